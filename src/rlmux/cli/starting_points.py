"""The files that `rlmux init` writes: templates of a starting point, filled in for this machine.

START ── templates/START.yaml, companions ──▶ names checked ──▶ files written ──▶ commands to type next
"""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from string import Template
from textwrap import indent

from rlmux.cli import inputs
from rlmux.core.errors import UserError


@dataclass(frozen=True, slots=True, kw_only=True)
class StartingPoint:
    """What is written beside the YAML file, and what is typed next."""

    companions: Mapping[str, str] = field(default_factory=dict)
    """Template by the name of the file."""
    commands: Sequence[str]
    """Shell commands; placeholders: the YAML `{file}`, its `{stem}`, and its `{folder}` with a slash."""


STARTING_POINTS: Mapping[str, StartingPoint] = {
    "tasks": StartingPoint(commands=("rlmux run {file}",)),
    "rows": StartingPoint(
        companions={"rows.jsonl": "rows.jsonl", "rewards.py": "rewards.py.txt"}, commands=("rlmux run {file}",)
    ),
    "checkpoint": StartingPoint(commands=("rlmux run {file}",)),
    "trl": StartingPoint(
        companions={"train_trl.py": "train_trl.py.txt"},
        commands=(
            "rlmux broker {file}",
            "export RLMUX_BROKER=unix:$PWD/runs/broker-{stem}/broker.sock  # in each further shell",
            "RLMUX_JOB=a python {folder}train_trl.py out/a",
            "RLMUX_JOB=b python {folder}train_trl.py out/b",
        ),
    ),
    "tinker": StartingPoint(
        companions={"train_tinker.py": "train_tinker.py.txt"},
        commands=(
            "rlmux serve {file} --out runs/served",
            "export TINKER_BASE_URL=http://127.0.0.1:7460/tinker TINKER_API_KEY=tml-anything  # in each further shell",
            "python {folder}train_tinker.py",
        ),
    ),
}
"""By the word on the command line."""
_POOLS = {
    1: "    all: {phase: both, devices: 1}   # samples answers and updates weights\n",
    2: "    rollout: {devices: 1}     # samples answers\n    train: {devices: 1}       # updates weights\n",
}
"""The pools of a file, by the number of their devices."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """What `write` did."""

    files: Sequence[str]
    """Paths of the files, the YAML file first."""
    next: Sequence[str]
    """Shell commands to type next."""


def write(start: str, out: Path, model: Path | None = None) -> Written:
    """Write the files of a starting point: `out`, and its companions beside it.

    `model`: checkpoint folder. Raises UserError, before anything is written, for an unknown starting point, a folder
    that is no checkpoint, and a file that exists.
    """
    inputs.check_choice("START", start, list(STARTING_POINTS))
    chosen = STARTING_POINTS[start]
    values = {"file": shlex.quote(str(out)), **_machine(), "model": _model(start, out, model)}
    texts = {out: Template(_template(f"{start}.yaml")).substitute(values)}
    texts |= {out.parent / name: _template(template) for name, template in chosen.companions.items()}
    there = [path for path in texts if os.path.lexists(path)]
    if there:
        raise UserError(f"{there[0]}: exists; accepted: --out FILE in a folder without {_listed(texts)}")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        for path, text in texts.items():
            path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"{out}: {error.strerror}; accepted: --out FILE that can be written") from None
    folder = "" if out.parent == Path() else shlex.quote(f"{out.parent}/")
    placeholders = {"file": shlex.quote(str(out)), "stem": shlex.quote(out.stem), "folder": folder}
    return Written(files=list(map(str, texts)), next=[command.format_map(placeholders) for command in chosen.commands])


def show(written: Written, *, as_json: bool) -> None:
    """Print the commands to type next, one a line."""
    if as_json:
        print(json.dumps({"files": written.files, "next": written.next}))
        return
    inputs.print_notice(f"wrote {', '.join(written.files)}; next:")
    for command in written.next:
        print(command)


def _template(name: str) -> str:
    return files("rlmux.cli").joinpath("templates", name).read_text(encoding="utf-8")


def _machine() -> dict[str, str]:
    """A line about this machine, and pools of its devices, two at most, also for a lane."""
    from rlmux.runtime.local import visible_gpus

    num_gpus, num_cores = len(visible_gpus()), len(os.sched_getaffinity(0))
    cores = f"{num_cores} CPU core{'s' if num_cores > 1 else ''}"
    if num_gpus:
        line = f"A device is a GPU. This machine has {num_gpus}."
    else:
        line = f"A device is a GPU, or a CPU core on a machine without GPUs. This machine has {cores} and no GPU."
    pools = _POOLS[min(2, num_gpus or num_cores)].rstrip()
    return {"machine": line, "pools": pools, "lane_pools": indent(pools, "    ")}


def _model(start: str, out: Path, model: Path | None) -> str:
    """The checkpoint folder as the file names it: relative to the file, unless it is absolute."""
    if start != "checkpoint":
        if model is not None:
            raise UserError(f"--model {model}: does not go with {start}; accepted: rlmux init checkpoint --model DIR")
        return ""
    if model is None:
        raise UserError("--model is missing; accepted: rlmux init checkpoint --model DIR, a Hugging Face checkpoint")
    from rlmux.config.checkpoint_folder import check_checkpoint

    try:
        check_checkpoint(model)
    except UserError as error:
        raise UserError(f"--model {model}: {error}") from None
    return json.dumps(str(model) if model.is_absolute() else os.path.relpath(model, out.parent))


def _listed(paths: Mapping[Path, str]) -> str:
    *most, last = [path.name for path in paths]
    return f"{', '.join(most)} or {last}" if most else last
