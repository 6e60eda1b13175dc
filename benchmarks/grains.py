"""Both grains against each of them alone, and what each mechanism of `rlmux` is worth, on recorded workloads.

    python benchmarks/grains.py [--only TEXT] [--ablate] [--traces] [--quick] [--plot FILE.svg] [--json FILE]

A policy is judged by what is not given: where departures are, by the dollars until then; where the steps are, by the
dollars of nodes that are paid as they are used, else by how soon they are done. Only if it keeps the SLOs and refuses
no work. `--ablate`: each mechanism off alone, then all of them, over the same with all on. `--traces`: the eight whole
traces as well, some minutes each. `--quick`: one case of three small pipelines.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rlmux.core.model import Cluster
from rlmux.report.figures.svg import bar, number, tag
from rlmux.sim.results.result import SimResult
from rlmux.sim.results.sweep import SimRun, run_simulation, sweep
from rlmux.sim.workloads import catalog
from rlmux.sim.workloads.arrivals import Workload
from rlmux.sim.world import STEADY

POLICIES = ("rollmux", "jigsaw", "rlmux")
MECHANISMS = ("tails", "fractions", "fill")
ABLATED = (*(f"rlmux-no-{one}" for one in MECHANISMS), "rlmux-no-tails-no-fractions-no-fill")
MIXES = ("bl", "rh", "th", "mixed")
CLOCKED = "departure=wall,costs=false"
"""Departures are given, and nodes are paid until then."""
SIZED = tuple(f"{mix}-{size}" for mix in MIXES[:3] for size in "sml")
PAIRS = tuple(
    f"pair:num_steps=3,num_gpus={num_gpus},deployment={deployment}{second}"
    for num_gpus in (8, 16)
    for deployment in ("shared", "disaggregated")
    for second in ("", ",second=math_qwen3_4b", ",second=gsm8k_qwen3_0_6b")
)
TRACES = tuple(f"{name}:{CLOCKED}" for name in ("weave", "drift-up", "drift-down", "drift-mixed", *MIXES))


@dataclass(frozen=True, slots=True)
class Case:
    """A workload by its name in the catalog."""

    name: str
    has_prices: bool = False
    """Whether its nodes cost something: what is given away then is paid for."""
    seed: int = 3

    def load(self) -> Workload:
        seed = None if self.name.startswith("micro") else self.seed
        made = catalog.load(self.name) if seed is None else catalog.load(self.name, seed=seed)
        if not self.has_prices:
            return made
        pools = {name: replace(pool, usd_per_gpu_hour=2.0) for name, pool in made.cluster.pools.items()}
        return replace(made, cluster=Cluster(pools=pools))

    def __str__(self) -> str:
        return f"{self.name}{', paid' if self.has_prices else ''}{f', seed {self.seed}' if self.seed != 3 else ''}"


CASES = (
    *(Case(f"{mix}:num_pipelines=8,{CLOCKED}") for mix in MIXES),
    *(Case(f"{name}:num_steps=12") for name in ("micro-a", "micro-b", "micro-c")),
    *(Case(name, has_prices) for name in PAIRS for has_prices in (False, True)),
    *(Case(f"{mix}:num_pipelines=25,{CLOCKED}") for mix in (*MIXES, *SIZED)),
)
SMALL = tuple(
    Case(f"{mix}:num_pipelines={number}", seed=seed)
    for mix in (*MIXES, *SIZED)
    for number in (3, 5, 8)
    for seed in (0, 1)
)
"""Small mixes as `rlmux simulate` has them by default: so many steps, with switches and sync."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--ablate", action="store_true")
    parser.add_argument("--traces", action="store_true")
    parser.add_argument("--quick", action="store_true", help="the first of the small mixes alone")
    parser.add_argument("--plot", type=Path, default=None)
    parser.add_argument("--json", type=Path, default=None)
    args = parser.parse_args()
    cases = [*CASES, *SMALL, *(Case(name) for name in TRACES if args.traces)]
    cases = [*SMALL[:1]] if args.quick else cases
    cases = [case for case in cases if args.only in str(case)]
    policies = (*POLICIES, *(ABLATED if args.ablate else ()))
    results = sweep([SimRun(workload=case.load(), policy=name) for case in cases for name in policies])
    num = len(policies)
    figures = [judged(case, policies, results[num * at : num * (at + 1)]) for at, case in enumerate(cases)]
    print(table(cases, figures, policies))
    if args.plot is not None:
        args.plot.write_text(plot(cases, figures), encoding="utf-8")
    if args.json is not None:
        content = {str(case): dict(of_case) for case, of_case in zip(cases, figures, strict=True)}
        args.json.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def judged(case: Case, policies: Sequence[str], results: Sequence[SimResult] | None = None) -> Mapping[str, float]:
    """Seconds by policy, or dollars where these count; infinite for a policy that breaks SLOs.

    `results`: those of the policies, if they were simulated before.
    """
    workload = case.load()
    results = results or [run_simulation(SimRun(workload=workload, policy=name)) for name in policies]
    has_departures = workload.end_s is not None
    pools = workload.cluster.pools.values()
    is_by_dollars = has_departures or all(pool.num_nodes is None and pool.usd_per_gpu_hour for pool in pools)
    figures = {}
    for name, result in zip(policies, results, strict=True):
        is_done = has_departures or all(
            one.steps == arrival.pipeline.num_steps
            for one, arrival in zip(result.pipelines, workload.arrivals, strict=True)
        )
        figure = result.cost_usd if is_by_dollars else 3600 * result.hours
        attainment = result.paper_slo_attainment if has_departures else result.slo_attainment
        keeps = attainment >= least_attainment(workload, name)
        figures[name] = figure if is_done and keeps else math.inf
    return figures


