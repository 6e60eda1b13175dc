"""Backend `ray`: every worker is an actor of a Ray cluster, pinned to a node. Imported only where ray is installed.

    pool rollout, node 1  ◀──▶  a Ray node that offers the resource rlmux_rollout      (ray start --resources=...)
    worker                      an actor there, one call at a time, on its device
    device                      its GPUs where the Ray node has any (`gpus.py`), else as many cores
    weights                     one machine: files in shared memory, as under `local`
                                several: delivered from node to node before a rollout needs them (`weight_delivery.py`)
    batches                     objects, from the env worker's node to the trainer's, never through the controller
    checkpoints                 files in the run's folder, which every machine sees

rlmux decides everything; Ray starts processes and carries bytes. A node that Ray declares dead is a NodeLost, one
that comes with the right resource is a NodeJoined.
"""

from __future__ import annotations

import pickle
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rlmux.core.errors import UserError
from rlmux.core.model import Cluster, DeviceId, NodeId
from rlmux.log.run_log import LOG_NAME
from rlmux.runtime.backend import DeviceParts, WorkerOptions
from rlmux.runtime.local import SharedMemoryFolder
from rlmux.runtime.ray.actor import NodeProbe, RayWorkerActor, RayWorkerSetup, probe_node
from rlmux.runtime.ray.cluster import RayNode, alive_nodes, connect, head_answers, nodes_by_pool, resource_of
from rlmux.runtime.ray.fork_servers import ForkServers
from rlmux.runtime.ray.gpus import GpuReservations, check_gpus
from rlmux.runtime.ray.head_watch import HeadWatch
from rlmux.runtime.ray.reference_waiter import ReferenceWaiter
from rlmux.runtime.ray.shared_folder import Newcomers, check_shared
from rlmux.runtime.ray.weight_delivery import Deliveries, RaySync
from rlmux.runtime.ray.worker import PROBE_EVERY_S, RayWorker
from rlmux.runtime.worker_backend import WorkerBackend
from rlmux.runtime.workers.worker_pool import Worker

_POLL_NODES_EVERY_S = 1.0
_MAX_PROBES_PER_S = 100
"""Most probes per second of idle workers, in total."""
_PROBE_LIMIT_S = 60.0
_NUM_THREADS = 3
"""Threads of an actor: one for calls, one for probes, one for the end, which waits for neither."""
_LEAVE_LIMIT_S = 5.0


def ray_backend(
    cluster: Cluster,
    folder: Path,
    *,
    address: str | None = None,
    options: WorkerOptions | None = None,
    start_s: float = 0.0,
    is_sharing_memory: bool | None = None,
    sync: RaySync | None = None,
) -> WorkerBackend:
    """The backend of a run on a Ray cluster.

    `address`: address of a running cluster; None takes the one that this machine belongs to, or starts one here.
    `is_sharing_memory`: whether all nodes see one shared memory; None finds out.
    `sync`: how weights travel between nodes that do not.
    Raises UserError if there is no such cluster, its versions differ, it has less than the file's pools, or a node does
    not see the run's folder. A folder without a log is scratch space, which no node has to see.
    """
    nodes, probes = join_cluster(cluster, address)
    try:
        newcomers = None
        if (folder / LOG_NAME).exists():
            check_shared(folder, nodes)
            newcomers = Newcomers(folder)
        gpus = GpuReservations(cluster, nodes)
        here = probe_node().machine
        ids_here = [ray_id for ray_id, probe in probes.items() if probe.machine == here]
        if is_sharing_memory is None:
            is_sharing_memory = len(ids_here) == len(probes)
        memory = SharedMemoryFolder(folder)
        deliveries = None
        if not is_sharing_memory:
            addresses = {node.ray_id: node.address for node in nodes.values()}
            deliveries = Deliveries(memory.path, addresses, sync or RaySync())
        cores = {ray_id: probe.cores for ray_id, probe in probes.items()}
        driver_id = ray.get_runtime_context().get_node_id()
        fork_servers = ForkServers(probes, here=[driver_id, *ids_here] if is_sharing_memory else [driver_id])
        workplace = RayActors(cluster, nodes, cores, gpus, fork_servers, memory, deliveries, newcomers)
        workplace.watch_head(folder)
    except BaseException:  # an interrupt, too, must not leave a cluster that nothing uses
        ray.shutdown()
        raise
    return WorkerBackend(cluster, folder, workplace, memory.path, options=options, start_s=start_s)


def join_cluster(cluster: Cluster, address: str | None) -> tuple[dict[NodeId, RayNode], dict[str, NodeProbe]]:
    """(Ray node of every node of the file's pools, description by Ray id).

    Joins (or starts) the Ray cluster unless this process is in one already. Raises UserError as `ray_backend` does.
    """
    if not ray.is_initialized():
        connect(cluster, address)
    try:
        nodes = nodes_by_pool(cluster)
        check_gpus(cluster, nodes)
        return nodes, _probe(nodes)
    except UserError:
        ray.shutdown()
        raise


