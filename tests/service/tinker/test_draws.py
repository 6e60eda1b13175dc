"""A sample's random numbers are a function of what is asked, and of the client's own numbering."""

from __future__ import annotations

from rlmux.service.tinker.draws import Draws
from rlmux.service.tinker.in_order import InOrder


def test_requests_come_out_by_number_whatever_order_they_arrive_in():
    order: InOrder[str] = InOrder(1)
    assert order.put(3, "c") == []
    assert order.put(2, "b") == []
    assert order.put(1, "a") == ["a", "b", "c"]
    assert order.put(4, "d") == ["d"]


def test_equal_prompts_differ_by_their_occurrence_and_nothing_else():
    first, again = (Draws(model_seed=1, sampler_number=0) for _ in range(2))
    keys = [first.key([5, 6], None), first.key([7], None), first.key([5, 6], None)]
    assert len(set(keys)) == 3
    assert [again.key([7], None), again.key([5, 6], None), again.key([5, 6], None)] == [keys[1], keys[0], keys[2]]
    assert Draws(model_seed=2, sampler_number=0).key([7], None) != keys[1]
    assert Draws(model_seed=1, sampler_number=1).key([7], None) != keys[1]


def test_a_seed_that_is_given_is_the_key():
    draws = Draws(model_seed=1, sampler_number=0)
    assert [draws.key([5], 9), draws.key([5], 9)] == [9, 9]
