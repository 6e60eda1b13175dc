"""Lanes whose logs other versions wrote: each names its version and shows what is kept, beside a lane that is whole."""

from __future__ import annotations

import json
import shutil
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing
from importlib.metadata import version
from pathlib import Path

import httpx
import pytest
from tests.service.dashboard.auth.test_visibility import with_people
from tests.service.pages_server import Pages

from rlmux.config.load import parse_spec
from rlmux.config.service_file import Lane
from rlmux.core.errors import LogError
from rlmux.log.run_log import LogReader, OtherVersionError, other_version
from rlmux.report.reports import write_report
from rlmux.service.dashboard.auth import tokens
from rlmux.service.dashboard.webhook import Webhook
from rlmux.service.lanes.controllers import LaneController

WRITERS = {"two": (2, "0.1.5"), "three": (3, "0.2.0"), "four": (4, "0.2.9"), "six": (6, "0.4.0")}
"""(schema, rlmux) by lane."""


def make_other(folder: Path, schema: int, writer: str) -> None:
    """Have the log in a folder be of another schema, and by another rlmux."""
    with closing(sqlite3.connect(folder / "run.db", isolation_level=None)) as log:
        (text,) = log.execute("SELECT json FROM log WHERE kind = 'header'").fetchone()
        log.execute("DROP TRIGGER log_keeps_facts")
        header = {**json.loads(text), "schema_version": schema, "rlmux_version": writer}
        log.execute("UPDATE log SET json = ? WHERE kind = 'header'", (json.dumps(header),))
        log.execute(f"PRAGMA user_version = {schema}")


@pytest.fixture(scope="module")
def served(finished_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Pages]]:
    root = tmp_path_factory.mktemp("root")
    shutil.copytree(finished_run, root / "good")
    for name, (schema, writer) in WRITERS.items():
        shutil.copytree(finished_run, root / name)
        write_report(root / name)
        make_other(root / name, schema, writer)
        (root / name / "index.db").write_bytes(b"the index of that version")
    (root / "four" / "summary.json").unlink()
    with_people(root)
    with closing(Pages(root)) as pages:
        yield root, pages


@pytest.mark.parametrize(("lane", "written"), WRITERS.items())
def test_a_lane_of_another_schema_names_the_version_that_resumes_it(served, lane, written):
    _, pages = served
    schema, writer = written
    row = pages.get(f"/lanes/{lane}")
    newer = "a newer " if schema == 6 else ""
    assert row["banner"] == (
        f"written by {newer}rlmux {writer} (log schema {schema}); to resume it: pip install rlmux=={writer}; "
        f"this rlmux {version('rlmux')} reads schema 5"
    )
    assert (row["state"], row["is_indexing"]) == ("other_version", False)
    refused = pages.client.get(f"/lanes/{lane}/devices")
    assert (refused.status_code, refused.json()["detail"]) == (409, f"{lane}: {row['banner']}")


def test_its_kept_figures_are_those_of_its_summary(served):
    root, pages = served
    summary = json.loads((root / "three" / "summary.json").read_text())
    kept = pages.get("/lanes/three")["kept"]
    assert kept["makespan_s"] == summary["makespan_s"]
    assert {row["name"]: (row["status"], row["steps"], row["reward_last"]) for row in kept["pipelines"]} == {
        name: (row["status"], row["steps"], row["reward_last"]) for name, row in summary["pipelines"].items()
    }
    four = pages.get("/lanes/four")
    assert (four["kept"], four["files"]) == (None, ["timeline.html"])


def test_the_lane_beside_it_is_whole(served):
    _, pages = served
    rows = {row["name"]: row for row in pages.get("/lanes")["items"]}
    assert rows["good"]["state"] == "over"
    assert rows["good"]["banner"] is None
    assert not any(row["is_indexing"] for row in rows.values())
    assert {row["lane"] for row in pages.get("/pipelines")["items"]} == {"good"}
    assert pages.get("/health")["lanes"]["three"]["up"] is False


def test_an_index_of_that_version_is_left_as_it_is(served):
    root, pages = served
    pages.until(lambda: pages.get("/lanes/good")["state"] == "over")
    assert {(root / name / "index.db").read_bytes() for name in WRITERS} == {b"the index of that version"}


def test_its_report_is_downloaded_and_runs_no_script(served):
    root, pages = served
    for name in pages.get("/lanes/two")["files"]:
        answer = pages.client.get(f"/lanes/two/{name}")
        assert answer.content == (root / "two" / name).read_bytes()
        assert answer.headers["content-disposition"] == f'attachment; filename="{name}"'
        assert "sandbox" in answer.headers["content-security-policy"]
    assert pages.client.get("/lanes/four/summary.json").status_code == 404


def test_a_user_who_does_not_see_all_sees_its_version_alone(served):
    root, pages = served
    token = tokens.add(root, "ann", ["read"], days=1.0, now=time.time())
    with httpx.Client(base_url=f"{pages.url}/api/v1", headers={"Authorization": f"Bearer {token}"}) as ann:
        row = ann.get("/lanes/three").json()
        assert (row["state"], row["kept"], row["files"]) == ("other_version", None, [])
        assert ann.get("/lanes/three/summary.json").status_code == 403


def test_a_scrape_says_that_it_is_not_up(served):
    _, pages = served
    text = pages.client.get("/metrics").text
    assert 'rlmux_lane_up{lane="three"} 0.0' in text
    assert 'rlmux_run_seconds{lane="three"}' not in text
    assert 'rlmux_run_seconds{lane="good"}' in text


def test_a_webhook_looks_at_the_other_lanes(served):
    _, pages = served
    hook = Webhook(pages.dashboard._reads, "http://127.0.0.1:1/")
    assert {lane for lane, _, _ in hook._firing()} <= {"good"}


def test_a_service_starts_no_controller_for_it(finished_run, tmp_path):
    shutil.copytree(finished_run, tmp_path / "old")
    make_other(tmp_path / "old", 3, "0.2.0")
    text = "cluster: {pools: {rollout: {devices: 1}, train: {devices: 1}}}"
    spec = parse_spec(text, source="lanes.yaml", folder=tmp_path, may_be_empty=True)
    lane = LaneController(tmp_path, "old", Lane(spec=spec, serve=None))
    lane.poll()
    assert lane.pid is None
    assert str(lane.trouble()).startswith("lane old: written by rlmux 0.2.0 (log schema 3); to resume it: pip install")


def test_a_log_of_this_version_and_a_damaged_one_are_of_no_other(finished_run, tmp_path):
    assert other_version(finished_run) is None
    assert other_version(tmp_path) is None
    (tmp_path / "run.db").write_bytes(b"x" * 5000)
    assert other_version(tmp_path) is None
    with pytest.raises(LogError) as error:
        LogReader(tmp_path)
    assert not isinstance(error.value, OtherVersionError)
