"""The rows of RollMux's tables, from simulated results: published figures, accepted ranges, causes.

    weave (8.6)   Fig. 13 (arXiv), 14 (OSDI); *replay* is Algorithm 1 played on the authors' trace, outside rlmux
    beyond        our own policy, beside our RollMux in the same world
    mixes (8.7)   cost over the offline optimum
    micro (8.4)   gain over Solo-D at equal dollars, of RollMux and of Gavel+
    tail (8.5)    gain of long-tail migration
    drift (8.8)   cost over hourly regrouping; attainment

Results come by key: ("weave", nodes, policy, seed), (mix, policy, seed), ("stretched", mix, policy),
("drift", drift, policy, seed); the offline optimum is the policy "offline".

A module of its own: rows state what the paper printed, `rollmux.py` runs the simulations.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rlmux.papers import micro_cycles as micro
from rlmux.papers import tail_migration as tail
from rlmux.papers.offline_optimum import OfflineCost
from rlmux.papers.paper_rows import MissCause, PaperRow, mean, row_over, within, within_points
from rlmux.sim.results.result import SimResult

Results = Mapping[tuple[Any, ...], Any]

MIXES = ("bl", "rh", "th", "mixed")
BASELINES = ("random", "most-idle")
DRIFTS = ("up", "down", "mixed")
PRINTED = "rollmux with the printed saturation test"
"""Algorithm 1 as published: skips groups that are saturated before an insertion."""
BOUNDED = "rollmux with a spread in hand"
"""Our default: means, and what the steps that are left may vary."""
PUBLISHED_STAY_H = 14.4
"""Mean stay of the paper's sample of Philly's jobs, hours (8.3)."""

_SOLO, _COLOCATED, _ROLLMUX = 940.0, 710.0, 510.0
"""Published $/h, printed as $0.94k and $0.71k for Solo-D and veRL."""
_REPLAY_USD = {1: 510.0, 2: 570.0}
_ADMISSIONS = {"direct": 0.605, "scaled": 0.15, "new": 0.245}
_REPLAY_ADMISSIONS = {
    1: {"direct": 0.58, "scaled": 0.18, "new": 0.23},
    2: {"direct": 0.60, "scaled": 0.18, "new": 0.22},
}
_PEAKS = (("H20", "rollout", 216.0, 16.0), ("H800", "train", 152.0, 16.0))
"""(pool, phase, published peak, accepted distance in GPUs: two nodes)."""
_MIX_PUBLISHED = {
    "rollmux": (1.12, 1.10, 1.01, 1.06),
    "random": (2.00, 1.92, 1.72, 1.97),
    "most-idle": (1.75, 1.89, 1.38, 1.66),
}
_DRIFT_PUBLISHED = {"up": (1.11, 0.986), "down": (1.10, 0.987), "mixed": (1.08, 0.956)}
_REGROUPING_FRACTION = 32.9 / 370.2
"""Fraction of all time that the paper's hourly regrouping spends on restarts; ours is free and is charged this."""

CHOICES: Sequence[Mapping[str, str]] = (
    {
        "what": "SLOs",
        "chosen": "U(1.1, 2), by seed",
        "paper": "U(1, 2)",
        "why": "its scripts draw from 1.1; from 1 costs 2 to 4 % more",
    },
    {
        "what": "H20 price",
        "chosen": "$1.76 an hour",
        "paper": "$1.85 in its table",
        "why": "a third of an H800's; only that gives the $/h it draws",
    },
    {
        "what": "training of 32B",
        "chosen": "two nodes, and one beside it",
        "paper": "not said",
        "why": "its $/h fit one node, its GPU peaks two; 32B needs two",
    },
    {
        "what": "saturated groups",
        "chosen": "not skipped, and skipped beside it",
        "paper": "skipped (Algorithm 1)",
        "why": "its scripts do not skip; its admissions fit that",
    },
    {
        "what": "seconds of a phase",
        "chosen": "means of the profile",
        "paper": "worst case at the token limit",
        "why": "its scripts replay the means",
    },
    {
        "what": "members of a group",
        "chosen": "at most 5",
        "paper": "by host memory",
        "why": "its scripts count members; footprints are not published",
    },
    {
        "what": "switches, weight sync",
        "chosen": "free",
        "paper": "not said",
        "why": "its replay leaves them out; ours counts them in `our_accounting`",
    },
)


