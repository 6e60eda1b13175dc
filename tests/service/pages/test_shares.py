"""The page of shares in a browser: who is over, who is charged, and that the charges are the whole bill."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from tests.service.lane_here import Lane
from tests.service.pages.test_access import AXE, faults_of
from tests.service.pages_server import Pages

from rlmux.client.in_folder import InFolder
from rlmux.core.events import Event
from rlmux.log.notes import Note
from rlmux.policies.max_min_fairness import FairShares
from rlmux.runtime.fake_backend import FakeBackend
from rlmux.service.lanes.bundles import Bundles
from rlmux.service.lanes.data_dir import open_root
from rlmux.service.lanes.submission_ledger import SubmissionLedger
from rlmux.service.lanes.submissions import LaneSubmissions

pytestmark = pytest.mark.xdist_group("browser")
SHARES = """
shares:
  half_life_h: 24
  projects:
    lab: {weight: 2, guarantee: 0.25, quota: {running: 1}}
"""
NONE = "\N{EN DASH}"
WHO = (("one", "ann", "lab"), ("two", "ann", "lab"), ("three", "bob", ""), ("four", "carol", "lab"))


class Unhurried(FakeBackend):
    """Orders of 30 seconds each, a few of which end in a second of the test."""

    def __init__(self) -> None:
        super().__init__(lambda action: 30.0)

    def poll(self, timeout_s: float) -> tuple[Sequence[Event], Sequence[Note]]:
        time.sleep(0.1)
        return super().poll(timeout_s)


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pages]:
    """A lane with room for one pipeline, which three users want; its first pipeline outlasts the tests."""
    root: Path = tmp_path_factory.mktemp("shares") / "root"
    with open_root(root):
        lane = Lane(root, "solo", Unhurried(), FairShares())
        submissions = LaneSubmissions({"cpu": lane}, SubmissionLedger(root), Bundles(root))  # type: ignore[dict-item]
        served = Pages(root, lanes=["cpu"], more=submissions.addresses())
        answer = served.client.post("/lanes/cpu/shares", json={"text": SHARES, "source": "shares.yaml"})
        assert answer.status_code == 200, answer.text
        rows = "".join(
            f"  - {{name: {name}, task: sort, steps: 100000, user: {user}, project: {project or user}}}\n"
            for name, user, project in WHO
        )
        answer = served.client.post(
            "/submissions",
            json={"lane": "cpu", "text": f"pipelines:\n{rows}", "source": "four.yaml"},
            headers={"Idempotency-Key": "four"},
        )
        assert answer.status_code == 201, answer.text
        served.until(lambda: len(served.get("/pipelines")["items"]) == len(WHO))
        served.until(lambda: sum(served.get("/lanes/cpu/usage")["held_hours"].values()) > 0)
        yield served
        served.close()
        lane.close()


@pytest.mark.slow
def test_the_page_has_the_rows_of_rlmux_usage_and_the_charges_are_what_was_held(service, enter):
    page = enter(service, "/fleet")
    page.keyboard.press("g")
    page.keyboard.press("s")
    page.wait_for_selector(".shares tbody tr")
    rows = [line.locator("td").all_inner_texts() for line in page.locator(".shares tbody tr").all()]
    assert [(row[0], row[1], row[2], row[3]) for row in rows] == [
        ("lab", "ann", "2", "25 %"),
        ("", "carol", "", ""),
        ("bob", "bob", "1", NONE),
    ]
    assert [row[9] for row in rows] == ["1 at once", "1 at once", NONE]
    assert "over" in rows[0][4]
    asked = service.get("/lanes/cpu/usage")
    charged = sum(sum(one["device_hours"].values()) for one in asked["accounts"])
    assert charged == pytest.approx(sum(asked["held_hours"].values()), rel=1e-9)
    assert charged > 0
    sums = page.locator(".charged tfoot td b").all_inner_texts()
    assert sums[0] == sums[1]
    assert page.locator("main [role=alert], main .banner").count() == 0


def test_a_pipeline_that_waits_says_why_in_the_words_of_rlmux_why(service, enter):
    page = enter(service, "/pipelines/cpu/two")
    page.wait_for_selector("section[aria-label='why it waits']:has-text('over its quota')")
    page.wait_for_selector("main:has-text('charged to lab / ann')")
    assert "lab is over its share" in page.inner_text("section[aria-label='why it waits']")
    assert "of a pool of late, by its weight" in page.inner_text("main")
    page.goto(f"{service.url}/queue")
    page.wait_for_selector(".queue tbody tr >> text=over its quota")


@pytest.mark.skipif(not AXE.exists(), reason="needs axe-core, which `make pages` installs")
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_the_page_has_no_serious_fault(service, enter, theme):
    page = enter(service, "/shares", color_scheme=theme, bypass_csp=True)
    page.wait_for_selector(".shares tbody tr")
    assert faults_of(page, theme) == []


@pytest.mark.slow
def test_a_run_that_is_over_shows_what_its_log_said_last(tmp_path, dashboard):
    with open_root(tmp_path / "root"):
        lane = Lane(tmp_path / "root", "solo", queue_order=FairShares())
        submissions = LaneSubmissions({"cpu": lane}, SubmissionLedger(tmp_path / "root"), Bundles(tmp_path / "root"))  # type: ignore[dict-item]
        served = dashboard(tmp_path / "root", lanes=["cpu"], more=submissions.addresses())
        text = "pipelines:\n  - {name: only, task: sort, steps: 2, user: ann}\n"
        served.client.post(
            "/submissions", json={"lane": "cpu", "text": text, "source": "a.yaml"}, headers={"Idempotency-Key": "a"}
        )
        served.until(lambda: [one["status"] for one in served.get("/pipelines")["items"]] == ["finished"])
        before = served.get("/lanes/cpu/usage")
        lane.close()
        served.until(lambda: served.get("/lanes/cpu/usage").get("held_hours") == before["held_hours"])
        (row,) = served.get("/lanes/cpu/usage")["accounts"]
        assert row["device_hours"] == before["accounts"][0]["device_hours"]
        assert row["user"] == "ann"
        assert InFolder(lane.folder).usage() == served.get("/lanes/cpu/usage")


def test_a_run_that_counts_nothing_says_so(shown, enter):
    page = enter(shown, "/shares")
    page.wait_for_selector("main:has-text('Nothing is counted in this run')")
