"""From what a caller names to a checked file: a path, a mapping made in code, or a file that is loaded already.

path | mapping | Spec ─▶ load_file(purpose=RUN | PLAN) ─▶ Spec
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rlmux import plugins
from rlmux.config import Purpose, Spec, load_spec
from rlmux.config.checks import CheckTraining
from rlmux.config.load import parse_spec
from rlmux.core.errors import SpecError, UserError
from rlmux.policies import POLICIES, check_policy

File = str | Path | Mapping[str, Any] | Spec
"""A YAML file's path, its keys and values as a mapping, or what `rlmux.load` returned."""

IN_CODE = "the mapping"
"""Source of a file that was made in code, in errors and logs."""


def load_file(file: File, *, purpose: Purpose, overrides: Sequence[str] = (), policy: str | None = None) -> Spec:
    """The file, with all checked that the purpose needs. Raises SpecError, and UserError for an unknown policy.

    Paths of a mapping are relative to the working folder.
    """
    if policy is not None:
        check_policy(policy)
    spec = _load(file, purpose, tuple(overrides))
    spec = spec if policy is None else replace(spec, policy=policy)
    if plugins.is_plugin("policy", spec.policy):
        plugins.look_in(spec.code_folder)
    return spec


def load_for_submission(file: File, *, run: Spec, overrides: Sequence[str] = ()) -> Spec:
    """The file's pipelines, with all checked that training them on the run's cluster needs."""
    return _load(file, Purpose.RUN, tuple(overrides), cluster_of=run)


def _load(file: File, purpose: Purpose, overrides: tuple[str, ...], cluster_of: Spec | None = None) -> Spec:
    if isinstance(file, str | Path):
        return load_spec(
            file,
            overrides=overrides,
            purpose=purpose,
            check_training=_check_training(purpose),
            policies=list(POLICIES),
            cluster_of=cluster_of,
        )
    text, source, folder = _text_of(file)
    try:
        loaded = parse_spec(
            text,
            source=source,
            folder=folder,
            overrides=overrides,
            purpose=purpose,
            check_training=_check_training(purpose),
            policies=list(POLICIES),
            cluster_of=cluster_of,
        )
    except SpecError as error:  # the lines are of a text that is not the caller's
        raise SpecError(re.sub(rf"^{re.escape(source)}:\d+", source, str(error))) from None
    return replace(loaded, policy=file.policy) if isinstance(file, Spec) else loaded


def _check_training(purpose: Purpose) -> CheckTraining | None:
    if purpose is not Purpose.RUN:
        return None
    from rlmux.runtime.preflight import complaints_about

    return complaints_about


def _text_of(file: Mapping[str, Any] | Spec) -> tuple[str, str, Path]:
    """(YAML, name of the source, folder that its paths are relative to)."""
    if isinstance(file, Spec):
        return file.resolved, file.source, file.code_folder
    if not isinstance(file, Mapping):
        raise UserError(f"{file!r} is no file; accepted: a path, a mapping, or what rlmux.load returned")
    import yaml

    try:
        return yaml.safe_dump(_plain(file), sort_keys=False, allow_unicode=True), IN_CODE, Path.cwd()
    except yaml.YAMLError as error:
        raise UserError(f"{IN_CODE}: {error}; accepted: numbers, texts, lists and mappings") from None


def _plain(value: Any) -> Any:
    """Mappings and sequences of any kind as dicts and lists, paths as texts."""
    if isinstance(value, Mapping):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return str(value) if isinstance(value, Path) else value
