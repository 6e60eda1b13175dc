"""From the user's file to frozen values.

    text ─ parse ─▶ nodes ─ --set ─▶ nodes ─ merge defaults ─▶ nodes ─ --set pipelines.X ─▶ nodes
         ─ pydantic ─▶ SpecFile ─ cross-checks ─▶ Spec (Cluster, Pipeline, TrainingConfig)

Everything that can be known to be wrong without starting anything is found here, as a SpecError of one line.
Paths in the file are relative to the file's folder; in a Spec they are absolute.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from rlmux.config import references
from rlmux.config.explain import explain, nearest_hint, shown_value, spec_error
from rlmux.config.located import Node, PathPart, parse_yaml
from rlmux.config.overrides import apply_override, parse_override
from rlmux.config.schema import ModelModel, PipelineModel, PoolModel, SpecFile, TaskModel, phase_of_pool
from rlmux.core.errors import SpecError, UserError
from rlmux.core.model import (
    Cluster,
    Footprint,
    Phase,
    PhaseSeconds,
    Pipeline,
    PipelineId,
    Pool,
    Stage,
)
from rlmux.rl.config import (
    AlgorithmConfig,
    ModelConfig,
    RolloutConfig,
    SftWarmupConfig,
    TaskConfig,
    TrainingConfig,
)

BYTES_PER_GB = 1e9

CheckTask = Callable[[TaskConfig, int], None]
"""Raises UserError, its text beginning with the key ("task.digits: ..."), if the task cannot be made."""


class Purpose(StrEnum):
    """What the file is read for, which decides what it has to say."""

    RUN = "run"
    """Every pipeline has a task; every pool has a size."""
    PLAN = "plan"
    """Every pipeline has an estimate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineSpec:
    """One pipeline of the file."""

    pipeline: Pipeline
    """For the scheduler."""
    training: TrainingConfig | None
    """For hosts and engines; None where the file names no task, which is enough to config."""
    submit_at_s: float
    num_rollout_workers: int
    num_train_workers: int

    @property
    def name(self) -> str:
        return str(self.pipeline.id)

    @property
    def config(self) -> TrainingConfig:
        """What it trains; only for a file read with Purpose.RUN, whose pipelines all have one."""
        if self.training is None:
            raise SpecError(f"pipeline {self.name} names no task: it can be planned, not run")
        return self.training


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    """A whole file, checked."""

    source: str
    """The file, as the user named it."""
    code_folder: Path
    """Belongs at the front of the module search path of every pipeline's host process."""
    cluster: Cluster
    policy: str
    pipelines: tuple[PipelineSpec, ...]
    resolved: str
    """YAML with defaults, overrides and absolute paths worked in: it loads to the same pipelines anywhere."""


def load_spec(
    path: str | Path,
    *,
    overrides: Sequence[str] = (),
    purpose: Purpose = Purpose.RUN,
    check_task: CheckTask | None = None,
    policies: Sequence[str] | None = None,
    cluster_of: Spec | None = None,
) -> Spec:
    """Read, check and convert the file. `check_task` and `policies` know the names; None accepts any.

    `cluster_of`: whose cluster takes the place of the file's own, which may then have none.
    """
    source = str(path)
    return parse_spec(
        _read(Path(path)),
        source=source,
        folder=Path(path).absolute().parent,
        overrides=overrides,
        purpose=purpose,
        check_task=check_task,
        policies=policies,
        cluster_of=cluster_of,
    )


def parse_spec(
    text: str,
    *,
    source: str,
    folder: Path,
    overrides: Sequence[str] = (),
    purpose: Purpose = Purpose.RUN,
    check_task: CheckTask | None = None,
    policies: Sequence[str] | None = None,
    cluster_of: Spec | None = None,
) -> Spec:
    """`load_spec` for a text that is at hand."""
    tree = parse_yaml(text, source)
    if cluster_of is not None and isinstance(tree.value, dict):
        other = parse_yaml(cluster_of.resolved, cluster_of.source)
        tree = tree.replaced(["cluster"], other.nearest(["cluster"]))
    root = _merged(tree, source, overrides)
    try:
        file = SpecFile.model_validate(root.plain())
    except ValidationError as error:
        raise explain(error, root, SpecFile) from None
    return _Builder(root, file, folder, purpose, check_task, policies).build(source)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        there = sorted(file.name for file in path.absolute().parent.glob("*.y*ml"))
        hint = f"; there: {', '.join(there[:8])}" if there else ""
        raise SpecError(f"{path}: no such file; accepted: a YAML file{hint}") from None
    except UnicodeDecodeError as error:
        raise SpecError(f"{path}: not UTF-8 text (byte {error.start}); accepted: a YAML file") from None
    except OSError as error:
        raise SpecError(f"{path}: cannot be read: {error.strerror}; accepted: a YAML file") from None