def _probe(nodes: Mapping[NodeId, RayNode]) -> dict[str, NodeProbe]:
    """Descriptions of Ray nodes by Ray id. Raises UserError if a node cannot run our workers."""
    probe_on = ray.remote(num_cpus=0, max_retries=0)(probe_node)
    ids = dict.fromkeys(node.ray_id for node in nodes.values())
    reports = {
        ray_id: probe_on.options(scheduling_strategy=NodeAffinitySchedulingStrategy(ray_id, soft=False)).remote()
        for ray_id in ids
    }
    here = probe_node()
    probes: dict[str, NodeProbe] = {}
    for node in nodes.values():
        try:
            probe = probes[node.ray_id] = ray.get(reports[node.ray_id], timeout=_PROBE_LIMIT_S)
        except Exception as error:  # anything may keep our code from running there
            reason = str(error).strip().splitlines()[-1]
            raise UserError(
                f"Ray node {node.address}: cannot run rlmux: {reason}; "
                f"install rlmux[train,ray] {here.versions[0]} there"
            ) from None
        for what, there, accepted in zip(("rlmux", "torch"), probe.versions, here.versions, strict=True):
            if there != accepted:
                raise UserError(
                    f"Ray node {node.address} has {what} {there}, this machine {accepted}; "
                    f"accepted there: {what} {accepted}"
                )
    return probes


