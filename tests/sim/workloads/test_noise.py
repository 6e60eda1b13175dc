"""Steps that vary: the factors of `noise`, in every workload that takes it."""

from __future__ import annotations

import math
import statistics
from pathlib import Path

import pytest

from rlmux.api.files import load_workload
from rlmux.core.errors import UserError
from rlmux.core.model import Stage
from rlmux.sim.api import simulate
from rlmux.sim.workloads import catalog
from rlmux.sim.workloads.arrivals import Arrival
from rlmux.sim.workloads.noise import measured_cv

CSV = """\
pipeline,submit_s,num_steps,rollout_s,train_s,colocated_rollout_s,colocated_train_s
a,0,20,60,40,80,40
b,0,20,50,30,70,30
"""
YAML = """\
cluster:
  pools:
    h20: {phase: rollout, nodes: 2, gpus_per_node: 8, usd_per_gpu_hour: 1}
    h800: {phase: train, nodes: 2, gpus_per_node: 8, usd_per_gpu_hour: 3}
defaults: {steps: 5}
pipelines:
  - {name: a, estimate: {rollout_s: 60, train_s: 40}}
  - {name: b, estimate: {rollout_s: 50, train_s: 50}}
"""


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "trace.csv").write_text(CSV)
    (tmp_path / "plan.yaml").write_text(YAML)
    return tmp_path


def factors(arrival: Arrival, num_steps: int = 50) -> list[float]:
    return [arrival.world.variation.factor(step) for step in range(1, num_steps + 1)]


def correlation(first: list[float], second: list[float]) -> float:
    return statistics.correlation([math.log(one) for one in first], [math.log(one) for one in second])


def test_a_seed_gives_the_same_factors_and_another_seed_others():
    one, again, other = (catalog.load("micro-a:noise=0.1", seed=seed).arrivals[0] for seed in (3, 3, 4))
    assert factors(one) == factors(again)
    assert not set(factors(one)) & set(factors(other))


def test_the_mean_is_1_and_the_coefficient_of_variation_as_stated():
    varied = factors(catalog.load("micro-a:noise=0.3").arrivals[0], num_steps=20_000)
    assert statistics.fmean(varied) == pytest.approx(1.0, abs=0.01)
    assert statistics.stdev(varied) == pytest.approx(0.3, rel=0.03)


def test_factors_of_steps_and_pipelines_are_independent():
    first, second = (factors(one, num_steps=5000) for one in catalog.load("micro-a:noise=0.1").arrivals[:2])
    assert abs(correlation(first[:-1], first[1:])) < 0.05
    assert abs(correlation(first, second)) < 0.05


def test_a_factor_scales_rollout_and_training_alike_and_no_weight_sync():
    arrival = catalog.load("weave:noise=0.2").arrivals[0]
    base, factor = arrival.world.by_stage, factors(arrival)[6]
    assert arrival.world.seconds(Stage.GENERATE, 7) == base[Stage.GENERATE] * factor
    assert arrival.world.seconds(Stage.UPDATE, 7) == base[Stage.UPDATE] * factor
    assert arrival.world.seconds(Stage.PUBLISH, 7) == base[Stage.PUBLISH] > 0.0


def test_without_noise_the_workload_and_with_it_the_estimates_are_the_same():
    plain, zero, noisy = (catalog.load(text, seed=2) for text in ("weave", "weave:noise=0", "weave:noise=0.1"))
    assert zero == plain
    assert [one.pipeline for one in noisy.arrivals] == [one.pipeline for one in plain.arrivals]
    assert noisy.about.endswith("steps of coefficient of variation 0.1")


def test_measured_noise_is_that_of_the_nearest_published_log():
    expected = {"3B": 0.019, "7B": 0.019, "8B": 0.019, "14B": 0.088, "32B": 0.133, "30B": 0.133, "": 0.088}
    assert {model: measured_cv(model) for model in expected} == expected
    arrivals = catalog.load("weave:noise=measured").arrivals
    for model in ("7B", "14B", "32B"):
        arrival = next(one for one in arrivals if one.model == model)
        assert statistics.stdev(factors(arrival, num_steps=5000)) == pytest.approx(expected[model], rel=0.05)


def test_both_phases_on_training_nodes_vary_as_apart(files):
    for arrival in catalog.load("trace.csv:noise=0.1").arrivals:
        assert arrival.colocated_world is not None
        assert arrival.colocated_world.variation == arrival.world.variation


def test_noise_comes_on_top_of_drift():
    drifting, noisy, both = (
        catalog.load(text, seed=1).arrivals[0] for text in ("drift-up", "weave:noise=0.1", "drift-up:noise=0.1")
    )
    assert len(set(factors(drifting))) > 1
    assert factors(both) == [one * other for one, other in zip(factors(drifting), factors(noisy), strict=True)]


@pytest.mark.parametrize("file", ["trace.csv", "plan.yaml"])
def test_the_steps_of_a_file_vary(files, file):
    for arrival in catalog.load(f"{file}:noise=0.1").arrivals:
        assert len(set(factors(arrival))) == 50
    measured = catalog.load(f"{file}:noise=measured").arrivals[0]
    assert statistics.stdev(factors(measured, num_steps=5000)) == pytest.approx(0.088, rel=0.05)


@pytest.mark.parametrize("overrides", [(), ("cluster.pools.h20.usd_per_gpu_hour=2",)])
@pytest.mark.parametrize("file", ["trace.csv", "plan.yaml"])
def test_seeds_of_a_noisy_file_differ(files, file, overrides):
    def makespans_s(text: str) -> set[float]:
        report = simulate(load_workload(text, overrides), policies=["solo"], seeds=[3, 4])
        return {report["policies"]["solo"][part]["makespan_s"] for part in ("min", "max")}

    assert len(makespans_s(f"{file}:noise=0.1")) == 2
    assert len(makespans_s(file)) == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("weave:noise=-1", "workload 'weave': noise is -1; accepted: 0 to 2"),
        ("weave:noise=3", "workload 'weave': noise is 3; accepted: 0 to 2"),
        ("weave:noise=true", "workload 'weave': noise is True; accepted: 0 to 2"),
        ("weave:noise=nan", "workload 'weave': noise is nan; accepted: 0 to 2"),
        ("weave:noise=high", "workload 'weave': noise is 'high'; accepted: 0 to 2"),
        ("trace.csv:noise=high", "noise is 'high'; accepted: 0 to 2"),
        ("trace.csv:noises=1", "workload 'trace.csv' has no parameter 'noises'; accepted: noise"),
        ("plan.yaml:noise=-1", "noise is -1; accepted: 0 to 2"),
        ("pair:noise=0.1", "workload 'pair': noise is 0.1, and the steps of "),
        ("weave:noises=1", "departure"),
    ],
)
def test_bad_noise_is_refused_in_one_line(files, text, message):
    with pytest.raises(UserError) as raised:
        catalog.load(text)
    assert message in str(raised.value)
    assert "accepted: " in str(raised.value)
    assert "\n" not in str(raised.value)


def test_steps_with_recorded_lengths_take_no_noise_but_0():
    assert catalog.load("pair:noise=0") == catalog.load("pair")
