"""What the backends share: orders become series of bounded calls to workers, wherever those live.

    per pipeline    host worker ── prompts, environments, rewards
                    rollout worker ── one per device of its rollout nodes
                    train worker ── on its training devices
    weights         train worker ──▶ a file in shared memory ──▶ rollout workers     (never through here)
    trajectories    rollout worker ──▶ here ──▶ host;     host ──▶ bytes ──▶ here ──▶ train worker

An order is a series of bounded calls. Between two calls is a safe point: that is where a Pause takes effect, where
progress is reported, and what a lost worker falls back to. Everything runs in one thread, on callbacks.

A rollout worker that dies is replaced and does again what it had not handed over. A host or train worker that dies
takes its pipeline back to the newest checkpoint, and so does a lost node, once the pipeline has another. All give the
same weights as if nothing had happened, since trajectories and updates are functions of the config.
"""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from rlmux.core.actions import (
    Action,
    Admit,
    MigrateShard,
    Pause,
    Prefetch,
    Release,
    Relocate,
    RunStage,
    SetDeviceFraction,
    Switch,
)
from rlmux.core.errors import RlmuxError, StorageError, WorkerLostError
from rlmux.core.events import (
    ChunkFinished,
    Event,
    NodeJoined,
    NodeLost,
    PipelineFailed,
    PipelineRestarted,
    ReplyArrived,
    StageFinished,
    StagePaused,
    TrajectoriesMigrated,
    WorkerLost,
)
from rlmux.core.model import Cluster, DeviceId, NodeId, OrderId, Phase, PipelineId, Placement, Stage
from rlmux.rl.config import TrainingConfig
from rlmux.rl.types import FinishedTurn, PartialTrajectory, TrainReport, TrajectoryId, TrajectoryRequest, TurnReply
from rlmux.runtime.backend import Note, Submission
from rlmux.runtime.checkpoints import CheckpointFolder, Written, checkpoint_folder
from rlmux.runtime.memory import HostMemory
from rlmux.runtime.rollout_record import RolloutRecord
from rlmux.runtime.workers import EnvWorker, RolloutChunk, RolloutChunkResult, RolloutWorker, StepBatch, TrainWorker

_PATIENCE_S = 0.02
"""So long the host may wait for environments while others of its trajectories decode: their turns end meanwhile."""
_QUIET_PATIENCE_S = 0.1
"""While none does."""


class Worker(Protocol):
    """One worker, wherever it lives: bounded calls, answered in order."""

    name: str
    pid: int | None

    def call(self, now_s: float, method: str, args: tuple[Any, ...], then: Callable[[Any], None]) -> None:
        """Have it run a method; `then` gets the result. Raises WorkerLostError if it is gone."""

    def receive(self, now_s: float) -> None:
        """Take the answer that is there. Raises what the method raised, WorkerLostError if the worker is gone."""

    def abandoned(self, method: str) -> list[Callable[[Any], None]]:
        """Who still waits for calls of this kind, once the worker is given up."""

    def is_overdue(self, now_s: float) -> bool:
        """It has not answered within its limit."""

    def end(self) -> None:
        """Let it finish its present call, then leave."""

    def kill(self) -> None:
        """End it now."""


class Workplace(Protocol):
    """Where workers live: processes of this machine, or actors of a cluster."""

    def spawn(
        self,
        name: str,
        make_worker: Callable[..., Any],
        args: tuple[Any, ...],
        *,
        device: DeviceId | None,
        log_path: Path,
        call_limit_s: float,
    ) -> Worker:
        """Start a worker, pinned to its device."""

    def wait(self, timeout_s: float) -> Sequence[Worker]:
        """Workers that have answered or died, waiting for the first."""

    def deliver(self, path: Path, trainer: Worker, receivers: Sequence[Worker], then: Callable[[], None]) -> None:
        """Have the weights that a trainer wrote where the receivers read them, then go on; never waits."""

    def forget(self, worker: Worker) -> None:
        """Stop watching a worker that is about to be ended."""

    def node_changes(self) -> Sequence[tuple[NodeId, bool]]:
        """(node, is it there now) for every node that went or came since the last call."""

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerOptions:
    """How workers are run; none of it can change a result."""

    chunk_s: float = 0.5
    """Longest uninterrupted piece of work: how soon a Pause is served."""
    chunk_decode_steps: int = 1_000_000
    """Decode steps in a piece, for tests that want many safe points."""
    multi_turn_decode_steps: int = 8
    """The same for multi-turn tasks: finished turns wait that long for their environment."""
    call_limit_s: float = 120.0
    """A worker that takes longer than this for one call is taken for dead."""
    checkpoint_every: int = 1
    """Steps between checkpoints; the last step always has one."""
    keep_checkpoints: int = 2
    """How far damaged ones can be fallen back from, beyond what staleness needs."""
    max_losses: int = 3
    """Deaths of one worker that its pipeline survives without a step further than ever published in between."""


