"""What-if questions: the rest of a run, simulated unchanged and with a change, side by side.

Ongoing ─▶ Workload ──────────────▶ simulate ─▶ now  ─┐
              └─ add, remove, policy, cluster ─▶ then ─┴▶ table of both

Both are simulated in three worlds (workloads/spread.py): figures are those of the expected one, with a range from the
low to the high one. A change is then less now in the same world, as most of a prediction's error is common to both.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rlmux.core.errors import UserError
from rlmux.core.estimation.measured_steps import MEASURED_STEPS
from rlmux.core.model import Cluster
from rlmux.sim.results.result import SimResult
from rlmux.sim.results.sweep import SimRun, sweep
from rlmux.sim.workloads.arrivals import Arrival, Workload, check_nodes
from rlmux.sim.workloads.ongoing import Ongoing
from rlmux.sim.workloads.spread import UNMEASURED, Bound, at_bound, is_measured

FEW_STEPS = 2000
"""Steps that are simulated sooner than a process is started."""
FIGURES = (
    "makespan_s",
    "mean_step_slowdown",
    "max_step_slowdown",
    "mean_queue_s",
    "slo_attainment",
    "cost_usd",
    "cost_usd_per_hour",
)
"""Figures of a side that have a range."""
PIPELINE_FIGURES = "ends_s", "queue_s", "step_slowdown"
"""Figures of a pipeline that have a range."""
NUM_WORLDS = 1 + len(Bound)
"""The expected one and the two bounds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WhatIfChange:
    """The change of a what-if question."""

    added: Sequence[Arrival] = ()
    removed: Sequence[str] = ()
    policy: str | None = None
    cluster: Cluster | None = None

    def applied_to(self, workload: Workload) -> Workload:
        """Raises UserError for a name that is taken, or that is not there."""
        there = [str(arrival.pipeline.id) for arrival in workload.arrivals]
        for name in self.removed:
            if name not in there:
                raise UserError(f"--remove {name}: not a pipeline that goes on; accepted: {', '.join(sorted(there))}")
        for arrival in self.added:
            if arrival.pipeline.id in there:
                raise UserError(f"pipeline {arrival.pipeline.id}: the run has one of this name; accepted: another name")
        kept = [arrival for arrival in workload.arrivals if arrival.pipeline.id not in self.removed]
        return replace(workload, arrivals=(*kept, *self.added), cluster=self.cluster or workload.cluster)


def what_if(run: Ongoing, change: WhatIfChange) -> dict[str, Any]:
    """Figures of what is left of the run, now and then; times are seconds from the log's last moment on.

    {"run", "at_s", "about", "notes", "now": SIDE, "then": SIDE,
     "change": {FIGURES, RANGE, "pipelines": {name: {PIPELINE_FIGURES, RANGE}}}}
    SIDE = {"policy", figures as in `simulate --json`, RANGE,
            "pipelines": {name: {"ends_s", "queue_s", "step_slowdown", "slo_slowdown", "keeps_slo", "refused", RANGE}}}
    RANGE = "low": {the least of each figure in the three worlds}, "high": {the largest}
    """
    policies = run.policy, change.policy or run.policy
    workloads = run.left, change.applied_to(run.left)
    if not run.left.arrivals and not change.added:
        raise UserError(f"{run.left.name}: nothing to predict; all its pipelines are over")
    for workload in workloads:
        check_nodes(workload)
    runs = [
        SimRun(workload=world, policy=policy)
        for workload, policy in zip(workloads, policies, strict=True)
        for world in _worlds(workload)
    ]
    num_steps = sum(_num_steps(arrival) for run in runs for arrival in run.workload.arrivals)
    results = sweep(runs, num_processes=1 if num_steps <= FEW_STEPS else None)
    sides = [_side(result) for result in results]
    now, then = sides[:NUM_WORLDS], sides[NUM_WORLDS:]
    return {
        "run": run.left.name,
        "at_s": run.at_s,
        "about": run.left.about,
        "notes": [*run.left.notes, *_notes(workloads)],
        "now": _with_range(now),
        "then": _with_range(then),
        "change": _with_range([_change(*both) for both in zip(now, then, strict=True)]),
    }


def _worlds(workload: Workload) -> list[Workload]:
    """The workload in the expected, the low and the high world."""
    bounds = [
        replace(workload, arrivals=tuple(at_bound(arrival, bound) for arrival in workload.arrivals)) for bound in Bound
    ]
    return [workload, *bounds]


def _notes(workloads: Sequence[Workload]) -> list[str]:
    arrivals = {arrival.pipeline.id: arrival for workload in workloads for arrival in workload.arrivals}
    return [
        f"{name}: fewer than {MEASURED_STEPS} steps are measured; its range is {UNMEASURED:.0%} more or less"
        for name, arrival in arrivals.items()
        if not is_measured(arrival)
    ]


def _num_steps(arrival: Arrival) -> float:
    pipeline = arrival.pipeline
    return math.inf if pipeline.num_steps is None else pipeline.num_steps - pipeline.first_step + 1


def _side(result: SimResult) -> dict[str, Any]:
    return {
        "policy": result.policy,
        **result.figures(),
        "pipelines": {
            str(pipeline.pipeline): {
                "ends_s": pipeline.left_s,
                "queue_s": pipeline.queue_s,
                "step_slowdown": pipeline.shown_slowdown,
                "slo_slowdown": pipeline.slo_slowdown,
                "keeps_slo": pipeline.keeps_slo,
                "refused": pipeline.refused,
            }
            for pipeline in result.pipelines
        },
    }


def _change(now: Mapping[str, Any], then: Mapping[str, Any]) -> dict[str, Any]:
    """Figures then less those now, in one world."""
    return {
        **_less(FIGURES, now, then),
        "pipelines": {
            name: _less(PIPELINE_FIGURES, now["pipelines"][name], figures)
            for name, figures in then["pipelines"].items()
            if name in now["pipelines"]
        },
    }


def _less(keys: Sequence[str], now: Mapping[str, Any], then: Mapping[str, Any]) -> dict[str, Any]:
    return {key: None if now[key] is None or then[key] is None else then[key] - now[key] for key in keys}


def _with_range(worlds: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The first of the worlds, with the range of its figures over all of them."""
    first, *_ = worlds
    return {
        **first,
        **_range(FIGURES, worlds),
        "pipelines": {
            name: {**figures, **_range(PIPELINE_FIGURES, [world["pipelines"][name] for world in worlds])}
            for name, figures in first["pipelines"].items()
        },
    }


def _range(keys: Sequence[str], worlds: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float | None]]:
    """The least and the largest of each figure; None where a world has none."""
    values = {key: [world[key] for world in worlds] for key in keys}
    return {
        bound: {key: None if None in own else pick(own) for key, own in values.items()}
        for bound, pick in (("low", min), ("high", max))
    }