def _merged(root: Node, source: str, override_texts: Sequence[str]) -> Node:
    """The tree with overrides and defaults worked in and `defaults` gone."""
    if root.value is None:
        raise SpecError(f"{source}:1: the file is empty; accepted: a mapping with cluster and pipelines")
    if not isinstance(root.value, dict):
        shown = shown_value(root.plain())
        raise SpecError(f"{root.where}: the file is {shown}; accepted: a mapping with cluster and pipelines")
    overrides = [parse_override(text) for text in override_texts]
    for override in overrides:
        if not override.is_of_one_pipeline:
            root = apply_override(root, override)
    root = _under_defaults(root)
    for override in overrides:
        if override.is_of_one_pipeline:
            root = apply_override(root, override)
    return _each_pipeline(root, _spelled_out)


def _under_defaults(root: Node) -> Node:
    entries = dict(root.value)
    defaults = entries.pop("defaults", Node(value={}, where=root.where))
    if defaults.value is None:
        defaults = Node(value={}, where=defaults.where)
    if not isinstance(defaults.value, dict):
        raise spec_error(root, ["defaults"], f"is {shown_value(defaults.plain())}; accepted: a mapping")
    defaults = _spelled_out(defaults)
    root = Node(value=entries, where=root.where, order=root.order)
    return _each_pipeline(root, lambda pipeline: _deep_merge(defaults, _spelled_out(pipeline)))


def _each_pipeline(root: Node, change: Callable[[Node], Node]) -> Node:
    pipelines = root.value.get("pipelines")
    if pipelines is None or not isinstance(pipelines.value, list):
        return root
    items = [change(pipeline) for pipeline in pipelines.value]
    return root.replaced(["pipelines"], Node(value=items, where=pipelines.where, order=pipelines.order))


def _spelled_out(pipeline: Node) -> Node:
    """`task: sort` and `algorithm: grpo` as `{name: ...}`."""
    if not isinstance(pipeline.value, dict):
        return pipeline
    entries = dict(pipeline.value)
    for key in ("task", "algorithm"):
        node = entries.get(key)
        if node is not None and isinstance(node.value, str):
            entries[key] = Node(value={"name": node}, where=node.where, order=node.order)
    return Node(value=entries, where=pipeline.where, order=pipeline.order)


def _deep_merge(below: Node, above: Node, key: str | None = None) -> Node:
    """`above` where it says something. A model or a task is one decision: it is taken whole."""
    if key in ("model", "task") or not (isinstance(below.value, dict) and isinstance(above.value, dict)):
        return above
    entries = dict(below.value)
    for name, node in above.value.items():
        entries[name] = _deep_merge(entries[name], node, name) if name in entries else node
    return Node(value=entries, where=above.where, order=above.order)


