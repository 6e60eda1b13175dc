"""RollMux's published figures again: what is simulated, what it is held against, and what was chosen.

    _Plan ──spread──▶ results by key ──rollmux_rows──▶ published, replay, ours, causes
                                     └──────────────▶ our_accounting, bounds

All rows are by the paper's accounting: pipelines leave when they did in the original cluster, so a slower policy does
less work; switches, weight sync and relocations are free (its $/h fit nothing else); an SLO is held against finished
steps from the first work on. `our_accounting` has the production trace beside them with the same steps under every
policy and all costs.

All inputs travel with the package.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rlmux.core.model import MEAN
from rlmux.papers.offline_optimum import OfflineCost, offline_cost, steady_usd_per_hour
from rlmux.papers.paper_rows import mean
from rlmux.papers.rollmux_rows import (
    BASELINES,
    BOUNDED,
    CHOICES,
    DRIFTS,
    MIXES,
    PRINTED,
    PUBLISHED_STAY_H,
    charged,
    rows_of,
)
from rlmux.policies import POLICIES, make_policy
from rlmux.sim.bounds import kept_slos_usd
from rlmux.sim.results.pictures import write_pictures
from rlmux.sim.results.result import SimResult
from rlmux.sim.results.sweep import Progress, SimRun, run_simulation, spread
from rlmux.sim.workloads import catalog
from rlmux.sim.workloads.arrivals import Workload

PAPER_ACCOUNTING: Mapping[str, Any] = {"departure": "wall", "costs": False}
"""Parameters of a workload that is accounted for as the paper does; by default ours are."""
WEAVE_ACCOUNTING: Mapping[str, Any] = {**PAPER_ACCOUNTING, "slo_probability": MEAN}
"""The same for the production trace, which the paper's scripts replay with means."""
_OUR_POLICIES = ("solo", "colocated", "rollmux", "rlmux")
_WITHOUT_SOLVER: Mapping[str, str] = {
    "what": "gain of gavel over Solo-D",
    "why": "OR-tools is not installed: pip install 'rlmux[solver]'",
}
_HOUR_S = 3600.0
_MAX_DRIFT_SEEDS = 1
"""Hourly regrouping by exact search takes far longer than any policy."""


@dataclass(frozen=True, slots=True)
class _Regroup:
    """An offline optimum to be found."""

    workload: Workload
    every_s: float | None = None


def reproduce(*, num_seeds: int = 5, progress: Progress | None = None, out: Path | None = None) -> dict[str, Any]:
    """{"paper", "num_seeds", "rows", "our_accounting", "bounds", "choices", "left_out"}; with `out`, pictures of the
    trace too."""
    plan = _Plan(num_seeds)
    results = spread(_run, plan.work, progress=progress)
    has_solver = find_spec("ortools") is not None
    done: dict[tuple[Any, ...], Any] = dict(zip(plan.keys, results, strict=True))
    report: dict[str, Any] = {
        "paper": "RollMux (arXiv 2512.11306, OSDI'26)",
        "num_seeds": num_seeds,
        "rows": [
            row.as_dict() for row in rows_of(done, num_seeds, min(num_seeds, _MAX_DRIFT_SEEDS), has_solver=has_solver)
        ],
        "our_accounting": _our_accounting(done, num_seeds),
        "bounds": _bounds(done, num_seeds),
        "choices": list(CHOICES),
        "left_out": [] if has_solver else [dict(_WITHOUT_SOLVER)],
    }
    if out is not None:
        drawn = {name: [done["weave", 2, name, 0]] for name in ("solo", "colocated", *plan.placing)}
        report["pictures"] = [str(path) for path in write_pictures(drawn, out, title="weave")]
    return report


def _bounds(done: Mapping[tuple[Any, ...], Any], num_seeds: int) -> list[dict[str, Any]]:
    """$/h of the production trace that no policy is below, and of steady whole nodes, which is no bound."""
    rows = []
    for nodes in (1, 2):
        made = [
            catalog.build("weave", seed=seed, train_nodes_32b=nodes, **WEAVE_ACCOUNTING) for seed in range(num_seeds)
        ]
        by_what = {("the steps that keep every SLO, on nodes that are never idle", True): _kept_slos_usd_per_hour}
        for uses_slack, speed in ((False, "solo speed"), (True, "all SLO slack")):
            for colocated in (False, True):
                where = "rollouts on training GPUs too" if colocated else "pools apart"
                by_what[f"whole nodes at every moment, {speed}, {where}", False] = partial(
                    steady_usd_per_hour, uses_slack=uses_slack, colocated=colocated
                )
        for (what, is_bound), usd_per_hour in by_what.items():
            rows.append(
                {
                    "what": f"{what}, {charged(nodes)}",
                    "usd_per_hour": round(mean([usd_per_hour(workload) for workload in made]), 1),
                    "is_bound": is_bound,
                    **{name: round(mean(_usd_per_hour(done, nodes, name, num_seeds)), 1) for name in _placing()},
                }
            )
    return rows


