"""Pipelines that come and go while a controller runs: the socket, the run API, and what the log keeps."""

from __future__ import annotations

import json
import socket
import stat
import threading
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.waiting import LIMIT_S, until

from rlmux.config.shares import parse_shares
from rlmux.core.actions import Admit, Refuse, Release, RunStage
from rlmux.core.errors import RlmuxError, UserError
from rlmux.core.events import PipelineSubmitted, SharesSet
from rlmux.core.model import PipelineId
from rlmux.core.scheduler import Scheduler
from rlmux.log.restored_shares import shares_events
from rlmux.log.run_log import LogReader, RunLog, run_header
from rlmux.policies import make_policy
from rlmux.policies.max_min_fairness import FairShares
from rlmux.runtime import controller
from rlmux.runtime.control.control_requests import GetStatus
from rlmux.runtime.control.control_socket import SOCKET_NAME, ControlServer, NotRunningError, send_request, send_words
from rlmux.runtime.control.run_control import RunControl, submitted_to
from rlmux.runtime.controller import Controller
from rlmux.runtime.fake_backend import FakeBackend
from rlmux.runtime.records.usage_notes import UsageNotes

STAGE_S = 0.05
ACCEPTED = (
    "accepted: submit, cancel, retry, remove, hold, release, rank, park, unpark, why, queue, account, usage, "
    "set_shares, status, check, notice, node_back"
)


class Run:
    """A controller, by default on the fake backend, asked from threads as other processes would."""

    def __init__(self, folder: Path, real: Any, *, policy: str = "rollmux", make_backend: Any = None) -> None:
        self.folder = folder
        folder.mkdir()
        cluster = real.cluster()
        self.scheduler = Scheduler(cluster, make_policy(policy), FairShares())
        self.backend: Any = (
            make_backend(cluster, folder, options=None) if make_backend else FakeBackend(lambda action: STAGE_S)
        )
        self.log = RunLog.create(folder, run_header(policy="rollmux", backend="fake", cluster=cluster))
        self.run_api = RunControl(
            ControlServer(folder, getattr(self.backend, "workplace", self.backend).wake),
            self.scheduler,
            parse(real),
            over={"past": {}},
            is_kept_open=True,
            taken={"p": ["past"]},
        )
        self.controller = Controller(self.scheduler, self.backend, self.log, run_api=self.run_api)
        self.answers: list[dict[str, Any]] = []
        self.types_at_answers: list[list[str]] = []
        """Types of the rows that the log had when each answer came."""

    def run(self, given: list[Any], *asked: dict[str, Any], until: Callable[[], bool] = lambda: True) -> None:
        """Ask one thing after another while it runs; end when all are answered and `until` holds."""

        def ask_all() -> None:
            for fields in asked:
                try:
                    self.answers.append(send_words(self.folder, fields))
                except UserError as error:
                    self.answers.append({"refused": str(error)})
                with LogReader(self.folder) as log:
                    self.types_at_answers.append([entry.type for entry in log.entries()])

        client = threading.Thread(target=ask_all)
        client.start()
        try:
            self.controller.run(given, until=lambda: not client.is_alive() and until())
        finally:
            self.close()
            client.join()

    def close(self) -> None:
        self.run_api.close()
        self.backend.close()
        self.log.close()

    def is_over(self, name: str) -> bool:
        query, pipeline = self.scheduler.query, PipelineId(name)
        return pipeline in query and query.status(pipeline).value not in ("waiting", "running")


def parse(real: Any) -> Any:
    """`NAME STEPS [AT_S] [NODES]` lines stand for a file."""

    def parse_lines(text: str, source: str) -> list[Any]:
        given = []
        for line in text.splitlines():
            name, steps, *more = line.split()
            if not steps.isdigit():
                raise UserError(f"{source}: steps is {steps!r}; accepted: a whole number")
            nodes = int(more[1]) if len(more) > 1 else 1
            one = real.submission(name, num_steps=int(steps), num_rollout_nodes=nodes)
            given.append(real.replace(one, submit_at_s=float(more[0]) if more else 0.0))
        return given

    return parse_lines


