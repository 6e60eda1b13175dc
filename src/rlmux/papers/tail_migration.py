"""Long-tail migration between two pipelines that share a rollout node (RollMux sections 4.3 and 8.5).

    GPUs 0-6   [ A dense ][ B dense        ]..........[ A dense ]
    GPU 7      [ A dense ][ A's tail  ]...............[ A dense ]      the tail still gates A's training
    training                           [ A trains ][ B ...

When at most 16 of the 128 responses of a rollout are left, they are interrupted, their contexts are
computed again on one GPU, and the other seven go to the next pipeline, whose rollout begins on those (and
gets no eighth before its end). If that one GPU still holds the other's tail, nothing migrates in this rollout.
The finish times are measured ones; how much slower one crowded GPU decodes, and seven GPUs instead of
eight, comes from the decode-cost model.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from rlmux.core.errors import UserError
from rlmux.sim import tables
from rlmux.sim.models.costs import RolloutCosts, rollout_costs
from rlmux.sim.workloads.arrivals import profiles, switch_seconds

NUM_GPUS = 8
TAIL_RESPONSES = 16
"""87.5 % of 128 are then complete."""
EARLIEST_S = 5.0
CHECK_EVERY_S = 1.0
_PROFILE_BATCH = 256
_COST_MODELS = {"7B": "qwen2.5-7b", "14B": "qwen2.5-14b"}

PUBLISHED = {
    ("7B_4k", "7B_4k"): 1.12,
    ("7B_8k", "7B_8k"): 1.19,
    ("7B_8k", "14B_8k"): 1.06,
    ("14B_8k", "14B_8k"): 1.28,
}
"""Throughput with migration over throughput without, by pair."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TailedPipeline:
    """One of the two pipelines."""

    name: str
    finish_s: tuple[float, ...]
    """Seconds from the begin of the rollout to the end of each response, on all eight GPUs, ascending."""
    train_s: float
    switch_s: tuple[float, float]
    """Seconds of a warm switch to its rollout, and to its training."""
    without_one_gpu: float
    """Factor by which the dense part decodes slower on seven GPUs than on eight."""
    migrated_tail_s: float
    """Seconds of the tail after its migration: contexts computed again, then all of it decoded on one GPU."""

    @property
    def rollout_s(self) -> float:
        return self.finish_s[-1]

    @property
    def dense_s(self) -> float:
        """Seconds until at most `TAIL_RESPONSES` are left."""
        return self.finish_s[-1 - TAIL_RESPONSES]


@dataclass(frozen=True, slots=True, kw_only=True)
class TailGain:
    """One pair with and without migration."""

    pair: tuple[str, str]
    seconds_without: float
    """Seconds of one meta-iteration in the steady state, without migration."""
    seconds_with: float
    published: float | None

    @property
    def gain(self) -> float:
        return self.seconds_without / self.seconds_with


def tailed_pipeline(profile: str) -> TailedPipeline:
    """A pipeline with the measured finish times of `7B_8k` or `14B_8k`; `7B_4k` is 7B's cut at 4,096 tokens.

    Training is the profile's, scaled from its batch of 256 to these 128.
    """
    model, _, cap = profile.partition("_")
    if model not in _COST_MODELS or cap not in ("4k", "8k"):
        raise UserError(f"no rollout of {profile!r} was measured; accepted: 7B_4k, 7B_8k, 14B_4k, 14B_8k")
    limit = 4096 if cap == "4k" else 8192
    rows = [row for row in tables.rows("rollout_finish_times") if row["model"] == model]
    finish_s = sorted(_cut(row, limit) for row in rows)
    tokens_per_s = max(float(row["response_tokens"]) for row in rows) / max(float(row["finish_s"]) for row in rows)
    costs = rollout_costs(_COST_MODELS[model], "H20-96GB-SXM", 1)
    per_gpu = len(rows) / NUM_GPUS
    dense_s = finish_s[-1 - TAIL_RESPONSES]
    context = dense_s * tokens_per_s
    warm = switch_seconds(model)
    return TailedPipeline(
        name=profile,
        finish_s=tuple(finish_s),
        train_s=profiles()[profile].disaggregated.train_s * len(rows) / _PROFILE_BATCH,
        switch_s=(warm.warm_rollout_s, warm.warm_train_s),
        without_one_gpu=costs.decode_step_s(per_gpu * NUM_GPUS / (NUM_GPUS - 1), context / 2)
        / costs.decode_step_s(per_gpu, context / 2),
        migrated_tail_s=costs.prefill_s(TAIL_RESPONSES * context)
        + _crowded_s(costs, finish_s[-1 - TAIL_RESPONSES :], tokens_per_s),
    )


def _crowded_s(costs: RolloutCosts, finish_s: Sequence[float], tokens_per_s: float) -> float:
    """The time after the first of these, were all that is left decoded on one GPU, not spread over eight."""
    total_s = 0.0
    for num_done, (begin_s, end_s) in enumerate(pairwise(finish_s)):
        num_left = len(finish_s) - 1 - num_done
        context = end_s * tokens_per_s
        together = costs.decode_step_s(num_left, context)
        apart = costs.decode_step_s(max(1.0, num_left / NUM_GPUS), context)
        total_s += (end_s - begin_s) * together / apart
    return total_s


def _cut(row: Mapping[str, str], limit: int) -> float:
    """When the response would have ended at that many tokens."""
    return float(row["finish_s"]) * min(1.0, limit / float(row["response_tokens"]))


def migration_gain(first: str, second: str) -> TailGain:
    """How much shorter a meta-iteration of the two gets."""
    pair = (tailed_pipeline(first), tailed_pipeline(second))
    return TailGain(
        pair=(first, second),
        seconds_without=meta_iteration_s(pair, migrates=False),
        seconds_with=meta_iteration_s(pair, migrates=True),
        published=PUBLISHED.get((first, second)),
    )


def gain_without_crowding(first: str, second: str) -> float:
    """`migration_gain` if one GPU decoded the tail as fast as all eight did, with nothing computed again."""
    pair = (tailed_pipeline(first), tailed_pipeline(second))
    light = tuple(replace(one, migrated_tail_s=one.rollout_s - one.dense_s) for one in pair)
    return meta_iteration_s(pair, migrates=False) / meta_iteration_s(light, migrates=True)


def meta_iteration_s(pair: tuple[TailedPipeline, ...], *, migrates: bool, num_cycles: int = 40) -> float:
    """Mean of the second half of the cycles: rollouts in turn on one node, training in turn on another."""
    free_s = tail_gpu_free_s = training_free_s = 0.0
    ready_s = [0.0] * len(pair)
    begun: list[float] = []
    for cycle in range(num_cycles + 1):
        for index, one in enumerate(pair):
            start_s = max(free_s, ready_s[index]) + one.switch_s[0]
            if index == 0 and cycle in (num_cycles // 2, num_cycles):
                begun.append(start_s)
            has_all = tail_gpu_free_s <= start_s
            slowdown = 1.0 if has_all else one.without_one_gpu
            tail_at_s = start_s + max(EARLIEST_S, math.ceil(one.dense_s * slowdown / CHECK_EVERY_S) * CHECK_EVERY_S)
            if migrates and tail_gpu_free_s <= tail_at_s:
                end_s = tail_at_s + one.migrated_tail_s
                free_s, tail_gpu_free_s = tail_at_s, end_s
            else:
                end_s = free_s = start_s + one.rollout_s * slowdown
            training_free_s = max(training_free_s, end_s) + one.switch_s[1] + one.train_s
            ready_s[index] = training_free_s
    return (begun[1] - begun[0]) / (num_cycles - num_cycles // 2)
