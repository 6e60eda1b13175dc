"""Registration of a program, and its form for the scheduler: an on-demand pipeline.

hello ── check_hello ─▶ Program ── pipeline_of ─▶ Pipeline(work_arrives)
ask   ── kind_of ─▶ phases of the batch

A module of its own: its functions are pure checks and conversions, while the permit manager holds state.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from rlmux.broker.program_roster import PhaseRequest, Program
from rlmux.broker.wire import WIRE_VERSION
from rlmux.core.errors import UserError
from rlmux.core.model import Cluster, Footprint, Phase, Pipeline, PipelineId, Pool, Stage
from rlmux.share import MAX_WEIGHT

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_MAX_WORLD = 1024


def check_hello(hello: Mapping[str, Any], cluster: Cluster, programs: Sequence[Program]) -> None:
    """Raises UserError with the accepted values. `programs`: joined and not over."""
    if hello["v"] != WIRE_VERSION:
        raise UserError(f"it speaks version {hello['v']} of the wire; accepted: {WIRE_VERSION} (copy share.py anew)")
    if not _NAME.fullmatch(hello["job"]):
        raise UserError(f"job {hello['job']!r}; accepted: 1 to 64 letters, digits, '-', '_' and '.'")
    if not 1 <= hello["world"] <= _MAX_WORLD or hello["rank"] >= hello["world"]:
        raise UserError(f"rank {hello['rank']} of {hello['world']}; accepted: 0 to world - 1, at most {_MAX_WORLD}")
    if hello.get("slo", 1.0) < 1.0:
        raise UserError(f"slo {hello['slo']}; accepted: 1.0 or more")
    if not 1.0 <= hello.get("weight", 1.0) <= MAX_WEIGHT:
        raise UserError(f"weight {hello['weight']}; accepted: 1 to {MAX_WEIGHT:g}")
    for pool in [*hello.get("pools", {}).values(), *hello.get("need_bytes", {}), *hello.get("resident", [])]:
        if pool not in cluster.pools:
            raise UserError(f"pool {pool!r}; accepted: {', '.join(cluster.pools)}")
    for pool, need in hello.get("need_bytes", {}).items():
        check_need(cluster, pool, need)
    limit = min(pool.host_memory_bytes for pool in cluster.pools.values())
    host_bytes, others = hello.get("host_bytes", 0), sum(program.host_bytes for program in programs)
    if others + host_bytes > limit:
        raise UserError(
            f"its hooks keep {host_bytes / 1e9:g} GB of host memory, those of {len(programs)} others "
            f"{others / 1e9:g} GB, and host_memory_gb is {limit / 1e9:g}; accepted: what fits"
        )


def check_need(cluster: Cluster, pool: str, need_bytes: int) -> None:
    """Raises UserError for a need above the pool's memory."""
    capacity = capacity_of(cluster.pools[pool]) if pool in cluster.pools else 0.0
    if need_bytes > capacity:
        raise UserError(f"it needs {need_bytes / 1e9:g} GB on {pool}, which has {capacity / 1e9:g} GB; accepted: less")


def capacity_of(pool: Pool) -> float:
    """Bytes of all devices of a pool: a permit is for all of them."""
    return pool.device_memory_bytes * pool.gpus_per_node


def program_of(hello: Mapping[str, Any], name: PipelineId, roles: Mapping[str, str]) -> Program:
    """A new program without ranks. `roles`: default pools."""
    return Program(
        id=name,
        world=hello["world"],
        pools=hello.get("pools", {}) or dict(roles),
        need_bytes=hello.get("need_bytes", {}),
        host_bytes=hello.get("host_bytes", 0),
        slo=hello.get("slo"),
        weight=hello.get("weight", 1.0),
    )


def pipeline_of(program: Program) -> Pipeline:
    """The scheduler's pipeline of the program, on one device that stands for the whole pool."""
    need = max(program.need_bytes.values(), default=None)
    return Pipeline(
        id=program.id,
        num_steps=None,
        work_arrives=True,
        stages=(Stage.GENERATE, Stage.UPDATE),
        slo_slowdown=math.inf if program.slo is None else program.slo,
        footprint=Footprint(
            train_host_bytes=float(program.host_bytes),
            rollout_device_bytes=None if need is None else float(need),
            train_device_bytes=None if need is None else float(need),
        ),
    )


def roles_of(cluster: Cluster) -> dict[str, str]:
    """Default roles: the pool of each phase."""
    pools = {phase: cluster.pool_serving(phase) for phase in (Phase.ROLLOUT, Phase.TRAIN)}
    return {phase.value: pool.name for phase, pool in pools.items() if pool is not None}


def parse_request(message: Mapping[str, Any], cluster: Cluster) -> PhaseRequest:
    """A program's request for the pools of one phase. Raises UserError for unknown pools and unmet needs."""
    pools = list(dict.fromkeys(message["pools"]))
    unknown = [pool for pool in pools if pool not in cluster.pools]
    if unknown or not pools:
        raise UserError(f"pools {unknown or pools}; accepted: {', '.join(cluster.pools)}")
    need_bytes = message.get("need_bytes", {})
    for pool, need in need_bytes.items():
        check_need(cluster, pool, need)
    return PhaseRequest(
        number=message["id"],
        pools=tuple(pools),
        phase=message["phase"],
        kind=kind_of(cluster, pools, message["phase"]),
        units=message.get("units", 0),
        step=message.get("step"),
        need_bytes=need_bytes,
    )


def kind_of(cluster: Cluster, pools: Sequence[str], phase: str) -> tuple[Phase, ...]:
    """Phases whose devices a request needs. A pool of both phases takes the one of the request's name."""
    of_both = Phase.ROLLOUT if phase == Phase.ROLLOUT else Phase.TRAIN
    requested = [cluster.pools[name] for name in pools]
    kinds = {of_both if pool.serves_both_phases else pool.phase for pool in requested}
    return tuple(phase for phase in (Phase.ROLLOUT, Phase.TRAIN) if phase in kinds)
