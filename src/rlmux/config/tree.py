"""The user's file as one typed tree of frozen dataclasses.

    RunConfig ── cluster ── pools ── PoolConfig
              ── code_folder, policy
              ── defaults            (merged under the pipelines before the tree is built)
              ── pipelines ── PipelineConfig ── model, task, sft_warmup, algorithm, rollout, train   (rl/config.py)
                                             ── estimate, footprint

The training part is made of the very classes that engines read. The rest is here: what only the scheduler and the
simulator need. In the file a count drops its `num_` (`steps` is `num_steps` in Python). Every key, default value, bound
and description is stated once, at its field; `read_tree` checks types and bounds, `error_messages.py` words the
mistakes, and `docs/reference/file.md` has the same tables.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from functools import cache
from typing import Annotated, Any, Literal

from annotated_types import Ge, MinLen, Predicate
from pydantic import BeforeValidator, TypeAdapter

from rlmux.config.shares import Period, SharesConfig, seconds_of
from rlmux.core.model import MEAN, Phase
from rlmux.rl.config import (
    KEYS_OF_TASKS,
    Count,
    FromFile,
    MisfitError,
    Name,
    NonNegativeFloat,
    PipelineKeys,
    PositiveFloat,
    Takes,
    TaskConfig,
    TrainingConfig,
    key_of,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolConfig(FromFile):
    """Nodes kept for one phase, or for both. Give `devices` on one machine, `nodes` on a cluster."""

    phase: Literal["rollout", "train", "both"] | None = None
    """Phase that the pool serves; may be omitted if the pool is named `rollout` or `train`. `both`: every device serves
    both phases, and the file has no other pool."""
    devices: Count | None = None
    """Devices of this machine: GPUs, else CPU cores. Each is placed separately."""
    gpus_per_device: Count = 1
    """GPUs of one device, with `devices`: a rollout worker's server computes on all of them. Above 1 in a pool for
    rollouts only."""
    gpu: str | None = None
    """Model of the GPUs, such as H100, for `plan` and `simulate`: steps without an estimate take what its peak figures
    allow. Default: what this machine has."""
    nodes: Count | None = None
    """Whole nodes, one worker each. With neither key: unlimited, to plan."""
    gpus_per_node: Count = 1
    """GPUs of one node, for counting and billing, and for a rollout worker's server."""
    usd_per_gpu_hour: NonNegativeFloat = 0.0
    """Price of one GPU for one hour."""
    host_memory_gb: PositiveFloat | None = None
    """Host memory of a node (with `devices`: of a device), in 10^9 bytes. Default: no limit."""
    device_memory_gb: PositiveFloat | None = None
    """Memory of a device, of all its GPUs, in 10^9 bytes. `run` uses at most the memory that the driver reports free,
    or a core's part of host memory. Default: not limited in `plan` and `simulate`."""
    spills_to_disk: bool = False
    """Spill states to disk when host memory is full: more pipelines fit, switches take longer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterConfig(FromFile):
    """The devices there are."""

    pools: Annotated[Mapping[Name, PoolConfig], MinLen(1)]
    """Pools by name: one for rollout and one for train, or one for both."""

    def __post_init__(self) -> None:
        name_by_phase: dict[str, str] = {}
        for name, pool in self.pools.items():
            phase = phase_of_pool(name, pool)
            if phase is None:
                raise MisfitError(
                    f"pools.{name}", "no phase; accepted: phase: rollout, or phase: train, or phase: both"
                )
            if phase in name_by_phase:
                first = name_by_phase[phase]
                raise MisfitError(f"pools.{name}", f"a second pool for {phase} beside {first!r}; accepted: one")
            name_by_phase[phase] = name
        if BOTH in name_by_phase:
            others = [name for name in self.pools if name != name_by_phase[BOTH]]
            if others:
                raise MisfitError(
                    f"pools.{others[0]}",
                    f"a pool beside {name_by_phase[BOTH]!r}, which serves both phases; accepted: that pool alone, or "
                    "one for rollout and one for train",
                )
            return
        for phase in (Phase.ROLLOUT, Phase.TRAIN):
            if phase not in name_by_phase:
                raise MisfitError(
                    "pools",
                    f"no pool for {phase}; accepted: one pool for rollout and one for train, or one with phase: both",
                )


BOTH = "both"
"""What a pool states whose devices serve both phases."""


def gpus_of_device(pool: PoolConfig) -> int:
    """GPUs of a device, or of a node."""
    return pool.gpus_per_node if pool.devices is None else pool.gpus_per_device


def phase_of_pool(name: str, pool: PoolConfig) -> str | None:
    """The phase that the pool states (or `both`), or else the one it is named after."""
    if pool.phase is None and name in (Phase.ROLLOUT, Phase.TRAIN):
        return name
    return pool.phase


def pool_serving(cluster: ClusterConfig, phase: Phase) -> tuple[str, PoolConfig]:
    """The pool for a phase, which may serve both, and its name."""
    return next((name, pool) for name, pool in cluster.pools.items() if phase_of_pool(name, pool) in (phase, BOTH))


@dataclass(frozen=True, slots=True, kw_only=True)
class EstimateConfig(FromFile):
    """Solo seconds of one step. `plan` and `simulate` need them, here or from `rlmux profile FILE`; `run` measures a
    pipeline without them in its first three steps."""

    rollout_s: PositiveFloat
    """Seconds of rollout on the requested rollout nodes."""
    train_s: PositiveFloat | None = None
    """Seconds of training on the requested training nodes. Required, except for a filler."""
    colocated_rollout_s: PositiveFloat | None = None
    """Seconds of rollout with both phases on the training pool; requires colocated_train_s."""
    colocated_train_s: PositiveFloat | None = None
    """Seconds of training with both phases on the training pool; requires colocated_rollout_s."""
    sync_s: NonNegativeFloat = 0.0
    """Seconds to send new weights to the rollout nodes."""
    rollout_switch_s: NonNegativeFloat | None = None
    """Seconds of a warm switch to the rollout state; requires train_switch_s. `rlmux profile FILE` measures both."""
    train_switch_s: NonNegativeFloat | None = None
    """Seconds of a warm switch to the training state; requires rollout_switch_s."""
    cold_rollout_switch_s: NonNegativeFloat | None = None
    """Seconds of the first load of the rollout state, to simulate. Default: a warm switch."""
    cold_train_switch_s: NonNegativeFloat | None = None
    """Seconds of the first load of the training state, to simulate. Default: a warm switch."""

    limit_rollout_s: PositiveFloat | None = None
    """Seconds of rollout if every answer reaches the token limit; used with slo_probability, requires limit_train_s.
    `rlmux profile FILE` measures both."""
    limit_train_s: PositiveFloat | None = None
    """Seconds of training if every answer reaches the token limit; requires limit_rollout_s."""

    def __post_init__(self) -> None:
        for first, other in (
            ("colocated_rollout_s", "colocated_train_s"),
            ("rollout_switch_s", "train_switch_s"),
            ("limit_rollout_s", "limit_train_s"),
        ):
            if (getattr(self, first) is None) != (getattr(self, other) is None):
                given = other if getattr(self, first) is None else first
                raise MisfitError(given, f"accepted: {first} and {other} together")
        for key, mean_s, limit_s in (
            ("limit_rollout_s", self.rollout_s, self.limit_rollout_s),
            ("limit_train_s", self.train_s or 0.0, self.limit_train_s),
        ):
            if limit_s is not None and limit_s < mean_s:
                raise MisfitError(key, f"accepted: {mean_s:g}, the seconds of a mean step, or more")


@dataclass(frozen=True, slots=True, kw_only=True)
class FootprintConfig(FromFile):
    """Memory kept on every node that the pipeline is pinned to. `run` estimates it unless both device figures are
    given."""

    rollout_host_gb: NonNegativeFloat = 0.0
    """Host memory of a rollout node, in 10^9 bytes."""
    train_host_gb: NonNegativeFloat = 0.0
    """Host memory of a training node, in 10^9 bytes."""
    rollout_device_gb: NonNegativeFloat | None = None
    """Memory of each rollout device while the pipeline is resident, in 10^9 bytes. Default: all."""
    train_device_gb: NonNegativeFloat | None = None
    """Memory of each training device while the pipeline is resident, in 10^9 bytes. Default: all."""


def _gather_params(value: Any) -> Any:
    """The mapping of a task, its own options under `params`."""
    if not isinstance(value, dict):
        return value
    known = {key_of(each.name) for each in fields(TaskConfig)} - {"params"}
    own = {key: item for key, item in value.items() if key not in known}
    return {key: item for key, item in value.items() if key in known} | {"params": own}


@dataclass(frozen=True, slots=True, kw_only=True)
class AlertConfig(FromFile):
    """Per-pipeline override of an alert rule. A bare level is short for `{level: ...}`."""

    level: Literal["critical", "warning", "info", "off"] | None = None
    """Severity; `off` disables the rule. Default: docs/reference/service.md."""
    steps: Count | None = None
    """Consecutive bad steps before it fires; not for `slo_at_risk`, `slo_broken` and `stands_still`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RetriesConfig(FromFile):
    """Tries after the first one. Each begins with the newest checkpoint and waits for its turn. A bare number is short
    for `{any_reason: ...}`."""

    any_reason: Annotated[int, Ge(0)] = 0
    """Tries in all, whatever made the pipeline fail. Not with the other keys."""
    lost_worker: Annotated[int, Ge(0)] = 0
    """Tries after a worker was lost more often than is survived within one step."""
    out_of_memory: Annotated[int, Ge(0)] = 0
    """Tries after a device or the machine had too little memory."""
    user_code: Annotated[int, Ge(0)] = 0
    """Tries after its task, reward or environment raised, returned what is not accepted, or did not return."""

    def __post_init__(self) -> None:
        if self.any_reason and (self.lost_worker or self.out_of_memory or self.user_code):
            raise MisfitError("any_reason", "accepted: 0 beside numbers by reason")