def submit(text: str, **more: str) -> dict[str, Any]:
    return {"request": "submit", "text": text, "source": "more.yaml", **more}


def cancel(name: str) -> dict[str, Any]:
    return {"request": "cancel", "name": name}


@pytest.fixture
def going(tmp_path, real):
    return Run(tmp_path / "run", real)


def test_an_answer_comes_once_what_it_says_is_in_the_log(tmp_path, real, monkeypatch):
    """A run that is killed right after loses nothing that a client was told."""
    commit = RunLog.commit

    def commit_late(log: RunLog) -> None:
        time.sleep(0.02)
        commit(log)

    monkeypatch.setattr(RunLog, "commit", commit_late)
    going = Run(tmp_path / "run", real, policy="solo")
    asked = [submit("b 9\nlater 9 999"), {"request": "hold", "name": "b"}, cancel("b"), cancel("later")]
    going.run([real.submission("a", num_steps=1_000_000)], *asked)
    logged = ["submitted", "PipelineHeld", "PipelineCancelled", "pipeline_end"]
    assert [one in types for one, types in zip(logged, going.types_at_answers, strict=True)] == [True] * 4


def test_a_pipeline_that_is_struck_off_last_of_all_is_in_the_log(going, real):
    going.run_api.is_kept_open = False
    going.run([real.replace(real.submission("later"), submit_at_s=999.0)], cancel("later"))
    assert going.answers == [{"ok": True, "pipeline": "later", "outcome": "struck off"}]
    with LogReader(going.folder) as log:
        assert [one.value["pipeline"] for one in log.entries() if one.type == "pipeline_end"] == ["later"]


def test_a_submitted_pipeline_is_placed_runs_and_leaves(going, real):
    going.run([real.submission("a")], submit("b 3"), until=lambda: going.is_over("b"))
    (placed,) = going.answers[0]["pipelines"]
    assert (placed["pipeline"], placed["outcome"]) == ("b", "placed")
    assert placed["rollout_nodes"] == ["rollout-0"]
    assert going.scheduler.query.status(PipelineId("b")).value == "finished"
    orders = [action for action in going.backend.executed if isinstance(action, RunStage)]
    assert {order.step for order in orders if order.pipeline == "b"} == {0, 1, 2, 3}


def test_a_pipeline_that_can_never_fit_is_refused_with_the_numbers_and_disturbs_no_other(going, real):
    going.run([real.submission("a")], submit("big 3 0 4"), until=lambda: going.is_over("a"))
    (refused,) = going.answers[0]["pipelines"]
    assert refused["outcome"] == "refused"
    assert "4" in refused["reason"]
    assert "1" in refused["reason"]
    assert any(isinstance(action, Refuse) for action in going.backend.executed)
    assert going.scheduler.query.status(PipelineId("a")).value == "finished"


def test_what_cannot_be_read_is_refused_and_leaves_no_trace(going, real):
    going.run([real.submission("a")], submit("b many"), submit("a 3"), submit("past 3"))
    assert going.answers[0] == {"refused": "more.yaml: steps is 'many'; accepted: a whole number"}
    assert "pipeline 'a' is in this run already" in going.answers[1]["refused"]
    assert "pipeline 'past' is in this run already" in going.answers[2]["refused"]
    assert submitted_to(going.folder) == []
    assert {action.pipeline for action in going.backend.executed if isinstance(action, Admit)} <= {"a"}


def test_what_was_taken_is_in_the_log_before_anything_of_it_starts(going, real):
    going.run([], submit("b 2\nc 2"), until=lambda: going.is_over("c"))
    (submitted,) = submitted_to(going.folder)
    assert (submitted.source, submitted.resolved) == ("more.yaml", "b 2\nc 2")
    assert submitted.at_s >= 0.0


