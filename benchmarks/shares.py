"""What shares cost a cluster, and what they change for its users.

    python benchmarks/shares.py price [--policies rlmux,rollmux] [--nodes 20,40] [--seeds 3]
    python benchmarks/shares.py weights [--policies solo,...] [--days 14] [--nodes 12] [--without-ageing]

`price`: the 200 pipelines of `weave`, asked for by eight users of whom the largest submits most (pipelines drawn by
1/rank), on so many rollout and training nodes, with shares and as one user would submit them.

    usd, hours          dollars of the nodes held, and makespan; goal: at most 3 % more with shares
    slos                part of all pipelines that keep their SLO, waiting included
    user_wait_h         mean wait of a user's pipelines: of all users the longest, and the mean of the users
    longest_h           the longest wait of any pipeline

`weights`: three users of weights 1, 2 and 1, who each want twice their part of so many nodes of each pool
all the time; pipelines are drawn from the profiles and lengths of `weave`.

    charged             device-seconds charged to each, over its weight, over the mean of these; goal: 0.95 to 1.05
    dominant            the same of the pool of which each has most, which is what shares make equal
    --without-ageing    waiting does not make a share smaller, and none goes first for having waited seven days
"""

from __future__ import annotations

import argparse
import math
import random
import time
from collections.abc import Sequence
from dataclasses import replace
from statistics import mean

from rlmux.core.actions import Action
from rlmux.core.events import Event
from rlmux.core.model import Account
from rlmux.core.offers import AccountShare, Share, ShareSettings
from rlmux.policies import make_policy
from rlmux.policies.planning import fairness
from rlmux.sim.results import SimResult
from rlmux.sim.simulator import Simulation, simulate
from rlmux.sim.workloads import catalog
from rlmux.sim.workloads.arrivals import Arrival, Workload, h20_h800_cluster

NUM_USERS = 8
WEIGHTS = {"ann": 1.0, "bob": 2.0, "eve": 1.0}


def of_users(workload: Workload, seed: int) -> Workload:
    """The workload, each pipeline asked for by one of eight users."""
    chance = random.Random(f"{seed}/users")
    ranks = range(1, NUM_USERS + 1)
    arrivals = [
        replace(one, pipeline=replace(one.pipeline, user=f"u{chance.choices(ranks, [1 / rank for rank in ranks])[0]}"))
        for one in workload.arrivals
    ]
    return replace(workload, arrivals=tuple(arrivals), shares=ShareSettings())


def price_row(policy: str, seed: int, num_rollout: int, num_train: int) -> list[tuple[str, SimResult, Workload]]:
    cluster = h20_h800_cluster(num_rollout_nodes=num_rollout, num_train_nodes=num_train)
    alike = replace(catalog.load("weave", seed=seed), cluster=cluster)
    by_user = of_users(alike, seed)
    return [
        ("without", simulate(alike, make_policy(policy, seed=seed)), by_user),
        ("with", simulate(by_user, make_policy(policy, seed=seed)), by_user),
    ]


def waits(result: SimResult, workload: Workload) -> tuple[float, float, float]:
    """Hours: (largest of the users' mean waits, mean of the users' mean waits, longest wait of a pipeline)."""
    user_of = {one.pipeline.id: one.pipeline.user for one in workload.arrivals}
    by_user: dict[str, list[float]] = {}
    for one in result.pipelines:
        by_user.setdefault(user_of[one.pipeline], []).append(one.queue_s / 3600.0)
    means = [mean(own) for own in by_user.values()]
    return max(means), mean(means), max(max(own) for own in by_user.values())


def price(policies: Sequence[str], seeds: int, num_rollout: int, num_train: int) -> None:
    for policy in policies:
        for seed in range(seeds):
            for shares, result, by_user in price_row(policy, seed, num_rollout, num_train):
                largest_h, mean_h, longest_h = waits(result, by_user)
                print(
                    f"{policy:10} seed {seed} {shares:7} usd {result.cost_usd:9.0f}  hours {result.hours:6.1f}  "
                    f"slos {result.slo_attainment:6.1%}  user_wait_h {largest_h:5.1f}, {mean_h:5.1f}  "
                    f"longest_h {longest_h:5.1f}  moves {result.num_moves}  ({result.wall_s:.0f} s)",
                    flush=True,
                )


