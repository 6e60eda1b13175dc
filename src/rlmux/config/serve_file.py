"""The section `serve` of a lane: models that Tinker clients may name, and permits for programs.

ServeConfig ── models ── ServedModelConfig ── model
            ── keys   ── KeyConfig
            ── projects ── ProjectConfig
            ── permits ── PermitsConfig
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from annotated_types import Ge, Le, Lt, Predicate
from pydantic import TypeAdapter, ValidationError

from rlmux.config.checkpoint_folder import check_checkpoint
from rlmux.config.error_messages import explain, nearest_hint, spec_error
from rlmux.config.load import absolute_path
from rlmux.config.source_map import Node, PathPart, parse_yaml
from rlmux.core.errors import UserError
from rlmux.core.model import Cluster
from rlmux.rl.config import (
    ADAPTER_TARGETS,
    MAX_POSITIONS,
    TARGETS_BY_ARCHITECTURE,
    Count,
    FromFile,
    ModelConfig,
    Name,
    PositiveFloat,
    Takes,
)


def is_model_name(text: str) -> bool:
    """Whether clients can name a model so: a client takes what is behind a colon, or a second slash, for its own."""
    return re.fullmatch(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", text) is not None


ModelName = Annotated[str, Predicate(is_model_name), Takes("ORG/NAME, such as Qwen/Qwen3-0.6B")]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModelConfig(FromFile):
    """A model that clients can train and sample. Each client gets a pipeline of its own."""

    model: ModelConfig = field(default_factory=ModelConfig)
    """A checkpoint, or a tiny new model."""
    max_prompt_tokens: Count = 256
    """Tokens of the longest prompt."""
    max_new_tokens: Count = 256
    """Tokens of the longest answer; the limit of a client's `max_tokens`."""
    num_slots: Annotated[int, Ge(1), Le(4096)] = 64
    """Sequences decoded at once. Changes the last bits."""
    micro_batch_size: Count = 32
    """Sequences per forward and backward pass. Changes the last bits."""
    seed: Annotated[int, Ge(0), Lt(2**31)] = 0
    """Seed of a new model's first weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyConfig(FromFile):
    """A client's API key."""

    project: Name
    """Project of the key; it sees no other project's work."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProjectConfig(FromFile):
    """Budget of a project of `keys`."""

    device_hours_a_day: PositiveFloat
    """Device-hours per day (UTC); clients then wait for the next day."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PermitsConfig(FromFile):
    """Permits for training programs of your own on the lane's devices (docs/how-to/your-trainer.md)."""

    listen: str | None = None
    """`unix:PATH`; with RLMUX_TOKEN set `tcp://HOST:PORT`, or `tls://HOST:PORT` with the server's certificate.
    Default: a socket in the server's folder."""
    leave_limit_s: PositiveFloat = 120.0
    """Seconds that a program may take to leave a pool on request before `status` marks it."""
    max_hold_s: PositiveFloat | None = None
    """Seconds that a program may hold a permit before it is ended. Default: no limit."""
    lease_s: PositiveFloat = 30.0
    """Seconds that a TCP program keeps its permit after a disconnect."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeConfig(FromFile):
    """Models, keys, projects and limits of clients."""

    models: Mapping[ModelName, ServedModelConfig] = field(default_factory=dict)
    """Models by name; clients load the tokenizer of that name on their machine. Default: permits only."""
    parameters: Literal["full", "lora", "refuse-lora"] = "full"
    """Meaning of a client's `create_lora_training_client(rank=N)`: train all parameters, whatever N is (`full`); train
    a LoRA adapter of rank N on the shared frozen model (`lora`); train all parameters, and refuse ranks other than 0
    (`refuse-lora`)."""
    max_lora_rank: Annotated[int, Ge(1), Le(1024)] = 128
    """Largest rank of a client's adapter, with `parameters: lora`."""
    keys: Mapping[str, KeyConfig] = field(default_factory=dict)
    """Projects by API key (`tml-...`). Default: any key is accepted, as its own project."""
    projects: Mapping[Name, ProjectConfig] = field(default_factory=dict)
    """Budgets by project. Default: no limit."""
    session_timeout_s: PositiveFloat = 600.0
    """Seconds without a request or heartbeat after which a client's session ends. Its checkpoints are kept."""
    keep_snapshots: Annotated[int, Ge(0)] = 8
    """Unnamed sampling weights (`save_weights_and_get_sampling_client`) to keep per model, newest first. 0: all, until
    the session ends."""
    ledger_gb: Annotated[float, Ge(0)] = 8.0
    """Size limit of `tinker.db` in gigabytes. Above it, the oldest loss requests covered by a checkpoint and delivered
    results are emptied down to 80 %; `rlmux verify` then names what is missing. 0: no limit."""
    permits: PermitsConfig | None = None
    """Permits for programs with their own trainer; `{}` for the defaults. Default: none."""


