"""How many of the nodes there are had better roll out, and how many train (StreamRL's resource allocation).

    seconds of a rollout on x nodes ─┐
    seconds of training on y nodes ──┴─▶ every x + y <= n ─▶ the split with the shortest step

    overlapping (one step off)   step = max(T_rollout(x), T_train(y))
    one after the other          step = T_rollout(x) + T_train(y)

The search is by enumeration, so the seconds may be of any shape: a rollout is bound by its longest answer from some
number of nodes on. Of equally short steps the one on fewer nodes is taken, then that with fewer rollout nodes: nodes
that shorten nothing are given back.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

from rlmux.core.errors import UserError
from rlmux.core.model import PHASE_BY_STAGE, Phase, Pipeline, PipelineKind, Stage
from rlmux.sim.workloads.arrivals import MAX_NODES, Arrival, Workload
from rlmux.sim.workloads.recorded import RecordedSeconds

Seconds = Callable[[int], float]
"""Solo seconds of a phase of one step on so many nodes, 1 or more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSplit:
    """Nodes for each phase, and what a step takes on them."""

    num_rollout_nodes: int
    num_train_nodes: int
    rollout_s: float
    train_s: float
    overlaps: bool
    """Whether the next rollout goes on while a step trains."""

    @property
    def step_s(self) -> float:
        """Seconds of a step, without switches and sync."""
        return max(self.rollout_s, self.train_s) if self.overlaps else self.rollout_s + self.train_s

    @property
    def num_nodes(self) -> int:
        return self.num_rollout_nodes + self.num_train_nodes


def split_of(
    rollout_s: Seconds, train_s: Seconds, num_rollout_nodes: int, num_train_nodes: int, overlaps: bool
) -> NodeSplit:
    """A given split with its seconds."""
    return NodeSplit(
        num_rollout_nodes=num_rollout_nodes,
        num_train_nodes=num_train_nodes,
        rollout_s=rollout_s(num_rollout_nodes),
        train_s=train_s(num_train_nodes),
        overlaps=overlaps,
    )


def best_split(rollout_s: Seconds, train_s: Seconds, num_nodes: int, *, overlaps: bool) -> NodeSplit:
    """The split of at most so many nodes with the shortest step. Raises ValueError for fewer than two."""
    if num_nodes < 2:
        raise ValueError(f"{num_nodes} nodes cannot be split; accepted: 2 or more")
    by_rollout, by_train = cache(rollout_s), cache(train_s)
    return min(
        (
            split_of(by_rollout, by_train, num_rollout, num_train, overlaps)
            for num_rollout in range(1, num_nodes)
            for num_train in range(1, num_nodes - num_rollout + 1)
        ),
        key=lambda split: (split.step_s, split.num_nodes, split.num_rollout_nodes),
    )


def wants_another_rollout_node(
    rollout_s: Seconds, train_s: Seconds, num_rollout_nodes: int, num_train_nodes: int
) -> bool:
    """StreamRL's rule for a run whose answers grow: rollouts take longer than training by what one more node saves."""
    now_s = rollout_s(num_rollout_nodes)
    saved_s = now_s - rollout_s(num_rollout_nodes + 1)
    return saved_s > 0.0 and now_s - train_s(num_train_nodes) >= saved_s


def estimated_seconds(pipeline: Pipeline) -> tuple[Seconds, Seconds]:
    """Both phases in proportion to their nodes, from an estimate on the requested ones: the best case, as
    nothing is known of its longest answer."""
    estimate = pipeline.estimate
    assert estimate is not None, "files read for planning have estimates"
    rollout, train = estimate.rollout_s * pipeline.num_rollout_nodes, estimate.train_s * pipeline.num_train_nodes
    return (lambda count: rollout / count), (lambda count: train / count)


def recorded_seconds(world: RecordedSeconds, *, devices_per_node: int, num_train_nodes: int) -> tuple[Seconds, Seconds]:
    """Means over steps of a finished run: its answers decoded again on other devices, its training in proportion.

    `num_train_nodes` are those that it trained on. Raises UserError for a run whose log has no answers.
    """
    known = tuple(world.rollouts.values())
    if not known:
        raise UserError(
            "the run's log has no tokens of trajectories; accepted: a run of rlmux run, or without --from-run"
        )
    train_stages = [stage for stage in world.by_stage if PHASE_BY_STAGE[stage] is Phase.TRAIN]
    train_s = sum(world.by_stage[stage] for stage in train_stages if stage is not Stage.SFT_WARMUP)

    def rollout_s(num_nodes: int) -> float:
        num_devices = num_nodes * devices_per_node
        return sum(
            max(rollout.shard(index, num_devices).until_over(1.0) for index in range(num_devices)) for rollout in known
        ) / len(known)

    return rollout_s, lambda count: train_s * num_train_nodes / count


def splits(workload: Workload, num_nodes: int, recorded: Workload | None = None) -> list[dict[str, Any]]:
    """Each trained pipeline of the workload alone on so many nodes, beside its requested nodes.

        [{"pipeline", "overlaps", "rollout_nodes", "train_nodes", "rollout_s", "train_s", "step_s",
          "asked": {the same five}, "gain", "wants_another_rollout_node"}]

    `recorded`: a finished run that has pipelines of the same names; without, seconds are in proportion to nodes. Raises
    UserError for a pipeline that the run does not have.
    """
    if num_nodes > MAX_NODES:
        raise UserError(f"--split {num_nodes}: every split is tried; accepted: 2 to {MAX_NODES:,} nodes")
    arrivals = {} if recorded is None else {arrival.pipeline.id: arrival for arrival in recorded.arrivals}
    rows = []
    for arrival in workload.arrivals:
        pipeline = arrival.pipeline
        if pipeline.kind is not PipelineKind.PLANNED:
            continue
        if recorded is None:
            rollout_s, train_s = estimated_seconds(pipeline)
        elif pipeline.id not in arrivals:
            names = ", ".join(map(str, arrivals))
            raise UserError(f"--from-run {recorded.name}: it has no pipeline {pipeline.id}; it has {names}")
        else:
            rollout_s, train_s = _seconds_of(arrivals[pipeline.id], recorded)
        overlaps = pipeline.staleness > 0
        given = split_of(rollout_s, train_s, pipeline.num_rollout_nodes, pipeline.num_train_nodes, overlaps)
        best = best_split(rollout_s, train_s, num_nodes, overlaps=overlaps)
        rows.append(
            {
                "pipeline": str(pipeline.id),
                "overlaps": overlaps,
                **_row(best),
                "asked": _row(given),
                "gain": given.step_s / best.step_s if best.step_s else 1.0,
                "wants_another_rollout_node": overlaps
                and wants_another_rollout_node(rollout_s, train_s, given.num_rollout_nodes, given.num_train_nodes),
            }
        )
    return rows


def _seconds_of(arrival: Arrival, recorded: Workload) -> tuple[Seconds, Seconds]:
    pool, world = recorded.cluster.pool_serving(Phase.ROLLOUT), arrival.world
    assert pool is not None, "a run has devices for its rollouts"
    assert isinstance(world, RecordedSeconds), "a client's batches are left out"
    return recorded_seconds(
        world, devices_per_node=pool.devices_per_node, num_train_nodes=arrival.pipeline.num_train_nodes
    )


def _row(split: NodeSplit) -> dict[str, Any]:
    return {
        "rollout_nodes": split.num_rollout_nodes,
        "train_nodes": split.num_train_nodes,
        "rollout_s": split.rollout_s,
        "train_s": split.train_s,
        "step_s": split.step_s,
    }
