"""What a reader does in a browser, and what the pages say: the same as the API."""

from __future__ import annotations

import csv
import json
import re
import shutil
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.log_script import AlternatingRun
from tests.service.pages_server import Pages
from tests.waiting import until

pytestmark = pytest.mark.xdist_group("browser")
GUTTER = 138
"""Pixels of names before the timeline's plot."""


def test_one_click_logs_in_and_leaves_no_ticket_in_the_address(shown, context):
    page = context().new_page()
    page.goto(f"{shown.url}/login#t={shown.ticket()}")
    page.wait_for_selector("text=Where the time of all devices went")
    assert page.url.startswith(f"{shown.url}/fleet")
    assert "#" not in page.evaluate("location.href")


def test_a_used_ticket_is_told_and_the_token_logs_in(shown, context):
    ticket = shown.ticket()
    first, second = context().new_page(), context().new_page()
    first.goto(f"{shown.url}/login#t={ticket}")
    first.wait_for_selector("main h1")
    second.goto(f"{shown.url}/login?next=%2Fpipelines#t={ticket}")
    second.wait_for_selector("text=This link has been used")
    second.fill("input[name=token]", shown.token)
    second.keyboard.press("Enter")
    second.wait_for_selector("h1:text('Pipelines')")


def test_after_a_refused_token_the_next_one_is_typed_over_it(shown, context):
    page = context().new_page()
    page.goto(f"{shown.url}/login?next=%2Fpipelines")
    page.wait_for_selector("input[name=token]:focus")
    for wrong in ("wrong", "wrong again"):
        page.keyboard.type(wrong)
        page.keyboard.press("Enter")
        page.wait_for_selector("[role=alert]:has-text('the token that you were given')")
        page.wait_for_selector("button:enabled")
        page.wait_for_selector("input[name=token]:focus")
        chosen = page.evaluate("[document.activeElement.selectionStart, document.activeElement.selectionEnd]")
        assert chosen == [0, len(wrong)]
    page.keyboard.insert_text(shown.token)
    page.keyboard.press("Enter")
    page.wait_for_selector("h1:text('Pipelines')")


def test_a_page_leads_to_the_login_and_back_only_within_the_service(shown, context):
    page = context().new_page()
    page.goto(f"{shown.url}/timeline?t0=1&t1=2")
    page.wait_for_url("**/login?next=*")
    page.goto(f"{shown.url}/login?next=%2F%2Fevil.test%2F#t={shown.ticket()}")
    page.wait_for_selector("main h1")
    assert page.url.startswith(f"{shown.url}/fleet")


@pytest.mark.slow
def test_a_page_whose_session_ends_leads_to_the_login(shown, context):
    browser = context()
    session = {"Origin": shown.url, "Content-Type": "application/json"}
    assert browser.request.post(f"{shown.url}/api/v1/login", data={"ticket": shown.ticket()}, headers=session).ok
    page = browser.new_page()
    page.goto(f"{shown.url}/fleet")
    page.wait_for_selector(".pulse:text('run is over')")
    assert browser.request.post(f"{shown.url}/api/v1/logout", headers=session).ok
    page.wait_for_url("**/login?next=%2Ffleet*")


def test_the_fleet_has_the_lanes_shares_and_pipelines(shown, enter):
    page = enter(shown, "/fleet")
    lane = shown.get("/lanes/demo")
    whole_s = sum(lane["seconds"].values())
    tiles = dict(
        zip(page.locator(".tiles dt").all_inner_texts(), page.locator(".tiles dd").all_inner_texts(), strict=True)
    )
    assert {kind: tiles[kind] for kind in lane["seconds"]} == {
        k: percent(s / whole_s) for k, s in lane["seconds"].items()
    }
    assert tiles["switches"] == str(lane["num_switches"])
    assert {name for name in page.locator(".name").all_inner_texts() if name} >= {"sort", "tools"}


@pytest.mark.slow
def test_a_run_whose_log_was_never_read_says_so_and_appears_by_itself(finished_run, tmp_path, context):
    folder = shutil.copytree(finished_run, tmp_path / "demo", ignore=shutil.ignore_patterns("index*"))
    served, wrong = Pages(folder, is_started=False), []
    try:
        page = context().new_page()
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.goto(f"{served.url}/login#t={served.ticket()}")
        page.wait_for_selector("text=The page opens once the log has been read")
        served.dashboard.start()
        page.wait_for_selector("text=Where the time of all devices went")
        assert wrong == []
    finally:
        served.close()


def percent(part: float) -> str:
    value = part * 100
    if 0 < value < 0.05:
        return "< 0.1 %"
    return f"{value:.1f} %" if value != 0 and value < 9.95 else f"{value:.0f} %"


