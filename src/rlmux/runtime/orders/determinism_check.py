"""Probes of each pipeline's determinism class, run by its own engines.

    first order of a phase ── probe ──▶ worker, under the order's lease ──▶ ProbeReport ─┐
    the other phase's first order ────────────────────────────────────────▶ ProbeReport ─┴▶ note `promise`

    a file with `promise` ── check_determinism, before anything is scheduled ──▶ UserError, or the run begins

A pipeline that requires a stronger class than its engines keep is refused: before the run begins if the file names it,
before it trains if it was submitted later.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlmux.core.errors import PipelineError, UserError
from rlmux.core.model import Cluster, DeviceId, NodeId, Phase, PipelineId
from rlmux.log.notes import DeterminismNote
from rlmux.rl.determinism_class import ProbeCheck, ProbeReport, determinism_class_of, refusal, worst_of
from rlmux.runtime.backend import Submission
from rlmux.runtime.orders.running_orders import RunningOrder
from rlmux.runtime.workers.call_loop import CallLoop, Future
from rlmux.runtime.workers.outbox import Outbox
from rlmux.runtime.workers.pipeline_workers import PipelineWorkers, all_of
from rlmux.runtime.workers.planned_workers import RolloutWorker, TrainWorker
from rlmux.runtime.workers.worker_pool import Worker, Workplace

PROBE_LIMIT_S = 600.0
"""Seconds within which a worker must have built its engine and answered a probe."""
_POLL_S = 0.25
_PHASES = (Phase.ROLLOUT, Phase.TRAIN)


class EngineProbes:
    """Probes of a run's pipelines and their results."""

    def __init__(self, calls: CallLoop, outbox: Outbox) -> None:
        self._calls = calls
        self._outbox = outbox
        self._begun: set[tuple[PipelineId, Phase]] = set()
        """Probes that were begun (membership tests only)."""
        self._checks: dict[PipelineId, dict[Phase, tuple[ProbeCheck, ...]]] = {}
        self._servers: dict[PipelineId, Mapping[str, Any]] = {}
        """What was measured of the servers that sample."""

    def probe(
        self, workers: PipelineWorkers, phase: Phase, probed: Sequence[Worker], order: RunningOrder
    ) -> Generator[Future, Any, None]:
        """Probe the engine of these workers together, once per pipeline and phase; counted as a switch.

        Raises PipelineError for a pipeline that requires more than was found.
        """
        pipeline = workers.id
        if (pipeline, phase) in self._begun:
            return
        self._begun.add((pipeline, phase))
        report: ProbeReport | None = None
        try:
            report = worst_of((yield from all_of([self._calls.call(worker, "probe") for worker in probed])))
        finally:
            if report is None:  # the worker was lost or has work: probe the next one
                self._begun.discard((pipeline, phase))
        if report is None:
            return
        order.add(seconds=0.0, switch_s=report.seconds, tokens=0)
        found = self._checks.setdefault(pipeline, {})
        found[phase] = report.checks
        if report.server:
            self._servers[pipeline] = report.server
        checks = [check for known in _PHASES for check in found.get(known, ())]
        refused = refusal(workers.config.name, workers.submission.determinism_class, checks)
        if refused is not None:
            raise PipelineError(refused)
        if len(found) == len(_phases_of(workers.submission)):
            equal = {check.name: check.is_equal for check in checks}
            promise = determinism_class_of(checks).value
            self._outbox.add_note(
                DeterminismNote(
                    pipeline=pipeline, promise=promise, checks=equal, server=self._servers.get(pipeline, {})
                )
            )

    def max_logprob_gap(self, pipeline: PipelineId) -> float:
        """Largest accepted gap in nats between rollout and training log-probs, for the class found so far."""
        checks = self._checks.get(pipeline, {}).values()
        return determinism_class_of(check for of_phase in checks for check in of_phase).max_logprob_gap

    def may_recompute(self, pipeline: PipelineId) -> bool:
        """Whether a recomputed KV cache is bit-equal to the one that it replaces."""
        checks = self._checks.get(pipeline, {}).get(Phase.ROLLOUT, ())
        return any(check.name == "recomputation" and check.is_equal for check in checks)


def _phases_of(submission: Submission) -> Sequence[Phase]:
    """The phases that the pipeline has workers for."""
    return _PHASES[:1] if submission.pipeline.is_filler else _PHASES


def check_determinism(workplace: Workplace, cluster: Cluster, submissions: Sequence[Submission], folder: Path) -> None:
    """Probe the engines of pipelines with a `promise`, one after another, before any other work.

    `folder`: for the workers' output. Raises UserError, with the failed check and the accepted classes, for a pipeline
    that requires more than was found.
    """
    for submission in submissions:
        checks: list[ProbeCheck] = []
        for phase in _phases_of(submission):
            with _probing(workplace, cluster, submission, phase, folder) as worker:
                checks += _probe_worker(workplace, worker).checks
        refused = refusal(submission.config.name, submission.determinism_class, checks)
        if refused is not None:
            raise UserError(refused)


@contextlib.contextmanager
def _probing(
    workplace: Workplace, cluster: Cluster, submission: Submission, phase: Phase, folder: Path
) -> Iterator[Worker]:
    """A short-lived worker of the pipeline on the first device of the phase's pool."""
    config = submission.config
    log_folder = folder / config.name
    log_folder.mkdir(mode=0o700, exist_ok=True)
    make_worker, args = (RolloutWorker, (config,)) if phase is Phase.ROLLOUT else (TrainWorker, (config, None))
    worker = workplace.spawn(
        f"{config.name}/probe-{phase}",
        make_worker,
        args,
        device=_first_device(cluster, phase),
        log_path=log_folder / "workers.log",
        call_limit_s=PROBE_LIMIT_S,
    )
    try:
        yield worker
    finally:
        workplace.forget(worker)
        worker.kill()


def _first_device(cluster: Cluster, phase: Phase) -> DeviceId:
    pool = cluster.pool_serving(phase)
    assert pool is not None, "the tree refuses a cluster without a pool for each phase"
    return pool.devices(NodeId(pool.name, 0))[0]


def _probe_worker(workplace: Workplace, worker: Worker) -> ProbeReport:
    """The probe report of a new worker."""
    reports: list[ProbeReport] = []
    worker.call(time.monotonic(), "build", (), lambda _: None)
    worker.call(time.monotonic(), "probe", (), reports.append)
    while not reports:
        for ready in workplace.wait(_POLL_S):
            if ready is worker:
                worker.receive(time.monotonic())
        if worker.is_overdue(time.monotonic()):
            raise UserError(f"{worker.name} gave no answer in {PROBE_LIMIT_S:.0f} s")
    return reports[0]
