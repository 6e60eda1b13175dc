"""What a regrouping keeps between decisions says what it would say if it were made anew."""

from __future__ import annotations

import random
from dataclasses import replace

from rlmux.core.model import Cluster, Phase, PhaseSeconds, Pipeline, PipelineId, Pool, WorkLeft
from rlmux.core.placement.placement_ledger import PlacementLedger
from rlmux.core.placement.view import PlacementView
from rlmux.policies.rollmux import RollMux
from rlmux.policies.search.economy import Economy
from rlmux.policies.search.ranking import BudgetWatch, GroupRanking

CLUSTER = Cluster(
    pools={
        "r": Pool(name="r", phase=Phase.ROLLOUT, usd_per_gpu_hour=1.0),
        "t": Pool(name="t", phase=Phase.TRAIN, usd_per_gpu_hour=3.0),
    }
)


class World:
    """A ledger with pipelines that come, go and make steps."""

    def __init__(self, seed):
        self.generator = random.Random(seed)
        self.now_s = 0.0
        self.lefts: dict[PipelineId, WorkLeft] = {}
        self.ledger = PlacementLedger(CLUSTER, self.left_of)
        self.view = PlacementView(self.ledger)

    def left_of(self, name):
        return replace(self.lefts[name], now_s=self.now_s)

    def add(self, number):
        draw = self.generator.uniform
        one = Pipeline(
            id=PipelineId(f"p{number}"),
            num_steps=50,
            estimate=PhaseSeconds(rollout_s=draw(20.0, 90.0), train_s=draw(10.0, 60.0)),
            slo_slowdown=draw(1.1, 2.0),
        )
        self.lefts[one.id] = WorkLeft(now_s=self.now_s, submitted_s=self.now_s, num_left=50, done_solo_s=0.0)
        self.ledger.admit(one, RollMux().place(one, self.view))

    def change(self, number):
        """Time passes, steps are made or not, and a pipeline comes or goes; sometimes one begins again."""
        self.now_s += self.generator.uniform(0.0, 400.0)
        for name, left in self.lefts.items():
            num_left = max(1, left.num_left - self.generator.randrange(4))
            done_s = (50 - num_left) * 100.0
            self.lefts[name] = replace(left, now_s=self.now_s, num_left=num_left, done_solo_s=done_s)
        if self.lefts and self.generator.random() < 0.4:
            name = self.generator.choice(list(self.lefts))
            if self.generator.random() < 0.5:
                self.ledger.depart(name)
                del self.lefts[name]
            else:
                self.lefts[name] = WorkLeft(now_s=0.0, submitted_s=0.0, num_left=50, done_solo_s=0.0)
                self.ledger.renew(name)
        else:
            self.add(number)


def test_groups_ranked_between_changes_are_in_the_order_of_a_sort():
    for seed in range(5):
        world, ranking = World(seed), GroupRanking()

        def key(group):
            return None if group.num_members == 2 else -group.usd_per_hour

        for number in range(60):
            world.change(number)
            groups = tuple(world.view.groups())
            anew = sorted((group for group in groups if key(group) is not None), key=lambda one: (key(one), one.id))
            assert list(ranking.ranked(groups, key)) == anew


def test_a_ranking_with_other_terms_is_made_anew():
    world, ranking = World(0), GroupRanking()
    for number in range(20):
        world.add(number)
    groups = tuple(world.view.groups())
    cheap_first = list(ranking.ranked(groups, lambda group: group.usd_per_hour, "up"))
    assert list(ranking.ranked(groups, lambda group: -group.id, "down")) == list(reversed(groups))
    assert list(ranking.ranked(groups, lambda group: group.usd_per_hour, "up")) == cheap_first


def test_groups_beyond_a_budget_are_found_though_few_are_asked():
    num_late = num_requested = num_groups = 0
    for seed in range(5):
        world, watch = World(seed), BudgetWatch()
        for number in range(60):
            world.change(number)
            groups = tuple(world.view.groups())
            economy = Economy(view=world.view, slowness_price=1.2, hold_up_usd=4.0, move_horizon_h=3.0)
            late = watch.late_groups(groups, economy)
            num_requested += len(economy._group_budgets)
            assert late == [group for group in groups if not economy.keeps_budgets(group)]
            num_late, num_groups = num_late + len(late), num_groups + len(groups)
    assert num_late > 50
    assert num_requested < 0.8 * num_groups
