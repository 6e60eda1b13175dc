"""The one way in which tests wait for what another thread or process brings about.

    until(is_so, "a step of `a`") ──▶ what is_so() returned, as soon as that is true
                                  └─▶ AssertionError: what was waited for, and what was seen last

A wait decides nothing by the clock: it goes on as soon as it can, and its limit is for what never comes.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import IO, Any, Protocol, TypeVar

T = TypeVar("T")
LIMIT_S = 120.0
_TAIL = 2000
"""Characters of an output that a failure shows."""


class Ending(Protocol):
    """A process that can be asked whether it has ended."""

    def poll(self) -> int | None:
        """Its exit code, None while it runs."""


def until(
    is_so: Callable[[], T],
    what: str,
    *,
    limit_s: float = LIMIT_S,
    seen: Callable[[], object] | None = None,
    poll_s: float = 0.02,
    process: Ending | None = None,
    not_yet: tuple[type[Exception], ...] = (),
) -> T:
    """Ask again and again; returns the first answer that is true.

    Fails after `limit_s`, and at once when `process` ends before. `seen`: tells in a failure how things stand; by
    default that is the last answer. `not_yet`: errors of `is_so` that are answers, too.
    """
    end_s = time.monotonic() + limit_s
    while True:
        # Whether it runs is asked first: what a process does last counts.
        has_ended = process is not None and process.poll() is not None
        is_late = time.monotonic() >= end_s
        try:
            last: object = (answer := is_so())
            if answer:
                return answer
        except not_yet as error:
            last = f"{type(error).__name__}: {error}"
        if has_ended or is_late:
            break
        time.sleep(poll_s)
    told = [f"its process ended before {what}" if has_ended else f"waited {limit_s:g} s for {what}"]
    told.append(f"seen last: {_seen(seen, last)}")
    if process is not None:
        told += _state_of(process)
    raise AssertionError("\n".join(told))


def _seen(seen: Callable[[], object] | None, last: object) -> str:
    if seen is None:
        return last if isinstance(last, str) else repr(last)
    try:
        return str(seen())
    except Exception as error:  # the wait has failed: this must not hide for what
        return f"{last!r}, and asking for more raised {type(error).__name__}: {error}"


def _state_of(process: Ending) -> list[str]:
    code = process.poll()
    told = ["its process still runs" if code is None else f"its exit code: {code}"]
    for name in ("stdout", "stderr"):
        stream = getattr(process, name, None)
        if stream is not None and not stream.closed:
            told.append(f"end of its {name}: {_tail_of(stream)}")
    return told


def _tail_of(stream: IO[Any]) -> str:
    """What a pipe holds now. Its end is not waited for: what the process started may hold it open."""
    number, data = stream.fileno(), b""
    os.set_blocking(number, False)
    try:
        while piece := os.read(number, 1 << 16):
            data += piece
    except BlockingIOError:
        pass
    finally:
        os.set_blocking(number, True)
    return data.decode(errors="replace")[-_TAIL:]
