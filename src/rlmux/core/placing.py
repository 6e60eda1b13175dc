"""The placement tier: pipelines come to nodes, move to others, and leave them.

    waiting ── try_to_place ─▶ placed ── relocate, at a step boundary ─▶ placed elsewhere
                                      ── park, at a step boundary ─▶ waiting
                                      ── release ─▶ over: its nodes are free

What the policy chooses is carried out here: in the ledger first, then in the groups as they run. Whatever leaves makes
room, so the queue for admission is tried again, and the policy may relocate others.
"""

from __future__ import annotations

from collections.abc import Callable

from rlmux.core.actions import Admit, Release, Relocate, Remind
from rlmux.core.admission_queue import AdmissionQueue
from rlmux.core.bursts import Bursts
from rlmux.core.expectations import Expectations
from rlmux.core.groups import Groups
from rlmux.core.journal import Journal
from rlmux.core.orders import Orders
from rlmux.core.parking import Parking
from rlmux.core.placement import PlacementLedger
from rlmux.core.placement_choice import FruitlessSearch, PlacementChoice, Refusal
from rlmux.core.placement_view import PlacementView
from rlmux.core.policy import Policy
from rlmux.core.shares import Shares
from rlmux.core.state import GroupState, PipelineRun, SchedulerState
from rlmux.core.step_machine import PipelineInput, StepMachine
from rlmux.core.turns import Turns


