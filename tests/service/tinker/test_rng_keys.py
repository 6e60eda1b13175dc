"""A sample's random numbers are a function of what is asked, and of the client's own numbering."""

from __future__ import annotations

import json

from rlmux.service.tinker.ledger import LoggedRequest
from rlmux.service.tinker.reorder_buffer import InOrder
from rlmux.service.tinker.requests import is_repeated
from rlmux.service.tinker.rng_keys import Draws


def test_requests_come_out_by_number_whatever_order_they_arrive_in():
    order: InOrder[str] = InOrder(1)
    assert order.put(3, "c") == []
    assert order.put(2, "b") == []
    assert order.put(1, "a") == ["a", "b", "c"]
    assert order.put(4, "d") == ["d"]


def test_equal_prompts_differ_by_their_occurrence_and_nothing_else():
    first, again = (Draws(model_seed=1, origin="0 1") for _ in range(2))
    keys = [first.key([5, 6], None), first.key([7], None), first.key([5, 6], None)]
    assert len(set(keys)) == 3
    assert [again.key([7], None), again.key([5, 6], None), again.key([5, 6], None)] == [keys[1], keys[0], keys[2]]
    assert Draws(model_seed=2, origin="0 1").key([7], None) != keys[1]
    assert Draws(model_seed=1, origin="0 2").key([7], None) != keys[1]


def test_a_seed_that_is_given_is_the_key():
    draws = Draws(model_seed=1, origin="0 1")
    assert [draws.key([5], 9), draws.key([5], 9)] == [9, 9]


def test_a_save_that_is_sent_again_may_number_its_sampler_anew():
    def body(**fields: object) -> bytes:
        return json.dumps({"model_id": "s0:train:0", "seq_id": 4, **fields}).encode()

    def known(**fields: object) -> LoggedRequest:
        return LoggedRequest("s0:train:0:4", path, body(**fields), "", "lab", 0.0)

    path = "save_weights_for_sampler"
    first = known(sampling_session_seq_id=1)
    assert is_repeated(path, first, body(sampling_session_seq_id=3, kind="snapshot"))
    assert not is_repeated(path, first, body(path="kept"))
    assert not is_repeated(path, known(path="kept"), body(path="other"))
    assert not is_repeated("save_weights", known(path="kept"), body(path="kept", overwrite=True))
