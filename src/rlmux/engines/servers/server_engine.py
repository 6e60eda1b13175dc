"""A rollout engine behind a server of others: tokens in, tokens out.

    submit / continue_from ──▶ waiting ──one request each──▶ server ──events──▶ FinishedTurn ──▶ reply, or released
                                  ▲                            │
                                  └── aborted, or lost: the next request is prompt + tokens so far, KV recomputed

    a chunk ends      the server is held between two steps (`keeps_held`), or its requests are aborted
    offload, load     requests aborted; sleep and wake if that frees memory; weights that were kept are compared by a
                      canary prompt, those that were dropped are loaded before the KV cache comes back
    load_weights      requests aborted; the server takes buffers by their handles (`takes_tensors`), loads a file
                      (`reloads`), or is restarted from it; its version, and its checksums of what it stores as the
                      file does, are compared with the file's

Invariant: a trajectory's requests carry a seed that is a function of (seed, step, prompt, sample) and, where the
server's noise is not one of the position, of the position. What else of promise 1 holds is the server's: it is probed.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rlmux.core.errors import IllegalTransitionError, PipelineError
from rlmux.core.model import decode_sub_stage, dense_threshold_of
from rlmux.engines.rollout.chunk_tally import ChunkTally
from rlmux.engines.rollout.request_limits import RequestLimits
from rlmux.engines.rollout.request_queue import WaitingQueue
from rlmux.engines.servers.capabilities import CANNOT, Capabilities
from rlmux.engines.servers.dialect import Dialect
from rlmux.engines.servers.generation_requests import Ended
from rlmux.engines.servers.gpu_memory import GpuMemory
from rlmux.engines.servers.http_connection import BusyError, ServerGoneError
from rlmux.engines.servers.model_folder import ModelFolder
from rlmux.engines.servers.one_server import MAX_LOST, WAKE_LIMIT_S, OneServer
from rlmux.engines.servers.settings import Piece, Sampling, ServerSettings
from rlmux.engines.servers.trajectory import ServedTrajectory
from rlmux.engines.servers.transfer import Buffers, buffer_bytes, pieces
from rlmux.engines.servers.weight_checks import check_checksums
from rlmux.rl.config import TrainingConfig
from rlmux.rl.types import (
    ChunkReport,
    FinishedTurn,
    PartialTrajectory,
    TrajectoryId,
    TrajectoryRequest,
    TurnReply,
)

_POLL_S = 0.05
_CANARY_GAP = 1e-2
"""Largest gap in nats between a canary's log-probs before sleep and after."""


def _nothing() -> None:
    """Default `on_wait`."""


