"""The picture of a step's sub-stages."""

from __future__ import annotations

import re
from itertools import pairwise
from xml.etree import ElementTree

import pytest

from rlmux.core.errors import UserError
from rlmux.core.model import DeviceId, PipelineId, Stage
from rlmux.report.figures.graph_svg import draw, write_graph
from rlmux.report.figures.step_graph import ShardRecord, StageRecord, graph_of_step

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
    root = ElementTree.fromstring(draw(made, title="a<b, step 1"))
    kinds = [element.tag.rpartition("}")[2] for element in root]
    assert kinds.count("g") == len(made.nodes)
    assert kinds.count("path") == len(made.edges)
    assert "a<b, step 1" in "".join(root.itertext())


def test_boxes_of_a_column_do_not_overlap_and_later_pieces_are_lower():
    text = draw(graph())
    boxes: dict[str, list[tuple[float, float]]] = {}
    for x, y, height in re.findall(r'd="M([\d.]+) ([\d.]+)h[\d.]+v([\d.]+)', text):
        boxes.setdefault(x, []).append((float(y), float(height)))
    assert len(boxes) == 4
    for column in boxes.values():
        for (y, height), (below, _) in pairwise(column):
            assert y + height <= below


def test_the_critical_path_is_drawn_dark():
    made = graph()
    assert draw(made).count('class="c"') == len(made.critical_path()) - 1


def test_a_step_that_is_not_in_the_log_is_named(tmp_path, alternating_run):
    folder = tmp_path / "run"
    alternating_run().write(folder)
    assert write_graph(folder, "sort:1").read_text(encoding="utf-8").startswith("<svg")
    with pytest.raises(UserError, match="accepted: 1 to"):
        write_graph(folder, "sort:99")
    with pytest.raises(UserError, match="no step of pipeline 'zz'"):
        write_graph(folder, "zz:1")
