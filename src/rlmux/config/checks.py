"""What can be known to be wrong with a whole file without starting anything, beyond the types and bounds of its keys.

The first mistake is raised, as a SpecError that names its place.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from enum import StrEnum
from importlib.util import find_spec
from pathlib import Path

from rlmux import plugins
from rlmux.config import import_checks
from rlmux.config.checkpoint_folder import CheckpointFolder, check_checkpoint
from rlmux.config.error_messages import nearest_hint, shown_value, spec_error
from rlmux.config.source_map import Node, PathPart
from rlmux.config.tree import BOTH, PipelineConfig, PoolConfig, RunConfig, gpus_of_device, phase_of_pool, pool_serving
from rlmux.core.errors import SpecError, UserError
from rlmux.core.model import Phase
from rlmux.rl.config import (
    KEYS_OF_TASKS,
    MAX_POSITIONS,
    OF_FILES,
    TARGETS_BY_ARCHITECTURE,
    AdapterConfig,
    RolloutConfig,
    TaskConfig,
    TrainingConfig,
)
from rlmux.rl.memory.model_shape import shape_of

CheckTraining = Callable[[Sequence[TrainingConfig], Path], Sequence[str | None]]
"""The complaint about each pipeline's prompts and reward, beginning with the key ("task.digits: ..."), or None.

