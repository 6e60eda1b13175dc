"""Small pieces of SVG and HTML text: elements, paths, numbers, ticks, colours. Knows nothing of runs."""

from __future__ import annotations

import math
from collections.abc import Iterable
from html import escape

PALETTE = (
    ("#0072b2", "#3d94d8"),
    ("#d55e00", "#f0803c"),
    ("#009e73", "#2fc49a"),
    ("#cc79a7", "#f0a3c4"),
    ("#e69f00", "#f2b53a"),
    ("#56b4e9", "#9bdcf7"),
    ("#8c6d46", "#b8976c"),
    ("#6f58c9", "#a390f2"),
)
"""(on white, on black): Okabe and Ito's colours, distinct to the colour-blind; the last two fill up.

The pages' style sheet has the same, and no cause has a colour like them."""


def tag(name: str, *children: str, **attributes: object) -> str:
    """An element. `class_` is class, other underscores are hyphens; attributes that are None are left out."""
    text = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(_text(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    return f"<{name}{text}>{''.join(children)}</{name}>"


def number(value: float) -> str:
    """Two decimals at most, none where they are zero: paths are long."""
    text = f"{value:.2f}".rstrip("0").rstrip(".")
    return "0" if text in ("-0", "") else text


def bar(x: float, y: float, width: float, height: float) -> str:
    """A rectangle as a path's data, the shortest way to write one."""
    return f"M{number(x)} {number(y)}h{number(width)}v{number(height)}h{number(-width)}z"


def polyline(points: Iterable[tuple[float, float]]) -> str:
    """A line's path data."""
    return "M" + "L".join(f"{number(x)} {number(y)}" for x, y in points)


def nice_ticks(low: float, high: float, num_wanted: int) -> list[float]:
    """Round values that divide a range into about so many parts."""
    span = high - low
    if not (span > 0.0 and math.isfinite(span)):
        return [low]
    raw = span / max(1, num_wanted)
    magnitude = 10.0 ** math.floor(math.log10(raw))
    step = next(magnitude * factor for factor in (1, 2, 2.5, 5, 10) if magnitude * factor >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [round(index * step, 12) for index in range(first, math.floor(high / step + 1e-9) + 1)]


def seconds_text(seconds: float) -> str:
    """`840 ms`, `12.3 s`, `3 min 20 s`, `5 h 12 min`."""
    if seconds < 1.0:
        return f"{seconds * 1e3:.0f} ms"
    if seconds < 100.0:
        return f"{seconds:.1f} s"
    if seconds < 3600.0:
        return f"{seconds // 60:.0f} min {seconds % 60:.0f} s"
    return f"{seconds // 3600:.0f} h {seconds % 3600 / 60:.0f} min"


def percent_text(part: float) -> str:
    """`62 %`, `3.1 %`; never broken over two lines."""
    if 0.0 < part < 0.0995:
        return f"{part * 100:.1f}\u00a0%" if part >= 0.0005 else "<0.1\u00a0%"
    return f"{part * 100:.0f}\u00a0%"


def _text(value: object) -> str:
    return number(value) if isinstance(value, float) else str(value)
