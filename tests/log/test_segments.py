"""Packing and sealing lose nothing: at any row, at any kill; and a reader checks what it is handed."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import itertools
import os
import re
import signal
import sqlite3
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.examples import examples

from rlmux.core.actions import ExpectSteps, Pause
from rlmux.core.errors import LogError
from rlmux.core.estimation.alike_seconds import MAX_KEPT
from rlmux.core.events import ChunkFinished, NodeJoined, StageFinished
from rlmux.core.model import AlikeSeconds, MeasuredSeconds, NodeId, PhaseSeconds, PipelineId
from rlmux.log import segments, value_codec
from rlmux.log.block_codec import pack, unpack
from rlmux.log.progress_rows import Progress, Report, Reports
from rlmux.log.run_log import Entry, LogLimits, LogReader, RunLog
from rlmux.log.run_state import RunState
from rlmux.report.timeline.history import History

SMALL = LogLimits(block_rows=7, snapshot_blocks=3, segment_rows=60)
NEVER = LogLimits(block_rows=10**9, segment_rows=10**9)
HEADER = {"policy": "p"}


def entries(folder: Path, after: int = 0) -> list[Entry]:
    with LogReader(folder) as reader:
        return list(reader.entries(after))


def write(folder: Path, rows: list[Entry], limits: LogLimits) -> Path:
    with RunLog.create(folder, HEADER, limits=limits) as log:
        for row in rows:
            append(log, row)
    return folder


def append(log: RunLog, row: Entry) -> None:
    if row.kind == "event":
        log.commit()
        log.append_event(row.value)  # type: ignore[arg-type]
    elif row.kind == "action":
        log.append_actions([row.value])  # type: ignore[list-item]
    else:
        log.note(row.type, row.time_s, **row.value)  # type: ignore[arg-type]


def facts(rows: list[Entry]) -> list[tuple[Any, ...]]:
    """Everything but the headers, which sealing adds, and the numbers of rows."""
    return [row[1:] for row in rows if row.kind != "header"]


def test_a_packed_and_sealed_log_reads_like_one_that_is_neither(tmp_path: Path, alternating_run) -> None:
    rows = alternating_run().rows
    plain = write(tmp_path / "plain", rows, NEVER)
    packed = write(tmp_path / "packed", rows, SMALL)
    assert len(list(packed.glob("run.*.db"))) >= 3
    assert facts(entries(packed)) == facts(entries(plain))


def test_a_fold_of_whole_reports_equals_a_fold_of_single_rows(tmp_path: Path, alternating_run) -> None:
    folder = write(tmp_path / "run", alternating_run(failing="tools").rows, SMALL)
    with LogReader(folder) as reader:
        by_row, by_part = History.of(HEADER, reader.entries()), History.of(HEADER, reader.parts())
    assert [list(order.chunks) for order in by_part.orders] == [list(order.chunks) for order in by_row.orders]
    assert any(len(order.chunks) > 3 for order in by_part.orders)
    for name in ("last_s", "start_s", "control_s", "instants", "down", "pins", "pipelines"):
        assert getattr(by_part, name) == getattr(by_row, name)
    assert [(o.seconds, o.tokens, o.end_s) for o in by_part.orders] == [
        (o.seconds, o.tokens, o.end_s) for o in by_row.orders
    ]


@pytest.mark.parametrize("limits", [SMALL, LogLimits(block_rows=1, snapshot_blocks=1, segment_rows=2), NEVER])
def test_a_state_read_from_a_snapshot_equals_the_fold_from_the_first_row_at_every_row(
    tmp_path: Path, alternating_run, limits: LogLimits
) -> None:
    rows = alternating_run(num_steps=1).rows
    rows[40:40] = [Entry(0, rows[40].time_s, "note", "submitted", {"source": "late.yaml", "resolved": "", "at_s": 1.0})]
    with RunLog.create(tmp_path, HEADER, limits=limits) as log, LogReader(tmp_path) as reader:
        for row in rows:
            append(log, row)
            log.commit()
            from_start = RunState()
            for entry in reader.entries():
                from_start.add(entry)
            assert reader.state() == from_start
    assert reader_state(tmp_path).ended.keys() == {"sort", "tools"}
    assert [note.source for note in reader_state(tmp_path).submitted] == ["late.yaml"]


def test_of_pipelines_alike_the_newest_seconds_are_kept_the_oldest_key_first() -> None:
    def expected(alike: str, seconds: float) -> ExpectSteps:
        step = PhaseSeconds(rollout_s=seconds, train_s=seconds)
        measured = MeasuredSeconds(num_steps=3, low=step, median=step, high=step, held=step)
        known = AlikeSeconds(alike=alike, num_rollout_nodes=1, num_train_nodes=1, is_colocated=False, measured=measured)
        return ExpectSteps(pipeline=PipelineId("a"), measured=None, step_slowdown=1.0, reason="", alike=known)

    state = RunState()
    for seq, action in enumerate([expected("x", 1.0), expected("y", 2.0), expected("x", 3.0)], 1):
        state.add(Entry(seq, 0.0, "action", "ExpectSteps", action))
    kept = value_codec.reader(tuple[AlikeSeconds, ...])(
        RunState.from_json(value_codec.loads(value_codec.dumps(state))).alike, "alike"
    )
    assert [(one.alike, one.measured.median.rollout_s) for one in kept] == [("y", 2.0), ("x", 3.0)]
    for seq in range(MAX_KEPT):
        state.add(Entry(4 + seq, 0.0, "action", "ExpectSteps", expected(str(seq), 1.0)))
    assert [one["alike"] for one in state.alike] == [str(number) for number in range(MAX_KEPT)]


def reader_state(folder: Path) -> RunState:
    with LogReader(folder) as reader:
        return reader.state()


numbers = st.integers(0, 2**40)
times = st.floats(0, 1e7) | st.integers(0, 10**12).map(lambda micros: micros / 1e6) | st.just(float("inf"))
reports = st.builds(
    ChunkFinished,
    time_s=times,
    order=st.integers(1, 3),
    num_active=numbers,
    num_waiting=numbers,
    num_waiting_for_env=numbers,
    tokens=numbers,
    seconds=times,
)
others = st.builds(NodeJoined, time_s=st.floats(0, 1e7), node=st.just(NodeId("r", 0))) | st.builds(
    StageFinished, time_s=st.floats(0, 1e7), order=st.integers(1, 3), seconds=times
)
notes = st.tuples(st.sampled_from(["resumed", "rollout"]), st.dictionaries(st.text(max_size=3), st.integers()))


def test_notes_that_are_wanted_bare_leave_everything_else_as_it_is(tmp_path: Path) -> None:
    with RunLog.create(tmp_path, HEADER, limits=LogLimits(block_rows=40)) as log:
        for step in range(1, 66):
            columns = {
                "runs": [[step, 300 * step], []],
                "of": {"a": step / 3, "b": [step]},
                "us": step / 8,
                "raw": None,
            }
            log.note("rollout", step / 7, pipeline="a", step=step, **columns)
            log.append_event(NodeJoined(time_s=step / 7, node=NodeId("rollout", step)))
            log.commit()
    with LogReader(tmp_path) as reader:
        whole, bare = list(reader.parts()), list(reader.parts(bare=["rollout"]))
    assert [part[:4] for part in whole] == [part[:4] for part in bare]
    assert [part for part in whole if part[3] != "rollout"] == [part for part in bare if part[3] != "rollout"]
    given = [part[4] for part in bare if part[3] == "rollout"]
    assert given.count({}) == 60, "those that are packed"
    assert given[60:] == [part[4] for part in whole if part[3] == "rollout"][60:]


@settings(max_examples=examples(30), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(reports | others | notes, max_size=40), st.integers(1, 9), st.integers(2, 30), st.integers(0, 45))
def test_whatever_is_appended_comes_back_from_every_row_on(tmp_path, values, block_rows, segment_rows, after) -> None:
    folder = tmp_path / str(len(list(tmp_path.iterdir())))
    limits = LogLimits(block_rows=block_rows, snapshot_blocks=2, segment_rows=segment_rows)
    with RunLog.create(folder, HEADER, limits=limits) as log:
        for value in values:
            if isinstance(value, tuple):
                log.note(value[0], 1.0, given=value[1])
            else:
                log.append_event(value)
            log.commit()
    rows = entries(folder)
    given_back = [
        (row.type, row.value["given"]) if row.kind == "note" else row.value for row in rows if row[2] != "header"
    ]
    assert given_back == values
    assert [row.seq for row in rows] == list(range(1, len(rows) + 1))
    assert entries(folder, after) == rows[after:]


# ---------------------------------------------------------------------- kills


def killed_at(number: int) -> Callable[..., None]:
    """What ends this process by SIGKILL when it is called for the n-th time."""
    seen = 0

    def count(*_: object) -> None:
        nonlocal seen
        seen += 1
        if seen == number:
            os.kill(os.getpid(), signal.SIGKILL)

    return count


def write_in_child(folder: Path, prepare: Callable[[RunLog], object]) -> bool:
    """Write in a child process; returns whether it was killed."""
    child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException), RunLog.open(folder, limits=SMALL) as log:
            prepare(log)
            write_on(log, log.last_time_s)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL


def write_on(log: RunLog, from_s: float) -> None:
    for index in range(1, 81):
        log.append_event(ChunkFinished(time_s=from_s + index, order=1, num_active=index, num_waiting=0))
        log.append_actions([Pause(order=1)])
        log.commit()


def check_nothing_lost(folder: Path, before: list[tuple[Any, ...]]) -> None:
    now = facts(entries(folder))
    assert now[: len(before)] == before
    assert [row[2] for row in now] == ["ChunkFinished", "Pause"] * (len(now) // 2), "a transaction was split"
    assert reader_state(folder).last_time_s == (now[-1][0] if now else 0.0)


def statements(folder: Path) -> list[str]:
    """What the database carries out for a log that packs often and is sealed."""
    seen: list[str] = []
    RunLog.create(folder, HEADER).close()
    with RunLog.open(folder, limits=SMALL) as log:
        log._connection.set_trace_callback(seen.append)
        write_on(log, 0.0)
    return seen


@pytest.mark.parametrize("every", [6, pytest.param(1, marks=pytest.mark.slow)])
def test_a_kill_before_any_statement_of_packing_and_sealing_loses_nothing(tmp_path: Path, every: int) -> None:
    seen = statements(tmp_path / "whole")
    first_pack = next(number for number, text in enumerate(seen) if "INSERT INTO block" in text)
    copied = next(number for number, text in enumerate(seen) if "VACUUM" in text)
    for number in [*range(first_pack - 2, first_pack + 8), *range(copied - 8, copied + 25)][::every]:
        folder = tmp_path / str(number)
        RunLog.create(folder, HEADER).close()
        for _ in range(2):
            before = facts(entries(folder))
            assert write_in_child(folder, lambda log, n=number: log._connection.set_trace_callback(killed_at(n + 1)))
            check_nothing_lost(folder, before)


@pytest.mark.parametrize("step", ["sync", "file_sha256"])
@pytest.mark.parametrize("number", [1, 2])
def test_a_kill_while_a_segment_is_made_loses_nothing(tmp_path: Path, monkeypatch, step: str, number: int) -> None:
    RunLog.create(tmp_path, HEADER).close()
    kept, kill = getattr(segments, step), killed_at(number)
    with monkeypatch.context() as patch:
        patch.setattr(segments, step, lambda path: (kill(), kept(path))[1])
        assert write_in_child(tmp_path, lambda log: None)
    before = facts(entries(tmp_path))
    check_nothing_lost(tmp_path, [])
    assert len(before) >= 60
    assert not write_in_child(tmp_path, lambda log: None)
    check_nothing_lost(tmp_path, before)
    assert all(re.fullmatch(r"run(\.\d{4})?\.db", path.name) for path in tmp_path.iterdir()), "something was left lying"


def test_no_block_can_be_changed_or_removed_before_a_segment_has_its_rows(tmp_path: Path) -> None:
    with RunLog.create(tmp_path, HEADER, limits=LogLimits(block_rows=7)) as log:
        write_on(log, 0.0)
        for refused in ("DELETE FROM block", "DELETE FROM block WHERE first_seq = 2", "UPDATE block SET rows = ''"):
            with pytest.raises(sqlite3.Error, match="append-only"):
                log._connection.execute(refused)
    check_nothing_lost(tmp_path, [])


# ---------------------------------------------------------------------- the chain


@pytest.fixture
def sealed_run(tmp_path: Path, alternating_run) -> Path:
    return write(tmp_path / "run", alternating_run().rows, SMALL)


def told(folder: Path, after: int = 0) -> str:
    with pytest.raises(LogError) as error:
        entries(folder, after)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_each_segment_names_its_predecessors_hash(sealed_run: Path) -> None:
    headers = [row.value for row in entries(sealed_run) if row.kind == "header"]
    sealed = sorted(sealed_run.glob("run.*.db"))
    assert len(headers) == len(sealed) + 1 >= 4
    for number, (path, header) in enumerate(zip(sealed, headers[1:], strict=True), 2):
        sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
        assert header == {**headers[0], "segment": number, "predecessor": {"name": path.name, "sha256": sha256}}
        assert stat.S_IMODE(path.stat().st_mode) == 0o400


def test_a_changed_segment_is_told_in_one_line(sealed_run: Path) -> None:
    path = sealed_run / "run.0002.db"
    content = bytearray(path.read_bytes())
    content[-100] ^= 1
    path.chmod(0o600)
    path.write_bytes(content)
    assert re.fullmatch(
        rf"{path}: its sha256 is \w{{12}}…, run.0003.db goes on from \w{{12}}…: "
        "this sealed segment was changed or exchanged",
        told(sealed_run),
    )


def test_a_missing_segment_is_told_in_one_line(sealed_run: Path) -> None:
    (sealed_run / "run.0001.db").unlink()
    expected = f"{sealed_run}/run.0001.db: missing; run.0002.db goes on from it: bring this sealed segment back"
    assert told(sealed_run) == expected


def test_an_exchanged_segment_is_told(sealed_run: Path) -> None:
    first, second = sealed_run / "run.0001.db", sealed_run / "run.0002.db"
    first.rename(sealed_run / "aside")
    second.rename(first)
    (sealed_run / "aside").rename(second)
    assert "run.0002.db: its sha256 is" in told(sealed_run)


def test_what_comes_after_the_damage_can_be_read(sealed_run: Path) -> None:
    rows = entries(sealed_run)
    third = next(row.seq for row in rows if row.kind == "header" and row.value.get("segment") == 3)
    (sealed_run / "run.0001.db").unlink()
    assert entries(sealed_run, after=third) == [row for row in rows if row.seq > third]


def test_a_resumed_run_reads_no_sealed_segment(sealed_run: Path) -> None:
    with LogReader(sealed_run) as reader:
        state, header = reader.state(), reader.header
    for path in sealed_run.glob("run.*.db"):
        path.unlink()
    assert reader_state(sealed_run) == state
    with RunLog.open(sealed_run) as log:
        assert log.last_time_s == state.last_time_s
        assert log.folder == sealed_run
    with LogReader(sealed_run) as reader:
        assert reader.header == header


def test_a_state_is_read_from_the_last_snapshot_alone(tmp_path: Path, alternating_run) -> None:
    limits = LogLimits(block_rows=7, snapshot_blocks=3)
    folder = write(tmp_path / "run", alternating_run().rows, limits)
    state = reader_state(folder)
    with contextlib.closing(sqlite3.connect(folder / "run.db")) as connection:
        connection.execute("DROP TRIGGER log_keeps_bytes")
        connection.execute("UPDATE block SET rows = x'00' WHERE last_seq <= (SELECT seq FROM snapshot)")
        connection.commit()
    assert reader_state(folder) == state
    assert re.fullmatch(rf"{folder}/run.db: the rows up to 8 are damaged: .*", told(folder))


def test_a_run_of_a_week_is_sealed_however_few_rows_it_has(tmp_path: Path) -> None:
    with RunLog.create(tmp_path, HEADER) as log:
        for day in range(16):
            log.append_event(NodeJoined(time_s=day * 86400.0, node=NodeId("r", 0)))
            log.commit()
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["run.0001.db", "run.0002.db", "run.db"]
    assert len(facts(entries(tmp_path))) == 16


def test_a_fold_gets_every_field_of_a_progress_report() -> None:
    names = [field.name for field in dataclasses.fields(ChunkFinished)]
    assert Progress._fields == ("order", "seqs", *[name for name in names if name != "order"])
    assert set(Report._fields) == {*names} - {"order"}


@given(
    st.lists(
        st.fixed_dictionaries(
            {"a": st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=2)},
            optional={"b": st.dictionaries(st.sampled_from("xy"), st.lists(st.integers() | st.floats(0, 1)))},
        ),
        min_size=1,
    )
)
def test_a_block_gives_back_the_very_texts_of_its_rows(values: list[dict[str, Any]]) -> None:
    rows = [(seq, float(seq), "note", "step", value_codec.dumps(value)) for seq, value in enumerate(values, 7)]
    assert [(*row[:4], value_codec.dumps(row[4])) for row in unpack(pack(rows))] == rows


def test_damaged_bytes_of_a_block_are_told() -> None:
    whole = pack([(seq, 1.0, "note", "step", f'{{"loss":{seq / 7}}}') for seq in range(1, 99)])
    for damaged in (whole[:-20], whole[:200] + bytes([whole[200] ^ 1]) + whole[201:]):
        with pytest.raises(LogError, match="not a block"):
            unpack(damaged)


def test_a_picture_of_a_long_order_shows_the_peak_the_end_and_every_hundredth_between() -> None:
    reports = Reports()
    for number in range(5000):
        reports.append(ChunkFinished(time_s=float(number), order=1, num_active=5000 - number, num_waiting=0))
    drawn = list(reports.drawn())
    assert 90 <= len(drawn) <= 110
    assert (drawn[0], drawn[-1]) == (reports[0], reports[-1])
    assert max(one.num_active - other.num_active for one, other in itertools.pairwise(drawn)) <= 50
