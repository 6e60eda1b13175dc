"""Why a pipeline's steps take longer than alone: each second of its steps gets a cause.

    steps, intervals of all devices ──▶ step_causes ──▶ alone + causes = what a step took

At each moment between two published versions the pipeline

    computes, or waits for its environment       alone; of it, what another pipeline beside it adds: slower beside NAME
    has its state loaded, a worker started       switch, starting
    waits, and the device of its next order
        computes or loads for another            waited for a device that NAME had
        is free                                  what the timeline calls the gap: control, cycle slot of NAME, held back

How much slower a stage is beside another pipeline is measured in the run itself: against the same stage in steps in
which nothing ran beside it, a rollout by its tokens. Without such steps it is not known, and counts as alone.
"""

from __future__ import annotations

import itertools
import math
import statistics
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any

from rlmux.core.errors import UserError
from rlmux.core.model import OrderId, PipelineId, Stage
from rlmux.log.run_log import NOT_SHOWN, LogReader
from rlmux.report.timeline.history import without_collector
from rlmux.report.timeline.intervals import Cause, Interval, Kind, label_of
from rlmux.report.timeline.live_steps import PublishedStep
from rlmux.report.timeline.live_timeline import Follower, Placed

HAD_DEVICE = "waited for a device that another pipeline had"
SLOWER_BESIDE = "slower beside another pipeline"
APART = "own phases apart"
"""Causes that a device's time has no name for: they are about a pipeline's steps."""
_OWN_ELSEWHERE = (Cause.ROLLOUT, Cause.REWARD, Cause.TRAINING, Cause.SYNC)
_ROUNDING_S = 1e-9
_BESIDE_PART = 0.02
"""Part of a stage's seconds up to which it counts as alone on its device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCause:
    """Seconds of a mean step that are put down to one cause."""

    cause: str
    """A `Cause`, or one of the three above."""
    pipeline: PipelineId | None = None
    """The pipeline that had the device, ran beside, or is waited for; None: none, or the pipeline itself."""
    stage: Stage | None = None
    """What that pipeline did; beside another, what this pipeline did."""
    seconds: float

    @property
    def label(self) -> str:
        """The cause in words, as `waited for a device that sort had (update)`."""
        if self.cause in (HAD_DEVICE, SLOWER_BESIDE):
            stage = "" if self.stage is None else f" ({self.stage.value.replace('_', ' ')})"
            return f"{self.cause.replace('another pipeline', str(self.pipeline))}{stage}"
        return self.cause if self.cause == APART else label_of(Cause(self.cause), self.pipeline)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCauses:
    """Where the seconds of a mean step went: `alone_s` and the causes add up to `step_s`."""

    first_step: int
    last_step: int
    num_steps: int
    step_s: float
    alone_s: float
    causes: Sequence[StepCause]
    """The largest first."""

    @property
    def slowdown(self) -> float | None:
        """How many times as long as alone; None if nothing is known of a step alone."""
        return self.step_s / self.alone_s if self.alone_s > 0.0 else None

    def as_json(self) -> dict[str, Any]:
        """Keys of `rlmux why --json` and of the service."""
        causes = [{**asdict(entry), "label": entry.label} for entry in self.causes]
        return {**asdict(self), "slowdown": self.slowdown, "causes": causes}


_Key = tuple[str, PipelineId | None, Stage | None]
_Piece = tuple[float, float]
_COMPUTES: _Key = ("computes", None, None)


def step_causes(
    pipeline: PipelineId,
    published: Sequence[PublishedStep],
    placed: Iterable[tuple[Hashable, Interval]],
    tokens_by_step: Mapping[int, float] | None = None,
) -> StepCauses | None:
    """The causes of these steps, None without one.

    `published`: steps in their order. `placed`: every interval that touches them, with its device. `tokens_by_step`:
    tokens that each step sampled.
    """
    if not published:
        return None
    fold = _Fold(pipeline, placed)
    for each in published:
        fold.charge_step(each)
    steps = [each.time for each in published]
    seconds = fold.seconds
    own_s = seconds.pop(_COMPUTES, 0.0)
    slower = fold.slower({step.step for step in steps}, tokens_by_step or {})
    seconds.update(slower)
    total_s = math.fsum(step.seconds for step in steps)
    alone_s = min(math.fsum(step.solo_s for step in steps), own_s) - math.fsum(slower.values())
    rest_s = total_s - alone_s - math.fsum(seconds.values())
    if rest_s > _ROUNDING_S:
        seconds[APART, None, None] += rest_s
    else:  # stages overlapped more than the estimate of a step alone has them
        alone_s += rest_s
    num = len(steps)
    causes = [
        StepCause(cause=cause, pipeline=other, stage=stage, seconds=spent_s / num)
        for (cause, other, stage), spent_s in seconds.items()
        if spent_s > _ROUNDING_S
    ]
    causes.sort(key=lambda entry: (-entry.seconds, entry.cause, str(entry.pipeline), str(entry.stage)))
    return StepCauses(
        first_step=steps[0].step,
        last_step=steps[-1].step,
        num_steps=num,
        step_s=total_s / num,
        alone_s=alone_s / num,
        causes=causes,
    )


def read_step_causes(folder: Path, pipeline: str) -> StepCauses | None:
    """The causes of all steps of a run's pipeline but its first; None before a step. Raises UserError, LogError."""
    with LogReader(folder) as log, without_collector():
        follower = Follower(log.header)
        for part in log.parts(bare=NOT_SHOWN):
            follower.add(part)
        look = follower.look()
    placed: list[Placed] = [*look.settled, *look.open]
    records = follower.history.pipelines
    name = PipelineId(pipeline)
    if name not in records:
        raise UserError(f"no pipeline {pipeline!r}; accepted: {', '.join(records) or 'none yet'}")
    published = steady([step for step in look.steps.get(name, {}).values() if step is not None])
    return step_causes(name, published, placed, tokens_of(records[name].metrics))


