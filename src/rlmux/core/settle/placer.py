"""The placement tier: pipelines come to nodes, move to others, and leave them.

    waiting ── place_waiting ─▶ placed ── pass_boundary, to relocate ─▶ placed elsewhere
                                       ── pass_boundary, to park ─▶ waiting
                                       ── release ─▶ over: its nodes are free

What the policy chooses is carried out here: in the ledger first, then in the groups as they run. What follows from it
is marked in `state.dirty`: no function here calls another stage of `Scheduler.settle`.
"""

from __future__ import annotations

from collections.abc import Sequence

from rlmux.core.actions import Action, Admit, Release, Relocate, Remind
from rlmux.core.model import AdmissionKind, PipelineStatus, Placement
from rlmux.core.pipeline_run import PipelineRun
from rlmux.core.placement.choice import FruitlessSearch, PlacementChoice, Refusal, Relocation
from rlmux.core.settle import filler_placement, parking
from rlmux.core.settle.parts import Parts
from rlmux.core.state import GroupState
from rlmux.core.steps.step_machine import PipelineInput


def place_waiting(parts: Parts) -> list[Action]:
    """Try the newcomer, or every pipeline of the queue; emit which are over a quota; have others park for the first."""
    dirty, newcomer = parts.state.dirty, parts.state.dirty.newcomer
    actions: list[Action] = []
    dirty.newcomer = None
    if newcomer is not None and not dirty.queue:
        actions += _try_to_place(parts, newcomer)
        dirty.queue = parts.queue.does_head_fit()
    if dirty.queue:
        actions += _try_all(parts)
    dirty.queue = False
    parking.make_room(parts)
    return actions


def rebalance(parts: Parts) -> None:
    """Let the policy relocate pipelines to nodes that have become free; each is relocated at a step boundary."""
    state, ledger = parts.state, parts.ledger
    state.dirty.balance = False
    state.dirty.expectations = True
    if state.has_tails:
        for group in state.groups.values():
            parts.groups.refresh_tails(group)
    relocations = []
    for choice in _chosen_relocations(parts):
        if isinstance(choice, FruitlessSearch):
            ledger.note_fruitless_search(choice.pipelines)
        else:
            relocations.append(choice)
    if relocations:
        _plan_moves(parts, relocations)
        state.dirty.queue = state.dirty.fillers = True


def begin_admitted(parts: Parts, run: PipelineRun, kind: AdmissionKind) -> list[Action]:
    """Begin a pipeline that was placed in this event."""
    placement = run.nodes.placement
    if placement is None or run.status is not PipelineStatus.RUNNING:
        return []
    begin(parts, run, run.admission.restart_step)
    if run.pipeline.slo_probability is not None:  # its budget has moved: it no longer waits for its first slot
        parts.state.dirty.queue |= parts.queue.does_head_fit()
    parts.state.mark_group(run)
    return [Admit(pipeline=run.pipeline.id, placement=placement, kind=kind)]


def pass_boundary(parts: Parts, run: PipelineRun) -> list[Action]:
    """Park or relocate a pipeline that is between two steps, or open its next rollout."""
    if run.nodes.placement is None or run.status is not PipelineStatus.RUNNING:
        return []
    if run.pipeline.work_arrives:
        if run.nodes.next_placement is None or not parts.batches.are_between(run):
            return []
        actions = _relocate(parts, run)
        parts.batches.open_due(run)
        return actions
    if parking.is_due(parts, run):
        return parking.leave(parts, run)
    if run.nodes.next_placement is None:
        parts.steps.open_rollout(run)
        parts.state.mark_group(run)
        return []
    if run.step.shards or run.step.training.is_open or parts.orders.of(run):
        return []  # the end of one of these comes back here
    actions = _relocate(parts, run)
    parts.steps.open_rollout(run)
    parts.state.mark_group(run)
    return actions


def park(parts: Parts, run: PipelineRun) -> list[Action]:
    """The pipeline has given its devices back: it waits, and its nodes are free."""
    _leave(parts, run)
    return parking.end(parts, run)


def release(parts: Parts, run: PipelineRun) -> list[Action]:
    """The pipeline is over: its nodes go back.

    An older version may still be on its way to rollout workers when the last one is published: that ends here too.
    """
    _leave(parts, run)
    return [Release(pipeline=run.pipeline.id)]


def begin(parts: Parts, run: PipelineRun, restored_step: int) -> None:
    """Let a pipeline that is placed go on from the step whose result is kept."""
    if run.pipeline.work_arrives:
        parts.batches.open_due(run)
    else:
        parts.steps.begin_after(run, restored_step)


def unpin(parts: Parts, run: PipelineRun) -> GroupState:
    """The pipeline leaves its nodes; returns the group that it was a member of."""
    parts.steps.withdraw(run)
    parts.turns.end(run)
    return parts.groups.leave(run)


# ------------------------------------------------------------------ helpers, in the order they are called


def _try_all(parts: Parts) -> list[Action]:
    actions: list[Action] = []
    parts.state.head_tried_s = parts.state.now_s
    if parts.turns.are_taken:
        actions += _give_turns(parts)
    else:
        for run in parts.queue.runs():
            actions += _try_to_place(parts, run)
    for run, refusal in parts.queue.over_quota():
        actions += _refuse(parts, run, refusal) + _remind(parts, run)
    return actions


