"""Spot nodes in a simulated run: notices and prices as they come, and what became of the pipelines that were there.

SpotTrace ─▶ kernel: NoticeGiven, NodeJoined, PriceChange (billed), PoolPriced (for the policy)
ExpectLoss ─▶ NodeLost, when its time has come
SpotFigures ◀─ each of these ─▶ SpotResult
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from rlmux.core.actions import ExpectLoss
from rlmux.core.errors import UserError
from rlmux.core.events import Event, NodeJoined, NodeLost, NoticeGiven, PipelineParked, PoolPriced
from rlmux.core.model import Cluster, NodeId, PipelineId
from rlmux.core.query import SchedulerQuery
from rlmux.sim.kernel import NODE_CHANGE, Kernel
from rlmux.sim.sim_state import SimPipeline
from rlmux.sim.spot_trace import SpotTrace

NOTICEABLE_PRICE_CHANGE = 0.05
"""Part of the last price sent to the scheduler by which a new price must differ to be sent: each one makes the policy
search anew, and a smaller change pays for no move."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFailure:
    """A node that is lost and comes back."""

    node: NodeId
    at_s: float
    down_s: float
    """Seconds until the node is back."""


class ExpectedLoss(NamedTuple):
    """The time at which a node is gone, unless it was lost before or is to go at another time."""

    node: NodeId
    at_s: float


class NodeChanges:
    """Schedules failures, a trace, and the losses that are expected."""

    def __init__(
        self, kernel: Kernel, cluster: Cluster, trace: SpotTrace | None, failures: Sequence[NodeFailure]
    ) -> None:
        """Raises UserError for a node or pool that the cluster does not have."""
        self._kernel = kernel
        _check_nodes(cluster, failures, trace or SpotTrace())
        for failure in failures:
            kernel.schedule(failure.at_s, NODE_CHANGE, NodeLost(time_s=failure.at_s, node=failure.node))
            back_s = failure.at_s + failure.down_s
            kernel.schedule(back_s, NODE_CHANGE, NodeJoined(time_s=back_s, node=failure.node))
        self._expected: dict[NodeId, float] = {}
        sent_usd = {name: pool.usd_per_gpu_hour for name, pool in cluster.pools.items()}
        for change in trace.prices if trace is not None else ():
            kernel.schedule(change.at_s, NODE_CHANGE, change)
            usd, last_usd = change.usd_per_gpu_hour, sent_usd[change.pool]
            if usd != last_usd and abs(usd - last_usd) >= NOTICEABLE_PRICE_CHANGE * last_usd:
                sent_usd[change.pool] = usd
                priced = PoolPriced(time_s=change.at_s, pool=change.pool, usd_per_gpu_hour=usd)
                kernel.schedule(change.at_s, NODE_CHANGE, priced)
        for reclaim in trace.reclaims if trace is not None else ():
            notice = NoticeGiven(time_s=reclaim.at_s, node=reclaim.node, gone_at_s=reclaim.gone_at_s)
            kernel.schedule(reclaim.at_s, NODE_CHANGE, notice)
            if math.isfinite(reclaim.back_at_s):
                joined = NodeJoined(time_s=reclaim.back_at_s, node=reclaim.node)
                kernel.schedule(reclaim.back_at_s, NODE_CHANGE, joined)

    def expect_loss(self, action: ExpectLoss) -> None:
        if action.at_s is None:
            self.forget(action.node)
            return
        self._expected[action.node] = action.at_s
        self._kernel.schedule(action.at_s, NODE_CHANGE, ExpectedLoss(action.node, action.at_s))

    def loss(self, expected: ExpectedLoss) -> NodeLost | None:
        """The loss, whose time has come; None where the node is not to go any more, or at another time."""
        if self._expected.get(expected.node) != expected.at_s:
            return None
        return NodeLost(time_s=expected.at_s, node=expected.node)

    def forget(self, node: NodeId) -> None:
        """The node is lost, or there."""
        self._expected.pop(node, None)


def _check_nodes(cluster: Cluster, failures: Sequence[NodeFailure], trace: SpotTrace) -> None:
    for what, changes in (("a failure", failures), ("a reclaim", trace.reclaims)):
        for change in changes:
            if not cluster.has_node(change.node):
                raise UserError(
                    f"{what} at {change.at_s:g} s names node {change.node}, which is not there; "
                    f"accepted: {cluster.node_names()}"
                )
    for price in trace.prices:
        if price.pool not in cluster.pools:
            raise UserError(
                f"a price at {price.at_s:g} s names pool {price.pool!r}, which is not there; "
                f"accepted: {', '.join(cluster.pools)}"
            )


class SpotFigures:
    """Follows the events of a run."""

    def __init__(self, query: SchedulerQuery, on_node: Callable[[NodeId], Iterable[SimPipeline]]) -> None:
        """`on_node`: pipelines on a node."""
        self._query = query
        self._on_node = on_node
        self._leaving: dict[PipelineId, None] = {}
        self.num_notices = self.num_moved = self.num_caught = 0
        self.lost_s = 0.0

    def observe(self, event: Event) -> None:
        """An event, before it is handled."""
        if type(event) is NoticeGiven:
            self.num_notices += 1
            self._leaving.update((pipeline, None) for pipeline in self._names(event.node))
        elif type(event) is PipelineParked and event.pipeline in self._leaving:
            del self._leaving[event.pipeline]
            self.num_moved += 1
        elif type(event) is NodeLost:
            for pipeline in self._names(event.node):
                self._leaving.pop(pipeline, None)
                self.num_caught += 1
                self.lost_s += max(0.0, event.time_s - self._query.pipeline(pipeline).step_began_s)

    def _names(self, node: NodeId) -> list[PipelineId]:
        """Pipelines on the node; fillers leave at once, and lose what they have begun."""
        on_node = [pipeline.arrival.pipeline for pipeline in self._on_node(node)]
        return [pipeline.id for pipeline in on_node if not pipeline.is_filler]
