"""The trace obeys the trace-event format, and shows what the timeline knows."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from rlmux.report.figures import perfetto
from rlmux.report.figures.perfetto import trace
from rlmux.report.timeline.intervals import Kind


@pytest.fixture(scope="module")
def failed_run(alternating_run: Callable[..., Any]) -> Any:
    return alternating_run(failing="tools").timeline()


@pytest.fixture(scope="module")
def events(failed_run: Any) -> list[dict[str, Any]]:
    content = json.loads(json.dumps(trace(failed_run), allow_nan=False))
    return content["traceEvents"]


def of(events: list[dict[str, Any]], phase: str) -> list[dict[str, Any]]:
    return [event for event in events if event["ph"] == phase]


def test_every_event_has_what_the_format_wants(events: list[dict[str, Any]]) -> None:
    for event in events:
        assert event["ph"] in "MXCsfi"
        assert isinstance(event["name"], str)
        assert isinstance(event["pid"], int)
        if event["ph"] != "M":
            assert isinstance(event["ts"], int)
            assert event["ts"] >= 0
        if event["ph"] == "X":
            assert event["dur"] >= 0


def test_slices_of_one_thread_do_not_overlap(events: list[dict[str, Any]]) -> None:
    ends: dict[tuple[int, int], int] = {}
    for event in sorted(of(events, "X"), key=lambda event: event["ts"]):
        place = (event["pid"], event["tid"])
        assert event["ts"] >= ends.get(place, 0) - 1
        ends[place] = event["ts"] + event["dur"]


def test_busy_time_of_a_device_is_all_there(events: list[dict[str, Any]], failed_run: Any) -> None:
    names = {e["pid"]: e["args"]["name"] for e in of(events, "M") if e["name"] == "process_name"}
    for device in failed_run.devices.values():
        (process,) = [pid for pid, name in names.items() if name.startswith(str(device.id))]
        busy_us = sum(
            e["dur"] for e in of(events, "X") if e["pid"] == process and e["args"].get("cause") in ("compute", "tail")
        )
        assert busy_us / 1e6 == pytest.approx(device.seconds_by_kind[Kind.BUSY], abs=1e-3)


def test_a_pipeline_keeps_its_colour(events: list[dict[str, Any]]) -> None:
    colours: dict[str, set[str]] = {}
    for event in of(events, "X"):
        if event["args"].get("cause") in ("compute", "tail"):
            colours.setdefault(event["args"]["pipeline"], set()).add(event["cname"])
    assert {name: len(names) for name, names in colours.items()} == {"sort": 1, "tools": 1}
    assert colours["sort"] != colours["tools"]


def test_arrows_lead_from_rollout_to_training_to_publishing(events: list[dict[str, Any]]) -> None:
    starts, ends = of(events, "s"), of(events, "f")
    assert [event["id"] for event in starts] == [event["id"] for event in ends]
    assert all(start["ts"] <= end["ts"] for start, end in zip(starts, ends, strict=True))
    assert sum(event["name"] == "trajectories of sort" for event in starts) == 6
    assert sum(event["name"] == "weights of sort" for event in starts) == 6
    slices = [(e["pid"], e["tid"], e["ts"], e["ts"] + e["dur"]) for e in of(events, "X")]
    for arrow in starts + ends:
        assert any(
            pid == arrow["pid"] and tid == arrow["tid"] and begin <= arrow["ts"] <= end
            for pid, tid, begin, end in slices
        )


def test_failure_and_counters_are_there(events: list[dict[str, Any]]) -> None:
    assert [(e["name"], e["args"]["text"][:25]) for e in of(events, "i")] == [
        ("failure: tools", "its reward function raise")
    ]
    counters = {event["name"] for event in of(events, "C")}
    assert {"sequences", "reward sort", "reward tools"} <= counters


def test_a_long_trace_merges_short_slices_and_loses_no_seconds(
    failed_run: Any, events: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(perfetto, "MAX_SLICES", 10)
    monkeypatch.setattr(perfetto, "_COLUMNS", (20, 20))
    content = json.loads(json.dumps(trace(failed_run), allow_nan=False))
    shortest_s = content["otherData"]["shortest_slice_s"]
    assert shortest_s == pytest.approx(failed_run.makespan_s / 20)
    thin = content["traceEvents"]
    merged = [event for event in of(thin, "X") if "slices" in event["args"]]
    assert any(event["args"]["slices"] > 1 for event in merged)
    assert len(of(thin, "X")) < len(of(events, "X"))
    assert len(of(thin, "C")) < len(of(events, "C"))
    assert all(event["dur"] >= shortest_s * 1e6 - 1 for event in of(thin, "X") if event not in merged)
    spent_s = sum(e["dur"] for e in of(thin, "X") if e not in merged) / 1e6
    spent_s += sum(sum(event["args"]["seconds"].values()) for event in merged)
    assert spent_s == pytest.approx(sum(event["dur"] for event in of(events, "X")) / 1e6)
    test_slices_of_one_thread_do_not_overlap(thin)


def test_a_long_trace_counts_once_in_each_part_and_shows_where_a_rollout_ends(
    failed_run: Any, events: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(perfetto, "MAX_SLICES", 10)
    monkeypatch.setattr(perfetto, "_COLUMNS", (20, 20))
    thin = trace(failed_run)["traceEvents"]
    part_us = failed_run.makespan_s / 20 * 1e6
    start_us = failed_run.start_s * 1e6

    def last(shown: list[dict[str, Any]]) -> list[tuple[tuple[int, int], dict[str, int]]]:
        counts = [event for event in of(shown, "C") if event["name"] == "sequences"]
        counts.sort(key=lambda event: event["ts"])
        return [((event["pid"], int((event["ts"] + start_us) / part_us)), event["args"]) for event in counts]

    assert len(last(thin)) == len(dict(last(thin))) == len(dict(last(events)))
    ends = {part for part, counts in dict(last(events)).items() if not any(counts.values())}
    assert ends
    assert ends == {part for part, counts in last(thin) if not any(counts.values())}


def test_a_short_trace_has_every_slice(failed_run: Any) -> None:
    assert "shortest_slice_s" not in trace(failed_run)["otherData"]
