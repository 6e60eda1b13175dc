"""A lane that stays open for ten days and takes a thousand pipelines is read as on its first day."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime, timedelta

import pytest
from tests.log_script import long_lane
from tests.service.pages_server import Pages
from tests.waiting import until

pytestmark = pytest.mark.xdist_group("browser")
NUM_PIPELINES = 1000
GUTTER = 138
"""Pixels of names before the timeline's plot."""


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
    assert page.locator("table[aria-label='needs you'] .name").first.inner_text() == ("job-0999")
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


def test_the_timeline_has_rows_and_names_of_the_pipelines_in_view(long, enter):
    begun_s = long.get("/pipelines/long/job-0500")["admitted_s"]
    page = enter(long, f"/timeline?t0={begun_s + 100}&t1={begun_s + 2000}")
    page.wait_for_selector("canvas[data-rows='job-0500 job-0501 job-0502']")
    assert page.inner_text(".key").startswith("job-0500\njob-0501\njob-0502\n")
    page.keyboard.press("f")
    page.wait_for_selector("text=and 984 more in view")
    rows = page.get_attribute("canvas", "data-rows").split()
    assert (len(rows), page.locator(".key .name").all_inner_texts()) == (16, rows)


def test_where_a_thousand_pipelines_lie_in_time_is_less_than_40_kb(long):
    columns = long.client.get("/timeline/long", params={"lives": "columns"})
    assert len(columns.content) <= 40_000
    found = columns.json()["life_columns"]
    for place, life in enumerate(long.get("/timeline/long")["lives"]):
        assert found["projects"][found["project"][place]] == life["project"]
        assert found["begun_ms"][place] == round(life["begun_s"] * 1000)
        assert found["begun_ms"][place] + found["lasted_ms"][place] == round(life["ended_s"] * 1000)
        assert (place not in found["has_no_rewards"]) == life["has_rewards"]


def test_a_drag_changes_the_rows_when_it_rests(long, enter):
    begun_s = long.get("/pipelines/long/job-0500")["admitted_s"]
    page = enter(long, f"/timeline?t0={begun_s + 100}&t1={begun_s + 800}")
    page.wait_for_selector("canvas[data-rows='job-0500']")
    box = page.locator("canvas").bounding_box()
    page.mouse.move(box["x"] + 1000, box["y"] + 95)
    page.mouse.down()
    page.mouse.move(box["x"] + 200, box["y"] + 95, steps=8)
    page.wait_for_selector("canvas[data-rows='job-0500 job-0501']")
    page.mouse.up()


def test_rows_by_project_are_in_the_address(long, enter):
    page = enter(long, "/timeline")
    page.select_option("label:has-text('rows') select", "project")
    page.wait_for_selector("canvas[data-rows='team-0 team-1 team-2 team-3 team-4']")
    assert "rows=project" in page.url
    page.reload()
    page.wait_for_selector("canvas[data-rows^='team-0']")


def test_a_click_on_a_gap_says_what_fills_it(long, enter):
    begun_s = long.get("/pipelines/long/job-0500")["admitted_s"]
    page = enter(long, f"/timeline?t0={begun_s}&t1={begun_s + 864}")
    page.wait_for_selector("canvas[data-state=whole]")
    box = page.locator("canvas").bounding_box()
    gap_s = 216 + 50  # of four steps of 216 s, the second one's rollout
    page.mouse.click(box["x"] + GUTTER + gap_s / 864 * (box["width"] - GUTTER), box["y"] + 150)
    said = page.inner_text(".fill")
    assert "its next update begins when job-0500's rollout of step 2 ends at" in said
    assert "waiting for its own rollout 2 on rollout-0.0" in page.inner_text(".measure")


@pytest.mark.parametrize(
    "path", ["/timeline", "/pipelines", "/queue", "/shares", "/compare", "/pipelines/long/job-0999"]
)
def test_every_page_opens(long, enter, path):
    page = enter(long, path)
    page.wait_for_selector("main h1")
    assert page.locator(".banner:not(.soft)").count() <= 1


@pytest.mark.parametrize("path", ["/pipelines", "/pipelines/long/job-0999?tab=steps"])
def test_usual_columns_fit_in_1280_pixels(long, enter, path):
    page = enter(long, path)
    page.wait_for_selector("tbody tr")
    assert page.locator(".scroll").evaluate("(box) => box.scrollWidth <= box.clientWidth")


@pytest.mark.parametrize(
    "path", ["/fleet", "/pipelines", "/queue", "/timeline", "/compare?of=long/job-0999,long/job-0998", "/whatif"]
)
def test_no_page_scrolls_sideways_at_390_pixels(long, enter, path):
    page = enter(long, path)
    page.set_viewport_size({"width": 390, "height": 844})
    page.wait_for_load_state("networkidle")
    until(lambda: page.evaluate("document.documentElement.scrollWidth <= innerWidth"), "a page that fits")


