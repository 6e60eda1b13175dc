"""Which class of promise each pipeline's engines keep, found out by the engines themselves.

    first order of a phase ── probe ──▶ worker, under the order's lease ──▶ ProbeReport ─┐
    the other phase's first order ────────────────────────────────────────▶ ProbeReport ─┴▶ note `promise`

    a file that asks for one ── check_promises, before anything is scheduled ──▶ UserError, or the run begins

A pipeline that asks for more than a probe finds is refused: before the run begins where it is in the file, and before
it trains where it was submitted to a run that goes on.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path
from typing import Any

from rlmux.core.errors import PipelineError, UserError
from rlmux.core.model import Cluster, DeviceId, NodeId, Phase, PipelineId
from rlmux.rl.determinism_class import Check, ProbeReport, promise_of, refusal, worst_of
from rlmux.runtime.backend import Submission
from rlmux.runtime.orders.call_loop import CallLoop, Future
from rlmux.runtime.orders.outbox import Outbox
from rlmux.runtime.orders.running_orders import RunningOrder
from rlmux.runtime.workers.pipeline_workers import PipelineWorkers, all_of
from rlmux.runtime.workers.planned_workers import RolloutWorker, TrainWorker
from rlmux.runtime.workers.worker_pool import Worker, Workplace

PROBE_LIMIT_S = 600.0
"""Seconds within which a worker must have built its engine and answered a probe."""
_POLL_S = 0.25
_PHASES = (Phase.ROLLOUT, Phase.TRAIN)


class Promises:
    """What the probes of a run's pipelines have found so far."""

    def __init__(self, calls: CallLoop, outbox: Outbox) -> None:
        self._calls = calls
        self._outbox = outbox
        self._asked: set[tuple[PipelineId, Phase]] = set()
        """Probes that were begun (membership tests only)."""
        self._checks: dict[PipelineId, dict[Phase, tuple[Check, ...]]] = {}

    def probe(
        self, workers: PipelineWorkers, phase: Phase, probed: Sequence[Worker], order: RunningOrder
    ) -> Generator[Future, Any, None]:
        """Have workers probe their engine together, unless some of the pipeline have for this phase; counted as a
        switch.

        Raises PipelineError for a pipeline that asks for more than was found.
        """
        pipeline = workers.id
        if (pipeline, phase) in self._asked:
            return
        self._asked.add((pipeline, phase))
        report: ProbeReport | None = None
        try:
            report = worst_of((yield from all_of([self._calls.call(worker, "probe") for worker in probed])))
        finally:
            if report is None:  # it was lost, or has work already: the next one is asked
                self._asked.discard((pipeline, phase))
        if report is None:
            return
        order.add(seconds=0.0, switch_s=report.seconds, tokens=0)
        found = self._checks.setdefault(pipeline, {})
        found[phase] = report.checks
        checks = [check for known in _PHASES for check in found.get(known, ())]
        refused = refusal(workers.config.name, workers.submission.promise, checks)
        if refused is not None:
            raise PipelineError(refused)
        if len(found) == len(_phases_of(workers.submission)):
            self._outbox.note(
                "promise",
                pipeline=pipeline,
                promise=promise_of(checks).value,
                checks={check.name: check.is_equal for check in checks},
            )

    def max_logprob_gap(self, pipeline: PipelineId) -> float:
        """Largest gap in nats that the class found so far accepts between rollout's and training's log-probs."""
        checks = self._checks.get(pipeline, {}).values()
        return promise_of(check for of_phase in checks for check in of_phase).max_logprob_gap

    def may_recompute(self, pipeline: PipelineId) -> bool:
        """Whether a KV cache that is computed anew has the bits of the one that it replaces."""
        checks = self._checks.get(pipeline, {}).get(Phase.ROLLOUT, ())
        return any(check.name == "recomputation" and check.is_equal for check in checks)


def _phases_of(submission: Submission) -> Sequence[Phase]:
    """The phases that the pipeline has workers for."""
    return _PHASES[:1] if submission.pipeline.is_filler else _PHASES


def check_promises(workplace: Workplace, cluster: Cluster, submissions: Sequence[Submission], folder: Path) -> None:
    """Probe the engines of pipelines that ask for a promise, one after another, while nothing else holds a device.

    `folder`: for the workers' output. Raises UserError, with the check that failed and what is accepted, for one that
    asks for more than was found.
    """
    for submission in submissions:
        checks: list[Check] = []
        for phase in _phases_of(submission):
            with _probing(workplace, cluster, submission, phase, folder) as worker:
                checks += _ask(workplace, worker).checks
        refused = refusal(submission.config.name, submission.promise, checks)
        if refused is not None:
            raise UserError(refused)


@contextlib.contextmanager
def _probing(
    workplace: Workplace, cluster: Cluster, submission: Submission, phase: Phase, folder: Path
) -> Iterator[Worker]:
    """A worker of the pipeline on the first device of the phase's pool, for a moment."""
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
    pool = cluster.pool_for(phase)
    assert pool is not None, "the tree refuses a cluster without a pool for each phase"
    return pool.devices(NodeId(pool.name, 0))[0]


def _ask(workplace: Workplace, worker: Worker) -> ProbeReport:
    """The report of a worker that has done nothing yet."""
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
