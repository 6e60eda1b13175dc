"""JigsawRL's published figures: the paper's, ours, and the cause of each difference.

    two pipelines alike, 8 H100       jigsaw over colocated, over rollmux, latency of each pipeline
    two unlike (0.6B beside 8B)       latency
    more GPUs, 16 to 64               jigsaw over colocated
    asynchronous, one step off        jigsaw over StreamRL and over AReaL

Throughput is tokens of all pipelines per second of makespan. Every comparison has the same GPUs and the same steps:
`colocated` runs one pipeline after another on all of them, or, at equal parallelism, each on its half; `rollmux` and
the asynchronous ones (`papers/rivals/`, at most one version stale) divide them into a rollout and a training pool.
`rollmux` and AReaL have the best division for the workload, StreamRL the one that its own search finds. Workloads are
drawn from recorded lengths; interference between sub-stages is the estimate of `interference.py`.

The cause of a miss is an ablation in the same command: the figure again with one thing changed (`_ABLATIONS`), on
seed 0. The cause of a row is the change that brings ours into the accepted range, or nearest to the published figure.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rlmux.papers.paper_rows import MissCause, PaperRow, Range, mean, row_over, within
from rlmux.papers.rivals import best_division, play
from rlmux.papers.rivals.trainer import RivalResult
from rlmux.sim.models.interference import fraction_grid, measured_table, table_without_interference
from rlmux.sim.models.multi_turn import ToolUse
from rlmux.sim.models.substages import SubStageWorld
from rlmux.sim.results.result import SimResult
from rlmux.sim.results.sweep import Progress, SimRun, sweep
from rlmux.sim.workloads.substage_pairs import (
    AIME_4B,
    GSM8K_06B,
    GSM8K_4B,
    GSM8K_8B,
    HOMOGENEOUS,
    MATH_06B,
    MATH_4B,
    MATH_8B,
    Recorded,
    crowd,
)
from rlmux.sim.world import TrueSeconds

_NUM_STEPS = 5
_TOLERANCE = 0.1
"""Relative deviation of a published figure that counts as reached."""
_SCALES = (16, 32, 64)
_ASYNC = (GSM8K_4B, MATH_4B, MATH_06B, AIME_4B)
_HETEROGENEOUS = ((GSM8K_06B, GSM8K_8B), (MATH_06B, MATH_8B))
_PARTS = (0.25, 0.5, 0.75)
_GRID = fraction_grid("H100")
_BASE = ""
_ABLATIONS = {
    "measured": "slowdowns of shared devices are estimated; with those measured on an H100",
    "free": "shared devices slow each other; without any slowdown",
    "unfixed": "an update has a fixed part (offloaded weights come back, 17 to 51 s); without it",
    "tools": "recorded lengths have no tool waits; with two calls of 10 s",
    "no-fractions": "our jigsaw divides devices by fractions; without",
    "slo": "no pipeline has an SLO; with one of 1.34",
    "one-part": "rollmux has the best of three divisions; with half of the GPUs for training",
    "whole": "each pipeline has its own half of the GPUs; one after the other on all of them",
    "index": "StreamRL sends long answers to devices of their own; dealt by index",
    "divided": "StreamRL's division is searched on a profile; the best of all",
    "three-to-one": "AReaL has the best division; three GPUs for rollouts to one that trains",
    "eta-4": "AReaL is one version ahead; four",
    "fine": "a pipeline's pools are quarters of its GPUs; eighths, at the same work for each GPU",
    "fine-fifteen": "pools are quarters of a pipeline's GPUs, in five steps of which the first has nothing beside it; "
    "eighths, and fifteen",
    "fifteen": "five steps, of which the first has nothing beside it; fifteen",
}
"""What is changed in each ablation: what stands in the row, then what is put in its place."""
_OF_SHARING = ("unfixed", "measured", "free")

_Key = tuple[str, str, int, int]
"""(pair, deployment with its ablation / policy, GPUs, seed)."""
_Values = Callable[[str, int], list[float]]
"""A figure's value on each workload, from (ablation, number of seeds)."""


