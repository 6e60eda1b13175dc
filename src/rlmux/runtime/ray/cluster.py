"""Finds a Ray cluster and our pools in it, and reports in one line what is missing.

pool NAME of n nodes  ◀──  Ray nodes that offer the resource rlmux_NAME, in the order of their addresses
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
import ray.exceptions

from rlmux.core.errors import UserError
from rlmux.core.model import Cluster, NodeId

_CONNECT_LIMIT_S = 5.0
_NO_SETTINGS = bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
"""A frame of HTTP/2 (RFC 9113, section 4.1): length, type 4 for SETTINGS, flags, stream."""
_GREETING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + _NO_SETTINGS


@dataclass(frozen=True, slots=True, kw_only=True)
class RayNode:
    """The Ray node that stands for a node of a pool."""

    node_id: NodeId
    ray_id: str
    address: str
    num_gpus: int = 0

    @staticmethod
    def of(node_id: NodeId, offer: Mapping[str, Any]) -> RayNode:
        """The Ray node of an entry of `alive_nodes`."""
        return RayNode(
            node_id=node_id,
            ray_id=offer["NodeID"],
            address=offer["NodeManagerAddress"],
            num_gpus=int(offer["Resources"].get("GPU", 0)),
        )


def resource_of(pool: str) -> str:
    """The custom resource that a Ray node offers to be a node of the pool."""
    return f"rlmux_{pool}"


def connect(cluster: Cluster, address: str | None) -> None:
    """Join the cluster at the address, or the one that this machine is part of, or start one here."""
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": "error", "namespace": "rlmux"}
    given = address or os.environ.get("RAY_ADDRESS")
    if given not in (None, "auto", "local"):
        _check_reachable(given)
        _join(given, quiet)
        return
    found = _cluster_of_this_machine() if given != "local" else None
    if found is not None:
        _join(found, quiet)
    elif given == "auto":
        raise _no_cluster_there("auto", "this machine is part of none")
    else:
        _start(cluster, quiet)


def _join(address: str, quiet: dict[str, Any]) -> None:
    try:
        ray.init(address=address, **quiet)
    except RuntimeError as error:
        raise UserError(version_line(str(error), address)) from None
    except (ConnectionError, ray.exceptions.RayError, ValueError) as error:
        raise _no_cluster_there(address, _last_line(error)) from None


def _start(cluster: Cluster, quiet: dict[str, Any]) -> None:
    """A cluster of this machine alone, with as many nodes of each pool as the file has."""
    os.environ.setdefault("RAY_worker_niceness", "0")  # the workers are the machine's work, not its background
    offers = {}
    for pool in cluster.pools.values():
        if pool.num_nodes is None:
            raise UserError(f"cluster.pools.{pool.name}: give a number of devices; one machine cannot grow")
        offers[resource_of(pool.name)] = float(pool.num_nodes)
    ray.init(address="local", include_dashboard=False, resources=offers, **quiet)


def _cluster_of_this_machine() -> str | None:
    """Address of the cluster that `ray start` has made this machine part of, if it still answers.

    Ray's own "auto" takes a minute to give up on a cluster that was killed, and then ends the whole process.
    """
    note = Path(os.environ.get("RAY_TMPDIR", "/tmp")) / "ray" / "ray_current_cluster"
    try:
        if note.stat().st_uid not in (0, os.getuid()):
            return None  # joining a cluster is trusting it with this account
        address = note.read_text().strip()
        _check_reachable(address)
    except (OSError, UserError):
        return None
    return address


def _check_reachable(address: str) -> None:
    """Raises UserError at once where Ray itself would try for a minute."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or "/" in host:
        raise UserError(
            f"--address {address}: accepted: HOST:PORT of the cluster's head, as `ray start --head` prints it, "
            "from a machine of the cluster"
        )
    try:
        with socket.create_connection((host, int(port)), timeout=_CONNECT_LIMIT_S) as connection:
            is_ray = os.environ.get("RAY_USE_TLS", "0") != "0" or _speaks_http2(connection)
    except OSError as error:
        raise _no_cluster_there(address, error.strerror or str(error)) from None
    if not is_ray:
        raise _no_cluster_there(address, "something else does")


def head_answers(address: str) -> bool:
    """Whether the head at HOST:PORT accepts a connection."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=_CONNECT_LIMIT_S).close()
    except OSError:
        return False
    return True


def _speaks_http2(connection: socket.socket) -> bool:
    """Whether the peer answers an HTTP/2 greeting with its settings, as Ray's head (a gRPC server) does."""
    connection.sendall(_GREETING)
    answer = b""
    while len(answer) < len(_NO_SETTINGS) and (more := connection.recv(len(_NO_SETTINGS))):
        answer += more
    return answer[3:4] == _NO_SETTINGS[3:4]


def _no_cluster_there(address: str, reason: str) -> UserError:
    return UserError(
        f"--address {address}: no Ray cluster answers there ({reason}); start one with `ray start --head`, "
        "or leave --address out to start one on this machine"
    )


def nodes_by_pool(cluster: Cluster) -> dict[NodeId, RayNode]:
    """A Ray node for every node of every pool. Raises UserError with the numbers if there are too few."""
    alive = sorted(alive_nodes(), key=lambda node: (node["NodeManagerAddress"], node["NodeID"]))
    found: dict[NodeId, RayNode] = {}
    for pool in cluster.pools.values():
        resource = resource_of(pool.name)
        slots = [node for node in alive for _ in range(int(node["Resources"].get(resource, 0)))]
        wanted = len(slots) if pool.num_nodes is None else pool.num_nodes
        if len(slots) < max(1, wanted):
            raise UserError(
                f"cluster.pools.{pool.name} has {wanted} nodes, the Ray cluster offers {len(slots)} of resource "
                f"{resource}; start as many more with: ray start --address=... --resources='{{\"{resource}\": 1}}'"
            )
        for index, node in enumerate(slots[:wanted]):
            found[NodeId(pool.name, index)] = RayNode.of(NodeId(pool.name, index), node)
    return found


def machines_of(nodes: Mapping[NodeId, RayNode], machine_by_ray_id: Mapping[str, str]) -> dict[str, tuple[str, ...]]:
    """`Pool.machines` by pool; a machine may have several Ray nodes.

    They hold for the run: a node that replaces a lost one counts as on the lost one's machine.
    """
    machines: dict[str, tuple[str, ...]] = {}
    for node_id, node in sorted(nodes.items()):
        machines[node_id.pool] = (*machines.get(node_id.pool, ()), machine_by_ray_id[node.ray_id])
    return machines


def alive_nodes() -> list[dict[str, Any]]:
    """Every Ray node that Ray has not declared dead."""
    list_nodes: Any = ray.nodes
    return [node for node in list_nodes() if node["Alive"]]


def version_line(text: str, address: str) -> str:
    """Ray's paragraph about versions that differ, or about another problem of a cluster, as one line."""
    reason = " ".join(text.split())
    if "ersion mismatch" in reason:
        versions = reason.partition("mismatch:")[2].strip()
        return f"Ray cluster {address}: versions differ: {versions}; install the same Python and Ray on both"
    return f"Ray cluster {address}: {reason}"


def _last_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
