"""A step's seconds by sizes alone: what they depend on, their ranges, and what stands beside a given estimate."""

from __future__ import annotations

import dataclasses

import pytest
from tests.small_files import SORT, small_file

from rlmux.config import Purpose
from rlmux.config.load import parse_spec
from rlmux.core.errors import SpecError, UserError
from rlmux.profiling.roofline_estimates import RooflineEstimates
from rlmux.sim.models.step_costs import answers_as_in, answers_of_mean

GPUS = "{rollout: {devices: 2, gpu: H100, device_memory_gb: 80}, train: {devices: 2, gpu: H100, device_memory_gb: 80}}"

BIG = "pipelines.a.model={hidden_size: 2048, layers: 8, heads: 16, kv_heads: 4, intermediate_size: 8192}"


@pytest.fixture
def figures(tmp_path):
    """`figures(key=value, ...)`: the figures of a pipeline of a file with these keys laid over it, by name."""

    def of(*overrides: str, gpu: str | None = None, answer_tokens: float | None = None, pools: str = GPUS):
        estimate_of = RooflineEstimates(gpu=gpu, answer_tokens=answer_tokens).of
        text, laid_over = small_file(SORT, steps=2), [f"cluster.pools={pools}", BIG, *overrides]
        spec = parse_spec(
            text,
            source="small.yaml",
            folder=tmp_path,
            purpose=Purpose.PLAN,
            overrides=laid_over,
            estimate_of=estimate_of,
        )
        (pipeline,) = spec.pipelines
        assert pipeline.keys.estimate is not None
        return {figure.name: figure for figure in pipeline.figures}

    return of


def test_each_figure_lies_in_its_range_and_names_what_it_comes_from(figures):
    for figure in figures().values():
        assert 0.0 < figure.low < figure.seconds < figure.high, figure
        assert (figure.origin, bool(figure.basis)) == ("roofline", True)


def test_a_step_at_the_token_limit_is_no_shorter(figures):
    found = figures("pipelines.a.rollout.max_new_tokens=8000")
    assert found["limit_rollout_s"].seconds > found["rollout_s"].seconds
    assert found["limit_train_s"].seconds > found["train_s"].seconds


@pytest.mark.parametrize(
    ("more", "key", "shorter"),
    [
        ("pipelines.a.rollout.workers=2", "rollout_s", True),
        ("pipelines.a.algorithm.group_size=64", "rollout_s", False),
        ("pipelines.a.rollout.max_new_tokens=2000", "train_s", False),
        ("pipelines.a.algorithm.kl_coef=0.1", "train_s", False),
        ("pipelines.a.adapter={rank: 4, alpha: 8}", "sync_s", True),
        ("pipelines.a.train.optimizer_state=8bit", "train_switch_s", True),
    ],
)
def test_a_step_depends_on_what_is_computed_and_moved(figures, more, key, shorter):
    before, after = figures()[key].seconds, figures(more)[key].seconds
    assert (after < before, after > before) == (shorter, not shorter)


def test_layers_that_are_computed_again_take_a_third_more_where_products_decide(figures):
    long = "pipelines.a.rollout.max_new_tokens=8000"
    again_s = figures(long, "pipelines.a.train.activation_checkpointing=true")["train_s"].seconds
    assert 1.2 < again_s / figures(long)["train_s"].seconds < 1.35


def test_a_slower_gpu_is_slower_and_a_core_slower_still(figures):
    cores = "{rollout: {devices: 2}, train: {devices: 2}}"
    slower = [figures()] + [figures(gpu=gpu, pools=cores) for gpu in ("A100-40GB", None)]
    for key in ("rollout_s", "train_s"):
        assert [each[key].seconds for each in slower] == sorted(each[key].seconds for each in slower), key


def test_a_typed_estimate_stands_and_its_costs_are_added(figures):
    found = figures("pipelines.a.estimate={rollout_s: 7, train_s: 3}")
    assert (found["rollout_s"].seconds, found["rollout_s"].origin) == (7.0, "typed")
    assert found["rollout_switch_s"].origin == found["sync_s"].origin == "roofline"
    assert "limit_rollout_s" not in found


def test_typed_costs_stand_all_together(figures):
    found = figures("pipelines.a.estimate={rollout_s: 7, train_s: 3, sync_s: 1}")
    assert found["sync_s"].origin == "typed"
    assert "rollout_switch_s" not in found


def test_a_known_mean_of_the_answers_decides_and_narrows_the_range(figures):
    long = "pipelines.a.rollout.max_new_tokens=8000"
    unknown, known = figures(long), figures(long, answer_tokens=800)
    for key in ("rollout_s", "train_s"):
        assert known[key].seconds < unknown[key].seconds
        assert known[key].high / known[key].low < unknown[key].high / unknown[key].low
    assert known["limit_rollout_s"].seconds == unknown["limit_rollout_s"].seconds
    assert " answers of 8" in known["rollout_s"].basis


@pytest.mark.parametrize("mean", [1, 100, 900, 1000, 5000])
def test_answers_are_stretched_to_their_mean_below_the_limit(mean):
    lengths = answers_of_mean(mean, 1000, 256)
    assert sum(lengths) / len(lengths) == pytest.approx(min(mean, 1000), rel=0.01)
    assert max(lengths) <= 1000


def test_a_filler_trains_nothing(figures):
    assert "train_s" not in figures("pipelines.a.urgency=filler", "pipelines.a.sft_warmup.updates=0")


@pytest.mark.parametrize(
    ("pools", "task"),
    [
        ("{rollout: {nodes: 2, gpus_per_node: 8}, train: {nodes: 2}}", "sort"),
        ("{rollout: {devices: 2, device_memory_gb: 80}, train: {devices: 2}}", "sort"),
        (GPUS, "null"),
    ],
)
def test_devices_or_models_that_are_not_known_have_no_estimate(figures, pools, task):
    with pytest.raises(SpecError, match=r"estimate is missing; accepted: .* gpu: H100"):
        figures(f"pipelines.a.task={task}", pools=pools)


def test_an_unknown_gpu_is_named_with_the_known_ones(figures):
    with pytest.raises(UserError, match="GPU 'V100' has no row in the table of GPUs; known: A100-80GB-SXM, "):
        figures(pools=GPUS.replace("H100", "V100"))


def test_answers_of_a_public_run_keep_its_mean_and_its_limit():
    lengths = answers_as_in("math_qwen3_4b", 1000, 512)
    assert 490 < sum(lengths) / len(lengths) < 550
    assert max(lengths) == 1000
    assert lengths[:8] != sorted(lengths[:8])


def test_the_estimate_is_the_same_each_time(figures):
    assert [dataclasses.asdict(each) for each in figures().values()] == [
        dataclasses.asdict(each) for each in figures().values()
    ]
