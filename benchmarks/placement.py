"""How long one placement takes, by the number of pipelines that are placed already.

    python benchmarks/placement.py [--sizes 5,9,...] [--policies rollmux,rlmux] [--arrivals 200]

Pipelines are drawn from the 16 measured profiles with SLO U(1.1, 2) and placed one by one; then more arrive, each is
timed and leaves again. Next to the published figures (RollMux Table 5, milliseconds on the authors' machine).
"""

from __future__ import annotations

import argparse
import random
import statistics
import time

from rlmux.core.model import Pipeline, PipelineId
from rlmux.core.placement import PlacementLedger
from rlmux.core.placement_choice import Refusal
from rlmux.policies import make_policy
from rlmux.sim.workloads import arrivals

PUBLISHED_MS = {5: 5.6, 9: 6.5, 13: 7.6, 100: 41.9, 500: 198.0, 1000: 318.0, 2000: 591.0}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", default="5,9,13,100,500,1000,2000")
    parser.add_argument("--policies", default="rollmux,rlmux")
    parser.add_argument("--arrivals", type=int, default=200)
    options = parser.parse_args()
    print(
        f"{'policy':<10}{'placed':>8}{'groups':>8}{'median ms':>11}{'p99 ms':>9}{'paper ms':>10}"
        f"{'rebalance p50/max ms':>23}"
    )
    for policy in options.policies.split(","):
        for size in map(int, options.sizes.split(",")):
            print(row(policy, size, options.arrivals), flush=True)


def row(policy_name: str, size: int, num_arrivals: int) -> str:
    policy = make_policy(policy_name)
    cluster = arrivals.h20_h800_cluster()
    ledger = PlacementLedger(cluster)
    view = ledger.view()
    generator = random.Random(0)
    for number in range(size):
        pipeline = drawn(f"p{number}", generator)
        choice = policy.place(pipeline, view)
        assert not isinstance(choice, Refusal)
        ledger.admit(pipeline, choice)
    place_ms, rebalance_ms = [], []
    for number in range(num_arrivals):
        pipeline = drawn(f"x{number}", generator)
        began = time.perf_counter()
        choice = policy.place(pipeline, view)
        place_ms.append((time.perf_counter() - began) * 1e3)
        assert not isinstance(choice, Refusal)
        ledger.admit(pipeline, choice)
        began = time.perf_counter()
        relocations = policy.rebalance(view)
        rebalance_ms.append((time.perf_counter() - began) * 1e3)
        for relocation in relocations:
            ledger.relocate(relocation.pipeline, relocation.choice)
        for relocation in relocations:
            ledger.finish_relocation(relocation.pipeline)
        ledger.depart(pipeline.id)
    published = f"{PUBLISHED_MS[size]:.1f}" if size in PUBLISHED_MS else "-"
    p99 = sorted(place_ms)[int(0.99 * len(place_ms))]
    moves = f"{statistics.median(rebalance_ms):.2f} / {max(rebalance_ms):.1f}"
    return (
        f"{policy_name:<10}{size:>8}{ledger.num_groups:>8}{statistics.median(place_ms):>11.3f}{p99:>9.3f}"
        f"{published:>10}{moves:>23}"
    )


def drawn(name: str, generator: random.Random) -> Pipeline:
    profile = generator.choice(PROFILES)
    return Pipeline(
        id=PipelineId(name),
        num_steps=None,
        num_rollout_nodes=profile.num_nodes,
        num_train_nodes=profile.num_nodes,
        estimate=profile.disaggregated,
        colocated_estimate=profile.colocated,
        slo_slowdown=generator.uniform(1.1, 2.0),
    )


PROFILES = tuple(arrivals.profiles().values())

if __name__ == "__main__":
    main()
