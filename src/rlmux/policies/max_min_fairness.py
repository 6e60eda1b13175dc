"""Shares: in which order waiting pipelines are offered room, by what their accounts have used.

    aged ─▶ urgent, normal, background ─▶ below the guarantee ─▶ smallest share of the project ─▶ ... of the user
         ─▶ rank ─▶ submission

A project's *share* is its dominant one: the largest part of a pool that it has held of late, over its weight (Ghodsi et
al., "Dominant Resource Fairness", NSDI 2011). Two projects of which one needs rollout nodes most and the other training
nodes so get more than half of those each. Waiting makes a share smaller, by half each `AGEING_S`, and a pipeline that
has waited `AGED_S` goes before all that have not, in the order of submission: every wait has an end.

The order is filled progressively: a pipeline that is put into it is counted as if it had started, so that accounts take
turns. Within one account ranks decide, and never pass another account's. What was used is forgotten
by half each week; the scheduler keeps it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from rlmux.core.model import Account, PipelineId, Urgency
from rlmux.core.queue_order import QueueView, Share, WaitingPipeline

AGEING_S = 24 * 3600.0
"""Seconds of waiting that halve a share."""
AGED_S = 7 * AGEING_S
"""Seconds of waiting after which shares and urgency count no more."""

_DEFAULT = Share()


@dataclass(frozen=True, slots=True)
class FairShares:
    """The order of the module's picture."""

    def order(self, view: QueueView) -> tuple[PipelineId, ...]:
        """Each waiting pipeline once, the first to be offered room first."""
        if len(view.waiting) < 2:
            return tuple(pipeline.id for pipeline in view.waiting)
        aged = sorted((pipeline for pipeline in view.waiting if pipeline.waited_s >= AGED_S), key=_sequence_of)
        ordered = list(aged)
        usage = _Usage(view)
        for pipeline in aged:
            usage.add(pipeline)
        for urgency in Urgency:
            ordered += _filled(
                [pipeline for pipeline in view.waiting if pipeline.urgency == urgency and pipeline.waited_s < AGED_S],
                usage,
            )
        return tuple(pipeline.id for pipeline in ordered)

    def to_park(self, head: WaitingPipeline, view: QueueView) -> tuple[PipelineId, ...]:
        """Background pipelines for one that is not, and those of projects (or of users of the same project) whose share
        stays larger than the head's once the head has entered; the largest share first, the latest first among equals.

        Pipelines of one account never make room for each other but those in the background.
        """
        usage = _Usage(view)
        usage.add(head)
        ordered = []
        for pipeline in view.running:
            is_background = pipeline.urgency is Urgency.BACKGROUND and head.urgency is not Urgency.BACKGROUND
            accounts = _compared(head.account, pipeline.account)
            if is_background or (accounts is not None and usage.share(accounts[0]) < usage.share(accounts[1])):
                share = usage.share(project_of(pipeline.account))
                ordered.append(((not is_background, -share, -pipeline.sequence), pipeline.id))
        return tuple(name for _, name in sorted(ordered))

    def fair_share(self, view: QueueView) -> float:
        """The mean over the projects of the view, counted by weight; 0 where there are none."""
        usage = _Usage(view)
        accounts = (*view.usage_by_account, *(pipeline.account for pipeline in view.waiting))
        projects = list(dict.fromkeys(map(project_of, accounts)))
        weights = [usage.weight(project) for project in projects]
        parts = [usage.share(project) * weight for project, weight in zip(projects, weights, strict=True)]
        return sum(parts) / sum(weights) if weights else 0.0

    def share_of(self, account: Account, view: QueueView) -> float:
        """As `dominant_share`."""
        return dominant_share(account, view)


def _compared(head: Account, other: Account) -> tuple[Account, Account] | None:
    """The accounts whose shares decide which of two pipelines gives way; None if both are of one."""
    if head == other:
        return None
    if head.project == other.project:
        return head, other
    return project_of(head), project_of(other)


