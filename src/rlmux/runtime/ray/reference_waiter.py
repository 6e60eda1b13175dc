"""Waits for references to become ready, and ends a wait early on a call from another thread.

    reference ── ready, and its value is on this node ──▶ Ray's thread ──┐
    wake()    ── any thread ─────────────────────────────────────────────┴──▶ event ──▶ wait() returns what is ready

`ray.wait` itself cannot be interrupted. Each reference gets one callback, however many waits it takes part in.

A module of its own: tested without a Ray cluster, by references that are plain futures.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import ray


class ReferenceWaiter:
    """References with a callback, and the event that ends a wait. One thread waits; any thread may wake it."""

    def __init__(self, find_ready: Callable[[Sequence[Any]], Sequence[Any]] = lambda found: _ready(found)) -> None:
        """`find_ready`: the ready ones of some references; never waits."""
        self._find_ready = find_ready
        self._news = threading.Event()
        self._watched: set[Any] = set()
        """References with a callback that has not counted yet."""

    def wait(self, references: Sequence[Any], timeout_s: float) -> Sequence[Any]:
        """References that are ready, after at most `timeout_s` seconds; none if a wake came first."""
        self._watched &= set(references)
        for reference in references:
            if reference not in self._watched:
                self._watch(reference)
        self._news.wait(timeout_s)
        self._news.clear()
        ready = self._find_ready(references) if references else []
        self._watched -= set(ready)
        return ready

    def wake(self) -> None:
        """End the present wait, or the next one."""
        self._news.set()

    def _watch(self, reference: Any) -> None:
        self._watched.add(reference)

        def arrive(_: Any) -> None:
            if reference in self._watched:  # else an earlier wait returned it
                self._news.set()

        reference.future().add_done_callback(arrive)


def _ready(references: Sequence[Any]) -> Sequence[Any]:
    ready, _ = ray.wait(list(references), num_returns=len(references), timeout=0, fetch_local=True)
    return ready
