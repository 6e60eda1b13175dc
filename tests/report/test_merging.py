"""Blocks that are merged lose nothing, at any kill; and blocks of earlier logs are read."""

from __future__ import annotations

import base64
import contextlib
import itertools
import os
import signal
import sqlite3
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlmux.core.actions import Pause
from rlmux.core.errors import LogError
from rlmux.core.events import ChunkFinished, StageFinished
from rlmux.report import codec, merging
from rlmux.report.blocks import XZ_MAGIC, Block, Row, merge, pack, unpack
from rlmux.report.log import LOG_NAME, LogLimits, LogReader, RunLog

LIMITS = LogLimits(block_rows=7, merge_blocks=3, snapshot_blocks=2)
EARLIER = (
    "c%02qJxc>Y5S`1RCxVC;mLW_j2cmXXK|!z+v^&D(KE`CpWiQ<BC8z{aq|iq47xIt%54M)t32`^MU^daz7Q?=`v-9@7UC%@65"
    "|`-WMKkBEOU9XKQjG4Y>!G~wkm^X*CSNF!W-(=I<$2o=BFVZ`kY2zf;|-JfcWLGm?`nm#MO-Tgic%g6tSR*n-ABv?o*~1&f<"
    "clfY})8A9?=uaRkW|LU(=fNFgG%2&`+4-HDTtK6zVY<HK)zO@ZUDg3s!6z6H^$@I#ZWCmD-As)Is+|ZOjlRsrc<qlP)S`B=U"
    "9<aAnSTkfq;U_aOi8cS9Yfwp}VsD%I=p`HQpr0bpPYEPLVrSODPcypNvX^$_em#b9GFEQ2nq{&t}Frage+e)&Niwkn<Rk@E!"
    ";r+WJgTlLQo=(4m5d;|4Y@`w"
)
"""A block of a log that was written before rows of all types had their numbers and times in common."""


def row_of(seq: int, value: Any) -> Row:
    """An event, or (time, type, fields) of a note, as the log's table has it."""
    if isinstance(value, tuple):
        return Row(seq, value[0], "note", value[1], codec.dumps(value[2]))
    return Row(seq, value.time_s, "event", type(value).__name__, codec.encode(value))


def rows_in(block: Block) -> list[Row]:
    """Every row, ascending."""
    rows = [Row(*row[:4], codec.dumps(row[4])) for row in block.rows]
    rows += [
        row_of(seq, event)
        for progress in block.progress
        for seq, event in zip(progress.seqs, progress.events(), strict=True)
    ]
    return sorted(rows)


def test_a_block_of_an_earlier_log_is_read_and_merged() -> None:
    values = [
        ChunkFinished(time_s=0.5, order=1, num_active=3, num_waiting=0, tokens=7, seconds=0.25),
        ChunkFinished(time_s=0.75, order=2, num_active=9, num_waiting=1),
        ChunkFinished(time_s=1.5, order=1, num_active=2, num_waiting=0, tokens=20, seconds=1.125),
        StageFinished(time_s=2.0, order=1, seconds=1.5),
        (2.0, "step", {"step": 1, "loss": 0.5}),
        (9.0, "resumed", {}),
        ChunkFinished(time_s=9.5, order=1, num_active=1, num_waiting=0),
        (10.0, "step", {"step": 2, "loss": 0.25}),
    ]
    earlier, expected = base64.b85decode("".join(EARLIER)), [row_of(seq, value) for seq, value in enumerate(values, 2)]
    assert rows_in(unpack(earlier)) == expected
    assert rows_in(unpack(merge([earlier]))) == expected
    assert [one.order for one in unpack(merge([earlier])).progress] == [1, 2, 1], "a resumed run counts from 1 again"


texts = st.text(max_size=3) | st.binary(min_size=2, max_size=3).map(bytes.hex)
values = st.none() | st.booleans() | st.integers() | st.integers(0, 300) | st.floats(allow_nan=False) | texts
notes = st.tuples(
    st.floats(0, 1e7),
    st.sampled_from(["resumed", "step"]),
    st.fixed_dictionaries({"a": values}, optional={"b": st.lists(st.tuples(texts, values).map(list), max_size=3)}),
)
micros = st.integers(0, 10**10).map(lambda number: number / 1e6)
reports = st.builds(
    ChunkFinished,
    time_s=micros | st.floats(0, 1e7),
    order=st.integers(1, 3),
    num_active=st.integers(0, 2**40),
    num_waiting=st.integers(0, 2),
    tokens=st.integers(0, 2**40),
    seconds=micros | st.floats(0, 1e7) | st.just(float("inf")),
)


@given(st.lists(st.lists(notes | reports, min_size=1, max_size=12), min_size=1, max_size=4))
def test_a_merged_block_gives_back_the_very_texts_of_its_rows(parts: list[list[Any]]) -> None:
    seq, blocks, expected = 1, [], []
    for part in parts:
        rows = [row_of(seq + index, value) for index, value in enumerate(part)]
        seq += len(rows)
        expected += rows
        blocks.append(pack(rows))
        assert rows_in(unpack(blocks[-1])) == rows
    assert rows_in(unpack(merge(blocks))) == expected


