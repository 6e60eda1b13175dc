"""The simulator for its callers: words in, plain dictionaries out.

    simulate(workload, policies=..., num_seeds=...)  ─▶ figures by policy: means over seeds, with min and max
    plan(workload, policy=...)                       ─▶ where every pipeline would go, its slowdown, $/h

`progress(done, total)` is called as simulations end. Nothing here prints. What only some calls need is imported there:
`plan` of a file takes no numpy and no processes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlmux.core.actions import Admit, ExpectSteps, Queue, Refuse
from rlmux.core.errors import UserError
from rlmux.core.events import PipelineSubmitted
from rlmux.core.model import AdmissionKind, Phase, Pipeline
from rlmux.core.placement.choice import PlacementChoice
from rlmux.core.placement.group_load import GroupLoad, solo_s
from rlmux.core.placement.placement_ledger import PlacementLedger
from rlmux.core.placement.view import PlacementView
from rlmux.core.scheduler import Scheduler
from rlmux.policies import make_policy
from rlmux.policies.max_min_fairness import FairShares
from rlmux.report.slos import is_within_slo, phase_fields
from rlmux.sim.results.metrics import predicted_slowdown
from rlmux.sim.results.plan_costs import PlanCosts, plan_costs
from rlmux.sim.results.result import SimResult
from rlmux.sim.workloads import spot as spot_trace
from rlmux.sim.workloads.arrivals import Arrival, Workload, check_ends, check_nodes, notes_of_prices

if TYPE_CHECKING:
    from rlmux.sim.results.sweep import Progress, SimRun

_MOST_LISTED = 3
"""Most notes of one kind that are listed one by one."""
WorkloadMaker = Callable[[int], Workload]
"""Makes the workload of a seed."""


def simulate(
    workload: str | Workload | WorkloadMaker,
    *,
    policies: Sequence[str],
    num_seeds: int = 1,
    seeds: Sequence[int] | None = None,
    progress: Progress | None = None,
    num_processes: int | None = None,
    out: Path | None = None,
    counts_decisions: bool = False,
    prices_moves: bool = False,
) -> dict[str, Any]:
    """Figures of every policy over `seeds`, by default 0 to num_seeds - 1; with `out`, pictures and a page go there.
    `counts_decisions`: decisions take the time that they take on this machine, instead of none. `prices_moves`: what
    relocations saved, from a second simulation without them.

    {"workload", "about", "num_seeds", "seeds", "notes",
     "policies": {name: {figure: mean, ..., "min": {...}, "max": {...}}}}
    """
    from rlmux.sim.results.sweep import sweep

    if seeds is None:
        if num_seeds < 1:
            raise UserError(f"num_seeds is {num_seeds}; accepted: 1 or more")
        seeds = range(num_seeds)
    tasks = tasks_of(workload, policies, seeds)
    if counts_decisions:
        tasks = tuple(replace(task, counts_decisions=True) for task in tasks)
    if out is not None:
        tasks = tuple(replace(task, spans_until_s=_first_steps_s(task.workload)) for task in tasks)
    results = sweep(tasks, progress=progress, num_processes=num_processes)
    if prices_moves:
        results = _with_moves_saved(tasks, results, progress, num_processes)
    by_policy: dict[str, list[SimResult]] = {name: [] for name in policies}
    for task, result in zip(tasks, results, strict=True):
        by_policy[str(task.policy)].append(result)
    report: dict[str, Any] = {
        "workload": tasks[0].workload.name,
        "about": tasks[0].workload.about,
        "num_seeds": len(seeds),
        "seeds": list(seeds),
        "notes": [*notes_of(tasks[0].workload, policies), *_refusals(by_policy), *_policy_faults(by_policy)],
        "policies": {name: over_seeds(runs) for name, runs in by_policy.items()},
    }
    if out is not None:
        from rlmux.sim.results.pictures import write_pictures

        report["pictures"] = [str(path) for path in write_pictures(by_policy, out, title=tasks[0].workload.name)]
    return report


def _with_moves_saved(
    tasks: Sequence[SimRun], results: Sequence[SimResult], progress: Progress | None, num_processes: int | None
) -> tuple[SimResult, ...]:
    """The results with the bill without relocations. A simulation that had none would be the same again."""
    from rlmux.sim.results.sweep import sweep

    moved = [index for index, result in enumerate(results) if result.num_moves]
    repeated = [replace(tasks[index], without_moves=True) for index in moved]
    unmoved = sweep(repeated, progress=progress, num_processes=num_processes)
    usd_by_index = {index: result.paid_usd for index, result in zip(moved, unmoved, strict=True)}
    return tuple(
        replace(result, unmoved_usd=usd_by_index.get(index, result.paid_usd)) for index, result in enumerate(results)
    )


def with_spot(workload: str | Workload | WorkloadMaker, path: Path) -> Workload | WorkloadMaker:
    """The workload on spot nodes, with the file's prices and reclaims. Raises UserError."""
    if isinstance(workload, Workload):
        return replace(workload, spot=spot_trace.load(path, workload.cluster))
    made = workload

    def of_seed(seed: int) -> Workload:
        named = _named(made, seed) if isinstance(made, str) else made(seed)
        return replace(named, spot=spot_trace.load(path, named.cluster))

    of_seed(0)  # errors in the file are raised before any simulation
    return of_seed


