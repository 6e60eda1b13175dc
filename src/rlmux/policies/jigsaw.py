"""`jigsaw`: pipelines share all devices at the grain of sub-stages; a look-ahead decides (after JigsawRL).

    view ──▶ upcoming (work_items of this step and the next ones) ──▶ lookahead.plan ──▶ its first moment ──▶ choices

Every pipeline of the group rolls out on all of its devices and trains on as many as it asks for. At each event the
work_items that are known or predicted are scheduled anew as a whole, and what that schedule does now is done:

    start      ready work on free devices; beside another only at a device fraction that was measured to help
    merge      the tail of a pipeline leaves one device for a sibling's: pause, then move, then the device is free
    gather     a share that has not begun joins a sibling's: fewer, fuller batches, and the device is another's
    migrate    a share whose device is held, or wanted, goes to a free one on which its pipeline's share has ended
    yield      a share whose trajectories all wait for their environments leaves its device to work that could start
    wait       hold a device for something that is about to become ready, if that ends everything sooner

A device never waits while nothing runs. Tails are merged only if the schedule ends sooner by it, moving included: so
not when nobody waits, and not when contexts are so long that moving eats the gain.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass

from rlmux.core.model import (
    AdmissionKind,
    DeviceId,
    NodeId,
    OrderId,
    Phase,
    Pipeline,
    PipelineId,
    SubStage,
)
from rlmux.core.placement import GroupLoad, PlacementChoice, PlacementView, Refusal, Relocation
from rlmux.core.sharing import NO_SHARING, SharingTable
from rlmux.core.state import ReadyWork
from rlmux.core.views import (
    ChangeFraction,
    Choice,
    GroupView,
    MarkPlanned,
    MemberView,
    MigrateWork,
    OrderView,
    PauseOrder,
    RunWork,
)
from rlmux.policies.planning.candidates import impossible, queue
from rlmux.policies.planning.dispatching import first_fit
from rlmux.policies.planning.forecast import Upcoming, decode_kind, is_idle, solo_step_s, upcoming
from rlmux.policies.planning.lookahead import BUDGET, Merge, Problem, Schedule, greedy, plan
from rlmux.policies.planning.migration import (
    Mover,
    continue_migrations,
    later_gathers,
    migrations_of,
    possible_merges,
    possible_movers,
)

PATIENCE_STEPS = 2
"""Of the longest member's: after so long, devices are kept for work that is ready."""
_STARTS_PER_STEP_S = 500.0
"""Where steps take less than a second the next decision is near, and a device stands still meanwhile: a decision then
plays out so many starts for each second of a step (a start takes some 7 µs)."""
_LEAST_STARTS = 150


