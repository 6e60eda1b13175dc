"""What the file may say: one pydantic model for each mapping of it.

    SpecFile ── cluster ── pools ── PoolModel
             ── policy
             ── defaults            (merged under the pipelines and gone before the check)
             ── pipelines ── PipelineModel ── model, task, sft_warmup, algorithm, rollout, train,
                                              estimate, footprint

Names are those of `rl/config.py` and `core/model.py`; a count drops its `num_`. Default values are theirs,
read from the dataclasses. Types are strict.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator
from pydantic_core import PydanticCustomError

from rlmux.core.model import Phase
from rlmux.rl.config import (
    AlgorithmConfig,
    ModelConfig,
    RolloutConfig,
    SftWarmupConfig,
    TaskConfig,
    TrainingConfig,
)

_MODEL = ModelConfig()
_TASK = TaskConfig(name="")
_WARM = SftWarmupConfig()
_ALGORITHM = AlgorithmConfig()
_ROLLOUT = RolloutConfig()
_PLAN = TrainingConfig(name="")

Count = Annotated[int, Field(ge=1)]
Seconds = Annotated[float, Field(gt=0)]
Gigabytes = Annotated[float, Field(gt=0)]
Name = Annotated[
    str,
    Field(
        pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]{0,63}$",
        json_schema_extra={"accepted": "1 to 64 letters, digits, '-' and '_', as it names a folder"},
    ),
]


class _Mapping(BaseModel):
    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )


def _problem(key: str, text: str) -> PydanticCustomError:
    """A mistake that two keys make together; `key` is the one whose line is named."""
    return PydanticCustomError("together", "{text}", {"key": key, "text": text})


class PoolModel(_Mapping):
    """Nodes kept for one phase. Give `devices` on one machine, `nodes` on a cluster."""

    phase: Literal["rollout", "train"] | None = None
    """What it is kept for. May be left out where the pool is named `rollout` or `train`."""
    devices: Count | None = None
    """How many devices this machine lends to the pool: GPUs, or else CPU cores. Each is placed by itself."""
    nodes: Count | None = None
    """How many whole nodes there are; each takes one worker. With neither key: unlimited (to plan)."""
    gpus_per_node: Count = 1
    """GPUs of one node, for counting and billing."""
    usd_per_gpu_hour: float = Field(default=0.0, ge=0)
    """Price of one GPU for one hour."""
    host_memory_gb: Gigabytes | None = None
    """Host memory of one node (of one device, with `devices`), in 10^9 bytes; without: not limited."""
    device_memory_gb: Gigabytes | None = None
    """Memory of one device, in 10^9 bytes; without: not limited."""
    spills_to_disk: bool = False
    """Where host memory is full, states that are off their device go to disk: more fit, and a switch takes longer."""

    @model_validator(mode="after")
    def _devices_or_nodes(self) -> PoolModel:
        if self.devices is None:
            return self
        for key in ("nodes", "gpus_per_node"):
            if key in self.model_fields_set:
                raise _problem(key, "does not go with 'devices'; accepted: devices or nodes, not both")
        return self


class ClusterModel(_Mapping):
    """The devices there are."""

    pools: dict[Name, PoolModel] = Field(min_length=1)
    """Pools by name: one for rollout, one for train."""

    @field_validator("pools")
    @classmethod
    def _one_pool_per_phase(cls, pools: dict[str, PoolModel]) -> dict[str, PoolModel]:
        name_by_phase: dict[str, str] = {}
        for name, pool in pools.items():
            phase = phase_of_pool(name, pool)
            if phase is None:
                raise _problem(name, "no phase; accepted: phase: rollout, or phase: train")
            if phase in name_by_phase:
                first = name_by_phase[phase]
                raise _problem(name, f"a second pool for {phase} beside {first!r}; accepted: one")
            name_by_phase[phase] = name
        for phase in (Phase.ROLLOUT, Phase.TRAIN):
            if phase not in name_by_phase:
                raise _problem("", f"no pool for {phase}; accepted: one pool for rollout and one for train")
        return pools


def phase_of_pool(name: str, pool: PoolModel) -> str | None:
    """What the pool says, or else what its name says."""
    if pool.phase is None and name in (Phase.ROLLOUT, Phase.TRAIN):
        return name
    return pool.phase


class ModelModel(_Mapping):
    """What is trained: a tiny new model, or a checkpoint."""

    path: str | None = None
    """Hugging Face checkpoint folder, relative to this file. Excludes the other keys."""
    architecture: Literal["qwen3", "llama"] = Field(default=_MODEL.architecture)  # type: ignore[arg-type]
    """Of a new model."""
    hidden_size: Count = _MODEL.hidden_size
    """Width of a new model."""
    layers: Count = _MODEL.num_layers
    """Of a new model."""
    heads: Count = _MODEL.num_heads
    """Attention heads of a new model; divides hidden_size, with an even quotient."""
    kv_heads: Count = _MODEL.num_kv_heads
    """Key/value heads of a new model; divides heads."""
    intermediate_size: Count = _MODEL.intermediate_size
    """Width of a new model's feed-forward layers."""

    @model_validator(mode="after")
    def _sizes_fit(self) -> ModelModel:
        if self.path is not None:
            for key in sorted(self.model_fields_set - {"path"}):
                raise _problem(key, "does not go with 'path': the checkpoint's own config.json decides")
        if self.hidden_size % (2 * self.heads):
            raise _problem("heads", f"accepted: a divisor of half of hidden_size {self.hidden_size}")
        if self.heads % self.kv_heads:
            raise _problem("kv_heads", f"accepted: a divisor of heads {self.heads}")
        return self


