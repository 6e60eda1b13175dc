"""Why a pipeline waits, and what would start it now: each change that is told is applied, and it starts."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.examples import examples

from rlmux.core.actions import Admit
from rlmux.core.events import HoldReleased, PipelineHeld
from rlmux.core.model import PhaseSeconds, Pipeline, PipelineId
from rlmux.core.placement.choice import PlacementChoice
from rlmux.core.placement.view import PlacementView
from rlmux.core.queue.wait_reasons import Change, WaitToken
from rlmux.core.scheduler import Scheduler
from rlmux.policies import make_policy
from rlmux.policies.max_min_fairness import FairShares


@pytest.fixture
def driver(builders):
    return builders.Driver(Scheduler(builders.cluster(rollout=2, train=2), make_policy("solo"), FairShares()))


def wait_of(driver, name: str):
    return driver.scheduler.wait_of(PipelineId(name))


def test_each_token_says_what_stands_in_the_way(driver, builders):
    driver.submit(builders.pipeline("s0", num_steps=10))
    driver.submit(builders.pipeline("wide", num_rollout_nodes=2), builders.pipeline("long", num_steps=99))
    driver.submit(builders.pipeline("wider", num_rollout_nodes=2))
    driver.submit(builders.pipeline("kept", num_steps=99))
    driver.send(PipelineHeld(time_s=0.0, pipeline=PipelineId("kept")))
    tokens = {name: wait_of(driver, name).token for name in ("wide", "long", "wider", "kept")}
    assert tokens == {"wide": "no_room", "long": "reserved_for", "wider": "behind", "kept": "held"}
    head = wait_of(driver, "wide")
    assert (head.position, head.num_waiting, head.first, head.starts_s) == (1, 3, "wide", 30.0)
    assert wait_of(driver, "kept").position == 0
    assert wait_of(driver, "s0") is None


def test_the_queue_says_of_each_what_is_said_of_it_alone_but_for_the_changes(driver, builders):
    driver.submit(builders.pipeline("s0", num_steps=10), builders.pipeline("wide", num_rollout_nodes=2))
    driver.submit(builders.pipeline("kept", num_steps=99), builders.pipeline("last", num_steps=99))
    driver.send(PipelineHeld(time_s=0.0, pipeline=PipelineId("kept")))
    found = driver.scheduler.waits(9)
    assert [name for name, _ in found] == ["wide", "last", "kept"]
    assert [wait for _, wait in found] == [replace(wait_of(driver, name), would_start_now_if=()) for name, _ in found]
    assert driver.scheduler.waits(1) == found[:1]


def test_a_wide_pipeline_is_told_how_many_nodes_are_there_and_what_stands_before_it(driver, builders):
    driver.submit(builders.pipeline("s0", num_steps=10), builders.pipeline("wide", num_rollout_nodes=2))
    changes = wait_of(driver, "wide").would_start_now_if
    assert changes == (Change(key="rollout.workers", was=2, to=1), Change(key="without", was="", to="s0"))


def test_a_stranger_is_not_told_to_do_without_anothers_pipeline(driver, builders):
    driver.submit(builders.pipeline("s0", user="ann"), builders.pipeline("wide", num_rollout_nodes=2, user="bob"))
    assert [change.key for change in wait_of(driver, "wide").would_start_now_if] == ["rollout.workers"]


@st.composite
def queues(draw):
    made = []
    for number in range(draw(st.integers(2, 9))):
        phases = PhaseSeconds(rollout_s=draw(st.integers(1, 6)), train_s=draw(st.integers(1, 6)))
        made.append(
            Pipeline(
                id=PipelineId(f"p{number}"),
                num_steps=draw(st.integers(1, 6)),
                num_rollout_nodes=draw(st.sampled_from([1, 1, 2])),
                num_train_nodes=draw(st.sampled_from([1, 1, 2])),
                estimate=phases,
                slo_slowdown=draw(st.sampled_from([1.0, 1.2, 1.5, math.inf])),
                user=draw(st.sampled_from(["ann", "bob"])),
            )
        )
    return made


def starts_in_a_trial(scheduler: Scheduler, pipeline: Pipeline, change: Change) -> bool:
    """Whether the policy places the pipeline, changed like this."""
    field = {"rollout.workers": "num_rollout_nodes", "train.workers": "num_train_nodes"}.get(change.key, change.key)
    changed = pipeline if change.key in ("without", "hold") else replace(pipeline, **{field: change.to})
    with scheduler.query.placement.trial() as ledger:
        if change.key == "without":
            ledger.depart(PipelineId(str(change.to)))
        return isinstance(scheduler.policy.place(changed, PlacementView(ledger)), PlacementChoice)


@pytest.mark.parametrize("policy", ["solo", "rollmux", "rlmux"])
@given(made=queues())
@settings(max_examples=examples(8), deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
def test_each_change_that_is_told_starts_it_and_a_smaller_raise_of_the_slo_does_not(builders, policy, made):
    """And to ask changes nothing: a scheduler that was not asked goes on with the same actions."""
    asked, twin = (
        builders.Driver(Scheduler(builders.cluster(rollout=2, train=2), make_policy(policy), FairShares()))
        for _ in range(2)
    )
    for driver in (asked, twin):
        driver.submit(*made)
    for pipeline in made:
        wait = asked.scheduler.wait_of(pipeline.id)
        for change in wait.would_start_now_if if wait is not None else ():
            assert starts_in_a_trial(asked.scheduler, pipeline, change), change
            if change.key == "slo_slowdown" and wait.token is WaitToken.NO_ROOM:
                smaller = replace(change, to=max(change.was, round(change.to - 0.1, 6)))
                assert not starts_in_a_trial(asked.scheduler, pipeline, smaller), change
    asked.run()
    twin.run()
    assert asked.log == twin.log


def test_nothing_but_its_release_starts_a_held_pipeline(driver, builders):
    """Neither the end of another pipeline nor fewer nodes would."""
    driver.submit(builders.pipeline("s0"), builders.pipeline("s1", is_held=True))
    driver.submit(builders.pipeline("s2", num_rollout_nodes=2, is_held=True))
    assert wait_of(driver, "s1").would_start_now_if == (Change(key="hold", was="held", to="released"),)
    assert wait_of(driver, "s2").would_start_now_if == ()


def test_a_pipeline_that_comes_held_waits_until_it_is_released(driver, builders):
    driver.submit(builders.pipeline("kept", is_held=True))
    assert wait_of(driver, "kept").would_start_now_if == (Change(key="hold", was="held", to="released"),)
    assert not driver.actions(Admit)
    driver.send(HoldReleased(time_s=1.0, pipeline=PipelineId("kept")))
    assert len(driver.actions(Admit)) == 1
