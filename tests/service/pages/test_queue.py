"""The queue in a browser: a file is mended, submitted and followed; a user does everything with the keyboard alone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.service.lane_here import Endless, Lane
from tests.service.pages_server import Pages
from tests.waiting import until

from rlmux.service.lanes.bundles import Bundles
from rlmux.service.lanes.data_dir import open_root
from rlmux.service.lanes.submission_ledger import SubmissionLedger
from rlmux.service.lanes.submissions import LaneSubmissions

pytestmark = pytest.mark.xdist_group("browser")
WRONG = "pipelines:\n  - name: first\n    task: sort\n    stps: 4\n"


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pages]:
    """The pages of a lane with room for one pipeline at a time."""
    root: Path = tmp_path_factory.mktemp("service") / "root"
    with open_root(root):
        lane = Lane(root, "solo", Endless())
        submissions = LaneSubmissions({"cpu": lane}, SubmissionLedger(root), Bundles(root))  # type: ignore[dict-item]
        served = Pages(root, lanes=["cpu"], more=submissions.addresses())
        yield served
        served.close()
        lane.close()


def file_of(*names: str) -> str:
    return "pipelines:\n" + "".join(f"  - {{name: {name}, task: sort, steps: 9}}\n" for name in names)


@pytest.mark.slow
def test_a_file_is_mended_submitted_and_each_pipeline_says_why_it_waits(service, enter):
    page = enter(service, "/queue")
    page.wait_for_selector("main:has-text('Nothing waits')")
    page.keyboard.press("n")
    page.keyboard.insert_text(WRONG)
    page.keyboard.press("Control+Enter")
    page.wait_for_selector("[role=alert]:has-text('pipelines.first.stps is 4: unknown key; nearest: steps')")
    assert page.inner_text(".excerpt .wrong").split() == ["▸", "4", "stps:", "4"]
    page.keyboard.insert_text("    steps: 4")  # in place of the wrong line, which is chosen
    page.keyboard.press("Control+Enter")
    page.wait_for_selector("[role=status]:has-text('It would be taken: first (4 steps)')")
    page.keyboard.press("Control+Shift+Enter")
    page.wait_for_selector("[role=status]:has-text('first: placed on')")
    assert page.input_value("textarea") == ""
    page.keyboard.insert_text(file_of("second", "third"))
    page.keyboard.press("Control+Shift+Enter")
    page.wait_for_selector("[role=status]:has-text('third: waiting')")
    page.keyboard.press("Escape")

    page.wait_for_selector(".queue tbody tr:nth-child(2)")
    places = page.locator(".queue tbody td:first-child").all_inner_texts()
    assert (places, page.locator(".queue .name").all_inner_texts()) == (["1", "2"], ["second", "third"])
    page.keyboard.press("j")
    page.wait_for_selector("tr.chosen .would:has-text('would start now without first')")
    page.keyboard.press("h")
    page.wait_for_selector("tr.chosen:has-text('held')")
    page.wait_for_function("() => document.querySelector('.queue .name').innerText === 'third'")
    assert page.locator(".queue tbody td:first-child").all_inner_texts()[0] == "1"
    page.keyboard.press("h")
    page.wait_for_function("() => document.querySelector('.queue .name').innerText === 'second'")
    page.keyboard.press("r")
    page.keyboard.type("3")
    page.keyboard.press("Enter")
    page.wait_for_selector("[role=status]:has-text('second: has rank 3')")
    page.keyboard.press("Escape")
    page.locator("tr.chosen input").blur()
    page.keyboard.press("x")
    page.wait_for_selector("button:focus:has-text('End second?')")
    page.keyboard.press("Enter")
    page.wait_for_selector("[role=status]:has-text('second: waits no longer')")
    page.wait_for_function("() => document.querySelectorAll('.queue tbody tr').length === 1")
    assert {"second", "third"} <= {name for row in service.get("/submissions")["items"] for name in names_of(row)}


def names_of(row: dict) -> list[str]:
    return [one["pipeline"] for one in row["pipelines"]]


def test_a_file_that_is_dropped_is_read_and_a_name_in_use_is_told(service, enter):
    service.client.post(
        "/submissions",
        json={"lane": "cpu", "text": file_of("used"), "source": "a.yaml"},
        headers={"Idempotency-Key": "used"},
    )
    page = enter(service, "/queue")
    data = page.evaluate_handle(
        "(text) => { const data = new DataTransfer(); data.items.add(new File([text], 'two.yaml')); return data; }",
        file_of("used"),
    )
    page.dispatch_event("textarea", "drop", {"dataTransfer": data})
    page.wait_for_function("() => document.querySelector('textarea').value.includes('used')")
    page.click("button:text-is('Check')")
    page.wait_for_selector("[role=alert]:has-text(\"two.yaml: pipeline 'used' is in this run already\")")


def test_why_a_pipeline_waits_is_whole_at_390_pixels(service, enter):
    name = "waits-with-a-name-of-many-words-as-a-team-writes-it"
    body = {"lane": "cpu", "text": file_of("runs-before-it", name), "source": "a.yaml"}
    service.client.post("/submissions", json=body, headers={"Idempotency-Key": name})
    page = enter(service, "/queue")
    page.set_viewport_size({"width": 390, "height": 844})
    row = page.locator(f".queue tr:has-text('{name}')")
    reason = row.locator("td.wide .why")
    reason.wait_for()
    assert "needs 1 rollout" in reason.inner_text()
    box = reason.bounding_box()
    assert box["x"] + box["width"] <= 390
    until(lambda: page.evaluate("document.documentElement.scrollWidth <= innerWidth"), "a page that fits")
    service.client.post(f"/pipelines/cpu/{name}/cancel", json={})


def test_a_pipeline_that_runs_is_ended_from_its_page(service, enter):
    service.until(lambda: any(row["status"] == "running" for row in service.get("/pipelines")["items"]))
    (row,) = (row for row in service.get("/pipelines")["items"] if row["status"] == "running")
    page = enter(service, f"/pipelines/cpu/{row['name']}")
    page.click("button:text-is('Cancel')")
    page.click(f"button:text-is('End {row['name']}?')")
    page.wait_for_selector(f".banner:has-text('{row['name']}: ends at its next safe point')")


def test_the_queue_of_a_run_that_is_over_takes_nothing(shown, enter):
    page = enter(shown, "/queue")
    assert page.locator("textarea").count() == 0
    assert "Nothing runs in lane demo now" in page.inner_text("main")
