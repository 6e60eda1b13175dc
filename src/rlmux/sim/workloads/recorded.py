"""A finished run as a workload: what would it have taken under another policy?

    run.db ─▶ orders with their reports ─▶ RecordedSeconds, one world per pipeline ─▶ Workload ─▶ simulate

Every stage of every step takes what it took, from its order to the event that ended it, so the hand-overs between
processes are included. What the first orders took longer than they computed is the start of their processes, and
becomes the cost of a cold switch. Where the cost of busy neighbours is known (neighbours.py), the seconds that orders
lost to them are taken off: the simulation adds them again for the orders that are neighbours under its policy.

Rollouts are decoded again, trajectory by trajectory (recorded_rollout.py): the log has their tokens, the seconds of an
iteration, and the waits of each trajectory for its environment. The log of a simulation has only a rollout's seconds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median

from rlmux.core.actions import Switch
from rlmux.core.errors import UserError
from rlmux.core.model import (
    PHASE_BY_STAGE,
    SUB_STAGE_BY_STAGE,
    Cluster,
    DeviceId,
    Phase,
    PipelineId,
    Pool,
    Stage,
    SubStage,
)
from rlmux.log.notes import RolloutNote
from rlmux.report.reports import read_timeline
from rlmux.report.timeline.build import Timeline
from rlmux.report.timeline.records import Ending, OrderRecord, PipelineRecord
from rlmux.sim.clients import ClientBatch
from rlmux.sim.models.neighbour_slowdown import Busy, Neighbours, seconds_lost
from rlmux.sim.models.work import Work
from rlmux.sim.workloads.arrivals import Arrival, Workload
from rlmux.sim.workloads.recorded_rollout import Iterations, RecordedRollout
from rlmux.sim.world import SwitchSeconds, TrueSeconds


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedSeconds(TrueSeconds):
    """What each stage of each step took."""

    by_stage: Mapping[Stage, float]
    """Mean seconds, for steps that were not recorded."""
    by_step: Mapping[tuple[Stage, int], float]
    """Seconds of each recorded (stage, step)."""
    rollouts: Mapping[int, RecordedRollout] = field(default_factory=dict)
    """Recorded rollouts, by step."""
    like: Sequence[int] = ()
    """Steps whose recorded rollouts stand for other steps; empty: all of them."""
    spread: Mapping[Stage, tuple[float, float]] = field(default_factory=dict)
    """(low, high) factors on each stage's seconds, between which those of later steps are expected."""

    def scaled(self, factors: Mapping[Stage, float]) -> RecordedSeconds:
        """The same with all seconds of each stage times its factor; those of other stages are as they were."""
        rollout_factor = factors.get(Stage.GENERATE, 1.0)
        return replace(
            self,
            by_stage={stage: factors.get(stage, 1.0) * seconds for stage, seconds in self.by_stage.items()},
            by_step={key: factors.get(key[0], 1.0) * seconds for key, seconds in self.by_step.items()},
            rollouts={step: rollout.scaled(rollout_factor) for step, rollout in self.rollouts.items()},
        )

    def seconds(self, stage: Stage, step: int) -> float:
        return self.by_step.get((stage, step), self.by_stage.get(stage, 0.0))

    def solo_s(self, step: int) -> float:
        return sum(self.seconds(stage, step) for stage in self.by_stage if stage is not Stage.SFT_WARMUP)

    def shard(self, step: int, index: int, num_devices: int) -> Work:
        is_known = (Stage.GENERATE, step) in self.by_step
        if not self.rollouts or (is_known and step not in self.rollouts):
            return TrueSeconds.shard(self, step, index, num_devices)  # a dataclass with slots has no super()
        if step not in self.rollouts:  # any of those that it is like, each as often as the others
            steps = tuple(self.like or self.rollouts)
            step = steps[step % len(steps)]
        return self.rollouts[step].shard(index, num_devices)


