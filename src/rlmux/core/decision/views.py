"""What a policy sees of a group.

A view is live and read-only. Its properties give frozen values or plain numbers, with no way from them to the state.
While a policy fills its plan, the plan's view answers as if what was chosen so far had been done (`plan.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from operator import itemgetter
from typing import TypeVar

from rlmux.core.decision.cycle_slots import CycleSlot, has_phase_to_begin
from rlmux.core.estimation.estimates import StepEstimates, StepPlan
from rlmux.core.estimation.switches import num_fitting
from rlmux.core.model import DeviceId, GroupId, OrderId, Phase, Pipeline, PipelineId, Stage, dense_threshold_of
from rlmux.core.pipeline_run import PipelineRun
from rlmux.core.placement.group_load import sync_s
from rlmux.core.placement.group_snapshot import GroupLook
from rlmux.core.placement.view import cached
from rlmux.core.state import GroupState, SchedulerState
from rlmux.core.work import Order, ReadyWork, RolloutShard, WorkState

C = TypeVar("C")


@dataclass(slots=True)
class Planned:
    """What was chosen so far in the decision under way."""

    gone: set[int] = field(default_factory=set)
    """Sequence numbers of ready work that starts or migrates."""
    held: dict[DeviceId, float] = field(default_factory=dict)
    """Device fraction that work which starts takes on each device."""
    states: dict[DeviceId, dict[tuple[PipelineId, Phase], float | None]] = field(default_factory=dict)
    """Device bytes of each state that work which starts needs on each device; None is unknown."""
    begun: set[tuple[PipelineId, Phase, DeviceId]] = field(default_factory=set)
    """Phases that begin, each a slot of its pipeline's cycle."""
    targets: dict[tuple[PipelineId, DeviceId], tuple[DeviceId, ...]] = field(default_factory=dict)
    """Targets of each migration, by pipeline and source device."""
    pauses: dict[OrderId, DeviceId | None] = field(default_factory=dict)
    """Orders that are to pause, with the device to which the shard is to migrate then."""
    fractions: dict[OrderId, float] = field(default_factory=dict)
    """Device fraction of each running order that gets another one."""

    def allows_migration(self, pipeline: PipelineId, source: DeviceId, target: DeviceId) -> bool:
        """Whether no planned migration of the pipeline brings trajectories to the source or takes the target's away."""
        targets = self.targets
        if not targets:
            return True
        is_awaited = any(name == pipeline and source in to for (name, _), to in targets.items())
        return not is_awaited and (pipeline, target) not in targets


NOTHING_PLANNED = Planned()
"""No decision is under way."""


class OrderView:
    """A running order."""

    __slots__ = ("_order", "_planned")

    def __init__(self, order: Order, planned: Planned = NOTHING_PLANNED) -> None:
        self._order = order
        self._planned = planned

    @property
    def id(self) -> OrderId:
        return self._order.id

    @property
    def pipeline(self) -> PipelineId:
        return self._order.pipeline

    @property
    def step(self) -> int:
        return self._order.step

    @property
    def stage(self) -> Stage:
        return self._order.stage

    @property
    def phase(self) -> Phase:
        return self._order.phase

    @property
    def devices(self) -> tuple[DeviceId, ...]:
        return self._order.devices

    @property
    def device_fraction(self) -> float:
        return self._planned.fractions.get(self._order.id, self._order.device_fraction)

    @property
    def started_s(self) -> float:
        return self._order.started_s

    def solo_s(self, now_s: float) -> float:
        """Seconds since it started, as if it had had its devices alone."""
        return self._order.solo_s + (now_s - self._order.rate_since_s) / self._order.slowdown

    @property
    def is_pausing(self) -> bool:
        return self._order.is_pausing or self._order.id in self._planned.pauses

    @property
    def migrate_to(self) -> DeviceId | None:
        """The device to which its shard migrates once it has paused; None where it goes on where it is."""
        work = self._order.work
        if not isinstance(work, RolloutShard):
            return None
        return self._planned.pauses.get(self._order.id, work.migrate_to)

    @property
    def num_active(self) -> int | None:
        """Sequences decoding at the last report; None before the first."""
        return self._order.num_active

    @property
    def num_waiting(self) -> int:
        """Sequences waiting for a slot at the last report."""
        return self._order.num_waiting

    @property
    def num_waiting_for_env(self) -> int:
        """Sequences waiting for their environment at the last report."""
        return self._order.num_waiting_for_env

    @property
    def tokens(self) -> int:
        """Tokens since it started, at the last report."""
        return self._order.tokens


