"""What a step is expected to take, figure by figure, and where each comes from.

typed in the file ─┐
rlmux profile ─────┤
a finished run ────┼──▶ Estimated = EstimateConfig + StepFigures, each with its range
a roofline, bytes ─┘
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from enum import StrEnum

from rlmux.config.tree import EstimateConfig


class FigureOrigin(StrEnum):
    """What a figure was taken from, the surest first."""

    TYPED = "typed"
    RECORDED = "recorded"
    """A finished run of the pipeline."""
    PROFILED = "profiled"
    """What `rlmux profile` measured."""
    ROOFLINE = "roofline"
    """Bytes over bandwidth and operations over speed, of a named device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFigure:
    """Seconds of one part of a step, or of the start."""

    name: str
    """A key of `estimate`, or `checkpoint_s`."""
    seconds: float
    low: float
    """Lower end of its range; `seconds` where none is known."""
    high: float
    origin: FigureOrigin
    basis: str = ""
    """Words for what it was computed from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimated:
    """A pipeline's estimate."""

    estimate: EstimateConfig
    figures: tuple[StepFigure, ...]


def figures_of(estimate: EstimateConfig, origin: FigureOrigin, basis: str = "") -> tuple[StepFigure, ...]:
    """The figures that an estimate gives, without ranges; seconds of 0 are none."""
    given = {key.name: getattr(estimate, key.name) for key in fields(estimate)}
    return tuple(
        StepFigure(name=name, seconds=value, low=value, high=value, origin=origin, basis=basis)
        for name, value in given.items()
        if value
    )
