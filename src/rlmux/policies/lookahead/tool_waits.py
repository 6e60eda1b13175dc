"""Devices of shards that wait for their environments: they go to work that could start, and the tools go on
meanwhile."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rlmux.core.decision.plan import GroupPlan, PauseOrder
from rlmux.core.decision.views import GroupView, OrderView
from rlmux.core.model import DeviceId, Phase
from rlmux.core.work import ReadyWork
from rlmux.policies.lookahead.forecast import is_idle


def yield_devices(plan: GroupPlan) -> None:
    """Pause idle shards on devices that ready work could then start on.

    Not where their environments are known to reply before the states have been switched to and fro.
    """
    idle = {order.devices[0]: order for order in plan.running if order.phase is Phase.ROLLOUT and is_idle(order)}
    if not idle:
        return
    given: set[DeviceId] = set()
    for work in plan.ready:
        needed = [device for device in work.devices if not plan.is_free((device,))]
        if work.is_waiting or not needed or not all(device in idle for device in needed) or given & set(needed):
            continue
        if not _is_worth_switching(plan, work, [idle[device] for device in needed]):
            continue
        given.update(needed)
        for device in needed:
            if not idle[device].is_pausing:
                plan.choose(PauseOrder(order=idle[device].id))


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
