"""Groups that break a member's SLO, mended: by another place for a member, or by more steps per cycle for it.

    a pipeline was placed before its seconds were known ─▶ its own steps were measured ─▶ the group breaks an SLO

    another place     a member, youngest first, where the policy would place it now    both groups keep their SLOs then
    steps per cycle   the fewest for members with an SLO, one for the others           it keeps them then, with a margin
    neither           the group is unchanged, and the scheduler emits it               if it can

A pipeline without an SLO accepts any slowdown: with k steps per cycle for its neighbours it makes one in a cycle, so
none starves. A policy may ask for steps per cycle that are no longer needed to be taken back.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress

from rlmux.core.errors import IllegalTransitionError
from rlmux.core.model import AdmissionKind, Pipeline, PipelineId
from rlmux.core.placement.choice import PlacementChoice, Refusal, Relocation
from rlmux.core.placement.group_load import GroupLoad, Member, slo_budget_s
from rlmux.core.placement.placement_ledger import PlacementLedger
from rlmux.core.placement.view import PlacementView
from rlmux.policies.search.cycle_steps import cycle_rank

SLO_MARGIN = 0.2
"""Part of each SLO that steps per cycle keep in hand where they can: seconds vary from step to step, and hand-overs and
the steps before the pipeline was measured take some of it."""

MAX_STEPS_PER_CYCLE = 8
"""Steps per cycle of a member, at most: one without an SLO makes at least one step for so many of a neighbour's."""
MAX_SLOTS = 24
"""Cycle slots of all members, at most: the exact meta-iteration takes their cube."""

Place = Callable[[Pipeline, PlacementView], PlacementChoice | Refusal]


def mend_slos(
    view: PlacementView, place: Place, *, varies_steps_per_cycle: bool, takes_steps_back: bool = False
) -> tuple[Relocation, ...]:
    """Relocations after which fewer groups break an SLO; () where there is nothing to do, or nothing helps.

    `takes_steps_back`: groups that keep every SLO with fewer steps per cycle than they have get those.
    """
    groups = [group for group in view.uneven_groups() if takes_steps_back or not group.keeps_slos]
    if not groups:
        return ()
    relocations: list[Relocation] = []
    with view.trial() as ledger:
        for group in groups:
            found = None if group.keeps_slos else _to_another_place(group, ledger, place)
            if found is None and varies_steps_per_cycle:
                found = _other_steps(group, ledger)
            if found is not None:
                ledger.relocate(found.pipeline, found.choice)
                relocations.append(found)
    return tuple(relocations)


def _to_another_place(group: GroupLoad, ledger: PlacementLedger, place: Place) -> Relocation | None:
    """A relocation of one member that leaves every group that it touches within its SLOs."""
    if group.num_members == 1:
        return None
    for member in reversed(group.members):
        pipeline = member.pipeline
        with ledger.trial():
            ledger.set_aside(pipeline.id)
            choice = place(pipeline, PlacementView(ledger))
        if not isinstance(choice, Refusal) and _keeps_slos_there(group, member, ledger, choice):
            return Relocation(pipeline=pipeline.id, choice=choice)
    return None


def _keeps_slos_there(group: GroupLoad, member: Member, ledger: PlacementLedger, choice: PlacementChoice) -> bool:
    """Whether the choice is another place for the member, and both groups keep their SLOs then."""
    with ledger.trial():
        try:
            placement, _ = ledger.relocate(member.pipeline.id, choice)
        except IllegalTransitionError:  # it names what the pipeline's own departure removes
            return False
        is_kept = ledger.group(group.id).keeps_slos and ledger.group(placement.group).keeps_slos
        return placement != member.placement and is_kept


def _other_steps(group: GroupLoad, ledger: PlacementLedger) -> Relocation | None:
    """A member's relocation to where it is, with the fewest steps per cycle that keep every SLO with the margin; where
    none do, with those that keep it by the most."""
    if group.is_colocated or group.num_members == 1:
        return None
    now = {member.pipeline.id: member.steps_per_cycle for member in group.members}
    best, best_part = None, 1.0 + 1e-9
    for steps_per_cycle in _steps_to_try(group):
        part = _part_of_slo(group, steps_per_cycle)
        if part < best_part:
            best, best_part = steps_per_cycle, part
        if part <= 1.0 - SLO_MARGIN:
            break
    return None if best is None or best == now else _in_place(group, ledger, best)


def _steps_to_try(group: GroupLoad) -> Iterator[Mapping[PipelineId, int]]:
    """Steps per cycle by member in cyclic order, fewest first: in proportion to budgets, one without an SLO."""
    budgets_s = {member.pipeline.id: slo_budget_s(member.pipeline) for member in group.members}
    least_s = min(budgets_s.values())
    if least_s in (0.0, math.inf):
        return
    for most in range(1, MAX_STEPS_PER_CYCLE + 1):
        counts = {name: max(1, math.ceil(most * least_s / budget_s - 1e-9)) for name, budget_s in budgets_s.items()}
        if sum(counts.values()) > MAX_SLOTS:
            return
        order = group.members if most == 1 else sorted(group.members, key=lambda member: _rank(member, counts))
        yield {member.pipeline.id: counts[member.pipeline.id] for member in order}


def _rank(member: Member, counts: Mapping[PipelineId, int]) -> tuple[int, float]:
    return cycle_rank(counts[member.pipeline.id], member.phase_load.solo_s)


def _part_of_slo(group: GroupLoad, steps_per_cycle: Mapping[PipelineId, int]) -> float:
    """Seconds of the meta-iteration over the longest that keeps every SLO: 1 or less where all are kept."""
    reach_s = [slo_budget_s(member.pipeline) * steps_per_cycle[member.pipeline.id] for member in group.members]
    return group.period_with_steps(steps_per_cycle) / min(reach_s)


def _in_place(
    group: GroupLoad, ledger: PlacementLedger, steps_per_cycle: Mapping[PipelineId, int]
) -> Relocation | None:
    """Carried by the first member whose nodes others are pinned to too: they outlast its departure for a moment."""
    for member in group.members:
        choice = PlacementChoice(
            kind=AdmissionKind.DIRECT,
            group=group.id,
            rollout_nodes=member.placement.rollout_nodes,
            train_nodes=member.placement.train_nodes,
            steps_per_cycle=tuple(steps_per_cycle.items()),
        )
        with suppress(IllegalTransitionError), ledger.trial():
            ledger.relocate(member.pipeline.id, choice)
            return Relocation(pipeline=member.pipeline.id, choice=choice)
    return None
