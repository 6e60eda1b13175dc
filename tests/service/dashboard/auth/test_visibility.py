"""Users, roles and projects: what each may do, and that no answer has the name of a pipeline that is not to be seen."""

from __future__ import annotations

import contextlib
import json
import re
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.log_script import AlternatingRun
from tests.service.lane_here import Endless, Lane
from tests.service.pages_server import Pages, events
from tests.service.test_addresses import BEHIND

from rlmux.cli.main import run_command_line
from rlmux.core.errors import UserError
from rlmux.core.events import PipelineSubmitted
from rlmux.core.model import Visibility
from rlmux.policies.max_min_fairness import FairShares
from rlmux.service.dashboard import stream
from rlmux.service.dashboard.auth import tokens, users
from rlmux.service.dashboard.router import PREFIX
from rlmux.service.lanes.bundles import Bundles
from rlmux.service.lanes.data_dir import open_root
from rlmux.service.lanes.submission_ledger import SubmissionLedger
from rlmux.service.lanes.submissions import LaneSubmissions

HIDDEN = re.compile(rb"(?<![A-Za-z0-9])(tools|bob|audio)(?![A-Za-z0-9])")
"""Bob, his pipeline and its project, in whatever they stand."""
FILE = "pipelines:\n- {name: sort, task: sort, steps: 4}\n- {name: tools, task: sort, steps: 4}\n"
ALL = ["read", "samples", "submit", "control"]


def owned_run(folder: Path, visibility: Visibility = Visibility.PROJECT) -> Path:
    """Ann's pipeline `sort` of the project vision, and Bob's `tools` of the project audio, which fails."""
    run = AlternatingRun(num_steps=3, failing="tools")
    run.script.file = FILE
    owners = {"sort": ("ann", "vision", Visibility.PROJECT), "tools": ("bob", "audio", visibility)}
    for at, row in enumerate(run.script.rows):
        if isinstance(row.value, PipelineSubmitted):
            user, project, seen = owners[row.value.pipeline.id]
            pipeline = replace(row.value.pipeline, user=user, project=project, visibility=seen)
            run.script.rows[at] = row._replace(value=replace(row.value, pipeline=pipeline))
    run.script.note(run.script.rows[-1].time_s, "accounts", **counted(owners))
    return run.script.write(folder)


def counted(owners: dict[str, tuple[str, str, Visibility]]) -> dict[str, Any]:
    """Fields of a note `accounts`: each user is charged an hour of each pool."""
    row = {"weight": 1.0, "guarantee": 0.0, "share": 0.1, "fair_share": 0.1, "is_over_share": False, "running": 1}
    row |= {"waiting": 0, "device_hours_today": 0.0, "used_hours": {}, "device_hours": {"rollout": 1.0, "train": 1.0}}
    row["quota"] = {"max_running": None, "max_devices": None, "device_hours_a_day": None}
    rows = [{**row, "user": user, "project": project} for user, project, _ in owners.values()]
    return {"accounts": rows, "at_s": 3.0, "half_life_hours": 168.0, "held_hours": {"rollout": 2.0, "train": 2.0}}


def with_people(folder: Path) -> None:
    for user, role in (("ann", "member"), ("bob", "member"), ("eve", "viewer"), ("op", "operator"), ("root", "admin")):
        users.set_user(folder, user, role=role)
    users.set_project(folder, "vision", add=["ann"])
    users.set_project(folder, "audio", add=["bob"])


def client_of(pages: Pages, user: str, scopes: list[str] = ALL) -> httpx.Client:
    token = tokens.add(pages.dashboard.token_path.parent, user, scopes, days=1.0, now=time.time())
    return httpx.Client(
        base_url=f"{pages.url}{PREFIX}", headers={"Authorization": f"Bearer {token}"}, timeout=60, verify=False
    )


@pytest.fixture
def pages(tmp_path: Path) -> Iterator[Pages]:
    yield from served_run(tmp_path)


@pytest.fixture(scope="module")
def read_pages(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pages]:
    """The same for tests that change neither users nor pipelines."""
    yield from served_run(tmp_path_factory.mktemp("read"))


