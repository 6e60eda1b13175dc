"""Calls the user's code with a time limit, and turns every failure into one line.

    call_each([(name, call), ...])        call ──▶ result | awaitable      each limited by an alarm signal
    call_and_await([(name, call), ...])   the same, awaitables awaited     those that wait, wait together
    PendingCalls                          awaitables that are under way while more are begun
    load_callable(key, "module:name")     the function or class that a key of the file names

Rewards and environments run in the main thread of the pipeline's env worker, so an alarm can end a call that hangs.
Code that holds the interpreter inside C is beyond it; ending the process is not: `user_code/reward_pool.py` does so.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import signal
import threading
import traceback
from collections.abc import Awaitable, Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any, Generic, TypeVar

from rlmux.core.errors import PipelineError, RlmuxError, UserError

_REPEAT_S = 1.0
"""Seconds between two alarms: the user's code may have swallowed the first."""

_GRACE_S = 1.0
"""Seconds that the alarm leaves to the timers of awaitables; it is for one that never yields."""

_LINGER_S = 0.001
"""Seconds to wait on after the first awaitable is done: others are often about to be."""

K = TypeVar("K", bound=Hashable)


_tell: list[Callable[[str], None]] = []
"""Where this process says which call of the user's code is under way: it may be the last that it does."""


class _OutOfTime(BaseException):
    """Not an Exception, so that an `except Exception` in the user's code lets it through."""


def tell_calls_to(tell: Callable[[str], None]) -> None:
    """Pass the name of each call to `tell` before it is made, and "" after it."""
    _tell[:] = [tell]


def _nothing() -> None:
    """Default `on_answer`."""


def call_each(
    calls: Sequence[tuple[str, Callable[[], Any]]], limit_s: float, on_answer: Callable[[], None] = _nothing
) -> list[Any]:
    """Make each named call and return the results, awaitables as they are, in order. `on_answer`: called after each.

    Raises PipelineError for the first that fails or takes longer than `limit_s` seconds.
    """
    results: list[Any] = []
    try:
        with _alarm() as ring_after:
            for name, call in calls:
                with _failures_named(name, limit_s):
                    ring_after(limit_s)
                    results.append(call())
                    ring_after(0)
                on_answer()
    except BaseException:  # the alarm and an interrupt, too: coroutines that are never awaited would warn
        for result in results:
            if inspect.iscoroutine(result):
                result.close()
        raise
    return results


def call_and_await(
    calls: Sequence[tuple[str, Callable[[], Any]]], limit_s: float, on_answer: Callable[[], None] = _nothing
) -> list[Any]:
    """Make each named call, await the awaitables together, and return the results in order. `on_answer` as above.

    Raises PipelineError for the first that fails or takes longer than `limit_s` seconds.
    """
    results = call_each(calls, limit_s, on_answer)
    pending: PendingCalls[int] = PendingCalls(limit_s)
    for place, (result, (name, _)) in enumerate(zip(results, calls, strict=True)):
        if inspect.isawaitable(result):
            pending.begin(place, name, result)
    for place, result in pending.wait().items():
        results[place] = result
    return results


def load_callable(key: str, spec: str, kind: str) -> Callable[..., Any]:
    """Load `module:name`, the value of this key of the file, from sys.path. Raises UserError if it is missing.

    `kind`: "function" or "class", for errors.
    """
    module_name, _, name = spec.partition(":")
    if not module_name or not name:
        raise UserError(f"{key}: {spec!r}; accepted: module:{kind}, such as my_module:my_{kind}")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise UserError(f"{key}: {spec!r} imports {error.name!r}, which is not installed") from error
        raise UserError(
            f"{key}: no module {module_name!r} beside the spec file, in the working folder or installed"
        ) from None
    except Exception as error:  # the user's module may raise anything
        raise UserError(f"{key}: importing {module_name!r} raised {type(error).__name__}: {error}") from error
    found = getattr(module, name, None)
    if not callable(found):
        is_listed = inspect.isclass if kind == "class" else inspect.isfunction
        names = ", ".join(each for each, value in vars(module).items() if is_listed(value))
        raise UserError(f"{key}: {module_name!r} has no {kind} {name!r}; it has: {names or 'none'}")
    return found  # type: ignore[no-any-return]


