"""The rollout engine: continuous batching over fixed slots, bit for bit the same under any schedule.

    submit / continue_from ──▶ waiting ──seat──▶ slot ──▶ FinishedTurn (and freed, or parked until `reply`)
                                  ▲                │
                                  └── offload, take_partials, parked while others wait for a slot, seated last where
                                      slots become longer: tokens, log-probs and KV leave the slot

    one chunk:   refill ─▶ compact ─▶ decode until something ends ─▶ collect ─▶ refill ...

    LiveTrajectory  a trajectory's record              SlotTable      the slots' tensors, and which trajectory is where
    AdapterTable    whose adapter samples what         AdapterWeights computed beside the base, never merged into it
    PrefillAhead    computes KV of waiting contexts    BatchProbe     which batch shapes are exact
    ChunkTally      what the present chunk has done    RequestLimits  what is accepted
    WaitingQueue    which waiting trajectory is next

`rollout.kv_tokens` bounds slots x their length, which then follows the trajectories (`slot_table`).
A freed slot is refilled before the next decode step. Prompts are prefilled ahead, as many waiting ones at
once as there are slots and each distinct prompt once, so that refilling costs a copy. When nothing waits,
active sequences move to the lowest slots and a smaller batch is decoded, if `batch_probe` found it bit-equal.

Invariant: a trajectory's tokens and log-probs are a function of its request and the weights. Not of its slot,
its companions (those of other adapters among them), the order of admission, where chunks end, pauses, offloads,
or a migration that carries its KV. A migration without KV recomputes it in one prefill, which rounds differently
(a few 1e-6 in a log-prob, some 1e-2 in bfloat16).
Log-probs are those of the distribution sampled from, at the configured temperature.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Container, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor

from rlmux.core.errors import IllegalTransitionError, PipelineError, UserError
from rlmux.core.model import dense_threshold_of
from rlmux.engines.adapters.shared_base import SharedBase
from rlmux.engines.model.decode_graphs import DecodeGraphs
from rlmux.engines.model.decoder_shape import check_window
from rlmux.engines.model.transformer import DecodePlan, PositionTables, score
from rlmux.engines.model.weight_layout import check_sizes
from rlmux.engines.model.weights import Rounded, read_weights
from rlmux.engines.residency import Offloaded, release_storage, storage_bytes
from rlmux.engines.rollout.adapter_table import AdapterTable
from rlmux.engines.rollout.batch_probe import BatchProbe
from rlmux.engines.rollout.chunk_tally import ChunkTally
from rlmux.engines.rollout.live_trajectory import LiveTrajectory
from rlmux.engines.rollout.prefill_ahead import PrefillAhead
from rlmux.engines.rollout.request_limits import RequestLimits
from rlmux.engines.rollout.request_queue import WaitingQueue
from rlmux.engines.rollout.slot_table import SlotTable, slot_of
from rlmux.rl.config import AdapterConfig, ModelConfig, RolloutConfig
from rlmux.rl.types import (
    ChunkReport,
    FinishedTurn,
    PartialTrajectory,
    TrajectoryId,
    TrajectoryRequest,
    TurnReply,
)
from rlmux.rl.vocabulary import Vocabulary

_STEPS_AT_ONCE = {"cpu": 1, "cuda": 8}
"""Decode steps between two reads of the sampled tokens: a read waits for a GPU; steps past a turn's end are lost."""


