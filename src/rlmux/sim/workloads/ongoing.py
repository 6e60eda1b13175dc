"""The rest of a run in progress as a workload, to predict when its pipelines end.

    run.db ─▶ pipelines that are not over ─▶ what is left of their open steps, and the steps after them,
                                             each like the last ones                                     ─▶ Workload

All of them are submitted at second 0 as their users did, so that they are placed as they were, with their processes
there: first starts cost what a warm switch costs. Shares and quotas, what was used under them, and holds are the run's:
a pipeline that is held, or parked, does not start. They come in the order in which the run placed them, turned so that
the first is the one whose open step is furthest, so that a cycle continues from its position.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count, islice
from pathlib import Path

from rlmux.core.errors import UserError
from rlmux.core.events import SharesSet, UsageRestored
from rlmux.core.model import Cluster, DeviceId, PipelineId, Stage
from rlmux.log.restored_shares import shares_events
from rlmux.log.run_log import LogReader
from rlmux.report.reports import read_timeline
from rlmux.report.timeline.build import Timeline
from rlmux.report.timeline.records import Ending, OrderRecord, PipelineRecord
from rlmux.sim.workloads.arrivals import Arrival, Workload
from rlmux.sim.workloads.recorded import RecordedSeconds, recorded_arrival
from rlmux.sim.workloads.spread import spread_of
from rlmux.sim.world import SwitchSeconds, TrueSeconds

LIKE_STEPS = 8
"""Steps that those to come are taken to be like: the last ones."""
PROGRAM_STEPS = 100
"""Steps for which such a program goes on: how many it will do, only it knows."""
MAX_LIKE = 10_000
"""Pipelines that one question adds at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ongoing:
    """A run at one moment."""

    at_s: float
    """Last known time on the run's clock."""
    policy: str
    left: Workload
    """What is left to do."""
    whole: Mapping[PipelineId, Arrival]
    """Every pipeline that has ended a step, or has an estimate, from its first step and first start on."""

    def like(self, name: str, number: int) -> list[Arrival]:
        """So many new pipelines that take what this one takes, with names of their own. Raises UserError."""
        if name not in self.whole:
            accepted = ", ".join(self.whole) or "none, as none has ended a step yet"
            raise UserError(f"--like {name}: not a pipeline of the run that has ended a step; accepted: {accepted}")
        if number > MAX_LIKE:
            raise UserError(f"--add {number}: accepted: 1 to {MAX_LIKE:,} pipelines")
        model = self.whole[PipelineId(name)]
        names = (PipelineId(f"{name}-{index}") for index in count(2))
        free = (each for each in names if each not in self.whole)
        return [replace(model, pipeline=replace(model.pipeline, id=each)) for each in islice(free, number)]


def ongoing(folder: str | Path, cluster: Cluster) -> Ongoing:
    """A run up to the end of its log. `cluster`: from its file, as prices and memory are not in the log.

    What cannot be predicted is left out, with a note. Raises UserError where nothing is known.
    """
    timeline = read_timeline(folder)
    with LogReader(Path(folder)) as reader:
        state = reader.state()
    orders_by_pipeline: dict[PipelineId, list[OrderRecord]] = {name: [] for name in timeline.pipelines}
    for order in timeline.orders:
        if order.counts:
            orders_by_pipeline[order.pipeline].append(_without_startup(order, timeline.ready_s))
    whole: dict[PipelineId, Arrival] = {}
    left: list[_Remainder] = []
    notes = []
    for record in sorted(timeline.pipelines.values(), key=_admission_order):
        name = record.pipeline.id
        is_program = record.pipeline.work_arrives
        arrival = _repeating(record) if is_program else _whole_arrival(record, orders_by_pipeline[name])
        if arrival is not None:
            whole[name] = arrival
        if record.is_over:
            continue
        if arrival is not None:
            is_held = state.standings.get(name, {}).get("is_held", record.pipeline.is_held)
            arrival = replace(arrival, pipeline=replace(arrival.pipeline, is_held=is_held))
            left.append(_remainder(arrival, record, orders_by_pipeline[name], timeline.end_s))
            if is_program:
                notes.append(f"{name} goes on for {PROGRAM_STEPS} steps like its last ones")
            if is_held:
                notes.append(f"{name} is held or parked: it does not start before it is released")
        elif is_program:
            notes.append(f"{name} is left out: not enough of its steps has ended to learn from")
        else:
            notes.append(f"{name} is left out: it has ended no step yet, and its file has no estimate")
    if not whole or (not left and notes):
        raise UserError("; ".join([f"{folder}: nothing to predict", *(notes or ["it has no pipelines"])]))
    granted = shares_events(state.shares, state.usage, timeline.end_s)
    workload = Workload(
        name=Path(folder).absolute().name,
        cluster=cluster,
        arrivals=tuple(_in_cycle_order(left)),
        shares=next((event.shares for event in granted if isinstance(event, SharesSet)), None),
        usage=next((event for event in granted if isinstance(event, UsageRestored)), None),
        about=_description(timeline, left),
        notes=tuple(notes),
    )
    return Ongoing(at_s=timeline.end_s, policy=str(timeline.header.get("policy")), left=workload, whole=whole)


def _without_startup(order: OrderRecord, ready_s: Sequence[float]) -> OrderRecord:
    """The order without its wait for the run's first worker process: workers of later pipelines are forked from a
    running server."""
    return replace(order, start_s=max([order.start_s, *(at_s for at_s in ready_s if at_s < order.end_s)]))


def _description(timeline: Timeline, left: Sequence[_Remainder]) -> str:
    if not left:
        return f"from second {timeline.end_s:.0f} on, where all its pipelines are over"
    return f"from second {timeline.end_s:.0f} on, each step like the last ones"


