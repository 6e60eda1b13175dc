"""Failed pipelines that go on in the run in progress: by hand, by rule, and after a kill."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.runtime.control.test_run_control import Run, cancel

from rlmux.core.actions import Action, Admit, RunStage
from rlmux.core.errors import DeviceMemoryError, PipelineError, RlmuxError, WorkerLostError
from rlmux.core.events import Event, PipelineFailed
from rlmux.core.model import FailureCause, PipelineId, Stage
from rlmux.log.notes import Note, PipelineEndNote, RetriedNote
from rlmux.log.run_log import LogReader
from rlmux.report.status import status
from rlmux.report.timeline.history import History
from rlmux.runtime.backend import RetryRule
from rlmux.runtime.control.retries import Retries
from rlmux.runtime.controller import Controller
from rlmux.runtime.fake_backend import FakeBackend
from rlmux.runtime.run import _Endings
from rlmux.runtime.workers.processes import portable_error
from rlmux.runtime.workers.supervisor import _cause_of

LOST, MEMORY, CODE = FailureCause.LOST_WORKER, FailureCause.OUT_OF_MEMORY, FailureCause.USER_CODE


class FailingBackend(FakeBackend):
    """Each pipeline fails at its second step as often as `causes` has something for it."""

    def __init__(self, causes: dict[str, list[FailureCause]]) -> None:
        super().__init__(lambda action: 0.05)
        self._causes = causes
        self._failed: list[PipelineFailed] = []

    def execute(self, action: Action) -> None:
        is_second = isinstance(action, RunStage) and (action.stage, action.step) == (Stage.GENERATE, 2)
        if is_second and (causes := self._causes.get(action.pipeline)):
            cause = causes.pop(0)
            self._failed.append(PipelineFailed(pipeline=action.pipeline, reason=f"it has {cause}", cause=cause))
        else:
            super().execute(action)

    def poll(self, timeout_s: float) -> tuple[Sequence[Event], Sequence[Note]]:
        return ([self._failed.pop(0)], ()) if self._failed else super().poll(timeout_s)


class FailingRun(Run):
    """A run whose pipelines fail, with all that notes and retries it."""

    def __init__(self, folder: Path, real: Any, causes: dict[str, list[FailureCause]], *, earlier: Any = ()) -> None:
        super().__init__(folder, real, policy="solo", make_backend=lambda *given, **options: FailingBackend(causes))
        retries = Retries(folder, self.scheduler.query, dict(earlier))
        self.run_api._retries = retries
        endings = _Endings(self.scheduler, self.backend, self.log, folder, {})
        self.controller = Controller(
            self.scheduler, self.backend, self.log, [endings], run_api=self.run_api, retries=retries
        )


def retry(name: str) -> dict[str, Any]:
    return {"request": "retry", "name": name}


def ruled(submission: Any, any_reason: int = 0, **by_cause: int) -> Any:
    rule = RetryRule(any_reason=any_reason, by_cause={FailureCause(cause): most for cause, most in by_cause.items()})
    return replace(submission, retries=rule)


def retried_of(folder: Path) -> list[RetriedNote]:
    with LogReader(folder) as log:
        return [entry.note for entry in log.entries() if isinstance(entry.note, RetriedNote)]


def ends_of(folder: Path, name: str) -> list[str]:
    with LogReader(folder) as log:
        notes = [entry.note for entry in log.entries() if isinstance(entry.note, PipelineEndNote)]
        return [note.status for note in notes if note.pipeline == name]


def shown(folder: Path) -> dict[str, Any]:
    with LogReader(folder) as log:
        return status(History.of(log.header, log.entries()), is_going_on=True)["pipelines"]


def outcome_of(run: Run, name: str) -> str:
    return run.scheduler.query.status(PipelineId(name)).value


def test_a_failed_pipeline_goes_on_by_hand(tmp_path, real):
    run = FailingRun(tmp_path / "run", real, {"a": [CODE]})
    ticks = [retry("a")] * 40
    """Each is answered in a tick of its own, in which one stage of the step may end: one comes after the failure."""
    run.run([real.submission("a", num_steps=3)], *ticks, until=lambda: outcome_of(run, "a") == "finished")
    outcomes = [answer["outcome"] for answer in run.answers if "outcome" in answer]
    assert outcomes == ["goes on at step 1 as soon as there is room (try 2)"], "no checkpoint of the fake's"
    (note,) = retried_of(run.folder)
    assert (note.number, note.of, note.by_rule, note.cause, note.reason) == (2, None, False, CODE, "it has user_code")
    assert note.failed_s > 0.0
    assert ends_of(run.folder, "a") == ["failed", "finished"]
    assert shown(run.folder)["a"]["status"] == "finished"


def test_an_answer_to_a_retry_comes_once_it_is_in_the_log(tmp_path, real):
    run = FailingRun(tmp_path / "run", real, {"a": [CODE]})
    run.run([real.submission("a", num_steps=3)], *[retry("a")] * 40)
    (logged,) = [types for answer, types in zip(run.answers, run.types_at_answers, strict=True) if "outcome" in answer]
    assert "retried" in logged
    assert logged.count("PipelineSubmitted") == 2


def test_a_run_that_is_killed_after_a_retry_has_a_pipeline_that_is_not_over(tmp_path, real):
    run = FailingRun(tmp_path / "run", real, {"a": [CODE]})
    run.run([real.submission("a", num_steps=1_000_000)], *[retry("a")] * 40)
    with LogReader(run.folder) as log:
        state = log.state()
    assert state.ended == {}
    assert [note.number for note in state.retries["a"]] == [2]
    assert state.failures["a"].cause is CODE


@pytest.mark.parametrize(
    ("causes", "rule", "ends", "tries"),
    [
        ([CODE, MEMORY], {"any_reason": 2}, "finished", [(2, 3), (3, 3)]),
        ([CODE] * 3, {"any_reason": 2}, "failed", [(2, 3), (3, 3)]),
        ([LOST, MEMORY, LOST], {"lost_worker": 2, "out_of_memory": 1}, "finished", [(2, 4), (3, 4), (4, 4)]),
        ([LOST, CODE], {"lost_worker": 2}, "failed", [(2, 3)]),
        ([CODE], {}, "failed", []),
    ],
)
def test_a_rule_gives_tries_by_reason(tmp_path, real, causes, rule, ends, tries):
    run = FailingRun(tmp_path / "run", real, {"a": list(causes)})
    run.run_api.is_kept_open = False
    run.run([ruled(real.submission("a", num_steps=3), **rule)], until=lambda: False)
    assert outcome_of(run, "a") == ends
    notes = retried_of(run.folder)
    assert [(note.number, note.of) for note in notes] == tries
    assert [note.cause for note in notes] == causes[: len(tries)]
    assert all(note.by_rule for note in notes)
    assert ends_of(run.folder, "a") == ["failed"] * len(tries) + [ends]


def test_a_try_waits_for_its_turn_behind_what_waits(tmp_path, real):
    run = FailingRun(tmp_path / "run", real, {"a": [LOST]})
    run.run_api.is_kept_open = False
    run.run([ruled(real.submission("a", num_steps=2), 1), real.submission("b", num_steps=2)], until=lambda: False)
    placed = [action.pipeline for action in run.backend.executed if isinstance(action, Admit)]
    assert placed == ["a", "b", "a"]


def test_a_pipeline_that_failed_in_an_earlier_part_of_the_run_is_retried_too(tmp_path, real):
    earlier = {
        PipelineId("past"): ("failed", real.submission("past", num_steps=1)),
        PipelineId("gone"): ("cancelled", real.submission("gone", num_steps=1)),
    }
    run = FailingRun(tmp_path / "run", real, {}, earlier=earlier)
    run.run([], {"request": "account", "name": "past"}, retry("gone"), retry("past"), until=lambda: run.is_over("past"))
    account, refused, taken = run.answers
    assert account["user"] == earlier[PipelineId("past")][1].pipeline.account.user
    assert refused["refused"] == "pipeline 'gone' was cancelled; accepted: a failed pipeline"
    assert taken["outcome"] == "goes on at step 1 as soon as there is room (try 2)"
    assert outcome_of(run, "past") == "finished"


def test_retries_are_refused_in_one_line(tmp_path, real):
    run = FailingRun(tmp_path / "run", real, {})
    given = [real.submission("sort", num_steps=1_000_000), real.submission("sums", num_steps=1)]
    late = real.replace(real.submission("late"), submit_at_s=999.0)
    asked = [retry("sort"), retry("sums"), retry("sorts"), retry("late"), cancel("sums"), retry("sums"), cancel("sort")]
    run.run([*given, late], {"request": "status"}, *asked)
    refused = [answer.get("refused") for answer in run.answers[1:]]
    assert refused == [
        "pipeline 'sort' is running; accepted: a failed pipeline",
        "pipeline 'sums' waits, and starts without it; accepted: a failed pipeline",
        "no pipeline 'sorts'; nearest: sort; accepted: a failed pipeline: none has failed",
        "pipeline 'late' has yet to come; accepted: a failed pipeline",
        None,
        "pipeline 'sums' was cancelled; accepted: a failed pipeline",
        None,
    ]


def raised(error: Exception) -> RlmuxError:
    """What a worker that raises it answers."""
    try:
        raise error
    except Exception as caught:
        return portable_error(caught)


@pytest.mark.parametrize(
    ("error", "is_user_code", "cause"),
    [
        (raised(MemoryError("malloc")), True, MEMORY),
        (raised(RuntimeError("[enforce fail] can't allocate memory: you tried")), False, MEMORY),
        (raised(type("OutOfMemoryError", (RuntimeError,), {})("CUDA out of memory")), False, MEMORY),
        (DeviceMemoryError("out of device memory"), False, MEMORY),
        (WorkerLostError("a/train is gone (SIGKILL)"), True, LOST),
        (raised(KeyError("gold")), True, CODE),
        (PipelineError("the loss is nan"), False, FailureCause.OTHER),
    ],
)
def test_a_failure_has_its_cause_from_where_it_is_made(error, is_user_code, cause):
    assert _cause_of(error, is_user_code=is_user_code) is cause
    assert type(pickle.loads(pickle.dumps(error))) is type(error)


def test_a_run_that_ended_before_a_rule_had_its_say_does_so_when_it_is_resumed(tmp_path, real):
    past = ruled(real.submission("past", num_steps=1), any_reason=1)
    run = FailingRun(tmp_path / "run", real, {}, earlier={PipelineId("past"): ("failed", past)})
    run.run_api.is_kept_open = False
    run.run([], until=lambda: False)
    assert outcome_of(run, "past") == "finished"
