"""Metrics of a step's trajectories, and the definition of token counts.

response tokens   all tokens after the prompt, environment replies included: lengths, budgets, a step's `tokens`
sampled tokens    the response tokens that the model made: those with a loss; `ChunkReport.sampled_tokens`
trained tokens    prompt and response, padding left out: what a training forward computes; `TrainReport.tokens`
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from rlmux.rl.prompts.backlog import num_trajectories_of
from rlmux.rl.types import RoundRecord, TrainingBatch, Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchMetrics:
    """One step's batch in numbers."""

    num_trajectories: int
    reward_mean: float
    """Mean over the trajectories that have a reward; 0.0 without any."""
    reward_std: float
    """Standard deviation over the same trajectories."""
    response_tokens: int
    """Response tokens of all trajectories."""
    response_tokens_mean: float
    response_tokens_max: int
    """Response tokens of the longest trajectory."""
    clip_ratio: float
    """Share of the trajectories that ended for want of room, their own tokens or a reply's (stop reason `length`)."""
    turns_mean: float
    token_runs: Sequence[Sequence[int]]
    """Per trajectory, in id order, lengths in tokens: sampled, forced by its environment, sampled again, ..."""
    logged: Mapping[str, float]
    """What the reward function logged, by metric."""
    round: RoundRecord | None
    """Result of tail batching; None without it."""
    versions: Sequence[int]
    """Weight versions that made the trajectories' tokens, in order."""
    version_metrics: Mapping[str, float]
    """Figures of interruptible rollouts, by metric; empty without them."""
    engine_metrics: Mapping[str, float] = field(default_factory=dict)
    """Figures that rollout engines report, by metric."""

    @property
    def round_metrics(self) -> dict[str, int]:
        """The round in numbers, by metric; empty without tail batching."""
        if self.round is None:
            return {}
        return {
            "is_long_round": int(self.round.is_long),
            "cut_trajectories": self.round.num_cut,
            "queued_prompts": self.round.num_queued,
        }


def batch_metrics(batch: TrainingBatch) -> BatchMetrics:
    """Means are over trajectories."""
    rewards = [trajectory.reward for trajectory in batch.trajectories if trajectory.is_judged] or [0.0]
    lengths = [sum(len(each.tokens) for each in trajectory.sequences) for trajectory in batch.trajectories]
    mean = sum(rewards) / len(rewards)
    return BatchMetrics(
        num_trajectories=len(lengths),
        reward_mean=mean,
        reward_std=(sum((reward - mean) ** 2 for reward in rewards) / len(rewards)) ** 0.5,
        response_tokens=sum(lengths),
        response_tokens_mean=sum(lengths) / len(lengths),
        response_tokens_max=max(lengths),
        clip_ratio=sum(trajectory.stop_reason == "length" for trajectory in batch.trajectories) / len(lengths),
        turns_mean=sum(each.num_turns for trajectory in batch.trajectories for each in trajectory.sequences)
        / len(lengths),
        token_runs=[_token_runs(each) for each in batch.trajectories],
        logged=batch.logged,
        round=batch.round,
        versions=sorted({version for each in batch.trajectories for version in set(each.versions)}),
        version_metrics={} if batch.backlog is None else _version_metrics(batch, batch.backlog),
    )


def _token_runs(trajectory: Trajectory) -> list[int]:
    """Lengths in tokens: sampled, forced, sampled again; a forced first run comes behind 0 sampled ones."""
    is_sampled = [flag for each in trajectory.sequences for flag in each.is_sampled]
    runs = [len(list(run)) for _, run in groupby(is_sampled)]
    return runs if not is_sampled or is_sampled[0] else [0, *runs]


def _version_metrics(batch: TrainingBatch, backlog: bytes) -> dict[str, float]:
    """Staleness is of trajectories."""
    versions = [each.versions for each in batch.trajectories]
    staleness = [batch.step - 1 - min(each) for each in versions]
    return {
        "interrupted_trajectories": sum(min(each) < max(each) for each in versions),
        "staleness_mean": sum(staleness) / len(staleness),
        "staleness_max": max(staleness),
        "backlog_trajectories": num_trajectories_of(backlog),
    }


def count_sampled(is_sampled: Sequence[bool]) -> int:
    """Sampled tokens of a response; `is_sampled` has one entry for each of its tokens."""
    return sum(is_sampled)


def count_trained(prompt_tokens: Sequence[int], response_tokens: Sequence[int]) -> int:
    """Tokens that a training forward over one sequence computes, padding left out."""
    return len(prompt_tokens) + len(response_tokens)
