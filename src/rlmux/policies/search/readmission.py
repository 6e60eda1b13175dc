"""Pipelines that are alone since little was known of their steps, placed again when more is.

    admitted at the token limit: no group takes so long a step ─▶ its bound follows from its steps now ─▶ placed again
"""

from __future__ import annotations

from rlmux.core.model import Pipeline
from rlmux.core.placement.choice import FruitlessSearch, PlacementChoice, Relocation
from rlmux.core.placement.placement_ledger import PlacementLedger
from rlmux.core.placement.view import PlacementView
from rlmux.policies.search.slo_repair import Place


def place_again(view: PlacementView, place: Place) -> tuple[Relocation | FruitlessSearch, ...]:
    """Relocations of pipelines that are alone to the groups where the policy places them now.

    One that stays alone is tried again when its bound has changed.
    """
    alone = [group.members[0].pipeline for group in view.groups() if group.num_members == 1]
    due = [one for one in alone if one.slo_probability is not None and not view.was_searched_in_vain((one.id,))]
    if not due:
        return ()
    sandbox = view.sandbox()
    found: list[Relocation | FruitlessSearch] = []
    for pipeline in due:
        choice = _group_for(pipeline, sandbox, place)
        if choice is None:
            found.append(FruitlessSearch(pipelines=(pipeline.id,)))
        else:
            sandbox.relocate(pipeline.id, choice)
            found.append(Relocation(pipeline=pipeline.id, choice=choice))
    return tuple(found)


def _group_for(pipeline: Pipeline, ledger: PlacementLedger, place: Place) -> PlacementChoice | None:
    """Where the pipeline joins others; None where it does not, or others have joined it."""
    if ledger.group_of(pipeline.id).num_members > 1:
        return None
    with ledger.trial():
        ledger.set_aside(pipeline.id)
        choice = place(pipeline, PlacementView(ledger))
    return choice if isinstance(choice, PlacementChoice) and choice.group is not None else None
