"""RollMux's published figures again: what the paper says, what we get, and why where these differ.

    weave (8.6)      cost, attainment, admissions, peaks; 32B charged one training node and two
    mixes (8.7)      cost over the offline optimum; the baselines with the paper's penalty
    micro (8.4)      gain of sharing over Solo-D at equal dollars
    tail (8.5)       gain of long-tail migration
    drift (8.8)      cost over hourly regrouping; attainment

All rows are by the paper's accounting: pipelines leave when they did in the original cluster, so a slower policy does
less work; switches, weight sync and relocations are free (its $/h fit nothing else); an SLO is held against finished
steps from the first work on. `our_accounting` has the production trace beside them with the same steps under every
policy and all costs.

All inputs travel with the package.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rlmux.papers import micro_cycles as micro
from rlmux.papers import tail_migration as tail
from rlmux.papers.offline_optimum import OfflineCost, offline_cost, steady_usd_per_hour
from rlmux.papers.rows import Row, mean, row_over
from rlmux.policies import POLICIES
from rlmux.sim.bounds import kept_slos_usd
from rlmux.sim.metrics import SimResult
from rlmux.sim.pictures import write_pictures
from rlmux.sim.sweep import Progress, SimRun, run_simulation, spread
from rlmux.sim.workloads import catalog
from rlmux.sim.workloads.arrivals import Workload

PAPER_ACCOUNTING: Mapping[str, Any] = {"departure": "wall", "costs": False}
"""Parameters of a workload that is accounted for as the paper does; by default ours are."""
_OUR_POLICIES = ("solo", "colocated", "rollmux", "rlmux")
_MIXES = ("bl", "rh", "th", "mixed")
_MIX_POLICIES = ("rollmux", "random", "most-idle")
_MIX_PUBLISHED = {
    "rollmux": (1.12, 1.10, 1.01, 1.06),
    "random": (2.00, 1.92, 1.72, 1.97),
    "most-idle": (1.75, 1.89, 1.38, 1.66),
}
_DRIFTS = ("up", "down", "mixed")
_DRIFT_PUBLISHED = {"up": (1.11, 0.986), "down": (1.10, 0.987), "mixed": (1.08, 0.956)}
_HOUR_S = 3600.0
_REGROUPING_FRACTION = 32.9 / 370.2
"""Fraction of all time that the paper's hourly regrouping spends on restarts; ours is free and is charged this."""
_REGROUPING = "our hourly regrouping is an exact search over all groups; the paper samples 10,000 partitions"
_MAX_DRIFT_SEEDS = 1
"""Hourly regrouping by exact search takes far longer than any policy."""


@dataclass(frozen=True, slots=True)
class _Regroup:
    """An offline optimum to be found."""

    workload: Workload
    every_s: float | None = None


def reproduce(*, num_seeds: int = 5, progress: Progress | None = None, out: Path | None = None) -> dict[str, Any]:
    """All rows; with `out`, pictures of the production trace too."""
    plan = _Plan(num_seeds)
    results = spread(_run, plan.work, progress=progress)
    done: dict[tuple[Any, ...], Any] = dict(zip(plan.keys, results, strict=True))
    bounds = _lower_bounds(num_seeds)
    rows = [*_weave_rows(done, num_seeds), *_beyond_rows(done, num_seeds), *_bound_rows(done, bounds, num_seeds)]
    rows += _mix_rows(done, num_seeds)
    rows += [*_micro_rows(), *_tail_rows(), *_drift_rows(done, min(num_seeds, _MAX_DRIFT_SEEDS))]
    report: dict[str, Any] = {
        "paper": "RollMux (arXiv 2512.11306, OSDI'26)",
        "num_seeds": num_seeds,
        "rows": [row.as_dict() for row in rows],
        "lower_bounds_usd_per_hour": {label: round(sum(v) / len(v), 1) for label, v in bounds.items()},
        "our_accounting": _our_accounting(done, num_seeds),
    }
    if out is not None:
        drawn = {name: [done["weave", 2, name, 0]] for name in ("solo", "colocated", *plan.placing)}
        report["pictures"] = [str(path) for path in write_pictures(drawn, out, title="weave")]
    return report


