"""The sub-stage graph: recorded and checked."""

from __future__ import annotations

import pytest

from rlmux.core.model import DeviceId, PipelineId, Stage, SubStage
from rlmux.report.figures.step_graph import (
    GraphNode,
    NodeKey,
    ShardRecord,
    StageRecord,
    SubStageGraph,
    graph_of_step,
    seconds_by_sub_stage,
)

A = PipelineId("a")
D0, D1 = DeviceId("gpu", 0, 0), DeviceId("gpu", 1, 0)


def node(step: int, seconds: float = 1.0) -> GraphNode:
    return GraphNode(key=NodeKey(A, step, D0, Stage.GENERATE, SubStage.DENSE_DECODE), devices=(D0,), seconds=seconds)


def recorded() -> SubStageGraph:
    return graph_of_step(
        A,
        3,
        [
            ShardRecord(device=D0, begin_s=10, end_s=20, reports=((11, 200, 0), (14, 100, 0), (18, 3, 0))),
            ShardRecord(device=D1, begin_s=10, end_s=16, reports=((11, 4, 0), (12, 0, 4), (14, 4, 0))),
        ],
        [StageRecord(stage=Stage.UPDATE, devices=(D0,), begin_s=20, end_s=25)],
        dense_threshold=128,
    )


def test_a_recorded_shard_is_cut_where_its_character_changes():
    pieces = [(n.key.worker, n.key.sub_stage, n.seconds) for n in recorded().nodes if n.key.worker]
    assert pieces == [
        (D0, SubStage.DENSE_DECODE, 4), (D0, SubStage.TAIL_DECODE, 6),
        (D1, SubStage.TAIL_DECODE, 2), (D1, SubStage.TOOL_WAIT, 2), (D1, SubStage.TAIL_DECODE, 2),
    ]  # fmt: skip


def test_training_waits_for_the_last_piece_of_every_shard():
    graph = recorded()
    update = len(graph.nodes) - 1
    assert [graph.nodes[i].key.worker for i in graph.predecessors(update)] == [D0, D1]
    assert graph.critical_path_s == 15
    assert seconds_by_sub_stage(graph)[SubStage.TOOL_WAIT] == 2


def test_a_graph_refuses_cycles_twins_and_negative_seconds():
    with pytest.raises(ValueError, match="forward"):
        SubStageGraph(nodes=(node(1), node(2)), edges=((1, 0),))
    with pytest.raises(ValueError, match="twice"):
        SubStageGraph(nodes=(node(1), node(1)), edges=())
    with pytest.raises(ValueError, match="seconds"):
        SubStageGraph(nodes=(node(1, -1.0),), edges=())
