"""Compares the policies of rollout and training: the largest difference of their log-probabilities, and their KL.

fresh tokens: made by the version being trained      compared
stale tokens: made by an older version               another policy, not compared
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from rlmux.core.errors import PipelineError
from rlmux.engines.train.update.micro_batches import MicroBatch
from rlmux.rl.algorithms import kl_k3

NO_GAP = -math.inf
"""The gap of a micro-batch without a fresh token."""


def logprob_gap(logprobs: Tensor, batch: MicroBatch) -> Tensor:
    """Largest difference in nats between training's log-probabilities [R] of a micro-batch's tokens and the rollout's.

    A tensor of one number, on the device: NaN where a log-probability is not a number, `NO_GAP` without a fresh token.
    """
    if not len(batch.targets):
        return logprobs.new_tensor(NO_GAP)
    return (logprobs.detach() - batch.sampled_logprobs).abs().masked_fill(batch.is_stale, NO_GAP).amax()


@torch.no_grad()
def mismatch_kl(logprobs: Tensor, batch: MicroBatch) -> Tensor:
    """Summed estimate (k3) over the fresh tokens of the KL in nats from the rollout's policy to training's."""
    return kl_k3(batch.sampled_logprobs, logprobs.detach()).masked_fill(batch.is_stale, 0.0).sum()


def require_close(kl: float, accepted: float, place: str) -> None:
    """Raises PipelineError, beginning with `place`, for policies further apart than `accepted` nats a token."""
    if kl > accepted:
        raise PipelineError(
            f"{place}: mismatch_kl is {kl:.3g} nats a token, accepted: up to {accepted:.3g} "
            "(algorithm.max_mismatch_kl): training does not compute what rollout sampled from; the weights are left as "
            "they were"
        )


def require_gap(gap: float, accepted: float, place: str) -> None:
    """Raises PipelineError, beginning with `place`, for a gap that is not a number or larger than `accepted` nats."""
    if math.isnan(gap):
        raise PipelineError(
            f"{place}: a log-probability of rollout or training is not a number; the weights are left as they were"
        )
    if gap > accepted:
        raise PipelineError(
            f"{place}: logprob_gap is {gap:.3g}, accepted: up to {accepted:.3g} (algorithm.max_logprob_gap): "
            "training does not compute what rollout sampled from; the weights are left as they were"
        )
