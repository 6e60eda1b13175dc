"""A pipeline's checkpoints on disk: listed, checked, pruned.

    PIPELINE/step_12/  step_13/  latest      folders are written atomically; `latest` names the newest

A damaged checkpoint is skipped for the previous one, with a warning. This module checks only a checkpoint's numbers and
the length of its files. A worker verifies every byte before use: hashing takes as long as the disk, and the controller
serves other pipelines meanwhile.

With staleness k, step n + 1 samples from version n - k: training can resume from a checkpoint if the k versions before
it are good too. A pipeline that is not over resumes from before its last step, even if the last checkpoint exists: the
end is reported after it is written.
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

from rlmux.core.errors import CheckpointError, StorageError
from rlmux.core.model import PipelineId
from rlmux.engines.durable_files import sync_path
from rlmux.engines.train.state.checkpoint import PROMPTS, STEP_NOTE, read_checkpoint, read_state
from rlmux.log.notes import CheckpointNote, Note, StepNote, decode
from rlmux.rl.config import TrainingConfig
from rlmux.rl.origin import Origin
from rlmux.rl.prompts.backlog import BACKLOG_FILE, Backlog
from rlmux.rl.prompts.prompt_rounds import PromptQueue
from rlmux.runtime.backend import Submission

_NAME = re.compile(r"step_(\d+)")
_ASIDE = re.compile(r"step_\d+\.(tmp|old)-\d+|\.latest\.tmp.*|spilled-.*")


_FALLING_BACK = "falling back to the checkpoint before it"


_TRAINING_FILES = frozenset({"optimizer.safetensors", "reference.safetensors", BACKLOG_FILE})
"""Files of a checkpoint that only training reads."""


def model_files(checkpoint: Path) -> list[str]:
    """Names of the files that transformers or peft reads. Raises CheckpointError for an incomplete checkpoint."""
    return sorted(set(read_state(checkpoint)["files"]) - _TRAINING_FILES)


def damage_of(checkpoint: Path) -> str | None:
    """The damage of a checkpoint, found by reading every byte; None for a good one."""
    try:
        read_checkpoint(checkpoint)
    except (CheckpointError, OSError) as error:
        return str(error)
    return None


def queue_of(checkpoint: Path, config: TrainingConfig) -> PromptQueue | None:
    """A checkpoint's prompt queue; None without tail batching, and before its first step.

    Raises CheckpointError where it should have one.
    """
    if config.rollout.tail_batching is None:
        return None
    state = read_state(checkpoint)
    return PromptQueue.of_fields(state.get(PROMPTS), str(checkpoint)) if int(state["version"]) else None


def backlog_of(checkpoint: Path, config: TrainingConfig) -> Backlog:
    """Backlog from which interruptible rollouts continue; empty without them, and before the first step.

    Raises CheckpointError where a checkpoint should have one.
    """
    if config.rollout.interruptible is None or not int(read_state(checkpoint)["version"]):
        return Backlog()
    file = checkpoint / BACKLOG_FILE
    if not file.is_file():
        raise CheckpointError(f"{checkpoint} has no {BACKLOG_FILE}: it was written without rollout.interruptible")
    return Backlog.unpack(file.read_bytes(), str(file))


def is_due(submission: Submission, step: int, checkpoint_every: int) -> bool:
    """Whether a step has a checkpoint. With gaps between checkpoints, each has the versions that staleness needs."""
    return step == submission.config.num_steps or -step % checkpoint_every <= submission.pipeline.staleness


class Checkpoint(NamedTuple):
    """A checkpoint that appears complete."""

    step: int
    path: Path
    weights_sha256: str | None


class CheckpointStore:
    """The checkpoints of one pipeline."""

    def __init__(
        self,
        folder: Path,
        *,
        staleness: int = 0,
        first_version: int = 0,
        origin: Origin | None = None,
        on_warning: Callable[[str], None] = lambda _: None,
    ) -> None:
        """`first_version`: oldest version that training publishes; earlier ones need no checkpoint.
        `origin`: required run and plan of checkpoints; None accepts any.
        `on_warning`: gets a line about each checkpoint that is damaged or of another origin.
        """
        self._folder = folder
        self._staleness = staleness
        self._first_version = first_version
        self._origin = origin
        self._on_warning = on_warning
        self._damaged: set[int] = set()
        """Steps whose checkpoint failed verification (membership tests only)."""

    def steps(self) -> list[int]:
        """Steps that have a checkpoint, in order."""
        return _steps_in(self._folder)

    def path(self, step: int) -> Path:
        return self._folder / f"step_{step}"

    @staticmethod
    def step_of(checkpoint: Path) -> int:
        match = _NAME.fullmatch(checkpoint.name)
        assert match, checkpoint
        return int(match[1])

    def weights(self, version: int) -> Path:
        """File of a version that is no longer in shared memory, for rollout workers."""
        adapter = self.path(version) / "adapter_model.safetensors"
        return adapter if adapter.is_file() else self.path(version) / "model.safetensors"

    def newest(self, *, before: int) -> Checkpoint | None:
        """The newest checkpoint, older than step `before`, that training can resume from."""
        known: dict[int, Checkpoint | None] = {}
        for step in reversed([step for step in self.steps() if step < before]):
            older = range(max(self._first_version, step - self._staleness), step)
            found = [known[each] if each in known else known.setdefault(each, self._read(each)) for each in older]
            mine = known[step] if step in known else known.setdefault(step, self._read(step))
            if mine is not None and None not in found:
                return mine
        return None

    def step_notes(self, *, after: int, through: int) -> list[Note]:
        """Notes of these steps, from their checkpoints.

        A run that ends between a checkpoint and its step's note resumes after the step, which has no other record.
        """
        notes = []
        for step in self.steps():
            if after < step <= through:
                with contextlib.suppress(CheckpointError, OSError):  # a damaged one is reported where it is read
                    fields = read_state(self.path(step)).get(STEP_NOTE)
                    note = None if fields is None else decode(StepNote.type, {**fields, "from_checkpoint": True})
                    notes += [] if note is None else [note]
        return notes

    def needed_from(self, step: int) -> list[Path]:
        """Checkpoints that a resume from this step reads."""
        return [self.path(each) for each in range(max(self._first_version, step - self._staleness), step + 1)]

    def mark_damaged(self, checkpoint: Path, reason: str) -> None:
        """Exclude a checkpoint that failed verification, with a warning."""
        self._damaged.add(self.step_of(checkpoint))
        self._on_warning(f"{reason}; {_FALLING_BACK}")

    def mark_written(self, checkpoint: Path) -> None:
        """Accept a checkpoint that was written, possibly again."""
        self._damaged.discard(self.step_of(checkpoint))

    def remove_leftovers(self) -> None:
        """Remove a killed worker's incomplete files, which it may still remove itself."""
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
            self._on_warning(f"{error}; {_FALLING_BACK}")
            return None
        return Checkpoint(step, self.path(step), state.get("weights_sha256"))


