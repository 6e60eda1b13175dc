"""The sub-stage graph: a step of a pipeline as pieces of one compute character, for each worker.

    shard on a worker       PREFILL ─▶ DENSE_DECODE ─▶ TAIL_DECODE ─┐        order inside a worker
    shard on another        PREFILL ─▶ DENSE_DECODE ─▶ TAIL_DECODE ─┼─▶ reward ─▶ OLD_LOGPROBS ─▶ UPDATE ─▶ publish
                            TAIL_DECODE ─▶ TOOL_WAIT ─▶ TAIL_DECODE ┘        barrier: training waits for every shard

`graph_of_step` makes it from the records of a step, `graph_of_plan` from its plan. There are no edges between
pipelines: they meet on devices only, and that is the look-ahead's affair.

Invariant, checked on construction: edges go forward in the list of nodes, so the graph has no cycle; nodes of one shard
follow each other; no two nodes have the same key.

A module of its own: it is the graph as data, which pages and tests read without a drawing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from rlmux.core.estimation.estimates import StepPlan
from rlmux.core.model import SUB_STAGE_BY_STAGE, DeviceId, PipelineId, Stage, SubStage, decode_sub_stage


class NodeKey(NamedTuple):
    """Which piece of which step."""

    pipeline: PipelineId
    step: int
    worker: DeviceId | None
    """Device of a rollout shard; None for stages of all training devices, or of no device."""
    stage: Stage
    sub_stage: SubStage | None
    """None for stages without a compute character: rewards and publishing."""
    position: int = 0
    """Number of earlier pieces of the same shard, which may be of the same sub-stage."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphNode:
    """A sub-stage of one step on one worker, or a whole stage."""

    key: NodeKey
    devices: tuple[DeviceId, ...]
    seconds: float
    """Seconds that it took on its whole devices."""
    num_tokens: int = 0
    begin_s: float | None = None
    """Time at which it began, on the run's clock; None where it was not recorded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SubStageGraph:
    """Nodes in a topological order, and the edges along which they wait."""

    nodes: tuple[GraphNode, ...]
    edges: tuple[tuple[int, int], ...]
    """Pairs (earlier, later) of indices into `nodes`: the later node waits for the earlier one."""

    def __post_init__(self) -> None:
        keys = [node.key for node in self.nodes]
        if len(set(keys)) != len(keys):
            twice = next(key for index, key in enumerate(keys) if key in keys[:index])
            raise ValueError(f"sub-stage {twice} is in the graph twice")
        for earlier, later in self.edges:
            if not 0 <= earlier < later < len(self.nodes):
                raise ValueError(f"edge ({earlier}, {later}) does not go forward among {len(self.nodes)} nodes")
        for node in self.nodes:
            if not node.seconds >= 0.0:
                raise ValueError(f"sub-stage {node.key} takes {node.seconds} seconds")

    def predecessors(self, index: int) -> tuple[int, ...]:
        """Indices of the nodes that a node waits for."""
        return tuple(earlier for earlier, later in self.edges if later == index)

    def successors(self, index: int) -> tuple[int, ...]:
        """Indices of the nodes that wait for a node."""
        return tuple(later for earlier, later in self.edges if earlier == index)

    def longest_paths(self) -> tuple[float, ...]:
        """Seconds from each node's begin to the end of the longest chain after it, by index."""
        longest = [node.seconds for node in self.nodes]
        for earlier, later in sorted(self.edges, reverse=True):
            longest[earlier] = max(longest[earlier], self.nodes[earlier].seconds + longest[later])
        return tuple(longest)

    def critical_path(self) -> tuple[int, ...]:
        """Indices of the chain that determines how soon all nodes can have ended, first node first."""
        if not self.nodes:
            return ()
        longest = self.longest_paths()
        sources = [index for index in range(len(self.nodes)) if not self.predecessors(index)]
        path = [max(sources, key=lambda index: longest[index])]
        while following := self.successors(path[-1]):
            path.append(max(following, key=lambda index: longest[index]))
        return tuple(path)

    @property
    def critical_path_s(self) -> float:
        """Seconds of the critical path; 0 for an empty graph."""
        return max(self.longest_paths(), default=0.0)


# --- from a record ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardRecord:
    """The rollout shard of one worker in one step, as it was recorded."""

    device: DeviceId
    begin_s: float
    end_s: float
    reports: tuple[tuple[float, int, int], ...] = ()
    """(time, sequences decoding, sequences waiting for their environment) of every report."""
    num_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StageRecord:
    """Any other stage of the step, as it was recorded."""

    stage: Stage
    devices: tuple[DeviceId, ...]
    begin_s: float
    end_s: float