def _lower_bounds(num_seeds: int) -> dict[str, list[float]]:
    """$/h of the production trace by seed: below the work of all kept SLOs is no policy; steady nodes are no bound."""
    bounds: dict[str, list[float]] = {}
    for nodes in (1, 2):
        made = [
            catalog.build("weave", seed=seed, train_nodes_32b=nodes, **PAPER_ACCOUNTING) for seed in range(num_seeds)
        ]
        for uses_slack, speed in ((False, "solo speed"), (True, "all SLO slack")):
            for colocated in (False, True):
                where = "rollouts on training GPUs too" if colocated else "pools apart"
                bounds[f"{speed}, {where}, steady whole nodes, {_charged(nodes)}"] = [
                    steady_usd_per_hour(one, uses_slack=uses_slack, colocated=colocated) for one in made
                ]
        bounds[f"{_KEPT}, {_charged(nodes)}"] = [_kept_slos_usd_per_hour(one) for one in made]
    return bounds


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


def _charged(num_train_nodes: int) -> str:
    return f"{num_train_nodes} training node{'s' if num_train_nodes > 1 else ''} for 32B"


class _Plan:
    """What is to be simulated, and the key of each result."""

    def __init__(self, num_seeds: int) -> None:
        self.keys: list[tuple[Any, ...]] = []
        self.work: list[SimRun | _Regroup] = []
        self.placing = [name for name in ("rollmux", "rlmux") if name in POLICIES]
        for drift in _DRIFTS:
            for seed in range(min(num_seeds, _MAX_DRIFT_SEEDS)):
                drifting = catalog.build(f"drift-{drift}", seed=seed, **PAPER_ACCOUNTING)
                self._add(("drift", drift, "offline", seed), _Regroup(drifting, _HOUR_S))
                self._add(("drift", drift, "rollmux", seed), SimRun(workload=drifting, policy="rollmux"))
        for seed in range(num_seeds):
            for nodes in (1, 2):
                made = catalog.build("weave", seed=seed, train_nodes_32b=nodes, **PAPER_ACCOUNTING)
                for name in self.placing if seed else ("solo", "colocated", *self.placing):
                    self._add(("weave", nodes, name, seed), SimRun(workload=made, policy=name))
            for name in _OUR_POLICIES:
                if name in POLICIES:
                    self._add(("ours", name, seed), SimRun(workload=catalog.build("weave", seed=seed), policy=name))
            for mix in _MIXES:
                made = catalog.build(mix, seed=seed, **PAPER_ACCOUNTING)
                self._add((mix, "offline", seed), _Regroup(made))
                for name in _MIX_POLICIES:
                    self._add((mix, name, seed), SimRun(workload=made, policy=name))

    def _add(self, key: tuple[Any, ...], work: SimRun | _Regroup) -> None:
        self.keys.append(key)
        self.work.append(work)


def _run(work: SimRun | _Regroup) -> SimResult | OfflineCost:
    if isinstance(work, _Regroup):
        return offline_cost(work.workload, regroup_every_s=work.every_s)
    result = run_simulation(work)
    return replace(result, pipelines=result.pipelines, spans=())


# ------------------------------------------------------------------ the production trace

_CHARGING = "the paper's $/h fits one training node for a 32B pipeline, its GPU peaks fit two; a 32B pipeline needs two"


def _weave_rows(done: Mapping[tuple[Any, ...], Any], num_seeds: int) -> list[Row]:
    section = "weave"
    solo, colocated = done["weave", 2, "solo", 0], done["weave", 2, "colocated", 0]
    rows = [
        row_over([solo.cost_usd_per_hour], section=section, figure="Solo-D $/h", published=945, tolerance=0.01),
        row_over([colocated.cost_usd_per_hour], section=section, figure="veRL $/h", published=709, tolerance=0.01),
    ]
    for nodes, published in ((1, 510.0), (2, 570.0)):
        runs = [done["weave", nodes, "rollmux", seed] for seed in range(num_seeds)]
        rows += _rollmux_rows(runs, nodes, published)
    return rows


