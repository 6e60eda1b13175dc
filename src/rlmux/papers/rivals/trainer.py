"""The training side of a rival, and the figures of a finished run.

    seconds of a step = fixed part (once a step) + tokens x seconds per token       sim/models/costs.py, by device count

A streamed step pays its fixed part when its first prompt group arrives, and trains groups in the order of their ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rlmux.core.model import Stage
from rlmux.sim.models.costs import TRAIN_STAGES, train_costs
from rlmux.sim.models.substages import SubStageWorld


@dataclass(frozen=True, slots=True, kw_only=True)
class RivalResult:
    """Figures of a run of one pipeline."""

    system: str
    num_rollout_devices: int
    num_train_devices: int
    """The same devices as the rollout's where a system colocates."""
    step_ends_s: tuple[float, ...]
    """Seconds at which the weights of each step have arrived."""
    trained_tokens: int
    """Prompt and response tokens of all trained trajectories."""
    decoded_tokens: int
    """Response tokens, cut answers included."""
    staleness_mean: float
    """Weight versions between training and the first token, mean over trained trajectories."""
    staleness_max: int
    num_mixed: int = 0
    """Trained trajectories with tokens of more than one version."""
    bubble_share: float
    """Part of all device-seconds in which nothing runs."""

    @property
    def split(self) -> tuple[int, int]:
        """(rollout, training) devices."""
        return self.num_rollout_devices, self.num_train_devices

    @property
    def seconds(self) -> float:
        return self.step_ends_s[-1]

    @property
    def tokens_per_s(self) -> float:
        return self.trained_tokens / self.seconds

    @property
    def mean_step_s(self) -> float:
        return self.seconds / len(self.step_ends_s)


class VirtualTrainer:
    """The trainer on so many devices."""

    def __init__(self, world: SubStageWorld, num_devices: int) -> None:
        costs = train_costs(world.model, world.gpu, world.tp * num_devices).cost_by_stage
        stages = [costs[stage] for stage in TRAIN_STAGES if stage is not Stage.PUBLISH]
        self.fixed_s = world.fixed_part * sum(cost.fixed_s for cost in stages)
        self.token_s = sum(cost.mtoken_s for cost in stages) * 1e-6
        self.publish_s = world.stage_s(Stage.PUBLISH, 1, num_devices)
        self.busy_s = 0.0
        """Seconds of training so far."""

    def train_s(self, tokens: float) -> float:
        """Seconds of a step whose tokens are all there."""
        seconds = self.fixed_s + self.token_s * tokens
        self.busy_s += seconds
        return seconds

    def stream(self, free_s: float, groups: Sequence[tuple[float, float]]) -> float:
        """End of a step of (seconds at which a group is complete, its tokens), in that order, from `free_s` on."""
        now_s = max(free_s, groups[0][0]) + self.fixed_s
        for ready_s, tokens in groups:
            now_s = max(now_s, ready_s) + self.token_s * tokens
        self.busy_s += self.fixed_s + self.token_s * sum(tokens for _, tokens in groups)
        return now_s


def bubble_share(busy_device_s: float, num_devices: int, seconds: float) -> float:
    """Part of `num_devices` x `seconds` in which nothing runs."""
    return 1.0 - busy_device_s / (num_devices * seconds)
