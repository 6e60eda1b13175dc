"""The section `shares` of a file: what projects and users are entitled to beside others, and the most they may have.

shares ── projects ── ProjectShareConfig ── weight, guarantee, quota ─┐
       ── users    ── UserShareConfig    ── weight, quota            ─┴─ make_shares ─▶ core's ShareSettings
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated

from annotated_types import Ge, Le
from pydantic import TypeAdapter, ValidationError

from rlmux.config.explain import explain
from rlmux.config.located import parse_yaml
from rlmux.core.errors import SpecError
from rlmux.core.model import Account
from rlmux.core.offers import AccountShare, Quota, Share, ShareSettings
from rlmux.rl.config import Count, FromFile, Name, PositiveFloat


@dataclass(frozen=True, slots=True, kw_only=True)
class QuotaConfig(FromFile):
    """The most that a project or a user may have."""

    running: Count | None = None
    """Pipelines that run at once; without: any number."""
    waiting: Count | None = None
    """Pipelines that wait or are to come at once. A submission to a run that would exceed it is refused, all of it.
    Without: any number."""
    devices: Count | None = None
    """Devices that its running pipelines ask for together; two that share a device count twice. Without: any number."""
    device_hours_a_day: PositiveFloat | None = None
    """Hours of one device that it is charged in a day of the run's clock. Then its pipelines park at their next step
    boundary, and go on the next day. Without: no limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UserShareConfig(FromFile):
    """One user, in whatever project."""

    weight: PositiveFloat = 1.0
    """Its part of what its project gets, relative to the project's other users; of the cluster, without a project."""
    quota: QuotaConfig = field(default_factory=QuotaConfig)
    """The most that the user's pipelines of all projects may have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProjectShareConfig(FromFile):
    """One project."""

    weight: PositiveFloat = 1.0
    """Its part of a crowded cluster, relative to the weights of the other projects."""
    guarantee: Annotated[float, Ge(0), Le(1)] = 0.0
    """Part of each pool, 0 to 1, below which its pipelines are offered room before those of others."""
    quota: QuotaConfig = field(default_factory=QuotaConfig)
    """The most that the project's pipelines may have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SharesConfig(FromFile):
    """What projects and users are entitled to beside others (docs/shares.md)."""

    half_life_h: PositiveFloat = 168.0
    """Hours after which half of what was used is forgotten."""
    parks: bool = True
    """Whether running pipelines without an SLO, of projects that used more than their part, are parked at a step
    boundary for the first in the queue."""
    min_steps: Count = 10
    """Steps that a pipeline trains after each start before it is parked for another."""
    projects: Mapping[Name, ProjectShareConfig] = field(default_factory=dict)
    """Projects by name; others have weight 1 and no limit."""
    users: Mapping[Name, UserShareConfig] = field(default_factory=dict)
    """Users by name; others have weight 1 and no limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _SharesFile(FromFile):
    """What `parse_shares` reads of a file."""

    shares: SharesConfig
    """The section."""


def make_shares(config: SharesConfig | None) -> ShareSettings | None:
    """What the scheduler is told; None where the file has no such section."""
    if config is None:
        return None
    projects = [
        AccountShare(
            account=Account(name, ""), share=Share(weight=one.weight, guarantee=one.guarantee), quota=_quota(one.quota)
        )
        for name, one in config.projects.items()
    ]
    users = [
        AccountShare(account=Account("", name), share=Share(weight=one.weight), quota=_quota(one.quota))
        for name, one in config.users.items()
    ]
    return ShareSettings(
        half_life_s=config.half_life_h * 3600.0,
        parks=config.parks,
        min_steps=config.min_steps,
        accounts=(*projects, *users),
    )


def parse_shares(text: str, source: str) -> ShareSettings:
    """The section `shares` of a file that may have others beside it. Raises SpecError."""
    root = parse_yaml(text, source)
    if not isinstance(root.value, dict) or "shares" not in root.value:
        raise SpecError(f"{source}: has no section shares; accepted: shares: {{projects: ..., users: ...}}")
    try:
        file = TypeAdapter(_SharesFile).validate_json(json.dumps({"shares": root.nearest(["shares"]).plain()}))
    except ValidationError as error:
        raise explain(error, root, _SharesFile) from None
    made = make_shares(file.shares)
    assert made is not None
    return made


def _quota(config: QuotaConfig) -> Quota:
    return Quota(
        max_running=config.running,
        max_waiting=config.waiting,
        max_devices=config.devices,
        device_hours_a_day=config.device_hours_a_day,
    )
