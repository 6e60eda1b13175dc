"""How fast the simulator is: events per second, the production trace, and where the time goes.

    python benchmarks/simulator.py [--repeats N] [--json]

The median of the repeats. `loop` is the simulator without `Scheduler.handle`: the time that passes in there is
taken off.

    budget                                  figure
    >= 100,000 events/s on one core         events_per_s, loop_events_per_s
    weave, one policy and seed, <= 3 s      weave_s
    one Scheduler.handle <= 200 us median   handle_us, at 100 pipelines
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from dataclasses import replace
from typing import Any

from rlmux.policies.rollmux import RollMux
from rlmux.sim.decision_cost import Stopwatch
from rlmux.sim.simulator import simulate
from rlmux.sim.workloads import catalog
from rlmux.sim.workloads.arrivals import Workload


def measure(repeats: int) -> dict[str, Any]:
    weave = catalog.build("weave", departure="wall", costs=False)
    runs = [_timed(weave) for _ in range(repeats)]
    loops = [_loop_seconds(weave) for _ in range(repeats)]
    events = runs[0][1]
    seconds = statistics.median(run[0] for run in runs)
    return {
        "events": events,
        "weave_s": seconds,
        "events_per_s": events / seconds,
        "loop_events_per_s": events / statistics.median(loops),
        "handle_us": _handle_microseconds(),
    }


def _timed(workload: Workload) -> tuple[float, int]:
    gc.collect()
    began = time.process_time()
    result = simulate(workload, RollMux())
    return time.process_time() - began, result.events


def _loop_seconds(workload: Workload) -> float:
    """The simulator's own part: a run with a stopwatch around the scheduler, minus what passed in there."""
    stopwatch = Stopwatch()
    began = time.thread_time()
    result = simulate(workload, RollMux(), decision_cost=stopwatch)
    seconds = time.thread_time() - began
    inside = sum(sum(measured) for measured in stopwatch.measured_s.values()) + sum(result.decision_ms) * 1e-3
    return seconds - inside


def _handle_microseconds() -> float:
    """Median of one `handle`, 100 pipelines running."""
    made = catalog.build("mixed", num_pipelines=100, departure="wall", costs=False)
    stopwatch = Stopwatch()
    simulate(_all_at_once(made), RollMux(), decision_cost=stopwatch)
    return statistics.median(seconds for measured in stopwatch.measured_s.values() for seconds in measured) * 1e6


def _all_at_once(workload: Workload) -> Workload:
    arrivals = tuple(replace(one, submit_s=0.0, depart_s=20_000.0) for one in workload.arrivals)
    return replace(workload, arrivals=arrivals)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    figures = measure(options.repeats)
    if options.json:
        print(json.dumps(figures, indent=2))
        return
    for name, value in figures.items():
        print(f"{name:20} {value:,.1f}")


if __name__ == "__main__":
    main()
