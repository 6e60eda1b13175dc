"""What `rlmux chaos` runs, each run in a process of its own, and what it shows of the kills."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rlmux.cli import tables
from rlmux.runtime.checks.chaos_kills import ChaosResult, Commands

_RLMUX = (sys.executable, "-P", "-m", "rlmux")


def commands_of(file: str, *, policy: str, sets: Sequence[str]) -> Commands:
    """The command lines that run the file into a folder, and that resume a folder."""
    options = [word for each in sets for word in ("--set", each)]
    return Commands(
        run=lambda out: [*_RLMUX, "run", file, "--policy", policy, "--out", str(out), *options],
        resume=lambda out: [*_RLMUX, "resume", str(out)],
    )


def progress_printer(*, is_quiet: bool) -> Callable[[str], None]:
    """What prints progress on stderr, or nothing."""

    def print_line(text: str) -> None:
        if not is_quiet:
            print(text, file=sys.stderr, flush=True)

    return print_line


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