def checkpoint_folder(
    submission: Submission,
    run_folder: Path,
    *,
    on_warning: Callable[[str], None] = lambda _: None,
) -> CheckpointStore:
    """The checkpoints of a pipeline of a run."""
    return CheckpointStore(
        run_folder / submission.config.name,
        staleness=submission.pipeline.staleness,
        first_version=0 if submission.pipeline.has_sft_warmup else 1,
        origin=submission.origin,
        on_warning=on_warning,
    )


def mark_latest(checkpoint: Path) -> None:
    """Name the newest durable checkpoint in `latest`, for people and scripts."""
    aside = checkpoint.with_name(f".latest.tmp-{os.getpid()}")
    aside.write_text(f"{checkpoint.name}\n")
    sync_path(aside)
    aside.replace(checkpoint.with_name("latest"))
    sync_path(checkpoint.parent)


def prune(folder: Path, keep: int) -> None:
    """Remove all but the newest `keep` checkpoints of a pipeline, each atomically."""
    for step in _steps_in(folder)[: -max(1, keep)]:
        aside = folder / f"step_{step}.old-{os.getpid()}"
        with contextlib.suppress(FileNotFoundError):  # a killed worker that has not died yet has removed it
            (folder / f"step_{step}").rename(aside)
        shutil.rmtree(aside, ignore_errors=True)


def _steps_in(folder: Path) -> list[int]:
    names = (_NAME.fullmatch(path.name) for path in folder.iterdir()) if folder.is_dir() else ()
    return sorted(int(match[1]) for match in names if match)


class Written(NamedTuple):
    """A durable checkpoint, which survives a power cut."""

    folder: Path
    seconds: float
    """Seconds from the snapshot to durability, beside other work."""
    stall_s: float
    """Seconds that training waited for the previous checkpoint and the snapshot."""
    weights_sha256: str
    """Hash of its weights, computed as it was written."""


def checkpoint_note(pipeline: PipelineId, written: Written) -> CheckpointNote:
    """The note of a durable checkpoint."""
    return CheckpointNote(
        pipeline=pipeline,
        step=CheckpointStore.step_of(written.folder),
        seconds=round(written.seconds, 6),
        stall_s=round(written.stall_s, 6),
        weights_sha256=written.weights_sha256,
    )


class CheckpointWriter:
    """Writes checkpoints beside other work, one at a time.

        begin ─▶ in a thread: write, fsync, rename, `latest`, prune ─▶ written() returns it, once
                    └─ a failure is raised by the next call

    A process that ends by itself waits for the pending checkpoint.
    """

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._pool.submit(int).result()  # the thread is there from now on: none can be made where memory is short
        self._being_written: Future[Written | None] | None = None
        self._written: list[Written] = []

    def begin(
        self,
        folder: Path,
        snapshot: Callable[[], Callable[[Path], str | None]],
        *,
        is_well_everywhere: Callable[[bool], bool] = bool,
    ) -> None:
        """Wait for the previous checkpoint, take a snapshot, and begin to write it.

        `snapshot` returns a function that writes it into a folder and returns the hash of its weights; None where
        another rank ends the checkpoint. `is_well_everywhere`: told whether the previous one was written here, returns
        whether it was on all ranks that take the snapshot together. Raises the previous write's error.
        """
        started_s, is_well = time.perf_counter(), False
        try:
            self.wait()
            is_well = True
        finally:
            is_well = is_well_everywhere(is_well)
        if not is_well:
            raise StorageError(f"{folder}: another rank could not write the checkpoint before")
        write = snapshot()
        self._being_written = self._pool.submit(_write, folder, write, time.perf_counter() - started_s)

    def written(self) -> list[Written]:
        """Durable checkpoints since the last call. Raises the write's error."""
        if self._being_written is not None and self._being_written.done():
            self.wait()
        written, self._written = self._written, []
        return written

    def wait(self) -> None:
        """Wait for the pending checkpoint. Raises the write's error."""
        being_written, self._being_written = self._being_written, None
        written = None if being_written is None else being_written.result()
        if written is not None:
            self._written.append(written)


def _write(folder: Path, write: Callable[[Path], str | None], stall_s: float) -> Written | None:
    started_s = time.perf_counter()
    weights_sha256 = write(folder)
    if weights_sha256 is None:
        return None
    return Written(folder, time.perf_counter() - started_s, stall_s, weights_sha256)