def _rollmux_rows(runs: Sequence[SimResult], nodes: int, usd_per_hour: float) -> list[Row]:
    label = _charged(nodes)
    fraction: dict[str, Any] = {"section": "weave", "is_fraction": True}
    rows = [
        row_over(
            [run.cost_usd_per_hour for run in runs],
            section="weave",
            figure=f"RollMux $/h, {label}",
            published=usd_per_hour,
            tolerance=0.03,
        ),
        row_over(
            [run.paper_slo_attainment for run in runs],
            figure=f"SLO attainment, {label}",
            published=1.0,
            tolerance=0.0,
            **fraction,
        ),
    ]
    for kind, published in (("direct", 0.58), ("scaled", 0.18), ("new", 0.23)):
        fractions = [run.admissions[kind] / sum(run.admissions.values()) for run in runs]
        figure = f"admissions {kind}, {label}"
        rows.append(row_over(fractions, figure=figure, published=published, tolerance=0.05, **fraction))
    train_range = (128.0, 144.0) if nodes == 1 else (152.0, 168.0)
    for pool, phase, published, accepted in (
        ("H20", "rollout", 216.0, (208.0, 232.0)),
        ("H800", "train", 152.0, train_range),
    ):
        rows.append(
            row_over(
                [run.peak_gpus[phase] for run in runs],
                section="weave",
                figure=f"peak {pool}, {label}",
                published=published,
                tolerance=0.0,
                accepted=accepted,
                cause=_CHARGING if nodes == 1 and phase == "train" else "",
            )
        )
    return rows


def _beyond_rows(done: Mapping[tuple[Any, ...], Any], num_seeds: int) -> list[Row]:
    """Ours against the paper's published cost, where our own policy is there."""
    if ("weave", 1, "rlmux", 0) not in done:
        return []
    rows = []
    for nodes, published in ((1, 510.0), (2, 570.0)):
        runs: list[SimResult] = [done["weave", nodes, "rlmux", seed] for seed in range(num_seeds)]
        label = _charged(nodes)
        rows.append(
            row_over(
                [run.cost_usd_per_hour for run in runs],
                section="beyond",
                figure=f"rlmux $/h, {label}",
                published=published,
                tolerance=0.0,
                accepted=(0.0, published),
                cause="another policy than the published one: lower is better",
            )
        )
        rows.append(
            row_over(
                [run.paper_slo_attainment for run in runs],
                section="beyond",
                figure=f"rlmux SLO attainment, {label}",
                published=1.0,
                tolerance=0.0,
                is_fraction=True,
            )
        )
    return rows


_KEPT = "all SLO slack, work of the steps that keep every SLO"
_STEADY = (
    "whole nodes that the running pipelines keep busy at every moment, as if any work could share any node: what "
    "stands between is a strict cycle (a node pair serves whose steps fit one cycle), the cap of 5, and moves at step "
    "ends only. No bound: SLOs bind the mean step"
)
_BOUND = "steps that keep every SLO, on nodes that are never idle: no policy is below it"


def _bound_rows(
    done: Mapping[tuple[Any, ...], Any], bounds: Mapping[str, Sequence[float]], num_seeds: int
) -> list[Row]:
    """Our own policy over what no policy undercuts, and over steady nodes."""
    if ("weave", 1, "rlmux", 0) not in done:
        return []
    rows = []
    for label, by_seed in bounds.items():
        nodes = 1 if label.endswith(_charged(1)) else 2
        runs: list[SimResult] = [done["weave", nodes, "rlmux", seed] for seed in range(num_seeds)]
        cost = sum(run.cost_usd_per_hour for run in runs) / num_seeds
        rows.append(
            row_over(
                by_seed,
                section="bound",
                figure=f"least $/h: {label}",
                published=round(cost, 1),
                tolerance=0.0,
                accepted=(0.0, cost) if label.startswith(_KEPT) else (0.0, float("inf")),
                cause=f"in the column of published figures: rlmux; {_BOUND if label.startswith(_KEPT) else _STEADY}",
            )
        )
    return rows


# ------------------------------------------------------------------ synthetic mixes

