"""What a filler costs the pipeline whose gaps it fills, and what it gets: the pipeline alone and with it, in turn.

python benchmarks/fillers.py [--repeats 2] [--steps 50] [--filler-steps 400]

step_s          mean seconds of the pipeline's steps, the first left out
busy            part of the makespan for which the rollout device computes
filler tokens   tokens that the filler sampled
equal           whether the pipeline's weights are those of the first run
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from rlmux.cli.tables import print_rows

ALGORITHM = {"prompts_per_step": 32, "group_size": 8}
ROLLOUT_DEVICE = "rollout-0.0"


def file_of(num_steps: int, num_filler_steps: int) -> dict[str, Any]:
    """A pipeline on one device for each phase, and a filler where it is to have steps."""
    trained = {
        "name": "sort",
        "task": "sort",
        "steps": num_steps,
        "sft_warmup": {"updates": 20},
        "algorithm": ALGORITHM,
    }
    filler = {
        "name": "eval", "urgency": "filler", "task": "sort", "steps": num_filler_steps, "algorithm": ALGORITHM
    }  # fmt: skip
    return {
        "cluster": {"pools": {"rollout": {"devices": 1}, "train": {"devices": 1}}},
        "policy": "rollmux",
        "pipelines": [trained, *([filler] if num_filler_steps else [])],
    }


def train(plan: dict[str, Any]) -> dict[str, Any]:
    """The summary of a run."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "plan.yaml"
        file.write_text(json.dumps(plan), encoding="utf-8")
        words = ["run", str(file), "--out", str(Path(folder) / "run"), "--json"]
        said = subprocess.run([sys.executable, "-m", "rlmux", *words], check=True, stdout=subprocess.PIPE, text=True)
        summary: dict[str, Any] = json.loads(said.stdout)
        return summary


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--filler-steps", type=int, default=400)
    asked = parser.parse_args()
    rows, first = [], None
    for repeat in range(1, asked.repeats + 1):
        for num_filler_steps in (0, asked.filler_steps):
            summary = train(file_of(asked.steps, num_filler_steps))
            trained, filler = summary["pipelines"]["sort"], summary["pipelines"].get("eval")
            first = first or trained["weights_sha256"]
            rows.append(
                {
                    "repeat": repeat,
                    "with": "a filler" if filler else "nothing",
                    "step_s": trained["step_s_mean"],
                    "makespan_s": summary["makespan_s"],
                    "busy": f"{100 * summary['devices'][ROLLOUT_DEVICE]['utilization']:.0f}%",
                    "filler tokens": filler["tokens"] if filler else 0,
                    "equal": trained["weights_sha256"] == first,
                }
            )
    print_rows(rows)


if __name__ == "__main__":
    main()
