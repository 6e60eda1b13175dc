"""Orders that have been given and have not ended: each is given, changed and ended here.

    run, migrate ─▶ Order ── change_fraction, pause ─▶ Order ── end ─▶ gone
       RunStage, MigrateShard     SetDeviceFraction, Pause

An order for a shard, a training stage or a batch leases its devices; rewards, publications and migrations lease none.
"""

from __future__ import annotations

from rlmux.core.actions import Action, MigrateShard, RunStage, SetDeviceFraction, Switch
from rlmux.core.events import ChunkFinished
from rlmux.core.journal import Journal
from rlmux.core.model import DeviceId, OrderId, Phase, Pipeline, Resident, Stage
from rlmux.core.pipeline_run import PipelineRun
from rlmux.core.queue.fair_share import Shares
from rlmux.core.state import FILLERS, SchedulerState
from rlmux.core.steps.leases import Leases
from rlmux.core.work import Order, ReadyWork, RequestBatch, RolloutShard, Work

_NOTHING: tuple[Resident, ...] = ()


class Orders:
    """Owns the orders; see the module."""

    def __init__(self, state: SchedulerState, leases: Leases, shares: Shares, journal: Journal) -> None:
        self._state = state
        self._leases = leases
        self._shares = shares
        self._journal = journal

    def run_ready(
        self,
        run: PipelineRun,
        work: Work,
        ready: ReadyWork,
        device_fraction: float,
        slowdown: float,
    ) -> RunStage:
        """Run ready work on a fraction of its devices."""
        return self._run(
            run,
            ready.step,
            ready.stage,
            ready.phase,
            ready.devices,
            device_fraction,
            ready.rollout_devices,
            slowdown=slowdown,
            work=work,
        )

    def run_without_device(self, run: PipelineRun, step: int, stage: Stage, phase: Phase) -> RunStage:
        """Run a reward or a publication."""
        return self._run(run, step, stage, phase, (), 0.0)

    def migrate(self, run: PipelineRun, shard: RolloutShard, targets: tuple[DeviceId, ...]) -> MigrateShard:
        """Move the shard's trajectories to the targets. The pipeline decides how their KV caches get there."""
        order_id = self._next_id()
        self._state.orders[order_id] = run.step.orders[order_id] = Order(
            order_id,
            run.pipeline.id,
            run.step.rollout_step,
            Stage.GENERATE,
            Phase.SYNC,
            targets,
            0.0,
            self._state.now_s,
            work=shard,
            migrates_from=shard.device,
            rate_since_s=self._state.now_s,
            is_fresh=not shard.work.is_continuation,
        )
        return MigrateShard(
            order=order_id,
            pipeline=run.pipeline.id,
            step=run.step.rollout_step,
            source=shard.device,
            target=targets[0],
            copies_kv=run.pipeline.copies_kv,
            others=targets[1:],
        )

    def change_fraction(self, order: Order, device_fraction: float, slowdown: float) -> list[Action]:
        """Give a running order another device fraction, and the slowdown that is expected with it from now on."""
        is_changed = device_fraction != order.device_fraction
        self._shares.charge(order.devices)
        self._leases.change_fraction(order, device_fraction)
        now_s = self._state.now_s
        order.solo_s += (now_s - order.rate_since_s) / order.slowdown
        order.rate_since_s, order.slowdown = now_s, slowdown
        return [SetDeviceFraction(order=order.id, device_fraction=device_fraction)] if is_changed else []

    def end(self, order: Order) -> None:
        """The order has ended: its devices are free."""
        self._shares.charge(order.devices)
        run = self._state.runs[order.pipeline]
        del self._state.orders[order.id]
        del run.step.orders[order.id]
        if order.device_fraction == 0.0:  # rewards, a publication, a migration: it leases nothing
            return
        del self._state.group_of(run).running[order.id]
        self._leases.release(order)
        if run.is_filler:
            self._shares.let_go(order.devices)
            self._return_to_groups(order.devices)

    def _return_to_groups(self, devices: tuple[DeviceId, ...]) -> None:
        """A filler has left these devices: the groups that wanted them start what they chose there."""
        state = self._state
        for device in devices:
            group = state.groups.get(state.wanted_by.pop(device, FILLERS))
            if group is not None:
                state.dirty.groups[group.id] = group

    def end_all(self, run: PipelineRun) -> None:
        for order in self.of(run):
            self.end(order)

    def named(self, order_id: OrderId) -> Order:
        """The order of that id. Raises IllegalTransitionError where it has ended or was never given."""
        try:
            return self._state.orders[order_id]
        except KeyError:
            raise self._journal.illegal(f"order {order_id} is not running") from None

    def of(self, run: PipelineRun) -> list[Order]:
        """Every order of the pipeline, oldest first."""
        return list(run.step.orders.values())

    def solo_s(self, order: Order, seconds: float) -> float:
        """The driver's seconds of an order without what sharing its devices added to them."""
        since_s = self._state.now_s - order.started_s
        if since_s <= 0.0:
            return seconds
        solo_s = order.solo_s + (self._state.now_s - order.rate_since_s) / order.slowdown
        return seconds * solo_s / since_s

    def note_progress(self, order: Order, event: ChunkFinished) -> None:
        """Take in a progress report."""
        order.num_active = event.num_active
        order.num_waiting = event.num_waiting
        order.num_waiting_for_env = event.num_waiting_for_env
        order.has_waited_for_env |= event.num_waiting_for_env > 0
        order.tokens = event.tokens

    def measure(self, run: PipelineRun, order: Order, solo_s: float, switch_s: float) -> None:
        """Count an order that has ended for its step; `solo_s` are its seconds of computing."""
        held_s = self.solo_s(order, max(0.0, self._state.now_s - order.started_s - switch_s))
        if isinstance(order.work, RequestBatch):
            order.work.solo_s += solo_s
            order.work.held_s += held_s
        elif order.phase is Phase.ROLLOUT:
            if order.has_waited_for_env:
                solo_s = held_s  # it waits for its own environments alone, too
            run.estimates.measured.add_rollout(order.step, order.devices[0], solo_s, held_s)
        elif order.phase is not Phase.TRAIN:
            run.estimates.measured.add_between(order.stage, held_s)
        elif order.stage is not Stage.SFT_WARMUP:
            run.estimates.measured.add_train(order.step, solo_s, held_s)

    def _run(
        self,
        run: PipelineRun,
        step: int,
        stage: Stage,
        phase: Phase,
        devices: tuple[DeviceId, ...],
        device_fraction: float,
        rollout_devices: tuple[DeviceId, ...] = (),
        *,
        slowdown: float = 1.0,
        work: Work | None = None,
    ) -> RunStage:
        state = self._state
        pipeline = run.pipeline
        order_id = self._next_id()
        self._shares.charge(devices)
        switch, evicted = Switch.NONE, _NOTHING
        if devices and run.is_filler:
            self._shares.hold(devices, state.fillers)
            switch, evicted = self._leases.take_idle(run, devices[0], order_id)
        elif devices:
            switch, evicted = self._leases.take(run, phase, devices, order_id, device_fraction, rollout_devices)
        order = state.orders[order_id] = run.step.orders[order_id] = Order(
            order_id,
            pipeline.id,
            step,
            stage,
            phase,
            devices,
            device_fraction,
            state.now_s,
            work=work,
            switch=switch,
            slowdown=slowdown,
            rate_since_s=state.now_s,
            rollout_devices=rollout_devices,
        )
        if devices:
            state.group_of(run).running[order_id] = order
        return RunStage(
            order=order_id,
            pipeline=pipeline.id,
            step=step,
            stage=stage,
            devices=devices,
            weight_version=_weight_version(pipeline, step, phase),
            device_fraction=device_fraction,
            switch=switch,
            evicted=evicted,
        )

    def _next_id(self) -> OrderId:
        order_id = OrderId(self._state.next_order)
        self._state.next_order += 1
        return order_id


def rollout_version(pipeline: Pipeline, step: int) -> int:
    """The one weight version that the step's rollout samples from: a constant lag, not whatever was newest. A filler
    samples from the model that it was given."""
    if pipeline.is_filler:
        return 0
    return max(0, step - 1 - pipeline.staleness)


def _weight_version(pipeline: Pipeline, step: int, phase: Phase) -> int:
    if pipeline.work_arrives:
        return 0  # its client tracks its versions
    if phase is Phase.ROLLOUT:
        return rollout_version(pipeline, step)
    return max(0, step - (phase is Phase.TRAIN))
