"""What sub-stages gain where trajectories wait for tools, simulated.

    python benchmarks/tool_waits.py [--pipelines 3] [--steps 3] [--json]

Pipelines with the answer lengths of a recorded run, on two devices of 4 H100:

    whole     each on both devices, one pipeline after another
    split     each on one of them, one after another there
    jigsaw    all on both, beside each other
"""

from __future__ import annotations

import argparse
import json

from rlmux.policies import make_policy
from rlmux.sim.models.multi_turn import ToolUse
from rlmux.sim.simulator import simulate
from rlmux.sim.workloads.substage_pairs import GSM8K_06B, crowd

WAITS_S = (0.0, 5.0, 20.0, 60.0)
"""Mean wait of a call; 0 is no tools."""
MEAN_CALLS = 2.0


def tokens_per_s(policy: str, wait_s: float, num_pipelines: int, num_steps: int, num_parts: int) -> float:
    workload = crowd(
        [GSM8K_06B] * num_pipelines,
        num_gpus=8,
        num_steps=num_steps,
        sequences_per_device=64,
        num_parts=num_parts,
        tools=ToolUse(mean_calls=MEAN_CALLS, wait_s=wait_s) if wait_s else None,
    )
    return simulate(workload, make_policy(policy)).tokens_per_s or 0.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pipelines", type=int, default=3)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    size = (arguments.pipelines, arguments.steps)
    table = {
        wait_s: {
            "whole": tokens_per_s("colocated", wait_s, *size, num_parts=1),
            "split": tokens_per_s("colocated", wait_s, *size, num_parts=2),
            "jigsaw": tokens_per_s("jigsaw", wait_s, *size, num_parts=1),
        }
        for wait_s in WAITS_S
    }
    if arguments.json:
        print(json.dumps(table, indent=1))
        return
    print("wait_s    whole    split   jigsaw   over whole   over split")
    for wait_s, row in table.items():
        print(
            f"{wait_s:6g} {row['whole']:8.0f} {row['split']:8.0f} {row['jigsaw']:8.0f} "
            f"{row['jigsaw'] / row['whole']:12.2f} {row['jigsaw'] / row['split']:12.2f}"
        )


if __name__ == "__main__":
    main()