def _named(text: str, seed: int = 0) -> Workload:
    from rlmux.sim.workloads import catalog

    return catalog.load(text, seed=seed)


def notes_of(workload: Workload, policies: Sequence[str]) -> list[str]:
    """What was not given and what was taken instead, a line each."""
    spot_pools = () if workload.spot is None else workload.spot.pools
    notes = [*notes_of_prices(workload.cluster, spot_pools), *workload.notes]
    pipelines = [arrival.pipeline for arrival in workload.arrivals]
    missing = [pipeline for pipeline in pipelines if _misses_colocated_seconds(workload, pipeline)]
    if "colocated" in policies and missing:
        notes.append(f"colocated: {len(missing)} of {len(workload.arrivals)} pipelines have {_MISSING}")
    beyond = _first(_beyond_alone(workload), "pipelines whose SLO cannot hold even alone")
    return [*notes, *_without_limit(workload), *beyond]


def _without_limit(workload: Workload) -> list[str]:
    """Pipelines with an SLO whose proportion of phases at the token limit is not known, in a line."""
    bound = [arrival.pipeline for arrival in workload.arrivals if arrival.pipeline.slo_probability is not None]
    bound = [pipeline for pipeline in bound if pipeline.slo_slowdown < math.inf]
    num_without = sum(pipeline.limit is None for pipeline in bound)
    if not num_without:
        return []
    return [
        f"{num_without} of {len(bound)} pipelines with an SLO have no limit_rollout_s and limit_train_s: until three "
        "steps are seen, their phases are in the proportion of the means; `rlmux profile FILE` measures both"
    ]


def _refusals(by_policy: Mapping[str, Sequence[SimResult]]) -> list[str]:
    """Why pipelines were refused, each reason once, with the policies that gave it; of the first seed."""
    policies_by_reason: dict[str, list[str]] = {}
    for policy, runs in by_policy.items():
        for pipeline in runs[0].pipelines:
            if pipeline.refused:
                policies_by_reason.setdefault(pipeline.refused, []).append(policy)
    notes = [f"refused by {', '.join(named)}: {reason}" for reason, named in policies_by_reason.items()]
    return _first(notes, "reasons why pipelines were refused")


def _policy_faults(by_policy: Mapping[str, Sequence[SimResult]]) -> list[str]:
    """A line for each policy of which decisions failed, over all seeds."""
    return [
        _policy_fault_note(policy, sum(run.num_policy_faults for run in runs), error)
        for policy, runs in by_policy.items()
        if (error := next((run.first_policy_fault for run in runs if run.num_policy_faults), None)) is not None
    ]


def _policy_fault_note(policy: str, num_faults: int, error: str) -> str:
    decisions = "1 decision" if num_faults == 1 else f"{num_faults} decisions"
    verb = "was" if num_faults == 1 else "were"
    return f"{decisions} of policy {policy} failed and {verb} replaced by the plain order of work: {error}"


def _first(notes: list[str], what: str) -> list[str]:
    """The first few notes, and how many more there are."""
    num_more = len(notes) - _MOST_LISTED
    return notes if num_more <= 0 else [*notes[:_MOST_LISTED], f"more {what}: {num_more}"]


