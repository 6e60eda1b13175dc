"""What is measured of sharing a device, and what becomes of a file that does not fit."""

from __future__ import annotations

import json

import pytest

from rlmux.core.errors import PipelineError, UserError
from rlmux.engines.device_fraction import DeviceFractions, probe
from rlmux.profiling.interference_probe import fraction_grid_of, measure_interference
from rlmux.profiling.micro_benchmarks import BenchmarkProcess, BenchmarkSizes
from rlmux.profiling.profile_file import load_sharing
from rlmux.rl.config import ModelConfig
from rlmux.sim.models.interference import InterferenceTable

HERE = DeviceFractions(device="a device", how="nice", prepared=(0.25, 0.5, 0.75), num_units=20)
TINY = BenchmarkSizes(
    model=ModelConfig(hidden_size=32, num_layers=2, num_heads=2, num_kv_heads=1, intermediate_size=64),
    num_slots=8, num_tail=2, prompt_tokens=16, new_tokens=32, num_prompts=4, micro_batch_size=4, train_tokens=16,
)  # fmt: skip


def save(folder, measured, fractions=HERE):
    path = folder / "profile.json"
    table = InterferenceTable(device=fractions.device, grid=fraction_grid_of(fractions), measured=measured)
    table.save(path)
    return path


@pytest.mark.slow
def test_two_on_one_core_share_its_time_by_their_device_fractions():
    if not probe("cpu").prepared:
        pytest.skip("no device fractions here")
    table = measure_interference("cpu", sub_stages=("tail", "update"), sizes=TINY, window_s=0.15, num_rounds=2)
    low, _ = table.slowdowns("tail", "update", 0.1)
    high, other = table.slowdowns("tail", "update", 0.9)
    assert min(low, other) > 1.3 * high  # 9 where the machine is quiet; strangers on the core blur it


def test_only_device_fractions_that_helped_reach_a_policy(tmp_path):
    path = save(
        tmp_path,
        {("dense", "dense", 0.5): (2.0, 2.0), ("tail", "update", 0.25): (1.4, 1.2), ("tail", "update", 0.75): (1, 4)},
    )
    sharing, warnings = load_sharing(path, HERE)
    assert sharing.rates_beside("dense", ["dense"]) is None
    assert sharing.rates_beside("tail", ["update"]).device_fraction == 0.25
    assert any("holes" in warning and "estimated" in warning for warning in warnings)


def test_each_measured_sub_stage_of_training_has_slowdowns_of_its_own(tmp_path):
    path = save(tmp_path, {("tail", "update", 0.5): (1.2, 1.1), ("tail", "old_logprobs", 0.5): (1.1, 1.5)})
    sharing = load_sharing(path, HERE)[0]
    assert [sharing.rates_beside("tail", [one]).slowdown for one in ("update", "old_logprobs")] == [1.2, 1.1]
    assert [sharing.rates_beside(one, ["tail"]).slowdown for one in ("update", "old_logprobs")] == [1.1, 1.5]


def test_a_prepared_device_fraction_of_a_sub_stage_that_does_not_run_is_no_warning(tmp_path):
    path = save(tmp_path, {("tail", "tail", 0.5): (1.2, 1.2), ("tail", "old_logprobs", 0.5): (1.1, 1.5)})
    sharing, warnings = load_sharing(path, HERE, ["tail"])
    assert sharing.rates_beside("tail", ["old_logprobs"]) is None
    assert not any("not prepared" in warning for warning in warnings)


def test_a_profile_of_another_device_is_named_and_not_used(tmp_path):
    other = DeviceFractions(device="another", how="nice", prepared=(0.5,), num_units=20)
    sharing, warnings = load_sharing(save(tmp_path, {("tail", "update", 0.5): (1.1, 1.1)}, other), HERE)
    assert sharing.rates == {}
    assert "'another', not on 'a device'" in warnings[0]
    assert "devices alone" in warnings[-1]


def test_a_device_fraction_that_is_not_prepared_is_named_with_those_that_are(tmp_path):
    path = save(tmp_path, {("tail", "update", 0.35): (1.1, 1.1), ("tail", "update", 0.5): (1.1, 1.2)})
    sharing, warnings = load_sharing(path, HERE)
    assert sharing.rates_beside("tail", ["update"]).device_fraction == 0.5
    assert any("fraction 0.35 is not prepared here; used instead: 0.25, 0.5, 0.75" in warning for warning in warnings)


def test_a_device_that_cannot_be_split_is_not_shared(tmp_path):
    bare = DeviceFractions(device="a device", how="", num_units=20, missing="no nice")
    sharing, warnings = load_sharing(save(tmp_path, {("tail", "update", 0.5): (1.1, 1.1)}), bare)
    assert (sharing.rates, "no nice" in warnings[-1]) == ({}, True)


def test_a_file_that_is_no_profile_is_refused(tmp_path):
    path = tmp_path / "profile.json"
    path.write_text(json.dumps({"schema": 2}))
    with pytest.raises(UserError, match="not an interference profile"):
        load_sharing(path, HERE)


def test_a_micro_benchmark_that_ends_is_named() -> None:
    process = BenchmarkProcess("nonsense", TINY, "cpu", None)
    try:
        with pytest.raises(PipelineError, match="the micro-benchmark of nonsense ended"):
            process.wait_until_ready()
    finally:
        process.end()
