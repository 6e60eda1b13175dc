"""The broker's ledger: a pool has one holder, fences rise, and a program leaves before it is granted again."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlmux.broker.permit_ledger import PoolState, Residency
from rlmux.core.errors import IllegalTransitionError


def ledger() -> Residency:
    return Residency(["gpu0", "gpu1"])


def hold(book: Residency, job: str, **need) -> int:
    """Grant and end, so that the job stays there; the fence."""
    fence = book.grant(job, need).fence
    book.end(fence, {})
    return fence


def test_programs_stay_where_they_were_granted_and_one_holds_the_pool():
    book = ledger()
    hold(book, "a", gpu0=4)
    book.grant("b", {"gpu0": 6})
    assert list(book.lodgers["gpu0"]) == ["a", "b"]
    assert not book.is_free("a", ["gpu0", "gpu1"])
    assert book.is_free("a", ["gpu1"])
    with pytest.raises(IllegalTransitionError, match="while another holds"):
        book.grant("a", {"gpu0": 4})


def test_one_that_is_leaving_is_not_granted_before_it_has_left():
    book = ledger()
    hold(book, "a", gpu0=6)
    book.request_leave("a", "gpu0")
    with pytest.raises(IllegalTransitionError, match="about to leave"):
        book.grant("a", {"gpu0": 6})
    book.left("a", "gpu0")
    book.grant("a", {"gpu0": 6})
    with pytest.raises(IllegalTransitionError, match="holds; accepted"):
        book.left("a", "gpu0")


def test_a_permit_of_an_earlier_broker_is_adopted_with_its_fence():
    book = ledger()
    book.adopt("a", ["gpu0"], 91)
    assert not book.is_free("b", ["gpu0"])
    book.end(91, {"gpu0": 4})
    assert book.grant("b", {"gpu0": 6}).fence == 92


JOBS = "abcde"
NEEDS = {"a": 3, "b": 4, "c": 5, "d": 9, "e": None}


def play(book: Residency, draw: random.Random, num_events: int) -> int:
    """A driver that makes random legal moves of five programs on two pools; the number of grants."""
    fences = [0]
    waiting: dict[str, dict[str, float | None]] = {}
    for _ in range(num_events):
        job = draw.choice(JOBS)
        permit = next((one for one in book.permits.values() if one.job == job), None)
        if permit is not None and draw.random() < 0.6:
            book.end(permit.fence, {pool: draw.randint(0, NEEDS[job] or 10) for pool in permit.pools})
        elif permit is None and job not in waiting:
            pools = draw.choice((["gpu0"], ["gpu1"], ["gpu0", "gpu1"], ["gpu1", "gpu0"]))
            waiting[job] = dict.fromkeys(pools, NEEDS[job])
        for name, lodgers in ((pool, dict(book.lodgers[pool])) for pool in book.lodgers):
            for other, one in lodgers.items():
                if one.state in (PoolState.LEAVING, PoolState.STUCK) and draw.random() < 0.5:
                    book.left(other, name) if draw.random() < 0.9 else book.fail_to_leave(other, name, "?")
        if draw.random() < 0.02:
            book.remove(job)
        for asking, need in list(waiting.items()):
            if any(is_leaving(book, asking, pool) for pool in need) or not book.is_free(asking, need):
                continue
            fences.append(book.grant(asking, need).fence)
            del waiting[asking]
        staying = [(pool, name) for pool in book.lodgers for name in book.lodgers[pool] if is_staying(book, name, pool)]
        if staying and draw.random() < 0.3:
            pool, name = draw.choice(staying)
            book.request_leave(name, pool)
        book.check()
    assert fences == sorted(set(fences))
    return len(fences) - 1


def is_leaving(book: Residency, job: str, pool: str) -> bool:
    return job in book.lodgers[pool] and book.lodgers[pool][job].state is PoolState.LEAVING


def is_staying(book: Residency, job: str, pool: str) -> bool:
    return book.lodgers[pool][job].state is PoolState.STAYS


@given(st.integers(0, 2**32))
def test_the_invariants_hold_whatever_five_programs_do(seed):
    play(ledger(), random.Random(seed), 60)


def test_the_invariants_hold_over_ten_thousand_events():
    assert play(ledger(), random.Random(27), 10_000) > 1000
