"""The drawing of `timeline.html`: device rows, step rows and reward curves over one time axis, as SVG.

    fixed       names and scales at the left
    behind      tracks and grid
    zoom        everything whose x is time: one group, stretched by the page's script
    texts       placed one by one, shown where they fit;  marks: failures and moves, moved but not stretched

A rollout's bar is filled to the height of its active sequences, as a share of the most its pipeline ever
had on that device: a tail is a thin wedge, a tool wait a notch. A gap has a stripe in the colour of the
pipeline it waits for. Beyond a few thousand intervals a row becomes columns of equal width, each stacked by
what its time went to.
"""

# ruff: noqa: RUF001  typographic signs are meant: this text is read in a browser

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from html import escape

from rlmux.core.model import DeviceId, OrderId, PipelineId, Stage
from rlmux.report.intervals import Cause, Interval, Kind
from rlmux.report.records import Ending, Instant, OrderRecord
from rlmux.report.summary import StepTime, step_times
from rlmux.report.svg import bar, nice_ticks, number, percent_text, polyline, seconds_text, tag
from rlmux.report.timeline import DeviceTimeline, Timeline

MAX_INTERVALS = 4000
"""More than these are drawn as columns."""
_MAX_ROWS = 64
_MAX_TEXTS = 500

_GUTTER, _WIDTH, _RIGHT, _TOP = 150.0, 1080.0, 26.0, 22.0
_REWARD_HEIGHT = 150.0
_CHARACTER_WIDTH = 5.1

CLASS_BY_CAUSE = {
    Cause.SWITCH: "switch",
    Cause.STARTING: "starting",
    Cause.TOOL_WAIT: "tool",
    Cause.ROLLOUT: "wait",
    Cause.REWARD: "wait",
    Cause.TRAINING: "wait",
    Cause.TURN: "wait",
    Cause.DEVICES: "wait",
    Cause.SYNC: "sync",
    Cause.MIGRATION: "sync",
    Cause.HELD_BACK: "held",
    Cause.LOST: "lost",
    Cause.CONTROL: "ctrl",
    Cause.NOTHING_ADMITTED: "idle",
    Cause.DOWN: "idle",
}
_CLASS_BY_STAGE = {
    Stage.SFT_WARMUP: "s-warm",
    Stage.REFERENCE_LOGPROBS: "s-reference",
    Stage.OLD_LOGPROBS: "s-old",
    Stage.UPDATE: "s-update",
}
_MARK_BY_WHAT = {
    "failure": "✕",
    "loss": "✕",
    "restart": "↻",
    "resumed": "▶",
    "migration": "⇄",
    "node lost": "✕",
}


@dataclass(slots=True)
class _Load:
    """Active sequences of one rollout order over time, as shares of the most its pipeline ever had there."""

    points: list[tuple[float, float]]
    is_drawn: bool = False