def rows_of(done: Results, num_seeds: int, num_drift_seeds: int, *, has_solver: bool = True) -> list[PaperRow]:
    """Every row of the paper, in its order; Gavel+ only if the solver is installed."""
    rows = [*_solo_rows(done)]
    for nodes in (1, 2):
        rows += _rollmux_rows(done, nodes, num_seeds)
    rows += [*_beyond_rows(done, num_seeds), *_mix_rows(done, num_seeds), *micro_rows()]
    rows += [*(gavel_rows() if has_solver else ()), *tail_rows()]
    return [*rows, *_drift_rows(done, num_drift_seeds)]


def charged(num_train_nodes: int) -> str:
    return f"{num_train_nodes} training node{'s' if num_train_nodes > 1 else ''} for 32B"


# ------------------------------------------------------------------ the production trace


def _solo_rows(done: Results) -> list[PaperRow]:
    return [
        row_over(
            [done["weave", 2, policy, 0].cost_usd_per_hour],
            section="weave",
            figure=f"{name} $/h",
            published=published,
            source="8.6",
            replay=replay,
            accepted=within(published, 0.01),
        )
        for policy, name, published, replay in (
            ("solo", "Solo-D", _SOLO, 945.0),
            ("colocated", "veRL", _COLOCATED, 708.7),
        )
    ]


def _usd_per_hour(done: Results, nodes: int, policy: str, num_seeds: int) -> list[float]:
    return [done["weave", nodes, policy, seed].cost_usd_per_hour for seed in range(num_seeds)]


def _rollmux_rows(done: Results, nodes: int, num_seeds: int) -> list[PaperRow]:
    label = charged(nodes)
    runs: list[SimResult] = [done["weave", nodes, "rollmux", seed] for seed in range(num_seeds)]
    dollars = _usd_per_hour(done, nodes, "rollmux", num_seeds)
    one_node = MissCause(
        text="32B is charged the two training nodes that it needs",
        ours_without=mean(_usd_per_hour(done, 1, "rollmux", num_seeds)),
    )
    no_test = MissCause(
        text="groups that are saturated before an insertion are skipped, and 32B may be charged two nodes",
        ours_without=one_node.ours_without,
    )
    common: dict[str, Any] = {"section": "weave", "source": "8.6", "published": _ROLLMUX}
    rows = [
        row_over(
            dollars,
            figure=f"RollMux $/h, {label}",
            replay=_REPLAY_USD[nodes],
            accepted=within(_ROLLMUX, 0.03),
            cause=one_node
            if nodes == 2
            else MissCause(text="SLOs are drawn by seed, and one seed is up to 3 % off the mean"),
            **common,
        ),
        row_over(
            _usd_per_hour(done, nodes, PRINTED, num_seeds),
            figure=f"RollMux $/h, Algorithm 1 as printed, {label}",
            accepted=within(_ROLLMUX, 0.03),
            cause=no_test,
            **common,
        ),
    ]
    rows += _quality_rows(runs, nodes)
    return [*rows, *_peak_rows(done, nodes, num_seeds)]


def _quality_rows(runs: Sequence[SimResult], nodes: int) -> list[PaperRow]:
    """SLO attainment and the mix of admissions."""
    common: dict[str, Any] = {"section": "weave", "source": "8.6", "is_fraction": True}
    rows = [
        row_over(
            [run.paper_slo_attainment for run in runs],
            figure=f"SLO attainment, {charged(nodes)}",
            published=1.0,
            accepted=(1.0, 1.0),
            **common,
        )
    ]
    for kind, published in _ADMISSIONS.items():
        rows.append(
            row_over(
                [run.admissions[kind] / sum(run.admissions.values()) for run in runs],
                figure=f"admissions {kind}, {charged(nodes)}",
                published=published,
                replay=_REPLAY_ADMISSIONS[nodes][kind],
                accepted=within_points(published, 5),
                **common,
            )
        )
    return rows


