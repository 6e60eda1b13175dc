"""A service as a user starts it: real processes, killed at the worst moments."""

from __future__ import annotations

import contextlib
import io
import json
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing

import pytest
from tests.service.service_process import Service
from tests.small_files import small_file

import rlmux
from rlmux.cli import remote
from rlmux.cli.main import run_command_line
from rlmux.client import on_server
from rlmux.client.target import target_of
from rlmux.config.service_file import load_service_file
from rlmux.core.errors import UserError
from rlmux.policies import POLICIES
from rlmux.runtime.control.run_control import submitted_to
from rlmux.service.dashboard.auth import audit, tokens
from rlmux.service.lanes.controllers import LaneController
from rlmux.service.lanes.data_dir import open_root

pytestmark = pytest.mark.xdist_group("service")  # one service for all
CLUSTER = "cluster: {pools: {rollout: {devices: 1}, train: {devices: 1}}}"


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """Both processes end with the module."""
    pytest.importorskip("torch")
    one = Service(tmp_path_factory.mktemp("service"))
    one.start()
    try:
        yield one
    finally:
        one.kill()
        with contextlib.suppress(ProcessLookupError, AssertionError):
            one.kill_controller()


@pytest.mark.slow
def test_pipelines_submitted_from_elsewhere_finish_though_server_and_controller_are_killed(service, tmp_path):
    """Both bring a module of the same name: each is scored by its own."""
    for name, reward in (("low", 0.25), ("high", 0.75)):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "scores.py").write_text(f"def score(data_source, solution_str, ground_truth): return {reward}")
        task = '{name: file, path: rows.jsonl, prompt_key: q, answer_key: a, reward: "scores:score"}'
        (folder / "rows.jsonl").write_text('{"q": "12", "a": "3"}\n{"q": "21", "a": "3"}\n')
        text = small_file(f"{{name: {name}, seed: 1, task: {task}}}", steps=12).partition("\n")[2]
        (folder / "file.yaml").write_text(text)
    said = service.rlmux("submit", str(tmp_path / "low" / "file.yaml"), "--to", service.url)
    assert said.code == 0, said.err
    service.until_up()
    service.kill()
    pid = service.controller
    assert pid is not None, "training goes on without the server"
    service.start()
    assert service.rlmux("submit", str(tmp_path / "high" / "file.yaml"), "--to", service.url).code == 0
    assert service.controller == pid, "the server found the controller that was there"
    service.kill_controller()
    service.until(lambda: service.controller not in (None, pid), "another controller")
    service.until_up()
    service.until(
        lambda: [one["status"] for one in service.status()["pipelines"].values()] == ["finished"] * 2, "the end of both"
    )
    ended = service.status()["pipelines"]
    assert {name: (one["step"], one["reward_last"]) for name, one in ended.items()} == {
        "low": (12, 0.25),
        "high": (12, 0.75),
    }
    assert len(submitted_to(service.lane)) == 2


