"""How far later steps may differ from the last ones: a low and a high world beside the expected one.

    seconds of each stage in the last steps ─▶ spread: (low, high) factors on their mean ─▶ at_bound(arrival): a world

In the low world all pipelines are as quick as the quick ones of their last steps at once, in the high one as slow as
the slow ones: what makes later steps differ, such as longer responses or the machine's load, lasts for many steps and
is common to pipelines.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from enum import IntEnum

from rlmux.core.estimation.measured_steps import MEASURED_STEPS, quantile
from rlmux.core.model import Stage
from rlmux.sim.workloads.arrivals import Arrival
from rlmux.sim.workloads.recorded import RecordedSeconds
from rlmux.sim.world import TrueSeconds

QUANTILES = (0.1, 0.9)
"""Quantiles of the last steps that are taken for the low and the high world."""
LEAST = 0.25
"""Least distance of both from the mean, as a part of it: steps that happen to be alike do not narrow a range further.
With 0.15, 76 % of 84 recorded ends of `benchmarks/what_if.py` lay within their range; with 0.25, 83 %."""
UNMEASURED = 0.6
"""The same where fewer than `MEASURED_STEPS` steps were measured: the largest by which a stage of later steps differed
from the last eight in `benchmarks/what_if.py`."""


class Bound(IntEnum):
    """An index of the two factors."""

    LOW = 0
    HIGH = 1


def spread_of(seconds: Sequence[float]) -> tuple[float, float]:
    """(low, high) factors on the mean of these seconds of a stage, one a step."""
    mean_s = sum(seconds) / len(seconds) if seconds else 0.0
    if len(seconds) < MEASURED_STEPS:
        return 1.0 - UNMEASURED, 1.0 + UNMEASURED
    low, high = (quantile(seconds, part) / mean_s if mean_s else 1.0 for part in QUANTILES)
    return min(low, 1.0 - LEAST), max(high, 1.0 + LEAST)


def is_measured(arrival: Arrival) -> bool:
    """Whether enough steps were measured for a range of their own."""
    world = arrival.world
    return isinstance(world, RecordedSeconds) and world.spread.get(Stage.GENERATE) != spread_of(())


def at_bound(arrival: Arrival, bound: Bound) -> Arrival:
    """The pipeline in the low or the high world."""
    colocated = arrival.colocated_world
    return replace(
        arrival,
        world=_at_bound(arrival.world, bound),
        colocated_world=None if colocated is None else _at_bound(colocated, bound),
    )


def _at_bound(world: TrueSeconds, bound: Bound) -> TrueSeconds:
    if isinstance(world, RecordedSeconds):
        return world.scaled({stage: factors[bound] for stage, factors in world.spread.items()})
    factor = spread_of(())[bound]
    return replace(world, by_stage={stage: factor * seconds for stage, seconds in world.by_stage.items()})
