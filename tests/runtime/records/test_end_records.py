"""A log that is damaged, cut short or gone: what is readable makes a new one, and what is missing is said."""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from rlmux.core.errors import LogError
from rlmux.core.events import NodeJoined
from rlmux.core.model import NodeId, PipelineId
from rlmux.log.damaged_log import read_damaged
from rlmux.log.folder_lock import FolderInUseError, FolderLock
from rlmux.log.notes import PipelineEndNote
from rlmux.log.run_log import LOG_NAME, LogLimits, LogReader, RunLog, run_header
from rlmux.runtime.records.end_records import ENDS_NAME, HEADER_NAME, keep_end, keep_ends, keep_header, salvage

PAGE = 4096


def write_log(folder: Path, num_rows: int, **limits: int) -> dict:
    """A log of notes and events by turns; returns its header."""
    header = run_header(policy="rollmux", backend="local")
    with RunLog.create(folder, header, limits=LogLimits(**limits)) as log:
        keep_header(folder, header)
        for number in range(2, num_rows + 1):
            if number % 2:
                log.append_event(NodeJoined(time_s=number / 10, node=NodeId("rollout", number)))
            else:
                log.note("step", number / 10, pipeline="a", step=number, metrics={"text": "x" * 200})
            log.commit()
    return header


def rows_of(folder: Path) -> dict[int, tuple]:
    with LogReader(folder) as reader:
        return {entry.seq: entry[1:] for entry in reader.entries()}


def overwrite(path: Path, page: int, num_pages: int = 1) -> None:
    """Fill pages, counted from 1, with what is none."""
    path.chmod(0o600)
    with path.open("r+b") as file:
        file.seek((page - 1) * PAGE)
        file.write(b"\xa5" * PAGE * num_pages)


def steps_of(folder: Path) -> list[int]:
    with LogReader(folder) as reader:
        return [entry.value["step"] for entry in reader.entries() if entry.type == "step"]


def test_a_whole_log_is_left_as_it_is(tmp_path):
    write_log(tmp_path, 50)
    before = (tmp_path / LOG_NAME).read_bytes()
    assert salvage(tmp_path) is None
    assert (tmp_path / LOG_NAME).read_bytes() == before