@dataclass(frozen=True, slots=True, kw_only=True)
class Jigsaw:
    name: str = "jigsaw"
    reacts_to_progress: bool = True
    sharing: SharingTable = NO_SHARING
    """Pairs that were measured to help on these devices; empty: every order has its devices alone."""
    merges_tails: bool = True
    looks_ahead: bool = True
    """False: greedy, for comparison."""
    merge_stretch: float = 1.1
    """A target decodes this much slower with what it takes over, until a move was seen."""
    move_part: float = 0.02
    """Seconds of a move before one was seen, as a part of the share's."""
    budget: int = BUDGET
    """Starts on a device that one decision may play out; fewer where steps take less than a second."""
    max_members: int = 8

    def place(self, pipeline: Pipeline, view: PlacementView) -> PlacementChoice | Refusal:
        return place_sharing(pipeline, view, max_members=self.max_members)

    def rebalance(self, view: PlacementView) -> tuple[Relocation, ...]:
        return ()

    def dispatch(self, view: GroupView) -> Iterator[Choice]:
        has_migrated = yield from continue_migrations(view)
        if not view.has_changed:
            return
        yield MarkPlanned()
        yield from yield_devices(view)
        sharing = self.sharing if self.sharing.entries and _can_share(view) else NO_SHARING
        movers = possible_movers(view) if self.merges_tails else ()
        if not movers and not self._is_choice(view, sharing):
            yield from start_side_by_side(view, (), sharing)  # who is alone again gets the whole device
            return
        ahead = upcoming(view)
        problem = Problem(
            work_items=tuple(ahead.work_items),
            merges=self._merges(view, ahead, sharing) if self.merges_tails else (),
            migrations=migrations_of(view, ahead, movers, self._move_s),
            sharing=sharing,
            kept=ahead.kept,
            num_kept=ahead.num_kept,
        )
        made = plan(problem, budget=self._budget(view)) if self.looks_ahead else greedy(problem)
        yield from self._begin_merges(ahead, problem, made)
        yield from self._begin_migrations(ahead, problem, movers, made)
        works = _overdue_first(view, _to_start(view, ahead, made))
        started = yield from start_side_by_side(view, works, problem.sharing)
        if not started and not view.running and not view.moving and not has_migrated:
            yield from first_fit(view, [work for work in view.ready if not work.is_waiting])

    def _merges(self, view: GroupView, ahead: Upcoming, sharing: SharingTable) -> tuple[Merge, ...]:
        now = possible_merges(view, ahead, self._move_s, self.merge_stretch)
        return now if sharing.entries else now + later_gathers(view, ahead)  # side by side is better than gathered

    def _budget(self, view: GroupView) -> int:
        shortest_s = min(solo_step_s(member) for member in view.members)
        return min(self.budget, max(_LEAST_STARTS, int(_STARTS_PER_STEP_S * shortest_s)))

    def _is_choice(self, view: GroupView, sharing: SharingTable) -> bool:
        """Whether anything could be started or merged now, so that a plan is worth its milliseconds."""
        max_holders = 1 if sharing.entries else 0
        num_holders: dict[DeviceId, int] = {}
        rollouts: dict[PipelineId, int] = {}
        for order in view.running:
            for device in order.devices:
                num_holders[device] = num_holders.get(device, 0) + 1
            if order.phase is Phase.ROLLOUT:
                rollouts[order.pipeline] = rollouts.get(order.pipeline, 0) + 1
        ready = [work for work in view.ready if not work.is_waiting]
        if any(all(num_holders.get(d, 0) <= max_holders for d in work.devices) for work in ready):
            return True
        return (
            self.merges_tails
            and bool(view.ready)
            and any(
                rollouts.get(member.id, 0) and len(member.unfinished_rollout_devices) > 1 for member in view.members
            )
        )

    # ------------------------------------------------------------------ moves

    def _move_s(self, member: MemberView, device: DeviceId) -> float:
        estimates = member.estimates
        if estimates.move_s is None:
            return self.move_part * estimates.share_s
        return estimates.move_s * (member.live_share(device)[0] or 1)

    def _begin_merges(self, ahead: Upcoming, problem: Problem, made: Schedule) -> Iterator[Choice]:
        for number in made.merges_now:
            merge = problem.merges[number]
            source, target = ahead.device_of[merge.source], ahead.device_of[merge.target]
            order = ahead.orders.get(merge.source)
            if order is not None:
                yield from _pause_to_migrate(order, target)
            elif merge.source in ahead.works:
                work = ahead.works.pop(merge.source)
                yield MigrateWork(pipeline=work.pipeline, source=source, target=target)

    def _begin_migrations(
        self, ahead: Upcoming, problem: Problem, movers: Sequence[Mover], made: Schedule
    ) -> Iterator[Choice]:
        for number in made.migrations_now:
            share, device = movers[number]
            if isinstance(share, OrderView):
                yield from _pause_to_migrate(share, device)
            elif ahead.works.pop(problem.migrations[number].task, None) is not None:
                yield MigrateWork(pipeline=share.pipeline, source=share.devices[0], target=device)


def _pause_to_migrate(order: OrderView, target: DeviceId) -> Iterator[PauseOrder]:
    if not order.is_pausing:
        yield PauseOrder(order=order.id, migrate_to=target)


# --- placement ----------------------------------------------------------------------------------------------


