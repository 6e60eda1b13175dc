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
        rows = [(used.account.project, used.account.user, used.pool, used.device_s, used.today_s) for used in usage]
        spent = tuple(
            (entry.account.project, entry.account.user, entry.usd, entry.begun_s) for entry in self._scheduler.spent()
        )
        self._log.append_note(now_s, UsageNote(at_s=at_s, accounts=rows, spent=spent))
        if is_end or now_s >= self._shown_s + SHOWN_EVERY_S:
            self._shown_s = now_s
            self._log.append_note(now_s, usage_of(self._scheduler))


def usage_of(scheduler: Scheduler) -> AccountsNote:
    """A row for each project and user with usage or waiting work."""
    rows = []
    for row in scheduler.accounts():
        quota = {
            "max_running": row.quota.max_running,
            "max_waiting": row.quota.max_waiting,
            "max_devices": row.quota.max_devices,
            "device_hours_a_day": row.quota.device_hours_a_day,
            "max_usd_per_hour": row.quota.max_usd_per_hour,
            "budget_usd": row.quota.budget_usd,
            "budget_days": None if row.quota.budget_usd is None else row.quota.budget_period_s / DAY_S,
        }
        rows.append(
            {
                "project": row.account.project,
                "user": row.account.user,
                "weight": row.weight,
                "guarantee": row.guarantee,
                "share": row.share,
                "fair_share": row.fair_share,
                "is_over_share": row.is_over_share,
                "device_hours": _hours(row.charged_by_pool),
                "used_hours": _hours(row.used_by_pool),
                "device_hours_today": row.today_s / 3600.0,
                "running": row.num_running,
                "waiting": row.num_waiting,
                "quota": quota,
                "usd": row.usd,
                "spent_usd": row.spent_usd,
                "budget_begins_s": row.budget_begins_s,
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