class SlotRolloutEngine:
    """Samples trajectories with one model on one device. See the module docstring.

    Trajectories   submit, continue_from, reply, take_partials
    Time           run_chunk, run_chunk_of: nothing is computed outside them
    Weights        load_weights, version, add_adapter, remove_adapter
    Residency      offload, load, rest, resize, leave_cache, resident_bytes
    """

    @torch.inference_mode()
    def __init__(
        self,
        model_config: ModelConfig,
        rollout: RolloutConfig,
        *,
        vocab_size: int,
        seed: int,
        staleness: int = 0,
        is_single_turn: bool = True,
        device: str = "cpu",
        adapter: AdapterConfig | None = None,
        bases: Path | None = None,
        vocabulary: Vocabulary | None = None,
        steps_at_once: int | None = None,
        uses_graphs: bool = True,
        trained_dtype: str = "float32",
    ) -> None:
        """Weights are those of `build_model` until `load_weights`. Raises UserError for sizes out of range.

        With an `adapter` the model is its frozen base. `bases`: folder in shared memory where that lies once, on a CPU.
        `vocabulary`: decodes responses for stop texts. `steps_at_once`: decode steps between two reads of the
        sampled tokens; None: 1 on a CPU and 8 on a GPU. `uses_graphs`: a GPU records each decode step once.
        `trained_dtype`: what the trainer computes with, to which weights of a checkpoint are rounded as published ones
        are.
        """
        self._trained_dtype: torch.dtype = getattr(torch, trained_dtype)
        self._device = torch.device(device)
        self._rollout, self._vocabulary = rollout, vocabulary
        self._limits = RequestLimits.of(rollout, vocab_size, can_decode=vocabulary is not None)
        _check_rollout(rollout)
        longest, max_len = rollout.longest_sequence, rollout.slot_tokens
        self._dense_threshold = dense_threshold_of(rollout.num_slots)
        self._steps_at_once = steps_at_once or _STEPS_AT_ONCE.get(self._device.type, 1)
        self._is_base_shared = bases is not None and adapter is not None and device == "cpu"
        base = SharedBase(folder=bases, model=model_config, vocab_size=vocab_size, seed=seed)
        dtype: torch.dtype = getattr(torch, rollout.dtype)
        model, self._weights = base.fused(dtype) if self._is_base_shared else base.fused_alone(self._device, dtype)
        check_window(model, longest)
        self._tables = PositionTables(model, max_len, self._device, dtype)
        del model
        release_storage(self._device)  # the slots need its memory
        self._uses_graphs = uses_graphs and device != "cpu" and not self._weights.shape.num_experts
        self._probe = BatchProbe(self._weights, self._tables, rollout.num_slots, max_len, rollout.cached_tokens)
        self._slots = self._make_slots(rollout)
        self._adapters = AdapterTable(self._weights, self._device, self._adapters_changed)
        self._prefill = PrefillAhead(self._weights, self._tables, self._probe, self._adapters)
        self._plans: dict[tuple[int, int], DecodePlan] = {}
        """Decode plans by (width, window), of slots of `_planned_capacity`; empty while offloaded."""
        self._planned_capacity = max_len
        self._live: dict[TrajectoryId, LiveTrajectory] = {}
        """All unfinished trajectories."""
        self._waiting: WaitingQueue[LiveTrajectory] = WaitingQueue(rollout.order)
        self._resting: dict[TrajectoryId, LiveTrajectory] = {}
        """Trajectories that could decode, of pipelines that the last chunk left out."""
        self._overdue: list[FinishedTurn] = []
        """Turns that ended without a decode step, for the next report."""
        self._offloaded: Offloaded | None = None
        self._newer: Mapping[str, Tensor] | None = None
        """Weights that came while offloaded, in their file."""
        """Weights and tables while offloaded; None while loaded."""
        self._spilled: list[LiveTrajectory] = []
        """Trajectories whose KV was spilled behind the weights and tables, in that order."""
        self._staleness: dict[str, int] = {}
        self._multi_turn: set[str] = set()
        """Pipelines whose trajectories may have several turns (membership tests only)."""
        self.add_adapter("", adapter, staleness=staleness, is_single_turn=is_single_turn)

    @property
    def is_schedule_exact(self) -> bool:
        """Whether this machine computes a sequence to the same bits in any slot, which the invariant requires."""
        return self._probe.is_slot_exact

    @property
    def version(self) -> int:
        """Weight version of the engine's own pipeline."""
        return self._adapters.version("")

    @property
    def limits(self) -> RequestLimits:
        return self._limits

    @property
    def is_unused(self) -> bool:
        """Whether it is loaded and has no trajectory."""
        return not self._live and self._offloaded is None

    @property
    def num_unfinished(self) -> int:
        """Unfinished trajectories of the engine."""
        return len(self._live)

    @property
    def num_slots(self) -> int:
        """Trajectories that can be decoded at once."""
        return self._slots.num_slots

    def version_of(self, adapter: str) -> int:
        """Weight version of an adapter."""
        return self._adapters.version(adapter)

    def unfinished_of(self, adapter: str) -> list[TrajectoryId]:
        """Unfinished trajectories of an adapter."""
        return [each for each in self._live if each.adapter == adapter]

    # --- trajectories ---------------------------------------------------------------------------------------

    @torch.inference_mode()
    def submit(self, requests: Sequence[TrajectoryRequest]) -> None:
        """Queue new trajectories. Raises UserError for a request that cannot run, before any is taken."""
        for request in requests:
            self._limits.check_request(request)
            self._adapters.weights(request.id.adapter)
        for request in requests:
            self._enqueue(LiveTrajectory(request=request, is_waiting_for_env=request.is_session))

    @torch.inference_mode()
    def continue_from(self, partials: Sequence[PartialTrajectory]) -> None:
        """Queue unfinished trajectories of another engine, those that wait for their environment included."""
        for partial in partials:
            self._limits.check_partial(partial)
            self._adapters.weights(partial.request.id.adapter)
        for partial in partials:
            self._enqueue(LiveTrajectory.from_partial(partial))

    @torch.inference_mode()
    def reply(self, replies: Sequence[TurnReply], released: Sequence[TrajectoryId]) -> None:
        """Continue trajectories with their environment's replies, and drop those that are over.

        Releasing a trajectory that holds no slot any more (its budget ran out) does nothing.
        """
        for answer in replies:
            live = self._live.get(answer.id)
            if live is None or not live.is_waiting_for_env:
                raise IllegalTransitionError(f"{answer.id} got a reply but is not waiting for one")
            self._limits.check_reply(answer)
            if answer.context is None:
                self._resume(live, answer)
            else:
                self._forget(live)
                live = LiveTrajectory.from_partial(answer.context)
                live.mark_new(self._adapters.version_of(live))
                self._enqueue(live)
        for live in (self._live[each] for each in released if each in self._live):
            if not live.is_waiting_for_env:
                raise IllegalTransitionError(f"{live.request.id} was released in the middle of a turn")
            self._forget(live)

    @torch.inference_mode()
    def take_partials(self, ids: Sequence[TrajectoryId] | None, *, with_kv: bool) -> list[PartialTrajectory]:
        """Remove unfinished trajectories (None: all), in id order; also while offloaded."""
        self._recall()
        if missing := [each for each in ids or () if each not in self._live]:
            raise IllegalTransitionError(f"{missing[0]} was to be taken but is not here")
        taken = sorted(self._live if ids is None else ids)
        partials = [self._take(self._live[trajectory_id], with_kv=with_kv) for trajectory_id in taken]
        self._waiting.discard(set(taken))
        for each in taken:
            self._resting.pop(each, None)
        return partials

    @torch.inference_mode()
    def score(self, tokens: Sequence[int], num_scored: int, adapter: str = "") -> list[float]:
        """Log-probs at temperature 1 of the last `num_scored` of a prompt's tokens, with the adapter of a name."""
        self._limits.check_prompt(tokens, "scored prompt")
        on_device, rows = torch.tensor(tokens, device=self._device), self._adapters.rows([adapter])
        return score(self._weights, self._tables, on_device, num_scored, rows)

    # --- the chunk ------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def run_chunk(self, *, max_decode_steps: int, max_seconds: float) -> ChunkReport:
        """Decode until nothing is left to decode or a limit is reached.

        At least one step is made where one can be, however small `max_seconds` is. Raises PipelineError for a
        log-probability that is not finite.
        """
        start = time.perf_counter()
        tally = self._run(self._adapters.names, max_decode_steps, start + max_seconds)
        for error in tally.failed.values():
            raise error
        return self._report(tally, None, start)

    @torch.inference_mode()
    def run_chunk_of(
        self, adapters: Sequence[str], *, max_decode_steps: int, max_seconds: float
    ) -> dict[str, ChunkReport | PipelineError]:
        """`run_chunk` for the trajectories of these adapters; the others rest until a chunk of theirs.

        It ends when nothing of one adapter is left to decode, whose pipeline need not wait for the others.
        Each adapter's report counts its own trajectories and tokens; times are the chunk's. An adapter with a
        log-probability that is not finite gets the error.
        """
        start = time.perf_counter()
        tally = self._run(adapters, max_decode_steps, start + max_seconds, ends_with_first=True)
        return {name: tally.failed.get(name) or self._report(tally, name, start) for name in adapters}

    def _run(
        self, adapters: Sequence[str], max_decode_steps: int, deadline: float, *, ends_with_first: bool = False
    ) -> ChunkTally:
        if self._offloaded is not None:
            raise IllegalTransitionError("an offloaded rollout engine cannot run")
        tally = ChunkTally(dense_threshold=self._dense_threshold)
        tally.finished = [turn for turn in self._overdue if turn.id.adapter in adapters]
        self._overdue = [turn for turn in self._overdue if turn.id.adapter not in adapters]
        self.rest([name for name in self._adapters.names if name not in adapters])
        if self._resting:
            self._waiting.put_back([live for id, live in self._resting.items() if id.adapter in adapters])
            self._resting = {id: live for id, live in self._resting.items() if id.adapter not in adapters}
        num_before = 0
        while True:
            self._refill(tally)
            active = self._slots.active
            is_out_of_time = tally.decode_steps > 0 and time.perf_counter() >= deadline
            computing = {live.request.id.adapter for live in (*active, *self._waiting)} if ends_with_first else ()
            is_one_done = len(computing) < num_before
            if not active or tally.decode_steps >= max_decode_steps or is_out_of_time or is_one_done:
                break
            num_before = len(computing)
            self._decode(active, max_decode_steps - tally.decode_steps, deadline, tally)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)  # else its time would be the next caller's
        return tally

    def _report(self, tally: ChunkTally, adapter: str | None, start: float) -> ChunkReport:
        """The report of a chunk; with an `adapter`: of its trajectories."""
        own = [live for id, live in self._live.items() if adapter in (None, id.adapter)]
        num_active = sum(live.slot is not None and not live.is_waiting_for_env for live in own)
        num_waiting_for_env = sum(live.is_waiting_for_env for live in own)
        sampled = tally.sampled_tokens
        return ChunkReport(
            finished=[turn for turn in tally.finished if adapter in (None, turn.id.adapter)],
            num_active=num_active,
            num_waiting=len(own) - num_active - num_waiting_for_env,
            num_waiting_for_env=num_waiting_for_env,
            sampled_tokens=sampled.total() if adapter is None else sampled[adapter],
            prefill_tokens=tally.prefill_tokens(adapter),
            decode_steps=tally.decode_steps,
            seconds=time.perf_counter() - start,
            iterations=tally.iterations(adapter),
            progress={live.request.id: live.num_made for live in own if live.has_begun},
        )

    def _refill(self, tally: ChunkTally) -> None:
        """Seat waiting trajectories, lowest slot first: in free slots, and in those of trajectories that wait for their
        environment, whose KV goes to host memory until the reply."""
        evicted = self._slots.make_room(self._adapters.version_of)
        if evicted:
            self._waiting.put_back([live for live in evicted if not live.is_waiting_for_env])
        while self._waiting:
            slot = self._slots.slot_for(next(iter(self._waiting)), self._adapters.version_of)
            if slot is None:
                return
            live = self._waiting.pop()
            if live.needs_prefill:
                self._prefill.compute_ahead(live, self._waiting, self._slots.num_slots, tally)
            self._slots.seat(live, slot)

    def _decode(self, active: list[LiveTrajectory], max_steps: int, deadline: float, tally: ChunkTally) -> None:
        """Decode until a sequence ends, its window is full, or a limit is reached."""
        plan = self._plan(active)
        last_seen = max(live.position for live in active)
        num_steps = min(max_steps, plan.window - last_seen, min(live.tokens_left for live in active))
        has_forced = any(live.num_forced for live in active)
        plan.adapters = self._adapters.rows(self._slots.adapter_names(plan.width), masks=plan.masks)
        at_once = 1 if self._slots.watches_texts else self._steps_at_once
        stopped: dict[TrajectoryId, int] = {}
        steps = 0
        start = now = time.perf_counter()
        while steps < num_steps and not stopped and (not steps or now < deadline):
            count = min(at_once, num_steps - steps)
            stopped = self._slots.advance(plan, active, count, has_forced=has_forced)
            steps += count
            now = time.perf_counter()
        made, sampled = _move_on(active, steps, stopped)
        tally.add_decode(plan.width, steps, len(active), made=made, sampled=sampled, seconds=now - start)
        self._collect(active, stopped, tally)

    def _plan(self, active: list[LiveTrajectory]) -> DecodePlan:
        """The cheapest exact shape, after moving sequences to the lowest slots where that helps."""
        num_positions = max(live.position for live in active) + 1
        reach = max(slot_of(live) for live in active) + 1
        capacity = self._slots.cache.capacity
        if capacity != self._planned_capacity:
            self._plans.clear()
            self._planned_capacity = capacity
        shape = self._probe.decode_shape(reach, num_positions, capacity)
        if len(active) < reach:
            compact = self._probe.decode_shape(len(active), num_positions, capacity)
            if compact[0] < shape[0]:
                self._slots.compact(active, compact[0])
                shape = compact
        if shape not in self._plans:
            self._plans[shape] = DecodePlan(self._weights, self._slots.cache, self._tables, *shape)
            self._plans[shape].graphs = DecodeGraphs() if self._uses_graphs else None
        return self._plans[shape]

    def _collect(self, active: list[LiveTrajectory], stopped: Container[TrajectoryId], tally: ChunkTally) -> None:
        """End the turns that sampled a stop token or have used up their budget."""
        for live in active:
            is_stopped = live.request.id in stopped
            if is_stopped or live.position == live.last_position:
                try:
                    tally.finished.append(self._finish(live, is_stopped=is_stopped))
                except PipelineError as error:
                    tally.failed.setdefault(live.request.id.adapter, error)
                    self._forget(live)

    def _finish(self, live: LiveTrajectory, *, is_stopped: bool) -> FinishedTurn:
        """Report a turn; the trajectory is parked if a reply may come and forgotten otherwise."""
        self._slots.record(live, self._adapters.version_of(live))
        if not all(map(math.isfinite, live.logprobs)):
            raise PipelineError(f"{live.request.id}: a sampled token's log-probability is not finite")
        if live.is_sampled[-1]:
            live.num_turns += 1
        self._waiting.note_end(live.request.id, len(live.tokens))
        stop_reason = "stop" if is_stopped else live.end_reason
        is_over = stop_reason == "length" or live.request.id.adapter not in self._multi_turn
        if is_over and not live.request.is_session:
            self._forget(live)
        else:
            live.is_waiting_for_env = True
            self._slots.park(live)
        return live.finished_turn(stop_reason)

    # --- a trajectory's way through the engine ----------------------------------------------------------------

    def _enqueue(self, live: LiveTrajectory) -> None:
        if live.request.id in self._live:
            raise IllegalTransitionError(f"{live.request.id} is already here")
        self._live[live.request.id] = live
        if not live.is_waiting_for_env:
            self._waiting.append(live)

    def _resume(self, live: LiveTrajectory, answer: TurnReply) -> None:
        """Continue a trajectory after its environment's reply, or end it where its budget is used up."""
        if len(live.tokens) >= live.request.max_new_tokens:
            self._overdue.append(live.finished_turn("length"))
            self._forget(live)
            return
        forced = live.accept_reply(answer.tokens, answer.turn_end)
        if live.slot is None:
            live.pending = forced
            self._waiting.continue_with(live)
        else:
            self._slots.resume(live, forced)

    def _forget(self, live: LiveTrajectory) -> None:
        del self._live[live.request.id]
        self._slots.free(live)

    def _take(self, live: LiveTrajectory, *, with_kv: bool) -> PartialTrajectory:
        if live.slot is not None:
            self._slots.evict(live, self._adapters.version_of(live), with_kv=with_kv)
        elif live.is_prefilled_here or not with_kv:
            live.kv = None
        del self._live[live.request.id]
        return live.to_partial()

    # --- weights --------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def add_adapter(
        self, name: str, adapter: AdapterConfig | None, *, staleness: int = 0, is_single_turn: bool = True
    ) -> None:
        """Serve another pipeline of this base, named in its trajectories' ids; None: the base itself."""
        if self._offloaded is not None:
            raise IllegalTransitionError(f"adapter {name!r} was added to an offloaded rollout engine")
        self._adapters.add(name, adapter)
        self._staleness[name] = staleness
        if not is_single_turn:
            self._multi_turn.add(name)

    def _adapters_changed(self, configs: Sequence[AdapterConfig]) -> None:
        self._probe.set_adapters(configs)
        self._plans.clear()  # with the steps that were recorded with the adapters before

    def remove_adapter(self, name: str) -> None:
        """Stop serving a pipeline. Raises IllegalTransitionError with unfinished trajectories of it, or offloaded."""
        if self._offloaded is not None or any(live.request.id.adapter == name for live in self._live.values()):
            raise IllegalTransitionError(f"adapter {name!r} was removed while it, or the engine's state, is elsewhere")
        self._adapters.remove(name)
        del self._staleness[name]
        self._multi_turn.discard(name)

    @torch.inference_mode()
    def load_weights(self, path: Path, version: int, adapter: str = "") -> None:
        """Load weights from a safetensors file, of the model or of a named adapter; also while offloaded: those of the
        model then wait for `load`, which fuses them on the device and leaves older ones behind.

        Active trajectories keep their KV; waiting ones recompute it. Raises IllegalTransitionError for an active
        trajectory of a pipeline with staleness 0, PipelineError for weights with a wrong checksum.
        """
        theirs = [live for live in self._live.values() if live.request.id.adapter == adapter]
        begun = [live for live in theirs if live.has_begun]
        if begun and self._staleness[adapter] == 0:
            raise IllegalTransitionError(
                f"version {version} came while {begun[0].request.id} of a sync pipeline is unfinished"
            )
        host = torch.device("cpu")
        release_storage(host)  # the file's tensors need what sampling has freed
        of_adapter = self._adapters.weights_to_load(adapter)
        tensors = read_weights(path, version)
        if of_adapter is None and self._trained_dtype != torch.float32:
            tensors = Rounded(tensors, self._trained_dtype)
        for live in begun:
            if live.slot is not None:
                self._slots.record(live, self._adapters.version_of(live))
        if self._offloaded is None:
            (of_adapter or self._weights).refresh(tensors)
        elif of_adapter is None:
            check_sizes(tensors, self._weights.shape)
            self._newer = tensors
        else:
            self._recall()
            of_adapter.over(self._offloaded.copy_of(of_adapter.flat, self._kept_tensors())).refresh(tensors)
        release_storage(host)
        self._adapters.set_version(adapter, version)
        for live in theirs:
            live.drop_prefilled_kv()

    # --- residency ------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def offload(self, *, spill_to: Path | None = None) -> None:
        """Device to host, or to disk under this name; unfinished trajectories go along. Does nothing when offloaded."""
        if self._offloaded is not None:
            return
        self._empty_slots()
        self._spilled = [live for live in self._live.values() if live.kv is not None] if spill_to else []
        kv = [live.kv for live in self._spilled if live.kv is not None]
        self._offloaded = Offloaded([*self._kept_tensors(), *kv], spill_to=spill_to)
        for live in self._spilled:
            live.kv = None
        self._plans.clear()
        for tensor in self._device_tensors():
            tensor.untyped_storage().resize_(0)
        release_storage(self._device)

    def _empty_slots(self) -> None:
        """Move all trajectories out of their slots, with their KV."""
        seated = self._slots.seated
        for live in self._waiting:
            live.drop_prefilled_kv()
        for live in seated:
            self._slots.evict(live, self._adapters.version_of(live), with_kv=True)
        self._waiting.put_back([live for live in seated if not live.is_waiting_for_env])

    @torch.inference_mode()
    def rest(self, adapters: Sequence[str]) -> None:
        """Decode no trajectory of these adapters until a chunk of theirs; those that could leave their slots."""
        if not adapters:
            return
        active = [live for live in self._slots.active if live.request.id.adapter in adapters]
        for live in active:
            self._slots.evict(live, self._adapters.version_of(live), with_kv=True)
        waiting = self._waiting.take(adapters)
        for live in waiting:
            live.drop_prefilled_kv()
        self._resting |= {live.request.id: live for live in (*active, *waiting)}

    @torch.inference_mode()
    def resize(self, num_tenants: int) -> None:
        """Have the slots of so many tenants, each with `rollout.num_slots`, or as many of them as are exact at once.

        Trajectories leave their slots with their KV and continue. Raises IllegalTransitionError for an offloaded
        engine, or a cache of `kv_tokens`.
        """
        if self._offloaded is not None or self._rollout.kv_tokens is not None:
            raise IllegalTransitionError("an offloaded rollout engine, or one with kv_tokens, has no slots to add")
        self._empty_slots()
        self._plans.clear()
        for tensor in self._slots.tensors():
            tensor.untyped_storage().resize_(0)
        release_storage(self._device)
        num_slots = self._probe.widen(num_tenants)
        self._slots = self._make_slots(replace(self._rollout, num_slots=num_slots))

    def _make_slots(self, rollout: RolloutConfig) -> SlotTable:
        capacity_for = self._probe.capacity_for
        return SlotTable(
            self._weights.shape, rollout, rollout.slot_tokens, self._device, self._vocabulary, capacity_for
        )

    @torch.inference_mode()
    def load(self) -> None:
        """Back to the device. Does nothing when already there."""
        if self._offloaded is None:
            return
        for tensor in self._device_tensors():
            tensor.untyped_storage().resize_(tensor.numel() * tensor.element_size())
        for tensor in self._slots.tensors():
            tensor.zero_()
        kept = self._kept_tensors()
        self._offloaded.copy_to(kept, num_skipped=int(self._newer is not None))  # the weights are the first of them
        if self._newer is not None:
            self._weights.refresh(self._newer)
            self._newer = None
        if self._spilled:
            for live, copy in zip(self._spilled, islice(self._offloaded, len(kept), None), strict=True):
                live.kv = copy
        self._offloaded, self._spilled = None, []
        self._slots.reset()

    def leave_cache(self) -> None:
        """Drop the system's cache of a spilled file, so that a measured load reads the disk."""
        if self._offloaded is not None:
            self._offloaded.leave_cache()

    def resident_bytes(self) -> int:
        """Device bytes of weights, tables, slots and prefilled KV."""
        return storage_bytes([*self._device_tensors(), *(live.kv for live in self._waiting if live.is_prefilled_here)])

    def adapter_bytes(self, name: str) -> int:
        """Device bytes of an adapter."""
        weights = self._adapters.weights(name)
        return 0 if weights is None else storage_bytes([weights.flat])

    def slot_bytes(self) -> int:
        """Device bytes of the slots and their KV cache."""
        return storage_bytes(self._slots.tensors())

    def _recall(self) -> None:
        """Bring spilled KV and weights from disk to host memory, where they can be read and changed."""
        if self._offloaded is None or not self._offloaded.is_on_disk:
            return
        self._offloaded.recall()
        kv = list(self._offloaded)[len(self._kept_tensors()) :]
        for live, copy in zip(self._spilled, kv, strict=True):
            live.kv = copy
        self._spilled = []

    def _kept_tensors(self) -> list[Tensor]:
        """Tensors whose content survives an offload; the slots' content leaves with the trajectories."""
        own = [*self._tables.tensors(), *self._adapters.flats]
        return own if self._is_base_shared else [self._weights.flat, *own]

    def _device_tensors(self) -> list[Tensor]:
        return [*self._kept_tensors(), *self._slots.tensors()]


def _check_rollout(rollout: RolloutConfig) -> None:
    """Raises UserError for sizes out of range."""
    if not rollout.temperature > 0:
        raise UserError(f"rollout.temperature: {rollout.temperature} is not above 0")
    if rollout.num_slots < 1:
        raise UserError(f"rollout.num_slots: {rollout.num_slots} is below 1")


def _move_on(
    active: Sequence[LiveTrajectory], steps: int, stopped: Mapping[TrajectoryId, int]
) -> tuple[Counter[str], Counter[str]]:
    """Count `steps` tokens for each trajectory, fewer for one that stopped at a position.

    Returns (tokens, sampled ones) by adapter.
    """
    made: Counter[str] = Counter()
    sampled: Counter[str] = Counter()
    for live in active:
        id = live.request.id
        count = stopped.get(id, live.position + steps) - live.position
        made[id.adapter] += count
        sampled[id.adapter] += count - live.num_forced_within(count)
        live.position += count
    return made, sampled
