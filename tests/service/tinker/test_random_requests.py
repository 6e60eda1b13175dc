"""Requests that are valid, repeated, turned round, cut off or broken: never a failure of the server's own."""

from __future__ import annotations

import asyncio
import json
import random
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.service.clients import training_body

from rlmux.core.errors import UserError
from rlmux.rl.config import ModelConfig
from rlmux.service.tinker.budgets import Budgets
from rlmux.service.tinker.front import TinkerFront
from rlmux.service.tinker.keys import Keys
from rlmux.service.tinker.ledger import Ledger
from rlmux.service.tinker.routes import routes
from rlmux.service.tinker.served import ServedModel

REQUESTS = 34
LONG = [pytest.mark.slow, pytest.mark.timeout(1800)]
PROMPT = {"chunks": [{"type": "encoded_text", "tokens": [5, 6, 7]}]}
SERVED = ServedModel(
    name="rlmux/tiny", model=ModelConfig(), vocab_size=97, stop_tokens=(1,), max_prompt_tokens=16, max_new_tokens=16,
    num_slots=4,
)  # fmt: skip


class Recorded:
    """Takes what a front hands over, and answers nothing."""

    def __init__(self) -> None:
        self.given: dict[str, list[Any]] = {}
        self.opened: dict[str, tuple[Any, str]] = {}
        """Hints and project of each pipeline."""
        self.finished: list[str] = []
        self.withdrawn: list[str] = []

    def open(
        self, pipeline: str, config: object, folder: Path, restore_from: object, hints: object, project: str
    ) -> None:
        if pipeline in self.given:
            raise UserError(f"pipeline {pipeline!r} is in this run already; accepted: a name of its own")
        self.given[pipeline] = []
        self.opened[pipeline] = (hints, project)

    def train(self, pipeline: str, request_id: str, request: Any) -> None:
        self.given[pipeline].append(request_id.partition(":")[2])

    def sample(self, pipeline: str, request: Any, weights: Path | None) -> None:
        drawn = [(each.id, each.seed, each.drawn_as) for each in request.trajectories]
        self.given[pipeline].append((request.id.partition(":")[2], drawn))

    def withdraw(self, pipeline: str, ids: Sequence[str]) -> None:
        self.withdrawn += ids

    def finish(self, pipeline: str) -> None:
        self.finished.append(pipeline)


class Place:
    """A front in this process, and what reached its host."""

    def __init__(
        self, folder: Path, hours_by_project: Mapping[str, float] | None = None, served: ServedModel = SERVED
    ) -> None:
        folder.mkdir(exist_ok=True)
        self.folder = folder
        self.host = Recorded()
        self.reason: str | None = None
        self.ledger = Ledger(folder / "tinker.db")
        self.day = 1
        budgets = Budgets(self.ledger, hours_by_project or {}, today=lambda: self.day)
        self.front = TinkerFront({served.name: served}, self.ledger, folder, self.host, budgets)
        app = routes(self.front, Keys({}), lambda pipeline: self.reason)
        transport = httpx.ASGITransport(app, raise_app_exceptions=True)  # a failure of the server's own fails the test
        self.http = httpx.AsyncClient(transport=transport, base_url="http://test/api/v1/", headers={"X-API-Key": "k"})

    def resumed(self) -> Place:
        """A front that comes after this one, as `rlmux resume` makes it."""
        self.ledger.close()
        place = Place(self.folder)
        place.front.replay()
        return place

    async def post(self, route: str, content: bytes) -> httpx.Response:
        answer = await self.http.post(route, content=content)
        assert answer.status_code in (200, 400, 404, 409, 410), (route, content[:80], answer.text)
        return answer

    async def begin(self, display_name: str | None = None) -> str:
        told = await self.post("create_session", as_json(display_name=display_name))
        session = str(told.json()["session_id"])
        await self.post(
            "create_model", as_json(session_id=session, model_seq_id=0, base_model=SERVED.name, lora_config={"rank": 1})
        )
        await self.post(
            "create_sampling_session", as_json(session_id=session, sampling_session_seq_id=0, base_model=SERVED.name)
        )
        return session


