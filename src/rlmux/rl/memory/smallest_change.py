"""The smallest change of a pipeline's file with which a worker fits its device.

    rollout   half the slots, a bounded KV cache, a quarter of the slots, bfloat16, a server on several GPUs, few slots
    server    more GPUs for each copy of the model, half the slots, bfloat16, fewer slots
    train     smaller micro-batches, activation checkpointing, one gradient sum, 8-bit moments, bfloat16, shards, LoRA

One change is tried at a time, in that order, then all of them from the first on until the worker fits. What it fits
without is left out again, and what it fits with less of is made smaller.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

from rlmux.core.model import Phase
from rlmux.rl.config import AdapterConfig, EngineConfig, MisfitError, TrainingConfig
from rlmux.rl.memory.footprint import device_parts
from rlmux.rl.memory.memory_parts import total
from rlmux.rl.memory.model_shape import shape_of

_ADAPTER = AdapterConfig(rank=16, alpha=32.0)
_MAX_RANKS = 64


@dataclass(frozen=True, slots=True)
class _Change:
    text: str
    """As in the file: `rollout.slots: 16`."""
    section: str
    fields: tuple[tuple[str, Any], ...]
    num_gpus: int | None = None
    """GPUs of a device with the change; None: as before."""

    @property
    def key(self) -> str:
        """What no two changes that go together change."""
        return self.fields[0][0]

    def apply_to(self, config: TrainingConfig) -> TrainingConfig:
        """Raises MisfitError for a value that the config does not accept."""
        if not self.section:
            return replace(config, **dict(self.fields))
        return replace(config, **{self.section: replace(getattr(config, self.section), **dict(self.fields))})


def smallest_change(
    config: TrainingConfig,
    phase: Phase,
    capacity_bytes: float,
    num_devices: int | None,
    *,
    pool: str | None = None,
    num_gpus: int = 1,
    **counted: bool,
) -> str:
    """Keys and values, such as `rollout.slots: 16 and rollout.dtype: bfloat16`; empty if no change is enough.

    `num_devices`: devices of the pool, None for any number. `pool`: its name, if its devices may be several GPUs, and
    `num_gpus` the GPUs of one.
    `counted`: `is_gpu` and `has_base` of `device_parts`.
    """

    def fits(changes: Sequence[_Change]) -> bool:
        try:
            changed = reduce(lambda before, change: change.apply_to(before), changes, config)
        except MisfitError:
            return False
        gpus = next((change.num_gpus for change in reversed(changes) if change.num_gpus), num_gpus)
        need = total(device_parts(changed, phase, num_gpus=gpus, **counted))
        return need * num_gpus <= capacity_bytes * gpus

    if phase is Phase.ROLLOUT:
        splits = [] if pool is None else list(_splits(config, pool, num_gpus, num_devices or _MAX_RANKS))
        ways = _ways_of_rollout(config, splits)
    else:
        ways = [list(_train_changes(config, num_devices or _MAX_RANKS))]
    alone = next((change for way in ways for change in way if fits([change])), None)
    if alone is not None:
        return alone.text
    chosen = next((chosen for way in ways if (chosen := _chosen(way, fits))), [])
    return " and ".join(change.text for change in chosen)


def _chosen(known: Sequence[_Change], fits: Callable[[Sequence[_Change]], bool]) -> Sequence[_Change]:
    """Changes that are enough together, none of them too much; empty if all are not enough."""
    chosen: list[_Change] = []
    for change in known:
        chosen = [*(earlier for earlier in chosen if earlier.key != change.key), change]
        if fits(chosen):
            break
    else:
        return []
    for change in list(chosen):
        rest = [earlier for earlier in chosen if earlier is not change]
        alike = [smaller for smaller in known if smaller.key == change.key]
        chosen = next(less for less in (rest, *([*rest, each] for each in alike)) if fits(less))
    return sorted(chosen, key=known.index)


def _splits(config: TrainingConfig, pool: str, num_gpus: int, num_devices: int) -> Iterator[_Change]:
    """Servers that split the model over more GPUs: of the device as it is, or of as many devices made one."""
    rollout, engine = config.rollout, config.rollout.engine
    if engine.is_of_user or engine.url is not None:
        return
    own = {} if engine.is_server else {"engine": EngineConfig(name="vllm", python="python")}
    count = 2 * rollout.tensor_parallel
    while count <= num_gpus * num_devices // rollout.num_workers:
        if shape_of(config.model).splits_over(count):
            size = num_gpus if num_gpus % count == 0 else count
            text = f"{'rollout.engine: vllm with ' if own else ''}rollout.tensor_parallel: {count}"
            if size != num_gpus:
                text += f" {'and' if own else 'with'} cluster.pools.{pool}.gpus_per_device: {size}"
            yield _Change(text, "rollout", (("tensor_parallel", count), *own.items()), size)
        count *= 2


def _ways_of_rollout(config: TrainingConfig, splits: Sequence[_Change]) -> Sequence[Sequence[_Change]]:
    """Lists of changes that go together, each the smallest first."""
    rollout = config.rollout
    halves = _halves(rollout.num_slots)
    slots = [_Change(f"rollout.slots: {num}", "rollout", (("num_slots", num),)) for num in halves]
    half = _Change("rollout.dtype: bfloat16", "rollout", (("dtype", "bfloat16"),))
    if rollout.engine.name != "rlmux":  # it has no kv_tokens
        return [[*splits, *slots[:2], half, *slots[2:]]]
    least = max(rollout.slot_tokens, rollout.num_slots * rollout.slot_tokens // 4)
    bounds = [
        _Change(f"rollout.kv_tokens: {num}", "rollout", (("kv_tokens", num),))
        for num in _round_numbers(least, rollout.cached_tokens)
    ]
    own = [*slots[:1], *bounds, *slots[1:2], half]
    return [own, [*splits, half, *slots[:2]], [*own, *slots[2:]]]


def _train_changes(config: TrainingConfig, num_devices: int) -> Iterator[_Change]:
    """Changes of other values than the config has, the smallest first."""
    train = config.train
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
    engine = config.rollout.engine
    if config.adapter is None and engine.url is None and not engine.is_of_user:  # those take whole models
        yield _Change("adapter: {rank: 16, alpha: 32}", "", (("adapter", _ADAPTER),))


def _round_numbers(least: int, most: int) -> Iterator[int]:
    """Numbers from `least` to below `most` that end in zeros after two digits, the largest first."""
    unit = 10 ** max(0, len(str(most)) - 2)
    return (number for number in range(most // unit * unit, least - 1, -unit) if number < most)


def _halves(number: int) -> Iterator[int]:
    while number > 1:
        number //= 2
        yield number
