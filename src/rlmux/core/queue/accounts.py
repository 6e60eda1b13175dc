"""What projects and users have used, and what they are entitled to, for people: nothing here decides.

SchedulerState, Shares ── account_rows ─▶ AccountRow, one for each project and user that is known
                       └─ bill_of ──────▶ Bill, what was held: all that is charged adds up to it
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from rlmux.core.decayed_usage import HALF_LIFE_S
from rlmux.core.model import Account, PipelineStatus
from rlmux.core.pipeline_run import PipelineRun
from rlmux.core.queue.fair_share import Shares
from rlmux.core.queue.wait_reasons import is_over
from rlmux.core.queue_order import AccountUsage, Quota, Share
from rlmux.core.state import SchedulerState


@dataclass(frozen=True, slots=True, kw_only=True)
class AccountRow:
    """One project and one user of it."""

    account: Account
    weight: float
    """Weight of its project."""
    guarantee: float
    """Part of each pool, 0.0 to 1.0, below which its project goes first."""
    share: float
    """Dominant share of its project, of late."""
    fair_share: float
    """Dominant share that each project would have had by its weight."""
    charged_by_pool: dict[str, float]
    """Device-seconds that its pipelines of this part of the run are charged, by pool."""
    used_by_pool: dict[str, float]
    """Recent device-seconds by pool, decayed over time; an urgent pipeline's count twice."""
    today_s: float
    """Device-seconds that it is charged on this day; 0 where no quota needs them."""
    num_running: int
    num_waiting: int
    quota: Quota
    """The quota of its user, else of its project."""
    usd: float = 0.0
    """Dollars of what its pipelines of this part of the run are charged, at the pools' prices."""
    spent_usd: float = 0.0
    """Dollars that the account of `quota` was charged in the present period; 0 where that has no budget."""
    budget_begins_s: float | None = None
    """When that budget begins anew, by the run's clock; None without one."""

    @property
    def is_over_share(self) -> bool:
        """Whether its project has used more of late than its weight entitles it to."""
        return is_over(self.share, self.fair_share)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bill:
    """What a part of a run cost, in device-seconds, since accounts were counted."""

    held_by_pool: dict[str, float]
    """Seconds for which each device was held, added up by device and not by pipeline."""
    half_life_s: float
    """Seconds after which half of what was used is forgotten."""


def bill_of(state: SchedulerState, shares: Shares) -> Bill:
    """What was held up to now."""
    shares.charge(state.held_devices)
    half_life_s = HALF_LIFE_S if state.settings is None else state.settings.half_life_s
    return Bill(held_by_pool=dict(state.held_by_pool), half_life_s=half_life_s)


def account_rows(state: SchedulerState, shares: Shares) -> tuple[AccountRow, ...]:
    """A row for each account, the first that came first."""
    if not shares.are_set:
        return ()
    usage = {(used.account, used.pool): used for used in shares.usage()}
    accounts = dict.fromkeys((*(run.pipeline.account for run in state.runs.values()), *state.usage_by_account))
    return tuple(_row(account, state, shares, usage) for account in accounts)


def _row(
    account: Account, state: SchedulerState, shares: Shares, usage: dict[tuple[Account, str], AccountUsage]
) -> AccountRow:
    runs = [run for run in state.runs.values() if run.pipeline.account == account]
    share, fair_share = shares.standing_of(account)
    project, user = Account(account.project, ""), Account("", account.user)
    charged: dict[str, float] = {}
    for run in runs:
        for pool, device_s in state.charged_by_pipeline.get(run.pipeline.id, {}).items():
            charged[pool] = charged.get(pool, 0.0) + device_s
    set_for = state.share_by_account
    own_share = set_for.get(project) or set_for.get(Account("", account.project)) or Share()
    own = [used for (other, _), used in usage.items() if other == account]
    limited = next((holder for holder in (user, project) if holder in state.quota_by_account), None)
    quota, budgets = state.quota_by_account[limited] if limited else Quota(), shares.quotas.budgets
    has_budget = limited is not None and quota.budget_usd is not None
    return AccountRow(
        account=account,
        weight=own_share.weight,
        guarantee=own_share.guarantee,
        share=share,
        fair_share=fair_share,
        charged_by_pool=charged,
        used_by_pool={used.pool: used.device_s for used in own},
        today_s=sum(used.today_s for used in own),
        num_running=_count(runs, PipelineStatus.RUNNING),
        num_waiting=_count(runs, PipelineStatus.WAITING),
        quota=quota,
        usd=sum(device_s * budgets.usd_per_device_s[pool] for pool, device_s in charged.items()),
        spent_usd=budgets.spent_usd(limited) if limited else 0.0,
        budget_begins_s=budgets.next_period_s(limited) if limited and has_budget else None,
    )


def _count(runs: Iterable[PipelineRun], status: PipelineStatus) -> int:
    return sum(run.status is status for run in runs)
