"""A run that was stopped, killed or damaged goes on from its folder, to the same weights."""

from __future__ import annotations

import fcntl
import json
import math
import os
import resource
import shutil
import signal
import stat
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from tests import command_line
from tests.waiting import until

from rlmux.core.actions import ExpectSteps
from rlmux.core.errors import IllegalTransitionError, UserError
from rlmux.core.events import AlikeRestored, PipelineSubmitted, StageFinished
from rlmux.core.model import OrderId, PhaseSeconds, PipelineStatus
from rlmux.core.queue_order import PipelineWait
from rlmux.core.scheduler import Scheduler
from rlmux.engines.train.state import checkpoint
from rlmux.log.run_log import LOG_NAME, LogReader
from rlmux.log.value_codec import encode
from rlmux.policies import make_policy
from rlmux.runtime import local, worker_backend
from rlmux.runtime.backend import WorkerOptions
from rlmux.runtime.local import SharedMemoryFolder
from rlmux.runtime.memory.memory_budget import with_machine_memory
from rlmux.runtime.orders.train_driver import TrainDriver
from rlmux.runtime.records.end_records import salvage
from rlmux.runtime.run import RunOptions, resume_pipelines, run_pipelines

STEPS = 5


@pytest.fixture(scope="module", autouse=True)
def patient():
    """No pipeline passes another one that waits for its user code: on a busy machine it would be over too early."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(worker_backend, "USER_CODE_PATIENCE_S", math.inf)
        yield


@pytest.fixture(scope="module")
def pair(real):
    return [
        real.submission("sort", seed=1, num_steps=STEPS),
        real.submission("tool", seed=2, num_steps=STEPS, task="calculator", staleness=1),
    ]


def run(real, pair, folder: Path, **how):
    return run_pipelines(real.cluster(), pair, make_policy("rollmux"), folder, RunOptions(**how), spec={})


def resume(real, pair, folder: Path, **how):
    return resume_pipelines(real.cluster(), pair, make_policy("rollmux"), folder, RunOptions(**how))


def weights(summary) -> dict[str, str]:
    return {name: one["weights_sha256"] for name, one in summary["pipelines"].items()}


@pytest.fixture(scope="module")
def undisturbed(real, pair, tmp_path_factory):
    return run(real, pair, tmp_path_factory.mktemp("undisturbed") / "run")


class InterruptsAt:
    """Ctrl-C as a step of a pipeline ends."""

    def __init__(self, pipeline: str, step: int) -> None:
        self.at = (pipeline, step)
        self.notes: list = []

    def update(self, now_s, events, actions, notes) -> None:
        self.notes += notes
        if any(note.type == "step" and (note.pipeline, note.step) == self.at for note in notes):
            os.kill(os.getpid(), signal.SIGINT)


@pytest.fixture(scope="module")
def stopped(real, pair, tmp_path_factory):
    """A run that was interrupted at step 3; its checkpoints are there to be damaged, in copies."""
    folder = tmp_path_factory.mktemp("stopped") / "run"
    result = run(real, pair, folder, listeners=[InterruptsAt("tool", 3)])
    assert not result.is_complete
    return folder


def copy_of(folder: Path, to: Path) -> Path:
    shutil.copytree(folder, to)
    return to


def test_a_stopped_run_is_resumable_and_says_so(stopped):
    summary = json.loads((stopped / "summary.json").read_text())
    assert {one["status"] for one in summary["pipelines"].values()} == {"stopped"}
    assert summary["pipelines"]["tool"]["steps"] == 3


def test_resuming_gives_the_weights_of_a_run_left_alone(real, make_backend, pair, undisturbed, stopped, tmp_path):
    """Also under another backend than the one that it was stopped under."""
    folder = copy_of(stopped, tmp_path / "run")
    result = resume(real, pair, folder, make_backend=make_backend)
    assert result.is_complete
    assert weights(result.summary) == weights(undisturbed.summary)
    for name, one in result.summary["pipelines"].items():
        assert one["status"] == "finished"
        assert one["steps"] == STEPS
        # What was done twice counts once.
        assert one["trajectories"] == undisturbed.summary["pipelines"][name]["trajectories"]
        assert one["tokens"] == undisturbed.summary["pipelines"][name]["tokens"]
        assert one["reward_last"] == undisturbed.summary["pipelines"][name]["reward_last"]
        assert one["delivery"]["num_equal"] == STEPS, one["delivery"]["says"]
        assert not one["delivery"]["wrong_steps"]
        steps = [json.loads(line)["step"] for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
        assert steps == list(range(1, STEPS + 1))
    assert result.summary["makespan_s"] > json.loads((stopped / "summary.json").read_text())["makespan_s"]
    # Planned with what its steps took before, and not measured from nothing again.
    with LogReader(folder) as reader:
        entries = list(reader.entries())
    learned = [one.value for one in entries if isinstance(one.value, ExpectSteps) and one.value.pipeline == "tool"]
    submitted = [one.value for one in entries if isinstance(one.value, PipelineSubmitted)]
    assert [one.pipeline.estimate for one in submitted if one.pipeline.id == "tool"] == [
        None,
        learned[0].measured.median,
    ]


class StopsBeforeTheNote:
    """A backend that is interrupted after a step's checkpoint is ordered and before the step is noted."""

    def __init__(self, backend, step: int) -> None:
        self._backend, self._step = backend, step

    def __getattr__(self, name: str):
        return getattr(self._backend, name)

    def poll(self, timeout_s: float):
        events, notes = self._backend.poll(timeout_s)
        kept = [note for note in notes if note.type != "step" or note.step != self._step]
        if len(kept) < len(notes):
            os.kill(os.getpid(), signal.SIGINT)
        return events, kept


