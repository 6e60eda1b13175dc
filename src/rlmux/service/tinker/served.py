"""The models that clients may name, and what a pipeline of one is made of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rlmux.rl.config import AlgorithmConfig, ModelConfig, RolloutConfig, TrainConfig, TrainingConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """One model of the file's `serve.models`."""

    name: str
    """The name that clients write: `org/name`, a folder or a cached model of theirs, whose tokenizer they load."""
    model: ModelConfig
    vocab_size: int
    """Number of tokens; accepted are 0 to one less."""
    stop_tokens: Sequence[int]
    """Tokens that end a sequence where a request names none."""
    max_prompt_tokens: int
    max_new_tokens: int
    num_slots: int = 64
    micro_batch_size: int = 32
    seed: int = 0
    """Seed of a new model's first weights."""

    @property
    def max_context_tokens(self) -> int:
        return self.max_prompt_tokens + self.max_new_tokens

    def training(self, name: str) -> TrainingConfig:
        """What the workers of a pipeline of this name are built from."""
        return TrainingConfig(
            name=name,
            seed=self.seed,
            model=self.model,
            algorithm=AlgorithmConfig(micro_batch_size=self.micro_batch_size),
            rollout=RolloutConfig(
                max_prompt_tokens=self.max_prompt_tokens,
                max_new_tokens=self.max_new_tokens,
                num_slots=self.num_slots,
            ),
            train=TrainConfig(),
        )
