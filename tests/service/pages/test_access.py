"""The pages for readers with other eyes and without a mouse: the rules of axe-core, light and dark."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.xdist_group("browser")
AXE = Path(__file__).parents[3] / "node_modules" / "axe-core" / "axe.min.js"
PLACES = ("Timeline", "Queue", "Shares", "Audit", "Pipelines", "sort", "Steps", "compare", "Fleet")
RULES = {
    "light": {"type": "tag", "values": ["wcag2a", "wcag2aa"]},
    "dark": {"type": "rule", "values": ["color-contrast"]},
}
"""In the dark only colours differ."""


@pytest.mark.skipif(not AXE.exists(), reason="needs axe-core, which `make pages` installs")
@pytest.mark.parametrize("theme", ["light", pytest.param("dark", marks=pytest.mark.slow)])
def test_no_page_has_a_serious_fault(shown, enter, theme):
    page = enter(shown, "/fleet", color_scheme=theme, bypass_csp=True)  # axe is put into the page
    for place in PLACES:
        page.click(f"a:text-is('{place}')")
        page.wait_for_selector("main table, main canvas, main .empty")
        assert (place, faults_of(page, theme)) == (place, [])


def faults_of(page: Any, theme: str) -> list[str]:
    """Serious faults of what is shown, by axe-core's rules."""
    if not page.evaluate("() => 'axe' in window"):
        page.add_script_tag(path=AXE)
    found = page.evaluate("(rules) => axe.run({runOnly: rules}).then((told) => told.violations)", RULES[theme])
    return [
        f"{each['id']}: {each['nodes'][0]['html']} {each['nodes'][0]['failureSummary']}"
        for each in found
        if each["impact"] in ("serious", "critical")
    ]
