"""What faults cost, and what being ready for them costs.

    python benchmarks/reliability.py recovery    seconds from a kill to its detection, and to training again
    python benchmarks/reliability.py overhead    checkpoints and log, against the same run without them
    python benchmarks/reliability.py soak        pipelines come and go; processes, files, memory, log

Each prints a table. Times are medians, and noisy where the machine has other work.
"""

from __future__ import annotations

import argparse
import gc
import os
import signal
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil

from rlmux.core.actions import Release, RunStage
from rlmux.core.events import StageFinished
from rlmux.core.model import Cluster, Phase, Pipeline, PipelineId, Pool, Stage
from rlmux.core.policies import POLICIES
from rlmux.core.scheduler import Scheduler
from rlmux.report.log import RunLog, run_header
from rlmux.rl.config import AlgorithmConfig, ModelConfig, RolloutConfig, TaskConfig, TrainingPlan, WarmStartConfig
from rlmux.runtime.backend import Submission
from rlmux.runtime.controller import Controller
from rlmux.runtime.local import local_backend
from rlmux.runtime.run import run_pipelines
from rlmux.runtime.worker_backend import WorkerOptions

CLUSTER = Cluster(
    pools={
        "rollout": Pool(name="rollout", phase=Phase.ROLLOUT, num_nodes=1),
        "train": Pool(name="train", phase=Phase.TRAIN, num_nodes=1),
    }
)
STAGES = (Stage.GENERATE, Stage.REWARD, Stage.OLD_LOGPROBS, Stage.UPDATE, Stage.PUBLISH)
NEVER = 1_000_000


def submission(name: str, seed: int, num_steps: int, *, is_tiny: bool = False) -> Submission:
    """The demo's sizes, or as small as can be."""
    model = ModelConfig(hidden_size=32, num_heads=2, num_kv_heads=1, intermediate_size=64) if is_tiny else ModelConfig()
    algorithm = AlgorithmConfig(
        prompts_per_step=4 if is_tiny else 16, group_size=4 if is_tiny else 8, micro_batch_size=4 if is_tiny else 32
    )
    plan = TrainingPlan(
        name=name,
        seed=seed,
        num_steps=num_steps,
        model=model,
        task=TaskConfig(name="sort"),
        warm_start=WarmStartConfig(num_updates=4, batch_size=16),
        algorithm=algorithm,
        rollout=RolloutConfig(max_new_tokens=16, num_slots=8 if is_tiny else 64),
    )
    pipeline = Pipeline(id=PipelineId(name), num_steps=num_steps, stages=STAGES, has_warm_start=True)
    return Submission(pipeline=pipeline, plan=plan)


class Watcher:
    """Kills workers of a kind every few steps, and writes down when what happened was seen."""

    def __init__(self, kind: str, every: int) -> None:
        self.kind, self.every = kind, every
        self.pids: dict[str, int] = {}
        self.killed_s: float | None = None
        self.detected_s: list[float] = []
        self.recovered_s: list[float] = []
        self.lost_tokens: list[int] = []
        self.next_step = every
        self.orders: dict[int, RunStage] = {}
        self.tokens = 0

    def update(self, now_s: float, events: Sequence[Any], actions: Sequence[Any], notes: Sequence[Any]) -> None:
        for note in notes:
            if note.type == "worker":
                self.pids[note.fields["role"].partition("-")[0]] = note.fields["pid"]
            elif note.type == "loss" and self.killed_s is not None:
                self.detected_s.append(time.monotonic() - self.killed_s)
        for event in events:
            if isinstance(event, StageFinished) and self.killed_s is not None:
                action = self.orders.get(event.order)
                if action is not None and action.stage in (Stage.UPDATE, Stage.OLD_LOGPROBS):
                    self.recovered_s.append(time.monotonic() - self.killed_s)
                    self.killed_s = None
        for action in actions:
            if not isinstance(action, RunStage):
                continue
            self.orders[action.order] = action
            stage = Stage.UPDATE if self.kind == "train" else Stage.GENERATE
            if self.killed_s is None and action.stage is stage and action.step >= self.next_step:
                self.next_step = action.step + self.every
                os.kill(self.pids[self.kind], signal.SIGKILL)
                self.orders.clear()
                self.killed_s = time.monotonic()


def recovery(num_steps: int) -> list[list[str]]:
    rows = [["killed", "times", "detected after", "training again after", "work lost"]]
    lost = {"rollout": "one rollout at most", "train": "one step at most", "host": "one step at most"}
    for kind in ("rollout", "train", "host"):
        watcher = Watcher(kind, every=4)
        with tempfile.TemporaryDirectory() as folder:
            run_pipelines(
                CLUSTER, [submission("one", 1, num_steps)], POLICIES["rollmux"](), Path(folder) / "run",
                spec={}, listeners=[watcher],
            )  # fmt: skip
        rows.append(
            [
                kind,
                str(len(watcher.recovered_s)),
                f"{statistics.median(watcher.detected_s) * 1e3:.0f} ms",
                f"{statistics.median(watcher.recovered_s):.2f} s",
                lost[kind],
            ]
        )
    return rows