def _admission_order(record: PipelineRecord) -> tuple[bool, float, PipelineId]:
    is_waiting = record.admitted_s is None
    return is_waiting, record.submitted_s if record.admitted_s is None else record.admitted_s, record.pipeline.id


# --- from the first step on ---------------------------------------------------------------------------------


def _whole_arrival(record: PipelineRecord, orders: Sequence[OrderRecord]) -> Arrival | None:
    """The pipeline from its first step on; None where nothing is known of its seconds."""
    pipeline = record.pipeline
    done = max(record.published, default=0)
    if done:
        arrival = recorded_arrival(record, [order for order in orders if order.step <= done])
        assert isinstance(arrival.world, RecordedSeconds)
        world = _with_later_steps(arrival.world, done)
        return replace(arrival, submit_s=0.0, pipeline=replace(pipeline, first_step=1), world=world)
    if pipeline.estimate is None:
        return None
    return Arrival(
        submit_s=0.0,
        pipeline=pipeline,
        world=TrueSeconds.of_phases(pipeline.estimate, sync_s=pipeline.estimate.sync_s),
    )


def _repeating(record: PipelineRecord) -> Arrival | None:
    """A program, or a client, that goes on with steps like those that were learned of it; None before they were."""
    measured = None if record.expected is None else record.expected.measured
    if measured is None:
        return None
    estimate = measured.median
    seconds = {Stage.GENERATE: estimate.rollout_s, Stage.UPDATE: estimate.train_s}
    low, high = ({Stage.GENERATE: each.rollout_s, Stage.UPDATE: each.train_s} for each in (measured.low, measured.high))
    spread = {stage: (low[stage] / usual, high[stage] / usual) for stage, usual in seconds.items() if usual > 0}
    pipeline = replace(record.pipeline, work_arrives=False, num_steps=PROGRAM_STEPS, estimate=estimate)
    return Arrival(submit_s=0.0, pipeline=pipeline, world=RecordedSeconds(by_stage=seconds, by_step={}, spread=spread))


def _with_later_steps(world: RecordedSeconds, done: int) -> RecordedSeconds:
    """Recorded steps as they were, and all that follow like the last of them."""
    last = range(max(1, done + 1 - LIKE_STEPS), done + 1)
    known = {
        stage: [world.by_step[stage, step] for step in last if (stage, step) in world.by_step]
        for stage in world.by_stage
    }
    return replace(
        world,
        by_stage={stage: sum(own) / len(own) if own else world.by_stage[stage] for stage, own in known.items()},
        like=tuple(step for step in last if step in world.rollouts),
        spread={stage: spread_of(own) for stage, own in known.items()},
    )


# --- from now on --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Remainder:
    """What is left of a pipeline."""

    arrival: Arrival
    part_done: float
    """Part of its open step that is done."""


def _in_cycle_order(left: Sequence[_Remainder]) -> list[Arrival]:
    """Arrivals in their order, beginning with the one whose open step is furthest on."""
    first = max(range(len(left)), key=lambda number: left[number].part_done, default=0)
    return [entry.arrival for entry in (*left[first:], *left[:first])]


def _remainder(arrival: Arrival, record: PipelineRecord, orders: Sequence[OrderRecord], now_s: float) -> _Remainder:
    """Its steps that are not published, without what is done of them; its processes are there."""
    done = max(record.published, default=0)
    switch = arrival.switch
    if record.admitted_s is not None:
        switch = SwitchSeconds(
            cold_rollout_s=switch.warm_rollout_s,
            cold_train_s=switch.warm_train_s,
            warm_rollout_s=switch.warm_rollout_s,
            warm_train_s=switch.warm_train_s,
        )
    world, part_done = arrival.world, 0.0
    if isinstance(world, RecordedSeconds):
        open_steps = _seconds_left(world, [order for order in orders if order.step > done], now_s)
        usual_s = world.solo_s(done + 1)
        world = replace(
            world,
            by_step={**world.by_step, **open_steps},
            rollouts={step: kept for step, kept in world.rollouts.items() if (Stage.GENERATE, step) not in open_steps},
        )
        part_done = 1.0 - world.solo_s(done + 1) / usual_s if usual_s else 0.0
    has_sft_warmup = arrival.pipeline.has_sft_warmup and not done
    pipeline = replace(arrival.pipeline, first_step=done + 1, has_sft_warmup=has_sft_warmup)
    return _Remainder(replace(arrival, pipeline=pipeline, switch=switch, world=world), part_done)


def _seconds_left(
    world: RecordedSeconds, orders: Sequence[OrderRecord], now_s: float
) -> dict[tuple[Stage, int], float]:
    """Seconds that are left of each stage which has begun, beyond those that its orders have had."""
    had_s: dict[tuple[Stage, int], dict[tuple[DeviceId, ...], float]] = {}
    is_over: dict[tuple[Stage, int], dict[tuple[DeviceId, ...], bool]] = {}
    for order in orders:
        if order.is_migration:
            continue
        key = order.stage, order.step
        spent_s = (order.end_s if math.isfinite(order.end_s) else now_s) - order.start_s
        by_devices = had_s.setdefault(key, {})
        by_devices[order.devices] = by_devices.get(order.devices, 0.0) + spent_s
        is_over.setdefault(key, {})[order.devices] = order.ending is Ending.FINISHED
    return {
        (stage, step): max(
            0.0 if is_over[stage, step][devices] else max(0.0, world.seconds(stage, step) - spent_s)
            for devices, spent_s in by_devices.items()
        )
        for (stage, step), by_devices in had_s.items()
    }
