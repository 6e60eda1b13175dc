"""Backend `ray`: every worker is an actor of a Ray cluster, pinned to a node. Imported only where ray is installed.

    pool rollout, node 1  ◀──▶  a Ray node that offers the resource rlmux_rollout      (ray start --resources=...)
    worker                      an actor there, one call at a time, on its device's core
    weights                     one machine: files in shared memory, as under `local`
                                several: an object, which Ray brings to each machine once
    batches                     objects, from the host's node to the trainer's, never through the controller
    checkpoints                 files in the run's folder, which every machine sees

rlmux decides everything; Ray starts processes and carries bytes. A node that Ray declares dead is a NodeLost, one
that comes with the right resource is a NodeJoined.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import ray
import ray.exceptions
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rlmux.core.errors import PipelineError, RlmuxError, UserError, WorkerLostError
from rlmux.core.model import Cluster, DeviceId, NodeId
from rlmux.runtime.local import SharedMemoryFolder
from rlmux.runtime.ray_actor import Call, RayWorkerActor, RayWorkerSetup, probe_node
from rlmux.runtime.ray_cluster import RayNode, alive_nodes, connect, nodes_by_pool, resource_of
from rlmux.runtime.worker_backend import Worker, WorkerBackend, WorkerOptions

_LOOK_AT_NODES_EVERY_S = 1.0
_UNAVAILABLE_LIMIT_S = 40.0
"""How long a worker may be out of reach before it is lost: longer than Ray takes to declare a node dead."""
_PROBE_LIMIT_S = 60.0


def ray_backend(
    cluster: Cluster,
    folder: Path,
    *,
    address: str | None = None,
    options: WorkerOptions | None = None,
    start_s: float = 0.0,
    is_sharing_memory: bool | None = None,
) -> WorkerBackend:
    """The backend of a run on a Ray cluster.

    `address`: of a running cluster; None takes the one that this machine belongs to, or starts one here for the run.
    `is_sharing_memory`: whether all nodes see one shared memory; None finds out.
    Raises UserError if there is no such cluster, its versions differ, or it has less than the file's pools.
    """
    nodes = join_cluster(cluster, address)
    try:
        probes = _probe(nodes)
        is_one_machine = len({probe.machine for probe in probes.values()} | {probe_node().machine}) == 1
        memory = SharedMemoryFolder(folder)
        workplace = RayActors(
            cluster,
            nodes,
            {ray_id: probe.cores for ray_id, probe in probes.items()},
            memory,
            is_sharing_memory=is_one_machine if is_sharing_memory is None else is_sharing_memory,
        )
    except BaseException:
        ray.shutdown()
        raise
    return WorkerBackend(cluster, folder, workplace, memory.path, options=options, start_s=start_s)


def join_cluster(cluster: Cluster, address: str | None) -> dict[NodeId, RayNode]:
    """The Ray node of every node of the file's pools. Joins (or starts) the Ray cluster unless this process is in one
    already. Raises UserError as `ray_backend` does."""
    if not ray.is_initialized():
        connect(cluster, address)
    try:
        return nodes_by_pool(cluster)
    except UserError:
        ray.shutdown()
        raise


def _probe(nodes: Mapping[NodeId, RayNode]) -> dict[str, Any]:
    """What each Ray node is, by its id. Raises UserError if one cannot run our workers."""
    ask = ray.remote(num_cpus=0, max_retries=0)(probe_node)
    ids = dict.fromkeys(node.ray_id for node in nodes.values())
    asked = {
        ray_id: ask.options(scheduling_strategy=NodeAffinitySchedulingStrategy(ray_id, soft=False)).remote()
        for ray_id in ids
    }
    here = probe_node()
    probes = {}
    for node in nodes.values():
        try:
            probe = probes[node.ray_id] = ray.get(asked[node.ray_id], timeout=_PROBE_LIMIT_S)
        except Exception as error:  # whatever keeps our code from running there
            reason = str(error).strip().splitlines()[-1]
            raise UserError(
                f"Ray node {node.address}: cannot run rlmux: {reason}; install rlmux[train,ray] {here.version} there"
            ) from None
        if probe.version != here.version:
            raise UserError(
                f"Ray node {node.address} has rlmux {probe.version}, this machine {here.version}; "
                "install the same version on both"
            )
    return probes


class RayActors:
    """A workplace of actors, watched through the references of their answers."""

    def __init__(
        self,
        cluster: Cluster,
        nodes: Mapping[NodeId, RayNode],
        cores_by_ray_id: Mapping[str, Sequence[int]],
        memory: SharedMemoryFolder,
        *,
        is_sharing_memory: bool,
    ) -> None:
        self._cluster = cluster
        self._nodes = dict(nodes)
        self._core_by_device = self._assign_cores(cores_by_ray_id)
        self._memory = memory
        self._is_sharing_memory = is_sharing_memory
        self._driver_id = ray.get_runtime_context().get_node_id()
        self._workers: dict[int, RayWorker] = {}
        self._lost: set[NodeId] = set()
        self._changes: list[tuple[NodeId, bool]] = []
        self._looked_s = time.monotonic()
        self.published: dict[Path, ray.ObjectRef[Any]] = {}
        """Weights as objects, by the file that stands for them here."""

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
        """A worker without a device, a pipeline's host, lives beside the controller."""
        node = self._nodes[device.node_id] if device else None
        setup = RayWorkerSetup(
            make_worker=make_worker,
            args=args,
            cores=(self._core_by_device[device],) if device else (),
            log_path=log_path.absolute(),
            search_path=tuple(sys.path),
            is_sharing_memory=self._is_sharing_memory,
        )
        strategy = NodeAffinitySchedulingStrategy(node.ray_id if node else self._driver_id, soft=False)
        make_actor: Any = ray.remote(RayWorkerActor)
        options = {"num_cpus": 0, "max_concurrency": 1, "max_restarts": 0, "max_task_retries": 0}
        actor = make_actor.options(scheduling_strategy=strategy, **options).remote(setup)
        worker = RayWorker(name, actor, node.node_id if node else None, call_limit_s, self)
        self._workers[id(worker)] = worker
        return worker

    def wait(self, timeout_s: float) -> Sequence[Worker]:
        self._look_at_nodes()
        by_ref = {worker.pending: worker for worker in self._workers.values() if worker.pending is not None}
        if not by_ref:
            time.sleep(timeout_s)
            return []
        ready, _ = ray.wait(list(by_ref), num_returns=1, timeout=timeout_s, fetch_local=True)
        answered = []
        for worker in [by_ref[ref] for ref in ready]:
            if worker.fetch():
                answered.append(worker)
            self._look_at_nodes(is_due=worker.is_lost)
        return answered

    def node_changes(self) -> Sequence[tuple[NodeId, bool]]:
        """(node, is it there now) for every node that went or came since the last call."""
        changes, self._changes = self._changes, []
        return changes

    def forget(self, worker: Worker) -> None:
        self._workers.pop(id(worker), None)

    def close(self) -> None:
        self._memory.close()
        if ray.is_initialized():
            ray.shutdown()

    def drop_unused_weights(self) -> None:
        """Those whose file the backend has removed."""
        for path in [path for path in self.published if not path.exists()]:
            del self.published[path]

    def _assign_cores(self, cores_by_ray_id: Mapping[str, Sequence[int]]) -> dict[DeviceId, int]:
        """One core for each device, counted on each machine by itself; a node that takes a lost one's place takes its
        numbers."""
        given: dict[str, int] = {}
        assigned = {}
        for node_id, node in self._nodes.items():
            cores = cores_by_ray_id[node.ray_id]
            for device in self._cluster.pools[node_id.pool].devices(node_id):
                number = given.get(node.address, 0)
                given[node.address] = number + 1
                assigned[device] = cores[number % len(cores)]
        return assigned

    def _look_at_nodes(self, *, is_due: bool = False) -> None:
        now_s = time.monotonic()
        if not is_due and now_s - self._looked_s < _LOOK_AT_NODES_EVERY_S:
            return
        self._looked_s = now_s
        offers = {node["NodeID"]: node for node in alive_nodes()}
        for node_id, node in self._nodes.items():
            if node.ray_id not in offers and node_id not in self._lost:
                self._lost.add(node_id)
                self._changes.append((node_id, False))
        if self._lost:
            self._take_newcomers(offers)

    def _take_newcomers(self, offers: Mapping[str, Mapping[str, Any]]) -> None:
        """Ray nodes that offer what a lost node did, and do not stand for a node yet."""
        there = [(node_id, node) for node_id, node in self._nodes.items() if node_id not in self._lost]
        taken = Counter((node.ray_id, node_id.pool) for node_id, node in there)
        for node_id in sorted(self._lost):
            for ray_id, offer in offers.items():
                if taken[ray_id, node_id.pool] < int(offer["Resources"].get(resource_of(node_id.pool), 0)):
                    taken[ray_id, node_id.pool] += 1
                    self._lost.discard(node_id)
                    self._nodes[node_id] = RayNode(
                        node_id=node_id, ray_id=ray_id, address=offer["NodeManagerAddress"]
                    )
                    self._changes.append((node_id, True))
                    break

    def is_node_lost(self, node: NodeId | None) -> bool:
        return node in self._lost


