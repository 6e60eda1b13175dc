"""What faults cost, and what being ready for them costs.

    python benchmarks/reliability.py recovery    from a kill to its detection and to training again; tokens done twice
    python benchmarks/reliability.py overhead    checkpoints and log, against the same run without them
    python benchmarks/reliability.py soak        pipelines come and go; processes, files, memory, log

Each prints a table. Times are medians, and noisy where the machine has other work.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil

from rlmux.core.actions import Admit, Release, RunStage
from rlmux.core.errors import LogError
from rlmux.core.events import ChunkFinished, StageFinished, StagePaused
from rlmux.core.model import Cluster, Phase, Pipeline, PipelineId, Pool, Stage
from rlmux.core.scheduler import Scheduler
from rlmux.log.notes import CheckpointNote
from rlmux.log.run_log import LogReader, RunLog, run_header
from rlmux.policies import make_policy
from rlmux.rl.config import AlgorithmConfig, ModelConfig, RolloutConfig, SftWarmupConfig, TaskConfig, TrainingConfig
from rlmux.runtime.backend import Submission, WorkerOptions
from rlmux.runtime.controller import Controller
from rlmux.runtime.local import local_backend
from rlmux.runtime.run import RunOptions, resume_pipelines, run_pipelines
from rlmux.runtime.workers.processes import fork_server_pid

CLUSTER = Cluster(
    pools={
        "rollout": Pool(name="rollout", phase=Phase.ROLLOUT, num_nodes=1),
        "train": Pool(name="train", phase=Phase.TRAIN, num_nodes=1),
    }
)
STAGES = (Stage.GENERATE, Stage.REWARD, Stage.OLD_LOGPROBS, Stage.UPDATE, Stage.PUBLISH)
NEVER = 1_000_000


SIZES: dict[str, tuple[ModelConfig, dict[str, Any], dict[str, Any]]] = {
    "demo": (ModelConfig(), {"prompts_per_step": 32, "group_size": 8}, {"max_new_tokens": 24, "num_slots": 4}),
    "short": (ModelConfig(), {"prompts_per_step": 16, "group_size": 8}, {"max_new_tokens": 16, "num_slots": 64}),
    "tiny": (
        ModelConfig(hidden_size=32, num_heads=2, num_kv_heads=1, intermediate_size=64),
        {"prompts_per_step": 4, "group_size": 4, "micro_batch_size": 4},
        {"max_new_tokens": 16, "num_slots": 8},
    ),
}
"""Steps of the demo's size; the same model with steps as short as they get; as little as can be."""


def submission(name: str, seed: int, num_steps: int, size: str) -> Submission:
    model, algorithm, rollout = SIZES[size]
    plan = TrainingConfig(
        name=name,
        seed=seed,
        num_steps=num_steps,
        model=model,
        task=TaskConfig(name="sort"),
        sft_warmup=SftWarmupConfig(num_updates=4, batch_size=16),
        algorithm=AlgorithmConfig(**algorithm),
        rollout=RolloutConfig(**rollout),
    )
    pipeline = Pipeline(id=PipelineId(name), num_steps=num_steps, stages=STAGES, has_sft_warmup=True)
    return Submission(pipeline=pipeline, config=plan)


FINE = WorkerOptions(chunk_s=0.05, chunk_decode_steps=4)
"""Progress is told of often, so that little of what was lost goes unseen."""
KINDS = ("rollout", "train", "env", "controller", "everything")


def one_pipeline(num_steps: int) -> list[Submission]:
    return [submission("one", 1, num_steps, "short")]


