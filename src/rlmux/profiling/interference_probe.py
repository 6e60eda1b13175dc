"""Measures how two or three pieces of work on one device slow each other.

    two processes, side by side, at every device fraction that can be made here ─┬─▶ InterferenceTable
    three whose pairs all help, at the fractions closest to a third each ────────┘

Rounds are interleaved, since machines drift. A slowdown is the best rate alone over the median rate beside the
others: where rates are noisy, sharing looks worse than it is, never better.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import combinations, combinations_with_replacement
from statistics import median
from typing import Any

from rlmux.core.errors import PipelineError, UserError
from rlmux.core.estimation.colocation import SharingTable, SharingTriple
from rlmux.core.model import SubStage
from rlmux.engines.device_fraction import DeviceFractions, probe
from rlmux.profiling.micro_benchmarks import (
    BENCHMARK_SUB_STAGES,
    BenchmarkProcess,
    BenchmarkSizes,
    benchmark_processes,
    rates,
    usual_sizes,
)
from rlmux.sim.models.interference import (
    NO_SPLIT,
    FractionGrid,
    InterferenceTable,
    rest_of,
    sharing_entries,
    split_of_three,
)

Three = tuple[SubStage, SubStage, SubStage]
DEVICES = ("cpu", "cuda")
_LEAST_CHANGE = 1.03
"""Ratio of the slowdowns at the least and the largest fraction of a GPU, below which the fraction does nothing."""
QUICK: Mapping[str, Any] = {"window_s": 0.05, "num_rounds": 1}
"""Settings that are enough to see that a measurement works."""


def usual_device() -> str:
    """The device that a run uses here: a GPU, or else a core."""
    return "cuda" if probe("cuda").num_units > 1 else "cpu"


def check_device(device: str) -> None:
    """Raises UserError for a device that is not here."""
    if device not in DEVICES:
        raise UserError(f"--device {device}; accepted: {' or '.join(DEVICES)}")
    if device == "cuda":
        found = probe("cuda")
        if not found.num_units > 1:
            raise UserError(f"--device cuda: {found.missing}; accepted here: cpu")


def measure_interference(
    device: str,
    *,
    sub_stages: Sequence[SubStage] = BENCHMARK_SUB_STAGES,
    sizes: BenchmarkSizes | None = None,
    window_s: float = 0.2,
    num_rounds: int = 3,
    progress: Callable[[int, int], None] | None = None,
) -> InterferenceTable:
    """Measure sub-stages side by side on one core or one GPU.

    Every pair is measured at every device fraction prepared here. A triple is measured if its pairs all help, at the
    prepared fractions closest to thirds. `progress`: called with (rounds done, rounds in all) of pairs and triples.

    Raises PipelineError as `require_held` does.
    """
    report = progress or (lambda done, total: None)
    fractions = probe(device)
    is_core = device == "cpu"
    core = min(os.sched_getaffinity(0)) if is_core else None
    splits = [(fraction, rest_of(fraction)) for fraction in (*fractions.prepared, NO_SPLIT)]
    pairs = list(combinations_with_replacement(sub_stages, 2))
    triples = [three for three in combinations_with_replacement(sub_stages, 3) if len({*three}) > 1]
    with benchmark_processes(sub_stages, sizes or usual_sizes(device), device, core) as processes:
        bench = _Bench(processes, window_s, is_core=is_core)
        for done, pair in enumerate(pairs * num_rounds):
            report(done, num_rounds * (len(pairs) + len(triples)))
            bench.add_round(pair, splits)
        measured = {(a, b, split[0]): bench.of_two((a, b), split) for a, b in pairs for split in splits}
        if not is_core:
            require_held(measured, fractions.prepared)
        table = InterferenceTable(device=fractions.device, grid=fraction_grid_of(fractions), measured=measured)
        chosen = _that_may_help(triples, table, fractions.prepared)
        for done, three in enumerate([*chosen] * num_rounds, num_rounds * len(pairs)):
            report(done, num_rounds * (len(pairs) + len(chosen)))
            bench.add_round(three, [chosen[three]])
    return replace(table, triples=tuple(bench.of_three(three, split) for three, split in chosen.items()))


def require_held(
    measured: Mapping[tuple[SubStage, SubStage, float], tuple[float, float]], fractions: Sequence[float]
) -> None:
    """Raises PipelineError where dense decoding is as fast at the least of a GPU's fractions as at the largest: it does
    not keep to its fraction, and a plan would count on what nothing holds."""
    of_dense: dict[float, float] = {}
    for (a, b, fraction), (slow_a, _) in measured.items():
        if a == b == SubStage.DENSE_DECODE and fraction in fractions:
            of_dense[fraction] = slow_a
    if len(of_dense) < 2:
        return
    least, most = min(of_dense), max(of_dense)
    if of_dense[least] < _LEAST_CHANGE * of_dense[most]:
        raise PipelineError(
            f"dense decoding is slowed {of_dense[least]:.2f} times at {least:.0%} of the device and "
            f"{of_dense[most]:.2f} times at {most:.0%}: nothing holds it to a fraction here, so no profile is written; "
            "accepted: a device and driver whose green contexts hold decoding (rlmux doctor), or a file without sharing"
        )


def _that_may_help(
    triples: Sequence[Three], table: InterferenceTable, prepared: Sequence[float]
) -> dict[Three, tuple[float, float, float]]:
    """Triples whose pairs all help, with the prepared device fractions closest to thirds."""
    sharing = SharingTable.of(sharing_entries(table.measured))
    found = {
        three: split_of_three(table, three, prepared)
        for three in triples
        if all(sharing.rates_beside(a, [b]) is not None for a, b in combinations(three, 2))
    }
    return {three: split for three, split in found.items() if split is not None}


class _Bench:
    """Rates of sub-stages alone and at once, in rounds."""

    def __init__(self, processes: Mapping[str, Sequence[BenchmarkProcess]], window_s: float, *, is_core: bool) -> None:
        self._processes = processes
        self._window_s = window_s
        self._is_core = is_core
        self._alone: dict[SubStage, list[float]] = {}
        self._together: dict[tuple[tuple[SubStage, ...], tuple[float, ...]], list[list[float]]] = {}

    def add_round(self, sub_stages: tuple[SubStage, ...], splits: Iterable[tuple[float, ...]]) -> None:
        """Measure each alone, then all at once at each split of the device."""
        for sub_stage in dict.fromkeys(sub_stages):
            self._alone.setdefault(sub_stage, []).extend(self._rates((sub_stage,), (NO_SPLIT,)))
        for split in splits:
            self._together.setdefault((sub_stages, split), []).append(self._rates(sub_stages, split))

    def of_two(self, pair: tuple[SubStage, SubStage], split: tuple[float, float]) -> tuple[float, float]:
        """Slowdowns of a pair at a split."""
        slow_a, slow_b = self._slowdowns(pair, split)
        return slow_a, slow_b

    def of_three(self, three: Three, split: tuple[float, float, float]) -> SharingTriple:
        """Slowdowns of a triple at a split. Two alike cannot be distinguished, so both have the worse one."""
        worst = dict(sorted(zip(three, self._slowdowns(three, split), strict=True), key=lambda side: side[1]))
        a, b, c = three
        return SharingTriple(sub_stages=three, device_fractions=split, slowdowns=(worst[a], worst[b], worst[c]))

    def _slowdowns(self, sub_stages: tuple[SubStage, ...], split: tuple[float, ...]) -> list[float]:
        beside = zip(*self._together[sub_stages, split], strict=True)
        alone = (max(self._alone[sub_stage]) for sub_stage in sub_stages)
        return [max(1.0, best / median(rounds)) for best, rounds in zip(alone, beside, strict=True)]

    def _rates(self, sub_stages: tuple[SubStage, ...], split: tuple[float, ...]) -> list[float]:
        working = [
            (self._processes[sub_stage][sub_stages[:place].count(sub_stage)], device_fraction)
            for place, (sub_stage, device_fraction) in enumerate(zip(sub_stages, split, strict=True))
        ]
        return rates(working, self._window_s, is_core=self._is_core)


def fraction_grid_of(fractions: DeviceFractions) -> FractionGrid:
    """The grid of splits that these device fractions lie on."""
    return FractionGrid(
        device=fractions.device,
        num_units=fractions.num_units,
        unit_step=fractions.unit_step,
        min_units=fractions.min_units,
    )


def fractions_here() -> DeviceFractions:
    """Device fractions of this machine's GPU, or of its cores where it has none."""
    gpu = probe("cuda")
    return gpu if gpu.num_units > 1 else probe("cpu")
