"""`rlmux profile` and `--profile`: mistakes, what people see of a profile, and what a run takes from one."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from tests.small_files import REVERSE, SORT, small_file

from rlmux.api.files import policy_and_costs
from rlmux.cli import inputs, profile_tables
from rlmux.config import Purpose
from rlmux.config.load import parse_spec
from rlmux.core.errors import UserError
from rlmux.core.estimation.colocation import SharingTriple
from rlmux.core.model import Phase
from rlmux.engines.device_fraction import DeviceFractions
from rlmux.profiling import interference_probe
from rlmux.profiling.migration_times import MigrationTimes
from rlmux.profiling.profile_file import Profile
from rlmux.profiling.step_estimates import StepTimes, settings_of
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


def estimates_of(*pipelines: str) -> dict[str, StepTimes]:
    """Of pipelines of a small file: seconds that no tiny pipeline takes."""
    configs = [one.config for one in parse_spec(small_file(*pipelines, steps=2), source="", folder=Path()).pipelines]
    seconds = {"rollout_s": 60.0, "train_s": 30.0, "sync_s": 5.0, "limit_rollout_s": 90.0, "limit_train_s": 40.0}
    return {config.name: StepTimes(**settings_of(config), **seconds) for config in configs}


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


def test_a_file_whose_pipelines_have_no_task_is_refused(rlmux, folder):
    (folder / "plan.yaml").write_text(small_file("{name: a, estimate: {rollout_s: 1, train_s: 1}}", steps=2))
    said = rlmux("profile", "plan.yaml")
    assert said.code == 2
    assert "pipelines.a.task is missing; accepted: a task's name" in said.err


@pytest.mark.parametrize(("num_units", "device"), [(1, "cpu"), (132, "cuda")])
def test_a_gpu_is_measured_where_there_is_one(monkeypatch, num_units, device):
    gpu = DeviceFractions(device="a GPU", how="", num_units=num_units)
    monkeypatch.setattr(interference_probe, "probe", lambda _: gpu)
    assert interference_probe.usual_device() == device


def test_a_profile_goes_with_a_file_or_a_run_and_not_with_a_workload(rlmux, tmp_path):
    Profile(table=TABLE).save(tmp_path / "profile.json")
    said = rlmux("simulate", "weave", "--profile", str(tmp_path / "profile.json"))
    assert said.code == 2
    assert "'weave' has no pipelines to estimate; accepted: a YAML file, or a run" in said.err


def test_people_see_a_row_for_each_pipelines_step_and_how_long_the_profile_took(capsys, tmp_path):
    measured = Profile(table=TABLE, estimates=estimates_of(SORT), wall_s=12.34)
    profile_tables.show(measured, tmp_path / "profile.json", as_json=False)
    lines = capsys.readouterr().out.splitlines()
    assert ["a", "95.000", "60.000", "30.000", "5.000", "90.000", "40.000"] in [line.split() for line in lines]
    assert "The profile took 12.3 s" in lines
    profile_tables.show(measured, tmp_path / "profile.json", as_json=True)
    assert json.loads(capsys.readouterr().out)["wall_s"] == 12.34


@pytest.fixture
def bare(folder: Path) -> Path:
    """bare.yaml, whose pipelines a and b have no estimates, and a profile of both that another device made."""
    (folder / "bare.yaml").write_text(small_file(SORT, REVERSE, steps=2))
    Profile(table=replace(TABLE, device="a GPU"), estimates=estimates_of(SORT, REVERSE)).save(folder / "profile.json")
    return folder


@pytest.mark.parametrize("command", [["plan"], ["simulate", "--policies", "solo"]])
def test_a_file_without_estimates_is_planned_without_torch_by_a_profile_of_another_device(bare, command):
    words = [*command, "bare.yaml", "--profile", "profile.json", "--json"]
    code = f"import sys; sys.modules['torch'] = None; from rlmux.cli import main; main({words!r})"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=bare, check=True)
    assert json.loads(said.stdout)
    assert said.stderr == "rlmux: --profile profile.json: estimates of a, b taken, as measured on 'a GPU'\n"


def test_the_estimate_of_the_file_wins_over_that_of_the_profile(bare, capsys):
    given = ["pipelines.a.estimate={rollout_s: 1, train_s: 2}"]
    spec = inputs.load("bare.yaml", given, purpose=Purpose.PLAN, profile=bare / "profile.json")
    assert [one.pipeline.estimate.rollout_s for one in spec.pipelines] == [1.0, 60.0]
    assert [one.pipeline.limit is None for one in spec.pipelines] == [True, False]
    assert "estimates of b taken" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["plan", "simulate"])
def test_a_pipeline_that_the_profile_did_not_measure_cannot_be_planned_by_it(rlmux, bare, command):
    Profile(table=TABLE, estimates=estimates_of(SORT)).save(bare / "profile.json")
    said = rlmux(command, "bare.yaml", "--profile", "profile.json")
    assert said.code == 2
    assert "profile.json has estimates of a, and none of pipeline b; accepted: what `rlmux profile` writes" in said.err


def test_a_run_measures_what_the_profile_did_not_and_says_so(here, bare, capsys):
    Profile(table=TABLE, estimates=estimates_of(SORT)).save(bare / "profile.json")
    spec = inputs.load("bare.yaml", profile=bare / "profile.json")
    assert [one.pipeline.estimate is None for one in spec.pipelines] == [False, True]
    assert "none of pipeline b; accepted: what `rlmux profile` writes of this file" in (said := capsys.readouterr().err)
    assert "; the run measures it\n" in said


def test_a_run_keeps_the_estimates_that_it_took(here, bare):
    Profile(table=TABLE, estimates=estimates_of(SORT, REVERSE)).save(bare / "profile.json")
    spec = inputs.load("bare.yaml", profile=bare / "profile.json")
    again = parse_spec(spec.resolved, source="the log", folder=bare)
    assert [one.pipeline.estimate for one in again.pipelines] == [one.pipeline.estimate for one in spec.pipelines]


def test_a_run_takes_no_estimates_of_another_device(here, bare):
    with pytest.raises(UserError, match=r"was measured on 'a GPU', and this machine has 'a device'; accepted: what"):
        inputs.load("bare.yaml", profile=bare / "profile.json")


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
