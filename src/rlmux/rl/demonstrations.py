"""Demonstrations for the SFT warm-up: the task's answers as tokens with a loss mask, by update index.

Task indices run down from -1, so that no RL prompt was seen before. A train engine makes its
batches from the config alone; nothing has to be sent.
"""

from __future__ import annotations

from typing import NamedTuple

from rlmux.core.errors import PipelineError
from rlmux.rl.config import TrainingConfig
from rlmux.rl.tasks import Task
from rlmux.rl.vocabulary import Vocabulary, prompt_tokens_of


class Demonstration(NamedTuple):
    """One trajectory that earns the full reward."""

    prompt_tokens: tuple[int, ...]
    answer_tokens: tuple[int, ...]
    """All turns, environment replies included, the end-of-sequence token last."""
    is_sampled: tuple[bool, ...]
    """False where the environment speaks: no loss there. Same length as `answer_tokens`."""


def demonstration_batch(
    config: TrainingConfig, task: Task, vocabulary: Vocabulary, update_index: int
) -> list[Demonstration]:
    """The demonstrations of one update; updates count from 0. PipelineError for one that cannot be made."""
    size = config.sft_warmup.batch_size
    return [_demonstration(config, task, vocabulary, -1 - (update_index * size + place)) for place in range(size)]


def _demonstration(config: TrainingConfig, task: Task, vocabulary: Vocabulary, index: int) -> Demonstration:
    prompt = task.prompt(index)
    if prompt.answer is None:
        raise PipelineError(
            f"sft_warmup: task {config.task.name!r} has a prompt without an answer to learn from: "
            f"{prompt.text[:40]!r}; set task.answer_key, or sft_warmup.updates to 0"
        )
    prompt_tokens = prompt_tokens_of(vocabulary, prompt)
    tokens: list[int] = []
    is_sampled: list[bool] = []
    for segment in task.demonstration(prompt):
        spoken = vocabulary.encode(segment.text)
        tokens += spoken
        is_sampled += [segment.is_sampled] * len(spoken)
    # A trajectory whose last turn ends in a stop token of the task is over without an end-of-sequence token.
    if not (tokens and vocabulary.decode(tokens[-1:]) in task.stop):
        tokens.append(vocabulary.eos_token)
        is_sampled.append(True)
    if len(tokens) > config.rollout.max_new_tokens:
        raise PipelineError(
            f"sft_warmup: the answer to {prompt.text[:40]!r} takes {len(tokens)} tokens, more than "
            f"rollout.max_new_tokens {config.rollout.max_new_tokens}"
        )
    return Demonstration(prompt_tokens, tuple(tokens), tuple(is_sampled))