def recorded_workload(folder: str | Path, neighbours: Neighbours | None = None) -> Workload:
    """The run's pipelines and cluster; prices and memory of the cluster are not in the log.

    Raises UserError for a folder without a finished pipeline.
    """
    timeline = read_timeline(folder)
    orders_by_pipeline = {
        name: [order for order in timeline.orders if order.pipeline == name and order.counts]
        for name in timeline.pipelines
    }
    switches = {name: _switch_seconds(orders) for name, orders in orders_by_pipeline.items()}
    lost_s: Mapping[int, float] = {}
    if neighbours is not None:
        neighbours = replace(neighbours, is_one_machine=timeline.header.get("backend") == "local")
        lost_s = seconds_lost(_busy(timeline.orders, switches), neighbours)
    arrivals = []
    for name, record in timeline.pipelines.items():
        if record.pipeline.work_arrives and any(order.ending is Ending.FINISHED for order in orders_by_pipeline[name]):
            arrivals.append(_client(record, orders_by_pipeline[name], switches[name], lost_s))
        elif not record.pipeline.work_arrives and record.pipeline.num_steps in record.published:
            arrivals.append(_arrival(record, orders_by_pipeline[name], switches[name], lost_s))
    if len(arrivals) < len(timeline.pipelines) or not arrivals:
        taken = {arrival.pipeline.id for arrival in arrivals}
        missing = [str(name) for name in timeline.pipelines if name not in taken]
        names = ", ".join(missing) or "no pipeline"
        raise UserError(f"{folder}: not finished: {names}; accepted: a run whose pipelines have all finished")
    arrivals.sort(key=lambda arrival: arrival.submit_s)
    about = f"as measured under {timeline.header.get('policy')} in {timeline.makespan_s:.1f} s"
    return Workload(
        name=Path(folder).absolute().name,
        cluster=_cluster(timeline),
        arrivals=tuple(arrivals),
        about=about,
        neighbours=neighbours,
    )


def recorded_arrival(record: PipelineRecord, orders: Sequence[OrderRecord]) -> Arrival:
    """A pipeline with what these orders of it took; steps that they do not have take the mean."""
    return _arrival(record, orders, _switch_seconds(orders), {})


def _cluster(timeline: Timeline) -> Cluster:
    pools = {}
    for name, pool in timeline.header.get("pools", {}).items():
        devices = [DeviceId(*device) for device in pool["devices"]]
        pools[name] = Pool(
            name=name,
            phase=Phase.TRAIN if pool["phase"] == "both" else Phase(pool["phase"]),
            serves_both_phases=pool["phase"] == "both",
            num_nodes=len({device.node for device in devices}),
            devices_per_node=1 + max((device.index for device in devices), default=0),
        )
    return Cluster(pools=pools)


def _arrival(
    record: PipelineRecord, orders: Sequence[OrderRecord], switch: SwitchSeconds, lost_s: Mapping[int, float]
) -> Arrival:
    def alone_s(order: OrderRecord) -> float:
        return max(_elapsed_s(order, switch) - lost_s.get(order.id, 0.0), 0.0)

    by_step: dict[tuple[Stage, int], float] = {}
    for order in orders:
        if order.stage is not Stage.GENERATE and not order.is_migration:
            key = (order.stage, order.step)
            by_step[key] = by_step.get(key, 0.0) + alone_s(order)
    orders_by_step = _by_step(orders)
    by_step.update({(Stage.GENERATE, step): _longest_s(mine, alone_s) for step, mine in orders_by_step.items()})
    iterations = Iterations.of_notes(record.rollouts.values())
    rollouts = {
        step: _rollout(mine, record.rollouts[step], iterations, alone_s)
        for step, mine in orders_by_step.items()
        if step in record.rollouts
    }
    by_stage = {
        stage: sum(values) / len(values)
        for stage in dict.fromkeys(stage for stage, _ in by_step)
        if (values := [seconds for (other, _), seconds in by_step.items() if other is stage])
    }
    moves_s = [order.end_s - order.start_s for order in orders if order.is_migration]
    tokens = [metrics["tokens"] for metrics in record.metrics.values() if "tokens" in metrics]
    return Arrival(
        submit_s=record.submitted_s,
        pipeline=record.pipeline,
        world=RecordedSeconds(
            by_stage=by_stage, by_step=by_step, rollouts=rollouts, move_s=median(moves_s) if moves_s else 0.0
        ),
        switch=switch,
        tokens_per_step=sum(tokens) / len(tokens) if tokens else 0.0,
    )


