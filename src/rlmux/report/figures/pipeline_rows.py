"""The lower rows of `timeline.html`: each pipeline's steps, and its mean reward, over the devices' time axis.

A module of its own: rows of pipelines below those of devices.
"""

# ruff: noqa: RUF001  typographic signs are meant: this text is read in a browser

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

from rlmux.core.model import PipelineId
from rlmux.report.figures.canvas import GUTTER, WIDTH, Canvas, titled_shape
from rlmux.report.figures.svg import bar, nice_ticks, number, polyline, seconds_text, tag
from rlmux.report.slos import StepTime
from rlmux.report.timeline.records import PipelineRecord

_REWARD_HEIGHT = 150.0
_MAX_STEPS = 250
"""Steps of a pipeline; more are drawn as one bar."""


class PipelineRows:
    """Steps and rewards of every pipeline, drawn on a canvas."""

    def __init__(
        self,
        canvas: Canvas,
        pipelines: Mapping[PipelineId, PipelineRecord],
        steps: Mapping[PipelineId, Sequence[StepTime]],
        colour: Mapping[PipelineId, int],
    ) -> None:
        self._canvas = canvas
        self._pipelines = pipelines
        self._steps = steps
        self._colour = colour

    def draw_steps(self, name: PipelineId, slowdown: str) -> None:
        """One bar a step; `slowdown` stands beside the pipeline's name."""
        steps, colour, height = self._steps[name], self._colour[name], 15.0
        label = escape(str(name)) + (f' <tspan class="mute">{slowdown}</tspan>' if slowdown else "")
        self._canvas.fixed.append(tag("text", f"steps of {label}", x=0, y=self._canvas.y + 11.5))
        if len(steps) > _MAX_STEPS:
            start, end = self._canvas.x(steps[0].end_s - steps[0].seconds), self._canvas.x(steps[-1].end_s)
            shapes = [
                titled_shape(f"p{colour} step", bar(start, 0, end - start, height), f"{name}\n{len(steps)} steps")
            ]
        else:
            shapes = [self._step(colour, name, step, height) for step in steps]
        self._canvas.add_row(shapes, height + 4.0)

    def _step(self, colour: int, name: PipelineId, step: StepTime, height: float) -> str:
        start, end = self._canvas.x(step.end_s - step.seconds), self._canvas.x(step.end_s)
        slow = f" · {step.seconds / step.solo_s:.2f}× alone" if step.solo_s > 0.0 else ""
        self._canvas.add_text(str(step.step), start, end, self._canvas.y + 11.5)
        text = f"{name} · step {step.step}\n{seconds_text(step.seconds)}{slow}"
        return titled_shape(f"p{colour} step", bar(start, 0, end - start, height), text)

    def draw_rewards(self) -> bool:
        """One curve a pipeline; False where no step has a reward."""
        curves = {name: self._rewards(name) for name in self._pipelines}
        curves = {name: points for name, points in curves.items() if points}
        if not curves:
            return False
        values = [reward for points in curves.values() for _, reward in points]
        low, high = min(0.0, *values), max(values)
        high = 1.0 if 0.5 < high <= 1.0 else high if high > low else low + 1.0
        top, height = self._canvas.y + 16.0, _REWARD_HEIGHT
        self._canvas.fixed.append(tag("text", "mean reward", x=0, y=top + 4, class_="name"))

        def y(reward: float) -> float:
            return top + height * (1.0 - (reward - low) / (high - low))

        for tick in nice_ticks(low, high, 4):
            self._canvas.behind.append(tag("path", d=f"M0 {number(y(tick))}H{number(WIDTH)}", class_="grid"))
            self._canvas.fixed.append(tag("text", f"{tick:g}", x=GUTTER - 8, y=y(tick) + 4, class_="mute end"))
        ends: list[float] = []
        for name, points in curves.items():
            css = f"c{self._colour[name]}"
            placed = [(self._canvas.x(time_s), y(reward)) for time_s, reward in points]
            self._canvas.zoomed.append(tag("path", d=polyline(placed), class_=f"curve {css}"))
            if len(placed) <= 120:
                dots = "".join(f"M{number(px)} {number(py)}h0" for px, py in placed)
                self._canvas.zoomed.append(tag("path", d=dots, class_=f"dots {css}"))
            self._label_curve(name, placed[-1], ends)
        self._canvas.y = top + height + 6.0
        return True

    def _label_curve(self, name: PipelineId, end: tuple[float, float], taken: list[float]) -> None:
        """Put the name at the curve's end, lower where another name is there already."""
        y = end[1]
        while any(abs(y - other) < 13.0 for other in taken):
            y += 13.0
        taken.append(y)
        anchor = "end" if end[0] > WIDTH - 60.0 else None
        text = tag(
            "text", escape(str(name)), x=-8 if anchor else 8, y=y - 7.0,
            class_=anchor, style=f"fill:var(--p{self._colour[name]})",
        )  # fmt: skip
        self._canvas.add_element(tag("g", text, data_m=end[0], transform=f"translate({number(end[0])} 0)"), math.inf)

    def _rewards(self, name: PipelineId) -> list[tuple[float, float]]:
        metrics = self._pipelines[name].metrics
        points = [
            (step.end_s, metrics[step.step]["reward_mean"])
            for step in self._steps[name]
            if math.isfinite(metrics.get(step.step, {}).get("reward_mean", math.nan))
        ]
        return points if len(points) <= 1000 else _averaged(points, size=-(-len(points) // 500))


def _averaged(points: list[tuple[float, float]], size: int) -> list[tuple[float, float]]:
    """Every `size` points as one: their last time, their mean."""
    chunks = [points[at : at + size] for at in range(0, len(points), size)]
    return [(chunk[-1][0], sum(value for _, value in chunk) / len(chunk)) for chunk in chunks]