class RayWorker:
    """One actor and the calls that wait for it."""

    def __init__(
        self, name: str, actor: Any, node: NodeId | None, call_limit_s: float, workplace: RayActors
    ) -> None:
        self.name = name
        self.pid: int | None = None
        self.pending: ray.ObjectRef[Any] | None = None
        """The answer that is being waited for."""
        self.is_lost = False
        self._actor = actor
        self._node = node
        self._call_limit_s = call_limit_s
        self._workplace = workplace
        self._calls: deque[tuple[Call, Callable[[Any], None]]] = deque()
        self._deadline_s: float | None = None
        self._unavailable_since_s: float | None = None
        self._answer: Any = None

    def call(self, now_s: float, method: str, args: tuple[Any, ...], then: Callable[[Any], None]) -> None:
        self._calls.append((Call(method=method, args=args), then))
        if len(self._calls) == 1:
            self._send(now_s)

    def _send(self, now_s: float) -> None:
        call, _ = self._calls[0]
        weights = [self._workplace.published[path] for path in call.weights if path in self._workplace.published]
        self._deadline_s = now_s + self._call_limit_s
        self.pending = self._actor.answer.remote(call, weights)

    def fetch(self) -> bool:
        """Take in what is behind the reference. False: out of reach for the moment; it is asked after again."""
        assert self.pending is not None
        try:
            self._answer = ray.get(self.pending)
        except ray.exceptions.ActorUnavailableError as error:
            now_s = time.monotonic()
            since_s = self._unavailable_since_s = self._unavailable_since_s or now_s
            if now_s - since_s < _UNAVAILABLE_LIMIT_S and not self._workplace.is_node_lost(self._node):
                self.pending = self._actor.is_there.remote()
                time.sleep(0.1)
                return False
            self._answer = WorkerLostError(f"{self.name} is out of reach: {_first_line(error)}")
        except ray.exceptions.RayTaskError as error:
            self._answer = PipelineError(f"{self.name}: {_first_line(error.cause)}")
        except ray.exceptions.RayError as error:
            self._answer = WorkerLostError(f"{self.name} is gone: {_first_line(error)}")
        if self._unavailable_since_s is not None and not isinstance(self._answer, Exception):
            self._answer = WorkerLostError(f"{self.name} was out of reach; what it was doing is lost")
        self.is_lost = isinstance(self._answer, WorkerLostError)
        return True

    def receive(self, now_s: float) -> None:
        answer, self._answer = self._answer, None
        self.pending = self._deadline_s = None
        if isinstance(answer, RlmuxError):
            raise answer
        self.pid = answer.pid
        if answer.error is not None:
            raise answer.error
        call, then = self._calls.popleft()
        if answer.weights is not None:
            for path in call.weights:
                path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                path.touch(mode=0o600)
                self._workplace.published[path] = answer.weights
            self._workplace.drop_unused_weights()
        if self._calls:
            self._send(now_s)
        then(answer.value)

    def abandoned(self, method: str) -> list[Callable[[Any], None]]:
        return [then for call, then in self._calls if call.method == method]

    def is_overdue(self, now_s: float) -> bool:
        return self._deadline_s is not None and now_s > self._deadline_s

    def end(self) -> None:
        with contextlib.suppress(ray.exceptions.RayError):
            self._actor.__ray_terminate__.remote()

    def kill(self) -> None:
        with contextlib.suppress(ray.exceptions.RayError, ValueError):
            ray.kill(self._actor)


def _first_line(error: BaseException | None) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
