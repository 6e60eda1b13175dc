"""The device rows of `timeline.html`: computing, switches and named gaps over time.

A rollout's bar is filled to the height of its active sequences, as a part of the most that its pipeline ever had on
that device: a tail is a thin wedge, a tool wait a notch. A gap has a stripe in the colour of the pipeline it waits for.
Beyond a few thousand intervals a row becomes columns of equal width, each stacked by what its time went to.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from html import escape
from typing import Any

from rlmux.core.model import DeviceId, OrderId, PipelineId, Stage
from rlmux.report.figures.canvas import WIDTH, Canvas, titled_shape
from rlmux.report.figures.svg import bar, number, percent_text, polyline, seconds_text, tag
from rlmux.report.timeline.build import DeviceTimeline
from rlmux.report.timeline.intervals import Cause, Interval, Kind
from rlmux.report.timeline.records import Ending, OrderRecord

MAX_INTERVALS = 4000
"""Intervals of all rows together; more are drawn as columns."""

CLASS_BY_CAUSE = {
    Cause.SWITCH: "switch",
    Cause.STARTING: "starting",
    Cause.TOOL_WAIT: "tool",
    Cause.ROLLOUT: "wait",
    Cause.REWARD: "wait",
    Cause.TRAINING: "wait",
    Cause.CYCLE_SLOT: "wait",
    Cause.DEVICES: "wait",
    Cause.SYNC: "sync",
    Cause.MIGRATION: "sync",
    Cause.HELD_BACK: "held",
    Cause.LOST: "lost",
    Cause.STANDSTILL: "lost",
    Cause.CONTROL: "ctrl",
    Cause.CLIENT: "idle",
    Cause.NOTHING_ADMITTED: "idle",
    Cause.DOWN: "idle",
}
_CLASS_BY_STAGE = {
    Stage.SFT_WARMUP: "s-warm",
    Stage.REFERENCE_LOGPROBS: "s-reference",
    Stage.OLD_LOGPROBS: "s-old",
    Stage.UPDATE: "s-update",
}


@dataclass(slots=True)
class _Load:
    """Active sequences of one rollout order over time, as parts of the most that its pipeline ever had there."""

    points: list[tuple[float, float]]
    is_drawn: bool = False


class DeviceRows:
    """One row for each device, drawn on a canvas."""

    def __init__(
        self,
        canvas: Canvas,
        devices: list[DeviceTimeline],
        orders: Mapping[OrderId, OrderRecord],
        colour: Mapping[PipelineId, int],
        pools: Mapping[str, Mapping[str, Any]],
    ) -> None:
        """`pools`: of the run's header."""
        self._size = {
            name: f" · {gpus} GPUs" for name, pool in pools.items() if (gpus := pool.get("gpus_per_device", 1)) > 1
        }
        self._canvas = canvas
        self._devices = devices
        self._orders = orders
        self._colour = colour
        self._end_s = canvas.start_s + canvas.makespan_s
        self._is_dense = sum(len(device.intervals) for device in devices) > MAX_INTERVALS
        self._row_height = 40.0 if len(devices) <= 8 else 24.0 if len(devices) <= 24 else 14.0

    @property
    def note(self) -> str:
        """What a row's height and shades mean."""
        if self._is_dense:
            column_s = self._canvas.makespan_s / self._num_columns()
            return f"each column is {seconds_text(column_s)}, stacked by what the time went to"
        return "height of a rollout: its active sequences; darker training: the update"

    def draw(self) -> None:
        for device in self._devices:
            self._draw_device(device)

    def _colour_of(self, pipeline: PipelineId | None) -> int:
        return self._colour.get(pipeline, 0) if pipeline is not None else 0

    def _draw_device(self, device: DeviceTimeline) -> None:
        height, fixed = self._row_height, self._canvas.fixed
        middle = self._canvas.y + height / 2
        busy, size = device.seconds_by_kind[Kind.BUSY] / self._canvas.makespan_s, self._size.get(device.pool, "")
        if height >= 24.0:
            fixed.append(tag("text", escape(str(device.id)), x=0, y=middle - 2, class_="name"))
            fixed.append(tag("text", f"{percent_text(busy)} busy{size}", x=0, y=middle + 12, class_="mute"))
        else:
            fixed.append(tag("text", f"{escape(str(device.id))} · {percent_text(busy)}{size}", x=0, y=middle + 4))
        self._canvas.behind.append(tag("rect", x=0, y=self._canvas.y, width=WIDTH, height=height, class_="track"))
        shapes = self._columns(device) if self._is_dense else self._intervals(device)
        self._canvas.add_row(list(shapes), height + (10.0 if height >= 40.0 else 5.0))

    def _intervals(self, device: DeviceTimeline) -> Iterable[str]:
        lane_height = self._row_height / device.num_lanes
        loads = self._loads(device.id)
        for interval in device.intervals:
            is_gap = interval.stage is None
            y, height = (0.0, self._row_height) if is_gap else (interval.lane * lane_height, lane_height)
            draw = self._busy if interval.kind is Kind.BUSY else self._not_busy
            yield from draw(interval, y, height, loads)

    def _busy(self, interval: Interval, y: float, height: float, loads: dict[OrderId, _Load]) -> Iterable[str]:
        x, width = self._canvas.x(interval.start_s), interval.seconds * self._canvas.scale
        colour = self._colour_of(interval.pipeline)
        load = loads.get(interval.order) if interval.order is not None else None
        shade = _CLASS_BY_STAGE.get(interval.stage or Stage.UPDATE, "s-whole")
        if interval.stage is Stage.GENERATE and (load or interval.cause is Cause.TAIL):
            shade = "s-generate" if load else "s-tail"
        yield titled_shape(f"p{colour} {shade}", bar(x, y, width, height), self._title(interval))
        if load and not load.is_drawn:
            load.is_drawn = True
            yield tag("path", d=self._area(load.points, y, height), class_=f"p{colour} s-load none")
        if interval.is_open:
            yield tag("path", d=f"M{number(x + width)} {number(y)}v{number(height)}", class_="open")

    def _not_busy(self, interval: Interval, y: float, height: float, _: object) -> Iterable[str]:
        x, width = self._canvas.x(interval.start_s), interval.seconds * self._canvas.scale
        css = CLASS_BY_CAUSE[interval.cause]
        yield titled_shape(css, bar(x, y, width, height), self._title(interval))
        if interval.stage is None and interval.pipeline is not None:
            colour = self._colour_of(interval.pipeline)
            yield tag("path", d=bar(x, height - 3.0, width, 3.0), class_=f"p{colour} none")
        if width > 1.5:
            self._canvas.add_text(_short(interval.label), x, x + width, self._canvas.y + y + height / 2 + 3.5)

    def _title(self, interval: Interval) -> str:
        at = f"{seconds_text(interval.seconds)} at {interval.start_s - self._canvas.start_s:.2f} s"
        if interval.kind is Kind.BUSY:
            what = f"{interval.pipeline} · {str(interval.stage).replace('_', ' ')} · step {interval.step}"
            more = " · tail" if interval.cause is Cause.TAIL else ""
            more += f" · fraction {interval.device_fraction:g}" if interval.device_fraction != 1.0 else ""
            return f"{what}{more}\n{at}" + (" · not ended in the log" if interval.is_open else "")
        holder = f" · {interval.pipeline}, step {interval.step}" if interval.stage is not None else ""
        return f"{interval.label}{holder}\n{at}"

    def _loads(self, device: DeviceId) -> dict[OrderId, _Load]:
        """The load of each rollout order on this device that reported progress."""
        mine = [o for o in self._orders.values() if o.stage is Stage.GENERATE and device in o.devices and o.chunks]
        peaks: dict[PipelineId, int] = {}
        for order in mine:
            peaks[order.pipeline] = max(peaks.get(order.pipeline, 1), *(c.num_active for c in order.chunks))
        return {order.id: _Load(self._load(order, peaks[order.pipeline])) for order in mine}

    def _load(self, order: OrderRecord, peak: int) -> list[tuple[float, float]]:
        first, last = order.chunks[0], order.chunks[-1]
        points = [(max(order.start_s, first.time_s - first.seconds), float(first.num_active))]
        points += [(chunk.time_s, float(chunk.num_active)) for chunk in order.chunks]
        at_end = 0.0 if order.ending is Ending.FINISHED else float(last.num_active)
        points.append((min(order.end_s, self._end_s), at_end))
        return [(time_s, active / peak) for time_s, active in _without_repeats(points)]

    def _area(self, load: list[tuple[float, float]], y: float, height: float) -> str:
        base = y + height
        outline = [(self._canvas.x(time_s), base - part * height) for time_s, part in load]
        return polyline([(outline[0][0], base), *outline, (outline[-1][0], base)]) + "z"

    def _num_columns(self) -> int:
        """Wide enough to hold more than a step: narrower ones flicker."""
        return max(60, min(270, MAX_INTERVALS // max(1, len(self._devices))))

    def _columns(self, device: DeviceTimeline) -> Iterable[str]:
        """Equal stretches of time, each stacked: computing by pipeline, then switches, then gaps."""
        columns = self._column_parts(device)
        width = WIDTH / len(columns)
        paths: dict[str, list[str]] = {}
        for index, column in enumerate(columns):
            y = self._row_height
            for css in sorted(column, key=_stacking):
                height = column[css] * self._row_height
                y -= height
                paths.setdefault(css, []).append(bar(index * width, y, width, height))
        return [tag("path", d="".join(data), class_=css) for css, data in paths.items() if css != "idle"]

    def _column_parts(self, device: DeviceTimeline) -> list[dict[str, float]]:
        """The parts of each column's time (0.0 to 1.0) by CSS class."""
        columns: list[dict[str, float]] = [{} for _ in range(self._num_columns())]
        num_columns, num_lanes, origin_s = len(columns), device.num_lanes, self._canvas.start_s
        column_s = self._canvas.makespan_s / num_columns
        css_by_name: dict[tuple[Cause, PipelineId | None], str] = {}
        for interval in device.intervals:
            start_s, end_s, _, cause, pipeline, *_ = interval
            css = css_by_name.get((cause, pipeline))
            if css is None:
                css = css_by_name[cause, pipeline] = self._column_class(interval)
            start_s, end_s = start_s - origin_s, end_s - origin_s
            first, last = int(start_s / column_s), int(end_s / column_s)
            if last >= num_columns:
                last = num_columns - 1
            if first == last:
                column = columns[first]
                seconds = end_s - start_s if end_s > start_s else 0.0
                column[css] = column.get(css, 0.0) + seconds / column_s / num_lanes
                continue
            for index in range(first, last + 1):
                begun_s = start_s if index == first else index * column_s
                over_s = end_s if index == last else (index + 1) * column_s
                column = columns[index]
                column[css] = column.get(css, 0.0) + max(0.0, over_s - begun_s) / column_s / num_lanes
        return columns

    def _column_class(self, interval: Interval) -> str:
        if interval.kind is not Kind.BUSY:
            return CLASS_BY_CAUSE[interval.cause]
        tail = " s-tail" if interval.cause is Cause.TAIL else ""
        return f"p{self._colour_of(interval.pipeline)}{tail}"


def _short(label: str) -> str:
    """Label that fits into a gap; the gap itself shows that something waits."""
    return label.replace("waiting for ", "… ")


def _stacking(css: str) -> tuple[int, str]:
    """Computing at the bottom, then tails, switches and gaps."""
    if css.startswith("p"):
        return (1 if css.endswith("s-tail") else 0), css
    return (2 if css in ("switch", "starting") else 3), css


def _without_repeats(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Without points in the middle of a flat stretch."""
    return [
        point
        for index, point in enumerate(points)
        if not (0 < index < len(points) - 1 and points[index - 1][1] == point[1] == points[index + 1][1])
    ]
