"""`rlmux remove` on a run that has ended."""

from __future__ import annotations

import getpass
import json
from pathlib import Path

import pytest
from tests.service.dashboard.test_control import write_run
from tests.service.pages_server import Pages

from rlmux.log.folder_lock import FolderLock
from rlmux.log.run_log import LogReader


@pytest.fixture
def one(folder: Path) -> Path:
    return write_run(folder / "one")


def test_a_line_for_each_pipeline_says_what_was_freed(rlmux, one):
    assert rlmux("remove", "one", "sort", "tools", "--only", "checkpoints").out == (
        "sort: checkpoints removed (100 B)\ntools: checkpoints removed (100 B)\n200 B in all\n"
    )
    assert rlmux("remove", "one", "sort", "--dry-run").out == "sort: would be removed (200 B)\n"
    answer = json.loads(rlmux("remove", "one", "sort", "--json").out)
    assert answer["pipelines"][0] == {
        "pipeline": "sort", "outcome": "removed", "parts": "all", "freed_bytes": 200,
    }  # fmt: skip


def test_what_is_refused_is_a_line_with_exit_code_2_and_the_others_are_removed(rlmux, one):
    code, out, err = rlmux("remove", "one", "sorted", "sort")
    assert (code, out) == (2, "sort: removed (300 B)\n")
    assert err == "rlmux: no pipeline 'sorted'; nearest: sort; accepted: one that has ended: sort, tools\n"


def test_status_leaves_out_what_is_removed_and_says_how_many(rlmux, one):
    before = json.loads(rlmux("status", "one", "--json").out)["pipelines"]["sort"]
    rlmux("remove", "one", "sort")
    rlmux("remove", "one", "tools", "--only", "samples")
    shown = rlmux("status", "one", "--once").out
    assert "1 removed (--all shows them)" in shown
    assert "tools: its samples were removed at " in shown
    assert "\nsort " not in shown
    assert "\nsort " in rlmux("status", "one", "--all").out
    after = json.loads(rlmux("status", "one", "--json").out)["pipelines"]["sort"]
    (removed,) = after.pop("removed")
    assert (removed["parts"], removed["freed_bytes"], after) == ("all", 300, before)
    assert "all of its files were removed" in rlmux("samples", "one", "sort").err


def test_the_report_of_a_run_is_the_same_after_a_removal(rlmux, one):
    before = json.loads(rlmux("report", "one", "--json").out)
    rlmux("remove", "one", "sort", "tools")
    after = json.loads(rlmux("report", "one", "--json").out)
    assert after["pipelines"] == before["pipelines"]
    assert after["devices"] == before["devices"]


def test_a_whole_run_is_removed_when_the_user_says_so(rlmux, one):
    code, _, err = rlmux("remove", "one")
    assert code == 2
    assert "would be removed, its log too; accepted: with --yes" in err
    with FolderLock.take(one.parent):
        assert "one: a server has it; accepted: " in rlmux("remove", "one", "--yes").err
    assert rlmux("remove", "one", "--yes").out.startswith("one: removed (")
    assert not one.exists()


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["nowhere"], "nowhere: no such folder; accepted: the folder of a run"),
        (["one", "--only", "samples"], "one: accepted: names of pipelines with or without --only, or --lane alone"),
        (["one", "--lane", "x"], "one: accepted: names of pipelines, the folder of a run, or a server's URL with"),
        (["http://127.0.0.1:1"], "http://127.0.0.1:1: accepted: names of pipelines, the folder of a run, or a server"),
    ],
)
def test_a_mistake_is_one_line(rlmux, one, words, reason):
    code, out, err = rlmux("remove", *words)
    assert (code, out) == (2, "")
    assert err.startswith(f"rlmux: {reason}")


def test_a_run_on_a_server_and_an_old_lane_are_removed_through_it(rlmux, folder, monkeypatch):
    for lane in ("here", "old"):
        write_run(folder / "root" / lane)
    pages = Pages(folder / "root", lanes=["here"])
    monkeypatch.setenv("RLMUX_TOKEN", pages.token)
    try:
        assert rlmux("remove", f"{pages.url}/lanes/here", "sort").out == "sort: removed (300 B)\n"
        assert rlmux("remove", f"{pages.url}/lanes/here", "sort").code == 2
        told = rlmux("remove", pages.url, "--lane", "old", "--yes")
        assert told.out.startswith(f"{pages.url}: lane old: removed (")
        assert "is the service's own" in rlmux("remove", pages.url, "--lane", "here", "--yes").err
    finally:
        pages.close()
    with LogReader(folder / "root" / "here") as log:
        assert [note.by for note in log.state().removals["sort"].values()] == [getpass.getuser()]
