"""Every address of a service that goes on, asked by everyone who may not: the table of what each is answered."""

from __future__ import annotations

import contextlib
import hmac
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
from tests.service.dashboard.auth.test_visibility import ALL, client_of, submit, with_people
from tests.service.lane_here import Endless, Lane
from tests.service.pages_server import Pages

from rlmux.policies.max_min_fairness import FairShares
from rlmux.report.samples import KeptSample, SampleWriter
from rlmux.service.dashboard.auth import audit, tokens, users
from rlmux.service.dashboard.auth.access import Access
from rlmux.service.dashboard.router import PREFIX
from rlmux.service.lanes.bundles import Bundles
from rlmux.service.lanes.data_dir import open_root
from rlmux.service.lanes.submission_ledger import SubmissionLedger
from rlmux.service.lanes.submissions import LaneSubmissions
from rlmux.service.tinker.keys import Keys, UnknownKeyError

OF_BOB = {"name": "tools-9", "task": "sort", "steps": 9, "user": "bob", "project": "audio"}
SUBMISSION = {"lane": "cpu", "text": json.dumps({"pipelines": [OF_BOB]}), "source": "a.yaml"}


class Row(NamedTuple):
    """What is answered to cat, of Bob's project, and to Ann, of another, about what is Bob's."""

    cat: int
    ann: int
    query: str = ""
    body: Any = None


LANE, PIPELINE, TIMELINE = "/lanes/{lane}", "/pipelines/{lane}/{name}", "/timeline/{lane}"
TABLE: Mapping[tuple[str, str], Row] = {
    ("GET", "/openapi.json"): Row(200, 200),
    ("GET", "/whoami"): Row(200, 200),
    ("GET", "/audit"): Row(403, 403),
    ("GET", "/lanes"): Row(200, 200),
    ("GET", LANE): Row(200, 200),
    ("GET", f"{LANE}/summary.json"): Row(403, 403),
    ("GET", f"{LANE}/timeline.html"): Row(403, 403),
    ("GET", f"{LANE}/devices"): Row(200, 200),
    ("GET", f"{LANE}/cost"): Row(200, 200),
    ("GET", f"{LANE}/alerts"): Row(200, 200),
    ("POST", f"{LANE}/alerts"): Row(409, 409, body={"rule": "no_signal", "pipeline": "tools"}),
    ("GET", f"{LANE}/events"): Row(200, 200),
    ("GET", f"{LANE}/whatif"): Row(200, 200),
    ("POST", f"{LANE}/whatif"): Row(403, 403, body={"remove": ["tools"]}),
    ("GET", f"{LANE}/queue"): Row(200, 200),
    ("GET", f"{LANE}/usage"): Row(200, 200),
    ("GET", f"{LANE}/status"): Row(200, 200),
    ("GET", f"{LANE}/spec"): Row(200, 200),
    ("POST", f"{LANE}/shares"): Row(403, 403, body={"text": "shares: {}", "source": "s"}),
    ("POST", f"{LANE}/remove"): Row(403, 403, body={}),
    ("GET", "/pipelines"): Row(200, 200),
    ("GET", "/pipelines/groups"): Row(200, 200),
    ("GET", "/usage"): Row(200, 200),
    ("GET", PIPELINE): Row(200, 404),
    ("GET", "/search"): Row(200, 200, query="q=tools"),
    ("GET", "/compare"): Row(200, 404, query="of=cpu/tools&of=cpu/tools"),
    ("GET", f"{PIPELINE}/steps"): Row(200, 404),
    ("GET", f"{PIPELINE}/metrics"): Row(200, 404),
    ("GET", f"{PIPELINE}/logs"): Row(200, 404),
    ("GET", f"{PIPELINE}/samples"): Row(200, 404),
    ("GET", f"{PIPELINE}/samples/{{step}}/{{prompt}}/{{sample}}"): Row(200, 404),
    ("GET", f"{PIPELINE}/why"): Row(200, 404),
    ("GET", f"{PIPELINE}/causes"): Row(200, 404),
    ("GET", f"{PIPELINE}/checkpoints"): Row(200, 404),
    ("GET", f"{PIPELINE}/file"): Row(200, 404),
    **{("POST", f"{PIPELINE}/{verb}"): Row(403, 404, body={"rank": 1} if verb == "rank" else {})
       for verb in ("cancel", "retry", "remove", "hold", "release", "rank", "park", "unpark")},
    ("POST", f"{PIPELINE}/labels"): Row(403, 404, body={"labels": ["seen"], "note": "a note"}),
    ("GET", TIMELINE): Row(200, 200),
    ("GET", f"{TIMELINE}/tiles"): Row(200, 200),
    ("GET", f"{TIMELINE}/intervals"): Row(200, 200),
    ("GET", f"{TIMELINE}/measure"): Row(200, 200),
    ("GET", f"{TIMELINE}/gap"): Row(404, 404, query="device=rollout-0.0&t=0"),
    ("GET", "/metrics"): Row(403, 403),
    ("GET", "/metrics/grafana.json"): Row(403, 403),
    ("GET", "/stream"): Row(200, 200),
    ("POST", "/submissions"): Row(403, 403, body=SUBMISSION),
    ("GET", "/submissions"): Row(200, 200),
    ("GET", "/submissions/{id}"): Row(404, 404),
    ("POST", "/bundles"): Row(400, 400, body=b"no bundle"),
    ("GET", "/bundles/{sha256}"): Row(404, 404),
    ("POST", "/logout"): Row(204, 204, body={}),
}  # fmt: skip
FOR_ANYONE = {("GET", "/health"), ("GET", "/version"), ("POST", "/login")}