def recovery(num_steps: int, kills: int) -> list[list[str]]:
    rows = [["killed", "times", "detected after", "training again after", "sampled again", "trained again"]]
    for kind in KINDS:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name) / "run"
            killer = Killer(kind, random.Random(1), every=max(2, num_steps // (kills + 1)), most=kills)
            if kind in ("controller", "everything"):
                _run_and_resume(folder, num_steps, killer)
            else:
                options = RunOptions(workers=FINE, listeners=[killer])
                run_pipelines(CLUSTER, one_pipeline(num_steps), make_policy("rollmux"), folder, options, spec={})
            sampled, trained, per_step = _redone(folder)
        times = len(killer.again_s)
        detected = f"{statistics.median(killer.detected_s) * 1e3:.0f} ms" if killer.detected_s else "by whoever resumes"
        lost = [f"{tokens / times:,.0f} ({tokens / times / per_step:.2f} steps)" for tokens in (sampled, trained)]
        rows.append([kind, str(times), detected, f"{statistics.median(killer.again_s):.2f} s", *lost])
    return rows


class Killer:
    """Kills a worker of its kind at random moments, some steps apart, and writes down when what was seen."""

    def __init__(self, kind: str, rng: random.Random, *, every: int, most: int) -> None:
        self.kind, self.rng, self.every, self.left = kind, rng, every, most
        self.pid_by_role: dict[str, int] = {}
        self.next_step = every
        self.work_by_order: dict[int, RunStage] = {}
        self.killed_s: float | None = None
        self.detected_s: list[float] = []
        self.again_s: list[float] = []

    def update(self, now_s: float, events: Sequence[Any], actions: Sequence[Any], notes: Sequence[Any]) -> None:
        for note in notes:
            if note.type == "worker":
                self.pid_by_role[note.role.partition("-")[0]] = note.pid
            elif note.type == "loss" and self.killed_s is not None:
                self.detected_s.append(time.monotonic() - self.killed_s)
        under_way = [work for event in events if (work := self.work_by_order.get(getattr(event, "order", 0)))]
        if self.killed_s is not None:
            ended = [event.order for event in events if isinstance(event, StageFinished)]
            if any(order in ended and work.stage is Stage.UPDATE for order, work in self.work_by_order.items()):
                self.again_s.append(time.monotonic() - self.killed_s)
                self.killed_s = None
        for action in actions:
            if isinstance(action, RunStage):
                self.work_by_order[action.order] = action
                under_way.append(action)
        for work in under_way:
            if self.is_due(work.step):
                self.next_step = work.step + self.every
                self.work_by_order.clear()
                self.killed_s = time.monotonic()
                os.kill(self.pid_by_role[self.kind], signal.SIGKILL)

    def is_due(self, step: int) -> bool:
        """Asked many times a step."""
        if self.killed_s is None and self.left and step >= self.next_step and self.rng.random() < 0.1:
            self.left -= 1
            return True
        return False


def _run_and_resume(folder: Path, num_steps: int, killer: Killer) -> None:
    """In a process of its own, killed and resumed as its log says that the steps come."""
    begin = [sys.executable, __file__, "child", "--steps", str(num_steps), "--folder", str(folder)]
    process = subprocess.Popen([*begin, "--new"])
    followed = Followed(folder)
    while process.poll() is None:
        time.sleep(0.01)
        followed.read()
        if killer.killed_s is not None and followed.num_updates > 0:
            killer.again_s.append(time.monotonic() - killer.killed_s)
            killer.killed_s = None
        if followed.step and killer.is_due(followed.step + 1):
            killer.next_step = followed.step + killer.every
            family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
            for member in family if killer.kind == "everything" else family[:1]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    member.kill()
            process.wait()
            killer.killed_s = time.monotonic()
            followed.read()
            followed.num_updates = 0
            process = subprocess.Popen(begin)
    assert process.returncode == 0


class Followed:
    """A log, as it is written by somebody else."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.seq, self.step, self.num_updates = folder, 0, 0, 0
        self.updates: set[int] = set()

    def read(self) -> None:
        with contextlib.suppress(LogError), LogReader(self.folder) as log:
            for entry in log.entries(after=self.seq):
                self.seq = entry.seq
                if entry.type == "resumed":
                    self.updates.clear()
                elif isinstance(entry.value, RunStage) and entry.value.stage is Stage.UPDATE:
                    self.updates.add(entry.value.order)
                elif isinstance(entry.value, StageFinished) and entry.value.order in self.updates:
                    self.num_updates += 1
                elif entry.type == "step" and isinstance(entry.value, dict):
                    self.step = entry.value["step"]


def _redone(folder: Path) -> tuple[float, float, float]:
    """(tokens sampled, tokens trained) more than once, and the tokens of one step. By the log."""
    part = 0
    work: dict[tuple[int, int], RunStage] = {}
    done: dict[tuple[int, int], int] = {}
    needed: dict[int, float] = {}
    with LogReader(folder) as log:
        for entry in log.entries():
            match entry.value:
                case RunStage() as order:
                    work[part, order.order] = order
                case StageFinished() | ChunkFinished() | StagePaused() as event:
                    done[part, event.order] = max(done.get((part, event.order), 0), event.tokens)
                case {"step": step, "metrics": metrics}:
                    needed[step] = metrics["tokens"]
            part += entry.type == "resumed"
    per_step = sum(needed.values()) / len(needed)
    sampled = sum(tokens for key, tokens in done.items() if work[key].stage is Stage.GENERATE)
    trained: dict[int, list[int]] = {}
    for key, tokens in done.items():
        if work[key].stage is Stage.UPDATE:
            trained.setdefault(work[key].step, []).append(tokens)
    return sampled - sum(needed.values()), sum(sum(each) - max(each) for each in trained.values()), per_step


def overhead(num_steps: int, rounds: int, size: str) -> list[list[str]]:
    """The same pair with and without checkpoints and log, in turns.

    The work is the same, step by step: of each step the fastest of the rounds counts, as other work on the machine
    slows single ones.
    """
    made: dict[str, list[dict[str, Any]]] = {"neither": [], "both": []}
    for number in range(rounds):
        for kind in list(made)[:: 1 if number % 2 == 0 else -1]:
            options = WorkerOptions(checkpoint_every=1 if kind == "both" else NEVER)
            with tempfile.TemporaryDirectory() as folder:
                made[kind].append(_timed_run(Path(folder), num_steps, size, options, has_log=kind == "both"))
    rows = [["a pipeline's step", "seconds, fastest of the rounds", "seconds, median", "CPU seconds, least"]]
    for kind, runs in made.items():
        fastest = [min(each) for each in zip(*(run["gaps_s"] for run in runs), strict=True)]
        median_s = statistics.median(gap for run in runs for gap in run["gaps_s"])
        cpu_s = min(run["cpu_s"] for run in runs)
        row = [f"with {kind}", *(f"{value * 1e3:.1f} ms" for value in (statistics.mean(fastest), median_s, cpu_s))]
        rows.append(row)
    written = [each for run in made["both"] for each in run["checkpoints"]]
    stalls, beside = ([getattr(each, name) for each in written] for name in ("stall_s", "seconds"))
    rows += [
        ["checkpoint: training waits", f"{statistics.median(stalls) * 1e3:.1f} ms", "", ""],
        ["checkpoint: written beside what follows", f"{statistics.median(beside) * 1e3:.1f} ms", "", ""],
        ["log", f"{made['both'][-1]['log_bytes'] / (2 * num_steps):,.0f} bytes", "", ""],
    ]
    return rows


def _timed_run(folder: Path, num_steps: int, size: str, options: WorkerOptions, *, has_log: bool) -> dict[str, Any]:
    pair = [submission("a", 1, num_steps, size), submission("b", 2, num_steps, size)]
    policy = make_policy("rollmux")
    header = run_header(policy="rollmux", backend="local", cluster=CLUSTER)
    log = RunLog.create(folder / "log", header) if has_log else None
    backend = local_backend(CLUSTER, folder, options=options)
    ends: list[float] = []
    checkpoints: list[CheckpointNote] = []
    cpu_s: dict[int, float] = {}
    begun, enough = 4, 2 * num_steps - 2  # steps of both: before, workers warm up; after, some are gone

    class Clock:
        def update(self, now_s: float, events: Any, actions: Any, notes: Any) -> None:
            ends.extend(now_s for note in notes if note.type == "step")
            if len(ends) in (begun, enough):
                cpu_s.setdefault(len(ends), _cpu_s())
            checkpoints.extend(note for note in notes if isinstance(note, CheckpointNote))

    try:
        Controller(Scheduler(CLUSTER, policy), backend, log, [Clock()]).run(pair)
    finally:
        backend.close()
    if log is not None:
        log.close()
    log_bytes = (folder / "log" / "run.db").stat().st_size if has_log else 0
    return {
        "gaps_s": [after - before for before, after in pairwise(ends[begun:enough])],
        "cpu_s": (cpu_s[enough] - cpu_s[begun]) / (enough - begun),
        "checkpoints": checkpoints,
        "log_bytes": log_bytes,
    }


def _cpu_s() -> float:
    """Of this process and all that it has started and that lives."""
    me = psutil.Process()
    times = [each.cpu_times() for each in (me, *me.children(recursive=True))]
    return sum(each.user + each.system for each in times)


def soak(num_pipelines: int, num_steps: int, every_s: float, rows_wanted: int = 12) -> list[list[str]]:
    rows = [
        ["after", "steps", "pipelines over", "alive", "files", "processes", "zombies", "threads", "resident",
         "fork server: files, resident", "shared memory", "log", "its tail"]
    ]  # fmt: skip
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "run"
        gauge = Gauge(folder, rows, num_pipelines // rows_wanted)
        submissions = [
            replace(submission(f"p{number}", number, num_steps, "tiny"), submit_at_s=every_s * number)
            for number in range(num_pipelines)
        ]
        options = RunOptions(listeners=[gauge])
        result = run_pipelines(CLUSTER, submissions, make_policy("rollmux"), folder, options, spec={})
        statuses = {one["status"] for one in result.summary["pipelines"].values()}
        assert statuses == {"finished"}, statuses
        gc.collect()
        log_bytes = (folder / "run.db").stat().st_size
    me = psutil.Process()
    children = ", ".join(child.name() for child in me.children(recursive=True))
    print(f"{gauge.num_steps} steps; log {log_bytes / gauge.num_steps:,.0f} bytes per step; in the end: "
          f"{me.num_fds()} files, {me.num_threads()} threads, children: {children}\n")  # fmt: skip
    return rows


class Gauge:
    """Reads this process, the fork server and the folders each time that so many pipelines are over."""

    def __init__(self, folder: Path, rows: list[list[str]], every: int) -> None:
        self.folder, self.rows, self.every = folder, rows, max(1, every)
        self.num_over = self.num_begun = self.num_steps = 0

    def update(self, now_s: float, events: Sequence[Any], actions: Sequence[Any], notes: Sequence[Any]) -> None:
        before = self.num_over // self.every
        self.num_over += sum(isinstance(action, Release) for action in actions)
        self.num_begun += sum(isinstance(action, Admit) for action in actions)
        self.num_steps += sum(note.type == "step" for note in notes)
        if self.num_over // self.every != before:
            self.rows.append(self._row(now_s))

    def _row(self, now_s: float) -> list[str]:
        gc.collect()
        me = psutil.Process()
        family = me.children(recursive=True)
        server = psutil.Process(fork_server_pid())
        shared = sum(path.stat().st_size for path in Path("/dev/shm").glob(f"rlmux-{os.getuid()}-*/*/*"))
        return [
            f"{now_s:.0f} s", str(self.num_steps), str(self.num_over), str(self.num_begun - self.num_over),
            str(me.num_fds()), str(len(family)),
            str(sum(child.status() == psutil.STATUS_ZOMBIE for child in family)),
            str(me.num_threads()), f"{me.memory_info().rss / 1e6:.0f} MB",
            f"{server.num_fds()}, {server.memory_info().rss / 1e6:.0f} MB", f"{shared / 1e6:.1f} MB",
            *(f"{(self.folder / name).stat().st_size / 1e6:.1f} MB" for name in ("run.db", "run.db-wal")),
        ]  # fmt: skip


def show(rows: list[list[str]]) -> None:
    for number, row in enumerate(rows):
        print("| " + " | ".join(row) + " |")
        if number == 0:
            print("|" + "---|" * len(row))


def child(folder: Path, num_steps: int, *, is_new: bool) -> None:
    """What `recovery` kills."""
    given, policy = one_pipeline(num_steps), make_policy("rollmux")
    if is_new:
        run_pipelines(CLUSTER, given, policy, folder, RunOptions(workers=FINE), spec={})
    else:
        resume_pipelines(CLUSTER, given, policy, folder, RunOptions(workers=FINE))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["recovery", "overhead", "soak", "child"])
    parser.add_argument("--steps", type=int, default=None)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--size", choices=list(SIZES), default="demo", help="of the steps (overhead)")
    parser.add_argument("--kills", type=int, default=6, help="of each kind (recovery)")
    parser.add_argument("--pipelines", type=int, default=100, help="that come and go (soak)")
    parser.add_argument("--every", type=float, default=2.0, help="seconds between two of them (soak)")
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--new", action="store_true", help=argparse.SUPPRESS)
    words = parser.parse_args()
    if words.what == "child":
        child(words.folder, words.steps, is_new=words.new)
        return
    tables: dict[str, Callable[[], list[list[str]]]] = {
        "recovery": lambda: recovery(words.steps or 40, words.kills),
        "overhead": lambda: overhead(words.steps or 40, words.rounds, words.size),
        "soak": lambda: soak(words.pipelines, words.steps or 24, words.every),
    }
    show(tables[words.what]())


if __name__ == "__main__":
    main()