def served_run(root: Path) -> Iterator[Pages]:
    folder = owned_run(root / "demo")
    with_people(folder)
    shown = Pages(folder)
    yield shown
    shown.close()


QUERIES = {
    "/timeline/{lane}/gap": ["device=rollout.0.0&t=1", "device=train.0.0&t=1"],
    "/search": ["q=sort", "q=too", "q=steps", "q=aud"],
    "/compare": ["of=demo/sort&of=demo/sort", "of=demo/sort&of=demo/tools"],
    "/timeline/{lane}/tiles": ["level=0", "level=9"],
}


def test_no_answer_of_any_address_names_a_pipeline_of_another_project(read_pages):
    """Addresses come from the table: one that is added is covered. A stream is read further down."""
    devices = [row["id"] for row in read_pages.get("/lanes/demo/devices")["items"]]
    moments = [f"device={device}&t={t}" for device in devices for t in (0.2, 1.0, 2.0, 3.0)]
    num_of_bob, num_of_ann, wrong = 0, 0, []
    with client_of(read_pages, "ann") as ann, client_of(read_pages, "bob") as bob:
        for address in read_pages.dashboard.addresses:
            if address.method != "GET" or address.path == "/stream":
                continue
            queries = moments if address.path.endswith("/gap") else QUERIES.get(address.path, [""])
            for name in ("sort", "tools") if "{name}" in address.path else ("sort",):
                path = address.path.format(lane="demo", name=name, step=1, prompt=0, sample=0)
                for query in queries:
                    answer = ann.get(f"{path}?{query}")
                    told = answer.content
                    if name == "tools" or "tools" in query:  # the caller's own word
                        assert answer.status_code == 404, path
                        told = told.replace(b"/tools", b"").replace(b"'tools'", b"")
                    wrong += [(path, query, told[:600])] if HIDDEN.search(told) else []
                    num_of_ann += answer.status_code == 200
                    num_of_bob += HIDDEN.search(bob.get(f"{path}?{query}").content) is not None
    assert not wrong
    assert num_of_ann > 25
    assert num_of_bob > 15, "there is something to hide"


def test_what_is_not_to_be_seen_has_its_time_and_its_places_under_another_name(read_pages):
    whole = read_pages.get("/timeline/demo")
    with client_of(read_pages, "ann") as ann:
        shown = ann.get("/timeline/demo").json()
        assert whole["pipelines"] == ["sort", "tools"]
        assert shown["pipelines"] == ["sort", "another pipeline"]
        assert [row["name"] for row in ann.get("/pipelines").json()["items"]] == ["sort"]
        charges = {row["label"] for row in ann.get("/lanes/demo").json()["charges"]}
        assert any("another pipeline" in label for label in charges), charges
        measured = ann.get("/timeline/demo/measure").json()
        everything = read_pages.get("/timeline/demo/measure")
        assert [row["seconds"] for row in measured["items"]] == [row["seconds"] for row in everything["items"]]
        assert ann.get("/lanes/demo/cost").json()["sums"] == read_pages.get("/lanes/demo/cost")["sums"]
        assert "immutable" not in ann.get(f"/timeline/demo/tiles?rev={shown['rev']}").headers["cache-control"]
        asked = ann.post("/lanes/demo/whatif", json={"add": 1, "like": "sort"})
        assert asked.status_code == 403, "its answer is about every pipeline"
    with client_of(read_pages, "op") as operator:
        assert [row["name"] for row in operator.get("/pipelines").json()["items"]] == ["sort", "tools"]
        logs = operator.get("/pipelines/demo/tools/logs")
        assert logs.status_code == 403, "an operator sees that it runs, and not what its users wrote"
    with client_of(read_pages, "root", ["admin"]) as admin:
        assert admin.get("/pipelines/demo/tools/logs").status_code == 404, "it has none"


