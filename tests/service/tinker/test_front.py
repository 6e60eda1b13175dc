"""What a front takes, keeps waiting, refuses for a while and gives up; its host answers nothing."""

from __future__ import annotations

import asyncio
import json
import math
import random
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tests.service.tinker.test_random_requests import PROMPT, SERVED, Place, as_json, training_body

from rlmux.core.actions import Park, Release, RunStage
from rlmux.core.events import NodeLost, PipelineFailed, PipelineRestarted, StageFinished, WorkerLost
from rlmux.core.model import DeviceId, NodeId, OrderId, PipelineId, Stage, Urgency
from rlmux.log.notes import SharedBatchNote
from rlmux.runtime.workers.request_workers import RequestResult
from rlmux.service.model_serving import ClientEvents
from rlmux.service.tinker import routes
from rlmux.service.tinker.keys import Keys
from rlmux.service.tinker.ledger import SERVER_ERROR, Ledger, LoggedRequest, Result
from rlmux.service.tinker.project_budgets import Charges, ProjectBudgets


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path / "front")


def sample(session: str, number: int) -> bytes:
    sampler = f"{session}:sample:0"
    return as_json(sampling_session_id=sampler, seq_id=number, prompt=PROMPT, sampling_params={"max_tokens": 4})


def test_an_error_that_is_not_the_requests_own_is_the_servers_for_the_sdk_and_after_a_restart(place):
    async def fail() -> None:
        session = await place.begin()
        model = f"{session}:train:0"
        ids = [f"{model}:{number}" for number in (1, 2, 3)]
        for number in (1, 2, 3):
            await place.post("forward_backward", training_body(model, number, seed=1))
        client_events = ClientEvents(lambda call: call())
        client_events.front = place.front
        full = RequestResult(id=ids[1], error="disk full", is_fault_of_server=True)
        client_events.on_result(PipelineId("s0-0"), RequestResult(id=ids[0], error="no such loss"))
        client_events.on_result(PipelineId("s0-0"), full)
        client_events.update(0.0, [PipelineFailed(pipeline=PipelineId("s0-0"), reason="worker died")], [], [])
        answering = place
        for _ in range(2):
            told = [(await answering.post("retrieve_future", as_json(request_id=each))).json() for each in ids]
            answering = answering.resumed()
            assert [each["category"] for each in told] == ["user", "server", "server"]

    asyncio.run(fail())


NAMES = [None, "a", "a-sampling", "a-sampling-0", "a-0", "s1", "s2", "s3-0", "s4-sampling", "sampling", "s05", "x" * 50]


@pytest.mark.parametrize("seeds", [range(8), pytest.param(range(8, 300), marks=pytest.mark.slow)], ids=str)
def test_no_display_names_make_two_pipelines_of_one_name_and_a_restart_finds_all(tmp_path, seeds):
    async def open_models(place: Place, choose: random.Random) -> None:
        for _ in range(8):
            session = await place.begin(choose.choice([*NAMES, f"s{choose.randrange(8)}"]))
            for number in choose.sample(range(1, 30), 3):
                body = as_json(session_id=session, model_seq_id=number, base_model=SERVED.name)
                assert (await place.post("create_model", body)).status_code == 200
        opened = list(place.host.opened)
        assert len(opened) == 8 * 5
        assert list(place.resumed().host.opened) == opened

    for seed in seeds:
        asyncio.run(open_models(Place(tmp_path / str(seed)), random.Random(seed)))


@pytest.mark.parametrize(
    ("display_name", "pipeline"),
    [("my run", "my-run-0"), ("s12", "s0-0"), ("s1x", "s1x-0"), ("sampling", "sampling-0"), ("a-sampling", "s0-0")],
)
def test_a_display_name_is_kept_unless_another_session_may_need_it(place, display_name, pipeline):
    asyncio.run(place.begin(display_name))
    assert pipeline in place.host.opened


def test_a_name_that_came_in_by_another_door_is_refused_and_nothing_of_the_request_is_kept(place):
    place.host.given["s0-0"] = []  # a program with permits has it

    async def ask() -> None:
        session = (await place.post("create_session", b"{}")).json()["session_id"]
        body = as_json(session_id=session, model_seq_id=0, base_model=SERVED.name)
        refused = await place.post("create_model", body)
        assert (refused.status_code, refused.json()["detail"]) == (
            400,
            "pipeline 's0-0' is in this run already; accepted: a name of its own",
        )
        assert [each.path for each in place.ledger.taken()] == ["create_session"]
        assert place.front.registry.models == {}
        assert place.front.registry.sessions[session].pipelines == []
        del place.host.given["s0-0"]
        assert (await place.post("create_model", body)).status_code == 200, "the same request, once the name is free"

    asyncio.run(ask())


