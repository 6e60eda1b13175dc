"""Charts as SVG text, good in a paper and in a page: lines and steps, distributions, bars over time.

    Line*  ─▶ line_chart    cost or GPUs over time; cumulative distributions
    GanttRow*   ─▶ gantt_chart   bars of work over time, a row for each device
    parts  ─▶ waterfall_chart    parts of a sum, each from where the one before it ends

Each SVG carries its own style and follows the reader's light or dark setting, so a file stands alone and
several can share a page. Colours come from one palette that colour-blind readers can distinguish; lines also
differ in dash. A line that others run over is drawn wider, so that it shows as their border.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

from rlmux.report.figures.svg import PALETTE, bar, nice_ticks, number, tag

_DASHES = (None, "7 3", "2 3", "9 3 2 3")
_LINE_WIDTH, _BORDER_WIDTH = 1.7, 3.0
"""Width of a line, and what each line that runs over it adds, in units of the picture."""
_NUM_SAMPLES = 200
_HIDDEN_PART = 0.05
"""Part of the width of a chart over which a line may be hidden and is still found."""
_ROOM_FOR_NUMBERS = 1.1
"""Width of a waterfall's axis over its sum: the sum's number stands beside its bar."""
_TOTAL_COLOR = len(PALETTE) - 1
"""Colour of a waterfall's sum; its parts have the others."""
_LEFT, _RIGHT, _TOP, _BOTTOM = 64.0, 16.0, 40.0, 46.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One line of a chart."""

    name: str
    points: Sequence[tuple[float, float]]
    is_step: bool = False
    """True where each value holds until the next point, as a count does."""
    color: int | None = None
    """Index into the palette; None for the line's own position."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """Something that lasts."""

    begin: float
    end: float
    name: str
    """Owner of the work; equal names have equal colours."""
    label: str = ""
    """Text that is shown when the bar is pointed at; the name where it is empty."""
    is_pale: bool = False
    """True for a second kind of work of the same owner."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GanttRow:
    """One lane of a Gantt chart."""

    name: str
    bars: Sequence[Bar]


def line_chart(
    lines: Sequence[Line],
    *,
    title: str,
    x_label: str,
    y_label: str,
    width: float = 760.0,
    height: float = 320.0,
    y_from_zero: bool = True,
) -> str:
    """Lines over two linear axes, the legend above the plot."""
    xs = [x for line in lines for x, _ in line.points] or [0.0]
    ys = [y for line in lines for _, y in line.points] or [0.0]
    x_range = _widened(min(xs), max(xs))
    y_range = _widened(0.0 if y_from_zero else min(ys), max(ys) * 1.04)
    plot = _Plot(x_range, y_range, width, height)
    parts = [plot.axes(x_label, y_label)]
    for index, line in enumerate(lines):
        color = index if line.color is None else line.color
        num_over = sum(_runs_over(other, line, plot) for other in lines[index + 1 :])
        parts.append(
            tag(
                "path",
                tag("title", escape(line.name)),
                d=plot.path(line),
                class_=f"curve c{color % len(PALETTE)}",
                stroke_dasharray=_DASHES[color // len(PALETTE) % len(_DASHES)],
                style=f"stroke-width:{_LINE_WIDTH + num_over * _BORDER_WIDTH:g}px" if num_over else None,
            )
        )
    colors = {line.name: index if line.color is None else line.color for index, line in enumerate(lines)}
    return _document(title, width, height, _legend(colors, width) + "".join(parts))


def _runs_over(upper: Line, lower: Line, plot: _Plot) -> bool:
    """Whether a noticeable part of the lower line is under the upper one."""
    low, high = plot.x_range
    xs = [low + (high - low) * number / _NUM_SAMPLES for number in range(_NUM_SAMPLES + 1)]
    pairs = [(_value_at(upper, x), _value_at(lower, x)) for x in xs]
    hidden = [
        abs(plot.y(over) - plot.y(under)) < _LINE_WIDTH
        for over, under in pairs
        if over is not None and under is not None
    ]
    return sum(hidden) > _HIDDEN_PART * len(xs)


def _value_at(line: Line, x: float) -> float | None:
    """The line's height there; None outside of it."""
    points = line.points
    after = bisect_right(points, x, key=lambda point: point[0])
    if not points or after == 0 or (after == len(points) and x > points[-1][0]):
        return None
    (x0, y0), (x1, y1) = points[after - 1], points[min(after, len(points) - 1)]
    if line.is_step or x1 == x0:
        return y0
    return y0 + (y1 - y0) * (x - x0) / (x1 - x0)


def distribution(samples: Sequence[float]) -> list[tuple[float, float]]:
    """The points of a cumulative distribution: percent of the samples that are at most x."""
    ordered = sorted(samples)
    steps = [(value, 100.0 * (index + 1) / len(ordered)) for index, value in enumerate(ordered)]
    return [(ordered[0], 0.0), *steps] if ordered else []