def reproduce(*, num_seeds: int = 1, progress: Progress | None = None, out: Path | None = None) -> dict[str, Any]:
    """{"paper", "num_seeds", "rows", "workloads": the same by workload}."""
    work: dict[_Key, SimRun] = {}
    for seed in range(num_seeds):
        _add_pairs(work, seed)
    for ablation in ("measured", "free", "unfixed", "tools", "no-fractions", "slo"):
        _add_pairs(work, 0, ablation)
    for recorded in _ASYNC:
        _add(work, "one-off", (recorded, recorded), 32, 0, "jigsaw", ablation="fifteen")
    for ablation in (_BASE, *_OF_SHARING):
        for number in _SCALES if ablation == _BASE else _SCALES[-1:]:
            _add(work, "scale", (MATH_4B, MATH_4B), number, 0, "colocated", "jigsaw", ablation=ablation)
    results = dict(zip(work, sweep(tuple(work.values()), progress=progress), strict=True))
    figures = _Figures(results, num_seeds)
    rows = [*_pair_rows(figures), *_scale_rows(figures), *_async_rows(figures)]
    return {
        "paper": "JigsawRL (arXiv 2604.23838)",
        "num_seeds": num_seeds,
        "rows": [row.as_dict() for row in rows],
        "workloads": [*_by_workload(results, num_seeds), *figures.rivals_by_workload()],
    }


def _add_pairs(work: dict[_Key, SimRun], seed: int, ablation: str = _BASE) -> None:
    is_of_sharing = ablation in (_BASE, *_OF_SHARING)
    for recorded in HOMOGENEOUS if ablation != "slo" else ():
        pair = (recorded, recorded)
        others = ("mux-rollouts", "mux-all") if ablation == _BASE else ("mux-rollouts",) if is_of_sharing else ()
        _add(work, "shared", pair, 8, seed, "colocated", "jigsaw", *others, ablation=ablation)
        if ablation in (_BASE, "unfixed"):
            _add(work, "halves", pair, 8, seed, "colocated", ablation=ablation)
        if is_of_sharing:
            _add(work, "shared", pair, 16, seed, "jigsaw", ablation=ablation)
        for part in _PARTS if ablation in (_BASE, "unfixed") else ():
            _add(work, f"pools-{part}", pair, 16, seed, "rollmux", ablation=ablation)
    for pair in _HETEROGENEOUS:
        _add(work, "shared", pair, 8, seed, "colocated", "jigsaw", ablation=ablation)
    for recorded in _ASYNC if is_of_sharing else ():
        _add(work, "one-off", (recorded, recorded), 32, seed, "jigsaw", ablation=ablation)


_DEPLOYMENTS: dict[str, dict[str, Any]] = {
    "shared": {},
    "scale": {"gpu": "A100"},
    "halves": {"num_parts": 2},
    "one-off": {"staleness": 1},
    **{f"pools-{part}": {"deployment": "disaggregated", "train_part": part} for part in _PARTS},
}
_CHANGES: dict[str, dict[str, Any]] = {
    "unfixed": {"fixed_part": 0.0},
    "tools": {"tools": ToolUse(mean_calls=2.0, wait_s=10.0)},
    "slo": {"slo_slowdown": 1.34},
    "fifteen": {"num_steps": 15},
    "fine-fifteen": {"num_steps": 15},
}
_TABLES = {"measured": measured_table(_GRID), "free": table_without_interference(_GRID)}


def _add(
    work: dict[_Key, SimRun],
    how: str,
    pair: Sequence[Recorded],
    num_gpus: int,
    seed: int,
    *policies: str,
    ablation: str = _BASE,
) -> None:
    changes = {"num_steps": _NUM_STEPS, **_DEPLOYMENTS[how], **_CHANGES.get(ablation, {})}
    made = crowd(pair, num_gpus=num_gpus, seed=seed, **changes)
    table = _TABLES.get(ablation)
    for policy in policies:
        ablated = f"{policy}-{ablation}" if (policy, ablation) == ("jigsaw", "no-fractions") else policy
        run = SimRun(workload=made, policy=ablated, interference=table)
        work[_name(pair), _key(how, policy, ablation), num_gpus, seed] = run


