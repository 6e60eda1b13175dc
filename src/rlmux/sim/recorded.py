"""A finished run as a workload: what would it have taken under another policy?

    run.db ─▶ orders with their reports ─▶ RecordedSeconds, one world per pipeline ─▶ Workload ─▶ simulate

Every stage of every step takes what it took, from its order to the event that ended it: so the hand-overs between
processes are in. What the first orders took longer than they computed was their processes' starting, and becomes the
cost of a cold switch.

A rollout is cut where its last trajectory got a slot. Before, a device always has as many as it can decode, so
the seconds are divided by dealing the trajectories to more devices. After, each goes on to its own end, however many
devices there are:

    seconds of one of n shares  =  fixed + dense / n + tail        fixed: loading weights, passing requests on

Where no report came (a rollout shorter than a chunk) all of it counts as dense. While every trajectory with a slot
waits for its tool, nothing is computed: these waits are kept apart, and pass at any pace, paused or not.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import median

from rlmux.core.actions import Switch
from rlmux.core.errors import UserError
from rlmux.core.model import PHASE_BY_STAGE, Cluster, DeviceId, Phase, PipelineId, Pool, Stage
from rlmux.report.api import read_timeline
from rlmux.report.history import OrderRecord, PipelineRecord
from rlmux.report.timeline import Timeline
from rlmux.sim.arrivals import Arrival, Workload
from rlmux.sim.decoder import REPORT_AT
from rlmux.sim.remaining import DONE_S, ROLLOUT_KIND, Remaining
from rlmux.sim.world import SwitchSeconds, TrueSeconds


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutRecord:
    """One step's rollout, over all devices that it had."""

    fixed_s: float
    """Of each share, before anything is decoded."""
    dense_s: float
    """Device seconds while trajectories waited for slots."""
    tails_s: tuple[float, ...]
    """Of each trajectory that was left then, to its end; the longest first."""
    num_trajectories: int
    num_devices: int
    slots: int = 1
    """Most that a device was seen to decode at once."""
    dense_waits: tuple[tuple[float, float], ...] = ()
    """(part of its computing done by then, seconds) in which all with a slot waited for their tools, and others for a
    slot: with more devices there are fewer such waves."""
    tail_waits: tuple[tuple[float, float], ...] = ()
    """The same when nobody waited for a slot any more."""

    def share(self, index: int, num_devices: int) -> ShareSeconds:
        """The trajectories of one device, dealt in turn."""
        dense_s = self.dense_s / self.num_trajectories
        num_mine = len(range(index, self.num_trajectories, num_devices))
        tails_s = self.tails_s[index::num_devices]
        ended = [(dense_s, 0.0)] * max(0, num_mine - len(tails_s))
        waits = [*self.dense_waits[index::num_devices], *self.tail_waits]
        trajectories = [*ended, *((dense_s, tail_s) for tail_s in tails_s)]
        return ShareSeconds(self.fixed_s, trajectories, slots=self.slots, waits=waits)

    @property
    def seconds(self) -> float:
        """With the devices that it had."""
        return max(self.share(index, self.num_devices).until_over(1.0) for index in range(self.num_devices))


