"""What is remembered of pipelines of a kind says what a search from scratch would say."""

from __future__ import annotations

import random

from rlmux.core.estimation.cycles import PhaseLoad, fits_period
from rlmux.policies.search.packing import PackingBook
from rlmux.policies.search.partition import NodePrices, PipelineDemand, pack_rollouts

PRICES = NodePrices(
    rollout_usd=1.0, train_usd=3.0, rollout_host_bytes=100.0, rollout_device_bytes=20.0, train_device_bytes=20.0
)


def demand(lot: random.Random) -> PipelineDemand:
    return PipelineDemand(
        rollout_s=lot.choice((10.0, 20.0, 35.0, 60.0)),
        train_s=5.0,
        budget_s=100.0,
        num_rollout_nodes=lot.choice((1, 1, 2)),
        num_train_nodes=1,
        rollout_bytes=lot.choice((10.0, 40.0)),
        train_bytes=0.0,
        colocated_s=50.0,
        is_counted=False,
        sync_s=lot.choice((0.0, 3.0)),
        rollout_switch_s=lot.choice((0.0, 4.0)),
        rollout_device_bytes=lot.choice((8.0, 15.0)),
    )


def test_pins_that_were_found_for_other_budgets_are_those_of_a_new_search():
    lot, book = random.Random(1), PackingBook()
    kinds = [[demand(lot) for _ in range(lot.randint(1, 4))] for _ in range(12)]
    found = set()
    for _ in range(3_000):
        demands, budget_s, at_least = lot.choice(kinds), lot.uniform(5.0, 150.0), lot.choice((1, 1, 2))
        pins = pack_rollouts(demands, budget_s, PRICES, at_least=at_least)
        assert book.pack(demands, budget_s, PRICES, at_least=at_least) == pins
        found.add(pins)
    assert len(found) > 10


def loads(lot: random.Random) -> list[PhaseLoad]:
    return [
        PhaseLoad(
            rollout_s=lot.uniform(5.0, 60.0),
            train_s=lot.uniform(5.0, 40.0),
            rollout_nodes=tuple(lot.sample(range(3), lot.choice((1, 2)))),
            steps_per_cycle=lot.choice((1, 1, 2, 3)),
            sync_s=lot.choice((0.0, 3.0)),
        )
        for _ in range(lot.randint(2, 3))
    ]


def test_a_period_is_long_enough_whichever_was_asked_about_before():
    lot, book = random.Random(2), PackingBook()
    groups = [loads(lot) for _ in range(20)]
    answers = set()
    for _ in range(2_000):
        group, period_s = lot.choice(groups), lot.uniform(20.0, 400.0)
        is_enough = fits_period(group, period_s)
        assert book.fits(group, period_s) == is_enough
        answers.add(is_enough)
    assert answers == {True, False}
