"""The run log keeps what was committed, shows it at any time, and refuses what it cannot read."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import resource
import signal
import sqlite3
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.log_script import append

from rlmux.core.actions import Pause, RunStage
from rlmux.core.errors import LogError
from rlmux.core.events import NodeJoined
from rlmux.core.model import Cluster, DeviceId, NodeId, Phase, Pool, Stage
from rlmux.log.block_codec import entry_of
from rlmux.log.folder_lock import OWNER_NAME
from rlmux.log.run_log import LOG_NAME, SCHEMA_VERSION, LogLimits, LogReader, RunLog, other_version, run_header
from rlmux.log.segments import row_checksum

NODE = NodeId("rollout", 0)
HEADER = {"policy": "rollmux", "backend": "local"}
DOCS = Path(__file__).parents[2] / "docs/reference/report.md"


def order(number: int) -> RunStage:
    return RunStage(
        order=number,
        pipeline="a",
        step=1,
        stage=Stage.GENERATE,
        devices=(DeviceId("rollout", 0, 0),),
        weight_version=0,
    )


def times(folder: Path) -> list[float]:
    with LogReader(folder) as reader:
        return [event.time_s for event in reader.events()]


def test_event_and_its_orders_come_back_in_order(tmp_path: Path) -> None:
    with RunLog.create(tmp_path / "run", HEADER) as log:
        log.append_event(NodeJoined(time_s=1.5, node=NODE))
        log.append_actions([order(1), Pause(order=1)])
        log.note("step", 2.0, pipeline="a", step=1, reward_mean=0.25)
    with LogReader(tmp_path / "run") as reader:
        assert reader.header == {"schema_version": SCHEMA_VERSION, **HEADER}
        header, *rows = list(reader.entries())
    assert header.kind == "header"
    assert [(row.kind, row.type, row.time_s) for row in rows] == [
        ("event", "NodeJoined", 1.5),
        ("action", "RunStage", 1.5),
        ("action", "Pause", 1.5),
        ("note", "step", 2.0),
    ]
    assert rows[1].value == order(1)
    assert rows[3].value == {"pipeline": "a", "step": 1, "reward_mean": 0.25}


def test_uncommitted_rows_are_invisible_and_a_reader_can_follow(tmp_path: Path) -> None:
    log = RunLog.create(tmp_path / "run", HEADER)
    with LogReader(tmp_path / "run") as reader:
        log.append_event(NodeJoined(time_s=1.0, node=NODE))
        assert list(reader.events()) == []
        log.commit()
        assert [event.time_s for event in reader.events()] == [1.0]
        last = max(entry.seq for entry in reader.entries())
        log.append_event(NodeJoined(time_s=2.0, node=NODE))
        log.commit()
        assert [entry.time_s for entry in reader.entries(after=last)] == [2.0]
    log.close()


def test_log_is_private_to_its_user(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with RunLog.create(folder, HEADER) as log:
        log.append_event(NodeJoined(time_s=1.0, node=NODE))
        log.commit()
        modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()}
        assert modes == dict.fromkeys([OWNER_NAME, LOG_NAME, LOG_NAME + "-wal", LOG_NAME + "-shm"], 0o600)
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert [path.name for path in folder.iterdir()] == [LOG_NAME]


def test_create_never_touches_an_existing_log(tmp_path: Path) -> None:
    RunLog.create(tmp_path, HEADER).close()
    before = (tmp_path / LOG_NAME).read_bytes()
    with pytest.raises(LogError, match="there is a run log already"):
        RunLog.create(tmp_path, HEADER)
    assert (tmp_path / LOG_NAME).read_bytes() == before


def test_a_second_writer_is_refused_while_the_first_lives(tmp_path: Path) -> None:
    log = RunLog.create(tmp_path, HEADER)
    with pytest.raises(LogError, match="another process is writing"):
        RunLog.open(tmp_path)
    log.close()
    RunLog.open(tmp_path).close()


def test_open_goes_on_after_the_last_row(tmp_path: Path) -> None:
    with RunLog.create(tmp_path, HEADER) as log:
        log.append_event(NodeJoined(time_s=3.25, node=NODE))
    with RunLog.open(tmp_path) as log:
        assert log.last_time_s == 3.25
        log.append_event(NodeJoined(time_s=4.0, node=NODE))
    assert times(tmp_path) == [3.25, 4.0]


WRITER = """
import sys
from rlmux.core.events import NodeJoined
from rlmux.core.model import NodeId
from rlmux.core.actions import Pause
from rlmux.log.folder_lock import OWNER_NAME
from rlmux.log.run_log import RunLog
log = RunLog.create(sys.argv[1], {"policy": "p"})
for number in range(1, 10**9):
    log.append_event(NodeJoined(time_s=float(number), node=NodeId("rollout", 0)))
    log.append_actions([Pause(order=number)] * 3)
    log.commit()
    if number % 100 == 0:
        print(number, flush=True)
