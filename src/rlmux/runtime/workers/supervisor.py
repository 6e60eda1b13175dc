"""Starts pipelines' processes, watches them, ends them, and replaces those that are lost.

    per pipeline    env worker     ── prompts, environments, rewards
                    rollout worker ── one per device of its rollout nodes; those of adapters of one base share a
                                      process there (tenant_process.py)
                    train worker   ── one per training rank, on its device; none for a filler

    lost                                what happens
    rollout worker                      a successor does again what it had not handed over    ──▶ WorkerLost
    env worker, or any rank             all begins again from the newest checkpoint           ──▶ PipelineRestarted
    node                                the same, once the pipeline has another placement     ──▶ NodeLost
    anything of one that parks          nothing: its processes end anyway                     ──▶ PipelineParked
    one worker, again and again         the pipeline fails                                    ──▶ PipelineFailed
    a call that raises                  the pipeline fails                                    ──▶ PipelineFailed

All give the same weights as if nothing had happened, since trajectories and updates are functions of the config.
Three callbacks notify the drivers: processes have started, one was replaced, all are ending.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from rlmux.core.actions import Admit, Park, Relocate
from rlmux.core.errors import DeviceMemoryError, HostMemoryError, RlmuxError, StorageError, WorkerLostError
from rlmux.core.events import Event, NodeJoined, NodeLost, PipelineFailed, PipelineParked, PipelineRestarted, WorkerLost
from rlmux.core.model import Cluster, DeviceId, FailureCause, NodeId, Phase, PipelineId, Placement
from rlmux.log.notes import AdapterRoomNote, FailureNote, LossNote, WarningNote, WorkerNote
from rlmux.report.samples import SAMPLES_NAME
from rlmux.rl.config import TrainingConfig
from rlmux.rl.memory.adapter_base import rollout_base, train_base
from rlmux.runtime.backend import Submission, WorkerOptions
from rlmux.runtime.memory.memory_budget import HostMemory
from rlmux.runtime.records.filler_outputs import ANSWERS_NAME, answered_steps
from rlmux.runtime.weights.checkpoints import CheckpointStore, Written, checkpoint_folder, checkpoint_note
from rlmux.runtime.workers.call_loop import CallLoop, Work
from rlmux.runtime.workers.outbox import Outbox
from rlmux.runtime.workers.pipeline_workers import PipelineWorkers, rank_devices
from rlmux.runtime.workers.planned_workers import EnvWorker, RolloutWorker, TrainWorker
from rlmux.runtime.workers.standstill import StandstillWatch
from rlmux.runtime.workers.tenant_hosts import RolloutHost, TrainHost
from rlmux.runtime.workers.tenant_process import TenantWorkplace
from rlmux.runtime.workers.worker_calls import AdapterRoom
from rlmux.runtime.workers.worker_pool import Worker


class WorkerSupervisor:
    """Owns every pipeline's processes from admission to release."""

    def __init__(
        self,
        cluster: Cluster,
        folder: Path,
        weights_folder: Path,
        *,
        workplace: TenantWorkplace,
        calls: CallLoop,
        outbox: Outbox,
        host_memory: HostMemory,
        options: WorkerOptions,
        on_started: Callable[[PipelineWorkers], None],
        on_replaced: Callable[[PipelineWorkers, DeviceId], None],
        on_ending: Callable[[PipelineWorkers], None],
    ) -> None:
        """`on_started`: a pipeline's processes have started. `on_replaced`: a rollout worker has a successor.
        `on_ending`: all its processes are about to end."""
        self._cluster = cluster
        self._folder = folder
        self._weights_folder = weights_folder
        self._workplace = workplace
        self._calls = calls
        self._outbox = outbox
        self._host_memory = host_memory
        self._options = options
        self._on_started = on_started
        self._on_replaced = on_replaced
        self._on_ending = on_ending
        self._standstills = StandstillWatch(outbox)
        self._submissions: dict[PipelineId, Submission] = {}
        self._workers_by_pipeline: dict[PipelineId, PipelineWorkers] = {}
        self._pipeline_by_worker: dict[Worker, PipelineId] = {}
        self._homeless: dict[PipelineId, PipelineWorkers] = {}
        """Pipelines that lost or released their nodes and wait for another placement."""
        self._restarting: set[PipelineId] = set()
        """Pipelines whose restart from a checkpoint the scheduler has not handled yet (membership tests only). It
        withdraws its orders for them when it does."""
        self._parking: set[PipelineId] = set()
        """Pipelines whose processes end once a checkpoint is written (membership tests only)."""
        self._sha256: dict[PipelineId, str] = {}
        """Hashes of the weights of the newest checkpoints, kept when a pipeline is over."""

    # ------------------------------------------------------------------ queries

    @property
    def workers_by_pipeline(self) -> Mapping[PipelineId, PipelineWorkers]:
        """Admitted pipelines' processes. A pipeline that waits for other nodes is left out."""
        return self._workers_by_pipeline

    def find(self, pipeline: PipelineId) -> PipelineWorkers | None:
        return self._workers_by_pipeline.get(pipeline)

    def owner(self, worker: Worker) -> PipelineWorkers | None:
        """The worker's pipeline; None for a worker that was ended."""
        pipeline = self._pipeline_by_worker.get(worker)
        return None if pipeline is None else self._workers_by_pipeline.get(pipeline)

    def knows(self, pipeline: PipelineId) -> bool:
        """Whether the pipeline came before."""
        return pipeline in self._submissions

    def is_restarting(self, pipeline: PipelineId) -> bool:
        """Whether it restarts from a checkpoint, and the scheduler has not handled that yet."""
        return pipeline in self._restarting

    def weights_sha256(self, pipeline: PipelineId) -> str | None:
        return self._sha256.get(pipeline)

    # ------------------------------------------------------------------ from the backend and the drivers

    def add_pipeline(self, submission: Submission) -> None:
        self._submissions[submission.pipeline.id] = submission

    def events_are_taken(self, events: Sequence[Event]) -> None:
        """Record that the scheduler handles these events next."""
        self._restarting.difference_update(event.pipeline for event in events if isinstance(event, PipelineRestarted))

    def count_step(self, workers: PipelineWorkers, step: int) -> None:
        """Count a finished step. A step reached for the first time resets the count of losses."""
        if step > workers.furthest_step:
            workers.furthest_step = step
            workers.num_losses_by_worker.clear()

    def count_checkpoints(self, workers: PipelineWorkers, written: Sequence[Written]) -> None:
        """Record durable checkpoints of a pipeline."""
        for each in written:
            workers.checkpoints.mark_written(each.folder)
            self._sha256[workers.id] = each.weights_sha256
            self._outbox.add_note(checkpoint_note(workers.id, each))

    # ------------------------------------------------------------------ orders

    def admit(self, action: Admit) -> None:
        submission = self._submissions[action.pipeline]
        folder = self._folder / submission.config.name
        folder.mkdir(mode=0o700, exist_ok=True)
        weights = self._weights_folder / submission.config.name
        weights.mkdir(mode=0o700, exist_ok=True)
        checkpoints = checkpoint_folder(
            submission,
            self._folder,
            on_warning=lambda text: self._outbox.add_note(WarningNote(pipeline=action.pipeline, reason=text)),
        )
        before = self._homeless.pop(action.pipeline, None)
        num_noted = submission.pipeline.first_step - 1 if before is None else before.furthest_step
        workers = self._start(submission, action.placement, folder, weights, checkpoints, num_noted=num_noted)
        if before is not None:
            self._restarting.add(action.pipeline)
            self._report_restart(before, *workers)

    def relocate(self, action: Relocate) -> None:
        """Between two steps: restart from a checkpoint on other nodes, once the pending checkpoint is durable."""
        workers = self.find(action.pipeline)
        if workers is None:
            return  # it has failed, or lost a node, and the scheduler handles that next
        workers.placement = action.placement
        self._restarting.add(action.pipeline)
        self._calls.start(self._relocate(workers), pipeline=None)

    def _relocate(self, workers: PipelineWorkers) -> Work:
        self.count_checkpoints(workers, (yield self._calls.call(workers.trainer, "finish_checkpoint")))
        self._restart(workers)

    def park(self, action: Park) -> None:
        """End its processes, after the pending checkpoint if that is awaited; it resumes from a checkpoint at its next
        admission."""
        workers = self.find(action.pipeline)
        if workers is None:
            return  # it has failed, or lost a node itself
        if action.is_awaited:
            self._parking.add(action.pipeline)
            self._calls.start(self._park(workers), pipeline=None)
        else:
            self._end_processes(workers)
            self._homeless[action.pipeline] = workers

    def _park(self, workers: PipelineWorkers) -> Work:
        if workers.trainers:
            self.count_checkpoints(workers, (yield self._calls.call(workers.trainer, "finish_checkpoint")))
        self._end_parked(workers)

    def _end_parked(self, workers: PipelineWorkers) -> None:
        self._parking.discard(workers.id)
        self._end_processes(workers)
        self._homeless[workers.id] = workers
        self._outbox.add(PipelineParked(pipeline=workers.id))

    def release(self, pipeline: PipelineId, *, finishes_checkpoints: bool = False) -> None:
        """End a pipeline's workers. `finishes_checkpoints`: trainers first finish the checkpoint that they write."""
        self._restarting.discard(pipeline)
        self._parking.discard(pipeline)
        self._homeless.pop(pipeline, None)
        workers = self._workers_by_pipeline.pop(pipeline, None)
        if workers is None:
            return  # it failed: its processes are gone
        self._on_ending(workers)
        for worker in workers.processes:
            self._forget(worker)
            worker.end(finishes_checkpoint=finishes_checkpoints and worker in workers.trainers)
            self._calls.fail_calls(worker)
        shutil.rmtree(workers.weights, ignore_errors=True)

    # ------------------------------------------------------------------ watching

    def receive(self, worker: Worker) -> None:
        """Handle a worker's answer or its loss. Raises StorageError if a file of the run cannot be written."""
        pipeline = self._pipeline_by_worker.get(worker)
        if pipeline is None:
            return  # ended by an earlier answer of the same poll
        is_new = worker.pid is None
        try:
            worker.receive(self._outbox.now_s())
        except WorkerLostError as error:
            self._lose(pipeline, worker, str(error), _cause_of(error))
        except StorageError:
            raise  # no pipeline's fault, and none can go on
        except RlmuxError as error:
            workers = self._workers_by_pipeline[pipeline]
            self._fail(workers, str(error), _cause_of(error, is_user_code=worker is workers.env_worker))
        else:
            if is_new:  # an actor's process is known by its first answer
                self._note_worker(pipeline, worker)

    def end_overdue_workers(self) -> None:
        self._standstills.poll(self._workers_by_pipeline.values())
        now_s = self._outbox.now_s()
        for pipeline, workers in list(self._workers_by_pipeline.items()):
            overdue = [worker for worker in workers.processes if worker.is_overdue(now_s)]
            if overdue:  # ranks wait for each other: the one that is stopped keeps all of them
                worker = next((candidate for candidate in overdue if _is_stopped(candidate)), overdue[0])
                self._lose(pipeline, worker, f"{worker.name} gave no answer in time")

    def change_node(self, node: NodeId, *, is_there: bool) -> None:
        """Handle a lost or found node. Pipelines on a lost node wait for a placement and resume from a checkpoint."""
        if is_there:
            self._outbox.add(NodeJoined(node=node))
            return
        for pipeline, workers in list(self._workers_by_pipeline.items()):
            if node in workers.placement.nodes:
                self._parking.discard(pipeline)
                self._end_processes(workers)
                self._homeless[pipeline] = workers
                step = workers.furthest_step
                self._note_loss(pipeline, f"node {node} is gone; what came after step {step} is made again")
        self._outbox.add(NodeLost(node=node))

    # ------------------------------------------------------------------ losses

    def _lose(
        self, pipeline: PipelineId, worker: Worker, reason: str, cause: FailureCause = FailureCause.LOST_WORKER
    ) -> None:
        workers = self._workers_by_pipeline[pipeline]
        if pipeline in self._parking:
            self._note_loss(pipeline, f"{reason}; the pipeline is being parked")
            self._end_parked(workers)
            return
        num_losses = workers.num_losses_by_worker.get(worker.name, 0) + 1
        workers.num_losses_by_worker[worker.name] = num_losses
        self._standstills.end(workers, worker)
        device = next((device for device, other in workers.rollout.items() if other is worker), None)
        if num_losses > self._options.max_losses:
            self._note_loss(pipeline, reason)
            self._fail(workers, f"{reason}; that worker was lost {num_losses} times without a step between", cause)
        elif device is None:
            restored_step = self._restart(workers)
            where = f"after step {restored_step}" if restored_step > 0 else "from the beginning"
            self._note_loss(pipeline, f"{reason}; the pipeline goes on {where}")
        else:
            self._replace_rollout_worker(workers, device)
            self._note_loss(pipeline, f"{reason}; another takes its place")

    def _note_loss(self, pipeline: PipelineId, reason: str) -> None:
        self._outbox.add_note(LossNote(pipeline=pipeline, reason=reason))

    def _replace_rollout_worker(self, workers: PipelineWorkers, device: DeviceId) -> None:
        self._kill(workers.rollout[device])
        is_alone = workers.num_losses_by_worker[workers.rollout[device].name] > 1
        workers.rollout[device] = self._spawn_rollout_worker(
            workers.submission, device, workers.log_path, is_alone=is_alone
        )
        self._on_replaced(workers, device)
        self._outbox.add(WorkerLost(pipeline=workers.id, device=device))

    def _restart(self, workers: PipelineWorkers) -> int:
        """Restart the pipeline from its newest checkpoint; returns the checkpoint's step."""
        self._end_processes(workers)
        started, restored_step = self._start(
            workers.submission,
            workers.placement,
            workers.folder,
            workers.weights,
            workers.checkpoints,
            workers.num_losses_by_worker,
            num_noted=workers.furthest_step,
        )
        self._report_restart(workers, started, restored_step)
        return restored_step

    def _report_restart(self, before: PipelineWorkers, after: PipelineWorkers, restored_step: int) -> None:
        for note in after.checkpoints.step_notes(after=before.furthest_step, through=restored_step):
            self._outbox.add_note(note)
        after.num_losses_by_worker = before.num_losses_by_worker
        after.furthest_step = max(before.furthest_step, after.furthest_step)
        self._outbox.add(PipelineRestarted(pipeline=after.id, restored_step=restored_step))

    def _fail(self, workers: PipelineWorkers, reason: str, cause: FailureCause) -> None:
        self._parking.discard(workers.id)
        self._end_processes(workers)
        shutil.rmtree(workers.weights, ignore_errors=True)
        self._outbox.add_note(FailureNote(pipeline=workers.id, reason=reason, traceback=str(workers.log_path)))
        self._outbox.add(PipelineFailed(pipeline=workers.id, reason=reason, cause=cause))

    # ------------------------------------------------------------------ processes

    def _start(
        self,
        submission: Submission,
        placement: Placement,
        folder: Path,
        weights: Path,
        checkpoints: CheckpointStore,
        num_losses: Mapping[str, int] = MappingProxyType({}),
        *,
        num_noted: int,
    ) -> tuple[PipelineWorkers, int]:
        """Start a pipeline's processes from its newest good checkpoint; also returns that step, -1 without one.

        `num_losses`: deaths by name of the worker, before this start. `num_noted`: steps that are noted as over; a
        filler, whose answers have no figures, does others again.
        """
        config, pipeline = submission.config, submission.pipeline.id
        is_filler = submission.pipeline.is_filler
        checkpoints.remove_leftovers()
        restored = checkpoints.newest(before=config.num_steps)
        step = restored.step if restored else (-1 if submission.pipeline.has_sft_warmup else 0)
        if is_filler:
            step = min(num_noted, answered_steps(folder, config))
        if restored and restored.weights_sha256:
            self._sha256[pipeline] = restored.weights_sha256
        train_devices = self._devices(placement.train_nodes)
        restore_from = restored.path if restored else None
        log_path = folder / "workers.log"
        samples = folder / SAMPLES_NAME if submission.keeps_samples else None
        answers = folder / ANSWERS_NAME if is_filler else None
        workers = PipelineWorkers(
            submission=submission,
            placement=placement,
            folder=folder,
            weights=weights,
            checkpoints=checkpoints,
            env_worker=self._spawn(
                config,
                "env",
                EnvWorker,
                (config, submission.origin, samples, submission.code_folder, answers, restore_from),
                None,
                log_path,
            ),
            trainers=[]
            if is_filler
            else self._spawn_trainers(
                submission,
                restore_from,
                train_devices,
                log_path,
                is_alone=num_losses.get(f"{config.name}/train", 0) > 1,
            ),
            rollout={
                device: self._spawn_rollout_worker(submission, device, log_path)
                for device in self._devices(placement.rollout_nodes)
            },
            train_devices=train_devices,
            log_path=log_path,
            furthest_step=max(step, 0),
            note_room=self._note_room,
        )
        self._workers_by_pipeline[pipeline] = workers
        self._on_started(workers)
        if restored:
            self._calls.start(self._verify(workers, step), pipeline=None)
        return workers, step

    def _verify(self, workers: PipelineWorkers, step: int) -> Work:
        """Verify the checkpoints to resume from, with the env worker's first call, before anything needs them."""
        needed = workers.checkpoints.needed_from(step)
        damaged = yield self._calls.call(workers.env_worker, "verify", needed)
        for checkpoint, reason in damaged:
            workers.checkpoints.mark_damaged(checkpoint, reason)
        if damaged:
            self._restart(workers)

    def _spawn_trainers(
        self,
        submission: Submission,
        restore_from: Path | None,
        train_devices: Sequence[DeviceId],
        log_path: Path,
        *,
        is_alone: bool,
    ) -> list[Worker]:
        """Start one trainer for each rank. Each reads the whole checkpoint, which does not depend on the rank count.

        `is_alone`: as in `_spawn_rollout_worker`.
        """
        config = submission.config
        count = config.train.num_workers
        args = (config, restore_from, submission.origin, self._workplace.bases)
        tenancy = None if is_alone else train_base(config) or None
        return [
            self._spawn(
                config,
                "train" if rank == 0 else f"train-{rank}",
                TrainWorker if tenancy is None else TrainHost,
                args,
                rank_devices(train_devices, rank, count)[0],
                log_path,
                tenancy,
            )
            for rank in range(count)
        ]

    def _spawn_rollout_worker(
        self, submission: Submission, device: DeviceId, log_path: Path, *, is_alone: bool = False
    ) -> Worker:
        """`is_alone`: in a process of its own. A worker that was lost twice gets one, so that a pipeline that ends its
        process again and again is the only one to fail."""
        config = submission.config
        args = (config, submission.origin, self._workplace.bases)
        tenancy = None if is_alone else tenancy_of(submission)
        make_worker = RolloutWorker if tenancy is None else RolloutHost
        return self._spawn(config, f"rollout-{device}", make_worker, args, device, log_path, tenancy)

    def _spawn(
        self,
        config: TrainingConfig,
        role: str,
        make_worker: Callable[..., Any],
        args: tuple[Any, ...],
        device: DeviceId | None,
        log_path: Path,
        tenancy: str | None = None,
    ) -> Worker:
        worker = self._workplace.spawn(
            f"{config.name}/{role}",
            make_worker,
            args,
            device=device,
            log_path=log_path,
            call_limit_s=self._call_limit_s(config, role),
            tenancy=tenancy,
        )
        pipeline = PipelineId(config.name)
        self._pipeline_by_worker[worker] = pipeline
        self._note_worker(pipeline, worker)
        if device is not None:
            footprint = self._submissions[pipeline].pipeline.footprint
            self._host_memory.pin(
                worker.name,
                device,
                footprint,
                Phase.TRAIN if make_worker in (TrainWorker, TrainHost) else Phase.ROLLOUT,
            )
        return worker

    def _call_limit_s(self, config: TrainingConfig, role: str) -> float:
        """Limit of a role's calls. User code has a limit for each answer, and each answer is a sign of life."""
        limit_s = self._submissions[PipelineId(config.name)].worker_options(self._options).call_limit_s
        return limit_s + config.task.reward_timeout_s if role == "env" else limit_s

    def _note_worker(self, pipeline: PipelineId, worker: Worker) -> None:
        self._outbox.add_note(WorkerNote(pipeline=pipeline, role=worker.name.partition("/")[2], pid=worker.pid))

    def _note_room(self, worker: Worker, room: AdapterRoom | None) -> None:
        """Log an adapter worker's device memory, and the free memory."""
        workers = self.owner(worker)
        if room is not None and workers is not None:
            phase = Phase.TRAIN if worker in workers.trainers else Phase.ROLLOUT
            (device, *_) = workers.devices_of(worker)
            sizes = {"state_bytes": room.state_bytes, "free_bytes": room.free_bytes}
            self._outbox.add_note(AdapterRoomNote(pipeline=workers.id, device=str(device), phase=phase, **sizes))

    def _end_processes(self, workers: PipelineWorkers) -> None:
        del self._workers_by_pipeline[workers.id]
        self._on_ending(workers)
        for worker in workers.processes:
            self._kill(worker)

    def _kill(self, worker: Worker) -> None:
        self._forget(worker)
        worker.kill()
        self._calls.fail_calls(worker)

    def _forget(self, worker: Worker) -> None:
        del self._pipeline_by_worker[worker]
        self._standstills.forget(worker)
        self._host_memory.leave(worker.name)
        self._workplace.forget(worker)

    def _devices(self, nodes: Iterable[NodeId]) -> list[DeviceId]:
        return [device for node in nodes for device in self._cluster.pools[node.pool].devices(node)]


def tenancy_of(submission: Submission) -> str | None:
    """The key of rollouts that are decoded in one batch; None for a process of its own."""
    return None if submission.pipeline.is_filler else rollout_base(submission.config) or None


def _cause_of(error: RlmuxError, *, is_user_code: bool = False) -> FailureCause:
    """`is_user_code`: whether the worker calls code of the user, and little else."""
    if isinstance(error, DeviceMemoryError | HostMemoryError):
        return FailureCause.OUT_OF_MEMORY
    if isinstance(error, WorkerLostError):
        return FailureCause.LOST_WORKER
    return FailureCause.USER_CODE if is_user_code else FailureCause.OTHER


def _is_stopped(worker: Worker) -> bool:
    activity = worker.activity()
    return activity is not None and activity.is_stopped