class RayActors:
    """A workplace of actors, watched through the references of their answers."""

    def __init__(
        self,
        cluster: Cluster,
        nodes: Mapping[NodeId, RayNode],
        cores_by_ray_id: Mapping[str, Sequence[int]],
        gpus: GpuReservations,
        fork_servers: ForkServers,
        memory: SharedMemoryFolder,
        deliveries: Deliveries | None,
        newcomers: Newcomers | None = None,
    ) -> None:
        """`deliveries`: carry weights where nodes do not share a memory; else None.
        `newcomers`: the check of nodes that join later; None takes all.
        """
        self._newcomers = newcomers
        self._head: HeadWatch | None = None
        self._cluster = cluster
        self._gpus = gpus
        self.fork_servers = fork_servers
        self.nodes = dict(nodes)
        self._cores_by_device = self._assign_cores(cores_by_ray_id)
        self._memory = memory
        self.bases: Path | None = None
        self.parts: Mapping[DeviceId, DeviceParts] = {}
        self._deliveries = deliveries
        self._waiter = ReferenceWaiter()
        self._driver_id = ray.get_runtime_context().get_node_id()
        self._workers: dict[int, RayWorker] = {}
        self._leaving: list[ray.ObjectRef[Any]] = []
        self._lost: set[NodeId] = set()
        self._changes: list[tuple[NodeId, bool]] = []
        self._polled_s = time.monotonic()

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
        """Start a worker; an env worker, which has no device, starts on the controller's node."""
        node = self.nodes[device.node_id] if device else None
        has_gpu = self._gpus.has_gpu(device)
        setup = RayWorkerSetup(
            name=name,
            work=pickle.dumps((make_worker, args)),
            cores=self._cores_by_device[device] if device and not has_gpu else (),
            has_gpu=has_gpu,
            log_path=log_path.absolute(),
            search_path=tuple(sys.path),
            weights=self._weights_folders(node),
        )
        make_actor: Any = ray.remote(RayWorkerActor)
        ray_id = node.ray_id if node else self._driver_id
        where = self._gpus.actor_options(device, ray_id)
        options = {"num_cpus": 0, "max_concurrency": _NUM_THREADS, "max_restarts": 0, "max_task_retries": 0}
        actor = make_actor.options(**where, **options).remote(
            setup, self.fork_servers.address_on(ray_id), self._gpus.names_of(device)
        )
        worker = RayWorker(name, actor, node, call_limit_s, is_node_lost=self._is_node_lost, on_end=self._on_end)
        self._workers[id(worker)] = worker
        return worker

    def watch_head(self, folder: Path) -> None:
        """Watch the cluster's head from now on; `wait` raises ClusterLostError once it is gone."""
        address = ray.get_runtime_context().gcs_address
        self._head = HeadWatch(address, folder, answers=partial(head_answers, address))

    def _weights_folders(self, node: RayNode | None) -> tuple[Path, Path] | None:
        if node is None or self._deliveries is None:
            return None
        return self._memory.path, self._deliveries.folder_on(node.ray_id)

    def wait(self, timeout_s: float) -> Sequence[Worker]:
        if self._head is not None:
            self._head.check()
        self._poll_nodes()
        probe_every_s = max(PROBE_EVERY_S, len(self._workers) / _MAX_PROBES_PER_S)
        watched = [(worker.watched(probe_every_s), worker) for worker in self._workers.values()]
        by_ref = {ref: worker for ref, worker in watched if ref is not None}
        arriving = self._deliveries.watched() if self._deliveries else []
        ready = self._waiter.wait([*by_ref, *arriving], timeout_s)
        answered: list[Worker] = []
        for worker in [by_ref[ref] for ref in ready if ref in by_ref]:
            if worker.fetch():
                answered.append(worker)
            self._poll_nodes(is_due=worker.is_lost)
        if self._deliveries is not None:
            answered += self._deliveries.update(ready)
        return answered

    def wake(self) -> None:
        self._waiter.wake()

    def senders(self, trainers: Sequence[Worker]) -> Sequence[int]:
        """One rank a node, where nodes do not share a memory."""
        if self._deliveries is None:
            return [0]
        first_by_node: dict[str, int] = {}
        for rank, trainer in enumerate(trainers):
            first_by_node.setdefault(_node_of(trainer).ray_id, rank)
        return list(first_by_node.values())

    def deliver(
        self, path: Path, senders: Sequence[Worker], receivers: Sequence[Worker], then: Callable[[], None]
    ) -> None:
        """Deliver a version to its receivers. On one machine they read the trainer's file."""
        if self._deliveries is None:
            then()
            return
        trainer = senders[0]
        assert isinstance(trainer, RayWorker)
        sources = [_node_of(sender) for sender in senders]
        targets = {node.ray_id: node.address for node in map(_node_of, receivers)}
        self._deliveries.deliver(path, trainer, sources, targets, then)

    def node_changes(self) -> Sequence[tuple[NodeId, bool]]:
        """(node, whether it is present) for every node that left or joined since the last call."""
        changes, self._changes = self._changes, []
        return changes

    def forget(self, worker: Worker) -> None:
        self._workers.pop(id(worker), None)

    def close(self) -> None:
        if self._deliveries is not None and ray.is_initialized():
            self._deliveries.close()
        self._memory.close()
        if ray.is_initialized():
            if self._leaving:
                ray.wait(self._leaving, num_returns=len(self._leaving), timeout=_LEAVE_LIMIT_S, fetch_local=False)
            ray.shutdown()
        if self._head is not None:
            self._head.close()

    def _on_end(self, worker: RayWorker, leaving: ray.ObjectRef[Any]) -> None:
        """`leaving`: ready once the worker is gone."""
        _, self._leaving = ray.wait(
            [*self._leaving, leaving], num_returns=len(self._leaving) + 1, timeout=0, fetch_local=False
        )
        if self._deliveries is not None and worker.is_trainer:
            self._deliveries.withdraw(worker)

    def _assign_cores(self, cores_by_ray_id: Mapping[str, Sequence[int]]) -> dict[DeviceId, tuple[int, ...]]:
        """One core for each GPU that a device would be, counted by machine; a node that replaces a lost one takes
        its numbers."""
        given: dict[str, int] = {}
        assigned = {}
        for node_id, node in self.nodes.items():
            cores = cores_by_ray_id[node.ray_id]
            pool = self._cluster.pools[node_id.pool]
            for device in pool.devices(node_id):
                number = given.get(node.address, 0)
                given[node.address] = number + pool.gpus_per_device
                numbers = range(number, number + pool.gpus_per_device)
                assigned[device] = tuple(dict.fromkeys(cores[each % len(cores)] for each in numbers))
        return assigned

    def _poll_nodes(self, *, is_due: bool = False) -> None:
        now_s = time.monotonic()
        if not is_due and now_s - self._polled_s < _POLL_NODES_EVERY_S:
            return
        self._polled_s = now_s
        if self._head is not None and self._head.is_away():
            return  # Ray would wait for it
        offers = {node["NodeID"]: node for node in alive_nodes()}
        for node_id, node in self.nodes.items():
            if node.ray_id not in offers and node_id not in self._lost:
                self._lost.add(node_id)
                self._gpus.release(node_id)
                self.fork_servers.forget(node.ray_id)
                if self._deliveries is not None:
                    self._deliveries.forget_node(node.ray_id)
                self._changes.append((node_id, False))
        if self._lost:
            self._take_newcomers(offers)

    def _take_newcomers(self, offers: Mapping[str, Mapping[str, Any]]) -> None:
        """Replace lost nodes by unused Ray nodes with the same offer."""
        there = [(node_id, node) for node_id, node in self.nodes.items() if node_id not in self._lost]
        taken = Counter((node.ray_id, node_id.pool) for node_id, node in there)
        for node_id in sorted(self._lost):
            for ray_id, offer in offers.items():
                if taken[ray_id, node_id.pool] < int(offer["Resources"].get(resource_of(node_id.pool), 0)):
                    if self._newcomers is not None and not self._newcomers.share(RayNode.of(node_id, offer)):
                        continue
                    taken[ray_id, node_id.pool] += 1
                    self._lost.discard(node_id)
                    self.nodes[node_id] = RayNode.of(node_id, offer)
                    self._gpus.reserve(node_id, self.nodes[node_id])
                    self._changes.append((node_id, True))
                    break

    def _is_node_lost(self, node: RayNode | None) -> bool:
        return node is not None and node.node_id in self._lost


def _node_of(worker: Worker) -> RayNode:
    """The node of a worker that has a device."""
    assert isinstance(worker, RayWorker)
    assert worker.node is not None
    return worker.node