def test_a_word_is_explained_by_the_keyboard_and_by_a_tap(long, enter):
    page = enter(long, "/fleet", has_touch=True)
    page.focus("button.term:text-is('bubble')")
    page.keyboard.press("Enter")
    page.wait_for_selector(".explained:popover-open:has-text('Device time that a pipeline holds')")
    page.keyboard.press("Escape")
    page.wait_for_selector(".explained:popover-open", state="detached")
    page.goto(f"{long.url}/pipelines")
    page.tap("th:has-text('slowdown') button.help")
    page.wait_for_selector(".explained:popover-open:has-text('alone on the same devices')")
    box = page.locator(".explained:popover-open").bounding_box()
    assert box["x"] + box["width"] <= 1280
    assert "sort=" not in page.url


@pytest.mark.parametrize(("path", "label", "name", "heading"), [
    ("/fleet", "device-seconds by pipeline", "charges", "in all"),
    ("/fleet", "needs you", "needs", "pipeline"),
    ("/pipelines/long/job-0500?tab=steps", "steps", "steps", "took"),
])  # fmt: skip
def test_tables_take_their_order_from_a_heading_and_the_address(long, enter, path, label, name, heading):
    page = enter(long, path)
    table = page.locator(f"table[aria-label='{label}']")
    table.locator(f"th a:text-is('{heading}')").click()
    table.locator("th[aria-sort=ascending]").wait_for()
    assert f"{name}.sort=" in page.url
    rows = table.locator("tbody tr").all_inner_texts()
    page.reload()
    table.locator("th[aria-sort=ascending]").wait_for()
    assert table.locator("tbody tr").all_inner_texts() == rows


def test_filters_and_columns_are_in_the_address_and_survive_a_reload(long, enter):
    page = enter(long, "/pipelines")
    page.wait_for_selector("tbody tr:has-text('job-0999')")
    assert page.locator("tbody tr").count() == 100
    page.select_option("select[aria-label=project]", "team-1")
    page.select_option("select[aria-label=state]", "failed")
    page.wait_for_selector("text=25 of 1,000")
    page.click("summary:text-is('Columns')")
    page.uncheck("label:has-text('tokens') input")
    page.check("label:has-text('ended') input")
    page.click("th >> text=ended")
    page.wait_for_selector("th[aria-sort=ascending]:has-text('ended')")
    shown = page.locator("tbody .name").all_inner_texts()
    assert shown == [
        row["name"] for row in long.get("/pipelines", project="team-1", status="failed", sort="ended_s")["items"]
    ]
    page.reload()
    page.wait_for_selector("th[aria-sort=ascending]:has-text('ended')")
    heads = page.locator("thead th").all_inner_texts()
    assert "tokens" not in heads
    assert page.locator("tbody .name").all_inner_texts() == shown
    assert page.input_value("select[aria-label=project]") == "team-1"


def test_a_filter_that_nothing_meets_is_named_and_can_be_cleared(long, enter):
    page = enter(long, "/pipelines?user=user-99&since=2020-01-01")
    page.wait_for_selector("text=No pipeline matches user user-99, submitted from 2020-01-01.")
    page.click(".empty button")
    page.wait_for_selector("tbody tr:has-text('job-0999')")
    assert "user" not in page.url


def test_groups_of_a_thousand_pipelines_are_sums_of_the_server(long, enter):
    page = enter(long, "/pipelines")
    page.wait_for_selector("tbody tr")
    asked: list[str] = []
    page.on("response", lambda answer: asked.append(answer.url))
    page.select_option("select[aria-label=groups]", "project")
    page.wait_for_selector("tfoot td:text-is('1,000')")
    assert page.locator("tbody tr").count() == 5
    assert not [url for url in asked if "limit=100" in url]
    page.click("tbody a:text-is('team-2')")
    page.wait_for_selector("text=200 of 1,000")


def test_the_axis_has_one_unit_and_the_time_of_day(long, enter):
    page = enter(long, "/timeline?t0=86400&t1=88200", timezone_id="UTC")
    page.wait_for_selector("canvas[data-axis*=min]")
    marks = [mark.split(" ", 2) for mark in page.get_attribute("canvas", "data-axis").split("|")]
    assert {unit for _, unit, _ in marks} == {"min"}
    begun = datetime.fromisoformat(long.get("/lanes/long")["created"])
    for minutes, _, words in marks:
        assert words.endswith(f"{begun + timedelta(minutes=int(minutes)):%H:%M}")


def test_events_have_the_time_of_day_beside_the_runs_time(long, enter):
    page = enter(long, "/fleet", timezone_id="UTC")
    newest = long.get("/lanes/long/events", limit=1, migrations=False)["items"][0]
    at = datetime.fromisoformat(long.get("/lanes/long")["created"]) + timedelta(seconds=newest["time_s"])
    row = page.locator("table[aria-label='what happened'] tbody tr").first
    assert row.locator("td").first.inner_text() == f"{at:%b} {at.day} {at:%H:%M:%S} · 9 d 23 h"


def test_where_the_time_went_is_summed_by_project_and_day(long, enter):
    page = enter(long, "/fleet")
    page.select_option("select[aria-label='where the time went, by']", "project")
    page.wait_for_selector("table[aria-label='sums by project'] tfoot td:text-is('1,000')")
    page.select_option("select[aria-label='where the time went, by']", "day")
    page.wait_for_selector("table[aria-label='sums by day'] tbody tr")
    assert "by=day" in page.url
    page.click("table[aria-label='sums by day'] tbody a >> nth=1")
    page.wait_for_selector("text=of 1,000")