def _beyond_alone(workload: Workload) -> list[str]:
    """Pipelines whose SLO cannot hold even on nodes of their own, one note each."""
    ledger, solo = PlacementLedger(workload.cluster), make_policy("solo")
    notes = []
    for arrival in workload.arrivals:
        pipeline = arrival.pipeline
        if not solo_s(pipeline) or pipeline.slo_slowdown == math.inf:
            continue
        with ledger.trial():
            choice = solo.place(pipeline, PlacementView(ledger))
            if isinstance(choice, PlacementChoice):
                ledger.admit(pipeline, choice)
                notes += _beyond_slo(arrival, ledger.group_of(pipeline.id))
    return notes


def _beyond_slo(arrival: Arrival, group: GroupLoad) -> list[str]:
    """A note if a step of the pipeline, alone in its group, or the mean of its steps from its submission, is too long.

    A weight sync breaks no SLO: it is part of the solo time.
    """
    pipeline, alone_s = arrival.pipeline, solo_s(arrival.pipeline)
    placed_s = group.members[0].phase_load.solo_s
    switches_s = group.period_s - placed_s
    start_s = _start_s_per_step(arrival, switches_s)
    keeps_step = group.period_s <= pipeline.slo_slowdown * alone_s * (1.0 + 1e-9)
    if keeps_step and is_within_slo(group.period_s + start_s, alone_s, pipeline.slo_slowdown):
        return []
    causes = {
        "its switches": switches_s,
        "both phases on the same nodes": placed_s - alone_s,
        f"its cold start, over {pipeline.num_steps} steps": start_s,
    }
    reasons = " and ".join(f"{cause} ({seconds:.3g} s a step)" for cause, seconds in causes.items() if seconds > 1e-9)
    slowdown = (group.period_s + start_s) / alone_s
    return [
        f"slo_slowdown {pipeline.slo_slowdown:g} of pipeline {pipeline.id} cannot hold even alone: with {reasons} "
        f"a step takes {slowdown:.3f} times its estimate; accepted: {math.ceil(slowdown * 1e3 - 1e-6) / 1e3:g} or more"
    ]


def _start_s_per_step(arrival: Arrival, switches_s: float) -> float:
    """Seconds by which cold loads, in place of the first step's switches, lengthen the mean step; 0 where the number
    of steps is unknown."""
    pipeline = arrival.pipeline
    if pipeline.num_steps is None:
        return 0.0
    cold_s = arrival.switch.cold_rollout_s + arrival.switch.cold_train_s
    return max(0.0, cold_s - switches_s) / max(1, pipeline.num_steps - pipeline.first_step + 1)


_MISSING = (
    "no colocated_rollout_s and colocated_train_s: with both phases they hold their rollout nodes beside their "
    "training nodes, and are as fast as apart"
)


def _misses_colocated_seconds(workload: Workload, pipeline: Pipeline) -> bool:
    return pipeline.colocated_estimate is None and workload.cluster.pool_for(Phase.ROLLOUT) is not None


def _first_steps_s(workload: Workload) -> float:
    """End of a Gantt chart: ten steps of the slowest pipeline after the first submission."""
    longest_s = max(arrival.world.solo_s(1) for arrival in workload.arrivals)
    return workload.arrivals[0].submit_s + 10 * longest_s


def tasks_of(
    workload: str | Workload | WorkloadMaker, policies: Sequence[str], seeds: Sequence[int]
) -> tuple[SimRun, ...]:
    """One simulation for each policy and seed."""
    from rlmux.sim.results.sweep import SimRun

    if not policies:
        raise UserError("no policy was named; accepted: one or more of those in docs/how-it-works/policies.md")
    if not seeds:
        raise UserError("seeds: none is given; accepted: num_seeds of 1 or more, or one or more by number")
    for name in policies:
        make_policy(name)
    tasks = []
    for seed in seeds:
        if isinstance(workload, Workload):
            made = workload
        else:
            made = _named(workload, seed) if isinstance(workload, str) else workload(seed)
        check_ends(made)
        tasks += [SimRun(workload=made, policy=name) for name in policies]
    return tuple(tasks)


