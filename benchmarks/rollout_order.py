"""How much sooner a rollout ends when waiting trajectories get their slots in another order: recorded lengths, counted.

    RLMUX_DATA=<folder> python benchmarks/rollout_order.py [--slots 64,128,...] [--steps N] [--json]

A decode step gives every seated trajectory a token, and a freed slot is filled at once, by the engine's own queue.

    prompts seen for the first time   recorded steps of 256 prompts of 4 answers, on so many slots
    prompts that come again           52 prompts of several answers: the first of each is what an earlier epoch had

`known`: every length is known beforehand, and no order that can be had is much better. Numbers are decode steps of
`given` over those of the order, means over the steps or over ten orders of the prompts; nothing is timed.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import heapq
import json
import os
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from rlmux.engines.recorded import RecordedTrajectory
from rlmux.engines.waiting_queue import WaitingQueue
from rlmux.rl.types import TrajectoryId, TrajectoryRequest

PROMPTS, GROUP = 256, 4
ORDERS = ("longest", "known")
ALL = ("given", *ORDERS)
FEW_SLOTS = (8, 16, 32)


def decode_steps(groups: Sequence[Sequence[int]], num_slots: int, order: str, expected: Sequence[int] = ()) -> int:
    """Decode steps of one rollout. `groups`: lengths in tokens of each prompt's answers. `expected`: of each prompt."""
    length_of = {
        TrajectoryId(1, prompt, sample): length
        for prompt, group in enumerate(groups)
        for sample, length in enumerate(group)
    }
    ids = sorted(length_of, key=lambda id: -length_of[id]) if order == "known" else list(length_of)
    queue: WaitingQueue[RecordedTrajectory] = WaitingQueue("longest" if order == "longest" else "given")
    for id in ids:
        request = TrajectoryRequest(
            id=id,
            prompt_tokens=(0,),
            max_new_tokens=1,
            stop_tokens=(),
            seed=0,
            expected_tokens=expected[id.prompt] if expected else 0,
        )
        queue.append(RecordedTrajectory(request=request))
    now = 0
    seated: list[tuple[int, TrajectoryId]] = []
    while queue or seated:
        while queue and len(seated) < num_slots:
            id = queue.pop().request.id
            heapq.heappush(seated, (now + length_of[id], id))
        now, id = heapq.heappop(seated)
        queue.note_end(id, length_of[id])
    return now


def recorded_steps(path: Path, most: int) -> list[list[list[int]]]:
    """Lengths of the first whole steps of a run, by prompt; none of one whose answers have several turns."""
    with gzip.open(path, "rt") as file:
        rows = list(csv.DictReader(file))
    if len({row["turn"] for row in rows}) > 1:
        return []
    lengths = [int(row["length"]) for row in rows]
    groups = [lengths[start : start + GROUP] for start in range(0, len(lengths), GROUP)]
    return [groups[start : start + PROMPTS] for start in range(0, len(groups) - PROMPTS + 1, PROMPTS)][:most]


def recorded_groups(path: Path) -> dict[str, list[list[int]]]:
    """Lengths by model and prompt, of models with three answers or more to most prompts."""
    answers: dict[str, dict[str, list[int]]] = {}
    with gzip.open(path, "rt") as file:
        for row in csv.DictReader(file):
            answers.setdefault(row["model"], {}).setdefault(row["prompt_id"], []).append(int(row["total_tokens"]))
    groups = {model: [one for one in of.values() if len(one) >= 3] for model, of in answers.items()}
    return {model: of for model, of in groups.items() if len(of) >= 30}


def first_time(folder: Path, slots: Sequence[int], most: int) -> dict[str, dict[str, dict[str, float]]]:
    """Gains of prompts that are new, by run and slots."""
    table = {}
    for path in sorted(folder.glob("*.lengths.csv.gz")):
        steps = recorded_steps(path, most)
        if steps:
            table[path.name.removesuffix(".lengths.csv.gz")] = {
                str(num): gains([[decode_steps(step, num, order) for order in ALL] for step in steps]) for num in slots
            }
    return table


def come_again(path: Path) -> dict[str, dict[str, dict[str, float]]]:
    """Gains of prompts that were asked before, by model and slots."""
    table = {}
    for model, groups in recorded_groups(path).items():
        draw = random.Random(model)
        played: dict[int, list[list[int]]] = {num: [] for num in FEW_SLOTS}
        for _ in range(10):
            draw.shuffle(groups)
            earlier, now = [group[0] for group in groups], [group[1:] for group in groups]
            for num, rounds in played.items():
                rounds.append([decode_steps(now, num, order, earlier) for order in ALL])
        table[model] = {str(num): gains(rounds) for num, rounds in played.items()}
    return table


def gains(rounds: Sequence[Sequence[int]]) -> dict[str, float]:
    """Mean decode steps of `given` over those of the others."""
    given, *others = (fmean(column) for column in zip(*rounds, strict=True))
    return {order: round(given / steps, 3) for order, steps in zip(ORDERS, others, strict=True)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--slots", default="64,128,256,512", help="numbers of slots of new prompts, as 64,128")
    parser.add_argument("--steps", type=int, default=3, help="recorded steps of each run at most")
    parser.add_argument("--json", action="store_true", help="print JSON")
    given = parser.parse_args()
    folder = Path(os.environ.get("RLMUX_DATA", ""))
    groups = folder / "rollouts" / "reasoning_groups_k3.csv.gz"
    if not (folder / "rl_runs").is_dir() or not groups.is_file():
        sys.exit(f"RLMUX_DATA={str(folder)!r}: accepted: a folder with rl_runs/ and rollouts/{groups.name}")
    slots = [int(word) for word in given.slots.split(",")]
    tables = {
        "prompts seen for the first time": first_time(folder / "rl_runs", slots, given.steps),
        "prompts that come again": come_again(groups),
    }
    if given.json:
        print(json.dumps(tables))
        return
    for title, table in tables.items():
        numbers = next(iter(table.values()), {})
        print(f"{title:44}" + "".join(f"{num:>8} slots" for num in numbers) + "   longest (known)")
        for name, row in table.items():
            cells = (f"{gain['longest']:.2f} ({gain['known']:.2f})" for gain in row.values())
            print(f"{name[:43]:44}" + "".join(f"{cell:>14}" for cell in cells))


if __name__ == "__main__":
    main()
