"""Plans of the look-ahead against the exact optimum."""

from __future__ import annotations

import pytest

pytest.importorskip("ortools")

import lookahead


def test_plans_are_near_the_exact_optimum() -> None:
    """Few graphs, quickly proved: no clock decides."""
    found = lookahead.quality(30, is_sharing=False, limit_s=3600.0)
    assert found["unproved"] == 0
    assert found["mean"] <= lookahead.MEAN_BUDGET
    assert found["worst"] <= lookahead.WORST_BUDGET
    assert found["mean"] < found["greedy_mean"]