def place_sharing(pipeline: Pipeline, view: PlacementView, *, max_members: int) -> PlacementChoice | Refusal:
    """Into the first group whose nodes serve both phases of everyone and that keeps every SLO; else a new one.

    A finite cluster is one group with all its nodes. The period that is promised is that of one phase after
    another; the look-ahead then puts the deadlines that follow from SLOs before everything else.
    """
    needs = {
        phase: 0 if view.cluster.pool_for(phase) is None else count
        for phase, count in (
            (Phase.TRAIN, pipeline.num_train_nodes),
            (Phase.ROLLOUT, pipeline.num_rollout_nodes),
        )
    }
    refusal = impossible(pipeline, view, needs=needs, is_colocated=True)
    if refusal is not None:
        return refusal
    for group in view.groups():
        if (
            group.is_shared
            and group.num_members < max_members
            and len(group.rollout_nodes) >= max(pipeline.num_rollout_nodes, pipeline.num_train_nodes)
            and _has_memory(group, pipeline)
            and group.keeps_slos_with(pipeline, group.rollout_nodes, 0)
        ):
            return PlacementChoice(
                kind=AdmissionKind.DIRECT,
                group=group.id,
                rollout_nodes=group.rollout_nodes,
                train_nodes=_least_loaded(group, pipeline.num_train_nodes),
                is_colocated=True,
                is_shared=True,
            )
    free = {phase: view.num_free_nodes(phase) for phase in needs}
    if any(count > free[phase] for phase, count in needs.items()):
        return queue(pipeline, view)
    num_new = {phase: int(free[phase]) if free[phase] < float("inf") else count for phase, count in needs.items()}
    return PlacementChoice(
        kind=AdmissionKind.NEW,
        group=None,
        num_new_rollout_nodes=num_new[Phase.ROLLOUT],
        num_new_train_nodes=num_new[Phase.TRAIN],
        is_colocated=True,
        is_shared=True,
    )


def _has_memory(group: GroupLoad, pipeline: Pipeline) -> bool:
    need = pipeline.footprint.rollout_host_bytes + pipeline.footprint.train_host_bytes
    return group.has_memory_for(pipeline, group.rollout_nodes) and need <= min(group.free_rollout_bytes)


def _least_loaded(group: GroupLoad, count: int) -> tuple[NodeId, ...]:
    """The nodes with the least training on them, in the group's order among equals."""
    load_s = dict.fromkeys(group.rollout_nodes, 0.0)
    for member in group.members:
        for node in member.placement.train_nodes:
            load_s[node] += member.phase_load.train_s or 1e-9
    return tuple(sorted(group.rollout_nodes, key=lambda node: load_s[node])[:count])


def _to_start(view: GroupView, ahead: Upcoming, made: Schedule) -> list[ReadyWork]:
    """What the plan starts now. While tools are waited for, whatever else could start follows, in the plan's order:
    a device that is kept for a reply waits for nobody knows how long."""
    now = [index for index in made.starts_now if index in ahead.works]
    if any(work.is_waiting for work in view.ready) or any(is_idle(order) for order in view.running):
        now += sorted(ahead.works.keys() - now, key=lambda index: (made.start_s[index], index))
    return [ahead.works[index] for index in now]


# --- waiting for environments -------------------------------------------------------------------------------


def yield_devices(view: GroupView) -> Iterator[PauseOrder]:
    """Pause idle shares on devices that ready work could then start on. The tools go on meanwhile.

    Not where they are known to reply before the states have been switched to and fro.
    """
    idle = {order.devices[0]: order for order in view.running if order.phase is Phase.ROLLOUT and is_idle(order)}
    if not idle:
        return
    given: set[DeviceId] = set()
    for work in view.ready:
        needed = [device for device in work.devices if not view.is_free((device,))]
        if work.is_waiting or not needed or not all(device in idle for device in needed) or given & set(needed):
            continue
        if not _is_worth_switching(view, work, [idle[device] for device in needed]):
            continue
        given.update(needed)
        for device in needed:
            if not idle[device].is_pausing:
                yield PauseOrder(order=idle[device].id)


def _is_worth_switching(view: GroupView, work: ReadyWork, idle: Sequence[OrderView]) -> bool:
    members = {member.id: member for member in view.members}
    there_s = view.switch_s(work)
    for order in idle:
        estimates = members[order.pipeline].estimates
        is_crowded = view.num_kept(order.devices[0]) < math.inf
        back_s = estimates.switch_s(Phase.ROLLOUT) if is_crowded else 0.0
        if estimates.wait_s is not None and estimates.wait_s < there_s + back_s:
            return False
    return True


