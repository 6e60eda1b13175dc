"""Pipelines that hold nodes by turns: parked at a step boundary for the next one, by their parts of the time."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.examples import examples

from rlmux.core.actions import Admit, Park
from rlmux.core.events import NodeLost, ParkRequested, PipelineCancelled
from rlmux.core.model import NodeId, PhaseSeconds, PipelineId, PipelineStatus
from rlmux.core.scheduler import Scheduler
from rlmux.policies import make_policy

TURN_S = 9.0


def driver_of(builders, *, turn_s: float = TURN_S, reset_s: float = 20.0, **sizes):
    policy = make_policy("gavel", turn_s=turn_s, reset_s=reset_s)
    return builders.Driver(Scheduler(builders.cluster(**sizes), policy))


def order_of_steps(driver) -> str:
    """The pipelines' names in the order of their rollouts."""
    return "".join(name for _, name, stage, _ in driver.starts() if stage == "generate")


def test_two_pipelines_change_places_at_the_step_boundary_after_a_turn(builders):
    driver = driver_of(builders)
    driver.submit(builders.pipeline("a", num_steps=8), builders.pipeline("b", num_steps=8))
    driver.run()
    assert order_of_steps(driver) == "aaabbb" * 2 + "aabb"  # a step takes 3 s
    assert {driver.scheduler.query.status(PipelineId(name)) for name in "ab"} == {PipelineStatus.FINISHED}


def test_alone_it_keeps_its_nodes(builders):
    driver = driver_of(builders)
    driver.submit(builders.pipeline("a", num_steps=20))
    driver.run()
    assert not driver.actions(Park)
    assert driver.now_s == 60.0


def test_no_phases_of_two_pipelines_are_interleaved(builders):
    driver = driver_of(builders, turn_s=0.0)
    driver.submit(*(builders.pipeline(name, num_steps=4) for name in "abc"))
    assert driver.run() == 12 * 3.0


def test_a_step_is_never_left_out_or_made_twice(builders):
    driver = driver_of(builders, rollout=2, train=2)
    driver.submit(*(builders.pipeline(name, num_steps=9) for name in "abc"))
    driver.run()
    for name in "abc":
        steps = [step for _, one, stage, step in driver.starts() if (one, stage) == (name, "update")]
        assert steps == list(range(1, 10))


def test_over_a_hundred_turns_each_holds_nodes_for_its_part_of_the_time(builders):
    """Two nodes of each pool and three pipelines, one of them on two nodes: it counts for two of the four shares."""
    driver = driver_of(builders, rollout=2, train=2)
    wide = builders.pipeline("w", num_steps=10_000, num_rollout_nodes=2, num_train_nodes=2)
    driver.submit(wide, *(builders.pipeline(name, num_steps=10_000) for name in "ab"))
    while driver.now_s < 200 * TURN_S:
        driver.step()
    made = {name: sum(one == name for _, one, stage, _ in driver.starts() if stage == "update") for name in "wab"}
    targets = driver.scheduler.state.clock.targets
    elapsed_s = driver.now_s
    for name in "wab":
        assert 3.0 * made[name] / elapsed_s == pytest.approx(sum(targets[PipelineId(name)].values()), abs=0.02)


def test_a_newcomer_has_its_part_once_targets_are_made_anew(builders):
    driver = driver_of(builders, reset_s=50.0)
    driver.submit(builders.pipeline("a", num_steps=40))
    while driver.now_s < 30.0:
        driver.step()
    driver.submit(builders.pipeline("b", num_steps=5))
    driver.run()
    admitted_s = [time_s for time_s, action in driver.log if isinstance(action, Admit) and action.pipeline == "b"]
    assert 50.0 <= admitted_s[0] <= 60.0


def test_targets_are_made_anew_when_a_node_is_lost(builders):
    driver = driver_of(builders, rollout=2, train=2)
    driver.submit(*(builders.pipeline(name, num_steps=40) for name in "ab"))
    shares = driver.scheduler.state.clock
    assert [sum(one.values()) for one in shares.targets.values()] == pytest.approx([1.0, 1.0], abs=1e-6)
    while driver.now_s < 30.0:
        driver.step()
    driver.send(NodeLost(time_s=driver.now_s, node=NodeId("train", 1)))
    while driver.now_s < 70.0:
        driver.step()
    assert [sum(one.values()) for one in shares.targets.values()] == pytest.approx([0.5, 0.5], abs=1e-6)


def test_what_its_user_parks_is_not_given_a_turn(builders):
    driver = driver_of(builders)
    driver.submit(builders.pipeline("a", num_steps=4), builders.pipeline("b", num_steps=4))
    driver.send(ParkRequested(time_s=0.0, pipeline=PipelineId("a")))
    driver.run()
    assert driver.scheduler.query.reason(PipelineId("a")) == "its user parked it"
    assert order_of_steps(driver) == "abbbb"


@given(
    st.lists(
        st.tuples(st.sampled_from([1, 1, 2]), st.integers(1, 4), st.integers(1, 6), st.integers(0, 9), st.booleans()),
        min_size=1,
        max_size=6,
    )
)
@settings(max_examples=examples(30), deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
def test_every_pipeline_ends_whatever_comes_and_goes(builders, made):
    driver = driver_of(builders, rollout=2, train=2)
    for number, (nodes, rollout_s, num_steps, gap_s, is_known) in enumerate(made):
        while driver.next_end_s() <= driver.now_s + gap_s:
            driver.step()
        fields = {} if is_known else {"colocated_estimate": PhaseSeconds(rollout_s=rollout_s, train_s=2.0)}
        one = builders.pipeline(
            f"p{number}",
            num_steps=num_steps,
            rollout_s=rollout_s,
            num_rollout_nodes=nodes,
            num_train_nodes=nodes,
            **fields,
        )
        driver.submit(one)
    driver.send(PipelineCancelled(time_s=driver.now_s, pipeline=PipelineId("p0")))
    driver.run()
    statuses = {driver.scheduler.query.status(PipelineId(f"p{number}")) for number in range(1, len(made))}
    assert statuses <= {PipelineStatus.FINISHED}
