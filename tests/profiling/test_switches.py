"""What switches cost is measured, kept in the profile, and estimated for the pipelines of a run."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from rlmux.core.errors import UserError
from rlmux.core.model import Cluster, Phase, Pool, SwitchEstimate
from rlmux.profiling.device_costs import DeviceCosts
from rlmux.profiling.profile_file import Profile, load_costs
from rlmux.profiling.switch_times import SwitchTimes, measure_switches, switch_times
from rlmux.rl.config import ModelConfig, TrainingConfig
from rlmux.rl.memory.footprint import footprint_of
from rlmux.sim.models.interference import FractionGrid, InterferenceTable, load_interference

DEVICE = "a device"


def times(phase: Phase = Phase.TRAIN, footprint_bytes: float = 1e6, seconds: float = 0.1) -> SwitchTimes:
    return SwitchTimes(
        phase=phase, state_bytes=0.5 * footprint_bytes, footprint_bytes=footprint_bytes, offload_s=0.4 * seconds,
        load_s=0.6 * seconds, spill_s=3 * seconds, reload_s=4 * seconds, checkpoint_s=20 * seconds,
    )  # fmt: skip


def saved(folder: Path, *given: SwitchTimes, device: str = DEVICE) -> Path:
    path = folder / "profile.json"
    table = InterferenceTable(device=device, grid=FractionGrid(device=device, num_units=20))
    Profile(table=table, switches={"a": given}).save(path)
    return path


def cluster(*, spills: bool = False) -> Cluster:
    pools = (
        Pool(name="rollout", phase=Phase.ROLLOUT, num_nodes=1, devices_per_node=1),
        Pool(name="train", phase=Phase.TRAIN, num_nodes=1, devices_per_node=1, spills_to_disk=spills),
    )
    return Cluster(pools={pool.name: pool for pool in pools})


@pytest.fixture(scope="module")
def measured(tmp_path_factory) -> list[SwitchTimes]:
    config = TrainingConfig(name="tiny")
    return switch_times(config, "cpu", tmp_path_factory.mktemp("disk"), num_rounds=2)


def test_both_states_of_a_config_are_measured_on_every_way(measured):
    assert [one.phase for one in measured] == [Phase.ROLLOUT, Phase.TRAIN]
    for one in measured:
        assert min(one.offload_s, one.load_s, one.spill_s, one.reload_s, one.checkpoint_s) > 0.0
        assert 0 < one.state_bytes <= one.footprint_bytes


def test_the_profile_keeps_seconds_and_bytes_a_second(measured, tmp_path):
    path = saved(tmp_path, *measured)
    entry = json.loads(path.read_text())["switches"][1]
    assert entry["warm_bytes_per_s"] == pytest.approx(measured[1].state_bytes / measured[1].warm_s)
    assert load_costs(path, DEVICE) == (DeviceCosts(tuple(measured)), [])
    assert load_interference(path, FractionGrid(device=DEVICE, num_units=20))[0].device == DEVICE


def test_pipelines_whose_states_are_alike_are_measured_once(tmp_path):
    config = TrainingConfig(name="a")
    larger = replace(config, name="c", model=replace(config.model, hidden_size=128))
    alike = replace(config, name="b", seed=7)
    assert list(measure_switches([config, alike, larger], "cpu", tmp_path, num_rounds=1)) == ["a", "c"]


def test_a_state_of_another_size_takes_time_after_the_nearest_that_was_measured():
    costs = DeviceCosts((times(footprint_bytes=1e6, seconds=0.1), times(footprint_bytes=1e9, seconds=9.0)))
    assert costs.switch_s(Phase.TRAIN, 2e6, is_spilled=False) == pytest.approx(0.2)
    assert costs.switch_s(Phase.TRAIN, 5e8, is_spilled=False) == pytest.approx(4.5)
    assert costs.switch_s(Phase.TRAIN, 1e6, is_spilled=True) == pytest.approx(0.7)
    assert costs.switch_s(Phase.ROLLOUT, 1e6, is_spilled=False) is None


@pytest.mark.parametrize("spills", [False, True])
def test_a_switch_is_estimated_from_disk_where_the_pool_spills(spills):
    config = TrainingConfig(name="a")
    footprint = footprint_of(config)
    costs = DeviceCosts(
        (
            times(Phase.ROLLOUT, footprint.rollout_device_bytes, 1.0),
            times(Phase.TRAIN, footprint.train_device_bytes, 2.0),
        )
    )
    estimate = costs.switch_of(config, cluster(spills=spills))
    expected = SwitchEstimate(rollout_s=1.0, train_s=14.0 if spills else 2.0)
    assert (estimate.rollout_s, estimate.train_s) == pytest.approx((expected.rollout_s, expected.train_s))


def test_half_a_measurement_gives_no_estimate():
    assert DeviceCosts((times(Phase.ROLLOUT),)).switch_of(TrainingConfig(name="a"), cluster()) is None


def test_a_profile_of_another_device_is_refused(tmp_path):
    expected = "'another', and this machine has 'a device'; accepted: what `rlmux profile FILE` writes on this machine"
    with pytest.raises(UserError, match=expected):
        load_costs(saved(tmp_path, times(), device="another"), DEVICE)


def test_a_profile_of_other_models_is_refused_with_those_it_has(measured, tmp_path):
    config = TrainingConfig(name="a")
    other = replace(config, name="b", model=replace(config.model, hidden_size=128))
    path = saved(tmp_path, *measured)
    assert load_costs(path, DEVICE, [config])[1] == []
    expected = "measured with hidden_size 64, .*, and pipeline b has hidden_size 128, .*; accepted: what `rlmux profile"
    with pytest.raises(UserError, match=expected):
        load_costs(path, DEVICE, [config, other])


@pytest.mark.parametrize(
    ("changes", "warned"),
    [({"pipeline": "usual sizes"}, "measured without a file"), ({"model": None}, "names no models, an older version")],
)
def test_a_profile_that_names_none_of_the_models_is_accepted_with_a_warning(measured, tmp_path, changes, warned):
    path = saved(tmp_path, *measured)
    content = json.loads(path.read_text())
    for entry in content["switches"]:
        entry.update(changes)
    path.write_text(json.dumps(content))
    costs, (warning,) = load_costs(path, DEVICE, [TrainingConfig(name="b", model=ModelConfig(hidden_size=128))])
    assert len(costs.switches) == 2
    assert warned in warning


def test_a_profile_from_before_switches_were_measured_still_loads(tmp_path):
    path = saved(tmp_path, times())
    content = json.loads(path.read_text())
    del content["switches"]
    path.write_text(json.dumps(content))
    costs, (warning,) = load_costs(path, DEVICE)
    assert costs == DeviceCosts()
    assert "has no switches" in warning
    assert "count as nothing until" in warning


@pytest.mark.parametrize("wrong", [{"load_s": -1.0}, {"load_s": "1"}, {"phase": "sync"}, {"spill_s": float("nan")}])
def test_switches_that_are_no_numbers_are_told_with_what_is_expected(tmp_path, wrong):
    path = saved(tmp_path, times())
    content = json.loads(path.read_text())
    content["switches"][0].update(wrong)
    path.write_text(json.dumps(content))
    with pytest.raises(UserError, match=r"switch 1 is .*; expected phase rollout or train, and numbers"):
        load_costs(path, DEVICE)
