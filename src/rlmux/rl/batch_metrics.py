"""What a step's trajectories were like, as plain numbers for the log."""

from __future__ import annotations

from itertools import groupby
from statistics import fmean, pstdev

from rlmux.rl.types import TrainingBatch


def batch_metrics(batch: TrainingBatch) -> dict[str, float]:
    """Names are stable: they become columns of metrics.jsonl."""
    rewards = [trajectory.reward for trajectory in batch.trajectories]
    lengths = [len(trajectory.tokens) for trajectory in batch.trajectories]
    groups = [
        [trajectory.reward for trajectory in group]
        for _, group in groupby(batch.trajectories, key=lambda trajectory: trajectory.id.prompt)
    ]
    return {
        "reward_mean": fmean(rewards),
        "reward_std": pstdev(rewards),
        "reward_min": min(rewards),
        "reward_max": max(rewards),
        "response_tokens_mean": fmean(lengths),
        "response_tokens_max": float(max(lengths)),
        "sampled_tokens": float(sum(sum(trajectory.is_sampled) for trajectory in batch.trajectories)),
        "turns_mean": fmean(trajectory.num_turns for trajectory in batch.trajectories),
        "cut_share": fmean(trajectory.stop_reason == "length" for trajectory in batch.trajectories),
        "uniform_group_share": fmean(min(group) == max(group) for group in groups),
    }
