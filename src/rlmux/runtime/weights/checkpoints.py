"""A pipeline's checkpoints on disk: which exist, which are good, which may be removed.

    PIPELINE/step_12/  step_13/  latest      each folder whole by the way it is written; `latest` names the newest

A damaged checkpoint is skipped for the one before it, with a warning. It is only looked at here: its numbers, and that
every file is there in its length. That every byte is as it was written is for a worker to verify before any is used:
hashing takes as long as the disk, and the controller has others to serve.

With staleness k, step n + 1 samples from version n - k: training can resume from a checkpoint when the k versions
before it are good too. A pipeline that is not over resumes from before its last step, even where that step's checkpoint
exists: the end is told after it is written.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from rlmux.core.errors import CheckpointError
from rlmux.core.model import PipelineId
from rlmux.engines.durable_files import sync_path
from rlmux.engines.train.state.checkpoint import PROMPTS, read_checkpoint, read_state
from rlmux.rl.config import TrainingConfig
from rlmux.rl.origin import Origin
from rlmux.rl.prompts.backlog import BACKLOG_FILE, Backlog
from rlmux.rl.prompts.prompt_rounds import PromptQueue
from rlmux.runtime.backend import Note, Submission

_NAME = re.compile(r"step_(\d+)")
_ASIDE = re.compile(r"step_\d+\.(tmp|old)-\d+|\.latest\.tmp.*|spilled-.*")


_FALLING_BACK = "falling back to the checkpoint before it"


def damage_of(checkpoint: Path) -> str | None:
    """What is wrong with a checkpoint, of which every byte is read; None for a good one."""
    try:
        read_checkpoint(checkpoint)
    except (CheckpointError, OSError) as error:
        return str(error)
    return None


def queue_of(checkpoint: Path, config: TrainingConfig) -> PromptQueue | None:
    """The queue of prompts that a checkpoint has; None without tail batching, and before its first step.

    Raises CheckpointError where it should have one.
    """
    if config.rollout.tail_batching is None:
        return None
    state = read_state(checkpoint)
    return PromptQueue.of_fields(state.get(PROMPTS), str(checkpoint)) if int(state["version"]) else None


def backlog_of(checkpoint: Path, config: TrainingConfig) -> Backlog:
    """What interruptible rollouts go on from; empty without them, and before the first step.

    Raises CheckpointError where a checkpoint should have one.
    """
    if config.rollout.interruptible is None or not int(read_state(checkpoint)["version"]):
        return Backlog()
    file = checkpoint / BACKLOG_FILE
    if not file.is_file():
        raise CheckpointError(f"{checkpoint} has no {BACKLOG_FILE}: it was written without rollout.interruptible")
    return Backlog.unpack(file.read_bytes(), str(file))


def is_due(submission: Submission, step: int, checkpoint_every: int) -> bool:
    """Whether a step has a checkpoint. Where there are gaps between them, each comes with the versions that staleness
    needs."""
    return step == submission.config.num_steps or -step % checkpoint_every <= submission.pipeline.staleness


class Checkpoint(NamedTuple):
    """A checkpoint that looks whole."""

    step: int
    path: Path
    weights_sha256: str | None


class CheckpointFolder:
    """The checkpoints of one pipeline."""

    def __init__(
        self,
        folder: Path,
        *,
        staleness: int = 0,
        first_version: int = 0,
        origin: Origin | None = None,
        say: Callable[[str], None] = lambda _: None,
    ) -> None:
        """`first_version`: the oldest version that training publishes; those before it are made without a checkpoint.
        `origin`: the run and the plan that checkpoints must be of; None takes any.
        `say`: gets a line about each checkpoint that is damaged or of another origin.
        """
        self._folder = folder
        self._staleness = staleness
        self._first_version = first_version
        self._origin = origin
        self._say = say
        self._damaged: set[int] = set()
        """Steps whose checkpoint was found damaged when it was verified (membership tests only)."""

    def path(self, step: int) -> Path:
        return self._folder / f"step_{step}"

    @staticmethod
    def step_of(checkpoint: Path) -> int:
        match = _NAME.fullmatch(checkpoint.name)
        assert match, checkpoint
        return int(match[1])

    def weights(self, version: int) -> Path:
        """The file from which rollout workers load a version that is no longer in shared memory."""
        adapter = self.path(version) / "adapter_model.safetensors"
        return adapter if adapter.is_file() else self.path(version) / "model.safetensors"

    def newest(self, *, before: int) -> Checkpoint | None:
        """The newest checkpoint, older than step `before`, that training can resume from."""
        known: dict[int, Checkpoint | None] = {}
        for step in reversed([step for step in self._steps() if step < before]):
            older = range(max(self._first_version, step - self._staleness), step)
            found = [known[each] if each in known else known.setdefault(each, self._read(each)) for each in older]
            mine = known[step] if step in known else known.setdefault(step, self._read(step))
            if mine is not None and None not in found:
                return mine
        return None

    def needed_from(self, step: int) -> list[Path]:
        """All checkpoints that are read when training resumes from this step's."""
        return [self.path(each) for each in range(max(self._first_version, step - self._staleness), step + 1)]

    def mark_damaged(self, checkpoint: Path, reason: str) -> None:
        """It was verified and is not as it was written."""
        self._damaged.add(self.step_of(checkpoint))
        self._say(f"{reason}; {_FALLING_BACK}")

    def mark_written(self, checkpoint: Path) -> None:
        """It was written, perhaps again."""
        self._damaged.discard(self.step_of(checkpoint))

    def remove_leftovers(self) -> None:
        """Remove what a killed worker had begun to write. One that has not died yet may remove its own meanwhile."""
        for path in list(self._folder.iterdir()) if self._folder.is_dir() else ():
            if _ASIDE.fullmatch(path.name):
                shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)

    def _read(self, step: int) -> Checkpoint | None:
        if step in self._damaged:
            return None
        try:
            state = read_state(self.path(step))
            complaint = None if self._origin is None else self._origin.complaint_about(state)
            if complaint is not None:
                raise CheckpointError(f"{self.path(step)} is {complaint}")
        except (CheckpointError, OSError) as error:
            self._say(f"{error}; {_FALLING_BACK}")
            return None
        return Checkpoint(step, self.path(step), state.get("weights_sha256"))

    def _steps(self) -> list[int]:
        return _steps_in(self._folder)


