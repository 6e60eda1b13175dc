"""Whether two pipelines are the same run: plans by their hash, weights by the sums of every step that both have.

same plan, equal weights at all 61 steps
same plan, equal weights up to step 36, others at step 37
other plans, other weights from step 1 on
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """What two pipelines have in common."""

    is_same_plan: bool | None
    """Whether all that decides their weights is equal; None if one of the logs does not have it."""
    num_compared: int
    """Steps of whose weights both logs have the same kind of sum: a checksum, or SHA-256."""
    last_equal: int | None
    """Last of the compared steps before any differs; None where there is none."""
    first_other: int | None
    """First of the compared steps at which weights differ; None where all are equal."""

    def __str__(self) -> str:
        plans = {None: "plans not known", True: "same plan", False: "other plans"}[self.is_same_plan]
        if not self.num_compared:
            return f"{plans}, no step whose weights both logs have a sum of"
        if self.first_other is None:
            steps = "the one step" if self.num_compared == 1 else f"all {self.num_compared} steps"
            return f"{plans}, equal weights at {steps}"
        if self.last_equal is None:
            return f"{plans}, other weights from step {self.first_other} on"
        return f"{plans}, equal weights up to step {self.last_equal}, others at step {self.first_other}"


def identity(
    plans: tuple[str | None, str | None], sums: tuple[Mapping[int, Mapping[str, str]], Mapping[int, Mapping[str, str]]]
) -> Identity:
    """`plans`: hash of each plan. `sums`: of each pipeline, the sums of the weights after each step, by name.

    Weights are equal where every sum is that both have.
    """
    first, second = sums
    steps = sorted(step for step in first.keys() & second.keys() if first[step].keys() & second[step].keys())
    others = [
        step
        for step in steps
        if any(first[step][name] != second[step][name] for name in first[step].keys() & second[step].keys())
    ]
    equal = [step for step in steps if not others or step < others[0]]
    return Identity(
        is_same_plan=None if None in plans else plans[0] == plans[1],
        num_compared=len(steps),
        last_equal=equal[-1] if equal else None,
        first_other=others[0] if others else None,
    )
