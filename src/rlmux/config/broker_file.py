"""The file of a broker: pools that programs of others share, and how long things may take.

    text ─ parse ─▶ nodes ─ merge ─▶ nodes ─ read ─▶ BrokerConfig ─ checks ─▶ BrokerSpec

It takes the keys of `cluster` and `policy` as every other file does; it has no pipelines, for they join by themselves.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from rlmux.config.checks import check_policy
from rlmux.config.derive import make_cluster
from rlmux.config.error_messages import explain, spec_error
from rlmux.config.file_kind import FileKind, check_kind
from rlmux.config.load import read_text
from rlmux.config.merge import merge
from rlmux.config.source_map import parse_yaml
from rlmux.config.tree import ClusterConfig
from rlmux.core.model import Cluster
from rlmux.rl.config import FromFile, PositiveFloat


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokerConfig(FromFile):
    """The whole file of `rlmux broker`. A permit is for a pool as a whole, all of its devices at once."""

    cluster: ClusterConfig
    """The devices that are shared. Of a pool, `devices` (or `nodes`) says how many it has, 1 where it says nothing;
    `device_memory_gb` how much of each the programs may fill together: without it nothing ever has to leave, and
    permits order computing only."""
    policy: str = "fifo"
    """Policy that decides which program is next, unless the command line names another."""
    leave_limit_s: PositiveFloat = 120.0
    """Seconds after which a program that has not left a pool on request is marked in `status`. No other is granted
    the pool until it has left or is gone."""
    max_hold_s: PositiveFloat | None = None
    """Seconds for which a program may hold one permit. One that holds it for longer is ended, with all its processes on
    this machine. Without it none is: a permit held for ten times as long as mostly is shown as overdue."""
    lease_s: PositiveFloat = 30.0
    """Seconds for which a program behind TCP keeps its permit and its memory after its connection has ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokerSpec:
    """A broker's file, checked."""

    source: str
    """The file, as the user named it."""
    cluster: Cluster
    """Every pool, with one device that stands for all of its own."""
    policy: str
    """Name of the policy that decides."""
    leave_limit_s: float
    max_hold_s: float | None
    lease_s: float


def load_broker_spec(path: str | Path, *, overrides: Sequence[str] = (), policies: Sequence[str]) -> BrokerSpec:
    """Read, check and convert the file. Raises SpecError, one line that names the place."""
    source = str(path)
    tree = parse_yaml(read_text(Path(path)), source)
    check_kind(tree, FileKind.PERMITS, source)
    root = merge(tree, source, overrides)
    try:
        config = TypeAdapter(BrokerConfig).validate_json(json.dumps(root.plain()))
    except ValidationError as error:
        raise explain(error, root, BrokerConfig) from None
    check_policy(root, config.policy, policies)
    for name, pool in config.cluster.pools.items():
        if pool.devices is not None and pool.nodes is not None:
            raise spec_error(root, ["cluster", "pools", name], "has devices and nodes; accepted: one of them")
        if pool.gpus_per_device > 1:
            text = (
                f"is {pool.gpus_per_device}: a permit is for a whole pool; accepted: 1, and 'devices' as many as GPUs"
            )
            raise spec_error(root, ["cluster", "pools", name, "gpus_per_device"], text)
    return BrokerSpec(
        source=source,
        cluster=_as_wholes(make_cluster(config.cluster)),
        policy=config.policy,
        leave_limit_s=config.leave_limit_s,
        max_hold_s=config.max_hold_s,
        lease_s=config.lease_s,
    )


def _as_wholes(cluster: Cluster) -> Cluster:
    """Each pool as one node with one device, which stands for all devices of the file."""
    pools = {
        name: replace(pool, num_nodes=1, gpus_per_node=(pool.num_nodes or 1) * pool.gpus_per_node)
        for name, pool in cluster.pools.items()
    }
    return Cluster(pools=pools)