def _client(
    record: PipelineRecord, orders: Sequence[OrderRecord], switch: SwitchSeconds, lost_s: Mapping[int, float]
) -> Arrival:
    """A client that sends the same batches, each after the recorded pause behind an earlier one."""
    by_batch: dict[tuple[tuple[Phase, ...], int, float | None], list[OrderRecord]] = {}
    for order in orders:
        by_batch.setdefault((order.kind, order.step, order.arrived_s), []).append(order)
    whole = [mine for mine in by_batch.values() if mine[-1].ending is Ending.FINISHED]
    whole.sort(key=lambda mine: (mine[0].arrived_s or 0.0, mine[0].start_s))
    batches: list[ClientBatch] = []
    for number, mine in enumerate(whole):
        arrived_s, kind = mine[0].arrived_s or 0.0, mine[0].kind
        after = max(
            (other for other in range(number) if _is_before(whole[other], arrived_s, kind)),
            key=lambda other: whole[other][-1].end_s,
            default=None,
        )
        base_s = (record.admitted_s or 0.0) if after is None else whole[after][-1].end_s
        seconds = sum(max(_elapsed_s(order, switch) - lost_s.get(order.id, 0.0), 0.0) for order in mine)
        batches.append(ClientBatch(kind=kind, seconds=seconds, after=after, think_s=max(0.0, arrived_s - base_s)))
    num_steps = max(1, sum(Phase.TRAIN in batch.kind for batch in batches))
    in_phase = {
        stage: sum(batch.seconds for batch in batches if (Phase.TRAIN in batch.kind) is (stage is Stage.UPDATE))
        for stage in (Stage.GENERATE, Stage.UPDATE)
    }
    by_stage = {**in_phase, Stage.PUBLISH: sum(batch.think_s for batch in batches)}
    return Arrival(
        submit_s=record.submitted_s,
        pipeline=record.pipeline,
        world=TrueSeconds(by_stage={stage: seconds / num_steps for stage, seconds in by_stage.items()}),
        switch=switch,
        batches=tuple(batches),
    )


def _is_before(orders: Sequence[OrderRecord], arrived_s: float, kind: tuple[Phase, ...]) -> bool:
    """Whether a later announcement waits for the end of this batch: it came after it, or is of its kind."""
    return orders[-1].end_s <= arrived_s or orders[0].kind == kind


def _by_step(orders: Iterable[OrderRecord]) -> dict[int, list[OrderRecord]]:
    """Rollout orders by step."""
    found: dict[int, list[OrderRecord]] = {}
    for order in orders:
        if order.stage is Stage.GENERATE and not order.is_migration:
            found.setdefault(order.step, []).append(order)
    return found


# --- seconds ------------------------------------------------------------------------------------------------


def _elapsed_s(order: OrderRecord, switch: SwitchSeconds) -> float:
    """Seconds from the order to its end, without those that its switch is taken to cost."""
    return max(order.end_s - order.start_s - _switched_s(order, switch), 0.0)


def _switched_s(order: OrderRecord, switch: SwitchSeconds) -> float:
    if order.switch is Switch.NONE:
        return 0.0
    return switch.seconds(PHASE_BY_STAGE[order.stage], is_warm=order.switch is Switch.WARM)


def _busy(orders: Iterable[OrderRecord], switches: Mapping[PipelineId, SwitchSeconds]) -> list[Busy]:
    """When orders computed on devices; a switch belongs to no order, as in the simulator."""
    busy: list[Busy] = []
    for order in orders:
        if order.is_migration or not order.devices or not math.isfinite(order.end_s):
            continue
        at_s = min(order.start_s + _switched_s(order, switches[order.pipeline]), order.end_s)
        spans: list[tuple[int | None, float, float]] = [(None, order.start_s, at_s)]
        for chunk, wait_s in zip(order.chunks, _waits(order), strict=True):
            if wait_s > 0.0:
                spans.append((order.id, at_s, chunk.time_s))
                at_s = chunk.time_s + wait_s
        spans.append((order.id, at_s, order.end_s))
        is_rollout = order.stage is Stage.GENERATE
        sub_stage = SubStage.DENSE_DECODE if is_rollout else SUB_STAGE_BY_STAGE.get(order.stage, SubStage.UPDATE)
        busy += [
            Busy(order=number, device=device, sub_stage=sub_stage, start_s=start_s, end_s=end_s)
            for device in order.devices
            for number, start_s, end_s in spans
        ]
    return busy


