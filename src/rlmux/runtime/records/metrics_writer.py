"""Per-pipeline metrics during the run: `metrics.jsonl` for scripts, TensorBoard events for people.

Events are TensorBoard's own records, a step each, without TensorFlow or torch; without the package they are left out.
Its writer's thread opens the file again for each record, and ends with a traceback where the folder was moved.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlmux.core.actions import Action, Admit, Release
from rlmux.core.events import Event
from rlmux.core.model import PipelineId
from rlmux.log.notes import Note, StepNote
from rlmux.log.run_log import LogReader

_TAGS = {
    "reward_mean": "reward/mean",
    "reward_std": "reward/std",
    "response_len_mean": "response_length/mean",
    "response_len_max": "response_length/max",
    "response_len_clip_ratio": "response_length/clip_ratio",
    "turns_mean": "rollout/turns_mean",
    "tokens": "rollout/tokens",
}


_RECENT_ROWS = 10_000
"""Rows of the log that one commit may have, and more."""


class MetricsWriter:
    """A listener that writes each step's numbers into its pipeline's folder, once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: dict[PipelineId, _StepFiles] = {}

    def update(self, now_s: float, events: Sequence[Event], actions: Sequence[Action], notes: Sequence[Note]) -> None:
        for note in notes:
            if isinstance(note, StepNote):
                self._files_of(note.pipeline).add(now_s, note.step, note.metrics)
        for action in actions:
            if isinstance(action, Admit):
                _import_records()  # while its workers start: later a device would wait for its next order meanwhile
            if isinstance(action, Release):  # a run may see thousands of pipelines: none keeps a file open
                files = self._files.pop(action.pipeline, None)
                if files is not None:
                    files.close()

    def fill(self, log: LogReader) -> None:
        """Add the steps that the log has and the files lack, because the run was killed between the two.

        Files follow each commit of the log, so only pipelines with a step in its last rows are looked at.
        """
        state = log.state()
        recent = {note.pipeline for _, note in _step_notes(log, after=max(0, state.seq - _RECENT_ROWS))}
        there = [name for name in sorted(recent) if (self._folder / name).is_dir()]
        behind = {name for name in there if self._files_of(name).num_whole < state.steps[name]}
        for time_s, note in _step_notes(log) if behind else ():
            if note.pipeline in behind:
                self._files_of(note.pipeline).add(time_s, note.step, note.metrics)

    def close(self) -> None:
        for files in self._files.values():
            files.close()

    def _files_of(self, pipeline: PipelineId) -> _StepFiles:
        if pipeline not in self._files:
            self._files[pipeline] = _StepFiles(self._folder / pipeline)
        return self._files[pipeline]


class _StepFiles:
    """One pipeline's two records, each with a last step of its own: a run may be killed between them."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "metrics.jsonl"
        self._event_folder = folder / "tensorboard"
        self._last_line = _last_line(self._path)
        self._last_event = _last_event(self._event_folder)
        self._events: _EventFile | None = None

    @property
    def num_whole(self) -> int:
        """Last step that both have; without TensorBoard, that the lines have."""
        return self._last_line if self._last_event is None else min(self._last_line, self._last_event)

    def add(self, now_s: float, step: int, metrics: Mapping[str, float | None]) -> None:
        """Write a step, unless it is one that is done again after a crash, with the same numbers."""
        if step > self._last_line:
            with self._path.open("a") as file:
                file.write(json.dumps({"step": step, "time_s": round(now_s, 4), **metrics}) + "\n")
            self._last_line = step
        if self._last_event is None or step <= self._last_event:
            return
        if self._events is None:
            self._events = _EventFile(self._event_folder)
        # None: nothing was there to measure in this step.
        self._events.add(step, {tag_of(name): value for name, value in metrics.items() if value is not None})
        self._last_event = step

    def close(self) -> None:
        if self._events is not None:
            self._events.close()


def _step_notes(log: LogReader, after: int = 0) -> Iterator[tuple[float, StepNote]]:
    steps = ((entry.time_s, entry.note) for entry in log.entries(after) if entry.type == StepNote.type)
    return ((time_s, note) for time_s, note in steps if isinstance(note, StepNote))


def tag_of(name: str) -> str:
    """A metric's TensorBoard tag, in the names that other programs use."""
    return _TAGS.get(name, f"train/{name}")


def _last_line(path: Path) -> int:
    """The last step of an earlier part of the run; a truncated last line is removed."""
    if not path.exists():
        return 0
    text = path.read_bytes()
    whole = text[: text.rfind(b"\n") + 1]
    if whole != text:
        os.truncate(path, len(whole))
    lines = whole.splitlines()
    return int(json.loads(lines[-1])["step"]) if lines else 0


def _last_event(folder: Path) -> int | None:
    """The last step in the events of an earlier part of the run; None where TensorBoard is not installed."""
    if _import_records() is None:
        return None
    files = sorted(folder.glob("events*"), reverse=True)
    if files:
        from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
        from tensorboard.compat.proto import event_pb2

        for file in files:
            steps: list[int] = [
                event_pb2.Event.FromString(record).step for record in RawEventFileLoader(str(file)).Load()
            ]
            if any(steps):
                return max(steps)
    return 0


def _import_records() -> Any:
    """TensorBoard's modules for (events, summaries, records), or None where the package is not installed."""
    with contextlib.suppress(ImportError):
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.summary.writer import record_writer

        return event_pb2, summary_pb2, record_writer
    return None


class _EventFile:
    """TensorBoard's events of one pipeline."""

    def __init__(self, folder: Path) -> None:
        self._events, self._summaries, records = _import_records()
        folder.mkdir(exist_ok=True)  # never its parents: a run that was removed stays removed
        name = f"events.out.tfevents.{int(time.time()):010}.{socket.gethostname()}.{os.getpid()}"
        self._records = records.RecordWriter((folder / name).open("ab"))
        self._write(file_version="brain.Event:2")

    def add(self, step: int, value_by_tag: dict[str, float]) -> None:
        values = [self._summaries.Summary.Value(tag=tag, simple_value=value) for tag, value in value_by_tag.items()]
        self._write(step=step, summary=self._summaries.Summary(value=values))

    def close(self) -> None:
        self._records.close()

    def _write(self, **fields: Any) -> None:
        self._records.write(self._events.Event(wall_time=time.time(), **fields).SerializeToString())
        self._records.flush()
