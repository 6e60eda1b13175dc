"""What another framework's trainer logged of its steps: numbers by step and by its own keys.

    LOG ── lines of a console, JSON lines, CSV ──▶ read_log ──▶ TrainerLog

Formats are found by the content. A step that is logged again, after a resume, counts as it was logged last; an
unfinished last line is left out.

A module of its own: it changes with the loggers of the frameworks, and `logged_estimates.py` with their trainers.
"""

from __future__ import annotations

import csv
import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlmux.core.errors import UserError

FRAMEWORK_BY_PREFIX = {"timing_s/": "verl", "timeperf/": "AReaL", "timing/": "SkyRL"}
"""By the beginning of the keys of its timings."""
ACCEPTED = (
    "accepted: the console output of verl, AReaL or SkyRL, verl's file logger, or a W&B history as CSV or JSON, with "
    "keys such as timing_s/gen, timeperf/rollout or timing/generate"
)
_STEP_KEYS = ("_step", "step", "Step", "global_step", "training/global_step", "trainer/global_step")
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_VERL_LINE = re.compile(r"(?:^|\s)step:(\d+) - (.*)")
_STEP_LINE = re.compile(r"Train step (\d+)/\d+ done|\bStep (\d+):\s*$")
"""Before the numbers of a step: AReaL's, SkyRL's."""
_CELLS = re.compile(r"([\w.@-]+(?:/[\w.@-]+)+)\s+│\s+([^\s│]+)")
"""Of AReaL's tables."""
_ENTRIES = re.compile(r"'([\w.@-]+(?:/[\w.@-]+)+)': '?([^',}]+)")
"""Of the mapping that SkyRL prints."""
_NUMPY = re.compile(r"np\.\w+\((.*)\)")
_MODE = re.compile(r"trainer_mode['\"]?\s*[:=]\s*['\"]?(\w+)")
_Row = tuple[str, "int | None", Mapping[str, Any]]
"""(line, step, values); the step is None where it has no number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerLog:
    """One log."""

    path: Path
    framework: str
    steps: Mapping[int, Mapping[str, float]]
    """Numbers by key, of every step with timings, in the order of the log."""
    trainer_mode: str
    """verl's `trainer_mode`, where the log has its settings; else empty."""


def read_log(path: Path) -> TrainerLog:
    """The steps of a log. Raises UserError, with the place, for a file without step timings, for one with those of two
    frameworks or two runs, and for seconds that are negative or not finite."""
    try:
        text = _COLOUR.sub("", path.read_text(encoding="utf-8", errors="replace"))
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}; {ACCEPTED}") from None
    steps: dict[int, dict[str, float]] = {}
    frameworks: dict[str, str] = {}
    last = 0
    for place, step, values in _rows(path, text):
        timed = {key: _framework_of(key) for key in values if values[key] is not None and _framework_of(key)}
        for framework in timed.values():
            frameworks.setdefault(framework, place)
        numbers = {key: number for key in values if (number := _number(values[key])) is not None}
        for key in timed:
            if not 0.0 <= numbers.get(key, math.nan) < math.inf:
                raise UserError(f"{path}, {place}: {key} is {values[key]}; accepted: seconds, 0 or more")
        last = last + 1 if step is None else step
        if timed or last in steps:
            steps.setdefault(last, {}).update(numbers)
    if not frameworks:
        raise UserError(f"{path} has no timings of steps; {ACCEPTED}")
    if len(frameworks) > 1:
        found = " and ".join(f"{name} ({place})" for name, place in frameworks.items())
        raise UserError(f"{path} has timings of {found}; accepted: one framework a file")
    mode = _MODE.search(text)
    return TrainerLog(path=path, framework=next(iter(frameworks)), steps=steps, trainer_mode=mode[1] if mode else "")


def _framework_of(key: str) -> str:
    """Whose timing it is; empty for another number."""
    return next((name for prefix, name in FRAMEWORK_BY_PREFIX.items() if key.startswith(prefix)), "")


def _number(value: Any) -> float | None:
    """None for what is no number."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    if isinstance(value, str):
        numpy = _NUMPY.fullmatch(value.strip())
        value = numpy[1] if numpy else value
    try:
        return float(value)
    except (ValueError, OverflowError):
        return None


def _rows(path: Path, text: str) -> Iterator[_Row]:
    lines = text.splitlines()
    begin = next((line.strip() for line in lines if line.strip()), "")
    if begin.startswith("[") and isinstance(entries := _json(text), list):
        yield from (_json_row(f"entry {number}", entry) for number, entry in enumerate(entries, 1))
    elif isinstance(_json(begin), dict):
        yield from _json_rows(path, lines)
    elif not _VERL_LINE.search(begin) and any(map(_framework_of, map(_column, next(csv.reader([begin]), [])))):
        yield from _csv_rows(path, lines)
    else:
        yield from _console_rows(lines)


def _json(text: str) -> Any:
    """None for what is no JSON."""
    try:
        return json.loads(text)
    except ValueError:
        return None


def _json_rows(path: Path, lines: list[str]) -> Iterator[_Row]:
    for number, line in enumerate(lines, 1):
        entry = _json(line)
        if isinstance(entry, dict):
            yield _json_row(f"line {number}", entry)
        elif line.strip() and number < len(lines):
            raise UserError(f"{path}, line {number}: no JSON mapping, and the lines before it are; {ACCEPTED}")


def _json_row(place: str, entry: Any) -> _Row:
    """verl has the numbers under `data`, a W&B history beside the step."""
    entry = entry if isinstance(entry, dict) else {}
    values = entry["data"] if isinstance(entry.get("data"), dict) else entry
    step = next((entry[key] for key in _STEP_KEYS if isinstance(entry.get(key), int)), None)
    return place, step, values


def _column(name: str) -> str:
    """The key of a column; W&B's pages put the run's name before it."""
    return name.rpartition(" - ")[2].strip()


def _csv_rows(path: Path, lines: list[str]) -> Iterator[_Row]:
    rows = csv.reader(line for line in lines if line.strip())
    names = [_column(name) for name in next(rows)]
    twice = next((name for name in names if names.count(name) > 1 and _framework_of(name)), None)
    if twice is not None:
        raise UserError(f"{path} has {names.count(twice)} columns {twice}; accepted: one run a file")
    for number, cells in enumerate(rows, 2):
        values: dict[str, Any] = {
            name: cell
            for name, cell in zip(names, cells, strict=False)
            if cell and not name.endswith(("__MIN", "__MAX"))
        }
        step = next((_number(values[key]) for key in _STEP_KEYS if key in values), None)
        yield f"line {number}", None if step is None or not math.isfinite(step) else int(step), values


def _console_rows(lines: list[str]) -> Iterator[_Row]:
    """Between other output, and with the prefixes that Ray and loggers put before each line."""
    step: int | None = None
    for number, line in enumerate(lines, 1):
        if found := _VERL_LINE.search(line):
            pairs = (pair.rpartition(":") for pair in found[2].split(" - "))
            yield f"line {number}", int(found[1]), {key.strip(): value.strip() for key, _, value in pairs}
        elif found := _STEP_LINE.search(line):
            step = int(found[1] or found[2])
        elif entries := _CELLS.findall(line) or _ENTRIES.findall(line):
            yield f"line {number}", step, dict(entries)