The path is the folder of reward modules.
"""

KeyPath = tuple[PathPart, ...]


_PROGRAM_KEYS = ("command", "url", "function")


class Purpose(StrEnum):
    """What the file is read for, which decides what it must contain."""

    RUN = "run"
    """Every pipeline has a task; every pool has a size."""
    PLAN = "plan"
    """Every pipeline has an estimate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checks:
    """The checks of one file. Its paths are absolute already."""

    root: Node
    """The merged file as nodes, with the place of every key and whether it was really given."""
    config: RunConfig
    """The same file as a typed tree, with absolute paths."""
    purpose: Purpose
    """What the file is read for."""
    check_training: CheckTraining | None
    """Check of tasks, prompts and rewards; None accepts any."""
    policies: Sequence[str] | None
    """Accepted names of policies; None accepts any."""
    checkpoints: dict[tuple[str, bool], CheckpointFolder] = field(default_factory=dict, init=False)
    """Checkpoints that are read, by folder and whether another engine samples."""

    def run(self) -> None:
        """Every check, in the order of the file."""
        self._check_policy()
        self._check_names()
        self._check_code_folder()
        for name, pool in self.config.cluster.pools.items():
            self._check_pool(("cluster", "pools", name), pool)
        for index, pipeline in enumerate(self.config.pipelines):
            self._check_pipeline(("pipelines", index), pipeline)
        if self.check_training is not None:
            self._check_training(self.check_training)

    def _error(self, path: Sequence[PathPart], text: str) -> SpecError:
        return spec_error(self.root, path, text)

    @contextmanager
    def _placed(self, path: Sequence[PathPart]) -> Iterator[None]:
        """Adds place and value to a UserError about the value at this path."""
        try:
            yield
        except UserError as error:
            raise self._error(path, f"is {self._given(path)}: {error}") from None

    def _given(self, path: Sequence[PathPart]) -> str:
        return shown_value(self.root.nearest(path).plain())

    def _keys(self, path: Sequence[PathPart]) -> set[str]:
        """The keys that are really given in the mapping at this path."""
        node = self.root.at(path)
        return set(node.value) if node is not None and isinstance(node.value, dict) else set()

    def _refuse_keys(self, path: Sequence[PathPart], keys: Sequence[str], text: str) -> None:
        for key in keys:
            if key in self._keys(path):
                raise self._error((*path, key), f"is {self._given((*path, key))}: {text}")

    def _check_policy(self) -> None:
        if self.policies is not None:
            check_policy(self.root, self.config.policy, self.policies)

    def _check_names(self) -> None:
        where_by_name: dict[str, str] = {}
        for index, pipeline in enumerate(self.config.pipelines):
            path = ("pipelines", index, "name")
            if pipeline.name in where_by_name:
                raise self._error(
                    path,
                    f"is {pipeline.name!r}, which {where_by_name[pipeline.name]} has too; "
                    "accepted: a name for each pipeline",
                )
            where_by_name[pipeline.name] = self.root.nearest(path).where

    def _check_code_folder(self) -> None:
        if not os.path.isdir(self._code_folder):  # one that is too long to exist is no folder either
            raise self._error(["code_folder"], f"is {self._given(['code_folder'])}; accepted: a folder that exists")

    @property
    def _code_folder(self) -> Path:
        assert self.config.code_folder is not None, "paths are absolute already"
        return Path(self.config.code_folder)

    def _check_pool(self, path: KeyPath, pool: PoolConfig) -> None:
        if pool.devices is not None:
            not_both = "does not go with 'devices'; accepted: devices or nodes, not both"
            self._refuse_keys(path, ("nodes", "gpus_per_node"), not_both)
        else:
            self._refuse_keys(path, ("gpus_per_device",), "goes with 'devices'; accepted with 'nodes': gpus_per_node")
        count = pool.gpus_per_device
        if count > 1 and phase_of_pool(str(path[-1]), pool) != Phase.ROLLOUT:
            text = f"is {count}: a training worker computes on one GPU; accepted: 1, and train.workers: {count} with"
            raise self._error((*path, "gpus_per_device"), f"{text} train.sharding: shard for a model over {count} GPUs")
        if self.purpose is Purpose.RUN and pool.devices is None and pool.nodes is None:
            raise self._error((*path, "devices"), "is missing; accepted: a whole number, 1 or more")

    def _check_pipeline(self, path: KeyPath, pipeline: PipelineConfig) -> None:
        if self.purpose is Purpose.PLAN and pipeline.estimate is None:
            raise self._error(
                (*path, "estimate"),
                "is missing; accepted: {rollout_s: seconds, train_s: seconds} of one step alone, "
                "which planning and simulating start from, or --profile with what `rlmux profile` measured; "
                "or a task here, and in each pool its GPU, such as gpu: H100, for an estimate by sizes",
            )
        if not pipeline.is_filler and pipeline.estimate is not None and pipeline.estimate.train_s is None:
            raise self._error((*path, "estimate", "train_s"), "is missing; accepted: a number, more than 0")
        self._check_fits(path, Phase.ROLLOUT, pipeline.rollout.num_workers)
        self._check_fits(path, Phase.TRAIN, pipeline.train.num_workers)
        self._check_ranks((*path, "train", "workers"), pipeline)
        self._check_sharding((*path, "train", "sharding"), pipeline)
        self._check_optimizer_state((*path, "train", "optimizer_state"), pipeline)
        architecture, max_positions, source = self._check_model((*path, "model"), pipeline)
        if pipeline.adapter is not None:
            self._check_adapter((*path, "adapter"), pipeline.adapter, architecture)
        self._check_context((*path, "rollout"), pipeline.rollout, max_positions, source)
        self._check_engine((*path, "rollout", "engine", "url"), pipeline)
        self._check_gpus((*path, "rollout"), pipeline)
        if pipeline.task is not None:
            self._check_task((*path, "task"), pipeline.task)
        elif self.purpose is Purpose.RUN:
            accepted = "a task's name, or a mapping (docs/reference/file.md)"
            raise self._error((*path, "task"), f"is missing; accepted: {accepted}")

    def _check_adapter(self, path: KeyPath, adapter: AdapterConfig, architecture: str) -> None:
        accepted = TARGETS_BY_ARCHITECTURE.get(architecture)
        if accepted is None:
            text = f"does not go with a {architecture!r} model; accepted: {', '.join(TARGETS_BY_ARCHITECTURE)}"
            raise self._error(path, text)
        lacking = [target for target in adapter.targets if target not in accepted]
        if lacking:
            text = f"includes {lacking[0]}, which a {architecture!r} model lacks; accepted: [{', '.join(accepted)}]"
            raise self._error((*path, "targets"), text)

    def _check_engine(self, path: KeyPath, pipeline: PipelineConfig) -> None:
        """A server holds the weights of one worker of one pipeline, whole."""
        url = pipeline.rollout.engine.url
        if pipeline.adapter is not None and (url is not None or pipeline.rollout.engine.is_of_user):
            text = "does not go with an adapter; accepted: our own engine, or vllm or sglang with python"
            raise self._error(path[:-1], text)
        if url is None:
            return
        if pipeline.rollout.num_workers > 1:
            raise self._error(
                path, f"is {url!r}: one server for {pipeline.rollout.num_workers} workers; accepted: python"
            )
        others = [each.name for each in self.config.pipelines if each.rollout.engine.url == url]
        if others[0] != pipeline.name:
            raise self._error(path, f"is {url!r}, which {others[0]} has too; accepted: a server for each pipeline")

    def _check_gpus(self, path: KeyPath, pipeline: PipelineConfig) -> None:
        """Copies of the model fill a rollout device's GPUs, and each is split evenly over its own."""
        rollout, (name, pool) = pipeline.rollout, pool_serving(self.config.cluster, Phase.ROLLOUT)
        count, num_gpus = rollout.tensor_parallel, 1 if phase_of_pool(name, pool) == BOTH else gpus_of_device(pool)
        if pool.gpus_per_device > 1 and rollout.engine.name == "rlmux":
            text = f"is our own, which computes on one GPU, and a device of pool {name!r} has {num_gpus}"
            raise self._error((*path, "engine"), f"{text}; accepted: vllm, sglang, or gpus_per_device: 1")
        if count == 1 or rollout.engine.url is not None:
            return
        path = (*path, "tensor_parallel")
        if self.config.policy == "colocated" or (pipeline.estimate and pipeline.estimate.colocated_rollout_s):
            colocated = "policy colocated" if self.config.policy == "colocated" else "estimate.colocated_rollout_s"
            text = f"is {count}, which does not go with {colocated}: a training device is one GPU"
            raise self._error(path, f"{text}; accepted: 1, or no rollouts on training devices")
        if num_gpus % count:
            accepted = ", ".join(str(number) for number in range(1, num_gpus + 1) if num_gpus % number == 0)
            key = "gpus_per_node" if pool.devices is None else "gpus_per_device"
            larger = f", or cluster.pools.{name}.{key}: {count}" if phase_of_pool(name, pool) != BOTH else ""
            text = f"is {count}: a device of pool {name!r} has {num_gpus} GPU{'s' if num_gpus > 1 else ''}"
            raise self._error(path, f"{text}; accepted: {accepted}{larger}")
        shape = shape_of(pipeline.model)
        if not shape.splits_over(count):
            accepted = ", ".join(str(number) for number in range(1, shape.num_heads + 1) if shape.splits_over(number))
            text = f"is {count}, over which {shape.num_heads} heads, {shape.num_kv_heads} key/value heads and a width"
            raise self._error(path, f"{text} of {shape.intermediate_size} do not divide; accepted: {accepted}")

    def _check_fits(self, path: KeyPath, phase: Phase, num_workers: int) -> None:
        name, pool = pool_serving(self.config.cluster, phase)
        size = pool.nodes if pool.devices is None else pool.devices
        if size is not None and num_workers > size:
            raise self._error(
                (*path, phase.value, "workers"),
                f"is {num_workers}; accepted: up to {size}, the size of pool {name!r}",
            )

    def _check_ranks(self, path: KeyPath, pipeline: PipelineConfig) -> None:
        """Ranks sum the gradients of an update in pairs, and each has a part of every update. Planning takes any."""
        count, algorithm = pipeline.train.num_workers, pipeline.algorithm
        if self.purpose is not Purpose.RUN:
            return
        if count & (count - 1):
            powers = f"{1 << count.bit_length() - 1} or {1 << count.bit_length()}"
            raise self._error(path, f"is {count}: gradients are summed in pairs of ranks; accepted: {powers}")
        num_sequences = algorithm.prompts_per_step * algorithm.group_size // algorithm.num_minibatches
        # Micro-batches by tokens are counted when there are rollouts: a rank may then be without one in some updates.
        size = 1 if pipeline.train.tokens_per_micro_batch else algorithm.sequences_per_pass
        num_micro_batches = -(-num_sequences // size)
        if count > num_micro_batches:
            raise self._error(
                path,
                f"is {count}: an update has {num_micro_batches} micro-batches (algorithm.micro_batch_size {size}), and "
                f"some ranks would have none; accepted: up to {1 << num_micro_batches.bit_length() - 1}, or a smaller "
                "algorithm.micro_batch_size",
            )

    def _check_sharding(self, path: KeyPath, pipeline: PipelineConfig) -> None:
        """What does not go with a model of which each rank has a part."""
        if pipeline.train.sharding != "shard":
            return
        if pipeline.train.num_workers == 1:
            raise self._error(path, "is 'shard' with one worker; accepted: replicate, or train.workers 2 or more")
        if pipeline.train.equal_across_ranks:
            text = "is true, which does not go with sharding: shard; accepted: false, or sharding: replicate"
            raise self._error((*path[:-1], "equal_across_ranks"), text)
        if pipeline.promise is not None:
            text = (
                "is 'shard', which does not go with a promise: one worker is probed; accepted: replicate, or no promise"
            )
            raise self._error(path, text)

    def _check_optimizer_state(self, path: KeyPath, pipeline: PipelineConfig) -> None:
        if pipeline.train.optimizer_state != "8bit":
            return
        if self.purpose is Purpose.RUN and find_spec("torchao") is None:
            text = "is '8bit': torchao is not installed; accepted: pip install 'rlmux[8bit]', or device or cpu"
            raise self._error(path, text)

    def _check_model(self, path: KeyPath, pipeline: PipelineConfig) -> tuple[str, int | None, str]:
        """The model's architecture, its largest number of positions (None: not known), and what decides that."""
        model = pipeline.model
        if model.path is None:
            return model.architecture, MAX_POSITIONS, "a new model's positions"
        others = sorted(self._keys(path) - {"path"})
        self._refuse_keys(path, others, "does not go with 'path': the checkpoint's own config.json decides")
        key = (model.path, pipeline.rollout.engine.name != "rlmux")
        if key not in self.checkpoints:
            needs_weights = self.purpose is Purpose.RUN
            with self._placed((*path, "path")):
                self.checkpoints[key] = check_checkpoint(Path(key[0]), is_served=key[1], needs_weights=needs_weights)
        checkpoint = self.checkpoints[key]
        return checkpoint.model_type, checkpoint.max_positions, f"{checkpoint.positions_key} of {model.path}"

    def _check_context(self, path: KeyPath, rollout: RolloutConfig, max_positions: int | None, source: str) -> None:
        num_tokens = rollout.max_prompt_tokens + rollout.max_new_tokens
        if max_positions is None or num_tokens <= max_positions:
            return
        is_prompt_given = self._keys(path) & {"max_prompt_tokens", "max_new_tokens"} == {"max_prompt_tokens"}
        key, other = ("max_prompt_tokens", "max_new_tokens")[:: 1 if is_prompt_given else -1]
        raise self._error(
            (*path, key),
            f"is {getattr(rollout, key)}: with {other} {getattr(rollout, other)} a sequence has up to {num_tokens} "
            f"tokens; accepted: up to {max_positions}, {source}",
        )

    def _check_task(self, path: KeyPath, task: TaskConfig) -> None:
        for names, keys in KEYS_OF_TASKS:
            if task.name not in names:
                text = f"does not go with the task {task.name!r}; accepted with: name: {' or '.join(names)}"
                self._refuse_keys(path, keys, text)
        if task.name in OF_FILES and task.path is None:
            files = "a folder of tasks" if task.name == "harbor" else "a .jsonl or .parquet file"
            raise self._error(path, f"is a mapping: 'path' is missing; accepted: {files}")
        if task.name == "agent":
            self._check_program(path, task)
        if task.command is not None and task.sandbox != "docker":
            with self._placed((*path, "command")):
                import_checks.check_command(task.command, self._code_folder)
        if task.path is not None and task.name != "harbor":
            with self._placed((*path, "path")):
                import_checks.check_rows_file(Path(task.path))
        if task.environment is not None and task.reward is None:
            text = "needs a reward, since a response has several turns; accepted: 'reward' beside it, or none of them"
            raise self._error((*path, "environment"), text)
        references = (("reward", task.reward), ("environment", task.environment), ("function", task.function))
        for key, reference in references:
            if reference is not None:
                with self._placed((*path, key)):
                    import_checks.check_function(reference, self._code_folder)

    def _check_program(self, path: KeyPath, task: TaskConfig) -> None:
        """What an agent is: one of three keys; and where it may run."""
        given = [key for key in _PROGRAM_KEYS if getattr(task, key) is not None]
        if len(given) != 1:
            found = " and ".join(repr(key) for key in given) or "none of its programs"
            raise self._error(path, f"has {found}; accepted: one of {', '.join(_PROGRAM_KEYS)}")
        if task.sandbox == "docker":
            raise self._error(
                (*path, "sandbox"), "is docker: it needs an image; accepted: folder, process, or the task harbor"
            )

    def _check_training(self, check: CheckTraining) -> None:
        """What is found by making tasks, reading rows and calling rewards; last, since it takes longest."""
        configs = {index: each.training for index, each in enumerate(self.config.pipelines)}
        given = {index: config for index, config in configs.items() if config is not None}
        for index, complaint in zip(given, check(list(given.values()), self._code_folder), strict=True):
            if complaint is not None:
                raise self._training_error(("pipelines", index), given[index].name, complaint)

    def _training_error(self, path: KeyPath, name: str, text: str) -> SpecError:
        """Places a complaint, "task.params.digits ...: ...", at the key it is about; one about a row at the task."""
        shown = text.replace("task.params.", "task.", 1)
        key = shown.partition(" ")[0].rstrip(":").split(".")
        is_key = key[0] in {each.name for each in fields(TrainingConfig)}
        where = self.root.nearest((*path, *(key if is_key else ("task", "path")))).where
        return SpecError(f"{where}: pipelines.{name}{'.' if is_key else ': '}{shown}")


def check_policy(root: Node, policy: str, policies: Sequence[str]) -> None:
    """Raises SpecError for a name that is neither one of `policies` nor a plug-in's. Nothing is imported."""
    if policy not in policies and not plugins.is_plugin("policy", policy):
        raise spec_error(root, ["policy"], f"is {policy!r}: no such policy; {nearest_hint(policy, policies)}")
