"""Samples the next token: random numbers of the trajectory, and the inverse of the distribution.

    uniform(j) = Philox4x64(key = (pipeline seed, 0), counter = (-, sample, prompt, step)), j-th output
    token(j)   = first token whose cumulative probability exceeds uniform(j)

Invariant: the j-th uniform is a function of (seed, step, prompt, sample, j) and of nothing else; the token
is a function of its own row of logits and its own uniform. The log-probability with a token is that of
the distribution it was drawn from: log-softmax of logits / temperature.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rlmux.rl.types import TrajectoryId

_WORD = (1 << 64) - 1


def trajectory_uniforms(seed: int, trajectory_id: TrajectoryId, num_tokens: int) -> NDArray[np.float64]:
    """One number in [0, 1) for each response position of a trajectory."""
    key = np.array([seed & _WORD, 0], dtype=np.uint64)
    counter = np.array([0, trajectory_id.sample, trajectory_id.prompt, trajectory_id.step], dtype=np.uint64)
    raw = np.random.Philox(key=key, counter=counter).random_raw(num_tokens)
    # 32 bits, so that the product with a cumulative sum never rounds up to the sum itself.
    return (raw >> np.uint64(32)).astype(np.float64) * 2.0**-32


def sample(logits: Tensor, uniforms: Tensor, temperatures: Tensor | None) -> tuple[Tensor, Tensor]:
    """Draw one token per row of `logits` [rows, vocab] with `uniforms` [rows, 1] (float64).

    `temperatures`: [rows, 1], of each row; None: 1 for all of them, to the same bits.

    Returns tokens [rows, 1] and their log-probabilities [rows, 1]. The cumulative sum is float64: at a large
    vocabulary float32 would skew the tail. A token of probability zero is never drawn.
    """
    if temperatures is not None:
        logits = logits.div_(temperatures)
    logprobs = torch.log_softmax(logits, dim=-1)
    cumulative = torch.cumsum(logprobs.exp(), dim=-1, dtype=torch.float64)
    tokens = torch.searchsorted(cumulative, uniforms * cumulative[:, -1:], right=True)
    # Logits that are not numbers match no token; any will do, since its log-probability is not finite.
    tokens.clamp_(max=logits.shape[1] - 1)
    return tokens, logprobs.gather(1, tokens)
