"""What-if questions over the API: the answer of the command line, and a score of what came true."""

from __future__ import annotations

import json
import shlex
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from tests import waiting
from tests.log_script import AlternatingRun, append

from rlmux.cli.main import run_command_line
from rlmux.log.run_log import RunLog
from rlmux.service.dashboard import what_if_jobs
from rlmux.service.dashboard.schemas.usage_schemas import SideFigures

FILE = """
cluster: {pools: {rollout: {devices: 1}, train: {devices: 1}}}
policy: rollmux
pipelines: [{name: sort, steps: 30, task: sort}]
"""
WHATIF = "/lanes/demo/whatif"


@pytest.fixture(scope="module")
def script():
    script = AlternatingRun(num_steps=30).script
    script.file = FILE
    return script


@pytest.fixture
def half(script, tmp_path):
    """A run that stopped in the middle."""
    return script.write(tmp_path / "demo", len(script.rows) // 2)


def test_an_answer_is_that_of_the_command_line(half, dashboard, capsys):
    pages = dashboard(half)
    answer = pages.client.post(WHATIF, json={"add": 2, "like": "sort", "policy": "fifo"})
    assert answer.status_code == 200, answer.text
    said = answer.json()
    words = shlex.split(said.pop("command"))
    assert words[0] == "rlmux"
    assert run_command_line([*words[1:], "--json"]) == 0
    printed = json.loads(capsys.readouterr().out, parse_constant=lambda _: None)  # JSON has no infinity
    assert said.keys() == printed.keys()
    for side in ("now", "then"):  # how long the scheduler thought differs each time
        assert said[side]["pipelines"] == printed[side]["pipelines"]
        assert said[side]["makespan_s"] == printed[side]["makespan_s"]
        for bound in ("low", "high"):
            assert said[side][bound] == printed[side][bound]
    assert said["change"] == printed["change"]
    sort = said["then"]["pipelines"]["sort"]
    assert sort["low"]["ends_s"] < sort["ends_s"] < sort["high"]["ends_s"]
    assert set(said["then"]["pipelines"]) - set(said["now"]["pipelines"]) == {"sort-2", "sort-3"}


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ({}, "the body is wrong: no question"),
        ([1], "the body is wrong"),
        ({"when": 3}, "no field 'when'"),
        ({"add": True, "like": "sort"}, "add is 'True'"),
        ({"remove": "sort"}, "remove is 'sort'"),
        ({"set": [3]}, "set.0 is '3'"),
        ({"file": "x" * 200_000}, "file is 'xxx"),
        ({"like": "so\0rt", "add": 1}, "like is 'so"),
    ],
)
def test_a_body_that_is_no_question_is_refused(shown, body, told):
    answer = shown.client.post("/lanes/demo/whatif", json=body)
    assert answer.status_code == 400
    assert answer.json()["detail"].startswith(told)
    assert answer.json()["accepted"]


@pytest.fixture(scope="module")
def shown(finished_run):
    from tests.service.pages_server import Pages

    pages = Pages(finished_run)
    yield pages
    pages.close()


def test_what_the_command_line_refuses_is_refused_with_its_line(half, dashboard):
    pages = dashboard(half)
    for body, told in (
        ({"remove": ["--json"]}, "--remove --json: not a pipeline that goes on; accepted: sort, tools"),
        ({"file": "pipelines: ["}, "question.yaml:1: this is not YAML"),
    ):
        answer = pages.client.post(WHATIF, json=body)
        assert (answer.status_code, answer.json()["detail"][: len(told)]) == (400, told)


def test_predictions_are_scored_by_what_came(script, half, dashboard):
    pages = dashboard(half)
    assert pages.get(WHATIF)["num_scored"] == 0
    assert pages.client.post(WHATIF, json={"add": 1, "like": "sort"}).status_code == 200
    assert pages.get(WHATIF)["num_scored"] == 0
    pages.close()
    with RunLog.open(half) as log:
        append(log, script.rows[len(script.rows) // 2 :])
    score = dashboard(half).get(WHATIF)
    assert score["num_scored"] == 2
    assert 0.0 < score["median_error"] <= score["worst_error"] < 0.2
    assert score["within_range"] == 1.0


def test_questions_that_take_long_hold_no_other_request_up(half, dashboard, monkeypatch):
    pages, is_let_go = dashboard(half), threading.Event()

    def slow(*_: object) -> dict[str, Any]:
        is_let_go.wait()
        figures = dict.fromkeys(SideFigures.model_fields)
        side = figures | {"low": figures, "high": figures, "policy": "solo", "pipelines": {}}
        return {"run": "", "at_s": 0.0, "about": "", "notes": [], "now": side, "then": side, "change": side}

    monkeypatch.setattr(what_if_jobs, "_answer", slow)
    with ThreadPoolExecutor(60) as asking:
        try:
            asked = [asking.submit(pages.client.post, WHATIF, json={"remove": ["sort"]}) for _ in range(60)]
            waiting.until(lambda: sum(one.done() for one in asked) == 55, "all but those that wait are refused")
            refused = [one.result() for one in asked if one.done()]
            assert pages.get("/lanes")["items"], "and every page is answered"
        finally:
            is_let_go.set()
    assert {(one.status_code, one.headers["Retry-After"]) for one in refused} == {(429, "5")}
    assert [one.result().status_code for one in asked].count(200) == 5
    assert pages.client.post(WHATIF, json={"remove": ["sort"]}).status_code == 200, "and the next is, too"


def test_who_may_only_read_may_not_ask(half, dashboard):
    pages = dashboard(half)
    pages.dashboard.access.add_token("rlx_reader00_" + "r" * 32, scopes=["read"])
    headers = {"Authorization": "Bearer rlx_reader00_" + "r" * 32}
    assert pages.client.get(WHATIF, headers=headers).status_code == 200
    assert pages.client.post(WHATIF, json={"remove": ["sort"]}, headers=headers).status_code == 403
