"""Dollars of projects and users, at the prices of the pools: requested per hour, and spent in a period.

    charge of a pipeline ── count ─▶ SchedulerState.spent_by_account ── is_spent ─▶ Quotas
    note in the log ─────── restore ─────┘

Periods are those of the run's clock, as days are: a budget for 30 days begins anew at day 0, 30, 60. Only accounts with
a budget are counted, from when it is set.

A module of its own: prices and periods are a subject apart from counts.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from rlmux.core.model import Account, Cluster, Phase, Pipeline
from rlmux.core.queue_order import AccountSpent
from rlmux.core.state import SchedulerState


class Budgets:
    """See the module."""

    def __init__(self, cluster: Cluster, state: SchedulerState) -> None:
        self._cluster = cluster
        self._state = state
        self.usd_per_device_s = {
            name: pool.usd_per_node_hour / pool.devices_per_node / 3600.0 for name, pool in cluster.pools.items()
        }
        """Dollars of one second of a device, by pool."""

    def usd_per_hour(self, pipeline: Pipeline) -> float:
        """Dollars an hour of the nodes that the pipeline requests."""
        dollars = []
        for phase, nodes in ((Phase.ROLLOUT, pipeline.num_rollout_nodes), (Phase.TRAIN, pipeline.num_train_nodes)):
            pool = self._cluster.pool_serving(phase)
            dollars.append(nodes * pool.usd_per_node_hour if pool is not None else 0.0)
        return max(dollars) if self._cluster.is_one_pool else sum(dollars)

    def are_set(self) -> bool:
        """Whether any project or user has a budget."""
        return any(quota.budget_usd is not None for quota in self._state.quota_by_account.values())

    def count(self, accounts: Iterable[Account], pool: str, rate: float, since_s: float) -> None:
        """Count a charge at a rate, in devices, from `since_s` until now, as far as it falls in the present period."""
        for account in accounts:
            quota = self._state.quota_by_account.get(account)
            if quota is not None and quota.budget_usd is not None:
                begun_s = self._begin_s(quota.budget_period_s)
                seconds = max(0.0, self._state.now_s - max(since_s, begun_s))
                usd = self.spent_usd(account) + rate * seconds * self.usd_per_device_s[pool]
                self._state.spent_by_account[account] = AccountSpent(account=account, usd=usd, begun_s=begun_s)

    def restore(self, spent: Iterable[AccountSpent]) -> None:
        """Go on with what was spent in earlier parts of the run."""
        self._state.spent_by_account.update((entry.account, entry) for entry in spent)

    def spent_usd(self, account: Account) -> float:
        """Dollars that the account was charged in the present period; 0 without a budget.

        Where another length of the period was set since, the charges count whose own period began in the present one.
        """
        quota, spent = self._state.quota_by_account.get(account), self._state.spent_by_account.get(account)
        if quota is None or quota.budget_usd is None or spent is None:
            return 0.0
        return spent.usd if spent.begun_s >= self._begin_s(quota.budget_period_s) else 0.0

    def is_spent(self, account: Account) -> bool:
        """Whether the account's budget of the present period is used up."""
        quota = self._state.quota_by_account.get(account)
        return quota is not None and quota.budget_usd is not None and self.spent_usd(account) >= quota.budget_usd

    def next_period_s(self, account: Account) -> float:
        """When the account's budget begins anew; infinite without one."""
        quota = self._state.quota_by_account.get(account)
        if quota is None or quota.budget_usd is None:
            return math.inf
        return self._begin_s(quota.budget_period_s) + quota.budget_period_s

    def _begin_s(self, period_s: float) -> float:
        """When the present period began, by the run's clock."""
        return self._state.now_s // period_s * period_s