class MemberView:
    """A pipeline of the group."""

    __slots__ = ("_planned", "_run")

    def __init__(self, run: PipelineRun, planned: Planned = NOTHING_PLANNED) -> None:
        self._run = run
        self._planned = planned

    @property
    def pipeline(self) -> Pipeline:
        return self._run.pipeline

    @property
    def id(self) -> PipelineId:
        return self._run.pipeline.id

    @property
    def rollout_devices(self) -> tuple[DeviceId, ...]:
        return self._run.nodes.rollout_devices

    @property
    def train_devices(self) -> tuple[DeviceId, ...]:
        return self._run.nodes.train_devices

    @property
    def rollout_step(self) -> int:
        return self._run.step.rollout_step

    @property
    def train_step(self) -> int:
        return self._run.step.train_step

    @property
    def published_version(self) -> int:
        return self._run.step.published_version

    @property
    def estimates(self) -> StepEstimates:
        """Forecast of its next step from the last ones."""
        return self._run.estimates.history.estimates()

    @property
    def dense_threshold(self) -> int | None:
        """Sequences from which its decode counts as dense; None where neither slots nor a shard are known."""
        known = self._run.pipeline.dense_threshold
        if known is None and (peak := self._run.estimates.history.largest_shard):
            return dense_threshold_of(peak)
        return known

    @property
    def step_plan(self) -> StepPlan:
        """The sub-stages of its next step, as the look-ahead and the report have them."""
        return self.estimates.plan(self.pipeline.train_stages, self.dense_threshold)

    @property
    def step_began_s(self) -> float:
        """When its open (or last) rollout was opened."""
        return self._run.estimates.history.step_began_s

    @property
    def due_s(self) -> float:
        """Time by which the open step must end for the mean of all its steps to keep the SLO; infinite without one."""
        return self._run.estimates.history.due_s

    def cycle_place(self, phase: Phase, device: DeviceId, num_later: int = 0) -> tuple[float, int]:
        """Where its next phase there has its slot in the meta-iteration, or the one so many later; the lesser first."""
        num_begun = _num_begun(self._run, (phase, device), self._planned) + num_later
        return num_begun / self._run.cycle.steps_per_cycle, self._run.cycle.cycle_index

    def live_shard(self, device: DeviceId) -> tuple[int | None, float]:
        """Sequences of the shard there at the last report, None before the first; solo seconds of earlier orders."""
        return self._run.estimates.history.live_shard(device)

    def wall_left_s(self, device: DeviceId, run_s: float) -> float:
        """Seconds until its shard there, which has run for so many, is over, waits for environments included; 0 for a
        pipeline without such waits."""
        return self._run.estimates.history.wall_left_s(device, run_s)

    def has_moved(self, device: DeviceId) -> bool:
        """Whether its shard there migrated to an idle device before it began: that takes no time, so it is not offered
        again."""
        return self._run.estimates.history.has_moved(device)

    @property
    def is_rollout_open(self) -> bool:
        return bool(self._run.step.shards)

    @property
    def unfinished_rollout_devices(self) -> tuple[DeviceId, ...]:
        """Devices with an unfinished shard of the open rollout, or of an on-demand pipeline's batch."""
        if self._run.pipeline.work_arrives:
            batch = self._run.step.batches.get((Phase.ROLLOUT,))
            return batch.work.devices if batch is not None and batch.is_open and batch.work is not None else ()
        return tuple(device for device, shard in self._run.step.shards.items() if shard.state is not WorkState.DONE)


