"""The per-slot state of a rollout engine: what the decode step reads and writes, one column or row per slot.

    position ──▶ the token fed next stands here; the cache holds everything before it
    following = position + 1 ──▶ where the sampled (or forced) token and its log-probability are written

    slot:  free ──seat──▶ advancing ──▶ parked (keeps its row) ──▶ advancing ... ──▶ free

Idle slots are computed along with the others and stay where they are: what they write lands at their own
`following`, which is rewritten before it is ever read. A slot that samples a stop token becomes idle on the device, by
itself, so that several steps may follow each other before the host looks at it (`progress`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rlmux.engines.model.transformer import DecodePlan
from rlmux.engines.rollout.sampling import sample

MAX_STOP_TOKENS = 8
"""Stop tokens that a slot has room for."""

_POSITION, _IS_ADVANCING, _CURRENT, _FORCED_END, _STOPS = range(5)
_NO_TOKEN = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotRow:
    """Initial state of a slot."""

    position: int
    """Position in prompt + response of the token fed next."""
    first: int
    """Position of `tokens[0]`."""
    tokens: Sequence[int]
    """Known tokens from `first` on, up to and including forced ones not fed yet."""
    logprobs: Sequence[float]
    """Log-probability of each response token, from `response_start` on."""
    response_start: int
    """Position of the first response token."""
    uniforms: Tensor
    """Random numbers [max_new_tokens] in [0, 1), one for each response token, float64."""
    stop_tokens: Sequence[int]
    """Sampled tokens that end the turn; up to MAX_STOP_TOKENS."""
    temperature: float
    """Temperature of the distribution sampled from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _StepViews:
    """Views of the buffers' first `width` slots, in the shapes that a step reads and writes."""

    position: Tensor
    position_column: Tensor
    is_advancing: Tensor
    current: Tensor
    current_column: Tensor
    forced_end_column: Tensor
    stops: Tensor
    tokens: Tensor
    logprobs: Tensor
    uniforms: Tensor
    temperatures: Tensor
    """Temperatures [width, 1]."""


