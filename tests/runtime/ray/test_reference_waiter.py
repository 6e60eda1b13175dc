"""A wait for references ends with the first of them, or with a wake; here a reference is a plain future."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

pytest.importorskip("ray", reason="needs the ray extra: pip install 'rlmux[ray]'")
pytestmark = [pytest.mark.ray, pytest.mark.xdist_group("ray")]

from tests.waiting import LIMIT_S, until  # noqa: E402

from rlmux.runtime.ray.reference_waiter import ReferenceWaiter  # noqa: E402

_LONG_S = 10 * LIMIT_S
"""Longer than a test waits: a wait that ends was ended."""


class Reference(Future[None]):
    def __init__(self) -> None:
        super().__init__()
        self.num_callbacks = 0

    def future(self) -> Future[None]:
        return self

    def add_done_callback(self, fn: Callable[[Future[None]], object]) -> None:
        self.num_callbacks += 1
        super().add_done_callback(fn)


def done(references: Sequence[Reference]) -> list[Reference]:
    return [each for each in references if each.done()]


def test_a_wake_from_another_thread_ends_a_wait_and_leaves_its_references():
    waiter, reference = ReferenceWaiter(done), Reference()
    with ThreadPoolExecutor(1) as other:
        waiting = other.submit(waiter.wait, [reference], _LONG_S)
        until(lambda: reference.num_callbacks, "the wait")
        waiter.wake()
        until(waiting.done, "the end of the wait")
    assert waiting.result() == []


def test_the_first_arrival_ends_a_wait_and_all_that_are_ready_are_returned():
    waiter, references = ReferenceWaiter(done), [Reference() for _ in range(3)]
    references[2].set_result(None)
    with ThreadPoolExecutor(1) as other:
        assert other.submit(waiter.wait, references, _LONG_S).result(LIMIT_S) == [references[2]]
        waiting = other.submit(waiter.wait, references[:2], _LONG_S)
        references[0].set_exception(RuntimeError())
        until(waiting.done, "the end of the wait")
    assert waiting.result() == [references[0]]


def test_a_wake_before_a_wait_counts_for_it_and_once():
    waiter = ReferenceWaiter(done)
    waiter.wake()
    waiter.wake()
    assert waiter.wait([], _LONG_S) == []
    assert not waiter._news.is_set()


def test_a_reference_gets_one_callback_in_many_waits():
    waiter, reference = ReferenceWaiter(done), Reference()
    for _ in range(5):
        waiter.wake()
        waiter.wait([reference], _LONG_S)
    assert reference.num_callbacks == 1


def test_a_reference_that_a_wait_has_returned_wakes_no_later_one():
    waiter, reference = ReferenceWaiter(lambda references: references), Reference()
    waiter.wake()
    assert waiter.wait([reference], _LONG_S) == [reference]
    reference.set_result(None)
    assert not waiter._news.is_set()


def test_what_is_ready_without_word_is_found_at_the_timeout():
    waiter = ReferenceWaiter(lambda references: references)
    one: Any = Reference()
    assert waiter.wait([one], 0.0) == [one]