def test_a_stream_tells_of_what_may_be_seen_alone(read_pages):
    """It begins at the run's first row, so that all is told of."""
    with (
        client_of(read_pages, "ann") as ann,
        ann.stream(
            "GET",
            "/stream?topics=lanes,pipelines:demo,pipelines:demo/tools,timeline:demo",
            headers={"Last-Event-ID": "demo=0"},
        ) as answer,
    ):
        told = []
        for kind, data, _ in events(answer.iter_lines()):
            told.append((kind, data))
            if kind == "timeline":
                break
    assert {"lane", "pipeline", "devices"} <= {kind for kind, _ in told}
    assert not [data for _, data in told if HIDDEN.search(data.encode())]


@pytest.mark.parametrize("end", ["revoked", "no user any more", "no reader any more"])
def test_a_stream_ends_with_what_let_it_begin(pages, monkeypatch, end):
    """A stream is one request that lasts for days."""
    monkeypatch.setattr(stream, "QUIET_S", 0.1)
    folder = pages.dashboard.token_path.parent
    with client_of(pages, "ann") as ann, ann.stream("GET", "/stream?topics=lanes") as answer:
        told = events(answer.iter_lines())
        assert next(told)[0] == "hello"
        if end == "revoked":
            tokens.revoke(folder, tokens.read(folder)[0].id)
        elif end == "no user any more":
            users.remove_user(folder, "ann")
        else:
            (folder / users.NAME).write_text("{")
        assert [json.loads(data)["reason"] for kind, data, _ in told if kind == "bye"] == ["you may read no more"]


@pytest.mark.parametrize(
    ("visibility", "seen_by"),
    [
        (Visibility.PRIVATE, {"bob", "op", "root"}),
        (Visibility.PROJECT, {"bob", "cat", "op", "root"}),
        (Visibility.PUBLIC, {"ann", "bob", "cat", "eve", "op", "root"}),
    ],
)
def test_a_pipeline_is_shown_to_those_its_file_says(tmp_path, visibility, seen_by):
    folder = owned_run(tmp_path / "demo", visibility)
    with_people(folder)
    users.set_user(folder, "cat", role="viewer")
    users.set_project(folder, "audio", add=["cat"])
    (folder / "tools").mkdir()
    (folder / "tools" / "workers.log").write_text("line\n")
    with contextlib.closing(Pages(folder)) as shown:
        for user in ("ann", "bob", "cat", "eve", "op", "root"):
            with client_of(shown, user, ["admin"]) as client:
                assert (client.get("/pipelines/demo/tools").status_code == 200) == (user in seen_by), user
                reads = client.get("/pipelines/demo/tools/logs").status_code == 200
                assert reads == (user in seen_by and (user != "op" or visibility is Visibility.PUBLIC)), user


def test_a_change_of_the_file_counts_from_the_next_request_on(pages):
    folder = pages.dashboard.token_path.parent
    with client_of(pages, "ann") as ann, client_of(pages, "nobody", ["admin"]) as stranger:
        assert ann.get("/pipelines/demo/tools").status_code == 404
        users.set_project(folder, "audio", add=["ann"])
        assert ann.get("/pipelines/demo/tools").status_code == 200
        users.set_user(folder, "ann", role="viewer")
        assert ann.get("/whoami").json()["scopes"] == ["read", "samples"]
        assert ann.post("/pipelines/demo/sort/cancel", json={}).status_code == 403
        assert stranger.get("/lanes").status_code == 403, "a token of a user that there is not"
        users.remove_user(folder, "ann")
        assert ann.get("/lanes").status_code == 403
        (folder / users.NAME).write_text("{")
        assert stranger.get("/lanes").status_code in (401, 403), "a damaged file lets nobody in"
        assert pages.get("/lanes")["items"], "but for the owner of the folder"
        (folder / users.NAME).unlink()
        assert stranger.get("/pipelines/demo/tools").status_code == 200, "without the file there is one user"


def test_a_session_has_what_its_user_may_do_now(pages):
    folder = pages.dashboard.token_path.parent
    token = tokens.add(folder, "op", ["admin"], days=1.0, now=time.time())
    with httpx.Client(base_url=f"{pages.url}{PREFIX}", headers={"Origin": pages.url}, verify=False) as browser:
        assert browser.post("/login", json={"token": token}).json()["role"] == "operator"
        assert browser.get("/pipelines/demo/tools").status_code == 200
        users.set_user(folder, "op", role="viewer")
        assert browser.get("/pipelines/demo/tools").status_code == 404


