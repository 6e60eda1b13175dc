"""The rollout engine: continuous batching over fixed slots, bit for bit the same under any schedule.

    submit / continue_from ──▶ waiting ──seat──▶ slot ──▶ FinishedTurn (and freed, or parked until `reply`)
                                  ▲                │
                                  └── offload, take_partials: tokens, log-probs and KV leave the slot

    one chunk:   refill ─▶ compact ─▶ decode until something ends ─▶ collect ─▶ refill ...

A freed slot is refilled before the next decode step. Prompts are prefilled ahead, as many waiting ones at
once as there are slots and each distinct prompt once, so that refilling costs a copy. When nothing waits,
active sequences move to the lowest slots and a smaller batch is decoded, if `batch_probe` found it bit-equal.

Invariant: a trajectory's tokens and log-probs are a function of its request and the weights. Not of its slot,
its companions, the order of admission, where chunks end, pauses, offloads, or a migration that carries its
KV. A migration without KV recomputes it in one prefill, which rounds differently (a few 1e-6 in a log-prob).
Log-probs are those of the distribution sampled from, at the configured temperature.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from rlmux.core.errors import IllegalTransitionError, PipelineError, UserError
from rlmux.core.model import SubStage
from rlmux.engines.batch_probe import PREFILL_BUCKET, BatchProbe, pad_rows
from rlmux.engines.model_io import build_model
from rlmux.engines.residency import Offloaded, give_back
from rlmux.engines.sampling import trajectory_uniforms
from rlmux.engines.slots import MAX_STOP_TOKENS, SlotBuffers, SlotRow
from rlmux.engines.transformer import (
    DecodePlan,
    DecoderShape,
    DecoderWeights,
    KvCache,
    PositionTables,
    prefill,
)
from rlmux.rl.config import ModelConfig, RolloutConfig
from rlmux.rl.types import (
    ChunkReport,
    FinishedTurn,
    IterationBand,
    PartialTrajectory,
    TrajectoryId,
    TrajectoryRequest,
    TurnReply,
)

_MAX_PREFILL_TOKENS = 4096
"""Of one forward pass."""


@dataclass(slots=True, kw_only=True)
class _Live:
    """An unfinished trajectory. In a slot, the buffers know its tokens beyond `is_sampled`."""

    request: TrajectoryRequest
    tokens: list[int]
    """Response tokens as of when it was last outside a slot."""
    logprobs: list[float]
    is_sampled: list[bool]
    versions: list[int]
    pending: list[int] = field(default_factory=list)
    """Forced tokens not fed yet, while outside a slot."""
    num_forced: int = 0
    """Of the response tokens beyond `is_sampled`, how many come from the environment; they come first."""
    num_turns: int = 0
    is_waiting_for_env: bool = False
    slot: int | None = None
    position: int = field(init=False)
    """Of the next token to feed."""
    kv: Tensor | None = None
    """Cache of everything before `position`, while outside a slot."""
    is_prefilled_here: bool = False
    """`kv` was computed by this engine from the tokens alone, so it can be dropped."""
    response_start: int = field(init=False)
    """Position of the first response token."""
    last_position: int = field(init=False)
    """Of the last token the budget allows."""

    def __post_init__(self) -> None:
        self.response_start = len(self.request.prompt_tokens)
        self.last_position = self.response_start + self.request.max_new_tokens - 1
        self.position = self.response_start + len(self.tokens) - 1

    @property
    def context(self) -> tuple[int, ...]:
        """All tokens before `position`, while outside a slot."""
        return (*self.request.prompt_tokens, *self.tokens)[:-1]

    @property
    def has_begun(self) -> bool:
        return self.slot is not None or bool(self.tokens)


class SlotRolloutEngine:
    """A `RolloutEngine` on one device. See the module docstring."""

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
    ) -> None:
        if not rollout.temperature > 0:
            raise UserError(f"rollout.temperature: {rollout.temperature} is not above 0")
        if rollout.num_slots < 1:
            raise UserError(f"rollout.num_slots: {rollout.num_slots} is below 1")
        model = build_model(model_config, vocab_size, seed)
        self.version = 0
        self._config = rollout
        self._vocab_size = vocab_size
        self._staleness = staleness
        self._is_single_turn = is_single_turn
        self._device = torch.device(device)
        longest = rollout.max_prompt_tokens + rollout.max_new_tokens + 1
        self._max_len = -(-longest // PREFILL_BUCKET) * PREFILL_BUCKET
        self._weights = DecoderWeights(DecoderShape.of(model), self._device)
        self._weights.refresh(model.state_dict())
        self._cache = KvCache(self._weights.shape, rollout.num_slots, self._max_len, self._device)
        self._tables = PositionTables(model, self._max_len, self._device)
        self._buffers = SlotBuffers(rollout.num_slots, self._max_len, self._device)
        self._probe = BatchProbe(self._weights, self._tables, rollout.num_slots, self._max_len)
        self._plans: dict[tuple[int, int], DecodePlan] = {}
        self._live: dict[TrajectoryId, _Live] = {}
        self._waiting: deque[_Live] = deque()
        self._slots: list[_Live | None] = [None] * rollout.num_slots
        self._overdue: list[FinishedTurn] = []
        """Turns that ended without a decode step, for the next report."""
        self._offloaded: Offloaded | None = None
        """Weights and tables while offloaded; None while loaded."""
        self._spilled_kv: list[_Live] = []
        """Whose KV lies behind them in what was spilled."""
        self._bands: dict[tuple[str, int], tuple[int, int, float]] = {}
        """Of the chunk under way: (iterations, tokens, ms) by kind and rows."""

    @property
    def is_schedule_exact(self) -> bool:
        """This machine computes a sequence to the same bits in any slot, which the invariant rests on."""
        return self._probe.is_slot_exact

    # --- what the host hands in ---------------------------------------------------------------------------

    @torch.inference_mode()
    def submit(self, requests: Sequence[TrajectoryRequest]) -> None:
        for request in requests:
            self._check_request(request)
        for request in requests:
            self._enqueue(_Live(request=request, tokens=[], logprobs=[], is_sampled=[], versions=[]))

    @torch.inference_mode()
    def continue_from(self, partials: Sequence[PartialTrajectory]) -> None:
        for partial in partials:
            self._check_request(partial.request)
            context = len(partial.request.prompt_tokens) + len(partial.tokens) - 1
            if partial.kv is not None and partial.kv.shape[3] != context:
                raise IllegalTransitionError(
                    f"{partial.request.id} brings KV of {partial.kv.shape[3]} tokens for its {context}"
                )
        for partial in partials:
            live = _Live(
                request=partial.request,
                tokens=list(partial.tokens),
                logprobs=list(partial.logprobs),
                is_sampled=list(partial.is_sampled),
                versions=list(partial.versions),
                pending=list(partial.pending_tokens),
                num_forced=len(partial.pending_tokens),
                num_turns=partial.num_turns,
                is_waiting_for_env=partial.is_waiting_for_reply,
                kv=partial.kv,
            )
            self._enqueue(live)

    @torch.inference_mode()
    def reply(self, replies: Sequence[TurnReply], released: Sequence[TrajectoryId]) -> None:
        """Releasing a trajectory that holds no slot any more (its budget ran out) does nothing."""
        for turn in replies:
            live = self._live.get(turn.id)
            if live is None or not live.is_waiting_for_env:
                raise IllegalTransitionError(f"{turn.id} got a reply but is not waiting for one")
            self._check_tokens(turn.tokens, f"reply to {turn.id}")
            self._resume(live, turn.tokens)
        for trajectory_id in released:
            live = self._live.get(trajectory_id)
            if live is not None and not live.is_waiting_for_env:
                raise IllegalTransitionError(f"{trajectory_id} was released in the middle of a turn")
            if live is not None:
                self._forget(live)

    # --- the chunk ------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def run_chunk(self, *, max_decode_steps: int, max_seconds: float) -> ChunkReport:
        """At least one step is made where one can be, however small `max_seconds` is."""
        if self._offloaded is not None:
            raise IllegalTransitionError("an offloaded rollout engine was asked to run")
        start = time.perf_counter()
        deadline = start + max_seconds
        finished, self._overdue = self._overdue, []
        decode_steps = sampled_tokens = 0
        self._bands = {}
        while True:
            self._refill()
            active = self._active()
            is_over = decode_steps >= max_decode_steps or (decode_steps and time.perf_counter() >= deadline)
            if not active or is_over:
                break
            steps, sampled, ended = self._decode(active, max_decode_steps - decode_steps, deadline)
            decode_steps += steps
            sampled_tokens += sampled
            finished += ended
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)  # else its time would be the next caller's
        bands = [
            IterationBand(kind, rows, iterations, tokens, ms)
            for (kind, rows), (iterations, tokens, ms) in sorted(self._bands.items())
        ]
        return ChunkReport(
            finished=finished,
            num_active=len(active),
            num_waiting=len(self._waiting),
            num_waiting_for_env=sum(live.is_waiting_for_env for live in self._live.values()),
            sampled_tokens=sampled_tokens,
            prefill_tokens=sum(band.tokens for band in bands if band.kind == SubStage.PREFILL),
            decode_steps=decode_steps,
            seconds=time.perf_counter() - start,
            bands=bands,
        )

    def _decode(self, active: list[_Live], max_steps: int, deadline: float) -> tuple[int, int, list[FinishedTurn]]:
        """Decode until a sequence ends, its window is full, or a limit is reached."""
        plan = self._plan(active)
        last_seen = max(live.position for live in active)
        num_steps = min(max_steps, plan.window - last_seen, min(live.last_position - live.position for live in active))
        has_forced = any(live.num_forced for live in active)
        num_stops = max(len(live.request.stop_tokens) for live in active)
        stopped: list[int] = []
        steps = 0
        start = now = time.perf_counter()
        while steps < num_steps and not stopped and (not steps or now < deadline):
            stopped = self._buffers.step(plan, self._config.temperature, has_forced=has_forced, num_stops=num_stops)
            steps += 1
            now = time.perf_counter()
        sampled = steps * len(active)
        for live in active:
            if has_forced:
                sampled -= _num_forced_within(live, steps)
            live.position += steps
        self._count("decode", plan.width, steps, steps * len(active), now - start)
        return steps, sampled, self._collect(active, stopped)

    def _collect(self, active: list[_Live], stopped: list[int]) -> list[FinishedTurn]:
        finished = []
        for live in active:
            if live.slot in stopped:
                finished.append(self._finish(live, "stop"))
            elif live.position == live.last_position:
                finished.append(self._finish(live, "length"))
        return finished

    def _finish(self, live: _Live, stop_reason: str) -> FinishedTurn:
        """Report a turn; the trajectory is parked if it may go on and forgotten otherwise."""
        self._sync(live)
        if not all(map(math.isfinite, live.logprobs)):
            raise PipelineError(f"{live.request.id}: a sampled token's log-probability is not finite")
        if live.is_sampled[-1]:
            live.num_turns += 1
        if stop_reason == "length" or self._is_single_turn:
            self._forget(live)
        else:
            live.is_waiting_for_env = True
            assert live.slot is not None
            self._buffers.park(live.slot)
        return _turn(live, stop_reason)

    # --- slots ----------------------------------------------------------------------------------------------

    def _active(self) -> list[_Live]:
        return [live for live in self._slots if live is not None and not live.is_waiting_for_env]

    def _enqueue(self, live: _Live) -> None:
        if live.request.id in self._live:
            raise IllegalTransitionError(f"{live.request.id} is already here")
        self._live[live.request.id] = live
        if not live.is_waiting_for_env:
            self._waiting.append(live)

    def _refill(self) -> None:
        """Give free slots to those who wait, lowest slot first."""
        if not self._waiting:
            return
        for slot, occupant in enumerate(self._slots):
            if occupant is None and self._waiting:
                if self._waiting[0].kv is None and self._waiting[0].position:
                    self._prefill_ahead()
                self._seat(self._waiting.popleft(), slot)

    def _seat(self, live: _Live, slot: int) -> None:
        if live.kv is not None:
            self._cache.write(slot, live.kv.to(self._device))
        request = live.request
        row = SlotRow(
            position=live.position,
            first=live.response_start - 1,
            tokens=[request.prompt_tokens[-1], *live.tokens, *live.pending],
            logprobs=live.logprobs,
            response_start=live.response_start,
            uniforms=torch.from_numpy(trajectory_uniforms(request.seed, request.id, request.max_new_tokens)),
            stop_tokens=request.stop_tokens,
        )
        self._buffers.seat(slot, row)
        live.slot, live.kv, live.pending, live.is_prefilled_here = slot, None, [], False
        self._slots[slot] = live

    def _resume(self, live: _Live, tokens: Sequence[int]) -> None:
        """Let a parked trajectory go on, through as many of `tokens` as its budget allows."""
        room = live.last_position - live.position
        if room == 0:
            self._overdue.append(_turn(live, "length"))
            self._forget(live)
            return
        forced = list(tokens[:room])
        live.is_waiting_for_env = False
        live.num_forced = len(forced)
        if live.slot is None:
            live.pending = forced
            self._waiting.append(live)
        else:
            self._buffers.resume(live.slot, live.position, forced, live.request.stop_tokens)

    def _forget(self, live: _Live) -> None:
        del self._live[live.request.id]
        self._leave_slot(live)

    def _leave_slot(self, live: _Live) -> None:
        if live.slot is not None:
            self._buffers.free(live.slot)
            self._slots[live.slot] = None
            live.slot = None

    def _sync(self, live: _Live) -> None:
        """Bring the host's record of a seated trajectory up to its position."""
        num_tokens = live.position - live.response_start + 1
        assert live.slot is not None
        live.tokens, live.logprobs = self._buffers.read(
            live.slot, live.response_start, live.response_start + num_tokens
        )
        num_new = num_tokens - len(live.is_sampled)
        num_forced = min(live.num_forced, num_new)
        live.is_sampled += [False] * num_forced + [True] * (num_new - num_forced)
        live.versions += [self.version] * num_new
        live.num_forced -= num_forced

    def _evict(self, live: _Live, *, with_kv: bool) -> None:
        """Take a trajectory out of its slot, with all it needs to go on."""
        assert live.slot is not None
        self._sync(live)
        ahead = live.position + 1
        live.pending = self._buffers.read(live.slot, ahead, ahead + live.num_forced)[0]
        live.kv = self._cache.read(live.slot, live.position).cpu() if with_kv and live.position else None
        self._leave_slot(live)

    def _plan(self, active: list[_Live]) -> DecodePlan:
        """The cheapest exact shape, after moving sequences to the lowest slots where that helps."""
        num_positions = max(live.position for live in active) + 1
        reach = max(_slot_of(live) for live in active) + 1
        shape = self._probe.decode_shape(reach, num_positions)
        if len(active) < reach:
            compact = self._probe.decode_shape(len(active), num_positions)
            if compact[0] < shape[0]:
                self._compact(active, compact[0])
                shape = compact
        if shape not in self._plans:
            self._plans[shape] = DecodePlan(self._weights, self._cache, self._tables, *shape)
        return self._plans[shape]

    def _compact(self, active: list[_Live], width: int) -> None:
        """Exchange active sequences beyond `width` with idle slots below it."""
        high = [_slot_of(live) for live in active if _slot_of(live) >= width]
        idle = [slot for slot, live in enumerate(self._slots[:width]) if live is None or live.is_waiting_for_env]
        low = idle[: len(high)]
        slots = torch.tensor(low + high, device=self._device)
        sources = torch.tensor(high + low, device=self._device)
        self._cache.exchange(slots, sources)
        self._buffers.exchange(slots, sources)
        for a, b in zip(low, high, strict=True):
            self._slots[a], self._slots[b] = self._slots[b], self._slots[a]
            for slot in (a, b):
                occupant = self._slots[slot]
                if occupant is not None:
                    occupant.slot = slot

    # --- prefill --------------------------------------------------------------------------------------------

    def _prefill_ahead(self) -> None:
        """Compute the KV of the next waiting contexts, as many as there are slots, each distinct one once."""
        needing = [
            live
            for live, _ in zip(self._waiting, range(len(self._slots)), strict=False)
            if live.kv is None and live.position
        ]
        by_length: dict[int, dict[tuple[int, ...], list[_Live]]] = {}
        for live in needing:
            context = live.context
            length = -(-len(context) // PREFILL_BUCKET) * PREFILL_BUCKET
            by_length.setdefault(length, {}).setdefault(context, []).append(live)
        for length, lives_by_context in by_length.items():
            contexts = list(lives_by_context)
            while contexts:
                limit = max(1, _MAX_PREFILL_TOKENS // length)
                rows = self._probe.prefill_rows(min(len(contexts), limit), length)
                batch, contexts = contexts[:rows], contexts[rows:]
                for context, kv in zip(batch, self._prefill(batch, rows, length), strict=True):
                    for live in lives_by_context[context]:
                        live.kv, live.is_prefilled_here = kv, True

    def _prefill(self, contexts: list[tuple[int, ...]], rows: int, length: int) -> Iterable[Tensor]:
        start = time.perf_counter()
        tokens = torch.zeros(len(contexts), length, dtype=torch.int64)
        for row, context in enumerate(contexts):
            tokens[row, : len(context)] = torch.tensor(context)
        kv = prefill(self._weights, self._tables, pad_rows(tokens, rows).to(self._device))
        self._count(SubStage.PREFILL, rows, 1, sum(map(len, contexts)), time.perf_counter() - start)
        return [kv[row, :, :, :, : len(context)] for row, context in enumerate(contexts)]

    # --- migration, weights, residency ----------------------------------------------------------------------

    @torch.inference_mode()
    def take_partials(self, ids: Sequence[TrajectoryId] | None, *, with_kv: bool) -> list[PartialTrajectory]:
        self._recall()
        for trajectory_id in ids or ():
            if trajectory_id not in self._live:
                raise IllegalTransitionError(f"{trajectory_id} was to be taken but is not here")
        taken = sorted(self._live if ids is None else ids)
        partials = [self._take(self._live[trajectory_id], with_kv=with_kv) for trajectory_id in taken]
        gone = set(taken)
        self._waiting = deque(live for live in self._waiting if live.request.id not in gone)
        return partials

    def _take(self, live: _Live, *, with_kv: bool) -> PartialTrajectory:
        if live.slot is not None:
            self._evict(live, with_kv=with_kv)
        elif live.is_prefilled_here or not with_kv:
            live.kv = None
        del self._live[live.request.id]
        return PartialTrajectory(
            request=live.request,
            tokens=tuple(live.tokens),
            is_sampled=tuple(live.is_sampled),
            logprobs=tuple(live.logprobs),
            versions=tuple(live.versions),
            pending_tokens=tuple(live.pending),
            num_turns=live.num_turns,
            is_waiting_for_reply=live.is_waiting_for_env,
            kv=live.kv,
        )

    @torch.inference_mode()
    def load_weights(self, path: Path, version: int) -> None:
        """Also while offloaded. KV of trajectories under way is kept; of waiting ones, computed anew."""
        begun = [live for live in self._live.values() if live.has_begun]
        if begun and self._staleness == 0:
            raise IllegalTransitionError(
                f"version {version} came while {begun[0].request.id} of a sync pipeline is unfinished"
            )
        tensors = load_file(path)
        for live in begun:
            if live.slot is not None:
                self._sync(live)
        if self._offloaded is None:
            self._weights.refresh(tensors)
        else:
            fresh = DecoderWeights(self._weights.shape, torch.device("cpu"))
            fresh.refresh(tensors)
            self._recall()
            next(iter(self._offloaded)).copy_(fresh.flat)
        self.version = version
        for live in self._live.values():
            if live.is_prefilled_here:
                live.kv, live.is_prefilled_here = None, False

    @torch.inference_mode()
    def offload(self, *, spill_to: Path | None = None) -> None:
        """Trajectories under way go along."""
        if self._offloaded is not None:
            return
        seated = [live for live in self._slots if live is not None]
        for live in self._waiting:
            if live.is_prefilled_here:
                live.kv, live.is_prefilled_here = None, False
        for live in seated:
            self._evict(live, with_kv=True)
        self._waiting.extendleft(live for live in reversed(seated) if not live.is_waiting_for_env)
        self._spilled_kv = [live for live in self._live.values() if live.kv is not None] if spill_to else []
        kv = [live.kv for live in self._spilled_kv if live.kv is not None]
        self._offloaded = Offloaded([*self._kept_tensors(), *kv], spill_to=spill_to)
        for live in self._spilled_kv:
            live.kv = None
        self._plans.clear()
        for tensor in self._device_tensors():
            tensor.untyped_storage().resize_(0)
        give_back(self._device)

    @torch.inference_mode()
    def load(self) -> None:
        if self._offloaded is None:
            return
        for tensor in self._device_tensors():
            tensor.untyped_storage().resize_(tensor.numel() * tensor.element_size())
            tensor.zero_()
        kept = self._kept_tensors()
        self._offloaded.copy_to(kept)
        if self._spilled_kv:
            for live, copy in zip(self._spilled_kv, islice(self._offloaded, len(kept), None), strict=True):
                live.kv = copy
        self._offloaded, self._spilled_kv = None, []
        self._buffers.reset()

    def prefetch(self) -> None:
        """Begin to read ahead what was spilled; does nothing for what was not. Returns at once."""
        if self._offloaded is not None:
            self._offloaded.prefetch()

    def _recall(self) -> None:
        """From disk to host memory: whoever looks at trajectories under way finds them there."""
        if self._offloaded is None or not self._offloaded.is_on_disk:
            return
        self._offloaded.recall()
        kv = list(self._offloaded)[len(self._kept_tensors()) :]
        for live, copy in zip(self._spilled_kv, kv, strict=True):
            live.kv = copy
        self._spilled_kv = []

    def resident_bytes(self) -> int:
        tensors = self._device_tensors() + [live.kv for live in self._waiting if live.is_prefilled_here]
        storages = [tensor.untyped_storage() for tensor in tensors if tensor is not None]
        return sum({storage._cdata: storage.nbytes() for storage in storages}.values())

    def _kept_tensors(self) -> list[Tensor]:
        return [self._weights.flat, *self._tables.tensors()]

    def _device_tensors(self) -> list[Tensor]:
        return [*self._kept_tensors(), self._cache.keys, self._cache.values, *self._buffers.tensors()]

    # --- checks and counts ----------------------------------------------------------------------------------

    def _check_request(self, request: TrajectoryRequest) -> None:
        limits = self._config
        if not 1 <= len(request.prompt_tokens) <= limits.max_prompt_tokens:
            raise UserError(
                f"prompt of {request.id}: {len(request.prompt_tokens)} tokens; accepted: 1 to "
                f"max_prompt_tokens {limits.max_prompt_tokens}"
            )
        if not 1 <= request.max_new_tokens <= limits.max_new_tokens:
            raise UserError(
                f"max_new_tokens of {request.id}: {request.max_new_tokens}; accepted: 1 to "
                f"the engine's {limits.max_new_tokens}"
            )
        if len(request.stop_tokens) > MAX_STOP_TOKENS:
            raise UserError(
                f"stop_tokens of {request.id}: {len(request.stop_tokens)} of them; accepted: up to {MAX_STOP_TOKENS}"
            )
        self._check_tokens(request.prompt_tokens, f"prompt of {request.id}")

    def _check_tokens(self, tokens: Sequence[int], where: str) -> None:
        for token in tokens:
            if not 0 <= token < self._vocab_size:
                raise UserError(
                    f"{where}: token {token} is not in the vocabulary; accepted: 0 to {self._vocab_size - 1}"
                )

    def _count(self, kind: str, rows: int, iterations: int, tokens: int, seconds: float) -> None:
        before = self._bands.get((kind, rows), (0, 0, 0.0))
        self._bands[kind, rows] = before[0] + iterations, before[1] + tokens, before[2] + 1e3 * seconds


def _slot_of(live: _Live) -> int:
    assert live.slot is not None
    return live.slot


def _num_forced_within(live: _Live, steps: int) -> int:
    """How many of the next `steps` tokens the environment wrote."""
    num_known = live.position - live.response_start + 1 - len(live.is_sampled)
    return max(0, min(steps, live.num_forced - num_known))


def _turn(live: _Live, stop_reason: str) -> FinishedTurn:
    return FinishedTurn(
        id=live.request.id,
        tokens=tuple(live.tokens),
        is_sampled=tuple(live.is_sampled),
        logprobs=tuple(live.logprobs),
        versions=tuple(live.versions),
        stop_reason=stop_reason,
        num_turns=live.num_turns,
    )
