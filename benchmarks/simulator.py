"""How fast the simulator with its scheduler is, and what an arrival costs where many pipelines run.

    python benchmarks/simulator.py [--cases steps,day] [--policies rollmux,rlmux] [--pipelines N] [--profile FILE]

steps    16 synthetic pipelines on nodes that never run out, 4,000 steps each: hardly anything but steps
weave    the 200 production pipelines
day      10,000 synthetic pipelines that come within a day, on 100,000 GPUs: 12,500 counted nodes, half of each kind

*turns*: how often Python runs `d[i & 1023] = i` in the time of an event, timed beside each run: a machine's speed drops
out. *arrival*: `Scheduler.handle` of a submission, with the regrouping that it brings. *MB*: the process's peak, a
process for each row. `--profile`: cProfile's data of the last row, in this process.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import multiprocessing
import random
import resource
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from rlmux.core.model import PipelineId
from rlmux.policies import make_policy
from rlmux.sim.simulator import Simulation
from rlmux.sim.workloads import catalog
from rlmux.sim.workloads.arrivals import Workload, h20_h800_cluster

CASES = ("steps", "weave", "day")
DAY_S = 86_400.0
GPUS_OF_A_NODE = 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--policies", default="rollmux,rlmux")
    parser.add_argument("--pipelines", type=int, default=10_000, help="of the day; GPUs in proportion")
    parser.add_argument("--profile", type=Path)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    rows = []
    head = f"{'case':7}{'policy':9}{'pipelines':>9}{'events':>11}{'seconds':>9}{'events/s':>10}{'turns':>7}"
    if not args.json:
        print(f"{head}{'arrival p50/p99/max ms':>25}{'MB':>7}")
    for case in args.cases.split(","):
        for policy in args.policies.split(","):
            if args.profile is not None:
                profile = cProfile.Profile()
                row = profile.runcall(run, case, policy, args.pipelines)
                profile.dump_stats(args.profile)
            else:
                with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as process:
                    row = process.submit(run, case, policy, args.pipelines).result()
            rows.append(row)
            if not args.json:
                print(line_of(row), flush=True)
    if args.json:
        print(json.dumps(rows, indent=1))


def workload_of(case: str, num_pipelines: int) -> Workload:
    if case == "weave":
        return catalog.build("weave")
    if case == "steps":
        made = catalog.build("mixed", num_pipelines=16)
        return replace(
            made,
            arrivals=tuple(
                replace(each, submit_s=float(number), pipeline=replace(each.pipeline, num_steps=4_000))
                for number, each in enumerate(made.arrivals)
            ),
        )
    of_300 = [catalog.build("mixed", seed=seed).arrivals for seed in range(-(-num_pipelines // 300))]
    drawn = [each for arrivals in of_300 for each in arrivals][:num_pipelines]
    generator = random.Random(0)
    moments = sorted(generator.uniform(0.0, DAY_S) for _ in drawn)
    num_nodes = num_pipelines * 10 // GPUS_OF_A_NODE // 2
    return Workload(
        name="day",
        cluster=h20_h800_cluster(num_rollout_nodes=num_nodes, num_train_nodes=num_nodes),
        arrivals=tuple(
            replace(each, submit_s=moment, pipeline=replace(each.pipeline, id=PipelineId(f"p{number}")))
            for number, (moment, each) in enumerate(zip(moments, drawn, strict=True))
        ),
        seed=0,
        about=f"{num_pipelines} pipelines within a day",
    )


def run(case: str, policy: str, num_pipelines: int) -> dict[str, Any]:
    workload = workload_of(case, num_pipelines)
    simulation = Simulation(workload, make_policy(policy))
    turn_before_s = turn_s()
    began_s = time.process_time()
    result = simulation.run()
    seconds = time.process_time() - began_s
    turn = (turn_before_s + turn_s()) / 2
    arrivals_ms = sorted(simulation.collector.decision_ms)
    return {
        "case": case,
        "policy": policy,
        "pipelines": len(workload.arrivals),
        "events": result.events,
        "seconds": seconds,
        "turns": seconds / result.events / turn,
        "arrival_ms": [arrivals_ms[int(part * (len(arrivals_ms) - 1))] for part in (0.5, 0.99, 1.0)],
        "rss_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "cost_usd": result.cost_usd,
        "hours": result.hours,
        "slo_attainment": result.slo_attainment,
    }


def turn_s() -> float:
    """Seconds of one turn of the loop."""
    num, d = 2_000_000, dict.fromkeys(range(1024), 0)
    began_s = time.process_time()
    for i in range(num):
        d[i & 1023] = i
    return (time.process_time() - began_s) / num


def line_of(row: dict[str, Any]) -> str:
    arrival = " / ".join(f"{ms:.2f}" for ms in row["arrival_ms"])
    return (
        f"{row['case']:7}{row['policy']:9}{row['pipelines']:9,}{row['events']:11,}{row['seconds']:9.1f}"
        f"{row['events'] / row['seconds']:10,.0f}{row['turns']:7,.0f}{arrival:>25}{row['rss_mb']:7,.0f}"
    )


if __name__ == "__main__":
    main()
