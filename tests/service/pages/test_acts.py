"""Buttons of a pipeline that is over: each sends its request once, and the answer is shown."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.log_script import AlternatingRun
from tests.service.lane_here import Lane
from tests.service.pages_server import Pages
from tests.waiting import until

from rlmux.core.actions import Action, RunStage
from rlmux.core.events import Event, PipelineFailed
from rlmux.log.notes import Note
from rlmux.runtime.fake_backend import FakeBackend
from rlmux.service.lanes.bundles import Bundles
from rlmux.service.lanes.data_dir import open_root
from rlmux.service.lanes.submission_ledger import SubmissionLedger
from rlmux.service.lanes.submissions import LaneSubmissions

pytestmark = pytest.mark.xdist_group("browser")
NUM_BYTES = 3000
NAME = "sort-with-a-name-of-many-words-as-a-team-writes-it"
REASON = "its reward function raised ValueError: " + "a_reason_without_a_blank_" * 8


class FailsOnce(FakeBackend):
    """The first order fails its pipeline; later ones end."""

    def __init__(self) -> None:
        super().__init__(lambda action: 0.01)
        self._failed: list[PipelineFailed] = []
        self._has_failed = False

    def execute(self, action: Action) -> None:
        if isinstance(action, RunStage) and not self._has_failed:
            self._has_failed = True
            self._failed.append(PipelineFailed(pipeline=action.pipeline, reason=REASON))
        else:
            super().execute(action)

    def poll(self, timeout_s: float) -> tuple[Sequence[Event], Sequence[Note]]:
        return ([self._failed.pop(0)], ()) if self._failed else super().poll(timeout_s)


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Pages]:
    """A lane that goes on, with a pipeline that failed."""
    with open_root(tmp_path / "root"):
        lane = Lane(tmp_path / "root", "solo", FailsOnce(), has_retries=True)
        submissions = LaneSubmissions({"cpu": lane}, SubmissionLedger(tmp_path / "root"), Bundles(tmp_path / "root"))  # type: ignore[dict-item]
        served = Pages(tmp_path / "root", lanes=["cpu"], more=submissions.addresses())
        text = f"pipelines:\n  - {{name: {NAME}, task: sort, steps: 2}}\n"
        headers = {"Idempotency-Key": "sort"}
        served.client.post("/submissions", json={"lane": "cpu", "text": text, "source": "a.yaml"}, headers=headers)
        served.until(lambda: [row["status"] for row in served.get("/pipelines")["items"]] == ["failed"])
        yield served
        served.close()
        lane.close()


@pytest.fixture
def over(tmp_path: Path) -> Iterator[Pages]:
    """A run that is over, with files of a failed pipeline."""
    run = AlternatingRun(num_steps=3, failing="tools")
    for name in ("sort", "tools"):
        run.script.note(run.script.rows[-1].time_s, "plan", pipeline=name, plan_sha256="p")
    run.script.write(tmp_path / "root" / "demo")
    file = tmp_path / "root" / "demo" / "tools" / "samples.db"
    file.parent.mkdir()
    file.write_bytes(bytes(NUM_BYTES))
    served = Pages(tmp_path / "root", lanes=["demo"])
    yield served
    served.close()


def asked(page: Any, verb: str) -> list[Any]:
    """Bodies of the requests of this verb, from now on."""
    bodies: list[Any] = []
    page.on("request", lambda one: bodies.append(one.post_data_json) if one.url.endswith(f"/{verb}") else None)
    return bodies


@pytest.mark.parametrize("path", ["/pipelines", f"/pipelines/cpu/{NAME}"])
def test_retry_sends_one_request_and_the_answer_is_shown(service, enter, path):
    page = enter(service, path)
    bodies = asked(page, "retry")
    page.click("button:text-is('Retry')")
    page.wait_for_selector(f".banner.soft:has-text('{NAME}: ')")
    assert bodies == [{}]
    service.until(lambda: [row["status"] for row in service.get("/pipelines")["items"]] == ["finished"])
    page.wait_for_selector("button:text-is('Retry')", state="detached")


def test_remove_asks_again_with_the_bytes_before_it_removes_anything(over, enter, tmp_path):
    file = tmp_path / "root" / "demo" / "tools" / "samples.db"
    page = enter(over, "/pipelines/demo/tools")
    bodies = asked(page, "remove")
    page.click("button:text-is('Remove')")
    page.wait_for_selector("button:focus:text-is('Remove 3.0 kB of tools?')")
    assert bodies == [{"dry_run": True}]
    page.locator("button:focus").blur()
    page.wait_for_selector("button:text-is('Remove')")
    assert file.exists()
    page.click("button:text-is('Remove')")
    page.click("button:text-is('Remove 3.0 kB of tools?')")
    page.wait_for_selector(".banner.soft:has-text('tools: removed')")
    assert bodies == [{"dry_run": True}, {"dry_run": True}, {}]
    assert not file.exists()
    page.wait_for_selector("text=all of its files were removed")
    page.wait_for_selector("button:text-is('Remove')", state="detached")


def test_removed_pipelines_are_listed_on_demand_and_the_address_keeps_it(over, enter):
    over.client.post("/pipelines/demo/tools/remove", json={})
    over.until(lambda: over.get("/pipelines")["num_removed"] == 1)
    page = enter(over, "/pipelines")
    page.wait_for_selector("tbody .name:text-is('sort')")
    assert page.locator("tbody .name:text-is('tools')").count() == 0
    page.check("label:has-text('removed ones too (1)') input")
    page.wait_for_selector("tbody .name:text-is('tools')")
    assert "removed=1" in page.url
    page.reload()
    page.wait_for_selector("tbody .name:text-is('tools')")


@pytest.mark.parametrize("path", ["/pipelines", f"/pipelines/cpu/{NAME}", "/fleet"])
def test_a_reason_is_whole_at_390_pixels_however_long_its_words_are(service, enter, path):
    page = enter(service, path)
    page.set_viewport_size({"width": 390, "height": 844})
    place = page.locator("main :text('a_reason_without_a_blank')").first
    place.wait_for()
    assert REASON in place.inner_text()
    cut = "(box) => box.scrollWidth > box.clientWidth + 1 || box.getBoundingClientRect().right > innerWidth"
    until(lambda: not place.evaluate(cut), "a reason that fits, once the page is laid out anew")
    until(lambda: page.evaluate("document.documentElement.scrollWidth <= innerWidth"), "a page that fits")
