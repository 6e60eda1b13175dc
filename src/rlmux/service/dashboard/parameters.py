"""Query parameters: how a text becomes a value, and what the document of the API says of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Parse = Callable[[str], Any]
"""A parameter's value; raises ValueError with what would be accepted."""


@dataclass(frozen=True, slots=True)
class Takes:
    """A parser that says what it accepts."""

    parse: Parse
    schema: Mapping[str, Any]
    """JSON schema of the value."""

    def __call__(self, text: str) -> Any:
        return self.parse(text)


def whole(low: int, high: int) -> Takes:
    """An integer within bounds."""

    def parse(text: str) -> int:
        if not text.removeprefix("-").isascii() or not text.removeprefix("-").isdecimal() or len(text) > 18:
            raise ValueError(f"a whole number from {low} to {high}")
        if not low <= int(text) <= high:
            raise ValueError(f"{low} to {high}")
        return int(text)

    return Takes(parse, {"type": "integer", "minimum": low, "maximum": high})


def one_of(*accepted: str) -> Takes:
    def parse(text: str) -> str:
        if text not in accepted:
            raise ValueError(", ".join(accepted))
        return text

    return Takes(parse, {"type": "string", "enum": list(accepted)})


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value) or abs(value) > 1e10:
        raise ValueError("seconds of the run's clock")
    return value


def _words(text: str) -> list[str]:
    if len(text) > 4096:
        raise ValueError("at most 4096 characters")
    return [word for word in text.split(",") if word]


def _line(text: str) -> str:
    if len(text) > 512:
        raise ValueError("at most 512 characters")
    return text


seconds = Takes(_seconds, {"type": "number", "minimum": -1e10, "maximum": 1e10})
"""Finite seconds of the run's clock."""
words = Takes(_words, {"type": "array", "items": {"type": "string"}})
"""A list with commas."""
line = Takes(_line, {"type": "string", "maxLength": 512})
