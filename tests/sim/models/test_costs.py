"""The cost model: formulas that rise where they must, tables that answer, roads not measured that say so."""

from __future__ import annotations

import os
import runpy
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.examples import examples

from rlmux.core.errors import UserError
from rlmux.core.model import Stage
from rlmux.sim.models.costs import MEASURED_GPU, TRAIN_STAGES, rollout_costs, train_costs
from rlmux.sim.models.hardware import ModelSize, gpu_spec, model_shape, model_shapes
from rlmux.sim.models.roofline import decode_step_s, estimate_curves

MEASURED = ("qwen3-0.6b", "qwen3-4b", "llama-3.1-8b", "qwen3-32b")


def test_usual_spellings_of_a_model_are_one_model():
    assert model_shape("Qwen/Qwen3-4B-Instruct-2507") == model_shape("qwen3_4b")
    assert model_shape("meta-llama/Llama-3.1-8B-Instruct") == model_shape("llama3_1_8b")
    assert gpu_spec("h100") == gpu_spec("H100-80GB-SXM") == gpu_spec("h100_sxm")


def test_unknown_names_are_refused_with_what_is_known():
    with pytest.raises(UserError, match=r"gpt-9.*qwen3-4b"):
        model_shape("gpt-9")
    with pytest.raises(UserError, match="H200-141GB-SXM"):
        gpu_spec("TPU")


def test_shape_with_a_zero_in_it_is_refused():
    with pytest.raises(UserError, match="layers must be more than 0"):
        replace(model_shape("qwen3-4b"), layers=0)


@pytest.mark.parametrize(
    ("model", "active", "context", "ms"),
    # Means read off the published iteration logs: one sequence, a tail, a dense batch.
    [
        ("llama-3.1-8b", 1, 4000, 3.9),
        ("llama-3.1-8b", 220, 220, 6.05),
        ("qwen3-4b", 6, 7000, 4.4),
        ("qwen3-4b", 80, 3000, 7.3),
        ("qwen3-4b", 300, 800, 9.6),
        ("qwen3-0.6b", 40, 4500, 5.55),
        ("qwen3-32b", 110, 700, 15.0),
    ],
)
def test_measured_curves_return_what_was_measured(model, active, context, ms):
    assert rollout_costs(model).decode.step_s(active, context) * 1e3 == pytest.approx(ms, rel=0.10)


@pytest.mark.parametrize("model", MEASURED)
def test_estimate_by_shape_is_near_the_measured_curve(model):
    measured = rollout_costs(model).decode
    for active, context in [(1, 2000), (8, 5000), (64, 3000), (256, 1000)]:
        estimate = decode_step_s(model, "H100", 4, active, context)
        assert estimate == pytest.approx(measured.step_s(active, context), rel=0.12)


@settings(max_examples=examples(60), deadline=None)
@given(
    model=st.sampled_from(tuple(model_shapes())),
    gpu=st.sampled_from(["A100", "H100", "H200", "H20"]),
    tp=st.sampled_from([1, 2, 4, 8]),
    active=st.integers(1, 900),
    context=st.integers(1, 30_000),
)
def test_more_work_never_costs_less(model, gpu, tp, active, context):
    costs = rollout_costs(model, gpu, tp)
    step = costs.decode_step_s(active, context)
    assert 0 < step <= costs.decode_step_s(active + 1, context)
    assert step <= costs.decode_step_s(active, context + 1)
    assert costs.prefill_s(context) <= costs.prefill_s(context + 1)


def test_a_span_costs_the_sum_of_its_iterations():
    curve = rollout_costs("qwen3-4b").decode
    summed = sum(curve.step_s(40, 1000 + i) for i in range(300))
    assert curve.span_s(40, 1000, 300) == pytest.approx(summed)


def test_dense_batches_leave_the_captured_graph():
    curve = rollout_costs("qwen3-4b").decode
    assert curve.step_s(513, 100) > 1.5 * curve.step_s(512, 100)


def test_only_measured_pairs_claim_to_be_measured():
    assert rollout_costs("qwen3-4b").is_measured
    assert not rollout_costs("qwen3-4b", "H200").is_measured
    assert not rollout_costs("qwen3-4b", tp=2).is_measured
    assert not rollout_costs("qwen3-8b").is_measured
    assert not rollout_costs(replace(model_shape("qwen3-4b"), layers=40)).is_measured


def test_a_shape_of_ones_own_gets_an_estimate():
    own = ModelSize(name="own", params=2e9, layers=24, hidden=2048, kv_heads=8, head_dim=128)
    step = rollout_costs(own, "H200", 1).decode.step_s(16, 1000)
    assert 2e9 * 2 / 4.8e12 < step < 0.02


def test_faster_memory_and_more_gpus_shorten_a_step():
    assert decode_step_s("qwen3-32b", "H200", 4, 16, 2000) < decode_step_s("qwen3-32b", "H100", 4, 16, 2000)
    assert decode_step_s("qwen3-32b", "H100", 8, 16, 2000) < decode_step_s("qwen3-32b", "H100", 4, 16, 2000)


def test_training_a_warm_step_costs_what_was_measured():
    costs = train_costs("qwen3-4b")
    # GSM8K, 1.43 million tokens: reference 20, old log-probs 17, update 58 seconds.
    assert costs.stage_s(Stage.REFERENCE_LOGPROBS, 1.43e6) == pytest.approx(20.2, rel=0.15)
    assert costs.stage_s(Stage.OLD_LOGPROBS, 1.43e6) == pytest.approx(17.0, rel=0.15)
    assert costs.stage_s(Stage.UPDATE, 1.43e6) == pytest.approx(58.3, rel=0.15)
    assert costs.total_s(1.43e6) == pytest.approx(sum(costs.stage_s(s, 1.43e6) for s in TRAIN_STAGES))