def test_a_request_that_cannot_be_applied_again_is_skipped_and_its_client_is_told(place, caplog):
    async def ask() -> None:
        session = await place.begin()
        body = as_json(session_id="x", model_seq_id=1, base_model="org/gone")
        place.ledger.take(LoggedRequest("x:1", "create_model", body, "", "lab", 0.0))
        await place.begin("after")
        resumed = place.resumed()
        assert list(resumed.host.opened) == ["s0-0", "s0-sampling-0", "after-0", "after-sampling-0"]
        assert "request x:1 (create_model) is skipped: no session 'x'" in caplog.text
        assert resumed.front.futures.result("x:1") == Result(b"no session 'x'", SERVER_ERROR)
        assert (await resumed.post("asample", sample(session, 0))).status_code == 200

    asyncio.run(ask())


def test_another_project_gets_from_every_address_what_it_gets_for_a_thing_that_is_not_there(place, monkeypatch):
    monkeypatch.setattr(routes, "POLL_S", 0.0)

    async def ask_both() -> None:
        session = await place.begin()
        model, none = f"{session}:train:0", "s9-000000"
        await place.post("save_weights", as_json(model_id=model, seq_id=1, path="kept"))
        place.front.futures.settle(f"{model}:1", None, None)
        await place.post("forward_backward", training_body(model, 2, seed=1))
        await place.post("asample", sample(session, 0))
        kept = len(list(place.ledger.taken()))
        for method, address, body in [
            ("POST", "retrieve_future", {"request_id": f"{model}:1"}),
            ("POST", "retrieve_future", {"request_id": f"{model}:2"}),
            ("POST", "retrieve_future", {"request_id": f"{session}:sample:0:0"}),
            ("POST", "cancel_future", {"request_id": f"{session}:sample:0:0"}),
            ("POST", "session_heartbeat", {"session_id": session}),
            ("POST", "get_info", {"model_id": model}),
            ("POST", "weights_info", {"tinker_path": f"tinker://{model}/weights/kept"}),
            ("GET", f"samplers/{session}:sample:0", None),
            ("GET", f"training_runs/{model}", None),
            ("GET", f"training_runs/{model}/checkpoints", None),
            ("DELETE", f"training_runs/{model}/checkpoints/weights/kept", None),
            ("PUT", f"training_runs/{model}/checkpoints/weights/kept/ttl", {"ttl_seconds": 5}),
            ("POST", f"sessions/{session}/finish", None),
            ("POST", "save_weights", {"model_id": model, "seq_id": 1, "path": "kept"}),
            ("POST", "save_weights", {"model_id": model, "seq_id": 1, "path": "other"}),
            ("POST", "create_model", {"session_id": session, "model_seq_id": 0, "base_model": SERVED.name}),
            ("POST", "load_weights", {"path": f"tinker://{model}/weights/kept", "optimizer": True, "model_id": model}),
        ]:
            told = []
            for its_session in (session, none):
                text = json.dumps(body).replace(session, its_session) if body else ""
                answer = await place.http.request(
                    method, address.replace(session, its_session), content=text, headers={"X-API-Key": "other"}
                )
                told.append((answer.status_code, answer.text.replace(its_session, "S")))
            assert told[0] == told[1], address
            assert told[0][0] in (404, 410) or address == "cancel_future"
        assert place.host.withdrawn == []
        assert len(list(place.ledger.taken())) == kept
        mine = await place.post("retrieve_future", as_json(request_id=f"{model}:1"))
        assert mine.json()["path"] == f"tinker://{model}/weights/kept"

    asyncio.run(ask_both())


@pytest.mark.parametrize(
    ("prompt", "stop", "told"),
    [
        ([5, 97], None, "prompt: token 97 is unknown; accepted: 0 to 96 of rlmux/tiny"),
        ([-1], None, "prompt: token -1 is unknown; accepted: 0 to 96 of rlmux/tiny"),
        ([5], [1, 2**40], "stop: token 1099511627776 is unknown; accepted: 0 to 96 of rlmux/tiny"),
    ],
)
def test_a_token_that_the_model_has_not_is_refused_before_anything_is_kept(place, prompt, stop, told):
    async def ask() -> None:
        session = await place.begin()
        chunks = {"chunks": [{"type": "encoded_text", "tokens": prompt}]}
        wanted = {"max_tokens": 4, "stop": stop}
        body = as_json(sampling_session_id=f"{session}:sample:0", seq_id=0, prompt=chunks, sampling_params=wanted)
        refused = await place.http.post("asample", content=body)
        assert (refused.status_code, refused.json()["detail"]) == (400, told)
        assert (await place.http.post("asample", content=sample(session, 0))).status_code == 200, "its number is free"

    asyncio.run(ask())


