"""Measures one step of each pipeline alone, as a run does it.

    the pipeline's own run   warm-up │ measured steps │ a last step, which writes its checkpoint
    the same at the limit    warm-up │ measured steps       no token ends an answer, training is on those

Each run has the pipeline's workers, prompts, environment and reward, and as many devices as the pipeline requests. Its
log has the seconds, without the start of processes and without switches. Medians of steps count.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

from rlmux.config import Spec
from rlmux.config.load import PipelineSpec
from rlmux.core.actions import Action
from rlmux.core.errors import UserError
from rlmux.core.events import Event
from rlmux.core.model import PHASE_BY_STAGE, Cluster, Phase, Pipeline, Pool, Stage
from rlmux.log.notes import Note, StepNote
from rlmux.policies import make_policy
from rlmux.profiling.step_estimates import StepTimes, settings_of
from rlmux.report.reports import read_timeline
from rlmux.report.timeline.step_rows import read_step_rows
from rlmux.rl.config import SftWarmupConfig
from rlmux.runtime.launch import start_run
from rlmux.runtime.run import RunOptions


def measure_steps(
    spec: Spec,
    device: str,
    folder: Path,
    *,
    num_steps: int = 3,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, StepTimes]:
    """Step times of every training pipeline of the file, by name.

    `folder`: on a disk with room for one checkpoint. `num_steps`: measured steps of each run. `progress`: called with
    (steps done, steps in all). Raises UserError for a pipeline that cannot be run here, or that fails.
    """
    training = [pipeline for pipeline in spec.pipelines if not pipeline.pipeline.is_filler]
    ticks = _Ticks(progress, len(training) * (2 * num_steps + 3))
    with _on(device):
        return {pipeline.name: _step_times(spec, pipeline, folder, num_steps, ticks) for pipeline in training}


def _step_times(spec: Spec, given: PipelineSpec, folder: Path, num_steps: int, ticks: _Ticks) -> StepTimes:
    config = given.config
    at_limit = replace(config, fills_token_limit=True, sft_warmup=SftWarmupConfig())
    plain = _measured(spec, given, folder, num_steps + 2, ticks)[1:-1]
    limit = _measured(spec, replace(given, training=at_limit), folder, num_steps + 1, ticks)[1:]
    rollout_s, train_s = _seconds(plain, Phase.ROLLOUT), _seconds(plain, Phase.TRAIN)
    return StepTimes(
        **settings_of(config),
        rollout_s=rollout_s,
        train_s=train_s,
        sync_s=_seconds(plain, Phase.ENV, Phase.SYNC),
        limit_rollout_s=max(rollout_s, _seconds(limit, Phase.ROLLOUT)),  # both may be of full answers, and noisy
        limit_train_s=max(train_s, _seconds(limit, Phase.TRAIN)),
    )


def _seconds(steps: Sequence[Mapping[str, float]], *phases: Phase) -> float:
    """Median over steps of the seconds that their stages of these phases took."""
    return median(
        sum(seconds for stage, seconds in stages.items() if PHASE_BY_STAGE[Stage(stage)] in phases) for stages in steps
    )


def _measured(
    spec: Spec, given: PipelineSpec, folder: Path, num_steps: int, ticks: _Ticks
) -> list[Mapping[str, float]]:
    """Seconds of each stage of each step of the pipeline's own run."""
    has_sft_warmup = given.config.sft_warmup.num_updates > 0
    pipeline = replace(given.pipeline, num_steps=num_steps, has_sft_warmup=has_sft_warmup)
    alone = replace(
        given,
        pipeline=pipeline,
        training=replace(given.config, num_steps=num_steps),
        keys=replace(given.keys, submit_at_s=0.0, promise=None, samples=False),
    )
    of_one = replace(spec, cluster=_cluster_of(spec.cluster, pipeline), shares=None, pipelines=(alone,))
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        run = Path(scratch) / "run"
        result = start_run(of_one, run, policy=make_policy("solo"), options=RunOptions(listeners=[ticks]))
        if not result.is_complete:
            raise KeyboardInterrupt
        steps = [row["stages"] for row in read_step_rows(run)[given.name]]
        if len(steps) < num_steps:
            record = read_timeline(run).pipelines[pipeline.id]
            raise UserError(f"pipeline {given.name} {record.status}: {record.reason}")
    return steps


def _cluster_of(cluster: Cluster, pipeline: Pipeline) -> Cluster:
    """The file's pools, of the size that the pipeline requests."""
    requested = {Phase.ROLLOUT: pipeline.num_rollout_nodes, Phase.TRAIN: pipeline.num_train_nodes}

    def sized(pool: Pool) -> Pool:
        size = max(requested.values()) if pool.serves_both_phases else requested[pool.phase]
        return replace(pool, num_nodes=size)

    return replace(cluster, pools={name: sized(pool) for name, pool in cluster.pools.items()})


@dataclass(slots=True)
class _Ticks:
    """Counts the steps of runs, as their listener."""

    progress: Callable[[int, int], None] | None
    num_total: int
    num_done: int = 0

    def update(self, now_s: float, events: Sequence[Event], actions: Sequence[Action], notes: Sequence[Note]) -> None:
        ended = sum(isinstance(note, StepNote) for note in notes)
        self.num_done += ended
        if ended and self.progress is not None:
            self.progress(self.num_done, self.num_total)


@contextmanager
def _on(device: str) -> Iterator[None]:
    """Runs use GPUs where the machine has some, unless cores are to be measured."""
    before = os.environ.get("CUDA_VISIBLE_DEVICES")
    if device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    try:
        yield
    finally:
        if before is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = before
        elif device == "cpu":
            del os.environ["CUDA_VISIBLE_DEVICES"]