_PENALTY = (
    "our sample of Philly's jobs stays 10.6 h, the paper's 14.4 h: with every stay stretched by that, random on mixed "
    "rises from 1.47 to 1.73 and on bl from 1.48 to 1.57 (seed 0), so about half of the gap at most; the rest is the "
    "rules, which the paper gives in a sentence each, and random numbers that it does not give"
)


def _mix_rows(done: Mapping[tuple[Any, ...], Any], num_seeds: int) -> list[Row]:
    rows = []
    for name, published in _MIX_PUBLISHED.items():
        for mix, figure in zip(_MIXES, published, strict=True):
            ratios = []
            for seed in range(num_seeds):
                run: SimResult = done[mix, name, seed]
                best: OfflineCost = done[mix, "offline", seed]
                ratios.append(run.penalised_cost_usd_per_hour / best.usd_per_hour)
            is_ours = name == "rollmux"
            ranges = {"rollmux": (1.0, 1.13), "random": (1.7, 2.2), "most-idle": (1.4, 1.9)}
            rows.append(
                row_over(
                    ratios,
                    section="mixes",
                    figure=f"{name} on {mix}, cost over the offline optimum",
                    published=figure,
                    tolerance=0.0,
                    accepted=ranges[name],
                    cause="" if is_ours else _PENALTY,
                )
            )
    return rows


# ------------------------------------------------------------------ micro-benchmarks, tail, drift

_MICRO_CAUSE = {
    (
        "micro-b",
        True,
    ): "round robin holds D to E's pace; the testbed runs first come, first served (next row)",
    (
        "micro-c",
        True,
    ): "with the profile's means a shared rollout node is busy 578 s a round, 1.34 times D's own step; "
    "1.99 needs D unslowed, so the testbed's C or D rolled out for less",
    ("micro-c", False): "as above: both orders alternate C and D on each rollout node",
}


def _micro_rows() -> list[Row]:
    rows = []
    for case, (over_solo, _) in micro.PUBLISHED.items():
        for is_strict in (True, False):
            gain = micro.micro_gain(case, is_strict=is_strict)
            rows.append(
                Row(
                    section="micro",
                    figure=f"{case}, {'round robin' if is_strict else 'first come, first served'}: gain over Solo-D",
                    published=over_solo,
                    ours=gain.over_solo,
                    tolerance=0.05,
                    cause=_MICRO_CAUSE.get((case, is_strict), ""),
                )
            )
    return rows


_TAIL_CAUSE = (
    "14B's tail decodes on one H20 at an estimated, not a measured, speed; every published pair is within 1.06-1.28"
)


def _tail_rows() -> list[Row]:
    rows = []
    for (first, second), published in tail.PUBLISHED.items():
        gain = tail.migration_gain(first, second)
        rows.append(
            Row(
                section="tail",
                figure=f"migration gain, {first} + {second}",
                published=published,
                ours=gain.gain,
                tolerance=0.05,
                cause=_TAIL_CAUSE if "14B_8k" in (first, second) else "",
            )
        )
    return rows


def _drift_rows(done: Mapping[tuple[Any, ...], Any], num_seeds: int) -> list[Row]:
    rows = []
    for drift, (ratio, attainment) in _DRIFT_PUBLISHED.items():
        runs: list[SimResult] = [done["drift", drift, "rollmux", seed] for seed in range(num_seeds)]
        best: list[OfflineCost] = [done["drift", drift, "offline", seed] for seed in range(num_seeds)]
        rows.append(
            row_over(
                [
                    run.cost_usd_per_hour / (one.usd_per_hour / (1.0 - _REGROUPING_FRACTION))
                    for run, one in zip(runs, best, strict=True)
                ],
                section="drift",
                figure=f"{drift}: cost over hourly regrouping, its restarts charged",
                published=ratio,
                tolerance=0.05,
                cause=_REGROUPING,
            )
        )
        rows.append(
            row_over(
                [run.paper_slo_attainment for run in runs],
                section="drift",
                figure=f"{drift}: SLO attainment",
                published=attainment,
                tolerance=0.0,
                is_fraction=True,
                accepted=(0.95, 1.0),
            )
        )
    return rows