def test_a_model_that_waits_for_its_place_has_a_future_with_the_reason_until_it_has_it(place, monkeypatch):
    monkeypatch.setattr(routes, "POLL_S", 0.0)

    async def wait() -> None:
        session = await place.begin()
        asked = as_json(request_id=f"{session}:train:0:create")
        waiting = await place.http.post("retrieve_future", content=asked)
        assert waiting.status_code == 408
        assert waiting.json()["queue_state"] == "paused_capacity"
        assert waiting.json()["queue_state_reason"] == "rlmux: memory"
        assert not any(place.front.futures._waiters.values()), "a poll that is over waits for nothing"
        place.front.admit(PipelineId("s0-0"))
        told = (await place.post("retrieve_future", asked)).json()
        assert told == {"type": "create_model", "model_id": f"{session}:train:0"}

    place.reason = "rlmux: memory"
    asyncio.run(wait())


def test_a_silent_client_gives_back_what_it_holds_and_its_checkpoints_stay(place):
    async def fall_silent() -> None:
        session = await place.begin()
        model = f"{session}:train:0"
        await place.post("save_weights", as_json(model_id=model, seq_id=1, path="kept"))
        place.front.futures.settle(f"{model}:1", None, None)
        await place.post("forward_backward", training_body(model, 2, seed=1))
        await place.post("asample", sample(session, 0))
        place.front.end_silent_sessions(since_s=float("inf"))
        assert place.front.futures.num_pending == 0
        assert sorted(place.host.finished) == ["s0-0", "s0-sampling-0"]
        assert (await place.post("asample", sample(session, 1))).status_code == 410
        told = (await place.post("retrieve_future", as_json(request_id=f"{model}:2"))).json()
        assert told["error"].endswith("is over")
        listed = (await place.http.get("checkpoints")).json()["checkpoints"]
        assert [each["tinker_path"] for each in listed] == [f"tinker://{model}/weights/kept"]

    (place.folder / "models").mkdir()
    asyncio.run(fall_silent())


def telemetry(session: str, *events: str) -> bytes:
    told = [{"event": each, "event_id": "e", "event_session_index": 0, "severity": "INFO"} for each in events]
    return as_json(events=told, platform="Linux", sdk_version="0.38.0", session_id=session, process_uuid="p")


def test_a_program_that_said_that_it_ends_gives_back_what_it_holds_before_a_silent_one(place):
    async def end() -> None:
        silent, ended = await place.begin(), await place.begin()
        assert (await place.post("telemetry", telemetry(ended, "UNHANDLED_EXCEPTION", "SESSION_END"))).json() == {
            "status": "accepted"
        }
        place.front.end_silent_sessions(-math.inf, time.monotonic() - 30.0)
        assert place.host.finished == [], "it may have caught the error"
        place.front.end_silent_sessions(-math.inf, math.inf)
        assert place.host.finished == ["s1-0", "s1-sampling-0"]
        assert not place.front.registry.sessions[silent].is_over
        assert (await place.post("telemetry", telemetry(ended, "SESSION_END"))).status_code == 200, "over already"

    asyncio.run(end())


@pytest.mark.parametrize("life", ["session_heartbeat", "asample"])
def test_a_program_that_goes_on_after_an_error_that_it_caught_keeps_its_session(place, life):
    async def go_on() -> None:
        session = await place.begin()
        await place.post("telemetry", telemetry(session, "SESSION_END"))
        await place.post(life, as_json(session_id=session) if life == "session_heartbeat" else sample(session, 0))
        place.front.end_silent_sessions(-math.inf, math.inf)
        assert place.host.finished == []

    asyncio.run(go_on())


def test_a_session_ends_by_a_report_of_its_own_project_and_of_its_end_alone(place):
    async def report() -> None:
        session = await place.begin()
        body = telemetry(session, "SESSION_END")
        told = await place.http.post("telemetry", content=body, headers={"X-API-Key": "other"})
        assert told.status_code == 200, "what is not there is not told of, either"
        await place.post("telemetry", telemetry(session, "SESSION_START", "GENERIC_EVENT"))
        await place.post("telemetry", telemetry("sessionless-7", "GENERIC_EVENT", "SESSION_END"))
        place.front.end_silent_sessions(-math.inf, math.inf)
        assert place.host.finished == []

    asyncio.run(report())


