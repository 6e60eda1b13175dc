"""The index of a run says what the report says, however it came about."""

from __future__ import annotations

import contextlib
import json
import math
import os
import pickle
import random
import sqlite3
import zlib
from pathlib import Path

import pytest
from tests.log_script import TRAIN, AlternatingRun, LogScript, append, order

from rlmux.core.events import StageFinished
from rlmux.core.model import Stage
from rlmux.log.run_log import LOG_NAME, LogReader, RunLog
from rlmux.log.segments import last_seq_of
from rlmux.report.reports import read_timeline
from rlmux.report.summary import step_times, summarize
from rlmux.report.timeline.build import Timeline, exposed
from rlmux.report.timeline.intervals import Interval, Kind
from rlmux.report.timeline.step_rows import read_step_rows
from rlmux.service.dashboard.auth.access import SERVER
from rlmux.service.dashboard.handlers import Reads
from rlmux.service.index import indexer, kept_fold
from rlmux.service.index.columns import CAUSES, KINDS, STAGES
from rlmux.service.index.indexer import LaneIndexer, is_up_to_date
from rlmux.service.index.lanes import Root, log_signature
from rlmux.service.index.store import FIRST_LEVEL, TILE_BUCKETS, IndexReader, remove_index
from rlmux.service.index.tiles import LEVELS, planes, without_overlaps


def index_of(folder: Path) -> Path:
    made = LaneIndexer(folder, folder / "index.db")
    made.catch_up()
    made.close()
    return folder / "index.db"


def contents(index: Path) -> dict[str, list]:
    """All that pages can see, but for the numbers that count changes."""
    with IndexReader(index) as reader:
        found = {
            "device": reader.rows("SELECT place, name, json FROM device ORDER BY place"),
            "pipeline": reader.rows("SELECT place, name, json, detail FROM pipeline ORDER BY place"),
            "step": reader.rows("SELECT pipeline, step, json FROM step WHERE json IS NOT NULL"),
            "instant": reader.rows("SELECT * FROM instant"),
            "lane": [reader.facts["lane"]],
            "intervals": reader.intervals(-math.inf, math.inf)[["start_s", "end_s", "device", "cause"]].tolist(),
        }
        for level in (0, 2, 5):
            shown = reader.planes(level, 0, int(reader.facts["end_s"] / LEVELS[level]) + 1)
            found[f"tiles {level}"] = [plane.tolist() for plane in shown]
    return found


def assert_is_report(index: Path, timeline: Timeline) -> None:
    with IndexReader(index) as reader:
        devices, pipelines = reader.facts["devices"], reader.facts["pipelines"]
        for device, each in timeline.devices.items():
            records = reader.intervals(-math.inf, math.inf)
            own = records[records["device"] == devices.index(str(device))]
            assert [as_interval(record.item(), pipelines) for record in own] == list(each.intervals)
            assert_tiles(reader, devices.index(str(device)), list(each.intervals), each.num_lanes)
            ((text,),) = reader.rows("SELECT json FROM device WHERE name = ?", str(device))
            seconds = {str(kind): spent_s for kind, spent_s in each.seconds_by_kind.items()}
            assert json.loads(text)["seconds"] == pytest.approx(seconds, rel=1e-12, abs=1e-12)
        summary = summarize(timeline)
        for name, steps in step_times(timeline).items():
            found = [json.loads(text) for (text,) in reader.rows("SELECT json FROM step WHERE pipeline = ?", name)]
            shown = [(step["step"], step["end_s"], step["seconds"], step["solo_s"]) for step in found]
            assert shown == [(step.step, step.end_s, step.seconds, step.solo_s) for step in steps]
            ((text,),) = reader.rows("SELECT json FROM pipeline WHERE name = ?", name)
            row, expected = json.loads(text), summary["pipelines"][name]
            same = ("tokens", "reward_first", "reward_last", "step_s_mean", "step_slowdown", "slo_slowdown", "promise")
            assert {key: row[key] for key in same} == {key: expected[key] for key in same}
        assert reader.facts["lane"]["control_overhead"] == pytest.approx(summary["control_overhead"], rel=1e-12)


def as_interval(record: tuple, pipelines: list[str]) -> Interval:
    start_s, end_s, _, pipeline, step, order, fraction, cause, kind, stage, lane, flags = record
    return Interval(
        start_s=start_s,
        end_s=end_s,
        kind=KINDS[kind],
        cause=CAUSES[cause],
        pipeline=None if pipeline == 65535 else pipelines[pipeline],
        step=step,
        stage=None if stage == 255 else STAGES[stage],
        order=order or None,
        device_fraction=fraction,
        lane=lane,
        is_open=bool(flags & 1),
    )