class ServerRolloutEngine(OneServer):
    """Samples trajectories with one server. See the module docstring; the protocol is in protocol.py."""

    def __init__(
        self,
        dialect: Dialect,
        settings: ServerSettings,
        folder: ModelFolder,
        config: TrainingConfig,
        *,
        vocab_size: int,
        is_single_turn: bool = True,
        on_wait: Callable[[], None] = _nothing,
        gpus: GpuMemory | None = None,
        new_buffers: Callable[[int], Buffers] | None = None,
    ) -> None:
        """Starts the server, or finds it at `engine.url`. It has no capabilities until `capabilities` is set.

        `on_wait`: called now and then while the server is waited for. `gpus`: its GPUs; None on cores. `new_buffers`:
        makes buffers of so many bytes that the server can open; None where there are none. Raises ServerGoneError, and
        UserError for a server of another kind.
        """
        rollout = config.rollout
        super().__init__(dialect, settings, rollout.engine, on_wait=on_wait, gpus=gpus)
        self.folder = folder
        self._new_buffers = new_buffers
        self.version = 0
        self.capabilities: Capabilities = CANNOT
        """Measured capabilities of the server (measuring.py)."""
        self._temperature = rollout.temperature
        self._dense_threshold = dense_threshold_of(rollout.num_slots)
        self._staleness = config.algorithm.staleness
        self._is_single_turn = is_single_turn
        self._limits = RequestLimits(
            vocab_size=vocab_size,
            max_prompt_tokens=rollout.max_prompt_tokens,
            max_new_tokens=rollout.max_new_tokens,
        )
        self._live: dict[TrajectoryId, ServedTrajectory] = {}
        """All unfinished trajectories."""
        self._waiting: WaitingQueue[ServedTrajectory] = WaitingQueue(rollout.order)
        self._by_request: dict[str, ServedTrajectory] = {}
        """Trajectories under way, by request."""
        self._overdue: list[FinishedTurn] = []
        """Turns that ended without a request, for the next report."""
        self._is_offloaded = False
        self._num_copies = settings.data_parallel
        """Copies of the model behind the server. A prompt's samples and turns go to one, which has it cached."""
        self._num_loads = 0
        self._has_other_weights = False
        """Whether the server has other weights than its folder shows: they came while it slept, or it dropped its
        own."""
        self._prompt_tokens = self._cached_tokens = 0
        """Of requests that the server has ended since the last report."""
        self._canary: tuple[int, Piece] | None = None
        """Version of weights, and the answer to the canary prompt under it; None before the first."""

    @property
    def limits(self) -> RequestLimits:
        return self._limits

    def described(self) -> dict[str, Any]:
        """Name, version and measured capabilities, for a log."""
        return {"name": self.dialect.name, "version": self.server_version, **asdict(self.capabilities)}

    @property
    def is_unused(self) -> bool:
        """Whether it is loaded and has no trajectory."""
        return not self._live and not self._is_offloaded

    @property
    def num_unfinished(self) -> int:
        """Unfinished trajectories of the engine."""
        return len(self._live)

    # --- trajectories ---------------------------------------------------------------------------------------

    def submit(self, requests: Sequence[TrajectoryRequest]) -> None:
        """Queue new trajectories. Raises UserError for a request that cannot run, before any is taken."""
        for request in requests:
            self._limits.check_request(request)
        for request in requests:
            self._enqueue(ServedTrajectory(request=request, is_waiting_for_env=request.is_session))

    def continue_from(self, partials: Sequence[PartialTrajectory]) -> None:
        """Queue unfinished trajectories of another engine, those that wait for their environment included."""
        for partial in partials:
            self._limits.check_partial(partial)
        for partial in partials:
            self._enqueue(ServedTrajectory.from_partial(partial))

    def reply(self, replies: Sequence[TurnReply], released: Sequence[TrajectoryId]) -> None:
        """Continue trajectories with their environment's replies; drop finished ones."""
        for answer in replies:
            live = self._live.get(answer.id)
            if live is None or not live.is_waiting_for_env:
                raise IllegalTransitionError(f"{answer.id} got a reply but is not waiting for one")
            self._limits.check_reply(answer)
            if answer.context is not None:
                del self._live[answer.id]
                live = ServedTrajectory.from_partial(answer.context)
                live.mark_new(self.version)
                self._enqueue(live)
                continue
            live.is_waiting_for_env, live.turn_end = False, answer.turn_end
            live.add(
                answer.tokens[: live.tokens_left],
                [0.0] * len(answer.tokens[: live.tokens_left]),
                self.version,
                is_sampled=False,
            )
            if live.tokens_left:
                self._waiting.append(live)
            else:
                self._overdue.append(live.finished_turn("length"))
                del self._live[answer.id]
        for trajectory_id in released:
            gone = self._live.get(trajectory_id)
            if gone is not None and not gone.is_waiting_for_env:
                raise IllegalTransitionError(f"{trajectory_id} was released in the middle of a turn")
            self._live.pop(trajectory_id, None)

    def take_partials(self, ids: Sequence[TrajectoryId] | None, *, with_kv: bool) -> list[PartialTrajectory]:
        """Remove unfinished trajectories (None: all), in id order; also while offloaded. Their KV never comes along."""
        for trajectory_id in ids or ():
            if trajectory_id not in self._live:
                raise IllegalTransitionError(f"{trajectory_id} was to be taken but is not here")
        taken = sorted(self._live if ids is None else ids)
        self._drain()
        taken = [trajectory_id for trajectory_id in taken if trajectory_id in self._live]  # a turn may just have ended
        self._abort([self._live[trajectory_id] for trajectory_id in taken])
        partials = [self._live.pop(trajectory_id).to_partial() for trajectory_id in taken]
        self._waiting.discard(set(taken))
        return partials

    def _enqueue(self, live: ServedTrajectory) -> None:
        if live.request.id in self._live:
            raise IllegalTransitionError(f"{live.request.id} is already here")
        self._live[live.request.id] = live
        if not live.is_waiting_for_env:
            self._waiting.append(live)

    # --- the chunk ------------------------------------------------------------------------------------------

    def run_chunk(self, *, max_decode_steps: int, max_seconds: float) -> ChunkReport:
        """Decode until nothing is left to decode or a limit is reached.

        Servers take no limit of steps: the chunk ends once some trajectory has made that many. Raises
        ServerGoneError for a server that is gone, PipelineError for answers that cannot be right.
        """
        if self._is_offloaded:
            raise IllegalTransitionError("an offloaded rollout engine cannot run")
        start = time.perf_counter()
        tally = ChunkTally(dense_threshold=self._dense_threshold, finished=self._overdue)
        self._overdue = []
        self._release()
        made: dict[TrajectoryId, int] = {}
        most = 0
        while self._waiting or self._by_request:
            self._seat()
            most = max(most, len(self._by_request))
            left_s = start + max_seconds - time.perf_counter()
            if made and (left_s <= 0 or max(made.values()) >= max_decode_steps):
                break
            self._take_event(tally, made, _POLL_S if not made else min(_POLL_S, left_s))
        self._hold()
        seconds = time.perf_counter() - start
        steps = max(made.values(), default=0)
        if steps:
            sampled = Counter({"": sum(made.values())})
            tally.decode_steps, tally.sampled_tokens = steps, sampled
            sub_stage = decode_sub_stage(most, self._dense_threshold)
            tally.add_iterations(sub_stage, most, iterations=steps, tokens=sampled, seconds=seconds)
        tally.finished.sort(key=lambda turn: turn.id)
        prompt_tokens, self._prompt_tokens = self._prompt_tokens, 0
        cached_tokens, self._cached_tokens = self._cached_tokens, 0
        return ChunkReport(
            finished=tally.finished,
            num_active=len(self._by_request),
            num_waiting=len(self._waiting),
            num_waiting_for_env=sum(live.is_waiting_for_env for live in self._live.values()),
            sampled_tokens=tally.sampled_tokens.total(),
            prefill_tokens=0,
            decode_steps=tally.decode_steps,
            seconds=seconds,
            iterations=tally.iterations(None),
            prompt_tokens=prompt_tokens,
            cached_tokens=cached_tokens,
        )

    def _seat(self) -> None:
        """Begin requests for waiting trajectories, as many as the server decodes at once."""
        while self._waiting and len(self._by_request) < self._settings.num_slots:
            live = self._waiting.pop()
            live.request_id = self.next_request_id()
            self._by_request[live.request_id] = live
            seed = live.noise_seed(is_positional=self.capabilities.has_positional_noise)
            self.requests.begin(
                Sampling(
                    request_id=live.request_id,
                    tokens=live.context,
                    seed=seed,
                    temperature=self._temperature,
                    max_tokens=live.tokens_left,
                    stop_tokens=live.request.stop_tokens,
                    weights=self.weights,
                    adapter=self.adapter,
                    rank=live.request.id.prompt % self._num_copies if self._num_copies > 1 else None,
                )
            )

    def _take_event(self, tally: ChunkTally, made: dict[TrajectoryId, int], wait_s: float) -> bool:
        """Handle one event; False if there was none."""
        event = self.requests.next(wait_s)
        if event is None:
            if self._process is not None and not self._process.is_alive:
                raise ServerGoneError(f"the server is gone: {self._process.last_words()}")
            return False
        request_id, found = event
        if isinstance(found, Piece):  # what was cached comes behind a turn's end
            self._prompt_tokens += found.prompt_tokens
            self._cached_tokens += found.cached_tokens
        live = self._by_request.get(request_id)
        if live is None:
            return True
        if isinstance(found, Ended):
            self._lose(live, found)
        else:
            self._add(live, found, tally, made)
        return True

    def _add(self, live: ServedTrajectory, piece: Piece, tally: ChunkTally, made: dict[TrajectoryId, int]) -> None:
        self._check(live, piece)
        live.add(piece.tokens, piece.logprobs, self.version, is_sampled=True)
        if piece.tokens:
            live.num_lost = 0
            made[live.request.id] = made.get(live.request.id, 0) + len(piece.tokens)
        if piece.finish == "abort":
            self._lose(live, Ended(None))
        elif piece.finish is not None:
            tally.finished.append(self._finish(live, piece.finish))

    def _check(self, live: ServedTrajectory, piece: Piece) -> None:
        """Raises PipelineError for an answer that cannot be right."""
        name = f"{self.dialect.name}: {live.request.id}"
        if len(piece.tokens) != len(piece.logprobs):
            raise PipelineError(f"{name} came with {len(piece.logprobs)} log-probs for {len(piece.tokens)} tokens")
        if len(piece.tokens) > live.tokens_left:
            raise PipelineError(f"{name} got {len(piece.tokens)} tokens; {live.tokens_left} were left of its budget")
        if not all(map(math.isfinite, piece.logprobs)):
            raise PipelineError(f"{name}: a sampled token's log-probability is not finite")
        if not all(0 <= token < self._limits.vocab_size for token in piece.tokens):
            raise PipelineError(f"{name} got a token that is not in the vocabulary of {self._limits.vocab_size}")
        wrong = [version for version in piece.versions if version != str(self.version)]
        if wrong and self.capabilities.names_versions:
            raise PipelineError(f"{name} was sampled with version {wrong[0]!r}; it is to be {self.version}")

    def _finish(self, live: ServedTrajectory, reason: str) -> FinishedTurn:
        """Report a turn; the trajectory waits if a reply may come and is forgotten otherwise."""
        self._by_request.pop(str(live.request_id))
        live.request_id = None
        live.num_turns += 1
        self._waiting.note_end(live.request.id, len(live.tokens))
        has_stopped = bool(live.tokens) and live.tokens[-1] in live.request.stop_tokens
        stop_reason = "stop" if has_stopped else live.end_reason
        if not has_stopped and live.tokens_left:
            raise PipelineError(
                f"{self.dialect.name}: {live.request.id} ended ({reason}) without a stop token, with "
                f"{live.tokens_left} tokens left"
            )
        is_over = stop_reason == "length" or self._is_single_turn
        if is_over and not live.request.is_session:
            del self._live[live.request.id]
        else:
            live.is_waiting_for_env = True
        return live.finished_turn(stop_reason)

    def _lose(self, live: ServedTrajectory, ended: Ended) -> None:
        """Requeue a trajectory whose request was lost. Raises after too many losses."""
        self._by_request.pop(str(live.request_id))
        live.request_id = None
        if ended.error is not None and not isinstance(ended.error, ServerGoneError):
            raise ended.error
        if isinstance(ended.error, BusyError):
            time.sleep(_POLL_S)
        else:
            live.num_lost += 1
        if live.num_lost > MAX_LOST:
            why = ended.error or "its answer ended without a reason"
            raise ServerGoneError(f"{self.dialect.name} lost {live.request.id} {live.num_lost} times: {why}")
        self._waiting.put_back([live])

    def _drain(self) -> None:
        """Handle pending events. Turns that end here are in the next report."""
        tally = ChunkTally(dense_threshold=self._dense_threshold, finished=[])
        while self._by_request and self._take_event(tally, {}, 0.0):
            pass
        self._overdue += tally.finished

    def _abort(self, lives: Sequence[ServedTrajectory]) -> None:
        """Abort trajectories' requests and requeue them, in their order, before all new ones."""
        under_way = [live for live in lives if live.request_id is not None]
        self.requests.end([str(live.request_id) for live in under_way])
        for live in reversed(under_way):
            self._by_request.pop(str(live.request_id))
            live.request_id = None
            self._waiting.put_back([live])

    def abort_all(self) -> None:
        """Abort all requests; trajectories keep their tokens and continue with the next chunk."""
        self._drain()
        self._abort(list(self._by_request.values()))

    # --- safe points ----------------------------------------------------------------------------------------

    def _hold(self) -> None:
        """Nothing is computed until `_release`."""
        if self._by_request and self.capabilities.keeps_held:
            self.dialect.hold(self.server)
            self._is_held = True
        else:
            self.abort_all()

    def _release(self) -> None:
        if self._is_held:
            self.dialect.release(self.server)
            self._is_held = False

    # --- weights --------------------------------------------------------------------------------------------

    def load_weights(self, path: Path, version: int) -> None:
        """Load weights from a safetensors file; also while offloaded.

        Active trajectories continue with prompt and tokens so far. Raises IllegalTransitionError if one has tokens and
        the pipeline's staleness is 0, PipelineError for damaged weights, or if the server has other weights.
        """
        self._drain()
        begun = [live for live in self._live.values() if live.tokens]
        if begun and self._staleness == 0:
            raise IllegalTransitionError(
                f"version {version} came while {begun[0].request.id} of a sync pipeline is unfinished"
            )
        self.abort_all()
        self.folder.show(path, version)
        self.version = version
        self._has_other_weights = True
        if not self._is_asleep:
            self._release()
            self.give_weights(self.capabilities)

    def give_weights(self, capabilities: Capabilities) -> None:
        """Have the server take the folder's weights, by the best way that it has."""
        if self.folder.adapter_path is not None:
            self.load_adapter()
        elif capabilities.takes_tensors:
            self.hand_over()
        elif capabilities.reloads:
            self.reload()
        else:
            self.restart()
        if capabilities.names_versions:
            found = self.dialect.weight_version(self.server)
            if found != str(self.version):
                raise PipelineError(
                    f"{self.dialect.name} reports weights of version {found!r}; accepted: {self.version}"
                )
        if capabilities.has_checksums:
            check_checksums(self.dialect.name, self.dialect.checksums(self.server), self.folder.tensors, self.dtype)
        self._has_other_weights = False

    def load_adapter(self) -> None:
        """Have the server load the folder's adapter, and forget the one before. Each version has a name of its own, so
        no request is answered by an older one, nor from its cached prefixes. Raises ServerAnswerError where it cannot.
        """
        assert self.folder.adapter_path is not None
        before, name = self.adapter, self.folder.adapter_path.name
        self.dialect.load_adapter(self.server, name, self.folder.adapter_path)
        self.adapter = name
        if before and before != name:
            self.dialect.unload_adapter(self.server, before)

    def drop_adapter(self) -> None:
        """The base alone again, as an adapter begins."""
        self.folder.hide_adapter()
        if self.adapter:
            self.dialect.unload_adapter(self.server, self.adapter)
        self.adapter = ""

    @property
    def has_buffers(self) -> bool:
        """Whether weights may be handed over."""
        return self._new_buffers is not None

    def hand_over(self) -> None:
        """Give the server the folder's weights through buffers. Raises ServerAnswerError where it takes none."""
        assert self._new_buffers is not None
        tensors = self.folder.tensors
        buffers = self._new_buffers(buffer_bytes(tensors))
        self._name_weights()
        try:
            self.dialect.take_weights(self.server, pieces(tensors, buffers), self.version)
        finally:
            buffers.release()

    def reload(self) -> None:
        """Have the server read the folder's weights. Raises ServerAnswerError where it cannot."""
        self._name_weights()
        self.dialect.load_weights(self.server, self.folder.path, self.version)

    def _name_weights(self) -> None:
        self._num_loads += 1
        self.weights = str(self._num_loads)

    # --- residency ------------------------------------------------------------------------------------------

    def offload(self, *, spill_to: Path | None = None) -> None:
        """Leave the device as far as the server can; trajectories keep their tokens. Does nothing when offloaded.

        Raises PipelineError for a sleeping server that keeps its memory, although it freed it when measured.
        """
        if self._is_offloaded:
            return
        self.abort_all()
        self._release()  # nothing is under way; a server that is held samples no canary
        if self.capabilities.frees_memory:
            keeps_weights = not self._drops_weights
            if self._canary is None or self._canary[0] != self.version:
                self._canary = self.version, self._sample_canary(self._limits.vocab_size)
            before = self.memory_bytes()
            self.dialect.sleep(self.server, keeps_weights=keeps_weights)
            self._is_asleep = True
            self._has_other_weights |= not keeps_weights
            self._wait_for_memory(before - self.capabilities.freed_bytes / 2)
        self._is_offloaded = True

    @property
    def _drops_weights(self) -> bool:
        """Whether it sleeps without its weights: where the next version comes before the next token, or where taking
        them again costs no more than copying them out and in."""
        return self.capabilities.drops_weights and (not self._live or self.capabilities.takes_tensors)

    def load(self) -> None:
        """Back to the device. Does nothing when already there. Raises PipelineError for weights that changed asleep."""
        if not self._is_offloaded:
            return
        if self._is_asleep:
            self.wake(self.capabilities, has_dropped=self._has_other_weights)
            self._is_asleep = False
            if self._canary is not None and self._canary[0] == self.version:
                self._check_canary(self._canary[1])
        self._is_offloaded = False

    def wake(self, capabilities: Capabilities, *, has_dropped: bool) -> None:
        """Wake the server, give it the folder's weights if it has dropped its own, and wait until it takes requests."""
        if has_dropped and not capabilities.reloads:
            self.give_weights(capabilities)  # started anew, it is awake
            return
        self.dialect.wake(self.server, "weights")
        if has_dropped:
            self.give_weights(capabilities)
        self.dialect.wake(self.server, "kv_cache")
        until_s = time.monotonic() + WAKE_LIMIT_S
        while not self.dialect.is_awake(self.server):
            if time.monotonic() >= until_s:
                raise ServerGoneError(f"{self.dialect.name} did not wake within {WAKE_LIMIT_S:.0f} s")
            self._on_wait()
            time.sleep(_POLL_S)

    def _check_canary(self, before: Piece) -> None:
        """Raises PipelineError where the canary under the same weights has other log-probs than before."""
        now = self._sample_canary(self._limits.vocab_size)
        gap = max((abs(a - b) for a, b in zip(before.logprobs, now.logprobs, strict=True)), default=0.0)
        if list(before.tokens[:1]) != list(now.tokens[:1]) or (gap > _CANARY_GAP and before.tokens == now.tokens):
            raise PipelineError(f"{self.dialect.name} woke with other weights: its canary is {gap:.3g} nats off")
