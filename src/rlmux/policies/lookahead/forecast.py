"""The near future of a group as work items for the look-ahead: what runs, what is ready, and the steps after.

    a pipeline of staleness k     shard on worker 0   prefill ─▶ dense ─▶ tail ─┐
                                  shard on worker 1   prefill ─▶ dense ─▶ tail ─┴─▶ reward ─▶ reference ─▶ old log-probs
                                  shards of step n + 1 + k  ◀── publish ◀── update ◀──────────────────────────────┘

A shard is one work item, and so is each stage of training; a reward and a publication are waits that hold no device.
Shards of step n + 1 come after those of step n, and so does training.

Running work comes with what is left of it by the live active count; later steps are as the last ones were. Every
pipeline is looked ahead to about the same time, the end of the longest one's next step.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from itertools import accumulate

from rlmux.core.decision.views import GroupView, MemberView, OrderView
from rlmux.core.estimation.colocation import sub_stage_in
from rlmux.core.estimation.estimates import StepEstimates, StepPlan
from rlmux.core.model import (
    SUB_STAGE_BY_STAGE,
    DeviceId,
    Phase,
    PipelineId,
    Stage,
    SubStage,
    decode_sub_stage,
)
from rlmux.core.work import ReadyWork
from rlmux.policies.lookahead.problem import WorkItem

MAX_WORK_ITEMS = 96
"""More would leave time for one schedule only: crowds look ahead less far."""
_SHORTEST_S = 1e-6


@dataclass(slots=True)
class Forecast:
    """Work items, and what each of them is; an index is its position in `work_items`."""

    work_items: list[WorkItem] = field(default_factory=list)
    works: dict[int, ReadyWork] = field(default_factory=dict)
    """Ready work of each item that is ready, by index."""
    orders: dict[int, OrderView] = field(default_factory=dict)
    """Order of each item that runs, by index."""
    shards: dict[PipelineId, list[int]] = field(default_factory=dict)
    """Indices of the unfinished shards of each pipeline's open rollout."""
    continued: set[int] = field(default_factory=set)
    """Indices of training stages after the first of their step: no phase begins with them."""
    later_shards: dict[PipelineId, list[list[int]]] = field(default_factory=dict)
    """Indices of the shards of each of a pipeline's next rollouts."""
    device_of: dict[int, DeviceId] = field(default_factory=dict)
    """Device of each shard, by index."""
    device_numbers: dict[DeviceId, int] = field(default_factory=dict)
    """Number of each of the group's devices in the work items."""
    kept: tuple[tuple[int, ...], ...] = ()
    num_kept: tuple[float, ...] = ()
    """The fields of the same names of `Problem`; () where all states fit all devices, or switches take no time."""

    def add(self, item: WorkItem) -> int:
        """Append the work item; returns its index."""
        self.work_items.append(item)
        return len(self.work_items) - 1

    def is_fresh(self, index: int) -> bool:
        """Whether the item is a ready shard that has not begun."""
        return index in self.works and not self.works[index].is_continuation


def forecast_group(view: GroupView, *, is_due_by_mean: bool = False, splits_training: bool = True) -> Forecast:
    """What the members run, have ready and will do in their next steps.

    `is_due_by_mean`: a step is due when the mean of all its pipeline's steps would break the SLO, as cycle slots have
    it; else each step is due by itself. `splits_training`: whether other work may come between two stages of training.
    """
    members = view.members
    numbers: dict[DeviceId, int] = {}
    for member in members:
        for device in member.rollout_devices + member.train_devices:
            numbers.setdefault(device, len(numbers))
    forecast = Forecast(device_numbers=numbers)
    ready: dict[PipelineId, list[ReadyWork]] = {member.id: [] for member in members}
    running: dict[PipelineId, list[OrderView]] = {member.id: [] for member in members}
    for work in view.ready:
        ready[work.pipeline].append(work)
    for order in view.running:
        running[order.pipeline].append(order)
    solos = [solo_step_s(member) for member in members]
    longest_s = max(solos, default=0.0)
    per_step = sum(
        len(member.rollout_devices) + (len(member.pipeline.train_stages) if splits_training else 1)
        for member in members
    )
    for number, (member, solo_s) in enumerate(zip(members, solos, strict=True)):
        num_steps = min(3, max(1, round(longest_s / solo_s))) if solo_s > 0 else 1
        if per_step * (num_steps + 1) > MAX_WORK_ITEMS:
            num_steps = 1 if 2 * per_step <= MAX_WORK_ITEMS else 0
        works, orders = ready[member.id], running[member.id]
        _MemberForecast(view, forecast, member, number, works, orders, is_due_by_mean, splits_training).add(num_steps)
    if any(item.switch_s for item in forecast.work_items):
        _add_kept_states(view, forecast)
    return forecast