def _try_to_place(parts: Parts, run: PipelineRun) -> list[Action]:
    """Admit a waiting pipeline, or emit why it waits or never starts; all of them where nodes are held by turns."""
    if parts.turns.are_taken:
        return _give_turns(parts)
    choice = parts.queue.decide(run)
    if isinstance(choice, Refusal):
        return _refuse(parts, run, choice)
    _admit(parts, run, choice)
    return []


def _give_turns(parts: Parts) -> list[Action]:
    actions: list[Action] = []
    for run, answer in parts.turns.next():
        if isinstance(answer, Refusal):
            actions += _refuse(parts, run, answer)
        else:
            _admit(parts, run, answer.choice)
    return actions


def _admit(parts: Parts, run: PipelineRun, choice: PlacementChoice) -> None:
    placement = parts.ledger.admit(run.pipeline, choice)
    parts.queue.start(run)
    parking.forget(run)
    parts.steps.move_pipeline(run, PipelineInput.PLACED)
    parts.expectations.note_placed(run)
    parts.groups.join(run, placement)
    parts.turns.begin(run)
    parts.state.dirty.admitted[run.pipeline.id] = run, choice.kind
    parts.state.dirty.fillers = True


def _refuse(parts: Parts, run: PipelineRun, refusal: Refusal) -> list[Action]:
    if refusal.is_final:
        del parts.state.waiting[run.pipeline.id]
        parts.steps.move_pipeline(run, PipelineInput.REFUSED)
    return parts.queue.refuse(run, refusal)


def _remind(parts: Parts, run: PipelineRun) -> list[Action]:
    """Have the queue looked at when a day or a budget begins anew, where that is what a pipeline waits for."""
    state, again_s = parts.state, parts.shares.quotas.again_s(run)
    if again_s is None or again_s in state.reminders:
        return []
    state.reminders = {at_s: None for at_s in state.reminders if at_s > state.now_s} | {again_s: None}
    return [Remind(at_s=again_s)]


def _chosen_relocations(parts: Parts) -> Sequence[Relocation | FruitlessSearch]:
    """What the policy chooses, where all of it can be done; nothing where it fails."""
    try:
        choices = tuple(parts.policy.rebalance(parts.placement))
        _check_relocations(parts, choices)
    except Exception as error:  # a policy, a user's above all, may raise anything
        parts.faults.note("rebalance", error)
        return ()
    return choices


def _check_relocations(parts: Parts, choices: Sequence[Relocation | FruitlessSearch]) -> None:
    """Try the relocations one after another, each beside those before it. Raises for one that cannot be done."""
    with parts.ledger.trial():
        for choice in choices:
            if isinstance(choice, Relocation):
                parts.ledger.relocate(choice.pipeline, choice.choice)
            elif not isinstance(choice, FruitlessSearch) or not isinstance(choice.pipelines, tuple):
                raise parts.journal.illegal_choice(f"answers {choice!r}; accepted: Relocation and FruitlessSearch")


def _plan_moves(parts: Parts, relocations: list[Relocation]) -> None:
    """Carry the relocations out in the ledger; the pipelines follow at their step boundaries."""
    state, ledger = parts.state, parts.ledger
    for relocation in relocations:  # all in the ledger first: later ones count on the nodes of earlier ones
        run = state.runs[relocation.pipeline]
        placement, _ = ledger.relocate(relocation.pipeline, relocation.choice)
        parts.groups.plan_move(run, placement)
        parts.expectations.note_placed(run)
    runs = [state.runs[name] for name in dict.fromkeys(relocation.pipeline for relocation in relocations)]
    kinds = {relocation.pipeline: relocation.choice.kind for relocation in relocations}
    for run in runs:
        if run.nodes.next_placement == run.nodes.placement:
            parts.groups.plan_move(run, None)
            ledger.finish_relocation(run.pipeline.id)
            parts.groups.refresh_cycle(state.group_of(run))
        elif run.pipeline.id in state.dirty.admitted:
            state.dirty.admitted[run.pipeline.id] = run, kinds[run.pipeline.id]
            _switch_nodes(parts, run)
        elif run.pipeline.work_arrives or not run.step.shards:
            state.dirty.boundaries[run.pipeline.id] = run


def _relocate(parts: Parts, run: PipelineRun) -> list[Action]:
    """Leave the old nodes, join the new ones."""
    placement = _switch_nodes(parts, run)
    expected_s = parts.expectations.step_s(run)
    return [Relocate(pipeline=run.pipeline.id, placement=placement, expected_step_s=expected_s)]


def _switch_nodes(parts: Parts, run: PipelineRun) -> Placement:
    """Leave the old nodes, join the planned ones, which are returned."""
    placement = run.nodes.next_placement
    assert placement is not None
    parts.groups.plan_move(run, None)
    old = unpin(parts, run)
    parts.ledger.finish_relocation(run.pipeline.id)
    parts.groups.refresh_cycle(old)
    parts.groups.join(run, placement)
    parts.state.dirty.groups[old.id] = old
    parts.state.dirty.queue = parts.state.dirty.fillers = True
    return placement


def _leave(parts: Parts, run: PipelineRun) -> None:
    """Take the pipeline off its nodes; what these can be used for is to be settled."""
    parts.state.dirty.fillers = True
    if run.is_filler:
        filler_placement.unpin(parts, run)
        return
    parts.orders.end_all(run)
    group = unpin(parts, run)
    parts.ledger.depart(run.pipeline.id)
    parts.groups.refresh_cycle(group)
    parts.state.dirty.mark_nodes()
    parts.state.dirty.groups[group.id] = group