def test_a_session_that_was_silent_before_a_restart_has_been_so_since_then(place, monkeypatch):
    async def ask() -> tuple[str, str]:
        first, second = await place.begin(), await place.begin()
        monkeypatch.setattr(time, "time", lambda: written - 600)
        await place.post("asample", sample(second, 0))
        return first, second

    written = time.time()
    monkeypatch.setattr(time, "time", lambda: written - 3600)
    first, second = asyncio.run(ask())
    monkeypatch.setattr(time, "time", lambda: written)
    resumed = place.resumed()
    resumed.front.end_silent_sessions(time.monotonic() - 1200)
    sessions = resumed.front.registry.sessions
    assert (sessions[first].is_over, sessions[second].is_over) == (True, False)


def test_answers_that_come_together_have_one_commit_before_any_is_told(place):
    async def answer() -> None:
        session = await place.begin()
        ids = [f"{session}:sample:0:{number}" for number in range(3)]
        for number in range(3):
            await place.post("asample", sample(session, number))
        done: list[str] = []
        place.ledger._database.set_trace_callback(lambda statement: done.append(statement.split()[0]))
        for each in ids:
            place.front.futures.when_settled(each, lambda: done.append("told"))
        calls: list[Callable[[], None]] = []
        client_events = ClientEvents(calls.append)
        client_events.front = place.front
        for each in [*ids, ids[0]]:  # one is done again, which changes nothing
            client_events.on_result(PipelineId("s0-sampling-0"), RequestResult(id=each, value=b""))
        for call in calls:
            call()
        assert len(calls) == 1
        assert done == ["BEGIN", *["INSERT"] * 3, "COMMIT", *["told"] * 3]

    asyncio.run(answer())


def test_commits_leave_the_disk_to_another_thread_which_brings_all_of_them_into_the_file(tmp_path):
    ledger = Ledger(tmp_path / "tinker.db")
    ledger.leave_folding()
    for number in range(300):  # more than SQLite's log holds by itself: 1,000 pages of 4 KB
        ledger.take(LoggedRequest(f"s:{number}", "asample", b"x" * 20_000, "", "lab", 0.0))
    before = (tmp_path / "tinker.db").stat().st_size
    with ThreadPoolExecutor(1) as pool:
        num_pages = pool.submit(ledger.fold).result()
    assert num_pages > 1000
    assert before < 4096 * 10 < 300 * 20_000 < (tmp_path / "tinker.db").stat().st_size
    ledger.take(LoggedRequest("s:after", "asample", b"", "", "lab", 0.0))
    assert ledger.request("s:after").body == b""


def test_tags_reach_the_host_with_the_project(place):
    async def begin() -> None:
        body = as_json(tags=["rlmux.priority=background", "rlmux.slo=1.5"])
        session = (await place.post("create_session", body)).json()["session_id"]
        await place.post("create_model", as_json(session_id=session, model_seq_id=0, base_model=SERVED.name))

    asyncio.run(begin())
    hints, project = place.host.opened["s0-0"]
    assert (hints.urgency, hints.slo) == (Urgency.BACKGROUND, 1.5)
    assert project.startswith("key-")


def test_a_project_that_used_up_its_budget_waits_for_the_next_day_and_ends_its_step(tmp_path):
    place = Place(tmp_path / "front", {Keys({}).project("k"): 1.0})

    async def use_up() -> None:
        session = await place.begin()
        model = f"{session}:train:0"
        await place.post("forward_backward", training_body(model, 1, seed=1))
        place.front.charge(PipelineId("s0-0"), 3000.0)
        assert (await place.http.post("asample", content=sample(session, 0))).status_code == 200
        place.front.charge(PipelineId("s0-sampling-0"), 600.0)
        refused = await place.http.post("asample", content=sample(session, 1))
        assert refused.status_code == 402
        assert "has used 1 of 1 device-hours today; goes on at 00:00 UTC" in refused.json()["detail"]
        loss = await place.http.post("forward_backward", content=training_body(model, 3, seed=1))
        assert loss.status_code == 402
        update = as_json(model_id=model, seq_id=2, adam_params={"learning_rate": 0.1})
        assert (await place.http.post("optim_step", content=update)).status_code == 200
        assert (await place.http.post("asample", content=sample(session, 0))).status_code == 200, "a repeated one"
        place.day = 2
        assert (await place.http.post("asample", content=sample(session, 1))).status_code == 200

    asyncio.run(use_up())