def test_a_proxys_user_has_the_role_of_the_user_that_is_meant(tmp_path):
    folder = owned_run(tmp_path / "demo")
    with_people(folder)
    users.set_user(folder, "bob", role=None, login="bob@lab.example")
    with contextlib.closing(Pages(folder, listening=BEHIND)) as shown:
        for login, status in (("bob@lab.example", 200), ("ann", 404), ("bob", 403), ("bob@evil.example", 403)):
            headers = {"X-Forwarded-Email": login}
            answer = httpx.get(f"{shown.url}{PREFIX}/pipelines/demo/tools", headers=headers)
            assert answer.status_code == status, login


# ---------------------------------------------------------------------- a lane that goes on


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Pages]:
    yield from served_lane(tmp_path / "root")


@pytest.fixture(scope="module")
def without_code(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pages]:
    """A service where Ann may run no code, for tests that submit nothing."""
    for served in served_lane(tmp_path_factory.mktemp("without code") / "root"):
        users.set_user(served.dashboard.token_path.parent, "ann", role=None, may_run_code=False)
        yield served


def served_lane(root: Path) -> Iterator[Pages]:
    """One lane with room for one pipeline at a time: Bob's runs, Ann's waits, and one of each is to come."""
    with open_root(root):
        lane = Lane(root, "solo", Endless(), FairShares())
        submissions = LaneSubmissions({"cpu": lane}, SubmissionLedger(root), Bundles(root))  # type: ignore[dict-item]
        served = Pages(root, lanes=["cpu"], more=(*submissions.addresses(), *Bundles(root).addresses()))
        with_people(root)
        with client_of(served, "bob") as bob, client_of(served, "ann") as ann:
            assert submit(bob, name="tools", user="bob", project="audio").status_code == 201
            assert submit(ann, name="sort", user="ann", project="vision").status_code == 201
            assert submit(bob, name="tools-2", user="bob", project="audio", submit_at_s=1e6).status_code == 201
            assert submit(ann, name="sort-2", user="ann", project="vision", submit_at_s=1e6).status_code == 201
        served.until(lambda: {row["name"] for row in served.get("/pipelines")["items"]} == {"tools", "sort"})
        yield served
        served.close()
        lane.close()


def submit(client: httpx.Client, **pipeline: object) -> httpx.Response:
    file = {"pipelines": [{"task": "sort", "steps": 9, **pipeline}]}
    body = {"lane": "cpu", "text": json.dumps(file), "source": f"{pipeline['name']}.yaml"}
    return client.post("/submissions", json=body, headers={"Idempotency-Key": f"{hash(str(pipeline))}"})


def test_a_controller_tells_a_user_of_no_pipeline_that_is_not_to_be_seen(service):
    with client_of(service, "ann") as ann:
        told = {
            path: ann.get(path)
            for path in (
                "/lanes/cpu/status",
                "/lanes/cpu/queue",
                "/lanes/cpu/usage",
                "/submissions",
                "/pipelines/cpu/sort/why",
                "/pipelines/cpu/sort-2/why",
            )
        }
        for path, answer in told.items():
            assert answer.status_code in (200, 409), answer.text
            assert not HIDDEN.search(answer.content), (path, answer.text)
        status = told["/lanes/cpu/status"].json()
        assert (list(status["pipelines"]), [one["pipeline"] for one in status["upcoming"]]) == (["sort"], ["sort-2"])
        assert {row["pipeline"] for row in status["devices"].values()} <= {"another pipeline", None}
        assert [row["pipeline"] for row in told["/lanes/cpu/queue"].json()["items"]] == ["sort"]
        rows = told["/lanes/cpu/usage"].json()["accounts"]
        whose = [(row["project"], row["user"]) for row in rows]
        assert whose == [("another project", "another user"), ("vision", "ann")]
        for verb in ("cancel", "retry", "remove", "hold", "park"):
            for name in ("tools", "tools-2", "none-such"):
                answer = ann.post(f"/pipelines/cpu/{name}/{verb}", json={})
                assert (answer.status_code, "another" in answer.text) == (404, False), answer.text
                own = answer.content.replace(f"/{name}/".encode(), b"").replace(f"'{name}'".encode(), b"")
                assert not HIDDEN.search(own), answer.text
            told_of = {
                name: {
                    key: value for key, value in ann.get(f"/pipelines/cpu/{name}").json().items() if key != "request_id"
                }
                for name in ("tools", "none-such")
            }
            assert str(told_of["tools"]).replace("tools", "none-such") == str(told_of["none-such"]), "no one can tell"
        assert ann.get("/pipelines/cpu/tools-2/why").status_code == 404
        assert ann.post("/pipelines/cpu/sort-2/cancel", json={}).status_code == 200, "its own, in no index yet"


