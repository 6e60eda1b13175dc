"""The page stands alone, stays small, and says what the summary says."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from html.parser import HTMLParser
from typing import Any

import pytest

from rlmux.core.actions import Release, RunStage
from rlmux.core.events import StageFinished
from rlmux.core.model import DeviceId, Stage
from rlmux.report.figures.html import page

ROLLOUT = DeviceId("rollout", 0, 0)
VOID = {"meta", "br"}


class Reader(HTMLParser):
    """Elements with their text; fails on tags that do not match."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.stack: list[str] = []
        self.seen: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.feed(text)
        self.close()
        assert self.stack == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))
        if tag not in VOID:
            self.stack.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.stack.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.stack and self.stack[-1] not in ("style", "script"):
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


@pytest.fixture(scope="module")
def failed(alternating_run: Callable[..., Any]) -> Reader:
    return Reader(page(alternating_run(failing="tools").timeline(), title="my run"))


def test_page_needs_nothing_from_outside(alternating_run: Callable[..., Any]) -> None:
    text = page(alternating_run().timeline())
    assert not re.search(r"https?://(?!www\.w3\.org/)", text)
    assert not re.search(r"<link|<img|@import|url\((?!#)", text)
    assert "src=" not in text


def test_a_two_minute_run_stays_under_300_kb(alternating_run: Callable[..., Any]) -> None:
    timeline = alternating_run(num_steps=22).timeline()
    assert timeline.makespan_s > 115.0
    assert len(page(timeline).encode()) < 300_000


def test_a_very_long_run_stays_small_too(alternating_run: Callable[..., Any]) -> None:
    timeline = alternating_run(num_steps=250).timeline()
    assert sum(len(device.intervals) for device in timeline.devices.values()) > 4000
    text = page(timeline)
    assert "each column is" in text
    assert len(text.encode()) < 300_000


def test_rows_gaps_and_reasons_can_be_read(failed: Reader) -> None:
    for words in (
        "my run", "rollout-0.0", "train-0.0", "steps of sort", "mean reward", "waiting for rollout of sort",
        "tools failed: its reward function raised ValueError: 'nine' is not a digit", "6 of 6",
        "Where the time went",
    ):  # fmt: skip
        assert words in failed.text


def test_every_gap_tells_its_cause_on_hover(failed: Reader) -> None:
    titles = [word for word in failed.words if re.search(r"(s|ms) at [\d.]+ s", word)]
    assert any(word.startswith("waiting for rollout of sort\n") for word in titles)
    assert any(word.startswith("sort · update · step 1\n") for word in titles)
    assert any(word.startswith("lost work · tools, step 2\n") for word in titles)
    assert any(word.startswith("sort · generate · step 1 · tail\n") for word in titles)


def test_unfinished_run_says_so_and_marks_what_is_open(alternating_run: Callable[..., Any]) -> None:
    whole = alternating_run()
    chunks = [index for index, row in enumerate(whole.rows) if row.type == "ChunkFinished"]
    cut = Reader(page(type(whole)(rows=whole.rows[: chunks[40] + 1]).timeline()))
    assert "The log has no end" in cut.text
    assert "not ended in the log" in cut.text
    assert any("open" in (attributes.get("class") or "").split() for tag, attributes in cut.seen if tag == "path")


def test_empty_run_has_a_page(script: Any) -> None:
    assert "Nothing has run yet" in Reader(page(script.timeline())).text


def test_names_cannot_break_out_of_the_page(script: Any, make_order: Callable[..., RunStage]) -> None:
    name = '<script>alert("x")</script>'
    script.submit(0.0, name, make_order(1, name, Stage.GENERATE, ROLLOUT), num_steps=1)
    script.event(StageFinished(time_s=2.0, order=1, seconds=1.0), Release(pipeline=name))
    text = page(script.timeline(), title=name)
    assert "<script>alert" not in text
    assert Reader(text).text.count("alert") > 3


def test_numbers_on_the_page_are_those_of_the_summary(alternating_run: Callable[..., Any]) -> None:
    from rlmux.report.summary import summarize

    timeline = alternating_run().timeline()
    summary = summarize(timeline)
    text = Reader(page(timeline)).text
    assert f"{summary['pipelines']['sort']['step_slowdown']:.2f}×" in text  # noqa: RUF001
    assert f"{summary['devices']['rollout-0.0']['utilization'] * 100:.0f} %" in text


def test_many_devices_are_summed_by_pool(script: Any, make_order: Callable[..., RunStage]) -> None:
    script.num_rollout = 40
    devices = [DeviceId("rollout", index, 0) for index in range(40)]
    orders = [make_order(number, "a", Stage.GENERATE, device) for number, device in enumerate(devices, 1)]
    script.submit(0.0, "a", *orders, num_steps=1)
    for number in range(1, 41):
        script.event(StageFinished(time_s=2.0, order=number, seconds=2.0))
    script.event(StageFinished(time_s=2.0, order=99, seconds=0.0), Release(pipeline="a"))
    text = Reader(page(script.timeline())).text
    assert "40 devices" in text


def test_a_device_of_several_gpus_says_so(alternating_run: Callable[..., Any]) -> None:
    timeline = alternating_run().timeline()
    pools = timeline.header["pools"]
    wide = {**timeline.header, "pools": {**pools, "rollout": {**pools["rollout"], "gpus_per_device": 4}}}
    text = page(dataclasses.replace(timeline, header=wide))
    assert len(re.findall(r"% busy · 4 GPUs<", text)) == 1
    assert "GPUs<" not in page(timeline)
