"""Crowds of pipelines that come, are parked and lose nodes in any order, with shares that park: what always holds.

Ten thousand such sequences are the long form.
"""

from __future__ import annotations

import math
import random

import pytest
from tests.core.settle.test_parking import LAB, POLICIES, ask_to_park, driver_of, release, status

from rlmux.core.events import NodeJoined, NodeLost, SharesSet
from rlmux.core.model import QUEUED, NodeId, PhaseSeconds, Pipeline, PipelineId, PipelineStatus
from rlmux.core.placement.choice import PlacementChoice
from rlmux.core.queue_order import AccountShare, Quota, Share, ShareSettings

Crowd = tuple[list[tuple[int, str, Pipeline]], ShareSettings]
"""(seconds since the one before, what happens besides, pipeline), and the shares."""
SLOW_PARTS = 10
"""Parts of the long form, for two processes to share."""


def crowd(chance: random.Random) -> Crowd:
    made = []
    for number in range(chance.randint(3, 9)):
        pipeline = Pipeline(
            id=PipelineId(f"p{number}"),
            num_steps=chance.randint(1, 12),
            num_rollout_nodes=chance.choice([1, 1, 2]),
            estimate=PhaseSeconds(rollout_s=chance.randint(1, 5), train_s=chance.randint(1, 5)),
            slo_slowdown=chance.choice([1.5, math.inf, math.inf]),
            staleness=chance.choice([0, 0, 1]),
            user=chance.choice(["ann", "bob", "eve"]),
            urgency=chance.choice(QUEUED),
        )
        made.append((chance.randint(0, 20), chance.choice(["", "", "", "park", "lose"]), pipeline))
    quota = chance.choice([Quota(), Quota(max_running=1), Quota(max_devices=3)])
    return made, ShareSettings(
        min_steps=chance.randint(1, 3),
        half_life_s=chance.choice([30.0, 1e6]),
        accounts=(AccountShare(account=LAB, share=Share(weight=chance.choice([0.5, 3.0])), quota=quota),),
    )


@pytest.mark.parametrize("policy", POLICIES)
def test_all_end_none_is_parked_in_turn_no_slo_is_broken_and_limits_hold(builders, policy):
    """In any order of submissions, parkings and lost nodes; every invariant is looked at after each event."""
    for seed in range(12):
        play(builders, policy, crowd(random.Random(seed)))


@pytest.mark.slow
@pytest.mark.parametrize("part", range(SLOW_PARTS))
def test_ten_thousand_crowds_end_and_none_is_parked_in_turn(builders, part):
    """Every invariant of the core is looked at after each fifth event, all else after each."""
    for seed in range(1_000 * part, 1_000 * (part + 1)):
        play(builders, POLICIES[seed % len(POLICIES)], crowd(random.Random(f"long {seed}")), check_every=5)


def play(builders, policy: str, crowd: Crowd, check_every: int = 1) -> None:
    made, shares = crowd
    driver = driver_of(builders, policy, rollout=2, train=2)
    driver.park_s, driver.check_every = 0.5, check_every
    watch(driver, shares)
    driver.send(SharesSet(time_s=0.0, shares=shares))
    for gap_s, what, pipeline in made:
        until_s = driver.now_s + gap_s
        while driver.next_end_s() <= until_s:
            driver.step()
        driver.now_s = until_s
        driver.submit(pipeline)
        if what == "park":
            ask_to_park(driver, pipeline.id)
        elif what == "lose":
            driver.send(NodeLost(time_s=driver.now_s, node=NodeId("rollout", 0)))
            driver.send(NodeJoined(time_s=driver.now_s, node=NodeId("rollout", 0)))
    driver.run()
    for _, what, pipeline in made:
        if what == "park" and status(driver, pipeline.id) is PipelineStatus.WAITING:
            release(driver, pipeline.id)
    driver.run()
    for _, _, pipeline in made:
        state = driver.scheduler.state.runs[pipeline.id]
        assert state.status in (PipelineStatus.FINISHED, PipelineStatus.REFUSED), (pipeline.id, state.admission.reason)
        if state.status is PipelineStatus.FINISHED:
            assert state.step.published_version == pipeline.num_steps


def watch(driver, shares: ShareSettings) -> None:
    """After each event: ann has no more at once than her quota says, none parks for one that was parked, every group
    keeps the SLOs of its members by their estimates, and nothing that could start is left waiting: not the head,
    without a head no other, and where nothing runs none at all."""
    quota, state, send = shares.accounts[0].quota, driver.scheduler.state, driver.send

    def send_and_look(event):
        actions = send(event)
        running = [run.pipeline for group in state.groups.values() for run in group.members.values()]
        of_ann = [one for one in running if one.user == "ann"]
        assert quota.max_running is None or len(of_ann) <= quota.max_running
        asked = sum(one.num_rollout_nodes + one.num_train_nodes for one in of_ann)
        assert quota.max_devices is None or asked <= quota.max_devices
        for run in state.runs.values():
            if run.status is PipelineStatus.RUNNING and run.parking.is_parking and run.parking.parks_for is not None:
                assert state.runs[run.parking.parks_for].parking.num_parks == 0
                assert run.pipeline.slo_slowdown == math.inf
        for load in driver.scheduler.ledger.groups():
            assert load.keeps_slos, f"{load.id} takes {load.period_s} s, its members allow {load.budget_s} s"
        over = {run.pipeline.id for run, _ in driver.scheduler._parts.queue.over_quota()}
        waiting = [run for run in state.waiting.values() if not run.admission.is_held and run.pipeline.id not in over]
        if state.reservation is not None:
            waiting = [state.runs[state.reservation.pipeline]]
        for run in waiting:
            placed = driver.scheduler.policy.place(run.pipeline, driver.scheduler.query.placement)
            assert not isinstance(placed, PlacementChoice), run.pipeline.id
        if not isinstance(event, NodeLost):  # the node is back with the next event
            assert running or not waiting, "nothing runs, and what may start waits"
        return actions

    driver.send = send_and_look
