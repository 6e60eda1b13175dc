"""How long a decision of the look-ahead takes, and how near its schedules are to the best there is.

    python benchmarks/lookahead.py [--graphs 200] [--json]

decisions   `Scheduler.handle` under `jigsaw` in whole simulated runs, 2 to 8 pipelines on 8 workers (budget: 5 ms)
quality     makespan of one plan over the exact optimum (CP-SAT, the `solver` extra) on small random graphs, whole
            devices, shared ones, and whole ones where shards also move before they begin, to several siblings and to
            idle devices; and of the greedy rule over the same (goal: mean 1 %, worst 5 %)

Times are CPU milliseconds of this thread, so that a busy machine does not show. A graph whose optimum is not proved
within the limit is left out and counted.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
from typing import Any

from exact_schedule import least_makespan, random_problem

from rlmux.core.errors import UserError
from rlmux.policies import make_policy
from rlmux.policies.lookahead.search import look_ahead
from rlmux.policies.search.greedy import greedy
from rlmux.sim.models.interference import estimated_table, fraction_grid, sharing_table
from rlmux.sim.models.rates import InterferenceRates
from rlmux.sim.results.decision_cost import Stopwatch
from rlmux.sim.simulator import Simulation
from rlmux.sim.workloads.substage_pairs import HOMOGENEOUS, crowd

NUM_WORKERS = 8
MEAN_GOAL, WORST_GOAL, DECISION_BUDGET_MS = 0.01, 0.05, 5.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--graphs", type=int, default=200, help="graphs on whole devices; a quarter as many shared")
    parser.add_argument("--limit", type=float, default=10.0, help="seconds of the solver for one graph")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    result = {
        "decisions_ms": {num: decision_times(num) for num in (2, 4, 8)},
        "whole_devices": quality(options.graphs, is_sharing=False, limit_s=options.limit),
        "shared_devices": quality(options.graphs // 4, is_sharing=True, limit_s=options.limit),
        "every_move": quality(options.graphs, is_sharing=False, has_moves=True, limit_s=options.limit),
    }
    print(json.dumps(result, indent=1) if options.json else _text(result))


def decision_times(num_pipelines: int) -> dict[str, float]:
    """CPU milliseconds of all decisions but placements; every pair that the estimate calls helpful may share."""
    chosen = [HOMOGENEOUS[number % len(HOMOGENEOUS)] for number in range(num_pipelines)]
    workload = crowd(chosen, num_gpus=4 * NUM_WORKERS, num_steps=2, sequences_per_device=64)
    table = estimated_table(fraction_grid("H100"))
    stopwatch = Stopwatch()
    policy = make_policy("jigsaw", sharing=sharing_table(table))
    Simulation(workload, policy, rates=InterferenceRates(table), decision_cost=stopwatch).run()
    times = [seconds * 1e3 for measured in stopwatch.measured_s.values() for seconds in measured]
    planned = sorted(ms for ms in times if ms > 0.5)
    ordered = sorted(times)
    return {
        "events": len(times),
        "p50": ordered[len(ordered) // 2],
        "p99": ordered[int(0.99 * len(ordered))],
        "planned": len(planned),
        "planned_p50": planned[len(planned) // 2] if planned else 0.0,
        "planned_p99": planned[int(0.99 * len(planned))] if planned else 0.0,
    }


def quality(num_graphs: int, *, is_sharing: bool, limit_s: float, has_moves: bool = False) -> dict[str, float]:
    gaps, greedy_gaps, num_unproved = [], [], 0
    for seed in range(num_graphs):
        problem = random_problem(random.Random(seed), is_sharing=is_sharing, has_moves=has_moves)
        made, by_greed = look_ahead(problem), greedy(problem)
        try:
            least = least_makespan(problem, limit_s=limit_s, upper_s=min(made.makespan_s, by_greed.makespan_s))
        except UserError:
            num_unproved += 1
            continue
        if not least.is_proved:
            num_unproved += 1
            continue
        gaps.append(made.makespan_s / least.makespan_s - 1)
        greedy_gaps.append(by_greed.makespan_s / least.makespan_s - 1)
    return {
        "proved": len(gaps),
        "unproved": num_unproved,
        "mean": statistics.mean(gaps),
        "worst": max(gaps),
        "greedy_mean": statistics.mean(greedy_gaps),
        "greedy_worst": max(greedy_gaps),
    }


def _text(result: dict[str, Any]) -> str:
    lines = [f"decisions, CPU ms on {NUM_WORKERS} workers (budget {DECISION_BUDGET_MS:g})"]
    for num, row in result["decisions_ms"].items():
        lines.append(
            f"  {num} pipelines: {row['events']} events p50 {row['p50']:.2f} p99 {row['p99']:.2f}; "
            f"{row['planned']} planned p50 {row['planned_p50']:.2f} p99 {row['planned_p99']:.2f}"
        )
    for name in ("whole_devices", "shared_devices", "every_move"):
        row = result[name]
        lines.append(
            f"{name}: {row['proved']} graphs proved, {row['unproved']} not; over the optimum: mean {row['mean']:.1%} "
            f"worst {row['worst']:.1%} (goal {MEAN_GOAL:.0%}, {WORST_GOAL:.0%}); "
            f"greedy mean {row['greedy_mean']:.1%} worst {row['greedy_worst']:.1%}"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
