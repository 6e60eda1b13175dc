"""A backup of a folder that is written to is what a kill leaves; a restore brings it back, or says why not."""

from __future__ import annotations

import json
import shutil
import socket
import sqlite3
import threading
from contextlib import closing
from pathlib import Path

import pytest

from rlmux.core.errors import UserError
from rlmux.core.events import NodeJoined
from rlmux.core.model import NodeId
from rlmux.engines.train.state.checkpoint import begin_checkpoint, end_checkpoint
from rlmux.log.notes import StepNote
from rlmux.log.run_log import SCHEMA_VERSION, LogLimits, LogReader, RunLog, run_header
from rlmux.runtime.control.backup import MANIFEST, back_up, restore
from rlmux.runtime.weights.checkpoints import CheckpointStore, mark_latest, prune

LIMITS = LogLimits(block_rows=20, snapshot_blocks=2, segment_rows=150)


def write_checkpoint(folder: Path, step: int) -> None:
    aside = begin_checkpoint(folder / f"step_{step}")
    (aside / "model.safetensors").write_bytes(f"weights {step} ".encode() * 5000)
    end_checkpoint(folder / f"step_{step}", {"version": step})
    mark_latest(folder / f"step_{step}")


class Script(threading.Thread):
    """Writes a run's folder as a controller and a worker do: a checkpoint, a step's note, its metrics, a prune."""

    def __init__(self, folder: Path, log: RunLog) -> None:
        super().__init__()
        self.folder, self.log = folder, log
        self.is_over = threading.Event()
        self.step = 0

    def run(self) -> None:
        while not self.is_over.is_set():
            self.write_step()

    def write_step(self) -> None:
        self.step += 1
        write_checkpoint(self.folder / "a", self.step)
        for number in range(7):
            self.log.append_event(NodeJoined(time_s=self.step, node=NodeId("rollout", number)))
        self.log.append_note(self.step, StepNote(pipeline="a", step=self.step, metrics={}))
        self.log.commit()
        with (self.folder / "a" / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({"step": self.step}) + "\n")
        prune(self.folder / "a", 2)


@pytest.fixture
def script(tmp_path: Path):
    """A run's folder that a script writes to, with all that a folder may hold."""
    folder = tmp_path / "run"
    log = RunLog.create(folder, run_header(policy="rollmux", backend="local"), limits=LIMITS)
    (folder / "header.json").write_text("{}")
    (folder / "a").mkdir()
    with closing(sqlite3.connect(folder / "a" / "samples.db", isolation_level=None)) as samples:
        samples.execute("PRAGMA journal_mode = WAL")
        samples.execute("CREATE TABLE t (x)")
        samples.execute("INSERT INTO t VALUES (1)")
    for name in ("index.db", ".status.cache", "listen"):
        (folder / name).write_text("derived")
    (folder / "a" / "step_9999.tmp-1").mkdir()
    (folder / "link").symlink_to("/dev/shm")
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(folder / "control.sock"))
    script = Script(folder, log)
    yield script
    script.is_over.set()
    if script.is_alive():
        script.join()
    log.close()
    listener.close()


def names(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file() and "step_" not in str(path)}


def test_a_folder_backed_up_while_it_is_written_to_is_of_one_moment(script, tmp_path):
    script.write_step()
    script.start()
    for number in range(8):
        out, restored = tmp_path / f"backup{number}", tmp_path / f"restored{number}"
        copied = back_up(script.folder, out)
        restore(out, restored)
        with LogReader(restored) as log:
            state = log.state()
            log.sha256()
        assert copied.logs["."]["last_seq"] == state.seq
        steps = CheckpointStore(restored / "a").steps()
        assert steps, "a resume has nothing to begin from"
        assert max(steps) <= state.steps["a"] + 1, "the log lacks more than the note of the last step"
        assert CheckpointStore(restored / "a").newest(before=10**6).step == max(steps)
        assert (restored / "a" / "latest").read_text() == f"step_{max(steps)}\n"
        lines = [json.loads(line)["step"] for line in (restored / "a" / "metrics.jsonl").read_text().splitlines()]
        assert lines in (list(range(1, state.steps["a"] + 1)), list(range(1, state.steps["a"])))
        found = {name for name in names(restored) if not name.startswith("run")}
        assert found == {"header.json", "a/latest", "a/metrics.jsonl", "a/samples.db"}
        shutil.rmtree(restored)
    assert script.is_alive(), "the writer went on"


def test_a_restored_log_goes_on_where_it_was(script, tmp_path):
    for _ in range(60):
        script.write_step()
    back_up(script.folder, tmp_path / "backup")
    restore(tmp_path / "backup", tmp_path / "again")
    segments = sorted(path.name for path in (tmp_path / "again").glob("run.0*.db"))
    assert segments == sorted(path.name for path in script.folder.glob("run.0*.db"))
    assert len(segments) > 1
    with RunLog.open(tmp_path / "again", limits=LIMITS) as log:
        assert (log.last_seq, log.state.steps["a"]) == (script.log.last_seq, 60)
        log.append_note(61.0, StepNote(pipeline="a", step=61, metrics={}))
    assert ((tmp_path / "again").stat().st_mode & 0o777, (tmp_path / "backup").stat().st_mode & 0o777) == (0o700, 0o700)


