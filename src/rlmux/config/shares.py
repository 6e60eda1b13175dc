"""The section `shares` of a file: what projects and users are entitled to beside others, and the most they may have.

shares ── projects ── ProjectShareConfig ── weight, guarantee, quota ─┐
       ── users    ── UserShareConfig    ── weight, quota            ─┴─ make_shares ─▶ core's ShareSettings
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated

from annotated_types import Ge, Le, Predicate
from pydantic import TypeAdapter, ValidationError

from rlmux.config.error_messages import explain
from rlmux.config.source_map import parse_yaml
from rlmux.core.errors import SpecError
from rlmux.core.model import Account, Cluster
from rlmux.core.queue_order import AccountShare, Quota, Share, ShareSettings
from rlmux.rl.config import Count, FromFile, Name, PositiveFloat, Takes

_SECONDS_BY_UNIT = {"h": 3600.0, "d": 86_400.0, "w": 7 * 86_400.0}


def seconds_of(text: str) -> float:
    """Seconds of a text such as `30d`; 0 for one that is no period."""
    number, unit = text[:-1], text[-1:]
    return int(number) * _SECONDS_BY_UNIT.get(unit, 0.0) if re.fullmatch("[0-9]{1,6}", number) else 0.0


def _is_period(text: str) -> bool:
    return seconds_of(text) > 0.0


Period = Annotated[str, Predicate(_is_period), Takes("a whole number and h, d or w, such as 30d")]


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetConfig(FromFile):
    """Dollar limit of a project or a user per period."""

    limit: PositiveFloat
    """Dollars, at the cluster's prices. When they are spent, pipelines park at their next step boundary until the next
    period."""
    per: Period = "30d"
    """Hours, days or weeks of a period, by the run's clock."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QuotaConfig(FromFile):
    """Limits of a project or a user."""

    running: Count | None = None
    """Running pipelines. Default: no limit."""
    waiting: Count | None = None
    """Waiting and scheduled pipelines; a submission that exceeds it is refused as a whole. Default: no limit."""
    devices: Count | None = None
    """Devices requested by running pipelines; shared devices count for each. Default: no limit."""
    device_hours_a_day: PositiveFloat | None = None
    """Device-hours charged per day of the run's clock; pipelines then park at their next step boundary until the next
    day. Default: no limit."""
    usd_per_hour: PositiveFloat | None = None
    """Dollars per hour of the nodes requested by running pipelines; shared nodes count for each. Default: no limit."""
    budget_usd: BudgetConfig | None = None
    """Dollars per period. Default: no limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UserShareConfig(FromFile):
    """One user, in any project."""

    weight: PositiveFloat = 1.0
    """Weight relative to the project's other users, or, without a project, to all."""
    quota: QuotaConfig = field(default_factory=QuotaConfig)
    """Limits of the user's pipelines in all projects."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProjectShareConfig(FromFile):
    """One project."""

    weight: PositiveFloat = 1.0
    """Weight relative to other projects."""
    guarantee: Annotated[float, Ge(0), Le(1)] = 0.0
    """Part of each pool, 0 to 1, below which its pipelines are placed first."""
    quota: QuotaConfig = field(default_factory=QuotaConfig)
    """Limits of the project's pipelines."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SharesConfig(FromFile):
    """Fair shares of projects and users (docs/how-it-works/shares.md)."""

    half_life_h: PositiveFloat = 168.0
    """Half-life of recorded use, in hours."""
    parks: bool = True
    """Park running pipelines without an SLO, of projects above their share, for the first pipeline in the queue."""
    min_steps: Count = 10
    """Steps that a pipeline trains after each start before it can be parked."""
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
    """Shares as the scheduler takes them; None without such a section."""
    if config is None:
        return None
    projects = [
        AccountShare(
            account=Account(name, ""),
            share=Share(weight=keys.weight, guarantee=keys.guarantee),
            quota=_quota(keys.quota),
        )
        for name, keys in config.projects.items()
    ]
    users = [
        AccountShare(account=Account("", name), share=Share(weight=keys.weight), quota=_quota(keys.quota))
        for name, keys in config.users.items()
    ]
    return ShareSettings(
        half_life_s=config.half_life_h * 3600.0,
        parks=config.parks,
        min_steps=config.min_steps,
        accounts=(*projects, *users),
    )


def parse_shares(text: str, source: str, cluster: Cluster | None = None) -> ShareSettings:
    """The section `shares` of a file that may have others beside it. `cluster`: that they are to hold in; None: not
    known here. Raises SpecError."""
    root = parse_yaml(text, source)
    if not isinstance(root.value, dict) or "shares" not in root.value:
        raise SpecError(f"{source}: has no section shares; accepted: shares: {{projects: ..., users: ...}}")
    try:
        file = TypeAdapter(_SharesFile).validate_json(json.dumps({"shares": root.nearest(["shares"]).plain()}))
    except ValidationError as error:
        raise explain(error, root, _SharesFile) from None
    made = make_shares(file.shares)
    assert made is not None
    if cluster is not None:
        check_prices(made, cluster, source)
    return made


def _quota(config: QuotaConfig) -> Quota:
    return Quota(
        max_running=config.running,
        max_waiting=config.waiting,
        max_devices=config.devices,
        device_hours_a_day=config.device_hours_a_day,
        max_usd_per_hour=config.usd_per_hour,
        budget_usd=None if config.budget_usd is None else config.budget_usd.limit,
        budget_period_s=seconds_of("30d" if config.budget_usd is None else config.budget_usd.per),
    )


def check_prices(settings: ShareSettings | None, cluster: Cluster, source: str) -> None:
    """Raises SpecError for a quota in dollars of a cluster whose pools cost nothing: it would limit nothing."""
    if any(pool.usd_per_gpu_hour > 0.0 for pool in cluster.pools.values()):
        return
    for account in settings.accounts if settings is not None else ():
        if account.quota.max_usd_per_hour is not None or account.quota.budget_usd is not None:
            raise SpecError(
                f"{source}: the quota of {account.account} is in dollars, and no pool has a price; accepted: "
                "usd_per_gpu_hour of a pool, or a quota of devices or device_hours_a_day"
            )