def _usd_per_hour(done: Mapping[tuple[Any, ...], Any], nodes: int, policy: str, num_seeds: int) -> list[float]:
    return [done["weave", nodes, policy, seed].cost_usd_per_hour for seed in range(num_seeds)]


def _placing() -> list[str]:
    return [name for name in ("rollmux", "rlmux") if name in POLICIES]


def _kept_slos_usd_per_hour(workload: Workload) -> float:
    assert workload.end_s is not None, "by the paper's accounting departures are given"
    return kept_slos_usd(workload) * _HOUR_S / (workload.end_s - workload.arrivals[0].submit_s)


def _our_accounting(done: Mapping[tuple[Any, ...], Any], num_seeds: int) -> list[dict[str, Any]]:
    """The production trace by policy, 32B on two nodes: the same steps, with switches, syncs and relocations."""
    rows = []
    for name in _OUR_POLICIES:
        if ("ours", name, 0) not in done:
            continue
        runs: list[SimResult] = [done["ours", name, seed] for seed in range(num_seeds)]
        dollars = [run.cost_usd for run in runs]
        rows.append(
            {
                "policy": name,
                "cost_usd": round(mean(dollars)),
                "min": round(min(dollars)),
                "max": round(max(dollars)),
                "bound_usd": round(mean([run.bound_usd for run in runs])),
                "cost_usd_per_solo_hour": round(mean([run.cost_usd_per_solo_hour or 0.0 for run in runs]), 2),
                "slo_attainment": round(mean([run.slo_attainment for run in runs]), 4),
            }
        )
    return rows


class _Plan:
    """What is to be simulated, and the key of each result."""

    def __init__(self, num_seeds: int) -> None:
        self.keys: list[tuple[Any, ...]] = []
        self.work: list[SimRun | _Regroup] = []
        self.placing = _placing()
        for drift in DRIFTS:
            for seed in range(min(num_seeds, _MAX_DRIFT_SEEDS)):
                drifting = catalog.build(f"drift-{drift}", seed=seed, **WEAVE_ACCOUNTING)
                self._add(("drift", drift, "offline", seed), _Regroup(drifting, _HOUR_S))
                self._add(("drift", drift, "rollmux", seed), SimRun(workload=drifting, policy="rollmux"))
                bounded = catalog.build(f"drift-{drift}", seed=seed, **PAPER_ACCOUNTING)
                self._add(("drift", drift, BOUNDED, seed), SimRun(workload=bounded, policy="rollmux"))
        for seed in range(num_seeds):
            for nodes in (1, 2):
                made = catalog.build("weave", seed=seed, train_nodes_32b=nodes, **WEAVE_ACCOUNTING)
                for name in self.placing if seed else ("solo", "colocated", *self.placing):
                    self._add(("weave", nodes, name, seed), SimRun(workload=made, policy=name))
                printed = make_policy("rollmux", skips_saturated=True)
                self._add(("weave", nodes, PRINTED, seed), SimRun(workload=made, policy=printed))
                bounded = catalog.build("weave", seed=seed, train_nodes_32b=nodes, **PAPER_ACCOUNTING)
                self._add(("weave", nodes, BOUNDED, seed), SimRun(workload=bounded, policy="rollmux"))
            for name in _OUR_POLICIES:
                if name in POLICIES:
                    self._add(("ours", name, seed), SimRun(workload=catalog.build("weave", seed=seed), policy=name))
            for mix in MIXES:
                made = catalog.build(mix, seed=seed, **PAPER_ACCOUNTING)
                self._add((mix, "offline", seed), _Regroup(made))
                for name in ("rollmux", *BASELINES):
                    self._add((mix, name, seed), SimRun(workload=made, policy=name))
        for mix in MIXES:
            made = _with_published_stay(catalog.build(mix, seed=0, **PAPER_ACCOUNTING))
            self._add(("stretched", mix, "offline"), _Regroup(made))
            for name in BASELINES:
                self._add(("stretched", mix, name), SimRun(workload=made, policy=name))

    def _add(self, key: tuple[Any, ...], work: SimRun | _Regroup) -> None:
        self.keys.append(key)
        self.work.append(work)


def _with_published_stay(workload: Workload) -> Workload:
    """Every stay stretched alike, so that the mean is the paper's."""
    stays_s = [(arrival.depart_s or arrival.submit_s) - arrival.submit_s for arrival in workload.arrivals]
    factor = PUBLISHED_STAY_H * _HOUR_S / mean(stays_s)
    stretched = zip(workload.arrivals, stays_s, strict=True)
    return replace(
        workload,
        arrivals=tuple(replace(arrival, depart_s=arrival.submit_s + factor * stay_s) for arrival, stay_s in stretched),
    )


def _run(work: SimRun | _Regroup) -> SimResult | OfflineCost:
    if isinstance(work, _Regroup):
        return offline_cost(work.workload, regroup_every_s=work.every_s)
    result = run_simulation(work)
    return replace(result, pipelines=result.pipelines, spans=())