class PendingCalls(Generic[K]):
    """Awaitables that are under way, by key. They advance during `wait` only; the event loop lives as long as any."""

    def __init__(self, limit_s: float) -> None:
        """`limit_s`: seconds that each awaitable may take, counted from its first `wait`."""
        self._limit_s = limit_s
        self._loop: asyncio.AbstractEventLoop | None = None
        self._tasks: dict[K, tuple[str, asyncio.Task[Any]]] = {}

    def __contains__(self, key: K) -> bool:
        return key in self._tasks

    def begin(self, key: K, name: str, awaitable: Awaitable[Any]) -> None:
        """Add an awaitable; errors begin with `name`."""
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
        self._tasks[key] = name, self._loop.create_task(_limited(name, awaitable, self._limit_s))

    def wait(self, patience_s: float | None = None, *, keeps_errors: bool = False) -> dict[K, Any]:
        """Results by key, in the order begun: all of them (None), or what is there after the first or `patience_s`.

        Raises PipelineError for the first that failed, and the others are cancelled then; with `keeps_errors` it is the
        result instead, except where one that holds the interpreter cannot be named.
        """
        if not self._tasks:
            return {}
        assert self._loop is not None
        names = [name for name, _ in self._tasks.values()]
        try:
            with _alarm() as ring_after, _failures_named(" and ".join(names[:2]), self._limit_s):
                ring_after(self._limit_s + _GRACE_S)
                tasks = [task for _, task in self._tasks.values()]
                self._loop.run_until_complete(_wait_for_some(tasks, patience_s, ends_with_error=not keeps_errors))
            done = {key: _result_of(task, keeps_errors) for key, (_, task) in self._tasks.items() if task.done()}
        except BaseException:  # the alarm and an interrupt, too, end the tasks that are under way
            self._close()
            raise
        for key in done:
            del self._tasks[key]
        if not self._tasks:
            self._close()
        return done

    def drop(self, key: K) -> None:
        """Cancel an awaitable whose result is no longer needed."""
        assert self._loop is not None
        self._loop.run_until_complete(_cancel([self._tasks.pop(key)[1]]))
        if not self._tasks:
            self._close()

    def _close(self) -> None:
        assert self._loop is not None
        self._loop.run_until_complete(_cancel([task for _, task in self._tasks.values()]))
        self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        self._loop.close()
        self._loop, self._tasks = None, {}


@contextmanager
def _failures_named(name: str, limit_s: float) -> Iterator[None]:
    """Anything that the body raises, the alarm included, becomes a `PipelineError` that begins with `name`."""
    for tell in _tell:
        tell(name)
    try:
        yield
    except _OutOfTime:
        raise _out_of_time(name, limit_s) from None
    except RlmuxError:
        raise
    except (Exception, SystemExit) as error:  # the user's code may raise anything
        raise PipelineError(f"{name} raised {_one_line(error)}") from error
    finally:
        for tell in _tell:
            tell("")


@contextmanager
def _alarm() -> Iterator[Callable[[float], None]]:
    """Yields a function that sets the alarm so many seconds ahead; 0 stops it.

    Signals arrive in the main thread only; in any other, time is not limited.
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


def _result_of(task: asyncio.Task[Any], keeps_errors: bool) -> Any:
    error = task.exception() if keeps_errors else None
    return error if isinstance(error, PipelineError) else task.result()


async def _wait_for_some(
    tasks: Sequence[asyncio.Task[Any]], patience_s: float | None, *, ends_with_error: bool
) -> None:
    """Return once all are done or, with `ends_with_error`, one failed; with `patience_s`, soon after the first is done
    or when it is over."""
    until = asyncio.FIRST_EXCEPTION if ends_with_error else asyncio.ALL_COMPLETED
    if patience_s is not None:
        until = asyncio.FIRST_COMPLETED
    done, left = await asyncio.wait(tasks, timeout=patience_s, return_when=until)
    if done and left and patience_s is not None:
        await asyncio.sleep(_LINGER_S)


async def _cancel(tasks: Sequence[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def _limited(name: str, awaitable: Awaitable[Any], limit_s: float) -> Any:
    timer = asyncio.timeout(limit_s)
    try:
        async with timer:
            return await awaitable
    except RlmuxError:
        raise
    except Exception as error:  # as above
        if timer.expired():
            raise _out_of_time(name, limit_s) from None
        raise PipelineError(f"{name} raised {_one_line(error)}") from error


def _out_of_time(name: str, limit_s: float) -> PipelineError:
    return PipelineError(f"{name} did not return within {limit_s:g} s (task.reward_timeout_s)")


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split())[:200]
    where = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {text} (at {where.filename}:{where.lineno})"
