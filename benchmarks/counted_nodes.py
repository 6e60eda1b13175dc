"""Clusters as teams have them: so many nodes with a price, paid whether held or not.

    python benchmarks/counted_nodes.py [--seed 7] [--quick]

Synthetic mixes whose pipelines come ten times as close together, of at most 200 steps, one or three for each node pair,
with their SLOs and without. A cell: dollars of all nodes until the last step, hours, SLOs kept, mean step slowdown.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import replace

from rlmux.sim.results.sweep import SimRun, sweep
from rlmux.sim.workloads import catalog
from rlmux.sim.workloads.arrivals import Arrival, Workload, h20_h800_cluster

POLICIES = ("solo", "colocated", "rollmux", "rlmux")
NODES = (2, 4, 8)
MIXES = ("mixed", "rh")
MOST_STEPS = 200
CLOSER = 0.1
"""Factor on the times of submission."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--quick", action="store_true", help="the smallest clusters and one mix")
    args = parser.parse_args()
    cases = [(nodes, mix, each, slo) for nodes in NODES for mix in MIXES for each in (1, 3) for slo in (True, False)]
    if args.quick:
        cases = [case for case in cases if case[:2] == (NODES[0], MIXES[0])]
    workloads = [workload_of(*case, seed=args.seed) for case in cases]
    results = sweep([SimRun(workload=made, policy=name) for made in workloads for name in POLICIES])
    print(f"{'nodes':6}{'mix':7}{'pipelines':>9}  {'SLOs':5}" + "".join(f"{name:>30}" for name in POLICIES))
    for number, (nodes, mix, each, has_slo) in enumerate(cases):
        cells = [
            f"${one.paid_usd:,.0f} {one.hours:.1f} h {one.slo_attainment:.0%} {one.mean_step_slowdown:.2f}"
            for one in results[number * len(POLICIES) : (number + 1) * len(POLICIES)]
        ]
        row = f"{nodes}+{nodes:<4}{mix:7}{each * nodes:9}  {'yes' if has_slo else '-':5}"
        print(row + "".join(f"{cell:>30}" for cell in cells))


def workload_of(nodes: int, mix: str, pipelines_per_pair: int, has_slo: bool, *, seed: int) -> Workload:
    made = catalog.build(mix, seed=seed, num_pipelines=pipelines_per_pair * nodes)
    cluster = h20_h800_cluster(num_rollout_nodes=nodes, num_train_nodes=nodes)
    return replace(made, cluster=cluster, arrivals=tuple(_arrival(one, has_slo) for one in made.arrivals))


def _arrival(one: Arrival, has_slo: bool) -> Arrival:
    num_steps = min(one.pipeline.num_steps or MOST_STEPS, MOST_STEPS)
    slo_slowdown = one.pipeline.slo_slowdown if has_slo else math.inf
    pipeline = replace(one.pipeline, num_steps=num_steps, slo_slowdown=slo_slowdown)
    return replace(one, submit_s=CLOSER * one.submit_s, pipeline=pipeline)


if __name__ == "__main__":
    main()