def test_a_submission_with_an_id_is_taken_once_whatever_part_of_the_run_took_it(going, real):
    twice = submit("b 3\nlate 1 1000000", id="k")
    going.run([], twice, twice, submit("past 3", id="p"), until=lambda: going.is_over("b"))
    first, again, past = (answer["pipelines"] for answer in going.answers)
    assert [one["outcome"] for one in first] == ["placed", "upcoming"]
    assert [(one["pipeline"], one["outcome"]) for one in again][1] == ("late", "upcoming")
    assert again[0]["outcome"] in ("running", "finished")
    assert past == [{"pipeline": "past", "outcome": "over", "reason": "it ended before"}]
    assert [one.resolved for one in submitted_to(going.folder)] == ["b 3\nlate 1 1000000"]


def test_a_cancelled_pipeline_ends_at_a_safe_point_and_gives_its_nodes_back(going, real):
    going.run([], submit("b 100000"), cancel("b"), submit("c 1"), until=lambda: going.is_over("c"))
    assert going.answers[1]["outcome"] == "ends at its next safe point"
    assert going.scheduler.query.status(PipelineId("b")).value == "cancelled"
    assert Release(pipeline=PipelineId("b")) in going.backend.executed
    assert going.scheduler.query.status(PipelineId("c")).value == "finished"


def test_a_pipeline_that_is_still_to_come_is_shown_and_can_be_struck_off(going, real):
    look = {"request": "status"}
    going.run([], submit("late 2 1000000"), look, cancel("late"), look, submit("late 2"))
    assert going.answers[0]["pipelines"][0]["outcome"] == "upcoming"
    assert [one["pipeline"] for one in going.answers[1]["upcoming"]] == ["late"]
    assert going.answers[2]["outcome"] == "struck off"
    assert going.answers[3]["upcoming"] == []
    assert "in this run already" in going.answers[4]["refused"]


def test_a_waiting_pipeline_is_explained_held_ranked_and_released(tmp_path, real):
    """Both want the only nodes; the notes are what a resumed run knows of those that wait."""
    going = Run(tmp_path / "run", real, policy="solo")

    def ask_for(request: str, name: str = "b", **more: object) -> dict[str, Any]:
        return {"request": request, "name": name, **more}

    going.run(
        [real.submission("a", num_steps=1_000_000), real.submission("b", num_steps=1)],
        {"request": "status"},  # answered in the tick in which both are submitted, or later
        ask_for("why"),
        ask_for("why", "a"),
        ask_for("hold", "a"),
        ask_for("hold"),
        ask_for("why"),
        ask_for("rank", rank=3),
        ask_for("release"),
        ask_for("why", "past"),
        cancel("a"),
        until=lambda: going.is_over("b"),
    )
    _, why, running, refused, _, held, _, _, past, _ = going.answers
    assert (why["token"], why["position"], why["num_waiting"], why["status"]) == ("no_room", 1, 1, "waiting")
    assert why["would_start_now_if"] == [{"key": "without", "was": "", "to": "a"}]
    assert (running["status"], running["token"]) == ("running", None)
    assert refused["refused"] == "pipeline 'a' is running; accepted: one that waits"
    assert (held["token"], held["position"], held["reason"]) == ("held", 0, "its user holds it")
    assert past["refused"] == "no pipeline 'past' waits or runs here; accepted: one of: a, b"
    with LogReader(going.folder) as reader:
        assert reader.state().standings == {"b": {"is_held": False, "rank": 3}}


def test_a_running_pipeline_is_parked_and_goes_on(going, real):
    def ask_for(request: str, name: str = "a") -> dict[str, Any]:
        return {"request": request, "name": name}

    ticks = [{"request": "status"}] * 40
    """Each is answered in a tick of its own, in which one stage of the step may end."""
    going.run(
        [real.submission("a", num_steps=1_000_000)],
        {"request": "status"},
        ask_for("unpark"),
        ask_for("park", "past"),
        ask_for("park"),
        *ticks,
        ask_for("why"),
        ask_for("unpark"),
        cancel("a"),
        until=lambda: going.is_over("a"),
    )
    _, early, unknown, parked, *_, why, unparked, _ = going.answers
    assert early["refused"] == "pipeline 'a' is not parked; accepted: one that `park` or `hold` keeps"
    assert unknown["refused"] == "no pipeline 'past' waits or runs here; accepted: one of: a"
    assert parked["outcome"] == "gives its devices back at its next step boundary"
    assert (why["token"], why["reason"], why["released_by"]) == ("held", "its user parked it", "unpark")
    assert [change["key"] for change in why["would_start_now_if"]] == ["hold"]
    assert unparked["outcome"] == "goes on as soon as there is room"
    with LogReader(going.folder) as reader:
        assert reader.state().standings == {"a": {"is_held": False}}


