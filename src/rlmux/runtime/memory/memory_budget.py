"""Adds up memory before anything starts, and refuses with numbers what cannot fit.

    host memory     of this machine, in equal parts for all devices
    device memory   of a core: its part of host memory; of a GPU: the free bytes reported by its driver

The frozen bases of adapters lie in shared memory, each once for all its pipelines. Their bytes are taken from host
memory before it is divided. On a GPU pipelines of one base share a process for each phase, and so one base on each
device: its bytes are taken from the device's. Any other worker has a base of its own, and so has each server.

Several devices of the file on one GPU divide its memory: each gets its pipelines' largest state and an equal part of
the rest. A pool's figure in the file can lower this, never raise it.

    host memory of a node  ≥  processes pinned there  +  states off their devices
                                                           └─ in a pool that spills: what does not fit goes to disk

A state that leaves its device without room in host memory goes to disk: in a cycle it is needed last. States already in
host memory stay there.
"""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

import psutil

from rlmux.core.errors import RefusedError
from rlmux.core.model import Cluster, DeviceId, Footprint, NodeId, Phase, Pool
from rlmux.policies.search.shared_placement import MAX_MEMBERS
from rlmux.rl.memory.adapter_base import bases_of
from rlmux.rl.memory.footprint import BOTH_PHASES, device_parts, footprint_of, rollout_contexts_bytes
from rlmux.rl.memory.memory_parts import CUDA_CONTEXT_BYTES, Parts, total
from rlmux.rl.memory.smallest_change import smallest_change
from rlmux.runtime.backend import Submission

