"""Prices that change under way: the policy sees them, and regroups at them."""

from __future__ import annotations

import pytest

from rlmux.core.actions import Relocate
from rlmux.core.errors import IllegalTransitionError
from rlmux.core.events import PoolPriced
from rlmux.core.model import Phase
from rlmux.core.scheduler import Scheduler
from rlmux.log import value_codec
from rlmux.policies import make_policy


def driver_of(builders, *, rollout: int = 2, train: int = 2):
    return builders.Driver(Scheduler(builders.cluster(rollout=rollout, train=train), make_policy("rlmux")))


def price(driver, usd: float, pool: str = "train") -> None:
    driver.send(PoolPriced(time_s=driver.now_s, pool=pool, usd_per_gpu_hour=usd))


def spread_then_priced(builders, usd: float):
    """Two pipelines that spread over nodes that cost nothing, until training nodes have a price."""
    driver = driver_of(builders)
    driver.submit(*(builders.pipeline(name, num_steps=6, slo_slowdown=3.0) for name in "ab"))
    driver.step()
    assert driver.scheduler.query.placement.num_nodes_in_use("train") == 2
    price(driver, usd)
    return driver


def test_the_policy_prices_placements_at_the_new_price(builders):
    driver = driver_of(builders)
    driver.submit(builders.pipeline("a", slo_slowdown=1.5))
    price(driver, 3.0)
    view = driver.scheduler.query.placement
    (group,) = view.groups()
    assert (view.usd_per_node_hour(Phase.TRAIN), view.usd_per_node_hour(Phase.ROLLOUT)) == (3.0, 0.0)
    assert view.usd_per_hour == group.usd_per_hour == 3.0
    assert group.least_usd_per_hour == pytest.approx(3.0 * 1.0 / (1.5 * 3.0)), "1 s of training in 4.5 s, on one node"


def test_a_pool_that_becomes_dear_is_packed_tighter(builders):
    driver = spread_then_priced(builders, 9.0)
    (group,) = driver.scheduler.query.placement.groups()
    assert (group.num_members, len(group.train_nodes), group.usd_per_hour) == (2, 1, 9.0)
    driver.run()
    assert len(driver.actions(Relocate)) == 1


def test_a_price_for_which_no_move_pays_moves_nothing(builders):
    driver = spread_then_priced(builders, 0.5)
    driver.run()
    assert driver.actions(Relocate) == []


def test_replaying_the_logged_events_prices_again_and_gives_the_same_actions(builders):
    driver = spread_then_priced(builders, 9.0)
    driver.run()
    again = driver_of(builders).scheduler
    logged = [value_codec.decode(value_codec.encode(event)) for event in driver.events]
    assert repr([action for event in logged for action in again.handle(event)]) == repr(driver.actions())
    assert again.query.placement.usd_per_node_hour(Phase.TRAIN) == 9.0


def test_a_price_of_no_pool_is_refused(builders):
    with pytest.raises(IllegalTransitionError, match="pool gpu is priced; pools: rollout, train"):
        price(driver_of(builders), 1.0, pool="gpu")


@pytest.mark.parametrize("usd", [-1.0, float("nan"), float("inf")])
def test_a_price_is_finite_and_not_negative(usd):
    with pytest.raises(ValueError, match="it must be 0 or more, and finite"):
        PoolPriced(pool="train", usd_per_gpu_hour=usd)
