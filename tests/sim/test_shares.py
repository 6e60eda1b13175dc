"""Simulated clusters with shares: charges follow weights, what is free is used, and parking is simulated too."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from rlmux.core.actions import Admit, Park, Release
from rlmux.core.model import Account, Cluster, Phase, PhaseSeconds, Pipeline, PipelineId, Pool
from rlmux.core.queue_order import AccountShare, Quota, Share, ShareSettings
from rlmux.policies import make_policy
from rlmux.sim.simulator import Simulation
from rlmux.sim.workloads.arrivals import Arrival, Workload
from rlmux.sim.world import TrueSeconds

CLUSTER = Cluster(
    pools={
        "rollout": Pool(name="rollout", phase=Phase.ROLLOUT, num_nodes=2),
        "train": Pool(name="train", phase=Phase.TRAIN, num_nodes=2),
    }
)


def arrival(name: str, user: str, *, submit_s: float = 0.0, num_steps: int = 4, seconds: float = 30.0) -> Arrival:
    estimate = PhaseSeconds(rollout_s=seconds, train_s=seconds)
    pipeline = Pipeline(id=PipelineId(name), num_steps=num_steps, estimate=estimate, user=user)
    return Arrival(submit_s=submit_s, pipeline=pipeline, world=TrueSeconds.of_phases(estimate))


def simulate(arrivals: list[Arrival], shares: ShareSettings | None, policy: str = "solo", observer=None) -> Simulation:
    arrivals = sorted(arrivals, key=lambda one: one.submit_s)
    workload = Workload(name="shares", cluster=CLUSTER, arrivals=tuple(arrivals), shares=shares)
    simulation = Simulation(workload, make_policy(policy), observer=observer, checks=True)
    simulation.run()
    return simulation


def settings(**weights: float) -> ShareSettings:
    return ShareSettings(
        accounts=tuple(
            AccountShare(account=Account("", user), share=Share(weight=weight)) for user, weight in weights.items()
        )
    )


@pytest.mark.parametrize("policy", ["solo", "rollmux"])
def test_while_all_want_more_charges_follow_the_weights(policy):
    """Users of weights 1, 2 and 1 with more work than fits: after forty pipelines, but for the part of one."""
    charged: dict[str, float] = {}
    ended: list[str] = []

    def observe(event, actions) -> None:
        ended.extend(one.pipeline for one in actions if isinstance(one, Release))
        if not charged and len(ended) >= 40:
            for row in simulation.scheduler.accounts():
                charged[row.account.user] = sum(row.charged_by_pool.values())
                assert row.num_waiting > 0, "each still wants more"

    users = ("ann", "bob", "bob", "eve")
    arrivals = [
        arrival(f"{user}{number}-{place}", user, num_steps=1)
        for number in range(14)
        for place, user in enumerate(users)
    ]
    shares = settings(ann=1.0, bob=2.0, eve=1.0)
    workload = Workload(name="shares", cluster=CLUSTER, arrivals=tuple(arrivals), shares=shares)
    simulation = Simulation(workload, make_policy(policy), observer=observe)
    simulation.run()
    total = sum(charged.values())
    assert charged["ann"] / total == pytest.approx(0.25, abs=1.1 / 40)
    assert charged["bob"] / total == pytest.approx(0.5, abs=1.1 / 40)


@pytest.mark.parametrize("days", [2, pytest.param(14, marks=pytest.mark.slow)])
def test_over_days_of_pipelines_of_all_lengths_charges_are_by_weight_within_5_percent(days):
    """Three users of weights 1, 2 and 1, each with a fifth more work than its part, from minutes to hours long."""
    draw = random.Random(5)
    weights = {"ann": 1.0, "bob": 2.0, "eve": 1.0}
    arrivals = []
    for user, weight in weights.items():
        work_s, number = 0.0, 0
        while work_s < 1.2 * weight / 4.0 * 2 * days * 86_400.0:  # of two nodes of each pool
            seconds = min(draw.lognormvariate(5.0, 0.8), 2000.0)
            submit_s = max(0.0, work_s / (1.2 * weight / 4.0 * 2) - 4 * 3600.0)
            arrivals.append(arrival(f"{user}{number}", user, submit_s=submit_s, num_steps=4, seconds=seconds))
            work_s, number = work_s + 4 * 2 * seconds, number + 1
    charged: dict[str, float] = {}

    def observe(event, actions) -> None:
        if not charged and event.time_s >= days * 86_400.0:
            for row in simulation.scheduler.accounts():
                charged[row.account.user] = sum(row.charged_by_pool.values()) / weights[row.account.user]
                assert row.num_waiting > 0, "each still wants more"

    shares = settings(**weights)
    arrivals.sort(key=lambda one: one.submit_s)
    workload = Workload(name="days", cluster=CLUSTER, arrivals=tuple(arrivals), shares=shares)
    simulation = Simulation(workload, make_policy("solo"), observer=observe)
    simulation.run()
    mean = sum(charged.values()) / 3
    assert {user: one / mean for user, one in charged.items()} == pytest.approx(dict.fromkeys(weights, 1.0), rel=0.05)


def test_two_whose_needs_complement_each_other_each_get_more_than_half_of_what_they_need_most():
    """Six nodes of each pool; ann asks for two of the one and one of the other, bob the other way round."""
    nodes = {name: replace(pool, num_nodes=6) for name, pool in CLUSTER.pools.items()}
    asked = {"ann": {"num_rollout_nodes": 2}, "bob": {"num_train_nodes": 2}}
    arrivals = []
    for user, more in asked.items():  # all of ann's come first
        for number in range(40):
            one = arrival(f"{user}{number}", user, num_steps=3)
            arrivals.append(replace(one, pipeline=replace(one.pipeline, **more)))
    held: dict[str, dict[str, float]] = {}

    def observe(event, actions) -> None:
        if not held and event.time_s >= 2000.0:
            for row in simulation.scheduler.accounts():
                assert row.num_waiting > 0
                parts = {pool: seconds / 6 / event.time_s for pool, seconds in row.charged_by_pool.items()}
                held[row.account.user] = parts

    workload = Workload(
        name="pair", cluster=Cluster(pools=nodes), arrivals=tuple(arrivals), shares=settings(ann=1.0, bob=1.0)
    )
    simulation = Simulation(workload, make_policy("solo"), observer=observe)
    simulation.run()
    assert held["ann"]["rollout"] > 0.5
    assert held["bob"]["train"] > 0.5


def test_one_who_is_alone_gets_all_of_it():
    """Shares leave nothing idle: the same starts at the same times as without."""
    starts: list[list[tuple[float, str]]] = []
    for shares in (None, settings(ann=0.1, bob=5.0)):
        log: list[tuple[float, str]] = []
        simulate(
            [arrival(f"a{number}", "ann", submit_s=7.0 * number) for number in range(12)],
            shares,
            observer=lambda event, actions, log=log: log.extend(
                (event.time_s, one.pipeline) for one in actions if isinstance(one, Admit)
            ),
        )
        starts.append(log)
    assert starts[0] == starts[1]


def test_a_newcomer_is_made_room_for_and_the_parked_goes_on_to_its_end():
    parked: list[tuple[float, str]] = []

    def observe(event, actions) -> None:
        parked.extend((event.time_s, one.pipeline) for one in actions if isinstance(one, Park))

    long = [arrival(f"a{number}", "ann", num_steps=200) for number in range(2)]
    simulation = simulate([*long, arrival("b", "bob", submit_s=3_000.0)], ShareSettings(), observer=observe)
    assert [name for _, name in parked] == ["a1"]
    assert 3_000.0 <= parked[0][0] <= 3_060.0, "at its next step boundary"
    statuses = {simulation.scheduler.query.status(PipelineId(name)).value for name in ("a0", "a1", "b")}
    assert statuses == {"finished"}


def test_a_budget_is_kept_over_periods():
    """$40 a day of a pipeline that asks for $2 an hour and takes fifty hours: it ends on the third day."""
    pools = {name: replace(pool, usd_per_gpu_hour=1.0) for name, pool in CLUSTER.pools.items()}
    quota = AccountShare(account=Account("", "ann"), quota=Quota(budget_usd=40.0, budget_period_s=86_400.0))
    workload = Workload(
        name="budget",
        cluster=Cluster(pools=pools),
        arrivals=(arrival("a", "ann", num_steps=3000),),
        shares=ShareSettings(accounts=(quota,)),
    )
    simulation = Simulation(workload, make_policy("solo"), checks=True)
    simulation.run()
    assert simulation.scheduler.query.now_s == pytest.approx(2 * 86_400.0 + 10 * 3600.0, abs=121.0)
    (row,) = simulation.scheduler.accounts()
    assert (row.usd, row.spent_usd) == (pytest.approx(100.0), pytest.approx(20.0, abs=0.1))


def test_the_hours_of_a_day_are_kept_over_days():
    """Two device-hours a day of a pipeline that takes ten: it ends on the fifth day."""
    quota = AccountShare(account=Account("", "ann"), quota=Quota(device_hours_a_day=2.0))
    simulation = simulate([arrival("a", "ann", num_steps=300)], ShareSettings(accounts=(quota,)))
    assert simulation.scheduler.query.now_s // 86_400.0 == 4.0
    (row,) = simulation.scheduler.accounts()
    assert sum(row.charged_by_pool.values()) == pytest.approx(300 * 60.0 * 2)