def assert_tiles(reader: IndexReader, device: int, intervals: list[Interval], num_lanes: int) -> None:
    """Every bucket against sums made one by one."""
    pieces = exposed(intervals) if num_lanes > 1 else intervals
    end_s = max(piece.end_s for piece in pieces)
    for level in range(FIRST_LEVEL - 1, 6):
        width_s = LEVELS[level]
        shown = reader.planes(level, 0, int(end_s / width_s) + 1)
        for bucket in range(shown.busy.shape[1]):
            sums = dict.fromkeys(Kind, 0.0)
            for piece in pieces:
                part_s = min(piece.end_s, (bucket + 1) * width_s) - max(piece.start_s, bucket * width_s)
                sums[piece.kind] += max(0.0, part_s)
            for kind in (Kind.BUSY, Kind.SWITCH, Kind.BUBBLE):
                part = int(getattr(shown, kind.value)[device, bucket])
                assert part == pytest.approx(255 * sums[kind] / width_s, abs=1.01), (level, bucket, kind)


@pytest.fixture(scope="module")
def script() -> LogScript:
    return AlternatingRun(num_steps=40, failing="tools").script


@pytest.fixture(scope="module")
def folder(script: LogScript, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return script.write(tmp_path_factory.mktemp("run") / "demo")


def test_every_interval_step_sum_and_bucket_is_the_reports(folder):
    assert_is_report(index_of(folder), read_timeline(folder))


def test_some_buckets_are_kept_and_give_what_intervals_give(folder):
    with IndexReader(index_of(folder)) as reader:
        (kept,) = reader.rows("SELECT count(*) FROM tile WHERE level = ?", FIRST_LEVEL)[0]
        assert kept >= 2
        num, width_s = (kept + 1) * TILE_BUCKETS, LEVELS[FIRST_LEVEL]
        intervals = without_overlaps(reader.intervals(3 * width_s, (3 + num) * width_s))
        asked, made = reader.planes(FIRST_LEVEL, 3, num), planes(intervals, FIRST_LEVEL, 3, num, 2)
        assert [one.tolist() for one in asked] == [one.tolist() for one in made]


def test_a_deleted_index_comes_back_equal(folder):
    before = contents(index_of(folder))
    remove_index(folder / "index.db")
    assert contents(index_of(folder)) == before


@pytest.mark.parametrize("damage", [b"", b"nonsense" * 1000])
def test_a_damaged_index_is_made_again(folder, damage):
    before = contents(index_of(folder))
    remove_index(folder / "index.db")
    (folder / "index.db").write_bytes(damage)
    assert contents(index_of(folder)) == before


def test_an_index_that_follows_a_log_equals_one_made_at_once(script, tmp_path):
    log, chance = RunLog.create(tmp_path / "run", script.header), random.Random(0)
    made, at = LaneIndexer(tmp_path / "run", tmp_path / "index.db"), 0
    while at < len(script.rows):
        end = at + chance.randrange(1, 200)
        while end < len(script.rows) and script.rows[end].kind == "action":
            end += 1
        append(log, script.rows[at:end])
        log.commit()
        at = end
        assert made.catch_up()
        assert not made.catch_up(), "nothing is new"
        assert_is_report(tmp_path / "index.db", read_timeline(tmp_path / "run"))
    log.close()
    made.catch_up()
    made.close()
    followed = contents(tmp_path / "index.db")
    assert followed == contents(index_of(tmp_path / "run"))


def test_rows_that_are_written_while_a_lane_is_read_are_indexed_though_none_follow(script, tmp_path, monkeypatch):
    folder, index = tmp_path / "run", tmp_path / "index.db"
    log, catch_up, later = RunLog.create(folder, script.header), LaneIndexer.catch_up, [script.rows[40:80]]
    append(log, script.rows[:40])
    log.commit()

    def catch_up_while_the_log_grows(self: LaneIndexer) -> bool:
        has_news = catch_up(self)
        if later:
            append(log, later.pop())
            log.commit()
        return has_news

    monkeypatch.setattr(LaneIndexer, "catch_up", catch_up_while_the_log_grows)
    lane = indexer._Lane(folder, index)
    for _ in range(3):
        lane.look()
    lane.forget()
    with IndexReader(index) as reader:
        assert reader.facts["seq"] == reader.facts["log_seq"] == last_seq_of(folder / LOG_NAME)
        assert reader.facts["signature"] == log_signature(folder)
    log.close()


def test_an_index_that_is_deleted_while_it_is_brought_up_to_date_is_made_again(tmp_path, script, monkeypatch):
    index = tmp_path / "index.db"
    lane = indexer._Lane(script.write(tmp_path / "run"), index)
    catch_up = indexer.LaneIndexer.catch_up

    def deleted_meanwhile(made: indexer.LaneIndexer) -> None:
        catch_up(made)
        for path in tmp_path.glob("index.db*"):
            path.unlink()

    monkeypatch.setattr(indexer.LaneIndexer, "catch_up", deleted_meanwhile)
    lane.look()
    assert not index.is_file()
    monkeypatch.undo()
    lane.look()
    assert index.is_file()


def test_an_index_that_read_rows_ahead_of_their_signature_is_up_to_date_at_the_next_look(script, tmp_path, monkeypatch):
    folder = tmp_path / "run"
    log = RunLog.create(folder, script.header)
    append(log, script.rows[:40])
    log.commit()
    made = LaneIndexer(folder, tmp_path / "index.db")
    with monkeypatch.context() as patch:
        patch.setattr(indexer, "log_signature", lambda folder: "before the newest rows")
        made.catch_up()
    assert not made.catch_up()
    made.close()
    with IndexReader(tmp_path / "index.db") as reader:
        assert reader.facts["signature"] == log_signature(folder)
    log.close()


@pytest.mark.slow
def test_parts_of_a_long_log_are_shown_while_it_is_read_and_the_whole_is_the_same(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(indexer, "_SHOWN_AFTER_S", 0.0)
    monkeypatch.setattr(indexer, "_SHOWN_GROWTH", 0.0)
    seen, show = [], LaneIndexer._show

    def showing(self: LaneIndexer, signature: str, last_seq: int) -> None:
        show(self, signature, last_seq)
        with IndexReader(tmp_path / "index.db") as reader:
            seen.append((reader.seq, reader.facts["log_seq"], reader.facts["signature"] == log_signature(folder)))

    monkeypatch.setattr(LaneIndexer, "_show", showing)
    made = LaneIndexer(folder, tmp_path / "index.db")
    made.catch_up()
    made.close()
    last = seen[-1][0]
    assert len(seen) > 20
    assert seen == sorted(seen)
    assert [one[1:] for one in seen] == [(last, False)] * (len(seen) - 1) + [(last, True)]
    assert contents(tmp_path / "index.db") == contents(index_of(folder))


def test_an_index_is_up_to_date_until_its_log_grows(script, tmp_path):
    folder = script.write(tmp_path / "run", len(script.rows) // 2)
    index = index_of(folder)
    with LogReader(folder):
        pass
    assert is_up_to_date(folder, index)
    with RunLog.open(folder) as log:
        append(log, script.rows[len(script.rows) // 2 :])
    assert not is_up_to_date(folder, index)
    assert_is_report(index_of(folder), read_timeline(folder))


def test_a_step_is_told_again_with_the_hash_that_its_checkpoint_brings(tmp_path):
    script, orders = LogScript(), [order(step, "a", Stage.PUBLISH, TRAIN, step=step) for step in (1, 2)]
    script.submit(0.0, "a", orders[0])
    for step in (1, 2):
        script.event(StageFinished(time_s=step + 0.5, order=step, seconds=0.4), *orders[step : step + 1])
        script.note(step + 0.6, "step", pipeline="a", step=step, metrics={}, weights_checksum=f"c{step}")
    num_before = len(script.rows)
    script.note(3.0, "checkpoint", pipeline="a", step=1, seconds=0.1, stall_s=0.0, weights_sha256="s1")
    log = RunLog.create(tmp_path / "run", script.header)
    append(log, script.rows[:num_before])
    log.commit()
    made = LaneIndexer(tmp_path / "run", tmp_path / "index.db")
    made.catch_up()
    assert sums_of(tmp_path / "index.db") == [("c1", None), ("c2", None)]
    append(log, script.rows[num_before:])
    log.close()
    made.catch_up()
    made.close()
    assert sums_of(tmp_path / "index.db") == [("c1", "s1"), ("c2", None)]
    rows = read_step_rows(tmp_path / "run")["a"]
    assert [(row["weights_checksum"], row["weights_sha256"]) for row in rows] == [("c1", "s1"), ("c2", None)]


def sums_of(index: Path) -> list[tuple[str | None, str | None]]:
    with IndexReader(index) as reader:
        rows = [json.loads(text) for (text,) in reader.rows("SELECT json FROM step ORDER BY step")]
    return [(row["weights_checksum"], row["weights_sha256"]) for row in rows]


def feed(log: RunLog, rows: list) -> None:
    append(log, rows)
    log.commit()


def whole_events(script: LogScript, num: int) -> int:
    """The first number of rows from `num` on that ends with an event's last action."""
    while num < len(script.rows) and script.rows[num].kind == "action":
        num += 1
    return num


@pytest.mark.parametrize("num_shown_later", [0, 60], ids=["kept at the end", "shown after it was kept"])
def test_a_restarted_indexer_reads_only_rows_after_the_kept_fold(script, tmp_path, monkeypatch, num_shown_later):
    folder, index = tmp_path / "run", tmp_path / "index.db"
    first = whole_events(script, len(script.rows) // 2)
    later = whole_events(script, first + num_shown_later)
    log = RunLog.create(folder, script.header)
    feed(log, script.rows[:first])
    made = LaneIndexer(folder, index)
    made.catch_up()
    feed(log, script.rows[first:later])
    made.catch_up()
    if num_shown_later:  # killed
        made._log.close()
        made._index.close()
    else:
        made.close()
    feed(log, script.rows[later:])
    log.close()
    read, parts = [], LogReader.parts

    def reading(self: LogReader, after: int = 0, **more):
        read.append(after)
        return parts(self, after, **more)

    monkeypatch.setattr(LogReader, "parts", reading)
    with IndexReader(index) as reader:
        rev = reader.facts["rev"]
    made = LaneIndexer(folder, index)
    assert made.catch_up()
    made.close()
    assert read == [script.rows[first - 1].seq]
    with IndexReader(index) as reader:
        assert reader.facts["rev"] == rev, "no settled interval has changed"
    monkeypatch.undo()
    resumed = contents(index)
    remove_index(index)
    assert resumed == contents(index_of(folder))


@pytest.mark.parametrize("other", ["log", "code", "bytes", "types"])
def test_a_kept_fold_of_another_log_or_of_other_code_is_not_resumed(script, tmp_path, monkeypatch, other):
    folder, index = tmp_path / "run", tmp_path / "index.db"
    num = whole_events(script, len(script.rows) // 2)
    script.write(folder, num)
    made = LaneIndexer(folder, index)
    made.catch_up()
    made.close()
    if other == "log":
        monkeypatch.setattr(LogReader, "row_checksum", lambda self, seq: 0)
    elif other == "code":
        monkeypatch.setattr(kept_fold, "_code_sha256", lambda: "other")
    else:
        with contextlib.closing(sqlite3.connect(index)) as connection, connection:
            data = b"nonsense" if other == "bytes" else zlib.compress(pickle.dumps(("", {"seq": os.system})))
            connection.execute("UPDATE kept SET data = ?", (data,))
    made = LaneIndexer(folder, index)
    assert made._seq == 0
    made.catch_up()
    made.close()
    assert_is_report(index, read_timeline(folder))


def test_a_pass_is_followed_by_a_bounded_pause(script, tmp_path, monkeypatch):
    lane = indexer._Lane(script.write(tmp_path / "run"), tmp_path / "index.db")
    now_s = iter([0.0, 600.0])
    monkeypatch.setattr(lane, "_catch_up", lambda begun_s: None)
    monkeypatch.setattr(indexer.time, "monotonic", lambda: next(now_s, 600.0))
    lane.look()
    assert lane.due_s == 603.0


def test_a_lane_that_is_resumed_is_said_to_be_resuming_until_its_index_has_a_row_of_it(script, tmp_path):
    folder = script.write(tmp_path / "cpu")
    index_of(folder)
    reads = Reads(Root(tmp_path, tmp_path), lambda folder: None)
    assert reads.lane_row("cpu", SERVER)["state"] == "over"
    with RunLog.open(folder) as log:
        log.note("resumed", 200.0)
        log.commit()
        row = reads.lane_row("cpu", SERVER)
        assert (row["state"], row["is_going_on"], row["is_indexing"]) == ("resuming", True, True)
        assert row["seq"] == last_seq_of(folder / LOG_NAME) > row["index_seq"]
        index_of(folder)
        assert reads.lane_row("cpu", SERVER)["state"] == "running"
    assert reads.lane_row("cpu", SERVER)["state"] == "over", "its process has ended, whatever the index has"


def test_a_lane_whose_service_starts_it_again_is_said_to_be_resuming(script, tmp_path):
    index_of(script.write(tmp_path / "cpu"))
    ended: list[str] = []
    reads = Reads(Root(tmp_path, tmp_path, ["cpu"]), lambda folder: None, lambda folder: "ended" if ended else None)
    assert reads.lane_row("cpu", SERVER)["state"] == "resuming"
    ended.append("five times")
    assert reads.lane_row("cpu", SERVER)["state"] == "over"


@pytest.mark.parametrize("is_going_on", [True, False])
def test_a_device_of_a_lane_without_a_placed_pipeline_is_idle(tmp_path: Path, monkeypatch, is_going_on) -> None:
    """Its log ends with the last work: what that row says is not what the device does since."""
    AlternatingRun().script.write(tmp_path)
    monkeypatch.setattr(indexer, "living_owner", lambda _: (1, "here") if is_going_on else None)
    with IndexReader(index_of(tmp_path)) as reader:
        devices = [json.loads(text) for (text,) in reader.rows("SELECT json FROM device")]
    assert {device["kind"] for device in devices} == {"idle"}
    assert {device["label"] for device in devices} == {"nothing admitted" if is_going_on else "down"}
    assert all(device["pipeline"] is None and device["order"] is None for device in devices)
