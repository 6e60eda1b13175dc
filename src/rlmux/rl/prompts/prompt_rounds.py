"""Prompts of each step under tail batching (RollPacker, NSDI'26): short rounds, and long rounds of their losers.

    dataset ── next prompts ──▶ short round: more prompts and answers than needed; the first that are done are the batch
                                    └── prompts that lost ──▶ queue ──▶ long round: those prompts, none too many

A step is a long round when the queue has a batch's worth of prompts, or when the rest of the run has too few prompts
left for a short one. Every prompt that the pipeline would train on without tail batching is trained on exactly once: in
all, prompts 0 to steps x prompts per step. A prompt that waited is sampled again, by the weights of its new step.

Invariant: prompts taken from the dataset = prompts trained on + prompts in the queue.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from rlmux.core.errors import CheckpointError, UserError
from rlmux.rl.config import TrainingConfig
from rlmux.rl.tasks import Task


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """Prompts and answers of one step."""

    prompts: tuple[int, ...]
    """Indices of the prompts, by their place in the step."""
    group_size: int
    """Answers of each."""
    is_long: bool
    """Whether its prompts come from the queue, and all of them are trained on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptQueue:
    """A pipeline's position in its prompts between two steps, part of the checkpoint."""

    next_prompt: int = 0
    """Index of the next prompt that no step has sampled."""
    queued: tuple[int, ...] = ()
    """Indices of prompts that lost a race, the longest waiting first."""

    def fields(self) -> dict[str, Any]:
        """As JSON."""
        return {"next_prompt": self.next_prompt, "queued": list(self.queued)}

    @classmethod
    def of_fields(cls, fields: Mapping[str, Any] | None, where: str) -> PromptQueue:
        """Raises CheckpointError, beginning with `where`, where a checkpoint has none."""
        if fields is None:
            raise CheckpointError(f"{where} has no queue of prompts: it was written without rollout.tail_batching")
        return cls(next_prompt=int(fields["next_prompt"]), queued=tuple(map(int, fields["queued"])))

    def round(self, step: int, config: TrainingConfig) -> Round:
        """The round of this step."""
        batching, algorithm = config.rollout.tail_batching, config.algorithm
        assert batching is not None
        wanted = algorithm.prompts_per_step
        most = more_than(wanted, batching.prompts)
        left = config.num_steps * wanted - self.next_prompt
        if len(self.queued) < wanted and left >= most:
            prompts = tuple(range(self.next_prompt, self.next_prompt + most))
            return Round(prompts=prompts, group_size=more_than(algorithm.group_size, batching.samples), is_long=False)
        queued = self.queued[:wanted]
        fresh = range(self.next_prompt, self.next_prompt + wanted - len(queued))
        return Round(prompts=(*queued, *fresh), group_size=algorithm.group_size, is_long=True)

    def after(self, round: Round, trained: Collection[int]) -> PromptQueue:
        """The same once the round has trained on the prompts at these places of its step."""
        lost = [prompt for place, prompt in enumerate(round.prompts) if place not in trained]
        kept = [prompt for prompt in self.queued if prompt not in round.prompts]
        return PromptQueue(
            next_prompt=max(self.next_prompt, max(round.prompts) + 1),
            queued=(*kept, *lost),
        )


def check_task(config: TrainingConfig, task: Task) -> None:
    """Raises UserError for rollouts by a plan clock of a task whose answers have several turns."""
    for mode in ("tail_batching", "interruptible"):
        if getattr(config.rollout, mode) is not None and not task.is_single_turn:
            raise UserError(
                f"rollout.{mode}: does not go with task {config.task.name!r}, whose answers have several turns; "
                f"accepted: a task of one turn, or no {mode}"
            )


def more_than(count: int, factor: float) -> int:
    """`factor` times a count, rounded up but for the rounding error of the product."""
    return math.ceil(count * factor - 1e-9)
