"""What migrations cost is measured, kept in the profile, and decides how the pipelines of a run migrate."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from rlmux.core.errors import UserError
from rlmux.core.model import Cluster, MigrationEstimate, Pipeline, PipelineId
from rlmux.profiling.device_costs import DeviceCosts
from rlmux.profiling.migration_times import MigrationTimes, expected_context, measure_migrations, migration_times
from rlmux.profiling.profile_file import Profile, load_costs
from rlmux.profiling.step_estimates import model_of
from rlmux.rl.config import (
    AlgorithmConfig,
    EngineConfig,
    InterruptibleConfig,
    ModelConfig,
    RolloutConfig,
    TrainingConfig,
)
from rlmux.sim.models.interference import FractionGrid, InterferenceTable

DEVICE = "a device"
CONFIG = TrainingConfig(name="a", rollout=RolloutConfig(max_prompt_tokens=20, max_new_tokens=20, num_slots=4))


def times(*, copy_s: float = 2.0, recompute_s: float = 1.0, is_exact: bool = True) -> MigrationTimes:
    return MigrationTimes(
        model=model_of(CONFIG), num_slots=4, context_tokens=19.0, kv_bytes_per_token=512.0, copy_s_per_token=copy_s,
        recompute_s_per_token=recompute_s, is_recompute_exact=is_exact,
    )  # fmt: skip


def saved(folder: Path, given: MigrationTimes) -> Path:
    path = folder / "profile.json"
    table = InterferenceTable(device=DEVICE, grid=FractionGrid(device=DEVICE, num_units=20))
    Profile(table=table, migrations={"a": given}).save(path)
    return path


@pytest.fixture(scope="module")
def measured() -> MigrationTimes:
    return migration_times(CONFIG, "cpu", num_rounds=1)


def test_both_ways_of_a_config_are_measured(measured):
    assert min(measured.copy_s_per_token, measured.recompute_s_per_token) > 0.0
    assert measured.kv_bytes_per_token == 2 * 2 * 2 * 16 * 4, "layers, keys and values, heads, their width, float32"
    assert measured.context_tokens == expected_context(CONFIG.rollout) - 1, "the newest token is fed next"


def test_recomputed_kv_has_other_bits_on_cores(measured):
    """Prefill adds in another order than decoding does; that is why no run on cores recomputes."""
    assert not measured.is_recompute_exact


@pytest.mark.parametrize("tokens", [1, 2])
def test_the_shortest_limits_can_be_measured(tokens):
    shortest = RolloutConfig(max_prompt_tokens=tokens, max_new_tokens=tokens, num_slots=1)
    assert migration_times(replace(CONFIG, rollout=shortest), "cpu", num_rounds=1).context_tokens > 0


def test_pipelines_that_are_alike_are_measured_once():
    larger = replace(CONFIG, name="c", model=ModelConfig(hidden_size=128))
    found = measure_migrations([CONFIG, replace(CONFIG, name="b", seed=7), larger], "cpu", num_rounds=1)
    assert {name: one.model for name, one in found.items()} == {"a": model_of(CONFIG), "c": model_of(larger)}


def test_the_profile_keeps_migrations(measured, tmp_path):
    assert load_costs(saved(tmp_path, measured), DEVICE, [CONFIG]) == (DeviceCosts(migrations=(measured,)), [])


@pytest.mark.parametrize("wrong", [{"copy_s_per_token": -1.0}, {"is_recompute_exact": 1}, {"num_slots": "4"}])
def test_migrations_that_are_no_numbers_are_told_with_what_is_expected(tmp_path, wrong):
    path = saved(tmp_path, times())
    content = json.loads(path.read_text())
    content["migrations"][0].update(wrong)
    path.write_text(json.dumps(content))
    with pytest.raises(UserError, match=r"migration 1 is .*; expected model, is_recompute_exact, and numbers"):
        load_costs(path, DEVICE)


def test_a_pipeline_takes_the_cheaper_way():
    for copy_s, recompute_s in ((1.0, 2.0), (2.0, 1.0)):
        costs = DeviceCosts(migrations=(times(copy_s=copy_s, recompute_s=recompute_s),))
        pipeline = costs.add_to(Pipeline(id=PipelineId("a"), num_steps=1), CONFIG, Cluster(pools={}))
        assert pipeline.copies_kv is (copy_s < recompute_s)


def test_a_migration_is_estimated_at_half_a_prompt_and_half_a_response():
    estimate = DeviceCosts(migrations=(times(),)).migration_of(CONFIG)
    assert estimate == MigrationEstimate(copy_s=40.0, recompute_s=20.0)


@pytest.mark.parametrize(
    ("config", "is_exact"),
    [
        (CONFIG, False),
        (replace(CONFIG, algorithm=AlgorithmConfig(staleness=1)), True),
        (replace(CONFIG, rollout=replace(CONFIG.rollout, interruptible=InterruptibleConfig(num_slots=4))), True),
    ],
    ids=["other bits", "stale", "interruptible"],
)
def test_no_cache_is_recomputed_that_could_get_other_bits(config, is_exact):
    estimate = DeviceCosts(migrations=(times(is_exact=is_exact),)).migration_of(config)
    assert estimate == MigrationEstimate(copy_s=40.0, recompute_s=math.inf)


@pytest.mark.parametrize(
    "config",
    [
        replace(CONFIG, model=ModelConfig(hidden_size=128)),
        replace(CONFIG, rollout=replace(CONFIG.rollout, num_slots=8)),
        replace(CONFIG, rollout=replace(CONFIG.rollout, engine=EngineConfig(name="vllm", url="http://localhost:1"))),
    ],
    ids=["model", "slots", "engine"],
)
def test_a_pipeline_that_was_not_measured_gets_no_estimate(config):
    assert DeviceCosts(migrations=(times(),)).migration_of(config) is None