def checkpoint_folder(
    submission: Submission,
    run_folder: Path,
    *,
    say: Callable[[str], None] = lambda _: None,
) -> CheckpointFolder:
    """The checkpoints of a pipeline of a run."""
    return CheckpointFolder(
        run_folder / submission.config.name,
        staleness=submission.pipeline.staleness,
        first_version=0 if submission.pipeline.has_sft_warmup else 1,
        origin=submission.origin,
        say=say,
    )


def mark_latest(checkpoint: Path) -> None:
    """Name the newest checkpoint in `latest`, for people and scripts, once it is there."""
    aside = checkpoint.with_name(f".latest.tmp-{os.getpid()}")
    aside.write_text(f"{checkpoint.name}\n")
    sync_path(aside)
    aside.replace(checkpoint.with_name("latest"))
    sync_path(checkpoint.parent)


def prune(folder: Path, keep: int) -> None:
    """Remove the oldest checkpoints of a pipeline, never the newest `keep`. A half removed one is never visible."""
    for step in _steps_in(folder)[: -max(1, keep)]:
        aside = folder / f"step_{step}.old-{os.getpid()}"
        with contextlib.suppress(FileNotFoundError):  # a killed worker that has not died yet has removed it
            (folder / f"step_{step}").rename(aside)
        shutil.rmtree(aside, ignore_errors=True)


def _steps_in(folder: Path) -> list[int]:
    names = (_NAME.fullmatch(path.name) for path in folder.iterdir()) if folder.is_dir() else ()
    return sorted(int(match[1]) for match in names if match)


class Written(NamedTuple):
    """A checkpoint that would survive a power cut."""

    folder: Path
    seconds: float
    """Seconds from the snapshot until it was durable, beside other work."""
    stall_s: float
    """Seconds that training waited: for the checkpoint before it to be written, and for the snapshot."""
    weights_sha256: str
    """Hash of its weights, computed as it was written."""


def checkpoint_note(pipeline: PipelineId, written: Written) -> Note:
    """The note `checkpoint` of one that would survive a power cut."""
    fields = {
        "pipeline": pipeline,
        "step": CheckpointFolder.step_of(written.folder),
        "seconds": round(written.seconds, 6),
        "stall_s": round(written.stall_s, 6),
        "weights_sha256": written.weights_sha256,
    }
    return Note(type="checkpoint", fields=fields)


class CheckpointWriter:
    """Writes checkpoints beside other work, one at a time.

        begin ─▶ in a thread: write, fsync, rename, `latest`, prune ─▶ written() tells of it, once
                    └─ a failure is raised by whichever call comes next

    A process that ends by itself waits for the checkpoint that is being written.
    """

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._pool.submit(int).result()  # the thread is there from now on: none can be made where memory is short
        self._being_written: Future[Written] | None = None
        self._written: list[Written] = []

    def begin(self, folder: Path, snapshot: Callable[[], Callable[[Path], str]]) -> None:
        """Wait for the checkpoint before, have a snapshot taken, and begin to write it.

        `snapshot` returns what writes it into a folder and returns the hash of its weights. Raises what writing the
        one before raised.
        """
        started_s = time.perf_counter()
        self.wait()
        write = snapshot()
        self._being_written = self._pool.submit(_write, folder, write, time.perf_counter() - started_s)

    def written(self) -> list[Written]:
        """Checkpoints that are durable and were not told of before. Raises what writing raised."""
        if self._being_written is not None and self._being_written.done():
            self.wait()
        written, self._written = self._written, []
        return written

    def wait(self) -> None:
        """Wait until nothing is being written. Raises what writing raised."""
        being_written, self._being_written = self._being_written, None
        if being_written is not None:
            self._written.append(being_written.result())


def _write(folder: Path, write: Callable[[Path], str], stall_s: float) -> Written:
    started_s = time.perf_counter()
    weights_sha256 = write(folder)
    return Written(folder, time.perf_counter() - started_s, stall_s, weights_sha256)
