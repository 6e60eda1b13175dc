"""A run's log as a workload: the same policy takes as long as it was measured, another what it would have taken."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rlmux.cli.main import run_command_line
from rlmux.core.errors import UserError
from rlmux.core.events import StageFinished
from rlmux.core.model import Cluster, Phase, PhaseSeconds, Pipeline, PipelineId, Pool, Stage
from rlmux.core.policies import POLICIES
from rlmux.report.log import RunLog, run_header
from rlmux.sim.arrivals import Arrival, Workload
from rlmux.sim.recorded import RolloutRecord, ShareSeconds, recorded_workload
from rlmux.sim.simulator import simulate
from rlmux.sim.world import Sampled, SwitchSeconds, TrueSeconds

STAGES = (Stage.GENERATE, Stage.REWARD, Stage.OLD_LOGPROBS, Stage.UPDATE, Stage.PUBLISH)
CLUSTER = Cluster(pools={phase.value: Pool(name=phase.value, phase=phase, num_nodes=1) for phase in list(Phase)[:2]})


def pair(num_steps: int = 4) -> Workload:
    """Two pipelines whose steps vary, whose first orders are cold."""
    arrivals = []
    for seed, (rollout_s, train_s) in enumerate([(6.0, 3.0), (4.0, 5.0)]):
        seconds = {Stage.REWARD: 0.2, Stage.OLD_LOGPROBS: 1.0, Stage.UPDATE: train_s, Stage.PUBLISH: 0.1}
        world = TrueSeconds(by_stage={Stage.GENERATE: rollout_s, **seconds}, variation=Sampled(seed=seed, cv=0.3))
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

        return simulate(workload, POLICIES[policy](), observer=write)


@pytest.mark.parametrize("policy", ["solo", "rollmux"])
def test_under_its_own_policy_a_run_takes_what_was_measured(tmp_path, policy):
    measured = record(pair(), policy, tmp_path)
    again = simulate(recorded_workload(tmp_path), POLICIES[policy]())
    assert again.hours == pytest.approx(measured.hours, rel=1e-6)


@pytest.mark.parametrize("policy", ["rollmux", "fifo"])
def test_another_policys_makespan_is_predicted_from_a_solo_run(tmp_path, policy):
    record(pair(), "solo", tmp_path)
    truth = simulate(pair(), POLICIES[policy]())
    predicted = simulate(recorded_workload(tmp_path), POLICIES[policy]())
    assert predicted.hours == pytest.approx(truth.hours, rel=1e-6)
    assert truth.hours < 0.9 * simulate(pair(), POLICIES["solo"]()).hours


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


def test_dense_seconds_are_divided_among_devices_and_tails_are_not():
    rollout = RolloutRecord(fixed_s=1.0, dense_s=40.0, tails_s=(9.0, 8.0, 2.0), num_trajectories=20, num_devices=1)
    assert rollout.seconds == pytest.approx(50.0)
    assert [rollout.share(index, 2).until_over(1.0) for index in (0, 1)] == pytest.approx([30.0, 29.0])


def test_a_share_that_takes_over_another_has_all_its_seconds_and_every_tail():
    rollout = RolloutRecord(fixed_s=0.0, dense_s=40.0, tails_s=(9.0, 8.0), num_trajectories=20, num_devices=1)
    source, target = rollout.share(0, 2), rollout.share(1, 2)
    source.advance(5.0, 1.0)
    target.give(source.take(), 0.5)
    assert source.is_over
    assert target.until_over(1.0) == pytest.approx(0.5 + 35.0 + 9.0)
    while target.report() != (2, 0, 0):
        target.advance(target.until_news(1.0), 1.0)
    assert target.until_over(1.0) == pytest.approx(9.0)


def test_news_of_a_rollout_is_of_its_trajectories_left():
    work = RolloutRecord(
        fixed_s=1.0, dense_s=40.0, tails_s=(9.0, 8.0, 2.0), num_trajectories=20, num_devices=1, slots=4
    ).share(0, 1)
    seen = [work.report()]
    while not work.is_over:
        work.advance(work.until_news(1.0), 1.0)
        seen.append(work.report())
    assert seen == [None, (4, 16, 0), (4, 12, 0), (4, 4, 0), (4, 0, 0), (3, 0, 0), (2, 0, 0), (1, 0, 0), (0, 0, 0)]


def test_it_ends_however_it_is_driven():
    for pace, part in ((1.0, 1.0), (0.5, 0.3), (1.0, 0.01)):
        work = ShareSeconds(0.5, [(0.2, 0.0)] * 10 + [(0.2, 3.0), (0.0, 1.0)], slots=2, waits=[(0.3, 2.0), (0.9, 1.0)])
        total_s, passed_s = work.until_over(pace), 0.0
        while not work.is_over:
            step_s = max(part * work.until_news(pace), 1e-3)
            work.advance(step_s, pace)
            passed_s += step_s
        assert passed_s == pytest.approx(total_s, abs=2e-3)


def test_the_command_puts_the_prediction_beside_what_was_measured(tmp_path, capsys):
    measured = record(pair(), "solo", tmp_path)
    assert run_command_line(["simulate", "--from-run", str(tmp_path), "--policies", "solo,rollmux"]) == 0
    rows = {line.partition("  ")[0]: line.split() for line in capsys.readouterr().out.splitlines()}
    assert f"{measured.hours * 3600:.2f}" in rows["solo, measured"]
    assert float(rows["rollmux"][2]) < 0.9


@pytest.mark.parametrize("words", [["simulate"], ["simulate", "weave", "--from-run", "x"]])
def test_a_workload_or_a_run_is_wanted_and_not_both(words, capsys):
    assert run_command_line(words) == 2
    assert "either FILE|WORKLOAD or --from-run DIR" in capsys.readouterr().err
