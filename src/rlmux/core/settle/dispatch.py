"""A policy's choices for a group become orders. All are collected and checked before any is carried out.

GroupPlan ──▶ Policy.dispatch ── each choice ─▶ plan_check ──▶ Decision ──▶ Orders
                                                    └─ or the plain order

A decision that fails, because the policy raises or chooses what is not allowed, changes nothing: it is reported, and
work starts in the plain order instead.

No policy sees fillers. Where one computes on a device that is chosen, it is paused, and the policy chooses
again once it has.
"""

from __future__ import annotations

from functools import partial

from rlmux.core.actions import Action, MigrateShard
from rlmux.core.decision.plan import Decision, GroupPlan, MarkPlanned, MigrateWork, PauseOrder, RunWork
from rlmux.core.model import Phase
from rlmux.core.settle import plan_check
from rlmux.core.settle.parts import Parts
from rlmux.core.settle.plain_order import in_plain_order
from rlmux.core.state import GroupState
from rlmux.core.work import ReadyWork


def dispatch(parts: Parts, group: GroupState) -> list[Action]:
    """Ask the policy what of the group starts, pauses or migrates now, and order it."""
    if group is parts.state.fillers:
        return []  # `filler_placement.start` starts their work, when nothing else is left to settle
    if not group.ready and not (parts.policy.reacts_to_progress and group.running):
        return []
    try:
        decision = _decision(parts, group)
    except Exception as error:  # a policy, a user's above all, may raise anything
        parts.faults.note("dispatch", error)
        decision = tuple(in_plain_order(parts.groups.view(group)))
    actions = _carry_out(parts, group, decision)
    if group.has_requested_migrations:
        parts.steps.drop_requested_migrations(group)
    return actions


def _decision(parts: Parts, group: GroupState) -> Decision:
    """All that the policy chooses now. Raises PolicyError for a choice that is not allowed, and for other choices of a
    policy that is called again with the same plan."""
    check = partial(plan_check.enter, parts)
    decision = parts.policy.dispatch(GroupPlan(parts.state, group, check)).decision
    if parts.repeated is not None:
        again = parts.policy.dispatch(GroupPlan(parts.state, group, check))
        parts.repeated.compare("dispatch", decision, again.decision)
    return decision


def _carry_out(parts: Parts, group: GroupState, decision: Decision) -> list[Action]:
    """Order what was chosen and is allowed."""
    actions: list[Action] = []
    is_all_started, last_plan = True, (group.planned, group.planned_s)
    for choice in decision:
        if isinstance(choice, RunWork):
            started, orders = _start(parts, group, choice)
            is_all_started &= started
            actions += orders
        elif isinstance(choice, PauseOrder):
            actions += parts.steps.order_pause(parts.orders.named(choice.order), migrate_to=choice.migrate_to)
        elif isinstance(choice, MigrateWork):
            actions.append(_migrate(parts, choice))
        elif isinstance(choice, MarkPlanned):
            group.planned, group.planned_s = parts.groups.view(group).look, parts.state.now_s
        else:
            order = parts.orders.named(choice.order)
            actions += parts.orders.change_fraction(order, choice.device_fraction, choice.slowdown)
    if not is_all_started:  # a filler is leaving: then the policy plans again
        group.planned, group.planned_s = last_plan
    return actions


def _start(parts: Parts, group: GroupState, choice: RunWork) -> tuple[bool, list[Action]]:
    """Start the work, or have fillers leave its devices for it; returns whether it was started, and the orders."""
    work = choice.work
    if parts.state.fillers.running and _is_taken_by_fillers(parts, work):
        return False, _send_fillers_away(parts, group, work)
    del group.ready[work.sequence]
    run = parts.state.runs[work.pipeline]
    action = parts.steps.start(run, work, choice.device_fraction, choice.slowdown)
    if work.takes_slot:
        for device in work.devices:
            parts.groups.count_begun(run, work.phase, device)
    return True, [action]


def _is_taken_by_fillers(parts: Parts, work: ReadyWork) -> bool:
    return any(parts.state.devices[device].filler is not None for device in work.devices)


def _send_fillers_away(parts: Parts, group: GroupState, work: ReadyWork) -> list[Action]:
    """Have fillers on devices of the work leave at their next safe point."""
    actions: list[Action] = []
    for device in work.devices:
        filler = parts.state.devices[device].filler
        if filler is not None:
            parts.state.wanted_by[device] = group.id
            actions += parts.steps.order_pause(parts.orders.named(filler))
    return actions


def _migrate(parts: Parts, choice: MigrateWork) -> MigrateShard:
    run = parts.state.runs[choice.pipeline]
    shard = run.step.shards[choice.source]
    if shard.work.takes_slot:  # its phase begins elsewhere: the device owes it no slot in this cycle
        parts.groups.count_begun(run, Phase.ROLLOUT, choice.source)
    return parts.steps.order_migration(run, shard, choice.targets)
