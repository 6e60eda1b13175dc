"""Measures what busy neighbours cost on this machine.

    measure_neighbours ──▶ ratios, round after round ──neighbours_of──▶ Neighbours ──▶ profile.json "neighbours"

Two pieces of work run on two devices, each with one of its own: first one alone, then both, then the other alone. A
machine drifts within seconds by more than neighbours cost, so each moment beside a neighbour is compared with the
moment next to it. The median of these ratios counts, and only where it is above 1 by more than its own noise.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from math import floor, sqrt
from statistics import median

from rlmux.core.model import SubStage
from rlmux.engines.device_fraction import num_gpus, probe
from rlmux.profiling.micro_benchmarks import BenchmarkSizes, alternating_rates, benchmark_processes, usual_sizes
from rlmux.sim.models.neighbour_slowdown import MEASURED_SUB_STAGES, Neighbours

Ratios = dict[tuple[SubStage, SubStage], list[float]]
"""Rate alone over rate beside the neighbour, a list of ratios by (sub-stage, sub-stage beside it)."""


def neighbouring_devices(device: str) -> Sequence[tuple[str, int | None]]:
    """Two neighbouring devices as (device, core); fewer where the machine does not have two."""
    if device == "cpu":
        return [("cpu", core) for core in sorted(os.sched_getaffinity(0))[:2]]
    return [(f"cuda:{index}", None) for index in range(min(num_gpus(), 2))]


def missing_neighbours(device: str) -> str | None:
    """Why neighbours cannot be measured here, or None."""
    if len(neighbouring_devices(device)) == 2:
        return None
    return f"neighbouring devices: left out, since there is one {'core' if device == 'cpu' else 'GPU'} that may be used"


def measure_neighbours(
    device: str,
    *,
    sizes: BenchmarkSizes | None = None,
    window_s: float | None = None,
    num_rounds: int = 4,
    num_windows: int = 6,
    progress: Callable[[int, int], None] | None = None,
) -> Ratios:
    """Measure every pair of decoding and training on two neighbouring devices; empty where there are no two.

    On cores a pair takes 1.4 s a round. Each pair gives twice `num_rounds * num_windows` ratios.
    """
    ratios: Ratios = {}
    if missing_neighbours(device):
        return ratios
    (here, here_core), (there, there_core) = neighbouring_devices(device)
    sizes, is_core = sizes or short_sizes(device), device == "cpu"
    window_s = window_s or (0.06 if is_core else 0.3)
    pairs = list(product(MEASURED_SUB_STAGES, repeat=2))
    with (
        benchmark_processes(MEASURED_SUB_STAGES, sizes, here, here_core, num_each=1) as first,
        benchmark_processes(MEASURED_SUB_STAGES, sizes, there, there_core, num_each=1) as second,
    ):
        for done, (a, b) in enumerate(pairs * num_rounds):
            if progress is not None:
                progress(done, num_rounds * len(pairs))
            of_a, of_b = alternating_rates(first[a][0], second[b][0], window_s, num_windows, is_core=is_core)
            ratios.setdefault((a, b), []).extend(alone / beside for alone, beside in of_a)
            ratios.setdefault((b, a), []).extend(alone / beside for alone, beside in of_b)
    return ratios


def short_sizes(device: str) -> BenchmarkSizes:
    """The usual model in units that are short beside a window."""
    usual = usual_sizes(device)
    if device != "cpu":
        return usual
    return replace(usual, num_slots=8, new_tokens=16, decode_steps=2, micro_batch_size=2, train_tokens=32)


def neighbours_of(device: str, ratios: Ratios) -> Neighbours | None:
    """The slowdowns that the ratios amount to; None where there are no ratios."""
    measured = {pair: slowdown_of(values) for pair, values in ratios.items()}
    return Neighbours(device=probe(device).device, measured=measured) if measured else None


def slowdown_of(ratios: Sequence[float]) -> float:
    """The median ratio where it is above 1 by more than its own noise, else 1.

    The lower end of an interval that holds the true median two times in three has to be above 1.
    """
    ordered = sorted(ratios)
    lower_end = ordered[max(0, floor((len(ordered) - sqrt(len(ordered))) / 2))]
    return max(1.0, median(ordered)) if lower_end > 1.0 else 1.0
