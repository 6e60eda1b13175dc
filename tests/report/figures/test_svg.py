"""The small pieces are well-formed and readable."""

from __future__ import annotations

import pytest

from rlmux.report.figures.svg import nice_ticks, number, percent_text, seconds_text, tag


def test_tags_escape_what_they_hold() -> None:
    assert (
        tag("text", x=1.0, data_a='"<', class_="a", style=None) == '<text x="1" data-a="&quot;&lt;" class="a"></text>'
    )


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [(0.0, 1.0, [0.0, 0.25, 0.5, 0.75, 1.0]), (0.0, 83.0, [0.0, 25.0, 50.0, 75.0]), (2.0, 2.0, [2.0])],
)
def test_ticks_are_round(low: float, high: float, ticks: list[float]) -> None:
    assert nice_ticks(low, high, 4) == ticks


def test_numbers_are_short() -> None:
    assert [number(x) for x in (1.0, 1.25, 1.256, -0.001, 100.0)] == ["1", "1.25", "1.26", "0", "100"]
    assert [seconds_text(s) for s in (0.84, 12.34, 200.0, 18720.0)] == [
        "840 ms",
        "12.3 s",
        "3 min 20 s",
        "5 h 12 min",
    ]
    assert [percent_text(x).replace("\u00a0", " ") for x in (0.0, 0.0001, 0.031, 0.62)] == [
        "0 %",
        "<0.1 %",
        "3.1 %",
        "62 %",
    ]