def _retries(value: Any) -> Any:
    is_number = isinstance(value, int) and not isinstance(value, bool)
    return {"any_reason": value} if is_number else value


def _alert(value: Any) -> Any:
    return {"level": value} if isinstance(value, str) else value


AlertRule = Literal[
    "nonfinite", "reward_collapse", "kl_blowup", "kl_huge", "engine_trainer_gap", "engine_mismatch",
    "entropy_collapse", "no_signal", "slo_at_risk", "slo_broken", "stands_still",
]  # fmt: skip


def _is_slo_probability(value: float | str) -> bool:
    return value == MEAN if isinstance(value, str) else 0.0 < value < 1.0


SloProbability = Annotated[float | str, Predicate(_is_slo_probability), Takes("a number above 0 and below 1, or mean")]


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineConfig(PipelineKeys):
    """One user's RL post-training run."""

    task: Annotated[TaskConfig, BeforeValidator(_gather_params), Takes("a task's name, or a mapping")] | None = None
    """Where prompts come from and how answers are scored. Needed by `run`."""
    slo_slowdown: Annotated[float, Ge(1)] | None = None
    """Largest accepted slowdown of a step over running alone. Default: no limit."""
    slo_probability: SloProbability | None = None
    """Probability that the mean of the remaining steps keeps slo_slowdown (docs/how-it-works/policies.md). Default:
    0.95. `mean`: plan with means alone; no probability is stated."""
    user: Name | None = None
    """User of the pipeline. Waiting users take turns (docs/how-it-works/shares.md)."""
    project: Name | None = None
    """Project to charge. Default: the user."""
    visibility: Literal["private", "project", "public"] = "project"
    """Who sees it in a service: its user, its project's members too, or all users (docs/reference/service.md)."""
    urgency: Literal["urgent", "normal", "background", "filler"] = "normal"
    """More urgent pipelines are placed first; an urgent pipeline's devices count double for its project. A `filler`
    samples and scores prompts, trains nothing, and uses idle devices only (docs/how-it-works/fillers.md)."""
    rank: int = 0
    """Order among its user's waiting pipelines, lowest first."""
    promise: Literal["exact", "replayable", "statistical"] | None = None
    """Minimum determinism class of its engines (docs/how-it-works/design.md); `run` probes them and refuses the file if
    they keep less. Default: no minimum."""
    submit_at_s: NonNegativeFloat = 0.0
    """Seconds from the start of the run to submission."""
    checkpoint_every: Count | None = None
    """Steps between checkpoints, each with the SHA-256 of its weights. The last step always has one. Default: 1, and 10
    where 1B parameters or more are trained."""
    keep_checkpoints: Count = 2
    """Checkpoints to keep in case one is damaged, beyond those that `algorithm.staleness` needs."""
    call_limit_s: PositiveFloat = 120.0
    """Seconds without an answer or a heartbeat after which a worker is replaced. Building a model, loading and
    checkpoints send heartbeats; user code sends one with each answer."""
    retries: Annotated[RetriesConfig, BeforeValidator(_retries), Takes("a number, or a mapping by reason")] = field(
        default_factory=RetriesConfig
    )
    """How often the pipeline is tried again when it fails. By default never: `rlmux retry` does it by hand."""
    samples: bool = True
    """Store trajectories as text in `NAME/samples.db`."""
    alerts: Mapping[AlertRule, Annotated[AlertConfig, BeforeValidator(_alert), Takes("a level, or a mapping")]] = field(
        default_factory=dict
    )
    """Overrides of alert rules by name (docs/reference/service.md)."""
    estimate: EstimateConfig | None = None
    """Solo seconds of one step. Required by `plan` and `simulate`; `run` can measure them."""
    footprint: FootprintConfig = field(default_factory=FootprintConfig)
    """Memory kept on every node that the pipeline is pinned to."""

    def __post_init__(self) -> None:
        if self.rollout.tail_batching is not None and self.algorithm.staleness > 0:
            text = "accepted: 0 with rollout.tail_batching, which is on-policy"
            raise MisfitError("algorithm.staleness", text, ("rollout.tail_batching", "accepted: none with staleness"))
        if self.versions_behind > self.algorithm.staleness:
            text = "accepted: 0 with algorithm.staleness 0, since training and rollout do not overlap then"
            raise MisfitError("rollout.interruptible.overlap_ticks", text, ("algorithm.staleness", "accepted: 1 to 8"))
        if not self.is_filler:
            if self.algorithm.group_size < 2:
                text = "accepted: 2 or more, since trajectories of one prompt are compared; 1 with urgency: filler"
                raise MisfitError("algorithm.group_size", text)
            return
        for key, is_given, why in (
            ("slo_slowdown", self.slo_slowdown is not None, "it is promised nothing"),
            ("slo_probability", self.slo_probability is not None, "it is promised nothing"),
            ("adapter", self.adapter is not None, "it trains nothing"),
            ("sft_warmup.updates", self.sft_warmup.num_updates > 0, "it trains nothing"),
            ("algorithm.staleness", self.algorithm.staleness > 0, "it trains nothing"),
            ("algorithm.kl_coef", self.algorithm.kl_coef > 0, "it trains nothing"),
            ("rollout.tail_batching", self.rollout.tail_batching is not None, "all of its answers are wanted"),
            ("rollout.interruptible", self.rollout.interruptible is not None, "it trains nothing"),
            ("estimate.train_s", self.estimate is not None and self.estimate.train_s is not None, "it trains nothing"),
        ):
            if is_given:
                raise MisfitError(key, f"does not go with urgency: filler, since {why}; accepted: no such key")

    @property
    def versions_behind(self) -> int:
        """Versions by which the weights that a step's rollout begins with may be behind."""
        if self.rollout.interruptible is None:
            return self.algorithm.staleness
        return min(1, self.rollout.interruptible.overlap_ticks)

    @property
    def is_filler(self) -> bool:
        """Whether it takes only what no other pipeline wants."""
        return self.urgency == "filler"

    @property
    def training(self) -> TrainingConfig | None:
        """The part that decides the weights; None without a task."""
        if self.task is None:
            return None
        common = {each.name: getattr(self, each.name) for each in fields(PipelineKeys)}
        return TrainingConfig(task=self.task, **common)


