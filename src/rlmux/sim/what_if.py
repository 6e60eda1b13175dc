"""What-if questions: the rest of a run, simulated unchanged and with a change, side by side.

Ongoing ─▶ Workload ──────────────▶ simulate ─▶ now  ─┐
              └─ add, remove, policy, cluster ─▶ then ─┴▶ table of both
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from rlmux.core.errors import UserError
from rlmux.core.model import Cluster
from rlmux.sim.results.result import SimResult
from rlmux.sim.results.sweep import SimRun, sweep
from rlmux.sim.workloads.arrivals import Arrival, Workload
from rlmux.sim.workloads.ongoing import Ongoing

FEW_STEPS = 2000
"""Steps that are simulated sooner than a process is started."""


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

    {"run", "at_s", "about", "notes", "now": SIDE, "then": SIDE}
    SIDE = {"policy", figures as in `simulate --json`,
            "pipelines": {name: {"ends_s", "queue_s", "step_slowdown", "slo_slowdown", "keeps_slo", "refused"}}}
    """
    policies = run.policy, change.policy or run.policy
    workloads = run.left, change.applied_to(run.left)
    if not run.left.arrivals and not change.added:
        raise UserError(f"{run.left.name}: nothing to predict; all its pipelines are over")
    runs = [SimRun(workload=one, policy=policy) for one, policy in zip(workloads, policies, strict=True)]
    num_steps = sum(_num_steps(arrival) for one in workloads for arrival in one.arrivals)
    results = sweep(runs, num_processes=1 if num_steps <= FEW_STEPS else None)
    now, then = (_side(result) for result in results)
    return {
        "run": run.left.name,
        "at_s": run.at_s,
        "about": run.left.about,
        "notes": list(run.left.notes),
        "now": now,
        "then": then,
    }


def _num_steps(arrival: Arrival) -> float:
    pipeline = arrival.pipeline
    return math.inf if pipeline.num_steps is None else pipeline.num_steps - pipeline.first_step + 1


def _side(result: SimResult) -> dict[str, Any]:
    return {
        "policy": result.policy,
        **result.figures(),
        "pipelines": {
            str(one.pipeline): {
                "ends_s": one.left_s,
                "queue_s": one.queue_s,
                "step_slowdown": one.shown_slowdown,
                "slo_slowdown": one.slo_slowdown,
                "keeps_slo": one.keeps_slo,
                "refused": one.refused,
            }
            for one in result.pipelines
        },
    }
