"""What switches cost, and what reading ahead is worth.

    python benchmarks/residency.py states      seconds of a warm switch, of one from disk, of a new engine, by size
    python benchmarks/residency.py makespan    two pipelines that find no room in host memory, with and without reading
                                               ahead

In `makespan` the system forgets what it keeps of a spilled file once that is written, as it does where memory is
short; otherwise what was just written is read back from memory, and there is nothing to gain. States are read ahead
on cores too, where workers themselves do not. Medians of interleaved rounds.
"""

from __future__ import annotations

import argparse
import importlib
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from threading import Thread
from typing import Any

from rlmux.core.actions import Prefetch, RunStage, Switch
from rlmux.core.events import StageFinished
from rlmux.core.model import Cluster, Phase, Pipeline, PipelineId, Pool, Stage
from rlmux.core.scheduler import Scheduler
from rlmux.policies import make_policy
from rlmux.profiling.switch_times import switch_times
from rlmux.rl.config import AlgorithmConfig, ModelConfig, RolloutConfig, TaskConfig, TrainingConfig
from rlmux.rl.footprint import footprint_of
from rlmux.runtime import worker_supervisor
from rlmux.runtime.backend import Submission
from rlmux.runtime.controller import Controller
from rlmux.runtime.local import local_backend
from rlmux.runtime.worker_backend import WorkerBackend
from rlmux.runtime.worker_calls import RolloutChunk, RolloutChunkResult
from rlmux.runtime.workers import RolloutWorker, TrainWorker
from rlmux.runtime.workplace import WorkerOptions

STAGES = (Stage.GENERATE, Stage.REWARD, Stage.OLD_LOGPROBS, Stage.UPDATE, Stage.PUBLISH)
MODELS = {
    "demo": ModelConfig(),
    "5M": ModelConfig(hidden_size=256, num_layers=6, num_heads=4, num_kv_heads=2, intermediate_size=768),
    "20M": ModelConfig(hidden_size=512, num_layers=6, num_heads=8, num_kv_heads=4, intermediate_size=1536),
    "32M": ModelConfig(hidden_size=640, num_layers=6, num_heads=10, num_kv_heads=5, intermediate_size=1920),
}
NEVER = 1_000_000


class _Forgetful:
    """A worker of which the system keeps nothing that was spilled; it writes and forgets beside what others compute."""

    _forgetting: Thread | None = None

    def offload(self, spill_to: Path | None = None) -> int:
        held_bytes: int = super().offload(spill_to)  # type: ignore[misc]
        self._forgetting = Thread(target=self._engine.leave_cache)  # type: ignore[attr-defined]
        self._forgetting.start()
        return held_bytes

    def prefetch(self) -> None:
        self._forget()
        self._engine.prefetch()  # type: ignore[attr-defined]

    def _forget(self) -> None:
        if self._forgetting is not None:
            self._forgetting.join()
            self._forgetting = None


class ForgetfulRollout(_Forgetful, RolloutWorker):
    def run_chunk(self, chunk: RolloutChunk) -> RolloutChunkResult:
        self._forget()
        return super().run_chunk(chunk)


class ForgetfulTrain(_Forgetful, TrainWorker):
    def run_stage(self, *args: Any) -> Any:
        self._forget()
        return super().run_stage(*args)


def config(name: str, model: ModelConfig, num_steps: int) -> TrainingConfig:
    return TrainingConfig(
        name=name,
        seed=1 if name == "a" else 2,
        num_steps=num_steps,
        model=model,
        task=TaskConfig(name="sort"),
        algorithm=AlgorithmConfig(prompts_per_step=8, group_size=4, micro_batch_size=8),
        rollout=RolloutConfig(max_new_tokens=8, max_prompt_tokens=16, num_slots=8),
    )


def states(names: Sequence[str], rounds: int) -> list[list[str]]:
    rows = [["model", "state", "MB", "leave", "come back", "to disk", "from disk", "new engine"]]
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as folder:
        for name in names:
            for one in switch_times(config("a", MODELS[name], 1), "cpu", Path(folder), num_rounds=rounds):
                seconds = (one.offload_s, one.load_s, one.spill_s, one.reload_s, one.checkpoint_s)
                rows.append([name, one.phase.value, f"{one.state_bytes / 1e6:.1f}", *(f"{s:.4f}" for s in seconds)])
    return rows


