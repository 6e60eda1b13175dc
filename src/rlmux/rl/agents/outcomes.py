"""How a program's trajectory ends, and what that is worth to the trainer.

    ended     the program ended by itself, with a reward
    failed    it raised, hung, died, gave no reward, or lost its sandbox, as often as `task.retries` allows
    turns, tokens, time     it ran into a limit

A module of its own: programs and environments of a class share it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rlmux.core.errors import PipelineError
from rlmux.rl.config import OutcomesConfig

ENDED = "ended"
"""Kind and text of an outcome without anything to say about it."""
KINDS = (ENDED, "failed", "turns", "tokens", "time")


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One trajectory's end."""

    kind: str
    """One of `KINDS`."""
    text: str
    """One line: what happened."""
    reward: float | None = None
    """What the program or its tests gave; None: nothing."""
    num_retries: int = 0
    """Programs before this one that failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Worth:
    """What an outcome counts for."""

    reward: float | None
    """None: masked, without an advantage."""
    is_decided: bool
    """Whether a reward function is not to be asked."""


def worth_of(outcome: Outcome, config: OutcomesConfig, place: str) -> Worth:
    """What the user chose. Raises PipelineError, beginning with `place`, where that is the end of the pipeline."""
    choice: Any = "keep" if outcome.kind == ENDED else getattr(config, outcome.kind)
    if choice == "stop":
        raise PipelineError(f"{place} {outcome.text} (task.outcomes.{outcome.kind}: stop)")
    if choice == "mask":
        return Worth(reward=None, is_decided=True)
    if choice == "keep":
        return Worth(reward=outcome.reward or 0.0, is_decided=False)
    return Worth(reward=float(choice), is_decided=True)


def reward_in(found: Any) -> float | None:
    """A finite number, or a text of one; None for anything else."""
    if isinstance(found, bool) or not isinstance(found, int | float | str):
        return None
    try:
        number = float(found)
    except (ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


def counted(outcomes: Sequence[Outcome]) -> dict[str, float]:
    """How many trajectories of a step ended how, by metric."""
    counts = {f"outcomes/{kind}": float(sum(each.kind == kind for each in outcomes)) for kind in KINDS[1:]}
    return {**counts, "outcomes/retries": float(sum(each.num_retries for each in outcomes))}
