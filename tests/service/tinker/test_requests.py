"""How many requests are taken at once, and how the log tells of those that are refused."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from tests.service.tinker.test_front import sample
from tests.service.tinker.test_random_requests import SERVED, Place, as_json, training_body

from rlmux.service.tinker import requests, routes
from rlmux.service.tinker.futures import PendingLoad
from rlmux.service.tinker.keys import Keys


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path / "front")


def test_a_flood_is_answered_with_429_and_what_others_wait_for_is_always_taken(place, monkeypatch):
    monkeypatch.setattr(requests, "MAX_SAMPLES_AT_ONCE", 3)

    async def flood() -> None:
        session = await place.begin()
        for number in (1, 2, 3):  # all wait for number 0
            await place.post("asample", sample(session, number))
        refused = await place.http.post("asample", content=sample(session, 4))
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
        told = refused.json()["detail"]
        assert told == "3 sampling requests of this project wait already; accepted: this one again, later"
        assert (await place.http.post("asample", content=sample(session, 2))).status_code == 200, "a repeated one"
        assert (await place.http.post("asample", content=sample(session, 0))).status_code == 200
        for number in (0, 1):
            assert (await place.http.post("asample", content=sample(session, 4))).status_code == 429
            place.front.futures.settle(f"{session}:sample:0:{number}", b"", None)
        assert (await place.http.post("asample", content=sample(session, 4))).status_code == 200

    asyncio.run(flood())


def test_floods_are_refused_by_name_for_one_project_and_room_is_given_back(place, monkeypatch):
    for name, most in (("SESSIONS", 2), ("MODELS", 2), ("TRAINING", 4)):
        monkeypatch.setattr(requests, f"MAX_{name}_AT_ONCE", most)

    async def refused(route: str, body: bytes) -> str:
        answer = await place.http.post(route, content=body)
        assert (answer.status_code, answer.headers["retry-after"]) == (429, "1")
        return str(answer.json()["detail"])

    async def flood() -> None:
        first, second = await place.begin(), await place.begin()
        told = await refused("create_session", b"{}")
        assert told.startswith("2 sessions of this project are open; accepted: another once one is closed")
        model = as_json(session_id=second, model_seq_id=1, base_model=SERVED.name)
        assert (await refused("create_model", model)).startswith("2 models of this project are in training; accepted:")
        for number in (2, 3):  # the models wait, too
            await place.post("forward_backward", training_body(f"{first}:train:0", number, seed=1))
        told = await refused("forward_backward", training_body(f"{first}:train:0", 4, seed=1))
        assert told == "4 requests of models of this project wait already; accepted: this one again, later"
        monkeypatch.setattr(requests, "MAX_TRAINING_AT_ONCE", 9)
        monkeypatch.setattr(requests, "MAX_BYTES_AT_ONCE", 100)
        assert "with 100 bytes wait already" in await refused("asample", sample(first, 0))
        missing = await place.http.post("forward_backward", content=training_body(f"{first}:train:0", 1, seed=1))
        assert missing.status_code == 200, "others wait for it"
        others = {"X-API-Key": "other"}
        assert (await place.http.post("create_session", content=b"{}", headers=others)).status_code == 200
        await place.post(f"sessions/{first}/finish", b"{}")
        place.front.futures.settle(f"{second}:train:0:create", None, None)
        assert place.front.futures.waiting_of(Keys({}).project("k")) == PendingLoad()
        assert (await place.http.post("create_session", content=b"{}")).status_code == 200
        assert (await place.http.post("create_model", content=model)).status_code == 200

    asyncio.run(flood())


@pytest.mark.parametrize(
    ("version", "is_taken"),
    [("0.24.9", False), ("0.3.1", False), ("0.25.0", True), ("0.38.0rc1", True), ("1.0", True), ("", True),
     ("nightly", True), ("0", True)],
)  # fmt: skip
def test_an_sdk_that_is_too_old_hears_so_before_it_has_a_session(place, version, is_taken):
    told = asyncio.run(place.post("create_session", as_json(sdk_version=version)))
    assert told.status_code == (200 if is_taken else 400)
    if not is_taken:
        text = f"tinker {version} is too old for this server; accepted: tinker 0.25 or newer"
        assert told.json()["detail"] == text
    assert len(place.front.registry.sessions) == is_taken


def test_a_body_without_end_is_refused_with_what_is_accepted(place, monkeypatch):
    monkeypatch.setattr(routes, "MAX_BODY_BYTES", 1000)
    told = asyncio.run(place.post("create_session", b" " * 1001))
    assert (told.status_code, told.json()["detail"]) == (
        400,
        "body: 1001 bytes; accepted: 1000 or less, in several requests",
    )


def test_each_refusal_is_a_line_in_the_log_and_a_flood_of_them_is_not(place, caplog):
    async def err() -> None:
        session = await place.begin()
        await place.post("forward_backward", b"\xff\xff")
        await place.post("optim_step", as_json(model_id=f"{session}:train:0", seq_id="two"))
        await place.post("asample", sample(session, 0))
        await place.post("asample", sample(session, 0).replace(b"[5, 6, 7]", b"[5]"))
        await place.post("create_model", as_json(session_id=session, model_seq_id=1, base_model="a\nb" + "x" * 999))
        lines = [each.getMessage() for each in caplog.records]
        assert len(lines) == 4
        for line, (route, status, text) in zip(
            lines,
            [
                ("forward_backward", 400, "forward_backward: not a protobuf request"),
                ("optim_step", 400, "seq_id: Input should be a valid integer"),
                ("asample", 409, f"{session}:sample:0:0 was another request"),
                ("create_model", 400, "base_model 'a"),
            ],
            strict=True,
        ):
            project = Keys({}).project("k")
            assert line.startswith(f"project {project}: POST /api/v1/{route}: {status}: {text}")
            assert line.isprintable()
            assert len(line) <= 400
        for _ in range(100):
            await place.post("optim_step", b"{")
        assert len(caplog.records) < 60

    asyncio.run(err())
