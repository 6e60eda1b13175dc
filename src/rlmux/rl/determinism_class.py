"""Determinism classes, and reports of an engine's probe.

    exact         the same bits under any schedule: alone, beside others, paused, migrated, restarted
    replayable    the same bits under the same schedule
    statistical   other bits from run to run; the same in distribution

A probe compares the engine's own computing under different schedules, on the device it is on (promise 1 of
docs/how-it-works/design.md). It is made of checks; those that fail decide the class.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class DeterminismClass(StrEnum):
    """How far an engine keeps its bits, the strongest class first."""

    EXACT = "exact"
    REPLAYABLE = "replayable"
    STATISTICAL = "statistical"

    @property
    def max_logprob_gap(self) -> float:
        """Largest gap in nats between the log-probabilities of our engines for a token in float32, unless the file has
        another: they are some 1e-5 apart."""
        return {DeterminismClass.EXACT: 1e-3, DeterminismClass.REPLAYABLE: 1e-2}.get(self, math.inf)

    def covers(self, required: DeterminismClass) -> bool:
        """Whether this class is at least as strong as the other one."""
        strongest_first = list(DeterminismClass)
        return strongest_first.index(self) <= strongest_first.index(required)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeCheck:
    """One comparison of a probe."""

    name: str
    """What was compared, in one or two words."""
    failure: str
    """Meaning of a difference, in one line."""
    is_equal: bool
    """Whether all bits were equal."""
    is_repetition: bool = False
    """Whether the same schedule was compared with itself."""
    is_avoidable: bool = False
    """Whether no schedule of a run needs what was compared: the class does not depend on it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeReport:
    """All checks of one engine."""

    checks: tuple[ProbeCheck, ...]
    seconds: float
    """Wall-clock seconds that the probe took."""
    server: Mapping[str, Any] = field(default_factory=dict)
    """Version and measured capabilities of a server engine; empty for others."""


def determinism_class_of(checks: Iterable[ProbeCheck]) -> DeterminismClass:
    """The class that these checks leave."""
    failed = failures_of(checks)
    if any(check.is_repetition for check in failed):
        return DeterminismClass.STATISTICAL
    return DeterminismClass.REPLAYABLE if failed else DeterminismClass.EXACT


def failures_of(checks: Iterable[ProbeCheck]) -> list[ProbeCheck]:
    """Checks that the class depends on and that found other bits."""
    return [check for check in checks if not (check.is_equal or check.is_avoidable)]


def refusal(pipeline: str, required: DeterminismClass | None, checks: Iterable[ProbeCheck]) -> str | None:
    """Why a pipeline that requires more than was found is refused, in one line; None if it is accepted."""
    every = list(checks)
    found = determinism_class_of(every)
    if required is None or found.covers(required):
        return None
    failures = "; ".join(f"{check.name}: {check.failure}" for check in failures_of(every))
    accepted = ", ".join(each for each in DeterminismClass if found.covers(each))
    return (
        f"pipelines.{pipeline}.promise: {required} is more than its engines keep on these devices, which is {found} "
        f"({failures}); accepted: {accepted}, or no promise"
    )


def worst_of(reports: Sequence[ProbeReport | None]) -> ProbeReport | None:
    """The first report with a difference from workers that compared together, else the first report; None if one is
    missing."""
    found = [report for report in reports if report is not None]
    if len(found) < len(reports):
        return None
    return next((report for report in found if failures_of(report.checks)), found[0])
