"""What a good file becomes."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
from tests.checkpoints import write_checkpoint

from rlmux.config import Purpose
from rlmux.config.load import parse_spec
from rlmux.core.errors import SpecError
from rlmux.core.model import Phase, PhaseSeconds, Stage
from rlmux.rl.config import AlgorithmConfig, RolloutConfig, TaskConfig, TrainingConfig

POOLS = "cluster: {pools: {rollout: {devices: 2}, train: {devices: 1}}}\n"


def test_a_file_becomes_what_scheduler_and_engines_take(load, good):
    spec = load(good)
    first, second = spec.pipelines
    assert [pipeline.name for pipeline in spec.pipelines] == ["sort", "reverse"]
    assert first.config == TrainingConfig(
        name="sort",
        num_steps=60,
        task=TaskConfig(name="sort", params={"digits": 5}),
        rollout=RolloutConfig(num_slots=32),
    )
    assert second.config == TrainingConfig(name="reverse", num_steps=60, task=TaskConfig(name="reverse"))
    assert first.pipeline.stages == (
        Stage.GENERATE,
        Stage.REWARD,
        Stage.UPDATE,
        Stage.PUBLISH,
    )
    assert first.pipeline.num_steps == 60
    assert first.pipeline.estimate is None
    assert first.pipeline.slo_slowdown == math.inf
    assert (first.keys.submit_at_s, first.config.rollout.num_workers, first.config.train.num_workers) == (0.0, 1, 1)
    assert (first.pipeline.slo_probability, first.pipeline.limit) == (0.95, None)
    assert not first.pipeline.has_sft_warmup
    assert spec.policy == "rollmux"


def test_devices_are_nodes_that_take_one_worker_each(load):
    spec = load(POOLS + "pipelines: [{name: a, task: sort, rollout: {workers: 2}}]")
    pool = spec.cluster.pools["rollout"]
    assert (pool.phase, pool.num_nodes, pool.devices_per_node, pool.gpus_per_node) == (Phase.ROLLOUT, 2, 1, 1)
    assert spec.pipelines[0].pipeline.num_rollout_nodes == 2


def test_one_pool_may_serve_both_phases(load):
    spec = load(
        "cluster: {pools: {gpus: {phase: both, devices: 2}}}\npipelines: [{name: a, task: sort, rollout: {workers: 2}}]"
    )
    pool = spec.cluster.pools["gpus"]
    assert pool.serves_both_phases
    assert spec.cluster.pool_for(Phase.ROLLOUT) is None
    assert spec.cluster.pool_serving(Phase.ROLLOUT) is spec.cluster.pool_serving(Phase.TRAIN) is pool
    with pytest.raises(SpecError, match=r"rollout\.workers is 3; accepted: up to 2, the size of pool 'gpus'"):
        load(
            "cluster: {pools: {gpus: {phase: both, devices: 2}}}\n"
            "pipelines: [{name: a, task: sort, rollout: {workers: 3}}]"
        )


def test_a_cluster_may_be_nodes_with_prices_and_memory(load):
    spec = load(
        "cluster: {pools: {cheap: {phase: rollout, nodes: 4, gpus_per_node: 8, usd_per_gpu_hour: 1.76,"
        " host_memory_gb: 1000}, fast: {phase: train, gpus_per_node: 8, usd_per_gpu_hour: 5}}}\n"
        "pipelines: [{name: a, estimate: {rollout_s: 100, train_s: 50.5}, footprint: {train_host_gb: 200}}]",
        purpose=Purpose.PLAN,
    )
    cheap, fast = spec.cluster.pools["cheap"], spec.cluster.pools["fast"]
    assert cheap.usd_per_node_hour == pytest.approx(8 * 1.76)
    assert (cheap.num_nodes, cheap.host_memory_bytes) == (4, 1e12)
    assert (fast.num_nodes, fast.host_memory_bytes) == (None, math.inf)
    pipeline = spec.pipelines[0].pipeline
    assert pipeline.estimate == PhaseSeconds(rollout_s=100, train_s=50.5)
    assert pipeline.footprint.train_host_bytes == 2e11
    assert spec.pipelines[0].training is None
    with pytest.raises(SpecError, match="names no task"):
        _ = spec.pipelines[0].config


def test_the_reference_stage_is_there_only_with_a_kl_penalty(load):
    spec = load(POOLS + "pipelines: [{name: a, task: sort, algorithm: {kl_coef: 0.1}}]")
    assert spec.pipelines[0].pipeline.stages[2] is Stage.REFERENCE_LOGPROBS


@pytest.mark.parametrize(
    ("algorithm", "is_computed"),
    [("{}", False), ("{staleness: 1}", False), ("{epochs: 2}", True), ("{minibatches: 4}", True)],
)
def test_old_log_probs_are_a_stage_only_where_a_step_has_several_updates(load, algorithm, is_computed):
    spec = load(POOLS + f"pipelines: [{{name: a, task: sort, algorithm: {algorithm}}}]")
    assert (Stage.OLD_LOGPROBS in spec.pipelines[0].pipeline.stages) is is_computed


def test_staleness_and_sft_warmup_reach_the_scheduler(load):
    spec = load(POOLS + "pipelines: [{name: a, task: sort, sft_warmup: {updates: 9}, algorithm: {staleness: 1}}]")
    assert spec.pipelines[0].pipeline.staleness == 1
    assert spec.pipelines[0].pipeline.has_sft_warmup
    assert spec.pipelines[0].config.sft_warmup.num_updates == 9


def test_defaults_merge_under_each_pipeline_key_by_key(load):
    spec = load(
        POOLS + "defaults: {seed: 7, algorithm: {group_size: 4, kl_coef: 0.1}, rollout: {slots: 16}}\n"
        "pipelines: [{name: a, task: sort, algorithm: rloo},"
        " {name: b, task: sort, seed: 8, rollout: {workers: 2}}]"
    )
    a, b = (pipeline.config for pipeline in spec.pipelines)
    assert a.algorithm == AlgorithmConfig(name="rloo", group_size=4, kl_coef=0.1)
    assert (a.seed, b.seed, b.rollout.num_slots) == (7, 8, 16)


def test_a_task_or_model_of_its_own_takes_nothing_from_the_default_one(load):
    spec = load(
        POOLS + "defaults: {task: {name: sort, digits: 5}, model: {hidden_size: 32}}\n"
        "pipelines: [{name: a, model: {layers: 3}}, {name: b, task: reverse}]"
    )
    a, b = (pipeline.config for pipeline in spec.pipelines)
    assert a.task.params == {"digits": 5}
    assert b.task.params == {}
    assert (a.model.hidden_size, b.model.hidden_size) == (64, 32)


def test_overrides_win_over_file_and_defaults(load, good):
    spec = load(
        good,
        "pipelines.sort.steps=3",
        "pipelines.1.task.digits=4",
        "pipelines.*.rollout.max_new_tokens=9",
        "defaults.algorithm.learning_rate=1e-4",
        "policy=solo",
        "cluster.pools.rollout.devices=2",
    )
    sort, reverse = (pipeline.config for pipeline in spec.pipelines)
    assert (sort.num_steps, reverse.num_steps) == (3, 60)
    assert reverse.task.params == {"digits": 4}
    assert sort.rollout.max_new_tokens == reverse.rollout.max_new_tokens == 9
    assert sort.algorithm.learning_rate == 1e-4
    assert spec.policy == "solo"
    assert spec.cluster.pools["rollout"].num_nodes == 2


def test_short_forms_work_in_overrides_too(load, good):
    spec = load(good, "pipelines.sort.task=reverse", "pipelines.*.algorithm=rloo")
    assert spec.pipelines[0].config.task == TaskConfig(name="reverse")
    assert [pipeline.config.algorithm.name for pipeline in spec.pipelines] == ["rloo", "rloo"]


def test_scalars_are_read_as_people_expect(load):
    spec = load(
        POOLS + "pipelines: [{name: no, task: {name: sort, digits: 010, flag: yes, day: 2024-01-01},"
        " algorithm: {learning_rate: 3e-4}}]"
    )
    config = spec.pipelines[0].config
    assert config.name == "no"
    assert config.task.params == {"digits": 10, "flag": "yes", "day": "2024-01-01"}
    assert config.algorithm.learning_rate == 3e-4


def test_anchors_work(load):
    spec = load(
        POOLS + "pipelines: [{name: a, task: &t {name: sort, digits: 3}}, {name: b, task: *t}]",
    )
    assert spec.pipelines[0].config.task == spec.pipelines[1].config.task


def test_paths_are_relative_to_the_file(load, tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a", "answer": "b"}\n')
    (tmp_path / "my_rewards.py").write_text("def score(data_source, solution_str, ground_truth): return 0.0\n")
    checkpoint = write_checkpoint(tmp_path / "ckpt")
    spec = load(
        POOLS + "pipelines: [{name: a, model: {path: ckpt}, "
        "task: {name: file, path: rows.jsonl, reward: 'my_rewards:score'}}]"
    )
    config = spec.pipelines[0].config
    assert config.model.path == str(checkpoint)
    assert config.task.path == str(tmp_path / "rows.jsonl")
    assert spec.code_folder == tmp_path
    again = parse_spec(spec.resolved, source="spec.yaml", folder=Path("/"))
    assert again.pipelines == spec.pipelines
    assert again.code_folder == tmp_path


CANNOT_BE_HELD = {
    "a code beyond Unicode": ('{name: "\\U00110000"}', "an escape names no character of Unicode"),
    "a code beyond C": ('{name: "\\UFFFFFFFF"}', "an escape names no character of Unicode"),
    "a number": ("{name: a, steps: " + "9" * 5000 + "}", "two.yaml:2: a number has 5,000 digits; accepted: fewer"),
    "a model's path": ("{name: a, model: {path: " + "a" * 5000 + "}}", "no such folder"),
    "a home of no one": ("{name: a, model: {path: ~no_such_user/a}}", "no such folder"),
    "a path of rows": ("{name: a, task: {name: file, path: " + "a" * 300 + ".jsonl}}", "no such file"),
    "a module in Latin-1": (
        "{name: a, task: {name: file, path: a.jsonl, reward: 'latin:f'}}",
        "latin.py: not Python",
    ),
    "a module": ("{name: a, task: {name: file, path: a.jsonl, reward: '" + "m" * 300 + ":f'}}", "no module"),
}


@pytest.mark.parametrize("case", CANNOT_BE_HELD)
def test_what_python_or_the_disk_cannot_hold_is_a_mistake_of_the_file(load, tmp_path, case):
    line, told = CANNOT_BE_HELD[case]
    (tmp_path / "a.jsonl").write_text("")
    (tmp_path / "latin.py").write_bytes(b"def f(): return '\xe9'\n")
    with pytest.raises(SpecError, match=re.escape(told)):
        load(POOLS + f"pipelines: [{line}]")


def test_a_code_folder_whose_name_no_disk_can_hold_is_no_folder(load):
    with pytest.raises(SpecError, match=r"two\.yaml:2: code_folder is"):
        load(POOLS + "code_folder: " + "b" * 5000 + "\npipelines: [{name: a}]")


def test_the_resolved_file_loads_to_the_same_pipelines(load, good):
    spec = load(good, "pipelines.reverse.algorithm.kl_coef=0.05", "pipelines.sort.estimate={rollout_s: 1, train_s: 2}")
    again = parse_spec(spec.resolved, source="spec.yaml", folder=Path("/"))
    assert (again.pipelines, again.cluster, again.policy) == (spec.pipelines, spec.cluster, spec.policy)
    assert again.resolved == spec.resolved