def saturating(days: float, num_nodes: int, seed: int) -> list[Arrival]:
    """More than fits for so many days, of every user: profiles and lengths of weave, none longer than a day."""
    chance = random.Random(seed)
    drawn = [one for one in catalog.load("weave", seed=seed).arrivals if (one.pipeline.num_train_nodes or 1) == 1]
    total = sum(WEIGHTS.values())
    found: list[Arrival] = []
    for user, weight in WEIGHTS.items():
        capacity = num_nodes * weight / total  # pipelines at once
        asked_s, number = 0.0, 0
        while asked_s < 2.0 * capacity * days * 86_400.0:
            one = chance.choice(drawn)
            assert one.pipeline.num_steps is not None
            solo_s = one.world.solo_s(1)
            num_steps = max(1, min(one.pipeline.num_steps, int(86_400.0 / solo_s)))
            submit_s = max(0.0, asked_s / capacity / 2.0 - 12 * 3600.0)
            name = f"{user}{number}"
            pipeline = replace(one.pipeline, id=type(one.pipeline.id)(name), user=user, num_steps=num_steps)
            found.append(replace(one, submit_s=submit_s, pipeline=pipeline))
            asked_s, number = asked_s + num_steps * solo_s, number + 1
    return sorted(found, key=lambda one: one.submit_s)


def charged_parts(policy: str, days: float, num_nodes: int, seed: int = 0) -> list[dict[str, float]]:
    """What each user was charged after so many days over its weight, over the mean of these: together, and in its
    dominant pool."""
    shares = ShareSettings(
        accounts=tuple(
            AccountShare(account=Account("", user), share=Share(weight=weight)) for user, weight in WEIGHTS.items()
        )
    )
    cluster = h20_h800_cluster(num_rollout_nodes=num_nodes, num_train_nodes=num_nodes)
    arrivals = tuple(replace(one, depart_s=days * 86_400.0 + 1.0) for one in saturating(days, num_nodes, seed))
    charged: dict[str, float] = {}
    dominant: dict[str, float] = {}

    def observe(event: Event, actions: list[Action]) -> None:
        if not charged and event.time_s >= days * 86_400.0:
            for row in simulation.scheduler.accounts():
                assert row.num_waiting > 0, f"{row.account.user} has nothing left to start"
                by_pool, weight = row.charged_by_pool.values(), WEIGHTS[row.account.user]
                charged[row.account.user], dominant[row.account.user] = sum(by_pool) / weight, max(by_pool) / weight

    workload = Workload(name="saturated", cluster=cluster, arrivals=arrivals, shares=shares)
    simulation = Simulation(workload, make_policy(policy), observer=observe)
    simulation.run()
    return [{user: one / mean(each.values()) for user, one in each.items()} for each in (charged, dominant)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["price", "weights"])
    parser.add_argument("--policies")
    parser.add_argument("--nodes", default="")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--days", type=float, default=14.0)
    parser.add_argument("--without-ageing", action="store_true")
    asked = parser.parse_args()
    if asked.without_ageing:
        fairness.AGEING_S = fairness.AGED_S = math.inf
    if asked.what == "price":
        num_rollout, num_train = (int(each) for each in (asked.nodes or "40,40").split(","))
        price((asked.policies or "rlmux").split(","), asked.seeds, num_rollout, num_train)
        return
    for policy in (asked.policies or "solo,colocated,gavel,rollmux,rlmux").split(","):
        began = time.perf_counter()
        both = charged_parts(policy, asked.days, int(asked.nodes or 12))
        charged, dominant = ({user: round(part, 3) for user, part in each.items()} for each in both)
        print(f"{policy:10} charged {charged}  dominant {dominant}  ({time.perf_counter() - began:.0f} s)", flush=True)


if __name__ == "__main__":
    main()
