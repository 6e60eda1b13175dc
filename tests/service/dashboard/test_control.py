"""Removals through the service, in lanes where nothing runs."""

from __future__ import annotations

import getpass
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.log_script import AlternatingRun
from tests.service.pages_server import Pages

from rlmux.log.folder_lock import FolderLock
from rlmux.log.run_log import LOG_NAME

ENDED = {"sort": "finished", "tools": "failed"}


def write_run(folder: Path) -> Path:
    run = AlternatingRun(num_steps=3, failing="tools")
    for name in ENDED:
        run.script.note(run.script.rows[-1].time_s, "plan", pipeline=name, plan_sha256="p")
    run.script.write(folder)
    for name in ENDED:
        for file in ("step_1/weights", "samples.db", "workers.log"):
            (folder / name / file).parent.mkdir(parents=True, exist_ok=True)
            (folder / name / file).write_bytes(bytes(100))
    return folder


@pytest.fixture
def pages(tmp_path: Path) -> Iterator[Pages]:
    for lane in ("demo", "old"):
        write_run(tmp_path / "root" / lane)
    shown = Pages(tmp_path / "root", lanes=["demo"])
    shown.folder = tmp_path / "root"
    yield shown
    shown.close()


def names(pages: Pages, **query: object) -> list[str]:
    return [row["name"] for row in pages.get("/pipelines", lane="demo", **query)["items"]]


def test_a_removed_pipeline_leaves_the_list_and_keeps_its_row_steps_and_audit(pages):
    answer = pages.client.post("/pipelines/demo/sort/remove", json={})
    assert answer.json() == {"pipeline": "sort", "outcome": "removed", "parts": "all", "freed_bytes": 300}
    assert not (pages.folder / "demo" / "sort").exists()
    pages.until(lambda: names(pages) == ["tools"])
    assert pages.get("/pipelines", lane="demo")["num_removed"] == 1
    assert names(pages, removed=True) == ["sort", "tools"]
    row = pages.get("/pipelines/demo/sort")
    assert [(each["parts"], each["by"], each["by_rule"]) for each in row["removed"]] == [
        ("all", getpass.getuser(), False)
    ]
    assert (row["status"], row["has_samples"], row["step"]) == ("finished", False, 3)
    assert len(pages.get("/pipelines/demo/sort/steps")["items"]) == 3
    assert pages.get("/audit")["items"][0]["path"].endswith("/pipelines/demo/sort/remove")


def test_a_dry_removal_has_the_bytes_alone_and_one_part_leaves_the_others(pages):
    dry = pages.client.post("/pipelines/demo/sort/remove", json={"dry_run": True}).json()
    assert (dry["outcome"], dry["freed_bytes"]) == ("would be removed", 300)
    told = pages.client.post("/pipelines/demo/sort/remove", json={"parts": "checkpoints"}).json()
    assert (told["outcome"], told["freed_bytes"]) == ("removed", 100)
    assert sorted(path.name for path in (pages.folder / "demo" / "sort").iterdir()) == ["samples.db", "workers.log"]
    assert names(pages) == ["sort", "tools"]


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/pipelines/demo/none-such/remove", {}, 404),
        ("/pipelines/none-such/sort/remove", {}, 404),
        ("/pipelines/demo/sort/remove", {"parts": "half"}, 400),
        ("/lanes/demo/remove", {}, 409),
        ("/lanes/none-such/remove", {}, 404),
    ],
)
def test_what_cannot_be_removed_is_refused_and_changes_nothing(pages, path, body, status):
    assert pages.client.post(path, json=body).status_code == status
    assert (pages.folder / "demo" / "sort" / "samples.db").exists()


def test_a_second_removal_is_refused_in_a_line(pages):
    pages.client.post("/pipelines/demo/sort/remove", json={})
    answer = pages.client.post("/pipelines/demo/sort/remove", json={})
    assert (answer.status_code, answer.json()["detail"]) == (
        409,
        "pipeline 'sort' is removed already; accepted: one that is not",
    )


def test_an_old_lane_is_removed_whole_and_the_others_go_on(pages):
    assert pages.client.post("/lanes/old/remove", json={"dry_run": True}).json()["outcome"] == "would be removed"
    with FolderLock.take(pages.folder / "old"):
        assert pages.client.post("/lanes/old/remove", json={}).status_code == 409, "a process writes there"
    (pages.folder / "old.yaml").touch()
    assert pages.client.post("/lanes/old/remove", json={}).json()["outcome"] == "removed"
    assert not (pages.folder / "old.yaml").exists()
    assert sorted(path.parent.name for path in pages.folder.glob(f"*/{LOG_NAME}")) == ["demo"]
    assert [lane["name"] for lane in pages.get("/lanes")["items"]] == ["demo"]
    pages.client.post("/pipelines/demo/sort/remove", json={})
    pages.until(lambda: names(pages) == ["tools"], "the indexer, which goes on")
