"""The sub-stage graph: recorded, predicted, checked."""

from __future__ import annotations

import pytest

from rlmux.core.estimates import Curve, StepEstimates, StepHistory
from rlmux.core.graph import (
    Band,
    ShareRecord,
    StageRecord,
    SubStage,
    SubStageGraph,
    SubStageKey,
    graph_of_step,
    lookahead_tasks,
    predicted_graph,
    seconds_by_band,
)
from rlmux.core.lookahead import Problem, plan
from rlmux.core.model import DeviceId, PhaseSeconds, Pipeline, PipelineId, Stage

A = PipelineId("a")
D0, D1 = DeviceId("gpu", 0, 0), DeviceId("gpu", 1, 0)
STAGES = (Stage.GENERATE, Stage.UPDATE, Stage.PUBLISH)


def node(step: int, seconds: float = 1.0) -> SubStage:
    return SubStage(key=SubStageKey(A, step, D0, Stage.GENERATE, Band.DENSE), devices=(D0,), seconds=seconds)


def estimates(train_s: float = 4.0) -> StepEstimates:
    return StepEstimates(((Stage.UPDATE, train_s), (Stage.PUBLISH, 0.5)), (), 6.0)


def predicted(**fields) -> SubStageGraph:
    return predicted_graph(A, estimates(), stages=STAGES, rollout_devices=(D0, D1), train_devices=(D0,), **fields)


def recorded() -> SubStageGraph:
    return graph_of_step(
        A,
        3,
        [
            ShareRecord(device=D0, begin_s=10, end_s=20, reports=((11, 200, 0), (14, 100, 0), (18, 3, 0))),
            ShareRecord(device=D1, begin_s=10, end_s=16, reports=((11, 4, 0), (12, 0, 4), (14, 4, 0))),
        ],
        [StageRecord(stage=Stage.UPDATE, devices=(D0,), begin_s=20, end_s=25)],
    )


def test_a_recorded_share_is_cut_where_its_character_changes():
    bands = [(n.key.worker, n.key.band, n.seconds) for n in recorded().nodes if n.key.worker]
    assert bands == [
        (D0, Band.DENSE, 4), (D0, Band.TAIL, 6),
        (D1, Band.TAIL, 2), (D1, Band.TOOL_WAIT, 2), (D1, Band.TAIL, 2),
    ]  # fmt: skip


def test_training_waits_for_the_last_band_of_every_share():
    graph = recorded()
    update = len(graph.nodes) - 1
    assert [graph.nodes[i].key.worker for i in graph.predecessors(update)] == [D0, D1]
    assert graph.critical_path_s == 15
    assert seconds_by_band(graph)[Band.TOOL_WAIT] == 2


def test_on_policy_rollouts_wait_for_the_version_before_and_stale_ones_for_an_older():
    def versions_needed(graph: SubStageGraph, step: int) -> set[int]:
        return {
            graph.nodes[before].key.step
            for index, one in enumerate(graph.nodes)
            if one.key.step == step and one.key.band is Band.DENSE
            for before in graph.predecessors(index)
            if graph.nodes[before].key.band is Band.SYNC
        }

    assert versions_needed(predicted(num_steps=3), 3) == {2}
    assert versions_needed(predicted(num_steps=3, staleness=1), 3) == {1}
    assert predicted(num_steps=3, staleness=1).critical_path_s < predicted(num_steps=3).critical_path_s


def test_a_graph_refuses_cycles_twins_and_negative_seconds():
    with pytest.raises(ValueError, match="forward"):
        SubStageGraph(nodes=(node(1), node(2)), edges=((1, 0),))
    with pytest.raises(ValueError, match="twice"):
        SubStageGraph(nodes=(node(1), node(1)), edges=())
    with pytest.raises(ValueError, match="seconds"):
        SubStageGraph(nodes=(node(1, -1.0),), edges=())


def test_the_look_ahead_sees_a_share_as_one_task_with_a_tail():
    tasks = lookahead_tasks([predicted(num_steps=1)])
    assert [(t.kind, t.seconds, t.tail_s) for t in tasks[:2]] == [("dense", 6.0, 3.0)] * 2
    assert tasks[2].needs == (0, 1)


def test_alone_a_graph_takes_its_critical_path():
    graph = predicted(num_steps=2)
    assert plan(Problem(tasks=lookahead_tasks([graph]))).makespan_s == pytest.approx(graph.critical_path_s)


# --- estimates


def history(curves: list[list[tuple[float, int]]]) -> StepHistory:
    pipeline = Pipeline(id=A, num_steps=None, estimate=PhaseSeconds(rollout_s=9.0, train_s=2.0))
    made = StepHistory(pipeline)
    for step, reports in enumerate(curves, 1):
        made.open_rollout(step, (D0,), 0.0)
        for seconds, active in reports[:-1]:
            made.progress(D0, active, seconds)
        made.share_ended(D0, reports[-1][0])
    return made


SHORT, LONG = [(1.0, 32), (4.0, 8), (6.0, 0)], [(1.0, 32), (4.2, 8), (12.0, 0)]


def test_bands_begin_as_in_the_last_steps_and_the_tails_end_is_a_range():
    known = history([SHORT, LONG, SHORT]).estimates()
    assert known.share_s == 6.0
    assert known.tail_s == 2.0
    left = known.remaining(8, run_s=4.0)
    assert (left.low_s, left.median_s, left.high_s) == (2.0, 2.0, pytest.approx(7.8))


def test_the_live_count_corrects_the_prediction():
    known = history([SHORT, SHORT, SHORT]).estimates()
    assert known.remaining(8, run_s=9.0).median_s == 2.0  # late: still 8 to go
    assert known.remaining(None, run_s=4.0).median_s == 2.0


def test_before_the_first_step_the_users_estimate_stands_in():
    known = history([]).estimates()
    assert (known.share_s, known.train_s) == (9.0, 2.0)
    assert known.remaining(None, run_s=4.0).median_s == 5.0


def test_a_share_that_was_moved_does_not_teach():
    made = history([SHORT])
    made.open_rollout(2, (D0, D1), 0.0)
    made.moved(D1, D0, 4, 0.4)
    made.share_ended(D0, 99.0)
    assert made.estimates().share_s == 6.0
    assert made.estimates().move_s == pytest.approx(0.1)


def test_a_curve_knows_when_it_fell_for_good():
    curve = Curve((0.0, 1.0, 2.0, 3.0, 5.0), (8, 4, 6, 2, 0))
    assert curve.time_to(4) == 3.0
    assert curve.time_to(8) == 0.0
