"""Every wait in the queue has an end, whatever shares, urgencies and ranks say, and however much others submit.

A pipeline that has waited for `AGED_S` goes before all that were submitted later. What was submitted earlier and is not
over takes its turn before it, so it starts no later than

    submission + AGED_S + (pipelines submitted earlier and not over then, + 1) x the longest pipeline
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.examples import examples

from rlmux.core.actions import Admit, Release
from rlmux.core.model import QUEUED, Account, Cluster, Phase, PhaseSeconds, Pipeline, PipelineId, Pool, Urgency
from rlmux.core.queue_order import AccountShare, Share, ShareSettings
from rlmux.policies import make_policy, max_min_fairness
from rlmux.policies.max_min_fairness import AGED_S
from rlmux.sim.simulator import Simulation
from rlmux.sim.workloads.arrivals import Arrival, Workload
from rlmux.sim.world import TrueSeconds

HOUR_S = 3600.0
SHARES = ShareSettings(
    accounts=tuple(
        AccountShare(account=Account("", user), share=Share(weight=weight, guarantee=guarantee))
        for user, weight, guarantee in (("poor", 0.01, 0.0), ("fair", 1.0, 0.0), ("rich", 100.0, 0.9))
    )
)


def cluster(num_nodes: int) -> Cluster:
    phases = (Phase.ROLLOUT, Phase.TRAIN)
    return Cluster(pools={each.value: Pool(name=each.value, phase=each, num_nodes=num_nodes) for each in phases})


def arrival(name: str, submit_s: float, hours: float, **fields: Any) -> Arrival:
    """A pipeline of two steps that alone takes so many hours."""
    phases = PhaseSeconds(rollout_s=hours * HOUR_S / 4, train_s=hours * HOUR_S / 4)
    pipeline = Pipeline(id=PipelineId(name), num_steps=2, estimate=phases, slo_slowdown=1.0, **fields)
    return Arrival(submit_s=submit_s, pipeline=pipeline, world=TrueSeconds.of_phases(phases))


def times_of(arrivals: Sequence[Arrival], num_nodes: int, policy: str) -> tuple[dict[str, float], dict[str, float]]:
    """When each pipeline was admitted first, and when it was over."""
    begun: dict[str, float] = {}
    over: dict[str, float] = {}

    def observe(event, actions) -> None:
        for each in actions:
            if isinstance(each, Admit):
                begun.setdefault(each.pipeline, event.time_s)
            elif isinstance(each, Release):
                over[each.pipeline] = event.time_s

    ordered = tuple(sorted(arrivals, key=lambda one: one.submit_s))
    workload = Workload(name="waits", cluster=cluster(num_nodes), arrivals=ordered, shares=SHARES)
    Simulation(workload, make_policy(policy), observer=observe).run()
    assert len(begun) == len(over) == len(arrivals), "all are over"
    return begun, over


def lateness_s(arrivals: Sequence[Arrival], begun: dict[str, float], over: dict[str, float]) -> list[float]:
    """Seconds by which each pipeline that aged started later than the bound; below 0: earlier."""
    longest_s = max(one.world.solo_s(1) * 2 for one in arrivals)
    found = []
    for one in arrivals:
        name, aged_s = one.pipeline.id, one.submit_s + AGED_S
        if begun[name] > aged_s:
            before = sum(
                other.submit_s <= one.submit_s and over[other.pipeline.id] > aged_s
                for other in arrivals
                if other is not one
            )
            found.append(begun[name] - aged_s - (before + 1) * longest_s)
    return found


@st.composite
def crowds(draw) -> list[Arrival]:
    """A node or two that are asked for more than they have, for weeks."""
    num_nodes = draw(st.integers(1, 2))
    chance = random.Random(draw(st.integers(0, 10**6)))
    load = draw(st.floats(0.9, 1.6))
    arrivals, at_s = [], 0.0
    for number in range(draw(st.integers(20, 110))):
        hours = chance.uniform(1.0, 24.0)
        arrivals.append(
            arrival(
                f"p{number}",
                at_s,
                hours,
                user=chance.choices(["poor", "fair", "rich"], [1, 2, 6])[0],
                urgency=chance.choices(QUEUED, [4, 3, 2])[0],
                rank=chance.randint(-3, 3),
                num_rollout_nodes=chance.randint(1, num_nodes),
            )
        )
        at_s += hours * HOUR_S / num_nodes / load
    return arrivals


@pytest.mark.parametrize("policy", ["solo", "rollmux"])
@given(made=crowds())
@settings(max_examples=examples(25))
def test_no_pipeline_waits_longer_than_the_bound(policy, made):
    assert max(lateness_s(made, *times_of(made, 2, policy)), default=0.0) <= 0.0


def flood(num: int = 120) -> list[Arrival]:
    """One background pipeline, and more urgent ones than fit, for four weeks."""
    urgent = [
        arrival(f"rich{number}", 5.9 * HOUR_S * number, 6.0, user="rich", urgency=Urgency.URGENT)
        for number in range(num)
    ]
    return [*urgent, arrival("last", 1.0, 6.0, user="poor", urgency=Urgency.BACKGROUND)]


def test_one_behind_a_flood_of_urgent_ones_starts_when_it_has_aged_and_not_before():
    made = flood()
    begun, over = times_of(made, 1, "solo")
    assert AGED_S < begun["last"] < AGED_S + 7 * HOUR_S
    assert max(lateness_s(made, begun, over)) <= 0.0


def test_without_ageing_it_would_wait_for_the_end_of_the_flood(monkeypatch):
    """The bound is ageing's: the same flood without it breaks the bound that the tests above hold."""
    monkeypatch.setattr(max_min_fairness, "AGED_S", float("inf"))
    made = flood()
    begun, over = times_of(made, 1, "solo")
    assert begun["last"] == max(begun.values())
    assert max(lateness_s(made, begun, over)) > 7 * 24 * HOUR_S


@pytest.mark.slow
def test_among_ten_thousand_pipelines_none_waits_longer_than_the_bound():
    """Twenty nodes of each pool for months, a tenth more work than fits half of the time; every user and urgency.

    Each pipeline asks for a node of each pool, so no node is free while one waits, and the bound is sharper: what was
    submitted earlier and is not over then, spread over the nodes, and the longest.
    """
    num_nodes, chance = 20, random.Random(16)
    made, at_s = [], 0.0
    for number in range(10_000):
        hours = min(chance.lognormvariate(1.0, 0.8), 24.0)
        user = chance.choices(["poor", "fair", "rich"], [1, 2, 3])[0]
        urgency = chance.choices(QUEUED, [2, 6, 2])[0]
        made.append(arrival(f"p{number}", at_s, hours, user=user, urgency=urgency))
        load = 1.1 if int(at_s // (14 * 24 * HOUR_S)) % 2 == 0 else 0.8
        at_s += hours * HOUR_S / num_nodes / load
    begun, over = times_of(made, num_nodes, "solo")
    waits_s = [begun[one.pipeline.id] - one.submit_s for one in made]
    assert sum(wait_s > AGED_S for wait_s in waits_s) > 20, "there is something to bound"
    longest_s = 24 * HOUR_S
    ends = sorted((over[one.pipeline.id], one.submit_s, 2 * one.world.solo_s(1)) for one in made)
    for one in made:
        aged_s = one.submit_s + AGED_S
        if begun[one.pipeline.id] > aged_s:
            before_s = sum(work_s for end_s, submit_s, work_s in ends if end_s > aged_s and submit_s <= one.submit_s)
            assert begun[one.pipeline.id] <= aged_s + before_s / num_nodes + longest_s
