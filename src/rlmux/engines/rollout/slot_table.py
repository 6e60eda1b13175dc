"""Which trajectory has which slot, and the tensors of all slots: KV cache and `SlotBuffers`.

    free ──seat──▶ active ──park──▶ parked (waits for its environment) ──resume──▶ active ...
      ▲              │                │
      └────free──────┴────────────────┘        evict: the trajectory takes its tokens and KV along

The cache's tokens are cut into slots of one capacity. Where `rollout.kv_tokens` leaves less than the full length to
each slot, capacities follow the trajectories:

    make_room   a seated trajectory's next step lies beyond its slot: slots become longer and fewer. Parked trajectories
                leave, then those that were seated last
    slot_for    no slot is free: slots become as short as the seated trajectories allow, so that more of them are there

Invariants: a trajectory's `slot` and this table always agree. The trajectory that was seated first among the active
ones keeps its slot, so that each of them ends.

A module of its own: it owns the slots, and the engine owns the trajectories.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from rlmux.engines.model.decoder_shape import DecoderShape
from rlmux.engines.model.transformer import DecodePlan, KvCache
from rlmux.engines.residency import to_host
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
        vocabulary: Vocabulary | None,
        capacity_for: Callable[[int], int],
    ) -> None:
        """`rollout`: with the temperature of requests that name none. `vocabulary`: decodes where stop texts are.

        `capacity_for`: the smallest capacity of slots for a number of positions, up to `max_len`.
        """
        num_slots, dtype = rollout.num_slots, getattr(torch, rollout.dtype)
        self.cache = KvCache(shape, num_slots, max_len, device, dtype, rollout.cached_tokens)
        self._capacity_for = capacity_for
        self._buffers = SlotBuffers(num_slots, max_len, device)
        self._device = device
        self._temperature = rollout.temperature
        self._stop_texts = None if vocabulary is None else StopTexts(vocabulary)
        self._special: dict[TrajectoryId, LiveTrajectory] = {}
        """Seated trajectories with a temperature other than 1, or with stop texts."""
        self._occupants: list[LiveTrajectory | None] = [None] * num_slots
        self._adapter_by_slot: list[str | None] = [None] * num_slots
        """Adapter that made what a slot's cache holds; None for zeros."""
        self._in_order: dict[TrajectoryId, LiveTrajectory] = {}
        """Seated trajectories, the one that was seated last at the end."""

    @property
    def num_slots(self) -> int:
        return len(self._occupants)

    @property
    def seated(self) -> list[LiveTrajectory]:
        """All trajectories with a slot, in slot order."""
        return [live for live in self._occupants if live is not None]

    @property
    def active(self) -> list[LiveTrajectory]:
        """The seated trajectories that can decode now, in slot order."""
        return [live for live in self.seated if not live.is_waiting_for_env]

    def seat(self, live: LiveTrajectory, slot: int) -> None:
        """Copy a trajectory's tokens and KV into a free slot, cleared of what another adapter left there.

        What an adapter with huge numbers leaves may not be finite, and a masked NaN is one for its reader.
        """
        adapter = live.request.id.adapter
        if self._adapter_by_slot[slot] not in (None, adapter):
            self.cache.clear(slot)
        self._adapter_by_slot[slot] = adapter
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
        self._in_order[request.id] = live
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
        """Free a trajectory's slot; the record keeps all it needs to continue, optionally its KV in host memory.

        The KV of a prompt alone is left out: new weights may come before it is seated again, which make it anew.
        """
        self.record(live, version)
        slot, ahead = slot_of(live), live.position + 1
        live.pending = self._buffers.read(slot, ahead, ahead + live.num_forced)[0]
        live.kv = to_host(self.cache.read(slot, live.position)) if with_kv and live.tokens else None
        self.free(live)

    def adapter_names(self, width: int) -> list[str | None]:
        """The adapter of each of the first `width` slots; None for a slot that is empty or parked."""
        return [
            None if live is None or live.is_waiting_for_env else live.request.id.adapter
            for live in self._occupants[:width]
        ]

    def make_room(self, version_of: Callable[[LiveTrajectory], int]) -> list[LiveTrajectory]:
        """Make slots long enough for the next step of each seated trajectory.

        Returns those that had to leave for that, with their KV, in the order in which they were seated.
        """
        evicted: list[LiveTrajectory] = []
        while len(self._in_order) > self.cache.num_slots_of(capacity := self._capacity_of_seated()):
            last = sorted(self._in_order.values(), key=lambda live: live.is_waiting_for_env)[-1]
            evicted.insert(0, last)
            self.evict(last, version_of(last), with_kv=True)
        self._lay_out(capacity)
        return evicted

    def _capacity_of_seated(self) -> int:
        """The present capacity, or a larger one for the next step of the seated trajectories."""
        return self._capacity_for(max(self.cache.capacity, _positions_of(self.seated)))

    def slot_for(self, live: LiveTrajectory, version_of: Callable[[LiveTrajectory], int]) -> int | None:
        """The lowest free slot, long enough for a waiting trajectory's next step; None if that has to wait.

        Parked trajectories leave with their KV where one more finds no slot beside them.
        """
        free = self._lowest_free()
        if free is not None and live.position < self.cache.capacity:
            return free
        parked = [other for other in self.seated if other.is_waiting_for_env]
        while len(self._in_order) >= self.cache.num_slots_of(capacity := self._capacity_beside(live)):
            if not parked:
                return None
            first = parked.pop(0)
            self.evict(first, version_of(first), with_kv=True)
        self._lay_out(capacity)
        return self._lowest_free()

    def _lowest_free(self) -> int | None:
        return next((slot for slot in range(self.cache.num_slots) if self._occupants[slot] is None), None)

    def _capacity_beside(self, live: LiveTrajectory) -> int:
        """The capacity with which a waiting trajectory finds room beside the seated ones.

        Where slots become shorter, there is room for an eighth more, so that they need not become longer at once.
        """
        needed = _positions_of([live, *self.seated])
        capacity = self._capacity_for(needed)
        if capacity < self.cache.capacity:
            capacity = self._capacity_for(min(needed + needed // 8, self.cache.capacity))
        return capacity

    def _lay_out(self, capacity: int) -> None:
        """Give slots another capacity; the lowest ones keep their trajectories, which move there first."""
        if capacity != self.cache.capacity:
            self.compact(self.seated, self.cache.num_slots_of(capacity))
            self.cache.lay_out(capacity, max((slot_of(live) + 1 for live in self.seated), default=0))

    def free(self, live: LiveTrajectory) -> None:
        """Free a trajectory's slot, if it has one."""
        if live.slot is not None:
            self._buffers.free(live.slot)
            self._special.pop(live.request.id, None)
            self._occupants[live.slot] = None
            del self._in_order[live.request.id]
            live.slot = None

    def compact(self, lives: Sequence[LiveTrajectory], width: int) -> None:
        """Exchange these trajectories in slots from `width` on with slots of none of them below it."""
        taken = {slot_of(live) for live in lives}
        high = [slot_of(live) for live in lives if slot_of(live) >= width]
        low = [slot for slot in range(width) if slot not in taken][: len(high)]
        if not high:
            return
        slots = torch.tensor(low + high, device=self._device)
        sources = torch.tensor(high + low, device=self._device)
        self.cache.exchange(slots, sources)
        self._buffers.exchange(slots, sources)
        for a, b in zip(low, high, strict=True):
            self._occupants[a], self._occupants[b] = self._occupants[b], self._occupants[a]
            self._adapter_by_slot[a], self._adapter_by_slot[b] = self._adapter_by_slot[b], self._adapter_by_slot[a]
            for slot in (a, b):
                occupant = self._occupants[slot]
                if occupant is not None:
                    occupant.slot = slot

    def tensors(self) -> list[Tensor]:
        """All tensors whose device memory an offload gives back."""
        return [*self.cache.tensors(), *self._buffers.tensors()]

    def reset(self) -> None:
        """Reset the tensors to empty slots after their memory is restored."""
        self._buffers.reset()


def _positions_of(lives: Sequence[LiveTrajectory]) -> int:
    """Positions of a slot that the next step of each of these needs."""
    return max((live.position + 1 for live in lives), default=1)


def slot_of(live: LiveTrajectory) -> int:
    """The slot of a seated trajectory."""
    assert live.slot is not None
    return live.slot