def as_json(**fields: Any) -> bytes:
    return json.dumps(fields).encode()


def valid_requests(session: str) -> list[tuple[str, bytes]]:
    """What a client sends, in its own order."""
    model = f"{session}:train:0"
    found: list[tuple[str, bytes]] = []
    for step in range(4):
        found += [
            ("forward_backward", training_body(model, 4 * step + 1, seed=step)),
            ("optim_step", as_json(model_id=model, seq_id=4 * step + 2, adam_params={"learning_rate": 0.1})),
            ("save_weights", as_json(model_id=model, seq_id=4 * step + 3, path=f"at{step}")),
            (
                "save_weights_for_sampler",
                as_json(model_id=model, seq_id=4 * step + 4, sampling_session_seq_id=1 + step),
            ),
        ]
    sampler, params = f"{session}:sample:0", {"max_tokens": 4}
    found += [
        ("asample", as_json(sampling_session_id=sampler, seq_id=number, prompt=PROMPT, sampling_params=params))
        for number in range(6)
    ]
    return found


def broken(request: tuple[str, bytes], choose: random.Random) -> tuple[str, bytes]:
    """The request cut off, with some bytes changed, sent elsewhere, or something else altogether."""
    route, body = request
    match choose.randrange(4):
        case 0:
            return route, body[: choose.randrange(len(body))]
        case 1:
            place = choose.randrange(len(body))
            return route, body[:place] + choose.randbytes(3) + body[place + 3 :]
        case 2:
            routes_known = ("forward_backward", "optim_step", "asample", "load_weights", "create_model", "save_weights")
            return choose.choice(routes_known), body
    fields = choose.choice([[], None, 7, {"model_id": "x"}, {"seq_id": -1}, {"session_id": 3, "path": {}}])
    return route, json.dumps(fields).encode()


async def ordered(folder: Path) -> dict[str, list[Any]]:
    place = Place(folder)
    for route, body in valid_requests(await place.begin()):
        assert (await place.post(route, body)).status_code == 200
    await place.http.aclose()
    return place.host.given


async def shuffled(folder: Path, choose: random.Random) -> dict[str, list[Any]]:
    """Valid requests in any order, each perhaps twice, with broken ones between: whole bodies get their promise."""
    place = Place(folder)
    requests = valid_requests(await place.begin())
    order = [*requests, *choose.choices(requests, k=REQUESTS - len(requests))]
    choose.shuffle(order)
    promises: dict[tuple[str, bytes], Any] = {}
    for request in order:
        if choose.random() < 0.5:
            await breaking(place, broken(choose.choice(requests), choose), requests)
        answer = await place.post(*request)
        assert answer.status_code == 200, answer.text
        assert promises.setdefault(request, answer.json()) == answer.json()
    await place.http.aclose()
    return place.host.given


async def breaking(place: Place, request: tuple[str, bytes], requests: Sequence[tuple[str, bytes]]) -> None:
    """Send a broken request that cannot be taken for one that is to come."""
    scratch = (request[0], request[1].replace(b":train:0", b":train:9").replace(b":sample:0", b":sample:9"))
    if scratch not in requests:
        await place.post(*scratch)


@pytest.mark.parametrize("num_sequences", [30, pytest.param(2000, marks=LONG)])
def test_any_order_and_repetition_of_requests_hands_over_the_same_and_nothing_broken_is_a_500(tmp_path, num_sequences):
    expected = asyncio.run(ordered(tmp_path / "ordered"))
    assert sum(map(len, expected.values())) == 22
    for number in range(num_sequences):
        found = asyncio.run(shuffled(tmp_path / str(number), random.Random(number)))
        assert found == expected, f"sequence {number}"
        shutil.rmtree(tmp_path / str(number))
