"""Files of pipelines that are over, removed: by hand, and by the rule `keep` of the file.

    rlmux remove ─▶ RunControl ── checked ──┐
    once a minute: `keep` ─▶ what is due ───┴─▶ note `removed` ─▶ log ─▶ DIR/.removing/ ─▶ deleted, in a thread

The note comes first, and the files are moved aside before they are deleted: no reader meets half of them. What a kill
leaves in between, the next start of the run removes (`finish`). The log itself stays whole: what a removed pipeline
used is counted as before. Where nothing runs in the folder, `remove_here` does the same under the folder's lock.
"""

from __future__ import annotations

import contextlib
import os
import queue
import shutil
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path

from rlmux.config.load import values_of_pipelines
from rlmux.config.tree import KeepConfig, keep_text, read_keep
from rlmux.core.actions import Action
from rlmux.core.errors import UserError
from rlmux.core.events import Event
from rlmux.core.model import PipelineId, PipelineStatus
from rlmux.log.folder_lock import FolderLock
from rlmux.log.notes import Note, RemovedNote
from rlmux.log.run_log import LogReader, RunLog
from rlmux.log.run_state import RunState
from rlmux.report.samples import SAMPLES_NAME
from rlmux.runtime.backend import Submission
from rlmux.runtime.control.retries import Retries
from rlmux.runtime.control.supervised_thread import SupervisedThread
from rlmux.runtime.records.folders import SERVED, check_run

ALL, CHECKPOINTS, SAMPLES = PARTS = ("all", "checkpoints", "samples")
ASIDE = ".removing"
"""Folder of a run for what is being deleted."""
RULE = "keep.json"
"""File of a lane's folder: the rule of its service's file, which may have changed since the run began."""
_PATTERNS = {CHECKPOINTS: ("step_*", "latest", "spilled-*"), SAMPLES: (f"{SAMPLES_NAME}*",)}
_CHECK_EVERY_S = 60.0
_MAX_NAMES = 20
_UNDER_WAY = (PipelineStatus.WAITING, PipelineStatus.RUNNING)


