"""A trajectory token by token in a browser: what was unlikely has an underline and words beside its colour."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.log_script import AlternatingRun
from tests.service.pages.test_access import AXE, faults_of
from tests.service.pages_server import Pages

from rlmux.report.samples import KeptSample, SampledToken, SampleWriter

pytestmark = pytest.mark.xdist_group("browser")
TOKENS = (
    SampledToken("car", -0.01, 4),
    SampledToken("ry", -0.5, 4),
    SampledToken(" the", -1.5, 5),
    SampledToken(" one", -3.0, 5),
    SampledToken("!", -9.0, 5),
)


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pages]:
    folder: Path = AlternatingRun(num_steps=3).script.write(tmp_path_factory.mktemp("runs") / "demo")
    (folder / "sort").mkdir()
    writer = SampleWriter(folder / "sort" / "samples.db")
    figures = {"reward": 0.5, "advantage": 0.1, "stop": "stop", "tokens": 5, "num_turns": 1, "first_version": 4}
    turns = ((True, "carry the one!"), (False, "ok"))
    whole = KeptSample(
        prompt=0, sample=0, prompt_text="add", turns=turns, tokens_by_turn=(TOKENS,), last_version=5, **figures
    )
    writer.add(1, [whole])
    writer.close()
    served = Pages(folder)
    yield served
    served.close()


def test_tokens_have_their_likelihood_and_the_weights_that_made_them(kept, enter):
    page = enter(kept, "/pipelines/demo/sort?tab=samples&open=1.0.0")
    page.wait_for_selector(".sample pre.model:has-text('carry the one!')")
    page.keyboard.press("t")
    page.wait_for_selector("pre.tokens")
    assert "tokens=1" in page.url
    shown = page.locator("pre.tokens span")
    assert shown.all_text_contents() == [token.text for token in TOKENS]
    assert [each.get_attribute("class") or "" for each in shown.all()] == ["", "t1", "t2", "t3", "t4"]
    lines = [each.evaluate("(one) => getComputedStyle(one).textDecorationStyle") for each in shown.all()]
    assert lines[1:] == ["dotted", "dashed", "solid", "double"]
    assert "probability 0.00012" in (shown.last.get_attribute("title") or "")
    assert page.locator("pre.tokens sup").all_text_contents() == ["v4", "v5"]
    assert "rare: below 0.01" in page.inner_text(".token-key")
    page.keyboard.press("t")
    page.wait_for_selector(".sample pre.model:not(.tokens)")


@pytest.mark.skipif(not AXE.exists(), reason="needs axe-core, which `make pages` installs")
@pytest.mark.parametrize("theme", [pytest.param("light", marks=pytest.mark.slow), "dark"])
def test_the_view_by_tokens_has_no_serious_fault(kept, enter, theme):
    page = enter(kept, "/pipelines/demo/sort?tab=samples&open=1.0.0&tokens=1", color_scheme=theme, bypass_csp=True)
    page.wait_for_selector("pre.tokens")
    assert faults_of(page, theme) == []