SHARES = """
shares:
  projects:
    lab: {weight: 2, quota: {running: 1}}
"""


def test_shares_set_while_it_runs_hold_at_once_and_are_kept(tmp_path, real):
    going = Run(tmp_path / "run", real)
    going.run_api._parse_shares = parse_shares
    going.run(
        [
            real.replace(one, pipeline=real.replace(one.pipeline, user="ann", project="lab"))
            for one in (real.submission("a", num_steps=1_000_000), real.submission("b", num_steps=1))
        ],
        {"request": "set_shares", "text": "shares: {projets: {}}", "source": "s.yaml"},
        {"request": "set_shares", "text": SHARES, "source": "s.yaml"},
        {"request": "why", "name": "b"},
        {"request": "usage"},
        cancel("a"),
        until=lambda: going.is_over("a"),
    )
    wrong, answer, _, usage, _ = going.answers
    accepted = "half_life_h, parks, min_steps, projects, users"
    assert (
        wrong["refused"]
        == f"s.yaml:1: shares.projets is an empty mapping: unknown key; nearest: projects; accepted: {accepted}"
    )
    assert answer["outcome"] == "holds from now on"
    (row,) = usage["accounts"]
    assert (row["project"], row["user"], row["weight"], row["quota"]["max_running"]) == ("lab", "ann", 2.0, 1)
    with LogReader(going.folder) as reader:
        (event,) = shares_events(reader.state().shares, None, 7.0)
    assert replace(event, time_s=7.0) == SharesSet(time_s=7.0, shares=parse_shares(SHARES, "s.yaml"))


def test_a_file_after_which_too_many_would_wait_is_refused_whole_and_taken_once_fewer_do(tmp_path, real):
    """Of those of lab three may wait: one does behind `a`, one is to come, and a file of two is one too many."""
    going = Run(tmp_path / "run", real, policy="solo")
    going.run_api._parse_shares = parse_shares
    lines = going.run_api._parse

    def parse_of_lab(text: str, source: str) -> list[Any]:
        return [of_lab(real, one) for one in lines(text, source)]

    going.run_api._parse = parse_of_lab
    shares = "shares: {projects: {lab: {quota: {waiting: 3}}}}"
    going.run(
        [of_lab(real, real.submission("a", num_steps=1_000_000))],
        {"request": "set_shares", "text": shares, "source": "s.yaml"},
        submit("b 1\nc 1 999"),
        {"request": "check", "text": "d 1\ne 1", "source": "more.yaml"},
        submit("d 1\ne 1", id="k"),
        cancel("c"),
        submit("d 1\ne 1", id="k2"),
        cancel("a"),
        until=lambda: all(going.is_over(name) for name in "abde"),
    )
    refused = {
        "refused": "more.yaml: over quota: 2 pipelines of lab wait or are to come, with 2 more it is 4 of 3; "
        "accepted: fewer at once, or the same again when fewer wait"
    }
    assert going.answers[2:4] == [refused, refused]
    assert [one["outcome"] for one in going.answers[5]["pipelines"]] == ["waiting", "waiting"]
    assert [one.resolved for one in submitted_to(going.folder)] == ["b 1\nc 1 999", "d 1\ne 1"]


