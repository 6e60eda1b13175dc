"""Tails of rollouts leave nodes of several GPUs to the next member, where a device is such a node.

    node   [ A dense ][ B dense, 7/8 of it ][ B dense ]
           [         ][ A's tail, 1/8      ]              A's training begins after its tail

A tail leaves once three things hold: no more trajectories are left than its group's meta-iteration is shortest with
(`core/estimation/tail_gain.py`), the member whose slot is next waits for the node, and the freed part of the node is
worth more for the rest of the rollout than the rollout grows. Where each GPU is a device of its own, shards migrate
instead (`migration.py`).
"""

from __future__ import annotations

from rlmux.core.decision.plan import ChangeFraction, GroupPlan
from rlmux.core.decision.views import GroupView, OrderView
from rlmux.core.estimation.tail_gain import is_tail
from rlmux.core.model import Phase, Stage

_ROUNDING = 1e-9


def share_nodes_with_tails(plan: GroupPlan) -> None:
    """Let tails leave their nodes now, and give what they have left, or ended on, to the rollout beside them."""
    if plan.num_members < 2:
        return
    for order in plan.running:
        if order.phase is not Phase.ROLLOUT or order.is_pausing:
            continue
        pipeline = plan.pipeline(order.pipeline)
        if is_tail(pipeline, order.device_fraction):
            continue
        slowdown = _slowdown_of_tail(plan, order)
        if slowdown is not None and pipeline.tail is not None:
            fraction = pipeline.tail.device_fraction
            plan.choose(ChangeFraction(order=order.id, device_fraction=fraction, slowdown=slowdown))
        elif order.device_fraction < 1.0 - _ROUNDING:
            fraction = min(1.0, order.device_fraction + plan.free_fraction(order.devices[0]))
            if fraction > order.device_fraction + _ROUNDING:
                plan.choose(ChangeFraction(order=order.id, device_fraction=fraction, slowdown=1.0 / fraction))


def _slowdown_of_tail(view: GroupView, order: OrderView) -> float | None:
    """Expected slowdown of the rollout from now on if its tail leaves its node; None where it is to stay."""
    tail, num_active = view.pipeline(order.pipeline).tail, order.num_active
    if tail is None or num_active is None or not view.tail_left:
        return None
    first, now = tail.at(view.tail_left), tail.at(num_active)
    if first is None or now is None or num_active > first.num_left or not _is_awaited(view, order):
        return None
    estimates = next(member.estimates for member in view.members if member.id == order.pipeline)
    left_s = estimates.shard_s - order.solo_s(view.now_s)
    growth_s = now.growth * estimates.shard_s
    if left_s * (1.0 - tail.device_fraction) <= growth_s:
        return None
    return (left_s + growth_s) / left_s


def _is_awaited(view: GroupView, order: OrderView) -> bool:
    """Whether another member's rollout is ready, and next in the cycle on the order's node."""
    return any(
        work.stage is Stage.GENERATE
        and work.pipeline != order.pipeline
        and not work.is_waiting
        and work.devices == order.devices
        and (work.is_continuation or view.is_next_in_cycle(work))
        for work in view.ready
    )