def _key(how: str, policy: str, ablation: str = _BASE) -> str:
    return f"{how}{'@' if ablation else ''}{ablation}/{policy}"


def _name(pair: Sequence[Recorded]) -> str:
    return " + ".join(f"{recorded.lengths_of}/{recorded.model}" for recorded in pair)


# --- figures ------------------------------------------------------------------------------------------------


class _Figures:
    """Tokens per second of simulations and of rivals, with and without an ablation.

    An ablation that does not apply to a side of a ratio leaves that side alone.
    """

    def __init__(self, results: dict[_Key, SimResult], num_seeds: int) -> None:
        self.num_seeds = num_seeds
        self._results = results
        self._rivals: dict[tuple[Recorded, str, int, str], float] = {}

    def ratios(
        self, pairs: Sequence[str], before: str, after: str, num_gpus: int, ablation: str, num_seeds: int
    ) -> list[float]:
        """Tokens per second of `after` over `before` (deployment / policy) on each pair, mean over seeds."""
        return [
            mean(
                [
                    self.tokens_per_s(pair, after, num_gpus, seed, ablation)
                    / self.tokens_per_s(pair, before, num_gpus, seed, ablation)
                    for seed in range(num_seeds)
                ]
            )
            for pair in pairs
        ]

    def tokens_per_s(self, pair: str, how: str, num_gpus: int, seed: int, ablation: str) -> float:
        """Of a deployment, or of the best of those that divide the pools in different ways."""
        deployment, _, policy = how.partition("/")
        parts = [0.5] if ablation == "one-part" else _PARTS
        names = [deployment, *(f"{deployment}-{part}" for part in parts)]
        for kept in (ablation, ablation.removeprefix("fine-"), _BASE):
            keys = [(pair, _key(name, policy, kept), num_gpus, seed) for name in names]
            runs = [self._results[key] for key in keys if key in self._results]
            if runs:
                return max(run.tokens_per_s or 0.0 for run in runs)
        raise KeyError(f"{pair}, {how}")

    def step_slowdowns(self, pair: str, num_gpus: int, seed: int, ablation: str) -> list[float]:
        """Mean step slowdown of each pipeline under jigsaw."""
        key = (pair, _key("shared", "jigsaw", ablation), num_gpus, seed)
        run = self._results.get(key) or self._results[pair, _key("shared", "jigsaw"), num_gpus, seed]
        return [pipeline.step_slowdown or 0.0 for pipeline in run.pipelines]

    def over_rival(self, system: str, ablation: str, num_seeds: int) -> list[float]:
        """Tokens per second of jigsaw over two pipelines of a rival, on each asynchronous workload."""
        return [
            mean(
                [
                    self.tokens_per_s(_name((recorded, recorded)), "one-off/jigsaw", 32, seed, ablation)
                    / self._rival(recorded, system, seed, ablation)
                    for seed in range(num_seeds)
                ]
            )
            for recorded in _ASYNC
        ]

    def _rival(self, recorded: Recorded, system: str, seed: int, ablation: str) -> float:
        key = (recorded, system, seed, ablation)
        if key not in self._rivals:
            self._rivals[key] = two_of_rival(recorded, system, num_gpus=32, seed=seed, ablation=ablation)
        return self._rivals[key]

    def rivals_by_workload(self) -> list[dict[str, Any]]:
        """As `_by_workload`."""
        return [
            {
                "workload": _name((recorded, recorded)),
                "gpus": 32,
                "deployment": f"rival{'@' if ablation else ''}{ablation}/{system}",
                "tokens_per_s": round(
                    mean([self._rival(recorded, system, at, ablation) for at in range(num_seeds)]), 1
                ),
            }
            for recorded, system, seed, ablation in list(self._rivals)
            if seed == 0
            for num_seeds in [self.num_seeds if ablation == _BASE else 1]
        ]