USABLE_OF_HOST = 0.9
"""Part of the machine's memory that pipelines get; the rest is the system's and the controller's."""
LEAST_GPU_BYTES = 8e9
"""Bytes of the smallest GPU."""
USABLE_OF_GPU = 0.95
"""Part of a GPU's free memory that pipelines get; the rest is lost between torch's blocks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineMemory:
    """Memory of the machine and its GPUs."""

    host_bytes: float = field(default_factory=lambda: float(psutil.virtual_memory().total))
    """Host memory of the machine."""
    gpu_by_device: Mapping[DeviceId, str] = field(default_factory=dict)
    """The GPUs that each device of the file stands for, with commas between; empty where devices are cores."""
    free_bytes_by_gpu: Mapping[str, float] = field(default_factory=dict)
    """Free bytes of each GPU, as reported by its driver."""
    num_cores: int = field(default_factory=lambda: len(os.sched_getaffinity(0)))
    """Cores that this process may use."""

    def is_shared(self, num_wanted: int) -> bool:
        """Whether so many GPUs (or cores) are more than there are; controller and environments need a core, too."""
        num_gpus = len({gpu for names in self.gpu_by_device.values() for gpu in names.split(",")})
        return num_wanted > num_gpus if num_gpus else num_wanted >= self.num_cores


def with_machine_memory(
    cluster: Cluster, submissions: Sequence[Submission] = (), machine: MachineMemory | None = None
) -> Cluster:
    """The cluster with the machine's memory divided among its devices, and whether they have hardware of their own.

    Submissions come with footprints. Raises RefusedError for a GPU whose devices need more than it has, together.
    """
    machine = machine or MachineMemory()
    num_wanted = sum(pool.num_gpus or 0 for pool in cluster.pools.values())
    shared = 0.0 if machine.gpu_by_device else _shared_bytes(submissions)
    if shared >= machine.host_bytes * USABLE_OF_HOST:
        raise RefusedError(
            f"cluster: the bases of adapters need {_gigabytes(shared)} of host memory, and there are "
            f"{_gigabytes(machine.host_bytes * USABLE_OF_HOST)}; give fewer or smaller models"
        )
    host_bytes = (machine.host_bytes * USABLE_OF_HOST - shared) / max(1, num_wanted)
    gpu_bytes = {
        name: num_bytes - _shared_base_bytes(cluster.pools[name], submissions)
        for name, num_bytes in _assign_gpu_memory(cluster, submissions, machine).items()
    }
    return Cluster(
        pools={
            name: replace(
                pool,
                device_memory_bytes=min(
                    pool.device_memory_bytes, gpu_bytes.get(name, host_bytes * pool.gpus_per_device)
                ),
                host_memory_bytes=min(
                    pool.host_memory_bytes, host_bytes * pool.gpus_per_device * pool.devices_per_node
                ),
                shares_hardware=machine.is_shared(num_wanted),
            )
            for name, pool in cluster.pools.items()
        }
    )


def _shared_bytes(submissions: Sequence[Submission]) -> float:
    """Bytes of the bases that adapters stand on, each counted once."""
    return sum(num_bytes for num_bytes, _ in bases_of(submission.config for submission in submissions).values())


def _assign_gpu_memory(cluster: Cluster, submissions: Sequence[Submission], machine: MachineMemory) -> dict[str, float]:
    """Bytes for each device of a pool on GPUs, by pool: the minimum over its devices, as nodes are alike.

    A state lies in equal parts on all GPUs of its device, and the fullest of them decides for all.
    """
    devices_by_gpu: dict[str, list[DeviceId]] = {}
    for device, names in machine.gpu_by_device.items():
        for gpu in names.split(","):
            devices_by_gpu.setdefault(gpu, []).append(device)
    bytes_by_pool: dict[str, float] = {}
    for gpu, devices in devices_by_gpu.items():
        pools = [cluster.pools[device.pool] for device in devices]
        there_is = machine.free_bytes_by_gpu[gpu] * USABLE_OF_GPU - _waiting_context_bytes(pools, len(submissions))
        needs = [
            (_largest_state(pool, submissions) + _shared_base_bytes(pool, submissions)) / pool.gpus_per_device
            for pool in pools
        ]
        if len(devices) > 1 and sum(needs) > there_is:
            parts = " + ".join(f"{_gigabytes(need)} for {device}" for device, need in zip(devices, needs, strict=True))
            raise RefusedError(
                f"cluster: GPU {gpu} has {_gigabytes(there_is)} for {len(devices)} devices, whose largest states need "
                f"{_gigabytes(sum(needs))} together: {parts}; give one pool with phase: both, where states take "
                "turns, or fewer devices"
            )
        spare = (there_is - sum(needs)) / len(devices)
        for device, need in zip(devices, needs, strict=True):
            of_device = (need + spare) * cluster.pools[device.pool].gpus_per_device
            bytes_by_pool[device.pool] = min(bytes_by_pool.get(device.pool, math.inf), of_device)
    return bytes_by_pool


def _waiting_context_bytes(pools: Sequence[Pool], num_pipelines: int) -> float:
    """Bytes that workers keep on a GPU while their state is off it: CUDA's context of each but one for each device.

    The states' own bytes hold the contexts of those that are there. Pipelines beyond a group's members wait for nodes.
    """
    num_sharing = min(num_pipelines, MAX_MEMBERS)
    return CUDA_CONTEXT_BYTES * sum(max(0, num_sharing * (2 if pool.serves_both_phases else 1) - 1) for pool in pools)


def own_bases(submission: Submission, submissions: Sequence[Submission], *, is_gpu: bool) -> tuple[Phase, ...]:
    """Phases in which the worker of a pipeline has its adapter's base for itself on this machine.

    On cores all adapters share theirs, but for servers. On GPUs those do that compute in one process.
    """
    if not is_gpu:
        return (Phase.ROLLOUT,) if submission.config.rollout.engine.is_server else ()
    shared = {phase: _shared_bases(phase, submissions) for phase in BOTH_PHASES}
    return tuple(phase for phase in BOTH_PHASES if submission.pipeline.base_of(phase) not in shared[phase])


def _shared_bases(phase: Phase, submissions: Sequence[Submission]) -> dict[str, Submission]:
    """A pipeline of each base that several share a process of, by `Pipeline.base_of`."""
    bases = [submission.pipeline.base_of(phase) for submission in submissions]
    counts = Counter(bases)
    return {base: given for base, given in zip(bases, submissions, strict=True) if base and counts[base] > 1}


def _shared_base_bytes(pool: Pool, submissions: Sequence[Submission]) -> float:
    """Bytes of the bases that pipelines share on each device of the pool."""
    phases = BOTH_PHASES if pool.serves_both_phases else (pool.phase,)
    return sum(
        device_parts(submission.config, phase, is_gpu=True).get("base", 0.0)
        for phase in phases
        for submission in _shared_bases(phase, submissions).values()
    )


def _largest_state(pool: Pool, submissions: Sequence[Submission]) -> float:
    """Bytes of the largest state that a device of the pool is to hold."""
    needs = [0.0]
    for submission in submissions:
        footprint = submission.pipeline.footprint
        if pool.serves_both_phases or pool.phase is Phase.ROLLOUT:
            needs.append(footprint.rollout_device_bytes or 0.0)
        if pool.phase is Phase.TRAIN:
            needs.append(footprint.train_device_bytes or 0.0)
    return max(needs)


def with_footprint(
    submission: Submission, cluster: Cluster, *, is_gpu: bool = False, own_bases: Collection[Phase] = BOTH_PHASES
) -> Submission:
    """The submission with its footprint estimated from its config, where the file does not give it.

    In a pool that spills, a node's host memory must hold its process; its state has the disk. `own_bases`: as in
    `footprint_of`; `with_machine_memory` counts the other bases.
    """
    rollout, train = cluster.pool_serving(Phase.ROLLOUT), cluster.pool_serving(Phase.TRAIN)
    num_gpus = 1 if rollout is None else rollout.gpus_per_device
    footprint = _estimated_footprint(submission, is_gpu=is_gpu, own_bases=own_bases, num_gpus=num_gpus)
    context = CUDA_CONTEXT_BYTES if is_gpu else 0.0  # never in host memory
    if rollout is not None and rollout.spills_to_disk:
        contexts = rollout_contexts_bytes(submission.config, num_gpus) if is_gpu else 0.0
        process_bytes = footprint.rollout_host_bytes - (footprint.rollout_device_bytes or 0.0) + contexts
        footprint = replace(footprint, rollout_host_bytes=max(0.0, process_bytes))
    if train is not None and train.spills_to_disk:
        process_bytes = footprint.train_host_bytes - (footprint.train_device_bytes or 0.0) + context
        footprint = replace(footprint, train_host_bytes=max(0.0, process_bytes))
    return replace(submission, pipeline=replace(submission.pipeline, footprint=footprint))


def _estimated_footprint(
    submission: Submission, *, is_gpu: bool, own_bases: Collection[Phase], num_gpus: int
) -> Footprint:
    given, is_filler = submission.pipeline.footprint, submission.pipeline.is_filler
    if is_filler:  # it has no trainer
        given = replace(given, train_host_bytes=0.0, train_device_bytes=0.0)
    if given.rollout_device_bytes is not None and given.train_device_bytes is not None:
        return given
    estimated = footprint_of(submission.config, is_gpu=is_gpu, own_bases=own_bases, num_gpus=num_gpus)
    return replace(
        given,
        rollout_device_bytes=_first(given.rollout_device_bytes, estimated.rollout_device_bytes),
        train_device_bytes=_first(given.train_device_bytes, estimated.train_device_bytes),
        rollout_host_bytes=given.rollout_host_bytes or estimated.rollout_host_bytes,
        train_host_bytes=0.0 if is_filler else given.train_host_bytes or estimated.train_host_bytes,
    )


def has_gpu_sized_devices(cluster: Cluster) -> bool:
    """Whether memory is counted as on GPUs in a file that only is planned: its devices have as much as one."""
    return any(LEAST_GPU_BYTES <= pool.device_memory_bytes < math.inf for pool in cluster.pools.values())


def check_each_fits(
    cluster: Cluster, submissions: Sequence[Submission], *, is_gpu: bool = False, on_machine: bool = False
) -> None:
    """Raises RefusedError, with the parts, for the first pipeline that does not fit a device of its pools even alone.

    `is_gpu`: that with which `with_footprint` counted. `on_machine`: the cluster comes from `with_machine_memory`,
    which counts shared bases.
    """
    for submission in submissions:
        footprint = submission.pipeline.footprint
        for phase, device_bytes, host_bytes in (
            (Phase.ROLLOUT, footprint.rollout_device_bytes, footprint.rollout_host_bytes),
            (Phase.TRAIN, footprint.train_device_bytes, footprint.train_host_bytes),
        ):
            pool = cluster.pool_serving(phase)
            if pool is None:
                continue
            name, worker = submission.config.name, f"its {phase} worker needs"
            has_base = not on_machine or phase in own_bases(submission, submissions, is_gpu=is_gpu)
            counted = {"is_gpu": is_gpu, "has_base": has_base}
            need = device_bytes or 0.0
            if _is_over(need, pool.device_memory_bytes):
                parts = device_parts(submission.config, phase, num_gpus=pool.gpus_per_device, **counted)
                known = parts if total(parts) == need else {}  # the file may give another figure
                remedy = _remedy(submission, phase, pool, counted) if known else _SMALLER
                raise _refusal(name, worker, "device memory", need, pool.device_memory_bytes, remedy, known)
            if pool.serves_both_phases:
                worker = "its rollout and train workers need"
                host_bytes = footprint.rollout_host_bytes + footprint.train_host_bytes
            if _is_over(host_bytes, pool.host_memory_bytes):
                kind = "host memory, with its state on disk" if pool.spills_to_disk else "host memory"
                raise _refusal(name, worker, kind, host_bytes, pool.host_memory_bytes, _SMALLER)


_SMALLER = "make the model, rollout.slots, rollout.max_new_tokens or algorithm.micro_batch_size smaller"


def _is_over(need: float, capacity: float) -> bool:
    return need > capacity and not math.isinf(capacity)


def _remedy(submission: Submission, phase: Phase, pool: Pool, counted: Mapping[str, bool]) -> str:
    """The smallest change of the file with which a worker fits, by the estimate of its parts."""
    num_devices = None if pool.num_nodes is None else pool.num_nodes * pool.devices_per_node
    change = smallest_change(
        submission.config, phase, pool.device_memory_bytes, num_devices,
        pool=pool.name if pool.phase is Phase.ROLLOUT else None, num_gpus=pool.gpus_per_device, **counted,
    )  # fmt: skip
    return f"it fits with {change}" if change else "no other dtype, slots, micro-batch, shards or adapter make it fit"


def _refusal(
    name: str, worker: str, kind: str, need: float, capacity: float, remedy: str, parts: Parts | None = None
) -> RefusedError:
    largest_first = sorted((parts or {}).items(), key=lambda part: -part[1])
    shown = ", ".join(f"{part} {_gigabytes(size)}" for part, size in largest_first if size >= need / 100)
    return RefusedError(
        f"pipeline {name}: {worker} {_gigabytes(need)} of {kind}{f' ({shown})' if shown else ''}, and there are "
        f"{_gigabytes(capacity)}; {remedy}"
    )


def _gigabytes(num_bytes: float) -> str:
    """The bytes in the file's unit, with more digits where three decimals would show nothing."""
    return f"{num_bytes / 1e9:.3f} GB" if num_bytes >= 1e7 else f"{num_bytes / 1e9:.2g} GB"


