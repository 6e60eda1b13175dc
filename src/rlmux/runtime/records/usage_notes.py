"""Usage of projects and users, kept in the log for resumed runs.

    run ── UsageNotes, every half minute and at the end ─▶ note `usage` ─▶ RunState ── shares_events ─▶ scheduler
                     └─ every ten minutes and at the end ─▶ note `accounts`, for people: what `rlmux usage` prints

A killed run loses the usage of its last half minute.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rlmux.core.queue.quotas import DAY_S
from rlmux.core.scheduler import Scheduler
from rlmux.log.notes import AccountsNote, UsageNote
from rlmux.log.run_log import RunLog

EVERY_S = 30.0
"""Seconds between two notes `usage`."""
SHOWN_EVERY_S = 600.0
"""Seconds between two notes `accounts`."""


class UsageNotes:
    """A listener that writes the notes."""

    def __init__(self, scheduler: Scheduler, log: RunLog) -> None:
        self._scheduler = scheduler
        self._log = log
        self._written_s = self._shown_s = 0.0

    def update(self, now_s: float, events: Sequence[object], actions: Sequence[object], notes: object) -> None:
        if actions and now_s >= self._written_s + EVERY_S:
            self.write(now_s, is_end=False)

    def write(self, now_s: float, *, is_end: bool = True) -> None:
        """Write the usage notes, if usage is counted. `now_s`: of the note. `is_end`: the run ends with it."""
        usage = self._scheduler.usage()
        if not usage:
            return
        self._written_s = now_s
        at_s = self._scheduler.query.now_s
        rows = [(one.account.project, one.account.user, one.pool, one.device_s, one.today_s) for one in usage]
        spent = tuple((one.account.project, one.account.user, one.usd, one.begun_s) for one in self._scheduler.spent())
        self._log.append_note(now_s, UsageNote(at_s=at_s, accounts=rows, spent=spent))
        if is_end or now_s >= self._shown_s + SHOWN_EVERY_S:
            self._shown_s = now_s
            self._log.append_note(now_s, usage_of(self._scheduler))


def usage_of(scheduler: Scheduler) -> AccountsNote:
    """A row for each project and user with usage or waiting work."""
    rows = []
    for one in scheduler.accounts():
        quota = {
            "max_running": one.quota.max_running,
            "max_waiting": one.quota.max_waiting,
            "max_devices": one.quota.max_devices,
            "device_hours_a_day": one.quota.device_hours_a_day,
            "max_usd_per_hour": one.quota.max_usd_per_hour,
            "budget_usd": one.quota.budget_usd,
            "budget_days": None if one.quota.budget_usd is None else one.quota.budget_period_s / DAY_S,
        }
        rows.append(
            {
                "project": one.account.project,
                "user": one.account.user,
                "weight": one.weight,
                "guarantee": one.guarantee,
                "share": one.share,
                "fair_share": one.fair_share,
                "is_over_share": one.is_over_share,
                "device_hours": _hours(one.charged_by_pool),
                "used_hours": _hours(one.used_by_pool),
                "device_hours_today": one.today_s / 3600.0,
                "running": one.num_running,
                "waiting": one.num_waiting,
                "quota": quota,
                "usd": one.usd,
                "spent_usd": one.spent_usd,
                "budget_begins_s": one.budget_begins_s,
            }
        )
    bill = scheduler.bill()
    return AccountsNote(
        accounts=rows,
        at_s=scheduler.query.now_s,
        half_life_hours=bill.half_life_s / 3600.0,
        held_hours=_hours(bill.held_by_pool),
    )


def _hours(by_pool: Mapping[str, float]) -> dict[str, float]:
    return {pool: device_s / 3600.0 for pool, device_s in by_pool.items()}