def _peak_rows(done: Results, nodes: int, num_seeds: int) -> list[PaperRow]:
    rows = []
    for pool, phase, published, distance in _PEAKS:
        peaks = {
            charge: [done["weave", charge, "rollmux", seed].peak_gpus[phase] for seed in range(num_seeds)]
            for charge in (1, 2)
        }
        two_nodes = MissCause(text="32B is charged one training node, and it needs two", ours_without=mean(peaks[2]))
        rows.append(
            row_over(
                peaks[nodes],
                section="weave",
                figure=f"peak {pool}, {charged(nodes)}",
                published=published,
                source="8.6",
                accepted=(published - distance / 2, published + distance / 2),
                cause=two_nodes if nodes == 1 else None,
            )
        )
    return rows


def _beyond_rows(done: Results, num_seeds: int) -> list[PaperRow]:
    """Our own planning and policy: nothing is published of them, so they are held against RollMux in the same world."""
    rows = []
    for nodes in (1, 2):
        rollmux = mean(_usd_per_hour(done, nodes, "rollmux", num_seeds))
        bounded = [done["weave", nodes, BOUNDED, seed] for seed in range(num_seeds)]
        over_means = mean(_usd_per_hour(done, nodes, BOUNDED, num_seeds)) / rollmux
        rows += _bounded_rows(bounded, charged(nodes), over_means)
    if ("weave", 1, "rlmux", 0) not in done:
        return rows
    for nodes in (1, 2):
        runs: list[SimResult] = [done["weave", nodes, "rlmux", seed] for seed in range(num_seeds)]
        rollmux = mean(_usd_per_hour(done, nodes, "rollmux", num_seeds))
        rows += [
            row_over(
                [run.cost_usd_per_hour for run in runs],
                section="beyond",
                figure=f"rlmux $/h, {charged(nodes)}",
                accepted=(0.0, rollmux),
            ),
            row_over(
                [run.paper_slo_attainment for run in runs],
                section="beyond",
                figure=f"rlmux SLO attainment, {charged(nodes)}",
                accepted=(1.0, 1.0),
                is_fraction=True,
                cause=MissCause(text="a running phase is never stopped, so a step that begins behind one may be late"),
            ),
        ]
    return rows


def _bounded_rows(runs: Sequence[SimResult], where: str, over_means: float) -> list[PaperRow]:
    return [
        PaperRow(
            section="beyond",
            figure=f"{BOUNDED}, cost over that with means, {where}",
            published=None,
            source="",
            ours=over_means,
            accepted=(0.0, 1.01),
            cause=MissCause(text="steps that drift widen their own bounds, so their pipelines share later"),
        ),
        row_over(
            [run.paper_slo_attainment for run in runs],
            section="beyond",
            figure=f"{BOUNDED}, SLO attainment, {where}",
            accepted=(1.0, 1.0),
            is_fraction=True,
        ),
    ]


# ------------------------------------------------------------------ synthetic mixes


def over_offline(run: SimResult, best: OfflineCost) -> float:
    """Cost with the paper's penalty for broken SLOs, over the offline optimum."""
    return run.penalised_cost_usd_per_hour / best.usd_per_hour


def _mix_rows(done: Results, num_seeds: int) -> list[PaperRow]:
    rows = []
    for name, published in _MIX_PUBLISHED.items():
        for mix, figure in zip(MIXES, published, strict=True):
            ratios = [over_offline(done[mix, name, seed], done[mix, "offline", seed]) for seed in range(num_seeds)]
            rows.append(
                row_over(
                    ratios,
                    section="mixes",
                    figure=f"{name} on {mix}, cost over the offline optimum",
                    published=figure,
                    source="8.7",
                    accepted=(1.0, 1.05 * figure) if name == "rollmux" else within(figure, 0.1),
                    cause=None if name == "rollmux" else _baseline_cause(done, mix, name, figure, ratios),
                )
            )
    return rows


def _baseline_cause(done: Results, mix: str, name: str, published: float, ratios: Sequence[float]) -> MissCause:
    """Longer stays (their ratio is seed 0's) where they bring ours nearer, else a conjecture."""
    stretched = over_offline(done["stretched", mix, name], done["stretched", mix, "offline"])
    cause = MissCause(
        text=f"our sample of Philly's jobs stays shorter than the paper's {PUBLISHED_STAY_H:g} h",
        ours_without=mean(ratios) * stretched / ratios[0],
    )
    if cause.kind(mean(ratios), published, within(published, 0.1)) != "refuted":
        return cause
    return MissCause(text="the paper gives a sentence for each rule, and no random numbers")