def _overdue_first(view: GroupView, works: list[ReadyWork]) -> list[ReadyWork]:
    """What to start, the devices of the one that has waited too long kept for it.

    Makespans look only so far ahead: work on several devices would wait for ever while shorter work alternates on each.
    """
    patience_s = PATIENCE_STEPS * max(solo_step_s(member) for member in view.members)
    overdue = next((w for w in view.ready if not w.is_waiting and view.now_s - w.since_s > patience_s), None)
    if overdue is None:
        return works
    return [overdue, *(work for work in works if set(work.devices).isdisjoint(overdue.devices))]


# --- starting, side by side ---------------------------------------------------------------------------------


def _can_share(view: GroupView) -> bool:
    """Any two states of the group fit any of its devices together."""
    needs = [
        size
        for member in view.members
        for size in (
            member.pipeline.footprint.rollout_device_bytes,
            member.pipeline.footprint.train_device_bytes,
        )
    ]
    if None in needs:
        return False
    two_largest = sum(sorted((size for size in needs if size is not None), reverse=True)[:2])
    devices = {device for member in view.members for device in member.rollout_devices + member.train_devices}
    return all(two_largest <= view.memory_bytes(device) for device in devices)


def start_side_by_side(
    view: GroupView, works: Sequence[ReadyWork], sharing: SharingTable
) -> Generator[Choice, None, bool]:
    """Grant these, lowering the device fraction of whoever is there, and raise those that are alone again."""
    members = {member.id: member for member in view.members}
    residents: dict[DeviceId, list[tuple[OrderId | int, str]]] = {}
    blocked: set[DeviceId] = set()
    for order in view.running:
        for device in order.devices:
            residents.setdefault(device, []).append((order.id, kind_of(order)))
            if order.is_pausing:
                blocked.add(device)
    granted: list[tuple[ReadyWork, str]] = []
    for work in works:
        kind = _ready_kind(members[work.pipeline], work)
        present = [residents.get(device, []) for device in work.devices]
        if any(device in blocked for device in work.devices) or any(len(there) > 1 for there in present):
            continue
        if any(sharing.pair_rates(kind, other) is None for there in present for _, other in there):
            continue
        for device in work.devices:
            residents.setdefault(device, []).append((-work.sequence, kind))
        granted.append((work, kind))
    levels = _fractions(residents, sharing)
    raised: list[ChangeFraction] = []
    for order in view.running:
        device_fraction, slowdown = levels[order.id]
        if order.is_pausing or (abs(device_fraction - order.device_fraction) < 1e-9 and not granted):
            continue
        if device_fraction > order.device_fraction and not blocked.isdisjoint(order.devices):
            continue  # who is pausing there keeps its device fraction until it has gone
        change = ChangeFraction(order=order.id, device_fraction=device_fraction, slowdown=slowdown)
        if device_fraction > order.device_fraction:
            raised.append(change)
        else:
            yield change
    for work, _ in granted:
        device_fraction, slowdown = levels[-work.sequence]
        yield RunWork(work=work, device_fraction=device_fraction, slowdown=slowdown)
    yield from raised
    return bool(granted)


def _fractions(
    residents: dict[DeviceId, list[tuple[OrderId | int, str]]], sharing: SharingTable
) -> dict[OrderId | int, tuple[float, float]]:
    """Level and slowdown of each: the least device fraction and the largest slowdown over its devices."""
    levels: dict[OrderId | int, tuple[float, float]] = {}
    for there in residents.values():
        for name, kind in there:
            device_fraction, slowdown = levels.get(name, (1.0, 1.0))
            for other, other_kind in there:
                if other != name:
                    pair_rates = sharing.pair_rates(kind, other_kind)
                    mine = (pair_rates.device_fraction, pair_rates.slowdown) if pair_rates else (0.5, 2.0)
                    device_fraction, slowdown = min(device_fraction, mine[0]), max(slowdown, mine[1])
            levels[name] = (device_fraction, slowdown)
    return levels


def kind_of(order: OrderView) -> str:
    """The character of what the order does now."""
    if order.phase is Phase.TRAIN:
        return SubStage.UPDATE
    return decode_kind(order.num_active)


def _ready_kind(member: MemberView, work: ReadyWork) -> str:
    """What ready work will be; a share that has not begun begins as the last ones did."""
    if work.phase is Phase.TRAIN:
        return SubStage.UPDATE
    num_active = member.live_share(work.devices[0])[0] if work.is_continuation else member.estimates.peak
    return decode_kind(num_active)
