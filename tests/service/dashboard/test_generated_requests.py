"""Requests that are generated from the document of the API, right ones and wrong ones: each is answered as the document
says, and none is the server's fault."""

from __future__ import annotations

import contextlib
import errno
import tarfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis.errors import Unsatisfiable
from tests.service.dashboard.test_openapi import answer_schema, faults, submit
from tests.service.lane_here import Endless, Lane
from tests.service.lanes.test_bundles import tar
from tests.service.pages_server import Pages

from rlmux.service.dashboard import what_if_jobs
from rlmux.service.lanes.bundles import Bundles
from rlmux.service.lanes.data_dir import open_root
from rlmux.service.lanes.submission_ledger import SubmissionLedger
from rlmux.service.lanes.submissions import LaneSubmissions

THERE = {"lane": "cpu", "name": "first"}
"""What right requests ask for."""
RARELY = {("POST", "/lanes/{lane}/whatif"): 40}
"""Addresses that begin a process for each answer: every so many requests of theirs one is sent."""
LEFT_OUT = {("POST", "/logout"), ("POST", "/bundles")}
"""What ends a session, and what takes bytes that no generator makes: BUNDLES, and test_bundles.py."""
BUNDLES = [
    b"",
    tar(("a", 1), ("a/b", 1)),
    tar(("a" * 300, 1)),
    tar(("a/" * 2000 + "b", 1)),
    tar(*((f"{number}/a", 1) for number in range(20))),
]
"""The last is one; the others are refused."""
NUM = 3_000
FULL = (503, 507)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pages]:
    root: Path = tmp_path_factory.mktemp("service") / "root"
    with open_root(root):
        lane = Lane(root, "solo", Endless())
        bundles = Bundles(root)
        submissions = LaneSubmissions({"cpu": lane}, SubmissionLedger(root), bundles)  # type: ignore[dict-item]
        pages = Pages(root, lanes=["cpu"], more=(*submissions.addresses(), *bundles.addresses()))
        for name in ("first", "second"):
            assert submit(pages, {"name": name, "user": "ann"}).status_code == 201
        pages.until(lambda: {row["name"] for row in pages.get("/pipelines")["items"]} == {"first", "second"})
        yield pages
        pages.close()
        lane.close()


class Asker:
    """Sends what is generated, and counts what is answered."""

    def __init__(self, pages: Pages, root: dict[str, Any], client: httpx.Client) -> None:
        self.root = root
        self.statuses: Counter[tuple[str, int]] = Counter()
        self.wrong: dict[str, str] = {}
        self._asked: Counter[tuple[str, str]] = Counter()
        self._client = client
        self._headers = {"Authorization": f"Bearer {pages.token}"}
        self._base = f"{pages.url}/api/v1"

    @property
    def num(self) -> int:
        return sum(self.statuses.values())

    def sending(self, kind: str) -> Callable[[Any], None]:
        def send(case: Any) -> None:
            self.send(case, kind)

        return send

    def send(self, case: Any, kind: str) -> None:
        address = (case.method.upper(), case.path)
        self._asked[address] += 1
        if self._asked[address] % RARELY.get(address, 1):
            return
        told = case.as_transport_kwargs(base_url=self._base, headers=self._headers)
        sent = {key: told[key] for key in ("headers", "params", "json", "cookies") if told.get(key) is not None}
        sent["headers"] = {key: str(value).encode("utf-8", "replace") for key, value in sent["headers"].items()}
        body = told.get("data")
        if isinstance(body, str | bytes):
            sent["content"] = body
        if address == ("POST", "/submissions"):
            sent["headers"].setdefault("Idempotency-Key", f"key {self._asked[address]}".encode())
        with self._client.stream(told["method"], told["url"], **sent) as answer:
            status, media_type = answer.status_code, answer.headers.get("content-type", "")
            if media_type.startswith("text/event-stream"):
                text = value = None
            else:
                answer.read()
                text, value = answer.text, answer.json() if "json" in media_type else None
        self.statuses[kind, status] += 1
        fault = self._fault(*address, status, media_type, text, value)
        if fault is not None:
            self.wrong.setdefault(f"{address} {status}", f"{case.as_curl_command()}\n{fault}")

    def _fault(
        self, method: str, path: str, status: int, media_type: str, text: str | None, value: Any
    ) -> object | None:
        if status >= 500 and status not in FULL:
            return text
        if text is not None and "Traceback" in text and status != 200:
            return text
        if method == "HEAD" or (status in (404, 405) and "json" not in media_type):
            return None
        schema = answer_schema(self.root, method, path, status)
        if value is None or schema is None:
            return None
        return faults(value, schema, self.root) or None