def test_the_list_has_the_apis_rows_sorted_and_filtered_by_the_server(shown, enter):
    page = enter(shown, "/pipelines")
    rows = {row["name"]: row for row in shown.get("/pipelines", lane="demo")["items"]}
    page.wait_for_selector("tbody tr")
    for line in page.locator("tbody tr").all():
        cells = line.locator("td").all_inner_texts()
        row = rows.pop(cells[0])
        assert cells[1] == row["status"]
        assert cells[2] == f"{row['step']}/{row['num_steps']}"
        assert cells[4].startswith(f"{row['step_slowdown']:.2f}")
    assert rows == {}
    page.click("th >> text=name")
    page.click("th >> text=name")
    page.wait_for_function("() => document.querySelector('tbody .name')?.innerText === 'tools'")
    assert "sort=-name" in page.url
    page.fill("[data-search]", "sor")
    page.wait_for_function("() => document.querySelectorAll('tbody tr').length === 1")


def test_the_timeline_names_what_the_api_has_under_the_pointer(shown, enter):
    page = enter(shown, "/timeline")
    canvas = page.locator("canvas")
    page.wait_for_function("() => document.querySelector('.key')?.innerText.includes('sort')")
    box, timeline = canvas.bounding_box(), shown.get("/timeline/demo")
    wide = next(one for one in longest_first(shown) if one["device"] == 0)
    share = (wide["start"] + wide["seconds"] / 2 - timeline["start_s"]) / (timeline["end_s"] - timeline["start_s"])
    page.mouse.move(box["x"] + GUTTER + share * (box["width"] - GUTTER), box["y"] + 95)
    name = timeline["pipelines"][wide["pipeline"]]
    page.wait_for_function(f"() => document.querySelector('.reading')?.innerText.includes({name!r})")
    said = page.inner_text(".reading")
    assert said.startswith(timeline["devices"][0]["id"])
    assert f"step {wide['step']}" in said
    assert f"{wide['seconds']:.2f} s" in said


def longest_first(shown: Any) -> list[dict[str, Any]]:
    """Work of the whole run, as the raw answer has it."""
    data = shown.client.get("/timeline/demo/intervals").content
    (size,) = struct.unpack_from("<I", data)
    header = json.loads(data[4 : 4 + size])
    types = {"f64": "<f8", "f32": "<f4", "u8": "u1", "u16": "<u2", "u32": "<u4"}
    columns = {
        each["name"]: np.frombuffer(data, types[each["type"]], header["count"], 4 + size + each["offset"])
        for each in header["columns"]
    }
    rows = [{name: column[at].item() for name, column in columns.items()} for at in range(header["count"])]
    return sorted((row for row in rows if row["cause"] == 0), key=lambda row: -row["seconds"])


def test_a_measured_window_has_the_apis_shares(shown, enter):
    page = enter(shown, "/timeline")
    box = page.locator("canvas").bounding_box()
    page.keyboard.down("Shift")
    page.mouse.move(box["x"] + 400, box["y"] + 95)
    page.mouse.down()
    page.mouse.move(box["x"] + 700, box["y"] + 95, steps=4)
    page.mouse.up()
    page.keyboard.up("Shift")
    page.wait_for_selector(".measure td")
    timeline = shown.get("/timeline/demo")
    per_pixel_s = (timeline["end_s"] - timeline["start_s"]) / (box["width"] - GUTTER)
    t0, t1 = (timeline["start_s"] + (x - GUTTER) * per_pixel_s for x in (400, 700))
    measured = shown.get("/timeline/demo/measure", t0=t0, t1=t1)
    told = page.locator(".measure td:last-child").all_inner_texts()
    shares = [float(text.removeprefix("< ").split()[0]) for text in told]
    assert shares == pytest.approx([100 * item["share"] for item in measured["items"]], abs=0.6)
    page.keyboard.press("Escape")
    assert page.locator(".measure").count() == 0


def test_a_view_is_in_the_address_and_comes_back_from_it(shown, enter):
    page = enter(shown, "/timeline?t0=1&t1=3&q=sort")
    assert page.input_value("[data-search]") == "sort"
    page.click("button[aria-label='zoom in']")
    page.wait_for_url(re.compile(r"t0=1\.4000.*t1=2\.6000"))
    address = page.url
    page.reload()
    page.wait_for_selector("canvas")
    page.wait_for_timeout(400)  # longer than a view takes to reach the address
    assert page.url == address
    page.keyboard.press("f")
    page.wait_for_function("() => !location.search.includes('t0')")


