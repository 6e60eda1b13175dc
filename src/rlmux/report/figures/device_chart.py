"""The drawing of `timeline.html`: device rows, step rows and reward curves over one time axis, as SVG.

Canvas (canvas.py) ◀── DeviceRows (device_rows.py)  PipelineRows (pipeline_rows.py)
     │
     ▼
Chart.draw: names at the left, grid, the zoomed group, texts, and marks: failures and migrations, moved by a zoom
but not stretched

A module of its own: it is drawn and tested without the page around it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from html import escape

from rlmux.core.model import PipelineId
from rlmux.report.figures.canvas import GUTTER, RIGHT, TOP, WIDTH, Canvas
from rlmux.report.figures.device_rows import DeviceRows
from rlmux.report.figures.pipeline_rows import PipelineRows
from rlmux.report.figures.svg import nice_ticks, number, tag
from rlmux.report.summary import StepTimes
from rlmux.report.timeline.build import Timeline
from rlmux.report.timeline.records import MIGRATIONS, Instant

_MAX_ROWS = 64
_MAX_STEP_ROWS = 12
_MAX_MARKS = 300

_MARK_BY_WHAT = {
    "failure": "✕",
    "loss": "✕",
    "restart": "↻",
    "resumed": "▶",
    "tail migration": "⇄",
    "shard migration": "→",
    "node lost": "✕",
    "notice": "!",
}


class Chart:
    """Device rows, step rows and reward curves over one time axis."""

    def __init__(
        self,
        timeline: Timeline,
        steps: StepTimes,
        colour: Mapping[PipelineId, int],
        slowdown: Mapping[PipelineId, str],
    ) -> None:
        """`colour` is an index into the palette, `slowdown` the text beside a pipeline's name."""
        self._timeline = timeline
        self._slowdown = slowdown
        self._canvas = Canvas(timeline.start_s, timeline.makespan_s)
        devices = list(timeline.devices.values())
        orders = {order.id: order for order in timeline.orders}
        pools = timeline.header.get("pools") or {}
        self._device_rows = DeviceRows(self._canvas, devices[:_MAX_ROWS], orders, colour, pools)
        self._pipeline_rows = PipelineRows(self._canvas, timeline.pipelines, steps, colour)
        num_hidden = len(devices[_MAX_ROWS:])
        hidden = f"; {num_hidden} more devices are in summary.json" if num_hidden else ""
        self.note = self._device_rows.note + hidden

    def draw(self) -> str:
        """The whole drawing as one SVG element. Call it once."""
        canvas = self._canvas
        self._device_rows.draw()
        canvas.y += 8.0
        names = list(self._timeline.pipelines)
        for name in names if len(names) <= _MAX_STEP_ROWS else []:
            self._pipeline_rows.draw_steps(name, self._slowdown[name])
        has_rewards = self._pipeline_rows.draw_rewards()
        bottom = canvas.y + (0.0 if has_rewards else 4.0)
        height = bottom + 26.0
        plot = tag(
            "g",
            *canvas.behind,
            tag("g", self._ticks(bottom), id="axis", data_h=bottom),
            tag("g", tag("g", *canvas.zoomed, class_="zoom"), clip_path="url(#plot)"),
            *canvas.texts(),
            *self._marks(bottom),
            transform=f"translate({number(GUTTER)} 0)",
        )
        clip = tag("defs", tag("clipPath", tag("rect", x=0, y=0, width=WIDTH, height=height), id="plot"))
        return tag(
            "svg", clip, *canvas.fixed, plot,
            id="timeline", class_="pan", viewBox=f"0 0 {number(GUTTER + WIDTH + RIGHT)} {number(height)}",
            data_x=GUTTER, data_w=WIDTH, data_s=f"{canvas.makespan_s:.6f}", role="img",
            aria_label="Timeline of every device",
        )  # fmt: skip

    def _ticks(self, bottom: float) -> str:
        return "".join(
            tag("path", d=f"M{number(tick * self._canvas.scale)} 0V{number(bottom)}", class_="grid")
            + tag("text", f"{tick:g} s", x=tick * self._canvas.scale, y=bottom + 14.0, class_="mute mid")
            for tick in nice_ticks(0.0, self._canvas.makespan_s, 10)
        )

    def _marks(self, bottom: float) -> Iterable[str]:
        """Failures and the like; migrations as well, while they are few."""
        shown = [instant for instant in self._timeline.instants if instant.what in _MARK_BY_WHAT]
        if len(shown) > _MAX_MARKS:
            shown = [instant for instant in shown if instant.what not in MIGRATIONS][:_MAX_MARKS]
        for instant in shown:
            yield self._mark(instant, bottom)

    def _mark(self, instant: Instant, bottom: float) -> str:
        x = self._canvas.x(instant.time_s)
        subject = f" of {instant.pipeline}" if instant.pipeline else ""
        heading = f"{instant.what}{subject} at {instant.time_s - self._timeline.start_s:.2f} s"
        return tag(
            "g",
            tag("title", escape(f"{heading}\n{instant.text}".strip())),
            tag("line", x1=0, y1=TOP - 4, x2=0, y2=bottom),
            tag("text", _MARK_BY_WHAT[instant.what], x=0, y=TOP - 8),
            class_="mark soft" if instant.what in MIGRATIONS else "mark",
            data_m=x,
            transform=f"translate({number(x)} 0)",
        )
