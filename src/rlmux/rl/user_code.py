"""Calls the user's code: bounded in time, and every way it can go wrong becomes one line.

    settle([(name, call), ...])    call ──▶ result                      each limited by an alarm signal
                                        └─▶ awaitable ──┬──▶ result     those that wait, wait together
                                                        └──▶ ...

Rewards and environments run in the main thread of the pipeline's own host process, so an alarm can end a call
that hangs. Code that holds the interpreter inside C is beyond it; ending the host process is not.
"""

from __future__ import annotations

import asyncio
import inspect
import signal
import threading
import traceback
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

from rlmux.core.errors import PipelineError, RlmuxError

_REPEAT_S = 1.0
"""The alarm rings again, in case the user's code swallowed it."""

_GRACE_S = 1.0
"""Awaitables have their own timers; the alarm behind them is for one that never yields."""


class _OutOfTime(BaseException):
    """Not an Exception, so that an `except Exception` in the user's code lets it through."""


def settle(calls: Sequence[tuple[str, Callable[[], Any]]], limit_s: float) -> list[Any]:
    """Make each named call and return the results in order; the first that fails is a `PipelineError`."""
    results: list[Any] = []
    try:
        with _alarm() as ring_after:
            for name, call in calls:
                with _blamed(name, limit_s):
                    ring_after(limit_s)
                    results.append(call())
                    ring_after(0)
            waiting = [place for place, result in enumerate(results) if inspect.isawaitable(result)]
            if waiting:
                names = [calls[place][0] for place in waiting]
                with _blamed(" and ".join(names[:2]), limit_s):
                    ring_after(limit_s + _GRACE_S)
                    settled = asyncio.run(_gather(names, [results[place] for place in waiting], limit_s))
                for place, result in zip(waiting, settled, strict=True):
                    results[place] = result
    except BaseException:
        for result in results:
            if inspect.iscoroutine(result):
                result.close()
        raise
    return results


@contextmanager
def _blamed(name: str, limit_s: float) -> Iterator[None]:
    """Whatever the body raises, the alarm included, is a `PipelineError` that begins with `name`."""
    try:
        yield
    except _OutOfTime:
        raise _out_of_time(name, limit_s) from None
    except RlmuxError:
        raise
    except Exception as error:
        raise PipelineError(f"{name} raised {_one_line(error)}") from error


@contextmanager
def _alarm() -> Iterator[Callable[[float], None]]:
    """Gives a function that sets the alarm so many seconds ahead; 0 stops it.

    Off the main thread no signal can be had, and time is not limited.
    """
    if threading.current_thread() is not threading.main_thread():
        yield lambda seconds: None
        return
    is_on = True

    def ring(signum: int, frame: FrameType | None) -> None:
        if is_on:
            raise _OutOfTime

    def ring_after(seconds: float) -> None:
        signal.setitimer(signal.ITIMER_REAL, seconds, _REPEAT_S if seconds else 0)

    previous = signal.signal(signal.SIGALRM, ring)
    try:
        yield ring_after
    finally:
        is_on = False
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


async def _gather(names: Sequence[str], awaitables: Sequence[Awaitable[Any]], limit_s: float) -> list[Any]:
    return await asyncio.gather(
        *(_named(name, awaitable, limit_s) for name, awaitable in zip(names, awaitables, strict=True))
    )


async def _named(name: str, awaitable: Awaitable[Any], limit_s: float) -> Any:
    timer = asyncio.timeout(limit_s)
    try:
        async with timer:
            return await awaitable
    except RlmuxError:
        raise
    except Exception as error:
        if timer.expired():
            raise _out_of_time(name, limit_s) from None
        raise PipelineError(f"{name} raised {_one_line(error)}") from error


def _out_of_time(name: str, limit_s: float) -> PipelineError:
    return PipelineError(f"{name} did not return within {limit_s:g} s (task.reward_timeout_s)")


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split())[:200]
    where = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {text} (at {where.filename}:{where.lineno})"
