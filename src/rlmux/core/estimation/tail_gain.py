"""What tails of rollouts free for others, where a device stands for a node of several GPUs.

    node   [ A dense ][ B dense            ][ C dense ...       7/8 of it while one tail is there, 6/8 with two
           [         ][ A's tail  ]         [ B's tail          1/8 of it each
                      ^ no more than `num_left` of A's trajectories are left

A rollout with a tail ends later than alone: it decodes what is left on fewer GPUs, and its own dense part has less than
the node while another's tail is there. Members of a group leave their nodes at one number of trajectories left, so that
a group has one such number, or none: the one with which its meta-iteration is shortest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from rlmux.core.estimation.cycles import PhaseLoad
from rlmux.core.model import Pipeline, RolloutTail

_ROUNDING = 1e-9


def is_tail(pipeline: Pipeline, device_fraction: float) -> bool:
    """Whether a rollout with this part of its nodes has left the rest of them to others: its state is there no more."""
    return pipeline.tail is not None and device_fraction <= pipeline.tail.device_fraction * (1.0 + _ROUNDING)


def numbers_left(tails: Sequence[RolloutTail | None]) -> list[int]:
    """Every number of trajectories left at which one of these tails may leave its nodes, the largest first."""
    return sorted({point.num_left for tail in tails if tail for point in tail.points}, reverse=True)


def with_tails(loads: Sequence[PhaseLoad], tails: Sequence[RolloutTail | None], num_left: int) -> list[PhaseLoad]:
    """The loads if each rollout that shares a node leaves it at so many trajectories; switches are not in them yet.

    What a rollout loses to another's tail is counted as that of the longest tail on its nodes. The node's work adds up
    so: where it is always busy, as much is lost to each tail as it holds.
    """
    num_members: dict[object, int] = {}
    for load in loads:
        for node in load.rollout_nodes:
            num_members[node] = num_members.get(node, 0) + 1
    tails_s = [
        tail_seconds(load.rollout_s, tail, num_left)
        if max(num_members[node] for node in load.rollout_nodes) > 1
        else (0.0, 0.0)
        for load, tail in zip(loads, tails, strict=True)
    ]
    made = []
    for index, load in enumerate(loads):
        growth_s, tail_s = tails_s[index]
        lost_s = max(
            (
                tails_s[other][1] * tail.device_fraction
                for other, tail in enumerate(tails)
                if tail and other != index and not set(load.rollout_nodes).isdisjoint(loads[other].rollout_nodes)
            ),
            default=0.0,
        )
        is_as_before = not (growth_s or tail_s or lost_s)
        made.append(
            load if is_as_before else replace(load, rollout_s=load.rollout_s + growth_s + lost_s, tail_s=tail_s)
        )
    return made


def tail_seconds(rollout_s: float, tail: RolloutTail | None, num_left: int) -> tuple[float, float]:
    """Seconds by which a rollout that leaves its nodes at so many trajectories ends later, and seconds of its tail;
    both 0 where it keeps them."""
    point = tail.at(num_left) if tail else None
    if point is None:
        return 0.0, 0.0
    return point.growth * rollout_s, (1.0 - point.begins + point.growth) * rollout_s