class Removals:
    """Removals of a run in progress."""

    def __init__(self, folder: Path, log: RunLog, retries: Retries, keep: KeepConfig | None = None) -> None:
        """`keep`: the rule of the run's file, where the folder has none of a service's; None: nothing is removed unless
        a user says so."""
        self._folder = folder
        self._log = log
        self._retries = retries
        self._keep = self._rule = keep
        self._began_s = log.last_time_s
        """Counts as the end of pipelines whose end has no time."""
        self._next_check_s = 0.0
        self._nothing_there: set[tuple[str, str]] = set()
        """(pipeline, parts) that the rule asked for and that have no files."""
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: SupervisedThread | None = None
        self._measured: dict[str, int] | None = None
        """Bytes of each pipeline's folder, when the thread has measured them."""

    def requested(
        self, name: str, parts: str, by: str, upcoming: Sequence[Submission], notes: Sequence[Note]
    ) -> RemovedNote:
        """The note of a removal that a user asks for. `notes`: of this tick. Raises UserError."""
        state, pipeline = self._log.state, PipelineId(name)
        _check_parts(parts)
        earlier = {note.parts for note in notes if isinstance(note, RemovedNote) and note.pipeline == name}
        if name not in state.ended and self._retries.find(pipeline) is None:
            known = [*state.ended, *(each.pipeline.id for each in self._retries.submissions())]
            raise UserError(_unknown(name, known, state, self._retries.knows(pipeline)))
        status = self._status(pipeline, upcoming)
        if status is not None:
            raise UserError(f"pipeline {name!r} {status}; accepted: one that has ended; to end it: rlmux cancel")
        _check_not_removed(name, parts, {*state.removals.get(name, ()), *earlier})
        _check_unused(self._folder, name, parts, self._models(upcoming))
        return _note(self._folder, name, parts, by=by)

    def take(self, now_s: float, upcoming: Sequence[Submission]) -> list[RemovedNote]:
        """The removals that are due by the rule; looked at once a minute."""
        if now_s >= self._next_check_s:
            self._next_check_s = now_s + _CHECK_EVERY_S
            self._rule = _rule_of(self._folder, self._keep)
            if self._rule is None:
                return []
            if self._rule.project_bytes is None:
                return self._due(now_s, upcoming, {})
            self._do(self._measure)
        measured, self._measured = self._measured, None
        return [] if measured is None else self._due(now_s, upcoming, measured)

    def update(self, now_s: float, events: Sequence[Event], actions: Sequence[Action], notes: Sequence[Note]) -> None:
        """Remove the files whose notes are in the log by now."""
        if self._thread is not None:
            self._thread.check()
        for note in notes:
            if isinstance(note, RemovedNote) and (aside := _move_aside(self._folder, note.pipeline, note.parts)):
                self._do(lambda aside=aside: _delete(aside))  # type: ignore[misc]

    def close(self) -> None:
        """Waits for what is being deleted."""
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join()

    # ------------------------------------------------------------------ helpers, in the order they are called

    def _status(self, name: PipelineId, upcoming: Sequence[Submission]) -> str | None:
        """Why a pipeline's files are still needed, in words; None for one that is over."""
        if any(each.pipeline.id == name for each in upcoming):
            return "has yet to come"
        if self._retries.is_due(name):
            return "is about to be tried again"
        status = self._retries.status(name)
        return f"is {status.value}" if status in _UNDER_WAY and name not in self._log.state.ended else None

    def _models(self, upcoming: Sequence[Submission]) -> Iterable[tuple[str, str]]:
        """(pipeline, folder of its model) of those that run or wait."""
        under_way = [each for each in self._retries.submissions() if self._status(each.pipeline.id, upcoming)]
        given = {each.pipeline.id: each.config.model.path for each in [*under_way, *upcoming]}
        return [(name, path) for name, path in given.items() if path is not None]

    def _due(self, now_s: float, upcoming: Sequence[Submission], sizes: Mapping[str, int]) -> list[RemovedNote]:
        if self._rule is None:
            return []
        state = self._log.state
        projects = {str(each.pipeline.id): each.pipeline.account.project for each in self._retries.submissions()}
        over = {
            name: state.ended_s.get(name, self._began_s)
            for name in state.ended
            if name in projects and ALL not in state.removals.get(name, ())
            if self._status(PipelineId(name), upcoming) is None
        }
        removed = {name: set(state.removals.get(name, ())) for name in over}
        models = list(self._models(upcoming)) if over else []
        notes = []
        for name, parts in due(self._rule, now_s, over, removed, sizes, projects):
            is_used = _user_of(self._folder, name, models) is not None and parts != SAMPLES
            if is_used or (name, parts) in self._nothing_there:
                continue
            if parts != ALL and not files_of(self._folder, name, parts):
                self._nothing_there.add((name, parts))
                continue
            notes.append(_note(self._folder, name, parts, by=None))
        return notes

    def _do(self, job: Callable[[], None]) -> None:
        if self._thread is None:
            self._thread = SupervisedThread(self._serve, "removals")
            self._thread.start()
        self._jobs.put(job)

    def _serve(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()

    def _measure(self) -> None:
        folders = [path for path in self._folder.iterdir() if path.is_dir() and path.name != ASIDE]
        self._measured = {path.name: size_of([path]) for path in folders}


def write_rule(folder: Path, keep: KeepConfig | None) -> None:
    """Have this rule hold in a run from its next look on, whatever its file says."""
    aside = folder / f".{RULE}.{os.getpid()}"
    aside.write_text(keep_text(keep), encoding="utf-8")
    aside.replace(folder / RULE)


def _rule_of(folder: Path, keep: KeepConfig | None) -> KeepConfig | None:
    try:
        return read_keep((folder / RULE).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return keep


def due(
    keep: KeepConfig,
    now_s: float,
    ended_s: Mapping[str, float],
    removed: Mapping[str, set[str]],
    sizes: Mapping[str, int],
    projects: Mapping[str, str],
) -> list[tuple[str, str]]:
    """(pipeline, parts) to remove, those that ended first first.

    `ended_s`: of pipelines that are over. `sizes`: bytes of every pipeline, running ones too. `projects`: of each.
    """
    oldest_first = sorted(ended_s, key=lambda name: (ended_s[name], name))
    found = [
        (name, parts)
        for name in oldest_first
        for parts in PARTS
        if (after_s := keep.after_s(parts)) is not None
        and now_s - ended_s[name] >= after_s
        and parts not in removed.get(name, ())
    ]
    whole = {name for name, parts in found if parts == ALL}
    if keep.project_bytes is not None:
        left: dict[str, int] = {}
        for name, project in projects.items():
            left[project] = left.get(project, 0) + (0 if name in whole else sizes.get(name, 0))
        for name in oldest_first:
            if name not in whole and sizes.get(name, 0) and left[projects[name]] > keep.project_bytes:
                left[projects[name]] -= sizes[name]
                whole.add(name)
    return [(name, ALL) for name in oldest_first if name in whole] + [each for each in found if each[0] not in whole]


def remove_here(folder: Path, name: str, parts: str, *, by: str, is_dry: bool = False) -> RemovedNote:
    """Remove files of a pipeline in a folder where nothing runs; returns the note that the log has of it.

    `is_dry`: nothing is removed. Raises UserError for what cannot be removed, and for a folder in use.
    """
    check_run(folder)
    _check_parts(parts)
    with FolderLock.take(folder) as lock, RunLog.open(folder, lock=lock) as log:
        state = log.state
        finish(folder, state)
        if name not in state.ended or name not in state.plans:
            if name in state.plans:
                raise UserError(
                    f"pipeline {name!r} is stopped, and goes on with rlmux resume {folder}; accepted: one that has "
                    "ended; to end it: rlmux cancel, once it goes on"
                )
            is_known = name in state.ended or name in state.waits
            raise UserError(_unknown(name, [*state.plans], state, is_known=is_known))
        _check_not_removed(name, parts, set(state.removals.get(name, ())))
        with_models = parts != SAMPLES and not state.ended.keys() >= state.plans.keys()
        _check_unused(folder, name, parts, _models_of(folder, state) if with_models else ())
        note = _note(folder, name, parts, by=by)
        if not is_dry:
            log.append_note(log.last_time_s, note)
            log.commit()
            if aside := _move_aside(folder, name, parts):
                _delete(aside)
    return note


def remove_run(folder: Path, *, is_dry: bool = False) -> int:
    """Remove the folder of a run that nothing runs in; returns the bytes that are freed.

    `is_dry`: nothing is removed. Raises UserError for another folder, and for one in use.
    """
    check_run(folder, may_be_damaged=True)
    with FolderLock.take(folder):
        freed_bytes = size_of([folder])
        if is_dry:
            return freed_bytes
        aside = folder.absolute().parent / f"{ASIDE}-{folder.absolute().name}"
        try:
            folder.rename(aside)
        except OSError as error:
            raise UserError(f"{folder}: cannot be removed: {error.strerror}; accepted: a folder of your own") from None
        for name in aside.glob("run.db*"):  # from now on it is no run
            name.unlink(missing_ok=True)
        shutil.rmtree(aside, ignore_errors=True)
    return freed_bytes


def finish(folder: Path, state: RunState) -> None:
    """Delete what an earlier part of the run was killed in the middle of removing."""
    for name, removals in state.removals.items():
        for parts in removals:
            _move_aside(folder, name, parts)
    shutil.rmtree(folder / ASIDE, ignore_errors=True)


def files_of(folder: Path, name: str, parts: str) -> list[Path]:
    """What there is of a pipeline's parts."""
    own = folder / name
    if parts == ALL:
        return [own] if own.is_dir() else []
    return sorted(path for pattern in _PATTERNS[parts] for path in own.glob(pattern))


def size_of(paths: Iterable[Path]) -> int:
    """Bytes of these files, and of those in these folders."""
    total = 0
    for path in paths:
        for file in path.rglob("*") if path.is_dir() and not path.is_symlink() else (path,):
            with contextlib.suppress(FileNotFoundError):  # pruned meanwhile
                total += file.lstat().st_size if file.is_symlink() or not file.is_dir() else 0
    return total


def _check_parts(parts: str) -> None:
    if parts not in PARTS:
        raise UserError(f"{parts!r} is no part of a pipeline; accepted: {', '.join(PARTS)}")


def _unknown(name: str, known: Sequence[str], state: RunState, is_known: bool) -> str:
    if is_known:
        return f"pipeline {name!r} is another program's; accepted: one whose steps rlmux trains"
    close = get_close_matches(name, known, n=1)
    nearest = f"; nearest: {close[0]}" if close else ""
    ended = [each for each in state.ended if ALL not in state.removals.get(each, ())][:_MAX_NAMES]
    accepted = ", ".join(ended) or "none is left"
    return f"no pipeline {name!r}{nearest}; accepted: one that has ended: {accepted}"


def _check_not_removed(name: str, parts: str, removed: set[str]) -> None:
    """Raises UserError where there is nothing left of these parts."""
    if parts in removed or ALL in removed:
        what = f"pipeline {name!r} is" if ALL in removed else f"the {parts} of pipeline {name!r} are"
        raise UserError(f"{what} removed already; accepted: one that is not")


def _check_unused(folder: Path, name: str, parts: str, models: Iterable[tuple[str, str]]) -> None:
    """Raises UserError for checkpoints that a pipeline starts from that is not over, or that are served."""
    if parts == SAMPLES:
        return
    user = _user_of(folder, name, models)
    if user is not None:
        raise UserError(f"a checkpoint of {name!r} is in use: {user}; accepted: --only samples, or once that has ended")


def _user_of(folder: Path, name: str, models: Iterable[tuple[str, str]]) -> str | None:
    """What starts from a checkpoint of the pipeline, in words."""
    own = (folder / name).absolute()
    for user, path in models:
        if user != name and Path(path).absolute().is_relative_to(own):
            return f"pipeline {user!r} starts from {path}"
    served = folder / SERVED
    if served.is_file() and f"{own}/" in served.read_text(encoding="utf-8"):
        return "the lane serves it"
    return None


def _models_of(folder: Path, state: RunState) -> Iterable[tuple[str, str]]:
    """(pipeline, folder of its model) of those of a stopped run that would go on."""
    with LogReader(folder) as log:
        spec = log.header.get("spec") or {}
    texts = [str(spec.get("resolved", "")), *(each.resolved for each in state.submitted)]
    for text in texts:
        for name, values in values_of_pipelines(text).items():
            if name not in state.ended and values.get("model.path"):
                yield name, str(values["model.path"])


def _note(folder: Path, name: str, parts: str, *, by: str | None) -> RemovedNote:
    """`by`: None: the rule says so."""
    freed_bytes = size_of(files_of(folder, name, parts))
    return RemovedNote(pipeline=PipelineId(name), parts=parts, by=by or "", by_rule=by is None, freed_bytes=freed_bytes)


def _move_aside(folder: Path, name: str, parts: str) -> Path | None:
    """The folder that the files are in now; None where there are none."""
    files = files_of(folder, name, parts)
    if not files:
        return None
    (folder / ASIDE).mkdir(mode=0o700, exist_ok=True)
    aside = Path(tempfile.mkdtemp(dir=folder / ASIDE))
    for path in files:
        path.rename(aside / path.name)
    return aside


def _delete(aside: Path) -> None:
    """What cannot be deleted is left to the next start."""
    shutil.rmtree(aside, ignore_errors=True)
    with contextlib.suppress(OSError):  # others are in it
        aside.parent.rmdir()