@pytest.mark.slow
@pytest.mark.parametrize(("num_clients", "num_kills"), [(6, 2), (60, 20)])
def test_submissions_of_many_clients_are_there_once_though_the_server_is_killed(
    service, monkeypatch, num_clients, num_kills
):
    """They come later than the test lasts: nothing is started for them. A busy machine takes long to start a server."""
    monkeypatch.setattr(on_server, "_AWAY_S", 400.0)
    service.until_up()
    names = [f"late{num_clients}-{number:02}" for number in range(num_clients)]
    kills = {(each + 1) * num_clients // (num_kills + 1) for each in range(num_kills)}
    outcomes: dict[str, str] = {}

    def submit(connection: rlmux.Connection, name: str) -> None:
        file = {"pipelines": [{"name": name, "task": "sort", "steps": 1, "submit_at_s": 1e6}]}
        (outcome,) = connection.submit(file)
        outcomes[name] = outcome["outcome"]

    pid = service.controller
    with service.environment():
        connection = rlmux.connect(f"{service.url}/lanes/cpu")
        clients = [threading.Thread(target=submit, args=(connection, name)) for name in names]
        for number, client in enumerate(clients):
            client.start()
            if number in kills:
                service.kill()
                service.start()
        for client in clients:
            client.join()
    assert set(outcomes) == set(names)
    assert set(outcomes.values()) <= {"upcoming", "accepted"}
    service.until(lambda: set(names) <= set(service.upcoming()), f"{names} to be upcoming")
    assert [name for name in service.upcoming() if name in names] == names
    assert service.controller == pid, "each server found the controller that was there"


def test_what_is_submitted_while_the_controller_is_away_is_kept_and_taken_once(service):
    """A killed controller is started again, and knows what was submitted before."""
    service.until_up()
    before = service.upcoming()
    pid = service.controller
    service.kill_controller()
    file = service.folder / "away.yaml"
    file.write_text("pipelines: [{name: away, task: sort, steps: 1, submit_at_s: 1000000.0}]")
    said = service.rlmux("submit", str(file), "--to", f"{service.url}/lanes/cpu")
    assert said.out == "away: accepted: kept; it goes to the lane as soon as its controller answers\n"
    service.until(lambda: service.controller not in (None, pid), "another controller")
    service.until(lambda: "away" in service.upcoming(), "`away` to be upcoming")
    assert service.upcoming() == sorted([*before, "away"])
    assert [row["state"] for row in service.client.get("/submissions?limit=1").json()["items"]] == ["taken"]


@pytest.mark.slow
def test_a_folder_and_a_url_answer_every_verb_alike(service):
    service.until_up()
    in_folder, on_server = str(service.lane), f"{service.url}/lanes/cpu"
    file = service.folder / "far.yaml"
    file.write_text("pipelines: [{name: far, task: sort, steps: 1, submit_at_s: 1000000.0}]")
    verbs = [
        lambda place, name: ["submit", str(file), "--to", place, "--json", "--set", f"pipelines.far.name={name}"],
        lambda place, name: ["status", place, "--json"],
        lambda place, name: ["cancel", place, name],
        lambda place, name: ["cancel", place, name],
        lambda place, name: ["logs", place, "nobody"],
        lambda place, name: ["why", place, "nobody", "--json"],
        lambda place, name: ["hold", place, "nobody"],
        lambda place, name: ["release", place, "nobody"],
        lambda place, name: ["rank", place, "nobody", "3"],
        lambda place, name: ["queue", place, "--json"],
        lambda place, name: ["alerts", place, "--json"],
        lambda place, name: ["alerts", place, "--ack", "kl_huge"],
        lambda place, name: ["export", place],
    ]
    for verb in verbs:
        one, other = (
            service.rlmux(*verb(place, name)) for place, name in ((in_folder, "inside"), (on_server, "outside"))
        )
        assert one.code == other.code, (one, other)
        assert shape(one.out) == shape(other.out.replace("outside", "inside"))
        here, there = one.err.replace(in_folder, "P"), other.err.replace(on_server, "P")
        assert here == there.replace("outside", "inside")


def shape(text: str) -> object:
    """What is printed; of JSON, and of lines of JSON, keys and the types of values."""
    if not text.startswith("{"):
        return text
    lines = text.splitlines()
    if len(lines) > 1 and all(line.startswith("{") for line in lines):
        return [shape(line) for line in lines]

    def of(value: object) -> object:
        if isinstance(value, dict):
            return {key: of(each) for key, each in value.items()}
        return [of(value[0])] if isinstance(value, list) and value else type(value).__name__

    return of(json.loads(text))


def test_a_token_without_admin_submits_and_changes_its_own_users_pipelines_alone(service):
    service.until_up()
    token = tokens.add(service.root, "ann", ["read", "submit", "control"], days=1.0, now=time.time())

    def submit(name: str, user: str, token: str) -> int:
        file = {"pipelines": [{"name": name, "task": "sort", "steps": 1, "user": user, "submit_at_s": 1e6}]}
        body = {"lane": "cpu", "text": json.dumps(file), "source": "it.yaml"}
        headers = {"Authorization": f"Bearer {token}", "Idempotency-Key": f"{name} {user} {token}"}
        return service.client.post("/submissions", json=body, headers=headers).status_code

    def cancel(name: str) -> int:
        headers = {"Authorization": f"Bearer {token}"}
        return service.client.post(f"/pipelines/cpu/{name}/cancel", json={}, headers=headers).status_code

    assert submit("of-bob", "bob", token) == 403
    assert submit("of-bob", "bob", service.token) < 300
    assert submit("of-ann", "ann", token) < 300
    service.until(lambda: {"of-ann", "of-bob"} <= set(service.upcoming()), "a pipeline of each to be upcoming")
    assert (cancel("of-bob"), cancel("of-ann")) == (403, 200)
    assert "of-bob" in service.upcoming()
    assert "of-ann" not in service.upcoming()
    rows, _ = audit.read(service.root, user="ann")
    assert [row["status"] for row in rows if row["path"].endswith("/cancel")] == [200, 403], "newest first"
    service.client.post("/pipelines/cpu/of-bob/cancel", json={})


def test_a_lane_is_reached_from_python(service):
    service.until_up()
    with service.environment():
        connection = rlmux.connect(service.url)
        assert connection.status()["is_kept_open"]
        with pytest.raises(rlmux.UserError, match="no pipeline 'nobody' waits or runs here"):
            connection.why("nobody")
        with pytest.raises(rlmux.UserError, match="its folder is the server's; accepted: a connection to a folder"):
            connection.run  # noqa: B018


@pytest.mark.slow
def test_a_connection_rides_through_a_server_that_is_killed_and_started_again(service, caplog):
    service.until_up()
    with service.environment():
        connection = rlmux.connect(service.url, patience_s=400.0)
        hasty = rlmux.connect(service.url, patience_s=0.0)
        (outcome,) = connection.submit({"pipelines": [{"name": "rides", "task": "sort", "steps": 100_000}]})
        assert outcome["outcome"] == "placed"
        service.until(lambda: "rides" in service.status()["pipelines"], "the pipeline `rides`")
        service.kill()
        for call in (hasty.status, lambda: rlmux.connect(service.url, patience_s=400.0)):
            with pytest.raises(UserError, match="cannot be reached"):
                call()
        told: dict[str, str] = {}
        calls = [
            threading.Thread(target=lambda: told.update(connection.wait("rides"))),
            threading.Thread(target=lambda: told.update(told=connection.cancel("rides"))),
        ]
        for each in calls:
            each.start()
        service.until(lambda: sum("tried for 400 s" in one.message for one in caplog.records) == 2, "two warnings")
        service.start()
        for each in calls:
            each.join()
    assert (told["rides"], "told" in told) == ("cancelled", True)


@pytest.mark.slow
def test_a_log_is_followed_through_a_server_and_a_controller_that_are_killed(service, monkeypatch, capsys):
    looks = threading.Semaphore(0)

    class Screen(io.StringIO):
        def flush(self) -> None:
            looks.release()

    service.until_up()
    (service.folder / "followed.yaml").write_text("pipelines: [{name: followed, task: sort, steps: 100000}]")
    assert service.rlmux("submit", str(service.folder / "followed.yaml"), "--to", service.url).code == 0
    service.until(lambda: "followed" in service.status()["pipelines"], "the pipeline `followed`")
    pid = service.controller
    with service.environment():
        monkeypatch.setattr(sys, "stdout", Screen())
        following = threading.Thread(
            target=remote.show_logs, args=(service.url, "followed"), kwargs={"is_following": True}
        )
        following.start()
        looks.acquire()
        service.kill()
        service.until(lambda: "cannot be reached" in capsys.readouterr().err, "a line that the server is away")
        service.start()
        service.kill_controller()
        service.until(lambda: service.controller not in (None, pid), "another controller")
        service.until_up()
        while looks.acquire(blocking=False):
            pass
        service.until(lambda: looks.acquire(blocking=False) or not following.is_alive(), "a line that is followed")
        assert following.is_alive()
        rlmux.connect(service.url).cancel("followed")
        following.join()


@pytest.mark.slow
def test_waiting_for_a_pipeline_goes_on_while_a_killed_controller_is_started_again(service):
    service.until_up()
    pid = service.controller
    with service.environment():
        connection = rlmux.connect(service.url, patience_s=400.0)
        connection.submit({"pipelines": [{"name": "endures", "task": "sort", "steps": 100_000}]})
        told: dict[str, str] = {}
        waiting = threading.Thread(target=lambda: told.update(connection.wait("endures")))
        waiting.start()
        service.kill_controller()
        service.until(lambda: service.controller not in (None, pid), "another controller")
        service.until_up()
        time.sleep(1.0)  # two looks of the one that waits
        assert (told, waiting.is_alive()) == ({}, True)
        connection.cancel("endures")
        waiting.join()
    assert told == {"endures": "cancelled"}


def test_what_may_have_been_carried_out_is_not_sent_twice():
    """A server that takes a request and ends without an answer."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        taken: list[bytes] = []

        def take_and_end() -> None:
            for _ in range(2):
                taking, _ = listening.accept()
                with taking:
                    taken.append(taking.recv(1 << 16).partition(b" HTTP")[0])

        server = threading.Thread(target=take_and_end)
        server.start()
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("RLMUX_TOKEN", "t")
            target = target_of(f"http://127.0.0.1:{listening.getsockname()[1]}/lanes/cpu", patience_s=60.0)
            with pytest.raises(UserError, match=r"no answer .*: it may have been carried out; accepted: the same"):
                target.send_command("cancel", "a")
            with closing(target), pytest.raises(UserError, match="it may have been carried out"):
                target.send_command("hold", "a")
        server.join()
    assert taken == [b"POST /api/v1/pipelines/cpu/a/cancel", b"POST /api/v1/pipelines/cpu/a/hold"]


@pytest.mark.parametrize(
    ("place", "token", "line"),
    [
        (
            "URL",
            "wrong",
            "the token is not this server's, or has ended; accepted: the token that you were given for it",
        ),
        ("URL", "", "no token; accepted: RLMUX_TOKEN=..., or RLMUX_TOKEN_FILE="),
        ("URL/lanes/gpu", "good", "no lane 'gpu'; accepted: cpu"),
        ("URL/cpu", "good", "accepted: http://HOST:PORT/lanes/NAME, or http://HOST:PORT where there is one lane"),
        ("http://127.0.0.1:1", "good", "http://127.0.0.1:1: cannot be reached: "),
    ],
)
def test_a_wrong_address_or_token_is_one_line_and_exit_code_2(service, place, token, line):
    given = service.token if token == "good" else token
    said = service.rlmux("status", place.replace("URL", service.url), token=given)
    assert (said.code, said.out) == (2, "")
    assert line in said.err
    assert said.err.count("\n") == 1


def test_what_is_sent_to_the_wrong_address_or_too_large_is_refused(service):
    post = service.client.post
    body = {"lane": "cpu", "text": "pipelines: []", "source": "a.yaml"}
    assert post("/submissions", json=body).json()["where"] == "Idempotency-Key"
    assert post("/bundles", json={}).status_code == 415
    packed = {"Content-Type": "application/gzip"}
    assert post("/bundles", content=b"no tar", headers=packed).json()["accepted"] == "a gzipped tar"
    assert post("/pipelines/cpu/a/rank", json={"rank": "3"}).json()["accepted"] == "Input should be a valid integer"
    assert post("/pipelines/gpu/a/cancel", json={}).status_code == 404
    assert post("/bundles", content=bytes(65 << 20), headers=packed).status_code == 413


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("lanes: {}", "service.yaml:1: lanes is an empty mapping; accepted: a mapping, at least 1"),
        ("lanes: {'a b': {%s}}", "lanes.a b cannot be a name; accepted: 1 to 64 letters, digits, '-' and '_'"),
        ("lanes: {bundles: {%s}}", "lanes.bundles cannot be named so; accepted: any but bundles"),
        ("lanes: {a: {%s, polici: rlmux}}", "lanes.a.polici is 'rlmux': unknown key; nearest: policy"),
        ("lanes: {a: {%s, policy: rlmx}}", "policy is 'rlmx': no such policy; nearest: rlmux"),
        ("lanes: {a: {cluster: {pools: {rollout: {}, train: {}}}}}", "cluster.pools.rollout.devices is missing"),
        (
            "lanes: {a: {%s}, b: {cluster: {pools: {train: {phase: both, devices: 9000}}}}}",
            "lanes a (2), b (9000) have 9002 devices together; accepted: at most",
        ),
        ("lanes: {a: {%s}}\nserve: {}", "serve is an empty mapping: unknown key; accepted: lanes"),
        ("%s\nserve: {}", "serve belongs to a lane; accepted: lanes: {NAME: {cluster: ..., serve: ...}}"),
        ("%s\npipelines: []", "the file has pipelines; accepted: one with lanes; for pipelines: rlmux run service."),
        ("lanes: {a: {%s, serve: {}}}", "lanes.a.serve serves nothing; accepted: models, permits, or both"),
        (
            "lanes: {a: {%s, serve: {models: {r/t: {}}}}, b: {%s, serve: {models: {r/t: {}}}}}",
            "lanes.b.serve is given in lane a too; accepted: one lane",
        ),
    ],
)
def test_a_mistake_in_the_file_is_one_line_and_nothing_is_made(tmp_path, capsys, monkeypatch, text, line):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "service.yaml").write_text(text.replace("%s", CLUSTER))
    assert run_command_line(["serve", "service.yaml", "--out", "root"]) == 2
    said = capsys.readouterr().err
    assert line in said
    assert said.count("\n") == 1
    assert not (tmp_path / "root").exists()


def test_a_folder_of_another_kind_is_left_alone(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match="not empty, and no service was in it; accepted: a new or an empty folder"):
        open_root(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_one_server_at_a_time_has_a_services_folder(tmp_path):
    with open_root(tmp_path), pytest.raises(UserError, match="another process is writing here: pid"):
        open_root(tmp_path)


def test_a_lane_keeps_the_cluster_that_its_run_began_with(service):
    file = service.folder / "other.yaml"
    file.write_text("lanes: {cpu: {cluster: {pools: {rollout: {devices: 2}, train: {devices: 1}}}}}")
    (lane,) = load_service_file(file, policies=list(POLICIES)).values()
    service.until_up()
    with pytest.raises(UserError, match="began with another cluster or policy; accepted: the cluster and policy"):
        LaneController(service.root, "cpu", lane)