class Placing:
    """Carries out placement choices; see the module."""

    def __init__(
        self,
        *,
        state: SchedulerState,
        ledger: PlacementLedger,
        policy: Policy,
        queue: AdmissionQueue,
        groups: Groups,
        orders: Orders,
        steps: StepMachine,
        bursts: Bursts,
        expectations: Expectations,
        parking: Parking,
        shares: Shares,
        turns: Turns,
        journal: Journal,
        dispatch: Callable[[GroupState], None],
    ) -> None:
        """`dispatch`: starts what its policy chooses in a group."""
        self._state = state
        self._ledger = ledger
        self._policy = policy
        self._view = PlacementView(ledger)
        self._queue = queue
        self._groups = groups
        self._orders = orders
        self._steps = steps
        self._bursts = bursts
        self._expectations = expectations
        self._parking = parking
        self._shares = shares
        self._turns = turns
        self._journal = journal
        self._dispatch = dispatch

    def try_to_place(self, run: PipelineRun) -> None:
        """Admit a waiting pipeline, or say why it waits or never starts; all of them where nodes are held by turns."""
        if self._turns.are_taken:
            self._give_turns()
            return
        choice = self._queue.decide(run)
        if isinstance(choice, Refusal):
            self._refuse(run, choice)
        else:
            self._admit(run, choice)

    def _give_turns(self) -> None:
        for run, answer in self._turns.next():
            if isinstance(answer, Refusal):
                self._refuse(run, answer)
            else:
                self._admit(run, answer.choice)

    def _admit(self, run: PipelineRun, choice: PlacementChoice) -> None:
        placement = self._ledger.admit(run.pipeline, choice)
        self._queue.start(run)
        self._parking.forget(run)
        self._steps.move_pipeline(run, PipelineInput.PLACED)
        self._journal.act(Admit(pipeline=run.pipeline.id, placement=placement, kind=choice.kind))
        self._expectations.note_placed(run)
        self._groups.join(run, placement)
        self._turns.begin(run)
        self.begin(run, run.restart_step)
        self._dispatch(self._state.groups[placement.group])

    def _refuse(self, run: PipelineRun, refusal: Refusal) -> None:
        if refusal.is_final:
            del self._state.waiting[run.pipeline.id]
            self._steps.move_pipeline(run, PipelineInput.REFUSED)
        self._queue.tell(run, refusal)

    def begin(self, run: PipelineRun, restored_step: int) -> None:
        """Let a pipeline that is placed go on from the step whose result is kept."""
        if run.pipeline.work_arrives:
            self._bursts.open_due(run)
        else:
            self._steps.begin_after(run, restored_step)

    def place_waiting(self) -> None:
        """Try every pipeline of the queue for admission, say which are over a quota, and have others parked for the
        first."""
        if self._turns.are_taken:
            self._give_turns()
        else:
            for run in self._queue.runs():
                self.try_to_place(run)
        for run, refusal in self._queue.over_quota():
            self._refuse(run, refusal)
            self._remind(run)
        self.make_room()

    def make_room(self) -> None:
        """Have others park for the first in the queue, where it is entitled to their room."""
        for run in self._parking.make_room():
            if not run.shards:  # else what is open comes to its step boundary by itself
                self._steps.open_rollout(run)

    def park(self, run: PipelineRun) -> None:
        """The pipeline has given its devices back: it waits, and its nodes are free."""
        self._orders.end_all(run)
        group = self.unpin(run)
        self._ledger.depart(run.pipeline.id)
        self._groups.refresh_cycle(group)
        self._parking.end(run, self._steps)
        self.place_waiting()
        self.rebalance()
        if group.members:
            self._dispatch(group)

    def _remind(self, run: PipelineRun) -> None:
        """Have the queue looked at when a day or a budget begins anew, where that is what a pipeline waits for."""
        state, again_s = self._state, self._shares.quotas.again_s(run)
        if again_s is not None and again_s not in state.reminders:
            state.reminders = {at_s: None for at_s in state.reminders if at_s > state.now_s} | {again_s: None}
            self._journal.act(Remind(at_s=again_s))

    def release(self, run: PipelineRun) -> None:
        """The pipeline is over: its nodes go back, waiting pipelines are tried again, its group goes on.

        An older version may still be on its way to rollout workers when the last one is published: that ends here too.
        """
        self._orders.end_all(run)
        group = self.unpin(run)
        self._ledger.depart(run.pipeline.id)
        self._groups.refresh_cycle(group)
        self._journal.act(Release(pipeline=run.pipeline.id))
        self.place_waiting()
        self.rebalance()
        if group.members:
            self._dispatch(group)

    def rebalance(self) -> None:
        """Let the policy relocate pipelines to nodes that have become free; each is relocated at a step boundary."""
        if self._state.has_tails:
            for group in self._state.groups.values():
                self._groups.refresh_tails(group)
        relocations = []
        for choice in self._policy.rebalance(self._view):
            if isinstance(choice, FruitlessSearch):
                self._ledger.note_fruitless_search(choice.pipelines)
            else:
                relocations.append(choice)
        for relocation in relocations:  # all in the ledger first: later ones count on the nodes of earlier ones
            placement, _ = self._ledger.relocate(relocation.pipeline, relocation.choice)
            self._state.runs[relocation.pipeline].next_placement = placement
            self._expectations.note_placed(self._state.runs[relocation.pipeline])
        for pipeline in dict.fromkeys(relocation.pipeline for relocation in relocations):
            run = self._state.runs[pipeline]
            if run.next_placement == run.placement:
                run.next_placement = None
                self._ledger.finish_relocation(pipeline)
                self._groups.refresh_cycle(self._state.group_of(run))
            elif run.pipeline.work_arrives:
                self._bursts.relocate_between(run)
                self._dispatch(self._state.group_of(run))
            elif not run.shards:
                self._steps.open_rollout(run)
        if relocations:
            self.place_waiting()
        self._expectations.tell()

    def relocate(self, run: PipelineRun) -> None:
        """Between two steps: leave the old nodes, join the new ones."""
        placement = run.next_placement
        assert placement is not None
        run.next_placement = None
        old = self.unpin(run)
        self._ledger.finish_relocation(run.pipeline.id)
        self._groups.refresh_cycle(old)
        self._groups.join(run, placement)
        expected_s = self._expectations.step_s(run)
        self._journal.act(Relocate(pipeline=run.pipeline.id, placement=placement, expected_step_s=expected_s))
        if old.members:
            self._dispatch(old)
        self.place_waiting()

    def unpin(self, run: PipelineRun) -> GroupState:
        """The pipeline leaves its nodes; returns the group that it was a member of."""
        self._steps.withdraw(run)
        self._turns.end(run)
        return self._groups.leave(run)
