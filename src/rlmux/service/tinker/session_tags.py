"""Hints that a client's owner gives without touching its code: TINKER_TAGS="rlmux.slo=1.3,rlmux.priority=urgent"."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from rlmux.core.errors import UserError
from rlmux.core.model import QUEUED, Urgency

_PREFIX = "rlmux."


@dataclass(frozen=True, slots=True, kw_only=True)
class Hints:
    """Hints in a session's tags."""

    slo: float | None = None
    """Largest accepted slowdown of a step against running alone; None: any."""
    seed: int | None = None
    """Seed of every random number of its models; None: the model's own, or 0."""
    urgency: Urgency = Urgency.NORMAL
    """Place among what waits for admission: urgent ones are offered room first, background ones last."""


def read_tags(tags: Iterable[str]) -> Hints:
    """The hints among a session's tags. Raises UserError for a `rlmux.` tag that is unknown or has no such value."""
    readers: Mapping[str, tuple[str, Callable[[str], Any]]] = {
        "slo": ("slo", _slo),
        "seed": ("seed", _seed),
        "priority": ("urgency", _urgency),
    }
    found: dict[str, Any] = {}
    for tag in sorted(tags):
        if not tag.startswith(_PREFIX):
            continue
        key, _, value = tag.removeprefix(_PREFIX).partition("=")
        if key not in readers:
            raise UserError(f"tag {tag!r}: accepted: {', '.join(f'{_PREFIX}{name}=...' for name in readers)}")
        field, read = readers[key]
        found[field] = read(value)
    return Hints(**found)


def _slo(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not value >= 1.0:
        raise UserError(f"tag rlmux.slo={text}: accepted: a number, 1 or more")
    return value


def _seed(text: str) -> int:
    if not text.isdecimal() or int(text) >= 2**31:
        raise UserError(f"tag rlmux.seed={text}: accepted: a whole number below 2147483648")
    return int(text)


def _urgency(text: str) -> Urgency:
    if text not in QUEUED:
        raise UserError(f"tag rlmux.priority={text}: accepted: {', '.join(QUEUED)}")
    return Urgency(text)
