"""`rlmux` against each of the two grains alone, on every workload of `benchmarks/grains.py`."""

from __future__ import annotations

import math

import pytest
from grains import CASES, PAIRS, POLICIES, SMALL, TRACES, Case, gain, judged

QUICK = (
    "micro-a", "rh-m:num_pipelines=8, seed 0",
    *(f"{name}," for name in PAIRS[::8]),
)  # fmt: skip


def is_quick(case):
    return f"{case},".startswith(QUICK)


@pytest.mark.parametrize(
    "case", [pytest.param(one, marks=() if is_quick(one) else pytest.mark.slow) for one in (*CASES, *SMALL)], ids=str
)
def test_rlmux_is_never_clearly_worse_than_the_better_grain_alone(case):
    figures = judged(case, POLICIES)
    assert figures["rlmux"] < math.inf
    assert gain(figures) > 0.999, figures


@pytest.mark.slow
@pytest.mark.parametrize("name", TRACES)
def test_rlmux_costs_no_more_on_the_whole_of_a_long_trace(name):
    assert gain(judged(Case(name), POLICIES)) > 0.999
