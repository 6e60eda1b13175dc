"""`gavel`: whole pipelines hold nodes by turns, for parts of the time that a linear program shares out (OSDI'20).

    pipelines, seconds of their steps ──max-min──▶ X: part of the time on each configuration ──▶ turns by X / received

A configuration is a kind of nodes that a pipeline can hold: rollout and training nodes, or training nodes for both
phases where it is known how fast that is. No two pipelines share a node, and no phases are interleaved. The largest
target beside what was received comes next; of equals, the largest deficit from earlier targets. A pipeline that is two
turns behind on a configuration waits for that one, and its nodes are kept: otherwise pipelines on two configurations
would never change places, and one that needs several nodes at once would never find them.

Where nodes are paid for as they are used nothing is scarce: every pipeline then has the configuration whose steps cost
the fewest dollars within its SLO, at once and to its end (Gavel's cost policy with SLOs, section 4.2). Where they are
counted, SLOs play no part.

Needs the `solver` extra.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from rlmux.core.decision.policy import TimeSlice, TurnTaking
from rlmux.core.model import AdmissionKind, Phase, Pipeline, PipelineId, Placement
from rlmux.core.placement.choice import PlacementChoice, Refusal
from rlmux.core.placement.group_load import colocated_step_s, slo_step_s
from rlmux.core.placement.view import PlacementView
from rlmux.policies.baselines import OneRule
from rlmux.policies.search.candidates import impossible, queue
from rlmux.policies.search.linear_program import Solver, require_solver, solve_with_glop
from rlmux.policies.search.shared_placement import nodes_for_both
from rlmux.policies.time_slice_clock import Claim, Configuration, Seconds, SliceClock, SliceGrant
from rlmux.policies.time_slice_shares import Column, Demand, max_min_shares

TURNS_BEHIND = 2.0
"""Turns by which a pipeline is behind its target on a configuration before nodes are kept for it."""
_NEVER_HELD = 1e9
"""Priority, over the target, of what has received nothing yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """A configuration that a pipeline could hold."""

    configuration: Configuration
    nodes: Mapping[str, int]
    """Nodes by pool."""
    choice: PlacementChoice
    step_s: float | None
    """Seconds of a step there; None where they are not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gavel(OneRule):
    name: str = "gavel"
    turn_s: float = 360.0
    """Seconds after which a turn ends at the next step boundary."""
    reset_s: float = 1920.0
    """Least seconds between two targets."""
    solve: Solver = solve_with_glop

    def place(self, pipeline: Pipeline, view: PlacementView) -> PlacementChoice | Refusal:
        """Free nodes, the first configuration that has them: used before turns are given."""
        options = options_of(pipeline, view)
        if isinstance(options, Refusal):
            return options
        free = _free_nodes(view)
        return next((option.choice for option in options if _fits(option, free)), None) or queue(pipeline, view)

    @property
    def turn_taking(self) -> TurnTaking:
        return self

    def new_clock(self) -> SliceClock:
        return SliceClock()

    def begin_turn(self, clock: SliceClock, pipeline: PipelineId, placement: Placement, now_s: float) -> None:
        clock.begin(pipeline, placement, now_s)

    def end_turn(self, clock: SliceClock, pipeline: PipelineId, now_s: float) -> None:
        clock.end(pipeline, now_s)

    def give_turns(
        self,
        clock: SliceClock,
        claimants: tuple[tuple[Pipeline, Placement | None], ...],
        pipelines: tuple[Pipeline, ...],
        now_s: float,
        view: PlacementView,
    ) -> Mapping[PipelineId, TimeSlice | Refusal]:
        """Count up to now, make targets anew where they are old, and give nodes by them."""
        clock.count(now_s)
        num_nodes = tuple(view.num_nodes(phase) for phase in (Phase.ROLLOUT, Phase.TRAIN))
        is_kept = self.turn_s < now_s - clock.since_s < self.reset_s
        if not is_kept and clock.are_targets_old(pipelines, num_nodes):
            clock.set_targets(pipelines, num_nodes, self.share_out(pipelines, view), now_s)
        claims = tuple(clock.claim(pipeline, placement) for pipeline, placement in claimants)
        answers = self.turns(claims, now_s - clock.since_s, view)
        return {claim.pipeline.id: _given(claim, answers[claim.pipeline.id]) for claim in claims}

    def share_out(self, pipelines: tuple[Pipeline, ...], view: PlacementView) -> Mapping[PipelineId, Seconds]:
        """Part of the time that each pipeline is to hold each configuration, of those that there are nodes for now."""
        num_nodes = _num_nodes(view)
        options = {}
        for pipeline in pipelines:
            found = options_of(pipeline, view)
            there = () if isinstance(found, Refusal) else tuple(option for option in found if _fits(option, num_nodes))
            if there:
                options[pipeline.id] = there
        if _is_unbounded(view):
            cheapest = {
                pipeline.id: _cheapest(pipeline, options[pipeline.id], view)
                for pipeline in pipelines
                if pipeline.id in options
            }
            return {name: {option.configuration: 1.0} for name, option in cheapest.items()}
        demands = [_demand(pipeline, options[pipeline.id]) for pipeline in pipelines if pipeline.id in options]
        shares = max_min_shares(demands, num_nodes, self.solve)
        return {
            name: {option.configuration: share for option, share in zip(found, row, strict=True)}
            for (name, found), row in zip(options.items(), shares, strict=True)
        }

    def turns(
        self, claims: tuple[Claim, ...], elapsed_s: float, view: PlacementView
    ) -> Mapping[PipelineId, SliceGrant | Refusal]:
        """Nodes by priority, each pipeline once; see the module."""
        answers: dict[PipelineId, SliceGrant | Refusal] = {}
        candidates: list[tuple[tuple[float, float, float], Claim, Option]] = []
        for claim in claims:
            options = options_of(claim.pipeline, view)
            if isinstance(options, Refusal):
                answers[claim.pipeline.id] = options
                continue
            for option in _wanted(claim, options, view):
                candidates.append((_rank(claim, option, elapsed_s), claim, option))
        free, pace = _free_nodes(view), _pace(claims, elapsed_s)
        for _, claim, option in sorted(candidates, key=lambda ranked: ranked[0]):  # stable: first come, first served
            name = claim.pipeline.id
            if name in answers:
                continue
            if _fits(option, free):
                answers[name] = SliceGrant(configuration=option.configuration, choice=option.choice)
                free = _without(free, option)
            elif self._is_far_behind(claim, option, elapsed_s * pace):
                answers[name] = _waiting(claim)
                free = _without(free, option)
        return {claim.pipeline.id: answers.get(claim.pipeline.id) or _waiting(claim) for claim in claims}

    def _is_far_behind(self, claim: Claim, option: Option, elapsed_s: float) -> bool:
        due_s = claim.targets.get(option.configuration, 0.0) * elapsed_s
        behind_s = due_s - claim.received_s.get(option.configuration, 0.0)
        return behind_s > TURNS_BEHIND * max(self.turn_s, option.step_s or 0.0)


def _given(claim: Claim, answer: SliceGrant | Refusal) -> TimeSlice | Refusal:
    if isinstance(answer, Refusal):
        return answer
    return TimeSlice(answer.choice, is_as_before=answer.configuration == claim.holds)


def gavel() -> Gavel:
    """Raises UserError where the solver is not installed."""
    require_solver("policy 'gavel'")
    return Gavel()


def options_of(pipeline: Pipeline, view: PlacementView) -> tuple[Option, ...] | Refusal:
    """What the pipeline could hold on the empty cluster; why it can never be placed where that is nothing."""
    cluster = view.cluster
    rollout, train = cluster.pool_for(Phase.ROLLOUT), cluster.pool_for(Phase.TRAIN)
    needs = {Phase.ROLLOUT: pipeline.num_rollout_nodes, Phase.TRAIN: pipeline.num_train_nodes}
    options, refusal = [], impossible(pipeline, view, needs=needs)
    if refusal is None and rollout is not None and train is not None:
        step_s = pipeline.estimate.solo_s if pipeline.estimate else None
        options.append(_option(Configuration(rollout.name, train.name), needs, step_s, view))
    if train is not None and (rollout is None or pipeline.colocated_estimate is not None):
        needs = nodes_for_both(pipeline, view)
        needs[Phase.ROLLOUT] = 0
        never = impossible(pipeline, view, needs=needs, is_colocated=True)
        refusal = never if rollout is None else refusal
        if never is None:
            step_s = colocated_step_s(pipeline, train)
            if step_s == math.inf:
                step_s = pipeline.estimate.solo_s if pipeline.estimate else math.inf
            known_s = step_s if step_s < math.inf else None
            options.append(_option(Configuration(train.name, train.name), needs, known_s, view))
    if options:
        return tuple(options)
    return refusal or impossible(pipeline, view) or queue(pipeline, view)


def _option(
    configuration: Configuration, needs: Mapping[Phase, int], step_s: float | None, view: PlacementView
) -> Option:
    choice = PlacementChoice(
        kind=AdmissionKind.NEW,
        group=None,
        num_new_rollout_nodes=needs[Phase.ROLLOUT],
        num_new_train_nodes=needs[Phase.TRAIN],
        is_colocated=configuration.rollout == configuration.train,
    )
    nodes = {pool.name: needs[phase] for phase in needs if (pool := view.cluster.pool_for(phase)) and needs[phase]}
    return Option(configuration=configuration, nodes=nodes, choice=choice, step_s=step_s)


def _demand(pipeline: Pipeline, options: tuple[Option, ...]) -> Demand:
    """Where no seconds are known every configuration is as fast as any other."""
    is_known = all(option.step_s for option in options)
    return Demand(
        columns=tuple(
            Column(steps_per_s=1.0 / option.step_s if is_known and option.step_s else 1.0, nodes=option.nodes)
            for option in options
        ),
        num_nodes=pipeline.num_rollout_nodes + pipeline.num_train_nodes,
    )


def _wanted(claim: Claim, options: tuple[Option, ...], view: PlacementView) -> list[Option]:
    """Options with a target. One that came after targets were made has none: any will do, or the cheapest."""
    if claim.targets:
        return [option for option in options if claim.targets.get(option.configuration, 0.0) > 0.0]
    return [_cheapest(claim.pipeline, options, view)] if _is_unbounded(view) else list(options)


def _cheapest(pipeline: Pipeline, options: tuple[Option, ...], view: PlacementView) -> Option:
    """The option whose steps cost least of those that keep the SLO; the first where none does, or nothing is known."""
    pools, budget_s = view.cluster.pools, slo_step_s(pipeline)
    in_time = [option for option in options if option.step_s is not None and option.step_s <= budget_s]

    def usd(option: Option) -> float:
        per_hour = sum(pools[pool].usd_per_node_hour * count for pool, count in option.nodes.items())
        return per_hour * (option.step_s or 0.0)

    return min(in_time, key=usd, default=options[0])


def _rank(claim: Claim, option: Option, elapsed_s: float) -> tuple[float, float, float]:
    """Smallest first: target over the part of the time that was received, then deficit, then target."""
    configuration = option.configuration
    target, received_s = claim.targets.get(configuration, 0.0), claim.received_s.get(configuration, 0.0)
    priority = target * elapsed_s / received_s if received_s > 0.0 else target * _NEVER_HELD
    return (-priority, -claim.deficits_s.get(configuration, 0.0), -target)


def _pace(claims: tuple[Claim, ...], elapsed_s: float) -> float:
    """Part of their targets that these have received together, at most 1: switches and whole steps cost all of them."""
    due_s = sum(sum(claim.targets.values()) for claim in claims) * elapsed_s
    received_s = sum(sum(claim.received_s.values()) for claim in claims)
    return min(1.0, received_s / due_s) if due_s > 0.0 else 1.0


def _waiting(claim: Claim) -> Refusal:
    share = sum(claim.targets.values())
    cause = (
        f"it is to hold nodes for {share:.0%} of the time" if claim.targets else "its part of the time is not set yet"
    )
    return Refusal(reason=f"pipeline {claim.pipeline.id} waits for its turn: {cause}", is_final=False)


def _is_unbounded(view: PlacementView) -> bool:
    return all(count == math.inf for count in _num_nodes(view).values())


def _num_nodes(view: PlacementView) -> dict[str, float]:
    return {name: view.num_nodes(pool.phase) for name, pool in view.cluster.pools.items()}


def _free_nodes(view: PlacementView) -> dict[str, float]:
    return {name: view.num_free_nodes(pool.phase) for name, pool in view.cluster.pools.items()}


def _fits(option: Option, free: Mapping[str, float]) -> bool:
    return all(count <= free[pool] for pool, count in option.nodes.items())


def _without(free: Mapping[str, float], option: Option) -> dict[str, float]:
    return {pool: max(0.0, count - option.nodes.get(pool, 0)) for pool, count in free.items()}
