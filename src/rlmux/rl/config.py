"""What one pipeline trains, how, and on what: frozen values that cross processes.

    TrainingConfig ── model, task, sft_warmup, algorithm, rollout, train

These classes are also the training part of the user's file. `rlmux.config` reads them from it with pydantic, and
every key, default value, bound and description is stated here only. In the file a count drops its `num_`.
A value built in Python checks how its fields fit together; the bounds of each field are checked in files.

All of it belongs to the pipeline alone. Nothing about other pipelines on the same devices may appear here, since a
pipeline's weights are a function of these values only (promise 1 of docs/how-it-works/design.md). Nothing here imports
torch.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, ClassVar, Literal, get_args

from annotated_types import Ge, Gt, Le, Lt, MinLen, Predicate

from rlmux import plugins
from rlmux.core.errors import UserError
from rlmux.plugins import is_reference

ARCHITECTURES = ("qwen3", "llama", "qwen2", "mistral", "qwen3_moe")
"""Values of `model_type` in config.json that both engines support, and architectures of new models."""

ACCEPTED_MODELS = ", ".join(ARCHITECTURES) + "; vLLM and SGLang serve others (rollout.engine)"
"""What a refusal of another architecture names."""

ENGINES = ("rlmux", "vllm", "sglang")
"""Rollout engines by the names that a file gives them: our own, and servers of others."""

AGENT_TASKS = ("agent", "harbor")
"""Tasks whose trajectories are sessions of programs."""

OF_FILES = ("file", *AGENT_TASKS)
"""Tasks whose prompts are in files of the user's."""

KEYS_OF_TASKS = (
    (OF_FILES, ("path",)),
    (("file", "agent"), ("prompt_key", "answer_key")),
    (("file",), ("environment",)),
    (("agent",), ("url", "function", "reward_from")),
    (AGENT_TASKS, ("command", "sandbox", "programs", "program_memory_gb", "model_name", "max_turns", "time_limit_s")),
)
"""Names of tasks, and keys of `TaskConfig` that go with them alone."""

AdapterTarget = Literal["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head"]
"""What an adapter can stand beside: a projection of each block, or the output matrix."""

ADAPTER_TARGETS: tuple[AdapterTarget, ...] = get_args(AdapterTarget)
BLOCK_TARGETS: tuple[AdapterTarget, ...] = ADAPTER_TARGETS[:-1]
"""Those that are in every block."""

ATTENTION_TARGETS: tuple[AdapterTarget, ...] = ("q_proj", "k_proj", "v_proj", "o_proj")

TARGETS_BY_ARCHITECTURE: Mapping[str, tuple[AdapterTarget, ...]] = {
    "qwen3": ADAPTER_TARGETS,
    "llama": ADAPTER_TARGETS,
    "qwen2": ADAPTER_TARGETS,
    "mistral": ADAPTER_TARGETS,
    "qwen3_moe": (*ATTENTION_TARGETS, "lm_head"),
}
"""Targets that both engines serve, by architecture. The experts of a mixture get no adapters."""

MAX_POSITIONS = 8192
"""Tokens of the longest sequence of a new model: its `max_position_embeddings`."""


@dataclass(frozen=True, slots=True)
class Takes:
    """Words for what a field accepts, beyond its type and bounds. For `Annotated`."""

    text: str


def is_name(text: str) -> bool:
    """Whether a pipeline or a pool can have this name."""
    return re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}", text) is not None


Name = Annotated[str, Predicate(is_name), Takes("1 to 64 letters, digits, '-' and '_', as it names a folder")]
Count = Annotated[int, Ge(1)]
PositiveFloat = Annotated[float, Gt(0)]
NonNegativeFloat = Annotated[float, Ge(0)]
BetaFloat = Annotated[float, Ge(0), Lt(1)]
FunctionReference = Annotated[str, Predicate(is_reference), Takes("module:function, such as my_rewards:score")]
ClassReference = Annotated[str, Predicate(is_reference), Takes("module:Class, such as my_tools:Calculator")]


