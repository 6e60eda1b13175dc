"""Two pipelines are the same run as long as their plans and every sum of their weights are."""

from __future__ import annotations

import pytest

from rlmux.report.comparison import identity

SAME = ("plan", "plan")


def sums(num_steps: int, *, other_from: int = 10**9) -> dict[int, dict[str, str]]:
    return {step: {"checksum": f"{step}{'!' if step >= other_from else ''}"} for step in range(1, num_steps + 1)}


def hashes(by_step: dict[int, str]) -> dict[int, dict[str, str]]:
    return {step: {"sha256": sha256} for step, sha256 in by_step.items()}


@pytest.mark.parametrize(
    ("plans", "first", "second", "says"),
    [
        (SAME, sums(61), sums(61), "same plan, equal weights at all 61 steps"),
        (SAME, sums(61), sums(40), "same plan, equal weights at all 40 steps"),
        (SAME, sums(61), sums(61, other_from=37), "same plan, equal weights up to step 36, others at step 37"),
        (("a", "b"), sums(9), sums(9, other_from=1), "other plans, other weights from step 1 on"),
        ((None, "b"), sums(1), sums(1), "plans not known, equal weights at the one step"),
        (
            SAME,
            hashes({2: "x"}),
            hashes({1: "x"}),
            "same plan, no step whose weights both logs have a sum of",
        ),
        (SAME, sums(2), hashes({1: "x", 2: "y"}), "same plan, no step whose weights both logs have a sum of"),
        (
            SAME,
            hashes({2: "a", 4: "b"}),
            hashes({3: "z", 4: "b"}),
            "same plan, equal weights at the one step",
        ),
        (
            SAME,
            {1: {"checksum": "a", "sha256": "b"}, 2: {"checksum": "c", "sha256": "d"}},
            {1: {"checksum": "a"}, 2: {"checksum": "c", "sha256": "e"}},
            "same plan, equal weights up to step 1, others at step 2",
        ),
    ],
)
def test_the_first_difference_is_named(plans, first, second, says):
    assert str(identity(plans, (first, second))) == says


def test_a_flipped_bit_at_one_step_is_found_even_where_later_weights_are_equal_again():
    flipped = {**sums(61), 37: {"checksum": "flipped"}}
    found = identity(SAME, (sums(61), flipped))
    assert (found.last_equal, found.first_other, found.num_compared) == (36, 37, 61)
