"""The near future of a group as work_items for the look-ahead: what runs, what is ready, and the steps after.

    each pipeline, staleness k:   R[n] ──▶ T[n] ──▶ R[n+1+k]        R: one task per device and step; T: one per step
                                  R[n] ──▶ R[n+1],  T[n] ──▶ T[n+1]

Running work comes with what is left of it by the live active count; later steps are as the last ones were. Every
pipeline is looked ahead to about the same time, the end of the longest one's next step.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from rlmux.core.estimates import StepEstimates
from rlmux.core.model import DENSE_DECODE_MIN, DeviceId, Phase, PipelineId, Stage, SubStage
from rlmux.core.state import ReadyWork
from rlmux.core.views import GroupView, MemberView, OrderView
from rlmux.policies.planning.lookahead import WorkItem

MAX_WORK_ITEMS = 96
"""More would leave time for one schedule only: crowds look ahead less far."""
_SHORTEST_S = 1e-6


@dataclass(slots=True)
class Upcoming:
    """Tasks, and what each of them is."""

    work_items: list[WorkItem] = field(default_factory=list)
    works: dict[int, ReadyWork] = field(default_factory=dict)
    """Tasks that are ready."""
    orders: dict[int, OrderView] = field(default_factory=dict)
    """Tasks that run."""
    shares: dict[PipelineId, list[int]] = field(default_factory=dict)
    """Unfinished shares of each pipeline's open rollout."""
    later_shares: dict[PipelineId, list[list[int]]] = field(default_factory=dict)
    """Shares of each of its next rollouts."""
    device_of: dict[int, DeviceId] = field(default_factory=dict)
    """Of a share."""
    numbers: dict[DeviceId, int] = field(default_factory=dict)
    """Of the group's devices, as work_items name them."""

    def is_fresh(self, index: int) -> bool:
        """A share that has not begun."""
        return index in self.works and not self.works[index].is_continuation

    kept: tuple[tuple[int, ...], ...] = ()
    num_kept: tuple[float, ...] = ()
    """As of `Problem`; () where all states fit all devices, or switches take no time."""

    def add(self, task: WorkItem) -> int:
        self.work_items.append(task)
        return len(self.work_items) - 1


def upcoming(view: GroupView) -> Upcoming:
    """The group's work items."""
    members = view.members
    numbers: dict[DeviceId, int] = {}
    for member in members:
        for device in member.rollout_devices + member.train_devices:
            numbers.setdefault(device, len(numbers))
    ahead = Upcoming(numbers=numbers)
    ready: dict[PipelineId, list[ReadyWork]] = {member.id: [] for member in members}
    running: dict[PipelineId, list[OrderView]] = {member.id: [] for member in members}
    for work in view.ready:
        ready[work.pipeline].append(work)
    for order in view.running:
        running[order.pipeline].append(order)
    solos = [solo_step_s(member) for member in members]
    longest_s = max(solos, default=0.0)
    per_step = sum(len(member.rollout_devices) + 1 for member in members)
    for number, (member, solo_s) in enumerate(zip(members, solos, strict=True)):
        num_steps = min(3, max(1, round(longest_s / solo_s))) if solo_s > 0 else 1
        if per_step * (num_steps + 1) > MAX_WORK_ITEMS:
            num_steps = 1 if 2 * per_step <= MAX_WORK_ITEMS else 0
        _Member(view, ahead, member, number, numbers, ready[member.id], running[member.id]).add(num_steps)
    if any(task.switch_s for task in ahead.work_items):
        _add_kept(view, ahead, numbers)
    return ahead


def _add_kept(view: GroupView, ahead: Upcoming, numbers: Mapping[DeviceId, int]) -> None:
    """Whose states are where, as far as there is no room for all."""
    num_kept = tuple(view.num_kept(device) for device in numbers)
    if all(count == math.inf for count in num_kept):
        return
    number_of = {member.id: number for number, member in enumerate(view.members)}
    ahead.num_kept = num_kept
    ahead.kept = tuple(
        tuple(
            state_number(number_of[pipeline], phase)
            for pipeline, phase in reversed(view.residents(device))
            if pipeline in number_of
        )
        for device in numbers
    )


