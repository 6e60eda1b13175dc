"""The sub-stage graph of one step as a picture: a column for each worker, time downwards, arrows.

    log ──planned_step──▶ SubStageGraph, planned ───────────┐
    History ──step_graph──▶ SubStageGraph, as it went ──────┴─draw──▶ SVG text

Both graphs are drawn on one scale, each from its own begin. Boxes are coloured by sub-stage and as high as it lasted;
the critical path's arrows are dark. The picture needs no script and reads on white and on black.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path

from rlmux.core.errors import RlmuxError, UserError
from rlmux.core.model import DeviceId, PipelineId, Stage, SubStage, dense_threshold_of
from rlmux.core.scheduler import Scheduler
from rlmux.log.run_log import NOT_SHOWN, LogReader
from rlmux.report.figures.planned_step import planned_step
from rlmux.report.figures.step_graph import GraphNode, ShardRecord, StageRecord, SubStageGraph, graph_of_step
from rlmux.report.figures.svg import bar, number, seconds_text, tag
from rlmux.report.timeline.history import History

_COLUMN, _GAP, _TOP, _HEIGHT, _LEFT = 160.0, 34.0, 90.0, 460.0, 76.0
_LEAST = 17.0
"""Least height of a box, so that its name fits."""
_FILL: dict[SubStage | None, str] = {
    SubStage.PREFILL: "#d55e00",
    SubStage.DENSE_DECODE: "#0072b2",
    SubStage.TAIL_DECODE: "#56b4e9",
    SubStage.TOOL_WAIT: "#e69f00",
    SubStage.REFERENCE: "#8c6d46",
    SubStage.OLD_LOGPROBS: "#cc79a7",
    SubStage.UPDATE: "#009e73",
    None: "#7f7f7f",
}
_NO_SUB_STAGE = "rewards, publishing"
"""The column of stages that hold no device."""
_UNKNOWN = "nothing was known yet"
"""In place of a plan, where neither a step was seen nor an estimate given."""
_CHARACTER = 6.5
"""Width of a character of the note, so that the picture is wide enough for it."""
_STYLE = (
    "text{font:12px system-ui,sans-serif;fill:#222}.b{font-weight:bold}.on{fill:#fff}.e{stroke:#999;fill:none}"
    ".c{stroke:#222;fill:none;stroke-width:2}.m{fill:#222}"
    "@media(prefers-color-scheme:dark){text{fill:#ddd}.on{fill:#fff}.c{stroke:#eee}.m{fill:#eee}}"
)


def step_graph(history: History, pipeline: PipelineId, step: int) -> SubStageGraph:
    """A step of a run from its log; empty for a step that never began."""
    shards: dict[DeviceId, ShardRecord] = {}
    stages: dict[Stage, StageRecord] = {}
    for order in history.orders:
        if order.pipeline != pipeline or order.step != step or order.is_migration or not order.counts:
            continue
        end_s = min(order.end_s, history.last_s)
        if order.stage is Stage.GENERATE:
            before = shards.get(order.devices[0])
            reports = tuple((chunk.time_s, chunk.num_active, chunk.num_waiting_for_env) for chunk in order.chunks)
            shards[order.devices[0]] = ShardRecord(
                device=order.devices[0],
                begin_s=before.begin_s if before else order.start_s,
                end_s=end_s,
                reports=(*(before.reports if before else ()), *reports),
                num_tokens=order.tokens + (before.num_tokens if before else 0),
            )
        else:
            known = stages.get(order.stage)
            begin_s = known.begin_s if known else order.start_s
            stages[order.stage] = StageRecord(stage=order.stage, devices=order.devices, begin_s=begin_s, end_s=end_s)
    threshold = history.pipelines[pipeline].pipeline.dense_threshold or _dense_threshold(history, pipeline)
    return graph_of_step(pipeline, step, list(shards.values()), list(stages.values()), threshold)


def write_graph(folder: str | Path, wanted: str, new_scheduler: Callable[..., Scheduler]) -> Path:
    """Draw the step `NAME:STEP` of a run into its folder, as it was planned and as it went; returns the file.

    `new_scheduler`: as for `planned_step`. A plan that the log does not give is replaced by a line that says why.
    Raises UserError for a step that is not in the log.
    """
    with LogReader(folder) as reader:
        history = History.of(reader.header, reader.parts(bare=NOT_SHOWN))
        name, step = _checked(history, wanted)
        begin_s = min(
            order.start_s for order in history.orders if order.pipeline == name and order.step == step and order.counts
        )
        note, parts = "", [("as it went", step_graph(history, name, step))]
        try:
            planned = planned_step(reader.entries(), new_scheduler, name, step, begin_s)
        except RlmuxError as error:
            note = f"the planned graph cannot be drawn: {str(error).splitlines()[0]}"
        else:
            parts.insert(0, (f"planned at {seconds_text(planned.at_s)}", planned.graph))
    path = Path(folder) / f"graph-{name}-{step}.svg"
    path.write_text(draw(parts, title=f"{name}, step {step}", note=note), encoding="utf-8")
    return path


def _checked(history: History, wanted: str) -> tuple[PipelineId, int]:
    """The pipeline and the step of `NAME:STEP`. Raises UserError for a step that is not in the log."""
    name, _, number_text = wanted.rpartition(":")
    steps = {order.step for order in history.orders if order.pipeline == name and order.step > 0 and order.counts}
    if not steps:
        known = ", ".join(history.pipelines)
        raise UserError(f"--graph {wanted}: no step of pipeline {name!r} is in the log; accepted: NAME:STEP of {known}")
    if not number_text.isdigit() or int(number_text) not in steps:
        accepted = f"{min(steps)} to {max(steps)}"
        raise UserError(f"--graph {wanted}: step {number_text!r} is not in the log; accepted: {accepted}")
    return PipelineId(name), int(number_text)


def _dense_threshold(history: History, name: str) -> int:
    """As the scheduler has it of a pipeline whose slots are not known: by the sequences of its largest shard."""
    peak = max(
        (chunk.num_active for order in history.orders if order.pipeline == name for chunk in order.chunks), default=0
    )
    return dense_threshold_of(peak)


def draw(parts: Sequence[tuple[str, SubStageGraph]], *, title: str = "", note: str = "") -> str:
    """The graphs, each under its heading, side by side as SVG text; `note` is a line below the title."""
    begins = [_begins(graph) for _, graph in parts]
    ends_s = [begins[i][k] + node.seconds for i, (_, graph) in enumerate(parts) for k, node in enumerate(graph.nodes)]
    total_s = max(ends_s, default=0.0)
    scale = _HEIGHT / total_s if total_s > 0 else 0.0
    drawn = [tag("style", _STYLE), _marker()]
    for text, y, kind in ((title, 18, "b"), (note, 36, None)):
        if text:
            drawn.append(tag("text", _escaped(text), x=8, y=y, class_=kind))
    for part in range(5):
        at_s = total_s * part / 4
        drawn.append(tag("text", seconds_text(at_s), x=4, y=_TOP + at_s * scale + 4, opacity=0.7))
    left, bottom = _LEFT, _TOP + _HEIGHT
    for (heading, graph), begun in zip(parts, begins, strict=True):
        columns = _columns(graph, left)
        boxes = _boxes(graph, begun, columns, scale)
        drawn.append(tag("text", _escaped(heading), x=left, y=_TOP - 28, class_="b"))
        drawn += _drawn_graph(graph, boxes, columns) or [tag("text", _UNKNOWN, x=left, y=_TOP - 10)]
        left += max(1, len(columns)) * (_COLUMN + _GAP) + _GAP
        bottom = max([bottom, *(y + height for _, y, _, height in boxes)])
    width, height = max(left, 16 + _CHARACTER * len(note)), bottom + 20
    return tag(
        "svg", *drawn, xmlns="http://www.w3.org/2000/svg", viewBox=f"0 0 {number(width)} {number(height)}",
        width=width, height=height, role="img",
    )  # fmt: skip


def _drawn_graph(
    graph: SubStageGraph, boxes: list[tuple[float, float, float, float]], columns: dict[str, float]
) -> list[str]:
    """Names of the columns, arrows, then boxes; nothing for an empty graph."""
    on_path = set(pairwise(graph.critical_path()))
    drawn = [tag("text", _escaped(name), x=x, y=_TOP - 10) for name, x in columns.items()]
    drawn += [_arrow(boxes, edge, edge in on_path) for edge in sorted(graph.edges, key=lambda edge: edge in on_path)]
    return drawn + [_drawn(node, box) for node, box in zip(graph.nodes, boxes, strict=True)]


def _begins(graph: SubStageGraph) -> list[float]:
    """Recorded begins from the first on, or as early as the edges allow."""
    if graph.nodes and all(node.begin_s is not None for node in graph.nodes):
        first_s = min(node.begin_s or 0.0 for node in graph.nodes)
        return [(node.begin_s or 0.0) - first_s for node in graph.nodes]
    begins = [0.0] * len(graph.nodes)
    for earlier, later in sorted(graph.edges, key=lambda edge: edge[1]):
        begins[later] = max(begins[later], begins[earlier] + graph.nodes[earlier].seconds)
    return begins


def _columns(graph: SubStageGraph, left: float) -> dict[str, float]:
    """Left edge of each column by its name, the first at `left`: workers in the order of their devices, training,
    stages without a device."""
    workers = sorted({node.key.worker for node in graph.nodes if node.key.worker is not None})
    names = [f"worker {worker}" for worker in workers]
    names += [name for name in ("training", _NO_SUB_STAGE) if any(_column_name(n) == name for n in graph.nodes)]
    return {name: left + index * (_COLUMN + _GAP) for index, name in enumerate(names)}


def _column_name(node: GraphNode) -> str:
    if node.key.worker is not None:
        return f"worker {node.key.worker}"
    return _NO_SUB_STAGE if node.key.sub_stage is None else "training"


def _boxes(
    graph: SubStageGraph, begins: list[float], columns: dict[str, float], scale: float
) -> list[tuple[float, float, float, float]]:
    """Where each node goes; a box that is too low for its name pushes the next ones of its column down."""
    bottoms: dict[str, float] = {}
    boxes = []
    for node, begin_s in zip(graph.nodes, begins, strict=True):
        name = _column_name(node)
        y = max(_TOP + begin_s * scale, bottoms.get(name, 0.0))
        height = max(_LEAST, node.seconds * scale - 2)
        bottoms[name] = y + height + 2
        boxes.append((columns[name], y, _COLUMN, height))
    return boxes


def _drawn(node: GraphNode, box: tuple[float, float, float, float]) -> str:
    x, y, width, height = box
    name = str(node.key.stage if node.key.worker is None or node.key.sub_stage is None else node.key.sub_stage)
    label = f"{name.replace('_', ' ')} {seconds_text(node.seconds)}"
    return tag(
        "g",
        tag("title", _escaped(f"step {node.key.step} {label}")),
        tag("path", d=bar(x, y, width, height), fill=_FILL[node.key.sub_stage]),
        tag("text", _escaped(label), x=x + 5, y=y + min(height / 2 + 4, 16), class_="on"),
    )


def _arrow(boxes: list[tuple[float, float, float, float]], edge: tuple[int, int], is_critical: bool) -> str:
    x0, y0, w0, h0 = boxes[edge[0]]
    x1, y1, w1, _ = boxes[edge[1]]
    start, end = (x0 + w0 / 2, y0 + h0), (x1 + w1 / 2, y1)
    if x0 != x1:
        start, end = (x0 + w0, y0 + h0 - 3), (x1, y1 + 6)
        if x1 < x0:
            start, end = (x0, y0 + h0 - 3), (x1 + w1, y1 + 6)
    middle = (start[0] + end[0]) / 2
    path = (
        f"M{number(start[0])} {number(start[1])}C{number(middle)} {number(start[1])} "
        f"{number(middle)} {number(end[1])} {number(end[0])} {number(end[1])}"
    )
    return tag("path", d=path, class_="c" if is_critical else "e", marker_end="url(#tip)")


def _marker() -> str:
    tip = tag("path", d="M0 0L7 3.5L0 7z", class_="m")
    return tag(
        "defs",
        tag("marker", tip, id="tip", markerWidth=7, markerHeight=7, refX=6, refY=3.5, orient="auto",
            markerUnits="userSpaceOnUse"),
    )  # fmt: skip


def _escaped(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
