"""What drivers, displays and tests may read of a scheduler: live, read-only, nothing else.

scheduler.query ── status, orders, ready_work, ... ─▶ frozen values and plain numbers
                ── placement ─▶ PlacementView
                ── pipeline(id) ─▶ MemberView
"""

from __future__ import annotations

from collections.abc import Sequence

from rlmux.core.decision.views import GroupView, MemberView, OrderView
from rlmux.core.model import DeviceId, OrderId, Pipeline, PipelineId, PipelineStatus
from rlmux.core.placement.view import PlacementView
from rlmux.core.queue.quotas import too_many_waiting
from rlmux.core.state import SchedulerState
from rlmux.core.work import ReadyWork, WorkState


class SchedulerQuery:
    """Answers from the scheduler's state and offers no way to change it."""

    __slots__ = ("_placement", "_state")

    def __init__(self, state: SchedulerState, placement: PlacementView) -> None:
        self._state = state
        self._placement = placement

    @property
    def placement(self) -> PlacementView:
        """Groups, nodes and costs."""
        return self._placement

    @property
    def now_s(self) -> float:
        """Time of the last event."""
        return self._state.now_s

    @property
    def num_policy_faults(self) -> int:
        """Decisions of the policy that failed, and that the plain order of work stood in for."""
        return self._state.num_policy_faults

    @property
    def first_policy_fault(self) -> str:
        """Error of the first of them, in one line; empty where there is none."""
        return next((text for _, text in self._state.policy_faults), "")

    # pipelines

    def pipelines(self) -> tuple[PipelineId, ...]:
        """Every pipeline that was submitted, in that order."""
        return tuple(self._state.runs)

    def __contains__(self, pipeline: PipelineId) -> bool:
        """Whether the pipeline was submitted."""
        return pipeline in self._state.runs

    def status(self, pipeline: PipelineId) -> PipelineStatus:
        return self._state.runs[pipeline].status

    def is_held(self, pipeline: PipelineId) -> bool:
        """Whether its user keeps it from starting, or from going on once it is parked."""
        return self._state.runs[pipeline].admission.is_held

    def reason(self, pipeline: PipelineId) -> str:
        """Why the pipeline waits, failed or was refused; empty otherwise."""
        return self._state.runs[pipeline].admission.reason

    @property
    def first_in_queue(self) -> PipelineId | None:
        """The waiting pipeline that a start is reserved for; None where there is none."""
        reservation = self._state.reservation
        return None if reservation is None else reservation.pipeline

    def reserved_start_s(self, pipeline: PipelineId) -> float:
        """Earliest start that was ever reserved for the pipeline; infinite where none was, or its time is unknown."""
        return self._state.runs[pipeline].admission.reserved_start_s

    def pipeline(self, pipeline: PipelineId) -> MemberView:
        """Where the pipeline is in its steps."""
        return MemberView(self._state.runs[pipeline])

    def too_many_waiting(self, coming: Sequence[Pipeline], expected: Sequence[Pipeline]) -> str:
        """Why pipelines that are `coming` may not be submitted now, by quotas; empty where they may. `expected`: those
        that were taken before and are not submitted yet."""
        return too_many_waiting(
            self._state, coming, [pipeline for pipeline in expected if pipeline.id not in self._state.runs]
        )

    def shard_state(self, pipeline: PipelineId, device: DeviceId) -> WorkState | None:
        """The state of the pipeline's shard on the device; None where no rollout is open or the device is not its."""
        shard = self._state.runs[pipeline].step.shards.get(device)
        return None if shard is None else shard.state

    def is_idle(self) -> bool:
        """Whether every pipeline that was submitted is over."""
        state = self._state
        return not (state.waiting or state.groups or state.waiting_fillers or state.fillers.members)

    def groups(self) -> tuple[GroupView, ...]:
        """Every co-execution group, oldest first."""
        return tuple(GroupView(self._state, group) for group in self._state.groups.values())

    # work

    def ready_work(self) -> tuple[ReadyWork, ...]:
        """Work that could start now, of every group."""
        return tuple(work for group in self._state.groups.values() for work in group.ready.values())

    def orders(self) -> tuple[OrderView, ...]:
        """Every order that has not ended, oldest first."""
        return tuple(OrderView(order) for order in self._state.orders.values())

    def has_orders(self) -> bool:
        return bool(self._state.orders)

    def has_order(self, order: OrderId) -> bool:
        """Whether the order was given and has not ended."""
        return order in self._state.orders

    # devices

    def devices(self) -> tuple[DeviceId, ...]:
        """Every device that a pipeline was ever pinned to."""
        return tuple(self._state.devices)

    def held_fraction(self, device: DeviceId) -> float:
        """The part of the device that orders hold, 0.0 to 1.0."""
        held = self._state.devices[device]
        return 1.0 if held.filler is not None else sum(held.orders.values())

    def num_residents(self, device: DeviceId) -> int:
        """States that are kept on the device."""
        return len(self._state.devices[device].residents)