# ------------------------------------------------------------------ micro-benchmarks, tail, drift


def micro_rows() -> list[PaperRow]:
    """Gain over Solo-D of each case, in both orders inside the group."""
    rows = []
    for case, (published, _) in micro.PUBLISHED.items():
        gains = {is_strict: micro.micro_gain(case, is_strict=is_strict) for is_strict in (True, False)}
        in_order = MissCause(
            text="round robin holds every member to the longest step",
            ours_without=gains[False].over_solo,
        )
        unslowed = MissCause(
            text="C and D alternate on each rollout node, which slows D",
            ours_without=gains[False].over_solo_unslowed("d"),
        )
        for is_strict, gain in gains.items():
            rows.append(
                PaperRow(
                    section="micro",
                    figure=f"{case}, {'round robin' if is_strict else 'first come, first served'}: gain over Solo-D",
                    published=published,
                    source="8.4",
                    ours=gain.over_solo,
                    accepted=within(published, 0.05),
                    cause=unslowed if case == "micro-c" else in_order if is_strict else None,
                )
            )
    return rows


def gavel_rows() -> list[PaperRow]:
    """Gain of `gavel` over Solo-D on each case's nodes. Raises UserError where OR-tools is missing."""
    cold = "a turn begins with cold starts"
    causes = {
        "micro-a": MissCause(text=cold, ours_without=micro.gavel_gain("micro-a", costs=False)),
        "micro-b": MissCause(
            text=f"{cold}, and rollout nodes train no pipeline, so two of three are never held",
            ours_without=micro.gavel_gain("micro-b", costs=False),
        ),
        "micro-c": MissCause(text="ours runs two pipelines side by side; what Gavel+ does there is not printed"),
    }
    return [
        PaperRow(
            section="micro",
            figure=f"{case}, gavel by turns: gain over Solo-D",
            published=published,
            source="8.4, arXiv v2",
            ours=micro.gavel_gain(case),
            accepted=within(published, 0.05),
            cause=causes[case],
        )
        for case, published in micro.GAVEL_PUBLISHED.items()
    ]


def tail_rows() -> list[PaperRow]:
    """Gain of migration for each published pair."""
    rows = []
    for (first, second), published in tail.PUBLISHED.items():
        rows.append(
            PaperRow(
                section="tail",
                figure=f"migration gain, {first} + {second}",
                published=published,
                source="8.5",
                ours=tail.migration_gain(first, second).gain,
                accepted=within(published, 0.05),
                cause=MissCause(text="which rollouts migrate, and what the next one does meanwhile, is ours in detail"),
            )
        )
    return rows


def _drift_rows(done: Results, num_seeds: int) -> list[PaperRow]:
    rows = []
    for drift, (ratio, attainment) in _DRIFT_PUBLISHED.items():
        runs: list[SimResult] = [done["drift", drift, "rollmux", seed] for seed in range(num_seeds)]
        best: list[OfflineCost] = [done["drift", drift, "offline", seed] for seed in range(num_seeds)]
        rows.append(
            row_over(
                [
                    run.cost_usd_per_hour / (cost.usd_per_hour / (1.0 - _REGROUPING_FRACTION))
                    for run, cost in zip(runs, best, strict=True)
                ],
                section="drift",
                figure=f"{drift}: cost over hourly regrouping, its restarts charged",
                published=ratio,
                source="8.8",
                accepted=within(ratio, 0.05),
                cause=MissCause(
                    text="our regrouping is an exact search over all groups; the paper samples 10,000 partitions"
                ),
            )
        )
        rows.append(
            row_over(
                [run.paper_slo_attainment for run in runs],
                section="drift",
                figure=f"{drift}: SLO attainment",
                published=attainment,
                source="8.8",
                accepted=within_points(attainment, 2.5),
                is_fraction=True,
            )
        )
        bounded: list[SimResult] = [done["drift", drift, BOUNDED, seed] for seed in range(num_seeds)]
        over_means = mean([run.cost_usd_per_hour for run in bounded]) / mean([run.cost_usd_per_hour for run in runs])
        rows += _bounded_rows(bounded, f"drift {drift}", over_means)
    return rows