def test_a_run_that_is_resumed_goes_on_with_the_dollars_that_were_spent(tmp_path, real):
    """The log's own rows: settings, then what was used and spent, are told to the next scheduler before all else."""
    cluster = real.cluster()
    priced = {name: real.replace(pool, usd_per_gpu_hour=3600.0) for name, pool in cluster.pools.items()}
    cluster = real.replace(cluster, pools=priced)
    folder = tmp_path / "run"
    folder.mkdir()
    text = "shares: {projects: {lab: {quota: {budget_usd: {limit: 0.2}}}}}"
    shares = parse_shares(text, "s.yaml", cluster)
    scheduler = Scheduler(cluster, make_policy("solo"), FairShares())
    log = RunLog.create(folder, run_header(policy="solo", backend="fake", cluster=cluster))
    notes = UsageNotes(scheduler, log)
    one = of_lab(real, real.submission("a", num_steps=1_000_000))
    controller = Controller(scheduler, FakeBackend(lambda action: STAGE_S), log, [notes])
    controller.run(
        [one],
        until=lambda: bool(scheduler.spent()) and "spent" in reason_of(scheduler, "a"),
        first=shares_events(shares, None, 0.0),
    )
    notes.write(log.last_time_s)
    log.close()
    with LogReader(folder) as reader:
        state = reader.state()
    told = shares_events(state.shares, state.usage, state.last_time_s)
    again = Scheduler(cluster, make_policy("solo"), FairShares())
    for event in told:
        again.handle(replace(event, time_s=state.last_time_s))
    assert again.spent()[0].usd >= 0.2
    assert again.spent()[0].usd == pytest.approx(scheduler.spent()[0].usd)
    again.handle(PipelineSubmitted(time_s=state.last_time_s, pipeline=one.pipeline))
    assert again.query.reason(PipelineId("a")).startswith("budget spent")


def reason_of(scheduler: Scheduler, name: str) -> str:
    return scheduler.query.reason(PipelineId(name)) if PipelineId(name) in scheduler.query else ""


def of_lab(real: Any, one: Any) -> Any:
    return real.replace(one, pipeline=real.replace(one.pipeline, user="ann", project="lab"))


@pytest.mark.quick_on_ray
def test_a_request_ends_the_controllers_wait(real, make_backend, tmp_path, monkeypatch):
    monkeypatch.setattr(controller, "_POLL_S", 10 * LIMIT_S)
    going = Run(tmp_path / "run", real, make_backend=make_backend)

    def ask_all() -> None:
        try:
            for fields in ({"request": "status"}, submit("late 1 9999"), cancel("late")):
                going.answers.append(send_words(going.folder, fields))
        finally:
            going.controller.stop()
            going.backend.workplace.wake()

    client = threading.Thread(target=ask_all)
    client.start()
    try:
        going.controller.run([])
    finally:
        client.join()
        going.close()
    status, submitted, cancelled = going.answers
    assert status["upcoming"] == []
    assert submitted["pipelines"][0]["outcome"] == "upcoming"
    assert cancelled["outcome"] == "struck off"


def test_pipelines_come_and_go_and_those_that_stay_train_the_same_weights(real, make_backend, tmp_path):
    alone = real.run(tmp_path / "alone", [real.submission("stays", num_steps=6), real.submission("comes", num_steps=3)])
    going = Run(tmp_path / "run", real, make_backend=make_backend)
    going.run(
        [real.submission("stays", num_steps=6)],
        submit("comes 3\ngoes 100000"),
        cancel("goes"),
        submit("big 3 0 4"),
        until=lambda: going.is_over("stays") and going.is_over("comes") and going.is_over("goes"),
    )
    assert [one["outcome"] for one in going.answers[0]["pipelines"]] == ["placed", "placed"]
    assert going.answers[2]["pipelines"][0]["outcome"] == "refused"
    query = going.scheduler.query
    status = {name: query.status(name).value for name in query.pipelines()}
    assert status == {"stays": "finished", "comes": "finished", "goes": "cancelled", "big": "refused"}
    assert {name: going.backend.weights_sha256(name) for name in ("stays", "comes")} == alone.sha256


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        (cancel("nobody"), "no pipeline 'nobody'; accepted: one that waits or runs, of: a"),
        (cancel("past"), "pipeline 'past' is over"),
        ({"request": "dance"}, f"request 'dance' with ['request']: {ACCEPTED}"),
        ({"request": "cancel"}, f"request 'cancel' with ['request']: {ACCEPTED}"),
    ],
)
def test_a_wrong_request_is_told_what_is_accepted(going, real, asked, reason):
    going.run([real.submission("a", num_steps=100_000)], asked)
    assert going.answers[0]["refused"].startswith(reason)


