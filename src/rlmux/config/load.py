"""From the user's file to frozen values.

    text ─ parse ─▶ nodes ─ merge ─▶ nodes ─ read_tree ─▶ RunConfig ─ checks ─▶ Spec
    (source_map.py)        (merge.py)        (tree.py)            (checks.py)   Cluster, Pipeline: derive.py
                                                                             TrainingConfig: the tree's own

Everything that can be known to be wrong without starting anything is found here, as a SpecError of one line.
Paths in the file are relative to the file's folder; in a Spec they are absolute.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypedDict, Unpack

import yaml
from pydantic import ValidationError

from rlmux.config.checks import Checks, CheckTraining, Purpose
from rlmux.config.derive import make_cluster, make_pipeline
from rlmux.config.error_messages import explain
from rlmux.config.figures import Estimated, StepFigure
from rlmux.config.file_kind import FileKind, check_kind
from rlmux.config.merge import merge
from rlmux.config.shares import check_prices, make_shares
from rlmux.config.source_map import Node, parse_yaml
from rlmux.config.tree import (
    ClusterConfig,
    KeepConfig,
    PipelineConfig,
    RunConfig,
    TrackersConfig,
    plain_tree,
    read_tree,
)
from rlmux.core.errors import SpecError
from rlmux.core.model import Cluster, Pipeline
from rlmux.core.queue_order import ShareSettings
from rlmux.rl.config import TrainingConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineSpec:
    """One pipeline of the file."""

    pipeline: Pipeline
    """The scheduler's view of it."""
    training: TrainingConfig | None
    """What env workers and engines read; None where the file names no task, which is enough to plan."""
    keys: PipelineConfig
    """Its keys in the file, defaults included."""
    figures: tuple[StepFigure, ...] = ()
    """The figures of its estimate with their origins and ranges; none where the reader asked for none."""

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
    """Absolute folder that goes to the front of the module search path of every env worker."""
    cluster: Cluster
    """Every pool."""
    policy: str
    """Name of the policy that decides."""
    pipelines: tuple[PipelineSpec, ...]
    """Pipelines in the order of the file."""
    shares: ShareSettings | None = None
    """What projects and users are entitled to; None if the file has no such section."""
    trackers: TrackersConfig = field(default_factory=TrackersConfig)
    """Trackers that get each step while the run goes on."""
    keep: KeepConfig | None = None
    """How long files of pipelines that are over are kept; None: until they are removed by hand."""
    resolved: str
    """YAML with defaults, overrides and absolute paths worked in: it loads to the same pipelines anywhere."""


EstimateOf = Callable[[PipelineConfig, ClusterConfig], Estimated | None]
"""The estimate of a pipeline, with what its file gives; None: nothing is known of it."""


class Reading(TypedDict, total=False):
    """How a file is read; every key may be left out."""

    overrides: Sequence[str]
    """Words KEY=VALUE that override the file, or add to it."""
    purpose: Purpose
    """What it is read for; without: to run it."""
    check_training: CheckTraining | None
    """Knows the names of tasks and models; None, or without: any is accepted."""
    policies: Sequence[str] | None
    """Names of policies; None, or without: any is accepted."""
    may_be_empty: bool
    """Whether the file may be without pipelines, since they are submitted later; without: it may not."""
    estimate_of: EstimateOf | None
    """Called for each pipeline; None, or without: they have what the file gives."""


def load_spec(path: str | Path, *, cluster_of: Spec | None = None, **reading: Unpack[Reading]) -> Spec:
    """Read, check and convert the file.

    `cluster_of`: the Spec whose cluster takes the place of the file's own, which may then have none.
    """
    folder = Path(path).absolute().parent
    return parse_spec(read_text(Path(path)), source=str(path), folder=folder, cluster_of=cluster_of, **reading)


def parse_spec(
    text: str, *, source: str, folder: Path, cluster_of: Spec | None = None, **reading: Unpack[Reading]
) -> Spec:
    """`load_spec` for a text that is at hand."""
    tree = parse_yaml(text, source)
    has_others = bool(reading.get("may_be_empty") or reading.get("overrides"))
    check_kind(tree, FileKind.PIPELINES, source, may_be_empty=has_others)
    if cluster_of is not None and isinstance(tree.value, dict):
        other = parse_yaml(cluster_of.resolved, cluster_of.source)
        tree = tree.replaced(["cluster"], other.nearest(["cluster"]))
    return spec_of_tree(tree, source=source, folder=folder, **reading)


def spec_of_tree(tree: Node, *, source: str, folder: Path, **reading: Unpack[Reading]) -> Spec:
    """`load_spec` for nodes that are at hand."""
    root = merge(tree, source, reading.get("overrides", ()))
    try:
        config = read_tree(root.plain(), is_open=reading.get("may_be_empty", False))
    except ValidationError as error:
        raise explain(error, root, RunConfig) from None
    config = _with_absolute_paths(config, folder)
    estimate_of = reading.get("estimate_of")
    estimated: dict[str, Estimated] = {}
    if estimate_of is not None:
        found = {each.name: estimate_of(each, config.cluster) for each in config.pipelines}
        estimated = {name: each for name, each in found.items() if each is not None}
        config = _with_estimates(config, estimated)
    Checks(
        root=root,
        config=config,
        purpose=reading.get("purpose", Purpose.RUN),
        check_training=reading.get("check_training"),
        policies=reading.get("policies"),
    ).run()
    return _spec(config, source, estimated)


def read_text(path: Path) -> str:
    """The text of a file. Raises SpecError where it cannot be read, with what there is instead."""
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


def absolute_path(path: str, folder: Path) -> str:
    """A path of a file in `folder`; where ~ names no user, it stays, and no such folder is found later."""
    return str((folder / os.path.expanduser(path)).absolute())