def steady(published: Sequence[PublishedStep]) -> Sequence[PublishedStep]:
    """Without the first step, which waits for every start, where there are others."""
    return published[1:] or published


def tokens_of(metrics: Mapping[int, Mapping[str, float]]) -> dict[int, float]:
    """Tokens that each step sampled, by its metrics."""
    return {step: its["tokens"] for step, its in metrics.items() if "tokens" in its}


class _Track:
    """Intervals by their start, to be looked up by time."""

    def __init__(self, intervals: Iterable[Interval]) -> None:
        self.intervals = sorted(intervals, key=itemgetter(0))
        self._starts = [interval.start_s for interval in self.intervals]
        self._longest_s = max((interval.seconds for interval in self.intervals), default=0.0)

    def touching(self, start_s: float, end_s: float) -> list[Interval]:
        """Those that touch a stretch of time."""
        first, last = bisect_left(self._starts, start_s - self._longest_s), bisect_left(self._starts, end_s)
        return [interval for interval in self.intervals[first:last] if interval.end_s > start_s]

    def nearest(self, at_s: float) -> Interval | None:
        """The first that begins at or after a time, or the last one before it."""
        place = bisect_left(self._starts, at_s - _ROUNDING_S)
        return self.intervals[min(place, len(self.intervals) - 1)] if self.intervals else None


