"""The simulator's makespan of a file against the measured one, policy by policy.

    python benchmarks/predicted.py [FILE ...] [--policies colocated,rollmux,jigsaw] [--rounds 3] [--steps 16]
                                   [--chunk-s 0.05] [--keep DIR] [--json]

Round after round every file is trained under `solo` and under each of the policies, one after another. A round's
prediction is made from its `solo` run alone (`rlmux simulate --from-run`); the figures are medians over the rounds, so
that the machine's drift counts less. Rollouts and training are what orders took, summed over a run: by how much the
machine differed before any scheduling.

    deviation   predicted makespan over the measured one, minus 1       goal: within 5 %
    own speed   the same, predicted from the seconds of the measured run itself: what is left is the scheduling's, and
                none of the machine's drift from one run to the next
    drift       of `solo`'s own makespan between rounds, largest over least, minus 1
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from rlmux.cli.training import header, submissions
from rlmux.core.model import PHASE_BY_STAGE, Phase, Stage
from rlmux.core.policies import POLICIES
from rlmux.report.api import read_timeline
from rlmux.runtime.run import run_pipelines
from rlmux.runtime.worker_backend import WorkerOptions
from rlmux.sim.recorded import recorded_workload
from rlmux.sim.sweep import Task, run_task
from rlmux.spec import Spec, load_spec

FILES = ("examples/two_pipelines.yaml", "examples/long_tails.yaml", "examples/tool_waits.yaml")
BASE = "solo"


def train(spec: Spec, policy: str, folder: Path, chunk_s: float) -> bool:
    """Whether every pipeline finished."""
    options = WorkerOptions(chunk_s=chunk_s)
    result = run_pipelines(
        spec.cluster, submissions(spec), POLICIES[policy](), folder, spec=header(spec), options=options
    )
    return all(fields["status"] == "finished" for fields in result.summary["pipelines"].values())


def stage_seconds(folder: Path) -> dict[str, float]:
    """From each order to its end, summed: rollouts (mean over devices) and training, warm starts left out."""
    timeline = read_timeline(folder)
    total = {"rollout": 0.0, "train": 0.0}
    for order in timeline.orders:
        phase = PHASE_BY_STAGE[order.stage]
        if order.counts and not order.is_migration and order.stage is not Stage.WARM_START and order.devices:
            total["rollout" if phase is Phase.ROLLOUT else "train"] += order.end_s - order.start_s
    return total


def one_round(file: str, spec: Spec, policies: list[str], parent: Path, chunk_s: float) -> dict[str, Any]:
    figures: dict[str, Any] = {}
    base = parent / BASE
    if not train(spec, BASE, base, chunk_s):
        raise SystemExit(f"{file}: {BASE}: a pipeline failed; rlmux run on the file says why")
    workload = recorded_workload(base)
    for policy in (BASE, *policies):
        folder = parent / policy
        if policy != BASE and not train(spec, policy, folder, chunk_s):
            print(f"{file}: {policy}: a pipeline failed; left out", file=sys.stderr)
            continue
        figures[policy] = {
            "predicted_s": run_task(Task(workload=workload, policy=policy)).hours * 3600,
            "own_s": run_task(Task(workload=recorded_workload(folder), policy=policy)).hours * 3600,
            "measured_s": read_timeline(folder).makespan_s,
            "seconds": stage_seconds(folder),
        }
    return figures


def medians(rounds: list[dict[str, Any]], policies: list[str]) -> dict[str, Any]:
    table = {}
    base_s = [one[BASE]["measured_s"] for one in rounds]
    for policy in policies:
        found = [one[policy] for one in rounds if policy in one]
        if not found:
            continue
        predicted_s = statistics.median(one["predicted_s"] for one in found)
        measured_s = statistics.median(one["measured_s"] for one in found)
        table[policy] = {
            "predicted_s": predicted_s,
            "measured_s": measured_s,
            "deviation": predicted_s / measured_s - 1,
            "by_round": [one["predicted_s"] / one["measured_s"] - 1 for one in found],
            "own_speed": statistics.median(one["own_s"] / one["measured_s"] - 1 for one in found),
            "seconds": {
                name: statistics.median(one["seconds"][name] for one in found) for name in ("rollout", "train")
            },
        }
    return {"drift": max(base_s) / min(base_s) - 1, "policies": table}


def text(file: str, result: dict[str, Any]) -> str:
    lines = [f"{file}: solo drifts by {result['drift']:.1%} between rounds"]
    for policy, row in result["policies"].items():
        by_round = " ".join(f"{value:+.1%}" for value in row["by_round"])
        lines.append(
            f"  {policy:10} predicted {row['predicted_s']:7.2f} s  measured {row['measured_s']:7.2f} s  "
            f"{row['deviation']:+6.1%}   rounds {by_round}   own speed {row['own_speed']:+.1%}   "
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
            rounds = []
            for number in range(arguments.rounds):
                print(f"{file}: round {number + 1} of {arguments.rounds}", file=sys.stderr, flush=True)
                folder = parent / Path(file).stem / str(number)
                folder.mkdir(parents=True)
                rounds.append(one_round(file, spec, policies, folder, arguments.chunk_s))
            results[file] = medians(rounds, [BASE, *policies])
            if not arguments.json:
                print(text(file, results[file]), flush=True)
    if arguments.json:
        print(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