class SlotBuffers:
    """Fixed tensors for all slots; a decode step allocates none of them."""

    def __init__(self, num_slots: int, max_len: int, device: torch.device) -> None:
        self._device = device
        self._state = torch.zeros(_STOPS + MAX_STOP_TOKENS, num_slots, dtype=torch.int64, device=device)
        self._tokens = torch.zeros(num_slots, max_len, dtype=torch.int64, device=device)
        self._logprobs = torch.zeros(num_slots, max_len, device=device)
        self._uniforms = torch.zeros(num_slots, max_len, dtype=torch.float64, device=device)
        self._temperatures = torch.ones(num_slots, 1, device=device)
        self._views_by_width: dict[int, _StepViews] = {}
        self.reset()

    def reset(self) -> None:
        """Empty all slots."""
        for tensor in self.tensors():
            tensor.zero_()
        self._state[_STOPS:] = _NO_TOKEN
        self._temperatures.fill_(1.0)

    def tensors(self) -> list[Tensor]:
        """All buffers, for an offload."""
        return [self._state, self._tokens, self._logprobs, self._uniforms, self._temperatures]

    def seat(self, slot: int, row: SlotRow) -> None:
        """Fill a slot and let it advance."""
        self._tokens[slot, row.first : row.first + len(row.tokens)] = self._new(row.tokens)
        if row.logprobs:
            end = row.response_start + len(row.logprobs)
            self._logprobs[slot, row.response_start : end] = torch.tensor(row.logprobs, device=self._device)
        end = row.response_start + len(row.uniforms)
        self._uniforms[slot, row.response_start : end] = row.uniforms.to(self._device)
        self._temperatures[slot] = row.temperature
        forced_end = row.first + len(row.tokens) - 1
        current = row.tokens[row.position - row.first]
        stops = [*row.stop_tokens, *[_NO_TOKEN] * (MAX_STOP_TOKENS - len(row.stop_tokens))]
        self._state[:, slot] = self._new([row.position, 1, current, forced_end, *stops])

    def park(self, slot: int) -> None:
        """Keep the row, stop advancing."""
        self._state[_IS_ADVANCING, slot] = 0
        self._state[_STOPS:, slot] = _NO_TOKEN

    def resume(self, slot: int, position: int, forced_tokens: Sequence[int], stop_tokens: Sequence[int]) -> None:
        """Advance again from `position`, first through `forced_tokens`."""
        forced_end = position + len(forced_tokens)
        self._tokens[slot, position + 1 : forced_end + 1] = self._new(forced_tokens)
        current = int(self._tokens[slot, position])
        stops = [*stop_tokens, *[_NO_TOKEN] * (MAX_STOP_TOKENS - len(stop_tokens))]
        self._state[:, slot] = self._new([position, 1, current, forced_end, *stops])

    def free(self, slot: int) -> None:
        """An empty slot stays at position 0 and never stops."""
        self.park(slot)
        self._state[_POSITION, slot] = 0
        self._temperatures[slot] = 1.0

    def exchange(self, slots: Tensor, sources: Tensor) -> None:
        """Put the contents of `sources` into `slots` at once; the two name the same slots."""
        self._state[:, slots] = self._state[:, sources]
        for buffer in (self._tokens, self._logprobs, self._uniforms, self._temperatures):
            buffer[slots] = buffer[sources]

    def read(self, slot: int, start: int, end: int) -> tuple[list[int], list[float]]:
        """Tokens and log-probabilities at positions [start, end)."""
        return self._tokens[slot, start:end].tolist(), self._logprobs[slot, start:end].tolist()

    def step(self, plan: DecodePlan, *, is_tempered: bool, has_forced: bool, num_stops: int) -> None:
        """Feed every slot's current token and write what follows; a slot that samples a stop advances no more.

        `is_tempered`: some slot's temperature is not 1. `num_stops`: the most stop tokens of any advancing slot.
        Nothing here waits for the device.
        """
        if plan.width not in self._views_by_width:
            self._views_by_width[plan.width] = self._views(plan.width)
        own = self._views_by_width[plan.width]

        def advance() -> None:
            self._advance(plan, own, is_tempered=is_tempered, has_forced=has_forced, num_stops=num_stops)

        if plan.graphs is None:
            advance()
        else:
            names = () if plan.adapters is None else plan.adapters.names
            plan.graphs.run((is_tempered, has_forced, num_stops, names), advance)

    def _advance(
        self, plan: DecodePlan, own: _StepViews, *, is_tempered: bool, has_forced: bool, num_stops: int
    ) -> None:
        logits = plan.step(own.current, own.position)
        following = own.position_column + 1
        tokens, logprobs = sample(logits, own.uniforms.gather(1, following), own.temperatures if is_tempered else None)
        if has_forced:
            is_forced = following <= own.forced_end_column
            tokens = torch.where(is_forced, own.tokens.gather(1, following), tokens)
            logprobs = logprobs.masked_fill(is_forced, 0.0)
        own.tokens.scatter_(1, following, tokens)
        own.logprobs.scatter_(1, following, logprobs)
        own.position.add_(own.is_advancing)
        own.current_column.copy_(tokens)
        if num_stops:
            is_stopped = (own.stops[:num_stops] == own.current).any(dim=0)
            if has_forced:
                is_stopped &= ~is_forced.squeeze(1)
            own.is_advancing.masked_fill_(is_stopped, 0)

    def num_advancing(self) -> int:
        """Slots that advance. Waits for the device."""
        return int(self._state[_IS_ADVANCING].sum())

    def progress(self, slots: Sequence[int]) -> list[tuple[int, bool]]:
        """(position, whether it still advances) of each of these slots. Waits for the device."""
        positions, are_advancing = self._state[_POSITION : _IS_ADVANCING + 1].tolist()
        return [(positions[slot], bool(are_advancing[slot])) for slot in slots]

    def newest(self, slots: Sequence[int]) -> list[tuple[int, int]]:
        """(newest token, its position) in each of these slots."""
        tokens, positions = self._state[_CURRENT].tolist(), self._state[_POSITION].tolist()
        return [(tokens[slot], positions[slot]) for slot in slots]

    def _views(self, width: int) -> _StepViews:
        state = self._state[:, :width]
        return _StepViews(
            position=state[_POSITION],
            position_column=state[_POSITION].unsqueeze(1),
            is_advancing=state[_IS_ADVANCING],
            current=state[_CURRENT],
            current_column=state[_CURRENT].unsqueeze(1),
            forced_end_column=state[_FORCED_END].unsqueeze(1),
            stops=state[_STOPS:],
            tokens=self._tokens[:width],
            logprobs=self._logprobs[:width],
            uniforms=self._uniforms[:width],
            temperatures=self._temperatures[:width],
        )

    def _new(self, values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self._device)