def noted(folder: Path, name: str) -> dict[int, dict]:
    """Fields of the notes `step` of a pipeline."""
    with LogReader(folder) as reader:
        notes = [one.value for one in reader.entries() if one.kind == "note" and one.type == "step"]
    return {note["step"]: note for note in notes if note["pipeline"] == name}


def test_a_step_stopped_between_its_checkpoint_and_its_note_is_not_lost(real, pair, undisturbed, tmp_path):
    folder = tmp_path / "run"

    def stopping_backend(*args, **options):
        return StopsBeforeTheNote(local.local_backend(*args, **options), step=3)

    assert not run(real, pair, folder, make_backend=stopping_backend).is_complete
    lost = [name for name in ("sort", "tool") if 3 not in noted(folder, name) and (folder / name / "step_3").is_dir()]
    assert lost
    result = resume(real, pair, folder)
    assert weights(result.summary) == weights(undisturbed.summary)
    for name in lost:
        lines = [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
        assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
        expected = noted(undisturbed.folder, name)[3]
        found = noted(folder, name)[3]
        assert found["from_checkpoint"] is True
        assert found["weights_checksum"] == expected["weights_checksum"]
        assert found["metrics"] == expected["metrics"]
        assert result.summary["pipelines"][name]["steps"] == STEPS
        assert result.summary["pipelines"][name]["delivery"]["num_equal"] == STEPS


def test_a_trainer_killed_between_its_checkpoint_and_its_steps_note_loses_no_step(
    real, pair, undisturbed, tmp_path, monkeypatch
):
    publish, killed = TrainDriver.publish, []

    def killed_once(self, order):
        if order.action.step == 3 and not killed:
            trainer = self._workers.trainer
            killed.append(self._workers.id)
            yield self._calls.call(trainer, "finish_checkpoint")
            os.kill(trainer.pid, signal.SIGKILL)
            yield self._calls.call(trainer, "finish_checkpoint")  # has no answer
        return (yield from publish(self, order))

    monkeypatch.setattr(TrainDriver, "publish", killed_once)
    result = run(real, pair, tmp_path / "run")
    assert weights(result.summary) == weights(undisturbed.summary)
    (name,) = killed
    assert noted(tmp_path / "run", name)[3]["from_checkpoint"] is True
    assert result.summary["pipelines"][name]["steps"] == STEPS
    lines = (tmp_path / "run" / name / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == list(range(1, STEPS + 1))


@pytest.mark.parametrize("lost", ["metrics.jsonl", "tensorboard"])
def test_numbers_that_the_log_has_and_a_file_lacks_are_filled_in(real, pair, stopped, tmp_path, lost):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder = copy_of(stopped, tmp_path / "run")
    lines = folder / "tool" / "metrics.jsonl"
    if lost == "tensorboard":
        shutil.rmtree(folder / "tool" / "tensorboard")
    else:
        lines.write_text("".join(lines.read_text().splitlines(keepends=True)[:1]))
    resume(real, pair, folder)
    assert [json.loads(line)["step"] for line in lines.read_text().splitlines()] == list(range(1, STEPS + 1))
    events = sorted((folder / "tool" / "tensorboard").glob("events*"))
    steps = [one.step for file in events for one in EventAccumulator(str(file)).Reload().Scalars("reward/mean")]
    assert steps == list(range(1, STEPS + 1))


class EndsAnOrderThatNeverWas:
    """A backend with a defect: after a step of a pipeline it reports the end of an order that was never given."""

    def __init__(self, backend, step: int) -> None:
        self._backend, self._step = backend, step

    def __getattr__(self, name: str):
        return getattr(self._backend, name)

    def poll(self, timeout_s: float):
        events, notes = self._backend.poll(timeout_s)
        if any(note.type == "step" and note.step == self._step for note in notes):
            events = [*events, StageFinished(order=OrderId(999), seconds=1.0)]
        return events, notes


def test_a_defect_stops_the_run_with_one_line_and_resumes_to_equal_weights(real, pair, undisturbed, tmp_path):
    folder = tmp_path / "run"

    def broken_backend(*args, **options):
        return EndsAnOrderThatNeverWas(local.local_backend(*args, **options), step=2)

    with pytest.raises(IllegalTransitionError) as raised:
        run(real, pair, folder, make_backend=broken_backend)
    text = str(raised.value)
    assert "\n" not in text
    assert text.startswith("this is a defect of rlmux, not of your file: order 999 is not running; to report it, send ")
    assert text.endswith(f"nothing that was finished is lost; resume with: rlmux resume {folder}")
    assert str(folder / LOG_NAME) in text
    with LogReader(folder) as reader:
        (defect,) = [one.value["text"] for one in reader.entries() if one.kind == "note" and one.type == "defect"]
    assert "recent events" in defect
    result = resume(real, pair, folder)
    assert result.is_complete
    assert weights(result.summary) == weights(undisturbed.summary)


@pytest.mark.slow
def test_a_resumed_pipeline_is_planned_with_the_steps_that_it_had(real, tmp_path):
    """Not with its estimate again, which its steps have shown to be far off."""
    one = real.submission("sort", num_steps=8)
    limit = PhaseSeconds(rollout_s=500.0, train_s=500.0)
    estimate = PhaseSeconds(rollout_s=300.0, train_s=300.0)
    promised = {"slo_slowdown": 50.0, "slo_probability": 0.9, "estimate": estimate, "limit": limit}
    one = replace(one, pipeline=replace(one.pipeline, **promised))
    stopped = run(real, [one], tmp_path / "run", listeners=[InterruptsAt("sort", 6)])
    assert not stopped.is_complete
    assert resume(real, [one], tmp_path / "run").is_complete
    with LogReader(tmp_path / "run") as reader:
        values = [entry.value for entry in reader.entries()]
    first, again = [at for at, value in enumerate(values) if isinstance(value, PipelineSubmitted)]
    told = [(at, value.bounded) for at, value in enumerate(values) if isinstance(value, ExpectSteps)]
    before = [bounded for at, bounded in told if at < again]
    assert 300.0 < before[0].bound.rollout_s < 400.0
    assert before[-1].bound.solo_s < 100.0
    assert values[first].pipeline.bounded is None
    assert values[again].pipeline.bounded == before[-1]
    first_again = next(bounded for at, bounded in told if at > again)
    assert first_again.seen == before[-1].seen
    assert first_again.bound.solo_s < 100.0


@pytest.mark.slow
def test_a_resumed_run_knows_what_pipelines_alike_took_before(real, tmp_path):
    first, second = (real.submission(name, num_steps=8) for name in ("first", "second"))
    first, second = (replace(one, pipeline=replace(one.pipeline, alike="sort")) for one in (first, second))
    stopped = run(real, [first], tmp_path / "run", listeners=[InterruptsAt("first", 6)])
    assert not stopped.is_complete
    assert resume(real, [first, second], tmp_path / "run").is_complete
    with LogReader(tmp_path / "run") as reader:
        values = [entry.value for entry in reader.entries()]
    (restored,) = [value for value in values if isinstance(value, AlikeRestored)]
    kept = [value.alike for value in values[: values.index(restored)] if isinstance(value, ExpectSteps) and value.alike]
    assert restored.seconds == (kept[-1],)
    known = next(value for value in values if isinstance(value, ExpectSteps) and value.pipeline == "second")
    assert known.measured == kept[-1].measured


def test_a_pipeline_that_waited_goes_on_waiting_where_it_stood(real, tmp_path):
    """The log tells a resumed run since when it has waited, and which start it was promised."""
    estimate = PhaseSeconds(rollout_s=0.2, train_s=0.2)
    pair = [real.submission(name, num_steps=4) for name in ("first", "second")]
    pair = [replace(one, pipeline=replace(one.pipeline, estimate=estimate)) for one in pair]
    solo = make_policy("solo")
    options = RunOptions(listeners=[InterruptsAt("first", 2)])
    stopped = run_pipelines(real.cluster(), pair, solo, tmp_path, options, spec={}, is_overwriting=True)
    assert not stopped.is_complete
    with LogReader(tmp_path) as reader:
        submitted_s = {
            entry.value.pipeline.id: entry.time_s for entry in reader.entries() if entry.type == "PipelineSubmitted"
        }
        reserved_start_s = [entry.value["start_s"] for entry in reader.entries() if entry.type == "start_promised"]
    assert resume_pipelines(real.cluster(), pair, solo, tmp_path).is_complete
    with LogReader(tmp_path) as reader:
        assert reader.state().waits == {}
        (restored,) = [entry.value for entry in reader.entries() if entry.type == "WaitsRestored"]
    second = PipelineWait(pipeline="second", since_s=submitted_s["second"], promised_s=reserved_start_s[-1])
    assert restored.waits == (second,)


def test_a_run_that_gets_no_backend_leaves_nothing_behind(real, pair, tmp_path):
    def refuse(*given, **options):
        raise UserError("its GPUs are held by others")

    for _ in range(2):
        with pytest.raises(UserError, match="held by others"):
            run(real, pair, tmp_path / "run", make_backend=refuse)
        assert not (tmp_path / "run").exists()


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def newest_step(folder: Path) -> int:
    return max(int(path.name[5:]) for path in folder.glob("step_*"))


@pytest.mark.parametrize(
    ("of_sort", "of_tool"),
    [
        ((truncate, "model.safetensors"), (flip_a_bit, "optimizer.safetensors")),
        pytest.param((Path.unlink, "reference.safetensors"), (flip_a_bit, "state.json"), marks=pytest.mark.slow),
    ],
)
def test_a_damaged_checkpoint_is_told_of_and_the_one_before_it_taken(
    real, pair, undisturbed, stopped, tmp_path, monkeypatch, of_sort, of_tool
):
    """Workers find the damage: the controller has others to serve, and a checkpoint takes as long as the disk."""

    def fail(path: Path) -> str:
        raise AssertionError(f"{path} is read by the controller")

    monkeypatch.setattr(checkpoint, "_file_sha256", fail)
    folder = copy_of(stopped, tmp_path / "run")
    steps = {name: newest_step(folder / name) for name in ("sort", "tool")}
    for name, (damage, file) in (("sort", of_sort), ("tool", of_tool)):
        damage(folder / name / f"step_{steps[name]}" / file)
    recorder = InterruptsAt("none", 0)
    result = resume(real, pair, folder, listeners=[recorder])
    # On a busy machine a process that gets no processor is warned of as well.
    warnings = [note for note in recorder.notes if note.type == "warning" and "step_" in note.reason]
    assert {note.pipeline for note in warnings} == {"sort", "tool"}
    for note in warnings:
        assert f"step_{steps[note.pipeline]}" in note.reason
        assert "falling back" in note.reason
    assert weights(result.summary) == weights(undisturbed.summary)


@pytest.mark.slow
def test_what_the_file_says_of_checkpoints_is_what_is_kept_and_resuming_heeds_it(real, pair, undisturbed, tmp_path):
    sort, tool = pair
    given = [replace(sort, checkpoint_every=2, keep_checkpoints=1), replace(tool, checkpoint_every=3)]
    folder = tmp_path / "run"
    assert not run(real, given, folder, listeners=[InterruptsAt("tool", 4)]).is_complete
    assert all(step % 2 == 0 for step in steps_of(folder / "sort"))
    assert len(steps_of(folder / "sort")) <= 1
    result = resume(real, given, folder)
    assert steps_of(folder / "sort") == [STEPS], "one is kept, the last step's"
    assert weights(result.summary) == weights(undisturbed.summary)


def steps_of(folder: Path) -> list[int]:
    return sorted(int(path.name[5:]) for path in folder.glob("step_*"))


@pytest.mark.slow
def test_without_any_good_checkpoint_it_begins_again(real, pair, undisturbed, stopped, tmp_path):
    folder = copy_of(stopped, tmp_path / "run")
    for path in folder.glob("*/step_*/model.safetensors"):
        flip_a_bit(path)
    (folder / "sort" / "step_3.tmp-12345").mkdir()
    result = resume(real, pair, folder)
    assert weights(result.summary) == weights(undisturbed.summary)
    assert not list(folder.glob("*/*.tmp-*"))


@pytest.mark.slow
def test_an_older_version_that_staleness_needs_is_not_taken_damaged(real, pair, undisturbed, stopped, tmp_path):
    """The newest checkpoint is good, the rollout after it samples from the version before it, and that is damaged."""
    folder = copy_of(stopped, tmp_path / "run")
    step = newest_step(folder / "tool")
    flip_a_bit(folder / "tool" / f"step_{step - 1}" / "model.safetensors")
    result = resume(real, pair, folder)
    assert weights(result.summary) == weights(undisturbed.summary)


@pytest.mark.slow
def test_a_checkpoint_of_another_pipeline_is_not_taken(real, pair, undisturbed, stopped, tmp_path):
    """All of its checksums hold, and the model has the same shape."""
    folder = copy_of(stopped, tmp_path / "run")
    step = newest_step(folder / "tool")
    shutil.rmtree(folder / "sort")
    shutil.copytree(folder / "tool", folder / "sort", ignore=shutil.ignore_patterns("*.jsonl", "tensorboard"))
    recorder = InterruptsAt("none", 0)
    result = resume(real, pair, folder, listeners=[recorder])
    warnings = [note.reason for note in recorder.notes if note.type == "warning"]
    assert any(f"sort/step_{step} is of another plan, of pipeline tool; this is sort" in each for each in warnings)
    assert weights(result.summary) == weights(undisturbed.summary)


@pytest.mark.slow
def test_a_checkpoint_of_another_run_is_not_taken(real, pair, undisturbed, stopped, tmp_path):
    """One with another seed, stopped at a later step, whose worker wrote into this run's folder."""
    other = [real.submission("sort", seed=9, num_steps=STEPS), pair[1]]
    assert not run(real, other, tmp_path / "other", listeners=[InterruptsAt("sort", STEPS - 1)]).is_complete
    folder = copy_of(stopped, tmp_path / "run")
    step = newest_step(tmp_path / "other" / "sort")
    shutil.rmtree(folder / "sort" / f"step_{step}", ignore_errors=True)
    shutil.copytree(tmp_path / "other" / "sort" / f"step_{step}", folder / "sort" / f"step_{step}")
    recorder = InterruptsAt("none", 0)
    result = resume(real, pair, folder, listeners=[recorder])
    assert any("is of another run: " in note.reason for note in recorder.notes if note.type == "warning")
    assert weights(result.summary) == weights(undisturbed.summary)


@pytest.mark.slow
@pytest.mark.parametrize("checkpoint_every", [2, 3])
def test_with_fewer_checkpoints_too(real, make_backend, pair, undisturbed, tmp_path, checkpoint_every):
    how = {"workers": WorkerOptions(checkpoint_every=checkpoint_every), "make_backend": make_backend}
    folder = tmp_path / "run"
    assert not run(real, pair, folder, listeners=[InterruptsAt("tool", 4)], **how).is_complete
    result = resume(real, pair, folder, **how)
    assert weights(result.summary) == weights(undisturbed.summary)


def test_resuming_a_finished_run_does_nothing(real, pair, undisturbed):
    before = (undisturbed.folder / "run.db").read_bytes()
    result = resume(real, pair, undisturbed.folder)
    assert result.is_complete
    assert weights(result.summary) == weights(undisturbed.summary)
    assert (undisturbed.folder / "run.db").read_bytes() == before


def parts_of(folder: Path) -> list[list]:
    """Events and actions of each process that ran it."""
    parts: list[list] = [[]]
    with LogReader(folder) as reader:
        for entry in reader.entries():
            if entry.type == "resumed":
                parts.append([])
            elif entry.kind in ("event", "action"):
                parts[-1].append(entry)
    return parts


def test_a_finished_run_whose_log_is_gone_trains_nothing_once_it_is_salvaged(real, pair, undisturbed, tmp_path):
    folder = copy_of(undisturbed.folder, tmp_path / "run")
    (folder / LOG_NAME).unlink()
    salvage(folder)
    assert resume(real, pair, folder).was_over
    with LogReader(folder) as reader:
        ended = reader.state().ended
    assert {name: one.weights_sha256 for name, one in ended.items()} == weights(undisturbed.summary)


def test_state_is_a_fold_over_the_log(real, pair, undisturbed, stopped, tmp_path):
    """Fed with the events of the log, a fresh scheduler gives the logged actions again, byte for byte."""
    resumed = copy_of(stopped, tmp_path / "run")
    assert resume(real, pair, resumed).is_complete
    for folder in (undisturbed.folder, stopped, resumed):
        for part in parts_of(folder):
            scheduler = Scheduler(with_machine_memory(real.cluster()), make_policy("rollmux"))
            for place, entry in enumerate(part):
                if entry.kind != "event":
                    continue
                expected = []
                for after in part[place + 1 :]:
                    if after.kind == "event":
                        break
                    expected.append(encode(after.value))
                assert [encode(action) for action in scheduler.handle(entry.value)] == expected
    query = scheduler.query
    assert {query.status(name) for name in query.pipelines()} == {PipelineStatus.FINISHED}


def test_what_a_run_writes_is_the_users_alone_and_holds_no_pickle(undisturbed, stopped):
    for folder in (undisturbed.folder, stopped):
        for path in [folder, *folder.rglob("*")]:
            expected = 0o700 if path.is_dir() else 0o600
            assert stat.S_IMODE(path.stat().st_mode) == expected, path
            assert path.suffix not in (".pt", ".pth", ".bin", ".pkl", ".pickle"), path


def test_shared_memory_of_a_dead_run_is_given_back_and_that_of_a_live_one_is_not(tmp_path):
    live = SharedMemoryFolder(tmp_path / "live")
    dead = SharedMemoryFolder(tmp_path / "dead")
    (dead.path / "1.safetensors").write_bytes(b"weights")
    os.close(dead.lock)  # as the system does for a process that is killed
    newcomer = SharedMemoryFolder(tmp_path / "newcomer")
    assert not dead.path.exists()
    assert live.path.exists()
    assert stat.S_IMODE(live.path.stat().st_mode) == 0o700
    for folder in (live, newcomer):
        folder.close()
        folder.close()
        assert not folder.path.exists()


def test_a_folder_that_is_made_again_while_another_run_tidies_up_stays(tmp_path, monkeypatch):
    """A killed run is resumed as another run starts, and that one has looked at the folder already."""
    left_behind = SharedMemoryFolder(tmp_path / "run")
    os.close(left_behind.lock)
    resumed: list[SharedMemoryFolder] = []
    flock = fcntl.flock

    def resume_first(lock: int, how: int) -> None:
        monkeypatch.setattr(fcntl, "flock", flock)
        resumed.append(SharedMemoryFolder(tmp_path / "run"))
        flock(lock, how)

    monkeypatch.setattr(fcntl, "flock", resume_first)
    local.remove_if_unheld(left_behind.path)
    assert resumed[0].path == left_behind.path
    assert resumed[0].path.exists()
    resumed[0].close()


@pytest.mark.parametrize("make", [SharedMemoryFolder, SharedMemoryFolder.at])
def test_a_new_folder_that_another_start_tidies_away_is_made_again(tmp_path, monkeypatch, make):
    flock = fcntl.flock

    def tidy_first(lock: int, how: int) -> None:
        if how == fcntl.LOCK_EX:
            monkeypatch.setattr(fcntl, "flock", flock)
            os.rmdir(os.readlink(f"/proc/self/fd/{lock}"))
        flock(lock, how)

    monkeypatch.setattr(fcntl, "flock", tidy_first)
    made = make(tmp_path / "run")
    assert made.path.exists()
    assert made.lock is not None
    made.close()


# ------------------------------------------------------------------ the command, in a process of its own

FILE = """
cluster:
  pools:
    rollout: {devices: 1}
    train: {devices: 1}
defaults:
  steps: 400
  model: {hidden_size: 16, layers: 1, heads: 1, kv_heads: 1, intermediate_size: 16}
  rollout: {max_new_tokens: 16, slots: 8}
  algorithm: {prompts_per_step: 4, group_size: 4, micro_batch_size: 4}
policy: fifo
pipelines:
  - {name: sort, seed: 1, task: sort}
  - {name: slow, seed: 2, task: {name: sort, reward: "slow_rewards:score", reward_timeout_s: 600}}
"""
SLOW = """
import subprocess, time

def score(data_source, solution_str, ground_truth, extra_info):
    if solution_str.strip() == ground_truth:
        return 1.0  # the sample that is scored before anything starts
    for is_on_its_own in (False, True):
        subprocess.Popen(["sleep", "601"], start_new_session=is_on_its_own)
    time.sleep(600)
"""


@pytest.fixture
def command(tmp_path):
    """Starts the command line as a process; whatever still runs at the end is killed."""
    started: list[subprocess.Popen] = []
    (tmp_path / "slow_rewards.py").write_text(SLOW)

    def start(*words: str, limit_bytes: int | None = None, has_own_fork_server: bool = True) -> subprocess.Popen:
        def limit_files() -> None:
            if limit_bytes is not None:
                resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, limit_bytes))

        with (tmp_path / "said.txt").open("w") as said:
            process = subprocess.Popen(
                [sys.executable, "-m", "rlmux", *words] if has_own_fork_server else command_line.command(*words),
                stdout=subprocess.DEVNULL,
                stderr=said,
                preexec_fn=limit_files,
            )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()


