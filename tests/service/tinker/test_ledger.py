"""What clients asked and got is kept while there is room, and what a restart needs always."""

from __future__ import annotations

import asyncio
import random
import sqlite3
import time
from pathlib import Path
from typing import Any

import pytest
from tests.service.clients import training_body
from tests.service.tinker.test_front import sample
from tests.service.tinker.test_random_requests import Place, Working, as_json

from rlmux.service.served_verification import _record, _verify_one
from rlmux.service.tinker.codec import read_head, write_head
from rlmux.service.tinker.ledger import EMPTIED, Ledger, LoggedRequest

KB = 1000
LATER_S = 1000.0
"""Seconds after which no client asks again for what it was told."""


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path / "front", host=Working())


async def step(place: Place, session: str, number: int) -> None:
    """A loss, its update and a sample, all carried out and told, with answers as large as losses have them."""
    model = f"{session}:train:0"
    await place.post("forward_backward", training_body(model, 2 * number + 1, seed=number))
    await place.post("optim_step", as_json(model_id=model, seq_id=2 * number + 2, adam_params={"learning_rate": 0.1}))
    await place.post("asample", sample(session, number))
    assert isinstance(place.host, Working)
    place.front.futures.settle(f"{model}:{2 * number + 1}", b"x" * 20 * KB, None)
    while place.host.do_one(random.Random(0)):
        pass
    for request_id in (f"{model}:{2 * number + 1}", f"{session}:sample:0:{number}"):
        assert (await place.post("retrieve_future", as_json(request_id=request_id))).status_code == 200


def compact(place: Place, max_bytes: int, later_s: float = LATER_S) -> int:
    return place.ledger.compact(max_bytes, write_head, time.time() + later_s)


def rows(place: Place) -> list[tuple[Any, ...]]:
    """(whether its body is whole, kind of its result) of each loss, in their order."""
    losses = [each for each in place.ledger.taken() if each.path == "forward_backward"]
    results = [place.ledger.result(each.id) for each in losses]
    return [(not one.sha256, result and result.kind) for one, result in zip(losses, results, strict=True)]


def test_the_head_of_a_loss_is_what_a_front_reads_of_it():
    body = training_body("s:train:0", 5, seed=1)
    head = write_head(body)
    assert len(head) < 60 < len(body)
    assert read_head(head)[:3] == read_head(body)[:3]


def test_the_file_stops_growing_and_the_newest_are_kept(place):
    async def run() -> list[int]:
        session = await place.begin()
        sizes = []
        for number in range(60):
            await step(place, session, number)
            compact(place, 400 * KB)
            place.ledger.fold()
            sizes.append((place.folder / "tinker.db").stat().st_size)
        return sizes

    sizes = asyncio.run(run())
    assert max(sizes) < 500 * KB < 60 * 20 * KB
    found = rows(place)
    assert found[0] == (False, EMPTIED)
    assert found[-1] == (True, "protobuf")
    assert [each for each in found if each[1] != EMPTIED] == found[-sum(each[1] != EMPTIED for each in found) :]


def test_within_the_bound_and_before_all_is_told_for_a_while_nothing_is_emptied(place):
    async def run() -> None:
        session = await place.begin()
        for number in range(10):
            await step(place, session, number)

    asyncio.run(run())
    compact(place, 10_000 * KB)
    assert set(rows(place)) == {(True, "protobuf")}
    compact(place, 50 * KB, later_s=0.0)
    assert {kind for _, kind in rows(place)} == {"protobuf"}, "a client may ask again"


def test_a_restart_from_a_compacted_ledger_comes_to_the_same_and_knows_what_was_asked(place):
    async def run() -> None:
        session = await place.begin()
        model = f"{session}:train:0"
        for number in range(10):
            await step(place, session, number)
        await place.post("forward_backward", training_body(model, 21, seed=21))  # no update has it
        whole = place.resumed()
        weights, given, pending = state(whole)
        compact(whole, 1)
        assert [is_whole for is_whole, _ in rows(whole)] == [False] * 10 + [True]
        emptied = whole.resumed()
        assert state(emptied) == (weights, given, pending)
        assert pending == [f"{model}:21"]
        body = training_body(model, 1, seed=0)
        assert (await emptied.post("forward_backward", body)).status_code == 200, "the same one again"
        other = await emptied.post("forward_backward", training_body(model, 1, seed=9))
        assert other.status_code == 409
        told = await emptied.post("retrieve_future", as_json(request_id=f"{model}:1"))
        assert told.status_code == 410
        assert "serve.ledger_gb" in told.json()["detail"]
        verdict = _verify_one(None, _record("s0-0", model, list(emptied.ledger.taken()), emptied.ledger), print)
        assert verdict.line() == (
            f"s0-0: nothing to compare: {model}:1 was emptied; accepted: what is within serve.ledger_gb, or 0 there"
        )

    asyncio.run(run())


def state(place: Place) -> tuple[Any, ...]:
    assert isinstance(place.host, Working)
    pending = [each for each in place.front.futures._pending if not each.endswith(":create")]
    return place.host.weights, place.host.given, pending


def test_a_loss_that_was_emptied_is_not_done_again_without_its_body(place, caplog):
    async def run() -> None:
        session = await place.begin()
        for number in range(3):
            await step(place, session, number)
        compact(place, 1)
        for folder in (place.folder / "s0-0").glob("update-*"):
            folder.rename(folder.with_name(f"lost-{folder.name}"))
        resumed = place.resumed()
        assert "serve.ledger_gb" in caplog.text
        assert resumed.host.given["s0-0"] == []

    asyncio.run(run())


def test_a_ledger_of_an_older_version_opens_with_all_it_has(tmp_path):
    file = tmp_path / "tinker.db"
    with sqlite3.connect(file) as database:
        database.executescript(
            "CREATE TABLE requests (number INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE, path TEXT NOT NULL, body BLOB "
            "NOT NULL, chosen TEXT NOT NULL, project TEXT NOT NULL, at_s REAL NOT NULL);"
            "INSERT INTO requests VALUES (1, 's:1', 'asample', 'x', '', 'lab', 2.0);"
        )
    for _ in range(2):
        ledger = Ledger(file)
        assert list(ledger.taken()) == [LoggedRequest("s:1", "asample", "x", "", "lab", 2.0)]
        ledger.close()
