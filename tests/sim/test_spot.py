"""Spot nodes in the simulator: dollars by the price over time, and pipelines that leave before their node goes."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from rlmux.core.errors import UserError
from rlmux.core.events import Event, PoolPriced
from rlmux.core.model import Cluster, NodeId, Phase, PhaseSeconds, Pipeline, PipelineId, Pool
from rlmux.policies import make_policy
from rlmux.sim.api import notes_of
from rlmux.sim.node_changes import NodeFailure
from rlmux.sim.results.result import SimResult
from rlmux.sim.simulator import simulate
from rlmux.sim.spot_trace import PriceChange, Reclaim, SpotTrace
from rlmux.sim.workloads.arrivals import Arrival, Workload
from rlmux.sim.world import TrueSeconds


def workload(*names: str, num_steps: int = 10, slo: float = math.inf, spot: SpotTrace | None = None) -> Workload:
    """Steps of 60 s of rollout and 40 s of training; rollout nodes at $8 an hour, training nodes at $16."""
    seconds = PhaseSeconds(rollout_s=60.0, train_s=40.0)
    pools = {
        "rollout": Pool(name="rollout", phase=Phase.ROLLOUT, num_nodes=2, gpus_per_node=8, usd_per_gpu_hour=1.0),
        "train": Pool(name="train", phase=Phase.TRAIN, num_nodes=2, gpus_per_node=8, usd_per_gpu_hour=2.0),
    }
    arrivals = tuple(
        Arrival(
            submit_s=0.0,
            pipeline=Pipeline(id=PipelineId(name), num_steps=num_steps, estimate=seconds, slo_slowdown=slo),
            world=TrueSeconds.of_phases(seconds),
        )
        for name in names
    )
    return Workload(name="spot", cluster=Cluster(pools=pools), arrivals=arrivals, spot=spot)


def run(made: Workload, policy: str = "solo") -> SimResult:
    return simulate(made, make_policy(policy), checks=True)


def price(at_s: float, usd: float, pool: str = "rollout") -> PriceChange:
    return PriceChange(at_s=at_s, pool=pool, usd_per_gpu_hour=usd)


def reclaim(at_s: float, notice_s: float, *, index: int = 0, pool: str = "rollout", **fields) -> Reclaim:
    return Reclaim(at_s=at_s, node=NodeId(pool, index), notice_s=notice_s, **fields)


def test_dollars_are_by_the_price_over_time():
    trace = SpotTrace(prices=(price(0.0, 0.5), price(250.0, 2.0), price(750.0, 0.0)))
    result = run(workload("a", spot=trace))
    assert result.hours * 3600 == pytest.approx(1000.0)
    spot_usd = 8 * (0.5 * 250 + 2.0 * 500 + 0.0 * 250) / 3600
    assert result.spot.usd == pytest.approx(spot_usd)
    assert result.spot.list_usd == pytest.approx(8 * 1000 / 3600)
    assert result.cost_usd == pytest.approx(spot_usd + 16 * 1000 / 3600)
    assert sum(result.parts_usd.values()) == pytest.approx(result.cost_usd), "all that is paid is put down to something"


def test_a_constant_price_over_time_costs_what_the_cluster_says():
    constant = SpotTrace(prices=(price(0.0, 1.0),))
    plain, priced = (run(made).figures() for made in (workload("a", "b"), workload("a", "b", spot=constant)))
    assert priced["parts_usd"] == pytest.approx(plain["parts_usd"])
    for key in ("cost_usd", "bound_usd", "makespan_s", "utilization", "num_moves"):
        assert priced[key] == pytest.approx(plain[key]), key


def test_a_price_reaches_the_policy_once_it_differs_noticeably_from_the_last_one_sent():
    events: list[Event] = []
    steps = (price(0.0, 1.04), price(10.0, 0.95), price(20.0, 0.99), price(30.0, 0.0), price(40.0, 0.01))
    made = workload("a", spot=SpotTrace(prices=steps))
    simulate(made, make_policy("solo"), observer=lambda event, _: events.append(event))
    sent = [(one.time_s, one.usd_per_gpu_hour) for one in events if isinstance(one, PoolPriced)]
    assert sent == [(10.0, 0.95), (30.0, 0.0), (40.0, 0.01)]


def test_a_pool_that_becomes_dear_is_left_for_fewer_nodes():
    free = SpotTrace(prices=(price(0.0, 0.0), price(0.0, 0.0, "train")))
    dear = replace(free, prices=(*free.prices, price(250.0, 5.0), price(250.0, 5.0, "train")))
    spread, packed = (run(workload("a", "b", num_steps=30, slo=3.0, spot=trace), "rlmux") for trace in (free, dear))
    assert (spread.num_moves, packed.num_moves) == (0, 1)


def test_a_pool_whose_price_is_in_the_trace_is_not_said_to_cost_nothing():
    made = workload("a")
    free = {**made.cluster.pools, "rollout": replace(made.cluster.pools["rollout"], usd_per_gpu_hour=0.0)}
    made = replace(made, cluster=Cluster(pools=free))
    (note,) = notes_of(made, ["solo"])
    assert note.startswith("nodes of pool rollout cost nothing")
    assert notes_of(replace(made, spot=SpotTrace(prices=(price(0.0, 1.0),))), ["solo"]) == []


def test_with_notice_enough_a_pipeline_moves_and_loses_nothing():
    result = run(workload("a", spot=SpotTrace(reclaims=(reclaim(250.0, 120.0),))))
    assert (result.spot.num_notices, result.spot.num_moved, result.spot.num_caught) == (1, 1, 0)
    assert result.spot.lost_s == 0.0
    assert result.hours * 3600 == pytest.approx(1000.0)
    assert result.pipelines[0].steps == 10


def test_with_too_little_notice_the_open_step_is_lost_and_said_to_be():
    result = run(workload("a", spot=SpotTrace(reclaims=(reclaim(250.0, 20.0),))))
    assert (result.spot.num_moved, result.spot.num_caught) == (0, 1)
    assert result.spot.lost_s == pytest.approx(70.0), "the third step had begun at 200 s, and the node went at 270 s"
    assert result.hours * 3600 == pytest.approx(1070.0)
    assert result.pipelines[0].steps == 10


def test_without_another_node_it_waits_until_one_is_back():
    both = (reclaim(250.0, 120.0), reclaim(250.0, 120.0, index=1, down_s=1000.0))
    result = run(workload("a", spot=SpotTrace(reclaims=both)))
    assert result.spot.num_notices == 2
    assert result.hours * 3600 == pytest.approx(300.0 + (1370.0 - 300.0) + 700.0)


@pytest.mark.parametrize("policy", ["solo", "rollmux", "rlmux", "colocated", "fifo"])
def test_a_day_of_reclaims_loses_no_step_for_good(policy):
    times = range(200, 6000, 450)
    reclaims = tuple(
        reclaim(float(at_s), 90.0, index=number % 2, pool=("rollout", "train")[number % 3 == 0], down_s=200.0)
        for number, at_s in enumerate(times)
    )
    result = run(workload("a", "b", "c", num_steps=12, spot=SpotTrace(reclaims=reclaims)), policy)
    assert [one.steps for one in result.pipelines] == [12, 12, 12]
    assert result.spot.num_notices >= 4


def test_a_node_that_fails_before_its_time_is_lost_once():
    made = workload("a", spot=SpotTrace(reclaims=(reclaim(250.0, 500.0),)))
    failure = NodeFailure(node=NodeId("rollout", 0), at_s=260.0, down_s=5000.0)
    result = simulate(made, make_policy("solo"), failures=[failure], checks=True)
    assert (result.spot.num_caught, result.pipelines[0].steps) == (1, 10)


def test_overlapping_failures_lose_a_node_once():
    first = NodeFailure(node=NodeId("rollout", 0), at_s=250.0, down_s=100.0)
    failures = [first, replace(first, at_s=300.0), replace(first, at_s=320.0, down_s=500.0)]
    result = simulate(workload("a"), make_policy("solo"), failures=failures, checks=True)
    assert (result.spot.num_caught, result.pipelines[0].steps) == (0, 10), "spot figures are of a trace"


@pytest.mark.parametrize(
    ("node", "accepted"),
    [(NodeId("rollout", 7), "rollout-0 to rollout-"), (NodeId("gpu", 0), "rollout-0 to rollout-")],
)
def test_a_node_that_is_not_there_is_one_line_before_anything_is_simulated(node, accepted):
    failure = NodeFailure(node=node, at_s=250.0, down_s=10.0)
    with pytest.raises(UserError, match=f"a failure at 250 s names node {node}, .*accepted: {accepted}"):
        simulate(workload("a"), make_policy("solo"), failures=[failure])
    taken = Reclaim(at_s=5.0, node=node, notice_s=1.0)
    with pytest.raises(UserError, match=f"a reclaim at 5 s names node {node}, .*accepted: {accepted}"):
        simulate(workload("a", spot=SpotTrace(reclaims=(taken,))), make_policy("solo"))


def test_a_price_of_no_pool_is_one_line():
    price = PriceChange(at_s=0.0, pool="gpu", usd_per_gpu_hour=1.0)
    with pytest.raises(UserError, match=r"a price at 0 s names pool 'gpu', .*accepted: rollout, train"):
        simulate(workload("a", spot=SpotTrace(prices=(price,))), make_policy("solo"))
