"""A pool as clients of the time-slice orchestrator see it, who call it a group: read from the desk, never kept."""

from __future__ import annotations

import time
from dataclasses import dataclass

from rlmux.broker.desk import Desk
from rlmux.broker.residency import Place
from rlmux.core.model import PipelineId


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupView:
    """One pool at one moment."""

    holder: str
    """Program that holds it; empty where none does."""
    held_since: float
    """Unix time of its permit; 0.0 where none holds it."""
    last: str
    """Program that was granted it last and is on it still; empty where there is none."""
    num_waiting: int
    """Programs that ask for it and wait."""
    places: tuple[tuple[str, Place | None], ...]
    """Programs on it, and those that wait for it, with how each lies there: None where it does not."""


def view_of(desk: Desk, pool: str) -> GroupView:
    """Called by the desk's own thread."""
    programs = desk.roster.programs.values()
    waiting = [one.id for one in programs if one.ask is not None and one.fence is None and pool in one.ask.pools]
    lodgers = desk.ledger.lodgers[pool]
    holder = desk.ledger.holder(pool) or ""
    held = desk.roster.programs.get(PipelineId(holder))
    places: dict[str, Place | None] = {name: lodger.place for name, lodger in lodgers.items()}
    return GroupView(
        holder=holder,
        held_since=time.time() - (desk.now_s() - held.granted_s) if held else 0.0,
        last=next(reversed(lodgers), ""),
        num_waiting=len(waiting),
        places=(*places.items(), *((name, None) for name in waiting if name not in places)),
    )