class ShareSeconds:
    """A `Remaining` by trajectories: (seconds of the whole engine that it needs, then seconds beside all others).

    `waits`: (part of its computing done by then, seconds) in which every trajectory with a slot waits for its tool.
    """

    kind = ROLLOUT_KIND

    def __init__(
        self,
        fixed_s: float,
        trajectories: Sequence[tuple[float, float]],
        *,
        slots: int = 1,
        waits: Sequence[tuple[float, float]] = (),
    ) -> None:
        self._fixed_s = fixed_s
        self._slots = slots
        self._dense = list(trajectories)
        self._tails: list[float] = []
        total_s = self._compute_s()
        self._waits = deque((part * total_s, wait_s) for part, wait_s in waits)
        """By seconds of computing from the start on."""
        self._done_s = 0.0
        self._pass_on()

    @property
    def is_over(self) -> bool:
        return self._fixed_s <= DONE_S and not self._dense and not self._tails

    @property
    def idle_s(self) -> float:
        return self._waits[0][1] if self._waits and self._waits[0][0] <= self._done_s + DONE_S else 0.0

    def until_over(self, pace: float) -> float:
        return self._compute_s() / pace + sum(wait_s for _, wait_s in self._waits)

    def until_news(self, pace: float) -> float:
        """Until decoding begins; until a wait; until fewer are left than one of `REPORT_AT`; then each end."""
        if self.idle_s:
            return self.idle_s
        seconds = self._until_fewer()
        if self._waits:
            seconds = min(seconds, self._waits[0][0] - self._done_s)
        return seconds / pace

    def advance(self, seconds: float, pace: float) -> float:
        computed_s = 0.0
        while seconds > 0.0 and not self.is_over:
            if self.idle_s:
                at_s, wait_s = self._waits.popleft()
                passed_s = min(seconds, wait_s)
                if wait_s - passed_s > DONE_S:
                    self._waits.appendleft((at_s, wait_s - passed_s))
            elif pace <= 0.0:
                break
            else:
                passed_s = min(seconds, (self._waits[0][0] - self._done_s) / pace) if self._waits else seconds
                self._compute(passed_s * pace)
                computed_s += passed_s
            seconds -= passed_s
        return computed_s

    def report(self) -> tuple[int, int, int] | None:
        if self._fixed_s > DONE_S:
            return None
        num_left = len(self._dense) + len(self._tails)
        num_in_slots = min(self._slots, num_left) if self._dense else num_left
        if self.idle_s:
            return 0, num_left - num_in_slots, num_in_slots
        return num_in_slots, num_left - num_in_slots, 0

    def take(self) -> list[tuple[float, float]]:
        taken = [*((0.0, tail_s) for tail_s in self._tails), *self._dense]
        self._fixed_s, self._dense, self._tails = 0.0, [], []
        self._waits.clear()
        return taken

    def give(self, trajectories: Sequence[tuple[float, float]], cost_s: float) -> None:
        """Their waits fall together with those here."""
        self._fixed_s += cost_s
        self._dense += trajectories
        self._pass_on()

    def _compute_s(self) -> float:
        longest_s = max([*self._tails, *(tail_s for _, tail_s in self._dense)], default=0.0)
        return self._fixed_s + sum(dense_s for dense_s, _ in self._dense) + longest_s

    def _until_fewer(self) -> float:
        """Seconds of computing until there are so few left that it is reported."""
        if self._fixed_s > DONE_S:
            return self._fixed_s
        if not self._dense:
            return min(self._tails, default=0.0)
        num_left = len(self._dense) + len(self._tails)
        border = next((count for count in REPORT_AT if count < num_left), 0)
        seconds = 0.0
        for dense_s, tail_s in self._dense:
            seconds += dense_s
            num_left -= tail_s <= DONE_S
            if num_left <= border:
                break
        return seconds

    def _compute(self, seconds: float) -> None:
        self._done_s += seconds
        spent_s = min(seconds, self._fixed_s)
        self._fixed_s -= spent_s
        seconds -= spent_s
        while self._dense and seconds > 0.0:
            dense_s, tail_s = self._dense[0]
            spent_s = min(seconds, dense_s)
            self._dense[0] = (dense_s - spent_s, tail_s)
            seconds -= spent_s
            self._pass_on()
        self._tails = [tail_s - seconds for tail_s in self._tails if tail_s - seconds > DONE_S]

    def _pass_on(self) -> None:
        """Who needs the whole engine no more goes on beside all others; tails begin when nobody waits."""
        while self._dense and self._dense[0][0] <= DONE_S:
            tail_s = self._dense.pop(0)[1]
            if tail_s > DONE_S:
                self._tails.append(tail_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedSeconds(TrueSeconds):
    """What each stage of each step took. `by_stage` are means, for steps that were not recorded."""

    by_stage: Mapping[Stage, float]
    by_step: Mapping[tuple[Stage, int], float]
    rollouts: Mapping[int, RolloutRecord] = field(default_factory=dict)

    def seconds(self, stage: Stage, step: int) -> float:
        return self.by_step.get((stage, step), self.by_stage.get(stage, 0.0))

    def solo_s(self, step: int) -> float:
        return sum(self.seconds(stage, step) for stage in self.by_stage if stage is not Stage.WARM_START)

    def share(self, step: int, index: int, num_devices: int) -> Remaining:
        record = self.rollouts.get(step) or self.rollouts[max(self.rollouts)]
        return record.share(index, num_devices)


def recorded_workload(folder: str | Path) -> Workload:
    """The run's pipelines and cluster; prices and memory of the cluster are not in the log.

    Raises UserError for a folder without a finished pipeline.
    """
    timeline = read_timeline(folder)
    arrivals = []
    for name, record in timeline.pipelines.items():
        orders = [order for order in timeline.orders if order.pipeline == name and order.counts]
        if record.pipeline.num_steps in record.published:
            arrivals.append(_arrival(name, record, orders))
    if len(arrivals) < len(timeline.pipelines) or not arrivals:
        missing = [str(name) for name in timeline.pipelines if name not in {one.pipeline.id for one in arrivals}]
        names = ", ".join(missing) or "no pipeline"
        raise UserError(f"{folder}: not finished: {names}; accepted: a run whose pipelines have all finished")
    arrivals.sort(key=lambda arrival: arrival.submit_s)
    about = f"as measured under {timeline.header.get('policy')} in {timeline.makespan_s:.1f} s"
    return Workload(
        name=Path(folder).absolute().name, cluster=_cluster(timeline), arrivals=tuple(arrivals), about=about
    )


def _cluster(timeline: Timeline) -> Cluster:
    pools = {}
    for name, pool in timeline.header.get("pools", {}).items():
        devices = [DeviceId(*device) for device in pool["devices"]]
        pools[name] = Pool(
            name=name,
            phase=Phase(pool["phase"]),
            num_nodes=len({device.node for device in devices}),
            devices_per_node=1 + max((device.index for device in devices), default=0),
        )
    return Cluster(pools=pools)


def _arrival(name: PipelineId, record: PipelineRecord, orders: Sequence[OrderRecord]) -> Arrival:
    switch = _switch_seconds(orders)
    by_step: dict[tuple[Stage, int], float] = {}
    for order in orders:
        if order.stage is not Stage.GENERATE and not order.is_migration:
            key = (order.stage, order.step)
            by_step[key] = by_step.get(key, 0.0) + _elapsed_s(order, switch)
    rollouts = {
        step: _rollout(step_orders, int(record.metrics.get(step, {}).get("trajectories", 0)), switch)
        for step, step_orders in _by_step(orders).items()
    }
    by_step.update({(Stage.GENERATE, step): rollout.seconds for step, rollout in rollouts.items()})
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


def _by_step(orders: Iterable[OrderRecord]) -> dict[int, list[OrderRecord]]:
    """Rollout orders."""
    found: dict[int, list[OrderRecord]] = {}
    for order in orders:
        if order.stage is Stage.GENERATE and not order.is_migration:
            found.setdefault(order.step, []).append(order)
    return found


# --- seconds ------------------------------------------------------------------------------------------------


def _elapsed_s(order: OrderRecord, switch: SwitchSeconds) -> float:
    """From the order to its end, without what its switch is said to take."""
    seconds = order.end_s - order.start_s
    if order.switch is not Switch.NONE:
        seconds -= switch.seconds(PHASE_BY_STAGE[order.stage], is_warm=order.switch is Switch.WARM)
    return max(seconds, 0.0)


def _switch_seconds(orders: Sequence[OrderRecord]) -> SwitchSeconds:
    """What orders with a switch took beyond their computing, more than others did; a mean over them."""
    costs: dict[tuple[Phase, Switch], float] = {}
    for phase in (Phase.ROLLOUT, Phase.TRAIN):
        mine = [order for order in orders if PHASE_BY_STAGE[order.stage] is phase and not order.is_migration]
        usual_s = [_overhead_s(order) for order in mine if order.switch is Switch.NONE]
        for kind in (Switch.COLD, Switch.WARM):
            spent_s = [_overhead_s(order) for order in mine if order.switch is kind]
            if spent_s:
                costs[phase, kind] = max(0.0, sum(spent_s) / len(spent_s) - (median(usual_s) if usual_s else 0.0))
    return SwitchSeconds(
        cold_rollout_s=costs.get((Phase.ROLLOUT, Switch.COLD), 0.0),
        cold_train_s=costs.get((Phase.TRAIN, Switch.COLD), 0.0),
        warm_rollout_s=costs.get((Phase.ROLLOUT, Switch.WARM), 0.0),
        warm_train_s=costs.get((Phase.TRAIN, Switch.WARM), 0.0),
    )


def _overhead_s(order: OrderRecord) -> float:
    """Neither computing nor waiting for tools."""
    return max(0.0, order.end_s - order.start_s - order.seconds - sum(_waits(order)))


def _rollout(orders: Sequence[OrderRecord], num_trajectories: int, switch: SwitchSeconds) -> RolloutRecord:
    """Of one step: every device's orders, one after another."""
    devices = list(dict.fromkeys(order.devices[0] for order in orders))
    curves = [_curve([order for order in orders if order.devices[0] == device], switch) for device in devices]
    tails_s = [tail_s for curve in curves for tail_s in curve.tails_s]
    num_trajectories = max(num_trajectories, len(tails_s), 1)
    return RolloutRecord(
        fixed_s=sum(curve.fixed_s for curve in curves) / len(devices),
        dense_s=sum(curve.dense_s for curve in curves),
        tails_s=tuple(sorted(tails_s, reverse=True)),
        num_trajectories=num_trajectories,
        num_devices=len(devices),
        dense_waits=tuple(sorted(wait for curve in curves for wait in curve.dense_waits)),
        tail_waits=max((curve.tail_waits for curve in curves), key=lambda waits: sum(one[1] for one in waits)),
        slots=max((chunk.num_active for order in orders for chunk in order.chunks), default=1) or 1,
    )


@dataclass(frozen=True, slots=True)
class _Curve:
    """One device's share."""

    fixed_s: float
    dense_s: float
    tails_s: list[float]
    dense_waits: tuple[tuple[float, float], ...]
    tail_waits: tuple[tuple[float, float], ...]


def _curve(orders: Sequence[OrderRecord], switch: SwitchSeconds) -> _Curve:
    """Cut where the last trajectory got a slot: at the first report that says that none waits for one."""
    total_s, points, waits = 0.0, [], []
    for order in orders:
        lost_s = order.end_s - order.start_s - _elapsed_s(order, switch)
        before_s = order.start_s + lost_s
        for chunk, wait_s in zip(order.chunks, _waits(order), strict=True):
            total_s += max(0.0, chunk.time_s - before_s)
            before_s = chunk.time_s
            points.append((total_s, chunk.num_waiting, chunk.num_active + chunk.num_waiting + chunk.num_parked))
            if wait_s > 0.0:
                waits.append((total_s, wait_s, chunk.num_waiting > 0))
                before_s += wait_s
        total_s += max(0.0, order.end_s - before_s)
    fixed_s = sum(_overhead_s(order) for order in orders if order.switch is Switch.NONE)
    dense_end_s = next((at_s for at_s, num_waiting, _ in points if num_waiting == 0), total_s)
    tail = [(at_s - dense_end_s, num_left) for at_s, _, num_left in points if at_s >= dense_end_s]
    tail.append((total_s - dense_end_s, 0))
    tails_s: list[float] = []
    for (earlier_s, before), (later_s, after) in pairwise(tail):
        num_ended = before - after
        tails_s += [earlier_s + (later_s - earlier_s) * (k + 1) / num_ended for k in range(max(0, num_ended))]
    fixed_s = min(fixed_s, dense_end_s)
    return _Curve(
        fixed_s=fixed_s,
        dense_s=dense_end_s - fixed_s,
        tails_s=[tail_s for tail_s in tails_s if tail_s > DONE_S],
        dense_waits=tuple((at_s / total_s, wait_s) for at_s, wait_s, is_dense in waits if is_dense),
        tail_waits=tuple((at_s / total_s, wait_s) for at_s, wait_s, is_dense in waits if not is_dense),
    )


def _waits(order: OrderRecord) -> list[float]:
    """After each report: seconds in which every trajectory with a slot waited for its tool."""
    ends = [*((chunk.time_s, chunk.seconds) for chunk in order.chunks[1:]), (order.end_s, order.seconds)]
    return [
        max(0.0, end_s - chunk.time_s - (seconds - chunk.seconds)) if chunk.num_active == 0 < chunk.num_parked else 0.0
        for chunk, (end_s, seconds) in zip(order.chunks, ends, strict=False)
    ]
