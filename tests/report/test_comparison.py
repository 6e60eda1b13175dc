"""Two pipelines are the same run as long as their plans and every hash of their weights are."""

from __future__ import annotations

import pytest

from rlmux.report.comparison import identity

SAME = ("plan", "plan")


def hashes(num_steps: int, *, other_from: int = 10**9) -> dict[int, str]:
    return {step: f"{step}{'!' if step >= other_from else ''}" for step in range(1, num_steps + 1)}


@pytest.mark.parametrize(
    ("plans", "first", "second", "says"),
    [
        (SAME, hashes(61), hashes(61), "same plan, equal weights at all 61 steps"),
        (SAME, hashes(61), hashes(40), "same plan, equal weights at all 40 steps"),
        (SAME, hashes(61), hashes(61, other_from=37), "same plan, equal weights up to step 36, others at step 37"),
        (("a", "b"), hashes(9), hashes(9, other_from=1), "other plans, other weights from step 1 on"),
        ((None, "b"), hashes(1), hashes(1), "plans not known, equal weights at the one step"),
        (SAME, {1: None, 2: "x"}, {1: "x"}, "same plan, no step whose weights both logs have a hash of"),
        (SAME, {2: "a", 4: "b"}, {3: "z", 4: "b"}, "same plan, equal weights at the one step"),
    ],
)
def test_the_first_difference_is_named(plans, first, second, says):
    assert str(identity(plans, (first, second))) == says


def test_a_flipped_bit_at_one_step_is_found_even_where_later_weights_are_equal_again():
    flipped = {**hashes(61), 37: "flipped"}
    found = identity(SAME, (hashes(61), flipped))
    assert (found.last_equal, found.first_other, found.num_compared) == (36, 37, 61)