def two_of_rival(recorded: Recorded, system: str, *, num_gpus: int, seed: int, ablation: str = _BASE) -> float:
    """Tokens per second of two pipelines under a rival, each on half of the GPUs; "whole": in turn on all of them."""
    changes: dict[str, Any] = {"num_steps": _NUM_STEPS, **_CHANGES.get(ablation, {})}
    made = crowd((recorded, recorded), num_gpus=num_gpus, seed=seed, **changes)
    num_nodes = made.cluster.pools["gpu"].num_nodes
    assert num_nodes is not None
    num_devices = num_nodes // (1 if ablation == "whole" else 2)
    num_steps = changes["num_steps"]
    runs = [_rival_run(system, arrival.world, num_devices, num_steps, ablation) for arrival in made.arrivals]
    seconds = [run.seconds for run in runs]
    tokens_per_s = sum(run.trained_tokens for run in runs) / (sum(seconds) if ablation == "whole" else max(seconds))
    return tokens_per_s / (2 if ablation.startswith("fine") else 1)


def _rival_run(system: str, world: TrueSeconds, num_devices: int, num_steps: int, ablation: str) -> RivalResult:
    assert isinstance(world, SubStageWorld)
    if ablation.startswith("fine"):
        world, num_devices = replace(world, num_sequences=2 * world.num_sequences), 2 * num_devices
    options: dict[str, Any] = {"num_devices": num_devices, "num_steps": num_steps}
    if system == "areal":
        options["eta"] = 4 if ablation == "eta-4" else 1
    if ablation == "index" and system == "streamrl":
        options["dispatches"] = False
    if ablation != "divided" if system == "streamrl" else ablation == "three-to-one":
        return play(system, world, **options)
    best = best_division(system, world, **{**options, "num_steps": _NUM_STEPS})
    return best if num_steps == _NUM_STEPS else play(system, world, split=best.split, **options)


# --- rows ---------------------------------------------------------------------------------------------------


def _pair_rows(figures: _Figures) -> list[PaperRow]:
    pairs = [_name((recorded, recorded)) for recorded in HOMOGENEOUS]

    def over(before: str, num_gpus: int = 8) -> _Values:
        return lambda ablation, seeds: figures.ratios(pairs, before, "shared/jigsaw", num_gpus, ablation, seeds)

    def slowdowns(ablation: str, num_seeds: int) -> list[float]:
        return [
            mean([mean(figures.step_slowdowns(pair, 8, seed, ablation)) for seed in range(num_seeds)]) for pair in pairs
        ]

    def unlike(ablation: str, num_seeds: int) -> list[float]:
        return [
            max(
                slowdown
                for seed in range(num_seeds)
                for slowdown in figures.step_slowdowns(_name(pair), 8, seed, ablation)
            )
            for pair in _HETEROGENEOUS
        ]

    alike, pools, unlike_pair = "8 H100, two alike", "16 H100, two alike", "0.6B beside 8B"
    colocated, halves = "tokens/s over colocated", "over colocated at equal parallelism"
    shares, latency = "over sharing rollouts only (MuxServe), mean", "latency of a pipeline over alone"
    mfu = "Fig. 19: MFU 3.89 over 2.57 %"
    more = ("unfixed", "measured", "tools", "no-fractions", "free")
    of_pools, of_shares = ("unfixed", "measured", "one-part"), _OF_SHARING
    over_colocated, over_halves, over_pools = (
        over("shared/colocated"),
        over("halves/colocated"),
        over("pools/rollmux", 16),
    )
    return [
        _row(figures, alike, f"{colocated}, mean", 1.56, "text", over_colocated, mean, more),
        _row(figures, alike, f"{colocated}, max", 1.85, "abstract", over_colocated, max, more),
        _row(figures, alike, f"{halves}, least", 1.16, "Fig. 18", over_halves, min, _OF_SHARING),
        _row(figures, alike, f"{halves}, max", 1.48, "Fig. 18", over_halves, max, _OF_SHARING),
        _row(figures, pools, "tokens/s over RollMux, mean", 1.27, "text", over_pools, mean, of_pools),
        _row(figures, alike, shares, round(3.89 / 2.57, 2), mfu, over("shared/mux-rollouts"), mean, of_shares),
        _row(figures, alike, f"{latency}, mean", 1.48, "text", slowdowns, mean, more),
        _row(figures, alike, f"{latency}, least", 1.14, "text", slowdowns, min, more),
        _row(
            figures, unlike_pair, "largest latency over alone", 1.34, "text", unlike, max, (*more, "slo"), (1.0, 1.34)
        ),
    ]


