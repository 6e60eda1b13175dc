"""Which files of saves are kept: those that a name, a sampler or a load still needs."""

from __future__ import annotations

import asyncio
import random
import time
from pathlib import Path
from typing import Any

import pytest
from tests.service.tinker.test_random_requests import PROMPT, Place, Working, as_json

from rlmux.service.tinker.ledger import LoggedRequest, Result


class Client:
    """A client with one model, and a host that does everything at once."""

    def __init__(self, folder: Path, keep_snapshots: int = 0) -> None:
        self.place = Place(folder, host=Working(), keep_snapshots=keep_snapshots)
        self.session = ""
        self.number = 0

    async def begin(self) -> None:
        self.session = await self.place.begin()

    async def ask(self, route: str, **fields: Any) -> Any:
        """What a request of the model came to."""
        self.number += 1
        model = f"{self.session}:train:0"
        told = await self.place.post(route, as_json(model_id=model, seq_id=self.number, **fields))
        assert told.status_code == 200, told.text
        return self.result(told.json()["request_id"])

    @property
    def project(self) -> str:
        return self.place.front.registry.sessions[self.session].project

    def result(self, request_id: str) -> Any:
        host = self.place.host
        while isinstance(host, Working) and host.do_one(random.Random(0)):
            pass
        return self.place.front.futures.result(request_id)

    async def save(self, name: str) -> None:
        await self.ask("save_weights", path=name, overwrite=True)

    async def delete(self, name: str) -> None:
        run = f"{self.session}:train:0"
        assert (await self.place.http.delete(f"training_runs/{run}/checkpoints/weights/{name}")).status_code == 200

    async def make_sampler(self, number: int, name: str) -> None:
        path = f"tinker://{self.session}:train:0/weights/{name}"
        body = as_json(session_id=self.session, sampling_session_seq_id=number, model_path=path)
        assert (await self.place.post("create_sampling_session", body)).status_code == 200

    async def sample(self, sampler: int, number: int) -> str:
        body = as_json(
            sampling_session_id=f"{self.session}:sample:{sampler}", seq_id=number, prompt=PROMPT, sampling_params={}
        )
        told = await self.place.post("asample", body)
        return str(self.result(told.json()["request_id"]).body.decode())

    def kept(self) -> list[str]:
        """Names of what saves have left."""
        names = [each.name for each in (self.place.folder / "s0-0").iterdir()]
        return sorted(name for name in names if not name.startswith("update-"))


@pytest.fixture
def client(tmp_path: Path) -> Client:
    return Client(tmp_path / "front")


def test_a_checkpoint_that_was_deleted_and_saved_again_is_there_after_a_restart(client):
    async def go() -> None:
        await client.begin()
        await client.ask("optim_step")
        await client.save("a")
        await client.delete("a")
        assert client.kept() == []
        await client.ask("optim_step")
        await client.save("a")
        client.place = client.place.resumed()
        assert client.kept() == ["state-4-a"]
        await client.ask("load_weights", path=f"tinker://{client.session}:train:0/weights/a", optimizer=True)
        assert client.place.host.weights["s0-0"] == " 1 3"

    asyncio.run(go())


def test_a_sampler_keeps_the_weights_it_was_made_with_while_its_checkpoint_is_overwritten(client):
    async def go() -> None:
        await client.begin()
        await client.ask("optim_step")
        await client.save("a")
        await client.make_sampler(1, "a")
        await client.ask("optim_step")
        await client.save("a")
        await client.make_sampler(2, "a")
        for number in range(3):
            assert [await client.sample(1, number), await client.sample(2, number)] == [" 1", " 1 3"]
            client.place = client.place.resumed()
        await client.delete("a")
        assert [await client.sample(1, 3), await client.sample(2, 3)] == [" 1", " 1 3"]
        assert client.kept() == ["state-2-a", "state-4-a"]
        for _ in range(2):  # the files go at the look after the one that ends the session
            client.place.front.end_silent_sessions(since_s=float("inf"))
        assert client.kept() == []

    asyncio.run(go())


