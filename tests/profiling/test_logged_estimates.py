"""Seconds of a step from logs: which keys make which figure, and what no log can tell."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from rlmux.core.errors import UserError
from rlmux.profiling.logged_estimates import estimate_of, file_text, read_estimates
from rlmux.profiling.trainer_logs import TrainerLog

VERL = {
    **{f"timing_s/{key}": 1.0 for key in ("reward", "old_log_prob", "ref", "values", "adv", "update_critic")},
    "timing_s/gen": 80.0,
    "timing_s/update_actor": 40.0,
    "timing_s/update_weights": 4.0,
    "timing_s/step": 132.0,
}
AREAL = {
    "timeperf/rollout": 80.0,
    "timeperf/recompute_logp": 8.0,
    "timeperf/train_step": 40.0,
    "timeperf/update_weights": 4.0,
    "timeperf/eval": 100.0,
}
SKYRL = {
    "timing/generate": 80.0,
    "timing/fwd_logprobs_values_reward": 8.0,
    "timing/train_critic_and_policy": 40.0,
    "timing/sync_weights": 4.0,
    "timing/step": 133.0,
}
ON_POLICY = {"ppo_actor/update/version_stats/sample_staleness_theta_max": 0.0}


def log_of(framework: str, *steps: dict[str, float], trainer_mode: str = "", name: str = "a.log") -> TrainerLog:
    return TrainerLog(path=Path(name), framework=framework, steps=dict(enumerate(steps, 1)), trainer_mode=trainer_mode)


def written(folder: Path, name: str, num_gpus: int | None = None, gen_s: float = 80.0) -> Path:
    """A log of verl's console."""
    path = folder / name
    path.parent.mkdir(exist_ok=True)
    per_gpu = (
        ""
        if num_gpus is None
        else f"perf/total_num_tokens:6400 - perf/time_per_step:10 - perf/throughput:{640 / num_gpus}"
    )
    lines = [f"step:{step} - timing_s/gen:{gen_s} - timing_s/update_actor:40 - {per_gpu}" for step in (1, 2, 3)]
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("framework", "step", "rest_s"),
    [("verl", VERL, 2.0), ("AReaL", {**AREAL, **ON_POLICY}, None), ("SkyRL", SKYRL, 1.0)],
)
def test_log_probs_and_updates_are_training_and_new_weights_are_sync(framework, step, rest_s):
    read = estimate_of("a", [log_of(framework, step, step)])
    assert {key: read.estimate[key] for key in ("rollout_s", "sync_s")} == {"rollout_s": 80.0, "sync_s": 4.0}
    assert read.estimate["train_s"] == (46.0 if framework == "verl" else 48.0)
    assert read.rest_s == rest_s


def test_only_verl_is_known_to_have_both_phases_on_the_same_devices():
    assert estimate_of("a", [log_of("verl", VERL, VERL)]).estimate["colocated_train_s"] == 46.0
    assert "colocated_train_s" not in estimate_of("a", [log_of("SkyRL", SKYRL, SKYRL)]).estimate


def test_figures_are_means_without_the_warm_up_and_steps_that_did_not_train():
    slow, first = {**VERL, "timing_s/gen": 120.0}, {**VERL, "timing_s/gen": 900.0}
    untrained = {key: value for key, value in VERL.items() if key != "timing_s/update_actor"}
    read = estimate_of("a", [log_of("verl", untrained, first, VERL, slow, VERL)])
    told = read.to_json()
    assert (told["steps"], told["warm_up_steps"], told["steps_left_out"]) == (3, 1, 1)
    assert told["spread"]["rollout_s"] == {"mean": 93.33, "median": 80.0, "p90": 120.0}
    assert told["noise"] == pytest.approx(0.1353, abs=1e-4)


def test_the_logs_of_one_run_are_joined_and_a_step_counts_as_the_last_one_has_it():
    again = {**VERL, "timing_s/gen": 70.0}
    read = estimate_of("a", [log_of("verl", VERL, VERL), log_of("verl", again, again, again)])
    assert read.seconds["rollout_s"] == [70.0, 70.0]


