"""A policy's choices for a group become orders; each is checked here first.

GroupView ──▶ Policy.dispatch ──▶ RunWork | PauseOrder | MigrateWork | ChangeFraction ──▶ Orders, by the step machine

No policy sees fillers. Where one computes on a device that is chosen, it is paused, and the policy chooses
again once it has.
"""

from __future__ import annotations

from rlmux.core.actions import Action, MigrateShard
from rlmux.core.model import Phase
from rlmux.core.parts import Parts
from rlmux.core.state import GroupState
from rlmux.core.views import MarkPlanned, MigrateWork, PauseOrder, RunWork
from rlmux.core.work import ReadyWork


def dispatch(parts: Parts, group: GroupState) -> list[Action]:
    """Ask the policy what of the group starts, pauses or migrates now, and order it.

    Raises PolicyError for a choice that is not allowed.
    """
    if group is parts.state.fillers:
        return []  # `fillers.start` starts their work, once nothing else is left to settle
    if not group.ready and not (parts.policy.reacts_to_progress and group.running):
        return []
    view = parts.groups.view(group)
    actions: list[Action] = []
    is_all_started, planned = True, (group.planned, group.planned_s)
    for choice in parts.policy.dispatch(view):
        if isinstance(choice, RunWork):
            started, orders = _start(parts, group, choice)
            is_all_started &= started
            actions += orders
        elif isinstance(choice, PauseOrder):
            actions += _pause(parts, choice)
        elif isinstance(choice, MigrateWork):
            actions.append(_migrate(parts, choice))
        elif isinstance(choice, MarkPlanned):
            group.planned, group.planned_s = view.look, parts.state.now_s
        else:
            order = parts.orders.named(choice.order)
            actions += parts.orders.change_fraction(order, choice.device_fraction, choice.slowdown)
    if not is_all_started:  # a filler is leaving: then the policy plans again
        group.planned, group.planned_s = planned
    if group.has_requested_migrations:
        parts.steps.drop_requested_migrations(group)
    return actions


def _start(parts: Parts, group: GroupState, choice: RunWork) -> tuple[bool, list[Action]]:
    """Start the work, or have fillers leave its devices for it; returns whether it was started, and the orders."""
    work = choice.work
    if group.ready.get(work.sequence) is not work:
        raise parts.journal.illegal_choice(f"starts {work}, which is not ready")
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


def _pause(parts: Parts, choice: PauseOrder) -> list[Action]:
    order = parts.orders.named(choice.order)
    target = choice.migrate_to
    if target is not None:
        shards = parts.state.runs[order.pipeline].step.shards
        if order.phase is not Phase.ROLLOUT or target not in shards or target in order.devices:
            raise parts.journal.illegal_choice(f"pauses {order} to migrate its shard to {target}")
    return parts.steps.order_pause(order, migrate_to=target)


def _migrate(parts: Parts, choice: MigrateWork) -> MigrateShard:
    run = parts.state.runs.get(choice.pipeline)
    if run is None:
        raise parts.journal.illegal_choice(f"migrates {choice}: no such pipeline was submitted")
    shard = run.step.shards.get(choice.source)
    if shard is None or not shard.is_ready or choice.target not in run.step.shards or choice.target == choice.source:
        raise parts.journal.illegal_choice(f"migrates {choice}: the source must be a ready shard")
    if not parts.state.can_migrate(run, choice.source, choice.target):
        raise parts.journal.illegal_choice(f"migrates {choice}: trajectories are on their way to one that leaves")
    if shard.work.takes_slot:  # its phase begins elsewhere: the device owes it no slot in this cycle
        parts.groups.count_begun(run, Phase.ROLLOUT, choice.source)
    return parts.steps.order_migration(run, shard, choice.target)
