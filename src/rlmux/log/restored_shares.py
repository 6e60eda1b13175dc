"""The shares in force and what was used under them, as events for a scheduler that continues, or predicts, a run.

RunState.shares, RunState.usage ──shares_events──▶ SharesSet, UsageRestored
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rlmux.core.decayed_usage import DecayedUsage
from rlmux.core.events import Event, SharesSet, UsageRestored
from rlmux.core.model import Account
from rlmux.core.queue.quotas import DAY_S
from rlmux.core.queue_order import AccountSpent, AccountUsage, ShareSettings
from rlmux.log.notes import UsageNote
from rlmux.log.value_codec import from_fields


def shares_events(
    shares: ShareSettings | Mapping[str, Any] | None, usage: UsageNote | None, now_s: float
) -> list[Event]:
    """A scheduler's first events: the shares in force, and usage in earlier parts of the run.

    `shares`: settings, or the fields of an event `SharesSet` as the log has them.
    """
    events: list[Event] = []
    if isinstance(shares, ShareSettings):
        events.append(SharesSet(shares=shares))
    elif shares is not None:
        event = from_fields({**shares})
        assert isinstance(event, SharesSet)
        events.append(event)
    if usage is not None:
        at_s, half_life_s = usage.at_s, _half_life_s(events)
        is_same_day = at_s // DAY_S == now_s // DAY_S
        restored = tuple(
            AccountUsage(
                account=Account(project, user),
                pool=pool,
                device_s=DecayedUsage(device_s, at_s, half_life_s).at(now_s),
                today_s=today_s if is_same_day else 0.0,
            )
            for project, user, pool, device_s, today_s in usage.accounts
        )
        spent = tuple(
            AccountSpent(account=Account(project, user), usd=usd, begun_s=begun_s)
            for project, user, usd, begun_s in usage.spent
        )
        events.append(UsageRestored(usage=restored, spent=spent))
    return events


def _half_life_s(events: Sequence[Event]) -> float:
    settings = events[0].shares if events and isinstance(events[0], SharesSet) else ShareSettings()
    return settings.half_life_s