def _add_kept_states(view: GroupView, forecast: Forecast) -> None:
    """Which states are on which device, as far as there is no room for all."""
    devices = forecast.device_numbers
    num_kept = tuple(view.num_kept(device) for device in devices)
    if all(count == math.inf for count in num_kept):
        return
    number_of = {member.id: number for number, member in enumerate(view.members)}
    forecast.num_kept = num_kept
    forecast.kept = tuple(
        tuple(
            state_number(number_of[pipeline], phase)
            for pipeline, phase in reversed(view.residents(device))
            if pipeline in number_of
        )
        for device in devices
    )


def state_number(pipeline: int, phase: Phase) -> int:
    """The number by which work items name a pipeline's state for a phase."""
    return 2 * pipeline + (phase is Phase.TRAIN)


def rollout_sub_stage(member: MemberView, num_active: int | None) -> SubStage:
    """The sub-stage of a shard of so many sequences; None: it has not begun to decode."""
    threshold = member.dense_threshold
    if num_active is None or threshold is None:
        return member.estimates.sub_stages(threshold)[0][1]
    return decode_sub_stage(num_active, threshold)


def sub_stage_of(member: MemberView, order: OrderView) -> SubStage:
    """The sub-stage that the order is in now."""
    return SUB_STAGE_BY_STAGE.get(order.stage) or rollout_sub_stage(member, order.num_active)


def ready_sub_stage(member: MemberView, work: ReadyWork) -> SubStage:
    """The sub-stage that ready work begins with; a shard that has not begun begins as the last ones did."""
    num_active = member.live_shard(work.devices[0])[0] if work.is_continuation else None
    return SUB_STAGE_BY_STAGE.get(work.stage) or rollout_sub_stage(member, num_active)


def name_of_order(member: MemberView, order: OrderView) -> str:
    """Name in a SharingTable of the sub-stage that the order is in now."""
    return sub_stage_in(sub_stage_of(member, order), member.pipeline.base_of(order.phase))


def name_of_work(member: MemberView, work: ReadyWork) -> str:
    """Name in a SharingTable of the sub-stage that ready work begins with."""
    return sub_stage_in(ready_sub_stage(member, work), member.pipeline.base_of(work.phase))


def is_idle(order: OrderView) -> bool:
    """Whether it decodes nothing: every trajectory that has a slot waits for its environment."""
    return order.num_active == 0 and order.num_waiting_for_env > 0


def solo_step_s(member: MemberView) -> float:
    """Seconds of one of its steps alone on its devices."""
    estimates = member.estimates
    return (estimates.shard_s if member.rollout_devices else 0.0) + estimates.train_s


