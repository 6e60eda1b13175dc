"""A pipeline's own steps are measured alone, kept in the profile, and become estimates of the same pipeline."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from tests.small_files import SORT, small_file

from rlmux.config import Spec
from rlmux.config.load import parse_spec
from rlmux.config.tree import EstimateConfig, PipelineConfig
from rlmux.core.errors import UserError
from rlmux.policies import make_policy
from rlmux.profiling.profile_file import Profile
from rlmux.profiling.step_estimates import StepTimes, load_estimates, settings_of
from rlmux.profiling.step_times import measure_steps
from rlmux.report.timeline.step_rows import read_step_rows
from rlmux.runtime.launch import start_run
from rlmux.sim.models.interference import FractionGrid, InterferenceTable

TABLE = InterferenceTable(device="a device", grid=FractionGrid(device="a device", num_units=20))
PIPELINE = PipelineConfig(name="a")
TIMES = StepTimes(
    **settings_of(PIPELINE), rollout_s=2.0, train_s=1.0, sync_s=0.5, limit_rollout_s=8.0, limit_train_s=1.0
)


def spec(*pipelines: str) -> Spec:
    return parse_spec(small_file(*pipelines, steps=100), source="small.yaml", folder=Path())


def saved(folder: Path, **changes: object) -> Path:
    """A profile with the estimate of one pipeline; a change to None takes the key out."""
    path = folder / "profile.json"
    Profile(table=TABLE, estimates={"a": TIMES}).save(path)
    content = json.loads(path.read_text())
    content["estimates"][0].update(changes)
    content["estimates"][0] = {key: value for key, value in content["estimates"][0].items() if value is not None}
    path.write_text(json.dumps(content))
    return path


def test_every_training_pipeline_is_measured_by_its_own_run(tmp_path):
    seen = []
    given = spec(SORT, "{name: f, task: sort, urgency: filler, sft_warmup: {updates: 0}}")
    measured = measure_steps(given, "cpu", tmp_path, num_steps=1, progress=lambda *counts: seen.append(counts))
    assert list(measured) == ["a"]
    times = measured["a"]
    assert settings_of(given.pipelines[0].config) == {name: getattr(times, name) for name in settings_of(PIPELINE)}
    assert min(times.rollout_s, times.train_s, times.sync_s) > 0.0
    assert times.limit_rollout_s >= times.rollout_s
    assert times.limit_train_s >= times.train_s
    assert seen[-1] == (5, 5), "a warm-up and a measured step of each run, and a last one"
    assert list(tmp_path.iterdir()) == []


def test_at_the_token_limit_every_answer_has_full_length(tmp_path):
    given = spec("{name: a, seed: 1, task: sort, sft_warmup: {updates: 200, batch_size: 32}}")
    (pipeline,) = given.pipelines

    def lengths(name: str, *, fills_token_limit: bool) -> float:
        training = replace(pipeline.config, num_steps=1, fills_token_limit=fills_token_limit)
        one = replace(pipeline, training=training, pipeline=replace(pipeline.pipeline, num_steps=1))
        start_run(replace(given, pipelines=(one,)), tmp_path / name, policy=make_policy("solo"))
        return read_step_rows(tmp_path / name)["a"][0]["metrics"]["response_len_mean"]

    limit = pipeline.config.rollout.max_new_tokens
    assert lengths("plain", fills_token_limit=False) < limit
    assert lengths("limit", fills_token_limit=True) == limit


def test_a_pipeline_that_fails_ends_the_profile_with_its_reason(tmp_path):
    reward = "def none(data_source, solution_str, ground_truth, extra_info):\n    raise ValueError('no reward')\n"
    (tmp_path / "rewards_of_steps.py").write_text(reward)
    broken = "{name: a, task: {name: sort, reward: 'rewards_of_steps:none'}}"
    given = parse_spec(small_file(broken, steps=1), source="small.yaml", folder=tmp_path)
    with pytest.raises(UserError, match=r"^pipeline a failed: .*no reward"):
        measure_steps(given, "cpu", tmp_path, num_steps=1)


def test_the_profile_gives_the_same_pipeline_its_estimate(tmp_path):
    estimates = load_estimates(saved(tmp_path))
    assert estimates.device == "a device"
    assert estimates.of(PIPELINE) == EstimateConfig(
        rollout_s=2.0, train_s=1.0, sync_s=0.5, limit_rollout_s=8.0, limit_train_s=1.0
    )


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        (
            replace(PIPELINE, name="b"),
            r"has estimates of a, and none of pipeline b; accepted: what `rlmux profile` writes",
        ),
        (
            replace(PIPELINE, rollout=replace(PIPELINE.rollout, max_new_tokens=99)),
            r"measured pipeline a with max_new_tokens 32, and it has max_new_tokens 99; accepted",
        ),
        (
            replace(PIPELINE, train=replace(PIPELINE.train, num_workers=2)),
            r"measured pipeline a with num_train_nodes 1, and it has num_train_nodes 2; accepted",
        ),
        (
            replace(PIPELINE, model=replace(PIPELINE.model, hidden_size=128)),
            r"measured pipeline a with hidden_size 64, .*, and it has hidden_size 128, .*; accepted",
        ),
    ],
)
def test_a_pipeline_that_was_not_measured_so_gets_none(tmp_path, changed, problem):
    with pytest.raises(UserError, match=problem):
        load_estimates(saved(tmp_path)).of(changed)


@pytest.mark.parametrize(
    "wrong",
    [
        *({"rollout_s": -1.0}, {"train_s": None}, {"limit_rollout_s": 1.0}, {"sync_s": "0"}),
        *({"num_slots": 0}, {"model": None}),
    ],
)
def test_estimates_with_wrong_or_missing_numbers_are_refused_with_what_is_expected(tmp_path, wrong):
    with pytest.raises(UserError, match=r"estimate 1 is .*; expected pipeline, model, whole numbers"):
        load_estimates(saved(tmp_path, **wrong))


def test_a_profile_of_an_older_version_has_no_estimates(tmp_path):
    path = saved(tmp_path)
    content = json.loads(path.read_text())
    del content["estimates"]
    path.write_text(json.dumps(content))
    with pytest.raises(UserError, match="has no estimates, and none of pipeline a; accepted"):
        load_estimates(path).of(PIPELINE)
