"""The surface of `timeline.html`'s drawing: one time axis, layers, and texts that are shown where they fit.

fixed       names and scales at the left
behind      tracks and grid
zoomed      everything whose x is time: one group, stretched by the page's script
texts       placed one by one, shown where they fit
"""

from __future__ import annotations

from html import escape

from rlmux.report.figures.svg import number, tag

GUTTER, WIDTH, RIGHT, TOP = 150.0, 1080.0, 26.0, 22.0
"""Pixels: names at the left, the time axis, the margin at the right, the row of marks on top."""
_MAX_TEXTS = 500
_CHARACTER_WIDTH = 5.1


class Canvas:
    """Layers of SVG over [start_s, start_s + makespan_s]; rows are added from top to bottom."""

    def __init__(self, start_s: float, makespan_s: float) -> None:
        self.start_s = start_s
        self.makespan_s = makespan_s
        self.scale = WIDTH / makespan_s
        """Pixels for each second."""
        self.y = TOP
        """Top of the next row."""
        self.fixed: list[str] = []
        self.behind: list[str] = []
        self.zoomed: list[str] = []
        self._texts: list[tuple[float, str]] = []
        """(width, element): the widest are kept."""

    def x(self, time_s: float) -> float:
        """Pixels from the axis' left end, before any zoom."""
        return (time_s - self.start_s) * self.scale

    def add_row(self, shapes: list[str], height: float) -> None:
        """A group of zoomed shapes whose y begins at the next row's top."""
        self.zoomed.append(tag("g", *shapes, transform=f"translate(0 {number(self.y)})"))
        self.y += height

    def add_text(self, text: str, start: float, end: float, y: float, css: str = "gaptext") -> None:
        """A text in the middle of [start, end], hidden while it does not fit there."""
        fits = end - start > len(text) * _CHARACTER_WIDTH + 6
        element = tag(
            "text", escape(text), class_=css, x=(start + end) / 2, y=y, data_a=start, data_b=end,
            style=None if fits else "display:none",
        )  # fmt: skip
        self.add_element(element, end - start)

    def add_element(self, element: str, width: float) -> None:
        """Something among the texts; infinite width keeps it."""
        self._texts.append((width, element))

    def texts(self) -> list[str]:
        """The widest texts, as many as a page takes."""
        return [text for _, text in sorted(self._texts, key=lambda item: -item[0])[:_MAX_TEXTS]]


def titled_shape(css: str, data: str, text: str) -> str:
    """A filled shape with a text that is shown when it is pointed at."""
    return f'<path class="{css}" d="{data}"><title>{escape(text)}</title></path>'