def _switch_seconds(orders: Sequence[OrderRecord]) -> SwitchSeconds:
    """Mean seconds that orders with a switch took beyond their computing, more than orders without a switch."""
    costs: dict[tuple[Phase, Switch], float] = {}
    for phase in (Phase.ROLLOUT, Phase.TRAIN):
        mine = [order for order in orders if PHASE_BY_STAGE[order.stage] is phase and not order.is_migration]
        usual_s = [_overhead_s(order) for order in mine if order.switch is Switch.NONE]
        for switch in (Switch.COLD, Switch.WARM):
            spent_s = [_overhead_s(order) for order in mine if order.switch is switch]
            if spent_s:
                costs[phase, switch] = max(0.0, sum(spent_s) / len(spent_s) - (median(usual_s) if usual_s else 0.0))
    return SwitchSeconds(
        cold_rollout_s=costs.get((Phase.ROLLOUT, Switch.COLD), 0.0),
        cold_train_s=costs.get((Phase.TRAIN, Switch.COLD), 0.0),
        warm_rollout_s=costs.get((Phase.ROLLOUT, Switch.WARM), 0.0),
        warm_train_s=costs.get((Phase.TRAIN, Switch.WARM), 0.0),
    )


def _overhead_s(order: OrderRecord) -> float:
    """Seconds of the order that it neither computed nor waited for tools."""
    return max(0.0, order.end_s - order.start_s - order.seconds - sum(_waits(order)))


def _rollout(
    orders: Sequence[OrderRecord], note: RolloutNote, iterations: Iterations, alone_s: Callable[[OrderRecord], float]
) -> RecordedRollout:
    """One step's rollout, such that its devices compute, and wait, as long as they did in the run.

    What environments took while a rollout shard was paused is not seen on its device: then the waits are left as each
    trajectory had them.
    """
    num_devices = len({order.devices[0] for order in orders})
    begun = [order for order in orders if order.switch is Switch.NONE]
    fixed_s = sum(_before_decoding_s(order) for order in begun) / num_devices
    waited_s = sum(sum(_waits(order)) for order in orders)
    computed_s = sum(alone_s(order) for order in orders) - waited_s - fixed_s * num_devices
    is_whole = all(order.ending is not Ending.PAUSED for order in orders)
    recorded = RecordedRollout.of_note(note, iterations, fixed_s)
    return recorded.fitted_to(max(computed_s, 0.0), waited_s if is_whole else None, num_devices)


def _before_decoding_s(order: OrderRecord) -> float:
    """Seconds of an order until it decodes: requests are passed on, weights are loaded."""
    if not order.chunks:
        return _overhead_s(order)
    first = order.chunks[0]
    return max(0.0, first.time_s - order.start_s - first.seconds)


def _longest_s(orders: Sequence[OrderRecord], alone_s: Callable[[OrderRecord], float]) -> float:
    """Seconds of the device that took longest."""
    by_device: dict[DeviceId, float] = {}
    for order in orders:
        by_device[order.devices[0]] = by_device.get(order.devices[0], 0.0) + alone_s(order)
    return max(by_device.values())


def _waits(order: OrderRecord) -> list[float]:
    """Seconds after each progress report in which every trajectory with a slot waited for its tool."""
    ends = [*((chunk.time_s, chunk.seconds) for chunk in order.chunks[1:]), (order.end_s, order.seconds)]
    return [
        max(0.0, end_s - chunk.time_s - (seconds - chunk.seconds))
        if chunk.num_active == 0 < chunk.num_waiting_for_env
        else 0.0
        for chunk, (end_s, seconds) in zip(order.chunks, ends, strict=False)
    ]