def gantt_chart(
    rows: Sequence[GanttRow], *, title: str, x_label: str, width: float = 900.0, row_height: float = 26.0
) -> str:
    """Lanes of bars over time; one colour for each name."""
    names = list(dict.fromkeys(piece.name for row in rows for piece in row.bars))
    colors = {name: index for index, name in enumerate(names)}
    ends = [piece.end for row in rows for piece in row.bars] or [1.0]
    begins = [piece.begin for row in rows for piece in row.bars] or [0.0]
    left = 16.0 + 6.6 * max((len(row.name) for row in rows), default=4)
    height = _TOP + _BOTTOM + row_height * len(rows)
    plot = _Plot(_widened(min(begins), max(ends)), (0.0, 1.0), width, height, left=left)
    parts = [plot.x_axis(x_label)]
    for index, row in enumerate(rows):
        y = _TOP + index * row_height
        parts.append(tag("path", d=bar(left, y + 2, width - left - _RIGHT, row_height - 4), class_="track"))
        parts.append(tag("text", escape(row.name), x=left - 8, y=y + row_height / 2 + 4, class_="end"))
        for piece in row.bars:
            x, x_end = plot.x(piece.begin), plot.x(piece.end)
            pale = " pale" if piece.is_pale else ""
            parts.append(
                tag(
                    "path",
                    tag("title", escape(piece.label or piece.name)),
                    d=bar(x, y + 3, max(0.6, x_end - x), row_height - 6),
                    class_=f"bar f{colors[piece.name] % len(PALETTE)}{pale}",
                )
            )
            if x_end - x > 7.0 * len(piece.name) + 4:
                middle = (x + x_end) / 2
                parts.append(tag("text", escape(piece.name), x=middle, y=y + row_height / 2 + 4, class_="mid on"))
    return _document(title, width, height, _legend(colors, width) + "".join(parts))


def waterfall_chart(
    parts: Mapping[str, float], *, title: str, x_label: str, total: str, width: float = 900.0, row_height: float = 26.0
) -> str:
    """A row for each part of a sum, its bar from where the one before it ends, and a last row for the sum."""
    left = 16.0 + 6.6 * max(len(name) for name in (*parts, total))
    height = _TOP + _BOTTOM + row_height * (len(parts) + 1)
    sum_of_all = sum(parts.values())
    plot = _Plot((0.0, (sum_of_all or 1.0) * _ROOM_FOR_NUMBERS), (0.0, 1.0), width, height, left=left)
    drawn, begin = [plot.x_axis(x_label)], 0.0
    for index, (name, value) in enumerate({**parts, total: sum_of_all}.items()):
        is_total = index == len(parts)
        begin = 0.0 if is_total else begin
        y, x, x_end = _TOP + index * row_height, plot.x(begin), plot.x(begin + value)
        color = _TOTAL_COLOR if is_total else index % _TOTAL_COLOR
        label = f"{name}: {value:,.2f}"
        drawn += [
            tag("path", d=bar(left, y + 2, width - left - _RIGHT, row_height - 4), class_="track"),
            tag("text", escape(name), x=left - 8, y=y + row_height / 2 + 4, class_="end"),
            tag(
                "path",
                tag("title", escape(label)),
                d=bar(x, y + 3, max(0.6, x_end - x), row_height - 6),
                class_=f"bar f{color}",
            ),
            tag("text", f"{value:,.2f}", x=x_end + 6, y=y + row_height / 2 + 4),
        ]
        if not is_total:
            drawn.append(tag("path", d=f"M{number(x_end)} {number(y + row_height - 3)}v6", class_="axis"))
        begin += value
    return _document(title, width, height, "".join(drawn))


