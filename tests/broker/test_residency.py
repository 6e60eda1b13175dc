"""The broker's ledger: no more on a pool than it has, nobody leaves for nothing, fences rise."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlmux.broker.residency import Place, Residency
from rlmux.core.errors import IllegalTransitionError


def ledger(gpu0: float = 10, gpu1: float = 10) -> Residency:
    return Residency({"gpu0": gpu0, "gpu1": gpu1})


def hold(book: Residency, job: str, **need) -> int:
    """Grant and end, so that the job stays there; the fence."""
    fence = book.grant(job, need).fence
    book.end(fence, {})
    return fence


def test_a_program_stays_where_nobody_needs_its_room():
    book = ledger()
    hold(book, "a", gpu0=4)
    assert book.leavers("b", {"gpu0": 6}) == {"gpu0": []}
    hold(book, "b", gpu0=6)
    assert list(book.lodgers["gpu0"]) == ["a", "b"]


def test_the_least_recently_granted_leaves_first_and_no_more_than_needed():
    book = ledger()
    for job, need in (("a", 2), ("b", 3), ("c", 5)):
        hold(book, job, gpu0=need)
    hold(book, "a", gpu0=2)
    assert book.leavers("d", {"gpu0": 3}) == {"gpu0": ["b"]}
    assert book.leavers("d", {"gpu0": 4}) == {"gpu0": ["c"]}  # b alone is not enough, and then b may stay
    assert book.leavers("d", {"gpu0": 8}) == {"gpu0": ["b", "c"]}
    assert book.leavers("d", {"gpu0": 9}) == {"gpu0": ["b", "c", "a"]}


def test_a_need_of_unknown_size_fills_the_pool_and_an_unlimited_pool_has_room_for_all():
    book = ledger(gpu1=math.inf)
    hold(book, "a", gpu0=1, gpu1=None)
    assert book.leavers("b", {"gpu0": None}) == {"gpu0": ["a"]}
    assert book.leavers("b", {"gpu1": None}) == {"gpu1": []}


def test_nobody_leaves_for_one_that_could_not_be_granted_all_the_same():
    book = ledger()
    hold(book, "a", gpu0=5)
    hold(book, "b", gpu1=5)
    book.fail_to_leave("b", "gpu1", "its hook raised")
    assert book.leavers("c", {"gpu0": 9, "gpu1": 9}) is None
    held = book.grant("b", {"gpu0": 5})
    assert book.leavers("c", {"gpu0": 9}) is None
    book.end(held.fence, {})
    assert book.leavers("c", {"gpu0": 6}) == {"gpu0": ["a", "b"]}


def test_one_that_is_stuck_keeps_the_pool_from_others_and_not_from_itself():
    book = ledger()
    hold(book, "a", gpu0=6)
    book.tell_to_leave("a", "gpu0")
    book.fail_to_leave("a", "gpu0", "freed nothing")
    assert book.leavers("b", {"gpu0": 6}) is None
    assert book.leavers("a", {"gpu0": 6}) == {"gpu0": []}
    book.remove("a")
    assert book.leavers("b", {"gpu0": 6}) == {"gpu0": []}


def test_no_grant_before_all_have_left():
    book = ledger()
    hold(book, "a", gpu0=6)
    book.tell_to_leave("a", "gpu0")
    with pytest.raises(IllegalTransitionError, match="before"):
        book.grant("b", {"gpu0": 6})
    with pytest.raises(IllegalTransitionError, match="about to leave"):
        book.grant("a", {"gpu0": 6})
    book.left("a", "gpu0")
    book.grant("b", {"gpu0": 6})
    with pytest.raises(IllegalTransitionError, match="not there"):
        book.left("a", "gpu0")


def test_a_permit_of_an_earlier_broker_is_adopted_with_its_fence():
    book = ledger()
    book.adopt("a", ["gpu0"], 91)
    assert book.leavers("b", {"gpu0": 1}) is None
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
                if one.place in (Place.LEAVING, Place.STUCK) and draw.random() < 0.5:
                    book.left(other, name) if draw.random() < 0.9 else book.fail_to_leave(other, name, "?")
        if draw.random() < 0.02:
            book.remove(job)
        for asking, need in list(waiting.items()):
            if any(
                book.lodgers[pool].get(asking, None) and book.lodgers[pool][asking].place is Place.LEAVING
                for pool in need
            ):
                continue
            leaving = book.leavers(asking, need)
            if leaving is None:
                continue
            if not any(leaving.values()):
                fences.append(book.grant(asking, need).fence)
                del waiting[asking]
                continue
            for pool, leavers in leaving.items():
                check_each_is_needed(book, asking, pool, need[pool], leavers)
                for other in leavers:
                    if book.lodgers[pool][other].place is Place.STAYS:
                        book.tell_to_leave(other, pool)
        book.check()
        assert all(place is not Place.HOLDS for place in places_of_leavers(book))
    assert fences == sorted(set(fences))
    return len(fences) - 1


def check_each_is_needed(book, asking, pool, need, leavers):
    others = {name: one for name, one in book.lodgers[pool].items() if name != asking}
    free = book.capacity_by_pool[pool] - sum(one.num_bytes for one in others.values()) - book.size(pool, need)
    free += sum(others[name].num_bytes for name in leavers)
    new = [others[name].num_bytes for name in leavers if others[name].place is Place.STAYS]
    assert free >= 0
    assert all(free - num_bytes < 0 for num_bytes in new)


def places_of_leavers(book):
    return [one.place for lodgers in book.lodgers.values() for one in lodgers.values() if one.reason]


@given(st.integers(0, 2**32))
def test_the_invariants_hold_whatever_five_programs_do(seed):
    play(ledger(), random.Random(seed), 60)


def test_the_invariants_hold_over_ten_thousand_events():
    assert play(ledger(), random.Random(27), 10_000) > 1000