class TaskModel(_Mapping):
    """Where prompts come from and how answers are scored. A bare name is short for `{name: ...}`.

    Further keys are the task's own options, such as `digits: 5`.
    """

    model_config = ConfigDict(extra="allow")

    name: str
    """A built-in task (listed below), `reasoning-gym:NAME`, or `file`."""
    path: str | None = None
    """JSONL or parquet rows of the task `file`, relative to this file."""
    prompt_key: str = _TASK.prompt_key
    """Column with the prompt, for `file`. Dots reach into nested columns."""
    answer_key: str = _TASK.answer_key
    """Column with the answer, for `file`."""
    reward: str | None = Field(
        default=None,
        pattern=r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*$",
        json_schema_extra={"accepted": "module:function, such as my_rewards:score"},
    )
    """`module:function` with verl's or TRL's signature, in `code_folder` or installed; else the task's."""
    reward_timeout_s: Seconds = _TASK.reward_timeout_s
    """A reward or environment call that takes longer fails its pipeline."""

    @model_validator(mode="after")
    def _file_has_path(self) -> TaskModel:
        if self.name != "file":
            for key in ("path", "prompt_key", "answer_key"):
                if key in self.model_fields_set:
                    raise _problem(key, f"does not go with the task {self.name!r}; accepted with: name: file")
            return self
        if self.path is None:
            raise _problem("", "'path' is missing; accepted: a .jsonl or .parquet file")
        return self

    @property
    def params(self) -> dict[str, Any]:
        """The task's own options."""
        return dict(self.model_extra or {})


class WarmStartModel(_Mapping):
    """Supervised training on the task's own answers before RL, so that rewards are not all zero."""

    updates: int = Field(default=_WARM.num_updates, ge=0)
    """Optimizer updates; 0 for none."""
    batch_size: Count = _WARM.batch_size
    """Sequences of one update."""
    learning_rate: float = Field(default=_WARM.learning_rate, gt=0)
    """Of AdamW."""


class AlgorithmModel(_Mapping):
    """The RL update. A bare name is short for `{name: ...}`."""

    name: Literal["grpo", "dr-grpo", "rloo"] = Field(default=_ALGORITHM.name)  # type: ignore[arg-type]
    """GRPO, Dr. GRPO, or RLOO; `rl/algorithms.py` has each formula and its source."""
    staleness: int = Field(default=_ALGORITHM.staleness, ge=0, le=8)
    """Largest staleness in weight versions: 0 is on-policy, 1 is one-step-off-policy."""
    prompts_per_step: Count = _ALGORITHM.prompts_per_step
    """Prompt groups of one step."""
    group_size: int = Field(default=_ALGORITHM.group_size, ge=2)
    """Trajectories of one prompt, compared with each other."""
    learning_rate: float = Field(default=_ALGORITHM.learning_rate, gt=0)
    """Of AdamW."""
    lr_warmup_steps: int = Field(default=_ALGORITHM.lr_warmup_steps, ge=0)
    """Steps over which the learning rate rises from 0."""
    adam_betas: list[Annotated[float, Field(ge=0, lt=1)]] = Field(
        default=list(_ALGORITHM.adam_betas), min_length=2, max_length=2
    )
    """AdamW's two decay rates."""
    weight_decay: float = Field(default=_ALGORITHM.weight_decay, ge=0)
    """Of AdamW."""
    grad_clip: float = Field(default=_ALGORITHM.grad_clip, gt=0)
    """Largest norm of the gradient."""
    clip_low: float = Field(default=_ALGORITHM.clip_low, gt=0, le=1)
    """The probability ratio is clipped from below at 1 - clip_low."""
    clip_high: float = Field(default=_ALGORITHM.clip_high, gt=0)
    """... and from above at 1 + clip_high."""
    kl_coef: float = Field(default=_ALGORITHM.kl_coef, ge=0)
    """Weight of the KL penalty to the frozen reference; 0 skips that stage."""
    micro_batch_size: Count = _ALGORITHM.micro_batch_size
    """Sequences of one forward and backward pass. Results change with it in the last bits."""


