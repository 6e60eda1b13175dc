"""Fixed ways of running pipelines on shared devices, without foresight: what `jigsaw` is compared with.

    serial          whole devices, one phase at a time, first come first served
    mux-rollouts    two rollouts share a device, training has it alone           (MuxServe for rollouts only)
    mux-training    a rollout and a training share a device, rollouts do not
    mux-all         every pair that was measured to help, at once

All start ready work as soon as their rule allows it, continuations and older work first; no shard migrates.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from rlmux.core.decision.plan import GroupPlan
from rlmux.core.decision.policy import Policy
from rlmux.core.estimation.colocation import NO_SHARING, SharingTable
from rlmux.core.model import DeviceId, Phase, Pipeline
from rlmux.core.placement.choice import PlacementChoice, Refusal
from rlmux.core.placement.view import PlacementView
from rlmux.core.settle.plain_order import age
from rlmux.core.work import ReadyWork
from rlmux.policies.lookahead.dispatching import start_oldest_first
from rlmux.policies.lookahead.side_by_side import start_side_by_side
from rlmux.policies.search.shared_placement import MAX_MEMBERS, place_on_shared_nodes


@dataclass(frozen=True, slots=True, kw_only=True)
class StaticSharing(Policy):
    name: str = field()
    reacts_to_progress: bool = True
    sharing: SharingTable = NO_SHARING
    """Pairs that were measured to help on these devices."""
    rollouts_share: bool = False
    """Whether two rollouts may share a device."""
    training_shares: bool = False
    """Whether a training may share a device with a rollout."""
    max_members: int = MAX_MEMBERS

    def place(self, pipeline: Pipeline, view: PlacementView) -> PlacementChoice | Refusal:
        return place_on_shared_nodes(pipeline, view, max_members=self.max_members)

    def dispatch(self, plan: GroupPlan) -> GroupPlan:
        if plan.has_arriving_work:  # the sub-stages of another program are not known
            return plan.choose(*start_oldest_first(plan))
        phases: dict[DeviceId, list[Phase]] = {}
        for order in plan.running:
            for device in order.devices:
                phases.setdefault(device, []).append(order.phase)
        allowed = []
        for work in sorted((work for work in plan.ready if not work.is_waiting), key=age):
            if all(self._may_join(work, phases.get(device, [])) for device in work.devices):
                allowed.append(work)
                for device in work.devices:
                    phases.setdefault(device, []).append(work.phase)
        start_side_by_side(plan, allowed, self.sharing)
        return plan

    def _may_join(self, work: ReadyWork, there: list[Phase]) -> bool:
        if not there:
            return True
        if len(there) > 1 or work.phase is there[0] is Phase.TRAIN:
            return False
        if work.phase is there[0]:
            return self.rollouts_share
        return self.training_shares


def serial() -> StaticSharing:
    return StaticSharing(name="serial")


def mux_rollouts() -> StaticSharing:
    return StaticSharing(name="mux-rollouts", rollouts_share=True)


def mux_training() -> StaticSharing:
    return StaticSharing(name="mux-training", training_shares=True)


def mux_all() -> StaticSharing:
    return StaticSharing(name="mux-all", rollouts_share=True, training_shares=True)