def test_only_the_owner_gets_to_the_socket_and_it_goes_with_the_run(tmp_path):
    tmp_path.chmod(0o700)
    server = ControlServer(tmp_path)
    assert stat.S_IMODE((tmp_path / SOCKET_NAME).stat().st_mode) == 0o600
    server.close()
    assert not (tmp_path / SOCKET_NAME).exists()
    with pytest.raises(NotRunningError, match="nothing runs there now"):
        send_request(tmp_path, GetStatus())


def test_a_socket_that_a_killed_run_left_behind_is_taken_over(tmp_path):
    with closing(socket.socket(socket.AF_UNIX)) as dead:
        dead.bind(str(tmp_path / SOCKET_NAME))
    with pytest.raises(NotRunningError):
        send_request(tmp_path, GetStatus())
    ControlServer(tmp_path).close()


def test_a_folder_deeper_than_socket_addresses_may_be_long_works(tmp_path):
    deep = tmp_path / ("x" * 120) / ("y" * 120)
    deep.mkdir(parents=True)
    with closing(ControlServer(deep)) as server, closing(Served(server)):
        assert send_request(deep, GetStatus())["echo"] == {"request": "status"}


class Served:
    """Answers every request of a server with what was asked."""

    def __init__(self, server: ControlServer) -> None:
        self._server = server
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        while not self._is_over.wait(0.005):
            for request in self._server.requests():
                request.answer(echo=request.words)

    def close(self) -> None:
        self._is_over.set()
        self._thread.join()


def test_clients_that_talk_nonsense_or_nothing_or_leave_hold_up_no_other(tmp_path):
    with closing(ControlServer(tmp_path)) as server, closing(Served(server)):
        idle = [socket.socket(socket.AF_UNIX) for _ in range(40)]
        for one in idle:
            one.connect(str(tmp_path / SOCKET_NAME))
        idle[-1].sendall(b'[1, 2]\n{"request": "st')
        assert b"not a JSON object" in idle[-1].recv(1000)
        idle[-2].sendall(b"x" * 1000)
        idle[-3].close()
        assert send_request(tmp_path, GetStatus())["echo"] == {"request": "status"}
        idle[-1].sendall(b'atus"}\n')
        assert json.loads(idle[-1].recv(1000))["echo"] == {"request": "status"}
        for one in idle:
            one.close()


def test_a_run_that_ends_before_it_answers_says_so(tmp_path):
    server = ControlServer(tmp_path)
    failures: list[str] = []

    def ask_once() -> None:
        with pytest.raises(RlmuxError) as caught:
            send_request(tmp_path, GetStatus())
        failures.append(str(caught.value))

    client = threading.Thread(target=ask_once)
    client.start()
    until(server.requests, "a request", poll_s=0.001)
    server.close()
    client.join()
    assert failures == [f"{tmp_path}: the run ended before it answered"]


@pytest.mark.parametrize("depth", [1_000, 100_000])
def test_json_that_is_nested_too_deeply_is_refused_like_any_nonsense(tmp_path, depth):
    with closing(ControlServer(tmp_path)) as server, closing(Served(server)):
        with closing(socket.socket(socket.AF_UNIX)) as client:
            client.connect(str(tmp_path / SOCKET_NAME))
            client.sendall(b"[" * depth + b"]" * depth + b"\n")
            assert b"not a JSON object" in client.recv(1000)
        assert send_request(tmp_path, GetStatus())["echo"] == {"request": "status"}