def test_damaged_bytes_of_a_merged_block_are_told() -> None:
    whole = merge([pack([row_of(seq, (1.0, "step", {"loss": seq / 7})) for seq in range(1, 99)])])
    for damaged in (whole[:-20], whole[:200] + bytes([whole[200] ^ 1]) + whole[201:]):
        with pytest.raises(LogError, match="not a block"):
            unpack(damaged)


# ---------------------------------------------------------------------- in a log


def write_on(log: RunLog, num_events: int = 80) -> None:
    from_s = log.last_time_s
    for index in range(1, num_events + 1):
        log.append_event(ChunkFinished(time_s=from_s + index, order=1, num_active=index, num_waiting=0))
        log.append_actions([Pause(order=1)])
        log.commit()
        log._merger.go_on(log._keep_state, waits=True)


def blocks_of(folder: Path) -> list[tuple[int, int, bool]]:
    """First row, last row and whether it is merged, of each block."""
    with contextlib.closing(sqlite3.connect(folder / LOG_NAME)) as connection:
        found = connection.execute("SELECT first_seq, last_seq, rows FROM block ORDER BY last_seq").fetchall()
    return [(first, last, rows.startswith(XZ_MAGIC)) for first, last, rows in found]


def check(folder: Path) -> int:
    """Every row is there once, whichever row is read from, and the state is that of the last; returns their number."""
    with LogReader(folder) as reader:
        rows, state = list(reader.entries()), reader.state()
        assert [row.seq for row in rows] == list(range(1, len(rows) + 1))
        assert [row.type for row in rows[1:]] == ["ChunkFinished", "Pause"] * (len(rows) // 2)
        for after in (0, 5, 20, 33, len(rows) - 2):
            assert list(reader.entries(after)) == rows[after:]
        assert (state.seq, state.last_time_s) == (rows[-1].seq, rows[-1].time_s)
    return len(rows)


def test_many_blocks_become_one_with_the_same_rows(tmp_path: Path) -> None:
    with RunLog.create(tmp_path, {}, limits=LIMITS) as log:
        write_on(log)
    assert check(tmp_path) == 161
    blocks = blocks_of(tmp_path)
    assert [is_merged for *_, is_merged in blocks[:6]] == [True] * 6
    assert all(after[0] == before[1] + 1 for before, after in itertools.pairwise(blocks))


def test_a_resumed_run_merges_the_blocks_of_a_file_that_was_begun_earlier(tmp_path: Path) -> None:
    with RunLog.create(tmp_path, {}, limits=LogLimits(block_rows=7, merge_blocks=1000)) as log:
        write_on(log)
        log._connection.executescript(
            "DROP TRIGGER log_keeps_blocks; CREATE TRIGGER log_keeps_blocks BEFORE DELETE ON block "
            "BEGIN SELECT RAISE(ABORT, 'the log is append-only'); END;"
        )
    assert not any(is_merged for *_, is_merged in blocks_of(tmp_path))
    with RunLog.open(tmp_path, limits=LIMITS) as log:
        write_on(log, 20)
    assert check(tmp_path) == 201
    assert sum(is_merged for *_, is_merged in blocks_of(tmp_path)) >= 6


def test_no_block_can_be_removed_unless_a_larger_one_has_its_rows(tmp_path: Path) -> None:
    with RunLog.create(tmp_path, {}, limits=LIMITS) as log:
        write_on(log)
        for refused in ("DELETE FROM block", "DELETE FROM block WHERE first_seq = 2", "UPDATE block SET rows = ''"):
            with pytest.raises(sqlite3.Error, match="append-only"):
                log._connection.execute(refused)
    assert check(tmp_path) == 161


def test_a_block_that_cannot_be_merged_stays(tmp_path: Path, monkeypatch) -> None:
    def refuse(_: object) -> bytes:
        raise LogError("not a block of rows")

    monkeypatch.setattr(merging, "merge", refuse)
    with RunLog.create(tmp_path, {}, limits=LIMITS) as log:
        write_on(log)
    assert check(tmp_path) == 161
    assert not any(is_merged for *_, is_merged in blocks_of(tmp_path))


def test_a_kill_before_any_statement_of_merging_loses_nothing(tmp_path: Path) -> None:
    seen: list[str] = []
    with RunLog.create(tmp_path / "whole", {}, limits=LIMITS) as log:
        log._connection.set_trace_callback(seen.append)
        write_on(log)
    first = next(number for number, text in enumerate(seen) if "INSERT OR REPLACE INTO block" in text)
    for number in range(first - 1, first + 9):
        folder = tmp_path / str(number)
        RunLog.create(folder, {}).close()
        child = os.fork()
        if child == 0:
            num_left = number + 1

            def count(_: str) -> None:
                nonlocal num_left
                num_left -= 1
                if num_left == 0:
                    os.kill(os.getpid(), signal.SIGKILL)

            with contextlib.suppress(BaseException), RunLog.open(folder, limits=LIMITS) as log:
                log._connection.set_trace_callback(count)
                write_on(log)
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
        num_before = check(folder)
        assert num_before > 20
        with RunLog.open(folder, limits=LIMITS) as log:
            write_on(log)
        assert check(folder) > num_before + 159
