"""Shared handler parameters: the caller, and common query parameters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

from fastapi import Depends, Query, Request

from rlmux.service.dashboard.auth.access import Principal


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


def words_of(text: str) -> list[str]:
    """The items of a `Words` parameter."""
    return [word for word in text.split(",") if word]