def least_attainment(workload: Workload, policy: str) -> float:
    """Drift breaks promises made on estimates; a move costs a wait, which few steps do not make up for."""
    drifts = any(arrival.world.variation != STEADY for arrival in workload.arrivals[:50])
    if workload.name.startswith("drift") or drifts:
        return 0.95
    if not policy.startswith("rlmux"):
        return 1.0
    return 0.99 if len(workload.arrivals) > 100 else 0.9


def gain(of_case: Mapping[str, float]) -> float:
    """What the better of the two grains alone takes or costs, over what `rlmux` does."""
    return min(of_case["rollmux"], of_case["jigsaw"]) / of_case["rlmux"]


def table(cases: list[Case], figures: Sequence[Mapping[str, float]], policies: tuple[str, ...]) -> str:
    width = max(len(str(case)) for case in cases)
    off = [name for name in policies if name in ABLATED]
    head = f"{'':<{width}}" + "".join(f"{name:>10}" for name in POLICIES)
    lines = [f"{head}  gain" + "".join(f"  {name[5:]}" for name in off)]
    for case, of_case in zip(cases, figures, strict=True):
        row = f"{case!s:<{width}}" + "".join(f"{of_case[name]:10.1f}" for name in POLICIES) + f"{gain(of_case):6.3f}"
        lines.append(row + "".join(f"{of_case[name] / of_case['rlmux']:{len(name) - 3}.3f}" for name in off))
    gains = sorted(gain(of_case) for of_case in figures)
    lines.append(
        f"gain over the better of both: least {gains[0]:.3f}, median {gains[len(gains) // 2]:.3f}, "
        f"1.03 or more in {sum(one >= 1.03 for one in gains)} of {len(gains)}"
    )
    return "\n".join(lines)


def plot(cases: list[Case], figures: Sequence[Mapping[str, float]]) -> str:
    """A bar for each workload, the greatest gain first; the line is a gain of 3 %."""
    rows = sorted(zip(map(gain, figures), map(str, cases), strict=True), reverse=True)
    left, row_height, scale = 570.0, 18.0, 900.0
    shapes = []
    for place, (value, name) in enumerate(rows):
        y = 10 + place * row_height
        shapes.append(tag("text", name, x=number(left - 8), y=number(y + 11), text_anchor="end"))
        width = max(0.0, value - 1.0) * scale
        shapes.append(tag("path", d=bar(left, y, width, row_height - 5), fill="#0072b2"))
        shapes.append(tag("text", f"{value - 1:+.1%}", x=number(left + width + 5), y=number(y + 11)))
    height = 20 + len(rows) * row_height
    x = number(left + 0.03 * scale)
    shapes.append(tag("path", d=f"M{x} 5V{number(height - 10)}", stroke="#d55e00"))
    colours = "text{font:11px system-ui,sans-serif;fill:#222}@media(prefers-color-scheme:dark){text{fill:#ddd}}"
    style = tag("style", colours)
    return tag("svg", style, *shapes, xmlns="http://www.w3.org/2000/svg", viewBox=f"0 0 1000 {number(height)}")


if __name__ == "__main__":
    main()