def overhead(num_steps: int, rounds: int) -> list[list[str]]:
    """The same pair with and without checkpoints and log, in turns: ratios within each round, their medians."""
    kinds = {"neither": (False, False), "the log": (True, False), "checkpoints": (False, True), "both": (True, True)}
    seconds: dict[str, list[float]] = {kind: [] for kind in kinds}
    written: list[Mapping[str, float]] = []
    log_bytes = 0
    for number in range(rounds):
        order = list(kinds.items())[:: 1 if number % 2 == 0 else -1]
        for kind, (has_log, has_checkpoints) in order:
            options = WorkerOptions(checkpoint_every=1 if has_checkpoints else NEVER)
            with tempfile.TemporaryDirectory() as folder:
                made = _timed_run(Path(folder), num_steps, options, has_log=has_log)
            seconds[kind].append(made["step_s"])
            if kind == "both":
                written += made["checkpoints"]
                log_bytes = made["log_bytes"]
    rows = [["a pipeline's step", "median", "over neither, median of the rounds"]]
    for kind in kinds:
        ratios = [mine / bare - 1 for mine, bare in zip(seconds[kind], seconds["neither"], strict=True)]
        median_ms = statistics.median(seconds[kind]) * 1e3
        rows.append([f"with {kind}", f"{median_ms:.1f} ms", f"{statistics.median(ratios):+.1%}"])
    stalls, beside = ([each[name] for each in written] for name in ("stall_s", "seconds"))
    rows += [
        ["checkpoint: training waits", f"{statistics.median(stalls) * 1e3:.1f} ms", ""],
        ["checkpoint: written beside the next rollout", f"{statistics.median(beside) * 1e3:.1f} ms", ""],
        ["log", f"{log_bytes / (2 * num_steps):,.0f} bytes", ""],
    ]
    return rows


def _timed_run(folder: Path, num_steps: int, options: WorkerOptions, *, has_log: bool) -> dict[str, Any]:
    pair = [submission("a", 1, num_steps), submission("b", 2, num_steps)]
    policy = POLICIES["rollmux"]()
    header = run_header(policy="rollmux", backend="local", cluster=CLUSTER)
    log = RunLog.create(folder / "log", header) if has_log else None
    backend = local_backend(CLUSTER, folder, options=options)
    ends: list[float] = []
    checkpoints: list[Mapping[str, float]] = []

    class Clock:
        def update(self, now_s: float, events: Any, actions: Any, notes: Any) -> None:
            ends.extend(now_s for note in notes if note.type == "step")
            checkpoints.extend(note.fields for note in notes if note.type == "checkpoint")

    try:
        Controller(Scheduler(CLUSTER, policy), backend, log, [Clock()]).run(pair)
    finally:
        backend.close()
    if log is not None:
        log.close()
    size = (folder / "log" / "run.db").stat().st_size if has_log else 0
    begun = 4  # steps of both, in which workers warm up
    return {
        "step_s": (ends[-1] - ends[begun]) / (len(ends) - 1 - begun),
        "checkpoints": checkpoints,
        "log_bytes": size,
    }


def soak(num_pipelines: int, num_steps: int) -> list[list[str]]:
    rows = [["pipelines over", "files", "processes", "threads", "resident MB", "log bytes per step"]]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "run"
        over = 0

        class Gauge:
            def update(self, now_s: float, events: Any, actions: Any, notes: Any) -> None:
                nonlocal over
                before = over
                over += sum(isinstance(action, Release) for action in actions)
                if before * 8 // num_pipelines == over * 8 // num_pipelines:
                    return
                gc.collect()
                me = psutil.Process()
                log_bytes = sum(path.stat().st_size for path in folder.glob("run.db*"))
                figures = [over, me.num_fds(), len(me.children(recursive=True)), me.num_threads()]
                rows.append(
                    [*map(str, figures), f"{me.memory_info().rss / 1e6:.0f}", f"{log_bytes / (over * num_steps):,.0f}"]
                )

        submissions = [
            replace(submission(f"p{number}", number, num_steps, is_tiny=True), submit_at_s=0.6 * number)
            for number in range(num_pipelines)
        ]
        run_pipelines(CLUSTER, submissions, POLICIES["rollmux"](), folder, spec={}, listeners=[Gauge()])
    return rows


def show(rows: list[list[str]]) -> None:
    for number, row in enumerate(rows):
        print("| " + " | ".join(row) + " |")
        if number == 0:
            print("|" + "---|" * len(row))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["recovery", "overhead", "soak"])
    parser.add_argument("--steps", type=int, default=None)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--pipelines", type=int, default=64)
    words = parser.parse_args()
    tables: dict[str, Callable[[], list[list[str]]]] = {
        "recovery": lambda: recovery(words.steps or 40),
        "overhead": lambda: overhead(words.steps or 40, words.rounds),
        "soak": lambda: soak(words.pipelines, words.steps or 16),
    }
    show(tables[words.what]())


if __name__ == "__main__":
    main()