@dataclass(frozen=True, slots=True, kw_only=True)
class WandbConfig(FromFile):
    """Weights & Biases, a run a pipeline. Needs the package `wandb`."""

    mode: Literal["offline", "online"] = "offline"
    """`offline`: files in `wandb` of the run's folder, for `wandb sync`. `online`: sent at once, with the login of the
    process that trains (`wandb login`, or `WANDB_API_KEY`)."""
    project: Name = "rlmux"
    """Project that the runs are in."""
    entity: str | None = None
    """User or team of the project. Default: the login's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MlflowConfig(FromFile):
    """MLflow, a run a pipeline. Needs the package `mlflow-skinny` or `mlflow`."""

    uri: str | None = None
    """Address of a tracking server, or a folder. Default: `mlruns` in the run's folder."""
    experiment: Name = "rlmux"
    """Experiment that the runs are in."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackersConfig(FromFile):
    """Trackers that get each step while the run goes on. Each is a process beside the run, whose end does not matter to
    training; what it prints is in `trackers.log`."""

    wandb: WandbConfig | None = None
    """Weights & Biases; `{}` for the defaults."""
    mlflow: MlflowConfig | None = None
    """MLflow; `{}` for the defaults."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeepConfig(FromFile):
    """How long the files of pipelines that are over are kept, by the run's clock. A bare period is short for
    `{ended: ...}`. The log keeps what they used."""

    ended: Period | None = None
    """Period after its end in which a pipeline's folder is kept. Default: until it is removed by hand."""
    checkpoints: Period | None = None
    """The same for its checkpoints alone."""
    samples: Period | None = None
    """The same for its stored trajectories alone."""
    project_gb: PositiveFloat | None = None
    """Most of a project's folders, in 10^9 bytes: beyond that, pipelines that ended first are removed first. Those
    without a project count together. Default: no limit."""

    def after_s(self, parts: str) -> float | None:
        """Seconds after a pipeline's end in which `all` of it, its `checkpoints` or its `samples` are kept."""
        period = {"all": self.ended, "checkpoints": self.checkpoints, "samples": self.samples}[parts]
        return None if period is None else seconds_of(period)

    @property
    def project_bytes(self) -> float | None:
        return None if self.project_gb is None else self.project_gb * 1e9


