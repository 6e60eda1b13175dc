"""What switches cost is measured, kept in the profile, and reaches the pipelines of a run."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from rlmux.cli import profiling, switch_costs, training
from rlmux.cli.inputs import load_for_run
from rlmux.core.errors import UserError
from rlmux.core.model import Phase, SwitchEstimate
from rlmux.engines.device_fraction import DeviceFractions
from rlmux.profiling.switch_times import SwitchTimes, switch_times
from rlmux.rl.config import TrainingConfig
from rlmux.rl.footprint import footprint_of
from rlmux.sim.models.interference import FractionGrid, InterferenceTable

DEVICE = "a device"


def times(phase: Phase = Phase.TRAIN, footprint_bytes: float = 1e6, seconds: float = 0.1) -> SwitchTimes:
    return SwitchTimes(
        phase=phase, state_bytes=0.5 * footprint_bytes, footprint_bytes=footprint_bytes, offload_s=0.4 * seconds,
        load_s=0.6 * seconds, spill_s=3 * seconds, reload_s=4 * seconds, checkpoint_s=20 * seconds,
    )  # fmt: skip


def saved(folder: Path, *given: SwitchTimes, device: str = DEVICE) -> Path:
    path = folder / "profile.json"
    table = InterferenceTable(device=device, levels=FractionGrid(device=device, num_units=20))
    profiling.save(table, {"a": given}, path)
    return path


def submission(folder: Path, **sets):
    spec = load_for_run(str(folder / "small.yaml"), [f"{name}={value}" for name, value in sets.items()], None)
    return training.submissions(spec)[0], spec.cluster


@pytest.fixture(scope="module")
def measured(tmp_path_factory) -> list[SwitchTimes]:
    config = TrainingConfig(name="tiny")
    return switch_times(config, "cpu", tmp_path_factory.mktemp("disk"), num_rounds=2)


def test_both_states_of_a_plan_are_measured_on_every_way(measured):
    assert [one.phase for one in measured] == [Phase.ROLLOUT, Phase.TRAIN]
    for one in measured:
        assert min(one.offload_s, one.load_s, one.spill_s, one.reload_s, one.checkpoint_s) > 0.0
        assert 0 < one.state_bytes <= one.footprint_bytes


def test_the_profile_keeps_seconds_and_bytes_a_second(measured, tmp_path):
    path = saved(tmp_path, *measured)
    entry = json.loads(path.read_text())["switches"][1]
    assert entry["warm_bytes_per_s"] == pytest.approx(measured[1].state_bytes / measured[1].warm_s)
    assert switch_costs.load(path, DEVICE) == (switch_costs.SwitchCosts(tuple(measured)), [])
    assert profiling.load_interference(path, FractionGrid(device=DEVICE, num_units=20))[0].device == DEVICE


def test_pipelines_whose_states_are_alike_are_measured_once(monkeypatch, tmp_path):
    asked = []
    monkeypatch.setattr(switch_costs, "switch_times", lambda config, *_, **__: asked.append(config.name) or [])
    config = TrainingConfig(name="a")
    larger = replace(config, name="c", model=replace(config.model, hidden_size=128))
    switch_costs.measure([config, replace(config, name="b", seed=7), larger], "cpu", tmp_path)
    assert asked == ["a", "c"]


def test_a_state_of_another_size_takes_time_after_the_nearest_that_was_measured():
    costs = switch_costs.SwitchCosts((times(footprint_bytes=1e6, seconds=0.1), times(footprint_bytes=1e9, seconds=9.0)))
    assert costs.seconds(Phase.TRAIN, 2e6, is_spilled=False) == pytest.approx(0.2)
    assert costs.seconds(Phase.TRAIN, 5e8, is_spilled=False) == pytest.approx(4.5)
    assert costs.seconds(Phase.TRAIN, 1e6, is_spilled=True) == pytest.approx(0.7)
    assert costs.seconds(Phase.ROLLOUT, 1e6, is_spilled=False) is None


@pytest.mark.parametrize("spills", [False, True])
def test_a_runs_pipelines_are_told_what_their_switches_take(folder, tmp_path, spills):
    given, cluster = submission(folder, **{"cluster.pools.train.spills_to_disk": str(spills).lower()})
    footprint = footprint_of(given.config)
    costs = switch_costs.SwitchCosts(
        (
            times(Phase.ROLLOUT, footprint.rollout_device_bytes, 1.0),
            times(Phase.TRAIN, footprint.train_device_bytes, 2.0),
        )
    )
    told = costs.applied_to(given, cluster).pipeline.switch
    expected = SwitchEstimate(rollout_s=1.0, train_s=14.0 if spills else 2.0)
    assert (told.rollout_s, told.train_s) == pytest.approx((expected.rollout_s, expected.train_s))


def test_half_a_measurement_tells_nothing(folder):
    given, cluster = submission(folder)
    assert switch_costs.SwitchCosts((times(Phase.ROLLOUT),)).applied_to(given, cluster) == given


def test_a_profile_of_another_device_is_named_and_not_used(tmp_path):
    costs, (warning,) = switch_costs.load(saved(tmp_path, times(), device="another"), DEVICE)
    assert costs.measured == ()
    assert "'another', not on 'a device'" in warning
    assert "count as nothing until" in warning


def test_a_profile_from_before_switches_were_measured_still_loads(tmp_path):
    path = saved(tmp_path, times())
    content = json.loads(path.read_text())
    del content["switches"]
    path.write_text(json.dumps(content))
    costs, (warning,) = switch_costs.load(path, DEVICE)
    assert costs.measured == ()
    assert "has no switches" in warning
    assert "count as nothing until" in warning


@pytest.mark.parametrize("wrong", [{"load_s": -1.0}, {"load_s": "1"}, {"phase": "sync"}, {"spill_s": float("nan")}])
def test_switches_that_are_no_numbers_are_told_with_what_is_expected(tmp_path, wrong):
    path = saved(tmp_path, times())
    content = json.loads(path.read_text())
    content["switches"][0].update(wrong)
    path.write_text(json.dumps(content))
    with pytest.raises(UserError, match=r"switch 1 is .*; expected phase rollout or train, and numbers"):
        switch_costs.load(path, DEVICE)


def test_people_see_a_row_for_each_state(measured, capsys, tmp_path):
    table = InterferenceTable(device=DEVICE, levels=FractionGrid(device=DEVICE, num_units=20))
    profiling.show(table, {"tiny": measured}, tmp_path / "profile.json", as_json=False)
    shown = capsys.readouterr().out
    assert "tiny | rollout" in shown
    assert "from disk s" in shown


def test_what_a_profile_says_reaches_those_who_are_submitted_late_too(folder, tmp_path, monkeypatch, capsys):
    here = DeviceFractions(device=DEVICE, how="nice", shares=(0.5,), num_units=20)
    monkeypatch.setattr(
        profiling, "probe", lambda device: here if device == "cpu" else DeviceFractions(device="", how="")
    )
    path = saved(tmp_path, times(Phase.ROLLOUT), times(Phase.TRAIN))
    spec = load_for_run(str(folder / "small.yaml"), None, None)
    policy, costs = training._profiled("rollmux", spec.cluster, path)
    assert policy.name == "rollmux"
    assert "only its switches are used" in capsys.readouterr().err
    late = training._parser(spec, costs)((folder / "small.yaml").read_text(), "late.yaml")
    assert [one.pipeline.switch for one in late] == [costs(one).pipeline.switch for one in training.submissions(spec)]
    assert None not in [one.pipeline.switch for one in late]
