"""How long one placement takes, by the number of pipelines that are placed already.

    python benchmarks/placement.py [--sizes 5,9,...] [--policies rollmux,rlmux] [--arrivals 200] [--queue]

Pipelines are drawn from the 16 measured profiles with SLO U(1.1, 2) and placed one by one; then more arrive, each is
timed and leaves again. Next to the published figures (RollMux Table 5, milliseconds on the authors' machine).

`--queue` times the scheduler on a cluster without room: so many pipelines run, a wide one waits for nodes with a
reservation, more arrive (some overtake it, others wait), then one after another of those that run fails. What a
decision takes is shown without the policy's regrouping, which a column of its own has.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from dataclasses import replace

from rlmux.core.decision.plan import GroupPlan
from rlmux.core.decision.policy import Policy
from rlmux.core.estimation.colocation import SharingTable
from rlmux.core.events import Event, PipelineFailed, PipelineSubmitted
from rlmux.core.model import Pipeline, PipelineId, PipelineStatus
from rlmux.core.placement.choice import FruitlessSearch, PlacementChoice, Refusal, Relocation
from rlmux.core.placement.placement_ledger import PlacementLedger
from rlmux.core.placement.view import PlacementView
from rlmux.core.scheduler import Scheduler
from rlmux.policies import make_policy
from rlmux.sim.workloads import arrivals

PUBLISHED_MS = {5: 5.6, 9: 6.5, 13: 7.6, 100: 41.9, 500: 198.0, 1000: 318.0, 2000: 591.0}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", default="5,9,13,100,500,1000,2000")
    parser.add_argument("--policies", default="rollmux,rlmux")
    parser.add_argument("--arrivals", type=int, default=200)
    parser.add_argument("--queue", action="store_true", help="a cluster without room, and a queue")
    options = parser.parse_args()
    sizes = [int(size) for size in options.sizes.split(",")]
    if options.queue:
        print(
            f"{'policy':<10}{'running':>8}{'waiting':>8}{'overtakes':>10}{'p50/max ms':>14}{'waits':>7}"
            f"{'p50/max ms':>14}{'releases':>9}{'p50/max ms':>14}{'each ms':>9}{'regroup p50/max ms':>20}"
        )
        for policy in options.policies.split(","):
            for size in sizes:
                print(queue_row(policy, size, options.arrivals), flush=True)
        return
    print(
        f"{'policy':<10}{'placed':>8}{'groups':>8}{'median ms':>11}{'p99 ms':>9}{'paper ms':>10}"
        f"{'rebalance p50/max ms':>23}"
    )
    for policy in options.policies.split(","):
        for size in sizes:
            print(row(policy, size, options.arrivals), flush=True)


def row(policy_name: str, size: int, num_arrivals: int) -> str:
    policy = make_policy(policy_name)
    cluster = arrivals.h20_h800_cluster()
    ledger = PlacementLedger(cluster)
    view = PlacementView(ledger)
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
        found = policy.rebalance(view)
        rebalance_ms.append((time.perf_counter() - began) * 1e3)
        relocations = [each for each in found if isinstance(each, Relocation)]
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


def queue_row(policy_name: str, size: int, num_arrivals: int) -> str:
    """Decisions of a scheduler with a queue: arrivals that overtake, arrivals that wait, and releases."""
    policy = TimedRegrouping(make_policy(policy_name))
    scheduler, generator = full_scheduler(policy, size)
    query = scheduler.query
    wide = replace(drawn("wide", generator), num_rollout_nodes=40, num_train_nodes=20, num_steps=100)
    scheduler.handle(PipelineSubmitted(time_s=1.0, pipeline=wide))
    assert query.status(wide.id) is PipelineStatus.WAITING, "the wide pipeline found room"
    overtook_ms: list[float] = []
    waits_ms: list[float] = []
    release_ms: list[float] = []
    each_ms: list[float] = []
    for number in range(num_arrivals):
        pipeline = replace(drawn(f"x{number}", generator), num_steps=generator.choice((1, 1000)))
        taken_ms = policy.timed(scheduler, PipelineSubmitted(time_s=2.0, pipeline=pipeline))
        waits = query.status(pipeline.id) is PipelineStatus.WAITING
        (waits_ms if waits else overtook_ms).append(taken_ms)
    for number in range(num_arrivals):
        num_waiting = num_that_wait(scheduler)
        name = PipelineId(f"p{generator.randrange(size)}")
        if query.status(name) is PipelineStatus.RUNNING:
            failed = PipelineFailed(time_s=3.0 + number, pipeline=name, reason="by hand")
            release_ms.append(policy.timed(scheduler, failed))
            each_ms.append(release_ms[-1] / max(num_waiting, 1))
    return (
        f"{policy_name:<10}{size:>8}{num_that_wait(scheduler):>8}{len(overtook_ms):>10}{spread(overtook_ms):>14}"
        f"{len(waits_ms):>7}{spread(waits_ms):>14}{len(release_ms):>9}{spread(release_ms):>14}"
        f"{statistics.median(each_ms):>9.3f}{spread(policy.regroup_ms):>20}"
    )


def num_that_wait(scheduler: Scheduler) -> int:
    query = scheduler.query
    return sum(query.status(name) is PipelineStatus.WAITING for name in query.pipelines())


def full_scheduler(policy: Policy, size: int) -> tuple[Scheduler, random.Random]:
    """A scheduler with so many pipelines on as many nodes as they take, a few more free, and what draws the next."""
    open_ended = PlacementLedger(arrivals.h20_h800_cluster(num_rollout_nodes=10 * size, num_train_nodes=10 * size))
    pipelines = [replace(drawn(f"p{number}", random.Random(number)), num_steps=50 + number) for number in range(size)]
    for pipeline in pipelines:
        choice = policy.place(pipeline, PlacementView(open_ended))
        assert not isinstance(choice, Refusal)
        open_ended.admit(pipeline, choice)
    nodes = [open_ended.num_nodes_in_use(pool) for pool in ("h20", "h800")]
    cluster = arrivals.h20_h800_cluster(num_rollout_nodes=nodes[0] + 12, num_train_nodes=nodes[1] + 6)
    scheduler = Scheduler(cluster, policy)
    for pipeline in pipelines:
        scheduler.handle(PipelineSubmitted(time_s=0.0, pipeline=pipeline))
    return scheduler, random.Random(0)


class TimedRegrouping(Policy):
    """A policy whose regrouping is timed apart from the rest of a decision."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self.regroup_ms: list[float] = []

    @property
    def name(self) -> str:
        return self._policy.name

    @property
    def sharing(self) -> SharingTable | None:
        return self._policy.sharing

    def place(self, pipeline: Pipeline, view: PlacementView) -> PlacementChoice | Refusal:
        return self._policy.place(pipeline, view)

    def dispatch(self, plan: GroupPlan) -> GroupPlan:
        return self._policy.dispatch(plan)

    def rebalance(self, view: PlacementView) -> tuple[Relocation | FruitlessSearch, ...]:
        began = time.thread_time()
        found = self._policy.rebalance(view)
        self.regroup_ms.append((time.thread_time() - began) * 1e3)
        return found

    def timed(self, scheduler: Scheduler, event: Event) -> float:
        """CPU milliseconds of the decision without its regrouping."""
        num_before, began = len(self.regroup_ms), time.thread_time()
        scheduler.handle(event)
        return (time.thread_time() - began) * 1e3 - sum(self.regroup_ms[num_before:])


def spread(milliseconds: list[float]) -> str:
    return f"{statistics.median(milliseconds):.2f} / {max(milliseconds):.1f}" if milliseconds else "-"


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
