"""Pipelines are planned with the seconds of their own steps; emits whether their SLO can hold.

    a step is trained ─▶ learn ─▶ Pipeline.estimate in run and ledger ─▶ the policy's rebalance ─▶ emit ─▶ ExpectSteps

With the estimate come a budget (SLO times solo step), a load in its group's meta-iteration and due times, as if the
user had given it. It can change when and where things run, never what is trained. Before its own steps are measured a
pipeline has the seconds of the last one alike, where there was one (`alike_seconds.py`). An estimate that the user gave
stands as long as the steps are near it; where a phase has drifted from it, both of its estimates, apart and colocated,
drift along, in steps of a tenth: pipelines that were alike so stay alike for a search.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from rlmux.core.actions import Action, ExpectSteps
from rlmux.core.estimation.measured_steps import has_drifted
from rlmux.core.journal import Journal
from rlmux.core.model import AlikeSeconds, MeasuredSeconds, PhaseSeconds, Pipeline, PipelineId, PipelineStatus
from rlmux.core.pipeline_run import PipelineRun
from rlmux.core.placement.group_load import GroupLoad, budget_of, cold_start_s, slo_step_s, solo_s
from rlmux.core.placement.placement_ledger import PlacementLedger
from rlmux.core.placement.step_bounds import StepBounds
from rlmux.core.state import SchedulerState

_ROUNDING = 1e-9
_DRIFT_STEP = 1.1
"""Factor by which estimates that the user gave drift at once."""
_NOTICEABLE = 0.1
"""Fraction by which an expected slowdown changes before it is emitted again."""


class Expectations:
    """Keeps what the scheduler believes of steps up to date; see the module."""

    def __init__(self, state: SchedulerState, ledger: PlacementLedger, journal: Journal) -> None:
        self._state = state
        self._ledger = ledger
        self._journal = journal
        self._learned: dict[PipelineId, AlikeSeconds | None] = {}
        """Pipelines with seconds that were learned in this event and not emitted yet, and what is kept of them for
        pipelines alike."""
        self._placed: dict[PipelineId, None] = {}
        """Pipelines that came in this event to a group where a probability was requested."""

    def learn(self, run: PipelineRun, step: int) -> bool:
        """The step is trained. Returns whether the pipeline is planned with other seconds from now on."""
        run.estimates.measured.end_step(step)
        last, given = run.estimates.measured.last, self._submitted_seconds(run)
        if last is not None:
            run.estimates.done.add(step, last, given)
        if run.estimates.bounds is not None:
            return self._plan_with_bounds(run, run.estimates.bounds, last, given)
        return self._plan_with(run, run.estimates.measured.seconds)

    def learn_batches(self, run: PipelineRun) -> bool:
        """A batch of arrived work has ended. Returns whether the pipeline is planned with other seconds from now on."""
        return self._plan_with(run, run.estimates.batch_seconds.seconds)

    def _plan_with(self, run: PipelineRun, measured_seconds: Callable[[], MeasuredSeconds | None]) -> bool:
        if run.status is not PipelineStatus.RUNNING:
            return False
        planned = self._given_seconds(run) if run.estimates.has_given_estimate else run.pipeline.estimate
        if run.estimates.has_given_estimate and (planned is None or not run.estimates.measured.is_last_beyond(planned)):
            return False  # before the distribution is computed, which takes longer than the rest of a step's end
        measured = measured_seconds()
        if measured is None or not has_drifted(planned, measured.median):
            return False
        if run.estimates.has_given_estimate:
            run.estimates.has_left_estimate = True
            run.pipeline = drifted(run.pipeline, planned, measured.median)
        else:
            run.pipeline = replace(run.pipeline, estimate=measured.median, held=measured.held)
        if not run.pipeline.work_arrives:
            run.estimates.history.plan_with(run.pipeline)
        self._note_learned(run)
        return True

    def _submitted_seconds(self, run: PipelineRun) -> PhaseSeconds | None:
        """What its user gave for a step on nodes like those where it is; None where nothing was given."""
        given, placement = run.submitted, run.nodes.placement
        if placement is None or not run.estimates.has_given_estimate:
            return None
        is_colocated = set(placement.train_nodes) <= set(placement.rollout_nodes)
        return (given.colocated_estimate if is_colocated else None) or given.estimate

    def _plan_with_bounds(
        self, run: PipelineRun, bounds: StepBounds, last: PhaseSeconds | None, given: PhaseSeconds | None
    ) -> bool:
        """Learn mean and spread from the last step, and plan with them."""
        if run.status is not PipelineStatus.RUNNING or run.nodes.placement is None:
            return False
        bounds.forget(len(run.nodes.placement.rollout_nodes))
        if last is None:
            return False
        bounds.add(last, given)
        left = self._state.work_left(run.pipeline.id)
        planned = bounds.plan(run.pipeline, None if left is None else left.num_left)
        if planned is not None and not bounds.has_base:
            measured = run.estimates.measured.seconds()
            planned = replace(planned, held=measured.held) if measured is not None else planned
        if planned is None:
            return False
        run.estimates.has_left_estimate |= planned.estimate != run.submitted.estimate
        run.pipeline = planned
        run.estimates.history.plan_with(planned)
        self._note_learned(run)
        return True

    def _note_learned(self, run: PipelineRun) -> None:
        """It is planned with seconds of its own from now on."""
        self._ledger.revise(run.pipeline)
        run.estimates.of_alike = None
        self._learned[run.pipeline.id] = self._for_alike(run)

    def _for_alike(self, run: PipelineRun) -> AlikeSeconds | None:
        """What its steps took where it is, for pipelines alike; None where it has no key, or too few steps."""
        measured = run.estimates.measured.seconds() if run.pipeline.alike else None
        placement = run.nodes.placement
        if measured is None or placement is None:
            return None
        return AlikeSeconds(
            alike=run.pipeline.alike,
            num_rollout_nodes=len(placement.rollout_nodes),
            num_train_nodes=len(placement.train_nodes),
            is_colocated=set(placement.train_nodes) <= set(placement.rollout_nodes),
            measured=measured,
        )

    def note_placed(self, run: PipelineRun) -> None:
        """It has a place in the ledger: the next `emit` states the probabilities that were requested in its group, and
        the seconds of pipelines alike that it is planned with."""
        if run.estimates.of_alike is not None:
            self._learned[run.pipeline.id] = None
        members = self._ledger.group_of(run.pipeline.id).members
        if any(member.pipeline.slo_probability is not None for member in members):
            self._placed[run.pipeline.id] = None

    def _given_seconds(self, run: PipelineRun) -> PhaseSeconds | None:
        """What the steps of a pipeline with a given estimate should take where it is; None where that tells nothing: on
        other numbers of nodes, or where sub-stages of several members share them."""
        pipeline, placement = run.pipeline, run.nodes.placement
        if placement is None or len(placement.train_nodes) != pipeline.num_train_nodes:
            return None
        if set(placement.train_nodes) <= set(placement.rollout_nodes):
            return pipeline.colocated_estimate if self._ledger.group_of(pipeline.id).num_members == 1 else None
        return pipeline.estimate if len(placement.rollout_nodes) == pipeline.num_rollout_nodes else None

    def emit(self) -> list[Action]:
        """Say what is expected of pipelines whose seconds are new, and of their neighbours with an SLO where that is
        different from the last emitted."""
        beyond_slo = self._state.beyond_slo
        if not self._learned and not beyond_slo and not self._placed:
            return []
        actions: list[Action] = []
        learned, self._learned = self._learned, {}
        placed, self._placed = self._placed, {}
        due = {**learned, **placed, **beyond_slo}
        for pipeline in {**learned, **placed}:
            if pipeline not in self._ledger:
                continue
            due |= {member.pipeline.id: None for member in self._ledger.group_of(pipeline).members}
        for pipeline in due:
            run = self._state.runs[pipeline]
            if pipeline not in self._ledger:
                beyond_slo.pop(pipeline, None)
                continue
            step_slowdown, reason = self._expected(run)
            probability = self._probability(run)
            is_stated_anew = run.estimates.bounds is not None and (
                probability != run.estimates.emitted_probability or pipeline in placed
            )
            if (
                pipeline in learned
                or is_stated_anew
                or bool(reason) != (pipeline in beyond_slo)
                or _is_news(run, step_slowdown)
            ):
                run.estimates.emitted_slowdown, run.estimates.emitted_probability = step_slowdown, probability
                seen = run.estimates.batch_seconds if run.pipeline.work_arrives else run.estimates.measured
                is_given = run.estimates.has_given_estimate and not run.estimates.has_left_estimate
                measured = None if is_given else seen.seconds() or run.estimates.of_alike
                alike = learned.get(pipeline)
                if alike is not None:
                    self._state.alike.keep(alike)
                actions.append(
                    ExpectSteps(
                        pipeline=pipeline,
                        measured=measured,
                        step_slowdown=step_slowdown,
                        reason=reason,
                        probability=probability,
                        bounded=run.estimates.bounds.known(run.pipeline) if run.estimates.bounds is not None else None,
                        alike=alike,
                    )
                )
            if reason:
                beyond_slo[pipeline] = None
            else:
                beyond_slo.pop(pipeline, None)
        return actions

    def _probability(self, run: PipelineRun) -> float | None:
        """Probability with which the mean of the steps that are left keeps its SLO in its group as planned; 1 where it
        is alone. None where the plan does not keep it with its spread in hand, or a member states no probability."""
        pipeline = run.pipeline
        if run.estimates.bounds is None or pipeline.slo_slowdown == math.inf or pipeline.estimate is None:
            return None
        group = self._ledger.group_of(pipeline.id)
        if not self._keeps_slo_as_planned(run, group):
            return None
        if group.num_members == 1:
            return 1.0
        probabilities = [member.pipeline.slo_probability or 0.0 for member in group.members]
        bounds = [self._state.runs[member.pipeline.id].estimates.bounds for member in group.members]
        return min(probabilities) if all(bound and bound.is_known for bound in bounds) else None

    def _keeps_slo_as_planned(self, run: PipelineRun, group: GroupLoad) -> bool:
        """Whether its SLO is kept if the steps that are left take its spread times what is planned: by their mean, or
        by the mean of all steps, those that are done included. Alone, its steps deviate on both sides of the ratio."""
        pipeline = run.pipeline
        spread = pipeline.spread if group.num_members > 1 else 1.0
        step_s = spread * group.period_s / self._ledger.member(pipeline.id).steps_per_cycle
        budget_s = slo_step_s(pipeline) if run.estimates.measured.last else spread * budget_of(pipeline)
        if step_s <= budget_s * (1.0 + _ROUNDING):
            return True
        left = self._state.work_left(pipeline.id)
        if left is None:
            return False
        due_s = left.submitted_s + left.num_left * slo_step_s(pipeline) + pipeline.slo_slowdown * left.done_solo_s
        begins_s = left.now_s
        if run.estimates.measured.last is None:  # its first step waits for a slot that another member may have
            begins_s += cold_start_s(pipeline) + (solo_s(pipeline) if group.num_members > 1 else 0.0)
        return begins_s + left.num_left * step_s <= due_s * (1.0 + _ROUNDING)

    def step_s(self, run: PipelineRun) -> float | None:
        """Expected seconds of a step in the meta-iteration of its group; None where nothing is known of it."""
        estimate = run.pipeline.estimate
        if estimate is None:
            return None
        return max(1.0, self._ledger.group_of(run.pipeline.id).slowdown_of(run.pipeline.id)) * estimate.solo_s

    def _expected(self, run: PipelineRun) -> tuple[float, str]:
        """Its expected step slowdown, and why its SLO cannot be promised."""
        pipeline = run.pipeline
        group = self._ledger.group_of(pipeline.id)
        slowdown, slo = max(1.0, group.slowdown_of(pipeline.id)), pipeline.slo_slowdown
        if pipeline.estimate is None or slo == math.inf or slowdown <= slo * (1.0 + _ROUNDING):
            return slowdown, ""
        alone_s = pipeline.estimate.solo_s
        return slowdown, (
            f"slo_slowdown {slo:g} cannot be promised here: a step of {alone_s:.3g} s alone is expected to take "
            f"{slowdown * alone_s:.3g} s, {slowdown:.2f} times as long, in a group of {group.num_members} pipelines, "
            f"and policy {self._journal.policy_name} finds no better place"
        )


def drifted(pipeline: Pipeline, planned: PhaseSeconds | None, measured: PhaseSeconds) -> Pipeline:
    """The pipeline with all its estimates stretched as the measured seconds are against those planned with."""
    if planned is None:
        return pipeline
    rollout, train = (
        _stretch(now_s, before_s)
        for before_s, now_s in ((planned.rollout_s, measured.rollout_s), (planned.train_s, measured.train_s))
    )

    def stretched(seconds: PhaseSeconds | None) -> PhaseSeconds | None:
        if seconds is None:
            return None
        return replace(seconds, rollout_s=rollout * seconds.rollout_s, train_s=train * seconds.train_s)

    return replace(
        pipeline,
        estimate=stretched(pipeline.estimate),
        held=stretched(pipeline.held),
        colocated_estimate=stretched(pipeline.colocated_estimate),
    )


def _stretch(now_s: float, before_s: float) -> float:
    """Ratio of current to previous seconds, as a power of `_DRIFT_STEP`; 1 if either is zero."""
    if now_s <= 0.0 or before_s <= 0.0:
        return 1.0
    return _DRIFT_STEP ** round(math.log(now_s / before_s, _DRIFT_STEP))


def _is_news(run: PipelineRun, step_slowdown: float) -> bool:
    """Whether the expected slowdown of a pipeline with an SLO differs noticeably from the last emitted one."""
    if run.estimates.emitted_slowdown is None or run.pipeline.slo_slowdown == math.inf:
        return False
    return abs(step_slowdown - run.estimates.emitted_slowdown) > _NOTICEABLE * run.estimates.emitted_slowdown