@dataclass(slots=True)
class _Share:
    """What one device has to do, and has done, of a step's rollout."""

    step: int
    to_submit: list[TrajectoryRequest] = field(default_factory=list)
    partials: list[PartialTrajectory] = field(default_factory=list)
    replies: list[TurnReply] = field(default_factory=list)
    released: list[TrajectoryId] = field(default_factory=list)
    unfinished: dict[TrajectoryId, TrajectoryRequest] = field(default_factory=dict)
    """Not yet over as far as the host has said: what a lost worker has to do again."""
    is_begun: bool = False
    """Its worker was given some of it."""
    is_lost: bool = False
    """Its worker died: what the host still answers it is for trajectories that begin anew elsewhere."""
    moved_to: _Share | None = None
    is_asleep: bool = False
    """Paused with nothing to compute until an environment replies."""


@dataclass(slots=True)
class _Running:
    """An order under way."""

    action: RunStage
    device_fraction: float
    """Share of its devices, from the next call on."""
    seconds: float = 0.0
    switch_s: float = 0.0
    tokens: int = 0
    is_pausing: bool = False
    is_calling: bool = True
    """A call is out, or queued, that will carry the order on."""


@dataclass(slots=True)
class _Workers:
    """One admitted pipeline's processes and what they hold."""

    submission: Submission
    placement: Placement
    folder: Path
    weights: Path
    checkpoints: CheckpointFolder
    host: Worker
    trainer: Worker
    rollout: dict[DeviceId, Worker]
    version_by_device: dict[DeviceId, int] = field(default_factory=dict)
    """Weight version each rollout worker holds. A new worker holds the model's initial weights: that is version 0
    unless there is a warm start, which makes version 0 of them."""
    shares: dict[DeviceId, _Share] = field(default_factory=dict)
    requests_by_step: dict[int, tuple[Sequence[TrajectoryRequest], bool]] = field(default_factory=dict)
    """Asked of the host ahead of time: (requests, is the task single-turn)."""
    waiting_for_requests: list[Callable[[], None]] = field(default_factory=list)
    unasked: list[tuple[_Share, FinishedTurn]] = field(default_factory=list)
    """Turns that ended while the host was busy."""
    asked: dict[TrajectoryId, _Share] = field(default_factory=dict)
    """Turns that the host has not answered yet: it has them, and their environments think."""
    is_asking: bool = False
    rollout_by_step: dict[int, RolloutRecord] = field(default_factory=dict)
    batch_by_step: dict[int, StepBatch] = field(default_factory=dict)
    trainer_step: int = 0
    """The step whose batch the trainer has."""
    metrics: dict[str, float] = field(default_factory=dict)
    num_losses_by_worker: dict[str, int] = field(default_factory=dict)
    """Since `furthest_step` was published."""
    furthest_step: int = 0
    is_single_turn: bool = True

    @property
    def config(self) -> TrainingConfig:
        return self.submission.config

    @property
    def processes(self) -> list[Worker]:
        return [self.host, self.trainer, *self.rollout.values()]


