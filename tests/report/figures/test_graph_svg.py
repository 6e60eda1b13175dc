"""The picture of a step's sub-stages."""

from __future__ import annotations

import re
from functools import partial
from itertools import pairwise
from xml.etree import ElementTree

import pytest
from tests.log_script import ROLLOUT

from rlmux.core.errors import UserError
from rlmux.core.events import ChunkFinished, StageFinished
from rlmux.core.model import DeviceId, PipelineId, Stage, SubStage
from rlmux.core.scheduler import Scheduler
from rlmux.report.figures.graph_svg import draw, step_graph, write_graph
from rlmux.report.figures.step_graph import ShardRecord, StageRecord, SubStageGraph, graph_of_step
from rlmux.runtime.launch import scheduler_of

D0, D1 = DeviceId("gpu", 0, 0), DeviceId("gpu", 1, 0)


def graph():
    return graph_of_step(
        PipelineId("a<b"),
        1,
        [
            ShardRecord(device=D0, begin_s=5, end_s=15, reports=((6, 200, 0), (9, 20, 0))),
            ShardRecord(device=D1, begin_s=5, end_s=12, reports=((6, 20, 0),)),
        ],
        [
            StageRecord(stage=Stage.UPDATE, devices=(D0, D1), begin_s=15, end_s=20),
            StageRecord(stage=Stage.PUBLISH, devices=(), begin_s=20, end_s=20.01),
        ],
        dense_threshold=128,
    )


def test_every_piece_has_a_box_and_every_edge_an_arrow():
    made = graph()
    root = ElementTree.fromstring(draw([("as it went", made)], title="a<b, step 1"))
    kinds = [element.tag.rpartition("}")[2] for element in root]
    assert kinds.count("g") == len(made.nodes)
    assert kinds.count("path") == len(made.edges)
    assert "a<b, step 1" in "".join(root.itertext())


def test_boxes_of_a_column_do_not_overlap_and_later_pieces_are_lower():
    text = draw([("planned at 3 s", graph()), ("as it went", graph())])
    boxes: dict[str, list[tuple[float, float]]] = {}
    for x, y, height in re.findall(r'd="M([\d.]+) ([\d.]+)h[\d.]+v([\d.]+)', text):
        boxes.setdefault(x, []).append((float(y), float(height)))
    assert len(boxes) == 2 * 4
    for column in boxes.values():
        for (y, height), (below, _) in pairwise(column):
            assert y + height <= below


def test_the_critical_path_is_drawn_dark():
    made = graph()
    assert draw([("as it went", made)]).count('class="c"') == len(made.critical_path()) - 1


def test_both_parts_are_on_one_scale():
    short = graph_of_step(PipelineId("a"), 1, [ShardRecord(device=D0, begin_s=0, end_s=7.5)], [], dense_threshold=128)
    text = draw([("planned at 3 s", short), ("as it went", graph())])
    first, *_ = re.findall(r'd="M[\d.]+ [\d.]+h[\d.]+v([\d.]+)h', text)
    assert float(first) + 2 == pytest.approx(460 / 2, rel=0.01)
    assert "planned at 3 s" in text


def test_a_plan_without_anything_known_says_so():
    text = draw([("planned at 0 s", SubStageGraph(nodes=(), edges=())), ("as it went", graph())])
    assert "nothing was known yet" in text
    assert "nothing was known yet" not in draw([("as it went", graph())])


def test_the_picture_is_wide_enough_for_its_note():
    parts = [("as it went", graph())]
    narrow, wide = (ElementTree.fromstring(draw(parts, note="x" * length)).get("width") for length in (1, 300))
    assert float(wide) > float(narrow)


def unloadable() -> Scheduler:
    raise UserError("policy 'mine:Mine': no module 'mine'")


def test_a_run_whose_policy_is_gone_is_drawn_as_it_went(tmp_path, alternating_run):
    alternating_run().write(tmp_path)
    text = write_graph(tmp_path, "sort:1", unloadable).read_text(encoding="utf-8")
    assert "the planned graph cannot be drawn: policy 'mine:Mine': no module 'mine'" in text
    assert "as it went" in text
    assert "planned at" not in text


def test_a_run_that_decides_otherwise_is_drawn_as_it_went(tmp_path, alternating_run):
    alternating_run().write(tmp_path)
    text = write_graph(tmp_path, "sort:2", partial(scheduler_of, tmp_path)).read_text(encoding="utf-8")
    assert "the planned graph cannot be drawn: at " in text
    assert "as it went" in text


def test_a_pipeline_counts_decode_as_dense_from_its_own_threshold(script, make_order):
    script.submit(0.0, "a", make_order(1, "a", Stage.GENERATE, ROLLOUT), dense_threshold=8)
    for time_s, num_active in ((1.0, 9), (2.0, 8), (3.0, 7)):
        script.event(ChunkFinished(time_s=time_s, order=1, num_active=num_active, num_waiting=0, seconds=time_s))
    script.event(StageFinished(time_s=4.0, order=1, seconds=4.0))
    pieces = [(node.key.sub_stage, node.seconds) for node in step_graph(script.history(), PipelineId("a"), 1).nodes]
    assert pieces == [(SubStage.DENSE_DECODE, 3.0), (SubStage.TAIL_DECODE, 1.0)]


def test_a_step_that_is_not_in_the_log_is_named(tmp_path, alternating_run):
    folder = tmp_path / "run"
    alternating_run().write(folder)
    assert write_graph(folder, "sort:1", unloadable).read_text(encoding="utf-8").startswith("<svg")
    with pytest.raises(UserError, match="accepted: 1 to"):
        write_graph(folder, "sort:99", unloadable)
    with pytest.raises(UserError, match="no step of pipeline 'zz'"):
        write_graph(folder, "zz:1", unloadable)
