"""Files of pipelines that are over: removed by hand, by rule, and after a kill in between."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.runtime.control.test_retries import CODE, FailingRun, ends_of, retried_of, ruled, shown
from tests.runtime.control.test_run_control import submit

from rlmux.config.tree import KeepConfig
from rlmux.core.errors import UserError
from rlmux.core.model import PipelineId
from rlmux.log.folder_lock import FolderInUseError, FolderLock
from rlmux.log.notes import PipelineEndNote, PlanNote, RemovedNote
from rlmux.log.run_log import LogReader, RunLog, run_header
from rlmux.log.run_state import RunState
from rlmux.log.value_codec import dumps, loads
from rlmux.report.timeline.condensed_state import BlockEnd, CondensedHistory
from rlmux.runtime.control import removals
from rlmux.runtime.control.removals import ASIDE, Removals, due, files_of, finish, remove_here, remove_run, write_rule


class RemovingRun(FailingRun):
    """A run whose pipelines have files, with all that removes them."""

    def __init__(self, folder: Path, real: Any, *, keep: KeepConfig | None = None, causes: Any = None) -> None:
        super().__init__(folder, real, causes or {})
        self.removals = Removals(folder, self.log, self.run_api._retries, keep)
        self.run_api._removals = self.removals
        self.controller._removals = self.removals
        self.controller._listeners.insert(0, self.removals)

    def close(self) -> None:
        self.removals.close()
        super().close()


def remove(name: str, **fields: Any) -> dict[str, Any]:
    return {"request": "remove", "name": name, "by": "ann", **fields}


def fill(folder: Path, *names: str) -> None:
    """The files of pipelines, 100 bytes each."""
    for name in names:
        for file in ("step_1/weights", "step_2/weights", "latest", "samples.db", "workers.log"):
            (folder / name / file).parent.mkdir(parents=True, exist_ok=True)
            (folder / name / file).write_bytes(bytes(100))


def notes_of(folder: Path) -> list[RemovedNote]:
    with LogReader(folder) as log:
        return [entry.note for entry in log.entries() if isinstance(entry.note, RemovedNote)]


def names_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


@pytest.fixture
def run(tmp_path, real):
    made = RemovingRun(tmp_path / "run", real)
    fill(made.folder, "a", "b")
    return made


@pytest.fixture
def ended(tmp_path):
    """A folder where nothing runs: a and b have ended, c was stopped."""
    folder = tmp_path / "ended"
    with RunLog.create(folder, run_header(policy="rollmux", backend="fake")) as log:
        for name in ("a", "b", "c"):
            log.append_note(1.0, PlanNote(pipeline=PipelineId(name), plan_sha256="p"))
        for at_s, name in enumerate(("a", "b"), start=10):
            log.append_note(float(at_s), end(name))
    fill(folder, "a", "b", "c")
    return folder


def end(name: str, status: str = "finished") -> PipelineEndNote:
    return PipelineEndNote(pipeline=PipelineId(name), status=status, reason="", weights_sha256=None)


# ---------------------------------------------------------------------- by hand, in a run in progress


def over(run: RemovingRun, real: Any, *asked: dict[str, Any], num_steps: int = 1) -> list[dict[str, Any]]:
    """The answers to what is asked once pipeline a is over, while b runs."""
    given = [real.submission("a", num_steps=num_steps), real.submission("b", num_steps=1_000_000)]
    run.controller.run(given, until=lambda: run.is_over("a"))
    run.run([], *asked)
    return run.answers


def test_the_files_of_an_ended_pipeline_go_and_the_log_has_who_and_what(run, real):
    (answer,) = over(run, real, remove("a"))
    assert (answer["outcome"], answer["parts"], answer["freed_bytes"]) == ("removed", "all", 500)
    (note,) = notes_of(run.folder)
    assert (note.pipeline, note.by, note.by_rule, note.freed_bytes) == ("a", "ann", False, 500)
    assert not names_in(run.folder) & {"a", ASIDE}
    assert (run.folder / "b" / "latest").exists()
    assert ends_of(run.folder, "a") == ["finished"]
    status = shown(run.folder)
    assert [each["by"] for each in status["a"]["removed"]] == ["ann"]
    assert status["a"]["status"] == "finished"
    assert "removed" not in status["b"]


@pytest.mark.parametrize(
    ("parts", "left"),
    [("checkpoints", {"samples.db", "workers.log"}), ("samples", {"step_1", "step_2", "latest", "workers.log"})],
)
def test_one_part_of_it_can_be_removed_alone(run, real, parts, left):
    over(run, real, remove("a", parts=parts))
    assert names_in(run.folder / "a") == left


def test_the_note_is_in_the_log_before_a_file_is_touched(run, real, monkeypatch):
    notes: list[int] = []
    move_aside = removals._move_aside

    def observed(folder: Path, name: str, parts: str) -> Path | None:
        notes.append(len(notes_of(folder)))
        return move_aside(folder, name, parts)

    monkeypatch.setattr(removals, "_move_aside", observed)
    over(run, real, remove("a"))
    assert notes == [1]


def test_a_dry_removal_changes_nothing(run, real):
    (answer,) = over(run, real, remove("a", dry_run=True))
    assert (answer["outcome"], answer["freed_bytes"]) == ("would be removed", 500)
    assert (notes_of(run.folder), len(files_of(run.folder, "a", "all"))) == ([], 1)


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        ((remove("b"),), "pipeline 'b' is running; accepted: one that has ended; to end it: rlmux cancel"),
        ((submit("late 1 9999"), remove("late")), "pipeline 'late' has yet to come; accepted: one that has ended"),
        ((remove("aa"),), "no pipeline 'aa'; nearest: a; accepted: one that has ended: a"),
        ((remove("../b"),), "no pipeline '../b'"),
        ((remove("a", parts="half"),), "'half' is no part of a pipeline; accepted: all, checkpoints, samples"),
        ((remove("a"), remove("a")), "pipeline 'a' is removed already; accepted: one that is not"),
        ((remove("a"), remove("a", parts="samples")), "pipeline 'a' is removed already"),
        ((remove("a", parts="samples"),) * 2, "the samples of pipeline 'a' are removed already"),
    ],
)
def test_what_cannot_be_removed_is_refused_in_a_line(run, real, asked, reason):
    assert over(run, real, *asked)[-1]["refused"].startswith(reason)
    assert len(notes_of(run.folder)) == len(asked) - 1 - ("late" in reason)


def test_checkpoints_that_a_pipeline_starts_from_stay_until_it_is_over(run, real):
    model = replace(real.submission("b").config.model, path=str(run.folder / "a" / "step_1"))
    user = real.submission("b", num_steps=1_000_000)
    user = replace(user, config=replace(user.config, model=model))
    run.controller.run([real.submission("a", num_steps=1), user], until=lambda: run.is_over("a"))
    run.run([], remove("a"), remove("a", parts="checkpoints"), remove("a", parts="samples"))
    refused, again, samples = run.answers
    assert refused["refused"].startswith("a checkpoint of 'a' is in use: pipeline 'b' starts from ")
    assert (again, samples["outcome"]) == (refused, "removed")


def test_a_retry_after_a_removal_says_so_and_one_of_a_removed_pipeline_is_refused(tmp_path, real):
    run = RemovingRun(tmp_path / "run", real, causes={"a": [CODE], "c": [CODE]})
    given = [real.submission("a", num_steps=3), real.submission("c", num_steps=3)]
    run.controller.run(given, until=lambda: run.is_over("a") and run.is_over("c"))
    asked = [remove("a", parts="checkpoints"), {"request": "retry", "name": "a"}]
    run.run([], *asked, remove("c"), {"request": "retry", "name": "c"}, until=lambda: run.is_over("a"))
    assert run.answers[1]["outcome"].endswith("(try 2, its checkpoints are removed)")
    assert run.answers[3]["refused"] == "pipeline 'c' is removed; accepted: a failed pipeline whose files are there"
    assert [note.pipeline for note in retried_of(run.folder)] == ["a"]
    assert "removed" not in shown(run.folder)["a"], "it has new files"


def test_a_pipeline_that_its_rule_revives_is_not_removed_in_between(tmp_path, real):
    run = RemovingRun(tmp_path / "run", real, causes={"a": [CODE]})
    run.controller.run([ruled(real.submission("a", num_steps=3), any_reason=1)], until=lambda: run.is_over("a"))
    with pytest.raises(UserError, match="is about to be tried again"):
        run.removals.requested("a", "all", "ann", [], [])
    run.run([])


# ---------------------------------------------------------------------- where nothing runs


def test_a_folder_where_nothing_runs_is_cleared_under_its_lock(ended):
    note = remove_here(ended, "a", "checkpoints", by="ann")
    assert (note.freed_bytes, names_in(ended / "a")) == (300, {"samples.db", "workers.log"})
    assert remove_here(ended, "a", "all", by="ann").freed_bytes == 200
    assert [(each.parts, each.by) for each in notes_of(ended)] == [("checkpoints", "ann"), ("all", "ann")]
    assert not names_in(ended) & {"a", ASIDE}


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("c", "pipeline 'c' is stopped, and goes on with rlmux resume"),
        ("d", "no pipeline 'd'; accepted: one that has ended: a, b"),
    ],
)
def test_a_stopped_or_unknown_pipeline_of_it_is_refused(ended, name, reason):
    with pytest.raises(UserError, match=reason):
        remove_here(ended, name, "all", by="ann")
    assert notes_of(ended) == []


def test_a_folder_in_use_is_refused(ended):
    with FolderLock.take(ended), pytest.raises(FolderInUseError):
        remove_here(ended, "a", "all", by="ann")
    with FolderLock.take(ended), pytest.raises(FolderInUseError):
        remove_run(ended)


def test_what_a_kill_left_is_removed_at_the_next_start(ended):
    with RunLog.open(ended) as log:
        note = RemovedNote(pipeline=PipelineId("a"), parts="checkpoints", by="ann", by_rule=False, freed_bytes=1)
        log.append_note(20.0, note)
        log.commit()
        (ended / ASIDE / "x" / "step_9").mkdir(parents=True)
        finish(ended, log.state)
    assert ASIDE not in names_in(ended)
    assert names_in(ended / "a") == {"samples.db", "workers.log"}


def test_a_state_from_a_snapshot_knows_what_was_removed(ended):
    remove_here(ended, "a", "all", by="ann")
    with LogReader(ended) as log:
        state = log.state()
    assert RunState.from_json(loads(dumps(state))) == state
    assert state.ended_s == {"a": 10.0, "b": 11.0}


def test_a_kept_status_knows_what_was_removed(run, real):
    over(run, real, remove("a"))
    with LogReader(run.folder) as log:
        history = CondensedHistory(log.header)
        for part in log.parts():
            history.add(part)
        history.condense()
        data = history.as_bytes(BlockEnd(1, 1))
        assert data is not None
        again, _ = CondensedHistory.of_bytes(log.header, data)
    removed = again.pipelines[PipelineId("a")].removed
    assert [(each["parts"], each["by"]) for each in removed] == [("all", "ann")]


def test_a_whole_run_is_removed_and_no_other_folder(ended, tmp_path):
    assert remove_run(ended) > 1500
    assert names_in(tmp_path) == set()
    (tmp_path / "other").mkdir()
    with pytest.raises(UserError, match="holds no run"):
        remove_run(tmp_path / "other")


# ---------------------------------------------------------------------- by rule

DAY_S = 86_400.0
NONE: dict[str, Any] = {}


def test_the_rule_removes_what_ended_longer_ago_the_oldest_first():
    keep = KeepConfig(ended="3d", checkpoints="1d")
    ended_s = {"new": 3.5 * DAY_S, "old": 1.0 * DAY_S, "middle": 2.0 * DAY_S, "oldest": 0.0}
    found = due(keep, 4.0 * DAY_S, ended_s, {"middle": {"checkpoints"}}, NONE, dict.fromkeys(ended_s, ""))
    assert found == [("oldest", "all"), ("old", "all")]
    found = due(keep, 3.2 * DAY_S, ended_s, {"middle": {"checkpoints"}}, NONE, dict.fromkeys(ended_s, ""))
    assert found == [("oldest", "all"), ("old", "checkpoints")]


def test_a_project_above_its_bytes_loses_its_oldest_ended_pipelines():
    keep = KeepConfig(project_gb=1.0)
    sizes = {"a": 4e8, "b": 4e8, "running": 4e8, "c": 9e8}
    projects = {"a": "vision", "b": "vision", "running": "vision", "c": "tools"}
    ended_s = {"b": 2.0, "a": 1.0, "c": 0.0}
    assert due(keep, 9.0, ended_s, NONE, {k: int(v) for k, v in sizes.items()}, projects) == [("a", "all")]


def test_the_rule_runs_once_a_minute_and_its_notes_say_so(tmp_path, real):
    run = RemovingRun(tmp_path / "run", real, keep=KeepConfig(ended="1h", samples="1h"))
    fill(run.folder, "a")
    run.controller.run([real.submission("a", num_steps=1)], until=lambda: run.is_over("a"))
    take = run.removals.take
    assert take(59.0 + run.removals._next_check_s - 60.0, []) == []
    (note,) = take(2 * 3600.0, [])
    assert (note.pipeline, note.parts, note.by, note.by_rule, note.freed_bytes) == ("a", "all", "", True, 500)
    assert take(2 * 3600.0 + 59.0, []) == [], "a minute has not passed"
    run.run([])


def test_the_rule_of_bytes_measures_in_a_thread_and_decides_in_the_loop(tmp_path, real):
    run = RemovingRun(tmp_path / "run", real, keep=KeepConfig(project_gb=7e-7))
    fill(run.folder, "a", "b")
    given = [real.submission("a", num_steps=1), real.submission("b", num_steps=1_000_000)]
    given = [replace(each, pipeline=replace(each.pipeline, project="vision")) for each in given]
    run.controller.run(given, until=lambda: run.is_over("a"))
    run.removals._next_check_s = 0.0
    run.run([], until=lambda: not (run.folder / "a").exists())
    assert [(note.pipeline, note.by_rule) for note in notes_of(run.folder)] == [("a", True)]
    assert (run.folder / "b").exists(), "it runs"


def test_the_rule_leaves_what_a_pipeline_starts_from(tmp_path, real):
    run = RemovingRun(tmp_path / "run", real, keep=KeepConfig(ended="1h"))
    fill(run.folder, "a")
    model = replace(real.submission("b").config.model, path=str(run.folder / "a" / "step_1"))
    user = real.submission("b", num_steps=1_000_000)
    user = replace(user, config=replace(user.config, model=model))
    run.controller.run([real.submission("a", num_steps=1), user], until=lambda: run.is_over("a"))
    assert run.removals.take(1e6, []) == []
    run.run([])


def test_the_rule_of_a_services_newer_file_holds_from_the_next_look_on(tmp_path, real):
    run = RemovingRun(tmp_path / "run", real, keep=KeepConfig(ended="1h"))
    fill(run.folder, "a")
    run.controller.run([real.submission("a", num_steps=1)], until=lambda: run.is_over("a"))
    write_rule(run.folder, None)
    assert run.removals.take(2 * 3600.0, []) == []
    write_rule(run.folder, KeepConfig(samples="1h"))
    assert [note.parts for note in run.removals.take(3 * 3600.0, [])] == ["samples"]
    run.run([])


def test_without_a_rule_nothing_is_removed_by_itself(run):
    assert run.removals.take(1e9, []) == []
    run.close()