class WorkerBackend:
    """See the module's picture. Everything it starts ends with `close`."""

    def __init__(
        self,
        cluster: Cluster,
        folder: Path,
        workplace: Workplace,
        weights_folder: Path,
        *,
        options: WorkerOptions | None = None,
        start_s: float = 0.0,
    ) -> None:
        self._cluster = cluster
        self._folder = folder
        self._workplace = workplace
        self._weights_folder = weights_folder
        self._options = options or WorkerOptions()
        self._zero = time.monotonic() - start_s
        self._submissions: dict[PipelineId, Submission] = {}
        self._workers: dict[PipelineId, _Workers] = {}
        self._sha256: dict[PipelineId, str] = {}
        self._running: dict[OrderId, _Running] = {}
        self._events: list[Event] = []
        self._notes: list[Note] = []
        self._pipeline_by_worker: dict[int, PipelineId] = {}
        self._host_memory = HostMemory(cluster)
        self._homeless: dict[PipelineId, _Workers] = {}
        """Lost a node and wait for another placement."""
        self._told_to_begin_anew: set[PipelineId] = set()
        """Begin from a checkpoint that the scheduler has not heard of yet (membership tests only); what it orders of
        them until then it will take back."""

    def now_s(self) -> float:
        return time.monotonic() - self._zero

    def add_pipeline(self, submission: Submission) -> None:
        self._submissions[submission.pipeline.id] = submission

    def weights_sha256(self, pipeline: PipelineId) -> str | None:
        return self._sha256.get(pipeline)

    def execute(self, action: Action) -> None:
        match action:
            case RunStage() | MigrateShard() if action.pipeline in self._told_to_begin_anew:
                pass
            case Admit():
                self._admit(action)
            case RunStage(stage=Stage.GENERATE):
                self._run_share(action)
            case RunStage(stage=Stage.REWARD):
                self._run_reward(action)
            case RunStage(stage=Stage.PUBLISH):
                self._run_publish(action)
            case RunStage():
                self._run_training(action)
            case Pause():
                self._pause(action.order)
            case SetDeviceFraction():
                if action.order in self._running:  # else it ended meanwhile
                    self._running[action.order].device_fraction = action.device_fraction
            case MigrateShard():
                self._migrate(action)
            case Prefetch():
                self._prefetch(action)
            case Relocate():
                self._replace(action)
            case Release():
                self._release(action.pipeline)
            case _:
                pass  # Refuse and Queue are the controller's to show

    def poll(self, timeout_s: float) -> tuple[Sequence[Event], Sequence[Note]]:
        if self._events:  # of orders given since the last poll: the scheduler may have heard of later things
            self._events = [replace(event, time_s=self.now_s()) for event in self._events]
        else:
            ready = self._workplace.wait(timeout_s)
            for node, is_there in self._workplace.node_changes():
                self._change_node(node, is_there=is_there)
            for worker in ready:
                self._receive(worker)
            self._end_overdue_workers()
        events, notes = self._events, self._notes
        self._events, self._notes = [], []
        restarted = [event.pipeline for event in events if isinstance(event, PipelineRestarted)]
        self._told_to_begin_anew.difference_update(restarted)
        return events, notes

    def close(self) -> None:
        for pipeline in list(self._workers):
            self._release(pipeline)
        self._workplace.close()
        shutil.rmtree(self._weights_folder, ignore_errors=True)

    # ------------------------------------------------------------------ processes

    def _admit(self, action: Admit) -> None:
        submission = self._submissions[action.pipeline]
        folder = self._folder / submission.config.name
        folder.mkdir(mode=0o700, exist_ok=True)
        weights = self._weights_folder / submission.config.name
        weights.mkdir(mode=0o700, exist_ok=True)
        checkpoints = checkpoint_folder(
            submission,
            self._folder,
            say=lambda text: self._notes.append(
                Note(type="warning", fields={"pipeline": action.pipeline, "reason": text})
            ),
        )
        step = self._start(submission, action.placement, folder, weights, checkpoints)
        before = self._homeless.pop(action.pipeline, None)
        if before is not None:
            self._keep_count(before, self._workers[action.pipeline])
            self._told_to_begin_anew.add(action.pipeline)
            self._events.append(PipelineRestarted(time_s=self.now_s(), pipeline=action.pipeline, restored_step=step))

    def _replace(self, action: Relocate) -> None:
        """Between two steps: go on from a checkpoint on other nodes, once the one under way is written."""
        workers = self._workers[action.pipeline]
        workers.placement = action.placement
        self._told_to_begin_anew.add(action.pipeline)

        def move(written: Sequence[Written]) -> None:
            if self._workers.get(action.pipeline) is workers:
                self._checkpointed(workers, written)
                self._restart(action.pipeline)

        self._call(workers, workers.trainer, "finish_checkpoint", (), move)

    def _start(
        self, submission: Submission, placement: Placement, folder: Path, weights: Path, checkpoints: CheckpointFolder
    ) -> int:
        """Start a pipeline's processes from its newest good checkpoint; returns that step, -1 without one."""
        config = submission.config
        checkpoints.remove_leftovers()
        restored = checkpoints.newest(before=config.num_steps)
        step = restored.step if restored else (-1 if submission.pipeline.has_sft_warmup else 0)
        if restored and restored.weights_sha256:
            self._sha256[submission.pipeline.id] = restored.weights_sha256
        train_device = self._devices(placement.train_nodes)[0]
        host = self._spawn(config, "host", EnvWorker, (config,), None, folder)
        trainer = self._spawn(
            config, "train", TrainWorker, (config, restored.path if restored else None), train_device, folder
        )
        rollout = {
            device: self._spawn(config, f"rollout-{device}", RolloutWorker, (config,), device, folder)
            for device in self._devices(placement.rollout_nodes)
        }
        workers = _Workers(submission, placement, folder, weights, checkpoints, host, trainer, rollout)
        workers.furthest_step = max(step, 0)
        self._workers[submission.pipeline.id] = workers
        for process in workers.processes:
            self._listen(submission.pipeline.id, process)
        return step

    def _spawn(
        self,
        config: TrainingConfig,
        role: str,
        make_worker: Callable[..., Any],
        args: tuple[Any, ...],
        device: DeviceId | None,
        folder: Path,
    ) -> Worker:
        process = self._workplace.spawn(
            f"{config.name}/{role}",
            make_worker,
            args,
            device=device,
            log_path=folder / "workers.log",
            call_limit_s=self._call_limit_s(config, role),
        )
        self._notes.append(Note(type="worker", fields={"pipeline": config.name, "role": role, "pid": process.pid}))
        if device is not None:
            footprint = self._submissions[PipelineId(config.name)].pipeline.footprint
            self._host_memory.pin(process.name, device, footprint, Phase.TRAIN if role == "train" else Phase.ROLLOUT)
        return process

    def _call_limit_s(self, config: TrainingConfig, role: str) -> float:
        """User code has a limit of its own for each answer; a call of the host covers many answers."""
        if role != "host":
            return self._options.call_limit_s
        num_answers = config.algorithm.prompts_per_step * config.algorithm.group_size
        return self._options.call_limit_s + config.task.reward_timeout_s * num_answers

    def _num_kept(self, submission: Submission) -> int:
        """Checkpoints. With gaps between them, each brings along the older versions that staleness needs."""
        keep, staleness = self._options.keep_checkpoints, submission.pipeline.staleness
        return keep + staleness if self._options.checkpoint_every == 1 else keep * (staleness + 1)

    def _listen(self, pipeline: PipelineId, process: Worker) -> None:
        self._pipeline_by_worker[id(process)] = pipeline

    def _devices(self, nodes: Iterable[NodeId]) -> list[DeviceId]:
        return [device for node in nodes for device in self._cluster.pools[node.pool].devices(node)]

    def _receive(self, process: Worker) -> None:
        pipeline = self._pipeline_by_worker.get(id(process))
        if pipeline is None:
            return  # ended by an earlier answer of the same round
        is_new = process.pid is None
        try:
            process.receive(self.now_s())
        except WorkerLostError as error:
            self._lose(pipeline, process, str(error))
        except StorageError:
            raise  # nobody's fault, and nobody can go on
        except RlmuxError as error:
            self._fail(pipeline, str(error))
        else:
            if is_new:  # an actor's process is known by its first answer
                self._tell_worker(pipeline, process)

    def _tell_worker(self, pipeline: PipelineId, process: Worker) -> None:
        role = process.name.partition("/")[2]
        self._notes.append(Note(type="worker", fields={"pipeline": pipeline, "role": role, "pid": process.pid}))

    def _call(
        self, workers: _Workers, process: Worker, method: str, args: tuple[Any, ...], then: Callable[..., None]
    ) -> None:
        with contextlib.suppress(WorkerLostError):  # its pipe is at its end: the next poll finds and deals with that
            process.call(self.now_s(), method, args, then)

    def _end_overdue_workers(self) -> None:
        now_s = self.now_s()
        for pipeline, workers in list(self._workers.items()):
            for process in workers.processes:
                if process.is_overdue(now_s):
                    self._lose(pipeline, process, f"{process.name} gave no answer in time")
                    break

    def _lose(self, pipeline: PipelineId, process: Worker, reason: str) -> None:
        workers = self._workers[pipeline]
        num_losses = workers.num_losses_by_worker.get(process.name, 0) + 1
        workers.num_losses_by_worker[process.name] = num_losses
        self._notes.append(Note(type="loss", fields={"pipeline": pipeline, "reason": reason}))
        if num_losses > self._options.max_losses:
            self._fail(pipeline, f"{reason}; that worker was lost {num_losses} times without a step between")
            return
        device = next((device for device, other in workers.rollout.items() if other is process), None)
        if device is None or any(isinstance(run.action, MigrateShard) for run in self._orders_of(pipeline)):
            self._restart(pipeline)
        else:
            self._replace_rollout_worker(pipeline, device)

    def _replace_rollout_worker(self, pipeline: PipelineId, device: DeviceId) -> None:
        workers = self._workers[pipeline]
        self._kill(workers.rollout[device])
        workers.rollout[device] = self._spawn(
            workers.config, f"rollout-{device}", RolloutWorker, (workers.config,), device, workers.folder
        )
        self._listen(pipeline, workers.rollout[device])
        workers.version_by_device.pop(device, None)
        share = workers.shares.get(device)
        if share is not None:
            share.is_lost = True
            workers.shares[device] = _Share(
                share.step, to_submit=list(share.unfinished.values()), unfinished=share.unfinished
            )
        for run in self._orders_of(pipeline):
            if device in run.action.devices and run.action.stage is Stage.GENERATE:
                del self._running[run.action.order]
        self._events.append(WorkerLost(time_s=self.now_s(), pipeline=pipeline, device=device))

    def _restart(self, pipeline: PipelineId) -> None:
        """Everything of the pipeline again from its newest checkpoint."""
        workers = self._workers.pop(pipeline)
        self._drop_orders(pipeline)
        for process in workers.processes:
            self._kill(process)
        step = self._start(workers.submission, workers.placement, workers.folder, workers.weights, workers.checkpoints)
        self._keep_count(workers, self._workers[pipeline])
        self._events.append(PipelineRestarted(time_s=self.now_s(), pipeline=pipeline, restored_step=step))

    @staticmethod
    def _keep_count(before: _Workers, after: _Workers) -> None:
        after.num_losses_by_worker = before.num_losses_by_worker
        after.furthest_step = max(before.furthest_step, after.furthest_step)

    def _change_node(self, node: NodeId, *, is_there: bool) -> None:
        """Whoever is pinned to a lost node waits for another placement, and goes on there from a checkpoint."""
        if is_there:
            self._events.append(NodeJoined(time_s=self.now_s(), node=node))
            return
        for pipeline, workers in list(self._workers.items()):
            if node not in workers.placement.nodes:
                continue
            del self._workers[pipeline]
            self._drop_orders(pipeline)
            for process in workers.processes:
                self._kill(process)
            self._homeless[pipeline] = workers
            self._notes.append(Note(type="loss", fields={"pipeline": pipeline, "reason": f"node {node} is gone"}))
        self._events.append(NodeLost(time_s=self.now_s(), node=node))

    def _fail(self, pipeline: PipelineId, reason: str) -> None:
        workers = self._workers.pop(pipeline)
        self._drop_orders(pipeline)
        for process in workers.processes:
            self._kill(process)
        shutil.rmtree(workers.weights, ignore_errors=True)
        log = workers.folder / "workers.log"
        self._notes.append(Note(type="failure", fields={"pipeline": pipeline, "reason": reason, "traceback": str(log)}))
        self._events.append(PipelineFailed(time_s=self.now_s(), pipeline=pipeline, reason=reason))

    def _release(self, pipeline: PipelineId) -> None:
        workers = self._workers.pop(pipeline, None)
        if workers is None:
            return  # it failed: its processes are gone
        self._drop_orders(pipeline)
        for process in workers.processes:
            self._forget(process)
            process.end()
            self._answer_for(process)
        shutil.rmtree(workers.weights, ignore_errors=True)

    def _kill(self, process: Worker) -> None:
        self._forget(process)
        process.kill()
        self._answer_for(process)

    def _forget(self, process: Worker) -> None:
        del self._pipeline_by_worker[id(process)]
        self._host_memory.leave(process.name)
        self._workplace.forget(process)

    @staticmethod
    def _answer_for(process: Worker) -> None:
        """An ended worker holds nothing any more: whoever waited for it to make room may go on."""
        for offloaded in process.abandoned("offload"):
            offloaded(0)

    def _orders_of(self, pipeline: PipelineId) -> list[_Running]:
        return [run for run in self._running.values() if run.action.pipeline == pipeline]

    def _drop_orders(self, pipeline: PipelineId) -> None:
        for run in self._orders_of(pipeline):
            del self._running[run.action.order]

    # ------------------------------------------------------------------ rollout

    def _run_share(self, action: RunStage) -> None:
        workers = self._workers[action.pipeline]
        run = self._running[action.order] = _Running(action, action.device_fraction)
        self._evict_then(run, lambda: self._begin_share(workers, run))

    def _begin_share(self, workers: _Workers, run: _Running) -> None:
        if run.action.order in self._running:  # else its pipeline began again while others made room
            self._with_shares(workers, run.action.step, partial(self._next_chunk, workers, run))

    def _with_shares(self, workers: _Workers, step: int, go_on: Callable[[], None]) -> None:
        """Go on once the step's requests are dealt out."""
        if workers.shares and all(share.step == step for share in workers.shares.values()):
            go_on()
        elif step in workers.requests_by_step:
            self._split_requests(workers, step)
            go_on()
        else:
            workers.waiting_for_requests.append(partial(self._with_shares, workers, step, go_on))
            if len(workers.waiting_for_requests) == 1:
                self._ask_for_requests(workers, step)

    def _ask_for_requests(self, workers: _Workers, step: int) -> None:
        then = partial(self._requests_ready, workers, step)
        self._call(workers, workers.host, "begin_step", (step,), then)

    def _requests_ready(self, workers: _Workers, step: int, answer: tuple[Sequence[TrajectoryRequest], bool]) -> None:
        if all(share.step < step for share in workers.shares.values()):  # else it was asked twice
            workers.requests_by_step[step] = answer
        waiting, workers.waiting_for_requests = workers.waiting_for_requests, []
        for go_on in waiting:
            go_on()

    def _split_requests(self, workers: _Workers, step: int) -> None:
        """Deal whole prompt groups out to the devices; who samples a trajectory does not change it."""
        requests, workers.is_single_turn = workers.requests_by_step.pop(step)
        devices = list(workers.rollout)
        workers.shares = {device: _Share(step) for device in devices}
        for request in requests:
            share = workers.shares[devices[request.id.prompt % len(devices)]]
            share.to_submit.append(request)
            share.unfinished[request.id] = request

    def _next_chunk(self, workers: _Workers, run: _Running) -> None:
        if run.action.order not in self._running:
            return
        device, version = run.action.devices[0], run.action.weight_version
        share = workers.shares[device]
        options = self._options
        initial = None if workers.submission.pipeline.has_sft_warmup else 0
        needs_weights = workers.version_by_device.get(device, initial) != version
        chunk = RolloutChunk(
            weights=(self._weights_path(workers, version), version) if needs_weights else None,
            requests=share.to_submit,
            partials=share.partials,
            replies=share.replies,
            released=share.released,
            max_decode_steps=options.chunk_decode_steps if workers.is_single_turn else options.multi_turn_decode_steps,
            max_seconds=options.chunk_s,
            is_load_needed=run.action.switch is not Switch.NONE and run.seconds == 0.0,
            device_fraction=run.device_fraction,
        )
        if chunk.is_load_needed:
            self._host_memory.load(workers.rollout[device].name)
        workers.version_by_device[device] = version
        share.to_submit, share.partials, share.replies, share.released = [], [], [], []
        share.is_begun = True
        run.is_calling = True
        self._call(workers, workers.rollout[device], "run_chunk", (chunk,), partial(self._chunk_done, workers, run))

    def _weights_path(self, workers: _Workers, version: int) -> Path:
        exported = workers.weights / f"{version}.safetensors"
        if exported.exists():
            return exported
        return workers.checkpoints.weights(version)

    def _chunk_done(self, workers: _Workers, run: _Running, result: RolloutChunkResult) -> None:
        report = result.report
        device = run.action.devices[0]
        share = workers.shares[device]
        run.seconds += report.seconds
        run.switch_s += result.load_s
        run.tokens += report.sampled_tokens
        run.is_calling = False
        record = workers.rollout_by_step.setdefault(run.action.step, RolloutRecord())
        record.computed(report.bands)
        if report.finished:
            if not workers.is_single_turn:
                for turn in report.finished:
                    record.turn_ended(turn.id, self.now_s())
            workers.unasked += [(share, turn) for turn in report.finished]
            if not workers.is_asking:
                self._ask_host(workers)
        if report.num_active + report.num_waiting + report.num_waiting_for_env == 0 and not (
            share.partials or share.to_submit
        ):
            share.unfinished.clear()
            self._end(run)
            return
        has_free_slot = report.num_waiting_for_env < workers.config.rollout.num_slots  # else nobody can begin meanwhile
        can_go_on = bool(report.num_active or (report.num_waiting and has_free_slot) or _has_input(share))
        if run.is_pausing:
            self._end_paused(run, None if can_go_on else share)
        else:
            self._events.append(
                ChunkFinished(
                    time_s=self.now_s(),
                    order=run.action.order,
                    num_active=report.num_active,
                    num_waiting=report.num_waiting,
                    num_waiting_for_env=report.num_waiting_for_env,
                    tokens=run.tokens,
                    seconds=run.seconds,
                )
            )
            if can_go_on:
                self._next_chunk(workers, run)

    def _ask_host(self, workers: _Workers) -> None:
        """Pass on what ended, and wait a little for whichever environment is the first to have thought."""
        turns = [turn for _, turn in workers.unasked]
        workers.asked.update((turn.id, share) for share, turn in workers.unasked)
        workers.unasked = []
        workers.is_asking = True
        is_decoding = any(run.is_calling for run in self._orders_of(workers.submission.pipeline.id))
        patience_s = _PATIENCE_S if is_decoding else _QUIET_PATIENCE_S
        self._call(workers, workers.host, "on_turns", (turns, patience_s), partial(self._turns_answered, workers))

    def _turns_answered(self, workers: _Workers, answer: tuple[list[TurnReply], list[TrajectoryId]]) -> None:
        """Environments have spoken, or trajectories are over. A worker that had nothing else to do goes on."""
        reply_by_trajectory = {reply.id: reply for reply in answer[0]}
        share_by_trajectory = {
            trajectory: workers.asked.pop(trajectory)
            for trajectory in sorted([*reply_by_trajectory, *answer[1]])
            if trajectory in workers.asked
        }
        workers.is_asking = False
        if workers.unasked or workers.asked:
            self._ask_host(workers)
        spoken_to: dict[int, _Share] = {}
        for trajectory, share in share_by_trajectory.items():
            if (record := workers.rollout_by_step.get(share.step)) is not None:
                record.answered(trajectory, self.now_s())
            while share.moved_to is not None:  # while its environment was thinking
                share = share.moved_to
            reply = reply_by_trajectory.get(trajectory)
            if reply is None:  # it is over
                share.unfinished.pop(trajectory, None)
            if share.is_lost or workers.is_single_turn:  # a single turn's slot has gone to another long since
                continue
            if reply is None:
                share.released.append(trajectory)
            else:
                share.replies.append(reply)
            spoken_to[id(share)] = share
        for share in spoken_to.values():
            self._go_on(workers, share)

    def _go_on(self, workers: _Workers, share: _Share) -> None:
        """It may have something to do now: an order that had nothing goes on, or the scheduler learns of it."""
        if not _has_input(share):
            return
        device = next((device for device, other in workers.shares.items() if other is share), None)
        if device is None:
            return  # of a step that is over
        for run in self._orders_of(workers.submission.pipeline.id):
            if run.action.stage is Stage.GENERATE and run.action.devices[0] == device:
                if not run.is_calling:
                    self._next_chunk(workers, run)
                return
        if share.is_asleep:
            share.is_asleep = False
            pipeline = workers.submission.pipeline.id
            self._events.append(ReplyArrived(time_s=self.now_s(), pipeline=pipeline, device=device))

    def _pause(self, order: OrderId) -> None:
        run = self._running.get(order)
        if run is None:
            return  # it ended meanwhile; the event is on its way
        run.is_pausing = True
        if not run.is_calling:  # it waits for its environments
            self._end_paused(run, self._workers[run.action.pipeline].shares[run.action.devices[0]])

    def _migrate(self, action: MigrateShard) -> None:
        workers = self._workers[action.pipeline]
        self._with_shares(workers, action.step, partial(self._take, workers, action, self.now_s()))

    def _take(self, workers: _Workers, action: MigrateShard, started_s: float) -> None:
        """Its worker is asked only for what it was given."""
        source = workers.shares[action.source]
        hand_over = partial(self._hand_over, workers, action, started_s)
        if source.is_begun:
            self._call(workers, workers.rollout[action.source], "take_partials", (action.copies_kv,), hand_over)
        else:
            hand_over([])

    def _hand_over(
        self, workers: _Workers, action: MigrateShard, started_s: float, partials: list[PartialTrajectory]
    ) -> None:
        source, target = workers.shares[action.source], workers.shares[action.target]
        target.partials += [*partials, *source.partials]
        target.to_submit += source.to_submit
        target.replies += source.replies
        target.released += source.released
        target.unfinished.update(source.unfinished)
        source.moved_to = target
        workers.shares[action.source] = _Share(action.step)
        num_moved = len(partials) + len(source.partials) + len(source.to_submit)
        now_s = self.now_s()
        self._events.append(
            TrajectoriesMigrated(
                time_s=now_s, order=action.order, num_trajectories=num_moved, seconds=now_s - started_s
            )
        )
        self._go_on(workers, target)

    # ------------------------------------------------------------------ reward, training, publishing

    def _run_reward(self, action: RunStage) -> None:
        """Complete once everything that was sampled is scored: answers come in the order of the calls."""
        workers = self._workers[action.pipeline]
        run = self._running[action.order] = _Running(action, action.device_fraction)
        if workers.unasked:
            self._ask_host(workers)
        self._call(workers, workers.host, "finish_step", (action.step,), partial(self._batch_ready, workers, run))

    def _batch_ready(self, workers: _Workers, run: _Running, batch: StepBatch) -> None:
        step = run.action.step
        workers.batch_by_step[step] = batch
        if step < workers.config.num_steps:
            self._ask_for_requests(workers, step + 1)  # the host has nothing else to do while others compute
        if workers.config.algorithm.staleness == 0:
            self._hand_batch_to_trainer(workers, step)  # it is idle until then; an asynchronous one may be training
        self._end(run)

    def _run_training(self, action: RunStage) -> None:
        workers = self._workers[action.pipeline]
        run = self._running[action.order] = _Running(action, action.device_fraction)
        self._evict_then(run, lambda: self._begin_training(workers, run))

    def _begin_training(self, workers: _Workers, run: _Running) -> None:
        if run.action.order not in self._running:
            return
        step = run.action.step
        if run.action.stage is not Stage.SFT_WARMUP and workers.trainer_step != step:
            self._hand_batch_to_trainer(workers, step)
        self._next_train_call(workers, run)

    def _hand_batch_to_trainer(self, workers: _Workers, step: int) -> None:
        workers.trainer_step = step
        self._call(workers, workers.trainer, "begin_step", (workers.batch_by_step[step].payload,), lambda _: None)

    def _next_train_call(self, workers: _Workers, run: _Running) -> None:
        is_load_needed = run.action.switch is not Switch.NONE and run.seconds == 0.0
        if is_load_needed:
            self._host_memory.load(workers.trainer.name)
        args = (run.action.stage.value, self._options.chunk_s, is_load_needed, run.device_fraction)
        self._call(workers, workers.trainer, "run_stage", args, partial(self._train_call_done, workers, run))

    def _train_call_done(
        self, workers: _Workers, run: _Running, result: tuple[TrainReport, float, Sequence[Written]]
    ) -> None:
        report, load_s, written = result
        self._checkpointed(workers, written)
        run.seconds += report.seconds
        run.switch_s += load_s
        run.tokens += report.tokens
        if report.is_done:
            workers.metrics.update(report.metrics)
            self._end(run)
        elif run.is_pausing:
            self._end_paused(run)
        else:
            self._events.append(
                ChunkFinished(
                    time_s=self.now_s(),
                    order=run.action.order,
                    num_active=report.micro_batches_total - report.micro_batches_done,
                    num_waiting=0,
                    tokens=run.tokens,
                    seconds=run.seconds,
                )
            )
            self._next_train_call(workers, run)

    def _run_publish(self, action: RunStage) -> None:
        """Weights first, so that the next rollout can begin; the checkpoint is written beside it.

        The last step's checkpoint is there before its end is told: nobody is released without one.
        """
        workers = self._workers[action.pipeline]
        run = self._running[action.order] = _Running(action, action.device_fraction)
        step = action.step
        is_last = step == workers.config.num_steps
        if is_last:
            self._begin_checkpoint(workers, step)
            self._call(workers, workers.trainer, "finish_checkpoint", (), partial(self._checkpointed, workers))
        path = workers.weights / f"{step}.safetensors"
        self._call(workers, workers.trainer, "publish", (path,), partial(self._published, workers, run))
        # Where there are gaps between checkpoints, each comes with the versions that staleness needs.
        is_due = -step % self._options.checkpoint_every <= workers.config.algorithm.staleness
        if not is_last and is_due:
            self._begin_checkpoint(workers, step)

    def _published(self, workers: _Workers, run: _Running, answer: tuple[int, str]) -> None:
        version, sha256 = answer
        pipeline = run.action.pipeline
        self._sha256[pipeline] = sha256
        if version > workers.furthest_step:
            workers.furthest_step = version
            workers.num_losses_by_worker.clear()
        (workers.weights / f"{version - workers.config.algorithm.staleness - 2}.safetensors").unlink(missing_ok=True)
        batch = workers.batch_by_step.pop(version, None)
        if batch is not None:
            fields = _step_fields(pipeline, version, batch, workers.metrics)
            self._notes.append(Note(type="step", fields={**fields, "weights_sha256": sha256}))
            self._note_rollout(workers, version, batch)
        workers.metrics = {}
        path = workers.weights / f"{version}.safetensors"
        receivers = list(workers.rollout.values())
        self._workplace.deliver(path, workers.trainer, receivers, partial(self._delivered, run))

    def _note_rollout(self, workers: _Workers, step: int, batch: StepBatch) -> None:
        record = workers.rollout_by_step.pop(step, None)
        if record is not None:  # else it was sampled before a crash
            config = workers.config
            slots, group_size = config.rollout.num_slots, config.algorithm.group_size
            self._notes.append(record.note(config.name, step, batch, slots=slots, group_size=group_size))

    def _delivered(self, run: _Running) -> None:
        if run.action.order in self._running:  # else its pipeline was cancelled meanwhile
            self._end(run)

    def _begin_checkpoint(self, workers: _Workers, step: int) -> None:
        args = (workers.checkpoints.path(step), self._num_kept(workers.submission))
        self._call(workers, workers.trainer, "checkpoint", args, lambda _: None)

    def _checkpointed(self, workers: _Workers, written: Sequence[Written]) -> None:
        """They would survive a power cut."""
        for each in written:
            fields = {
                "pipeline": workers.submission.pipeline.id,
                "step": workers.checkpoints.step_of(each.folder),
                "seconds": round(each.seconds, 6),
                "stall_s": round(each.stall_s, 6),
            }
            self._notes.append(Note(type="checkpoint", fields=fields))

    # ------------------------------------------------------------------ helpers

    def _evict_then(self, run: _Running, go_on: Callable[[], None]) -> None:
        """Have the states that must make room leave the order's devices, which is part of its switch; then go on."""
        action, began_s = run.action, self.now_s()
        leaving = [
            (workers, process)
            for resident in action.evicted
            if (workers := self._workers.get(resident.pipeline)) is not None
            for process in self._processes_of(workers, resident.phase, action.devices)
        ]
        remaining = len(leaving)

        def one_left(_: int) -> None:
            nonlocal remaining
            remaining -= 1
            if remaining == 0:
                run.switch_s += self.now_s() - began_s
                go_on()

        for workers, process in leaving:
            self._call(workers, process, "offload", (self._spill_path(workers, process),), one_left)
        if not leaving:
            go_on()

    def _prefetch(self, action: Prefetch) -> None:
        workers = self._workers.get(action.pipeline)
        if workers is None:
            return  # it failed, or waits for other nodes
        for process in self._processes_of(workers, action.phase, action.devices):
            if self._host_memory.is_on_disk(process.name):
                self._call(workers, process, "prefetch", (), lambda _: None)

    def _spill_path(self, workers: _Workers, process: Worker) -> Path | None:
        """Where its state goes; None: to host memory."""
        if self._host_memory.offload(process.name):
            return None
        pipeline = workers.submission.pipeline.id
        self._notes.append(Note(type="spill", fields={"pipeline": pipeline, "worker": process.name}))
        return workers.folder / f"spilled-{process.name.rpartition('/')[2]}.safetensors"

    @staticmethod
    def _processes_of(workers: _Workers, phase: Phase, devices: Sequence[DeviceId]) -> list[Worker]:
        if phase is Phase.ROLLOUT:
            return [workers.rollout[device] for device in devices if device in workers.rollout]
        return [workers.trainer]

    def _end_paused(self, run: _Running, asleep: _Share | None = None) -> None:
        """`asleep`: the share that has nothing to compute until an environment replies."""
        if asleep is not None:
            asleep.is_asleep = True
        self._end(run, partial(StagePaused, is_waiting=asleep is not None))

    def _end(self, run: _Running, event: Callable[..., Event] = StageFinished) -> None:
        del self._running[run.action.order]
        self._events.append(
            event(
                time_s=self.now_s(),
                order=run.action.order,
                seconds=run.seconds,
                switch_s=run.switch_s,
                tokens=run.tokens,
            )
        )


def _has_input(share: _Share) -> bool:
    return bool(share.to_submit or share.partials or share.replies or share.released)


def _step_fields(pipeline: PipelineId, step: int, batch: StepBatch, metrics: dict[str, float]) -> dict[str, Any]:
    return {
        "pipeline": pipeline,
        "step": step,
        "metrics": {
            "reward_mean": batch.reward_mean,
            "reward_std": batch.reward_std,
            "tokens": batch.num_tokens,
            "trajectories": batch.num_trajectories,
            "response_len_mean": batch.response_tokens_mean,
            "response_len_max": batch.response_tokens_max,
            "turns_mean": batch.turns_mean,
            **metrics,
        },
    }
