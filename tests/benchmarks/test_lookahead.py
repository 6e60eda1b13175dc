"""Plans of the look-ahead against the exact optimum."""

from __future__ import annotations

import pytest

pytest.importorskip("ortools")

import lookahead


@pytest.mark.parametrize(("has_moves", "mean", "worst"), [(False, 0.01, 0.05), (True, 0.02, 0.2)])
def test_plans_are_near_the_exact_optimum(has_moves: bool, mean: float, worst: float) -> None:
    """Few graphs, quickly proved: no clock decides."""
    found = lookahead.quality(30, is_sharing=False, has_moves=has_moves, limit_s=3600.0)
    assert found["unproved"] == 0
    assert found["mean"] <= mean
    assert found["worst"] <= worst
    assert found["mean"] < found["greedy_mean"]