def state_number(pipeline: int, phase: Phase) -> int:
    return 2 * pipeline + (phase is Phase.TRAIN)


def decode_kind(num_active: int | None) -> str:
    """The character of decoding so many sequences; None: nothing is known yet."""
    return SubStage.TAIL_DECODE if num_active is not None and num_active < DENSE_DECODE_MIN else SubStage.DENSE_DECODE


def is_idle(order: OrderView) -> bool:
    """It decodes nothing: every trajectory that has a slot waits for its environment."""
    return order.num_active == 0 and order.num_waiting_for_env > 0


def solo_step_s(member: MemberView) -> float:
    """A step of it with its devices for itself."""
    estimates = member.estimates
    return (estimates.share_s if member.rollout_devices else 0.0) + estimates.train_s


@dataclass(slots=True)
class _Member:
    """Adds one pipeline's work_items."""

    view: GroupView
    ahead: Upcoming
    member: MemberView
    number: int
    numbers: dict[DeviceId, int]
    ready: list[ReadyWork]
    running: list[OrderView]

    def add(self, num_steps: int) -> None:
        """What is under way, then so many steps more."""
        member = self.member
        pipeline = member.pipeline
        estimates = member.estimates
        train_devices = tuple(self.numbers[device] for device in member.train_devices)
        trains: dict[int, int] = {}
        last_train = self._add_training(estimates, train_devices, trains)
        first_train = min(trains, default=member.published_version + 1)
        rollouts = self._add_open_shares(estimates)
        step = member.rollout_step
        if rollouts or member.is_rollout_open:
            last_train = self._add_train(step, rollouts, estimates, train_devices, trains, last_train)
        else:
            for done in range(first_train, step + 1):
                if done not in trains and done > member.published_version:
                    last_train = self._add_train(done, [], estimates, train_devices, trains, last_train)
        last = pipeline.num_steps if pipeline.num_steps is not None else math.inf
        for ahead_by in range(1, num_steps + 1):
            following = step + ahead_by
            if following > last:
                break
            needs = list(rollouts)
            trained = trains.get(following - 1 - pipeline.staleness)
            if trained is not None:
                needs.append(trained)
            rollouts = [
                self.ahead.add(
                    WorkItem(
                        pipeline=self.number,
                        kind=decode_kind(estimates.peak),
                        devices=(self.numbers[device],),
                        seconds=max(estimates.share_s, _SHORTEST_S),
                        tail_s=estimates.tail_s,
                        needs=tuple(needs),
                        state=state_number(self.number, Phase.ROLLOUT),
                        switch_s=estimates.switch_s(Phase.ROLLOUT),
                    )
                )
                for device in member.rollout_devices
            ]
            self.ahead.later_shares.setdefault(member.id, []).append(rollouts)
            last_train = self._add_train(following, rollouts, estimates, train_devices, trains, last_train)

    def _add_training(self, estimates: StepEstimates, devices: tuple[int, ...], trains: dict[int, int]) -> int | None:
        """The training that is ready or runs, all its later stages included."""
        for order in self.running:
            if order.phase is Phase.TRAIN:
                left_s = self._train_left_s(estimates, order.stage) - order.solo_s(self.view.now_s)
                left_s = max(left_s, 0.05 * estimates.train_s)
                index = self._train_task(left_s, devices, (), order.step, is_running=True)
                self.ahead.orders[index] = order
                trains[order.step] = index
                return index
        for work in self.ready:
            if work.phase is Phase.TRAIN:
                index = self._train_task(self._train_left_s(estimates, work.stage), devices, (), work.step)
                self.ahead.works[index] = work
                trains[work.step] = index
                return index
        return None

    def _train_left_s(self, estimates: StepEstimates, stage: Stage) -> float:
        stages = self.member.pipeline.train_stages
        if stage not in stages:
            return estimates.train_s
        return sum(estimates.stage_s(later) for later in stages[stages.index(stage) :])

    def _add_open_shares(self, estimates: StepEstimates) -> list[int]:
        added = []
        by_device = {order.devices[0]: order for order in self.running if order.phase is Phase.ROLLOUT}
        ready = {work.devices[0]: work for work in self.ready if work.phase is Phase.ROLLOUT}
        for device in self.member.unfinished_rollout_devices:
            order, work = by_device.get(device), ready.get(device)
            if order is None and work is None:
                continue  # on its way to a sibling
            num_active, before_s = self.member.live_share(device)
            tail_s = estimates.tail_s
            if order is not None:
                run_s = before_s + order.solo_s(self.view.now_s)
                left_s = estimates.remaining_time(num_active, run_s).median_s
                left_s = _SHORTEST_S if order.is_pausing else max(left_s, 0.02 * estimates.share_s)
            elif work is not None and work.is_continuation:
                left_s = estimates.remaining_time(num_active, before_s).median_s
            else:
                left_s = estimates.share_s
            index = self.ahead.add(
                WorkItem(
                    pipeline=self.number,
                    kind=decode_kind(num_active if num_active is not None else estimates.peak),
                    devices=(self.numbers[device],),
                    seconds=max(left_s, _SHORTEST_S),
                    tail_s=tail_s,
                    needs=() if work is None or not work.is_waiting else (self._add_wait(estimates, work),),
                    is_running=order is not None,
                    state=state_number(self.number, Phase.ROLLOUT),
                    switch_s=estimates.switch_s(Phase.ROLLOUT),
                )
            )
            self.ahead.device_of[index] = device
            if order is not None:
                self.ahead.orders[index] = order
            elif work is not None and not work.is_waiting:
                self.ahead.works[index] = work
            added.append(index)
        self.ahead.shares[self.member.id] = added
        return added

    def _add_wait(self, estimates: StepEstimates, work: ReadyWork) -> int:
        """Until an environment replies, on no device."""
        known_s = estimates.wait_s if estimates.wait_s is not None else 0.1 * estimates.share_s
        left_s = max(known_s - (self.view.now_s - work.since_s), 0.1 * known_s, _SHORTEST_S)
        return self.ahead.add(WorkItem(pipeline=self.number, kind="wait", devices=(), seconds=left_s, is_running=True))

    def _add_train(
        self,
        step: int,
        rollouts: list[int],
        estimates: StepEstimates,
        devices: tuple[int, ...],
        trains: dict[int, int],
        last_train: int | None,
    ) -> int:
        if step in trains:
            return trains[step]
        needs = tuple(rollouts) if last_train is None else (*rollouts, last_train)
        trains[step] = self._train_task(estimates.train_s, devices, needs, step)
        return trains[step]

    def _train_task(
        self, seconds: float, devices: tuple[int, ...], needs: tuple[int, ...], step: int, *, is_running: bool = False
    ) -> int:
        return self.ahead.add(
            WorkItem(
                pipeline=self.number,
                kind=SubStage.UPDATE,
                devices=devices,
                seconds=max(seconds, _SHORTEST_S),
                needs=needs,
                is_running=is_running,
                deadline_s=self._deadline_s(step),
                state=state_number(self.number, Phase.TRAIN),
                switch_s=self.member.estimates.switch_s(Phase.TRAIN),
            )
        )

    def _deadline_s(self, step: int) -> float | None:
        """When the step must have ended to keep the SLO, from now; on-policy pipelines only."""
        member = self.member
        slo = member.pipeline.slo_slowdown
        if slo == math.inf or member.pipeline.staleness or step < member.rollout_step:
            return None
        solo_s = solo_step_s(member)
        return member.step_began_s - self.view.now_s + (step - member.rollout_step + 1) * slo * solo_s