@dataclass(slots=True)
class _MemberForecast:
    """Adds one pipeline's work items to the forecast."""

    view: GroupView
    forecast: Forecast
    member: MemberView
    number: int
    """The pipeline's number in the work items."""
    ready: list[ReadyWork]
    running: list[OrderView]
    is_due_by_mean: bool
    """Whether what its earlier steps took less, or more, counts for the next."""
    splits_training: bool
    """Whether each stage of training is a work item of its own."""
    estimates: StepEstimates = field(init=False)
    plan: StepPlan = field(init=False)
    tail_s: float = field(init=False)
    train_devices: tuple[int, ...] = field(init=False)
    trains: dict[int, int] = field(default_factory=dict)
    """Index of each step's last stage of training."""
    last_train: int | None = None
    """Index of the training that was added last; the next one needs it."""

    def __post_init__(self) -> None:
        estimates = self.estimates = self.member.estimates
        self.plan, self.tail_s = self.member.step_plan, estimates.tail_s
        self.train_devices = tuple(self.forecast.device_numbers[device] for device in self.member.train_devices)

    def add(self, num_steps: int) -> None:
        """Add what is under way, then so many steps more."""
        member = self.member
        self._add_present_training()
        first_train = min(self.trains, default=member.published_version + 1)
        shards = self._add_open_shards()
        step = member.rollout_step
        if shards or member.is_rollout_open:
            self._add_training(step, shards)
        else:
            for generated in range(first_train, step + 1):
                if generated not in self.trains and generated > member.published_version:
                    self._add_training(generated, [])
        last_step = member.pipeline.num_steps if member.pipeline.num_steps is not None else math.inf
        for following in range(step + 1, step + num_steps + 1):
            if following > last_step:
                break
            shards = self._add_later_rollout(following, shards)
            self._add_training(following, shards)

    def _add_present_training(self) -> None:
        """Add the training that is ready or runs, all its later stages included."""
        for order in self.running:
            if order.phase is Phase.TRAIN:
                run_s = order.solo_s(self.view.now_s)
                first = self._add_training_from(order.stage, order.step, (), is_running=True, run_s=run_s)
                self.forecast.orders[first] = order
                return
        for work in self.ready:
            if work.phase is Phase.TRAIN:
                self.forecast.works[self._add_training_from(work.stage, work.step, ())] = work
                return

    def _add_open_shards(self) -> list[int]:
        added = []
        orders = {order.devices[0]: order for order in self.running if order.phase is Phase.ROLLOUT}
        ready = {work.devices[0]: work for work in self.ready if work.phase is Phase.ROLLOUT}
        for device in self.member.unfinished_rollout_devices:
            order, work = orders.get(device), ready.get(device)
            if order is not None or work is not None:  # else it migrates to a sibling
                added.append(self._add_open_shard(device, order, work))
        self.forecast.shards[self.member.id] = added
        return added

    def _add_open_shard(self, device: DeviceId, order: OrderView | None, work: ReadyWork | None) -> int:
        estimates = self.estimates
        num_active, before_s = self.member.live_shard(device)
        if order is not None:
            run_s = before_s + order.solo_s(self.view.now_s)
            left_s = max(estimates.remaining_time(num_active, run_s).median_s, self.member.wall_left_s(device, run_s))
            left_s = _SHORTEST_S if order.is_pausing else max(left_s, 0.02 * self.plan.shard_s)
        elif work is not None and work.is_continuation:
            left_s = estimates.remaining_time(num_active, before_s).median_s
        else:
            left_s = self.plan.shard_s
        needs = () if work is None or not work.is_waiting else (self._add_tool_wait(work),)
        index = self._add_shard(device, left_s, num_active, needs, is_running=order is not None)
        self.forecast.device_of[index] = device
        if order is not None:
            self.forecast.orders[index] = order
        elif work is not None and not work.is_waiting:
            self.forecast.works[index] = work
        return index

    def _add_tool_wait(self, work: ReadyWork) -> int:
        """Add the wait for an environment's reply, which holds no device; returns its index."""
        known_s = self.estimates.wait_s if self.estimates.wait_s is not None else 0.1 * self.plan.shard_s
        left_s = max(known_s - (self.view.now_s - work.since_s), 0.1 * known_s, _SHORTEST_S)
        return self._add_wait(left_s, (), is_running=True)

    def _add_wait(self, seconds: float, needs: tuple[int, ...], *, is_running: bool = False) -> int:
        """Add seconds that hold no device; returns its index."""
        return self.forecast.add(
            WorkItem(
                pipeline=self.number,
                sub_stage=SubStage.TOOL_WAIT,
                devices=(),
                seconds=seconds,
                needs=needs,
                is_running=is_running,
            )
        )

    def _after(self, stage: Stage, needs: tuple[int, ...]) -> tuple[int, ...]:
        """What needs these and a stage that holds no device has to wait for."""
        seconds = dict(self.plan.waits).get(stage)
        return needs if seconds is None else (self._add_wait(seconds, needs),)

    def _add_later_rollout(self, step: int, shards_before: list[int]) -> list[int]:
        """Add a rollout to come, as the last ones were; returns the indices of its shards."""
        needs = tuple(shards_before)
        trained = self.trains.get(step - 1 - self.member.pipeline.staleness)
        if trained is not None:
            needs = (*needs, *self._after(Stage.PUBLISH, (trained,)))
        shards = [self._add_shard(device, self.plan.shard_s, None, needs) for device in self.member.rollout_devices]
        self.forecast.later_shards.setdefault(self.member.id, []).append(shards)
        return shards

    def _add_shard(
        self,
        device: DeviceId,
        seconds: float,
        num_active: int | None,
        needs: tuple[int, ...],
        *,
        is_running: bool = False,
    ) -> int:
        """Add a shard with so many solo seconds left; `num_active`: sequences at its last report, None before it."""
        begun = self.plan.sub_stages[0][1] if num_active is None else rollout_sub_stage(self.member, num_active)
        return self.forecast.add(
            WorkItem(
                pipeline=self.number,
                sub_stage=begun,
                later=self.plan.sub_stages_after(begun, seconds),
                devices=(self.forecast.device_numbers[device],),
                seconds=max(seconds, _SHORTEST_S),
                tail_s=self.tail_s,
                base=self.member.pipeline.rollout_base,
                needs=needs,
                is_running=is_running,
                state=state_number(self.number, Phase.ROLLOUT),
                switch_s=self.estimates.switch_s(Phase.ROLLOUT),
            )
        )

    def _add_training(self, step: int, shards: list[int]) -> None:
        """Add the step's training after its shards and the training before, unless it is there."""
        if step in self.trains:
            self.last_train = self.trains[step]
            return
        needs = self._after(Stage.REWARD, tuple(shards))
        if self.last_train is not None:
            needs = (*needs, self.last_train)
        self._add_training_from(self.member.pipeline.train_stages[0], step, needs)

    def _add_training_from(
        self, stage: Stage, step: int, needs: tuple[int, ...], *, is_running: bool = False, run_s: float = 0.0
    ) -> int:
        """Add this stage, of which `run_s` solo seconds are done, and all after it; returns the index of the first."""
        stages = self.member.pipeline.train_stages
        if stage in stages:
            left = list(self.plan.training[stages.index(stage) :])
        else:  # the SFT warm-up
            left = [(stage, self.estimates.train_s)]
        left[0] = (stage, max(left[0][1] - run_s, 0.05 * left[0][1]))
        items: list[tuple[SubStage, tuple[tuple[float, SubStage], ...], float]]
        if self.splits_training:
            items = [(SUB_STAGE_BY_STAGE[kind], (), seconds) for kind, seconds in left]
        else:
            left_s = reversed([*accumulate(seconds for _, seconds in reversed(left))])
            begins = [(at_s, SUB_STAGE_BY_STAGE[kind]) for at_s, (kind, _) in zip(left_s, left, strict=True)]
            items = [(begins[0][1], tuple(begins[1:]), begins[0][0])]
        first = len(self.forecast.work_items)
        for place, (sub_stage, later_ones, seconds) in enumerate(items):
            index = self.forecast.add(
                WorkItem(
                    pipeline=self.number,
                    sub_stage=sub_stage,
                    later=later_ones,
                    devices=self.train_devices,
                    seconds=max(seconds, _SHORTEST_S),
                    base=self.member.pipeline.train_base,
                    needs=needs,
                    is_running=is_running and place == 0,
                    deadline_s=self._deadline_s(step) if place == len(items) - 1 else None,
                    state=state_number(self.number, Phase.TRAIN),
                    switch_s=self.estimates.switch_s(Phase.TRAIN),
                )
            )
            needs = (index,)
            if place:
                self.forecast.continued.add(index)
        self.trains[step] = self.last_train = index
        return first

    def _deadline_s(self, step: int) -> float | None:
        """Seconds from now by which the step must have ended to keep the SLO. With staleness a step is due by the mean
        only: its rollout is opened before the step before it ends."""
        member = self.member
        slo, lag = member.pipeline.slo_slowdown, member.pipeline.staleness
        is_by_mean = self.is_due_by_mean and member.due_s < math.inf
        if slo == math.inf or step < member.rollout_step - lag or (lag and not is_by_mean):
            return None
        solo_s = solo_step_s(member)
        if is_by_mean:
            return member.due_s - self.view.now_s + (step - member.rollout_step) * slo * solo_s
        return member.step_began_s - self.view.now_s + (step - member.rollout_step + 1) * slo * solo_s
