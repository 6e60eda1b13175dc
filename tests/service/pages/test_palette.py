"""Colours: a pipeline's is told from each cause's and from each other pipeline's, in both themes."""

from __future__ import annotations

import itertools
import math
import re
from pathlib import Path

import pytest

from rlmux.report.figures.svg import PALETTE
from rlmux.service.dashboard.pages import DIST

STYLE = DIST.parent / "style.css"
CAUSES = ("busy", "switch", "starting", "wait", "tool", "sync", "lost", "control", "held", "idle", "bad")
LEAST = 12.0
"""CIEDE2000 from which two colours side by side are told apart at a glance; 1 is just visible."""


def themes() -> list[dict[str, str]]:
    """The variables of light, of dark by the button, and of dark by the system."""
    blocks = re.findall(r"\{([^{}]*--p0:[^{}]*)\}", Path(STYLE).read_text())
    return [dict(re.findall(r"--([\w-]+):(#[0-9a-f]+)", block)) for block in blocks]


def lab(colour: str) -> tuple[float, float, float]:
    digits = colour[1:] if len(colour) == 7 else "".join(2 * digit for digit in colour[1:])
    red, green, blue = (linear(int(digits[at : at + 2], 16) / 255) for at in (0, 2, 4))
    x = root((0.4124564 * red + 0.3575761 * green + 0.1804375 * blue) / 0.95047)
    y = root(0.2126729 * red + 0.7151522 * green + 0.0721750 * blue)
    z = root((0.0193339 * red + 0.1191920 * green + 0.9503041 * blue) / 1.08883)
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


def linear(part: float) -> float:
    return part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4


def root(part: float) -> float:
    return part ** (1 / 3) if part > 216 / 24389 else (24389 / 27 * part + 16) / 116


def distance(one: str, other: str) -> float:
    """CIEDE2000 (Sharma, Wu, Dalal 2005)."""
    (light_1, a_1, b_1), (light_2, a_2, b_2) = lab(one), lab(other)
    seventh = ((math.hypot(a_1, b_1) + math.hypot(a_2, b_2)) / 2) ** 7
    stretch = 1.5 - 0.5 * math.sqrt(seventh / (seventh + 25**7))
    chroma_1, chroma_2 = math.hypot(a_1 * stretch, b_1), math.hypot(a_2 * stretch, b_2)
    hue_1, hue_2 = (math.degrees(math.atan2(b, a * stretch)) % 360 for a, b in ((a_1, b_1), (a_2, b_2)))
    turn = (hue_2 - hue_1 + 180) % 360 - 180 if chroma_1 * chroma_2 else 0.0
    hue = (hue_1 + turn / 2) % 360 if chroma_1 * chroma_2 else hue_1 + hue_2
    light, chroma = (light_1 + light_2) / 2, (chroma_1 + chroma_2) / 2
    waves = ((0.17, 1, -30), (-0.24, 2, 0), (-0.32, 3, 6), (0.20, 4, -63))
    hues = 1 - sum(size * math.cos(math.radians(times * hue + shift)) for size, times, shift in waves)
    far = (light - 50) ** 2
    by_light = (light_2 - light_1) / (1 + 0.015 * far / math.sqrt(20 + far))
    by_chroma = (chroma_2 - chroma_1) / (1 + 0.045 * chroma)
    by_hue = 2 * math.sqrt(chroma_1 * chroma_2) * math.sin(math.radians(turn) / 2) / (1 + 0.015 * chroma * hues)
    blue = 30 * math.exp(-(((hue - 275) / 25) ** 2))
    twist = -2 * math.sqrt(chroma**7 / (chroma**7 + 25**7)) * math.sin(math.radians(2 * blue))
    return math.sqrt(by_light**2 + by_chroma**2 + by_hue**2 + twist * by_chroma * by_hue)


def test_the_distance_is_that_of_the_published_formula():
    assert distance("#0072b2", "#0072b2") == 0
    assert distance("#ffffff", "#000000") == pytest.approx(100, abs=0.01)
    assert distance("#ff0000", "#0000ff") == pytest.approx(52.88, abs=0.01)


@pytest.mark.parametrize("theme", range(3), ids=["light", "dark", "dark of the system"])
def test_a_pipelines_colour_is_far_from_every_causes_and_every_other_pipelines(theme):
    colours = themes()[theme]
    pipelines = [name for name in colours if re.fullmatch(r"p\d", name)]
    assert len(pipelines) == 8
    pairs = [*itertools.product(pipelines, CAUSES), *itertools.combinations(pipelines, 2)]
    near = {pair: distance(*(colours[name] for name in pair)) for pair in pairs}
    assert {pair: round(far, 1) for pair, far in near.items() if far < LEAST} == {}


def test_both_dark_themes_and_the_reports_have_the_same_colours():
    light, dark, of_system = themes()
    assert dark == of_system
    assert [(light[f"p{at}"], dark[f"p{at}"]) for at in range(8)] == list(PALETTE)