def makespan(name: str, num_steps: int, rounds: int) -> list[list[str]]:
    made: dict[bool, list[dict[str, float]]] = {False: [], True: []}
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as folder:
        _run(Path(folder), MODELS["demo"], 2, True)  # the fork server starts
    for number in range(rounds):
        for is_reading_ahead in (False, True) if number % 2 == 0 else (True, False):
            with tempfile.TemporaryDirectory(dir=Path.cwd()) as folder:
                made[is_reading_ahead].append(_run(Path(folder), MODELS[name], num_steps, is_reading_ahead))
    rows = [["", *made[True][0]]]
    for is_reading_ahead, runs in made.items():
        medians = [statistics.median(run[key] for run in runs) for key in runs[0]]
        rows.append(["read ahead" if is_reading_ahead else "as needed", *(f"{value:.3f}" for value in medians)])
    return rows


def _run(folder: Path, model: ModelConfig, num_steps: int, is_reading_ahead: bool) -> dict[str, float]:
    configs = [config(name, model, num_steps) for name in "ab"]
    footprint = footprint_of(configs[0])
    # Room for one state on a device, and for none in host memory.
    sizes = {Phase.ROLLOUT: footprint.rollout_device_bytes, Phase.TRAIN: footprint.train_device_bytes}
    cluster = Cluster(
        pools={
            phase.value: Pool(
                name=phase.value, phase=phase, num_nodes=1, device_memory_bytes=1.5 * (size or 0.0),
                host_memory_bytes=1.0, spills_to_disk=True,
            )
            for phase, size in sizes.items()
        }
    )  # fmt: skip
    footprint = replace(footprint, rollout_host_bytes=0.0, train_host_bytes=0.0)
    pair = [
        Submission(
            pipeline=Pipeline(id=PipelineId(each.name), num_steps=num_steps, stages=STAGES, footprint=footprint),
            config=each,
        )
        for each in configs
    ]
    backend: WorkerBackend = local_backend(cluster, folder, options=WorkerOptions(checkpoint_every=NEVER))
    if not is_reading_ahead:
        execute = backend.execute
        backend.execute = lambda action: None if isinstance(action, Prefetch) else execute(action)  # type: ignore[method-assign]
    seen = _Seen()
    start = time.perf_counter()
    try:
        Controller(Scheduler(cluster, make_policy("rollmux")), backend, None, [seen]).run(pair)
    finally:
        backend.close()
    return {"makespan s": time.perf_counter() - start, **seen.figures()}


class _Seen:
    """Of steps' training that began with a warm switch, which here is one from disk."""

    def __init__(self) -> None:
        self._step_of: dict[int, tuple[str, int]] = {}
        self._switch_s: dict[tuple[str, int], float] = {}
        self._stage_s: dict[tuple[str, int], float] = {}
        self._num_hints = 0

    def update(self, now_s: float, events: Any, actions: Any, notes: Any) -> None:
        for action in actions:
            self._num_hints += isinstance(action, Prefetch)
            if isinstance(action, RunStage) and action.stage in (Stage.OLD_LOGPROBS, Stage.UPDATE):
                self._step_of[action.order] = step = (action.pipeline, action.step)
                if action.switch is Switch.WARM:
                    self._switch_s[step] = 0.0
        for event in events:
            step_of = self._step_of.get(event.order) if isinstance(event, StageFinished) else None
            if step_of in self._switch_s:
                self._switch_s[step_of] += event.switch_s
                self._stage_s[step_of] = self._stage_s.get(step_of, 0.0) + event.seconds

    def figures(self) -> dict[str, float]:
        return {
            "switch s": statistics.median(self._switch_s.values()),
            "training s": statistics.median(self._stage_s.values()),
            "switches": float(len(self._switch_s)),
            "hints": float(self._num_hints),
        }


def _print(rows: Sequence[Sequence[str]]) -> None:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        print("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["states", "makespan"])
    parser.add_argument("--models", default="demo,5M,20M,32M", help=f"of {', '.join(MODELS)}")
    parser.add_argument("--model", default="32M", choices=list(MODELS), help="of makespan")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    if given.what == "states":
        _print(states(given.models.split(","), given.rounds))
    else:
        mine = importlib.import_module("residency")  # by a name that worker processes find too
        vars(worker_supervisor)["RolloutWorker"] = mine.ForgetfulRollout
        vars(worker_supervisor)["TrainWorker"] = mine.ForgetfulTrain
        _print(makespan(given.model, given.steps, given.rounds))


if __name__ == "__main__":
    main()
