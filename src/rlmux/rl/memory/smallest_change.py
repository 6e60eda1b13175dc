"""The smallest change of a pipeline's file with which a worker fits its device.

    rollout   half the slots, a bounded KV cache, fewer slots, bfloat16
    train     smaller micro-batches, activation checkpointing, one gradient sum, 8-bit moments, bfloat16, shards, LoRA

One change is tried at a time, in that order, then all of them from the first on until the worker fits. What it fits
without is left out again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

from rlmux.core.model import Phase
from rlmux.rl.config import AdapterConfig, MisfitError, TrainingConfig
from rlmux.rl.memory.footprint import device_parts
from rlmux.rl.memory.memory_parts import total

_ADAPTER = AdapterConfig(rank=16, alpha=32.0)
_MAX_RANKS = 64


@dataclass(frozen=True, slots=True)
class _Change:
    text: str
    """As in the file: `rollout.slots: 16`."""
    section: str
    fields: tuple[tuple[str, Any], ...]

    def apply_to(self, config: TrainingConfig) -> TrainingConfig:
        """Raises MisfitError for a value that the config does not accept."""
        if not self.section:
            return replace(config, **dict(self.fields))
        return replace(config, **{self.section: replace(getattr(config, self.section), **dict(self.fields))})


def smallest_change(
    config: TrainingConfig, phase: Phase, capacity_bytes: float, num_devices: int | None, **counted: bool
) -> str:
    """Keys and values, such as `rollout.slots: 16 and rollout.dtype: bfloat16`; empty if no change is enough.

    `num_devices`: devices of the pool, None for any number. `counted`: `is_gpu` and `has_base` of `device_parts`.
    """

    def fits(changes: Sequence[_Change]) -> bool:
        try:
            changed = reduce(lambda before, change: change.apply_to(before), changes, config)
        except MisfitError:
            return False
        return total(device_parts(changed, phase, **counted)) <= capacity_bytes

    known = list(_changes(config, phase, num_devices or _MAX_RANKS))
    for change in known:
        if fits([change]):
            return change.text
    chosen: list[_Change] = []
    for change in known:
        chosen = [*(earlier for earlier in chosen if earlier.fields[0][0] != change.fields[0][0]), change]
        if fits(chosen):
            break
    else:
        return ""
    for change in list(chosen):
        if fits(rest := [earlier for earlier in chosen if earlier is not change]):
            chosen = rest
    return " and ".join(change.text for change in chosen)


def _changes(config: TrainingConfig, phase: Phase, num_devices: int) -> Iterator[_Change]:
    """Changes of other values than the config has, the smallest first."""
    rollout, train = config.rollout, config.train
    if phase is Phase.ROLLOUT:
        halves = _halves(rollout.num_slots)
        slots = [_Change(f"rollout.slots: {num}", "rollout", (("num_slots", num),)) for num in halves]
        yield from slots[:1]
        least = max(rollout.slot_tokens, rollout.num_slots * rollout.slot_tokens // 4)
        for num in _round_numbers(least, rollout.cached_tokens):
            yield _Change(f"rollout.kv_tokens: {num}", "rollout", (("kv_tokens", num),))
        yield from slots[1:2]
        yield _Change("rollout.dtype: bfloat16", "rollout", (("dtype", "bfloat16"),))
        yield from slots[2:]
        return
    for size in _halves(config.algorithm.sequences_per_pass):
        yield _Change(f"algorithm.micro_batch_size: {size}", "algorithm", (("micro_batch_size", size),))
    yield _Change("train.activation_checkpointing: true", "train", (("activation_checkpointing", True),))
    yield _Change("train.equal_across_ranks: false", "train", (("equal_across_ranks", False),))
    yield _Change("train.optimizer_state: 8bit", "train", (("optimizer_state", "8bit"),))
    yield _Change("train.dtype: bfloat16", "train", (("dtype", "bfloat16"),))
    num_ranks = 2 * train.num_parts
    while num_ranks <= num_devices:
        shards = (("sharding", "shard"), ("num_workers", num_ranks))
        yield _Change(f"train.sharding: shard with train.workers: {num_ranks}", "train", shards)
        num_ranks *= 2
    if config.adapter is None:
        yield _Change("adapter: {rank: 16, alpha: 32}", "", (("adapter", _ADAPTER),))


def _round_numbers(least: int, most: int) -> Iterator[int]:
    """Numbers from `least` to below `most` that end in zeros after two digits, the largest first."""
    unit = 10 ** max(0, len(str(most)) - 2)
    return (number for number in range(most // unit * unit, least - 1, -unit) if number < most)


def _halves(number: int) -> Iterator[int]:
    while number > 1:
        number //= 2
        yield number
