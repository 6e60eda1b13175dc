"""The simulator's makespan of a file against the measured one, policy by policy.

    python benchmarks/predicted.py [FILE ...] [--policies colocated,rollmux,jigsaw] [--rounds 3] [--steps 16]
                                   [--chunk-s 0.05] [--keep DIR] [--json]

Round after round it is measured what busy neighbours cost here (seconds; all rounds of a file make one table), then the
file is trained under `solo` and under each of the policies, one after another. A round's prediction is made from its
`solo` run alone (`rlmux simulate --from-run --profile --count-decisions`); the figures are medians over the rounds, so
that the machine's drift counts less. Rollouts and training are what orders took, summed over a run: by how much the
machine differed before any scheduling.

    deviation   predicted makespan over the measured one, minus 1       goal: within 5 %
    without     the same, had neighbours and decisions cost nothing
    own speed   the same, predicted from the seconds of the measured run itself: what is left is the scheduling's, and
                none of the machine's drift from one run to the next
    drift       spread of `solo`'s own makespan between rounds, largest over least, minus 1
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from rlmux.config import Spec, load_spec
from rlmux.core.model import PHASE_BY_STAGE, Phase, Stage
from rlmux.policies import make_policy
from rlmux.profiling import neighbours as neighbours_profile
from rlmux.report.reports import read_timeline
from rlmux.runtime.backend import WorkerOptions
from rlmux.runtime.launch import header, submissions
from rlmux.runtime.run import RunOptions, run_pipelines
from rlmux.sim.models.neighbour_slowdown import Neighbours
from rlmux.sim.results.sweep import SimRun, run_simulation
from rlmux.sim.workloads.recorded import recorded_workload

FILES = ("examples/01_two_pipelines.yaml", "examples/05_long_tails.yaml", "examples/06_tool_waits.yaml")
BASE = "solo"
NEIGHBOUR_ROUNDS = 2
"""Settings of measuring what neighbours cost in each round: 12 s."""


def train(spec: Spec, policy: str, folder: Path, chunk_s: float) -> bool:
    """Whether every pipeline finished."""
    options = RunOptions(workers=WorkerOptions(chunk_s=chunk_s))
    result = run_pipelines(spec.cluster, submissions(spec), make_policy(policy), folder, options, spec=header(spec))
    return all(fields["status"] == "finished" for fields in result.summary["pipelines"].values())


def stage_seconds(folder: Path) -> dict[str, float]:
    """Seconds from order to end, summed: rollouts (mean over devices) and training, SFT warm-up left out."""
    timeline = read_timeline(folder)
    total = {"rollout": 0.0, "train": 0.0}
    for order in timeline.orders:
        phase = PHASE_BY_STAGE[order.stage]
        if order.counts and not order.is_migration and order.stage is not Stage.SFT_WARMUP and order.devices:
            total["rollout" if phase is Phase.ROLLOUT else "train"] += order.end_s - order.start_s
    return total


def measured_neighbours() -> neighbours_profile.Ratios:
    """Ratios measured in a process of its own: a run's fork server does not serve these pieces."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(neighbours_profile.measure_neighbours, "cpu", num_rounds=NEIGHBOUR_ROUNDS).result()


def train_each(file: str, spec: Spec, policies: list[str], parent: Path, chunk_s: float) -> list[str]:
    """One run for each policy, the base included; returns those that finished."""
    finished = []
    for policy in (BASE, *policies):
        if train(spec, policy, parent / policy, chunk_s):
            finished.append(policy)
        elif policy == BASE:
            raise SystemExit(f"{file}: {BASE}: a pipeline failed; rlmux run on the file says why")
        else:
            print(f"{file}: {policy}: a pipeline failed; left out", file=sys.stderr)
    return finished


def predicted_s(run: Path, policy: str, neighbours: Neighbours | None, *, counts_decisions: bool = False) -> float:
    workload = recorded_workload(run, neighbours)
    return run_simulation(SimRun(workload=workload, policy=policy, counts_decisions=counts_decisions)).hours * 3600


