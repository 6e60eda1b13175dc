"""Real runs of shapes that no policy was tuned for: is `rlmux` ever slower than the better of `rollmux` and `jigsaw`?

    python benchmarks/real_shapes.py [--rounds 3] [--only TEXT] [--steps 10] [--json FILE]

One to three rollout devices and a training device, two to four pipelines, plain, with long tails, with tools; policies
in turn, medians over the rounds. Where `rlmux` is slower, its parts are told beside those of the better one, in
device-seconds of each log: computing (more of it for the same steps is merging and slower neighbours), switches with
starts, and control.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

import yaml

from rlmux.api.commands import compare

POLICIES = ("rollmux", "jigsaw", "rlmux")
PLAIN = {"task": {"name": "sort", "min_digits": 2, "max_digits": 24}}
REVERSE = {"task": {"name": "reverse"}}
TAILS = {
    "task": {"name": "sort", "min_digits": 2, "mean_digits": 16, "max_digits": 200},
    "sft_warmup": {"updates": 40, "batch_size": 16, "learning_rate": 3e-3},
    "rollout": {"max_new_tokens": 260, "max_prompt_tokens": 220, "slots": 16},
    "algorithm": {"name": "grpo", "prompts_per_step": 8, "group_size": 4, "micro_batch_size": 4},
}
TOOLS = {
    "task": {"name": "calculator", "min_digits": 1, "max_digits": 2, "wait_s": 0.2},
    "rollout": {"max_new_tokens": 24, "max_prompt_tokens": 32, "slots": 64},
}
SHAPES: Mapping[str, tuple[int, tuple[Mapping[str, Any], ...]]] = {
    "1+1, two plain": (1, (PLAIN, REVERSE)),
    "1+1, three plain": (1, (PLAIN, REVERSE, PLAIN)),
    "1+1, plain and tools": (1, (PLAIN, TOOLS)),
    "1+1, four plain": (1, (PLAIN, REVERSE, PLAIN, REVERSE)),
    "2+1, three plain": (2, (PLAIN, REVERSE, PLAIN)),
    "2+1, two with tails": (2, (TAILS, TAILS)),
    "2+1, plain and tools": (2, (PLAIN, TOOLS)),
    "3+1, two plain": (3, (PLAIN, REVERSE)),
    "3+1, tails and tools": (3, (TAILS, TOOLS)),
    "3+1, four of all kinds": (3, (PLAIN, TAILS, TOOLS, REVERSE)),
}
"""Rollout devices, and what each pipeline differs in."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--only", default="")
    parser.add_argument("--json", type=Path, default=None)
    args = parser.parse_args()
    print(f"{'shape':<24}" + "".join(f"{policy:>9}" for policy in POLICIES) + f"{'ratio':>8}{'by round':>14}  weights")
    results = {}
    for name, (num_devices, pipelines) in SHAPES.items():
        if args.only not in name:
            continue
        result = results[name] = measure(num_devices, pipelines, args.steps, args.rounds)
        low, high = min(result["ratios"]), max(result["ratios"])
        seconds = "".join(f"{result['makespan_s'][policy]:>9.2f}" for policy in POLICIES)
        same = "equal" if result["same_weights"] else "UNEQUAL"
        print(f"{name:<24}{seconds}{result['ratio']:>8.2f}{f'{low:.2f}..{high:.2f}':>14}  {same}", flush=True)
        if result["ratio"] < 1.0:
            for policy, parts in result["parts"].items():
                print(f"    {policy:<10}" + ", ".join(f"{part} {s:.2f} s" for part, s in parts.items()))
    if args.json is not None:
        args.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    ratios = [result["ratio"] for result in results.values()]
    print(f"the better of both over rlmux: least {min(ratios):.2f}, median {median(ratios):.2f}")


def measure(num_devices: int, pipelines: tuple[Mapping[str, Any], ...], steps: int, rounds: int) -> dict[str, Any]:
    """Medians of each policy, ratios of each round, and parts of `rlmux` and the better of the others."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "shape.yaml"
        file.write_text(yaml.safe_dump(config(num_devices, pipelines, steps)), encoding="utf-8")
        table = compare(file, policies=POLICIES, rounds=rounds, out=Path(folder) / "runs", on_warning=lambda _: None)
        rows = table["policies"]
        makespan_s = {policy: rows[policy]["makespan_s"] for policy in POLICIES}
        better = min(POLICIES[:2], key=makespan_s.__getitem__)
        pairs = zip(rows[better]["makespans_s"], rows["rlmux"]["makespans_s"], strict=True)
        ratios = [better_s / mine_s for better_s, mine_s in pairs]
        runs = Path(folder) / "runs" / ("" if rounds == 1 else str(rounds))
        return {
            "makespan_s": makespan_s,
            "ratio": median(ratios),
            "ratios": ratios,
            "same_weights": all(row["same_weights"] for row in rows.values()),
            "mechanisms": rows["rlmux"]["mechanisms"],
            "parts": {policy: parts(runs / policy) for policy in (better, "rlmux")},
        }


def config(num_devices: int, pipelines: tuple[Mapping[str, Any], ...], steps: int) -> dict[str, Any]:
    rollout = {"workers": num_devices, "max_new_tokens": 40, "slots": 32}
    made = []
    for number, fields in enumerate(pipelines):
        own = {**fields, "rollout": {**rollout, **fields.get("rollout", {})}}
        made.append({"name": f"{fields['task']['name']}-{number}", "seed": number + 1, "steps": steps, **own})
    return {
        "cluster": {"pools": {"rollout": {"devices": num_devices}, "train": {"devices": 1}}},
        "defaults": {"algorithm": {"name": "grpo", "prompts_per_step": 12, "group_size": 8}},
        "pipelines": made,
    }


def parts(run: Path) -> dict[str, float]:
    """Device-seconds of the run by what they were spent on."""
    summary = json.loads((run / "summary.json").read_text(encoding="utf-8"))
    devices = summary["devices"].values()
    return {
        "computing": sum(device["busy_s"] for device in devices),
        "switches and starts": sum(device["switch_s"] for device in devices),
        "control": summary["control_overhead"] * summary["makespan_s"] * len(devices),
        "waiting": sum(device["bubble_s"] + device["idle_s"] for device in devices),
    }


if __name__ == "__main__":
    main()