@pytest.mark.parametrize("body", [b'{"a": "\\ud800"}', b'{"\\udfff": 1}', b'{"a": ["\\ud83d "]}', b'"\xed\xa0\x80"'])
def test_half_of_a_surrogate_pair_is_refused_by_every_address_that_takes_json(served, body):
    paths = served.get("/openapi.json")["paths"]
    posts = [path for path, methods in paths.items() if "post" in methods and path not in ("/bundles", "/logout")]
    assert {"/submissions", "/lanes/{lane}/whatif", "/login"} <= set(posts)
    for path in posts:
        headers = {"Content-Type": "application/json", "Idempotency-Key": "half"}
        answer = served.client.post(path.format(**THERE), content=body, headers=headers)
        assert (answer.status_code, answer.json()["detail"]) == (400, "a text is not Unicode"), path


def test_bundles_are_answered_as_the_document_says(served):
    root = served.get("/openapi.json")
    statuses = []
    for body in BUNDLES:
        answer = served.client.post("/bundles", content=body, headers={"Content-Type": "application/gzip"})
        schema = answer_schema(root, "POST", "/bundles", answer.status_code)
        assert not faults(answer.json(), schema, root), answer.text
        statuses.append(answer.status_code)
    assert statuses == [400, 400, 400, 400, 201]


@pytest.mark.parametrize("sends", ["a bundle", "a submission", "a question"])
def test_a_full_disk_is_said_and_keeps_nothing_half_written(served, monkeypatch, sends):
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    def post() -> httpx.Response:
        if sends == "a bundle":
            headers = {"Content-Type": "application/gzip"}
            return served.client.post("/bundles", content=packed, headers=headers)
        if sends == "a submission":
            return submit(served, {"name": "full", "user": "ann"})
        return served.client.post("/lanes/cpu/whatif", json={"remove": ["first"]})

    packed, root = tar(("full.py", 3000)), served.dashboard.token_path.parent
    before = sorted(path.name for path in (root / "bundles").iterdir()), submissions_of(served)
    with monkeypatch.context() as patched:
        patched.setattr(tarfile, "copyfileobj", full)
        patched.setattr(SubmissionLedger, "add", full)
        patched.setattr(what_if_jobs.tempfile, "TemporaryDirectory", full)
        answer = post()
    assert (answer.status_code, answer.json()["detail"]) == (507, "the disk is full, and nothing was kept")
    assert (sorted(path.name for path in (root / "bundles").iterdir()), submissions_of(served)) == before
    assert post().status_code < 500, "the disk has room again"


def submissions_of(pages: Pages) -> list[str]:
    return [one["id"] for one in pages.get("/submissions")["items"]]


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_two_thousand_requests_made_from_the_document_are_answered_as_it_says(served):
    """Of each address half as the document allows, about what is there, and half not."""
    schemathesis = pytest.importorskip("schemathesis", reason="needs schemathesis, of the dev extra")
    right, wrong = schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE
    root = served.get("/openapi.json")
    every = [found.ok() for found in schemathesis.openapi.from_dict(root).get_all_operations()]
    operations = [one for one in every if (one.method.upper(), one.path) not in LEFT_OUT]
    threads = threading.active_count()
    quiet = settings(
        max_examples=NUM // (2 * len(operations)),
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    with httpx.Client(verify=False, timeout=120) as client:
        asker = Asker(served, root, client)
        for mode in (right, wrong):
            for operation in operations:
                there = {
                    name: value for name, value in THERE.items() if mode is right and f"{{{name}}}" in operation.path
                }
                cases = operation.as_strategy(mode, path_parameters=there)
                with contextlib.suppress(Unsatisfiable):  # what takes nothing cannot be asked wrongly
                    quiet(given(case=cases)(asker.sending(mode.value)))()
    print(asker.statuses)
    assert asker.wrong == {}, "\n\n".join(asker.wrong.values())
    assert asker.num > 2_000, asker.num
    assert asker.statuses["positive", 200] > 300, asker.statuses
    assert asker.statuses["negative", 400] > 300, asker.statuses
    assert served.get("/health")["ok"]
    assert threading.active_count() <= threads + 40, "threads of the pool, and no more"
