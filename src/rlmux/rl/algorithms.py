"""RL algorithms: advantages from a prompt group's rewards, and weights of tokens.

    rewards of a group ──▶ advantages ─┐
                                       ├─▶ loss = Σ_i w_i Σ_t ( clipped surrogate_it + kl_coef · k3_it )
    length of each     ──▶ w_i ────────┘       over the N trajectories i of a step, their sampled tokens t

| name      | advantage A_i                                  | weight w_i               | source             |
|-----------|------------------------------------------------|--------------------------|--------------------|
| `grpo`    | (r_i - mean r) / (std r + 1e-6)                | 1 / (N · length_i)       | arXiv 2402.03300   |
| `dr-grpo` | r_i - mean r                                   | 1 / (N · max_new_tokens) | arXiv 2503.20783   |
| `rloo`    | r_i - mean of the others' rewards              | 1 / N                    | arXiv 2402.14740   |

Every weight is known before the first micro-batch, so micro-batch gradients simply add up to the step's.
The losses use methods of the tensors they are given: nothing here imports torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

_STD_EPSILON = 1e-6
MAX_LOG_RATIO = 20.0
"""Largest difference of two log-probs, either way, that a loss reads (verl's default): beyond 88 its exponential is
infinite in 32 bits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Algorithm:
    """One row of the table above."""

    advantages: Callable[[Sequence[float]], list[float]]
    """Rewards of one prompt group to advantages, in the same order."""
    trajectory_weight: Callable[[int, int, int], float]
    """(N, sampled tokens of the trajectory, max_new_tokens) to w_i."""


def group_normalized(rewards: Sequence[float]) -> list[float]:
    """GRPO: A_i = (r_i - mean r) / (std r + 1e-6), std with G - 1 in the denominator."""
    centered = group_centered(rewards)
    std = math.sqrt(sum(value * value for value in centered) / (len(rewards) - 1))
    return [value / (std + _STD_EPSILON) for value in centered]


def group_centered(rewards: Sequence[float]) -> list[float]:
    """Dr. GRPO: A_i = r_i - mean r."""
    mean = fmean(rewards)
    return [reward - mean for reward in rewards]


def leave_one_out(rewards: Sequence[float]) -> list[float]:
    """RLOO: A_i = r_i - (Σ_{j≠i} r_j) / (G - 1) = G / (G - 1) · (r_i - mean r)."""
    scale = len(rewards) / (len(rewards) - 1)
    return [scale * value for value in group_centered(rewards)]


ALGORITHMS: dict[str, Algorithm] = {
    "grpo": Algorithm(
        advantages=group_normalized,
        trajectory_weight=lambda num_trajectories, length, max_new_tokens: 1 / (num_trajectories * length),
    ),
    "dr-grpo": Algorithm(
        advantages=group_centered,
        trajectory_weight=lambda num_trajectories, length, max_new_tokens: 1 / (num_trajectories * max_new_tokens),
    ),
    "rloo": Algorithm(
        advantages=leave_one_out,
        trajectory_weight=lambda num_trajectories, length, max_new_tokens: 1 / num_trajectories,
    ),
}


def clamped_log_ratio(logprobs: Tensor, others: Tensor) -> Tensor:
    """Difference of log-probs, of any shape, within ±MAX_LOG_RATIO; a token beyond has no gradient.

    One stale outlier would otherwise make the loss of the whole step infinite. (verl, `compute_policy_loss`)
    """
    return (logprobs - others).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def is_clamped(logprobs: Tensor, others: Tensor) -> Tensor:
    """Which tokens `clamped_log_ratio` changes."""
    return (logprobs - others).abs() > MAX_LOG_RATIO


def clipped_surrogate(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, *, clip_low: float, clip_high: float
) -> tuple[Tensor, Tensor]:
    """PPO's loss of each token: -min(ρ A, clip(ρ, 1 - clip_low, 1 + clip_high) A) with ρ = exp(new - old), clamped.

    Where new equals old, ρ is exactly 1 and the gradient is -A ∇log π. (arXiv 1707.06347, equation 7)
    Second comes which tokens the clip took out of the gradient.
    """
    ratio = clamped_log_ratio(logprobs, old_logprobs).exp()
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    return -(ratio * advantages).minimum(clipped * advantages), clipped * advantages < ratio * advantages


def behavior_ratio(proximal_logprobs: Tensor, sampled_logprobs: Tensor, max_ratio: float) -> tuple[Tensor, Tensor]:
    """Weight of each token in the decoupled objective: exp(proximal - sampled), and 0 where that is above the cap.

    E_t[ w_t · min(u A, clip(u) A) ] with w = π_prox / π_behav and u = π_θ / π_prox: the clip holds an update near the
    weights that it begins with, however old the policy is that sampled. (AReaL, arXiv 2505.24298, equation 5)
    Second comes which tokens are above the cap; neither has a gradient.
    """
    ratio = clamped_log_ratio(proximal_logprobs, sampled_logprobs).exp().detach()
    is_dropped = ratio > max_ratio
    return ratio.masked_fill(is_dropped, 0.0), is_dropped


def mismatch_weight(log_ratio: Tensor, correction: str, max_ratio: float) -> tuple[Tensor, Tensor]:
    """Weight of tokens, or of sequences, that the sampler drew with other probabilities than the trainer computes.

    `log_ratio`: trainer's log-prob less the sampler's. `tis`, truncated importance sampling: the ratio, at most
    `max_ratio` (https://fengyao.notion.site/off-policy-rl). `mis`, masked: 0 outside 1 / max_ratio to max_ratio.
    Second comes where the ratio is beyond that; neither has a gradient.
    """
    log_ratio = log_ratio.detach().clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    is_beyond = log_ratio > math.log(max_ratio)
    if correction == "mis":
        is_beyond |= log_ratio < -math.log(max_ratio)
        return log_ratio.exp().masked_fill(is_beyond, 0.0), is_beyond
    return log_ratio.exp().clamp(max=max_ratio), is_beyond


def kl_k3(logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """Low-variance estimate of KL(new || reference) per token: exp(d) - d - 1 with d = reference - new.

    Never negative, zero where both agree. (GRPO, arXiv 2402.03300, equation 4; Schulman's k3)
    """
    difference = clamped_log_ratio(reference_logprobs, logprobs)
    return difference.exp() - difference - 1
