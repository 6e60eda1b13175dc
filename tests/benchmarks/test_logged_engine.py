"""Rollouts predicted from lengths: conservation, bounds, and the admission rule of a real engine."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from logged_engine import EngineLimits, ToolCalls, kv_pool_tokens, predict_rollout
from tests.examples import examples

from rlmux.core.errors import UserError
from rlmux.sim.models.costs import rollout_costs
from rlmux.sim.models.hardware import model_shape
from rlmux.sim.models.lengths import length_distribution

FREE = EngineLimits()


def measured_engine(model: str) -> EngineLimits:
    """The cache of the published runs: a fifth of an 80 GB device."""
    return EngineLimits(kv_pool_tokens=kv_pool_tokens(model_shape(model), memory_fraction=0.2))


def brute_force_s(lengths, model, prompt):
    """One iteration at a time."""
    costs = rollout_costs(model)
    seconds, done = costs.prefill.seconds(len(lengths) * prompt) + costs.host.rollout_s, 0
    seconds += costs.prefill.num_iterations(len(lengths) * prompt) * (
        (costs.host.iteration_ms + costs.host.prefill_ms) * 1e-3
    )
    while done < max(lengths):
        active = sum(length > done for length in lengths)
        seconds += costs.decode_step_s(active, prompt + done)
        done += 1
    return seconds


@settings(max_examples=examples(25), deadline=None)
@given(lengths=st.lists(st.integers(1, 300), min_size=1, max_size=40), prompt=st.integers(1, 400))
def test_closed_form_equals_stepping_through_every_iteration(lengths, prompt):
    predicted = predict_rollout(lengths, "qwen3-4b", prompt_tokens=prompt, limits=FREE)
    assert predicted.seconds == pytest.approx(brute_force_s(lengths, "qwen3-4b", prompt))


@settings(max_examples=examples(40), deadline=None)
@given(
    lengths=st.lists(st.integers(1, 8192), min_size=1, max_size=120),
    pool=st.integers(500, 60_000),
    slots=st.integers(1, 64),
    workers=st.integers(1, 4),
    reserve=st.sampled_from([0.0, 0.3, 0.7]),
)
def test_every_token_is_generated_once_whatever_the_cache(lengths, pool, slots, workers, reserve):
    limits = EngineLimits(kv_pool_tokens=pool, max_active=slots, reserve_start=reserve)
    predicted = predict_rollout(lengths, "qwen3-4b", workers, limits=limits)
    assert predicted.tokens == sum(lengths)
    for worker in predicted.workers:
        assert worker.span_tokens.sum() == pytest.approx(worker.tokens)
        assert worker.peak_active <= slots
        assert (np.diff(worker.times_s) > 0).all()
        assert worker.seconds == pytest.approx(worker.decode_s + worker.prefill_s + worker.host_s)


@settings(max_examples=examples(20), deadline=None)
@given(lengths=st.lists(st.integers(50, 2000), min_size=8, max_size=60))
def test_less_cache_never_raises_the_peak(lengths):
    peaks = [
        predict_rollout(lengths, "qwen3-4b", limits=EngineLimits(kv_pool_tokens=pool)).workers[0].peak_active
        for pool in (10_000, 100_000, math.inf)
    ]
    assert peaks == sorted(peaks)


def test_a_rollout_ends_with_its_slowest_worker():
    lengths = [100] * 4 + [4000] * 4
    split = predict_rollout(lengths, "qwen3-4b", 2, group_size=4, limits=FREE)
    assert split.seconds == max(worker.seconds for worker in split.workers)
    assert [worker.tokens for worker in split.workers] == [400, 16_000]


def test_one_long_answer_makes_the_rollout():
    short = predict_rollout([300] * 512, "qwen3-4b", limits=FREE)
    long = predict_rollout([300] * 511 + [8000], "qwen3-4b", limits=FREE)
    assert long.seconds > 4 * short.seconds
    assert long.time_to_active(1) == pytest.approx(short.seconds, rel=0.05)


def test_time_to_active_falls_with_the_count_allowed():
    lengths = length_distribution("gsm8k_qwen3_4b").sample(np.random.default_rng(1), 1024)
    predicted = predict_rollout(lengths, "qwen3-4b", 2, group_size=4, limits=measured_engine("qwen3-4b"))
    times = [predicted.time_to_active(k) for k in (0, 1, 8, 32, 128, 512)]
    assert times == sorted(times, reverse=True)
    assert times[0] == pytest.approx(max(w.seconds for w in predicted.workers))


def test_tail_is_most_of_a_short_answer_rollout_and_little_of_its_tokens():
    lengths = length_distribution("gsm8k_qwen3_4b_instruct").sample(np.random.default_rng(0), 1024)
    worker = predict_rollout(
        lengths, "qwen3-4b", prompt_tokens=83, group_size=4, limits=measured_engine("qwen3-4b")
    ).workers[0]
    tail_from_s = worker.time_to_active(127)
    assert worker.seconds - tail_from_s > 0.5 * worker.seconds
    assert worker.span_tokens[worker.times_s[:-1] >= tail_from_s].sum() < 0.4 * worker.tokens


def test_first_admission_is_what_the_reserve_leaves_room_for():
    """The published 4B run, whose cache held about 365 thousand tokens, started 2 and then 85 sequences."""
    pool = EngineLimits(kv_pool_tokens=365_000)
    worker = predict_rollout([2000] * 1024, "qwen3-4b", prompt_tokens=83, group_size=4, limits=pool).workers[0]
    assert worker.active[0] == pytest.approx(87, abs=3)


def test_a_full_cache_puts_sequences_out_and_rebuilds_them():
    tight = EngineLimits(kv_pool_tokens=20_000, reserve_start=0.0)
    squeezed = predict_rollout([3000] * 16, "qwen3-4b", limits=tight).workers[0]
    free = predict_rollout([3000] * 16, "qwen3-4b", limits=FREE).workers[0]
    assert squeezed.prefill_s > free.prefill_s
    assert squeezed.seconds > free.seconds
    assert squeezed.tokens == free.tokens


def test_tools_add_only_what_decoding_does_not_cover():
    lengths = [200] * 64
    engine_s = predict_rollout(lengths, "qwen3-4b", limits=FREE).seconds
    few = predict_rollout(lengths, "qwen3-4b", limits=FREE, tools=ToolCalls(num_calls=4, seconds_per_call=0.01))
    many = predict_rollout(lengths, "qwen3-4b", limits=FREE, tools=ToolCalls(num_calls=1000, seconds_per_call=0.18))
    assert few.seconds == engine_s
    assert many.seconds == pytest.approx(180)


def test_first_rollout_pays_its_warm_up():
    first = predict_rollout([100], "qwen3-4b", limits=FREE, is_first=True).seconds
    assert first - predict_rollout([100], "qwen3-4b", limits=FREE).seconds == pytest.approx(8.6, abs=0.1)


@pytest.mark.parametrize(
    ("run", "model", "gen_s"),
    [
        ("gsm8k_qwen3_4b", "qwen3-4b", 121.3),
        ("gsm8k_llama3_1_8b", "llama-3.1-8b", 25.2),
        ("math_qwen3_4b", "qwen3-4b", 493.1),
        ("gsm8k_qwen3_4b_instruct_10step", "qwen3-4b", 52.7),
        ("math_qwen3_8b", "qwen3-8b", 547.9),
    ],
)
def test_rollouts_drawn_from_the_embedded_quantiles_take_the_measured_time(run, model, gen_s):
    lengths_of = length_distribution(run)
    seconds = [
        predict_rollout(
            lengths_of.sample(np.random.default_rng(seed), 1024),
            model,
            prompt_tokens=lengths_of.prompt_tokens,
            group_size=4,
            limits=measured_engine(model),
        ).seconds
        for seed in range(8)
    ]
    assert np.mean(seconds) == pytest.approx(gen_s, rel=0.25)


def test_what_cannot_fit_is_refused_with_the_numbers():
    with pytest.raises(UserError, match=r"141\.1 GB of weights on each of 1 H100.*raise tp"):
        kv_pool_tokens(model_shape("llama-3.1-70b"), "H100", tp=1)
    with pytest.raises(UserError, match="non-empty"):
        predict_rollout([], "qwen3-4b")
    with pytest.raises(UserError, match="max_active=0"):
        EngineLimits(max_active=0)