_SERVE = TypeAdapter(ServeConfig)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeSpec:
    """What a lane serves, checked, and where."""

    cluster: Cluster
    """Every pool of the lane."""
    policy: str
    """Name of the policy that decides."""
    serve: ServeConfig
    """What is served, paths made absolute."""


def checked_serve(
    root: Node, path: Sequence[PathPart], serve: ServeConfig, cluster: Cluster, folder: Path
) -> ServeConfig:
    """The section with absolute paths. `folder`: of the file. `path`: of the lane. Raises SpecError."""
    here = [*path, "serve"]
    if not serve.models and serve.permits is None:
        raise spec_error(root, here, "serves nothing; accepted: models, permits, or both")
    known = {key.project for key in serve.keys.values()}
    for name in serve.projects:
        if name not in known:
            raise spec_error(
                root, [*here, "projects", name], f"is the project of no key; {nearest_hint(name, sorted(known))}"
            )
    for name, pool in cluster.pools.items() if serve.permits else ():
        if (pool.num_nodes or 1) * pool.gpus_per_node != 1:
            where = [*path, "cluster", "pools", name]
            raise spec_error(root, where, "has several devices; accepted with serve.permits: pools of one device")
    models = {name: _absolute(served, folder) for name, served in serve.models.items()}
    for name, served in models.items():
        try:
            _check_model(served, has_adapters=serve.parameters == "lora")
        except UserError as error:
            raise spec_error(root, [*here, "models", name], f"cannot be served: {error}") from None
    return replace(serve, models=models)


def written(serve: ServeConfig) -> str:
    """YAML with every key written out."""
    plain: dict[str, Any] = _SERVE.dump_python(serve, mode="json", by_alias=True, exclude_none=True)
    for served in plain["models"].values():
        if "path" in served["model"]:
            served["model"] = {"path": served["model"]["path"]}
    return yaml.safe_dump(plain, sort_keys=False, allow_unicode=True)


def read_written(text: str, source: str) -> ServeConfig:
    """The section that `written` wrote. Raises SpecError."""
    root = parse_yaml(text, source)
    try:
        return _SERVE.validate_json(json.dumps(root.plain()))
    except ValidationError as error:
        raise explain(error, root, ServeConfig) from None


def _check_model(served: ServedModelConfig, *, has_adapters: bool) -> None:
    """Raises UserError for a checkpoint that cannot be trained, for a context beyond a model's positions, and for an
    architecture that adapters are not served for where they are what is trained."""
    longest = served.max_prompt_tokens + served.max_new_tokens
    most: int | None = MAX_POSITIONS
    architecture: str = served.model.architecture
    if served.model.path is not None:
        found = check_checkpoint(Path(served.model.path))
        most, architecture = found.max_positions, found.model_type
    whole = [name for name, targets in TARGETS_BY_ARCHITECTURE.items() if targets == ADAPTER_TARGETS]
    if has_adapters and architecture not in whole:
        raise UserError(f"parameters: lora does not go with a {architecture!r} model; accepted: {', '.join(whole)}")
    if most is not None and longest > most:
        raise UserError(f"max_prompt_tokens + max_new_tokens is {longest}; accepted: {most} or less")


def _absolute(served: ServedModelConfig, folder: Path) -> ServedModelConfig:
    if served.model.path is None:
        return served
    return replace(served, model=replace(served.model, path=absolute_path(served.model.path, folder)))
