"""A step as it was planned: the log's events give the scheduler's plan of it again."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

import pytest

from rlmux.core.errors import UserError
from rlmux.core.estimation.colocation import SharingEntry, SharingTable
from rlmux.core.model import SUB_STAGE_BY_STAGE, Stage
from rlmux.core.scheduler import Scheduler
from rlmux.log.run_log import LogReader, RunLog, run_header
from rlmux.policies import make_policy
from rlmux.report.figures.planned_step import planned_step
from rlmux.runtime.launch import scheduler_of
from rlmux.sim.simulator import Simulation
from rlmux.sim.workloads.substage_pairs import GSM8K_06B, crowd

HELPS = SharingTable.of(
    [SharingEntry(sub_stage_a="update", sub_stage_b="tail", device_fraction=0.75, slowdown_a=1.1, slowdown_b=1.2)]
)
WORKLOAD = crowd((GSM8K_06B, GSM8K_06B), num_gpus=8, num_steps=3)
FIRST, SECOND = (arrival.pipeline.id for arrival in WORKLOAD.arrivals)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A simulated run's folder, and the scheduler's (time, plan) of each step when its rollout was opened."""
    folder, plans, policy = tmp_path_factory.mktemp("run"), {}, make_policy("jigsaw", sharing=HELPS)
    header = run_header(policy=policy.name, backend="local", cluster=WORKLOAD.cluster, sharing=policy.sharing)
    with RunLog.create(folder, header) as log:

        def write(event, actions):
            log.append_event(event)
            log.append_actions(actions)
            for name in simulation.scheduler.query.pipelines():
                member = simulation.scheduler.query.pipeline(name)
                if member.is_rollout_open:
                    plans.setdefault((name, member.rollout_step), (event.time_s, member.step_plan))

        simulation = Simulation(WORKLOAD, policy, observer=write)
        simulation.run()
    return folder, plans


def rows_of(folder):
    with LogReader(folder) as reader:
        return list(reader.entries())


@pytest.mark.parametrize("step", [1, 2, 3])
@pytest.mark.parametrize("name", [FIRST, SECOND])
def test_the_plan_is_the_one_that_the_scheduler_had(run, name, step):
    folder, plans = run
    at_s, plan = plans[name, step]
    planned = planned_step(rows_of(folder), partial(scheduler_of, folder), name, step, at_s)
    assert planned.at_s == at_s
    workers = {node.key.worker for node in planned.graph.nodes} - {None}
    assert len(workers) == 2
    for worker in workers:
        shard = [node for node in planned.graph.nodes if node.key.worker == worker]
        assert [node.key.sub_stage for node in shard] == [sub_stage for _, sub_stage in plan.sub_stages]
        assert [plan.shard_s - node.begin_s for node in shard] == pytest.approx(
            [plan.shard_s, *(left_s for left_s, _ in plan.sub_stages[1:])]
        )
    stages = {node.key.stage: node.seconds for node in planned.graph.nodes if node.key.worker is None}
    assert {stage: stages[stage] for stage, _ in plan.training} == pytest.approx(dict(plan.training))


def test_the_first_step_is_planned_by_the_estimate_and_later_ones_by_the_last_steps(run):
    folder, plans = run
    estimate_s = WORKLOAD.arrivals[0].pipeline.estimate.rollout_s
    rollout_s = []
    for step in (1, 3):
        graph = planned_step(rows_of(folder), partial(scheduler_of, folder), FIRST, step, plans[FIRST, step][0]).graph
        worker = graph.nodes[0].key.worker
        rollout_s.append(sum(node.seconds for node in graph.nodes if node.key.worker == worker))
        assert [node.key.stage for node in graph.nodes if node.key.stage in SUB_STAGE_BY_STAGE][-1] is Stage.UPDATE
    assert rollout_s[0] == pytest.approx(estimate_s)
    assert rollout_s[1] != pytest.approx(estimate_s)


def test_a_resumed_run_is_decided_again_from_its_resumption(run):
    folder, plans = run
    rows = rows_of(folder)
    end_s = rows[-1].time_s
    note = rows[-1]._replace(kind="note", type="resumed", value={"machines": {"train": ["a"]}})
    notes: list[object] = []

    def new_scheduler(*resumed: object) -> Scheduler:
        notes.extend(resumed)
        return scheduler_of(folder)

    later = [
        row._replace(time_s=row.time_s + end_s, value=replace(row.value, time_s=row.time_s + end_s))
        if row.kind == "event" else row._replace(time_s=row.time_s + end_s)
        for row in rows
    ]  # fmt: skip
    at_s, _ = plans[SECOND, 2]
    again = planned_step([*rows, note, *later], new_scheduler, SECOND, 2, end_s + at_s)
    assert notes == [note.value], "the second scheduler has the machines of the second part"
    assert again.at_s == end_s + at_s
    first = planned_step(rows, partial(scheduler_of, folder), SECOND, 2, at_s)
    assert [node.seconds for node in again.graph.nodes] == pytest.approx([node.seconds for node in first.graph.nodes])


def test_nothing_is_planned_of_steps_that_nothing_is_known_of(run):
    folder, _ = run
    scheduler, events = scheduler_of(folder), [row for row in rows_of(folder) if row.kind == "event"][:1]
    unknown = replace(events[0].value, pipeline=replace(events[0].value.pipeline, estimate=None))
    actions = scheduler.handle(unknown)
    rows = [events[0]._replace(value=unknown)]
    rows += [events[0]._replace(kind="action", value=action) for action in actions]
    planned = planned_step(rows, partial(scheduler_of, folder), FIRST, 1, 0.0)
    assert planned.graph.nodes == ()


def test_other_decisions_than_the_logged_ones_are_no_plan(run):
    folder, plans = run
    at_s, _ = plans[SECOND, 3]

    def alone() -> Scheduler:
        return Scheduler(WORKLOAD.cluster, make_policy("solo"))

    with pytest.raises(UserError, match="the scheduler decides otherwise than the log"):
        planned_step(rows_of(folder), alone, SECOND, 3, at_s)


def test_a_step_whose_rollout_is_never_opened_has_no_plan(run):
    folder, _ = run
    with pytest.raises(UserError, match="opened no rollout for step 4"):
        planned_step(rows_of(folder), partial(scheduler_of, folder), FIRST, 4, math.inf)
