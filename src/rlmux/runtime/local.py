"""Backend `local`: every worker is a process on this machine. No server, no Ray.

    WorkerBackend ── spawn ──▶ LocalProcesses ──▶ WorkerProcess (one per worker; its pipe is watched by `wait`)

device    one GPU, if this machine has any that may be used (CUDA_VISIBLE_DEVICES; empty: none); else one CPU core,
          to which its workers are pinned; a worker computes with one thread there; with `gpus_per_device` several of
          either: a server on them holds one model, or copies of it
weights   files in shared memory, in a folder that only the user can read
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import selectors
import shutil
import sys
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from itertools import cycle, islice
from pathlib import Path
from typing import Any

from rlmux.core.errors import UserError
from rlmux.core.model import Cluster, DeviceId, NodeId
from rlmux.runtime.backend import DeviceParts, WorkerOptions
from rlmux.runtime.gpus_here import visible_gpus
from rlmux.runtime.mps import MpsDaemon
from rlmux.runtime.worker_backend import WorkerBackend
from rlmux.runtime.workers.processes import WorkerProcess, warm_up
from rlmux.runtime.workers.worker_pool import Neighbour, Worker

_PREFIX = "rlmux-"
_SIGNATURE = "run.json"
_COMPUTING = ".computing"
"""File beside the signature while the run has workers on devices."""
BASES = ".bases"
"""Folder of the bases in a run's shared memory; no pipeline has this name."""


def local_backend(
    cluster: Cluster, folder: Path, *, options: WorkerOptions | None = None, start_s: float = 0.0
) -> WorkerBackend:
    """The backend of a run on this machine. Raises UserError for a cluster that this machine cannot be."""
    memory = SharedMemoryFolder(folder)
    gpus = assign_gpus(cluster, visible_gpus())
    cores = {} if gpus else assign_cores(cluster)
    used = {f"GPU {gpu}" for names in gpus.values() for gpu in names.split(",")} | {
        f"core {core}" for each in cores.values() for core in each
    }
    neighbours = memory.neighbours_on(used)
    memory.sign(folder, used)
    mps = MpsDaemon.start() if gpus and (options or WorkerOptions()).shares_devices else None
    if mps is not None and mps.missing:
        print(f"rlmux: MPS: {mps.missing}: pipelines take turns on a GPU that they share", file=sys.stderr)
    workplace = LocalProcesses(cores, memory, gpu_by_device=gpus, mps=mps)
    return WorkerBackend(
        cluster, folder, workplace, memory.path, options=options, start_s=start_s, neighbours=neighbours
    )


class LocalProcesses:
    """A workplace of processes, watched through their pipes."""

    def __init__(
        self,
        cores_by_device: dict[DeviceId, tuple[int, ...]],
        memory: SharedMemoryFolder | None,
        *,
        gpu_by_device: dict[DeviceId, str] | None = None,
        bases: Path | None = None,
        mps: MpsDaemon | None = None,
    ) -> None:
        """`bases`: folder in shared memory for the frozen bases of adapters; by default one of `memory`. `mps`: ends
        with the workplace."""
        self._cores_by_device = cores_by_device
        self._gpu_by_device = gpu_by_device or {}
        self.parts: Mapping[DeviceId, DeviceParts] = {
            **{device: DeviceParts(cores=cores) for device, cores in cores_by_device.items()},
            **{device: DeviceParts(gpus=tuple(gpu.split(","))) for device, gpu in self._gpu_by_device.items()},
        }
        self._memory = memory
        self._mps = mps
        self._on_devices: set[Worker] = set()
        """Living workers that compute."""
        self._is_closed = False
        self._closing = threading.Lock()
        self.bases = bases if memory is None else memory.path / BASES
        self._selector = selectors.DefaultSelector()
        self._wakes = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._selector.register(self._wakes, selectors.EVENT_READ, None)
        warm_up()

    def spawn(
        self,
        name: str,
        make_worker: Callable[..., Any],
        args: tuple[Any, ...],
        *,
        device: DeviceId | None,
        log_path: Path,
        call_limit_s: float,
    ) -> Worker:
        process = WorkerProcess(
            name,
            make_worker,
            args,
            cores=self._cores_by_device.get(device, ()) if device else (),
            gpu=self._gpu_by_device.get(device, "") if device else "",
            environment={} if self._mps is None else self._mps.environment,
            log_path=log_path,
            call_limit_s=call_limit_s,
        )
        self._selector.register(process.connection, selectors.EVENT_READ, process)
        if device is not None:
            self._on_devices.add(process)
            self._mark()
        return process

    def wait(self, timeout_s: float) -> Sequence[Worker]:
        ready = [key.data for key, _ in self._selector.select(timeout_s)]
        if None in ready:
            os.eventfd_read(self._wakes)
        return [worker for worker in ready if worker is not None]

    def wake(self) -> None:
        with self._closing:  # a number that is closed may be another file's a moment later
            if not self._is_closed:
                os.eventfd_write(self._wakes, 1)

    def senders(self, trainers: Sequence[Worker]) -> Sequence[int]:
        return [0]

    def deliver(
        self, path: Path, senders: Sequence[Worker], receivers: Sequence[Worker], then: Callable[[], None]
    ) -> None:
        then()  # what one worker of this machine wrote, the others can read

    def forget(self, worker: Worker) -> None:
        assert isinstance(worker, WorkerProcess)
        self._selector.unregister(worker.connection)
        self._on_devices.discard(worker)
        self._mark()

    def _mark(self) -> None:
        if self._memory is not None:
            self._memory.mark(is_computing=bool(self._on_devices))

    def node_changes(self) -> Sequence[tuple[NodeId, bool]]:
        return ()  # this machine is there as long as this process

    def close(self) -> None:
        self._selector.close()
        with self._closing:
            if not self._is_closed:
                os.close(self._wakes)
            self._is_closed = True
        if self._mps is not None:
            self._mps.end()
        if self._memory is not None:
            self._memory.close()


