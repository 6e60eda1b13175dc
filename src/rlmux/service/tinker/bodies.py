"""The JSON bodies of requests, as far as they are read. Other keys are ignored: newer clients send more."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from rlmux.rl.client_requests import OptimizerStep

_RESERVED = re.compile(r"s[0-9]+|.*-sampling", re.DOTALL)
"""Display names that could make two pipelines of one name: `s7` is the seventh session's without one, and model 0 of a
session `a-sampling` would have the name of a sampling pipeline of the session `a`."""


class Body(BaseModel):
    """A request's body."""

    model_config = ConfigDict(extra="ignore", protected_namespaces=(), frozen=True, allow_inf_nan=False)


class CreateSession(Body):
    tags: Sequence[str] = ()
    user_metadata: dict[str, Any] | None = None
    sdk_version: str = ""
    project_id: str | None = None
    display_name: str | None = None

    def pipeline_name(self, taken: Collection[str], number: int) -> str:
        """First part of the names of the session's pipelines: its own where that is free, can name a folder, and makes
        no name that another session's pipeline may have (`_RESERVED`)."""
        name = "".join(char if char.isalnum() or char in "-_" else "-" for char in self.display_name or "")[:40]
        is_own = name[:1].isalnum() and name not in taken and not _RESERVED.fullmatch(name)
        return name if is_own else f"s{number}"


class OfSession(Body):
    session_id: str


class TelemetryEvent(Body):
    event: str = ""


class Telemetry(OfSession):
    events: Sequence[TelemetryEvent] = ()


class OfPath(Body):
    path: str


class Ttl(Body):
    ttl_seconds: int | None


class SetTtl(Ttl):
    path: str


class LoraConfig(Body):
    rank: int = 0
    seed: int | None = None
    train_mlp: bool = True
    train_attn: bool = True
    train_unembed: bool = True


class OptimizerConfig(Body):
    type: str = "adamw"


class CreateModel(Body):
    session_id: str
    model_seq_id: int = Field(ge=0)
    base_model: str
    lora_config: LoraConfig | None = None
    optimizer_config: OptimizerConfig | None = None
    user_metadata: dict[str, Any] | None = None


class OfModel(Body):
    model_id: str


class AdamParams(Body):
    learning_rate: float = Field(default=1e-4, ge=0)
    beta1: float = Field(default=0.9, ge=0, lt=1)
    beta2: float = Field(default=0.95, ge=0, lt=1)
    eps: float = Field(default=1e-12, ge=0)
    weight_decay: float = Field(default=0.0, ge=0)
    grad_clip_norm: float = Field(default=0.0, ge=0)


class OptimStep(Body):
    model_id: str
    seq_id: int = Field(ge=0)
    adam_params: AdamParams | None = None
    optimizer_params: AdamParams | None = None

    def step(self) -> OptimizerStep:
        """The engine's sampling parameters."""
        params = self.adam_params or self.optimizer_params or AdamParams()
        return OptimizerStep(
            learning_rate=params.learning_rate,
            betas=(params.beta1, params.beta2),
            epsilon=params.eps,
            weight_decay=params.weight_decay,
            grad_clip=params.grad_clip_norm,
        )


class SaveWeightsForSampler(Body):
    model_id: str
    seq_id: int = Field(ge=0)
    path: str | None = None
    ttl_seconds: int | None = None
    sampling_session_seq_id: int | None = None
    kind: Literal["snapshot", "inflight"] = "snapshot"
    user_metadata: dict[str, str] | None = None


class SaveWeightsBody(Body):
    model_id: str
    seq_id: int = Field(ge=0)
    path: str
    ttl_seconds: int | None = None
    overwrite: bool = False
    user_metadata: dict[str, str] | None = None


class SaveWeightsExternal(SaveWeightsBody):
    age_encryption_recipients: list[str] | None = None


class LoadWeights(Body):
    path: str
    optimizer: bool
    model_id: str | None = None
    seq_id: int | None = None
    session_id: str | None = None
    model_seq_id: int | None = None
    base_model: str | None = None
    user_metadata: dict[str, Any] | None = None


class CreateSamplingSession(Body):
    session_id: str
    sampling_session_seq_id: int = Field(ge=0)
    base_model: str | None = None
    model_path: str | None = None


class Chunk(Body):
    type: str = "encoded_text"
    tokens: Sequence[int] | None = None


class ModelInput(Body):
    chunks: Sequence[Chunk]


class SamplingParams(Body):
    max_tokens: int | None = Field(default=None, ge=1)
    seed: int | None = None
    stop: str | list[str | int] | None = None
    temperature: float = Field(default=1.0, ge=0)
    top_k: int = -1
    top_p: float = 1.0


class SampleBody(Body):
    sampling_session_id: str
    seq_id: int = Field(ge=0)
    prompt: ModelInput
    sampling_params: SamplingParams
    num_samples: int = Field(default=1, ge=1, le=4096)
    prompt_logprobs: bool | None = None
    prompt_logprobs_last_n: int | None = None
    topk_prompt_logprobs: int = 0
    topk_sample_logprobs: int = 0
    target_prompt_logprobs: Any = None
    prompt_alt_tokens_k: int = 0
    record_stability_info: bool | None = None


class OfRequest(Body):
    request_id: str


class WeightsInfo(Body):
    tinker_path: str