@pytest.mark.parametrize(
    ("framework", "step", "mode", "reason"),
    [
        ("AReaL", AREAL, "", "neither timeperf/rollout_offload nor a staleness of 0 is logged"),
        ("AReaL", {**AREAL, next(iter(ON_POLICY)): 1.0}, "", "AReaL is asynchronous"),
        ("verl", {**VERL, "timing_s/switch_wait": 3.0}, "", "timing_s/switch_wait is of an asynchronous trainer"),
        ("verl", VERL, "separate_async", "trainer_mode is separate_async"),
        ("SkyRL", {**SKYRL, "timing/run_training": 48.0}, "", "timing/run_training is of an asynchronous trainer"),
    ],
)
def test_no_rollout_seconds_are_made_of_the_wait_of_an_asynchronous_trainer(framework, step, mode, reason):
    log = log_of(framework, step, step, trainer_mode=mode)
    with pytest.raises(UserError, match=re.escape(reason)) as refused:
        estimate_of("a", [log])
    assert "only the seconds that training waited for them; accepted: " in str(refused.value)
    read = estimate_of("a", [log], rollout_s=200.0)
    assert read.estimate["rollout_s"] == 200.0
    assert read.rest_s is None
    assert not read.is_colocated


def test_an_areal_that_offloads_its_rollout_engine_does_not_overlap():
    step = {**AREAL, "timeperf/rollout_offload": 1.0}
    assert estimate_of("a", [log_of("AReaL", step, step)]).estimate["rollout_s"] == 80.0


@pytest.mark.parametrize(
    ("steps", "complaint"),
    [
        ([VERL], "a.log: 1 steps of verl with timing_s/update_actor and timing_s/gen; accepted: 2 or more"),
        ([VERL, {**VERL, "timing_s/gen": 0.0}], "a.log: the mean of rollout_s is 0; accepted: more than 0"),
    ],
)
def test_a_log_without_figures_is_refused(steps, complaint):
    with pytest.raises(UserError, match=re.escape(complaint)):
        estimate_of("a", [log_of("verl", *steps)])


def test_pipelines_are_named_after_files_and_after_folders_where_these_are_equal(tmp_path):
    apart = [written(tmp_path, "qwen 7b.log"), written(tmp_path, "b.log")]
    assert [each.name for each in read_estimates(apart)] == ["qwen-7b", "b"]
    alike = [written(tmp_path / "x", "train.log"), written(tmp_path / "y", "train.log")]
    assert [each.name for each in read_estimates(alike)] == ["x-train", "y-train"]
    assert [each.name for each in read_estimates(alike, name="both")] == ["both"]
    with pytest.raises(UserError, match="would both be"):
        read_estimates([apart[0], apart[0]])
    with pytest.raises(UserError, match="--name 'a b': accepted"):
        read_estimates(apart, name="a b")


def test_gpus_come_from_verls_throughput_and_nodes_fit_the_smaller_job(tmp_path):
    logs = [written(tmp_path, "a.log", 8), written(tmp_path, "b.log", 16)]
    read = read_estimates(logs)
    assert [each.num_gpus for each in read] == [8, 16]
    text = file_text(read)
    assert "rollout: {nodes: 2, gpus_per_node: 8}" in text
    assert text.count("workers: 2") == 2
    assert "does not show the GPUs" not in text


def test_gpus_that_no_log_shows_are_left_to_the_reader(tmp_path):
    text = file_text(read_estimates([written(tmp_path, "a.log")]))
    assert "# The log does not show the GPUs of a: set gpus_per_node and prices." in text


def test_gpu_counts_without_a_common_node_are_refused(tmp_path):
    read = read_estimates([written(tmp_path, "a.log", 8), written(tmp_path, "b.log", 12)])
    with pytest.raises(UserError, match="GPUs of the jobs: a 8, b 12; accepted: "):
        file_text(read)