def assign_cores(cluster: Cluster) -> dict[DeviceId, tuple[int, ...]]:
    """One core for each GPU that a device would be, in the order of the file; shared when there are more than cores.

    Raises UserError for a pool without a fixed number of devices: this machine cannot grow.
    """
    cores = sorted(os.sched_getaffinity(0))
    assigned: dict[DeviceId, tuple[int, ...]] = {}
    turns = cycle(cores)
    for pool in cluster.pools.values():
        if pool.num_nodes is None:
            raise UserError(f"cluster.pools.{pool.name}: give a number of devices; this machine has {len(cores)} cores")
        for index in range(pool.num_nodes):
            for device in pool.devices(NodeId(pool.name, index)):
                assigned[device] = tuple(dict.fromkeys(islice(turns, pool.gpus_per_device)))
    return assigned


def assign_gpus(cluster: Cluster, gpus: Sequence[str]) -> dict[DeviceId, str]:
    """The GPUs of each device, with commas between, as CUDA_VISIBLE_DEVICES has them; shared when there are too few.

    Devices of several GPUs come first and begin at multiples of their number, so that two of them have all in common or
    none; else in the order of the file. Empty without GPUs. Raises UserError for a pool without a fixed number of
    devices, and for a device of more GPUs than this machine has.
    """
    if not gpus:
        return {}
    assigned: dict[DeviceId, str] = {}
    num_given = 0
    for pool in sorted(cluster.pools.values(), key=lambda pool: -pool.gpus_per_device):
        size = pool.gpus_per_device
        if pool.num_nodes is None:
            raise UserError(f"cluster.pools.{pool.name}: give a number of devices; this machine has {len(gpus)} GPUs")
        if size > len(gpus):
            raise UserError(
                f"cluster.pools.{pool.name}: a device has {size} GPUs, and this machine has {len(gpus)}; accepted: "
                f"gpus_per_device up to {len(gpus)}"
            )
        for index in range(pool.num_nodes):
            for device in pool.devices(NodeId(pool.name, index)):
                first = num_given % (len(gpus) // size * size)
                assigned[device] = ",".join(gpus[first : first + size])
                num_given += size
    return assigned


def notes_of_devices(cluster: Cluster) -> list[str]:
    """A line where the cluster has more devices than this machine has GPUs, or cores."""
    pools = cluster.pools.values()
    num_devices = sum((pool.num_nodes or 0) * pool.devices_per_node for pool in pools)
    num_wanted = sum(pool.num_gpus or 0 for pool in pools)
    gpus = visible_gpus()
    num_here, what = (len(gpus), "GPU") if gpus else (len(os.sched_getaffinity(0)), "core")
    if num_wanted <= num_here:
        return []
    size = f" of {num_wanted} {what}s" if num_wanted > num_devices else ""
    here = f"{num_here} {what}{'s' if num_here > 1 else ''}"
    return [
        f"cluster.pools: {num_devices} devices{size} share {here} of this machine: they wait for each "
        "other, so times say little; results are the same"
    ]


class SharedMemoryFolder:
    """A private folder in shared memory, the same for every process of this run; emptied if it was left behind.

    A lock holds it, which ends with this process: folders of killed runs are known by it and removed.
    """

    def __init__(self, run_folder: Path) -> None:
        self.path = self.path_of(run_folder)
        for left_behind in self.path.parent.glob(f"{_PREFIX}{os.getuid()}-*"):
            remove_if_unheld(left_behind)
        self.lock: int | None = _make_and_hold(self.path)
        """Descriptor that holds the folder's lock; None once it is closed."""

    def sign(self, run_folder: Path, devices: Collection[str]) -> None:
        """Write the run's folder and devices into the shared folder."""
        fields = {"pid": os.getpid(), "folder": str(run_folder.absolute()), "devices": sorted(devices)}
        aside = self.path / f"{_SIGNATURE}.tmp"
        aside.write_text(json.dumps(fields), encoding="utf-8")
        aside.chmod(0o600)
        aside.replace(self.path / _SIGNATURE)

    def mark(self, *, is_computing: bool) -> None:
        """Say whether the run has workers on its devices."""
        with contextlib.suppress(OSError):  # shared memory is full: a word to another run is missing
            if is_computing:
                (self.path / _COMPUTING).touch(mode=0o600)
            else:
                (self.path / _COMPUTING).unlink(missing_ok=True)

    def neighbours_on(self, devices: Collection[str]) -> list[Neighbour]:
        """Other runs of this user that have some of these devices now."""
        return neighbours_on(self.path.parent, devices, but=[self.path])

    @staticmethod
    def path_of(run_folder: Path) -> Path:
        """The folder of a run."""
        parent = Path("/dev/shm") if os.access("/dev/shm", os.W_OK) else run_folder
        name = hashlib.sha256(str(run_folder.resolve()).encode()).hexdigest()[:16]
        return parent / f"{_PREFIX}{os.getuid()}-{name}"

    @classmethod
    def at(cls, path: Path) -> SharedMemoryFolder:
        """The folder at a known path, with its contents."""
        folder = cls.__new__(cls)
        folder.path, folder.lock = path, _make_and_hold(path)
        return folder

    def close(self) -> None:
        """Safe to call twice."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self.lock is not None:
            os.close(self.lock)
            self.lock = None


def _make_and_hold(folder: Path) -> int:
    """Make the folder and return its lock. Raises UserError if it belongs to another user."""
    lock = None
    while lock is None:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = _hold(folder)
    if os.fstat(lock).st_uid != os.getuid():
        os.close(lock)
        raise UserError(f"{folder}: belongs to another user; accepted: a folder of one's own, or none yet")
    return lock


def _hold(folder: Path) -> int | None:
    """The lock; None if another run's start removed the new folder as a leftover."""
    try:
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except FileNotFoundError:
        return None
    fcntl.flock(lock, fcntl.LOCK_EX)
    if os.fstat(lock).st_nlink:
        return lock
    os.close(lock)
    return None


def neighbours_on(shared_memory: Path, devices: Collection[str], *, but: Collection[Path]) -> list[Neighbour]:
    """Runs of this user that have some of these devices now. `shared_memory`: where their folders are; `but`: folders
    that are not counted."""
    found = []
    for folder in sorted(shared_memory.glob(f"{_PREFIX}{os.getuid()}-*")):
        if folder not in but and _is_held(folder):
            neighbour = _read_signature(folder)
            shared = [] if neighbour is None else [device for device in neighbour.devices if device in devices]
            if neighbour is not None and shared:
                found.append(replace(neighbour, devices=tuple(shared)))
    return found


def _read_signature(folder: Path) -> Neighbour | None:
    """None for a run without a signature yet, or one that has ended."""
    try:
        fields = json.loads((folder / _SIGNATURE).read_text(encoding="utf-8"))
        is_computing = (folder / _COMPUTING).exists()
        devices = tuple(fields["devices"])
        return Neighbour(pid=fields["pid"], folder=fields["folder"], devices=devices, is_computing=is_computing)
    except (OSError, ValueError, KeyError):
        return None


def _is_held(folder: Path) -> bool:
    """Whether a living run holds the folder's lock."""
    with contextlib.suppress(OSError):
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(lock)
    return False


def remove_if_unheld(folder: Path) -> None:
    with contextlib.suppress(OSError):  # another user's, or removed by another run's start meanwhile
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(lock).st_nlink:  # else it was removed meanwhile, and a folder of that name is another run's
                shutil.rmtree(folder, ignore_errors=True)
        finally:
            os.close(lock)
