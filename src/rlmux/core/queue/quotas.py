"""Limits of projects and users: which waiting pipeline would be over one, and whose hours or dollars are spent.

    SharesSet ── quotas ─▶ Quotas ── excess_of(run) ─▶ Shares.in_order leaves it out, with a reason
                              └──── is_spent(run) ──▶ Parking: it gives its nodes back at its next step boundary
    a submission ── too_many_waiting ─▶ refused before it is an event

What counts against a limit is what pipelines request, not where placement puts them: so a limit is kept exactly,
whatever the policy does. What counts against the hours of a day and a budget is what is charged; days and periods are
those of the run's clock, and what was charged in one that is over counts no more.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rlmux.core.model import Account, Cluster, Phase, Pipeline, PipelineId
from rlmux.core.pipeline_run import PipelineRun
from rlmux.core.queue.budgets import Budgets
from rlmux.core.queue_order import Quota
from rlmux.core.state import SchedulerState

DAY_S = 86_400.0
_CENTS = 100.0
"""Parts of a dollar, and of an hour, to which a sufficient limit is rounded."""


@dataclass(slots=True)
class _Held:
    """What running pipelines of a project or user have at one moment."""

    num_pipelines: int = 0
    num_devices: int = 0
    usd_per_hour: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Excess:
    """A limit that a waiting pipeline would exceed."""

    account: Account
    """Whose limit it is: a project or a user."""
    limit: str
    """Name of the limit, a field of `Quota`."""
    reason: str
    """One line for people, with the numbers."""
    was: float
    """The limit."""
    needed: float
    """The smallest value of the limit with which the pipeline would not be over it, in hundredths where it is no
    count."""
    again_s: float | None = None
    """When it counts anew; None for a limit that does not."""
    is_final: bool = False
    """Whether the pipeline is over it whatever else runs."""


class Quotas:
    """See the module."""

    def __init__(self, cluster: Cluster, state: SchedulerState) -> None:
        self._cluster = cluster
        self._state = state
        self.budgets = Budgets(cluster, state)

    def counts_charges(self) -> bool:
        """Whether what is charged is limited for any."""
        return self._counts_days() or self.budgets.are_set()

    def _counts_days(self) -> bool:
        return any(quota.device_hours_a_day is not None for quota in self._state.quota_by_account.values())

    def excess_of(
        self, run: PipelineRun, pipeline: Pipeline | None = None, *, without: PipelineId | None = None,
        raised: Excess | None = None,
    ) -> Excess | None:  # fmt: skip
        """The first limit that the waiting pipeline would exceed; None where there is none.

        `pipeline`: the same, changed. `without`: one that is taken to be over. `raised`: a limit that is taken to be
        what that needs.
        """
        return self._excess(pipeline or run.pipeline, self._held(without), raised)

    def excesses(self, runs: Iterable[PipelineRun]) -> list[tuple[PipelineRun, Excess | None]]:
        """`excess_of` for every pipeline, with one pass over held resources."""
        if not self._state.quota_by_account:
            return [(run, None) for run in runs]
        held = self._held()
        return [(run, self._excess(run.pipeline, held)) for run in runs]

    def _excess(self, pipeline: Pipeline, held: Mapping[Account, _Held], raised: Excess | None = None) -> Excess | None:
        for account in limited_accounts(pipeline):
            quota = self._state.quota_by_account.get(account)
            if quota is None:
                continue
            if raised is not None and raised.account == account:
                more: dict[str, Any] = {raised.limit: raised.needed}
                quota = replace(quota, **more)
            excess = self._over(pipeline, account, quota, held.get(account, _Held()))
            if excess is not None:
                return excess
        return None

    def is_spent(self, run: PipelineRun) -> bool:
        """Whether the hours of the day or the budget are used up of its project or its user."""
        return any(self._spent(account, quota) is not None for account, quota in self._limits(run.pipeline))

    def again_s(self, run: PipelineRun) -> float | None:
        """When the next of the limits begins anew that are used up; None where none is."""
        spent = (self._spent(account, quota) for account, quota in self._limits(run.pipeline))
        return min(
            (excess.again_s for excess in spent if excess is not None and excess.again_s is not None), default=None
        )

    def count(self, pipeline: Pipeline, pool: str, rate: float, since_s: float) -> None:
        """Count a charge at a rate, in devices, from `since_s` until now, where charges are limited."""
        state = self._state
        if not state.quota_by_account:
            return
        if self._counts_days():
            self.begin_day()
            by_pool = state.charged_today.setdefault(pipeline.account, {})
            begun_s = max(since_s, state.day * DAY_S)
            by_pool[pool] = by_pool.get(pool, 0.0) + rate * (state.now_s - begun_s)
        self.budgets.count(limited_accounts(pipeline), pool, rate, since_s)

    def begin_day(self) -> None:
        """Forget the charges of a day that is over."""
        day = int(self._state.now_s // DAY_S)
        if day != self._state.day:
            self._state.day = day
            self._state.charged_today.clear()

    def num_devices(self, pipeline: Pipeline) -> int:
        """Devices that the pipeline requests."""
        counts = []
        for phase, nodes in ((Phase.ROLLOUT, pipeline.num_rollout_nodes), (Phase.TRAIN, pipeline.num_train_nodes)):
            pool = self._cluster.pool_serving(phase)
            counts.append(nodes * pool.devices_per_node if pool is not None else 0)
        return max(counts) if self._cluster.is_one_pool else sum(counts)

    def _limits(self, pipeline: Pipeline) -> Iterable[tuple[Account, Quota]]:
        quotas = self._state.quota_by_account
        return ((account, quotas[account]) for account in limited_accounts(pipeline) if account in quotas)

    def _over(self, pipeline: Pipeline, account: Account, quota: Quota, held: _Held) -> Excess | None:
        wanted, wanted_usd = self.num_devices(pipeline), self.budgets.usd_per_hour(pipeline)
        if quota.max_devices is not None and held.num_devices + wanted > quota.max_devices:
            is_final = wanted > quota.max_devices
            has = "" if is_final else f", and {held.num_devices} are held"
            reason = f"it requests {wanted} devices of {quota.max_devices} that {account} may have{has}"
            needed: float = held.num_devices + wanted
            return _excess(account, "max_devices", reason, quota.max_devices, needed, is_final=is_final)
        if quota.max_running is not None and held.num_pipelines + 1 > quota.max_running:
            reason = f"{held.num_pipelines} of {quota.max_running} pipelines of {account} run"
            is_final = quota.max_running == 0
            return _excess(account, "max_running", reason, quota.max_running, held.num_pipelines + 1, is_final=is_final)
        if quota.max_usd_per_hour is not None and _is_more(held.usd_per_hour + wanted_usd, quota.max_usd_per_hour):
            is_final = _is_more(wanted_usd, quota.max_usd_per_hour)
            has = "" if is_final else f", and nodes for ${held.usd_per_hour:.2f} are held"
            most = f"of ${quota.max_usd_per_hour:.2f} that {account} may have"
            reason = f"it requests nodes of ${wanted_usd:.2f} an hour {most}{has}"
            needed = math.ceil((held.usd_per_hour + wanted_usd) * _CENTS - 1e-6) / _CENTS
            return _excess(account, "max_usd_per_hour", reason, quota.max_usd_per_hour, needed, is_final=is_final)
        return self._spent(account, quota)

    def _spent(self, account: Account, quota: Quota) -> Excess | None:
        """The hours of the day or the budget, where they are used up."""
        if quota.device_hours_a_day is not None and self._today_h(account) >= quota.device_hours_a_day:
            again_s = (self._state.now_s // DAY_S + 1) * DAY_S
            used = f"the {quota.device_hours_a_day:g} device-hours of {account} for this day are used"
            reason, needed = f"{used}; more come at {again_s:.0f} s", _above(self._today_h(account))
            return _excess(account, "device_hours_a_day", reason, quota.device_hours_a_day, needed, again_s=again_s)
        spent_usd = self.budgets.spent_usd(account)
        if quota.budget_usd is not None and spent_usd >= quota.budget_usd:
            again_s = self.budgets.next_period_s(account)
            days = f"{quota.budget_period_s / DAY_S:g} days"
            used = f"${spent_usd:.2f} of the ${quota.budget_usd:.2f} of {account} for {days} are spent"
            reason = f"budget spent: {used}; it begins anew at {again_s:.0f} s"
            return Excess(
                account=account,
                limit="budget_usd",
                reason=reason,
                was=quota.budget_usd,
                needed=_above(spent_usd),
                again_s=again_s,
            )
        return None

    def _today_h(self, account: Account) -> float:
        """Device-hours that the project or user is charged on this day."""
        if self._state.day != int(self._state.now_s // DAY_S):
            return 0.0
        used_s = sum(
            sum(by_pool.values())
            for charged, by_pool in self._state.charged_today.items()
            if account in (Account(charged.project, ""), Account("", charged.user))
        )
        return used_s / 3600.0

    def _held(self, without: PipelineId | None = None) -> dict[Account, _Held]:
        held: dict[Account, _Held] = {}
        for group in self._state.groups.values():
            for run in group.members.values():
                for account in limited_accounts(run.pipeline) if run.pipeline.id != without else ():
                    total = held.setdefault(account, _Held())
                    total.num_pipelines += 1
                    total.num_devices += self.num_devices(run.pipeline)
                    total.usd_per_hour += self.budgets.usd_per_hour(run.pipeline)
        return held


def _excess(
    account: Account, limit: str, reason: str, was: float, needed: float, *, again_s: float | None = None,
    is_final: bool = False,
) -> Excess:  # fmt: skip
    text = f"over quota: {reason}"
    return Excess(account=account, limit=limit, reason=text, was=was, needed=needed, again_s=again_s, is_final=is_final)


def _is_more(usd: float, limit: float) -> bool:
    """Whether so many dollars are more than the limit, by more than the rounding of a sum."""
    return usd > limit * (1.0 + 1e-9)


def _above(value: float) -> float:
    """The next hundredth above the value."""
    return math.floor(value * _CENTS + 1.0) / _CENTS


def too_many_waiting(state: SchedulerState, coming: Sequence[Pipeline], expected: Sequence[Pipeline]) -> str:
    """Why pipelines that are `coming` would exceed what their project or user may have waiting; empty where they
    would not.

    `expected`: pipelines that were submitted before, and that the state does not have yet. Fillers count in no quota.
    """
    if all(quota.max_waiting is None for quota in state.quota_by_account.values()):
        return ""
    waiting = [run.pipeline for run in state.waiting.values()]
    for account, quota in state.quota_by_account.items():
        num_more = _count(coming, account)
        num_waiting = _count(waiting, account) + _count(expected, account)
        if quota.max_waiting is not None and num_more and num_waiting + num_more > quota.max_waiting:
            wait = f"{num_waiting} pipelines of {account} wait or are to come"
            return f"over quota: {wait}, with {num_more} more it is {num_waiting + num_more} of {quota.max_waiting}"
    return ""


def _count(pipelines: Iterable[Pipeline], account: Account) -> int:
    return sum(account in limited_accounts(pipeline) for pipeline in pipelines if not pipeline.is_filler)


def limited_accounts(pipeline: Pipeline) -> Iterable[Account]:
    """The project and the user of a pipeline, as settings name them."""
    account = pipeline.account
    project = (Account(account.project, ""),) if account.project else ()
    return (*project, *((Account("", account.user),) if account.user else ()))