class GroupView:
    """One co-execution group at one moment."""

    __slots__ = ("_group", "_planned", "_state")

    def __init__(self, state: SchedulerState, group: GroupState, planned: Planned = NOTHING_PLANNED) -> None:
        """`planned`: what the decision under way has chosen so far."""
        self._state = state
        self._group = group
        self._planned = planned

    @property
    def id(self) -> GroupId:
        return self._group.id

    @property
    def now_s(self) -> float:
        return self._state.now_s

    def cache(self, name: str, make: Callable[[], C]) -> C:
        """The policy's cache of this name, made when it is first wanted: dropping it must change no decision."""
        return cached(self._state.policy_caches, name, make)

    @property
    def ready(self) -> tuple[ReadyWork, ...]:
        """Everything that could start, in the order in which it became ready."""
        gone = self._planned.gone
        if not gone:
            return tuple(self._group.ready.values())
        return tuple(work for sequence, work in self._group.ready.items() if sequence not in gone)

    @property
    def members(self) -> tuple[MemberView, ...]:
        """Pipelines of the group, in cyclic order."""
        return tuple(MemberView(run, self._planned) for run in self._group.members.values())

    @property
    def num_members(self) -> int:
        return len(self._group.members)

    def pipeline(self, pipeline: PipelineId) -> Pipeline:
        """A member by its name."""
        return self._group.members[pipeline].pipeline

    @property
    def has_arriving_work(self) -> bool:
        """Whether a member is on demand: its next work cannot be planned."""
        return self._group.facts.has_arriving_work

    @property
    def has_wide_rollouts(self) -> bool:
        """Whether a member rolls out on several devices: trajectories migrate nowhere else."""
        return self._group.facts.has_wide_rollouts

    @property
    def has_tails(self) -> bool:
        """Whether tails of a member's rollouts may leave their nodes to others."""
        return self._group.facts.has_tails

    @property
    def look(self) -> GroupLook:
        """What a plan of the group depends on."""
        running, pauses = self._group.running.values(), self._planned.pauses
        return GroupLook(
            ready=tuple((work.sequence, work.is_waiting) for work in self.ready),
            running=tuple(
                (order.id, order.is_pausing or order.id in pauses, (order.num_active or 0).bit_length())
                for order in running
            ),
            num_idle=sum(order.num_active == 0 and order.num_waiting_for_env > 0 for order in running),
            num_migrating=len(self.migrating),
        )

    @property
    def planned(self) -> GroupLook | None:
        """What the group looked like when it was last marked as planned; None before the first time."""
        return self._group.planned

    @property
    def has_changed(self) -> bool:
        """Whether the group looks different from when it was last marked as planned."""
        return self._group.planned != self.look

    @property
    def serves_both_phases(self) -> bool:
        """The first member trains on devices that it rolls out on, and so do all."""
        return self._group.facts.serves_both_phases

    @property
    def running(self) -> tuple[OrderView, ...]:
        """Running and pausing orders that compute, in the order they were given. Work that has been chosen to start is
        not among them, but holds its devices."""
        return tuple(OrderView(order, self._planned) for order in self._group.running.values())

    @property
    def migrating(self) -> tuple[tuple[PipelineId, DeviceId], ...]:
        """Pipeline and source device of every migration under way, or chosen."""
        under_way = [
            (order.id, order.pipeline, order.migrates_from)
            for run in self._group.members.values()
            for order in run.step.orders.values()
            if order.migrates_from is not None
        ]
        ordered = tuple((pipeline, source) for _, pipeline, source in sorted(under_way, key=itemgetter(0)))
        return ordered + tuple(self._planned.targets)

    def can_migrate(self, pipeline: PipelineId, source: DeviceId, target: DeviceId) -> bool:
        """Whether the shard of the open rollout on the source may migrate to the target now: no trajectories are on
        their way to the source, and none leave the target."""
        return self._planned.allows_migration(pipeline, source, target) and self._state.can_migrate(
            self._group.members[pipeline], source, target
        )

    def is_free(self, devices: Iterable[DeviceId]) -> bool:
        """No order computes on any of these."""
        states, held = self._state.devices, self._planned.held
        return not any([states[device].orders or device in held for device in devices])  # noqa: C419 - a generator takes twice as long

    def free_fraction(self, device: DeviceId) -> float:
        """Part of the device that no order holds."""
        fractions, held = self._planned.fractions, self._planned.held.get(device, 0.0)
        orders = self._state.devices[device].orders.items()
        return max(0.0, 1.0 - sum(fractions.get(order, fraction) for order, fraction in orders) - held)

    def batch_slowdown(self, pipeline: Pipeline, phase: Phase, num_together: int) -> float:
        """Expected seconds of a member in one batch of so many of its base, over its seconds alone."""
        return self._state.batch_slowdowns.slowdown(pipeline, phase, num_together)

    @property
    def tail_left(self) -> int:
        """Trajectories of a step at which rollouts leave their nodes to the next member's; 0: they keep them."""
        return self._group.tail_left

    def memory_bytes(self, device: DeviceId) -> float:
        """Bytes that all states which compute on the device at once must fit into."""
        return self._state.devices[device].memory_bytes

    def residents(self, device: DeviceId) -> tuple[tuple[PipelineId, Phase], ...]:
        """States of members that are kept there, least recently used first."""
        return tuple(
            resident for resident in self._state.devices[device].residents if resident[0] in self._group.members
        )

    def num_kept(self, device: DeviceId) -> float:
        """How many of the states that members use there fit at once, whichever they are; infinite for all."""
        pinned = self._group.members_by_device
        footprints = {
            phase: [run.pipeline.footprint for run in pinned.get((phase, device), {}).values()]
            for phase in (Phase.ROLLOUT, Phase.TRAIN)
        }
        sizes = [footprint.rollout_device_bytes for footprint in footprints[Phase.ROLLOUT]]
        sizes += [footprint.train_device_bytes for footprint in footprints[Phase.TRAIN]]
        return num_fitting(sizes, self.memory_bytes(device))

    def switch_s(self, work: ReadyWork) -> float:
        """Seconds to bring the state that this work needs to its devices; 0 where it is there, or evicts no other."""
        run = self._group.members[work.pipeline]
        return max(self._switch_s(run, work.phase, device)[0] for device in work.devices)

    def is_next_in_cycle(self, work: ReadyWork) -> bool:
        """Whether this pipeline is next in the strict meta-iteration on all of the work's devices.

        A member with m steps per cycle has its n-th slot (from 0) at n / m of the meta-iteration. On every device the
        member whose next slot comes first is next, ties in cyclic order, ready or not: all but one that only waits for
        its own user code. With one step per cycle each
        that is RollMux section 5.1: one rollout and one training phase of each member in a cycle. A pipeline whose work
        arrives has a slot while work of it is ready, and a batch of both phases takes none.
        """
        if len(self._group.members) == 1 or len(work.kind) > 1:
            return True
        return all([self._is_next(work, device) for device in work.devices])  # noqa: C419 - as above

    def cycle_slot(self, work: ReadyWork) -> CycleSlot:
        """The phase that begins with this work."""
        run = self._group.members[work.pipeline]
        seconds = _phase_s(run, work.phase)
        switch_s, forced_s = self._switch_s(run, work.phase, work.devices[0])
        return CycleSlot(gap_s=0.0, seconds=seconds, switch_s=switch_s, forced_s=forced_s, laxity_s=self._laxity_s(run))

    def cycle_slots_before(self, work: ReadyWork, device: DeviceId) -> list[CycleSlot]:
        """Phases that are to begin on the device before this work, in the order of their slots."""
        key = (work.phase, device)
        pinned = self._group.members_by_device[key]
        mine = pinned[work.pipeline]
        own_rank = self._rank(mine, key)
        ranked = [
            (rank, run)
            for run in pinned.values()
            if (rank := self._rank(run, key)) < own_rank and has_phase_to_begin(run, key, self._planned.gone)
        ]
        ranked.sort(key=itemgetter(0))
        slots = []
        for _, run in ranked:
            switch_s, forced_s = self._switch_s(run, work.phase, device)
            slots.append(
                CycleSlot(
                    gap_s=self._gap_s(run, work.phase, device),
                    seconds=_phase_s(run, work.phase),
                    switch_s=switch_s,
                    forced_s=forced_s,
                    laxity_s=self._laxity_s(run),
                )
            )
        return slots

    def _switch_s(self, run: PipelineRun, phase: Phase, device: DeviceId) -> tuple[float, float]:
        """Seconds to bring its state to the device now, and seconds to bring it back after another evicted it."""
        seconds = run.estimates.history.estimates().switch_s(phase)
        if seconds == 0.0 or self.num_kept(device) == math.inf:
            return 0.0, 0.0
        is_there = (run.pipeline.id, phase) in self._state.devices[device].residents
        return (0.0, seconds) if is_there else (seconds, 0.0)

    def _gap_s(self, run: PipelineRun, phase: Phase, device: DeviceId) -> float:
        if run.pipeline.staleness:
            return 0.0
        if phase is Phase.TRAIN:
            return 0.0 if run.step.training.is_open else self._until_trajectories_s(run)
        shard = run.step.shards.get(device)
        if shard is not None and shard.is_ready:
            return 0.0
        if run.step.shards:
            return self._until_trajectories_s(run) + run.estimates.history.estimates().train_s
        return self._until_trained_s(run)

    def _until_trained_s(self, run: PipelineRun) -> float:
        """Seconds until the training that is ready or runs can have ended."""
        training = run.step.training
        if not training.is_open or training.index != 0:
            return 0.0
        train_s = run.estimates.history.estimates().train_s
        if training.order is None:
            return train_s
        return max(0.0, train_s - OrderView(self._state.orders[training.order]).solo_s(self.now_s))

    def _until_trajectories_s(self, run: PipelineRun) -> float:
        """Seconds until its open rollout, or the next one, can have ended."""
        estimates = run.estimates.history.estimates()
        if not run.step.shards:
            return estimates.shard_s if run.nodes.rollout_devices else 0.0
        left_s = 0.0
        for device, shard in run.step.shards.items():
            if shard.state is WorkState.DONE:
                continue
            num_active, run_s = run.estimates.history.live_shard(device)
            if shard.order is not None:
                run_s += OrderView(self._state.orders[shard.order]).solo_s(self.now_s)
            wall_s = run.estimates.history.wall_left_s(device, run_s)
            left_s = max(left_s, wall_s, estimates.remaining_time(num_active, run_s).low_s)
        return left_s

    def _laxity_s(self, run: PipelineRun) -> float:
        due_s = run.estimates.history.due_s
        if due_s == math.inf:
            return math.inf
        if run.step.shards:
            left_s = self._until_trajectories_s(run) + run.estimates.history.estimates().train_s
        else:
            left_s = self._until_trained_s(run)
        return due_s - self.now_s - left_s - sync_s(run.pipeline)

    def _is_next(self, work: ReadyWork, device: DeviceId) -> bool:
        key = (work.phase, device)
        pinned = self._group.members_by_device[key]
        if len(pinned) == 1:
            return True
        planned, mine = self._planned, pinned[work.pipeline]
        begun, cycle = _num_begun(mine, key, planned), mine.cycle
        steps_per_cycle, cycle_index = cycle.steps_per_cycle, cycle.cycle_index
        for pipeline_id, run in pinned.items():
            other_begun = _num_begun(run, key, planned) if planned.begun else run.cycle.phases_started[key]
            # Positive: the other's next slot comes first.
            lead = begun * run.cycle.steps_per_cycle - other_begun * steps_per_cycle
            if (
                (lead > 0 or (lead == 0 and run.cycle.cycle_index < cycle_index))
                and pipeline_id != work.pipeline
                and has_phase_to_begin(run, key, planned.gone)
            ):
                return False
        return True

    def _rank(self, run: PipelineRun, key: tuple[Phase, DeviceId]) -> tuple[float, int]:
        """Where its next phase has its slot in the meta-iteration; the lesser first."""
        return _num_begun(run, key, self._planned) / run.cycle.steps_per_cycle, run.cycle.cycle_index


def _num_begun(run: PipelineRun, key: tuple[Phase, DeviceId], planned: Planned) -> int:
    """Phases that it has begun on the device, with the one that begins by the decision under way."""
    num_begun = run.cycle.phases_started[key]
    return num_begun + ((run.pipeline.id, *key) in planned.begun) if planned.begun else num_begun


def _phase_s(run: PipelineRun, phase: Phase) -> float:
    estimates = run.estimates.history.estimates()
    return estimates.shard_s if phase is Phase.ROLLOUT else estimates.train_s