def test_a_log_that_was_cut_short_keeps_the_rows_before_the_cut(tmp_path):
    header = write_log(tmp_path, 400, block_rows=10**6)
    whole = rows_of(tmp_path)
    path = tmp_path / LOG_NAME
    damaged = path.read_bytes()[: path.stat().st_size * 6 // 10]
    path.write_bytes(damaged)
    salvaged = salvage(tmp_path)
    assert salvaged is not None
    assert any("cut short" in line for line in salvaged.lines())
    assert (salvaged.old_files / LOG_NAME).read_bytes() == damaged
    with LogReader(tmp_path) as reader:
        assert reader.header["run_id"] == header["run_id"]
        kept = [entry for entry in reader.entries() if entry.type != "salvaged"]
    assert 150 < len(kept) < 400
    assert [entry[1:] for entry in kept] == [whole[seq] for seq in range(1, len(kept) + 1)], "nothing is made up"
    assert salvage(tmp_path) is None


def test_behind_missing_rows_notes_are_taken_over_and_events_are_not(tmp_path):
    write_log(tmp_path, 400, block_rows=10**6)
    whole = rows_of(tmp_path)
    num_pages = (tmp_path / LOG_NAME).stat().st_size // PAGE
    overwrite(tmp_path / LOG_NAME, num_pages // 2, 2)
    salvaged = salvage(tmp_path)
    assert salvaged is not None
    ((first, last),) = salvaged.missing
    assert 100 < first < last < 300
    assert f"rows {first} to {last} are missing" in salvaged.lines()
    assert steps_of(tmp_path) == [seq for seq in range(2, 401, 2) if not first <= seq <= last]
    with LogReader(tmp_path) as reader:
        events = [entry.value for entry in reader.entries() if entry.kind == "event"]
        (told,) = [entry.value for entry in reader.entries() if entry.type == "salvaged"]
    assert [event.node.index for event in events] == list(range(3, first, 2))
    assert salvaged.num_set_aside == len(range(last + 1 + last % 2, 401, 2))
    assert told["missing"] == [[first, last]]
    assert whole[2][2] == "step"


@pytest.mark.parametrize("what", ["first page", "all", "no file"])
def test_without_its_first_page_or_at_all_a_log_is_made_from_what_is_left(tmp_path, what):
    header = write_log(tmp_path, 400, block_rows=10**6)
    path = tmp_path / LOG_NAME
    if what == "first page":
        overwrite(path, 1)
    elif what == "all":
        overwrite(path, 1, path.stat().st_size // PAGE)
    else:
        path.unlink()
    salvaged = salvage(tmp_path)
    assert salvaged is not None
    assert salvaged.damage
    with LogReader(tmp_path) as reader:
        assert reader.header["run_id"] == header["run_id"]
    assert len(steps_of(tmp_path)) == (200 if what == "first page" else 0)


@pytest.mark.parametrize("what", ["last pages", "no file"])
def test_a_pipeline_that_was_over_stays_over_however_its_log_is_damaged(tmp_path, what):
    write_log(tmp_path, 400, block_rows=10**6)
    end = PipelineEndNote(pipeline=PipelineId("a"), status="cancelled", reason="", weights_sha256=None)
    keep_ends(tmp_path, ())
    keep_end(tmp_path, end)
    with (tmp_path / ENDS_NAME).open("a") as file:
        file.write('{"pipeline": "b", "sta')  # of a run that was killed as it wrote
    path = tmp_path / LOG_NAME
    if what == "no file":
        path.unlink()
    else:
        os.truncate(path, path.stat().st_size // 2)
    salvaged = salvage(tmp_path)
    assert salvaged is not None
    assert "pipeline a was over (cancelled) and stays so" in salvaged.lines()
    with LogReader(tmp_path) as reader:
        assert reader.state().ended == {"a": end}


def test_without_any_header_nothing_is_changed(tmp_path):
    write_log(tmp_path, 50)
    (tmp_path / LOG_NAME).write_bytes(b"")
    text = (tmp_path / HEADER_NAME).read_text()
    (tmp_path / HEADER_NAME).write_text(text.replace("rollmux", "rollmax"))
    with pytest.raises(LogError, match="has the run's header, without which it cannot go on"):
        salvage(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {LOG_NAME, HEADER_NAME}


def test_sealed_segments_are_read_and_one_that_was_changed_counts_only_by_its_checksums(tmp_path):
    write_log(tmp_path, 700, block_rows=50, segment_rows=200)
    whole = rows_of(tmp_path)
    assert (tmp_path / "run.0003.db").is_file()
    path = tmp_path / "run.0002.db"
    with closing(sqlite3.connect(path)) as segment:
        blocks = [rows for (rows,) in segment.execute("SELECT rows FROM block ORDER BY last_seq")]
    assert len(blocks) == 4
    content = bytearray(path.read_bytes())
    place = content.index(blocks[1][:100])
    content[place + 50] ^= 1
    path.chmod(0o600)
    path.write_bytes(content)
    salvaged = salvage(tmp_path)
    assert salvaged is not None
    assert "run.0002.db is not the segment that its successor names" in salvaged.damage
    missing = {seq for first, last in salvaged.missing for seq in range(first, last + 1)}
    assert missing == set(range(252, 302)), "one block, whose checksum does not hold"
    kept = [row[3]["step"] for seq, row in whole.items() if row[2] == "step" and seq not in missing]
    assert steps_of(tmp_path) == kept
    assert not (tmp_path / "run.0002.db").exists()
    assert (salvaged.old_files / "run.0002.db").is_file()


def test_a_loose_row_whose_bytes_changed_is_not_taken_over(tmp_path):
    write_log(tmp_path, 50)
    content = bytearray((tmp_path / LOG_NAME).read_bytes())
    content[content.index(b'"step":40,') + len(b'"step":')] ^= 1  # step 50: a row as good as any but for its checksum
    (tmp_path / LOG_NAME).write_bytes(content)
    salvaged = salvage(tmp_path)
    assert salvaged is not None
    assert salvaged.missing == [(40, 40)]
    assert steps_of(tmp_path) == [step for step in range(2, 51, 2) if step != 40]


def test_rows_in_the_write_ahead_log_of_a_killed_run_are_read(tmp_path):
    header = run_header(policy="rollmux", backend="local")
    log = RunLog.create(tmp_path / "live", header)
    log.note("step", 1.0, pipeline="a", step=1, metrics={})
    log.commit()
    shutil.copytree(tmp_path / "live", tmp_path / "run")  # as a kill leaves it
    log.close()
    assert (tmp_path / "run" / f"{LOG_NAME}-wal").stat().st_size
    assert [entry.type for entry in read_damaged(tmp_path / "run").entries.values()] == ["header", "step"]


def test_a_live_run_is_not_salvaged(tmp_path):
    write_log(tmp_path, 50)
    os.truncate(tmp_path / LOG_NAME, PAGE)
    with FolderLock.take(tmp_path), pytest.raises(FolderInUseError):
        salvage(tmp_path)


# ------------------------------------------------------------------ a whole run


FILE = """\
cluster: {pools: {rollout: {devices: 1}, train: {devices: 1}}}
defaults:
  steps: 60
  model: {hidden_size: 16, layers: 1, heads: 2, kv_heads: 1, intermediate_size: 32}
  algorithm: {prompts_per_step: 2, group_size: 4}
  rollout: {max_new_tokens: 6, slots: 8}
pipelines:
  - {name: a, seed: 1, task: sort}
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", ["cut short", "gone"])
def test_a_run_whose_log_is_damaged_goes_on_from_its_checkpoint(tmp_path, monkeypatch, capsys, how):
    pytest.importorskip("torch")
    from rlmux.config import load_spec
    from rlmux.policies import make_policy
    from rlmux.runtime import launch
    from rlmux.runtime.run import RunOptions

    class StopsAt:
        def __init__(self, step: int) -> None:
            self.step = step

        def update(self, now_s, events, actions, notes) -> None:
            if any(note.type == "step" and note.step == self.step for note in notes):
                raise BrokenPipeError(32, "as by a closed output")

    monkeypatch.chdir(tmp_path)
    Path("file.yaml").write_text(FILE)
    spec, run = load_spec("file.yaml"), tmp_path / "run"
    options = RunOptions(listeners=[StopsAt(20)])
    assert not launch.start_run(spec, run, policy=make_policy("fifo"), options=options).is_complete
    if how == "gone":
        (run / LOG_NAME).unlink()
    else:
        os.truncate(run / LOG_NAME, (run / LOG_NAME).stat().st_size // 2)
        with pytest.raises(LogError):
            launch.resume_run(spec, run, policy=make_policy("fifo"))
    assert salvage(run) is not None
    submitted: list[int] = []

    class SeesFirstStep:
        def update(self, now_s, events, actions, notes) -> None:
            submitted.extend(event.pipeline.first_step for event in events if hasattr(event, "pipeline")
                             and hasattr(event.pipeline, "first_step"))  # fmt: skip

    options = RunOptions(listeners=[SeesFirstStep()])
    done = launch.resume_run(launch.spec_of(run), run, policy=make_policy("fifo"), options=options)
    assert submitted[0] > 15, "from its newest checkpoint, not from the beginning"
    alone = launch.start_run(spec, tmp_path / "alone", policy=make_policy("fifo"))
    weights = {name: one["weights_sha256"] for name, one in done.summary["pipelines"].items()}
    assert weights == {name: one["weights_sha256"] for name, one in alone.summary["pipelines"].items()}
    assert json.loads((run / "summary.json").read_text())["pipelines"]["a"]["status"] == "finished"