@dataclass(frozen=True, slots=True)
class _Plot:
    x_range: tuple[float, float]
    y_range: tuple[float, float]
    width: float
    height: float
    left: float = _LEFT

    def x(self, value: float) -> float:
        low, high = self.x_range
        return self.left + (value - low) / (high - low) * (self.width - self.left - _RIGHT)

    def y(self, value: float) -> float:
        low, high = self.y_range
        return self.height - _BOTTOM - (value - low) / (high - low) * (self.height - _TOP - _BOTTOM)

    def path(self, line: Line) -> str:
        """A point that would fall on the pixel of the one before it is left out."""
        commands: list[str] = []
        last = (-1e9, -1e9)
        for value_x, value_y in line.points:
            x, y = self.x(value_x), self.y(value_y)
            if not commands:
                commands.append(f"M{number(x)} {number(y)}")
            elif abs(x - last[0]) < 0.15 and abs(y - last[1]) < 0.15:
                continue
            elif line.is_step:
                commands.append(f"H{number(x)}V{number(y)}")
            else:
                commands.append(f"L{number(x)} {number(y)}")
            last = (x, y)
        return "".join(commands)

    def axes(self, x_label: str, y_label: str) -> str:
        parts = [self.x_axis(x_label)]
        right = self.width - _RIGHT
        for tick in nice_ticks(*self.y_range, 5):
            y = self.y(tick)
            parts.append(tag("path", d=f"M{number(self.left)} {number(y)}H{number(right)}", class_="grid"))
            parts.append(tag("text", tick_text(tick), x=self.left - 8, y=y + 4, class_="end mute"))
        middle = (_TOP + self.height - _BOTTOM) / 2
        parts.append(
            tag(
                "text",
                escape(y_label),
                x=0,
                y=0,
                class_="mid",
                transform=f"translate(14 {number(middle)}) rotate(-90)",
            )
        )
        return "".join(parts)

    def x_axis(self, x_label: str) -> str:
        bottom = self.height - _BOTTOM
        right = self.width - _RIGHT
        parts = [tag("path", d=f"M{number(self.left)} {number(bottom)}H{number(right)}", class_="axis")]
        for tick in nice_ticks(*self.x_range, 8):
            x = self.x(tick)
            parts.append(tag("path", d=f"M{number(x)} {number(bottom)}v4", class_="axis"))
            parts.append(tag("text", tick_text(tick), x=x, y=bottom + 17, class_="mid mute"))
        middle = (self.left + right) / 2
        parts.append(tag("text", escape(x_label), x=middle, y=self.height - 9, class_="mid"))
        return "".join(parts)


def tick_text(value: float) -> str:
    """A tick's number: thousands apart, no trailing zeros."""
    text = f"{value:,.6f}".rstrip("0").rstrip(".")
    return "0" if text in ("", "-0") else text


def _widened(low: float, high: float) -> tuple[float, float]:
    return (low, high) if high > low else (low, low + 1.0)


def _legend(colors: Mapping[str, int], width: float) -> str:
    """A row of keys; names that no longer fit are counted."""
    parts = []
    x = _LEFT
    names = list(colors)
    for index, name in enumerate(names):
        needs = 34.0 + 7.0 * len(name)
        if x + needs > width - 70 and index < len(names) - 1:
            parts.append(tag("text", f"and {len(names) - index} more", x=x, y=32.0, class_="mute"))
            break
        color = colors[name]
        parts.append(
            tag(
                "path",
                d=f"M{number(x)} 28h18",
                class_=f"curve key c{color % len(PALETTE)}",
                stroke_dasharray=_DASHES[color // len(PALETTE) % len(_DASHES)],
            )
        )
        parts.append(tag("text", escape(name), x=x + 23, y=32.0))
        x += needs
    return "".join(parts)


def _document(title: str, width: float, height: float, body: str) -> str:
    return tag(
        "svg",
        tag("title", escape(title)),
        tag("style", _STYLE),
        tag("rect", width=width, height=height, class_="paper"),
        tag("text", escape(title), x=16, y=16, class_="head"),
        body,
        xmlns="http://www.w3.org/2000/svg",
        class_="chart",
        viewBox=f"0 0 {number(width)} {number(height)}",
        width=width,
        height=height,
        role="img",
    )


def _style() -> str:
    light = "".join(f".chart .c{i}{{stroke:{a}}}.chart .f{i}{{fill:{a}}}" for i, (a, _) in enumerate(PALETTE))
    dark = "".join(f".chart .c{i}{{stroke:{b}}}.chart .f{i}{{fill:{b}}}" for i, (_, b) in enumerate(PALETTE))
    return (
        '.chart{font:11.5px system-ui,-apple-system,"Segoe UI",Roboto,"DejaVu Sans",Arial,sans-serif}'
        ".chart text{fill:#1d2125}.chart .mute{fill:#5c646d}.chart .head{font-size:13px;font-weight:600}"
        ".chart .paper{fill:#fff}.chart .track{fill:#f1f2f4}.chart .on{fill:#fff;pointer-events:none}"
        ".chart .grid{stroke:#e1e4e8;fill:none}.chart .axis{stroke:#8a929b;fill:none}"
        ".chart .curve{fill:none;stroke-width:1.7;stroke-linejoin:round}.chart .key{stroke-width:3}"
        ".chart .pale{fill-opacity:.55}.chart .mid{text-anchor:middle}.chart .end{text-anchor:end}"
        + light
        + "@media(prefers-color-scheme:dark){.chart text{fill:#e6e8eb}.chart .mute{fill:#a0a8b1}"
        ".chart .paper{fill:#14171a}.chart .track{fill:#20252a}.chart .on{fill:#0d0f11}"
        ".chart .grid{stroke:#2c3238}.chart .axis{stroke:#6f7881}" + dark + "}"
    )


_STYLE = _style()
