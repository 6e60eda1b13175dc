"""A run's log as a workload: the same policy takes as long as it was measured, another what it would have taken."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rlmux.cli.main import run_command_line
from rlmux.core.errors import UserError
from rlmux.core.events import StageFinished
from rlmux.core.model import Cluster, Phase, PhaseSeconds, Pipeline, PipelineId, Pool, Stage
from rlmux.engines.device_fraction import DeviceFractions
from rlmux.log.run_log import RunLog, run_header
from rlmux.policies import make_policy
from rlmux.profiling.interference_probe import fraction_grid_of
from rlmux.profiling.profile_file import Profile
from rlmux.sim.models.interference import InterferenceTable
from rlmux.sim.models.neighbour_slowdown import Neighbours
from rlmux.sim.simulator import simulate
from rlmux.sim.workloads.arrivals import Arrival, Workload
from rlmux.sim.workloads.recorded import recorded_workload
from rlmux.sim.world import RandomVariation, SwitchSeconds, TrueSeconds

STAGES = (Stage.GENERATE, Stage.REWARD, Stage.OLD_LOGPROBS, Stage.UPDATE, Stage.PUBLISH)
CLUSTER = Cluster(pools={phase.value: Pool(name=phase.value, phase=phase, num_nodes=1) for phase in list(Phase)[:2]})


def pair(num_steps: int = 4) -> Workload:
    """Two pipelines whose steps vary, whose first orders are cold."""
    arrivals = []
    for seed, (rollout_s, train_s) in enumerate([(6.0, 3.0), (4.0, 5.0)]):
        seconds = {Stage.REWARD: 0.2, Stage.OLD_LOGPROBS: 1.0, Stage.UPDATE: train_s, Stage.PUBLISH: 0.1}
        variation = RandomVariation(seed=seed, cv=0.3)
        world = TrueSeconds(by_stage={Stage.GENERATE: rollout_s, **seconds}, variation=variation)
        pipeline = Pipeline(
            id=PipelineId(f"p{seed}"),
            num_steps=num_steps,
            stages=STAGES,
            estimate=PhaseSeconds(rollout_s=rollout_s, train_s=train_s),
        )
        switch = SwitchSeconds(cold_rollout_s=2.0, cold_train_s=3.0)
        arrivals.append(Arrival(submit_s=float(seed), pipeline=pipeline, world=world, switch=switch))
    return Workload(name="pair", cluster=CLUSTER, arrivals=tuple(arrivals))


def record(workload: Workload, policy: str, folder, *, until_step: int | None = None):
    """Simulate it and write the log that a real run would have written."""
    with RunLog.create(folder, run_header(policy=policy, backend="local", cluster=workload.cluster)) as log:

        def write(event, actions) -> None:
            if isinstance(event, StageFinished):  # as real ones, which take what they computed
                event = replace(event, seconds=max(0.0, event.seconds))
            log.append_event(event)
            log.append_actions(actions)

        return simulate(workload, make_policy(policy), observer=write)


@pytest.mark.parametrize("policy", ["solo", "rollmux"])
def test_under_its_own_policy_a_run_takes_what_was_measured(tmp_path, policy):
    measured = record(pair(), policy, tmp_path)
    again = simulate(recorded_workload(tmp_path), make_policy(policy))
    assert again.hours == pytest.approx(measured.hours, rel=1e-6)


def test_a_run_on_a_pool_of_both_phases_is_played_on_one(tmp_path):
    pool = Pool(name="gpu0", phase=Phase.TRAIN, serves_both_phases=True, num_nodes=1)
    measured = record(replace(pair(), cluster=Cluster(pools={"gpu0": pool})), "fifo", tmp_path)
    found = recorded_workload(tmp_path)
    assert found.cluster.is_one_pool
    assert simulate(found, make_policy("fifo")).hours == pytest.approx(measured.hours, rel=1e-6)


@pytest.mark.parametrize("policy", ["rollmux", "fifo"])
def test_another_policys_makespan_is_predicted_from_a_solo_run(tmp_path, policy):
    record(pair(), "solo", tmp_path)
    truth = simulate(pair(), make_policy(policy))
    predicted = simulate(recorded_workload(tmp_path), make_policy(policy))
    assert predicted.hours == pytest.approx(truth.hours, rel=1e-6)
    assert truth.hours < 0.9 * simulate(pair(), make_policy("solo")).hours


def test_what_orders_lost_to_busy_neighbours_is_taken_off_and_put_on_again(tmp_path):
    """Both policies in a world where neighbours cost something: what one run tells is true of the other."""
    costs = {("dense", "update"): 1.25, ("update", "dense"): 1.1, ("dense", "dense"): 1.2, ("update", "update"): 1.3}
    neighbours = Neighbours(device="a cpu", measured=costs, is_one_machine=True)
    world = replace(pair(), neighbours=neighbours)
    measured = record(world, "rollmux", tmp_path)
    assert measured.hours > 1.02 * simulate(pair(), make_policy("rollmux")).hours
    recorded = recorded_workload(tmp_path, neighbours)
    assert simulate(recorded, make_policy("rollmux")).hours == pytest.approx(measured.hours, rel=1e-6)
    for policy in ("solo", "fifo"):
        truth = simulate(world, make_policy(policy))
        assert simulate(recorded, make_policy(policy)).hours == pytest.approx(truth.hours, rel=1e-6)


def test_what_the_first_orders_took_longer_is_the_cost_of_a_cold_switch(tmp_path):
    record(pair(), "solo", tmp_path)
    switch = recorded_workload(tmp_path).arrivals[0].switch
    assert (switch.cold_rollout_s, switch.cold_train_s) == (pytest.approx(2.0), pytest.approx(3.0))


def test_a_run_that_is_not_over_is_refused_with_the_names(tmp_path):
    unfinished = pair()
    cut = replace(unfinished, arrivals=tuple(replace(one, depart_s=15.0) for one in unfinished.arrivals))
    record(cut, "rollmux", tmp_path)
    with pytest.raises(UserError, match="not finished: p0, p1"):
        recorded_workload(tmp_path)


def test_the_command_puts_the_prediction_beside_what_was_measured(tmp_path, capsys):
    measured = record(pair(), "solo", tmp_path)
    assert run_command_line(["simulate", "--from-run", str(tmp_path), "--policies", "solo,rollmux"]) == 0
    rows = {line.partition("  ")[0]: line.split() for line in capsys.readouterr().out.splitlines()}
    assert f"{measured.hours * 3600:.2f}" in rows["solo, measured"]
    assert float(rows["rollmux"][2]) < 0.9


def test_the_command_counts_what_its_profile_says_of_neighbours(tmp_path, capsys, monkeypatch):
    record(pair(), "rollmux", tmp_path / "run")
    here = DeviceFractions(device="a cpu", how="nice", num_units=20)
    monkeypatch.setattr("rlmux.profiling.interference_probe.fractions_here", lambda: here)
    table = InterferenceTable(device="a cpu", grid=fraction_grid_of(here))
    costs = {("dense", "update"): 1.25, ("update", "dense"): 1.25}
    Profile(table=table, neighbours=Neighbours(device="a cpu", measured=costs)).save(tmp_path / "profile.json")
    Profile(table=table).save(tmp_path / "older.json")

    def solo_s(*options: str) -> tuple[float, str]:
        assert run_command_line(["simulate", "--from-run", str(tmp_path / "run"), "--policies", "solo", *options]) == 0
        said = capsys.readouterr()
        return float(next(line.split()[1] for line in said.out.splitlines() if line.startswith("solo"))), said.err

    as_recorded_s, alone_s = solo_s()[0], solo_s("--profile", str(tmp_path / "profile.json"))[0]
    assert alone_s < 0.95 * as_recorded_s
    unchanged_s, complaint = solo_s("--profile", str(tmp_path / "older.json"))
    assert (unchanged_s, "has nothing of neighbouring devices" in complaint) == (as_recorded_s, True)


@pytest.mark.parametrize("words", [["simulate"], ["simulate", "weave", "--from-run", "x"]])
def test_a_workload_or_a_run_is_wanted_and_not_both(words, capsys):
    assert run_command_line(words) == 2
    assert "either FILE|WORKLOAD or --from-run DIR" in capsys.readouterr().err
