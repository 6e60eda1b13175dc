"""What one pipeline trains, how, and on what: frozen values that cross processes.

`spec` builds these from the user's file; hosts and engines read them. Nothing here imports torch.
All of them belong to the pipeline alone: nothing about who shares the machine may appear here,
since a pipeline's weights are a function of these values only (promise 1 of docs/design.md).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """A tiny model made from a transformers config, or a local Hugging Face checkpoint folder."""

    path: str | None = None
    """Folder with config.json, *.safetensors and (optionally) a tokenizer; None makes a new model."""
    architecture: str = "qwen3"
    """`qwen3` or `llama`; ignored with `path`."""
    hidden_size: int = 64
    num_layers: int = 2
    num_heads: int = 4
    num_kv_heads: int = 2
    intermediate_size: int = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskConfig:
    """Where prompts come from and how answers are scored."""

    name: str
    """A built-in task (`sort`, `reverse`, `add`, `calculator`, ...), `reasoning-gym:NAME`, or `file`."""
    params: Mapping[str, Any] = field(default_factory=dict)
    """Options of a built-in or reasoning-gym task, such as `digits: 5`."""
    path: str | None = None
    """JSONL or parquet rows for the task `file`."""
    prompt_key: str = "prompt"
    answer_key: str = "answer"
    reward: str | None = None
    """`module:function` with verl's or TRL's signature; None takes the task's own reward."""
    reward_timeout_s: float = 30.0
    """A reward or environment call that takes longer fails its pipeline."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SftWarmupConfig:
    """Supervised training on the task's own answers before RL, so that rewards are not all zero."""

    num_updates: int = 0
    batch_size: int = 64
    learning_rate: float = 3e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class AlgorithmConfig:
    """The RL update. Names are the field's: see `rl/algorithms.py` for each formula and its source."""

    name: str = "grpo"
    """`grpo`, `dr-grpo`, or `rloo`."""
    staleness: int = 0
    """Largest allowed staleness in weight versions: 0 is on-policy, 1 is one-step-off-policy."""
    prompts_per_step: int = 16
    group_size: int = 8
    learning_rate: float = 3e-4
    lr_warmup_steps: int = 0
    adam_betas: tuple[float, float] = (0.9, 0.99)
    weight_decay: float = 0.0
    grad_clip: float = 1.0
    clip_low: float = 0.2
    clip_high: float = 0.2
    kl_coef: float = 0.0
    """Weight of the KL penalty (low-variance estimator k3) against the frozen reference; 0 skips that stage."""
    micro_batch_size: int = 32
    """Sequences per forward/backward. Part of the spec because it fixes the order of summation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutConfig:
    """How answers are sampled."""

    max_new_tokens: int = 32
    """Budget of one trajectory, environment replies included."""
    max_prompt_tokens: int = 64
    temperature: float = 1.0
    num_slots: int = 64
    """Sequences decoded at once per worker. Fixed shapes: the count belongs to the spec, not to the schedule."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingConfig:
    """All that decides a pipeline's weights, in one value."""

    name: str
    seed: int = 0
    num_steps: int = 100
    model: ModelConfig = field(default_factory=ModelConfig)
    task: TaskConfig = field(default_factory=lambda: TaskConfig(name="sort"))
    sft_warmup: SftWarmupConfig = field(default_factory=SftWarmupConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    num_threads: int = 1
    """Compute threads of every worker; results change with it, so it is fixed here."""