class RolloutModel(_Mapping):
    """How answers are sampled, and on how much."""

    workers: Count = 1
    """Devices of the rollout pool it asks for (whole nodes, where the pool is given in nodes)."""
    max_new_tokens: Count = _ROLLOUT.max_new_tokens
    """Budget of one trajectory, environment replies included."""
    max_prompt_tokens: Count = _ROLLOUT.max_prompt_tokens
    """Longest prompt that is accepted."""
    temperature: float = Field(default=_ROLLOUT.temperature, gt=0, le=10)
    """Of sampling."""
    slots: int = Field(default=_ROLLOUT.num_slots, ge=1, le=4096)
    """Sequences decoded at once per worker. Results change with it in the last bits."""


class TrainModel(_Mapping):
    """How much the training side asks for."""

    workers: Count = 1
    """Devices of the training pool it asks for, likewise."""
    threads: int = Field(default=_PLAN.num_threads, ge=1, le=1024)
    """Compute threads of each worker, rollout workers included. Results change with it in the last bits."""


class EstimateModel(_Mapping):
    """Solo seconds of one step, where known. `plan` and `simulate` need them; `run` learns its own."""

    rollout_s: Seconds
    """On the rollout nodes it asks for."""
    train_s: Seconds
    """On the training nodes it asks for."""
    colocated_rollout_s: Seconds | None = None
    """With both phases on the training pool's nodes; given together with colocated_train_s."""
    colocated_train_s: Seconds | None = None
    """Likewise."""

    @model_validator(mode="after")
    def _colocated_come_together(self) -> EstimateModel:
        if (self.colocated_rollout_s is None) != (self.colocated_train_s is None):
            given = "colocated_train_s" if self.colocated_rollout_s is None else "colocated_rollout_s"
            raise _problem(given, "accepted: colocated_rollout_s and colocated_train_s together")
        return self


class FootprintModel(_Mapping):
    """Memory it keeps on every node it is pinned to, where known, in 10^9 bytes. `run` measures its own."""

    rollout_host_gb: float = Field(default=0.0, ge=0)
    """Host memory of a rollout node."""
    train_host_gb: float = Field(default=0.0, ge=0)
    """Host memory of a training node."""
    rollout_device_gb: float | None = Field(default=None, ge=0)
    """Memory of each rollout device while it is resident there; without: it fills the device."""
    train_device_gb: float | None = Field(default=None, ge=0)
    """Memory of each training device, likewise."""


class PipelineModel(_Mapping):
    """One user's RL post-training run."""

    name: Name
    """Its name, unlike all others of the file."""
    seed: int = Field(default=_PLAN.seed, ge=0, lt=2**31)
    """Decides, with the rest of the pipeline's own keys, every weight it will ever have."""
    steps: Count = _PLAN.num_steps
    """Optimizer updates of RL."""
    slo_slowdown: float | None = Field(default=None, ge=1)
    """Largest slowdown of a step against running alone that it accepts; without: any."""
    submit_at_s: float = Field(default=0.0, ge=0)
    """Seconds after the start of the run when it is submitted."""
    model: ModelModel = ModelModel()
    """What is trained."""
    task: TaskModel | None = Field(default=None, json_schema_extra={"accepted": "a task's name, or a mapping"})
    """Where prompts come from and how answers are scored. Needed by `run`."""
    sft_warmup: WarmStartModel = WarmStartModel()
    """Supervised training before RL."""
    algorithm: AlgorithmModel = Field(
        default=AlgorithmModel(), json_schema_extra={"accepted": "an algorithm's name, or a mapping"}
    )
    """The RL update."""
    rollout: RolloutModel = RolloutModel()
    """How answers are sampled, and on how much."""
    train: TrainModel = TrainModel()
    """How much the training side asks for."""
    estimate: EstimateModel | None = None
    """Solo seconds of one step. Needed by `plan` and `simulate`."""
    footprint: FootprintModel = FootprintModel()
    """Memory it keeps."""


class SpecFile(_Mapping):
    """The whole file."""

    cluster: ClusterModel
    """The devices there are."""
    code_folder: str | None = None
    """Where reward modules are looked up, relative to this file; without: the file's own folder."""
    policy: str = "rollmux"
    """Who decides, where the command line names nobody else (docs/cli.md lists policies)."""
    defaults: dict[str, Any] = {}
    """Keys of a pipeline, merged under each of them. A pipeline's own `task` or `model` is taken whole."""
    pipelines: list[PipelineModel] = Field(min_length=1)
    """What is to be trained."""
