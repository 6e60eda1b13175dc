"""Charts are well-formed, complete and stand alone."""

from __future__ import annotations

import xml.etree.ElementTree as ET

import pytest

from rlmux.core.errors import UserError
from rlmux.core.model import DeviceId, Stage
from rlmux.report.figures.charts import (
    Bar,
    GanttRow,
    Line,
    distribution,
    gantt_chart,
    line_chart,
    tick_text,
    waterfall_chart,
)
from rlmux.sim import api
from rlmux.sim.results import pictures
from rlmux.sim.results.result import Span
from rlmux.sim.results.sweep import SimRun, run_simulation
from rlmux.sim.workloads import catalog

SVG = "{http://www.w3.org/2000/svg}"


def texts(svg):
    return [element.text for element in ET.fromstring(svg).iter(f"{SVG}text")]


def test_a_line_chart_names_its_lines_and_axes_and_escapes_them():
    lines = [Line(name="a<b", points=[(0, 1), (5, 3)]), Line(name="c", points=[(0, 2), (5, 2)], is_step=True)]
    svg = line_chart(lines, title="A & B", x_label="hours", y_label="$ per hour")
    assert {"A & B", "a<b", "c", "hours", "$ per hour", "0", "5"} <= set(texts(svg))


def test_steps_are_drawn_level_then_up():
    svg = line_chart(
        [Line(name="n", points=[(0, 0), (1, 1)], is_step=True)], title="t", x_label="x", y_label="y", y_from_zero=True
    )
    curves = [p.get("d") for p in ET.fromstring(svg).iter(f"{SVG}path") if p.get("class", "").startswith("curve c0")]
    assert any("H" in d and "V" in d for d in curves)


def test_lines_that_run_over_each_other_are_all_seen():
    def widths(*heights):
        lines = [
            Line(name=f"n{number}", points=[(0, height), (10, height)], is_step=True)
            for number, height in enumerate(heights)
        ]
        svg = line_chart(lines, title="t", x_label="x", y_label="y")
        curves = [
            p
            for p in ET.fromstring(svg).iter(f"{SVG}path")
            if p.get("class", "") in ("curve c0", "curve c1", "curve c2")
        ]
        return [float((p.get("style") or "stroke-width:1.7px").removeprefix("stroke-width:")[:-2]) for p in curves]

    apart, same = widths(1.0, 5.0, 9.0), widths(5.0, 5.0, 5.0)
    assert len(set(apart)) == 1
    assert same[0] > same[1] + 2 > same[2] + 4
    assert widths(5.0, 9.0, 5.0)[0] > 2 * apart[0]


@pytest.mark.parametrize("points", [[], [(1.0, 1.0)], [(0.0, 0.0), (0.0, 0.0)]])
def test_a_chart_of_nothing_is_still_a_chart(points):
    ET.fromstring(line_chart([Line(name="n", points=points)], title="t", x_label="x", y_label="y"))
    ET.fromstring(gantt_chart([], title="t", x_label="x"))


def test_a_distribution_ends_at_all_of_them():
    assert distribution([3.0, 1.0]) == [(1.0, 0.0), (1.0, 50.0), (3.0, 100.0)]
    assert distribution([]) == []


def test_a_gantt_chart_has_a_bar_for_every_span_and_a_lane_for_every_device():
    rows = [GanttRow(name="r0", bars=[Bar(begin=0, end=2, name="a"), Bar(begin=2, end=3, name="b", is_pale=True)])]
    svg = gantt_chart(rows, title="t", x_label="minutes")
    bars = [p for p in ET.fromstring(svg).iter(f"{SVG}path") if p.get("class", "").startswith("bar")]
    assert len(bars) == 2
    assert "r0" in texts(svg)


def test_a_waterfall_has_a_row_for_each_part_and_one_for_their_sum():
    svg = waterfall_chart({"work": 30.0, "idle": 12.5}, title="t", x_label="$", total="all")
    assert {"work", "30.00", "idle", "12.50", "all", "42.50"} <= set(texts(svg))
    bars = [p for p in ET.fromstring(svg).iter(f"{SVG}path") if p.get("class", "").startswith("bar")]
    starts = [p.get("d").split()[0] for p in bars]
    assert starts[0] == starts[2] != starts[1]


def test_ticks_read_as_people_write_them():
    assert [tick_text(x) for x in (0.0, 2500.0, 0.25, 1e6)] == ["0", "2,500", "0.25", "1,000,000"]


def test_a_sweep_writes_pictures_and_a_page_that_needs_no_network(tmp_path):
    report = api.simulate("bl-s:num_pipelines=12", policies=["solo", "rollmux"], num_processes=1, out=tmp_path)
    names = {path.rsplit("/", 1)[-1] for path in report["pictures"] if not path.endswith(".png")}
    assert names == {
        "cost.svg",
        "gpus.svg",
        "slowdowns.svg",
        "dollars.svg",
        "solo.gantt.svg",
        "rollmux.gantt.svg",
        "index.html",
    }
    page = (tmp_path / "index.html").read_text()
    assert "<table>" in page
    assert "src=" not in page
    assert "href=" not in page
    for name in names - {"index.html"}:
        ET.parse(tmp_path / name)


def test_a_groups_gantt_shows_its_devices():
    made = catalog.load("micro-b")
    result = run_simulation(SimRun(workload=made, policy="rollmux", spans_until_s=3000.0))
    lanes = texts(pictures.gantt(result.spans, title="micro-b"))
    assert {"h20 0.0", "h20 1.0", "h800 0.0"} <= set(lanes)


def test_a_picture_becomes_pixels_of_the_width_asked_for():
    pytest.importorskip("resvg_py")
    svg = line_chart([Line(name="n", points=[(0, 0), (1, 1)])], title="t", x_label="x", y_label="y")
    drawn = pictures.png(svg, width=900)
    assert drawn.startswith(b"\x89PNG")
    assert int.from_bytes(drawn[16:20], "big") == 900


def test_pixels_without_the_extra_are_refused_by_name_and_the_rest_is_written(monkeypatch, tmp_path):
    monkeypatch.setattr(pictures, "can_draw_pixels", lambda: False)
    with pytest.raises(UserError, match=r"pip install 'rlmux\[png\]'"):
        pictures.png("<svg/>")
    result = run_simulation(SimRun(workload=catalog.load("micro-a:num_steps=2"), policy="rollmux"))
    written = pictures.write_pictures({"rollmux": [result]}, tmp_path, title="t")
    assert {path.suffix for path in written} == {".svg", ".html"}


def span(pipeline, *nodes):
    devices = tuple(DeviceId("train", node, 0) for node in nodes)
    return Span(pipeline=pipeline, devices=devices, stage=Stage.UPDATE, step=1, begin_s=0.0, end_s=1.0, switch_s=0.0)


def test_a_group_is_all_pipelines_that_share_devices_directly_or_through_others():
    spans = [span("a", 0), span("b", 0, 1), span("c", 1), span("d", 2)]
    assert {one.pipeline for one in pictures.spans_of_group(spans, "a")} == {"a", "b", "c"}
    assert {one.pipeline for one in pictures.spans_of_group(spans, "d")} == {"d"}
    with pytest.raises(UserError, match="no spans of pipeline 'e'; accepted: a, b, c, d"):
        pictures.spans_of_group(spans, "e")