class MisfitError(UserError):
    """Two fields that do not fit together."""

    def __init__(self, key: str, text: str, *others: tuple[str, str]) -> None:
        super().__init__(key, text, *others)
        self.key = key
        """Key of the file that is to be changed."""
        self.text = text
        """What is accepted there."""
        self.others = others
        """Further keys that may be changed instead, and what is accepted there."""

    def __str__(self) -> str:
        return f"{self.key}: {self.text}"


def key_of(field_name: str) -> str:
    """The key of a field in the user's file."""
    return field_name.removeprefix("num_")


class FromFile:
    """A mapping of the user's file. Unknown keys are errors, types are strict, numbers are finite."""

    __slots__ = ()
    __pydantic_config__: ClassVar[dict[str, Any]] = {
        "alias_generator": key_of,
        "allow_inf_nan": False,
        "extra": "forbid",
        "strict": True,
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig(FromFile):
    """What is trained: a tiny new model, or a checkpoint. The sizes describe a new model."""

    path: str | None = None
    """Hugging Face checkpoint folder, relative to this file. Excludes the other keys."""
    architecture: Literal["qwen3", "llama", "qwen2", "mistral", "qwen3_moe"] = "qwen3"
    """Architecture of a new model."""
    hidden_size: Count = 64
    """Width of the residual stream."""
    num_layers: Count = 2
    """Transformer blocks."""
    num_heads: Count = 4
    """Attention heads; a divisor of half of hidden_size."""
    num_kv_heads: Count = 2
    """Key/value heads; a divisor of heads."""
    intermediate_size: Count = 128
    """Width of the feed-forward layers."""
    seed: Annotated[int, Ge(0), Lt(2**31)] | None = None
    """Seed of a new model's weights; adapters of one model and seed share a base. Default: the pipeline's seed."""
    num_experts: Count | None = None
    """Experts of each layer, for qwen3_moe."""
    num_experts_per_token: Count | None = None
    """Experts per token, for qwen3_moe; at most experts."""
    moe_intermediate_size: Count | None = None
    """Width of each expert, for qwen3_moe."""

    def __post_init__(self) -> None:
        self._check_experts()
        if self.hidden_size % (2 * self.num_heads):
            raise MisfitError(
                "heads",
                f"accepted: a divisor of half of hidden_size {self.hidden_size}",
                ("hidden_size", f"accepted: a multiple of {2 * self.num_heads}, twice the heads"),
            )
        if self.num_heads % self.num_kv_heads:
            raise MisfitError(
                "kv_heads",
                f"accepted: a divisor of heads {self.num_heads}",
                ("heads", f"accepted: a multiple of kv_heads {self.num_kv_heads}"),
            )

    def _check_experts(self) -> None:
        given = {
            "experts": self.num_experts,
            "experts_per_token": self.num_experts_per_token,
            "moe_intermediate_size": self.moe_intermediate_size,
        }
        has_experts = self.architecture == "qwen3_moe"
        for key, value in given.items():
            if has_experts and value is None:
                raise MisfitError(key, "accepted with architecture qwen3_moe: a whole number, 1 or more")
            if not has_experts and value is not None:
                raise MisfitError(key, "accepted with architecture qwen3_moe only")
        if has_experts and (self.num_experts_per_token or 0) > (self.num_experts or 0):
            raise MisfitError("experts_per_token", f"accepted: up to experts {self.num_experts}")


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterConfig(FromFile):
    """A LoRA adapter trained instead of the model: y = W x + (alpha / rank) B (A x), with W frozen (arXiv 2106.09685).
    B starts at zero, A at random numbers of the pipeline's seed."""

    rank: Annotated[int, Ge(1), Le(1024)]
    """Rows of A and columns of B."""
    alpha: PositiveFloat
    """The adapter's output is multiplied by alpha / rank."""
    targets: Annotated[tuple[AdapterTarget, ...], MinLen(1)] = BLOCK_TARGETS
    """Projections with an adapter, in every block; `lm_head` is the output matrix."""

    def __post_init__(self) -> None:
        if len(set(self.targets)) < len(self.targets):
            raise MisfitError("targets", f"accepted: each of {', '.join(ADAPTER_TARGETS)} once at most")


@dataclass(frozen=True, slots=True, kw_only=True)
class OutcomesConfig(FromFile):
    """What trajectories count for that do not end by themselves: a reward, `mask` (no advantage, in no mean), `stop`
    (the end of the pipeline), or `keep` (the reward that was given, or 0)."""

    failed: Annotated[float | Literal["mask", "stop"], Takes("a number, mask or stop")] = "mask"
    """A program or environment that failed `retries` + 1 times."""
    turns: Annotated[float | Literal["keep", "mask", "stop"], Takes("a number, keep, mask or stop")] = "keep"
    """A program that asked more than `max_turns` times."""
    tokens: Annotated[float | Literal["keep", "mask", "stop"], Takes("a number, keep, mask or stop")] = "keep"
    """A program whose chat left no room for an answer."""
    time: Annotated[float | Literal["keep", "mask", "stop"], Takes("a number, keep, mask or stop")] = 0.0
    """A program that was ended after `time_limit_s`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskConfig(FromFile):
    """Where prompts come from and how answers are scored. A bare name is short for `{name: ...}`.

    Further keys are the task's own options, such as `digits: 5`.
    """

    name: str
    """A built-in task (listed above), `reasoning-gym:NAME`, `file`, `agent`, `harbor`, or your own: `module:Class` in
    `code_folder` or installed, or a plug-in's name."""
    params: Mapping[str, Any] = field(default_factory=dict)
    """Options of a built-in or reasoning-gym task: the further keys."""
    path: str | None = None
    """JSONL or parquet rows of `file` and `agent`, or the folder of tasks of `harbor`, relative to this file."""
    prompt_key: str = "prompt"
    """Column with the prompt, for `file` and `agent`. Dots reach into nested columns."""
    answer_key: str | None = "answer"
    """Column with the answer, for `file` and `agent`; null: no answers, so without a reward every score is 0."""
    reward: FunctionReference | None = None
    """Reward function with the signature of verl or TRL, in `code_folder` or installed. Default: the task's own."""
    environment: ClassReference | None = None
    """Environment of several turns, for `file` with a `reward`. Default: one turn."""
    reward_timeout_s: PositiveFloat = 30.0
    """Seconds after which a reward or environment call has failed."""
    num_reward_processes: Annotated[int, Ge(0), Le(256)] = 0
    """Processes of this pipeline that call `reward` beside each other. 0: its env worker calls it, one call after
    another. Never changes the results of a function of its arguments."""
    reward_memory_gb: Annotated[float, Ge(0.1)] | None = None
    """Memory of each of `reward_processes`, Python and all modules included, in 10^9 bytes. A call that needs more
    fails its pipeline. Default: not limited."""
    reward_file_gb: NonNegativeFloat | None = None
    """Largest file that each of `reward_processes` can write, in 10^9 bytes; 0: none. Default: not limited."""
    command: Annotated[str, MinLen(1)] | None = None
    """Program that `agent` and `harbor` start for each trajectory; `{NAME}` stands for a column of its row."""
    url: Annotated[str, MinLen(1)] | None = None
    """Instead of `command`: address of the user's agent, which gets a POST for each trajectory."""
    function: FunctionReference | None = None
    """Instead of `command`: a Python function, called with the row in a process of its own; returns the reward."""
    sandbox: Literal["folder", "process", "docker"] | None = None
    """Where programs run: in a folder of their own (the default of `agent`), in namespaces without a network (of
    `harbor`), or in containers."""
    num_programs: Count = 8
    """Programs that run at once."""
    program_memory_gb: PositiveFloat | None = None
    """Memory of each process of a program, in 10^9 bytes. Default: what is free."""
    model_name: str | None = None
    """Name that programs ask for. Default: the pipeline's."""
    reward_from: Literal["report", "exit_code"] = "report"
    """What a program's reward is without `reward`: the number that it reports, or 1 for the exit code 0."""
    max_turns: Count = 64
    """Questions that a program may ask."""
    time_limit_s: PositiveFloat = 600.0
    """Seconds that a program may take, but for those in which it waits for answers."""
    num_retries: Annotated[int, Ge(0), Le(10)] = 2
    """New starts of a program or environment that failed."""
    outcomes: OutcomesConfig = field(default_factory=OutcomesConfig)
    """What trajectories count for that fail, or run into a limit."""

    def __post_init__(self) -> None:
        for key in ("reward_memory_gb", "reward_file_gb"):
            if getattr(self, key) is not None and not self.num_reward_processes:
                raise MisfitError(
                    key,
                    "limits the processes of reward_processes; accepted with reward_processes 1 or more",
                    ("reward_processes", f"accepted: 1 or more, as {key} limits each of them"),
                )

    @property
    def is_agent(self) -> bool:
        """Whether trajectories are sessions of programs."""
        return self.name in AGENT_TASKS


@dataclass(frozen=True, slots=True, kw_only=True)
class SftWarmupConfig(FromFile):
    """Supervised training on the task's own answers before RL, so that rewards are not all zero."""

    num_updates: Annotated[int, Ge(0)] = 0
    """Optimizer updates; 0 for none."""
    batch_size: Count = 64
    """Sequences of one update."""
    learning_rate: PositiveFloat = 3e-3
    """Learning rate of AdamW."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AlgorithmConfig(FromFile):
    """The RL update. A bare name is short for `{name: ...}`."""

    name: Literal["grpo", "dr-grpo", "rloo"] = "grpo"
    """GRPO, Dr. GRPO, or RLOO; `rl/algorithms.py` has each formula and its source."""
    staleness: Annotated[int, Ge(0), Le(8)] = 0
    """Largest staleness in weight versions: 0 is on-policy, 1 is one-step-off-policy."""
    prompts_per_step: Count = 16
    """Prompt groups of one step."""
    group_size: Count = 8
    """Trajectories of one prompt, compared with each other: 2 or more, except for a filler."""
    num_epochs: Count = 1
    """Passes of one step over its trajectories. The clip acts from a step's second update on."""
    num_minibatches: Count = 1
    """Optimizer updates per epoch, each on as many prompt groups; a divisor of prompts_per_step."""
    learning_rate: PositiveFloat = 3e-4
    """Learning rate of AdamW."""
    lr_warmup_steps: Annotated[int, Ge(0)] = 0
    """Steps over which the learning rate rises from 0."""
    adam_betas: tuple[BetaFloat, BetaFloat] = (0.9, 0.99)
    """AdamW's two decay rates."""
    weight_decay: NonNegativeFloat = 0.0
    """Weight decay of AdamW."""
    grad_clip: PositiveFloat = 1.0
    """Largest norm of the gradient."""
    clip_low: Annotated[float, Gt(0), Le(1)] = 0.2
    """Lower clip of the probability ratio: 1 - clip_low."""
    clip_high: PositiveFloat = 0.2
    """Upper clip of the probability ratio: 1 + clip_high."""
    objective: Literal["ppo", "decoupled"] = "ppo"
    """Center of the clip for stale tokens: the policy that sampled them (`ppo`), or the policy at the start of the
    step, weighted by its likelihood ratio (`decoupled`, AReaL). Fresh tokens: no difference."""
    max_behavior_ratio: Annotated[float, Ge(1)] = 5.0
    """Largest weight of a stale token with `decoupled`; tokens above it give no gradient."""
    kl_coef: NonNegativeFloat = 0.0
    """Weight of the KL penalty (low-variance estimator k3) to the frozen reference; 0 skips that stage."""
    max_logprob_gap: PositiveFloat | None = None
    """Largest gap in nats between the log-probabilities of rollout and training for a token of the present version;
    above it the pipeline fails. Default: 0.001 or 0.01 where rlmux samples in float32, exact or replayable; none for
    bfloat16, mixtures of experts, servers and engines of your own, where one token says nothing."""
    max_mismatch_kl: PositiveFloat | None = None
    """Largest KL in nats a token from the policy that rollout sampled with to the trainer's, estimated over a step's
    tokens of the present version; above it the pipeline fails. Default: 0.1 where no gap of one token ends it."""
    mismatch: Literal["none", "tis", "mis"] | None = None
    """What corrects that difference: a weight for each token that is cut at max_mismatch_ratio (`tis`, truncated
    importance sampling), or 0 beyond it (`mis`, masked). Default: none where rlmux samples and trains in float32, else
    tis."""
    mismatch_level: Literal["token", "sequence"] = "token"
    """What has one weight: each token, or all tokens of an answer."""
    max_mismatch_ratio: Annotated[float, Gt(1)] = 2.0
    """Largest such weight; with `mis` its inverse is the least."""
    micro_batch_size: Count | None = None
    """Sequences per forward and backward pass. Default: 32; on one GPU 16,384 tokens. Changes the last bits."""

    def __post_init__(self) -> None:
        if self.prompts_per_step % self.num_minibatches:
            raise MisfitError(
                "minibatches",
                f"accepted: a divisor of prompts_per_step {self.prompts_per_step}",
                ("prompts_per_step", f"accepted: a multiple of minibatches {self.num_minibatches}"),
            )

    @property
    def sequences_per_pass(self) -> int:
        """Sequences of a micro-batch that is not cut by tokens."""
        return _SEQUENCES_PER_PASS if self.micro_batch_size is None else self.micro_batch_size

    @property
    def num_updates(self) -> int:
        """Optimizer updates of one step."""
        return self.num_epochs * self.num_minibatches

    @property
    def needs_old_logprobs(self) -> bool:
        """A step computes log-probs of its own under the weights that it begins with, before the first update.

        One update needs none: a fresh token's old log-prob is the one that the update's own forward gives, and a
        stale token's the one that it was sampled with.
        """
        return self.num_updates > 1


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig(FromFile):
    """The program that samples the answers (docs/how-to/vllm.md). A bare name is short for `{name: ...}`."""

    name: Annotated[str, Takes("rlmux, vllm, sglang, a plug-in's name, or module:name of your own")] = "rlmux"
    """Our engine (rlmux), a server (vllm, sglang) by `python` or `url`, or your own, by `module:name` or its plug-in
    name (docs/reference/python.md)."""
    python: str | None = None
    """Python of the engine's environment, relative to this file. Each rollout worker starts a server with it and ends
    it. Excludes `url`."""
    url: str | None = None
    """A running server of the pipeline's model on this machine, used by this pipeline only. Excludes `python`."""
    args: tuple[str, ...] = ()
    """Further arguments of the server's command, with `python`, or of your own engine."""
    without: tuple[str, ...] = ()
    """Flags that rlmux gives the server's command and that are left out, with `python`: [--enable-sleep-mode]."""
    environment: Mapping[str, str | None] = field(default_factory=dict)
    """Environment variables of the server, with `python`, in place of those that rlmux sets; null unsets one:
    {VLLM_BATCH_INVARIANT: null}."""
    memory_gb: PositiveFloat | None = None
    """Device memory of the engine, on all GPUs of its device, in 10^9 bytes. Default: what our engine would take, and
    for a server 2 more on each GPU."""
    start_limit_s: PositiveFloat = 600.0
    """Time limit for the start of a server, in seconds."""

    def __post_init__(self) -> None:
        if self.name == "rlmux":
            for key in ("python", "url", "args", "memory_gb", "without", "environment"):
                if getattr(self, key):
                    raise MisfitError(
                        key, "does not go with our own engine; accepted with: name: vllm, or name: sglang"
                    )
            return
        if self.is_of_user:
            if not plugins.is_plugin("engine", self.name):
                known = ", ".join((*ENGINES, *plugins.names("engine")))
                raise MisfitError("name", f"unknown; accepted: {known}, or module:name of your own")
            for key in ("python", "url", "without", "environment"):
                if getattr(self, key):
                    raise MisfitError(key, "does not go with an engine of your own; accepted with: vllm, sglang")
            return
        if (self.python is None) == (self.url is None):
            given = "url" if self.url is not None else "name"
            raise MisfitError(
                given, f"accepted: {self.name} with python: PATH of its environment's python, or with url:, not both"
            )
        if self.url is not None and re.fullmatch(r"http://(127\.0\.0\.1|localhost)(:\d+)?/?", self.url) is None:
            raise MisfitError("url", "accepted: http://127.0.0.1:PORT, a server on this machine")
        for key in ("args", "without", "environment"):
            if self.url is not None and getattr(self, key):
                raise MisfitError(key, "does not go with url; accepted with: python")

    @property
    def is_server(self) -> bool:
        """A server of others samples."""
        return self.name in ENGINES[1:]

    @property
    def is_of_user(self) -> bool:
        """An engine that the user wrote samples."""
        return self.name not in ENGINES


@dataclass(frozen=True, slots=True, kw_only=True)
class TailBatchingConfig(FromFile):
    """Short rounds sample more than a step needs and drop the longest; long rounds sample the prompts that lost
    (RollPacker; docs/how-it-works/tail-batching.md). `tail_batching: {}` has the defaults."""

    prompts: Annotated[float, Ge(1), Le(4)] = 1.25
    """Prompts of a short round, as a multiple of `algorithm.prompts_per_step`, rounded up."""
    samples: Annotated[float, Ge(1), Le(4)] = 1.25
    """Answers per prompt of a short round, as a multiple of `algorithm.group_size`, rounded up."""
    num_slots: Annotated[int, Ge(1), Le(65536)] | None = None
    """Slots of the plan clock, which decides what is dropped, over all workers. Default: `rollout.slots`. Changes the
    results."""

    def __post_init__(self) -> None:
        if self.prompts == self.samples == 1.0:
            raise MisfitError("prompts", "accepted: above 1, or samples above 1, or no tail_batching")


@dataclass(frozen=True, slots=True, kw_only=True)
class InterruptibleConfig(FromFile):
    """Unfinished answers continue in the next step with its weights (AReaL; docs/how-it-works/interruptible.md).
    `interruptible: {}` has the defaults; `algorithm.staleness` bounds the age of a token."""

    num_slots: Annotated[int, Ge(1), Le(65536)] | None = None
    """Slots of the plan clock, which decides what a step trains on, over all workers. Default: `rollout.slots`. Changes
    the results."""
    overlap_ticks: Annotated[int, Ge(0), Le(1_000_000)] = 0
    """Tokens per active answer sampled during a step's training: about training seconds over seconds of a decode step.
    0: training stops the rollout. Above 0 requires staleness."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutConfig(FromFile):
    """How answers are sampled, and on how many devices."""

    num_workers: Count = 1
    """Devices (or whole nodes) of the rollout pool. Never changes the results."""
    max_new_tokens: Count = 32
    """Token budget of one trajectory, environment replies included."""
    max_prompt_tokens: Count = 64
    """Tokens of the longest prompt that is accepted."""
    temperature: Annotated[float, Gt(0), Le(10)] = 1.0
    """Sampling temperature."""
    num_slots: Annotated[int, Ge(1), Le(4096)] = 64
    """Sequences decoded at once by each worker. Changes the last bits."""
    order: Literal["given", "longest"] = "given"
    """Order in which waiting trajectories get slots and devices: `given`, or `longest` expected answer first. Never
    changes the results."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of weights, keys and values in sampling; logits and log-probabilities stay float32."""
    kv_tokens: Count | None = None
    """Capacity of each worker's KV cache in tokens, at least one full sequence. Default: full length for every slot.
    Can change the last bits."""
    engine: Annotated[EngineConfig, Takes("an engine's name, or a mapping")] = field(default_factory=EngineConfig)
    """The program that samples."""
    tensor_parallel: Count = 1
    """GPUs over which a server splits each copy of the model. A device of more GPUs (`gpus_per_device`) has several
    copies behind one server. Can change the last bits."""
    tail_batching: TailBatchingConfig | None = None
    """Sample more than a step needs, so that few steps wait for the longest answers. Default: off."""
    interruptible: InterruptibleConfig | None = None
    """Let answers continue over several steps. Default: off."""

    def __post_init__(self) -> None:
        modes = [mode for mode in ("tail_batching", "interruptible") if getattr(self, mode) is not None]
        if modes and self.engine.name != "rlmux":
            raise MisfitError(modes[0], "does not go with an engine of others; accepted: our own engine")
        if len(modes) > 1:
            raise MisfitError("interruptible", "does not go with tail_batching; accepted: one of them")
        if self.tensor_parallel > 1 and not self.engine.is_server:
            text = f"the engine {self.engine.name} samples with whole copies of a model"
            accepted = "accepted: 1, or rollout.engine: {name: vllm, python: PATH}"
            raise MisfitError("tensor_parallel", f"{text}; {accepted}")
        if self.kv_tokens is not None and self.engine.name != "rlmux":
            raise MisfitError("kv_tokens", "does not go with an engine of others; accepted: our own engine")
        if self.kv_tokens is not None and self.kv_tokens < self.slot_tokens:
            text = f"{self.kv_tokens} tokens hold no sequence of full length; accepted: {self.slot_tokens} or more"
            raise MisfitError("kv_tokens", text)

    @property
    def longest_sequence(self) -> int:
        """Positions of the longest sequence."""
        return self.max_prompt_tokens + self.max_new_tokens + 1

    @property
    def slot_tokens(self) -> int:
        """Tokens of a slot of full length: the longest sequence, and what fills it up to a multiple of 16."""
        return -(-self.longest_sequence // 16) * 16

    @property
    def cached_tokens(self) -> int:
        """Tokens that a worker's KV cache has room for."""
        all_slots = self.num_slots * self.slot_tokens
        return all_slots if self.kv_tokens is None else min(self.kv_tokens, all_slots)


_SEQUENCES_PER_PASS = 32
_TOKENS_PER_PASS_OF_GPU = 16_384
"""Tokens that keep a GPU busy: a pass over fewer costs it the launches of its kernels."""
_MAX_TREE_PARAMETERS = 200_000_000
"""Most trained parameters for which `train.equal_across_ranks` is true where the file is silent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig(FromFile):
    """What the training side computes on."""

    num_workers: Count = 1
    """Devices (or whole nodes) of the training pool that train together: a power of two, at most the micro-batches of
    an update. On cores changes the last bits only with `equal_across_ranks: false` or `sharding: shard`."""
    num_threads: Annotated[int, Ge(1), Le(1024)] = 1
    """Compute threads of each worker, rollout workers included. Changes the last bits."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of training computation. Master weights and moments stay float32."""
    sharding: Literal["replicate", "shard"] = "replicate"
    """`shard` (torch's FSDP2): weights, gradients and moments are divided among 2 or more `workers` and gathered layer
    by layer. The last bits then change with `workers`."""
    equal_across_ranks: bool | None = None
    """Bit-equal results for any number of `workers`, at the cost of a float32 gradient copy for each doubling of a
    rank's micro-batches. Default: true up to 200 million trained parameters; false with `sharding: shard`."""
    optimizer_state: Literal["device", "cpu", "8bit"] = "device"
    """AdamW's moments, 8 bytes a weight: on the device, in host memory (`cpu`; same results), or on the device in 2
    bytes (`8bit`, by torchao). `8bit` with `sharding: shard` resumes with the same `workers` only."""
    activation_checkpointing: bool = False
    """Recompute each layer from its input for the gradient: less memory, a third more time."""
    tokens_per_micro_batch: Count | None = None
    """Tokens per forward and backward pass of RL steps; longer sequences run alone. Default:
    `algorithm.micro_batch_size`. Changes the last bits."""
    router_aux_loss_coef: NonNegativeFloat | None = None
    """Weight of the load-balancing loss of a mixture of experts. Default: config.json's value if its
    `output_router_logits` is true, else 0."""
    whole_checksums: bool = False
    """Checksum all tensors of every published version. Default: all of versions up to 64 MB and of the first; of others
    names and shapes, and the bytes of one tensor in 16, others each time. Checkpoints have a SHA-256 of all bytes."""
    logits_chunk_mb: PositiveFloat = 256.0
    """Largest size of logits in memory, in megabytes; above it training computes them in chunks, twice. Changes the
    last bits."""

    @property
    def is_sharded(self) -> bool:
        """Each of several workers has a part of the model."""
        return self.sharding == "shard" and self.num_workers > 1

    @property
    def num_parts(self) -> int:
        """Workers among which weights and moments are divided."""
        return self.num_workers if self.is_sharded else 1

    def is_equal_across_ranks(self, num_trained: int) -> bool:
        """Whether gradients are summed as a tree. `num_trained`: parameters that training changes."""
        return num_trained <= _MAX_TREE_PARAMETERS if self.equal_across_ranks is None else self.equal_across_ranks

    def rows_of_chunk(self, vocab_size: int) -> int:
        """Tokens whose logits are held at once; at least one."""
        return max(1, int(self.logits_chunk_mb * 1e6) // (4 * vocab_size))


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineKeys(FromFile):
    """What a pipeline of the file and its `TrainingConfig` have in common: all but the task."""

    name: Name
    """Unique name of the pipeline."""
    seed: Annotated[int, Ge(0), Lt(2**31)] = 0
    """Seed of every random number of the pipeline."""
    num_steps: Count = 100
    """Steps of RL."""
    model: ModelConfig = field(default_factory=ModelConfig)
    """What is trained."""
    adapter: AdapterConfig | None = None
    """A LoRA adapter to train on the frozen model. Default: train the whole model."""
    sft_warmup: SftWarmupConfig = field(default_factory=SftWarmupConfig)
    """Supervised training before RL."""
    algorithm: Annotated[AlgorithmConfig, Takes("an algorithm's name, or a mapping")] = field(
        default_factory=AlgorithmConfig
    )
    """The RL update."""
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    """How answers are sampled, and on how many devices."""
    train: TrainConfig = field(default_factory=TrainConfig)
    """What the training side computes on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingConfig(PipelineKeys):
    """All that decides a pipeline's weights, in one value. (`rollout.num_workers` decides only its speed,
    and so does `train.num_workers` where results are equal across ranks.)"""

    task: TaskConfig = field(default_factory=lambda: TaskConfig(name="sort"))
    """Where prompts come from and how answers are scored."""
    fills_token_limit: bool = False
    """Whether no token ends an answer before its limit, as a profile measures it. No key of the file."""

    def computed_on(self, device_type: str) -> TrainingConfig:
        """This config with the sizes that training derives for a kind of device, `cpu` or `cuda`.

        Several workers keep the number of sequences: by tokens, some of them could be without a micro-batch.
        """
        is_given = self.algorithm.micro_batch_size is not None or self.train.tokens_per_micro_batch is not None
        if device_type == "cpu" or is_given or self.train.num_workers > 1:
            return self
        return replace(self, train=replace(self.train, tokens_per_micro_batch=_TOKENS_PER_PASS_OF_GPU))

    @property
    def is_sampled_by_trainer(self) -> bool:
        """Whether rollout computes what training does, but for the rounding of float32."""
        engine = self.rollout.engine
        return not (engine.is_server or engine.is_of_user) and {self.train.dtype, self.rollout.dtype} == {"float32"}

    @property
    def mismatch_correction(self) -> Literal["none", "tis", "mis"]:
        """What corrects the difference between the policies of rollout and training."""
        return self.algorithm.mismatch or ("none" if self.is_sampled_by_trainer else "tis")

    @property
    def model_seed(self) -> int:
        """Seed of a new model's weights."""
        return self.seed if self.model.seed is None else self.model.seed
