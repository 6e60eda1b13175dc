"""What the addresses answer is what the report of the same log says."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from datetime import datetime, timedelta
from pathlib import Path

import numpy as np
import pytest
from tests.log_script import ROLLOUT, STAGES, TRAIN, AlternatingRun, LogScript, long_lane, order
from tests.service.pages_server import Pages

from rlmux.core.actions import Admit
from rlmux.core.events import PipelineSubmitted, StageFinished, TimeReached
from rlmux.core.model import AdmissionKind, DeviceId, NodeId, Pipeline, Placement, Stage
from rlmux.report.reports import read_timeline
from rlmux.report.samples import KeptSample, SampleWriter
from rlmux.report.summary import summarize
from rlmux.report.timeline.intervals import Kind
from rlmux.service.dashboard import handlers


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pages]:
    folder = AlternatingRun(num_steps=12).script.write(tmp_path_factory.mktemp("runs") / "demo")
    (folder / "sort").mkdir()
    (folder / "sort" / "workers.log").write_text("".join(f"line {number}\n" for number in range(1000)))
    writer = SampleWriter(folder / "sort" / "samples.db")
    for step in (1, 2):
        writer.add(step, [told(step, place) for place in range(4)])
    writer.close()
    shown = Pages(folder)
    shown.folder = folder
    yield shown
    shown.close()


def told(step: int, place: int) -> KeptSample:
    figures = {"advantage": 0.0, "stop": "stop", "tokens": 3, "num_turns": 1, "first_version": 0, "last_version": 0}
    turns = ((True, f"answer {step}.{place}"),)
    return KeptSample(prompt=0, sample=place, prompt_text="q", turns=turns, reward=float(place), **figures)


def unpacked(data: bytes) -> tuple[dict, bytes]:
    (size,) = struct.unpack_from("<I", data)
    assert (4 + size) % 8 == 0
    return json.loads(data[4 : 4 + size]), data[4 + size :]


def test_a_lane_has_the_reports_sums(pages):
    lane, timeline = pages.get("/lanes/demo"), read_timeline(pages.folder)
    summary = summarize(timeline)
    assert (lane["state"], lane["banner"], lane["makespan_s"]) == ("over", None, summary["makespan_s"])
    assert lane["num_switches"] == summary["num_switches"]
    for kind in Kind:
        expected = sum(device.seconds_by_kind[kind] for device in timeline.devices.values())
        assert lane["seconds"][kind.value] == pytest.approx(expected)
    assert sum(charge["seconds"] for charge in lane["charges"]) == pytest.approx(2 * lane["makespan_s"])


def test_raw_intervals_are_the_reports(pages):
    header, data = unpacked(pages.client.get("/timeline/demo/intervals").content)
    columns = {
        column["name"]: np.frombuffer(
            data, {"f64": "<f8", "f32": "<f4", "u8": "u1", "u16": "<u2", "u32": "<u4"}[column["type"]],
            header["count"], column["offset"],
        )
        for column in header["columns"]
    }  # fmt: skip
    timeline, at = read_timeline(pages.folder), 0
    for place, device in enumerate(header["devices"]):
        for interval in next(one for id_, one in timeline.devices.items() if str(id_) == device).intervals:
            assert columns["device"][at] == place
            assert columns["start"][at] == interval.start_s
            assert columns["seconds"][at] == interval.seconds
            assert header["causes"][columns["cause"][at]] == interval.cause.value
            pipeline = columns["pipeline"][at]
            assert (None if pipeline == 65535 else header["pipelines"][pipeline]) == interval.pipeline
            assert (columns["step"][at], columns["order"][at]) == (interval.step, interval.order or 0)
            at += 1
    assert at == header["count"]


def test_tiles_add_up_to_the_run(pages):
    header, data = unpacked(pages.client.get("/timeline/demo/tiles", params={"level": 0}).content)
    num = header["num_devices"] * header["num_buckets"]
    busy = np.frombuffer(data, "u1", num)
    assert len(data) == 6 * num
    lane = pages.get("/lanes/demo")
    assert busy.sum() * header["bucket_s"] / 255 == pytest.approx(lane["seconds"]["busy"], rel=0.01)


def test_an_answer_that_stays_is_kept_and_another_is_asked_for_again(pages):
    rev = pages.get("/timeline/demo")["rev"]
    first = pages.client.get("/timeline/demo/tiles", params={"level": 1, "rev": rev})
    assert "immutable" in first.headers["cache-control"]
    other = pages.client.get("/timeline/demo/tiles", params={"level": 1, "rev": rev + 1})
    assert other.headers["cache-control"] == "no-cache"
    again = pages.client.get(
        "/timeline/demo/tiles", params={"level": 1}, headers={"If-None-Match": first.headers["etag"]}
    )
    assert (again.status_code, again.content) == (304, b"")


def test_a_window_measures_what_a_sum_over_its_intervals_gives(pages):
    found = pages.get("/timeline/demo/measure", t0=3.0, t1=20.0, device="rollout-0.0")
    (device,) = [one for id_, one in read_timeline(pages.folder).devices.items() if str(id_) == "rollout-0.0"]
    sums: dict[str, float] = {}
    for piece in device.intervals:
        spent_s = max(0.0, min(piece.end_s, 20.0) - max(piece.start_s, 3.0))
        if spent_s:
            sums[piece.label] = sums.get(piece.label, 0.0) + spent_s
    shown: dict[str, float] = {}
    for item in found["items"]:
        shown[item["label"]] = shown.get(item["label"], 0.0) + item["seconds"]
    assert shown == pytest.approx(sums)
    assert found["device_s"] == pytest.approx(17.0)


def test_a_gap_names_what_came_before_and_after_and_who_held_the_device(pages):
    timeline = read_timeline(pages.folder)
    (device,) = [one for id_, one in timeline.devices.items() if str(id_) == "train-0.0"]
    gap = next(one for one in device.intervals if one.kind is Kind.BUBBLE and one.start_s > 20.0 and one.order is None)
    found = pages.get("/timeline/demo/gap", device="train-0.0", t=(gap.start_s + gap.end_s) / 2)
    assert found["interval"]["label"] == gap.label
    assert (found["interval"]["start_s"], found["interval"]["end_s"]) == (gap.start_s, gap.end_s)
    assert found["before"]["end_s"] <= gap.start_s
    assert found["after"]["start_s"] >= gap.end_s
    assert [one["pipeline"] for one in found["pinned"]] == ["sort", "tools"]
    (doing,) = [order for one in found["pinned"] for order in one["doing"]]
    pieces = [piece for each in timeline.devices.values() for piece in each.intervals if piece.order == doing["order"]]
    assert (len(pieces) > 1, doing["end_s"]) == (True, max(piece.end_s for piece in pieces))


def test_a_gap_names_who_else_could_have_run_there(tmp_path, dashboard):
    """Two rollout nodes: `sort` has the first and rolls out later, `tools` computes on the second, `late` is queued."""
    script = LogScript(num_rollout=2)
    for node, name in enumerate(("sort", "tools")):
        placement = Placement(group=1, rollout_nodes=(NodeId("rollout", node),), train_nodes=(NodeId("train", 0),))
        admit = Admit(pipeline=name, placement=placement, kind=AdmissionKind.NEW)
        script.event(PipelineSubmitted(time_s=0.0, pipeline=Pipeline(id=name, num_steps=2, stages=STAGES)), admit)
    script.event(PipelineSubmitted(time_s=1.0, pipeline=Pipeline(id="late", num_steps=2, stages=STAGES)))
    beside = order(1, "tools", Stage.GENERATE, DeviceId("rollout", 1, 0))
    script.event(TimeReached(time_s=1.5), beside)
    script.event(TimeReached(time_s=5.0), order(2, "sort", Stage.GENERATE, ROLLOUT))
    script.event(StageFinished(time_s=6.0, order=1, seconds=4.5))
    script.event(StageFinished(time_s=7.0, order=2, seconds=2.0))
    shown = dashboard(script.write(tmp_path / "demo"))
    found = shown.get("/timeline/demo/gap", device="rollout-0.0", t=2.0)
    assert [one["pipeline"] for one in found["pinned"]] == ["sort"]
    tools, late = found["others"]
    assert (tools["pipeline"], tools["nodes"]) == ("tools", ["rollout-1"])
    assert [doing["devices"] for doing in tools["doing"]] == [["rollout-1.0"]]
    assert (late["pipeline"], late["nodes"], late["submitted_s"], late["admitted_s"]) == ("late", [], 1.0, None)
    assert found["num_others"] == 2
    assert shown.get("/timeline/demo/gap", device="rollout-0.0", t=0.5)["num_others"] == 1, "late is not there yet"
    assert shown.get("/timeline/demo/gap", device="rollout-1.0", t=2.0)["others"] == [], "the device computes"


def test_the_timeline_has_the_life_of_each_pipeline(pages):
    found = pages.get("/timeline/demo")
    rows = {row["name"]: row for row in pages.get("/pipelines", lane="demo")["items"]}
    for name, life in zip(found["pipelines"], found["lives"], strict=True):
        row = rows[name]
        assert (life["project"], life["begun_s"], life["ended_s"]) == (
            row["project"],
            row["admitted_s"],
            row["ended_s"],
        )
        assert life["has_rewards"]


def test_steps_come_in_pages(pages):
    first = pages.get("/pipelines/demo/sort/steps", limit=5)
    rest = pages.get("/pipelines/demo/sort/steps", limit=100, cursor=first["next"])
    assert [step["step"] for step in first["items"] + rest["items"]] == list(range(1, 13))
    assert rest["next"] is None
    one = first["items"][2]
    assert one["solo_s"] == pytest.approx(sum(one["stages"].values()))


def test_curves_skip_no_extreme(pages):
    every = pages.get("/pipelines/demo/sort/metrics", names="reward_mean")["series"]["reward_mean"]
    few = pages.get("/pipelines/demo/sort/metrics", names="reward_mean", points=4)["series"]["reward_mean"]
    assert len(few["x"]) <= 4
    assert (min(few["min"]), max(few["max"])) == (min(every["y"]), max(every["y"]))
    assert few["x"][-1] == every["x"][-1] == 12


def test_pipelines_are_searched_sorted_and_paged(pages):
    names = [row["name"] for row in pages.get("/pipelines", sort="-reward_last")["items"]]
    assert names == ["sort", "tools"]
    assert [row["name"] for row in pages.get("/pipelines", name="oo")["items"]] == ["tools"]
    first = pages.get("/pipelines", limit=1)
    assert [row["name"] for row in pages.get("/pipelines", limit=1, cursor=first["next"])["items"]] == ["tools"]
    assert pages.get("/pipelines", status="failed,waiting")["items"] == []


@pytest.fixture(scope="module")
def lane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pages]:
    """40 pipelines over four days, in five projects of 17 users."""
    served = Pages(long_lane(40, days=4.0).write(tmp_path_factory.mktemp("runs") / "long"))
    yield served
    served.close()


def names_of(found: dict) -> list[str]:
    return [row["name"] for row in found["items"]]


def test_pipelines_are_filtered_by_project_user_label_and_state(lane):
    label = {"labels": ["baseline", "seed 1"], "note": ""}
    assert lane.client.post("/pipelines/long/job-0006/labels", json=label).status_code == 200
    assert names_of(lane.get("/pipelines", project="team-1", user="user-1,user-6")) == ["job-0001", "job-0006"]
    assert names_of(lane.get("/pipelines", label="baseline")) == ["job-0006"]
    assert lane.get("/pipelines", label="-")["total"] == 39
    assert names_of(lane.get("/pipelines", status="failed", project="team-2")) == ["job-0007"]
    assert lane.get("/pipelines", task="copy")["total"] == 0
    assert lane.get("/pipelines/groups", by="label")["items"][0]["key"] == "-"
    counted = {group["key"]: group["pipelines"] for group in lane.get("/pipelines/groups", by="label")["items"]}
    assert counted == {"-": 39, "baseline": 1, "seed 1": 1}
    assert lane.get("/pipelines/groups", by="label")["total"]["pipelines"] == 40


def test_a_filters_values_count_what_the_other_filters_let_pass(lane):
    found = lane.get("/pipelines", project="team-1", status="failed", facets=True, limit=1)["facets"]
    counts = {name: {each["value"]: each["pipelines"] for each in values} for name, values in found.items()}
    assert counts["project"] == {f"team-{place % 5}": 1 for place in (7, 15, 23, 31, 39)}
    assert counts["status"] == {"finished": 7, "failed": 1}
    assert counts["user"] == {"user-14": 1}
    assert "facets" not in lane.get("/pipelines", limit=1)


def test_dates_of_submission_are_utc_and_a_last_date_is_included(lane):
    rows = lane.get("/pipelines")["items"]
    begun = datetime.fromisoformat(lane.get("/lanes/long")["created"])
    for row in rows:
        assert datetime.fromisoformat(row["submitted_at"]) == begun + timedelta(seconds=int(row["submitted_s"]))
    day = rows[20]["submitted_at"][:10]
    of_day = [row["name"] for row in rows if row["submitted_at"].startswith(day)]
    assert names_of(lane.get("/pipelines", since=day, until=day)) == of_day
    after = lane.get("/pipelines", since=rows[20]["submitted_at"], limit=500)
    assert names_of(after) == [row["name"] for row in rows[20:]]


@pytest.mark.parametrize(
    ("query", "said"),
    [
        ({"since": "yesterday"}, "no time 'yesterday'"),
        ({"status": "running,broken"}, "no status 'broken'"),
        ({"sort": "colour"}, "colour"),
        ({"team": "a"}, "no parameter 'team'"),
    ],
)
def test_an_unknown_filter_is_refused_in_one_line_with_what_is_accepted(lane, query, said):
    for path in ("/pipelines", "/pipelines/groups"):
        answer = lane.client.get(path, params=query)
        assert answer.status_code == 400
        assert said in answer.text or "no parameter 'sort'" in answer.text
        assert answer.json()["accepted"]
        assert "\n" not in answer.json()["detail"]


def test_pipelines_are_sorted_by_any_column_those_without_a_value_last(lane):
    rows = lane.get("/pipelines", sort="-tokens")["items"]
    assert [row["tokens"] for row in rows] == sorted((row["tokens"] for row in rows), reverse=True)
    assert lane.get("/pipelines", sort="user")["items"][0]["user"] == "user-0"
    slowest = [row["step_s_mean"] for row in lane.get("/pipelines", sort="step_s_mean")["items"]]
    known = [value for value in slowest if value is not None]
    assert slowest == sorted(known) + [None] * (len(slowest) - len(known))


@pytest.mark.parametrize("by", ["project", "user", "task", "status", "day"])
def test_groups_sum_the_pipelines_and_all_device_time(lane, by):
    found = lane.get("/pipelines/groups", by=by)
    rows, whole = lane.get("/pipelines", limit=500)["items"], lane.get("/lanes/long")
    total = found["total"]
    assert (total["pipelines"], total["tokens"]) == (40, sum(row["tokens"] for row in rows))
    assert sum(group["steps"] for group in found["items"]) == sum(row["step"] for row in rows)
    hours = sum(group["device_hours"] for group in found["items"])
    assert hours == pytest.approx(total["device_hours"])
    assert hours + found["other_hours"] == pytest.approx(2 * whole["makespan_s"] / 3600)
    charged = sum(charge["seconds"] for charge in whole["charges"] if charge["pipeline"])
    assert hours == pytest.approx(charged / 3600)
    assert total["busy_hours"] == pytest.approx(whole["seconds"]["busy"] / 3600)
    assert total["usd"] is None


def test_device_time_of_a_group_is_on_the_day_it_was_spent(lane):
    found = lane.get("/pipelines/groups", by="day")
    assert [group["key"] for group in found["items"]] == sorted((g["key"] for g in found["items"]), reverse=True)
    assert len(found["items"]) in (4, 5)
    assert all(group["device_hours"] <= 48 + 1e-6 for group in found["items"]), "two devices"
    one = lane.get("/pipelines/groups", by="project", project="team-1")
    assert [group["key"] for group in one["items"]] == ["team-1"]
    assert one["other_hours"] > one["total"]["device_hours"]


def test_a_resumed_runs_times_of_day_have_its_down_time(tmp_path, dashboard):
    script = LogScript()
    script.submit(0.0, "first")
    script.note(10.0, "resumed", pipelines=["first"], retried=[], utc="2026-11-29T14:00:00+00:00")
    script.submit(25.0, "second")
    shown = dashboard(script.write(tmp_path / "demo"))
    assert [row["submitted_at"] for row in shown.get("/pipelines")["items"]][1] == "2026-11-29T14:00:15Z"
    clock = shown.get("/lanes/demo")["clock"]
    assert [mark["at_s"] for mark in clock] == [0.0, 10.0]
    assert clock[1]["utc"] == "2026-11-29T14:00:00Z"


def test_a_log_is_read_from_any_byte_in_whole_lines(pages):
    first = pages.get("/pipelines/demo/sort/logs", limit=100)
    assert first["text"].endswith("\n")
    assert not first["is_end"]
    text, at = "", 0
    while True:
        part = pages.get("/pipelines/demo/sort/logs", limit=1000, offset=at)
        text, at = text + part["text"], part["next_offset"]
        if part["is_end"]:
            break
    assert text == (pages.folder / "sort" / "workers.log").read_text()
    assert pages.get("/pipelines/demo/sort/logs", grep="line 77", limit=262144)["text"].count("\n") == 11
    assert pages.get("/pipelines/demo/sort/logs", offset=-9)["text"] == "line 999\n"


def test_a_log_is_searched_as_far_back_as_it_is_said(pages, monkeypatch):
    monkeypatch.setattr(handlers, "MAX_LOG_BYTES", 40)
    whole = (pages.folder / "sort" / "workers.log").read_text()
    found = pages.get("/pipelines/demo/sort/logs", grep="line 7", offset=-(1 << 24), limit=1 << 24)
    assert found["text"] == "".join(f"line {number}\n" for number in (796, 797, 798, 799)), "the newest"
    assert found["offset"] == whole.index("line 796")
    older = pages.get("/pipelines/demo/sort/logs", grep="line 7", limit=found["offset"])
    assert older["text"] == "".join(f"line {number}\n" for number in (792, 793, 794, 795))
    first = pages.get("/pipelines/demo/sort/logs", grep="line 3", limit=60)
    assert (first["text"], first["offset"], first["is_end"]) == ("line 3\n", 0, False)
    assert pages.get("/pipelines/demo/sort/logs", grep="no such", limit=1 << 24)["offset"] == 0, "all was searched"
    assert len(pages.get("/pipelines/demo/sort/logs", limit=1 << 24)["text"]) == 35, "what is not searched stays short"


def test_trajectories_are_searched_paged_and_read(pages):
    first = pages.get("/pipelines/demo/sort/samples", sort="step", limit=3)
    rest = pages.get("/pipelines/demo/sort/samples", sort="step", cursor=first["next"])
    assert [(one["step"], one["sample"]) for one in first["items"] + rest["items"]] == [
        (step, place) for step in (1, 2) for place in range(4)
    ]
    assert (rest["next"], first["first_step"], first["last_step"]) == (None, 1, 2)
    assert [one["step"] for one in pages.get("/pipelines/demo/sort/samples", text="answer 2.3")["items"]] == [2]
    one = pages.get("/pipelines/demo/sort/samples/2/0/3")
    assert (one["prompt_text"], one["said"]) == ("q", [{"role": "model", "text": "answer 2.3", "is_cut": False}])
    assert [each["reward"] for each in one["group"]] == [0.0, 1.0, 2.0, 3.0]
    assert not pages.get("/pipelines/demo/tools")["has_samples"]


@pytest.mark.parametrize(
    ("path", "status", "says"),
    [
        ("/pipelines/demo/tools/samples", 404, "no trajectories"),
        ("/pipelines/demo/nothing/samples", 404, "sort, tools"),
        ("/pipelines/demo/sort/samples?sort=colour", 400, "-reward"),
        ("/pipelines/demo/sort/samples?least=nan", 400, "finite"),
        ("/pipelines/demo/sort/samples/9/0/0", 404, "not kept"),
        ("/pipelines/demo/sort/samples/1/x/0", 404, "STEP/PROMPT"),
        ("/lanes/other", 404, "demo"),
        ("/pipelines/demo/nothing", 404, "sort, tools"),
        ("/pipelines/demo/tools/logs", 404, "workers.log"),
        ("/pipelines/demo/..%2F..%2Fetc/logs", 404, ""),
        ("/timeline/demo/tiles?level=13", 400, "0 to 12"),
        ("/timeline/demo/tiles?level=0&t0=0&t1=9999", 413, "level="),
        ("/timeline/demo/tiles?t0=nan", 400, "seconds"),
        ("/timeline/demo/tiles?t0=5&t1=4", 400, "5.0 or more"),
        ("/timeline/demo/gap?device=nowhere&t=1", 404, "rollout-0.0"),
        ("/timeline/demo/gap", 400, "an id"),
        ("/pipelines?sort=colour", 400, "reward_last"),
        ("/pipelines?limit=501", 400, "1 to 500"),
        ("/pipelines?limits=5", 400, "limit"),
        ("/lanes?lanes=1", 400, "none"),
        ("/stream?topics=everything", 400, "timeline:L"),
        ("/compare?of=demo%2Fsort", 400, "twice"),
        ("/compare?of=demo", 400, "L/NAME"),
        ("/compare?of=demo%2Fsort&of=demo%2Fnothing", 404, "sort, tools"),
        ("/nothing", 404, "service.md"),
    ],
)
def test_what_is_wrong_is_said_with_what_would_be_accepted(pages, path, status, says):
    answer = pages.client.get(path)
    assert (answer.status_code, answer.headers["content-type"]) == (status, "application/problem+json")
    problem = answer.json()
    assert says in f"{problem['detail']} {problem['accepted']}"
    assert problem["where"]


def test_two_runs_are_compared_step_by_step(tmp_path, dashboard):
    for run, flipped in (("one", 0), ("two", 3)):
        script = LogScript()
        orders = [order(step, "a/b", Stage.PUBLISH, TRAIN, step=step) for step in range(1, 6)]
        script.submit(0.0, "a/b", orders[0], num_steps=5)
        script.note(0.1, "plan", pipeline="a/b", plan_sha256="same")
        for step in range(1, 6):
            script.event(StageFinished(time_s=step + 0.5, order=step, seconds=0.4), *orders[step : step + 1])
            checksum = f"{step}{'!' * (step == flipped)}"
            script.note(step + 0.6, "step", pipeline="a/b", step=step, metrics={}, weights_checksum=checksum)
        script.write(tmp_path / run)
    pages = dashboard(tmp_path)
    found = pages.get("/compare", of=["one/a%2Fb", "two/a%2Fb"])
    assert found["identity"]["says"] == "same plan, equal weights up to step 2, others at step 3"
    assert [row["lane"] for row in found["items"]] == ["one", "two"]
    same = pages.get("/compare", of=["one/a%2Fb", "one/a%2Fb"])["identity"]
    assert (same["says"], same["first_other"]) == ("same plan, equal weights at all 5 steps", None)


def test_many_runs_are_many_lanes(tmp_path, dashboard):
    for name in ("one", "two"):
        AlternatingRun(num_steps=2).script.write(tmp_path / name)
    (tmp_path / "neither").mkdir()
    pages = dashboard(tmp_path)
    assert [lane["name"] for lane in pages.get("/lanes")["items"]] == ["one", "two"]
    assert [(row["lane"], row["name"]) for row in pages.get("/pipelines")["items"]] == [
        ("one", "sort"), ("one", "tools"), ("two", "sort"), ("two", "tools"),
    ]  # fmt: skip


def test_a_log_that_cannot_be_read_is_a_banner_and_the_others_are_shown(tmp_path, dashboard):
    AlternatingRun(num_steps=2).script.write(tmp_path / "good")
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "run.db").write_bytes(b"no log" * 500)
    pages = dashboard(tmp_path, is_indexed=False)
    pages.until(lambda: pages.get("/lanes/good")["banner"] is None)
    pages.until(lambda: "not a" in str(pages.get("/lanes/bad")["banner"]))
    assert pages.client.get("/lanes/bad/devices").status_code == 503


def test_a_deleted_index_comes_back_under_a_running_server(tmp_path, dashboard):
    folder: Path = AlternatingRun(num_steps=3).script.write(tmp_path / "run")
    pages = dashboard(folder)
    before = pages.get("/lanes/run/devices")
    for path in folder.glob("index.db*"):
        path.unlink()
    pages.until(lambda: (folder / "index.db").is_file() and pages.client.get("/lanes/run/devices").status_code == 200)
    assert pages.get("/lanes/run/devices") == before


def test_tiles_and_pages_are_compressed_for_clients_that_take_it(pages):
    plain = pages.client.get("/timeline/demo/intervals", headers={"Accept-Encoding": "identity"})
    packed = pages.client.get("/timeline/demo/intervals", headers={"Accept-Encoding": "gzip"})
    assert (plain.headers.get("Content-Encoding"), packed.headers["Content-Encoding"]) == (None, "gzip")
    assert packed.content == plain.content
    assert int(packed.headers["Content-Length"]) < 0.5 * len(plain.content)
