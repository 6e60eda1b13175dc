"""What decode iterations cost by their rows, and what a sibling's trajectories then add to a shard."""

from __future__ import annotations

import pytest

from rlmux.core.estimation.decode_rate import DecodeRate
from rlmux.core.events import DecodeSpan


def rate(fixed_s: float, row_s: float, *widths: int) -> DecodeRate:
    """Seen on a device whose iterations take so long and so much longer for each row: ten of each width."""
    made = DecodeRate()
    made.add([DecodeSpan(10, 10 * width, 10 * (fixed_s + row_s * width)) for width in widths])
    return made


def test_iterations_bound_by_memory_take_a_sibling_over_for_nothing():
    cost = rate(0.01, 0.0, 4, 16, 32).cost()
    assert cost.row_part == pytest.approx(0.0, abs=1e-9)
    assert cost.growth(1.0, None) == pytest.approx(0.0, abs=1e-9)


def test_iterations_bound_by_computing_take_as_long_as_both_shards():
    cost = rate(0.0, 0.001, 4, 16, 32).cost()
    assert cost.row_part == pytest.approx(1.0)
    assert cost.growth(1.0, None) == pytest.approx(1.0)
    assert cost.growth(0.5, None) == pytest.approx(0.5)


def test_trajectories_that_find_no_slot_cost_whole_iterations():
    cost = rate(0.01, 0.0, 4, 16, 32).cost()
    assert cost.peak_rows == 32
    assert cost.growth(1.0, slots=32) == pytest.approx(1.0)
    assert cost.growth(1.0, slots=48) == pytest.approx(0.5)
    assert cost.growth(0.5, slots=48) == pytest.approx(0.0, abs=1e-9)


def test_both_parts_are_told_apart():
    cost = rate(0.016, 0.001, 8, 16, 24).cost()
    assert cost.row_part == pytest.approx(0.5)


def test_nothing_is_known_before_iterations_of_different_widths_were_seen():
    assert DecodeRate().cost() is None
    assert rate(0.01, 0.001, 32).cost() is None
    empty = DecodeRate()
    empty.add([DecodeSpan(0, 0, 0.0)])
    assert empty.cost() is None


def test_the_last_orders_count_most():
    changed = rate(0.0, 0.001, 4, 32)
    for _ in range(20):
        changed.add([DecodeSpan(10, 10 * width, 10 * 0.01) for width in (4, 32)])
    assert changed.cost().row_part < 0.05
