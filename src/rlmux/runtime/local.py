"""Backend `local`: every worker is a process on this machine. No server, no Ray.

    device    one CPU core, which its workers are pinned to; a worker computes with one thread
    weights   files in shared memory, in a folder that only the user can read
"""

from __future__ import annotations

import hashlib
import os
import selectors
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rlmux.core.errors import UserError
from rlmux.core.model import Cluster, DeviceId, NodeId
from rlmux.runtime.processes import WorkerProcess, warm_up
from rlmux.runtime.worker_backend import Worker, WorkerBackend, WorkerOptions


def local_backend(
    cluster: Cluster, folder: Path, *, options: WorkerOptions | None = None, start_s: float = 0.0
) -> WorkerBackend:
    """The backend of a run on this machine. Raises UserError for a cluster that this machine cannot be."""
    workplace = LocalProcesses(assign_cores(cluster))
    return WorkerBackend(
        cluster, folder, workplace, shared_memory_folder(folder), options=options, start_s=start_s
    )


class LocalProcesses:
    """A workplace of processes, watched through their pipes."""

    def __init__(self, cores_by_device: dict[DeviceId, tuple[int, ...]]) -> None:
        self._cores_by_device = cores_by_device
        self._selector = selectors.DefaultSelector()
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
        cores = self._cores_by_device[device] if device else ()
        process = WorkerProcess(
            name, make_worker, args, cores=cores, log_path=log_path, call_limit_s=call_limit_s
        )
        self._selector.register(process.connection, selectors.EVENT_READ, process)
        return process

    def wait(self, timeout_s: float) -> Sequence[Worker]:
        return [key.data for key, _ in self._selector.select(timeout_s)]

    def forget(self, worker: Worker) -> None:
        assert isinstance(worker, WorkerProcess)
        self._selector.unregister(worker.connection)

    def close(self) -> None:
        self._selector.close()


def assign_cores(cluster: Cluster) -> dict[DeviceId, tuple[int, ...]]:
    """One core for each device, in the order of the file; cores are shared when there are more devices.

    Raises UserError for a pool without a fixed number of devices: this machine cannot grow.
    """
    cores = sorted(os.sched_getaffinity(0))
    assigned: dict[DeviceId, tuple[int, ...]] = {}
    for pool in cluster.pools.values():
        if pool.num_nodes is None:
            raise UserError(f"cluster.pools.{pool.name}: give a number of devices; this machine has {len(cores)} cores")
        for index in range(pool.num_nodes):
            for device in pool.devices(NodeId(pool.name, index)):
                assigned[device] = (cores[len(assigned) % len(cores)],)
    return assigned


def shared_memory_folder(run_folder: Path) -> Path:
    """A private folder in shared memory, the same for every process of this run; emptied if it was left behind."""
    name = f"rlmux-{os.getuid()}-{hashlib.sha256(str(run_folder.resolve()).encode()).hexdigest()[:16]}"
    parent = Path("/dev/shm")
    folder = (parent if os.access(parent, os.W_OK) else run_folder) / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(mode=0o700)
    return folder
