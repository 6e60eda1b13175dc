"""One day of very many pipelines: seconds, memory, decision times, by policy.

    python benchmarks/scale.py [--pipelines 10000] [--gpus 100000] [--hours 24] [--policies rollmux,rlmux] [--seed 0]

Pipelines are drawn from the 16 measured profiles, SLO U(1.1, 2), switches and sync on, on the production trace's two
kinds of nodes, as many of each as the GPUs make. They arrive evenly over the first half of the day; each has the steps
that it would make alone in 1 hour to half a day. Whatever still runs at the end of the day is cancelled there.
Every policy is run in a process of its own, so that the memory is its own.

    handle_ms     of one arrival, median and 99th percentile: it is placed and what follows is regrouped
"""

from __future__ import annotations

import argparse
import multiprocessing
import random
import resource
import time
from typing import Any

from rlmux.policies import make_policy
from rlmux.sim.simulator import simulate
from rlmux.sim.workloads import arrivals
from rlmux.sim.workloads.arrivals import Arrival, Workload, h20_h800_cluster, profiled_arrival

GPUS_PER_NODE = 8


def day(num_pipelines: int, num_gpus: int, hours: float, seed: int) -> Workload:
    generator = random.Random(seed)
    profiles = tuple(arrivals.profiles().values())
    day_s = hours * 3600.0
    made: list[Arrival] = []
    for number, submit_s in enumerate(sorted(generator.uniform(0.0, day_s / 2) for _ in range(num_pipelines))):
        profile = generator.choice(profiles)
        alone_s = generator.uniform(day_s / 24, day_s / 2)
        made.append(
            profiled_arrival(
                f"p{number}",
                profile,
                submit_s=submit_s,
                depart_s=day_s,
                num_steps=max(1, round(alone_s / profile.disaggregated.solo_s)),
                slo_slowdown=generator.uniform(1.1, 2.0),
                num_train_nodes=profile.num_nodes,
                costs=True,
            )
        )
    num_nodes = num_gpus // GPUS_PER_NODE // 2
    cluster = h20_h800_cluster(num_rollout_nodes=num_nodes, num_train_nodes=num_nodes)
    about = f"{num_pipelines} pipelines on {num_gpus} GPUs in {hours:g} hours"
    return Workload(name="day", cluster=cluster, arrivals=tuple(made), seed=seed, about=about)


def measure(policy: str, options: argparse.Namespace) -> dict[str, Any]:
    workload = day(options.pipelines, options.gpus, options.hours, options.seed)
    began, cpu_began = time.perf_counter(), time.process_time()
    result = simulate(workload, make_policy(policy))
    cpu_s = time.process_time() - cpu_began
    decisions = sorted(result.decision_ms)
    return {
        "policy": policy,
        "events": result.events,
        "wall_s": time.perf_counter() - began,
        "cpu_s": cpu_s,
        "events_per_cpu_s": result.events / cpu_s,
        "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "peak_gpus": sum(result.peak_gpus.values()),
        "handle_ms_p50": decisions[len(decisions) // 2],
        "handle_ms_p99": decisions[int(0.99 * len(decisions))],
        "moves": result.num_moves,
        "slo_attainment": result.slo_attainment,
        "cost_usd_per_solo_hour": result.cost_usd_per_solo_hour,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pipelines", type=int, default=10_000)
    parser.add_argument("--gpus", type=int, default=100_000)
    parser.add_argument("--hours", type=float, default=24.0)
    parser.add_argument("--policies", default="rollmux,rlmux")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    for policy in options.policies.split(","):
        with context.Pool(1) as pool:
            figures = pool.apply(measure, (policy, options))
        print("  ".join(f"{name} {value:,.4g}" if name != "policy" else f"{value}:" for name, value in figures.items()))


if __name__ == "__main__":
    main()