def dominant_share(account: Account, view: QueueView) -> float:
    """The largest part of a pool that the account (a project, where its user is empty) has held of late, over its
    weight."""
    return _Usage(view).share(account)


class _Usage:
    """Used parts of each pool, by project and by account, while an order is filled."""

    def __init__(self, view: QueueView) -> None:
        self._view = view
        self._parts: dict[Account, dict[str, float]] = {}
        for account, parts in view.usage_by_account.items():
            for pool, part in parts.items():
                self._add(account, pool, part)

    def add(self, pipeline: WaitingPipeline) -> None:
        """Count a pipeline as if it had started."""
        for pool, device_s in pipeline.entry_by_pool.items():
            self._add(pipeline.account, pool, device_s / self._view.capacity_by_pool.get(pool, 1.0))

    def share(self, account: Account) -> float:
        return self._largest_part(account) / self.weight(account)

    def weight(self, account: Account) -> float:
        return self._set(account).weight

    def is_below_guarantee(self, project: Account) -> bool:
        return self._largest_part(project) < self._set(project).guarantee

    def _set(self, account: Account) -> Share:
        """What was set for a user in every project, or for a project; a user without one is a project."""
        shares = self._view.share_by_account
        if account in shares:
            return shares[account]
        return shares.get(Account("", account.user or account.project), _DEFAULT)

    def _largest_part(self, account: Account) -> float:
        return max(self._parts.get(account, {}).values(), default=0.0)

    def _add(self, account: Account, pool: str, part: float) -> None:
        for counted in dict.fromkeys((account, project_of(account))):
            parts = self._parts.setdefault(counted, {})
            parts[pool] = parts.get(pool, 0.0) + part


@dataclass(slots=True)
class _Line:
    """Waiting pipelines of one account, the next one last."""

    account: Account
    waiting: list[WaitingPipeline] = field(default_factory=list)


def project_of(account: Account) -> Account:
    """The account that stands for the whole project."""
    return Account(account.project, "")


def _filled(waiting: list[WaitingPipeline], usage: _Usage) -> list[WaitingPipeline]:
    """Pipelines of one urgency in order; each is counted in `usage`."""
    lines: dict[Account, dict[Account, _Line]] = {}
    for pipeline in sorted(waiting, key=lambda pipeline: (pipeline.rank, pipeline.sequence), reverse=True):
        of_project = lines.setdefault(project_of(pipeline.account), {})
        of_project.setdefault(pipeline.account, _Line(pipeline.account)).waiting.append(pipeline)
    heads = {project: _head(project, of_project, usage) for project, of_project in lines.items()}
    ordered = []
    while heads:
        project = min(heads, key=lambda project: heads[project][0])
        line = heads[project][1]
        pipeline = line.waiting.pop()
        ordered.append(pipeline)
        usage.add(pipeline)
        if not line.waiting:
            del lines[project][line.account]
        if lines[project]:
            heads[project] = _head(project, lines[project], usage)
        else:
            del heads[project]
    return ordered


def _head(project: Account, lines: Mapping[Account, _Line], usage: _Usage) -> tuple[tuple[bool, float, int], _Line]:
    """What the project is compared by, and the line of its next pipeline."""

    def rank_of(line: _Line) -> tuple[float, int]:
        pipeline = line.waiting[-1]
        return usage.share(line.account) * _aged(pipeline), pipeline.sequence

    line = min(lines.values(), key=rank_of)
    pipeline = line.waiting[-1]
    return (not usage.is_below_guarantee(project), usage.share(project) * _aged(pipeline), pipeline.sequence), line


def _aged(pipeline: WaitingPipeline) -> float:
    """Factor by which its waiting makes its account's share smaller, at most 1."""
    return math.exp2(-pipeline.waited_s / AGEING_S)


def _sequence_of(pipeline: WaitingPipeline) -> int:
    return pipeline.sequence