@dataclass(slots=True)
class _PinnedState:
    """A worker on a node whose pool spills."""

    node: NodeId
    process_bytes: float
    state_bytes: float
    is_in_host_memory: bool = False
    """Its state is in host memory, neither on the device nor in a file."""


class HostMemory:
    """Which states lie in the host memory of which node, where pools spill."""

    def __init__(self, cluster: Cluster) -> None:
        self._pools = {name: pool for name, pool in cluster.pools.items() if pool.spills_to_disk}
        self._pinned: dict[str, _PinnedState] = {}

    def pin(self, worker: str, device: DeviceId, footprint: Footprint, phase: Phase) -> None:
        """A worker was started on a device: its process needs memory from now on."""
        if device.pool not in self._pools:
            return
        is_rollout = phase is Phase.ROLLOUT
        process_bytes = footprint.rollout_host_bytes if is_rollout else footprint.train_host_bytes
        state_bytes = footprint.rollout_device_bytes if is_rollout else footprint.train_device_bytes
        self._pinned[worker] = _PinnedState(device.node_id, process_bytes, state_bytes or 0.0)

    def offload(self, worker: str) -> bool:
        """Record a state that leaves its device. Returns whether host memory has room; otherwise it goes to disk."""
        pinned = self._pinned.get(worker)
        if pinned is None:
            return True
        in_use = sum(
            other.process_bytes + (other.state_bytes if other.is_in_host_memory else 0.0)
            for other in self._pinned.values()
            if other.node == pinned.node
        )
        capacity = self._pools[pinned.node.pool].host_memory_bytes
        pinned.is_in_host_memory = in_use + pinned.state_bytes <= capacity
        return pinned.is_in_host_memory

    def load(self, worker: str) -> None:
        """A worker's state goes to the device."""
        if worker in self._pinned:
            self._pinned[worker].is_in_host_memory = False

    def leave(self, worker: str) -> None:
        """A worker was ended."""
        self._pinned.pop(worker, None)


def _first(given: float | None, estimated: float | None) -> float | None:
    return estimated if given is None else given
