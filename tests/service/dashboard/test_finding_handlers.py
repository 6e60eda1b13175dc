"""Runs are found again by what was written about them, and compared by what differs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from tests.log_script import AlternatingRun
from tests.service.pages_server import Pages

ADDRESS = "/pipelines/demo/sort/labels"


@pytest.fixture
def pages(tmp_path, dashboard):
    return dashboard(AlternatingRun(num_steps=2).script.write(tmp_path / "demo"))


@pytest.fixture(scope="module")
def read_pages(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pages]:
    """The same for tests that change nothing."""
    with closing(Pages(AlternatingRun(num_steps=2).script.write(tmp_path_factory.mktemp("read") / "demo"))) as shown:
        yield shown


def row_of(pages, name: str) -> dict:
    return next(row for row in pages.get("/pipelines")["items"] if row["name"] == name)


def test_labels_and_a_note_are_kept_beside_the_log(pages, tmp_path, dashboard):
    given = {"labels": ["baseline", "for the paper", "baseline"], "note": "KL was off.\n<script>alert(1)</script>"}
    answer = pages.client.post(ADDRESS, json=given)
    assert answer.json() == {**given, "labels": ["baseline", "for the paper"]}
    again = dashboard(tmp_path / "demo")
    assert row_of(again, "sort")["labels"] == ["baseline", "for the paper"]
    assert row_of(again, "tools")["labels"] == []
    assert again.get("/pipelines/demo/sort")["note"] == given["note"]


def test_empty_labels_and_an_empty_note_leave_nothing(pages, tmp_path):
    pages.client.post(ADDRESS, json={"labels": ["old"], "note": "text"})
    assert pages.client.post(ADDRESS, json={"labels": [], "note": ""}).status_code == 200
    assert (tmp_path / "demo" / "labels.json").read_text() == "{}"


@pytest.mark.parametrize(
    ("body", "where"),
    [
        ({"labels": ["x" * 10_000]}, "labels.0"),
        ({"labels": ["fine", "two\nlines"]}, "labels.1"),
        ({"labels": ["a, b"]}, "labels.0"),
        ({"labels": [""]}, "labels.0"),
        ({"labels": [f"{number}" for number in range(21)]}, "labels"),
        ({"note": "x" * 10_001}, "note"),
        ({"label": "one"}, "body"),
    ],
)
def test_what_is_too_long_is_refused_in_one_line(read_pages, body, where):
    answer = read_pages.client.post(ADDRESS, json={"labels": [], "note": "", **body})
    problem = answer.json()
    assert (answer.status_code, problem["where"]) == (400, where)
    assert len(problem["detail"]) < 120
    assert "\n" not in problem["detail"] + problem["accepted"]


def test_labels_alone_do_not_erase_the_note(read_pages):
    assert "note is missing" in read_pages.client.post(ADDRESS, json={"labels": ["new"]}).json()["detail"]


def test_a_damaged_file_hides_no_pipeline_and_is_not_overwritten(pages, tmp_path):
    path = tmp_path / "demo" / "labels.json"
    path.touch(0o600)
    path.write_text("{no JSON")
    assert row_of(pages, "sort")["labels"] == []
    answer = pages.client.post(ADDRESS, json={"labels": ["new"], "note": ""})
    assert (answer.status_code, "is damaged" in answer.json()["detail"]) == (409, True)
    assert path.read_text() == "{no JSON"


FILE = """
pipelines:
- {name: sort, seed: 1, task: {name: sort}, model: {path: Qwen/Qwen3-0.6B}, algorithm: {learning_rate: 0.002}}
- {name: tools, seed: 2, task: {name: tools}, model: {path: Qwen/Qwen3-4B}, algorithm: {learning_rate: 0.001}}
"""


def write_two_lanes(folder: Path) -> Path:
    for name in ("one", "two"):
        run = AlternatingRun(num_steps=2)
        run.script.file = FILE
        run.script.write(folder / name)
    return folder


@pytest.fixture(scope="module")
def two_lanes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pages]:
    """Two lanes that no test changes."""
    with closing(Pages(write_two_lanes(tmp_path_factory.mktemp("two")))) as shown:
        yield shown


def found(pages, query: str) -> list[tuple[str, str]]:
    return [(row["lane"], row["name"]) for row in pages.get("/search", q=query)["items"]]


@pytest.mark.parametrize(
    "query", ["sort", "SOR", "learning_rate 0.002", "rate qwen3-0.6", "qwen/qwen3 task.name sor", "seed 1"]
)
def test_every_word_of_a_search_begins_a_word_of_some_field(two_lanes, query):
    assert sorted(found(two_lanes, query)) == [("one", "sort"), ("two", "sort")]


@pytest.mark.parametrize("query", ["ort", "sort 4B", "qwen3-0.7", "nothing"])
def test_a_search_finds_nothing_where_a_word_is_missing(two_lanes, query):
    assert found(two_lanes, query) == []


def test_a_search_finds_labels_and_notes_and_says_where(tmp_path, dashboard):
    two_lanes = dashboard(write_two_lanes(tmp_path))
    text = "first line\nKL drifted after step 40"
    two_lanes.client.post("/pipelines/two/tools/labels", json={"labels": ["ablation"], "note": text})
    (row,) = two_lanes.get("/search", q="abl drift")["items"]
    assert (row["lane"], row["name"], row["labels"]) == ("two", "tools", ["ablation"])
    assert row["matches"] == [
        {"field": "label", "text": "ablation"},
        {"field": "note", "text": "KL drifted after step 40"},
    ]


def test_a_search_counts_all_and_answers_some(two_lanes):
    answer = two_lanes.get("/search", q="t", limit=3)
    assert (len(answer["items"]), answer["total"]) == (3, 4)


def test_a_search_without_a_letter_is_refused(two_lanes):
    assert two_lanes.client.get("/search?q=%3C%3E").json()["accepted"] == "a word with a letter or a digit"


def test_runs_that_differ_in_their_seed_alone_are_one_group(tmp_path, dashboard):
    for lane, seed, rate in (("one", 1, 0.001), ("two", 2, 0.001), ("three", 1, 0.002)):
        run = AlternatingRun(num_steps=2)
        run.script.file = f"pipelines:\n- {{name: sort, seed: {seed}, algorithm: {{learning_rate: {rate}}}}}"
        run.script.write(tmp_path / lane)
    pages = dashboard(tmp_path)
    answer = pages.get("/compare", of=["one/sort", "two/sort", "three/sort"])
    assert answer["differs"] == {"algorithm.learning_rate": [0.001, 0.001, 0.002], "seed": [1, 2, 1]}
    assert answer["groups"] == [[0, 1], [2]]
    assert answer["identity"] is None
    assert [row["place"] for row in pages.get("/compare", of=["one/sort", "one/tools"])["items"]] == [0, 1]


@pytest.mark.parametrize("many", [1, 21])
def test_as_many_as_twenty_are_compared(read_pages, many):
    assert read_pages.client.get("/compare", params={"of": ["demo/sort"] * many}).status_code == 400
    assert read_pages.client.get("/compare", params={"of": ["demo/sort"] * 20}).status_code == 200
