"""One pipeline's training: SFT warm-up, rewards, training stages, publishing, checkpoints.

    env worker ── finish_step ──▶ batch ──▶ trainer ── run_stage* ──▶ weights ── deliver ──▶ rollout workers
                                                           └─▶ checkpoint, written beside what comes next

A training stage is a series of bounded calls to all ranks; it may be paused between two of them. All device work
belongs to it: building the engines, taking the batch and, with the last call of a step, handing out the weights and
copying the checkpoint's state. Scoring and publishing hold no device.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import replace
from typing import Any

from rlmux.core.actions import Switch
from rlmux.core.model import Phase, PipelineId, Stage
from rlmux.engines.spare_files import retire
from rlmux.log.notes import StepNote, WeightDelivery
from rlmux.rl.types import TrainReport
from rlmux.runtime.backend import WorkerOptions
from rlmux.runtime.orders.determinism_check import EngineProbes
from rlmux.runtime.orders.resident_states import ResidentStates
from rlmux.runtime.orders.rollout_driver import RolloutDriver
from rlmux.runtime.orders.running_orders import OrderWork, RunningOrder
from rlmux.runtime.weights.checkpoints import is_due
from rlmux.runtime.workers.call_loop import CallLoop, Future
from rlmux.runtime.workers.outbox import Outbox
from rlmux.runtime.workers.pipeline_workers import PipelineWorkers, all_of
from rlmux.runtime.workers.supervisor import WorkerSupervisor
from rlmux.runtime.workers.worker_calls import HandOut, StepBatch, TrainCall, TrainCallResult, joined, noted_metrics
from rlmux.runtime.workers.worker_pool import Worker


class TrainDriver:
    """Drives the training of one pipeline between two starts of its processes."""

    def __init__(
        self,
        workers: PipelineWorkers,
        rollout: RolloutDriver,
        *,
        calls: CallLoop,
        outbox: Outbox,
        states: ResidentStates,
        probes: EngineProbes,
        supervisor: WorkerSupervisor,
        options: WorkerOptions,
    ) -> None:
        self._workers = workers
        self._rollout = rollout
        self._calls = calls
        self._outbox = outbox
        self._states = states
        self._probes = probes
        self._supervisor = supervisor
        self._options = workers.submission.worker_options(options)
        self._batch_by_step: dict[int, StepBatch] = {}
        """Batches of scored, unpublished steps."""
        self._trainer_step = 0
        """The step whose batch the trainer has."""
        self._sums_by_version: dict[int, tuple[str, str | None]] = {}
        """(checksum of the weights, checksum in their file) of versions that are handed out and not published."""
        self._published: dict[int, list[str]] = {}
        """Checksums by version published since the last note `step`."""
        self._metrics: dict[str, float] = {}
        """Figures of the stages since the last publication."""

    def score(self, order: RunningOrder) -> OrderWork:
        """Rewards: the env worker scores the step and makes its batch."""
        step, config = order.action.step, self._workers.config
        order.waits_since_s = self._outbox.now_s()
        batch = yield from self._rollout.finish_step(step)
        if self._workers.trainers:
            self._batch_by_step[step] = batch
        else:  # without training the step is over
            self._supervisor.count_step(self._workers, step)
            self._outbox.add_note(_step_note(self._workers.id, step, batch, {}))
            self._note_rollout(step, batch)
        if step < config.num_steps:
            self._rollout.prepare(step + 1)  # the env worker has nothing else to do while others compute
        return order.finished()

    def run_stage(self, order: RunningOrder) -> OrderWork:
        """A training stage, or the SFT warm-up, until it is done or paused."""
        action, is_load_needed = order.action, order.action.switch is not Switch.NONE
        yield from self._states.make_room(order)
        yield from self._workers.build_trainers(self._calls)
        yield from self._probes.probe(self._workers, Phase.TRAIN, self._probed(), order)
        while True:
            result = yield from self._train(order, is_load_needed=is_load_needed)
            is_load_needed = False
            report = result.report
            self._supervisor.count_checkpoints(self._workers, result.written)
            seconds = result.input_s + report.seconds + result.hand_out_s
            order.add(seconds=seconds, switch_s=result.load_s, tokens=report.tokens)
            order.add_batch(result.num_together, report.tokens, report.seconds, result.token_share)
            if result.weights_checksum is not None:
                self._sums_by_version[action.step] = result.weights_checksum, result.file_checksum
            if report.is_done:
                self._metrics.update(report.metrics)
                return order.finished()
            if order.is_pausing:
                return order.paused()
            self._report_progress(order, report)

    def publish(self, order: RunningOrder) -> OrderWork:
        """Deliver the weights to the rollout workers, which need them to begin.

        The last step's checkpoint is written before its end is reported: no pipeline is released without one.
        """
        step, trainer = order.action.step, self._workers.trainer
        if step == self._workers.config.num_steps:
            written = yield self._calls.call(trainer, "finish_checkpoint")
            self._supervisor.count_checkpoints(self._workers, written)
        checksum, file_checksum = self._sums_by_version.pop(step)
        self._published[step] = sorted({checksum, file_checksum or checksum})
        self._take_in_publication(step, checksum)
        receivers = list(self._workers.rollout.values())
        senders = [self._workers.trainers[rank] for rank in self._calls.senders(self._workers.trainers)]
        yield self._calls.deliver(self._workers.published_path(step), senders, receivers)
        self._rollout.weights_arrived(step, file_checksum)
        return order.finished()

    # ------------------------------------------------------------------ training

    def _probed(self) -> Sequence[Worker]:
        """One rank, or all ranks if each has a part of the model: these compute together."""
        return self._workers.trainers if self._workers.config.train.is_sharded else [self._workers.trainer]

    def _train(self, order: RunningOrder, *, is_load_needed: bool) -> Generator[Future, Any, TrainCallResult]:
        """One bounded call of every rank; they stop together."""
        trainers, stage = self._workers.trainers, order.action.stage
        if is_load_needed:
            for trainer in trainers:
                self._states.load(trainer)
        is_last_stage = stage in (Stage.SFT_WARMUP, Stage.UPDATE)
        call = TrainCall(
            stage=stage,
            payload=self._take_payload(order),
            max_logprob_gap=self._probes.max_logprob_gap(self._workers.id),
            max_seconds=self._options.chunk_s,
            is_load_needed=is_load_needed,
            device_fraction=order.device_fraction,
            hand_out=self._hand_out(order.action.step) if is_last_stage else None,
        )
        return joined((yield from all_of([self._calls.call(trainer, "run_stage", call) for trainer in trainers])))

    def _take_payload(self, order: RunningOrder) -> bytes | None:
        """The batch of the order's step, for the first call that needs it; None if the trainer has it."""
        if order.action.stage is Stage.SFT_WARMUP or self._trainer_step == order.action.step:
            return None
        self._trainer_step = order.action.step
        return self._batch_by_step[order.action.step].payload

    def _hand_out(self, step: int) -> HandOut:
        """What the trainer is to write of the step's weights."""
        has_checkpoint = is_due(self._workers.submission, step, self._options.checkpoint_every)
        batch = self._batch_by_step.get(step) if has_checkpoint else None
        return HandOut(
            weights=self._workers.published_path(step),
            writers=tuple(self._calls.senders(self._workers.trainers)),
            checkpoint=self._workers.checkpoints.path(step) if has_checkpoint else None,
            num_kept=self._num_kept(),
            note=None if batch is None else self._step_note(step, batch, loaded=self._rollout.loaded()),
        )

    def _report_progress(self, order: RunningOrder, report: TrainReport) -> None:
        num_left = report.micro_batches_total - report.micro_batches_done
        self._outbox.add(order.progress(num_active=num_left, num_waiting=0))

    # ------------------------------------------------------------------ publishing

    def _take_in_publication(self, version: int, checksum: str) -> None:
        """End the step: note its metrics, and remove weights that staleness no longer needs."""
        self._supervisor.count_step(self._workers, version)
        oldest_needed = version - self._workers.submission.pipeline.staleness - 1
        retire(self._workers.published_path(oldest_needed - 1))
        batch = self._batch_by_step.pop(version, None)
        if batch is not None:
            note = self._step_note(version, batch, loaded=self._rollout.take_loaded())
            self._published = {}
            self._outbox.add_note(replace(note, weights_checksum=checksum))
            self._note_rollout(version, batch)
        self._metrics = {}

    def _step_note(self, step: int, batch: StepBatch, *, loaded: dict[int, list[str]]) -> StepNote:
        """The step's note, but for the checksum of its weights."""
        newest = step - 1
        delivery = WeightDelivery(
            versions=batch.metrics.versions,
            allowed=(max(0, newest - self._workers.config.algorithm.staleness), newest),
            loaded=loaded,
            published=self._published,
        )
        return replace(_step_note(self._workers.id, step, batch, self._metrics), delivery=delivery)

    def _note_rollout(self, step: int, batch: StepBatch) -> None:
        record = self._rollout.take_record(step)
        if record is not None:  # else it was sampled before a crash
            config = self._workers.config
            slots, group_size = config.rollout.num_slots, config.algorithm.group_size
            self._outbox.add_note(record.note(self._workers.id, step, batch, slots=slots, group_size=group_size))

    # ------------------------------------------------------------------ checkpoints

    def _num_kept(self) -> int:
        """Number of checkpoints. With gaps between them, each includes the older versions that staleness needs."""
        keep, staleness = self._options.keep_checkpoints, self._workers.submission.pipeline.staleness
        return keep + staleness if self._options.checkpoint_every == 1 else keep * (staleness + 1)


def _step_note(pipeline: PipelineId, step: int, batch: StepBatch, metrics: dict[str, float]) -> StepNote:
    return StepNote(
        pipeline=pipeline,
        step=step,
        metrics={
            "reward_mean": batch.metrics.reward_mean,
            "reward_std": batch.metrics.reward_std,
            "tokens": batch.metrics.response_tokens,
            "trajectories": batch.metrics.num_trajectories,
            "response_len_mean": batch.metrics.response_tokens_mean,
            "response_len_max": batch.metrics.response_tokens_max,
            "response_len_clip_ratio": batch.metrics.clip_ratio,
            "turns_mean": batch.metrics.turns_mean,
            **batch.metrics.round_metrics,
            **batch.metrics.version_metrics,
            **batch.metrics.engine_metrics,
            **batch.metrics.logged,
            **noted_metrics(metrics),
        },
    )