def over_seeds(results: Sequence[SimResult]) -> dict[str, Any]:
    """Means over the seeds, with the smallest and largest of each figure."""
    figures = [result.figures() for result in results]
    return {
        **_fold(figures, lambda values: sum(values) / len(values)),
        "min": _fold(figures, min),
        "max": _fold(figures, max),
    }


def _fold(figures: Sequence[Mapping[str, Any]], how: Callable[[list[float]], float]) -> dict[str, Any]:
    folded: dict[str, Any] = {}
    for key, first in figures[0].items():
        values = [row[key] for row in figures]
        if isinstance(first, Mapping):
            folded[key] = _fold(values, how)
        else:
            folded[key] = None if any(value is None for value in values) else how(values)
    return folded


def plan(workload: str | Workload, *, policy: str = "rollmux", out: Path | None = None) -> dict[str, Any]:
    """Place every pipeline in order of submission, as if none departed; start nothing.

        {"policy", "usd_per_hour", "solo_usd_per_hour", "paid_usd_per_hour", "bound_usd_per_hour", "usd_per_solo_hour",
         "paid_for": {part: $/h}, "gpus": {pool: count}, "num_groups", "notes",
         "pipelines": [{"pipeline", "status", "group", "admission", "rollout_nodes", "train_nodes",
                        "step_s", "step_slowdown", "slo_slowdown", "usd_per_hour", "bound_usd_per_hour", "reason",
                        "slo_probability", "bound", "estimate"}]}

    `usd_per_hour`: nodes in use, those that a relocation vacates included. `paid_usd_per_hour`: the groups' nodes and
    the other nodes that the cluster counts, the sum of `paid_for` (`results/plan_costs.py`). `bound`: solo seconds of
    each phase that the mean of its coming steps stays below with its probability. A pipeline's `usd_per_hour` is its
    part of its group's cost, by solo seconds; its `bound_usd_per_hour` is its own work on nodes that are never idle.
    With `out`, a picture goes there.
    """
    made = _named(workload) if isinstance(workload, str) else workload
    check_nodes(made)
    placed = _place(made, policy)
    query, costs = placed.scheduler.query, _costs(made, policy, placed.scheduler)
    view, pools = query.placement, made.cluster.pools
    notes = [*notes_of(made, [policy]), *([] if costs.paid_for else [_NO_PRICE])]
    if query.num_policy_faults:
        notes.append(_policy_fault_note(policy, query.num_policy_faults, query.first_policy_fault))
    planned = {
        "policy": policy,
        "usd_per_hour": view.usd_per_hour,
        "solo_usd_per_hour": solo_usd_per_hour(made),
        "paid_usd_per_hour": costs.paid_usd_per_hour,
        "bound_usd_per_hour": costs.bound_usd_per_hour,
        "usd_per_solo_hour": costs.usd_per_solo_hour,
        "paid_for": dict(costs.paid_for),
        "gpus": {name: view.num_nodes_in_use(name) * pool.gpus_per_node for name, pool in pools.items()},
        "num_groups": view.num_groups,
        "notes": notes,
        "pipelines": [
            {
                **_planned(view, given, placed, str(query.status(given.id)), costs.bound_by_pipeline.get(given.id)),
                **_stated(given, placed.stated.get(given.id)),
            }
            for given in (arrival.pipeline for arrival in made.arrivals)
        ],
    }
    if out is not None:
        from rlmux.sim.results.pictures import write_waterfall

        planned["pictures"] = [
            str(path) for path in write_waterfall(costs.paid_for, out, title=f"{made.name}, {policy}")
        ]
    return planned


_NO_PRICE = "no pool has a price, so no dollars are shown; accepted: cluster.pools.NAME.usd_per_gpu_hour"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Placed:
    """A scheduler to which every pipeline was submitted, and its answers, by pipeline."""

    scheduler: Scheduler
    admissions: dict[str, AdmissionKind] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)
    stated: dict[str, ExpectSteps] = field(default_factory=dict)


