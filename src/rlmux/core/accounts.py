"""What projects and users have used, and what they are entitled to, for people: nothing here decides.

SchedulerState, Shares ── account_rows ─▶ AccountRow, one for each project and user that is known
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from rlmux.core.model import Account, PipelineStatus
from rlmux.core.offers import Quota, Share
from rlmux.core.shares import Shares
from rlmux.core.state import PipelineRun, SchedulerState
from rlmux.core.why import is_over


@dataclass(frozen=True, slots=True, kw_only=True)
class AccountRow:
    """One project and one user of it."""

    account: Account
    weight: float
    """Weight of its project."""
    share: float
    """Dominant share of its project, of late."""
    fair_share: float
    """Dominant share that each project would have had by its weight."""
    charged_by_pool: dict[str, float]
    """Device-seconds that its pipelines of this part of the run are charged, by pool."""
    today_s: float
    """Device-seconds that it is charged on this day; 0 where no quota asks for them."""
    num_running: int
    num_waiting: int
    quota: Quota
    """The quota of its user, else of its project."""

    @property
    def is_over_share(self) -> bool:
        """Whether its project has used more of late than its weight entitles it to."""
        return is_over(self.share, self.fair_share)


def account_rows(state: SchedulerState, shares: Shares) -> tuple[AccountRow, ...]:
    """A row for each account, the first that came first."""
    if not shares.are_set:
        return ()
    today = {(one.account, one.pool): one.today_s for one in shares.usage()}
    accounts = dict.fromkeys((*(run.pipeline.account for run in state.runs.values()), *state.usage_by_account))
    return tuple(_row(account, state, shares, today) for account in accounts)


def _row(
    account: Account, state: SchedulerState, shares: Shares, today: dict[tuple[Account, str], float]
) -> AccountRow:
    runs = [run for run in state.runs.values() if run.pipeline.account == account]
    share, fair_share = shares.standing_of(account)
    project, user = Account(account.project, ""), Account("", account.user)
    charged: dict[str, float] = {}
    for run in runs:
        for pool, device_s in state.charged_by_pipeline.get(run.pipeline.id, {}).items():
            charged[pool] = charged.get(pool, 0.0) + device_s
    own_share = state.share_by_account.get(project) or state.share_by_account.get(Account("", account.project))
    return AccountRow(
        account=account,
        weight=(own_share or Share()).weight,
        share=share,
        fair_share=fair_share,
        charged_by_pool=charged,
        today_s=sum(device_s for (other, _), device_s in today.items() if other == account),
        num_running=_count(runs, PipelineStatus.RUNNING),
        num_waiting=_count(runs, PipelineStatus.WAITING),
        quota=state.quota_by_account.get(user) or state.quota_by_account.get(project) or Quota(),
    )


def _count(runs: Iterable[PipelineRun], status: PipelineStatus) -> int:
    return sum(run.status is status for run in runs)
