"""`most-idle`: the group with the highest idle share, on its most idle rollout nodes (RollMux 8.2, Greedy).

A new group only when no group has room. SLOs play no part. A group's idle share is 1 - busy seconds /
(nodes x period) in its meta-iteration, over rollout and training nodes together.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from rlmux.core.model import Pipeline
from rlmux.core.placement import GroupLoad, PlacementChoice, PlacementView, Refusal, Relocation
from rlmux.core.policies.candidates import any_room, founding, impossible, queue
from rlmux.core.policies.dispatching import first_come
from rlmux.core.views import GroupView, RunWork


@dataclass(frozen=True, slots=True, kw_only=True)
class MostIdle:
    name: str = "most-idle"
    reacts_to_progress: bool = False

    def place(self, pipeline: Pipeline, view: PlacementView) -> PlacementChoice | Refusal:
        refusal = impossible(pipeline, view)
        if refusal is not None:
            return refusal
        best: PlacementChoice | None = None
        best_rank = (math.inf, math.inf)
        for group in view.groups():
            rank = -idle_share(group)
            if rank > best_rank[0]:
                continue
            for choice in any_room(group, pipeline):
                load_s = sum(group.rollout_loads_s[group.rollout_nodes.index(node)] for node in choice.rollout_nodes)
                if (rank, load_s) < best_rank:
                    best, best_rank = choice, (rank, load_s)
        return best or founding(pipeline, view) or queue(pipeline, view)

    def rebalance(self, view: PlacementView) -> tuple[Relocation, ...]:
        return ()

    def dispatch(self, view: GroupView) -> Iterator[RunWork]:
        return first_come(view)


def idle_share(group: GroupLoad) -> float:
    """Of all node-seconds in one meta-iteration; 1 where no duration is known."""
    if group.period_s == 0:
        return 1.0
    num_nodes = len(group.rollout_nodes) + len(group.train_nodes)
    busy_s = sum(group.rollout_loads_s) + group.train_load_s * len(group.train_nodes)
    return 1.0 - busy_s / (num_nodes * group.period_s)