def _keep(value: Any) -> Any:
    return {"ended": value} if isinstance(value, str) else value


def keep_text(keep: KeepConfig | None) -> str:
    """The rule as `read_keep` reads it."""
    return json.dumps(None if keep is None else asdict(keep))


def read_keep(text: str) -> KeepConfig | None:
    fields = json.loads(text)
    return None if fields is None else KeepConfig(**fields)


Keep = Annotated[KeepConfig, BeforeValidator(_keep), Takes("a period such as 30d, or a mapping")]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig(FromFile):
    """The whole file."""

    cluster: ClusterConfig
    """The devices there are."""
    code_folder: str | None = None
    """Folder of reward modules, relative to this file. Default: the file's folder."""
    policy: str = "rollmux"
    """Policy, unless the command line names another (docs/reference/cli.md lists them); or your own: `module:Class` in
    `code_folder` or installed."""
    shares: SharesConfig | None = None
    """Fair shares of projects and users. Default: all equal, and no pipeline is parked."""
    trackers: TrackersConfig | None = None
    """Trackers that get each step while the run goes on, beside TensorBoard."""
    keep: Keep | None = None
    """How long files of pipelines that are over are kept. Default: until `rlmux remove`."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Default keys of every pipeline. A pipeline's own `task` or `model` replaces the default as a whole."""
    pipelines: Annotated[tuple[PipelineConfig, ...], MinLen(1)]
    """Pipelines to train; optional for `rlmux run --keep-open`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenRunConfig(RunConfig):
    """The whole file of a run that is kept open."""

    pipelines: tuple[PipelineConfig, ...] = ()
    """What is to be trained from the start."""


@cache
def _adapter(is_open: bool) -> TypeAdapter[RunConfig]:
    return TypeAdapter(OpenRunConfig if is_open else RunConfig)


def read_tree(plain: Any, *, is_open: bool = False) -> RunConfig:
    """The typed tree of nested dicts, lists and scalars. Raises pydantic's ValidationError.

    `is_open`: the file of a run that is kept open.

    JSON in between: with strict types pydantic takes a dict for a dataclass, and a list for a tuple, from JSON only.
    """
    return _adapter(is_open).validate_json(json.dumps(plain))


def plain_tree(config: RunConfig) -> dict[str, Any]:
    """The same tree as nested dicts by the file's keys, without empty keys and keys that do not go with others.

    Every default value is written out, so that a later rlmux with other default values trains the same.
    """
    adapter = _adapter(isinstance(config, OpenRunConfig))
    plain: dict[str, Any] = adapter.dump_python(config, mode="json", by_alias=True, exclude_none=True)
    del plain["defaults"]
    for pipeline in plain["pipelines"]:
        if "path" in pipeline["model"]:
            pipeline["model"] = {"path": pipeline["model"]["path"]}
        if task := pipeline.get("task"):
            task.update(task.pop("params"))
            for key in (key for names, keys in KEYS_OF_TASKS if task["name"] not in names for key in keys):
                task.pop(key, None)
    for pool in plain["cluster"]["pools"].values():
        del pool["gpus_per_node" if "devices" in pool else "gpus_per_device"]
    return plain
