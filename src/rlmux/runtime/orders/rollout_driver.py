"""One pipeline's rollout: its shards, one per device, and the turns for its environments.

    env worker ── begin_step ──▶ requests ── assigned ───▶ shards ── chunks ──▶ rollout workers
        ▲                                                    ▲                       │
        │                                                    └─ replies, released    │ finished turns
        └───────────── on_turns: one call at a time, with all turns that have ended ─┘

Under tail batching (rollout_race.py) only kept turns reach the env worker, and lost trajectories are cut. An
interruptible rollout (rollout_legs.py) has one or two legs a step, and may wait for weights between them.

A shard's order runs chunk after chunk. It waits for its worker's answer or, with nothing to compute, for user code: the
step's prompts, an environment's reply, a migrated shard or a Pause. A shard paused in that state counts as waiting,
and its input is reported as ReplyArrived. The backend soon pauses such an order, and the device goes to others.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import replace
from typing import Any

from rlmux.core.actions import MigrateShard, Switch
from rlmux.core.events import Event, ReplyArrived, TrajectoriesMigrated
from rlmux.core.model import DeviceId, Phase, PipelineId, Stage
from rlmux.core.settle.filler_placement import CHUNK_S
from rlmux.rl.packed_turns import PackedTurns
from rlmux.rl.prompts.backlog import Backlog
from rlmux.rl.types import ChunkReport, FinishedTurn, PartialTrajectory, TrajectoryId, TrajectoryRequest, TurnReply
from rlmux.runtime.backend import WorkerOptions
from rlmux.runtime.orders.determinism_check import EngineProbes
from rlmux.runtime.orders.prompt_sharding import assign_prompts
from rlmux.runtime.orders.resident_states import ResidentStates
from rlmux.runtime.orders.rollout_epochs import RolloutEpochs
from rlmux.runtime.orders.rollout_legs import RolloutLegs
from rlmux.runtime.orders.rollout_race import RolloutRace
from rlmux.runtime.orders.rollout_record import RolloutRecord
from rlmux.runtime.orders.rollout_shard import LiveShard
from rlmux.runtime.orders.running_orders import RunningOrder, RunningOrders
from rlmux.runtime.workers.call_loop import CallLoop, Future, LoopTask, Work
from rlmux.runtime.workers.outbox import Outbox
from rlmux.runtime.workers.pipeline_workers import PipelineWorkers
from rlmux.runtime.workers.worker_calls import RolloutChunk, RolloutChunkResult, StepBatch

_PATIENCE_S = 0.02
"""Longest wait of the env worker for environments, in seconds, while an order of its pipeline computes."""
_RACE_CHUNK_S = 0.1
"""Longest chunk of a race in seconds, after which lost trajectories stop."""
_QUIET_PATIENCE_S = 0.1
"""Longest wait of the env worker for environments, in seconds, while no order computes."""


class RolloutDriver:
    """Drives the rollouts of one pipeline between two starts of its processes."""

    def __init__(
        self,
        workers: PipelineWorkers,
        *,
        calls: CallLoop,
        outbox: Outbox,
        orders: RunningOrders,
        states: ResidentStates,
        probes: EngineProbes,
        options: WorkerOptions,
    ) -> None:
        self._workers = workers
        self._probes = probes
        self._calls = calls
        self._outbox = outbox
        self._orders = orders
        self._states = states
        self._options = options
        is_filler = workers.submission.pipeline.is_filler
        self._chunk_s = min(options.chunk_s, CHUNK_S) if is_filler else options.chunk_s
        self._is_single_turn = True
        self._shards: dict[DeviceId, LiveShard] = {}
        self._version_by_device: dict[DeviceId, int] = {}
        """Weight version of each rollout worker. A new worker has the model's initial weights: version 0 unless an SFT
        warm-up makes version 0 from them."""
        self._requests_by_step: dict[int, Sequence[TrajectoryRequest]] = {}
        """Requests from the env worker that are not assigned to devices yet."""
        self._fetching: set[int] = set()
        """Steps whose requests the env worker is making (membership tests only)."""
        self._waiting_for_requests: list[Future] = []
        self._paused_without_requests: list[DeviceId] = []
        """Devices whose shard was paused before the step's requests arrived."""
        self._unloaded: set[DeviceId] = set()
        """Devices whose worker must load its state with its next chunk (membership tests only)."""
        self._turns_to_send: list[tuple[LiveShard, PackedTurns]] = []
        """Finished turns that are not sent to the env worker yet."""
        self._shard_by_awaited: dict[TrajectoryId, LiveShard] = {}
        """Shards by trajectories that await a reply from the env worker."""
        self._is_sending_turns = False
        self._race: RolloutRace | None = None
        """Race of the present step; None if it trains on all trajectories."""
        self._legs: RolloutLegs | None = None
        """The legs of an interruptible rollout; None for others, and before the first step."""
        self._newest_version = workers.furthest_step
        """The newest weight version that rollout workers can load."""
        self._published: dict[int, str | None] = {}
        """Checksum in the trainer's file of each version, newest last; as many as staleness needs."""
        self._loaded: dict[int, list[str]] = {}
        """Checksums that engines verified since `take_loaded`, by version; empty for engines that report none."""
        self._migration_by_source: dict[DeviceId, LoopTask] = {}
        self._record_by_step: dict[int, RolloutRecord] = {}

    # ------------------------------------------------------------------ orders

    def run(self, order: RunningOrder) -> Generator[Future, Any, Event]:
        """Sample one device's shard until it is over or the order is paused; returns the order's final event."""
        device = order.action.devices[0]
        if order.action.switch is not Switch.NONE:
            self._unloaded.add(device)
        yield from self._states.make_room(order)
        yield from self._assign_prompts(order.action.step, order)
        if order.is_pausing and not self._has_prompts(order.action.step):
            self._paused_without_requests.append(device)
            return order.paused(is_waiting=True)
        yield from self._workers.build(self._workers.rollout[device], self._calls)
        if order.is_pausing and self._workers.submission.pipeline.is_filler:
            return order.paused(is_waiting=False)
        yield from self._probes.probe(self._workers, Phase.ROLLOUT, [self._workers.rollout[device]], order)
        while not self._shards[device].is_over:
            order.is_calling = True
            chunk = self._make_chunk(order, device)
            result: RolloutChunkResult = yield self._calls.call(self._workers.rollout[device], "run_chunk", chunk)
            order.is_calling = False
            self._note_load(chunk, result)
            shard, report = self._shards[device], result.report
            seconds = result.input_s + report.seconds
            order.add(seconds=seconds, switch_s=result.load_s, tokens=report.sampled_tokens)
            order.add_iterations(report.iterations)
            order.add_batch(result.num_together, report.sampled_tokens, report.seconds, result.token_share)
            self._forward_turns(shard, result)
            if self._is_over(shard, report):
                shard.unfinished.clear()
                break
            can_compute = self._can_compute(shard, report)
            if not order.is_pausing:
                self._report_progress(order, report)
                if not can_compute and not self._awaits_weights:
                    yield order.wait_for_input(self._calls.future(), self._outbox.now_s())
                    can_compute = shard.has_input or shard.is_over
            is_pausing = order.is_pausing or (self._awaits_weights and not can_compute)
            if is_pausing and (shard.unfinished or not shard.to_cut):  # else a call that only cuts ends it
                shard.is_waiting_for_env |= not can_compute
                return order.paused(is_waiting=not can_compute)
        self._shards[device].has_finished = True
        return order.finished()

    def migrate(self, action: MigrateShard) -> None:
        """Move all of a device's shard to other devices'."""
        self._migration_by_source[action.source] = self._start(self._migrate(action))

    def finish_step(self, step: int) -> Generator[Future, Any, StepBatch]:
        """The step's batch, once all trajectories are scored: answers come in the order of the calls."""
        if self._turns_to_send:
            self._start(self._send_turns())
        over = () if self._legs is None else (self._legs.end_step(),)
        batch: StepBatch = yield self._calls.call(self._workers.env_worker, "finish_step", step, *over)
        record = self._record_by_step.get(step)
        if record is None or not record.engine_metrics:
            return batch
        return replace(batch, metrics=replace(batch.metrics, engine_metrics=record.engine_metrics))

    def weights_arrived(self, version: int, checksum: str | None) -> None:
        """Record that rollout workers can load this version from now on. `checksum`: in the trainer's file."""
        self._newest_version = version
        self._published[version] = checksum
        self._published.pop(version - self._workers.submission.pipeline.staleness - 2, None)
        if self._legs is not None:
            self._forward(self._legs.weights_arrived(version))

    def prepare(self, step: int) -> None:
        """Fetch a step's requests after the present orders have started: devices come first."""
        self._fetching.add(step)
        self._calls.start_soon(self._fetch_requests(step), pipeline=self._pipeline)

    def take_loaded(self) -> dict[int, list[str]]:
        """Remove and return the checksums of loaded weights, by version; empty for engines that report none."""
        loaded, self._loaded = self._loaded, {}
        return loaded

    def loaded(self) -> dict[int, list[str]]:
        """What `take_loaded` would return, which stays."""
        return {version: list(sums) for version, sums in self._loaded.items()}

    def take_record(self, step: int) -> RolloutRecord | None:
        """Record of the step's rollout; None if it was sampled before the pipeline's processes started."""
        return self._record_by_step.pop(step, None)

    def replace_worker(self, device: DeviceId) -> None:
        """End the orders of a device whose worker was replaced, and restart its unfinished trajectories."""
        self._version_by_device.pop(device, None)
        self._unloaded.discard(device)
        if device in self._shards:
            begun_from = (lambda _: None) if self._legs is None else self._legs.begun_from
            self._shards[device] = self._shards[device].restarted(begun_from)
            self._announce(self._shards[device])
        lost = [order.task for order in self._orders_on(device)]
        for task in [*lost, self._migration_by_source.get(device)]:
            if task is not None:
                self._calls.close(task)

    # ------------------------------------------------------------------ requests

    def _assign_prompts(self, step: int, order: RunningOrder | None = None) -> Work:
        """Wait until the step's requests are assigned to devices, or the order is paused."""
        while not self._has_prompts(step):
            if step in self._requests_by_step:
                self._split_requests(step)
                return
            if order is not None and order.is_pausing:
                return
            dealt_out = self._calls.future()
            self._waiting_for_requests.append(dealt_out)
            if step not in self._fetching:
                self._start(self._fetch_requests(step))
            yield order.wait_for_input(dealt_out, self._outbox.now_s()) if order is not None else dealt_out
            if order is not None:
                order.input = order.waits_since_s = None

    def _has_prompts(self, step: int) -> bool:
        return bool(self._shards) and all(shard.step == step for shard in self._shards.values())

    def _fetch_requests(self, step: int) -> Work:
        answer: tuple[Sequence[TrajectoryRequest], bool]
        self._fetching.add(step)
        if self._legs is None and self._workers.config.rollout.interruptible is not None:
            backlog: Backlog = yield self._calls.call(self._workers.env_worker, "take_backlog")
            epochs = RolloutEpochs(self._workers.config, backlog, self._workers.submission.origin)
            self._legs = RolloutLegs(epochs, self._newest_version, self._resume)
        answer = yield self._calls.call(self._workers.env_worker, "begin_step", step)
        self._fetching.discard(step)
        if all(shard.step < step for shard in self._shards.values()):  # else it was fetched twice
            self._requests_by_step[step], self._is_single_turn = answer
        waiting, self._waiting_for_requests = self._waiting_for_requests, []
        for each in waiting:
            if not each.is_done:  # else its order was paused
                each.set_result()
        if step in self._requests_by_step:
            self._resume_paused()

    def _resume_paused(self) -> None:
        """Resume shards that were paused until the requests arrived."""
        paused, self._paused_without_requests = self._paused_without_requests, []
        for device in paused:
            self._outbox.add(ReplyArrived(pipeline=self._pipeline, device=device))

    def _split_requests(self, step: int) -> None:
        """Assign the step's requests to the devices."""
        requests = self._requests_by_step.pop(step)
        if self._legs is not None:
            self._shards = {device: LiveShard(step) for device in self._workers.rollout}
            self._forward(self._legs.open_step(step, requests, self._shards))
            return
        self._race = RolloutRace.of(requests, self._workers.config)
        dealt = assign_prompts(requests, list(self._workers.rollout))
        self._shards = {device: LiveShard(step) for device in dealt}
        for device, requests in dealt.items():
            for request in requests:
                self._shards[device].add(request)
            self._announce(self._shards[device])

    # ------------------------------------------------------------------ chunks

    def _make_chunk(self, order: RunningOrder, device: DeviceId) -> RolloutChunk:
        options, worker = self._options, self._workers.rollout[device]
        version = order.action.weight_version if self._legs is None else self._legs.version
        most_steps = options.chunk_decode_steps if self._is_single_turn else options.multi_turn_decode_steps
        initial = None if self._workers.submission.pipeline.has_sft_warmup else 0
        needs_weights = self._version_by_device.get(device, initial) != version
        is_load_needed = device in self._unloaded
        self._unloaded.discard(device)
        if is_load_needed:
            self._states.load(worker)
        self._version_by_device[device] = version
        path = self._workers.weights_path(version)
        return RolloutChunk(
            weights=(path, version) if needs_weights else None,
            published=self._published.get(version) if path == self._workers.published_path(version) else None,
            **self._shards[device].take_inputs(),
            max_decode_steps=most_steps if self._legs is None else int(min(most_steps, self._legs.most_steps)),
            max_seconds=min(_RACE_CHUNK_S, self._chunk_s) if self._race or self._legs else self._chunk_s,
            is_load_needed=is_load_needed,
            device_fraction=order.device_fraction,
        )

    def _note_load(self, chunk: RolloutChunk, result: RolloutChunkResult) -> None:
        if chunk.weights is not None:
            sums = self._loaded.setdefault(chunk.weights[1], [])
            if result.loaded is not None and result.loaded not in sums:
                sums.append(result.loaded)

    def _can_compute(self, shard: LiveShard, report: ChunkReport) -> bool:
        """Whether the device can compute without waiting for an environment."""
        return bool(report.num_active or report.num_waiting or shard.has_input)

    def _report_progress(self, order: RunningOrder, report: ChunkReport) -> None:
        self._outbox.add(
            order.progress(
                num_active=report.num_active,
                num_waiting=report.num_waiting,
                num_waiting_for_env=report.num_waiting_for_env,
            )
        )

    # ------------------------------------------------------------------ turns

    def _forward_turns(self, shard: LiveShard, result: RolloutChunkResult) -> None:
        record = self._record_by_step.setdefault(shard.step, RolloutRecord())
        record.computed(result.report)
        if self._legs is not None:
            self._forward(self._legs.take(shard, result))
            return
        turns = result.turns if self._race is None else self._run_race(self._race, shard, result)
        trajectories = turns.ids()
        if not trajectories:
            return
        if not self._is_single_turn:
            for trajectory in trajectories:
                record.turn_ended(trajectory, self._outbox.now_s())
        self._turns_to_send.append((shard, turns))
        is_reward_next = len(self._shards) == 1 and _is_over(shard, result.report)
        if not self._is_sending_turns and not is_reward_next:  # else `finish_step` sends them
            self._is_sending_turns = True
            self._calls.start_soon(self._send_turns_soon(), pipeline=self._pipeline)

    def _announce(self, shard: LiveShard) -> None:
        """Ask the env worker for the contexts of sessions that its worker is to begin."""
        ids = [request.id for request in shard.to_submit if request.is_session]
        if ids:
            self._queue_turns(shard, [FinishedTurn.opening(id) for id in ids])

    def _forward(self, turns: Sequence[FinishedTurn]) -> None:
        """Queue an interruptible rollout's turns that are trained on, of any shard."""
        if turns:
            self._queue_turns(next(iter(self._shards.values())), turns)

    def _queue_turns(self, shard: LiveShard, turns: Sequence[FinishedTurn]) -> None:
        self._turns_to_send.append((shard, PackedTurns.pack(turns)))
        if not self._is_sending_turns:
            self._is_sending_turns = True
            self._calls.start_soon(self._send_turns_soon(), pipeline=self._pipeline)

    def _run_race(self, race: RolloutRace, shard: LiveShard, result: RolloutChunkResult) -> PackedTurns:
        """The newly decided turns to train on, of any shard; every shard drops lost trajectories."""
        finished = result.turns.unpack()
        for turn in finished:
            shard.end(turn.id)
        kept = race.take(finished, result.report.progress)
        for each in self._shards.values():
            each.cut(race.is_lost)
        return PackedTurns.pack(kept)

    def _send_turns_soon(self) -> Work:
        """Send finished turns, unless `finish_step` did meanwhile."""
        if self._turns_to_send:
            yield from self._send_turns()

    def _send_turns(self) -> Work:
        """Send finished turns and handle the environments' replies, until no reply is pending."""
        while True:
            turns = [turns for _, turns in self._turns_to_send]
            for shard, packed in self._turns_to_send:
                self._shard_by_awaited.update(dict.fromkeys(packed.ids(), shard))
            self._turns_to_send = []
            self._is_sending_turns = True
            is_computing = any(order.is_calling for order in self._orders.of(self._pipeline))
            patience_s = _PATIENCE_S if is_computing else _QUIET_PATIENCE_S
            replies, over = yield self._calls.call(self._workers.env_worker, "on_turns", turns, patience_s)
            self._is_sending_turns = False
            for shard in self._take_answers(replies, over):
                self._resume(shard)
            if not (self._turns_to_send or self._shard_by_awaited):
                return

    def _take_answers(self, replies: Sequence[TurnReply], over: Sequence[TrajectoryId]) -> list[LiveShard]:
        """Handle replies, and trajectories that are over. Returns the shards with input for their workers."""
        reply_by_trajectory = {reply.id: reply for reply in replies}
        shards: dict[LiveShard, None] = {}
        for trajectory in sorted([*reply_by_trajectory, *over]):
            if trajectory not in self._shard_by_awaited:
                continue
            sender = self._shard_by_awaited.pop(trajectory)
            if (record := self._record_by_step.get(sender.step)) is not None:
                record.answered(trajectory, self._outbox.now_s())
            shard = sender.holder(trajectory)  # it may have migrated while the environment was thinking
            reply = reply_by_trajectory.get(trajectory)
            if reply is None:  # it is over
                shard.unfinished.pop(trajectory, None)
            if shard.is_lost or self._is_single_turn:  # a single turn's slot has gone to another long since
                continue
            if reply is None:
                shard.released.append(trajectory)
            else:
                shard.replies.append(reply)
            shards[shard] = None
        return list(shards)

    def _resume(self, shard: LiveShard) -> None:
        """Wake the waiting order of a shard with new input, or report the input to the scheduler."""
        device = next((device for device, other in self._shards.items() if other is shard), None)
        if device is None or not (shard.has_input or shard.is_over):
            return  # of a step that is over, or nothing new
        if orders := self._orders_on(device):
            orders[0].wake()
        elif shard.is_waiting_for_env:
            shard.is_waiting_for_env = False
            self._outbox.add(ReplyArrived(pipeline=self._pipeline, device=device))

    # ------------------------------------------------------------------ migration

    def _migrate(self, action: MigrateShard) -> Work:
        """Hand a shard over; its worker returns only the trajectories it was given."""
        began_s = self._outbox.now_s()
        yield from self._assign_prompts(action.step)
        partials: Sequence[PartialTrajectory] = ()
        if self._shards[action.source].is_begun:
            worker = self._workers.rollout[action.source]
            copies_kv = action.copies_kv or not self._probes.may_recompute(self._pipeline)
            partials = yield self._calls.call(worker, "take_partials", copies_kv)
        source, targets = self._shards[action.source], [self._shards[target] for target in action.targets]
        moved = source.migrate_to(targets, partials)
        is_over = source.is_over
        self._shards[action.source] = LiveShard(action.step, is_back=True, is_over=is_over, has_finished=True)
        if self._legs is not None:
            self._forward(self._legs.settle())
        seconds = self._outbox.now_s() - began_s
        self._outbox.add(TrajectoriesMigrated(order=action.order, seconds=seconds, **moved))
        for target in targets:
            self._resume(target)

    # ------------------------------------------------------------------ helpers

    @property
    def _pipeline(self) -> PipelineId:
        return self._workers.id

    def _start(self, work: Work) -> LoopTask:
        return self._calls.start(work, pipeline=self._pipeline)

    @property
    def _awaits_weights(self) -> bool:
        return self._legs is not None and self._legs.awaits_weights

    def _is_over(self, shard: LiveShard, report: ChunkReport) -> bool:
        return _is_over(shard, report) if self._legs is None else self._legs.is_over(shard)

    def _orders_on(self, device: DeviceId) -> list[RunningOrder]:
        return [
            order
            for order in self._orders.of(self._pipeline)
            if order.action.stage is Stage.GENERATE and order.action.devices[0] == device
        ]


def _is_over(shard: LiveShard, report: ChunkReport) -> bool:
    """Whether no trajectory of the shard is left, on its worker or for it."""
    num_left = report.num_active + report.num_waiting + report.num_waiting_for_env
    return num_left == 0 and not (shard.partials or shard.to_submit)