class _Builder:
    """Cross-checks a SpecFile and turns it into a Spec."""

    def __init__(
        self,
        root: Node,
        file: SpecFile,
        folder: Path,
        purpose: Purpose,
        check_task: CheckTask | None,
        policies: Sequence[str] | None,
    ) -> None:
        self._root = root
        self._file = file
        self._folder = folder
        self._code_folder = folder if file.code_folder is None else self._absolute(file.code_folder)
        self._purpose = purpose
        self._check_task = check_task
        self._policies = policies

    def build(self, source: str) -> Spec:
        self._check_policy()
        self._check_names()
        if not self._code_folder.is_dir():
            raise self._error(["code_folder"], f"is {self._file.code_folder!r}; accepted: a folder that exists")
        pools = self._file.cluster.pools
        cluster = Cluster(pools={name: self._pool(name, pool) for name, pool in pools.items()})
        pipelines = tuple(
            self._pipeline(index, pipeline, cluster) for index, pipeline in enumerate(self._file.pipelines)
        )
        return Spec(
            source=source,
            code_folder=self._code_folder,
            cluster=cluster,
            policy=self._file.policy,
            pipelines=pipelines,
            resolved=self._resolved(),
        )

    def _error(self, path: Sequence[PathPart], text: str) -> SpecError:
        return spec_error(self._root, path, text)

    def _check_policy(self) -> None:
        policy = self._file.policy
        if self._policies is not None and policy not in self._policies:
            hint = nearest_hint(policy, self._policies)
            raise self._error(["policy"], f"is {policy!r}: no such policy; {hint}")

    def _check_names(self) -> None:
        where_by_name: dict[str, str] = {}
        for index, pipeline in enumerate(self._file.pipelines):
            path = ("pipelines", index, "name")
            if pipeline.name in where_by_name:
                raise self._error(
                    path,
                    f"is {pipeline.name!r}, which {where_by_name[pipeline.name]} has too; "
                    "accepted: a name for each pipeline",
                )
            where_by_name[pipeline.name] = self._root.nearest(path).where

    def _pool(self, name: str, pool: PoolModel) -> Pool:
        phase = phase_of_pool(name, pool)
        assert phase is not None, "the schema refuses a pool without a phase"
        if self._purpose is Purpose.RUN and pool.devices is None and pool.nodes is None:
            path = ("cluster", "pools", name, "devices")
            raise self._error(path, "is missing; accepted: a whole number, 1 or more")
        return Pool(
            name=name,
            phase=Phase(phase),
            num_nodes=pool.nodes if pool.devices is None else pool.devices,
            gpus_per_node=pool.gpus_per_node,
            usd_per_gpu_hour=pool.usd_per_gpu_hour,
            host_memory_bytes=_bytes(pool.host_memory_gb) or math.inf,
            device_memory_bytes=_bytes(pool.device_memory_gb) or math.inf,
            spills_to_disk=pool.spills_to_disk,
        )

    def _pipeline(self, index: int, given: PipelineModel, cluster: Cluster) -> PipelineSpec:
        path = ("pipelines", index)
        estimate, colocated = self._estimates(path, given)
        algorithm = given.algorithm
        stages = [Stage.GENERATE, Stage.REWARD, Stage.OLD_LOGPROBS, Stage.UPDATE, Stage.PUBLISH]
        if algorithm.kl_coef > 0:
            stages.insert(2, Stage.REFERENCE_LOGPROBS)
        footprint = given.footprint
        return PipelineSpec(
            pipeline=Pipeline(
                id=PipelineId(given.name),
                num_steps=given.steps,
                stages=tuple(stages),
                has_sft_warmup=given.sft_warmup.updates > 0,
                num_rollout_nodes=self._num_nodes(path, "rollout", given.rollout.workers, cluster),
                num_train_nodes=self._num_nodes(path, "train", given.train.workers, cluster),
                estimate=estimate,
                colocated_estimate=colocated,
                slo_slowdown=math.inf if given.slo_slowdown is None else given.slo_slowdown,
                footprint=Footprint(
                    rollout_host_bytes=footprint.rollout_host_gb * BYTES_PER_GB,
                    train_host_bytes=footprint.train_host_gb * BYTES_PER_GB,
                    rollout_device_bytes=_bytes(footprint.rollout_device_gb),
                    train_device_bytes=_bytes(footprint.train_device_gb),
                ),
                staleness=algorithm.staleness,
            ),
            training=self._training_plan(path, given),
            submit_at_s=given.submit_at_s,
            num_rollout_workers=given.rollout.workers,
            num_train_workers=given.train.workers,
        )

    def _num_nodes(self, path: tuple[PathPart, ...], phase: str, num_workers: int, cluster: Cluster) -> int:
        pool = cluster.pool_for(Phase(phase))
        assert pool is not None, "the schema asks for a pool of each phase"
        if pool.num_nodes is not None and num_workers > pool.num_nodes:
            raise self._error(
                (*path, phase, "workers"),
                f"is {num_workers}; accepted: up to {pool.num_nodes}, the size of pool {pool.name!r}",
            )
        return num_workers

    def _estimates(
        self, path: tuple[PathPart, ...], given: PipelineModel
    ) -> tuple[PhaseSeconds | None, PhaseSeconds | None]:
        estimate = given.estimate
        if estimate is None:
            if self._purpose is Purpose.PLAN:
                raise self._error(
                    (*path, "estimate"),
                    "is missing; accepted: {rollout_s: seconds, train_s: seconds} of one step alone, "
                    "which planning and simulating start from",
                )
            return None, None
        solo = PhaseSeconds(rollout_s=estimate.rollout_s, train_s=estimate.train_s)
        if estimate.colocated_rollout_s is None or estimate.colocated_train_s is None:
            return solo, None
        return solo, PhaseSeconds(rollout_s=estimate.colocated_rollout_s, train_s=estimate.colocated_train_s)

    def _training_plan(self, path: tuple[PathPart, ...], given: PipelineModel) -> TrainingConfig | None:
        if given.task is None:
            if self._purpose is Purpose.RUN:
                raise self._error((*path, "task"), "is missing; accepted: a task's name, or a mapping (docs/spec.md)")
            return None
        algorithm = given.algorithm
        return TrainingConfig(
            name=given.name,
            seed=given.seed,
            num_steps=given.steps,
            model=self._model((*path, "model"), given.model),
            task=self._task((*path, "task"), given.task, given.seed),
            sft_warmup=SftWarmupConfig(
                num_updates=given.sft_warmup.updates,
                batch_size=given.sft_warmup.batch_size,
                learning_rate=given.sft_warmup.learning_rate,
            ),
            algorithm=AlgorithmConfig(
                **algorithm.model_dump(exclude={"adam_betas"}),
                adam_betas=(algorithm.adam_betas[0], algorithm.adam_betas[1]),
            ),
            rollout=RolloutConfig(
                max_new_tokens=given.rollout.max_new_tokens,
                max_prompt_tokens=given.rollout.max_prompt_tokens,
                temperature=given.rollout.temperature,
                num_slots=given.rollout.slots,
            ),
            num_threads=given.train.threads,
        )

    def _model(self, path: tuple[PathPart, ...], given: ModelModel) -> ModelConfig:
        if given.path is not None:
            folder = self._absolute(given.path)
            try:
                references.check_checkpoint(folder)
            except UserError as error:
                raise self._error((*path, "path"), f"is {given.path!r}: {error}") from None
            return ModelConfig(path=str(folder))
        return ModelConfig(
            architecture=given.architecture,
            hidden_size=given.hidden_size,
            num_layers=given.layers,
            num_heads=given.heads,
            num_kv_heads=given.kv_heads,
            intermediate_size=given.intermediate_size,
        )

    def _task(self, path: tuple[PathPart, ...], given: TaskModel, seed: int) -> TaskConfig:
        if given.path is not None:
            try:
                references.check_rows_file(self._absolute(given.path))
            except UserError as error:
                raise self._error((*path, "path"), f"is {given.path!r}: {error}") from None
        if given.reward is not None:
            try:
                references.check_function(given.reward, self._code_folder)
            except UserError as error:
                raise self._error((*path, "reward"), f"is {given.reward!r}: {error}") from None
        config = TaskConfig(
            name=given.name,
            params=given.params,
            path=None if given.path is None else str(self._absolute(given.path)),
            prompt_key=given.prompt_key,
            answer_key=given.answer_key,
            reward=given.reward,
            reward_timeout_s=given.reward_timeout_s,
        )
        if self._check_task is not None:
            try:
                self._check_task(config, seed)
            except UserError as error:
                raise self._task_error(path, str(error)) from None
        return config

    def _task_error(self, path: tuple[PathPart, ...], text: str) -> SpecError:
        """Places a task's own complaint, "task.params.digits ...: ...", at the key it is about."""
        head, _, _ = text.partition(" ")
        key = head.rstrip(":").removeprefix("task.").removeprefix("params.")
        where = self._root.nearest((*path, key)).where
        name = self._file.pipelines[int(path[1])].name
        shown = text.replace("task.params.", "task.", 1)
        return SpecError(f"{where}: pipelines.{name}{'.' if shown.startswith('task.') else ': '}{shown}")

    def _absolute(self, path: str) -> Path:
        return (self._folder / Path(path).expanduser()).absolute()

    def _resolved(self) -> str:
        """Every key written out, so that a later rlmux with other default values trains the same."""
        plain: dict[str, Any] = {"code_folder": str(self._code_folder)}
        plain.update(self._file.model_dump(exclude_none=True, exclude={"code_folder", "defaults"}))
        for pipeline in plain["pipelines"]:
            for section in ("model", "task"):
                if "path" in pipeline.get(section, {}):
                    pipeline[section]["path"] = str(self._absolute(pipeline[section]["path"]))
            if "path" in pipeline["model"]:
                pipeline["model"] = {"path": pipeline["model"]["path"]}
            if "task" in pipeline and pipeline["task"]["name"] != "file":
                for key in ("prompt_key", "answer_key"):
                    del pipeline["task"][key]
        for pool in plain["cluster"]["pools"].values():
            if "devices" in pool:
                del pool["gpus_per_node"]
        return yaml.safe_dump(plain, sort_keys=False, allow_unicode=True)


def _bytes(gigabytes: float | None) -> float | None:
    return None if gigabytes is None else gigabytes * BYTES_PER_GB