def _place(workload: Workload, policy: str) -> _Placed:
    """Submit every pipeline in order; start nothing."""
    placed = _Placed(scheduler=Scheduler(workload.cluster, make_policy(policy), FairShares()))
    for arrival in workload.arrivals:
        submitted = PipelineSubmitted(time_s=arrival.submit_s, pipeline=arrival.pipeline)
        for action in placed.scheduler.handle(submitted):
            if isinstance(action, Admit):
                placed.admissions[action.pipeline] = action.kind
            elif isinstance(action, Refuse | Queue):
                placed.reasons[action.pipeline] = action.reason
            elif isinstance(action, ExpectSteps):
                placed.stated[action.pipeline] = action
    return placed


def _costs(workload: Workload, policy: str, scheduler: Scheduler) -> PlanCosts:
    """What the plan's nodes are paid for; the plan without any SLO is made, too, if there is one."""
    groups = without = tuple(scheduler.query.placement.groups())
    has_price = any(group.usd_per_hour for group in groups)
    if has_price and any(arrival.pipeline.slo_slowdown < math.inf for arrival in workload.arrivals):
        without = tuple(_place(_without_slos(workload), policy).scheduler.query.placement.groups())
    return plan_costs(groups, workload.cluster, without)


def _without_slos(workload: Workload) -> Workload:
    arrivals = tuple(
        replace(arrival, pipeline=replace(arrival.pipeline, slo_slowdown=math.inf, slo_probability=None))
        for arrival in workload.arrivals
    )
    return replace(workload, arrivals=arrivals)


def _stated(pipeline: Pipeline, expected: ExpectSteps | None) -> dict[str, Any]:
    """Its probability, and the bounds beside the estimate, as in a run's status."""
    bounded, estimate = expected.bounded if expected else None, pipeline.estimate
    return {
        "slo_probability": expected.probability if expected else None,
        "bound": phase_fields(bounded.bound) if bounded else None,
        "estimate": {"source": "given", **phase_fields(estimate)} if estimate else None,
    }


def solo_usd_per_hour(workload: Workload) -> float:
    """Dollars per hour of the same pipelines with nodes of their own, all at once."""
    cluster = workload.cluster
    total = 0.0
    for arrival in workload.arrivals:
        pipeline = arrival.pipeline
        for phase, count in (("rollout", pipeline.num_rollout_nodes), ("train", pipeline.num_train_nodes)):
            pool = next((pool for pool in cluster.pools.values() if pool.phase == phase), None)
            if cluster.is_one_pool:
                count = max(count, pipeline.num_rollout_nodes) if pool else 0
            total += count * pool.usd_per_node_hour if pool else 0.0
    return total


def _planned(
    view: PlacementView, pipeline: Pipeline, placed: _Placed, status: str, bound_usd_per_hour: float | None
) -> dict[str, Any]:
    row: dict[str, Any] = {
        "pipeline": str(pipeline.id),
        "status": status,
        "group": None,
        "admission": None,
        "rollout_nodes": [],
        "train_nodes": [],
        "step_s": None,
        "step_slowdown": None,
        "slo_slowdown": pipeline.slo_slowdown,
        "usd_per_hour": 0.0,
        "bound_usd_per_hour": bound_usd_per_hour,
        "reason": placed.reasons.get(pipeline.id, ""),
    }
    if pipeline.id not in view:
        return row
    placement = view.placement(pipeline.id)
    group = view.group(placement.group)
    row.update(
        group=int(group.id),
        admission=str(placed.admissions[pipeline.id]),
        rollout_nodes=[str(node) for node in placement.rollout_nodes],
        train_nodes=[str(node) for node in placement.train_nodes],
        step_s=group.period_s / view.member(pipeline.id).steps_per_cycle,
        step_slowdown=predicted_slowdown(group, pipeline),
        usd_per_hour=_part_usd_per_hour(view, group, pipeline),
    )
    return row


def _part_usd_per_hour(view: PlacementView, group: GroupLoad, pipeline: Any) -> float:
    pools = view.cluster.pools
    nodes = dict.fromkeys(group.rollout_nodes + group.train_nodes)
    cost = sum(pools[node.pool].usd_per_node_hour for node in nodes)
    weights = {m.pipeline.id: m.phase_load.solo_s for m in group.members}
    total = sum(weights.values())
    return cost * (weights[pipeline.id] / total if total else 1 / len(weights))
