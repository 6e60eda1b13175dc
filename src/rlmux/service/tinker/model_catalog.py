"""The models that clients may name, and what a pipeline of one is made of: all its parameters, or an adapter of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from rlmux.core.errors import UserError
from rlmux.rl.config import (
    AdapterConfig,
    AdapterTarget,
    AlgorithmConfig,
    ModelConfig,
    RolloutConfig,
    TrainConfig,
    TrainingConfig,
)
from rlmux.service.tinker.bodies import LoraConfig

ALPHA = 32.0
"""Alpha of every adapter: the API has none, and its clients' learning rates are made for this one."""
_ATTENTION: tuple[AdapterTarget, ...] = ("q_proj", "k_proj", "v_proj", "o_proj")
_MLP: tuple[AdapterTarget, ...] = ("gate_proj", "up_proj", "down_proj")
_UNEMBED: tuple[AdapterTarget, ...] = ("lm_head",)


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
    parameters: str = "full"
    """What a client's model trains: `full`, `lora` or `refuse-lora`; see `serve.parameters` of the file."""
    max_lora_rank: int = 128
    """Largest rank of an adapter."""

    @property
    def max_context_tokens(self) -> int:
        return self.max_prompt_tokens + self.max_new_tokens

    @property
    def warning(self) -> str | None:
        """A warning for clients that request LoRA; None: no warning."""
        if self.parameters == "full":
            return (
                "this server trains all parameters: the LoRA rank is ignored; use about a tenth of a LoRA learning rate"
            )
        return None

    def adapter(self, requested: LoraConfig | None) -> AdapterConfig | None:
        """The adapter of a new model; None: all its parameters are trained.

        Raises UserError for a rank, or a choice of matrices, that is not served.
        """
        rank = 0 if requested is None else requested.rank
        if self.parameters == "refuse-lora" and rank:
            raise UserError(f"lora_config.rank is {rank}: this server trains all parameters; accepted: 0")
        if self.parameters != "lora":
            return None
        if requested is None or not 1 <= rank <= self.max_lora_rank:
            raise UserError(
                f"lora_config.rank is {rank}: this server trains LoRA adapters; accepted: 1 to {self.max_lora_rank}"
            )
        chosen = ((_ATTENTION, requested.train_attn), (_MLP, requested.train_mlp), (_UNEMBED, requested.train_unembed))
        targets = tuple(target for targets, is_chosen in chosen if is_chosen for target in targets)
        if not targets:
            raise UserError("lora_config: no matrix is chosen; accepted: train_attn, train_mlp or train_unembed")
        return AdapterConfig(rank=rank, alpha=ALPHA, targets=targets)

    def training(self, name: str, adapter: AdapterConfig | None = None, seed: int = 0) -> TrainingConfig:
        """What the workers of a pipeline of this name are built from. `seed`: of the adapter's first numbers."""
        return TrainingConfig(
            name=name,
            seed=self.seed if adapter is None else seed % 2**63,
            model=replace(self.model, seed=self.seed),
            adapter=adapter,
            algorithm=AlgorithmConfig(micro_batch_size=self.micro_batch_size),
            rollout=RolloutConfig(
                max_prompt_tokens=self.max_prompt_tokens,
                max_new_tokens=self.max_new_tokens,
                num_slots=self.num_slots,
            ),
            train=TrainConfig(),
        )


def find_served(models: Mapping[str, ServedModel], name: str) -> ServedModel:
    """The model of this name. Raises UserError for one that the server's file does not name."""
    if name not in models:
        raise UserError(f"base_model {name!r} is not served; accepted: {', '.join(sorted(models))}")
    return models[name]