def figures(parent: Path, finished: list[str], neighbours: Neighbours | None) -> dict[str, Any]:
    """Figures of one round, by policy."""
    return {
        policy: {
            "predicted_s": predicted_s(parent / BASE, policy, neighbours, counts_decisions=True),
            "without_s": predicted_s(parent / BASE, policy, None),
            "own_s": predicted_s(parent / policy, policy, neighbours),
            "measured_s": read_timeline(parent / policy).makespan_s,
            "seconds": stage_seconds(parent / policy),
        }
        for policy in finished
    }


def medians(rounds: list[dict[str, Any]], policies: list[str]) -> dict[str, Any]:
    table = {}
    base_s = [one[BASE]["measured_s"] for one in rounds]
    for policy in policies:
        found = [one[policy] for one in rounds if policy in one]
        if not found:
            continue
        seconds = {name: statistics.median(one[name] for one in found) for name in ("predicted_s", "measured_s")}
        table[policy] = {
            **seconds,
            "deviation": seconds["predicted_s"] / seconds["measured_s"] - 1,
            "without": statistics.median(one["without_s"] for one in found) / seconds["measured_s"] - 1,
            "by_round": [one["predicted_s"] / one["measured_s"] - 1 for one in found],
            "own_speed": statistics.median(one["own_s"] / one["measured_s"] - 1 for one in found),
            "seconds": {
                name: statistics.median(one["seconds"][name] for one in found) for name in ("rollout", "train")
            },
        }
    return {"drift": max(base_s) / min(base_s) - 1, "policies": table}


def text(file: str, result: dict[str, Any]) -> str:
    costs = ", ".join(f"{one} beside {beside} {cost:.3f}" for (one, beside), cost in result["neighbours"])
    lines = [f"{file}: solo drifts by {result['drift']:.1%} between rounds; neighbours: {costs or 'not measured'}"]
    for policy, row in result["policies"].items():
        by_round = " ".join(f"{value:+.1%}" for value in row["by_round"])
        lines.append(
            f"  {policy:10} predicted {row['predicted_s']:7.2f} s  measured {row['measured_s']:7.2f} s  "
            f"{row['deviation']:+6.1%}   rounds {by_round}   without {row['without']:+.1%}   "
            f"own speed {row['own_speed']:+.1%}   "
            f"rollouts {row['seconds']['rollout']:.2f} s training {row['seconds']['train']:.2f} s"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", default=list(FILES))
    parser.add_argument("--policies", default="colocated,rollmux,jigsaw")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--chunk-s", type=float, default=0.05)
    parser.add_argument("--keep", type=Path, help="keep the runs there")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    policies = arguments.policies.split(",")
    results = {}
    with tempfile.TemporaryDirectory() as scratch:
        parent = arguments.keep or Path(scratch)
        first = load_spec(arguments.files[0], overrides=["defaults.steps=1"])
        train(first, BASE, Path(scratch) / "warm-up", arguments.chunk_s)  # what starts once a process is not compared
        for file in arguments.files:
            spec = load_spec(file, overrides=[f"defaults.steps={arguments.steps}"])
            ratios: neighbours_profile.Ratios = {}
            trained = []
            for number in range(arguments.rounds):
                print(f"{file}: round {number + 1} of {arguments.rounds}", file=sys.stderr, flush=True)
                folder = parent / Path(file).stem / str(number)
                folder.mkdir(parents=True)
                for pair, seen in measured_neighbours().items():
                    ratios.setdefault(pair, []).extend(seen)
                trained.append((folder, train_each(file, spec, policies, folder, arguments.chunk_s)))
            neighbours = neighbours_profile.neighbours_of("cpu", ratios)
            rounds = [figures(folder, finished, neighbours) for folder, finished in trained]
            results[file] = {
                "neighbours": list(neighbours.measured.items()) if neighbours else [],
                **medians(rounds, [BASE, *policies]),
            }
            if not arguments.json:
                print(text(file, results[file]), flush=True)
    if arguments.json:
        print(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
