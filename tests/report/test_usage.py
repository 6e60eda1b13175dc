"""A window of time is charged to the second, over any number of runs, and what cannot be read is named."""

from __future__ import annotations

import math
import sqlite3
from pathlib import Path
from typing import Any

import pytest
from tests.log_script import AlternatingRun, LogScript

from rlmux.core.errors import UserError
from rlmux.log.run_log import LOG_NAME, SCHEMA_VERSION
from rlmux.report.reports import read_timeline
from rlmux.report.timeline.intervals import Kind
from rlmux.report.timeline.run_clock import unix_of, utc_text
from rlmux.report.usage import KEYS, UsageSums, Window, add_run, runs_in, window_of

NOW = 1_800_000_000.0
BEGIN = unix_of("2026-11-01T00:00:00Z")
USD = 36.0
DAY_S = 86_400.0


@pytest.fixture
def priced(monkeypatch, tmp_path) -> Path:
    """A run of two pipelines on two devices of $36 an hour, begun at midnight."""
    made = AlternatingRun(num_steps=6).script
    header = {**made.header, "created": "2026-11-01T00:00:00+00:00"}
    for pool in header["pools"].values():
        pool["usd_per_node_hour"] = USD
    monkeypatch.setattr(LogScript, "header", header)
    return made.write(tmp_path / "runs" / "demo")


def usage(folder: Path, since: float, until: float) -> dict[str, Any]:
    sums = UsageSums(Window(since, until))
    for name, path in runs_in(folder).items():
        add_run(sums, name, path)
    return sums.to_json()


def test_a_whole_run_is_its_timeline_under_every_key(priced):
    timeline, found = read_timeline(priced), usage(priced.parent, BEGIN, BEGIN + DAY_S)
    hours = {
        f"{kind.value}_hours": math.fsum(d.seconds_by_kind[kind] for d in timeline.devices.values()) / 3600
        for kind in Kind
    }
    total = {name: found["total"][name] for name in hours}
    assert total == pytest.approx(hours)
    assert found["total"]["device_hours"] == pytest.approx(2 * timeline.makespan_s / 3600)
    assert found["total"]["usd"] == pytest.approx(USD * found["total"]["device_hours"])
    for key in KEYS:
        rows = found["by"][key]
        for name in (*hours, "usd"):
            assert math.fsum(row[name] for row in rows) == pytest.approx(found["total"][name]), (key, name)
    assert {row["pipeline"] for row in found["by"]["pipeline"]} >= {"demo/sort", "demo/tools"}


def test_two_halves_are_the_whole(priced):
    middle = BEGIN + read_timeline(priced).end_s / 2
    halves = [usage(priced, BEGIN, middle), usage(priced, middle, BEGIN + DAY_S)]
    whole = usage(priced, BEGIN, BEGIN + DAY_S)
    for name, value in whole["total"].items():
        assert math.fsum(half["total"][name] for half in halves) == pytest.approx(value), name
    assert all(half["total"]["busy_hours"] > 0.0 for half in halves)


def test_two_runs_are_twice_one_and_a_service_beside_them_counts_too(priced):
    for copy in ("again", "service/lane"):
        (priced.parent / copy).mkdir(parents=True)
        (priced.parent / copy / LOG_NAME).write_bytes((priced / LOG_NAME).read_bytes())
    one, three = usage(priced, BEGIN, BEGIN + DAY_S), usage(priced.parent, BEGIN, BEGIN + DAY_S)
    assert three["total"]["device_hours"] == pytest.approx(3 * one["total"]["device_hours"])
    assert [row["lane"] for row in three["by"]["lane"]] == ["again", "demo", "service/lane"]


def test_the_longest_idle_stretches_are_named_with_their_price(priced):
    script = LogScript(num_rollout=2)
    script.submit(0.0, "sort")
    script.note(7200.0, "end", pipelines={}, control_s=0.0)
    folder = script.write(priced.parent / "idle")
    gaps = usage(folder, BEGIN, BEGIN + DAY_S)["idle_gaps"]
    hours = [gap["hours"] for gap in gaps]
    assert hours == sorted(hours, reverse=True)
    for gap in gaps:
        assert gap["usd"] == pytest.approx(USD * gap["hours"])
        assert gap["begins"] >= utc_text(BEGIN)


def test_a_run_that_cannot_be_read_is_named_and_the_others_count(priced):
    (priced.parent / "old").mkdir()
    (priced.parent / "old" / LOG_NAME).write_bytes((priced / LOG_NAME).read_bytes())
    with sqlite3.connect(priced.parent / "old" / LOG_NAME) as connection:
        connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION + 1}")
    found = usage(priced.parent, BEGIN, BEGIN + DAY_S)
    assert list(found["left_out"]) == ["old"]
    assert "written by a newer rlmux" in found["left_out"]["old"]
    assert found["total"]["device_hours"] > 0.0


@pytest.mark.parametrize(
    ("since", "until", "expected"),
    [
        ("2d", None, (NOW - 2 * DAY_S, NOW)),
        ("4w", "12h", (NOW - 28 * DAY_S, NOW - DAY_S / 2)),
        ("2026-11-01", "2026-11-02", (BEGIN, BEGIN + 2 * DAY_S)),
        ("2026-11-01T02:00:00+02:00", "2026-11-01T06:00", (BEGIN, BEGIN + DAY_S / 4)),
    ],
)
def test_a_window_is_periods_before_now_dates_or_times(since, until, expected):
    assert window_of(since, until, NOW) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("since", "until", "said"),
    [
        ("yesterday", None, "--since 'yesterday': accepted: a period such as 30d, 12h or 4w, a date, or an ISO time"),
        ("30d", "30 days", "--until '30 days': accepted: a period"),
        ("2d", "3d", "--until 3d: is not after --since 2d; accepted: a later time"),
    ],
)
def test_other_texts_are_one_line(since, until, said):
    with pytest.raises(UserError) as refused:
        window_of(since, until, NOW)
    assert str(refused.value).startswith(said)


def test_a_folder_without_a_run_is_one_line(tmp_path):
    with pytest.raises(UserError, match="no run in it; accepted: the folder of a run or a service"):
        runs_in(tmp_path)