"""


@pytest.mark.parametrize("num_acknowledged", [100, 400, 1500])
def test_sigkill_loses_nothing_committed_and_splits_no_transaction(tmp_path: Path, num_acknowledged: int) -> None:
    writer = subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert writer.stdout is not None
    for line in writer.stdout:
        if int(line) >= num_acknowledged:
            break
    with LogReader(tmp_path) as reader:
        assert sum(1 for _ in reader.events()) >= num_acknowledged
    os.kill(writer.pid, signal.SIGKILL)
    writer.wait()
    writer.stdout.close()

    with LogReader(tmp_path) as reader:
        entries = list(reader.entries())[1:]
    assert len(entries) >= 4 * num_acknowledged
    assert [e.type for e in entries] == ["NodeJoined", "Pause", "Pause", "Pause"] * (len(entries) // 4)
    with RunLog.open(tmp_path) as log:
        log.append_event(NodeJoined(time_s=0.5, node=NODE))
    assert len(times(tmp_path)) == len(entries) // 4 + 1


def copy_of_live_log(tmp_path: Path) -> Path:
    """What a power cut leaves: the database and a WAL with ten commits in it, and no writer."""
    log = RunLog.create(tmp_path / "live", HEADER)
    with contextlib.closing(sqlite3.connect(tmp_path / "live" / LOG_NAME)) as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    for number in range(10):
        log.append_event(NodeJoined(time_s=float(number), node=NODE))
        log.commit()
    crashed = tmp_path / "crashed"
    crashed.mkdir()
    for name in (LOG_NAME, LOG_NAME + "-wal"):
        (crashed / name).write_bytes((tmp_path / "live" / name).read_bytes())
    log.close()
    return crashed


@pytest.mark.parametrize("lost_bytes", [1, 100, 4120, 9000])
def test_torn_tail_costs_only_the_tail(tmp_path: Path, lost_bytes: int) -> None:
    crashed = copy_of_live_log(tmp_path)
    wal = crashed / (LOG_NAME + "-wal")
    os.truncate(wal, wal.stat().st_size - lost_bytes)
    num_commits = 10 - -(-lost_bytes // 4120)
    assert times(crashed) == [float(number) for number in range(num_commits)]
    with RunLog.open(crashed) as log:
        log.append_event(NodeJoined(time_s=99.0, node=NODE))
    assert times(crashed)[-1] == 99.0


def test_flipped_bit_in_the_tail_costs_only_what_follows(tmp_path: Path) -> None:
    crashed = copy_of_live_log(tmp_path)
    wal = crashed / (LOG_NAME + "-wal")
    content = bytearray(wal.read_bytes())
    content[-2000] ^= 1
    wal.write_bytes(content)
    assert times(crashed) == [float(number) for number in range(9)]


def test_rows_cannot_be_changed_or_removed(tmp_path: Path) -> None:
    with RunLog.create(tmp_path, HEADER) as log:
        log.append_event(NodeJoined(time_s=1.0, node=NODE))
    connection = sqlite3.connect(tmp_path / LOG_NAME)
    for statement in ("DELETE FROM log", "UPDATE log SET time_s = 0"):
        with pytest.raises(sqlite3.IntegrityError, match="append-only"):
            connection.execute(statement)
    connection.close()


def test_newer_schema_is_refused_with_both_versions(tmp_path: Path) -> None:
    RunLog.create(tmp_path, HEADER).close()
    connection = sqlite3.connect(tmp_path / LOG_NAME)
    connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION + 6}")
    connection.close()
    told = rf"written by a newer rlmux \(log schema {SCHEMA_VERSION + 6}\); this rlmux .* reads schema {SCHEMA_VERSION}"
    with pytest.raises(LogError, match=told):
        LogReader(tmp_path)
    with pytest.raises(LogError, match=told):
        RunLog.open(tmp_path)


def test_older_schema_is_refused_with_the_version_that_wrote_it(tmp_path: Path) -> None:
    RunLog.create(tmp_path, {**HEADER, "rlmux_version": "0.0.9"}).close()
    connection = sqlite3.connect(tmp_path / LOG_NAME)
    connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION - 1}")
    connection.close()
    told = rf"written by rlmux 0\.0\.9 \(log schema {SCHEMA_VERSION - 1}\); to resume it: pip install rlmux==0\.0\.9; "
    with pytest.raises(LogError, match=told):
        LogReader(tmp_path)
    with pytest.raises(LogError, match=told):
        RunLog.open(tmp_path)


def test_the_lines_of_the_docs_read_what_the_reader_reads(tmp_path: Path, alternating_run, monkeypatch, capsys) -> None:
    """Loose rows, blocks and sealed segments, while the run writes."""
    run = alternating_run()
    with RunLog.create(tmp_path / "runs/demo", run.header, limits=LogLimits(block_rows=7, segment_rows=60)) as log:
        append(log, run.rows)
        log.commit()
        monkeypatch.chdir(tmp_path)
        (lines,) = [one for one in re.findall(r"```python\n(.*?)```", DOCS.read_text(), re.S) if "zlib" in one]
        found: dict[str, Any] = {}
        exec(lines, found)
        with LogReader("runs/demo") as reader:
            rows = list(reader.entries())
    assert len(list(Path("runs/demo").glob("run.*.db"))) >= 3
    read = [found["rows"][seq] for seq in sorted(found["rows"])]
    assert [entry_of(*row) for row in read] == rows
    assert len(capsys.readouterr().out.splitlines()) == len(rows)
    assert len(lines.strip().splitlines()) <= 13


def test_what_is_not_a_run_log_is_told_apart(tmp_path: Path) -> None:
    with pytest.raises(LogError, match="there is no run log"):
        LogReader(tmp_path)
    (tmp_path / LOG_NAME).write_text("hello, I am not a database, but long enough to be taken for one" * 20)
    with pytest.raises(LogError, match="not a run log"):
        LogReader(tmp_path)
    (tmp_path / LOG_NAME).write_bytes(b"")
    with pytest.raises(LogError, match="not a run log"):
        LogReader(tmp_path)


def test_full_database_is_a_clear_error_and_leaves_a_readable_log(tmp_path: Path) -> None:
    log = RunLog.create(tmp_path, HEADER)
    (pages,) = log._connection.execute("PRAGMA page_count").fetchone()
    log._connection.execute(f"PRAGMA max_page_count = {pages + 2}")

    def fill() -> None:
        for number in itertools.count():
            log.append_event(NodeJoined(time_s=float(number), node=NODE))
            log.commit()

    with pytest.raises(LogError, match=r"cannot append to the run log: database or disk is full"):
        fill()
    kept = times(tmp_path)
    assert len(kept) > 10
    assert kept == [float(number) for number in range(len(kept))]
    log._connection.execute("PRAGMA max_page_count = 1000000")
    log.append_event(NodeJoined(time_s=-1.0, node=NODE))
    log.close()
    assert times(tmp_path)[-1] == -1.0


def test_full_disk_is_a_clear_error_and_leaves_a_readable_log(tmp_path: Path) -> None:
    """The kernel refuses the write: a file size limit stands for a disk without space."""

    def limit() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))

    done = subprocess.run(
        [sys.executable, "-c", WRITER, str(tmp_path)],
        preexec_fn=limit,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "LogError" in done.stderr.splitlines()[-1]
    assert "cannot append to the run log" in done.stderr.splitlines()[-1]
    printed = done.stdout.split()
    assert len(times(tmp_path)) >= (int(printed[-1]) if printed else 1)
    with RunLog.open(tmp_path) as log:
        log.append_event(NodeJoined(time_s=0.0, node=NODE))


def test_read_only_folder_can_be_read(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with RunLog.create(folder, HEADER) as log:
        log.append_event(NodeJoined(time_s=1.0, node=NODE))
    folder.chmod(0o500)
    try:
        assert times(folder) == [1.0]
    finally:
        folder.chmod(0o700)


def test_damaged_row_is_named(tmp_path: Path) -> None:
    RunLog.create(tmp_path, HEADER).close()
    connection = sqlite3.connect(tmp_path / LOG_NAME)
    row = (2, 1.0, "event", "Odd", '{"type":"Odd"}')
    connection.execute("INSERT INTO log VALUES (?, ?, ?, ?, ?, ?)", (*row, row_checksum(*row)))
    connection.commit()
    connection.close()
    with (
        LogReader(tmp_path) as reader,
        pytest.raises(LogError, match=r"row 2: unknown event or action type 'Odd'"),
    ):
        list(reader.entries())


def test_a_row_that_is_not_what_was_written_is_told(tmp_path: Path) -> None:
    with RunLog.create(tmp_path, HEADER) as log:
        log.note("step", 1.0, pipeline="sort", step=1, weights_sha256="ab12")
    content = bytearray((tmp_path / LOG_NAME).read_bytes())
    content[content.index(b"ab12")] ^= 1  # still JSON
    (tmp_path / LOG_NAME).write_bytes(content)
    with LogReader(tmp_path) as reader, pytest.raises(LogError, match=r"run\.db: row 2 is damaged"):
        list(reader.entries())


def test_header_holds_every_device_of_the_cluster() -> None:
    cluster = Cluster(
        pools={
            "rollout": Pool(name="rollout", phase=Phase.ROLLOUT, num_nodes=2, devices_per_node=2),
            "cloud": Pool(name="cloud", phase=Phase.TRAIN, num_nodes=None),
        }
    )
    header = run_header(policy="rollmux", backend="local", cluster=cluster, spec={"seed": 1})
    assert [DeviceId(*d) for d in header["pools"]["rollout"]["devices"]] == [
        DeviceId("rollout", node, index) for node in (0, 1) for index in (0, 1)
    ]
    assert header["pools"]["cloud"]["devices"] == []
    assert header["spec"] == {"seed": 1}


def test_error_closes_what_it_opened(tmp_path: Path) -> None:
    RunLog.create(tmp_path, HEADER).close()
    num_open = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        with pytest.raises(LogError):
            RunLog.create(tmp_path, HEADER)
    assert len(os.listdir("/proc/self/fd")) == num_open


WRITE = """
import sys
from rlmux.log.run_log import RunLog
with RunLog.open(sys.argv[1]) as log:
    log.append_note(1.0, __import__("rlmux.log.notes", fromlist=["x"]).DefectNote(text="new"))
"""


def test_a_look_at_the_schema_leaves_the_locks_of_open_readers_alone(tmp_path):
    """A file that is opened and closed beside SQLite drops a process's locks: its readers then see nothing new."""
    RunLog.create(tmp_path / "run", run_header(policy="solo", backend="local")).close()
    with LogReader(tmp_path / "run") as reader:
        seen = len(list(reader.entries()))
        assert other_version(tmp_path / "run") is None
        subprocess.run([sys.executable, "-c", WRITE, str(tmp_path / "run")], check=True)
        assert len(list(reader.entries())) == seen + 1
