"""Max-min fairness over kinds of nodes that are not equally fast (Gavel, OSDI'20, section 4.1).

    maximise  min_m  scale_m · Σ_c T_mc X_mc       X >= 0,   Σ_c X_mc <= 1,   Σ_mc a_mcr X_mc <= N_r
    scale_m = s_m / (w_m · Σ_c T_mc Xeq_mc)        Xeq_mc by how many such configurations the cluster holds, Σ_c = 1

X_mc is the part of the time for which pipeline m holds configuration c, which takes a_mcr nodes of pool r, and makes
T_mc steps a second there. Gavel's columns are kinds of accelerators; a step of RL needs two kinds at once, so ours are
configurations. A second program keeps the minimum and maximises the sum, so that nothing is left that could be given
away; ties go to the pipeline and the configuration that come first.

A module of its own: it is the linear program of the paper, tested by itself.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from rlmux.policies.search.linear_program import LinearProgram, Solver

_TIE = 1e-6
"""Relative gain of the first variable over one after the last, by which ties are broken."""
_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """A configuration of one pipeline."""

    steps_per_s: float
    nodes: Mapping[str, int]
    """Nodes by pool."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """A pipeline as the program sees it."""

    columns: tuple[Column, ...]
    """Its configurations, at least one, each of which the empty cluster has room for."""
    num_nodes: int = 1
    """Nodes that it requests (s_m)."""
    weight: float = 1.0
    """Its weight beside others (w_m)."""


def max_min_shares(
    demands: Sequence[Demand], num_nodes: Mapping[str, float], solve: Solver
) -> tuple[tuple[float, ...], ...]:
    """Part of the time of each column of each demand. `num_nodes`: nodes by pool, infinite for an unbounded one."""
    if not demands:
        return ()
    offsets = [0]
    for demand in demands:
        offsets.append(offsets[-1] + len(demand.columns))
    num_columns = offsets[-1]
    progress: list[dict[int, float]] = []
    for demand, offset in zip(demands, offsets, strict=False):
        scale = demand.num_nodes / (demand.weight * _equal_steps_per_s(demand, num_nodes))
        progress.append({offset + at: scale * column.steps_per_s for at, column in enumerate(demand.columns)})
    limits = [*_time_rows(demands, offsets), *_node_rows(demands, offsets, num_nodes)]
    least = num_columns  # the variable after the columns: what every pipeline has at least
    at_least = tuple(({**{index: -value for index, value in row.items()}, least: 1.0}, 0.0) for row in progress)
    found = solve(LinearProgram(gains=(*(0.0,) * num_columns, 1.0), rows=(*limits, *at_least)))
    floor = found[least] * (1.0 - _ROUNDING)
    gains = [0.0] * num_columns
    for row in progress:
        for index, value in row.items():
            gains[index] = value * (1.0 + _TIE * (num_columns - index) / num_columns)
    kept = tuple(({index: -value for index, value in row.items()}, -floor) for row in progress)
    values = solve(LinearProgram(gains=tuple(gains), rows=(*limits, *kept)))
    return tuple(tuple(values[start:end]) for start, end in pairwise(offsets))


def _equal_steps_per_s(demand: Demand, num_nodes: Mapping[str, float]) -> float:
    """Steps a second of a pipeline whose time is split by how many of each configuration the cluster holds."""
    held = [min(num_nodes[pool] / count for pool, count in column.nodes.items()) for column in demand.columns]
    if math.inf in held:
        held = [1.0 if count == math.inf else 0.0 for count in held]
    return sum(column.steps_per_s * count for column, count in zip(demand.columns, held, strict=True)) / sum(held)


def _time_rows(demands: Sequence[Demand], offsets: Sequence[int]) -> list[tuple[dict[int, float], float]]:
    return [
        ({offset + at: 1.0 for at in range(len(demand.columns))}, 1.0)
        for demand, offset in zip(demands, offsets, strict=False)
    ]


def _node_rows(
    demands: Sequence[Demand], offsets: Sequence[int], num_nodes: Mapping[str, float]
) -> list[tuple[dict[int, float], float]]:
    return [
        (
            {
                offset + at: float(column.nodes[pool])
                for demand, offset in zip(demands, offsets, strict=False)
                for at, column in enumerate(demand.columns)
                if column.nodes.get(pool)
            },
            float(count),
        )
        for pool, count in num_nodes.items()
        if count < math.inf
    ]
