"""Turns: pipelines hold nodes of their own for a while each, where the policy shares out their time (Gavel, OSDI'20).

    policy.share_out ─▶ targets ────────────┐
    seconds that each pipeline held nodes ──┴─▶ policy.turns ─▶ who holds nodes next

A turn ends at the first step boundary after `turn_s`, if another pipeline waits and the policy gives the nodes to it;
the pipeline is then parked. Targets are made anew when pipelines or nodes came, left or are believed to be different,
`reset_s` apart at least, or while they are younger than a turn. Nothing here is asked under a policy without turns.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, runtime_checkable

from rlmux.core.model import Phase, Pipeline, PipelineId, PipelineStatus
from rlmux.core.pipeline_run import PipelineRun
from rlmux.core.placement import PlacementLedger
from rlmux.core.placement_choice import Refusal
from rlmux.core.placement_view import PlacementView
from rlmux.core.policy import Policy
from rlmux.core.shares import Shares
from rlmux.core.state import SchedulerState
from rlmux.core.turn_shares import Claim, Seconds, Turn, configuration_of


@runtime_checkable
class TakesTurns(Protocol):
    """A policy whose pipelines hold nodes by turns."""

    turn_s: float
    """Seconds after which a turn ends at the next step boundary."""
    reset_s: float
    """Least seconds between two targets."""

    def share_out(self, pipelines: tuple[Pipeline, ...], view: PlacementView) -> Mapping[PipelineId, Seconds]:
        """Part of the time for which each is to hold nodes of each configuration."""
        ...

    def turns(
        self, claims: tuple[Claim, ...], elapsed_s: float, view: PlacementView
    ) -> Mapping[PipelineId, Turn | Refusal]:
        """Who holds which of the free nodes next, and why the others wait, `elapsed_s` after the targets were made."""
        ...


class Turns:
    """Counts what pipelines receive and asks the policy who is next; see the module."""

    def __init__(self, state: SchedulerState, ledger: PlacementLedger, policy: Policy, shares: Shares) -> None:
        self._state = state
        self._ledger = ledger
        self._view = PlacementView(ledger)
        self._policy = policy if isinstance(policy, TakesTurns) else None
        self._shares = shares

    @property
    def are_taken(self) -> bool:
        """Whether the policy gives nodes by turns."""
        return self._policy is not None

    def next(self) -> list[tuple[PipelineRun, Turn | Refusal]]:
        """What each waiting pipeline gets of the free nodes now, in the order of submission."""
        waiting = self._shares.in_order()
        if self._policy is None or not waiting:
            return []
        answers = self._ask(self._policy, waiting)
        return [(run, answers[run.pipeline.id]) for run in waiting]

    def is_over(self, run: PipelineRun) -> bool:
        """Whether a pipeline at a step boundary leaves its nodes to others; it stays where the policy has it stay."""
        policy, state, placement = self._policy, self._state, run.nodes.placement
        if (
            policy is None
            or placement is None
            or state.now_s - run.admission.admitted_s < policy.turn_s
            or not state.waiting
        ):
            return False
        if run.pipeline.work_arrives or run.is_filler or not (waiting := self._shares.in_order()):
            return False
        with self._ledger.trial():
            self._ledger.depart(run.pipeline.id)
            answer = self._ask(policy, [*waiting, run])[run.pipeline.id]
        return isinstance(answer, Refusal) or answer.configuration != configuration_of(placement)

    def begin(self, run: PipelineRun) -> None:
        """The pipeline holds nodes from now on."""
        if self.are_taken:
            self._state.turns.counted_s[run.pipeline.id] = self._state.now_s

    def end(self, run: PipelineRun) -> None:
        """The pipeline leaves its nodes."""
        if self.are_taken:
            self._count()
            self._state.turns.counted_s.pop(run.pipeline.id, None)

    def _ask(self, policy: TakesTurns, runs: list[PipelineRun]) -> Mapping[PipelineId, Turn | Refusal]:
        self._count()
        self._renew_targets(policy)
        shares = self._state.turns
        claims = tuple(
            Claim(
                pipeline=run.pipeline,
                holds=None if run.nodes.placement is None else configuration_of(run.nodes.placement),
                targets=shares.targets.get(run.pipeline.id, {}),
                received_s=shares.received_s.get(run.pipeline.id, {}),
                deficits_s=shares.deficits_s.get(run.pipeline.id, {}),
            )
            for run in sorted(runs, key=lambda run: run.sequence)
        )
        return policy.turns(claims, self._state.now_s - shares.since_s, self._view)

    def _count(self) -> None:
        """Count what all pipelines that hold nodes have received up to now."""
        shares, now_s = self._state.turns, self._state.now_s
        for name, since_s in shares.counted_s.items():
            placement = self._state.runs[name].nodes.placement
            if placement is not None and now_s > since_s:
                received = shares.received_s.setdefault(name, {})
                configuration = configuration_of(placement)
                received[configuration] = received.get(configuration, 0.0) + now_s - since_s
                shares.counted_s[name] = now_s

    def _renew_targets(self, policy: TakesTurns) -> None:
        shares, now_s = self._state.turns, self._state.now_s
        elapsed_s = now_s - shares.since_s
        if policy.turn_s < elapsed_s < policy.reset_s:
            return
        known = tuple(run.pipeline for run in self._state.runs.values() if _claims_time(run))
        num_nodes = tuple(self._view.num_nodes(phase) for phase in (Phase.ROLLOUT, Phase.TRAIN))
        if (known, num_nodes) == (shares.known, shares.num_nodes):
            return
        deficits = {}
        for name, targets in shares.targets.items():
            received, before = shares.received_s.get(name, {}), shares.deficits_s.get(name, {})
            deficits[name] = {
                one: before.get(one, 0.0) + target * elapsed_s - received.get(one, 0.0)
                for one, target in targets.items()
            }
        names = {pipeline.id for pipeline in known}
        shares.deficits_s = {name: by_configuration for name, by_configuration in deficits.items() if name in names}
        shares.received_s = {}
        shares.known, shares.num_nodes, shares.since_s = known, num_nodes, now_s
        shares.targets = dict(policy.share_out(known, self._view))


def _claims_time(run: PipelineRun) -> bool:
    """Whether the pipeline is not over, and its user does not hold it."""
    return run.status in (PipelineStatus.WAITING, PipelineStatus.RUNNING) and not (
        run.admission.is_held or run.is_filler
    )