def graph_of_step(
    pipeline: PipelineId,
    step: int,
    shards: Sequence[ShardRecord],
    stages: Sequence[StageRecord],
    dense_threshold: int,
    *,
    min_part: float = 0.02,
) -> SubStageGraph:
    """The step as it went. Sub-stages shorter than `min_part` of their shard are joined to the one before them."""
    return _graph(pipeline, step, [(shard, _sub_stages(shard, dense_threshold, min_part)) for shard in shards], stages)


def graph_of_plan(
    pipeline: PipelineId,
    step: int,
    rollout_devices: Sequence[DeviceId],
    train_devices: Sequence[DeviceId],
    plan: StepPlan,
) -> SubStageGraph:
    """The step as it was planned, on devices that it has alone; it begins at second 0."""
    end_s, begun = plan.shard_s, plan.sub_stages[0][1]
    begins = [(0.0, begun), *((end_s - left_s, later) for left_s, later in plan.sub_stages_after(begun, end_s))]
    ends = [*(begin_s for begin_s, _ in begins[1:]), end_s]
    pieces = [(sub_stage, begin_s, until_s) for (begin_s, sub_stage), until_s in zip(begins, ends, strict=True)]
    shards = [(ShardRecord(device=device, begin_s=0.0, end_s=end_s), pieces) for device in rollout_devices]
    stages = []
    for stage, seconds in sorted((*plan.waits, *plan.training), key=lambda entry: list(Stage).index(entry[0])):
        devices = tuple(train_devices) if stage in SUB_STAGE_BY_STAGE else ()
        stages.append(StageRecord(stage=stage, devices=devices, begin_s=end_s, end_s=end_s + seconds))
        end_s += seconds
    return _graph(pipeline, step, shards, stages)


def _graph(
    pipeline: PipelineId,
    step: int,
    shards: Sequence[tuple[ShardRecord, Sequence[tuple[SubStage, float, float]]]],
    stages: Sequence[StageRecord],
) -> SubStageGraph:
    """Shards, each with its pieces as (sub-stage, begin, end), then the other stages one after another."""
    nodes: list[GraphNode] = []
    edges: list[tuple[int, int]] = []
    lasts: list[int] = []
    for shard, pieces in shards:
        previous = None
        for position, (sub_stage, begin_s, end_s) in enumerate(pieces):
            part = (end_s - begin_s) / max(shard.end_s - shard.begin_s, 1e-12)
            nodes.append(
                GraphNode(
                    key=NodeKey(pipeline, step, shard.device, Stage.GENERATE, sub_stage, position),
                    devices=(shard.device,),
                    seconds=end_s - begin_s,
                    num_tokens=round(shard.num_tokens * part),
                    begin_s=begin_s,
                )
            )
            if previous is not None:
                edges.append((previous, len(nodes) - 1))
            previous = len(nodes) - 1
        if previous is not None:
            lasts.append(previous)
    for stage in sorted(stages, key=lambda record: record.begin_s):
        nodes.append(
            GraphNode(
                key=NodeKey(pipeline, step, None, stage.stage, SUB_STAGE_BY_STAGE.get(stage.stage)),
                devices=stage.devices,
                seconds=stage.end_s - stage.begin_s,
                begin_s=stage.begin_s,
            )
        )
        edges += [(last, len(nodes) - 1) for last in lasts]
        lasts = [len(nodes) - 1]
    return SubStageGraph(nodes=tuple(nodes), edges=tuple(edges))


def _sub_stages(shard: ShardRecord, dense_threshold: int, min_part: float) -> list[tuple[SubStage, float, float]]:
    """(sub-stage, begin, end) in order; consecutive reports of one character are one sub-stage."""
    found: list[tuple[SubStage, float, float]] = []
    times = [shard.begin_s, *(at_s for at_s, _, _ in shard.reports), shard.end_s]
    first = shard.reports[0][1] if shard.reports else 0
    counts = [(first, 0), *((active, waiting) for _, active, waiting in shard.reports)]
    for (active, waiting), begin_s, end_s in zip(counts, times, times[1:], strict=False):
        if end_s <= begin_s:
            continue
        is_waiting = active == 0 and waiting > 0
        sub_stage = SubStage.TOOL_WAIT if is_waiting else decode_sub_stage(active, dense_threshold)
        is_short = end_s - begin_s < min_part * (shard.end_s - shard.begin_s)
        if found and (found[-1][0] is sub_stage or is_short):
            found[-1] = (found[-1][0], found[-1][1], end_s)
        else:
            found.append((sub_stage, begin_s, end_s))
    return found


def seconds_by_sub_stage(graph: SubStageGraph) -> Mapping[SubStage | None, float]:
    """Device seconds of each sub-stage: what there is to share or to fill."""
    total: dict[SubStage | None, float] = {}
    for node in graph.nodes:
        total[node.key.sub_stage] = total.get(node.key.sub_stage, 0.0) + node.seconds * max(1, len(node.devices))
    return total
