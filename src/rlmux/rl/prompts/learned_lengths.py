"""Lengths of a prompt's previous answers, by which a rollout orders its prompts.

    TrajectoryRequest ◀── expected_tokens ── LearnedLengths ◀── lengths of a finished step

In later epochs of a dataset, answers to a prompt stay alike in length. A restarted process has no lengths, which costs
time and changes no result.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

MAX_PROMPTS = 1 << 17
"""Prompts that are remembered, the latest ones."""


class LearnedLengths:
    """Mean answer lengths by prompt, in tokens."""

    def __init__(self) -> None:
        self._tokens_by_prompt: dict[int, int] = {}
        """Mean length by the hash of the prompt's tokens, which is the same in every process."""

    def expected(self, prompt_tokens: tuple[int, ...]) -> int:
        """Mean length of the prompt's last answers; 0 for a new prompt."""
        return self._tokens_by_prompt.get(hash(prompt_tokens), 0)

    def learn(self, lengths: Mapping[tuple[int, ...], Sequence[int]]) -> None:
        """Record the lengths of all answers of each prompt."""
        for prompt_tokens, of_answers in lengths.items():
            key = hash(prompt_tokens)
            self._tokens_by_prompt.pop(key, None)
            self._tokens_by_prompt[key] = max(1, round(sum(of_answers) / len(of_answers)))
        while len(self._tokens_by_prompt) > MAX_PROMPTS:
            del self._tokens_by_prompt[next(iter(self._tokens_by_prompt))]
