"""Real fillers: their answers, and what others train, are the same alone and shared, over kills and parking too."""

from __future__ import annotations

import json
import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from rlmux.core.actions import Pause, RunStage
from rlmux.core.model import Stage, Urgency
from rlmux.policies import make_policy
from rlmux.runtime.records.filler_outputs import ANSWERS_NAME, AnswerFile, answered_steps
from rlmux.runtime.run import RunOptions, resume_pipelines, run_pipelines

NUM_STEPS = 6


def filler_of(real, name: str = "eval"):
    """Four prompts a step, one answer of each, from a model of its own."""
    made = real.submission(name, num_steps=NUM_STEPS, seed=7)
    algorithm = replace(made.config.algorithm, group_size=1, num_minibatches=1, kl_coef=0.0)
    config = replace(made.config, algorithm=algorithm, sft_warmup=replace(made.config.sft_warmup, num_updates=0))
    stages = (Stage.GENERATE, Stage.REWARD)
    pipeline = replace(made.pipeline, urgency=Urgency.FILLER, stages=stages, has_sft_warmup=False)
    return replace(made, pipeline=pipeline, config=config)


def answers(folder: Path) -> bytes:
    return (folder / "eval" / ANSWERS_NAME).read_bytes()


def run(real, submissions, folder: Path, **how):
    return run_pipelines(real.cluster(), submissions, make_policy("rollmux"), folder, RunOptions(**how), spec={})


@pytest.fixture(scope="module")
def pipeline(real):
    return real.submission("sort", num_steps=4)


@pytest.fixture(scope="module")
def alone(real, pipeline, tmp_path_factory):
    """(folder of the filler alone, hash of the pipeline's weights alone)."""
    folder = tmp_path_factory.mktemp("alone")
    run(real, [filler_of(real)], folder / "filler")
    result = run(real, [pipeline], folder / "pipeline")
    return folder / "filler", result.summary["pipelines"]["sort"]["weights_sha256"]


def test_beside_a_pipeline_both_come_out_as_alone_bit_for_bit(real, pipeline, alone, tmp_path):
    result = run(real, [pipeline, filler_of(real)], tmp_path / "run")
    assert {one["status"] for one in result.summary["pipelines"].values()} == {"finished"}
    assert answers(tmp_path / "run") == answers(alone[0])
    assert result.summary["pipelines"]["sort"]["weights_sha256"] == alone[1]


def test_the_mean_score_is_recorded_and_is_that_of_the_answers(alone):
    lines = [json.loads(line) for line in answers(alone[0]).splitlines()]
    assert [(one["step"], one["prompt"]) for one in lines] == [
        (s, p) for s in range(1, NUM_STEPS + 1) for p in range(4)
    ]
    mean = sum(one["reward"] for one in lines) / len(lines)
    summary = json.loads((alone[0] / "summary.json").read_text())
    assert summary["pipelines"]["eval"]["score"] == pytest.approx(mean)
    assert summary["pipelines"]["eval"]["weights_sha256"] is None, "it trains nothing"


@pytest.mark.slow
def test_it_leaves_a_device_that_a_pipeline_wants(real, pipeline, tmp_path):
    """On one device for all, where every phase of the pipeline finds the filler there or not."""
    long = filler_of(real)
    long = replace(long, config=replace(long.config, num_steps=40), pipeline=replace(long.pipeline, num_steps=40))
    result = real.run(tmp_path, [long, pipeline])
    assert set(result.status.values()) == {"finished"}
    owner = {one.order: one.pipeline for one in result.recorder.actions if isinstance(one, RunStage)}
    paused = [owner[one.order] for one in result.recorder.actions if isinstance(one, Pause)]
    assert set(paused) == {"eval"}, "only the filler is told to leave, and it is"


class KillsAt:
    """SIGINT as a step of the filler ends."""

    def __init__(self, step: int) -> None:
        self.step = step

    def update(self, now_s, events, actions, notes) -> None:
        if any(note.type == "step" and note.pipeline == "eval" and note.step == self.step for note in notes):
            os.kill(os.getpid(), signal.SIGINT)


def test_a_stopped_run_goes_on_after_the_last_whole_step_to_the_same_bytes(real, alone, tmp_path):
    folder = tmp_path / "run"
    assert not run(real, [filler_of(real)], folder, listeners=[KillsAt(3)]).is_complete
    with (folder / "eval" / ANSWERS_NAME).open("ab") as file:
        file.write(b'{"step": 5, "half a line')
    result = resume_pipelines(real.cluster(), [filler_of(real)], make_policy("rollmux"), folder)
    assert result.is_complete
    assert answers(folder) == answers(alone[0])


def test_a_step_that_is_answered_and_not_noted_is_noted_once(real, alone, tmp_path):
    folder = tmp_path / "run"
    assert not run(real, [filler_of(real)], folder, listeners=[KillsAt(3)]).is_complete
    with (folder / "eval" / ANSWERS_NAME).open("ab") as file:
        lines = answers(alone[0]).splitlines(keepends=True)
        file.writelines(lines[len(answers(folder).splitlines()) :])
    resume_pipelines(real.cluster(), [filler_of(real)], make_policy("rollmux"), folder)
    assert answers(folder) == answers(alone[0])
    steps = [json.loads(line)["step"] for line in (folder / "eval" / "metrics.jsonl").read_text().splitlines()]
    assert steps == list(range(1, NUM_STEPS + 1))


@pytest.mark.parametrize("role", [pytest.param("env", marks=pytest.mark.slow), "rollout-rollout-0.0"])
def test_a_killed_worker_changes_no_answer(real, alone, tmp_path, role):
    killed = []

    def watch(backend, recorder) -> bool:
        steps = [note for note in recorder.notes if note.type == "step"]
        workers = backend.workers_by_pipeline.get("eval")
        if len(steps) == 2 and not killed and workers is not None:
            victim = next(one for one in workers.processes if one.name == f"eval/{role}")
            killed.append(victim.pid)
            os.kill(victim.pid, signal.SIGKILL)
        return False

    result = real.run(tmp_path, [filler_of(real)], watch=watch)
    assert killed
    assert result.status == {"eval": "finished"}
    assert answers(tmp_path) == answers(alone[0])


def test_steps_that_are_not_whole_are_made_again(real, alone, tmp_path):
    config = filler_of(real).config
    lines = answers(alone[0]).splitlines(keepends=True)
    (tmp_path / ANSWERS_NAME).write_bytes(b"".join(lines[:11]))
    assert answered_steps(tmp_path, config) == 2, "the third step has three of its four lines"
    assert answered_steps(tmp_path / "none", config) == 0
    (tmp_path / ANSWERS_NAME).write_bytes(b"".join(lines))
    assert answered_steps(tmp_path, config) == NUM_STEPS - 1, "one that is not over makes its last step again"


def test_a_step_that_is_written_again_replaces_what_was_there(tmp_path):
    class Text:
        def decode(self, tokens) -> str:
            return " ".join(map(str, tokens))

    from rlmux.rl.types import TrainingBatch

    path = tmp_path / ANSWERS_NAME
    path.write_text('{"step": 1}\n{"step": 2}\n{"step": 2}\n{"step": 3}\n')
    writer = AnswerFile(path, Text())  # type: ignore[arg-type]
    writer.write(TrainingBatch(step=2, trajectories=(), advantages=()))
    assert path.read_text() == '{"step": 1}\n'