def test_training_scales_with_gpus_only_in_its_part_per_token():
    four, eight = train_costs("qwen3-4b"), train_costs("qwen3-4b", num_gpus=8)
    assert eight.stage_s(Stage.UPDATE, 0) == four.stage_s(Stage.UPDATE, 0)
    gained = four.stage_s(Stage.UPDATE, 4e6) - eight.stage_s(Stage.UPDATE, 4e6)
    assert gained == pytest.approx((four.stage_s(Stage.UPDATE, 4e6) - four.stage_s(Stage.UPDATE, 0)) / 2)
    assert not eight.is_measured


def test_training_of_an_unmeasured_size_lies_between_its_neighbours():
    small, middle, large = (train_costs(m).total_s(2e6) for m in ("qwen3-0.6b", "qwen3-1.7b", "qwen3-8b"))
    assert small < middle < large


def test_unknown_stage_is_refused():
    with pytest.raises(UserError, match=r"'reward'.*publish"):
        train_costs("qwen3-4b").stage_s(Stage.REWARD, 1e6)


def test_copying_a_cache_is_cheaper_than_rebuilding_it_over_nvlink():
    costs = rollout_costs("qwen3-4b")
    assert costs.kv_copy_s(100_000, gigabytes_per_s=200) < costs.prefill_s(100_000)


@pytest.mark.slow
@pytest.mark.skipif(not os.environ.get("RLMUX_DATA"), reason="RLMUX_DATA is not set: no recorded runs to predict")
def test_held_out_rollouts_are_predicted_within_ten_percent_in_the_median():
    bench = runpy.run_path(str(Path(__file__).parents[3] / "benchmarks" / "cost_model.py"))
    folder = bench["data_folder"]()
    steps = bench["load_steps"](folder)
    rows, serving = bench["validate"](folder, steps), bench["validate_serving"](folder)
    totals = bench["summary"](rows, serving, bench["resampled_errors"](steps, num_seeds=2))
    assert totals["gen_median_abs_error"] <= 0.10
    assert totals["gen_after_one_step_median_abs_error"] <= 0.06
    assert totals["gen_resampled_median_abs_error"] <= 0.12
    assert totals["serving_median_abs_error"] <= 0.20


def test_measured_gpu_is_in_the_table():
    assert gpu_spec(MEASURED_GPU).name == MEASURED_GPU


MIXTURES = ("qwen3-30b-a3b", "mixtral-8x7b", "qwen3-235b-a22b")


@pytest.mark.parametrize(
    ("model", "tokens", "ms"),
    # Kernels of one layer's experts on one H100 in bf16, routed evenly: aiconfigurator, h100_sxm/moe/vllm/0.24.0.
    [
        ("qwen3-30b-a3b", 2, 0.075),
        ("qwen3-30b-a3b", 8, 0.228),
        ("qwen3-30b-a3b", 64, 0.432),
        ("qwen3-30b-a3b", 256, 0.461),
        ("mixtral-8x7b", 1, 0.259),
        ("mixtral-8x7b", 64, 0.969),
        ("qwen3-235b-a22b", 4, 0.419),
        ("qwen3-235b-a22b", 128, 1.690),
    ],
)
def test_experts_are_read_as_often_as_some_sequence_picks_them(model, tokens, ms):
    shape = model_shape(model)
    decode, _ = estimate_curves(shape, "H100", 1)
    read_ms = decode.experts_ms * (1 - decode.idle_share**tokens) / shape.layers
    assert read_ms == pytest.approx(ms, rel=0.3)


def test_a_mixture_decodes_one_sequence_as_its_active_parameters_and_a_batch_as_all():
    mixture = model_shape("Qwen/Qwen3-30B-A3B-Instruct-2507")
    few, many = (
        replace(mixture, name=name, params=params, active_params=None, num_experts=1, num_picked=1)
        for name, params in (("few", mixture.computing_params), ("many", mixture.params))
    )
    one, batch = ({shape.name: decode_step_s(shape, "H100", 1, active, 500) for shape in (few, mixture, many)}
                  for active in (1, 128))  # fmt: skip
    assert one[mixture.name] == pytest.approx(one["few"], rel=0.01)
    assert one[mixture.name] < one["many"] / 3
    assert batch["few"] < batch[mixture.name] < batch["many"]
    assert batch[mixture.name] > 2 * batch["few"]


@pytest.mark.parametrize("model", MIXTURES)
def test_a_mixture_trains_as_its_active_parameters_and_publishes_all(model):
    shape = model_shape(model)
    assert shape.computing_params < shape.params / 3
    dense = replace(shape, name="dense", active_params=None, num_experts=1, num_picked=1)
    own, whole = train_costs(shape).cost_by_stage, train_costs(dense).cost_by_stage
    assert own[Stage.UPDATE].seconds(1e6) < whole[Stage.UPDATE].seconds(1e6)
    assert own[Stage.PUBLISH] == whole[Stage.PUBLISH]


@pytest.mark.parametrize(
    "changes",
    [{"num_picked": 129}, {"num_picked": 0}, {"active_params": 40e9}, {"active_params": 1e9}, {"num_experts": 8}],
)
def test_experts_that_do_not_add_up_are_refused(changes):
    with pytest.raises(UserError, match="qwen3-30b-a3b"):
        replace(model_shape("qwen3-30b-a3b"), **changes)
