"""The truth at the grain of sub-stages: one pipeline's rollouts by device and sequence, its training by stage.

    lengths of a step ──dealt to devices──▶ Decoder | TurnDecoder, one per rollout shard
    tokens of a step ──▶ seconds of reference, old log-probs, update, publish

The content of a step is a function of (seed, step) only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

import numpy as np

from rlmux.core.errors import UserError
from rlmux.core.model import MigrationEstimate, PhaseSeconds, Stage
from rlmux.sim.models.costs import MEASURED_GPU, TRAIN_STAGES, TrainCosts, rollout_costs, train_costs
from rlmux.sim.models.decoder import Decoder, Unfinished, copy_s, recompute_s
from rlmux.sim.models.lengths import length_distribution
from rlmux.sim.models.multi_turn import ToolUse, TurnDecoder
from rlmux.sim.models.work import Work
from rlmux.sim.world import TrueSeconds

STAGES = (Stage.GENERATE, *TRAIN_STAGES)
"""Stages of a step, in order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SubStageWorld(TrueSeconds):
    """One pipeline's truth. `by_stage` is not used: every second follows from the lengths."""

    by_stage: dict[Stage, float] = field(default_factory=dict)
    model: str
    lengths_of: str
    """Name of the recorded run whose answer lengths are drawn from."""
    num_sequences: int
    """Trajectories of a step, over all devices."""
    num_rollout_devices: int
    num_train_devices: int
    """Devices that the pipeline has alone, to which its solo time refers."""
    seed: int = 0
    gpu: str = MEASURED_GPU
    tp: int = 4
    """GPUs that act as one device."""
    slots: int = 512
    """Sequences that one device decodes at once."""
    tools: ToolUse | None = None
    """Waits for an environment between turns; None: every trajectory has one turn."""
    fixed_part: float = 1.0
    """Part of the training stages' fixed seconds that is charged; 0 for a trainer that never offloads its weights."""

    def __post_init__(self) -> None:
        if self.num_sequences < 1 or self.slots < 1:
            raise UserError(
                f"pipeline of {self.lengths_of!r}: num_sequences is {self.num_sequences} and slots {self.slots}; "
                "both must be at least 1"
            )

    def shard(self, step: int, index: int, num_devices: int) -> Work:
        """Whole prompt groups, dealt to the devices in turn."""
        distribution = length_distribution(self.lengths_of)
        group = distribution.group_size
        costs = rollout_costs(self.model, self.gpu, self.tp)
        sequences = [
            trajectory for n, trajectory in enumerate(self._trajectories(step)) if n // group % num_devices == index
        ]
        if self.tools is None:
            return Decoder(costs, sequences, slots=self.slots, group_size=group)
        return TurnDecoder(costs, sequences, slots=self.slots, group_size=group, keeps_slots=self.tools.keeps_slots)

    def _trajectories(self, step: int) -> list[Unfinished]:
        lengths = self.lengths(step)
        prompt_tokens = length_distribution(self.lengths_of).prompt_tokens
        if self.tools is None:
            return [Unfinished(length, -prompt_tokens) for length in lengths]
        generator = np.random.default_rng([self.seed, step, 1])
        turns = self.tools.turns_of(lengths, generator)
        return [Unfinished(first, -prompt_tokens, later) for first, later in turns]

    def lengths(self, step: int) -> tuple[int, ...]:
        return _lengths(self.lengths_of, self.num_sequences, self.seed, step)

    def tokens(self, step: int) -> int:
        """Prompt and response tokens of a step."""
        prompt = length_distribution(self.lengths_of).prompt_tokens
        return int(sum(self.lengths(step)) + prompt * self.num_sequences)

    def stage_s(self, stage: Stage, step: int, num_devices: int) -> float:
        """Solo seconds of a training stage on so many devices, or of publishing, which holds none."""
        if stage not in TRAIN_STAGES:
            return 0.0
        costs = _train_costs(self.model, self.gpu, self.tp * (num_devices or self.num_train_devices))
        saved_s = 0.0 if stage is Stage.PUBLISH else (1.0 - self.fixed_part) * costs.cost_by_stage[stage].fixed_s
        return costs.stage_s(stage, self.tokens(step)) - saved_s

    def migration_s(self, moved: Sequence[Unfinished], *, copies_kv: bool) -> tuple[float, float]:
        costs = rollout_costs(self.model, self.gpu, self.tp)
        return (copy_s(costs, moved), 0.0) if copies_kv else (0.0, recompute_s(costs, moved))

    def migration_estimate(self) -> MigrationEstimate:
        """As a profile would measure it: of a trajectory half of whose mean response is there."""
        costs, distribution = rollout_costs(self.model, self.gpu, self.tp), length_distribution(self.lengths_of)
        context = distribution.prompt_tokens + distribution.mean / 2
        return MigrationEstimate(copy_s=costs.kv_copy_s(context), recompute_s=costs.prefill_s(context))

    def rollout_s(self, step: int) -> float:
        """Solo seconds of a rollout, until its slowest shard ends."""
        return _rollout_s(
            self.model, self.gpu, self.tp, self.lengths_of, self.num_sequences, self.slots, self.tools, self.seed,
            step, self.num_rollout_devices,
        )  # fmt: skip

    def train_s(self, step: int) -> float:
        stages = (Stage.REFERENCE_LOGPROBS, Stage.OLD_LOGPROBS, Stage.UPDATE)
        return sum(self.stage_s(stage, step, self.num_train_devices) for stage in stages)

    def seconds(self, stage: Stage, step: int) -> float:
        if stage is Stage.GENERATE:
            return self.rollout_s(step)
        return self.stage_s(stage, step, self.num_train_devices)

    def solo_s(self, step: int) -> float:
        return sum(self.seconds(stage, step) for stage in STAGES)

    def mean_phases(self, num_steps: int = 3) -> PhaseSeconds:
        """An estimate as a measurement would give it: means over a few steps of another seed."""
        other = replace(self, seed=self.seed + 7919)
        steps = range(1, num_steps + 1)
        return PhaseSeconds(
            rollout_s=sum(other.rollout_s(step) for step in steps) / num_steps,
            train_s=sum(other.train_s(step) for step in steps) / num_steps,
        )


@lru_cache(maxsize=4096)
def _lengths(run: str, num_sequences: int, seed: int, step: int) -> tuple[int, ...]:
    generator = np.random.default_rng([seed, step])
    return tuple(int(n) for n in length_distribution(run).sample(generator, num_sequences))


@lru_cache(maxsize=256)
def _train_costs(model: str, gpu: str, num_gpus: int) -> TrainCosts:
    return train_costs(model, gpu, num_gpus)


@lru_cache(maxsize=4096)
def _rollout_s(
    model: str,
    gpu: str,
    tp: int,
    run: str,
    num_sequences: int,
    slots: int,
    tools: ToolUse | None,
    seed: int,
    step: int,
    num_devices: int,
) -> float:
    world = SubStageWorld(
        model=model, lengths_of=run, num_sequences=num_sequences, num_rollout_devices=num_devices,
        num_train_devices=num_devices, seed=seed, gpu=gpu, tp=tp, slots=slots, tools=tools,
    )  # fmt: skip
    return max(world.shard(step, index, num_devices).until_over(1.0) for index in range(num_devices))
