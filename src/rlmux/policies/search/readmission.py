"""Placed pipelines that are placed again: together with others, or by themselves.

place_again   no group took it when it came ─▶ its mean or spread has changed, or others wait for nodes
spread_out    nodes that are paid anyway have become free, and none waits for them
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from rlmux.core.model import Phase, Pipeline
from rlmux.core.placement.choice import FruitlessSearch, PlacementChoice, Relocation
from rlmux.core.placement.group_load import GroupLoad, cold_start_s, solo_s
from rlmux.core.placement.placement_ledger import PlacementLedger
from rlmux.core.placement.view import PlacementView
from rlmux.policies.search.candidates import founding
from rlmux.policies.search.economy import budget_left_s
from rlmux.policies.search.slo_repair import Place

MOVE_WORTH = 4.0
"""Times its cold starts and the step that it waits for that a pipeline's move to nodes of its own must gain."""
UNKNOWN_COLD_S = 30.0
"""Cold starts of a pipeline for which none are known."""
_NOTICEABLE = 0.02
"""Part of a period by which sharing makes it longer, from which members move to free nodes."""


def place_again(view: PlacementView, place: Place) -> tuple[Relocation | FruitlessSearch, ...]:
    """Relocations of pipelines that are alone to the groups where the policy places them now.

    One that stays alone is tried again when what is expected of it has changed.
    """
    alone = [group.members[0].pipeline for group in view.groups() if group.num_members == 1]
    due = [
        pipeline
        for pipeline in alone
        if (pipeline.slo_probability is not None or view.num_waiting) and not view.was_searched_in_vain((pipeline.id,))
    ]
    if not due:
        return ()
    found: list[Relocation | FruitlessSearch] = []
    with view.trial() as ledger:
        for pipeline in due:
            choice = _group_for(pipeline, ledger, place)
            if choice is None:
                found.append(FruitlessSearch(pipelines=(pipeline.id,)))
            else:
                ledger.relocate(pipeline.id, choice)
                found.append(Relocation(pipeline=pipeline.id, choice=choice))
    return tuple(found)


def spread_out(view: PlacementView) -> tuple[Relocation, ...]:
    """Relocations of members to free nodes of their own, who gains most first, if that outlasts the move."""
    has_free_nodes = all(view.num_free_nodes(phase) >= 1 for phase in (Phase.ROLLOUT, Phase.TRAIN))
    if view.num_waiting or not has_free_nodes or not _slowed(view.groups()):
        return ()
    found: list[Relocation] = []
    with view.trial() as ledger:
        while (move := _next_move(ledger)) is not None:
            ledger.relocate(move.pipeline, move.choice)
            found.append(move)
    return tuple(found)


def _next_move(ledger: PlacementLedger) -> Relocation | None:
    """The member that gains most from free nodes of its own, the youngest of equals; None where none gains enough."""
    best, best_gain_s = None, 0.0
    for group in _slowed(ledger.groups()):
        for member in reversed(group.members):
            gain_s = _gain_s(group, member.pipeline, ledger)
            choice = founding(member.pipeline, PlacementView(ledger)) if gain_s > best_gain_s else None
            if choice is not None:
                best, best_gain_s = Relocation(pipeline=member.pipeline.id, choice=choice), gain_s
    return best


def _slowed(groups: Iterable[GroupLoad]) -> list[GroupLoad]:
    """Groups in which sharing makes a member's steps noticeably longer."""
    return [
        group
        for group in groups
        if len(group.members) > 1
        and not group.is_colocated
        and any(group.slowdown_of(member.pipeline.id) > 1.0 + _NOTICEABLE for member in group.members)
    ]


def _gain_s(group: GroupLoad, pipeline: Pipeline, ledger: PlacementLedger) -> float:
    """Seconds by which its work that is left ends sooner alone, less what its move must gain at least."""
    left = ledger.work_left(pipeline.id)
    num_left = math.inf if left is None else left.num_left
    cold_s = UNKNOWN_COLD_S if pipeline.switch is None else cold_start_s(pipeline)
    slowed_s = (group.slowdown_of(pipeline.id) - 1.0) * solo_s(pipeline)
    if slowed_s <= 0.0:
        return 0.0
    return num_left * slowed_s - MOVE_WORTH * (cold_s + solo_s(pipeline))


def _group_for(pipeline: Pipeline, ledger: PlacementLedger, place: Place) -> PlacementChoice | None:
    """Where the pipeline joins others with time for the move; None where it does not, or others have joined it."""
    if ledger.group_of(pipeline.id).num_members > 1:
        return None
    with ledger.trial():
        ledger.set_aside(pipeline.id)
        choice = place(pipeline, PlacementView(ledger))
    if not isinstance(choice, PlacementChoice) or choice.group is None:
        return None
    with ledger.trial():
        ledger.relocate(pipeline.id, choice)
        period_s = ledger.group_of(pipeline.id).period_s
    return choice if period_s <= budget_left_s(pipeline, ledger.work_left(pipeline.id)) else None