def test_what_waits_of_another_project_is_in_the_queue_without_its_project(service):
    """Bob's second pipeline waits for his quota, which its reason names."""
    shares = {"text": "shares: {projects: {audio: {quota: {running: 1}}}}", "source": "s.yaml"}
    assert service.client.post("/lanes/cpu/shares", json=shares).status_code == 200
    with client_of(service, "bob") as bob, client_of(service, "ann") as ann:
        assert submit(bob, name="tools-3", user="bob", project="audio").status_code == 201
        service.until(lambda: len(ann.get("/lanes/cpu/queue").json()["items"]) == 2)
        waits = ann.get("/lanes/cpu/queue")
        assert not HIDDEN.search(waits.content), waits.text
        other = waits.json()["items"][1]
        assert (other["pipeline"][:16], other["project"]) == ("another pipeline", "another project")
        assert (other["token"], other["reason"]) == ("over_quota", "not shown")
        assert b"audio" in bob.get("/lanes/cpu/queue").content


def test_charges_of_hidden_accounts_keep_their_figures_and_their_sum(read_pages):
    everything = read_pages.get("/lanes/demo/usage")
    with client_of(read_pages, "ann") as ann, client_of(read_pages, "op") as operator:
        shown = ann.get("/lanes/demo/usage").json()
        assert [(row["project"], row["user"]) for row in shown["accounts"]] == [
            ("vision", "ann"),
            ("another project", "another user"),
        ]
        names = {"project": "", "user": ""}
        assert [row | names for row in shown["accounts"]] == [row | names for row in everything["accounts"]]
        assert operator.get("/lanes/demo/usage").json() == everything


def test_an_operator_changes_any_pipeline_and_a_member_its_own(service):
    with client_of(service, "op") as operator, client_of(service, "eve", ["admin"]) as viewer:
        assert operator.post("/pipelines/cpu/sort/hold", json={}).status_code == 200
        assert viewer.post("/pipelines/cpu/sort/release", json={}).status_code == 403
        shares = {"text": "shares: {users: {ann: {weight: 2}}}", "source": "s.yaml"}
        assert operator.post("/lanes/cpu/shares", json=shares).status_code == 403


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ({"user": "bob"}, "pipeline 'new' is of user 'bob', and the caller is 'ann'"),
        ({"project": "audio"}, "is of project 'audio', which 'ann' is not in"),
        ({"task": {"name": "sort", "reward": "os:system"}}, "with task.reward runs code"),
        ({"task": "my_tasks:Task"}, "with task.name runs code"),
        ({"rollout": {"engine": "my_engine:Engine"}}, "with rollout.engine.name runs code"),
    ],
)
def test_a_user_submits_nothing_that_it_may_not(without_code, more, told):
    with client_of(without_code, "ann") as ann:
        answer = submit(ann, **{"name": "new", "user": "ann", "project": "vision", "submit_at_s": 1e6, **more})
        assert (answer.status_code, told in answer.text) == (403, True), answer.text


def test_a_user_who_may_run_no_code_submits_pipelines_without_code_and_no_bundles(service):
    users.set_user(service.dashboard.token_path.parent, "ann", role=None, may_run_code=False)
    with client_of(service, "ann") as ann:
        packed = ann.post("/bundles", content=b"x", headers={"Content-Type": "application/gzip"})
        assert packed.status_code == 403
        assert submit(ann, name="plain", user="ann", project="vision", submit_at_s=1e6).status_code == 201