def test_a_budget_that_is_raised_lets_the_refused_request_through_and_outlives_the_front(tmp_path):
    project = Keys({}).project("k")
    place = Place(tmp_path / "front", {project: 1.0})

    async def go_on() -> None:
        session = await place.begin()
        place.front.charge(PipelineId("s0-0"), 3600.0)
        assert (await place.http.post("asample", content=sample(session, 0))).status_code == 402
        elsewhere = Ledger(place.folder / "tinker.db")
        ProjectBudgets(elsewhere, {}).set_hours(project, 1.5)
        elsewhere.close()
        assert (await place.http.post("asample", content=sample(session, 0))).status_code == 200

    asyncio.run(go_on())
    assert ProjectBudgets(Ledger(place.folder / "tinker.db"), {project: 1.0}).hours(project) == 1.5


def test_what_an_order_took_is_charged_on_all_its_devices_and_kept(tmp_path):
    charged: list[tuple[str, float]] = []
    charges = Charges(lambda pipeline, device_s: charged.append((pipeline, device_s)))
    devices = (DeviceId("train", 0, 0), DeviceId("train", 0, 1))
    order = RunStage(
        order=OrderId(7), pipeline=PipelineId("a"), step=1, stage=Stage.UPDATE, devices=devices, weight_version=0
    )
    charges.update([], [order])
    ended = StageFinished(time_s=9.0, order=OrderId(7), seconds=2.0, switch_s=0.5)
    charges.update([ended, ended], [])
    assert charged == [("a", 5.0)]
    for _ in range(2):
        ledger = Ledger(tmp_path / "tinker.db")
        ProjectBudgets(ledger, {}, today=lambda: 1).charge("lab", 5.0)
        ledger.close()
    assert Ledger(tmp_path / "tinker.db").usage("lab", 1) == 10.0


def test_a_batch_is_charged_to_each_client_by_its_tokens_and_the_sum_is_what_was_held():
    charged: list[tuple[str, float]] = []
    charges = Charges(lambda pipeline, device_s: charged.append((pipeline, device_s)))
    charges.update([], [order_of(1, "a")])
    for tokens, seconds in (({"a": 10, "b": 30}, 2.0), ({"b": 5, "c": 5}, 1.0)):
        charges.update([], [], [shared(tokens, seconds)])
    ended = StageFinished(time_s=9.0, order=OrderId(1), seconds=4.0, switch_s=0.5)
    charges.update([ended], [])
    assert charged == [("a", 2.0), ("b", 1.5 + 0.5), ("c", 0.5)]
    charges.update([], [order_of(1, "b")], [shared({"a": 1, "b": 1}, 1.0)])  # of the order that has ended
    charges.update([ended], [])
    assert charged[3:] == [("b", 4.5)]


def shared(tokens: dict[str, int], seconds: float) -> SharedBatchNote:
    return SharedBatchNote(order=OrderId(1), tokens=tokens, seconds=seconds)


def order_of(number: int, pipeline: str, node: int = 0) -> RunStage:
    device = DeviceId("train", node, 0)
    return RunStage(
        order=OrderId(number), pipeline=PipelineId(pipeline), step=1, stage=Stage.UPDATE, devices=(device,),
        weight_version=0,
    )  # fmt: skip


@pytest.mark.parametrize(
    "ending",
    [
        WorkerLost(time_s=1.0, pipeline=PipelineId("a"), device=DeviceId("train", 0, 0)),
        PipelineFailed(time_s=1.0, pipeline=PipelineId("a"), reason="died"),
        PipelineRestarted(time_s=1.0, pipeline=PipelineId("a"), restored_step=0),
        NodeLost(time_s=1.0, node=NodeId("train", 0)),
        Park(pipeline=PipelineId("a")),
        Release(pipeline=PipelineId("a")),
    ],
    ids=lambda ending: type(ending).__name__,
)
def test_an_order_that_ends_without_a_word_is_forgotten_and_others_are_still_charged(ending):
    charged: list[str] = []
    charges = Charges(lambda pipeline, device_s: charged.append(pipeline))
    charges.update([], [order_of(1, "a"), order_of(2, "b", node=1)])
    charges.update([ending], []) if hasattr(ending, "time_s") else charges.update([], [ending])
    assert charges.num_open == 1
    charges.update([StageFinished(time_s=9.0, order=OrderId(number), seconds=1.0) for number in (1, 2)], [])
    assert charged == ["b"]
    assert charges.num_open == 0
