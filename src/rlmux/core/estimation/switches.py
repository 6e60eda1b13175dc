"""What switches add to the phases of pipelines that share devices, by their estimates.

    all states of a device fit it together    no state is evicted                                     nothing
    they do not                               each phase finds its state evicted by those in between  a warm switch
                                                                                                      for each phase

A cycle is the worst case of a memory that evicts the least recently used: states that do not all fit are never there
when their phase comes next. A state alone on its device stays there. The two states of one pipeline that has both
phases on the same nodes are two.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from rlmux.core.model import NodeId, Pipeline, Pool

Tenant = tuple[Pipeline, Sequence[NodeId], Sequence[NodeId]]
"""A pipeline, its rollout nodes, its training nodes."""


def num_fitting(sizes: Iterable[float | None], memory_bytes: float) -> float:
    """How many of these states fit a device together, whichever they are; infinite for all of them."""
    free_bytes = memory_bytes
    known = list(sizes)
    if len(known) > 1 and None in known:
        return 1
    for count, size in enumerate(sorted((size for size in known if size is not None), reverse=True)):
        free_bytes -= size
        if free_bytes < 0.0:
            return max(1, count)
    return math.inf


def switch_seconds(tenants: Sequence[Tenant], pools: Mapping[str, Pool]) -> list[tuple[float, float]]:
    """Seconds added to each tenant's rollout and training, in their order."""
    if not any(pipeline.switch for pipeline, _, _ in tenants):
        return [(0.0, 0.0)] * len(tenants)
    sizes: dict[NodeId, list[float | None]] = {}
    for pipeline, rollout_nodes, train_nodes in tenants:
        footprint = pipeline.footprint
        for nodes, size in (
            (rollout_nodes, footprint.rollout_device_bytes),
            (train_nodes, footprint.train_device_bytes),
        ):
            for node in nodes:
                sizes.setdefault(node, []).append(size)
    crowded = {
        node
        for node, there in sizes.items()
        if len(there) > 1 and num_fitting(there, pools[node.pool].device_memory_bytes) < math.inf
    }
    return [
        (
            pipeline.switch.rollout_s if pipeline.switch and not crowded.isdisjoint(rollout_nodes) else 0.0,
            pipeline.switch.train_s if pipeline.switch and not crowded.isdisjoint(train_nodes) else 0.0,
        )
        for pipeline, rollout_nodes, train_nodes in tenants
    ]
