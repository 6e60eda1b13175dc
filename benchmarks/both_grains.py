"""`rlmux` against each of the two grains alone, simulated, on pairs of recorded pipelines; in ratios of makespans.

    python benchmarks/both_grains.py [--steps 6] [--json]

48 workloads: eight recorded runs in pairs of their own and four pairs that mix them, on 8 and on 16 H100,

    shared     one pool for both phases
    separate   one pool for rollouts, one for training; `jigsaw` runs both phases on both of them

and besides, on the 24 with separate pools:

    apart      `rlmux` may not do so either (`keeps_pools_apart`): each pool serves its phase alone

Then the example that `simulate` takes, with twenty steps. A policy is worse or better beyond 0.1 %. `same splits`:
`jigsaw` with `rlmux`'s splits of a device, which tells what they bring from the rest. CPU only; the same figures
every time.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from rlmux.core.model import Cluster
from rlmux.policies import make_policy
from rlmux.sim.models.interference import estimated_table, fraction_grid, sharing_table
from rlmux.sim.sweep import SimRun, sweep
from rlmux.sim.workloads import catalog
from rlmux.sim.workloads.arrivals import Workload
from rlmux.sim.workloads.substage_pairs import HOMOGENEOUS, MIXED, crowd

PAIRS = (*((one, one) for one in HOMOGENEOUS), *MIXED)
NUM_GPUS = (8, 16)
NOISE = 0.001
EXAMPLE = Path(__file__).resolve().parent.parent / "examples" / "07_cluster_what_if.yaml"
EXAMPLE_STEPS = 20
SAME_SPLITS = "same splits"
TABLES = ("shared", "separate", "apart", "example")
Row = Mapping[str, float]
"""Seconds by policy."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--only", choices=TABLES, help="one of the tables")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    tables = {}
    for title in [options.only] if options.only else TABLES:
        tables[title] = made(workloads(title, options.steps), keeps_pools_apart=title == "apart")
        if not options.json:
            print(_table(title, tables[title]) + "\n", flush=True)
    if options.json:
        print(json.dumps(tables, indent=1))


def workloads(title: str, num_steps: int) -> dict[str, Workload]:
    """The workloads of one table, by what they are."""
    if title == "example":
        return {EXAMPLE.stem: _shortened(catalog.load(str(EXAMPLE)))}
    deployment = "shared" if title == "shared" else "disaggregated"
    return {
        f"{first.lengths_of} + {second.lengths_of}, {num_gpus}": _both_phases(
            crowd((first, second), num_gpus=num_gpus, num_steps=num_steps, deployment=deployment)
        )
        for num_gpus in NUM_GPUS
        for first, second in PAIRS
    }


def _both_phases(workload: Workload) -> Workload:
    """The same with a single pool said to serve both phases, so that `rollmux` takes it too."""
    if len(workload.cluster.pools) > 1:
        return workload
    pools = {name: replace(pool, serves_both_phases=True) for name, pool in workload.cluster.pools.items()}
    return replace(workload, cluster=Cluster(pools=pools))


def _shortened(workload: Workload) -> Workload:
    arrivals = [replace(one, pipeline=replace(one.pipeline, num_steps=EXAMPLE_STEPS)) for one in workload.arrivals]
    return replace(workload, arrivals=tuple(arrivals))


def made(given: Mapping[str, Workload], *, keeps_pools_apart: bool = False) -> dict[str, Row]:
    """Makespans of every policy on every workload."""
    table = estimated_table(fraction_grid("H100"))
    policies = {
        "rollmux": make_policy("rollmux"),
        "jigsaw": make_policy("jigsaw"),
        SAME_SPLITS: make_policy("jigsaw", sharing=sharing_table(table, table.grid.with_half())),
        "rlmux": make_policy("rlmux", keeps_pools_apart=keeps_pools_apart),
    }
    if keeps_pools_apart:
        del policies["jigsaw"], policies[SAME_SPLITS]
    runs = [SimRun(workload=workload, policy=policy) for workload in given.values() for policy in policies.values()]
    results = iter(sweep(runs))
    return {name: {policy: 3600 * next(results).hours for policy in policies} for name in given}


def _table(title: str, rows: Mapping[str, Row]) -> str:
    names = list(next(iter(rows.values())))
    lines = [f"{title:<58}" + "".join(f"{name:>13}" for name in names) + "   rlmux/best"]
    for workload, row in rows.items():
        lines.append(f"{workload:<58}" + "".join(f"{row[name]:11.0f} s" for name in names) + f"{_ratio(row):13.3f}")
    for rival in names:
        if rival != "rlmux":
            lines.append(_summary(f"rlmux against {rival}", [row["rlmux"] / row[rival] for row in rows.values()]))
    lines.append(_summary("rlmux against the better of rollmux and jigsaw", [_ratio(row) for row in rows.values()]))
    return "\n".join(lines)


def _ratio(row: Row) -> float:
    return row["rlmux"] / min(row[name] for name in ("rollmux", "jigsaw") if name in row)


def _summary(title: str, ratios: Sequence[float]) -> str:
    mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
    better, worse = sum(one < 1 - NOISE for one in ratios), sum(one > 1 + NOISE for one in ratios)
    return f"{title}: mean {mean:.3f}, {better} of {len(ratios)} better, {worse} worse, worst {max(ratios):.3f}"


if __name__ == "__main__":
    main()
