"""`rlmux profile` and `--profile`: mistakes, what people see of a profile, and what a run takes from one."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rlmux.api.files import policy_and_costs
from rlmux.cli import inputs, profile_tables
from rlmux.core.model import Phase
from rlmux.core.steps.colocation import SharingTriple
from rlmux.engines.device_fraction import DeviceFractions
from rlmux.profiling.migration_times import MigrationTimes
from rlmux.profiling.profile_file import Profile
from rlmux.profiling.switch_times import SwitchTimes
from rlmux.runtime import launch
from rlmux.sim.models.interference import FractionGrid, InterferenceTable
from rlmux.sim.models.neighbour_slowdown import Neighbours

DEVICE = "a device"
TABLE = InterferenceTable(device=DEVICE, grid=FractionGrid(device=DEVICE, num_units=20))
SLOWDOWNS = {("dense", "dense"): 1.1, ("dense", "update"): 1.05, ("update", "dense"): 1.0, ("update", "update"): 1.2}


def switch_times(phase: Phase) -> SwitchTimes:
    return SwitchTimes(
        phase=phase, state_bytes=5e5, footprint_bytes=1e6, offload_s=0.04, load_s=0.06, spill_s=0.3, reload_s=0.4,
        checkpoint_s=2.0,
    )  # fmt: skip


SWITCHES = {"tiny": [switch_times(Phase.ROLLOUT), switch_times(Phase.TRAIN)]}


@pytest.fixture
def here(monkeypatch) -> DeviceFractions:
    """This machine is said to have DEVICE."""
    fractions = DeviceFractions(device=DEVICE, how="nice", prepared=(0.5,), num_units=20)
    monkeypatch.setattr("rlmux.profiling.interference_probe.fractions_here", lambda: fractions)
    return fractions


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (["--device", "tpu"], "--device tpu; accepted: cpu or cuda"),
        (["--out", "/no/such/folder/profile.json"], "accepted: a file in a folder that exists"),
    ],
)
def test_mistakes_are_told_before_anything_is_measured(rlmux, options, problem):
    said = rlmux("profile", *options)
    assert said.code == 2
    assert problem in said.err


def test_a_profile_is_of_devices_and_not_of_workloads(rlmux, tmp_path):
    Profile(table=TABLE).save(tmp_path / "profile.json")
    said = rlmux("simulate", "weave", "--profile", str(tmp_path / "profile.json"))
    assert said.code == 2
    assert "goes with --from-run only" in said.err


def test_people_see_a_row_for_each_triple_and_whether_it_helps(capsys, tmp_path):
    levels = (0.25, 0.25, 0.5)
    helps = SharingTriple(sub_stages=("dense", "tail", "update"), device_fractions=levels, slowdowns=(1.25, 1.25, 2.0))
    slow = SharingTriple(sub_stages=("dense", "tail", "tail"), device_fractions=levels, slowdowns=(4.0, 4.0, 4.0))
    profile_tables.show(Profile(table=replace(TABLE, triples=(helps, slow))), tmp_path / "profile.json", as_json=False)
    rows = ["".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert "dense|tail|update0.250.250.51.251.252.002.10helps" in rows
    assert "dense|tail|tail0.250.250.54.004.004.000.75" in rows


def test_people_see_a_row_for_each_state(capsys, tmp_path):
    profile_tables.show(Profile(table=TABLE, switches=SWITCHES), tmp_path / "profile.json", as_json=False)
    shown = capsys.readouterr().out
    assert "tiny | rollout" in shown
    assert "from disk s" in shown


def test_people_see_a_row_for_the_migrations_of_each_pipeline(capsys, tmp_path):
    times = MigrationTimes(
        model="", num_slots=4, context_tokens=48.0, kv_bytes_per_token=512.0, copy_s_per_token=2e-6,
        recompute_s_per_token=3e-6, is_recompute_exact=False,
    )  # fmt: skip
    profile_tables.show(Profile(table=TABLE, migrations={"tiny": times}), tmp_path / "profile.json", as_json=False)
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["tiny", "48", "512", "2.00", "3.00", "other"] in rows


def test_people_get_a_row_for_each_sub_stage_and_a_column_for_each_neighbour(tmp_path, capsys):
    with_neighbours = Profile(table=TABLE, neighbours=Neighbours(device=DEVICE, measured=SLOWDOWNS))
    profile_tables.show(with_neighbours, tmp_path, as_json=False)
    said = capsys.readouterr().out.splitlines()
    assert ["dense", "1.10", "1.05"] in [line.split() for line in said]
    profile_tables.show(Profile(table=TABLE), tmp_path, as_json=False, without_neighbours="left out")
    assert "left out" in capsys.readouterr().out.splitlines()


def test_a_policy_that_shares_nothing_says_that_only_other_costs_are_used(here, folder, tmp_path, capsys):
    Profile(table=TABLE, switches=SWITCHES).save(tmp_path / "profile.json")
    spec = inputs.load(str(folder / "small.yaml"), None, "solo")
    policy, _ = policy_and_costs(spec, tmp_path / "profile.json", inputs.print_notice)
    assert policy.name == "solo"
    assert "solo gives devices as a whole: only switches and migrations are used" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["run", "compare"])
def test_a_profile_of_another_device_ends_the_command_before_anything_starts(here, rlmux, folder, command):
    table = InterferenceTable(device="another", grid=FractionGrid(device="another", num_units=20))
    Profile(table=table, switches=SWITCHES).save(folder / "profile.json")
    out = folder / "out"
    said = rlmux(command, str(folder / "small.yaml"), "--profile", str(folder / "profile.json"), "--out", str(out))
    assert said.code == 2
    assert "was measured on 'another', and this machine has 'a device'; accepted: what `rlmux profile FILE`" in said.err
    assert not out.exists()


def test_a_profile_reaches_pipelines_that_are_submitted_late_too(here, folder):
    Profile(table=TABLE, switches=SWITCHES).save(folder / "profile.json")
    spec = inputs.load(str(folder / "small.yaml"))
    _, add_costs = policy_and_costs(spec, folder / "profile.json")
    parse = launch.parser(spec, add_costs)
    late = [one.pipeline.switch for one in parse((folder / "small.yaml").read_text(), "late.yaml")]
    assert late == [one.pipeline.switch for one in launch.submissions(spec, add_costs)]
    assert None not in late


@pytest.mark.parametrize(("sets", "slowdown"), [([], 1.1), (["defaults.algorithm.epochs=2"], 1.5)])
def test_a_policy_is_told_of_old_log_probs_only_where_a_pipeline_computes_them(here, folder, sets, slowdown):
    measured = {("tail", "update", 0.5): (1.2, 1.1), ("tail", "old_logprobs", 0.5): (1.1, 1.5)}
    Profile(table=replace(TABLE, measured=measured)).save(folder / "profile.json")
    spec = inputs.load(str(folder / "small.yaml"), sets, "jigsaw")
    policy, _ = policy_and_costs(spec, folder / "profile.json")
    assert policy.sharing.rates_beside("old_logprobs", ["tail"]).slowdown == slowdown
