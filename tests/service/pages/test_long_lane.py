"""A lane that stays open for ten days and takes a thousand pipelines is read as on its first day."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.log_script import long_lane
from tests.service.pages_server import Pages

pytestmark = pytest.mark.xdist_group("browser")
NUM_PIPELINES = 1000


@pytest.fixture(scope="module")
def long(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pages]:
    served = Pages(long_lane(NUM_PIPELINES).write(tmp_path_factory.mktemp("runs") / "long"))
    yield served
    served.close()


def test_what_failed_last_is_on_top_until_it_was_seen(long, enter):
    page = enter(long, "/fleet")
    page.wait_for_selector("h2:text('Needs you')")
    failed = page.locator("td.state.failed")
    assert "row 999 is not a number" in page.inner_text("main")
    assert page.locator("h2:text('Needs you') + table .name, h2:text('Needs you') + table a").first.inner_text() == (
        "job-0999"
    )
    assert failed.count() >= 8
    page.click("text=I have seen what failed")
    page.wait_for_selector("h2:text('Needs you')", state="detached")
    page.reload()
    page.wait_for_selector("h2:text('Where the time of all devices went')")
    assert page.locator("h2:text('Needs you')").count() == 0


def test_the_newest_pipelines_come_first_and_all_are_counted(long, enter):
    page = enter(long, "/fleet")
    page.wait_for_selector("text=all 1,000")
    assert [row["name"] for row in long.get("/pipelines", sort="active", limit=2)["items"]] == ["job-0999", "job-0998"]


def test_the_causes_name_eight_pipelines_and_sum_the_rest(long, enter):
    lane = long.get("/lanes/long")
    named = {charge["pipeline"] for charge in lane["charges"]}
    assert len(named - {None, "*"}) == 8
    assert sum(charge["seconds"] for charge in lane["charges"]) == pytest.approx(2 * lane["makespan_s"])
    assert len(long.client.get("/lanes/long").content) < 20_000, "what every page asks for, again and again"
    page = enter(long, "/fleet")
    page.wait_for_selector("text=992 others")


@pytest.mark.parametrize(
    "path", ["/timeline", "/pipelines", "/queue", "/shares", "/compare", "/pipelines/long/job-0999"]
)
def test_every_page_opens(long, enter, path):
    page = enter(long, path)
    page.wait_for_selector("main h1")
    assert page.locator(".banner:not(.soft)").count() <= 1