class Service(NamedTuple):
    """A lane in which Bob's `tools` runs, and the id of its submission."""

    pages: Pages
    id: str
    client: httpx.Client

    def send(self, method: str, path: str, row: Row, headers: Mapping[str, str]) -> int:
        """The status; of the answer only the head is read, as a stream has no end."""
        path = path.format(lane="cpu", name="tools", step=1, prompt=0, sample=0, id=self.id, sha256="0" * 64)
        media_type = "application/gzip" if path == "/bundles" else "application/json"
        body = row.body if isinstance(row.body, bytes) else json.dumps(row.body).encode()
        more = {} if method == "GET" else {"Content-Type": media_type, "Idempotency-Key": f"key {method} {path}"}
        content = None if method == "GET" else body
        with self.client.stream(method, f"{path}?{row.query}", headers={**more, **headers}, content=content) as answer:
            return answer.status_code

    @property
    def folder(self) -> Path:
        return self.pages.dashboard.token_path.parent

    def bearer(self, user: str, scopes: list[str] = ALL, *, days: float = 1.0, now: float | None = None) -> str:
        return tokens.add(self.folder, user, scopes, days=days, now=time.time() if now is None else now)


def headers_of(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    root = tmp_path_factory.mktemp("service") / "root"
    with open_root(root), contextlib.ExitStack() as undo:
        lane = Lane(root, "solo", Endless(), FairShares())
        undo.callback(lane.close)
        bundles = Bundles(root)
        submissions = LaneSubmissions({"cpu": lane}, SubmissionLedger(root), bundles)  # type: ignore[dict-item]
        pages = Pages(root, lanes=["cpu"], more=(*submissions.addresses(), *bundles.addresses()))
        undo.callback(pages.close)
        with_people(root)
        users.set_user(root, "cat", role="member")
        users.set_project(root, "audio", add=["cat"])
        with client_of(pages, "bob") as bob, client_of(pages, "ann") as ann:
            told = submit(bob, name="tools", user="bob", project="audio")
            assert told.status_code == 201
            assert submit(ann, name="sort", user="ann", project="vision").status_code == 201
        of_bob = lane.folder / "tools"
        of_bob.mkdir(exist_ok=True)
        (of_bob / "workers.log").write_text("a line\n")
        writer = SampleWriter(of_bob / "samples.db")
        figures: dict[str, Any] = {"reward": 0.5, "advantage": 0.1, "stop": "stop", "tokens": 5, "num_turns": 1}
        turns = ((True, "carry"),)
        writer.add(
            1,
            [
                KeptSample(
                    prompt=0, sample=0, prompt_text="add", turns=turns, first_version=0, last_version=0, **figures
                )
            ],
        )
        writer.close()
        pages.until(lambda: {row["name"] for row in pages.get("/pipelines")["items"]} == {"tools", "sort"})
        with httpx.Client(base_url=f"{pages.url}{PREFIX}", verify=False, timeout=60) as client:
            yield Service(pages, told.json()["id"], client)


def test_the_table_has_every_address_of_the_service(service):
    served = {(one.method, one.path) for one in service.pages.dashboard.addresses}
    assert served == set(TABLE) | FOR_ANYONE
    assert {(one.method, one.path) for one in service.pages.dashboard.addresses if one.scope is None} == FOR_ANYONE


def test_every_address_answers_each_caller_as_the_table_says(service):
    """And nothing of what was refused has come about, while all of it is in the audit."""
    before = service.pages.get("/lanes/cpu/status")["pipelines"], service.pages.get("/submissions")["items"]
    revoked, kept = service.bearer("bob", ["admin"]), service.bearer("bob", ["admin"])
    access = service.pages.dashboard.access
    session = access.login(token=revoked)
    tokens.revoke(service.folder, revoked.split("_")[1])
    cookie = f"rlmux_{service.pages.server.port}"
    unknown = [
        headers_of(tokens.make_token()[0]),
        headers_of(kept[:-1] + ("a" if kept[-1] != "a" else "b")),
        headers_of(revoked),
        headers_of(service.bearer("bob", ["admin"], days=1e-9, now=time.time() - 60.0)),
        {"Cookie": f"{cookie}={session}", "Sec-Fetch-Site": "same-origin"},
        {"Cookie": f"{cookie}={kept}", "Sec-Fetch-Site": "same-origin"},
    ]
    no_user, cat, ann = (headers_of(service.bearer(user)) for user in ("zed", "cat", "ann"))
    narrow = {scope: headers_of(service.bearer("bob", [scope])) for scope in ("read", "samples", "submit", "control")}
    scope_of = {(one.method, one.path): one.scope for one in service.pages.dashboard.addresses}
    wrong: list[tuple[str, str, str, int]] = []
    for (method, path), row in TABLE.items():
        asked = [
            *(("unknown", 401, each) for each in unknown),
            ("nobody", 401 if method == "GET" else 403, {}),
            ("no user", 403, no_user),
            *(
                (f"with {scope} alone", 403, headers)
                for scope, headers in narrow.items()
                if scope != scope_of[method, path]
            ),
            ("of the project", row.cat, cat),
            ("of another", row.ann, ann),
        ]
        for caller, status, headers in asked:
            told = service.send(method, path, row, headers)
            wrong += [(method, path, caller, told)] if told != status else []
        for other in ("PUT", "PATCH", "DELETE"):
            told = service.send(other, path, row, headers_of(kept))
            wrong += [(other, path, "no such method", told)] if told not in (404, 405) else []
    assert wrong == []
    assert (service.pages.get("/lanes/cpu/status")["pipelines"], service.pages.get("/submissions")["items"]) == before
    rows, _ = audit.read(service.folder, limit=10_000)
    tried = {(row["method"], row["path"]) for row in rows if row["status"] in (401, 403, 404)}
    fill = {"lane": "cpu", "name": "tools"}
    assert {(method, PREFIX + path.format(**fill)) for method, path in TABLE if method == "POST"} - tried == {
        ("POST", f"{PREFIX}/logout")
    } - tried


def test_the_row_of_each_address_is_right_for_its_owner(service):
    """Else a row of the table could hold since nobody is ever answered."""
    with client_of(service.pages, "bob") as bob:
        for (method, path), row in TABLE.items():
            is_the_same = row.cat == row.ann and (row.cat != 404 or path.endswith(("/gap", "{sha256}")))
            if path == "/logout" or is_the_same:
                continue
            told = service.send(method, path, row, {"Authorization": bob.headers["authorization"]})
            assert told == 200 or (method, told) == ("POST", 409), (method, path, told)


def test_a_key_of_a_submission_is_its_users_own(service):
    """Another user's key neither tells what that one submitted, nor stands in the way."""
    first, second = ({**OF_BOB, "name": "keyed", "submit_at_s": 1e6}, {**OF_BOB, "name": "keyed-2", "submit_at_s": 1e6})
    second |= {"user": "cat"}
    with client_of(service.pages, "bob") as bob, client_of(service.pages, "cat") as cat:
        for client, pipeline in ((bob, first), (cat, second)):
            body = {"lane": "cpu", "text": json.dumps({"pipelines": [pipeline]}), "source": "a.yaml"}
            again = [client.post("/submissions", json=body, headers={"Idempotency-Key": "a key"}) for _ in range(2)]
            assert [one.status_code for one in again] == [201, 201], again[0].text
            assert again[0].json()["id"] == again[1].json()["id"]
            assert again[0].json()["user"] == pipeline["user"]


@pytest.mark.parametrize(
    "question", [{"policy": "os:system"}, {"set": ["pipelines.0.task.reward=os:system"]}, {"file": "pipelines: []"}]
)
def test_a_question_that_names_code_is_refused_from_one_who_may_run_none(service, question):
    users.set_user(service.folder, "op", role="operator", may_run_code=False)
    with client_of(service.pages, "op") as operator:
        answer = operator.post("/lanes/cpu/whatif", json=question)
        assert (answer.status_code, "code" in answer.text) == (403, True), answer.text


# ---------------------------------------------------------------------- no caller can tell how wrong it was


def lines_of(call: Callable[[], object]) -> list[tuple[str, int]]:
    """Each line of ours that a call runs, in order: two calls that run the same lines took the same way."""
    seen: list[tuple[str, int]] = []

    def trace(frame: Any, event: str, arg: Any) -> Any:
        if f"rlmux{'/'}service" not in frame.f_code.co_filename:
            return None
        if event == "line":
            seen.append((frame.f_code.co_filename, frame.f_lineno))
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return seen


def altered(text: str, at: int) -> str:
    return text[:at] + ("a" if text[at] != "a" else "b") + text[at + 1 :]


@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Lengths of what is compared: the comparison itself is the real one."""
    seen: list[tuple[int, int]] = []
    compare = hmac.compare_digest

    def compare_and_note(one: Any, other: Any) -> bool:
        seen.append((len(one), len(other)))
        return compare(one, other)

    monkeypatch.setattr(hmac, "compare_digest", compare_and_note)
    return seen


def test_every_wrong_token_goes_the_same_way_and_is_compared_with_all(tmp_path, compared):
    """Whether its id is known, and how much of its secret is right, makes no difference: no clock is asked."""
    kept = [tokens.add(tmp_path, "ann", ["read"], days=1.0, now=time.time()) for _ in range(3)]
    access = Access()
    access.watch(tmp_path)
    access.of_token("warm")
    ways, lengths = [], []
    right = [lines_of(lambda one=one: access.of_token(one)) for one in kept]
    for token in (
        tokens.make_token()[0],
        *(altered(one, at) for one in kept for at in (4, 13, 20, len(one) - 1)),
        kept[0][:-1],
        "",
    ):
        compared.clear()
        assert access.of_token(token) is None
        lengths.append(list(compared))
        ways.append(lines_of(lambda token=token: access.of_token(token)))
    assert lengths == [[(64, 64)] * 3] * len(lengths)
    assert all(way == ways[0] for way in ways)
    assert len(ways[0]) > 5
    assert right[0] == right[1] == right[2], "nor does it tell which of them was right"


def test_every_wrong_session_goes_the_same_way(tmp_path):
    access = Access()
    access.watch(tmp_path)
    cookie = access.login(ticket=access.make_ticket())
    assert cookie is not None
    ways = [lines_of(lambda one=one: access.of_session(one)) for one in (altered(cookie, 0), altered(cookie, -1 % 9))]
    assert ways[0] == ways[1]


def test_every_wrong_key_of_a_client_goes_the_same_way_and_is_compared_with_all(compared):
    keys = Keys({"tml-first-key": "lab", "tml-other-key": "team"})
    assert (keys.project("tml-first-key"), keys.project("tml-other-key")) == ("lab", "team")
    ways = []
    for key in ("tml-first-kez", "tml-other-kez", "xml-first-key", "", "é"):
        compared.clear()

        def ask(key: str = key) -> None:
            with contextlib.suppress(UnknownKeyError):
                keys.project(key)

        ways.append(lines_of(ask))
        assert compared == [(32, 32)] * 2
        with pytest.raises(UnknownKeyError):
            keys.project(key)
    assert all(way == ways[0] for way in ways)
