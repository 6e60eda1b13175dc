"""Runs of the command line itself under hardship, each in a process of its own: what `rlmux chaos` shows."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlmux.cli import tables
from rlmux.core.errors import UserError
from rlmux.runtime.chaos import ChaosResult, Commands, run_chaos

_RLMUX = (sys.executable, "-m", "rlmux.cli")


def chaos(
    file: str, folder: Path, *, num_kills: int, seed: int, policy: str, sets: Sequence[str], is_quiet: bool
) -> ChaosResult:
    """The file undisturbed, then with kills, in subfolders of `folder`."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"--out {folder}: not empty; accepted: a folder that does not exist or is empty")
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    options = [word for each in sets for word in ("--set", each)]
    commands = Commands(
        run=lambda out: [*_RLMUX, "run", file, "--policy", policy, "--out", str(out), *options],
        resume=lambda out: [*_RLMUX, "resume", str(out)],
    )
    return run_chaos(commands, folder, num_kills=num_kills, seed=seed, say=lambda text: _say(text, is_quiet))


def show_chaos(result: ChaosResult, folder: Path, *, as_json: bool) -> None:
    """How many kills of each kind, and what became of each pipeline's weights."""
    kills = Counter(kill.kind for kill in result.kills)
    same = {
        name: sha256 is not None and all(each.get(name) == sha256 for each in result.rounds)
        for name, sha256 in result.undisturbed.items()
    }
    if as_json:
        tables.print_json(
            {
                "kills": dict(kills),
                "rounds": len(result.rounds),
                "orphans": len(result.orphans),
                "same_weights": result.is_equal,
                "pipelines": {
                    name: {"weights_sha256": sha256, "same_weights": same[name]}
                    for name, sha256 in result.undisturbed.items()
                },
            }
        )
        return
    tables.print_rows([{"killed": kind, "times": times} for kind, times in kills.items()])
    print()
    rows: list[dict[str, Any]] = [
        {"pipeline": name, "weights_sha256": (sha256 or "none")[:16], "the same after the kills": same[name]}
        for name, sha256 in result.undisturbed.items()
    ]
    tables.print_rows(rows)
    print(f"\n{len(result.kills)} kills in {len(result.rounds)} rounds, {len(result.orphans)} processes left behind")
    print(f"runs: {folder}")


def _say(text: str, is_quiet: bool) -> None:
    if not is_quiet:
        print(text, file=sys.stderr, flush=True)