def write_file(tmp_path: Path, text: str = FILE) -> tuple[str, ...]:
    (tmp_path / "two.yaml").write_text(text)
    return "run", str(tmp_path / "two.yaml"), "--out", str(tmp_path / "run")


def wait_for_a_step(process: subprocess.Popen, folder: Path) -> None:
    """Wait until `sort` has published one more step; a resume first fills in one that has no row yet."""
    metrics = folder / "sort" / "metrics.jsonl"

    def num_steps() -> int:
        return len(metrics.read_text().splitlines()) if metrics.exists() else 0

    wanted = num_steps() + 2
    until(
        lambda: num_steps() >= wanted,
        "a step of `sort`",
        limit_s=200.0,
        seen=(folder.parent / "said.txt").read_text,
        process=process,
    )


def family_once_training(process: subprocess.Popen, folder: Path) -> list[psutil.Process]:
    """Every process of the run, once `sort` has published a step and the reward of `slow` hangs with its children."""
    wait_for_a_step(process, folder)
    controller = psutil.Process(process.pid)

    def family_with_two_asleep() -> list[psutil.Process]:
        family = [controller, *controller.children(recursive=True)]
        return family if sum(member.name() == "sleep" for member in family) == 2 else []

    family = until(
        family_with_two_asleep,
        "two children of the reward",
        limit_s=200.0,
        seen=controller.children,
        process=process,
        not_yet=(psutil.NoSuchProcess,),
    )
    assert len(family) >= 10, "the controller, the fork server, two pipelines of three workers, two of the user's own"
    return family