class _Fold:
    """Charges the moments of one pipeline's steps."""

    def __init__(self, pipeline: PipelineId, placed: Iterable[tuple[Hashable, Interval]]) -> None:
        self.seconds: dict[_Key, float] = defaultdict(float)
        self._pipeline = pipeline
        by_device: dict[Hashable, list[Interval]] = defaultdict(list)
        own: list[Interval] = []
        self._devices_of: dict[OrderId | None, list[Hashable]] = defaultdict(list)
        for device, interval in placed:
            by_device[device].append(interval)
            if self._is_own(interval):
                own.append(interval)
                self._devices_of[interval.order].append(device)
        self._own = _Track(own)
        self._devices = {device: _Track(its) for device, its in by_device.items()}

    def _is_own(self, interval: Interval) -> bool:
        """Whether the pipeline does something in it: an order of its own computes, loads, or is held up."""
        return interval.pipeline == self._pipeline and interval.order is not None

    def charge_step(self, published: PublishedStep) -> None:
        """Charge every moment of one step."""
        end_s = published.time.end_s
        start_s = end_s - published.time.seconds
        publish_s = published.stages.get(Stage.PUBLISH.value, 0.0)  # it ends the step, and needs no device
        here = [*self._own.touching(start_s, end_s), Interval(end_s - publish_s, end_s, Kind.BUSY, Cause.COMPUTE)]
        for piece_start_s, piece_end_s, doing in _pieces(here, start_s, end_s):
            if doing:
                self.seconds[_own_key(doing)] += piece_end_s - piece_start_s
            else:
                self._charge_wait(piece_start_s, piece_end_s)

    def _charge_wait(self, start_s: float, end_s: float) -> None:
        """Charge a stretch in which the pipeline does nothing on any device, by what its next device does."""
        nearest = self._own.nearest(end_s)
        if nearest is None:
            self.seconds[str(Cause.CONTROL), None, None] += end_s - start_s
            return
        devices = dict.fromkeys(self._devices_of[nearest.order])
        blocking = self._devices[max(devices, key=lambda device: self._held_until(device, start_s, end_s))]
        for piece_start_s, piece_end_s, now in _pieces(blocking.touching(start_s, end_s), start_s, end_s):
            self.seconds[self._wait_key(now)] += piece_end_s - piece_start_s

    def _held_until(self, device: Hashable, start_s: float, end_s: float) -> float:
        """Time until which orders of others hold a device within a stretch of time."""
        ends = (
            min(interval.end_s, end_s) for interval in self._devices[device].touching(start_s, end_s) if interval.order
        )
        return max(ends, default=-math.inf)

    def _wait_key(self, now: Sequence[Interval]) -> _Key:
        """The cause of a wait for a device that shows these intervals."""
        held = [interval for interval in now if interval.order is not None]
        if held:
            last = max(held, key=lambda interval: (interval.kind is Kind.BUSY, interval.end_s))
            return HAD_DEVICE, last.pipeline, last.stage
        gap = now[0] if now else None
        if gap is None:
            return str(Cause.CONTROL), None, None
        if gap.pipeline == self._pipeline and gap.cause in _OWN_ELSEWHERE:
            return _COMPUTES  # a stage that needs no device, such as rewards
        return str(gap.cause), None if gap.pipeline == self._pipeline else gap.pipeline, None

    def slower(self, steps: Collection[int], tokens_by_step: Mapping[int, float]) -> dict[_Key, float]:
        """Seconds that stages took more beside others than without, by the other pipeline and the stage."""
        spent: dict[Stage, dict[int, float]] = defaultdict(lambda: defaultdict(float))
        beside: dict[tuple[Stage, int], dict[PipelineId, float]] = defaultdict(lambda: defaultdict(float))
        for track in self._devices.values():
            for interval in track.intervals:
                if (
                    not self._is_own(interval)
                    or interval.kind is not Kind.BUSY
                    or interval.stage is None
                    or interval.step not in steps
                ):
                    continue
                spent[interval.stage][interval.step] += interval.seconds
                for other in track.touching(interval.start_s, interval.end_s):
                    if other.kind is Kind.BUSY and other.pipeline not in (None, self._pipeline):
                        overlap_s = min(other.end_s, interval.end_s) - max(other.start_s, interval.start_s)
                        beside[interval.stage, interval.step][other.pipeline] += overlap_s
        found: dict[_Key, float] = defaultdict(float)
        for stage, spent_s in spent.items():
            units = {step: tokens_by_step.get(step, 0.0) if stage is Stage.GENERATE else 1.0 for step in spent_s}
            others = {step: dict(sorted(beside[stage, step].items())) for step in spent_s}
            overlaps_s = {step: math.fsum(others[step].values()) for step in spent_s}
            alone = [
                spent_s[step] / units[step]
                for step in spent_s
                if units[step] > 0.0 and overlaps_s[step] <= _BESIDE_PART * spent_s[step]
            ]
            for step in spent_s if alone else ():
                more_s = min(spent_s[step] - statistics.median(alone) * units[step], overlaps_s[step])
                for name, overlap_s in others[step].items() if more_s > 0.0 else ():
                    found[SLOWER_BESIDE, name, stage] += more_s * overlap_s / overlaps_s[step]
        return found


def _pieces(
    intervals: Sequence[Interval], start_s: float, end_s: float
) -> Iterator[tuple[float, float, list[Interval]]]:
    """Intervals between changes, each with its active items."""
    edges = {start_s, end_s}
    for interval in intervals:
        edges.update(edge for edge in (interval.start_s, interval.end_s) if start_s < edge < end_s)
    for first_s, last_s in itertools.pairwise(sorted(edges)):
        middle_s = (first_s + last_s) / 2
        yield first_s, last_s, [interval for interval in intervals if interval.start_s <= middle_s < interval.end_s]


def _own_key(doing: Sequence[Interval]) -> _Key:
    """What the pipeline does with several orders at once: the most useful counts."""
    if any(interval.kind is Kind.BUSY or interval.cause is Cause.TOOL_WAIT for interval in doing):
        return _COMPUTES
    first = min(doing, key=lambda interval: (interval.kind is not Kind.SWITCH, interval.cause))
    return str(first.cause), None, None