def test_a_damaged_checkpoint_is_left_out_and_named(script, tmp_path):
    script.write_step()
    script.write_step()
    (script.folder / "a" / "step_2" / "model.safetensors").write_bytes(b"other")
    copied = back_up(script.folder, tmp_path / "backup")
    assert copied.left_out == ("a/step_2: left out: model.safetensors is damaged",)
    assert CheckpointStore(tmp_path / "backup" / "a").steps() == [1]


def test_a_service_is_backed_up_with_its_tokens_bundles_and_lanes(script, tmp_path):
    script.write_step()
    root = tmp_path / "root"
    (root / "bundles" / "none").mkdir(parents=True)
    (root / "bundles" / "abc" / ".hidden").mkdir(parents=True)
    (root / "bundles" / "abc" / ".hidden" / "rows.jsonl").write_text("no newline")
    (root / "bundles" / ".upload.tgz").write_text("half")
    (root / "admin.token").write_text("secret")
    (root / "waits.yaml").write_text("x: 1")
    shutil.copytree(script.folder, root / "lane", ignore=lambda *_: ["control.sock"], symlinks=True)
    with closing(sqlite3.connect(root / "service.db", isolation_level=None)) as database:
        database.executescript("PRAGMA journal_mode = WAL; CREATE TABLE t (x); INSERT INTO t VALUES (7)")
        copied = back_up(root, tmp_path / "backup")
    restore(tmp_path / "backup", tmp_path / "again")
    assert set(copied.logs) == {"lane"}
    assert (tmp_path / "again" / "bundles" / "none").is_dir()
    assert (tmp_path / "again" / "bundles" / "abc" / ".hidden" / "rows.jsonl").read_text() == "no newline"
    assert not (tmp_path / "again" / "bundles" / ".upload.tgz").exists()
    assert (tmp_path / "again" / "lane" / "a" / "step_1" / "state.json").is_file()
    with closing(sqlite3.connect(tmp_path / "again" / "service.db")) as database:
        assert database.execute("SELECT x FROM t").fetchall() == [(7,)]
    assert {path.name for path in (tmp_path / "again").iterdir()} == {
        "admin.token", "bundles", "lane", "service.db", "waits.yaml",
    }  # fmt: skip


@pytest.fixture
def backup(script, tmp_path):
    script.write_step()
    back_up(script.folder, tmp_path / "backup")
    return tmp_path / "backup"


def damage(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1] + b"?")


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda backup: damage(backup / "a" / "step_1" / "model.safetensors"), "a/step_1/model.safetensors: damaged"),
        (
            lambda backup: (backup / "a" / "metrics.jsonl").unlink(),
            "a/metrics.jsonl: missing; the backup is incomplete",
        ),
        (lambda backup: (backup / MANIFEST).unlink(), "no backup (no backup.json)"),
        (lambda backup: damage(backup / MANIFEST), "backup.json: damaged"),
    ],
)
def test_a_backup_that_is_not_whole_is_not_restored(backup, change, complaint, tmp_path):
    change(backup)
    if complaint == "backup.json: damaged":
        (backup / MANIFEST).write_text("{")
    with pytest.raises(UserError) as error:
        restore(backup, tmp_path / "again")
    assert complaint in str(error.value)
    assert not (tmp_path / "again").exists()
    assert not list(tmp_path.glob("*.partial-*"))


def test_a_backup_of_a_newer_log_is_not_restored(backup, tmp_path):
    manifest = json.loads((backup / MANIFEST).read_text())
    manifest["logs"]["."]["schema"] = SCHEMA_VERSION + 1
    (backup / MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(
        UserError, match=r"its log schema is 6, this rlmux .* reads 5; accepted: an rlmux as new as that"
    ):
        restore(backup, tmp_path / "again")


def test_a_backup_never_names_a_file_outside_its_folder(backup, tmp_path):
    manifest = json.loads((backup / MANIFEST).read_text())
    manifest["files"]["../outside"] = {"bytes": 0, "sha256": ""}
    (backup / MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(UserError, match="names a file outside"):
        restore(backup, tmp_path / "again")


def test_a_folder_that_is_not_empty_is_left_alone(script, backup, tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").write_text("mine")
    for copy in (lambda to: back_up(script.folder, to), lambda to: restore(backup, to)):
        with pytest.raises(UserError, match="not empty; accepted: a folder that does not exist or is empty"):
            copy(tmp_path / "full")
    with pytest.raises(UserError, match="lies in"):
        back_up(script.folder, script.folder / "backup")
    with pytest.raises(UserError, match="holds no run and no service"):
        back_up(tmp_path / "full", tmp_path / "out")
    assert names(tmp_path / "full") == {"mine"}


def test_an_empty_disk_takes_a_backup_and_a_restore(script, backup, tmp_path):
    disk = tmp_path / "disk"
    (disk / "lost+found").mkdir(parents=True)
    restore(backup, disk)
    with LogReader(disk) as log:
        assert log.state().steps["a"] == 1
    assert not list(disk.glob(".partial-*"))