def _scale_rows(figures: _Figures) -> list[PaperRow]:
    pair = _name((MATH_4B, MATH_4B))

    def over_colocated(number: int) -> _Values:
        return lambda ablation, seeds: figures.ratios([pair], "scale/colocated", "scale/jigsaw", number, ablation, 1)

    return [
        _row(
            figures, f"{number} A100", "tokens/s over colocated", 1.75 if number == 64 else None,
            "Fig. 13" if number == 64 else "", over_colocated(number), mean, _OF_SHARING,
        )
        for number in _SCALES
    ]  # fmt: skip


def _async_rows(figures: _Figures) -> list[PaperRow]:
    def over(system: str) -> _Values:
        return lambda ablation, seeds: figures.over_rival(system, ablation, seeds)

    section = "32 H100, one step off"
    of_stream = ("unfixed", "measured", "fifteen", "whole", "index", "divided", "free")
    of_areal = ("unfixed", "measured", "fine", "fifteen", "fine-fifteen", "whole", "three-to-one", "eta-4", "free")
    stream, areal = over("streamrl"), over("areal")
    return [
        _row(figures, section, "tokens/s over StreamRL, mean", 1.25, "text", stream, mean, of_stream),
        _row(figures, section, "tokens/s over StreamRL, max", 1.54, "abstract", stream, max, of_stream),
        _row(figures, section, "tokens/s over AReaL, mean", 1.21, "text", areal, mean, of_areal),
        _row(figures, section, "tokens/s over AReaL, max", 1.41, "text", areal, max, of_areal),
    ]


def _row(
    figures: _Figures,
    section: str,
    figure: str,
    published: float | None,
    source: str,
    values_of: _Values,
    of: Callable[[Sequence[float]], float],
    ablations: Sequence[str],
    accepted: Range | None = None,
) -> PaperRow:
    """The row of `of` the values. A missed one runs its ablations."""
    values = values_of(_BASE, figures.num_seeds)
    any_gain = (1.0, float("inf"))
    row = row_over(
        values, section=section, figure=figure, published=published, source=source, ours=of(values),
        accepted=accepted or (any_gain if published is None else within(published, _TOLERANCE)),
    )  # fmt: skip
    if row.is_reached or published is None:
        return row
    first = of(values_of(_BASE, 1))
    causes = [
        MissCause(text=_ABLATIONS[ablation], ours_without=row.ours * of(values_of(ablation, 1)) / first)
        for ablation in ablations
    ]
    return replace(row, cause=nearest_cause(causes, row))


def nearest_cause(causes: Sequence[MissCause], row: PaperRow) -> MissCause:
    """The first computed cause that brings the row into its range, or that nearest to the published figure."""
    assert row.published is not None

    def distance(cause: MissCause) -> float:
        assert cause.ours_without is not None
        assert row.published is not None
        is_within = row.accepted[0] <= cause.ours_without <= row.accepted[1]
        return -1.0 if is_within else abs(cause.ours_without - row.published)

    return min(causes, key=distance)


def _by_workload(results: dict[_Key, SimResult], num_seeds: int) -> list[dict[str, Any]]:
    """Tokens per second of every deployment and policy, means over seeds."""
    keys = dict.fromkeys((pair, how, gpus) for pair, how, gpus, _ in results)
    table = []
    for pair, how, gpus in keys:
        runs = [results[key] for seed in range(num_seeds) if (key := (pair, how, gpus, seed)) in results]
        table.append(
            {
                "workload": pair,
                "gpus": gpus,
                "deployment": how,
                "tokens_per_s": round(mean([run.tokens_per_s or 0.0 for run in runs]), 1),
                "mean_step_slowdown": round(mean([run.mean_step_slowdown for run in runs]), 3),
                "num_migrations": sum(run.num_migrations for run in runs),
            }
        )
    return table