def test_a_pipeline_without_a_user_is_its_callers(service):
    with client_of(service, "ann") as ann:
        assert submit(ann, name="own", project="vision", submit_at_s=1e6).status_code == 201
        assert "user: ann" in service.get("/pipelines/cpu/own/file")["text"]
        text = json.dumps({"pipelines": [{"name": "later", "task": "sort", "steps": 9}]})
        checked = ann.post("/submissions", json={"lane": "cpu", "text": text, "source": "a.yaml", "dry_run": True})
        assert checked.json()["wrong"] is None


# ---------------------------------------------------------------------- the commands


def test_users_and_projects_are_made_listed_and_removed_by_commands(tmp_path, capsys):
    def rlmux(*words: str) -> tuple[int, str, str]:
        code = run_command_line(words)
        said = capsys.readouterr()
        return code, said.out, said.err

    folder = str(tmp_path)
    assert rlmux("user", "set", folder, "ann", "--role", "member") == (0, "ann: is member\n", "")
    assert rlmux("user", "set", folder, "bob", "--role", "viewer", "--code", "no")[0] == 0
    assert rlmux("user", "set", folder, "ann", "--login", "ann@lab")[0] == 0
    assert rlmux("project", "set", folder, "vision", "--add", "ann", "--add", "bob", "--drop", "bob")[1] == (
        "vision: has ann\n"
    )
    listed = json.loads(rlmux("user", "list", folder, "--json")[1])["users"]
    assert listed[0] == {"user": "ann", "role": "member", "code": "yes", "login": "ann@lab", "projects": "vision"}
    assert rlmux("project", "list", folder)[1].split() == ["project", "members", "vision", "ann"]
    assert (tmp_path / users.NAME).stat().st_mode & 0o777 == 0o600
    for words, accepted in [
        (("user", "set", folder, "cat"), "--role viewer, member, operator, admin"),
        (("user", "set", folder, "cat", "--role", "boss"), "viewer, member, operator, admin"),
        (("user", "set", folder, "a/b", "--role", "admin"), "letters"),
        (("user", "set", folder, "bob", "--login", "ann@lab"), "one that no other user has"),
        (("user", "remove", folder, "cat"), "ann, bob"),
        (("user", "set", folder), "rlmux user set DIR USER"),
        (("user", "list", str(tmp_path / "none")), "that of a server"),
        (("project", "set", folder, "vision", "--add", "cat"), "ann, bob"),
        (("project", "remove", folder, "audio"), "vision"),
    ]:
        code, out, err = rlmux(*words)
        assert (code, out, err.count("\n"), accepted in err) == (2, "", 1, True), err
    assert rlmux("user", "remove", folder, "ann")[0] == 0
    assert users.read(tmp_path).projects == {"vision": ()}  # type: ignore[union-attr]


def test_a_file_that_others_can_read_is_refused(tmp_path):
    users.set_user(tmp_path, "ann", role="admin")
    (tmp_path / users.NAME).chmod(0o644)
    with pytest.raises(UserError, match="chmod 600"):
        users.read(tmp_path)


def test_a_token_has_by_default_the_rights_of_its_users_role(tmp_path, capsys):
    def rlmux(*words: str) -> tuple[int, str, str]:
        code = run_command_line(words)
        said = capsys.readouterr()
        return code, said.out, said.err

    folder = str(tmp_path)
    assert rlmux("token", "add", folder, "ann")[2] == "rlmux: this token may read\n"
    users.set_user(tmp_path, "ann", role="member")
    users.set_user(tmp_path, "eve", role="viewer")
    assert rlmux("token", "add", folder, "ann")[2] == "rlmux: this token may read, samples, submit, control\n"
    assert tokens.read(tmp_path)[-1].scopes == users.ROLES["member"]
    told = "rlmux: this token may read; not submit: eve is viewer\n"
    assert rlmux("token", "add", folder, "eve", "--scope", "read", "--scope", "submit")[2] == told
    code, _, err = rlmux("token", "add", folder, "eva")
    assert (code, err.startswith("rlmux: no user 'eva'; accepted: ann, eve, or first: rlmux user set ")) == (2, True)
