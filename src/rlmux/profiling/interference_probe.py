"""Measures how two pieces of work on one device slow each other.

    two processes, side by side, at every device fraction that can be made here ──▶ InterferenceTable

Rounds are interleaved, since machines drift. A slowdown is the best rate alone over the median rate beside the other:
where rates are noisy, sharing looks worse than it is, never better.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any

from rlmux.core.errors import UserError
from rlmux.core.model import SubStage
from rlmux.engines.device_fraction import DeviceFractions, probe
from rlmux.profiling.micro_benchmarks import (
    BENCHMARK_SUB_STAGES,
    BenchmarkSizes,
    benchmark_processes,
    rates,
    usual_sizes,
)
from rlmux.sim.models.interference import NO_SPLIT, FractionGrid, InterferenceTable

DEVICES = ("cpu", "cuda")
QUICK: Mapping[str, Any] = {"window_s": 0.05, "num_rounds": 1}
"""Settings that are enough to see that a measurement works."""


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
    """Measure every pair of sub-stages, side by side on one core or one GPU, at every device fraction prepared here."""
    fractions = probe(device)
    is_core = device == "cpu"
    core = min(os.sched_getaffinity(0)) if is_core else None
    pairs = [(a, b) for place, a in enumerate(sub_stages) for b in sub_stages[place:]]
    alone: dict[SubStage, list[float]] = {one: [] for one in sub_stages}
    beside: dict[tuple[SubStage, SubStage, float], list[list[float]]] = {}
    with benchmark_processes(sub_stages, sizes or usual_sizes(device), device, core) as processes:
        for number in range(num_rounds):
            for done, (a, b) in enumerate(pairs):
                if progress is not None:
                    progress(number * len(pairs) + done, num_rounds * len(pairs))
                for one in dict.fromkeys((a, b)):
                    alone[one] += rates([(processes[one][0], NO_SPLIT)], window_s, is_core=is_core)
                for fraction in (*fractions.prepared, NO_SPLIT):
                    rest = NO_SPLIT if fraction == NO_SPLIT else 1.0 - fraction
                    working = [(processes[a][0], fraction), (processes[b][1], rest)]
                    beside.setdefault((a, b, fraction), []).append(rates(working, window_s, is_core=is_core))
    measured = {
        (a, b, fraction): (
            max(1.0, max(alone[a]) / median(first for first, _ in rounds)),
            max(1.0, max(alone[b]) / median(second for _, second in rounds)),
        )
        for (a, b, fraction), rounds in beside.items()
    }
    return InterferenceTable(device=fractions.device, grid=fraction_grid_of(fractions), measured=measured)


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
