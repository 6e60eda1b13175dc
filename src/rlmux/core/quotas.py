"""Limits of projects and users: which waiting pipeline would be over one, and whose hours of the day are spent.

    SharesSet ── quotas ─▶ Quotas ── reason_against(run) ─▶ Shares.in_order leaves it out, and it is told why
                              └──── is_spent(run) ────────▶ Parking: it gives its nodes back at its next step boundary
    a submission ── too_many_waiting ─▶ refused before it is an event

What counts against a limit is what pipelines ask for, not where placement puts them: so a limit is kept exactly,
whatever the policy does. A day is one of the run's clock; hours of a day that is over count no more.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from rlmux.core.model import Account, Cluster, Phase, Pipeline
from rlmux.core.offers import Quota
from rlmux.core.state import PipelineRun, SchedulerState

DAY_S = 86_400.0


@dataclass(slots=True)
class _Held:
    """What running pipelines of a project or user have at one moment."""

    num_pipelines: int = 0
    num_devices: int = 0


class Quotas:
    """See the module."""

    def __init__(self, cluster: Cluster, state: SchedulerState) -> None:
        self._cluster = cluster
        self._state = state

    def counts_days(self) -> bool:
        """Whether the hours of a day are limited for any."""
        return any(quota.device_hours_a_day is not None for quota in self._state.quota_by_account.values())

    def reason_against(self, run: PipelineRun) -> tuple[str, bool]:
        """(why the pipeline would be over a limit, whether it always would); empty where it would not."""
        ((_, reason, is_final),) = self.reasons_against([run])
        return reason, is_final

    def reasons_against(self, runs: Iterable[PipelineRun]) -> list[tuple[PipelineRun, str, bool]]:
        """Each pipeline, and what `reason_against` says of it: what others hold is counted once for all."""
        if not self._state.quota_by_account:
            return [(run, "", False) for run in runs]
        held = self._held()
        return [(run, *self._reason_against(run, held)) for run in runs]

    def _reason_against(self, run: PipelineRun, held: Mapping[Account, _Held]) -> tuple[str, bool]:
        for account in limited_accounts(run.pipeline):
            quota = self._state.quota_by_account.get(account)
            if quota is not None:
                reason, is_final = self._reason(run, account, quota, held.get(account, _Held()))
                if reason:
                    return reason, is_final
        return "", False

    def is_spent(self, run: PipelineRun) -> bool:
        """Whether the hours of the day are used up of its project or its user."""
        return any(self._is_spent(account) for account in limited_accounts(run.pipeline))

    def next_day_s(self) -> float:
        """When the next day of the run's clock begins."""
        return (self._state.now_s // DAY_S + 1) * DAY_S

    def add_today(self, account: Account, pool: str, rate: float, since_s: float) -> None:
        """Count a charge at a rate, in devices, from `since_s` until now, as far as it falls on this day."""
        state = self._state
        day = int(state.now_s // DAY_S)
        if day != state.day:
            state.day = day
            state.charged_today.clear()
        by_pool = state.charged_today.setdefault(account, {})
        by_pool[pool] = by_pool.get(pool, 0.0) + rate * (state.now_s - max(since_s, day * DAY_S))

    def num_devices(self, pipeline: Pipeline) -> int:
        """Devices that the pipeline asks for."""
        counts = []
        for phase, nodes in ((Phase.ROLLOUT, pipeline.num_rollout_nodes), (Phase.TRAIN, pipeline.num_train_nodes)):
            pool = self._cluster.pool_serving(phase)
            counts.append(nodes * pool.devices_per_node if pool is not None else 0)
        return max(counts) if self._cluster.is_one_pool else sum(counts)

    def _reason(self, run: PipelineRun, account: Account, quota: Quota, held: _Held) -> tuple[str, bool]:
        wanted, name = self.num_devices(run.pipeline), str(account)
        if quota.max_devices is not None and held.num_devices + wanted > quota.max_devices:
            is_final = wanted > quota.max_devices
            has = "" if is_final else f", and {held.num_devices} are held"
            most = f"{wanted} devices of {quota.max_devices} that {name} may have"
            return f"over quota: it asks for {most}{has}", is_final
        if quota.max_running is not None and held.num_pipelines + 1 > quota.max_running:
            limit = f"{held.num_pipelines} of {quota.max_running}"
            return f"over quota: {limit} pipelines of {name} run", quota.max_running == 0
        if self._is_spent(account):
            limit = f"{quota.device_hours_a_day:g} device-hours of {name} for this day are used"
            return f"over quota: the {limit}; more come at {self.next_day_s():.0f} s", False
        return "", False

    def _is_spent(self, account: Account) -> bool:
        quota = self._state.quota_by_account.get(account)
        if quota is None or quota.device_hours_a_day is None or self._state.day != int(self._state.now_s // DAY_S):
            return False
        used_s = sum(
            sum(by_pool.values())
            for charged, by_pool in self._state.charged_today.items()
            if account in (Account(charged.project, ""), Account("", charged.user))
        )
        return used_s >= quota.device_hours_a_day * 3600.0

    def _held(self) -> dict[Account, _Held]:
        held: dict[Account, _Held] = {}
        for group in self._state.groups.values():
            for run in group.members.values():
                for account in limited_accounts(run.pipeline):
                    one = held.setdefault(account, _Held())
                    one.num_pipelines += 1
                    one.num_devices += self.num_devices(run.pipeline)
        return held


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
    return sum(account in limited_accounts(one) for one in pipelines if not one.is_filler)


def limited_accounts(pipeline: Pipeline) -> Iterable[Account]:
    """The project and the user of a pipeline, as settings name them."""
    account = pipeline.account
    project = (Account(account.project, ""),) if account.project else ()
    return (*project, *((Account("", account.user),) if account.user else ()))
