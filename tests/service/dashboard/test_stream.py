"""A stream tells what changed, once, from where its reader was; of runs that go on while their log is written."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.log_script import AlternatingRun, LogScript, append
from tests.service.pages_server import Pages, events

from rlmux.log.run_log import RunLog
from rlmux.service.dashboard.stream import MAX_OWN_STREAMS, parse_id

TOPICS = "lanes,timeline:run,pipelines:run,pipelines:run/sort"


class Growing:
    """A run whose log is written piece by piece."""

    def __init__(self, folder: Path) -> None:
        self.script: LogScript = AlternatingRun(num_steps=8).script
        self.log = RunLog.create(folder, self.script.header)
        self.at, self.is_closed = 0, False
        self.write(100)

    def write(self, num: int) -> None:
        end = min(len(self.script.rows), self.at + num)
        while end < len(self.script.rows) and self.script.rows[end].kind == "action":
            end += 1
        append(self.log, self.script.rows[self.at : end])
        self.log.commit()
        self.at = end

    def close(self) -> None:
        if not self.is_closed:
            self.is_closed = True
            self.log.close()


@pytest.fixture
def growing(tmp_path: Path) -> Iterator[Growing]:
    run = Growing(tmp_path / "run")
    yield run
    run.close()


@pytest.fixture
def pages(growing: Growing, dashboard: Any) -> Pages:
    return dashboard(growing.log.folder, is_indexed=False)


def wait_for_rows(pages: Pages, num: int) -> None:
    pages.until(lambda: (pages.get("/lanes/run").get("index_seq") or 0) >= num)


def read_until(answer: httpx.Response, is_last: Any) -> list[tuple[str, dict[str, Any], str]]:
    found = []
    for name, data, id_ in events(answer.iter_lines()):
        if name != ":":
            found.append((name, json.loads(data), id_))
            if is_last(*found[-1]):
                return found
    raise AssertionError(f"the stream ended: {found[-1:]}")


def steps_of(found: list[tuple[str, dict[str, Any], str]]) -> list[int]:
    return [step["step"] for name, value, _ in found if name == "step" for step in value["items"]]


def has_told(number: int) -> Any:
    """Whether a step has come, and with it all that belongs to it: an id comes last."""
    steps: list[int] = []

    def look(name: str, value: dict[str, Any], id_: str) -> bool:
        steps.extend(step["step"] for step in (value["items"] if name == "step" else ()))
        return bool(id_) and max(steps, default=0) >= number

    return look


def test_a_reader_that_comes_back_gets_every_step_once(growing, pages):
    wait_for_rows(pages, growing.log.last_seq)
    with pages.client.stream("GET", "/stream", params={"topics": TOPICS}) as answer:
        lines = answer.iter_lines()
        assert next(lines) == "retry: 1000"
        first = next(events(lines))
    assert first[0] == "hello"
    with pages.client.stream(
        "GET", "/stream", params={"topics": TOPICS}, headers={"Last-Event-ID": first[2]}
    ) as answer:
        growing.write(120)
        found = read_until(answer, has_told(3))
    at = found[-1][2]
    growing.write(10_000)
    wait_for_rows(pages, growing.log.last_seq)
    with pages.client.stream("GET", "/stream", params={"topics": TOPICS}, headers={"Last-Event-ID": at}) as answer:
        later = read_until(answer, has_told(8))
    told = steps_of(found) + steps_of(later)
    assert sorted(set(told)) == list(range(min(told), 9))
    assert len(told) == len(set(told)), "no step came twice"
    assert {"lane", "devices", "pipeline", "timeline"} <= {name for name, _, _ in found}
    assert [value["name"] for name, value, _ in later if name == "pipeline"]


def test_what_a_stream_told_is_what_the_pages_would_read(growing, pages):
    wait_for_rows(pages, growing.log.last_seq)
    with pages.client.stream("GET", "/stream", params={"topics": TOPICS}) as answer:
        growing.write(10_000)
        found = read_until(answer, lambda name, value, id_: name == "timeline" and value["seq"] >= growing.log.last_seq)
    shown = {value["name"]: value for name, value, _ in found if name == "pipeline"}
    rows = {row["name"]: row for row in pages.get("/pipelines")["items"]}
    assert shown == rows
    (last,) = [value for name, value, _ in found if name == "timeline"][-1:]
    assert last["end_s"] == pages.get("/timeline/run")["end_s"]
    assert last["changed_from"] <= last["end_s"]


def test_a_run_that_goes_on_is_running_and_then_over(growing, pages):
    wait_for_rows(pages, growing.log.last_seq)
    assert pages.get("/lanes/run")["state"] == "running"
    growing.write(10_000)
    growing.close()
    pages.until(lambda: pages.get("/lanes/run")["state"] == "over")
    assert pages.get("/timeline/run")["open_from"] is None


def test_an_index_made_anew_has_the_page_ask_again(growing, pages):
    wait_for_rows(pages, growing.log.last_seq)
    with pages.client.stream("GET", "/stream", params={"topics": "timeline:run"}) as answer:
        lines = events(answer.iter_lines())
        assert next(lines)[0] == "hello"
        for path in growing.log.folder.glob("index.db*"):
            path.unlink()
        names = []
        while "reset" not in names:
            names.append(next(lines)[0])


def test_a_server_that_ends_says_goodbye(growing, pages):
    wait_for_rows(pages, growing.log.last_seq)
    with pages.client.stream("GET", "/stream", params={"topics": "lanes"}) as answer:
        lines = events(answer.iter_lines())
        assert next(lines)[0] == "hello"
        pages.server.close()
        assert [name for name, _, _ in lines][-1] == "bye"


def test_a_session_has_five_streams(growing, pages):
    wait_for_rows(pages, growing.log.last_seq)
    streams = [pages.client.stream("GET", "/stream") for _ in range(MAX_OWN_STREAMS)]
    try:
        lines = [stream.__enter__().iter_lines() for stream in streams]
        assert [next(its) for its in lines] == ["retry: 1000"] * MAX_OWN_STREAMS
        assert pages.client.get("/stream").status_code == 429
    finally:
        for stream in streams:
            stream.__exit__(None, None, None)
    pages.until(lambda: _is_open(pages))


def _is_open(pages: Pages) -> bool:
    with pages.client.stream("GET", "/stream") as answer:
        return answer.status_code == 200


def test_an_indexer_that_is_killed_is_started_again(growing, pages):
    wait_for_rows(pages, growing.log.last_seq)
    before = pages.dashboard.indexing.pid
    pages.dashboard.indexing.kill()
    growing.write(50)
    wait_for_rows(pages, growing.log.last_seq)
    assert pages.dashboard.indexing.pid != before
    assert pages.get("/lanes/run")["banner"] is None


def test_ids_that_make_no_sense_are_passed_over():
    assert parse_id("run=5,a%2Cb=7") == {"run": 5, "a,b": 7}
    assert parse_id("run=,=5,x,run=-1,é=²") == {"": 5}
