"""Kills parts of a run at random moments and compares the weights with an undisturbed run.

    undisturbed    run ───────────────────────────────▶ weights
    rounds         run ──✗worker──✗env worker──✗controller    (as many as it takes for all kills)
                         resume ──✗everything
                         resume ──────────────────────▶ the same weights, bit for bit

The run is a process of its own, so that its controller can be killed too. Its workers are read from its log while the
log is written. Kinds and moments come from a seed. Every kill is SIGKILL: no process gets to clean up.
"""

from __future__ import annotations

import contextlib
import random
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from rlmux.core.errors import LogError, RlmuxError, UserError
from rlmux.log.notes import StepNote, WorkerNote
from rlmux.log.run_log import LogReader
from rlmux.report.reports import load_summary

ROLLOUT, TRAIN, ENV, CONTROLLER, EVERYTHING = KINDS = ("rollout", "train", "env", "controller", "everything")
"""What a kill takes: one worker of a pipeline, the controller, or everything."""
_KILLS_OF_TWENTY = {ROLLOUT: 6, TRAIN: 5, ENV: 5, CONTROLLER: 2, EVERYTHING: 2}
"""Number of kills of each kind among twenty."""
_MAX_PER_STEP = 2
"""Most kills of one worker between two steps of its pipeline; more deaths would fail the pipeline."""
_POLL_EVERY_S = 0.02
_ORPHAN_GRACE_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Commands:
    """Command lines that run the file into a folder, and that resume a folder."""

    run: Callable[[Path], Sequence[str]]
    resume: Callable[[Path], Sequence[str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill:
    """A kill that was made."""

    kind: str
    victim: str
    time_s: float
    """Seconds since the start of its round."""


@dataclass(slots=True, kw_only=True)
class ChaosResult:
    """What the kills did to the weights."""

    undisturbed: Mapping[str, str | None]
    """`weights_sha256` by pipeline, of the run without kills; None: the pipeline has no weights."""
    rounds: list[Mapping[str, str | None]] = field(default_factory=list)
    """`weights_sha256` by pipeline, of each round."""
    kills: list[Kill] = field(default_factory=list)
    orphans: list[str] = field(default_factory=list)
    """Processes that outlived their controller."""

    @property
    def is_equal(self) -> bool:
        """Whether all pipelines of all rounds have weights, equal to the undisturbed run's."""
        return None not in self.undisturbed.values() and all(each == self.undisturbed for each in self.rounds)


def planned_kills(num_kills: int, rng: random.Random) -> list[str]:
    """Kinds in random order; each kind occurs where there are enough kills."""
    kinds = [kind for kind, num in _KILLS_OF_TWENTY.items() for _ in range(max(1, round(num * num_kills / 20)))]
    rng.shuffle(kinds)
    while len(kinds) < num_kills:
        kinds.append(rng.choice(KINDS[:3]))
    return kinds[:num_kills]


def run_chaos(
    commands: Commands,
    folder: Path,
    *,
    num_kills: int,
    seed: int,
    print_line: Callable[[str], None] = lambda _: None,
) -> ChaosResult:
    """Run undisturbed, then with kills, in subfolders of `folder`.

    Raises UserError for a folder that is not empty, RlmuxError when a run fails.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"--out {folder}: not empty; accepted: a folder that does not exist or is empty")
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    rng = random.Random(seed)
    undisturbed = folder / "undisturbed"
    print_line("undisturbed")
    with _Round(commands, undisturbed) as quiet:
        quiet.wait()
    result = ChaosResult(undisturbed=_weights(undisturbed))
    mean_s = max(0.2, load_summary(undisturbed)["makespan_s"] / max(1, num_kills))
    kinds = planned_kills(num_kills, rng)
    while kinds:
        name = f"round_{len(result.rounds) + 1}"
        with _Round(commands, folder / name) as disturbed:
            while kinds and disturbed.strike(kinds[0], rng, rng.uniform(0.0, 2.0 * mean_s)):
                kinds.pop(0)
                kill = disturbed.kills[-1]
                print_line(f"{name} {kill.time_s:6.1f} s  {kill.kind}: {kill.victim}")
            disturbed.wait()
        if not disturbed.kills:  # faster than the undisturbed run
            mean_s /= 2
        result.kills += disturbed.kills
        result.orphans += disturbed.orphans
        result.rounds.append(_weights(folder / name))
    return result


def _weights(folder: Path) -> dict[str, str | None]:
    return {name: fields["weights_sha256"] for name, fields in load_summary(folder)["pipelines"].items()}


class _Round:
    """One run, resumed until it is over."""

    def __init__(self, commands: Commands, folder: Path) -> None:
        self._commands = commands
        self._folder = folder
        self._output = folder.with_name(f"{folder.name}.log")
        self._started_s = time.monotonic()
        self._follower = _Follower(folder)
        self._process = self._start(commands.run(folder))
        self.kills: list[Kill] = []
        self.orphans: list[str] = []

    def __enter__(self) -> _Round:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.poll() is None:
            self._kill_all(_family(self._process.pid))
            self._process.wait()

    def wait(self) -> None:
        """Wait until the run is over. Raises RlmuxError if it did not end well."""
        if self._process.wait() != 0:
            lines = self._output.read_text(errors="replace").strip().splitlines()
            last = lines[-1] if lines else "no output"
            raise RlmuxError(f"{self._folder}: exit code {self._process.returncode}: {last} (see {self._output})")

    def strike(self, kind: str, rng: random.Random, after_s: float) -> bool:
        """Make one kill after `after_s`, as soon as there is a victim. False if the run was over before."""
        due_s = time.monotonic() + after_s
        while self._process.poll() is None:
            time.sleep(_POLL_EVERY_S)
            self._follower.read()
            if time.monotonic() >= due_s and self._follower.has_begun and self._try(kind, rng):
                return True
        return False

    def _try(self, kind: str, rng: random.Random) -> bool:
        if kind in (CONTROLLER, EVERYTHING):
            family = _family(self._process.pid)
            self._kill_all(family if kind == EVERYTHING else family[:1])
            self._process.wait()
            self._record(kind, f"{len(family)} processes" if kind == EVERYTHING else f"pid {family[0].pid}")
            self._await_orphans(family)
            self._process = self._start(self._commands.resume(self._folder))
            return True
        pids = {process.pid: process for process in _family(self._process.pid)}
        victims = [worker for worker in self._follower.victims(kind) if worker[2] in pids]
        if not victims:
            return False
        pipeline, role, pid = rng.choice(victims)
        self._kill_all([pids[pid]])
        self._follower.count_kill(pipeline, role)
        self._record(kind, f"{pipeline}/{role}, pid {pid}")
        return True

    def _record(self, kind: str, victim: str) -> None:
        self.kills.append(Kill(kind=kind, victim=victim, time_s=time.monotonic() - self._started_s))

    def _await_orphans(self, family: Sequence[psutil.Process]) -> None:
        _, alive = psutil.wait_procs(list(family), timeout=_ORPHAN_GRACE_S)
        self.orphans += [f"pid {process.pid}" for process in alive]
        self._kill_all(alive)

    @staticmethod
    def _kill_all(processes: Sequence[psutil.Process]) -> None:
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGKILL)

    def _start(self, words: Sequence[str]) -> subprocess.Popen[bytes]:
        self._output.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with self._output.open("ab") as output:
            return subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=output, stderr=output)


def _family(pid: int) -> list[psutil.Process]:
    """The controller and all that descends from it: the fork server and its workers."""
    try:
        controller = psutil.Process(pid)
        return [controller, *controller.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


class _Follower:
    """Reads a run's log while it is written: its workers, and the kills of each since its pipeline's last step."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._last_seq = 0
        self._pid_by_worker: dict[tuple[str, str], int] = {}
        self._num_kills: dict[tuple[str, str], int] = {}

    @property
    def has_begun(self) -> bool:
        """The run is in its log, so that it can be resumed."""
        return self._last_seq > 0

    def read(self) -> None:
        for entry in self._new_entries():
            self._last_seq = entry.seq
            match entry.note:
                case WorkerNote(pid=int(pid)) as worker:
                    self._pid_by_worker[worker.pipeline, worker.role] = pid
                case StepNote(pipeline=name):
                    self._num_kills = {each: num for each, num in self._num_kills.items() if each[0] != name}

    def _new_entries(self) -> Iterator[Any]:
        with contextlib.suppress(LogError), LogReader(self._folder) as reader:
            yield from reader.entries(after=self._last_seq)

    def victims(self, kind: str) -> list[tuple[str, str, int]]:
        """(pipeline, role, pid) of workers of this kind that may be killed now."""
        return [
            (pipeline, role, pid)
            for (pipeline, role), pid in self._pid_by_worker.items()
            if role.partition("-")[0] == kind and self._num_kills.get((pipeline, role), 0) < _MAX_PER_STEP
        ]

    def count_kill(self, pipeline: str, role: str) -> None:
        """Count the kill of a worker's process, for all workers that share it."""
        killed = self._pid_by_worker[pipeline, role]
        for worker in [worker for worker, pid in self._pid_by_worker.items() if pid == killed]:
            self._num_kills[worker] = self._num_kills.get(worker, 0) + 1
