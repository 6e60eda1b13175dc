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
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlmux.core.actions import Action, Admit, Release
from rlmux.core.events import Event
from rlmux.core.model import PipelineId
from rlmux.runtime.backend import Note

_TAGS = {
    "reward_mean": "reward/mean",
    "reward_std": "reward/std",
    "response_len_mean": "response_length/mean",
    "response_len_max": "response_length/max",
    "turns_mean": "rollout/turns_mean",
    "tokens": "rollout/tokens",
}


class MetricsWriter:
    """A listener that writes each step's numbers into its pipeline's folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._writers: dict[PipelineId, _EventFile | None] = {}
        self._last_step: dict[PipelineId, int] = {}

    def update(self, now_s: float, events: Sequence[Event], actions: Sequence[Action], notes: Sequence[Note]) -> None:
        for note in notes:
            if note.type == "step":
                self._write(now_s, note.fields["pipeline"], note.fields["step"], note.fields["metrics"])
        for action in actions:
            if isinstance(action, Admit):
                _import_records()  # while its workers start: later a device would wait for its next order meanwhile
            if isinstance(action, Release):  # a run may see thousands of pipelines: none keeps a file open
                writer = self._writers.pop(action.pipeline, None)
                self._last_step.pop(action.pipeline, None)
                if writer is not None:
                    writer.close()

    def close(self) -> None:
        for writer in self._writers.values():
            if writer is not None:
                writer.close()

    def _write(self, now_s: float, pipeline: PipelineId, step: int, metrics: dict[str, float | None]) -> None:
        path = self._folder / pipeline / "metrics.jsonl"
        if pipeline not in self._last_step:
            self._last_step[pipeline] = _last_whole_step(path)
        if step <= self._last_step[pipeline]:
            return  # done again after a crash, with the same numbers
        self._last_step[pipeline] = step
        line = json.dumps({"step": step, "time_s": round(now_s, 4), **metrics})
        with path.open("a") as file:
            file.write(line + "\n")
        if pipeline not in self._writers:
            self._writers[pipeline] = _event_writer(self._folder / pipeline / "tensorboard")
        writer = self._writers[pipeline]
        if writer is not None:
            # None: nothing was there to measure in this step.
            writer.add(step, {tag_of(name): value for name, value in metrics.items() if value is not None})


def tag_of(name: str) -> str:
    """A metric's TensorBoard tag, in the names that other programs use."""
    return _TAGS.get(name, f"train/{name}")


def _last_whole_step(path: Path) -> int:
    """The last step of an earlier part of the run; a truncated last line is removed."""
    if not path.exists():
        return 0
    text = path.read_bytes()
    whole = text[: text.rfind(b"\n") + 1]
    if whole != text:
        os.truncate(path, len(whole))
    lines = whole.splitlines()
    return int(json.loads(lines[-1])["step"]) if lines else 0


def _import_records() -> Any:
    """TensorBoard's modules for (events, summaries, records), or None where the package is not installed."""
    with contextlib.suppress(ImportError):
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.summary.writer import record_writer

        return event_pb2, summary_pb2, record_writer
    return None


def _event_writer(folder: Path) -> _EventFile | None:
    """A file of events in the folder, or None where TensorBoard is not installed."""
    modules = _import_records()
    if modules is None:
        return None
    folder.mkdir(exist_ok=True)  # never its parents: a run that was removed stays removed
    return _EventFile(folder, *modules)


class _EventFile:
    """TensorBoard's events of one pipeline."""

    def __init__(self, folder: Path, events: Any, summaries: Any, records: Any) -> None:
        self._events, self._summaries = events, summaries
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
