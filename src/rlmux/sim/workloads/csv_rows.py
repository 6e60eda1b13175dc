"""Rows of a user's CSV file: what each column accepts, and mistakes in one line with file, row and column."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from rlmux.core.errors import UserError
from rlmux.sim.workloads.arrivals import MAX_TIME_S


@dataclass(frozen=True, slots=True)
class CsvRow:
    """One row of the file, as an editor numbers lines."""

    path: Path
    number: int
    header: list[str]
    values: list[str]

    def __post_init__(self) -> None:
        if len(self.values) != len(self.header):
            raise UserError(
                f"{self.path}: row {self.number}: {len(self.values)} values for {len(self.header)} columns; "
                f"accepted: one for each of {', '.join(self.header)}"
            )

    def optional(self, column: str) -> str:
        return self.values[self.header.index(column)].strip() if column in self.header else ""

    def text(self, column: str) -> str:
        value = self.optional(column)
        if not value:
            raise self.error(column, "is empty; accepted: a value in every row")
        return value

    def time_of(self, column: str) -> float:
        """Seconds since the trace began."""
        value = self.number_of(column, at_least=0)
        if value > MAX_TIME_S:
            raise self.error(column, f"is {value:g}; accepted: seconds since the trace began, at most {MAX_TIME_S:g}")
        return value

    def number_of(self, column: str, *, at_least: float, default: float | None = None, above: bool = False) -> float:
        """A finite number at least (or above) the bound."""
        accepted = f"a number {'above' if above else 'of at least'} {at_least:g}"
        text = self.optional(column)
        if not text and default is not None:
            return default
        if not text:
            raise self.error(column, f"is empty; accepted: {accepted}")
        try:
            value = float(text)
        except ValueError:
            raise self.error(column, f"is {text!r}; accepted: {accepted}") from None
        if not math.isfinite(value) or value < at_least or (above and value == at_least):
            raise self.error(column, f"is {text}; accepted: {accepted}")
        return value

    def count(self, column: str, *, default: int | None = None) -> int:
        value = self.number_of(column, at_least=1, default=default)
        if value != int(value):
            raise self.error(column, f"is {value:g}; accepted: a whole number of at least 1")
        return int(value)

    def error(self, column: str, what: str) -> UserError:
        return UserError(f"{self.path}: row {self.number}: column {column!r} {what}")


def numbered_lines(path: Path) -> list[tuple[int, str]]:
    """The file's lines that hold data, with their numbers; empty ones and comments are left out. Raises UserError."""
    try:
        text = path.read_text("utf-8-sig")
    except FileNotFoundError:
        raise UserError(f"{path}: no such file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: not readable as text: {error}") from None
    return [(number, line) for number, line in enumerate(text.splitlines(), 1) if _has_data(line)]


def _has_data(line: str) -> bool:
    return bool(line.strip()) and not line.lstrip().startswith("#")