def test_a_step_of_the_table_opens_its_time_on_the_timeline(shown, enter):
    page = enter(shown, "/pipelines/demo/sort?tab=steps")
    page.wait_for_selector("tbody tr")
    steps = shown.get("/pipelines/demo/sort/steps")["items"]
    lines = page.locator("tbody tr").all_inner_texts()
    assert [int(line.split()[0]) for line in lines] == [step["step"] for step in reversed(steps)]
    delivered = page.locator("tbody td:last-child")
    assert delivered.all_inner_texts() == [step["delivery"]["text"] for step in reversed(steps)]
    assert delivered.last.get_attribute("title") == steps[0]["delivery"]["says"]
    assert page.locator("tbody td.bad").all_inner_texts() == ["v3 ≠ trained"]
    page.locator("tbody a").first.click()
    page.wait_for_selector("canvas")
    assert f"t1={steps[-1]['end_s']}" in page.url


def test_curves_have_every_metric_and_logs_their_control_characters_as_signs(shown, enter):
    page = enter(shown, "/pipelines/demo/sort")
    names = shown.get("/pipelines/demo/sort")["metrics"]
    page.wait_for_selector(".chart canvas")
    drawn, constant = (
        {one.get_attribute("title") for one in page.locator(place).all()}
        for place in (".chart h3 b", ".constants span")
    )
    assert "Reward, mean" in page.inner_text(".charts")
    assert (drawn | constant, drawn & constant) == (set(names), set())
    series = shown.get("/pipelines/demo/sort/metrics")["series"]
    assert constant == {name for name in names if len(set(series[name]["y"])) == 1}
    page.keyboard.press("4")
    page.wait_for_selector("pre:has-text('red')")
    assert page.inner_text("pre") == "step 1\nred and ␇ a bell\n"


def test_the_keyboard_reaches_everything(shown, enter):
    page = enter(shown, "/fleet")
    for keys, title in (("gp", "Pipelines"), ("gt", "Timeline"), ("gp", "Pipelines")):
        for key in keys:
            page.keyboard.press(key)
        page.wait_for_selector(f"h1:text('{title}')")
    page.wait_for_selector("tbody tr")
    page.keyboard.press("j")
    page.wait_for_selector("tr.chosen")
    page.keyboard.press("Enter")
    page.wait_for_selector(".tabs")
    page.keyboard.press("?")
    page.wait_for_selector("dialog[open]")
    assert "Timeline" in page.inner_text("dialog")
    page.keyboard.press("Escape")
    assert page.locator("dialog[open]").count() == 0


@pytest.mark.slow
def test_all_tabs_of_a_browser_share_one_stream_and_another_takes_over(shown, enter):
    first = enter(shown, "/fleet")
    streams: list[str] = []
    first.context.on("request", lambda asked: streams.append(asked.url) if "/stream" in asked.url else None)
    others = [enter(shown, "/pipelines", inside=first.context) for _ in range(2)]
    others[0].wait_for_timeout(500)
    assert streams == []  # the first has it already
    first.close()
    others[0].wait_for_timeout(1000)
    assert len(streams) == 1


def test_a_hidden_tab_reads_nothing_until_it_is_shown(shown, enter):
    page = enter(shown, "/shares")
    page.clock.install()
    page.evaluate("Object.defineProperty(document, 'hidden', {get: () => window.isHidden})")
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    change = """hidden => new Promise(done => {
        window.isHidden = hidden;
        new BroadcastChannel('rlmux-live').onmessage = done;  // after the page's own
        const report = {message: {key: 'reset', data: {}}, pulse: {}};
        new BroadcastChannel('rlmux-live').postMessage({report});
    }).then(() => true)"""
    page.evaluate(change, False)
    page.clock.run_for(5000)
    until(lambda: page.title() and asked, "a tab that is not hidden to read again")
    page.wait_for_load_state("networkidle")
    asked.clear()
    page.evaluate(change, True)
    page.clock.run_for(5000)
    page.wait_for_load_state("networkidle")
    assert asked == []
    page.evaluate("window.isHidden = false; document.dispatchEvent(new Event('visibilitychange'))")
    until(lambda: page.title() and asked, "the shown tab to read again")


def test_labels_and_a_note_are_set_from_the_row(shown, enter):
    page = enter(shown, "/pipelines")
    page.click("[aria-label='labels and note of sort']")
    page.fill("input[name=labels]", "baseline, for the  paper")
    page.fill("textarea[name=note]", "KL was off")
    page.click("button:text-is('Save')")
    page.wait_for_selector(".label:text-is('for the paper')")
    assert "KL was off" in enter(shown, "/pipelines/demo/sort", inside=page.context).inner_text(".note")
    assert page.locator(".label").all_inner_texts() == ["baseline", "for the paper"]
    shown.client.post("/pipelines/demo/sort/labels", json={"labels": [], "note": ""})


