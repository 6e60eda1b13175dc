"""What decides in which order waiting pipelines are offered room: frozen values in, an order out.

    AdmissionQueue ── QueueView ──▶ QueueOrder.order ──▶ pipelines, the first to be offered room first

The order decides which pipeline is tried next. The policy decides where it goes, and whether it fits (`policy.py`).
`rlmux.policies.max_min_fairness` has the order by shares; without one, pipelines are offered room as they came.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from rlmux.core.decayed_usage import HALF_LIFE_S
from rlmux.core.model import Account, PipelineId, Urgency


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitingPipeline:
    """A pipeline that waits for room."""

    id: PipelineId
    account: Account
    urgency: Urgency
    rank: int
    """Its place among its account's own."""
    waited_s: float
    """Seconds in the queue, over all parts of the run."""
    sequence: int
    """Its number in the order of submission."""
    entry_by_pool: Mapping[str, float]
    """Device-seconds of each pool that one step of it is expected to hold."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineWait:
    """How long a pipeline had waited when an earlier part of the run ended. Times are of the run's clock."""

    pipeline: PipelineId
    since_s: float
    """Time from which on it waited."""
    promised_s: float = math.inf
    """Earliest start that was ever reserved for it; infinite where there was none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """What an account, or a project as a whole (no user), is entitled to beside others."""

    weight: float = 1.0
    """Its part of a crowded pool, relative to the weights of the others that want it."""
    guarantee: float = 0.0
    """Part of each pool, 0.0 to 1.0, below which its pipelines are offered room before those of others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Quota:
    """The most that a project, or a user, may have of the cluster."""

    max_running: int | None = None
    """Pipelines that run at once; None: no limit."""
    max_waiting: int | None = None
    """Pipelines that wait or are to come at once; a submission that would exceed it is not taken. None: no limit."""
    max_devices: int | None = None
    """Devices that its running pipelines request together; two that share a device count twice. None: no limit."""
    device_hours_a_day: float | None = None
    """Hours of one device that it is charged in a day of the run's clock; None: no limit."""
    max_usd_per_hour: float | None = None
    """Dollars an hour of the nodes that its running pipelines request together, at the pools' prices; None: no
    limit."""
    budget_usd: float | None = None
    """Dollars that it is charged in a period of the run's clock, at the pools' prices; None: no limit."""
    budget_period_s: float = 30 * 86_400.0
    """Seconds of such a period."""

    @property
    def is_empty(self) -> bool:
        return self == _NO_LIMIT


_NO_LIMIT = Quota()


@dataclass(frozen=True, slots=True, kw_only=True)
class AccountShare:
    """What was set for one project (no user) or for one user (no project)."""

    account: Account
    share: Share = field(default_factory=Share)
    quota: Quota = field(default_factory=Quota)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShareSettings:
    """The section `shares` of a file."""

    half_life_s: float = HALF_LIFE_S
    """Seconds after which half of what was used is forgotten."""
    parks: bool = True
    """Whether pipelines of those over their share are parked to make room for others."""
    min_steps: int = 10
    """Steps that a pipeline trains after an admission before it is parked for another."""
    accounts: tuple[AccountShare, ...] = ()
    """Settings by project or user, each once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AccountUsage:
    """What an account has used of one pool."""

    account: Account
    pool: str
    device_s: float
    """Device-seconds, decayed over time."""
    today_s: float = 0.0
    """Device-seconds that it was charged on the day of the run's clock that the event falls on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AccountSpent:
    """What a project (no user) or a user (no project) with a budget was charged in one period."""

    account: Account
    usd: float
    begun_s: float
    """Time at which the period began, by the run's clock."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningPipeline:
    """A pipeline that could be parked to make room for another."""

    id: PipelineId
    account: Account
    urgency: Urgency
    sequence: int
    """Its number in the order of submission."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueView:
    """The queue at one moment."""

    waiting: tuple[WaitingPipeline, ...]
    """Pipelines that may start, in the order of submission."""
    usage_by_account: Mapping[Account, Mapping[str, float]] = field(default_factory=dict)
    """Part of each pool that the account has held on average of late, decayed; 1.0 is all of it."""
    share_by_account: Mapping[Account, Share] = field(default_factory=dict)
    """Shares that were set; an account with an empty user stands for its project. Others have weight 1."""
    capacity_by_pool: Mapping[str, float] = field(default_factory=dict)
    """Device-seconds of a decayed usage of 1.0."""
    running: tuple[RunningPipeline, ...] = ()
    """Pipelines that could be parked, in the order of submission; only if `to_park`."""


class QueueOrder(Protocol):
    """Says which waiting pipeline is offered room first; it keeps no memory."""

    def order(self, view: QueueView) -> tuple[PipelineId, ...]:
        """Each waiting pipeline once."""
        ...

    def to_park(self, head: WaitingPipeline, view: QueueView) -> tuple[PipelineId, ...]:
        """Those of `view.running` that may be parked to make room for the first in the queue, the first to go first."""
        ...

    def fair_share(self, view: QueueView) -> float:
        """The dominant share that every project of the view would have, had all used by their weights."""
        ...

    def share_of(self, account: Account, view: QueueView) -> float:
        """The dominant share of an account; of a project as a whole where the user is empty."""
        ...
