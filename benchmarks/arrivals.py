"""Many tiny pipelines that arrive over time, for real, against the simulator's prediction of the same file.

    python benchmarks/arrivals.py                           50 pipelines over 120 s on 2 devices
    python benchmarks/arrivals.py --pipelines 20 --window 60 --json

Arrivals and lengths are drawn from a seed. The run's own stage times, mean of each pipeline's steps, are what the
simulator gets as estimates: the comparison is of the scheduling, not of a guess at how fast the machine is.

    longest_gap_s     between two published steps of a running pipeline, or its admission and its first
    num_stalls        gaps longer than one cycle, the mean steps of all pipelines that run meanwhile, and 2 s more
    in_longest_gap    the orders that took longest in it: seconds from the order to its end (of computing)
    start_p50_s       from a pipeline's admission to its first step, median
    longest_wait_s    from a pipeline's submission to its admission
    beside_change     a step during which another pipeline came or went, over the mean of that pipeline's other steps:
                      median and 95th percentile
    num_moves         relocations of pipelines to other nodes
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml

from rlmux.cli import inputs
from rlmux.config.checks import Purpose
from rlmux.config.load import load_spec
from rlmux.core.actions import Relocate
from rlmux.core.model import Stage
from rlmux.policies import make_policy
from rlmux.report.api import read_timeline
from rlmux.report.log import LogReader
from rlmux.runtime.backend import Submission
from rlmux.runtime.run import run_pipelines
from rlmux.sim import api

POLICY = "rollmux"
STALL_S = 2.0
"""Seconds that a start may take beside a cycle."""


def spec_of(num_pipelines: int, window_s: float, seed: int) -> dict[str, Any]:
    random_numbers = random.Random(seed)
    arrivals = sorted(random_numbers.uniform(0.0, window_s) for _ in range(num_pipelines))
    return {
        "policy": POLICY,
        "cluster": {"pools": {"rollout": {"devices": 1}, "train": {"devices": 1}}},
        "defaults": {
            "model": {"hidden_size": 32, "layers": 2, "heads": 2, "kv_heads": 1, "intermediate_size": 64},
            "sft_warmup": {"updates": 0},
            "algorithm": {"prompts_per_step": 4, "group_size": 4},
            "rollout": {"max_new_tokens": 12, "slots": 16},
        },
        "pipelines": [
            {
                "name": f"p{number}",
                "seed": number,
                "task": random_numbers.choice(["sort", "reverse"]),
                "steps": random_numbers.randint(4, 12),
                "submit_at_s": round(at_s, 3),
            }
            for number, at_s in enumerate(arrivals)
        ],
    }


def train(file: Path, folder: Path) -> None:
    spec = load_spec(file)
    submissions = [
        Submission(pipeline=one.pipeline, config=one.config, submit_at_s=one.submit_at_s) for one in spec.pipelines
    ]
    run_pipelines(spec.cluster, submissions, make_policy(POLICY), folder, spec={})


def stalls(gaps: list[tuple[float, float]], pipelines: list[dict[str, Any]], timeline: Any) -> tuple[float, int]:
    """(the longest gap, how many are stalls), as the module says."""
    lives = [
        (record.admitted_s, record.ended_s, one["estimate"]["rollout_s"] + one["estimate"]["train_s"])
        for one in pipelines
        for record in [timeline.pipelines[one["name"]]]
    ]
    num_stalls = 0
    for begin_s, end_s in gaps:
        cycle_s = sum(step_s for admitted_s, ended_s, step_s in lives if admitted_s < end_s and begin_s < ended_s)
        num_stalls += end_s - begin_s > cycle_s + STALL_S
    return max(end_s - begin_s for begin_s, end_s in gaps), num_stalls


def in_longest_gap(gaps: list[tuple[float, float]], timeline: Any) -> list[str]:
    """The longest orders of the longest gap, with seconds from order to end, and of computing."""
    begin_s, end_s = max(gaps, key=lambda gap: gap[1] - gap[0])
    orders = [order for order in timeline.orders if order.start_s < end_s and begin_s < order.end_s]
    orders.sort(key=lambda order: order.start_s - order.end_s)
    return [f"{one.pipeline} {one.stage} {one.end_s - one.start_s:.3g} s ({one.seconds:.3g})" for one in orders[:4]]


def beside_change(pipelines: list[dict[str, Any]], timeline: Any) -> list[float]:
    """Ratios, as the module says, of pipelines that had steps with and without a change; first steps are left out."""
    records = {one["name"]: timeline.pipelines[one["name"]] for one in pipelines}
    ratios = []
    for name, record in records.items():
        changes = [
            moment
            for other, its in records.items()
            for moment in (its.admitted_s, its.ended_s)
            if other != name and moment is not None
        ]
        steps = list(pairwise(sorted(record.published.values())))
        during = [any(begin_s < moment < end_s for moment in changes) for begin_s, end_s in steps]
        seconds = [(end_s - begin_s, is_beside) for (begin_s, end_s), is_beside in zip(steps, during, strict=True)]
        calm = [step_s for step_s, is_beside in seconds if not is_beside]
        if calm:
            ratios += [step_s / statistics.mean(calm) for step_s, is_beside in seconds if is_beside]
    return sorted(ratios)


def num_moves(folder: Path) -> int:
    with LogReader(folder) as log:
        return sum(isinstance(entry.value, Relocate) for entry in log.entries())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pipelines", type=int, default=50)
    parser.add_argument("--window", type=float, default=120.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    spec = spec_of(arguments.pipelines, arguments.window, arguments.seed)
    with tempfile.TemporaryDirectory() as parent:
        file, folder = Path(parent) / "many.yaml", Path(parent) / "run"
        file.write_text(yaml.safe_dump(spec))
        train(file, folder)
        timeline, moves = read_timeline(folder), num_moves(folder)
        gaps: list[tuple[float, float]] = []
        waits, completions, starts_s = [], [], []
        for one in spec["pipelines"]:
            record = timeline.pipelines[one["name"]]
            assert record.status == "finished", f"{one['name']}: {record.status}: {record.reason}"
            moments = [record.admitted_s or 0.0, *sorted(record.published.values())]
            gaps += pairwise(moments)
            starts_s.append(moments[1] - moments[0])
            waits.append((record.admitted_s or 0.0) - record.submitted_s)
            completions.append((record.ended_s or 0.0) - record.submitted_s)
            seconds = {Stage.GENERATE: 0.0, Stage.UPDATE: 0.0}
            for order in timeline.orders:
                if order.pipeline == one["name"] and order.counts:
                    stage = Stage.GENERATE if order.stage is Stage.GENERATE else Stage.UPDATE
                    seconds[stage] += order.end_s - order.start_s
            one["estimate"] = {
                "rollout_s": max(seconds[Stage.GENERATE] / one["steps"], 1e-4),
                "train_s": max(seconds[Stage.UPDATE] / one["steps"], 1e-4),
            }
        file.write_text(yaml.safe_dump(spec))
        predicted = api.simulate(inputs.workload_of(load_spec(file, purpose=Purpose.PLAN)), policies=[POLICY])[
            "policies"
        ][POLICY]
    longest_s, num_stalls = stalls(gaps, spec["pipelines"], timeline)
    ratios = beside_change(spec["pipelines"], timeline)
    num_steps = sum(one["steps"] for one in spec["pipelines"])
    first_s = spec["pipelines"][0]["submit_at_s"]
    makespan_s = timeline.end_s - first_s
    figures = {
        "pipelines": arguments.pipelines,
        "window_s": arguments.window,
        "steps": num_steps,
        "makespan_s": makespan_s,
        "predicted_makespan_s": predicted["makespan_s"],
        "steps_per_s": num_steps / makespan_s,
        "throughput_over_predicted": predicted["makespan_s"] / makespan_s,
        "median_completion_s": statistics.median(completions),
        "start_p50_s": statistics.median(starts_s),
        "longest_gap_s": longest_s,
        "in_longest_gap": in_longest_gap(gaps, timeline),
        "num_stalls": num_stalls,
        "longest_wait_s": max(waits),
        "beside_change_p50": ratios[len(ratios) // 2] if ratios else 0.0,
        "beside_change_p95": ratios[int(len(ratios) * 0.95)] if ratios else 0.0,
        "num_moves": moves,
    }
    if arguments.json:
        print(json.dumps(figures))
    else:
        for name, value in figures.items():
            print(f"{name:26} {', '.join(value) if isinstance(value, list) else f'{value:.4g}'}")


if __name__ == "__main__":
    main()