def test_a_search_over_all_runs_opens_what_it_finds(shown, enter):
    page = enter(shown, "/fleet")
    page.keyboard.press("s")
    page.keyboard.type("tool")
    page.wait_for_selector(".found a:has-text('tools')")
    page.keyboard.press("Enter")
    page.wait_for_selector("h1:has-text('tools')")
    assert page.locator(".found").count() == 0


def test_two_pipelines_are_compared_on_one_axis(shown, enter):
    page = enter(shown, "/pipelines/demo/sort")
    page.click("a:text-is('compare')")
    page.select_option("select[aria-label='add a pipeline']", "demo/tools")
    page.wait_for_selector("[role=status]:has-text('no step whose weights')")
    page.wait_for_selector(".chart canvas")
    assert page.url.endswith("of=demo%2Fsort%2Cdemo%2Ftools")
    assert page.locator(".compared thead th").all_inner_texts()[1:3] == ["demo / sort", "demo / tools"]


def test_marked_pipelines_are_compared_in_the_colours_of_the_list(shown, enter):
    page = enter(shown, "/pipelines")
    colours = [page.locator(f"tr:has-text('{name}') .dot").get_attribute("class") for name in ("sort", "tools")]
    page.check("[aria-label='compare sort']")
    page.check("[aria-label='compare tools']")
    page.click("a:text-is('compare 2')")
    page.wait_for_selector(".compared .dot")
    dots = page.locator(".compared .dot").all()
    assert [dot.get_attribute("class") for dot in dots] == colours


@pytest.mark.slow
def test_a_pipeline_of_another_lane_is_shown_with_its_own_lane(tmp_path, enter):
    for name in ("one", "two"):
        AlternatingRun(num_steps=2).script.write(tmp_path / name)
    served = Pages(tmp_path)
    try:
        page = enter(served, "/pipelines/two/sort?lane=one")  # an old link, or a click from a page of lane one
        page.wait_for_selector("h1:has-text('sort')")
        assert page.input_value(".top select") == "two"
        page.click("nav >> text=Timeline")
        page.wait_for_selector("h1:has-text('Timeline'), canvas")
        assert page.input_value(".top select") == "two"
        page.go_back()
        page.select_option(".top select", "one")
        page.wait_for_selector("h1:has-text('Pipelines')")
        assert page.input_value(".top select") == "one"
    finally:
        served.close()


def saved(page, button: str) -> bytes:
    with page.expect_download() as waiting:
        page.click(f"button:text-is('{button}')")
    return Path(waiting.value.path()).read_bytes()


def test_the_view_of_the_timeline_is_saved_as_table_picture_and_trace(shown, enter):
    page = enter(shown, "/timeline")
    page.wait_for_selector("canvas[data-state=whole]")
    rows = list(csv.DictReader(saved(page, "CSV").decode().splitlines()))
    lane = shown.get("/lanes/demo")
    for kind, seconds in lane["seconds"].items():
        spent_s = sum(float(row["seconds"]) for row in rows if row["kind"] == kind)
        assert spent_s == pytest.approx(seconds, abs=1e-6), kind
    assert {row["pipeline"] for row in rows} >= {"sort", "tools"}
    events = json.loads(saved(page, "Perfetto"))["traceEvents"]
    assert sum(event["ph"] == "X" for event in events) == len(rows)
    assert {event["args"]["name"] for event in events if event["ph"] == "M"} == {"rollout-0.0", "train-0.0"}
    assert saved(page, "PNG").startswith(b"\x89PNG")


@pytest.mark.slow
def test_a_question_is_answered_with_both_futures_of_each_pipeline(tmp_path, enter):
    script = AlternatingRun(num_steps=30).script
    script.file = """
cluster: {pools: {rollout: {devices: 1}, train: {devices: 1}}}
policy: rollmux
pipelines: [{name: sort, steps: 30, task: sort}]
"""
    served = Pages(script.write(tmp_path / "demo", len(script.rows) // 2))
    try:
        page = enter(served, "/whatif")
        assert page.is_disabled("button:text('Ask')")
        page.fill("input[aria-label='how many more']", "2")
        page.select_option("select[aria-label=like]", "sort")
        page.click("button:text('Ask')")
        page.wait_for_selector("td:has-text('sort-3')", timeout=60_000)
        rows = {line.split()[0]: line for line in page.locator("tbody tr").all_inner_texts()}
        assert "new" in rows["sort-2"]
        _, now, then, change, _ = rows["sort"].split("\t")
        assert all(" s to " in ends for ends in (now, then, change)), "a range, and no single number"
        assert change.startswith("+")
        assert "rlmux whatif --add=2 --like=sort" in page.inner_text("main")
    finally:
        served.close()
