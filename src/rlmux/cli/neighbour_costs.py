"""What busy neighbours cost on this machine: measured for a profile, shown to people.

    measure ──▶ ratios, round after round ──▶ Neighbours ──▶ profile.json "neighbours" ──▶ sim/models/neighbours.py

Two pieces of work on two devices, each with one of its own: first the one alone, then both, then the other alone.
A machine drifts within seconds by more than neighbours cost, so each moment beside a neighbour is compared with the one
next to it, and of these ratios the median counts: but only where it is above 1 by more than its own noise.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import product
from math import floor, sqrt
from statistics import median
from typing import Any

from rlmux.engines.device_fraction import num_gpus, probe
from rlmux.profiling.micro_benchmarks import PieceSizes, piece_processes, rates_in_turn, usual_sizes
from rlmux.sim.models.neighbours import KINDS, Neighbours

Ratios = dict[tuple[str, str], list[float]]
"""By (who, beside whom): its rate alone over its rate then."""


def places(device: str) -> Sequence[tuple[str, int | None]]:
    """Two neighbouring devices, as (device, core); fewer where there are no two."""
    if device == "cpu":
        return [("cpu", core) for core in sorted(os.sched_getaffinity(0))[:2]]
    return [(f"cuda:{index}", None) for index in range(min(num_gpus(), 2))]


def missing(device: str) -> str | None:
    """Why neighbours cannot be measured here, or None."""
    if len(places(device)) == 2:
        return None
    return f"neighbouring devices: left out, since there is one {'core' if device == 'cpu' else 'GPU'} that may be used"


def measure(
    device: str,
    *,
    sizes: PieceSizes | None = None,
    window_s: float | None = None,
    num_rounds: int = 4,
    num_turns: int = 6,
    progress: Callable[[int, int], None] | None = None,
) -> Ratios:
    """Every pair of decoding and training on two neighbouring devices; empty where there are no two. 1.4 s a pair and
    round on cores, and twice as many ratios of each as there are turns in all."""
    ratios: Ratios = {}
    if missing(device):
        return ratios
    (here, here_core), (there, there_core) = places(device)
    sizes, is_core = sizes or short_sizes(device), device == "cpu"
    window_s = window_s or (0.06 if is_core else 0.3)
    pairs = list(product(KINDS, repeat=2))
    with (
        piece_processes(KINDS, sizes, here, here_core, num_each=1) as first,
        piece_processes(KINDS, sizes, there, there_core, num_each=1) as second,
    ):
        for done, (a, b) in enumerate(pairs * num_rounds):
            if progress is not None:
                progress(done, num_rounds * len(pairs))
            of_a, of_b = rates_in_turn(first[a][0], second[b][0], window_s, num_turns, is_core=is_core)
            ratios.setdefault((a, b), []).extend(alone / beside for alone, beside in of_a)
            ratios.setdefault((b, a), []).extend(alone / beside for alone, beside in of_b)
    return ratios


def short_sizes(device: str) -> PieceSizes:
    """The usual model in units that are short beside a window."""
    usual = usual_sizes(device)
    if device != "cpu":
        return usual
    return replace(usual, num_slots=8, new_tokens=16, decode_steps=2, micro_batch_size=2, train_tokens=32)


def neighbours_of(device: str, ratios: Ratios) -> Neighbours | None:
    """What the ratios come to; None where there are none."""
    measured = {pair: slowdown_of(values) for pair, values in ratios.items()}
    return Neighbours(device=probe(device).device, measured=measured) if measured else None


def slowdown_of(ratios: Sequence[float]) -> float:
    """Their median where it is above 1 by more than its own noise, else 1: the lower end of an interval that holds the
    true median two times in three has to be above 1."""
    ordered = sorted(ratios)
    lower_end = ordered[max(0, floor((len(ordered) - sqrt(len(ordered))) / 2))]
    return max(1.0, median(ordered)) if lower_end > 1.0 else 1.0


def rows(measured: Mapping[tuple[str, str], float]) -> list[dict[str, Any]]:
    """For people: one for each sub-stage, a column for each neighbour."""
    table: dict[str, dict[str, Any]] = {}
    for (kind, beside), slowdown in measured.items():
        table.setdefault(kind, {"slowdown of": kind})[f"beside {beside}"] = f"{slowdown:.2f}"
    return list(table.values())