class Chart:
    """Device rows, step rows and reward curves over one time axis."""

    def __init__(
        self, timeline: Timeline, colour: Mapping[PipelineId, int], slowdown: Mapping[PipelineId, str]
    ) -> None:
        self._timeline = timeline
        self._colour = colour
        self._slowdown = slowdown
        self._steps = step_times(timeline)
        self._scale = _WIDTH / timeline.makespan_s
        self._devices = list(timeline.devices.values())[:_MAX_ROWS]
        self._is_dense = sum(len(device.intervals) for device in self._devices) > MAX_INTERVALS
        self._row_height = 40.0 if len(self._devices) <= 8 else 24.0 if len(self._devices) <= 24 else 14.0
        self._y = _TOP
        self._fixed: list[str] = []
        self._behind: list[str] = []
        self._zoomed: list[str] = []
        self._texts: list[tuple[float, str]] = []
        """(width, element): the widest are kept."""
        self.note = self._describe()

    def draw(self) -> str:
        orders = {order.id: order for order in self._timeline.orders}
        for device in self._devices:
            self._draw_device(device, orders)
        self._y += 8.0
        names = list(self._timeline.pipelines)
        for name in names if len(names) <= 12 else []:
            self._draw_steps(name, self._steps[name])
        has_rewards = self._draw_rewards()
        bottom = self._y + (0.0 if has_rewards else 4.0)
        texts = [text for _, text in sorted(self._texts, key=lambda item: -item[0])[:_MAX_TEXTS]]
        height = bottom + 26.0
        zoomed = tag("g", tag("g", *self._zoomed, class_="zoom"), clip_path="url(#plot)")
        plot = tag(
            "g",
            *self._behind,
            tag("g", self._ticks(bottom), id="axis", data_h=bottom),
            zoomed,
            *texts,
            *self._marks(bottom),
            transform=f"translate({number(_GUTTER)} 0)",
        )
        clip = tag("defs", tag("clipPath", tag("rect", x=0, y=0, width=_WIDTH, height=height), id="plot"))
        return tag(
            "svg", clip, *self._fixed, plot,
            id="timeline", class_="pan", viewBox=f"0 0 {number(_GUTTER + _WIDTH + _RIGHT)} {number(height)}",
            data_x=_GUTTER, data_w=_WIDTH, data_s=f"{self._timeline.makespan_s:.6f}", role="img",
            aria_label="Timeline of every device",
        )  # fmt: skip

    def _describe(self) -> str:
        if self._is_dense:
            column_s = self._timeline.makespan_s / self._num_columns()
            note = f"each column is {seconds_text(column_s)}, stacked by what the time went to"
        else:
            note = "height of a rollout: its active sequences; darker training: the update"
        hidden = len(self._timeline.devices) - len(self._devices)
        return note + (f"; {hidden} more devices are in summary.json" if hidden else "")

    def _colour_of(self, pipeline: PipelineId | None) -> int:
        return self._colour.get(pipeline, 0) if pipeline is not None else 0

    def _x(self, time_s: float) -> float:
        return (time_s - self._timeline.start_s) * self._scale

    # ------------------------------------------------------------------ device rows

    def _draw_device(self, device: DeviceTimeline, orders: Mapping[OrderId, OrderRecord]) -> None:
        height = self._row_height
        middle = self._y + height / 2
        busy = device.seconds_by_kind[Kind.BUSY] / self._timeline.makespan_s
        if height >= 24.0:
            self._fixed.append(tag("text", escape(str(device.id)), x=0, y=middle - 2, class_="name"))
            self._fixed.append(tag("text", f"{percent_text(busy)} busy", x=0, y=middle + 12, class_="mute"))
        else:
            self._fixed.append(tag("text", f"{escape(str(device.id))} · {percent_text(busy)}", x=0, y=middle + 4))
        self._behind.append(tag("rect", x=0, y=self._y, width=_WIDTH, height=height, class_="track"))
        pieces = self._columns(device) if self._is_dense else self._intervals(device, orders)
        self._zoomed.append(tag("g", *pieces, transform=f"translate(0 {number(self._y)})"))
        self._y += height + (10.0 if height >= 40.0 else 5.0)

    def _intervals(self, device: DeviceTimeline, orders: Mapping[OrderId, OrderRecord]) -> Iterable[str]:
        lane_height = self._row_height / device.num_lanes
        loads = self._loads(device.id, orders)
        for interval in device.intervals:
            is_gap = interval.stage is None
            y, height = (0.0, self._row_height) if is_gap else (interval.lane * lane_height, lane_height)
            draw = self._busy if interval.kind is Kind.BUSY else self._not_busy
            yield from draw(interval, y, height, loads)

    def _busy(self, interval: Interval, y: float, height: float, loads: dict[OrderId, _Load]) -> Iterable[str]:
        x, width = self._x(interval.start_s), interval.seconds * self._scale
        colour = self._colour_of(interval.pipeline)
        load = loads.get(interval.order) if interval.order is not None else None
        shade = _CLASS_BY_STAGE.get(interval.stage or Stage.UPDATE, "s-whole")
        if interval.stage is Stage.GENERATE and (load or interval.cause is Cause.TAIL):
            shade = "s-generate" if load else "s-tail"
        yield self._told(f"p{colour} {shade}", bar(x, y, width, height), self._tell(interval))
        if load and not load.is_drawn:
            load.is_drawn = True
            yield tag("path", d=self._area(load.points, y, height), class_=f"p{colour} s-load none")
        if interval.is_open:
            yield tag("path", d=f"M{number(x + width)} {number(y)}v{number(height)}", class_="open")

    def _not_busy(self, interval: Interval, y: float, height: float, _: object) -> Iterable[str]:
        x, width = self._x(interval.start_s), interval.seconds * self._scale
        css = CLASS_BY_CAUSE[interval.cause]
        yield self._told(css, bar(x, y, width, height), self._tell(interval))
        if interval.stage is None and interval.pipeline is not None:
            colour = self._colour_of(interval.pipeline)
            yield tag("path", d=bar(x, height - 3.0, width, 3.0), class_=f"p{colour} none")
        if width > 1.5:
            self._add_text(_short(interval.label), x, x + width, self._y + y + height / 2 + 3.5, "gaptext")

    @staticmethod
    def _told(css: str, data: str, text: str) -> str:
        """A shape that tells what it is when pointed at."""
        return f'<path class="{css}" d="{data}"><title>{escape(text)}</title></path>'

    def _tell(self, interval: Interval) -> str:
        at = f"{seconds_text(interval.seconds)} at {interval.start_s - self._timeline.start_s:.2f} s"
        if interval.kind is Kind.BUSY:
            what = f"{interval.pipeline} · {str(interval.stage).replace('_', ' ')} · step {interval.step}"
            more = " · tail" if interval.cause is Cause.TAIL else ""
            more += f" · fraction {interval.device_fraction:g}" if interval.device_fraction != 1.0 else ""
            return f"{what}{more}\n{at}" + (" · not ended in the log" if interval.is_open else "")
        who = f" · {interval.pipeline}, step {interval.step}" if interval.stage is not None else ""
        return f"{interval.label}{who}\n{at}"

    def _loads(self, device: DeviceId, orders: Mapping[OrderId, OrderRecord]) -> dict[OrderId, _Load]:
        """Of each rollout order here that reported progress."""
        mine = [o for o in orders.values() if o.stage is Stage.GENERATE and device in o.devices and o.chunks]
        peaks: dict[PipelineId, int] = {}
        for order in mine:
            peaks[order.pipeline] = max(peaks.get(order.pipeline, 1), *(c.num_active for c in order.chunks))
        return {order.id: _Load(self._load(order, peaks[order.pipeline])) for order in mine}

    def _load(self, order: OrderRecord, peak: int) -> list[tuple[float, float]]:
        first, last = order.chunks[0], order.chunks[-1]
        points = [(max(order.start_s, first.time_s - first.seconds), float(first.num_active))]
        points += [(chunk.time_s, float(chunk.num_active)) for chunk in order.chunks]
        at_end = 0.0 if order.ending is Ending.FINISHED else float(last.num_active)
        points.append((min(order.end_s, self._timeline.end_s), at_end))
        return [(time_s, active / peak) for time_s, active in _without_repeats(points)]

    def _area(self, load: list[tuple[float, float]], y: float, height: float) -> str:
        base = y + height
        outline = [(self._x(time_s), base - share * height) for time_s, share in load]
        return polyline([(outline[0][0], base), *outline, (outline[-1][0], base)]) + "z"

    def _num_columns(self) -> int:
        """Wide enough to hold more than a step: narrower ones flicker."""
        return max(60, min(270, MAX_INTERVALS // max(1, len(self._devices))))

    def _columns(self, device: DeviceTimeline) -> Iterable[str]:
        """Equal stretches of time, each stacked: computing by pipeline, then switches, then gaps."""
        columns = self._column_shares(device)
        width = _WIDTH / len(columns)
        paths: dict[str, list[str]] = {}
        for index, column in enumerate(columns):
            y = self._row_height
            for css in sorted(column, key=_stacking):
                height = column[css] * self._row_height
                y -= height
                paths.setdefault(css, []).append(bar(index * width, y, width, height))
        return [tag("path", d="".join(data), class_=css) for css, data in paths.items() if css != "idle"]

    def _column_shares(self, device: DeviceTimeline) -> list[dict[str, float]]:
        """For each column, the share of its time by CSS class."""
        columns: list[dict[str, float]] = [{} for _ in range(self._num_columns())]
        column_s = self._timeline.makespan_s / len(columns)
        for interval in device.intervals:
            css = self._column_class(interval)
            start_s, end_s = (
                interval.start_s - self._timeline.start_s,
                interval.end_s - self._timeline.start_s,
            )
            for index in range(int(start_s / column_s), min(len(columns), int(end_s / column_s) + 1)):
                overlap_s = min(end_s, (index + 1) * column_s) - max(start_s, index * column_s)
                share = max(0.0, overlap_s) / column_s / device.num_lanes
                columns[index][css] = columns[index].get(css, 0.0) + share
        return columns

    def _column_class(self, interval: Interval) -> str:
        if interval.kind is not Kind.BUSY:
            return CLASS_BY_CAUSE[interval.cause]
        tail = " s-tail" if interval.cause is Cause.TAIL else ""
        return f"p{self._colour_of(interval.pipeline)}{tail}"

    # ------------------------------------------------------------------ steps and rewards

    def _draw_steps(self, name: PipelineId, steps: list[StepTime]) -> None:
        colour = self._colour[name]
        height = 15.0
        slowdown = self._slowdown[name]
        label = escape(str(name)) + (f' <tspan class="mute">{slowdown}</tspan>' if slowdown else "")
        self._fixed.append(tag("text", f"steps of {label}", x=0, y=self._y + 11.5))
        if len(steps) > 250:
            start, end = self._x(steps[0].end_s - steps[0].seconds), self._x(steps[-1].end_s)
            shapes = [self._told(f"p{colour} step", bar(start, 0, end - start, height), f"{name}\n{len(steps)} steps")]
        else:
            shapes = [self._step(colour, name, step, height) for step in steps]
        self._zoomed.append(tag("g", *shapes, transform=f"translate(0 {number(self._y)})"))
        self._y += height + 4.0

    def _step(self, colour: int, name: PipelineId, step: StepTime, height: float) -> str:
        start, end = self._x(step.end_s - step.seconds), self._x(step.end_s)
        slow = f" · {step.seconds / step.solo_s:.2f}× alone" if step.solo_s > 0.0 else ""
        self._add_text(str(step.step), start, end, self._y + 11.5, "gaptext")
        text = f"{name} · step {step.step}\n{seconds_text(step.seconds)}{slow}"
        return self._told(f"p{colour} step", bar(start, 0, end - start, height), text)

    def _draw_rewards(self) -> bool:
        curves = {name: self._rewards(name) for name in self._timeline.pipelines}
        curves = {name: points for name, points in curves.items() if points}
        if not curves:
            return False
        values = [reward for points in curves.values() for _, reward in points]
        low, high = min(0.0, *values), max(values)
        high = 1.0 if 0.5 < high <= 1.0 else high if high > low else low + 1.0
        top, height = self._y + 16.0, _REWARD_HEIGHT
        self._fixed.append(tag("text", "mean reward", x=0, y=top + 4, class_="name"))

        def y(reward: float) -> float:
            return top + height * (1.0 - (reward - low) / (high - low))

        for tick in nice_ticks(low, high, 4):
            self._behind.append(tag("path", d=f"M0 {number(y(tick))}H{number(_WIDTH)}", class_="grid"))
            self._fixed.append(tag("text", f"{tick:g}", x=_GUTTER - 8, y=y(tick) + 4, class_="mute end"))
        ends: list[float] = []
        for name, points in curves.items():
            css = f"c{self._colour[name]}"
            placed = [(self._x(time_s), y(reward)) for time_s, reward in points]
            self._zoomed.append(tag("path", d=polyline(placed), class_=f"curve {css}"))
            if len(placed) <= 120:
                dots = "".join(f"M{number(px)} {number(py)}h0" for px, py in placed)
                self._zoomed.append(tag("path", d=dots, class_=f"dots {css}"))
            self._label_curve(name, placed[-1], ends)
        self._y = top + height + 6.0
        return True

    def _label_curve(self, name: PipelineId, end: tuple[float, float], taken: list[float]) -> None:
        """The name at the curve's end, moved down when another has that place."""
        y = end[1]
        while any(abs(y - other) < 13.0 for other in taken):
            y += 13.0
        taken.append(y)
        anchor = "end" if end[0] > _WIDTH - 60.0 else None
        text = tag(
            "text", escape(str(name)), x=-8 if anchor else 8, y=y - 7.0,
            class_=anchor, style=f"fill:var(--p{self._colour[name]})",
        )  # fmt: skip
        self._texts.append((math.inf, tag("g", text, data_m=end[0], transform=f"translate({number(end[0])} 0)")))

    def _rewards(self, name: PipelineId) -> list[tuple[float, float]]:
        metrics = self._timeline.pipelines[name].metrics
        points = [
            (step.end_s, metrics[step.step]["reward_mean"])
            for step in self._steps[name]
            if math.isfinite(metrics.get(step.step, {}).get("reward_mean", math.nan))
        ]
        return points if len(points) <= 1000 else _averaged(points, size=-(-len(points) // 500))

    # ------------------------------------------------------------------ axis, texts, marks

    def _ticks(self, bottom: float) -> str:
        return "".join(
            tag("path", d=f"M{number(tick * self._scale)} 0V{number(bottom)}", class_="grid")
            + tag("text", f"{tick:g} s", x=tick * self._scale, y=bottom + 14.0, class_="mute mid")
            for tick in nice_ticks(0.0, self._timeline.makespan_s, 10)
        )

    def _add_text(self, text: str, start: float, end: float, y: float, css: str) -> None:
        fits = end - start > len(text) * _CHARACTER_WIDTH + 6
        self._texts.append(
            (
                end - start,
                tag("text", escape(text), class_=css, x=(start + end) / 2, y=y, data_a=start, data_b=end,
                    style=None if fits else "display:none"),
            )
        )  # fmt: skip

    def _marks(self, bottom: float) -> Iterable[str]:
        """Failures and the like; moves as well, while they are few."""
        shown = [instant for instant in self._timeline.instants if instant.what in _MARK_BY_WHAT]
        if len(shown) > 300:
            shown = [instant for instant in shown if instant.what != "migration"][:300]
        for instant in shown:
            yield self._mark(instant, bottom)

    def _mark(self, instant: Instant, bottom: float) -> str:
        x = self._x(instant.time_s)
        whose = f" of {instant.pipeline}" if instant.pipeline else ""
        told = f"{instant.what}{whose} at {instant.time_s - self._timeline.start_s:.2f} s"
        return tag(
            "g",
            tag("title", escape(f"{told}\n{instant.text}".strip())),
            tag("line", x1=0, y1=_TOP - 4, x2=0, y2=bottom),
            tag("text", _MARK_BY_WHAT[instant.what], x=0, y=_TOP - 8),
            class_="mark soft" if instant.what == "migration" else "mark",
            data_m=x,
            transform=f"translate({number(x)} 0)",
        )


def _averaged(points: list[tuple[float, float]], size: int) -> list[tuple[float, float]]:
    """Every `size` points as one: their last time, their mean."""
    chunks = [points[at : at + size] for at in range(0, len(points), size)]
    return [(chunk[-1][0], sum(value for _, value in chunk) / len(chunk)) for chunk in chunks]


def _short(label: str) -> str:
    """What fits into a gap: the gap itself says that something waits."""
    return label.replace("waiting for ", "… ")


def _stacking(css: str) -> tuple[int, str]:
    """Computing at the bottom, then tails, switches and gaps."""
    if css.startswith("p"):
        return (1 if css.endswith("s-tail") else 0), css
    return (2 if css in ("switch", "starting") else 3), css


def _without_repeats(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Without points in the middle of a device fraction stretch."""
    return [
        point
        for index, point in enumerate(points)
        if not (0 < index < len(points) - 1 and points[index - 1][1] == point[1] == points[index + 1][1])
    ]
