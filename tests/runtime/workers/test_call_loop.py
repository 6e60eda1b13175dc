"""Work that waits for workers is resumed in order, one at a time, and ends with what it waits for."""

from __future__ import annotations

from typing import Any

import pytest

from rlmux.core.errors import WorkerLostError
from rlmux.core.model import PipelineId
from rlmux.runtime.workers.call_loop import CallLoop

MINE = PipelineId("mine")


class Setting:
    """A loop and a worker that answers when the test says so."""

    def __init__(self, real: Any) -> None:
        workplace = real.Workplace()
        self.calls = CallLoop(workplace, lambda: 0.0)
        self.worker = workplace.spawn("mine/train", None, ())
        self.said: list[Any] = []

    def ask(self, method: str):
        self.said.append((method, (yield self.calls.call(self.worker, method))))


@pytest.fixture
def setting(real: Any) -> Setting:
    return Setting(real)


def test_work_runs_at_once_up_to_its_first_call_and_goes_on_with_the_answer(setting: Setting) -> None:
    setting.calls.start(setting.ask("one"), pipeline=MINE)
    assert setting.worker.asked() == ["one"]
    setting.worker.answer("one", 1)
    assert setting.said == [("one", 1)]


def test_an_answer_that_came_before_it_was_waited_for_is_not_lost(setting: Setting) -> None:
    def work():
        first, second = setting.calls.call(setting.worker, "one"), setting.calls.call(setting.worker, "two")
        setting.said.append((yield first))
        setting.said.append((yield setting.calls.call(setting.worker, "three")))
        setting.said.append((yield second))

    setting.calls.start(work(), pipeline=MINE)
    for number, method in enumerate(["one", "two", "three"]):
        setting.worker.answer(method, number)
    assert setting.said == [0, 2, 1]


def test_work_that_is_resumed_by_other_work_runs_after_it(setting: Setting) -> None:
    future = setting.calls.future()

    def waits():
        yield future
        setting.said.append("resumed")

    def resumes():
        future.set_result()
        setting.said.append("goes on")
        yield setting.calls.call(setting.worker, "one")

    setting.calls.start(waits(), pipeline=MINE)
    setting.calls.start(resumes(), pipeline=MINE)
    assert setting.said == ["goes on", "resumed"]


def test_a_lost_worker_is_an_error_in_the_work_that_waits_for_it_and_in_no_other(setting: Setting) -> None:
    def survives():
        try:
            yield setting.calls.call(setting.worker, "offload")
        except WorkerLostError:
            setting.said.append("room is made")

    setting.calls.start(survives(), pipeline=PipelineId("other"))
    ended = setting.calls.start(setting.ask("run_stage"), pipeline=MINE)
    waiting = setting.calls.future()

    def waits_for_other_things():
        yield waiting

    untouched = setting.calls.start(waits_for_other_things(), pipeline=MINE)
    setting.calls.fail_calls(setting.worker)
    assert setting.said == ["room is made"]
    assert (ended.is_over, untouched.is_over) == (True, False)


def test_closing_a_pipelines_work_ends_it_where_it_waits_and_leaves_others(setting: Setting) -> None:
    def work():
        try:
            yield setting.calls.call(setting.worker, "one")
        finally:
            setting.said.append("closed")

    setting.calls.start(work(), pipeline=MINE)
    setting.calls.start(setting.ask("two"), pipeline=PipelineId("other"))
    setting.calls.close_all_of(MINE)
    setting.worker.answer("one", 1)
    setting.worker.answer("two", 2)
    assert setting.said == ["closed", ("two", 2)]


def test_work_that_is_put_off_begins_when_it_is_told_to_unless_it_was_closed(setting: Setting) -> None:
    setting.calls.start_soon(setting.ask("one"), pipeline=MINE)
    setting.calls.start_soon(setting.ask("other"), pipeline=PipelineId("other"))
    assert not setting.worker.asked()
    setting.calls.close_all_of(MINE)
    setting.calls.start_later_work()
    setting.calls.start_later_work()
    assert setting.worker.asked() == ["other"]
