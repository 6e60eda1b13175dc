"""What a model gives the sampled tokens of a micro-batch: their log-probabilities, and each one's entropy.

    input_tokens [T] ──model──▶ hidden [T, width] ──sources──▶ [R, width] ──head, a chunk of rows at a time──▶ [R], [R]

The logits of a chunk, [rows, vocab], are the largest tensors of training. They are computed once for the loss and once
more for the gradient, so that no more than one chunk of them is ever held. A micro-batch that is one chunk computes
them once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from rlmux.engines.micro_batches import MicroBatch
from rlmux.rl.config import TrainConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenScores:
    """What a model says of the R sampled tokens of a micro-batch."""

    logprobs: Tensor
    """Log-probability [R] of each target, float32, with a gradient."""
    entropies: Tensor
    """Entropy [R] in nats of the distribution that each target is from, without a gradient."""


def score_tokens(model: Any, batch: MicroBatch, temperature: float, *, train: TrainConfig | None = None) -> TokenScores:
    """Scores under log-softmax of logits / temperature, the distribution that rollout samples from.

    The model attends within runs (`packed_attention.pack_attention`). `train` says how large a chunk is.
    """
    hidden = model.model(
        input_ids=batch.input_tokens[None], position_ids=batch.positions[None], runs=batch.runs, use_cache=False
    ).last_hidden_state
    chosen = hidden[0].index_select(0, batch.sources)
    num_rows = (train or TrainConfig()).rows_of_chunk(model.lm_head.weight.shape[0])
    if len(chosen) <= num_rows:
        logprobs, entropies = _score_rows(model.lm_head, chosen, batch.targets, temperature)
        return TokenScores(logprobs=logprobs, entropies=entropies)
    scored = [
        checkpoint(_score_rows, model.lm_head, *rows, temperature, use_reentrant=False, preserve_rng_state=False)
        for rows in zip(torch.split(chosen, num_rows), torch.split(batch.targets, num_rows), strict=True)
    ]
    logprobs, entropies = map(torch.cat, zip(*scored, strict=True))
    return TokenScores(logprobs=logprobs, entropies=entropies)


def _score_rows(head: Any, hidden: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Log-probability and entropy of each row of `hidden` [rows, width]."""
    logits = head(hidden).float()
    if temperature != 1.0:
        logits = logits / temperature
    distribution = torch.log_softmax(logits, dim=-1)
    del logits
    logprobs = distribution.gather(1, targets.unsqueeze(1)).squeeze(1)
    with torch.no_grad():
        entropies = -(distribution.exp().mul_(distribution)).sum(dim=-1)
    return logprobs, entropies
