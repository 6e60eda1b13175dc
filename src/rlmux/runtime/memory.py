"""Memory is added up before anything starts: what cannot fit is refused with the numbers.

A device of this machine is a CPU core with its share of the memory: the total over the number of devices, unless the
file gives the pool's own figures.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import psutil

from rlmux.core.errors import RefusedError
from rlmux.core.model import Cluster, Phase
from rlmux.rl.footprint import footprint_of
from rlmux.runtime.backend import Submission

_USABLE = 0.9
"""Of the machine's memory; the rest is the system's and the controller's."""


def with_machine_memory(cluster: Cluster) -> Cluster:
    """The cluster with this machine's memory dealt out to devices whose memory the file does not give."""
    num_devices = sum((pool.num_nodes or 0) * pool.devices_per_node for pool in cluster.pools.values())
    share = psutil.virtual_memory().total * _USABLE / max(1, num_devices)
    return Cluster(
        pools={
            name: replace(
                pool,
                device_memory_bytes=min(pool.device_memory_bytes, share),
                host_memory_bytes=min(pool.host_memory_bytes, share * pool.devices_per_node),
            )
            for name, pool in cluster.pools.items()
        }
    )


def with_footprint(submission: Submission) -> Submission:
    """The submission with its footprint estimated from its plan, where the file does not give it."""
    given = submission.pipeline.footprint
    if given.rollout_device_bytes is not None and given.train_device_bytes is not None:
        return submission
    estimated = footprint_of(submission.plan)
    footprint = replace(
        given,
        rollout_device_bytes=_first(given.rollout_device_bytes, estimated.rollout_device_bytes),
        train_device_bytes=_first(given.train_device_bytes, estimated.train_device_bytes),
        rollout_host_bytes=given.rollout_host_bytes or estimated.rollout_host_bytes,
        train_host_bytes=given.train_host_bytes or estimated.train_host_bytes,
    )
    return replace(submission, pipeline=replace(submission.pipeline, footprint=footprint))


def check_each_fits(cluster: Cluster, submissions: Sequence[Submission]) -> None:
    """Raises RefusedError for the first pipeline that does not fit a device of its pools even alone."""
    for submission in submissions:
        footprint = submission.pipeline.footprint
        for phase, device_bytes, host_bytes in (
            (Phase.ROLLOUT, footprint.rollout_device_bytes, footprint.rollout_host_bytes),
            (Phase.TRAIN, footprint.train_device_bytes, footprint.train_host_bytes),
        ):
            pool = cluster.pool_for(phase)
            if pool is None:
                continue
            _check(submission.plan.name, phase, "device", device_bytes or 0.0, pool.device_memory_bytes)
            _check(submission.plan.name, phase, "host", host_bytes, pool.host_memory_bytes)


def _check(name: str, phase: Phase, kind: str, need: float, capacity: float) -> None:
    if need > capacity and not math.isinf(capacity):
        raise RefusedError(
            f"pipeline {name}: its {phase} worker needs {need / 1e9:.2f} GB of {kind} memory, and a {phase} {kind} has "
            f"{capacity / 1e9:.2f} GB; make the model, rollout.slots, rollout.max_new_tokens or "
            "algorithm.micro_batch_size smaller"
        )


def _first(given: float | None, estimated: float | None) -> float | None:
    return estimated if given is None else given