def still_alive(family: list[psutil.Process]) -> list[str]:
    _, alive = psutil.wait_procs(family, timeout=120)
    return [f"{process.pid} of {process.ppid()}, {process.status()}: {process.cmdline()[-1][:60]}" for process in alive]


@pytest.mark.slow
def test_no_process_outlives_its_controller_even_in_user_code(tmp_path, command, backend_words):
    """Killed, with an env worker that is stuck in the user's code; then once more, and interrupted."""
    process = command(*write_file(tmp_path), *backend_words.run)
    family = family_once_training(process, tmp_path / "run")
    process.kill()
    process.wait()
    assert still_alive(family) == []

    process = command("resume", str(tmp_path / "run"), *backend_words.resume)
    family = family_once_training(process, tmp_path / "run")
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=200) == 130
    assert f"rlmux resume {tmp_path / 'run'}" in (tmp_path / "said.txt").read_text()
    assert still_alive(family) == []


def test_a_start_on_a_full_disk_is_one_line_and_leaves_no_folder(tmp_path, command):
    words = write_file(tmp_path, FILE.replace("  - {name: slow", "  # {name: slow"))
    process = command(*words, limit_bytes=3_000, has_own_fork_server=False)
    assert process.wait(timeout=300) == 1
    (line,) = (tmp_path / "said.txt").read_text().splitlines()
    assert line.startswith(f"rlmux: the run cannot be begun: {tmp_path / 'run'}/run.db: the run log cannot be written")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("limit_bytes", "hidden_size"),
    [pytest.param(900_000, 192, marks=pytest.mark.slow), (150_000, 16)],
    ids=["checkpoint", "log"],
)
def test_a_full_disk_stops_the_run_with_one_line_and_it_can_be_resumed(tmp_path, command, limit_bytes, hidden_size):
    """No file may grow beyond the limit: with the larger model the moments of a checkpoint hit it first."""
    text = FILE.replace("  - {name: slow", "  # {name: slow").replace("hidden_size: 16", f"hidden_size: {hidden_size}")
    words = write_file(tmp_path, text)
    # The limit holds for the command and what it starts: a checkpoint is written by a worker, the log is not.
    process = command(*words, limit_bytes=limit_bytes, has_own_fork_server=hidden_size > 16)
    assert process.wait(timeout=300) == 1
    last = (tmp_path / "said.txt").read_text().strip().splitlines()[-1]
    assert last.startswith("rlmux: ")
    assert f"rlmux resume {tmp_path / 'run'}" in last
    assert ("run.db" if hidden_size == 16 else "step_1: cannot be written") in last
    with LogReader(tmp_path / "run") as reader:
        assert len(list(reader.entries())) > 1
    resumed = command("resume", str(tmp_path / "run"), has_own_fork_server=False)
    wait_for_a_step(resumed, tmp_path / "run")
    resumed.send_signal(signal.SIGINT)
    assert resumed.wait(timeout=200) == 130
