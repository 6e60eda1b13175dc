"""Pipelines that hold nodes of their own by turns, where the policy gives them so.

    waiting pipelines ── policy.give_turns ─▶ who holds which nodes next, and why the others wait
    a pipeline at a step boundary, `turn_s` after it was placed ── policy.give_turns ─▶ it stays, or it is parked

What the policy counts for it is a value made by `new_clock`, which the scheduler stores and hands back. Under a
policy without turns nothing here is called.
"""

from __future__ import annotations

from collections.abc import Mapping

from rlmux.core.decision.policy import Policy, TimeSlice, TurnTaking
from rlmux.core.decision.policy_faults import PolicyFaults
from rlmux.core.model import PipelineId, PipelineKind, PipelineStatus
from rlmux.core.pipeline_run import PipelineRun
from rlmux.core.placement.choice import Refusal
from rlmux.core.placement.own_nodes import on_nodes_of_its_own
from rlmux.core.placement.placement_ledger import PlacementLedger
from rlmux.core.placement.view import PlacementView
from rlmux.core.queue.fair_share import Shares
from rlmux.core.state import SchedulerState


class TimeSlices:
    """Asks the policy who is next; see the module."""

    def __init__(
        self, state: SchedulerState, ledger: PlacementLedger, policy: Policy, shares: Shares, faults: PolicyFaults
    ) -> None:
        self._state = state
        self._ledger = ledger
        self._view = PlacementView(ledger)
        self._turns = policy.turn_taking
        self._shares = shares
        self._faults = faults
        if self._turns is not None:
            state.clock = self._turns.new_clock()

    @property
    def are_taken(self) -> bool:
        """Whether the policy gives nodes by turns."""
        return self._turns is not None

    def next(self) -> list[tuple[PipelineRun, TimeSlice | Refusal]]:
        """What each waiting pipeline gets of the free nodes now, in the order of submission."""
        waiting = self._shares.in_order()
        if self._turns is None or not waiting:
            return []
        answers = self._answers(self._turns, waiting)
        return [(run, answers[run.pipeline.id]) for run in waiting]

    def is_over(self, run: PipelineRun) -> bool:
        """Whether a pipeline at a step boundary leaves its nodes to others; it stays where the policy has it stay."""
        turns, state = self._turns, self._state
        if turns is None or run.nodes.placement is None or not state.waiting:
            return False
        if state.now_s - run.admission.admitted_s < turns.turn_s or run.pipeline.kind is not PipelineKind.PLANNED:
            return False
        if not (waiting := self._shares.in_order()):
            return False
        with self._ledger.trial():
            self._ledger.depart(run.pipeline.id)
            answer = self._answers(turns, [*waiting, run])[run.pipeline.id]
        return isinstance(answer, Refusal) or not answer.is_as_before

    def begin(self, run: PipelineRun) -> None:
        """The pipeline holds nodes from now on."""
        if self._turns is not None and run.nodes.placement is not None:
            self._turns.begin_turn(self._state.clock, run.pipeline.id, run.nodes.placement, self._state.now_s)

    def end(self, run: PipelineRun) -> None:
        """The pipeline leaves its nodes."""
        if self._turns is not None:
            self._turns.end_turn(self._state.clock, run.pipeline.id, self._state.now_s)

    def _answers(self, turns: TurnTaking, runs: list[PipelineRun]) -> Mapping[PipelineId, TimeSlice | Refusal]:
        """The policy's answers, where all can be done; where it fails, nodes of their own in the order of offers."""
        try:
            answers = self._ask(turns, runs)
            with self._ledger.trial():
                for run in runs:
                    answer = answers[run.pipeline.id]
                    if not isinstance(answer, Refusal):
                        self._ledger.admit(run.pipeline, answer.choice)
        except Exception as error:  # a policy may raise anything
            return self._on_nodes_of_their_own(runs, self._faults.note("give_turns", error))
        return answers

    def _on_nodes_of_their_own(self, runs: list[PipelineRun], why: str) -> dict[PipelineId, TimeSlice | Refusal]:
        answers: dict[PipelineId, TimeSlice | Refusal] = {}
        with self._ledger.trial():
            for run in runs:
                choice = on_nodes_of_its_own(run.pipeline, self._ledger, why)
                if isinstance(choice, Refusal):
                    answers[run.pipeline.id] = choice
                else:
                    self._ledger.admit(run.pipeline, choice)
                    answers[run.pipeline.id] = TimeSlice(choice, is_as_before=True)
        return answers

    def _ask(self, turns: TurnTaking, runs: list[PipelineRun]) -> Mapping[PipelineId, TimeSlice | Refusal]:
        claimants = tuple((run.pipeline, run.nodes.placement) for run in sorted(runs, key=lambda run: run.sequence))
        pipelines = tuple(run.pipeline for run in self._state.runs.values() if _claims_time(run))
        return turns.give_turns(self._state.clock, claimants, pipelines, self._state.now_s, self._view)


def _claims_time(run: PipelineRun) -> bool:
    """Whether the pipeline is not over, and its user does not hold it."""
    is_over = run.status not in (PipelineStatus.WAITING, PipelineStatus.RUNNING)
    return not (is_over or run.admission.is_held or run.is_filler)
