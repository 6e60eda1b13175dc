"""What is measured of sharing a device, and what becomes of a file that does not fit."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from rlmux.cli import profiling
from rlmux.cli.commands import app
from rlmux.core.errors import UserError
from rlmux.engines.device_fraction import DeviceFractions, probe
from rlmux.profiling.micro_benchmarks import PieceSizes
from rlmux.rl.config import ModelConfig
from rlmux.sim.models.interference import InterferenceTable

HERE = DeviceFractions(device="a device", how="nice", shares=(0.25, 0.5, 0.75), num_units=20)
TINY = PieceSizes(
    model=ModelConfig(hidden_size=32, num_layers=2, num_heads=2, num_kv_heads=1, intermediate_size=64),
    num_slots=8, num_tail=2, prompt_tokens=16, new_tokens=32, num_prompts=4, micro_batch_size=4, train_tokens=16,
)  # fmt: skip


def save(folder, measured, levels=HERE):
    path = folder / "profile.json"
    table = InterferenceTable(device=levels.device, levels=profiling.fraction_grid_of(levels), measured=measured)
    table.save(path)
    return path


def test_two_on_one_core_share_its_time_by_their_levels():
    if not probe("cpu").shares:
        pytest.skip("no levels here")
    table = profiling.measure("cpu", kinds=("tail", "update"), sizes=TINY, window_s=0.15, num_rounds=2)
    low, _ = table.slowdowns("tail", "update", 0.1)
    high, other = table.slowdowns("tail", "update", 0.9)
    assert min(low, other) > 1.3 * high  # 9 where the machine is quiet; strangers on the core blur it


def test_only_levels_that_helped_reach_a_policy(tmp_path):
    path = save(
        tmp_path,
        {("dense", "dense", 0.5): (2.0, 2.0), ("tail", "update", 0.25): (1.4, 1.2), ("tail", "update", 0.75): (1, 4)},
    )
    sharing, warnings = profiling.sharing_of(path, HERE)
    assert sharing.pair_rates("dense", "dense") is None
    assert sharing.pair_rates("tail", "update").device_fraction == 0.25
    assert any("holes" in warning and "estimated" in warning for warning in warnings)


def test_the_worst_piece_of_training_speaks_for_all(tmp_path):
    path = save(tmp_path, {("tail", "update", 0.5): (1.2, 1.1), ("tail", "old_logprobs", 0.5): (1.1, 1.5)})
    pair_rates = profiling.sharing_of(path, HERE)[0].pair_rates("tail", "update")
    assert (pair_rates.slowdown, pair_rates.other_slowdown) == (1.2, 1.5)


def test_a_profile_of_another_device_is_named_and_not_used(tmp_path):
    other = DeviceFractions(device="another", how="nice", shares=(0.5,), num_units=20)
    sharing, warnings = profiling.sharing_of(save(tmp_path, {("tail", "update", 0.5): (1.1, 1.1)}, other), HERE)
    assert sharing.rates == {}
    assert "'another', not on 'a device'" in warnings[0]
    assert "devices alone" in warnings[-1]


def test_a_level_that_is_not_prepared_is_named_with_those_that_are(tmp_path):
    path = save(tmp_path, {("tail", "update", 0.35): (1.1, 1.1), ("tail", "update", 0.5): (1.1, 1.2)})
    sharing, warnings = profiling.sharing_of(path, HERE)
    assert sharing.pair_rates("tail", "update").device_fraction == 0.5
    assert any("fraction 0.35 is not prepared here; used instead: 0.25, 0.5, 0.75" in warning for warning in warnings)


def test_a_device_without_levels_is_not_shared(tmp_path):
    bare = DeviceFractions(device="a device", how="", num_units=20, missing="no nice")
    sharing, warnings = profiling.sharing_of(save(tmp_path, {("tail", "update", 0.5): (1.1, 1.1)}), bare)
    assert (sharing.rates, "no nice" in warnings[-1]) == ({}, True)


def test_a_policy_that_shares_nothing_says_that_the_profile_is_not_used(tmp_path):
    path = save(tmp_path, {("tail", "update", 0.5): (1.1, 1.1)})
    policy, warnings = profiling.policy_named("solo", path)
    assert (policy.name, "solo gives devices as a whole" in warnings[-1]) == ("solo", True)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (["--device", "tpu"], "--device tpu; accepted: cpu or cuda"),
        (["--out", "/no/such/folder/profile.json"], "accepted: a file in a folder that exists"),
    ],
)
def test_mistakes_are_told_before_anything_is_measured(options, problem):
    result = CliRunner().invoke(app, ["profile", *options])
    assert isinstance(result.exception, UserError)
    assert problem in str(result.exception)


def test_a_file_that_is_no_profile_is_refused(tmp_path):
    path = tmp_path / "profile.json"
    path.write_text(json.dumps({"schema": 2}))
    with pytest.raises(UserError, match="not an interference profile"):
        profiling.sharing_of(path, HERE)
