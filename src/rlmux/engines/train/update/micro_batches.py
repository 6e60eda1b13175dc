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
from dataclasses import dataclass, fields, replace
from itertools import chain, groupby, repeat
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rlmux.engines.model.packed_attention import sequence_starts
from rlmux.rl.batch_metrics import count_trained


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingSequence:
    """The trainer's input from one trajectory or demonstration."""

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
    """True for each token made by a version older than the trained one; empty if there is none."""

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

    @property
    def sequence_of(self) -> Tensor:
        """Number [R] of each sampled token's sequence."""
        ends = sequence_starts(self.runs, self.sources.device)[1:].long()
        return torch.searchsorted(ends, self.sources, right=True)

    def to(self, device: torch.device) -> MicroBatch:
        """A copy on `device`; the batch itself on a CPU.

        Copies go through pinned memory: from any other, each waits for all that the device has to do.
        """
        if device.type == "cpu":
            return self
        tensors = {each.name: found for each in fields(self) if isinstance(found := getattr(self, each.name), Tensor)}
        moved: dict[str, Any] = {
            name: tensor.pin_memory().to(device, non_blocking=True) for name, tensor in tensors.items()
        }
        return replace(self, **moved)


def cut(
    sequences: Sequence[TrainingSequence], micro_batch_size: int, max_tokens: int | None = None
) -> list[MicroBatch]:
    """Micro-batches of sequences of like length, the shortest first.

    Each has `micro_batch_size` sequences, or, with `max_tokens`, as many as have so many tokens together, at least one.
    """
    by_length = sorted(sequences, key=lambda sequence: sequence.num_tokens)
    parts = list(_parts(by_length, micro_batch_size, max_tokens))
    return _micro_batches(by_length, parts) if parts else []


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


def _micro_batches(
    sequences: Sequence[TrainingSequence], parts: Sequence[Sequence[TrainingSequence]]
) -> list[MicroBatch]:
    """Micro-batches of parts of the sequences that follow each other. Tensors are made of all of them at once and then
    cut: a step has thousands of tokens, and its device waits."""
    lengths = [sequence.num_tokens for sequence in sequences]
    inputs, by_sampled = _columns(sequences, np.array(lengths))
    sources = by_sampled[0]
    batches, first, first_input, first_sampled = [], 0, 0, 0
    for part in parts:
        lengths_of_part = lengths[first : first + len(part)]
        first += len(part)
        num_tokens = sum(lengths_of_part)
        end = first_input + num_tokens - len(part)
        end_sampled = int(sources.searchsorted(end))
        tokens, positions = (torch.from_numpy(column[first_input:end]) for column in inputs)
        places, *others = (torch.from_numpy(column[first_sampled:end_sampled]) for column in by_sampled)
        targets, weights, advantages, logprobs, is_stale = others
        batches.append(
            MicroBatch(
                input_tokens=tokens,
                positions=positions,
                runs=[(len(list(run)), length - 1) for length, run in groupby(lengths_of_part)],
                sources=places - first_input,
                targets=targets,
                weights=weights,
                advantages=advantages,
                sampled_logprobs=logprobs,
                is_stale=is_stale,
                num_tokens=num_tokens,
                token_share=num_tokens / sum(lengths),
            )
        )
        first_input, first_sampled = end, end_sampled
    return batches


def _columns(
    sequences: Sequence[TrainingSequence], lengths: NDArray[np.int64]
) -> tuple[list[NDArray[Any]], list[NDArray[Any]]]:
    """The sequences as one: (input tokens, positions) [T], and (sources, targets, weights, advantages, sampled
    log-probs, is_stale) [R]. `lengths`: tokens of each."""
    num_responses = np.fromiter((len(each.tokens) for each in sequences), np.int64)
    tokens = np.fromiter(chain.from_iterable(chain(each.prompt_tokens, each.tokens) for each in sequences), np.int64)
    ends = lengths.cumsum()
    positions = np.arange(len(tokens)) - (ends - lengths).repeat(lengths)
    is_input = np.ones(len(tokens), np.bool_)
    is_input[ends - 1] = False  # a last token predicts nothing
    is_sampled = np.fromiter(chain.from_iterable(each.is_sampled for each in sequences), np.bool_)
    is_response = positions >= (lengths - num_responses).repeat(lengths)
    sampled = is_response.nonzero()[0][is_sampled]  # places in `tokens`
    sequence_of = np.arange(len(sequences)).repeat(num_responses)[is_sampled]
    logprobs = chain.from_iterable(each.logprobs or repeat(0.0, len(each.tokens)) for each in sequences)
    is_stale = chain.from_iterable(each.is_stale or repeat(False, len(each.tokens)) for each in sequences)
    return [tokens[is_input], positions[is_input]], [
        sampled - 1 - sequence_of,
        tokens[sampled],
        np.fromiter((each.weight for each in sequences), np.float32)[sequence_of],
        np.fromiter((each.advantage for each in sequences), np.float32)[sequence_of],
        np.fromiter(logprobs, np.float32)[is_sampled],
        np.fromiter(is_stale, np.bool_)[is_sampled],
    ]
