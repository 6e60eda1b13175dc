"""DecisionCost that take time: orders begin later, and where no core is free, running orders lose it."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from rlmux.cli.main import run_command_line
from rlmux.core.events import ChunkFinished, PipelineSubmitted, StageFinished
from rlmux.core.model import Cluster, Phase, PhaseSeconds, Pipeline, PipelineId, Pool
from rlmux.policies import make_policy
from rlmux.sim.models.neighbour_slowdown import Neighbours
from rlmux.sim.results.decision_cost import DecisionCost, Stopwatch
from rlmux.sim.results.sweep import SimRun, run_simulation
from rlmux.sim.simulator import simulate
from rlmux.sim.workloads.arrivals import Arrival, Workload
from rlmux.sim.world import TrueSeconds

CLUSTER = Cluster(pools={phase.value: Pool(name=phase.value, phase=phase, num_nodes=1) for phase in list(Phase)[:2]})


def workload(num_pipelines: int = 1, num_steps: int = 3) -> Workload:
    """Rollouts of 4 s, training of 4 s."""
    phases = PhaseSeconds(rollout_s=4.0, train_s=4.0)
    world = TrueSeconds.of_phases(phases)
    pipelines = [
        Pipeline(id=PipelineId(f"p{number}"), num_steps=num_steps, estimate=phases, slo_slowdown=9.0)
        for number in range(num_pipelines)
    ]
    arrivals = tuple(Arrival(submit_s=0.0, pipeline=pipeline, world=world) for pipeline in pipelines)
    return Workload(name="test", cluster=CLUSTER, arrivals=arrivals)


def reporting(given: Workload) -> Workload:
    """The same, with trajectories that end after 1, 2 and 4 s, and told as they end."""
    fractions = (0.25, 0.5, 1.0)
    arrivals = [replace(one, world=replace(one.world, finish_fractions=fractions)) for one in given.arrivals]
    return replace(given, arrivals=tuple(arrivals), neighbours=Neighbours(device="cpu: some", measured={}))


def makespan_s(given: Workload, cost: DecisionCost | None = None) -> float:
    return simulate(given, make_policy("rollmux"), decision_cost=cost, checks=True).hours * 3600


def cost_of(seconds: float, **more) -> DecisionCost:
    return DecisionCost(seconds={StageFinished: seconds}, **more)


def test_an_order_begins_when_its_decision_has_been_made():
    """Five of six orders begin late: the first one answers a submission."""
    assert makespan_s(workload()) == pytest.approx(24.0)
    assert makespan_s(workload(), cost_of(0.5)) == pytest.approx(24.0 + 5 * 0.5)


def test_decisions_are_made_one_after_another():
    """Both orders end at once: the second one's decision waits for the first one's."""
    slow = cost_of(0.5)
    handled = [slow.decide(lambda event: [], StageFinished(time_s=4.0, order=1, seconds=4.0), 4.0) for _ in range(2)]
    assert [seconds for _, seconds in handled] == [0.5, 0.5]
    assert (slow.delay_s(4.0), slow.delay_s(9.0)) == (1.0, 0.0)


def test_other_events_take_no_time():
    only = DecisionCost(seconds={PipelineSubmitted: 5.0})
    only.decide(lambda event: [], StageFinished(time_s=0.0, order=1, seconds=4.0), 0.0)
    assert only.delay_s(0.0) == 0.0


def test_a_decision_takes_a_core_only_while_all_are_busy():
    """A rollout reports; beside it the other trains, or none does. A finished stage leaves its own core free."""
    for num_pipelines, is_slower in ((1, False), (2, True)):
        given = reporting(workload(num_pipelines))
        seconds = {ChunkFinished: 0.2}
        with_core = makespan_s(given, DecisionCost(seconds=seconds))
        without = makespan_s(given, DecisionCost(seconds=seconds, takes_cores=True))
        assert (without > with_core + 0.1) is is_slower
        assert without >= with_core


def test_a_stopwatch_changes_nothing_and_finds_what_each_kind_takes():
    watch = Stopwatch()
    assert makespan_s(workload(2), watch) == makespan_s(workload(2))
    assert watch.means()[StageFinished] > 0.0


def test_a_task_counts_decisions_when_told_to_and_cores_where_devices_are_some():
    neighbours = Neighbours(device="cpu: some", measured={}, is_one_machine=True)
    task = SimRun(workload=replace(workload(2), neighbours=neighbours), policy="rollmux")
    assert (neighbours.are_cores, replace(neighbours, device="a GPU").are_cores) == (True, False)
    assert run_simulation(replace(task, counts_decisions=True)).hours > run_simulation(task).hours


def test_the_command_counts_them_when_told_to(capsys):
    assert run_command_line(["simulate", "micro-a", "--policies", "rollmux", "--count-decisions", "--json"]) == 0
    assert "rollmux" in json.loads(capsys.readouterr().out)["policies"]