def _with_absolute_paths(config: RunConfig, folder: Path) -> RunConfig:
    def absolute(path: str) -> str:
        return absolute_path(path, folder)

    def of_pipeline(pipeline: PipelineConfig) -> PipelineConfig:
        model, task = pipeline.model, pipeline.task
        if model.path is not None:
            model = replace(model, path=absolute(model.path))
        if task is not None and task.path is not None:
            task = replace(task, path=absolute(task.path))
        rollout = pipeline.rollout
        if rollout.engine.python is not None:
            rollout = replace(rollout, engine=replace(rollout.engine, python=absolute(rollout.engine.python)))
        return replace(pipeline, model=model, task=task, rollout=rollout)

    return replace(
        config,
        code_folder=str(folder) if config.code_folder is None else absolute(config.code_folder),
        pipelines=tuple(of_pipeline(pipeline) for pipeline in config.pipelines),
    )


def _with_estimates(config: RunConfig, estimated: Mapping[str, Estimated]) -> RunConfig:
    def of_pipeline(pipeline: PipelineConfig) -> PipelineConfig:
        found = estimated.get(pipeline.name)
        return pipeline if found is None else replace(pipeline, estimate=found.estimate)

    return replace(config, pipelines=tuple(map(of_pipeline, config.pipelines)))


def _spec(config: RunConfig, source: str, estimated: Mapping[str, Estimated]) -> Spec:
    assert config.code_folder is not None, "paths are absolute already"
    cluster, shares = make_cluster(config.cluster), make_shares(config.shares)
    check_prices(shares, cluster, source)
    return Spec(
        source=source,
        code_folder=Path(config.code_folder),
        cluster=cluster,
        policy=config.policy,
        pipelines=tuple(
            PipelineSpec(
                pipeline=make_pipeline(keys),
                training=keys.training,
                keys=keys,
                figures=estimated[keys.name].figures if keys.name in estimated else (),
            )
            for keys in config.pipelines
        ),
        shares=shares,
        trackers=config.trackers or TrackersConfig(),
        keep=config.keep,
        resolved=yaml.safe_dump(plain_tree(config), sort_keys=False, allow_unicode=True),
    )


def without_pipelines(resolved: str, is_shown: Callable[[str], bool]) -> str:
    """The resolved file without hidden pipelines."""
    plain = yaml.safe_load(resolved)
    plain["pipelines"] = [keys for keys in plain.get("pipelines") or [] if is_shown(keys["name"])]
    return yaml.safe_dump(plain, sort_keys=False, allow_unicode=True)


def file_of_pipeline(resolved: str, name: str, *, is_short: bool = False) -> str | None:
    """The part of a resolved file that is one pipeline's, with its code's folder; None without the pipeline.

    `is_short`: without keys that have their default value. It loads to the same pipeline.
    """
    plain = yaml.safe_load(resolved) or {}
    found = [keys for keys in plain.get("pipelines") or [] if keys["name"] == name]
    if not found:
        return None
    code = {"code_folder": plain["code_folder"]} if "code_folder" in plain else {}
    if is_short:
        found = [without_defaults(keys) for keys in found]
    return yaml.safe_dump({**code, "pipelines": found}, sort_keys=False, allow_unicode=True)


_ANY_CLUSTER = {"pools": {"rollout": {"devices": 1}, "train": {"devices": 1}}}


def without_defaults(keys: Mapping[str, Any]) -> dict[str, Any]:
    """Keys of a resolved pipeline without default values. A section that would load otherwise stays whole."""
    task = {"task": {"name": keys["task"]["name"]}} if keys.get("task") else {}
    least = _resolved({"name": keys["name"], **task}) or _resolved({"name": keys["name"]}) or {}
    short = {"name": keys["name"], **task, **_difference(keys, least)}
    if "task" in keys:
        short["task"] = {**task["task"], **_difference(keys["task"], least.get("task") or {})}
    loaded = _resolved(short) or {}
    short |= {key: value for key, value in keys.items() if loaded.get(key) != value}
    if _resolved(short) != keys:
        return dict(keys)
    if "task" in short and set(short["task"]) == {"name"}:
        short["task"] = short["task"]["name"]
    return {key: short[key] for key in keys if key in short}


def _resolved(keys: Mapping[str, Any]) -> dict[str, Any] | None:
    """A pipeline's keys with every default; None where they are no pipeline, as keys that it needs are missing."""
    try:
        return dict(plain_tree(read_tree({"cluster": _ANY_CLUSTER, "pipelines": [keys]}))["pipelines"][0])
    except ValidationError:
        return None


def _difference(tree: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """The part of `tree` that differs from `other`."""
    found: dict[str, Any] = {}
    for key, value in tree.items():
        if key not in other:
            found[key] = value
        elif isinstance(value, Mapping) and isinstance(other[key], Mapping):
            if inner := _difference(value, other[key]):
                found[key] = inner
        elif value != other[key] or type(value) is not type(other[key]):
            found[key] = value
    return found


def values_of_pipelines(resolved: str) -> dict[str, dict[str, Any]]:
    """Values of each pipeline's part of a resolved file, by flat key (`task.name`), without its name.

    A list is its JSON.
    """
    plain = yaml.load(resolved, getattr(yaml, "CSafeLoader", yaml.SafeLoader)) or {}
    return {str(keys["name"]): dict(_flat(keys)) for keys in plain.get("pipelines") or ()}


def _flat(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            yield from _flat(value, f"{name}.")
        elif name != "name":
            is_plain = value is None or isinstance(value, bool | int | float | str)
            yield name, value if is_plain else json.dumps(value, default=str)
