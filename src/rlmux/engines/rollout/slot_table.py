"""Which trajectory has which slot, and the tensors of all slots: KV cache and `SlotBuffers`.

    free ──seat──▶ active ──park──▶ parked (waits for its environment) ──resume──▶ active ...
      ▲              │                │
      └────free──────┴────────────────┘        evict: the trajectory takes its tokens and KV along

Invariant: a trajectory's `slot` and this table always agree.

A module of its own: it owns the slots, and the engine owns the trajectories.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from rlmux.engines.model.decoder_shape import DecoderShape
from rlmux.engines.model.transformer import DecodePlan, KvCache
from rlmux.engines.rollout.live_trajectory import LiveTrajectory
from rlmux.engines.rollout.sampling import trajectory_uniforms
from rlmux.engines.rollout.slots import SlotBuffers, SlotRow
from rlmux.engines.rollout.stop_texts import StopTexts
from rlmux.rl.config import RolloutConfig
from rlmux.rl.types import TrajectoryId, TrajectoryRequest
from rlmux.rl.vocabulary import Vocabulary


class SlotTable:
    """`num_slots` slots of `max_len` positions each; trajectories move between slots, the tensors stay."""

    def __init__(
        self,
        shape: DecoderShape,
        rollout: RolloutConfig,
        max_len: int,
        device: torch.device,
        vocabulary: Vocabulary | None = None,
    ) -> None:
        """`rollout`: with the temperature of requests that name none. `vocabulary`: decodes where stop texts are."""
        num_slots = rollout.num_slots
        self.cache = KvCache(shape, num_slots, max_len, device, getattr(torch, rollout.dtype))
        self._buffers = SlotBuffers(num_slots, max_len, device)
        self._device = device
        self._temperature = rollout.temperature
        self._stop_texts = None if vocabulary is None else StopTexts(vocabulary)
        self._special: dict[TrajectoryId, LiveTrajectory] = {}
        """Seated trajectories with a temperature other than 1, or with stop texts."""
        self._occupants: list[LiveTrajectory | None] = [None] * num_slots

    @property
    def num_slots(self) -> int:
        return len(self._occupants)

    @property
    def free_slots(self) -> list[int]:
        """Indices, ascending."""
        return [slot for slot, occupant in enumerate(self._occupants) if occupant is None]

    @property
    def seated(self) -> list[LiveTrajectory]:
        """All trajectories with a slot, in slot order."""
        return [live for live in self._occupants if live is not None]

    @property
    def active(self) -> list[LiveTrajectory]:
        """The seated trajectories that can decode now, in slot order."""
        return [live for live in self.seated if not live.is_waiting_for_env]

    def seat(self, live: LiveTrajectory, slot: int) -> None:
        """Copy a trajectory's tokens and KV into a free slot."""
        if live.kv is not None:
            self.cache.write(slot, live.kv.to(self._device))
        request = live.request
        row = SlotRow(
            position=live.position,
            first=live.response_start - 1,
            tokens=[request.prompt_tokens[-1], *live.tokens, *live.pending],
            logprobs=live.logprobs,
            response_start=live.response_start,
            uniforms=self._uniforms_of(request),
            stop_tokens=request.stop_tokens,
            temperature=self._temperature_of(live),
        )
        self._buffers.seat(slot, row)
        live.slot, live.kv, live.pending, live.is_prefilled_here = slot, None, [], False
        self._occupants[slot] = live
        if self._temperature_of(live) != 1.0 or request.stop_texts:
            self._special[request.id] = live

    def _uniforms_of(self, request: TrajectoryRequest) -> Tensor:
        drawn_as = request.drawn_as or request.id
        return torch.from_numpy(trajectory_uniforms(request.seed, drawn_as, request.max_new_tokens))

    def park(self, live: LiveTrajectory) -> None:
        """Stop decoding a trajectory; it keeps its slot until another needs it."""
        self._buffers.park(slot_of(live))

    def resume(self, live: LiveTrajectory, forced: Sequence[int]) -> None:
        """Decode a parked trajectory again, first through the environment's tokens `forced`."""
        self._buffers.resume(slot_of(live), live.position, forced, live.request.stop_tokens)

    def _temperature_of(self, live: LiveTrajectory) -> float:
        return self._temperature if live.request.temperature is None else live.request.temperature

    def advance(
        self, plan: DecodePlan, active: Sequence[LiveTrajectory], num_steps: int, *, has_forced: bool
    ) -> dict[TrajectoryId, int]:
        """Make `num_steps` tokens for each active trajectory, fewer for one that ends its turn; positions of those.

        Completed stop texts are seen after the last of the steps alone. `has_forced`: some trajectory may be fed the
        environment's tokens.
        """
        is_tempered = any(self._temperature_of(live) != 1.0 for live in self._special.values())
        num_stops = max(len(live.request.stop_tokens) for live in active)
        for _ in range(num_steps):
            self._buffers.step(plan, is_tempered=is_tempered, has_forced=has_forced, num_stops=num_stops)
        stopped = {}
        if self._buffers.num_advancing() < len(active):
            progress = self._buffers.progress([slot_of(live) for live in active])
            for live, (position, is_advancing) in zip(active, progress, strict=True):
                if not is_advancing:
                    stopped[live.request.id] = position
        texts = [live for live in self._special.values() if live.request.stop_texts and not live.is_waiting_for_env]
        return stopped | self._completed_texts(texts) if texts else stopped

    @property
    def watches_texts(self) -> bool:
        """Whether any seated trajectory has stop texts, which the host checks after each token."""
        return any(live.request.stop_texts for live in self._special.values())

    def _completed_texts(self, lives: Sequence[LiveTrajectory]) -> dict[TrajectoryId, int]:
        """Positions of those whose response contains one of their stop texts."""
        assert self._stop_texts is not None
        stopped = {}
        slots = [slot_of(live) for live in lives]
        for live, slot, (token, position) in zip(lives, slots, self._buffers.newest(slots), strict=True):
            texts = live.request.stop_texts
            if self._stop_texts.may_complete(token, texts):
                response, _ = self._buffers.read(slot, live.response_start, position + 1)
                if self._stop_texts.is_in(response, texts):
                    stopped[live.request.id] = position
        return stopped

    def record(self, live: LiveTrajectory, version: int) -> None:
        """Bring a seated trajectory's record up to its position; `version` made what is new."""
        tokens, logprobs = self._buffers.read(slot_of(live), live.response_start, live.position + 1)
        live.record_tokens(tokens, logprobs, version)

    def evict(self, live: LiveTrajectory, version: int, *, with_kv: bool) -> None:
        """Free a trajectory's slot; the record keeps all it needs to continue, optionally its KV in host memory."""
        self.record(live, version)
        slot, ahead = slot_of(live), live.position + 1
        live.pending = self._buffers.read(slot, ahead, ahead + live.num_forced)[0]
        live.kv = self.cache.read(slot, live.position).cpu() if with_kv and live.position else None
        self.free(live)

    def adapter_names(self, width: int) -> list[str | None]:
        """The adapter of each of the first `width` slots; None for a slot that is empty or parked."""
        return [
            None if live is None or live.is_waiting_for_env else live.request.id.adapter
            for live in self._occupants[:width]
        ]

    def yield_slots(self, wanted: int, version_of: Callable[[LiveTrajectory], int]) -> None:
        """Evict parked trajectories, with their KV, until `wanted` slots are free or none is parked."""
        parked = [live for live in self.seated if live.is_waiting_for_env]
        for live in parked[: max(0, wanted - len(self.free_slots))]:
            self.evict(live, version_of(live), with_kv=True)

    def free(self, live: LiveTrajectory) -> None:
        """Free a trajectory's slot, if it has one."""
        if live.slot is not None:
            self._buffers.free(live.slot)
            self._special.pop(live.request.id, None)
            self._occupants[live.slot] = None
            live.slot = None

    def compact(self, active: Sequence[LiveTrajectory], width: int) -> None:
        """Exchange active trajectories in slots from `width` on with idle slots below it."""
        high = [slot_of(live) for live in active if slot_of(live) >= width]
        idle = [slot for slot, live in enumerate(self._occupants[:width]) if live is None or live.is_waiting_for_env]
        low = idle[: len(high)]
        slots = torch.tensor(low + high, device=self._device)
        sources = torch.tensor(high + low, device=self._device)
        self.cache.exchange(slots, sources)
        self._buffers.exchange(slots, sources)
        for a, b in zip(low, high, strict=True):
            self._occupants[a], self._occupants[b] = self._occupants[b], self._occupants[a]
            for slot in (a, b):
                occupant = self._occupants[slot]
                if occupant is not None:
                    occupant.slot = slot

    def tensors(self) -> list[Tensor]:
        """All tensors whose device memory an offload gives back."""
        return [self.cache.keys, self.cache.values, *self._buffers.tensors()]

    def reset(self) -> None:
        """Make the tensors those of empty slots, after their memory came back."""
        self._buffers.reset()


def slot_of(live: LiveTrajectory) -> int:
    """The slot of a seated trajectory."""
    assert live.slot is not None
    return live.slot