def test_a_deleted_checkpoint_stays_for_a_load_until_an_update_behind_it_is_kept(client):
    async def go() -> None:
        await client.begin()
        await client.ask("optim_step")
        await client.save("a")
        await client.ask("optim_step")
        await client.ask("load_weights", path=f"tinker://{client.session}:train:0/weights/a", optimizer=True)
        await client.delete("a")
        assert client.kept() == ["state-2-a"]
        client.place = client.place.resumed()  # the load is done again
        await client.ask("optim_step")
        assert client.place.host.weights["s0-0"] == " 1 5"
        assert client.kept() == []

    asyncio.run(go())


def test_a_save_of_an_older_version_is_found_where_that_wrote_it(client):
    async def go() -> None:
        await client.begin()
        model = f"{client.session}:train:0"
        path = f"tinker://{model}/weights/7"
        await client.ask("optim_step")
        body = as_json(model_id=model, seq_id=2, path="7")
        client.place.ledger.take(LoggedRequest(f"{model}:2", "save_weights", body, "", client.project, 1.0))
        client.place.ledger.settle(f"{model}:2", Result(as_json(path=path), "json"))
        old = client.place.folder / "s0-0" / "weights-7"
        old.mkdir()
        (old / "state.json").write_text(" 1")
        client.place = client.place.resumed()
        client.number = 2
        await client.ask("optim_step")
        await client.ask("load_weights", path=path, optimizer=True)
        assert client.place.host.weights["s0-0"] == " 1"
        await client.ask("optim_step")
        await client.ask("optim_step")
        await client.save("b")  # request 7, as the older one's name
        await client.delete("7")
        assert not old.exists()
        assert client.kept() == ["state-7-b"]

    asyncio.run(go())


def test_the_newest_snapshots_are_kept_and_a_request_to_an_older_one_names_the_key(tmp_path):
    client = Client(tmp_path / "front", keep_snapshots=2)

    def refused(answer: Any) -> None:
        assert answer.status_code == 410
        assert "the newest 2 snapshots of a model are kept (serve.keep_snapshots)" in answer.json()["detail"]

    async def go() -> None:
        await client.begin()
        for number in range(1, 6):
            await client.ask("save_weights_for_sampler", sampling_session_seq_id=number)
            await client.ask("optim_step")
        assert client.kept() == ["sampler-7.safetensors", "sampler-9.safetensors"]
        client.place = client.place.resumed()
        for number in (4, 5):
            assert await client.sample(number, 0) == "".join(f" {2 * n}" for n in range(1, number))
        body = as_json(sampling_session_id=f"{client.session}:sample:3", seq_id=0, prompt=PROMPT, sampling_params={})
        refused(await client.place.post("asample", body))
        refused(await client.place.http.get(f"samplers/{client.session}:sample:3"))
        assert client.place.front.registry.sampler(f"{client.session}:sample:0", client.project), "base weights stay"

    asyncio.run(go())


def test_a_snapshot_that_newer_ones_replaced_stays_for_what_was_asked_of_it_before(tmp_path):
    client = Client(tmp_path / "front", keep_snapshots=1)

    async def go() -> None:
        await client.begin()
        await client.ask("save_weights_for_sampler", sampling_session_seq_id=1)
        sampler = f"{client.session}:sample:1"
        told = await client.place.post(
            "asample", as_json(sampling_session_id=sampler, seq_id=0, prompt=PROMPT, sampling_params={})
        )
        body = as_json(model_id=f"{client.session}:train:0", seq_id=2, sampling_session_seq_id=2)
        await client.place.post("save_weights_for_sampler", body)
        client.place = client.place.resumed()
        assert client.result(told.json()["request_id"]) == Result(b"", "protobuf")
        client.number = 2
        await client.ask("save_weights_for_sampler", sampling_session_seq_id=3)
        assert client.kept() == ["sampler-3.safetensors"]

    asyncio.run(go())


