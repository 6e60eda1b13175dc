"""A user's notice that a node goes away or stays, checked and converted to an event.

rlmux notice DIR rollout-0 --seconds 120 ─▶ NoticeGiven ─▶ pipelines leave; ExpectLoss ─▶ at that time NodeLost
rlmux notice DIR rollout-0 --back        ─▶ NodeJoined

A module of its own: it checks the names of nodes, and needs only a scheduler.
"""

from __future__ import annotations

from rlmux.core.errors import UserError
from rlmux.core.events import NodeJoined, NoticeGiven
from rlmux.core.model import Cluster, NodeId
from rlmux.core.scheduler import Scheduler


def notice_of(scheduler: Scheduler, text: str, seconds: float, now_s: float) -> tuple[NoticeGiven, str]:
    """The event of a notice, and its effect in words. Raises UserError for an absent node."""
    node, view = node_of(scheduler.cluster, text), scheduler.query.placement
    if view.is_lost(node) and not view.is_about_to_go(node):
        raise UserError(f"node {text!r} is gone already; accepted: one that is there")
    if not 0.0 <= seconds < 1e9:
        raise UserError(f"a notice of {seconds:g} seconds; accepted: 0 or more")
    outcome = (
        f"goes in {seconds:g} s; pipelines there leave at their next step boundaries, and no other is placed there"
    )
    return NoticeGiven(node=node, gone_at_s=now_s + seconds), outcome


def return_of(scheduler: Scheduler, text: str) -> tuple[NodeJoined, str]:
    """The event of a node that stays or is back, and its effect in words. Raises UserError without a notice."""
    node = node_of(scheduler.cluster, text)
    if not scheduler.query.placement.is_lost(node):
        raise UserError(f"node {text!r} is there; accepted: one that is gone, or about to go")
    return NodeJoined(node=node), "is there, and pipelines are placed on it again"


def node_of(cluster: Cluster, text: str) -> NodeId:
    """The node of this name, such as `rollout-0`. Raises UserError with the existing names."""
    pool, _, index = text.rpartition("-")
    known = cluster.pools.get(pool)
    num_nodes = 0 if known is None else known.num_nodes or 0
    if index.isdecimal() and int(index) < num_nodes:
        return NodeId(pool, int(index))
    raise UserError(f"no node {text!r}; accepted: {cluster.node_names()}")
