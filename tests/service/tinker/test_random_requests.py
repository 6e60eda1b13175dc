"""Requests that are valid, repeated, turned round, cut off or broken: never a failure of the server's own."""

from __future__ import annotations

import asyncio
import json
import random
import shutil
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.service.clients import training_body

from rlmux.core.errors import UserError
from rlmux.rl.client_requests import LoadState, OptimizerStep, OptimizerStepDone, SaveState, WriteWeights
from rlmux.rl.config import ModelConfig
from rlmux.service.tinker.front import TinkerFront
from rlmux.service.tinker.keys import Keys
from rlmux.service.tinker.ledger import Ledger
from rlmux.service.tinker.model_catalog import ServedModel
from rlmux.service.tinker.project_budgets import ProjectBudgets
from rlmux.service.tinker.routes import routes

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


class Working(Recorded):
    """Carries out what it takes when it is told to; a model's weights are a text of the updates that made them."""

    front: TinkerFront

    def __init__(self) -> None:
        super().__init__()
        self.weights: dict[str, str] = {}
        self.folders: dict[str, Path] = {}
        self.work: dict[str, deque[Callable[[], None]]] = {}
        """What a pipeline has to do; samples have a queue of their own beside training."""

    def open(self, pipeline: str, config: object, folder: Path, restore_from: Any, hints: object, project: str) -> None:
        super().open(pipeline, config, folder, restore_from, hints, project)
        folder.mkdir(parents=True, exist_ok=True)
        self.folders[pipeline] = folder
        self.weights[pipeline] = (restore_from / "state.json").read_text() if restore_from else ""

    def train(self, pipeline: str, request_id: str, request: Any) -> None:
        super().train(pipeline, request_id, request)
        self.work.setdefault(pipeline, deque()).append(lambda: self._carry_out(pipeline, request_id, request))

    def sample(self, pipeline: str, request: Any, weights: Path | None) -> None:
        def answer() -> None:
            text = b"base" if weights is None else weights.read_bytes()
            self.front.futures.settle(request.id, text, None)

        self.work.setdefault(f"{pipeline} samples", deque()).append(answer)

    def do_one(self, choose: random.Random) -> bool:
        """One request of some pipeline; False: nothing is left."""
        queues = [each for each in self.work.values() if each]
        if queues:
            choose.choice(queues).popleft()()
        return bool(queues)

    def _carry_out(self, pipeline: str, request_id: str, request: Any) -> None:
        value = None
        match request:
            case OptimizerStep():
                self.weights[pipeline] += f" {request_id.rpartition(':')[2]}"
                value = OptimizerStepDone(grad_norm=1.0)
            case WriteWeights():
                request.path.write_text(self.weights[pipeline])
            case SaveState():
                self._save(pipeline, request.folder)
            case LoadState():
                self.weights[pipeline] = (request.folder / "state.json").read_text()
        self.front.futures.settle(request_id, value, None)
        if isinstance(request, OptimizerStep):
            update = self.folders[pipeline] / f"update-{request_id.rpartition(':')[2]}"
            self._save(pipeline, update)
            self.front.add_update(request_id, update, "")

    def _save(self, pipeline: str, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        for name in ("state.json", "model.safetensors"):
            (folder / name).write_text(self.weights[pipeline])


class Place:
    """A front in this process, and what reached its host."""

    def __init__(
        self,
        folder: Path,
        hours_by_project: Mapping[str, float] | None = None,
        served: ServedModel = SERVED,
        host: Recorded | None = None,
        keep_snapshots: int = 0,
    ) -> None:
        folder.mkdir(exist_ok=True)
        self.folder = folder
        self.host = host or Recorded()
        self.reason: str | None = None
        self.keep_snapshots = keep_snapshots
        self.ledger = Ledger(folder / "tinker.db")
        self.day = 1
        budgets = ProjectBudgets(self.ledger, hours_by_project or {}, today=lambda: self.day)
        self.front = TinkerFront({served.name: served}, self.ledger, folder, self.host, budgets, keep_snapshots)
        if isinstance(self.host, Working):
            self.host.front = self.front
        app = routes(self.front, Keys({}), lambda pipeline: self.reason)
        transport = httpx.ASGITransport(app, raise_app_exceptions=True)  # a failure of the server's own fails the test
        self.http = httpx.AsyncClient(transport=transport, base_url="http://test/api/v1/", headers={"X-API-Key": "k"})

    def resumed(self) -> Place:
        """A front that comes after this one, as `rlmux resume` makes it."""
        self.ledger.close()
        place = Place(self.folder, host=type(self.host)(), keep_snapshots=self.keep_snapshots)
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
    """Valid requests in any order, each perhaps twice, with broken ones between: whole bodies get their future."""
    place = Place(folder)
    requests = valid_requests(await place.begin())
    order = [*requests, *choose.choices(requests, k=REQUESTS - len(requests))]
    choose.shuffle(order)
    futures: dict[tuple[str, bytes], Any] = {}
    for request in order:
        if choose.random() < 0.5:
            await breaking(place, broken(choose.choice(requests), choose), requests)
        answer = await place.post(*request)
        assert answer.status_code == 200, answer.text
        assert futures.setdefault(request, answer.json()) == answer.json()
    await place.http.aclose()
    return place.host.given


async def breaking(place: Place, request: tuple[str, bytes], requests: Sequence[tuple[str, bytes]]) -> None:
    """Send a broken request that cannot be taken for one that is to come."""
    scratch = (request[0], request[1].replace(b":train:0", b":train:9").replace(b":sample:0", b":sample:9"))
    if scratch not in requests:
        await place.post(*scratch)


@pytest.mark.parametrize("num_sequences", [30, pytest.param(1000, marks=LONG)])
def test_any_order_and_repetition_of_requests_hands_over_the_same_and_nothing_broken_is_a_500(tmp_path, num_sequences):
    expected = asyncio.run(ordered(tmp_path / "ordered"))
    assert sum(map(len, expected.values())) == 22
    for number in range(num_sequences):
        found = asyncio.run(shuffled(tmp_path / str(number), random.Random(number)))
        assert found == expected, f"sequence {number}"
        shutil.rmtree(tmp_path / str(number))


async def two_projects(folder: Path, choose: random.Random) -> dict[str, list[Any]]:
    """Two clients with keys of their own send what they have in any order, and at times what is the other's."""
    place = Place(folder)
    sessions, to_send, given_ids = [], [], {0: ["s9:train:0:1"], 1: ["s9:train:0:1"]}
    for key in ("k", "other"):
        place.http.headers["X-API-Key"] = key
        sessions.append(await place.begin())
        to_send.append(valid_requests(sessions[-1]))
        choose.shuffle(to_send[-1])
    while any(to_send):
        mine = choose.randrange(2)
        place.http.headers["X-API-Key"] = ("k", "other")[mine]
        stolen = choose.choice(valid_requests(sessions[1 - mine]))
        assert (await place.post(*stolen)).status_code == 404
        await place.post(*broken(stolen, choose))
        its = choose.choice(given_ids[1 - mine])
        told = await place.post("retrieve_future", as_json(request_id=its))
        assert (told.status_code, told.json()) == (410 if ":sample:" in its else 404, {"detail": f"no request {its!r}"})
        await place.post("cancel_future", as_json(request_id=its))
        runs = (await place.http.get("training_runs")).json()["training_runs"]
        assert [each["training_run_id"] for each in runs] == [f"{sessions[mine]}:train:0"]
        if to_send[mine]:
            answer = await place.post(*to_send[mine].pop())
            assert answer.status_code == 200, answer.text
            given_ids[mine].append(answer.json()["request_id"])
    await place.http.aclose()
    assert place.host.withdrawn == []
    return place.host.given


@pytest.mark.parametrize("num_sequences", [10, pytest.param(500, marks=LONG)])
def test_no_sequence_gives_a_project_anything_of_another_ones(tmp_path, num_sequences):
    expected = asyncio.run(ordered(tmp_path / "ordered"))
    for number in range(num_sequences):
        found = asyncio.run(two_projects(tmp_path / str(number), random.Random(number)))
        for session in ("s0", "s1"):
            its = {f"s0{name.removeprefix(session)}": each for name, each in found.items() if name.startswith(session)}
            assert its == expected, f"sequence {number}"
        shutil.rmtree(tmp_path / str(number))


class Saves:
    """A client that saves, overwrites, deletes, loads and samples at random, and knows what it must get each time.

    Its server may begin again between any two requests. A name means the weights that were there under it when a
    request named it; a sampler's weights are the same for life.
    """

    def __init__(self, place: Place, choose: random.Random) -> None:
        self.place = place
        self.choose = choose
        self.session = ""
        self.numbers = [0, 0]
        """Number of each model's last request."""
        self.updates = ["", ""]
        """What each model's weights are once all that was asked is done."""
        self.named: dict[str, str] = {}
        """Weights by path, of saves that are done."""
        self.saves: list[tuple[str, str, str]] = []
        """(request, path, weights) of saves whose result is not known, in their order."""
        self.samplers: list[tuple[str, str]] = []
        """(the snapshot that tells its id, weights) of each sampler."""
        self.snapshots: list[list[int]] = [[], []]
        """Numbers of the samplers of each model's snapshots, those left out that newer ones took the place of."""
        self.samples: dict[str, str] = {}
        """Weights that a request is to be answered with."""

    async def begin(self) -> None:
        self.session = (await self.place.post("create_session", b"{}")).json()["session_id"]
        for number in (0, 1):
            await self.ask("create_model", session_id=self.session, model_seq_id=number, base_model=SERVED.name)

    async def ask(self, route: str, **fields: Any) -> dict[str, Any]:
        answer = await self.place.post(route, as_json(**fields))
        assert answer.status_code == 200, answer.text
        return dict(answer.json())

    def next(self, model: int) -> dict[str, Any]:
        self.numbers[model] += 1
        return {"model_id": f"{self.session}:train:{model}", "seq_id": self.numbers[model]}

    async def anything(self) -> None:
        model = self.choose.randrange(2)
        kind = self.choose.choice(["update", "save", "snapshot", "named", "load", "delete", "sampler", *["sample"] * 3])
        match kind:
            case "update":
                self.updates[model] += f" {self.numbers[model] + 1}"
                await self.ask("optim_step", **self.next(model))
            case "save" | "named":
                name = self.choose.choice("ab")
                asked = self.next(model) | {"path": name}
                route = "save_weights" if kind == "save" else "save_weights_for_sampler"
                part = "weights" if kind == "save" else "sampler_weights"
                told = await self.ask(route, **asked, overwrite=True)
                path = f"tinker://{asked['model_id']}/{part}/{name}"
                self.saves.append((told["request_id"], path, self.updates[model]))
            case "snapshot":
                number = len(self.samplers)
                told = await self.ask("save_weights_for_sampler", **self.next(model), sampling_session_seq_id=number)
                self.samplers.append((told["request_id"], self.updates[model]))
                self.snapshots[model] = [*self.snapshots[model], number][-self.place.keep_snapshots :]
            case "load" if trained := [path for path in sorted(self.named) if "/weights/" in path]:
                path = self.choose.choice(trained)
                self.updates[model] = self.named[path]
                await self.ask("load_weights", **self.next(model), path=path, optimizer=True)
            case "delete" if self.named:
                path = self.choose.choice(sorted(self.named))
                run, _, checkpoint = path.removeprefix("tinker://").partition("/")
                deleted = await self.place.http.delete(f"training_runs/{run}/checkpoints/{checkpoint}")
                assert deleted.status_code == 200
                del self.named[path]
            case "sampler" if self.named:
                path = self.choose.choice(sorted(self.named))
                number = len(self.samplers)
                await self.ask(
                    "create_sampling_session", session_id=self.session, sampling_session_seq_id=number, model_path=path
                )
                self.samplers.append(("", self.named[path]))
            case "sample" if self.samplers:
                await self.sample(self.choose.randrange(len(self.samplers)))

    async def sample(self, number: int) -> None:
        sampler, (snapshot, weights) = f"{self.session}:sample:{number}", self.samplers[number]
        if snapshot in self.place.front.futures:
            return
        following = self.place.front.registry.samplers[sampler].order(0)[0].following
        body = as_json(sampling_session_id=sampler, seq_id=following, prompt=PROMPT, sampling_params={"max_tokens": 4})
        told = await self.place.post("asample", body)
        is_kept = not snapshot or number in [*self.snapshots[0], *self.snapshots[1]]
        assert told.status_code == (200 if is_kept else 410)
        if is_kept:
            self.samples[told.json()["request_id"]] = weights

    def work(self, num_requests: int | None = None) -> None:
        """Have the host carry out so many requests, or all."""
        host = self.place.host
        assert isinstance(host, Working)
        while num_requests != 0 and host.do_one(self.choose):
            num_requests = None if num_requests is None else num_requests - 1
            for save in [each for each in self.saves if each[0] not in self.place.front.futures]:
                self.saves.remove(save)
                self.named[save[1]] = save[2]

    async def check(self) -> None:
        """All is answered as it must be, what is listed is there, and nothing else is."""
        self.work()
        for request_id, weights in self.samples.items():
            result = self.place.front.futures.result(request_id)
            assert result is not None
            assert result.body.decode() == weights, request_id
        listed = {path: each.weights.read_text() for path, each in self.place.front.registry.checkpoints.items()}
        assert listed == self.named
        for path in self.named:
            assert (await self.place.post("weights_info", as_json(tinker_path=path))).status_code == 200


async def save_at_random(folder: Path, seed: int) -> None:
    choose = random.Random(seed)
    client = Saves(Place(folder, host=Working(), keep_snapshots=choose.choice([0, 2])), choose)
    await client.begin()
    for _ in range(60):
        await client.anything()
        client.work(choose.choice([0, 0, 1, 3]))
        if choose.random() < 0.05:
            client.place = client.place.resumed()
    client.work()
    for number in range(len(client.samplers)):
        await client.sample(number)
    await client.check()
    order = list(client.place.front.registry.checkpoints)
    client.place = client.place.resumed()
    assert list(client.place.front.registry.checkpoints) == order
    for number in range(len(client.samplers)):
        await client.sample(number)
    await client.check()
    client.place.front.end_silent_sessions(since_s=float("inf"))
    client.place.front.end_silent_sessions(since_s=float("inf"))
    kept = {file for model in client.place.front.registry.models.values() for file in model.folder.glob("s*-*")}
    assert kept == {each.folder for each in client.place.front.registry.checkpoints.values()}


@pytest.mark.parametrize("num_sequences", [10, pytest.param(500, marks=LONG)])
def test_a_name_means_the_same_weights_whatever_is_saved_deleted_and_replayed(tmp_path, num_sequences):
    for seed in range(num_sequences):
        asyncio.run(save_at_random(tmp_path / str(seed), seed))
        shutil.rmtree(tmp_path / str(seed))