def test_a_checkpoint_past_its_time_is_deleted_and_its_time_can_be_changed_until_then(client):
    async def go() -> None:
        await client.begin()
        run = f"{client.session}:train:0"
        now_s = time.time()
        await client.ask("save_weights", path="a", ttl_seconds=3600)
        await client.ask("save_weights_for_sampler", path="b", ttl_seconds=3600)
        await client.ask("save_weights", path="c", ttl_seconds=3600)
        await client.save("stays")
        for name, seconds in [("a", 10_000), ("c", None)]:
            body = as_json(ttl_seconds=seconds)
            told = await client.place.http.put(f"training_runs/{run}/checkpoints/weights/{name}/ttl", content=body)
            assert told.status_code == 200, told.text
        client.place = client.place.resumed()
        listed = (await client.place.http.get("checkpoints")).json()["checkpoints"]
        assert [bool(each["expires_at"]) for each in listed] == [False, False, True, True]
        client.place.front.expire(now_s + 3590)
        assert len(client.kept()) == 4
        client.place.front.expire(now_s + 5000)
        assert client.kept() == ["state-1-a", "state-3-c", "state-4-stays"]
        client.place.front.expire(now_s + 20_000)
        assert client.kept() == ["state-3-c", "state-4-stays"]
        client.place = client.place.resumed()
        assert [each.path.name for each in client.place.front.registry.checkpoints.values()] == ["c", "stays"]

    asyncio.run(go())


def test_the_first_request_after_its_time_finds_a_checkpoint_no_more(client, monkeypatch):
    async def go() -> None:
        await client.begin()
        await client.ask("save_weights", path="a", ttl_seconds=1)
        path = f"tinker://{client.session}:train:0/weights/a"
        (later,) = [each.expires_s for each in client.place.front.registry.checkpoints.values()]
        monkeypatch.setattr(time, "time", lambda: later)
        assert (await client.place.post("weights_info", as_json(tinker_path=path))).status_code == 404
        assert (await client.place.http.get("checkpoints")).json()["checkpoints"] == []

    asyncio.run(go())


@pytest.mark.parametrize("body", [b"[" * 100_000, b"[]", b"{", b"{}", b"\xff", b'{"ttl_seconds": "soon"}'])
def test_a_time_to_live_that_cannot_be_read_is_refused_in_a_line(client, body):
    async def go() -> None:
        await client.begin()
        await client.save("a")
        place = f"training_runs/{client.session}:train:0/checkpoints/weights/a/ttl"
        told = await client.place.http.put(place, content=body)
        assert (told.status_code, "\n" in told.json()["detail"]) == (400, False)

    asyncio.run(go())


@pytest.mark.parametrize("seconds", [0, -5, 10**12])
def test_a_time_to_live_out_of_range_is_refused_with_what_is_accepted(client, seconds):
    async def go() -> None:
        await client.begin()
        await client.save("a")
        run = f"{client.session}:train:0"
        body = as_json(ttl_seconds=seconds)
        told = await client.place.http.put(f"training_runs/{run}/checkpoints/weights/a/ttl", content=body)
        assert told.status_code == 400
        assert told.json()["detail"].startswith(f"ttl_seconds: {seconds}; accepted: 1 to")
        body = as_json(model_id=run, seq_id=2, path="b", ttl_seconds=seconds)
        assert (await client.place.post("save_weights", body)).status_code == 400

    asyncio.run(go())


def test_what_is_being_written_stays_and_what_an_end_in_the_middle_left_goes(client):
    async def go() -> None:
        await client.begin()
        await client.save("a")
        await client.save("b")
        for name in ("state-1-a.tmp-77", "state-2-b.tmp-77", "weights-old.tmp-77"):
            (client.place.folder / "s0-0" / name).mkdir()
        await client.delete("b")
        assert client.kept() == ["state-1-a", "state-1-a.tmp-77"]

    asyncio.run(go())
