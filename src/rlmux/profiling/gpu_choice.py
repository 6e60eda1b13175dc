"""What a checkpoint is trained with on the GPUs of one machine: the fastest of the ways that fit.

    engine  the one that is given; else our own, or a server over several GPUs where a model leaves no room on one
      answers  7,168 tokens, shorter where nothing fits
        GPUs     R rollout devices of 1, 2, 4 or 8 GPUs, and T training GPUs, a power of two; one GPU serves both
          train    moments on the device, in 8 bits, in host memory; replicated, in parts; activations kept, recomputed
          rollout  slots, and a KV cache in what the weights leave

The first way that fits is taken of `train` and `rollout`; of the splits of GPUs the one with the shortest cycle of all
pipelines, by `RooflineEstimates`. Bytes are those of `rl/memory`, and a GPU has what `run` leaves pipelines of it. Host
memory counts too: pipelines overlap only if it holds the states of all, else they take whole steps in turn.
Pure: the same words give the same choice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import starmap
from pathlib import Path
from typing import Literal, NamedTuple

from rlmux.config.figures import Estimated
from rlmux.config.tree import ClusterConfig, PipelineConfig, PoolConfig
from rlmux.core.model import Footprint, Phase
from rlmux.policies.search.cycle_steps import MAX_MEMBERS as MAX_IN_CYCLE
from rlmux.policies.search.shared_placement import MAX_MEMBERS
from rlmux.profiling.roofline_estimates import RooflineEstimates
from rlmux.rl.config import (
    ATTENTION_TARGETS,
    AdapterConfig,
    AlgorithmConfig,
    EngineConfig,
    ModelConfig,
    RolloutConfig,
    TaskConfig,
    TrainConfig,
    TrainingConfig,
)
from rlmux.rl.memory.footprint import BOTH_PHASES, device_parts, footprint_of
from rlmux.rl.memory.memory_parts import CUDA_CONTEXT_BYTES, total
from rlmux.rl.memory.model_shape import ModelShape, shape_of
from rlmux.runtime.memory.memory_budget import USABLE_OF_GPU

LARGE = 10**9
"""Parameters from which activations are recomputed, and trained ones from which ranks have parts of a model."""
PROMPTS, GROUP_SIZE, STEPS = 32, 8, 200
OWN = EngineConfig()
SERVER = EngineConfig(name="vllm", python="PATH_OF_ITS_PYTHON")
"""A server of an environment that is yet to be named."""
_PROMPT_TOKENS, _ANSWER_TOKENS, _SHORTER = 1024, 7168, (3072, 1024)
_SLOTS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
_FEW_ANSWERS = 4
"""Answers that our engine has room for at least, where a server over several GPUs might sample instead."""
_SEQUENCES = (32, 16, 8, 4, 2, 1)
"""Full-length sequences of a micro-batch."""
_TOKENS_OF_PASS = 32_768
"""Tokens of the largest micro-batch; beyond it, a GPU gains nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuMachine:
    """GPUs of one machine, all alike."""

    num_gpus: int
    gpu: str
    """The kind, as `gpu` of a pool names it."""
    memory_gb: float
    """Of one GPU, in 10^9 bytes."""
    host_gb: float
    """Host memory for each GPU's workers and their states, in 10^9 bytes."""
    is_host_known: bool = False
    """Whether that is this machine's, or what such machines have."""

    def __str__(self) -> str:
        return f"{self.num_gpus} {self.gpu} of {self.memory_gb:g} GB"


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What a file is to train, and on what."""

    model: Path
    """Absolute checkpoint folder; its config.json is enough."""
    model_type: str
    max_positions: int | None
    """Tokens of the model's longest sequence; None: not known."""
    machine: GpuMachine
    num_pipelines: int = 2
    has_adapter: bool = False
    engine: EngineConfig = OWN
    """What samples the answers."""
    may_be_served: bool = False
    """Whether a server may take the place of our engine: no engine was asked for."""

    @cached_property
    def shape(self) -> ModelShape:
        return shape_of(ModelConfig(path=str(self.model)))

    @property
    def adapter(self) -> AdapterConfig | None:
        if not self.has_adapter:
            return None
        if self.model_type == "qwen3_moe":  # experts get none
            return AdapterConfig(rank=16, alpha=32.0, targets=ATTENTION_TARGETS)
        return AdapterConfig(rank=16, alpha=32.0)

    def host_bytes(self, pipeline: PipelineConfig, split: GpuSplit) -> float:
        """Host memory for each GPU that a pipeline's workers and their states need, where they need most."""
        footprint = footprint_of(training_of(pipeline), is_gpu=True, num_gpus=split.tensor_parallel)
        if split.is_both:
            return footprint.rollout_host_bytes + footprint.train_host_bytes
        return max(footprint.rollout_host_bytes / split.tensor_parallel, footprint.train_host_bytes)

    def free_bytes(self, split: GpuSplit) -> float:
        """Bytes of a GPU for the largest state, beside the contexts of the workers that wait."""
        num_workers = min(self.num_pipelines, MAX_MEMBERS) * (2 if split.is_both else 1)
        return self.machine.memory_gb * 1e9 * USABLE_OF_GPU - CUDA_CONTEXT_BYTES * (num_workers - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuSplit:
    """What the GPUs are for."""

    num_rollout: int
    """Rollout devices."""
    tensor_parallel: int = 1
    """GPUs of a rollout device."""
    num_train: int
    is_both: bool = False
    """One GPU serves both phases, and states take turns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A way that fits."""

    split: GpuSplit
    cluster: ClusterConfig
    pipeline: PipelineConfig
    """What all pipelines have in common; its name and task stand for theirs."""
    estimated: Estimated
    cycle_s: float
    """Seconds in which each pipeline takes a step."""
    num_hosted: int
    """Pipelines whose states fit in host memory at a time; 0: not known, the host may have too little."""

    @property
    def training(self) -> TrainingConfig:
        return training_of(self.pipeline)


def choose(wanted: Wanted) -> Choice | None:
    """The choice; None where nothing fits. What the host has no room for comes last: it may have more than is known."""
    if all(each.phase is Phase.TRAIN and each.need_bytes > wanted.free_bytes(each.split) for each in lacks(wanted)):
        return None  # most refusals: nothing else is tried
    own, tiers = wanted.engine, [(wanted.engine, 1)]
    if wanted.may_be_served and wanted.machine.num_gpus > 1:
        tiers = [(own, _FEW_ANSWERS), (SERVER, 1), (own, 1)]
    together = min(wanted.num_pipelines, MAX_IN_CYCLE)
    for hosted in ([1, together] if together > 1 else [1]), [0]:
        for engine, least in tiers:
            for tokens in lengths(wanted):
                found = _fastest(wanted, engine, tokens, hosted, least)
                if found is not None:
                    return found
    return None


class Lack(NamedTuple):
    """The worker that needs most on a split of the GPUs."""

    split: GpuSplit
    phase: Phase
    need_bytes: float
    """On each GPU, at least."""
    is_beside_base: bool
    """Whether the base that trainers of adapters share is counted with it."""


def lacks(wanted: Wanted) -> Iterator[Lack]:
    """What needs most on each split, for the shortest answers."""
    tokens, may_split = lengths(wanted)[-1], wanted.may_be_served and wanted.machine.num_gpus > 1
    for engine in [wanted.engine, SERVER] if may_split else [wanted.engine]:
        for split in splits(wanted, engine):
            pipeline = _with_least(wanted, split, engine, tokens)
            train = min(
                worker_bytes(_with_sequences(pipeline, each, 1), Phase.TRAIN) for each in _trains(wanted, split)
            )
            beside = {phase: _base_beside(wanted, split, pipeline, phase) for phase in BOTH_PHASES}
            need = {
                Phase.TRAIN: train + beside[Phase.TRAIN],
                Phase.ROLLOUT: worker_bytes(pipeline, Phase.ROLLOUT) + beside[Phase.ROLLOUT],
            }
            phase = max(need, key=lambda each: need[each])
            yield Lack(split, phase, need[phase], beside[phase] > 0)


def lengths(wanted: Wanted) -> list[tuple[int, int]]:
    """(Tokens of the longest prompt, of the longest answer), the longest first."""
    limit = wanted.max_positions or _PROMPT_TOKENS + _ANSWER_TOKENS
    prompt = max(1, min(_PROMPT_TOKENS, limit // 2))
    longest = max(1, min(_ANSWER_TOKENS, limit - prompt))
    return [(prompt, longest), *((prompt, tokens) for tokens in _SHORTER if tokens < longest)]


def splits(wanted: Wanted, engine: EngineConfig) -> Iterator[GpuSplit]:
    """All splits of the machine's GPUs that an engine can use; a server that stands in for ours is over several."""
    num_gpus = wanted.machine.num_gpus
    if num_gpus == 1:
        yield GpuSplit(num_rollout=1, num_train=1, is_both=True)
        return
    sizes = [size for size in (1, 2, 4, 8) if wanted.shape.splits_over(size)] if engine.is_server else [1]
    for size in sizes:
        if engine == SERVER and size == 1:
            continue
        for num_train in (1, 2, 4, 8):
            num_rollout, rest = divmod(num_gpus - num_train, size)
            if num_rollout > 0 and not rest:
                yield GpuSplit(num_rollout=num_rollout, tensor_parallel=size, num_train=num_train)


def _fastest(
    wanted: Wanted, engine: EngineConfig, tokens: tuple[int, int], hosted: Sequence[int], least: int
) -> Choice | None:
    """The choice with the shortest cycle, among those with a cache for so many answers at least."""
    found = (each for split in splits(wanted, engine) for each in _fitted(wanted, split, engine, tokens, hosted))
    usable = [each for each in found if _num_answers_held(each.pipeline.rollout) >= least]
    return min(usable, key=lambda each: each.cycle_s, default=None)


@dataclass(frozen=True, slots=True)
class _Room:
    """Memory of the GPUs and the host for a pipeline's workers."""

    wanted: Wanted
    split: GpuSplit
    num_hosted: int
    """Pipelines whose states the host is to hold at a time; 0: as many as there are, in whatever memory it has."""

    def has(self, pipeline: PipelineConfig) -> bool:
        return self.has_train(pipeline) and self.has_rollout(pipeline)

    def has_train(self, pipeline: PipelineConfig) -> bool:
        need = worker_bytes(pipeline, Phase.TRAIN) + _base_beside(self.wanted, self.split, pipeline, Phase.TRAIN)
        if need > self.wanted.free_bytes(self.split):
            return False
        return not self.num_hosted or self._hosts(self._footprint(pipeline).train_host_bytes, 1)

    def has_rollout(self, pipeline: PipelineConfig) -> bool:
        need = worker_bytes(pipeline, Phase.ROLLOUT) + _base_beside(self.wanted, self.split, pipeline, Phase.ROLLOUT)
        if need > self.wanted.free_bytes(self.split):
            return False
        if not self.num_hosted:
            return True
        footprint = self._footprint(pipeline)
        host_bytes = footprint.rollout_host_bytes + (footprint.train_host_bytes if self.split.is_both else 0.0)
        return self._hosts(host_bytes, self.split.tensor_parallel)

    def _hosts(self, worker_host_bytes: float, num_gpus: int) -> bool:
        return self.num_hosted * worker_host_bytes <= self.wanted.machine.host_gb * 1e9 * num_gpus

    def _footprint(self, pipeline: PipelineConfig) -> Footprint:
        return footprint_of(training_of(pipeline), is_gpu=True, num_gpus=self.split.tensor_parallel)


def _fitted(
    wanted: Wanted, split: GpuSplit, engine: EngineConfig, tokens: tuple[int, int], hosted: Sequence[int]
) -> Iterator[Choice]:
    """What fits on this split, for each number of pipelines whose states the host is to hold."""
    found: list[tuple[_Room, PipelineConfig]] = []
    for number in hosted:
        room = _Room(wanted, split, number)
        if found and room.has(found[-1][1]):
            found[-1] = (room, found[-1][1])  # the host has room for more of the same
            continue
        pipeline = _pipeline_in(room, engine, tokens)
        if pipeline is not None:
            found.append((room, pipeline))
    yield from starmap(_as_choice, found)


def _pipeline_in(room: _Room, engine: EngineConfig, tokens: tuple[int, int]) -> PipelineConfig | None:
    least = _with_least(room.wanted, room.split, engine, tokens)
    ways = (_with_micro_batches(room, least, train) for train in _trains(room.wanted, room.split))
    pipeline = next(filter(None, ways), None)
    return None if pipeline is None else _with_cache(room, pipeline)


def _as_choice(room: _Room, pipeline: PipelineConfig) -> Choice:
    wanted, split = room.wanted, room.split
    cluster = cluster_of(wanted.machine, split, has_host=room.num_hosted > 0)
    estimated = RooflineEstimates(gpu=wanted.machine.gpu).of(pipeline, cluster)
    assert estimated is not None, "the pools name a GPU of the table"
    estimate, number = estimated.estimate, wanted.num_pipelines
    assert estimate.train_s is not None
    both_s = estimate.rollout_s + estimate.train_s
    cycle_s = max(number * estimate.rollout_s, number * estimate.train_s, both_s)
    if split.is_both or room.num_hosted == 1:  # no two at a time
        cycle_s = number * both_s
    return Choice(
        split=split, cluster=cluster, pipeline=pipeline, estimated=estimated, cycle_s=cycle_s,
        num_hosted=room.num_hosted,
    )  # fmt: skip


def cluster_of(machine: GpuMachine, split: GpuSplit, *, has_host: bool) -> ClusterConfig:
    """The pools of the file. `has_host`: host memory is limited."""

    def pool(phase: Literal["rollout", "train", "both"], devices: int, size: int = 1) -> PoolConfig:
        return PoolConfig(
            phase=phase, devices=devices, gpus_per_device=size, gpu=machine.gpu,
            device_memory_gb=machine.memory_gb * size, host_memory_gb=machine.host_gb * size if has_host else None,
        )  # fmt: skip

    if split.is_both:
        return ClusterConfig(pools={"all": pool("both", 1)})
    rollout = pool("rollout", split.num_rollout, split.tensor_parallel)
    return ClusterConfig(pools={"rollout": rollout, "train": pool("train", split.num_train)})


def _with_least(wanted: Wanted, split: GpuSplit, engine: EngineConfig, tokens: tuple[int, int]) -> PipelineConfig:
    """The pipeline on this split with a single slot, and training as by default."""
    rollout = RolloutConfig(
        num_workers=split.num_rollout, max_prompt_tokens=tokens[0], max_new_tokens=tokens[1], num_slots=1,
        dtype="bfloat16", engine=engine, tensor_parallel=split.tensor_parallel,
    )  # fmt: skip
    learning_rate = 1e-5 if wanted.has_adapter else 1e-6
    return PipelineConfig(
        name="pipeline",
        num_steps=STEPS,
        model=ModelConfig(path=str(wanted.model)),
        adapter=wanted.adapter,
        task=TaskConfig(name="reverse"),
        algorithm=AlgorithmConfig(prompts_per_step=PROMPTS, group_size=GROUP_SIZE, learning_rate=learning_rate),
        rollout=rollout,
        train=TrainConfig(num_workers=split.num_train, dtype="bfloat16"),
    )


def _trains(wanted: Wanted, split: GpuSplit) -> Iterator[TrainConfig]:
    """Ways of training, the first that fits is the best: exact moments, then little traffic, then kept activations."""
    is_large, has_adapter = wanted.shape.num_parameters >= LARGE, wanted.has_adapter
    shardings: list[Literal["replicate", "shard"]] = ["replicate", "shard"]
    if split.num_train == 1:
        shardings = ["replicate"]
    elif is_large and not has_adapter:
        shardings = ["shard"]
    states: list[Literal["device", "8bit", "cpu"]] = ["device"] if has_adapter else ["device", "8bit", "cpu"]
    for state in states:
        for sharding in shardings:
            for recomputes in [True] if is_large else [False, True]:
                yield TrainConfig(
                    num_workers=split.num_train, dtype="bfloat16", sharding=sharding, optimizer_state=state,
                    activation_checkpointing=recomputes,
                )  # fmt: skip


def _with_sequences(pipeline: PipelineConfig, train: TrainConfig, number: int) -> PipelineConfig:
    """The pipeline with micro-batches of so many sequences of full length.

    Several ranks keep the number of sequences, as by tokens one of them could be without a micro-batch.
    """
    length = pipeline.rollout.max_prompt_tokens + pipeline.rollout.max_new_tokens
    if train.num_workers == 1:
        return replace(pipeline, train=replace(train, tokens_per_micro_batch=number * length))
    return replace(pipeline, train=train, algorithm=replace(pipeline.algorithm, micro_batch_size=number))


def _with_micro_batches(room: _Room, pipeline: PipelineConfig, train: TrainConfig) -> PipelineConfig | None:
    """The pipeline with the largest micro-batches that fit; None where not even one sequence does."""
    length = pipeline.rollout.max_prompt_tokens + pipeline.rollout.max_new_tokens
    sizes = (number for number in _SEQUENCES if number * length <= _TOKENS_OF_PASS)
    smallest = _with_sequences(pipeline, train, 1)
    if not room.has_train(smallest):
        return None
    ways = (_with_sequences(pipeline, train, number) for number in sizes if number > 1)
    return next((way for way in ways if room.has_train(way)), smallest)


def worker_bytes(pipeline: PipelineConfig, phase: Phase) -> float:
    """Bytes of a worker on each GPU of its device."""
    num_gpus = pipeline.rollout.tensor_parallel if phase is Phase.ROLLOUT else 1
    return total(device_parts(training_of(pipeline), phase, is_gpu=True, num_gpus=num_gpus)) / num_gpus


def training_of(pipeline: PipelineConfig) -> TrainingConfig:
    """What engines read of it."""
    training = pipeline.training
    assert training is not None, "it has a task"
    return training


def _base_beside(wanted: Wanted, split: GpuSplit, pipeline: PipelineConfig, phase: Phase) -> float:
    """Bytes of the base that trainers of one rank share, beside a worker on the same GPU.

    `run` counts a bfloat16 base as each trainer's own, too, and what is chosen is to pass there.
    """
    is_shared = wanted.has_adapter and wanted.num_pipelines > 1 and split.num_train == 1
    if not is_shared or (phase is Phase.ROLLOUT and not split.is_both):
        return 0.0
    return device_parts(training_of(pipeline), Phase.TRAIN, is_gpu=True)["base"]


def _with_cache(room: _Room, pipeline: PipelineConfig) -> PipelineConfig | None:
    """The pipeline with as many slots as its answers need, or as the KV cache has room for; None without room for one.

    In one pool for both, rollouts of adapters have a base of their own where their cache has a bound: a base that they
    shared would stay on the GPU while others train.
    """

    def fits(rollout: RolloutConfig) -> bool:
        return room.has_rollout(replace(pipeline, rollout=rollout))

    found: RolloutConfig | None = None
    is_bounded = room.split.is_both and room.wanted.has_adapter
    num_answers = -(-PROMPTS * GROUP_SIZE // room.split.num_rollout)
    for num_slots in _SLOTS:
        filled = _filled(replace(pipeline.rollout, num_slots=num_slots), fits, is_bounded=is_bounded)
        if filled is None:
            break
        found = filled
        if num_slots >= num_answers or num_slots >= 2 * filled.cached_tokens / filled.slot_tokens:
            break
    return None if found is None else replace(pipeline, rollout=found)


def _num_answers_held(rollout: RolloutConfig) -> float:
    """Answers of half the length that the KV cache has room for; a server keeps a slot's full length."""
    if rollout.engine.is_server:
        return rollout.num_slots
    return 2 * rollout.cached_tokens / rollout.slot_tokens


def _filled(rollout: RolloutConfig, fits: Callable[[RolloutConfig], bool], *, is_bounded: bool) -> RolloutConfig | None:
    """With full length for each slot, or our engine's cache as large as it fits, in a round number."""
    most = rollout.num_slots * rollout.slot_tokens
    full = replace(rollout, kv_tokens=most) if is_bounded else rollout
    if fits(full):
        return full
    if rollout.engine.name != "rlmux" or not fits(replace(rollout, kv_tokens=rollout.slot_tokens)):
        return None
    low, high, step = rollout.slot_tokens, most, 10 ** max(0, len(str(most)) - 3)
    while high - low > step:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(replace(rollout, kv_tokens=middle)) else (low, middle)
    unit = 10 ** max(0, len(str(low)) - 2)
    return replace(rollout, kv_tokens=max(rollout.slot_tokens, low // unit * unit))
