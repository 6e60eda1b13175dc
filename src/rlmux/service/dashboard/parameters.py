"""Shared handler parameters: the caller, and common query parameters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

from fastapi import Depends, Query, Request

from rlmux.report.timeline.run_clock import unix_from
from rlmux.service.dashboard.auth.access import Principal
from rlmux.service.index.selection import FILTERS, NO_VALUE, STATUSES, Selection
from rlmux.service.problems import ProblemError


@dataclass(frozen=True, slots=True, kw_only=True)
class CallerContext:
    """Context of one admitted request."""

    path: Mapping[str, str]
    """Path parameters by name."""
    principal: Principal | None
    address: str
    """Network address of the caller."""
    headers: Mapping[str, str]
    cookie: str
    """The session's secret; empty without one."""
    is_https: bool
    """Whether the caller uses TLS, to this server or to its proxy."""


async def _caller_context(request: Request) -> CallerContext:
    caller: CallerContext = request.state.caller
    return caller


Caller = Annotated[CallerContext, Depends(_caller_context)]
"""Handler parameter with the caller's context."""
Limit = Annotated[int, Query(ge=1, le=500)]
Cursor = Annotated[int, Query(ge=0, le=2**53)]
Line = Annotated[str | None, Query(max_length=512)]
Words = Annotated[str, Query(max_length=4096, description="words with commas between them")]
SECONDS = Query(ge=-1e10, le=1e10, allow_inf_nan=False, description="seconds of the run's clock")
Seconds = Annotated[float | None, SECONDS]


_NONE_HELP = f"words with commas between them; {NO_VALUE} for none"
FilterWords = Annotated[str, Query(max_length=4096, description=_NONE_HELP)]
_TIME_HELP = "a date or an ISO time, in UTC where it has no zone"


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineFilters:
    """Query parameters that choose pipelines."""

    lane: Line = None
    status: Words = ""
    name: Line = None
    user: FilterWords = ""
    project: FilterWords = ""
    label: FilterWords = ""
    task: FilterWords = ""
    since: Annotated[str, Query(max_length=64, description=f"earliest submission: {_TIME_HELP}")] = ""
    until: Annotated[
        str, Query(max_length=64, description=f"latest submission, a date's day included: {_TIME_HELP}")
    ] = ""

    def selection(self) -> Selection:
        """Raises ProblemError for an unknown status, and for text that is no time."""
        for status in words_of(self.status):
            if status not in STATUSES:
                raise ProblemError(400, f"no status {status[:80]!r}", where="?status", accepted=", ".join(STATUSES))
        return Selection(
            words={each: frozenset(words_of(getattr(self, each))) for each in FILTERS},
            name=self.name or "",
            since=_time(self.since, "since", is_end=False),
            until=_time(self.until, "until", is_end=True),
        )


Filters = Annotated[PipelineFilters, Depends()]


def _time(text: str, name: str, *, is_end: bool) -> float | None:
    if not text:
        return None
    found = unix_from(text, is_end=is_end)
    if found is None:
        raise ProblemError(
            400,
            f"no time {text[:80]!r}",
            where=f"?{name}",
            accepted="2026-11-29, 2026-11-29T14:00 or 2026-11-29T14:00Z",
        )
    return found


def words_of(text: str) -> list[str]:
    """The items of a `Words` parameter."""
    return [word for word in text.split(",") if word]
