"""What decides in which order waiting pipelines are offered room: frozen values in, an order out.

    AdmissionQueue ── QueueView ──▶ QueueOrder.order ──▶ pipelines, the first to be offered room first

The order says who is asked next. Where a pipeline goes, and whether it fits, is the policy's to say (`policy.py`).
`rlmux.policies.planning.fairness` has the order by shares; without one, pipelines are offered room as they came.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

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
    """Seconds since its submission."""
    sequence: int
    """Its number in the order of submission."""
    entry_by_pool: Mapping[str, float]
    """Device-seconds of each pool that one step of it is expected to hold."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """What an account, or a project as a whole (no user), is entitled to beside others."""

    weight: float = 1.0
    """Its part of a crowded pool, relative to the weights of the others that want it."""
    guarantee: float = 0.0
    """Part of each pool, 0.0 to 1.0, below which its pipelines are offered room before those of others."""


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


class QueueOrder(Protocol):
    """Says which waiting pipeline is offered room first; it keeps no memory."""

    def order(self, view: QueueView) -> tuple[PipelineId, ...]:
        """Each waiting pipeline once."""
        ...
