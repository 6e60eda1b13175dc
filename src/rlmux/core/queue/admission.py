"""The queue for admission: the first pipeline in it has a reservation, and a later one starts only if that holds.

    head          the waiting pipeline submitted first, or first by its `QueueOrder` where one is given; one that is
                  held, or waits for a lost node and not for others, is passed over
    reservation   the earliest time at which the policy places the head, if pipelines leave at their estimated ends
    overtaking    a later pipeline starts if, with it there, the policy still places the head at that time

This is EASY back-filling (Lifka, "The ANL/IBM SP Scheduling System", JSSPP 1995; Mu'alem and Feitelson, IEEE TPDS
12(6), 2001). What counts as room is the policy's own answer, in trials of the ledger in which pipelines
have departed. An unknown end is never, so where the head waits for one of these nothing overtakes.

Every wait is bounded: the earliest start ever reserved for the head is kept, over a resume too, and once it has passed
nothing overtakes.
What runs then ends, and each pipeline before it in the queue takes its turn as the head.

Only the head, its reservation and the reasons change here. The scheduler admits.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from rlmux.core.actions import Action, Queue, Refuse
from rlmux.core.decision.policy import Policy
from rlmux.core.decision.policy_faults import PolicyFaults
from rlmux.core.errors import PolicyError
from rlmux.core.estimation.estimates import StepEstimates
from rlmux.core.model import Pipeline, PipelineId, PipelineStatus
from rlmux.core.pipeline_run import PipelineRun
from rlmux.core.placement.choice import PlacementChoice, Refusal
from rlmux.core.placement.group_load import GroupLoad, Member
from rlmux.core.placement.own_nodes import on_nodes_of_its_own
from rlmux.core.placement.placement_ledger import PlacementLedger
from rlmux.core.placement.view import PlacementView
from rlmux.core.queue.fair_share import Shares
from rlmux.core.queue_order import PipelineWait
from rlmux.core.state import Reservation, SchedulerState

_TOLERANCE = 1e-9
"""Relative: ends that are computed in two ways are the same time."""
_MAX_NAMES = 3
"""Pipelines named in a reason; the others are counted."""


HELD = Refusal(reason="its user holds it", is_final=False)


class AdmissionQueue:
    """Says whether a waiting pipeline starts now, and where, or why it waits."""

    def __init__(
        self, state: SchedulerState, ledger: PlacementLedger, policy: Policy, shares: Shares, faults: PolicyFaults
    ) -> None:
        self._state = state
        self._ledger = ledger
        self._policy = policy
        self._shares = shares
        self._faults = faults
        self._view = PlacementView(ledger)
        self._step_s_of: dict[PipelineId, tuple[GroupLoad, StepEstimates, float]] = {}
        """Seconds of a step of pipelines in groups that are estimated, with what they follow from: a cache."""

    def runs(self) -> Iterator[PipelineRun]:
        """Every waiting pipeline that is not held, in the order of offers; again if one that was started made room for
        the head."""
        while True:
            self._state.reservation = None
            yield from self._each()
            if not self.does_head_fit():
                return

    def _each(self) -> Iterator[PipelineRun]:
        """Every waiting pipeline once. A start counts for its account, so the others are put in order again."""
        waiting, tried = self._state.waiting, set[PipelineId]()
        is_changed = True
        while is_changed:
            is_changed = False
            for run in self._shares.in_order():
                name = run.pipeline.id
                if name not in waiting or name in tried:
                    continue
                tried.add(name)
                yield run
                if self._shares.are_set and name not in waiting:
                    is_changed = True
                    break

    def over_quota(self) -> list[tuple[PipelineRun, Refusal]]:
        """Waiting pipelines that are over a quota, and why; final where they would be by themselves."""
        if not self._state.quota_by_account:
            return []
        waiting = [run for run in self._state.waiting.values() if not run.admission.is_held]
        return [
            (run, Refusal(reason=excess.reason, is_final=excess.is_final))
            for run, excess in self._shares.quotas.excesses(waiting)
            if excess is not None
        ]

    def is_next(self, run: PipelineRun) -> bool:
        """Whether a pipeline that has just come may be tried by itself: all others come before it."""
        return not self._shares.are_set or self._shares.in_order()[-1:] == [run]

    def does_head_fit(self) -> bool:
        """Whether the policy would place the head now."""
        reservation = self._state.reservation
        self._state.head_tried_s = self._state.now_s
        return reservation is not None and self.fits(self._state.runs[reservation.pipeline].pipeline)

    def leave(self, run: PipelineRun) -> None:
        """A pipeline that may have waited is over; where others were held back for it, all are tried again."""
        reservation = self._state.reservation
        self._state.waiting.pop(run.pipeline.id, None)
        self._state.waiting_fillers.pop(run.pipeline.id, None)
        if reservation is not None and reservation.pipeline == run.pipeline.id:
            self._state.dirty.queue = True

    def restore(self, waits: Sequence[PipelineWait]) -> None:
        """Have pipelines go on waiting as in an earlier part of the run, once they `enter`."""
        self._state.restored_waits = {wait.pipeline: wait for wait in waits}

    def enter(self, run: PipelineRun) -> None:
        """A pipeline was submitted: its wait begins, or goes on."""
        self._waiting(run)[run.pipeline.id] = run
        wait = self._state.restored_waits.pop(run.pipeline.id, None)
        if wait is not None:
            run.admission.waiting_since_s, run.admission.reserved_start_s = wait.since_s, wait.promised_s

    def hold(self, run: PipelineRun) -> None:
        """The user keeps the pipeline from starting, or from going on once it is parked."""
        run.admission.is_held = True

    def release_hold(self, run: PipelineRun) -> None:
        run.admission.is_held = False

    def rank(self, run: PipelineRun, rank: int) -> None:
        """Give a pipeline its place among its account's own waiting ones."""
        run.admission.rank = rank

    def start(self, run: PipelineRun) -> None:
        """A pipeline of the queue is admitted."""
        del self._waiting(run)[run.pipeline.id]
        run.admission.reason = ""
        run.admission.admitted_s = self._state.now_s
        if not run.is_filler:
            self._shares.enter(run)

    def wait_again(self, run: PipelineRun) -> None:
        """A pipeline that ran has left its nodes: it waits, and begins after its last published version."""
        self._waiting(run)[run.pipeline.id] = run
        run.admission.restart_step = run.step.published_version
        run.admission.waiting_since_s = self._state.now_s

    def drop_reserved_start(self, run: PipelineRun) -> None:
        """The start that was reserved for the pipeline before holds no longer."""
        run.admission.reserved_start_s = math.inf

    def fail(self, run: PipelineRun, reason: str) -> None:
        run.admission.reason = reason

    def _waiting(self, run: PipelineRun) -> dict[PipelineId, PipelineRun]:
        return self._state.waiting_fillers if run.is_filler else self._state.waiting

    def decide(self, run: PipelineRun) -> PlacementChoice | Refusal:
        """The policy's answer, unless it would let the pipeline start before its turn."""
        choice = self._answer(run.pipeline)
        reservation = self._state.reservation
        if isinstance(choice, PlacementChoice):
            return (
                choice
                if reservation is None or self._may_overtake(reservation, run.pipeline, choice)
                else _held(run, reservation)
            )
        if choice.is_final:
            return choice
        if reservation is not None:
            return replace(choice, reason=f"{choice.reason}; {reservation.pipeline} is before it in the queue")
        reservation = self._state.reservation = self._reserve(run)
        if reservation is None:
            return choice
        run.admission.reserved_start_s = min(run.admission.reserved_start_s, reservation.start_s)
        return replace(choice, reason=f"{choice.reason}; it is first in the queue and starts {_when(reservation)}")

    def would_start(self, pipeline: Pipeline, reservation: Reservation | None) -> bool:
        """Whether a waiting pipeline, changed like this, would be admitted now beside what is reserved."""
        choice = self._answer(pipeline)
        if isinstance(choice, Refusal):
            return False
        if reservation is None or reservation.pipeline == pipeline.id:
            return True
        return self._may_overtake(reservation, pipeline, choice)

    def refuse(self, run: PipelineRun, refusal: Refusal) -> list[Action]:
        """Emit why the pipeline waits, or never starts, unless the reason is the same as before."""
        is_new_reason = refusal.reason != run.admission.reason
        run.admission.reason = refusal.reason
        if refusal.is_final:
            return [Refuse(pipeline=run.pipeline.id, reason=refusal.reason)]
        return [Queue(pipeline=run.pipeline.id, reason=refusal.reason)] if is_new_reason else []

    # ------------------------------------------------------------------ reserving

    def _reserve(self, run: PipelineRun) -> Reservation | None:
        """When the policy places the pipeline, if others leave at their estimated ends; None if it never does."""
        with self._ledger.trial():
            self._ledger.finish_relocations()
            ends = self._ends()
            count = self._num_departures(run.pipeline, [name for _, _, name in ends])
        if count is None:
            return None
        start_s = ends[count - 1][0] if count else self._state.now_s
        return Reservation(pipeline=run.pipeline.id, start_s=start_s, awaits=tuple(name for _, _, name in ends[:count]))

    def _num_departures(self, pipeline: Pipeline, leaving: list[PipelineId]) -> int | None:
        """How many of these must leave, in this order, until the policy places the pipeline; None: all are too few.

        More departures are taken to leave more room, so the number is found by doubling and then by halving. Those
        that are known to be too few have left the ledger at the end: the caller's trial takes them back.
        """
        if self.fits(pipeline):
            return 0
        num_left, step = 0, 1
        while num_left < len(leaving):
            num_more = min(step, len(leaving) - num_left)
            if self._fits_without(pipeline, leaving[num_left : num_left + num_more]):
                break
            num_left, step = num_left + num_more, 2 * step
        else:
            return None
        while num_more > 1:
            half = num_more // 2
            if self._fits_without(pipeline, leaving[num_left : num_left + half]):
                num_more = half
            else:
                num_left, num_more = num_left + half, num_more - half
        return num_left + num_more

    def _fits_without(self, pipeline: Pipeline, leaving: list[PipelineId]) -> bool:
        """Whether the policy places the pipeline once these have left; where it does not, they leave the ledger."""
        with self._ledger.trial() as trial:
            self._depart(leaving)
            trial.is_kept = not self.fits(pipeline)
        return not trial.is_kept

    def fits(self, pipeline: Pipeline) -> bool:
        """Whether the policy would place the pipeline now, were no other before it."""
        return isinstance(self._answer(pipeline), PlacementChoice)

    def _answer(self, pipeline: Pipeline) -> PlacementChoice | Refusal:
        """The policy's answer, where it can be done; where it fails, nodes of its own or a refusal that says so."""
        try:
            answer = self._policy.place(pipeline, self._view)
            self._check(pipeline, answer)
        except Exception as error:  # a policy, a user's above all, may raise anything
            return on_nodes_of_its_own(pipeline, self._ledger, self._faults.note("place", error))
        return answer

    def _check(self, pipeline: Pipeline, answer: PlacementChoice | Refusal) -> None:
        """Raises where the ledger would not take the policy's answer."""
        if isinstance(answer, PlacementChoice):
            with self._ledger.trial():
                self._ledger.admit(pipeline, answer)
        elif not isinstance(answer, Refusal):
            accepted = "accepted: a PlacementChoice or a Refusal"
            raise PolicyError(f"policy {self._policy.name} answers {answer!r} in place; {accepted}")

    def _depart(self, pipelines: Sequence[PipelineId]) -> None:
        for name in pipelines:
            self._ledger.depart(name)

    # ------------------------------------------------------------------ overtaking

    def _may_overtake(self, reservation: Reservation, pipeline: Pipeline, choice: PlacementChoice) -> bool:
        """Whether the head can still start at its reserved time once this choice is carried out."""
        head = self._state.runs[reservation.pipeline]
        if reservation.start_s == math.inf or self._state.now_s >= head.admission.reserved_start_s:
            return False
        latest_s = reservation.start_s * (1.0 + _TOLERANCE)
        with self._ledger.trial():
            self._ledger.finish_relocations()
            self._ledger.admit(pipeline, choice)
            candidates = [name for name in reservation.awaits if name in self._ledger]
            ended = [name for name in (*candidates, pipeline.id) if self._placed_end_s(name) <= latest_s]
            self._depart(ended)
            return self.fits(head.pipeline)

    # ------------------------------------------------------------------ estimated ends

    def _ends(self) -> list[tuple[float, int, PipelineId]]:
        """Estimated ends of all placed pipelines, the first one first; those that were submitted first among equals."""
        runs = self._state.runs
        self._step_s_of = {name: known for name, known in self._step_s_of.items() if name in self._ledger}
        ends = []
        for group in self._ledger.groups():
            for member in group.members:
                run = runs[member.pipeline.id]
                ends.append((self._end_s(run, member, group), run.sequence, member.pipeline.id))
        ends.sort()
        return ends

    def _placed_end_s(self, pipeline: PipelineId) -> float:
        run, member = self._state.runs[pipeline], self._ledger.member(pipeline)
        return self._end_s(run, member, self._ledger.group_of(pipeline))

    def _end_s(self, run: PipelineRun, member: Member, group: GroupLoad) -> float:
        """When this member of this group will have ended, by the estimates; infinite where it is unknown."""
        now_s, num_steps = self._state.now_s, run.pipeline.num_steps
        if run.status not in (PipelineStatus.RUNNING, PipelineStatus.WAITING):
            return now_s  # it is over and waits for its last orders
        if num_steps is None:
            return math.inf
        is_running = run.status is PipelineStatus.RUNNING
        begun_s = max(run.admission.admitted_s, run.estimates.history.step_began_s) if is_running else now_s
        num_left = num_steps - max(run.step.published_version if is_running else run.admission.restart_step, 0)
        return max(now_s, begun_s + num_left * self._step_s(member, group))

    def _step_s(self, member: Member, group: GroupLoad) -> float:
        """Seconds of a step beside the members of its group: the meta-iteration's, where all of it is estimated.

        Otherwise the members are taken to work one after another, each as long as its last steps took.
        """
        estimates = self._state.runs[member.pipeline.id].estimates.history.estimates()
        known = self._step_s_of.get(member.pipeline.id)
        if known is not None and known[0] is group and known[1] is estimates:
            return known[2]
        if any(other.pipeline.estimate is None for other in group.members):
            return sum(self._solo_s(other) for other in group.members)
        step_s = max(group.period_s / member.steps_per_cycle, self._solo_s(member))
        self._step_s_of[member.pipeline.id] = (group, estimates, step_s)
        return step_s

    def _solo_s(self, member: Member) -> float:
        """Solo seconds of a step: as the last ones took, else as estimated; infinite where neither is known."""
        estimates = self._state.runs[member.pipeline.id].estimates.history.estimates()
        if estimates.curves:
            return estimates.shard_s + sum(seconds for _, seconds in estimates.seconds_by_stage)
        return member.phase_load.solo_s if member.pipeline.estimate is not None else math.inf


def _held(run: PipelineRun, reservation: Reservation) -> Refusal:
    """Why a pipeline that would fit does not start."""
    later = (
        "might start later"
        if reservation.start_s == math.inf
        else f"would start later than at {round(reservation.start_s, 1):g} s"
    )
    reason = f"pipeline {run.pipeline.id} would fit, but {reservation.pipeline} is before it in the queue and {later}"
    return Refusal(reason=reason, is_final=False)


def _when(reservation: Reservation) -> str:
    """What the head waits for, in words."""
    names: list[str] = list(reservation.awaits[-_MAX_NAMES:])
    num_others = len(reservation.awaits) - len(names)
    if not names:
        return "when the relocations under way are done"
    if num_others:
        names = [f"{num_others} others", *names]
    listed = ", ".join(names[:-1]) + " and " + names[-1] if len(names) > 1 else names[0]
    verb = "has" if len(names) == 1 else "have"
    expected = "" if reservation.start_s == math.inf else f", expected at {round(reservation.start_s, 1):g} s"
    return f"when {listed} {verb} ended{expected}"
