"""Sequences cut into micro-batches, for a forward without padding (`training_forward`).

    input_tokens [T]   prompt + response of one sequence after another, each without its last token; no padding
    sources      [R]   where in [T] each sampled token is predicted from
    targets      [R]   the token itself           R = sampled tokens of the micro-batch

A sequence's last token predicts nothing. Sequences of equal length stand side by side and attend as one batch
(`packed_attention`). Shapes depend on the sequences and `micro_batch_size`, or
`tokens_per_micro_batch`, alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from rlmux.rl.batch_metrics import count_trained


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingSequence:
    """What a trainer needs to know of one trajectory or demonstration."""

    prompt_tokens: Sequence[int]
    tokens: Sequence[int]
    """Response tokens."""
    is_sampled: Sequence[bool]
    """True for the tokens with a loss. Same length as `tokens`."""
    weight: float
    """Factor of each sampled token in the loss."""
    advantage: float = 0.0
    logprobs: Sequence[float] = ()
    """Log-probability of each token when it was sampled; empty for demonstrations."""
    is_stale: Sequence[bool] = ()
    """True for each token that an older version made than the one being trained; empty for demonstrations."""

    @property
    def num_tokens(self) -> int:
        """Tokens that a training forward computes for it, padding left out."""
        return count_trained(self.prompt_tokens, self.tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """Sequences that go forward and backward together; the module docstring has the shapes.

    `weights`, `advantages`, `sampled_logprobs` and `is_stale` are [R]: the fields of `TrainingSequence`, per sampled
    token.
    """

    input_tokens: Tensor
    positions: Tensor
    """Place [T] of each input token in its own sequence."""
    runs: Sequence[tuple[int, int]]
    """Sequences of equal length that follow each other, in the order of `input_tokens`: how many, and the length."""
    sources: Tensor
    targets: Tensor
    weights: Tensor
    advantages: Tensor
    sampled_logprobs: Tensor
    is_stale: Tensor
    num_tokens: int
    """Prompt and response tokens of all sequences, padding left out."""
    token_share: float = 1.0
    """Part of the tokens of all micro-batches that were cut together."""

    def to(self, device: torch.device) -> MicroBatch:
        """A copy on `device`; the batch itself on a CPU."""
        if device.type == "cpu":
            return self
        return MicroBatch(
            input_tokens=self.input_tokens.to(device),
            positions=self.positions.to(device),
            runs=self.runs,
            sources=self.sources.to(device),
            targets=self.targets.to(device),
            weights=self.weights.to(device),
            advantages=self.advantages.to(device),
            sampled_logprobs=self.sampled_logprobs.to(device),
            is_stale=self.is_stale.to(device),
            num_tokens=self.num_tokens,
            token_share=self.token_share,
        )


def cut(
    sequences: Sequence[TrainingSequence], micro_batch_size: int, max_tokens: int | None = None
) -> list[MicroBatch]:
    """Micro-batches of sequences of like length, the shortest first.

    Each has `micro_batch_size` sequences, or, with `max_tokens`, as many as have so many tokens together, at least one.
    """
    by_length = sorted(sequences, key=lambda sequence: sequence.num_tokens)
    num_tokens = sum(sequence.num_tokens for sequence in sequences)
    return [_micro_batch(part, num_tokens) for part in _parts(by_length, micro_batch_size, max_tokens)]


def _parts(
    sequences: Sequence[TrainingSequence], micro_batch_size: int, max_tokens: int | None
) -> Iterator[Sequence[TrainingSequence]]:
    if max_tokens is None:
        for start in range(0, len(sequences), micro_batch_size):
            yield sequences[start : start + micro_batch_size]
        return
    start = num_tokens = 0
    for index, sequence in enumerate(sequences):
        if index > start and num_tokens + sequence.num_tokens > max_tokens:
            yield sequences[start:index]
            start, num_tokens = index, 0
        num_tokens += sequence.num_tokens
    if sequences:
        yield sequences[start:]


def _micro_batch(sequences: Sequence[TrainingSequence], num_all_tokens: int) -> MicroBatch:
    """One micro-batch of sequences that are sorted by length; `num_all_tokens` are those of all micro-batches."""
    input_tokens: list[int] = []
    positions: list[int] = []
    sources: list[int] = []
    targets: list[int] = []
    weights: list[float] = []
    advantages: list[float] = []
    logprobs: list[float] = []
    is_stale: list[bool] = []
    for sequence in sequences:
        before = len(input_tokens) + len(sequence.prompt_tokens) - 1
        input_tokens += [*sequence.prompt_tokens, *sequence.tokens][:-1]
        positions += range(sequence.num_tokens - 1)
        sampled = [place for place, has_loss in enumerate(sequence.is_sampled) if has_loss]
        sources += [before + place for place in sampled]
        targets += [sequence.tokens[place] for place in sampled]
        weights += [sequence.weight] * len(sampled)
        advantages += [sequence.advantage] * len(sampled)
        logprobs += [sequence.logprobs[place] if sequence.logprobs else 0.0 for place in sampled]
        is_stale += [bool(sequence.is_stale) and sequence.is_stale[place] for place in sampled]
    lengths = [sequence.num_tokens - 1 for sequence in sequences]
    num_tokens = sum(sequence.num_tokens for sequence in sequences)
    return MicroBatch(
        input_tokens=torch.tensor(input_tokens),
        positions=torch.tensor(positions),
        runs=[(len(list(run)), length) for length, run in groupby(lengths)],
        sources=torch.tensor(sources),
        targets=torch.tensor(targets),
        weights=torch.tensor(weights),
        advantages=torch.tensor(advantages),
        sampled_logprobs=torch.tensor(logprobs),
        is_stale=torch.tensor(is_stale),
        num_tokens=num_tokens,
        token_share=num_tokens / num_all_tokens,
    )
