"""How much sooner a rollout ends when waiting trajectories get their slots in another order: recorded lengths, counted.

    RLMUX_DATA=<folder> python benchmarks/rollout_order.py [--slots 64,128,...] [--steps N] [--json]

Each recorded step (256 prompts of 4 answers) is played on S slots: a decode step gives every seated trajectory a token,
a freed slot is filled at once, by the engine's own queue. `longest` knows every length beforehand: no order that can be
had is much better. Numbers are decode steps of `given` over those of the order, means over the steps; nothing is timed.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import heapq
import json
import os
import sys
from pathlib import Path
from statistics import fmean

from rlmux.engines.recorded import RecordedTrajectory
from rlmux.engines.waiting_queue import WaitingQueue
from rlmux.rl.types import TrajectoryId, TrajectoryRequest

PROMPTS, GROUP = 256, 4
ORDERS = ("siblings", "longest")


def decode_steps(lengths: list[int], num_slots: int, order: str) -> int:
    """Decode steps of one recorded step; `lengths` in tokens, the answers of a prompt one after another."""
    ids = [TrajectoryId(1, place // GROUP, place % GROUP) for place in range(len(lengths))]
    length_of = dict(zip(ids, lengths, strict=True))
    if order == "longest":
        ids.sort(key=lambda id: -length_of[id])
    queue: WaitingQueue[RecordedTrajectory] = WaitingQueue("siblings" if order == "siblings" else "given")
    for id in ids:
        queue.append(
            RecordedTrajectory(
                request=TrajectoryRequest(id=id, prompt_tokens=(0,), max_new_tokens=1, stop_tokens=(), seed=0)
            )
        )
    now, seated = 0, []
    while queue or seated:
        while queue and len(seated) < num_slots:
            id = queue.pop().request.id
            heapq.heappush(seated, (now + length_of[id], id))
        now, id = heapq.heappop(seated)
        queue.note_end(id, length_of[id])
    return now


def recorded_steps(path: Path, most: int) -> list[list[int]]:
    """Lengths in tokens of the first whole steps of a run; none of one whose answers have several turns."""
    with gzip.open(path, "rt") as file:
        rows = list(csv.DictReader(file))
    if len({row["turn"] for row in rows}) > 1:
        return []
    lengths = [int(row["length"]) for row in rows]
    each = PROMPTS * GROUP
    return [lengths[start : start + each] for start in range(0, len(lengths) - each + 1, each)][:most]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--slots", default="64,128,256,512", help="numbers of slots, as 64,128")
    parser.add_argument("--steps", type=int, default=3, help="recorded steps of each run at most")
    parser.add_argument("--json", action="store_true", help="print JSON")
    given = parser.parse_args()
    folder = Path(os.environ.get("RLMUX_DATA", "")) / "rl_runs"
    paths = sorted(folder.glob("*.lengths.csv.gz"))
    if not paths:
        sys.exit(f"{folder}: no *.lengths.csv.gz; accepted: RLMUX_DATA=<folder> with rl_runs in it")
    slots = [int(word) for word in given.slots.split(",")]
    table: dict[str, dict[str, dict[str, float]]] = {}
    for path in paths:
        steps = recorded_steps(path, given.steps)
        if not steps:
            continue
        gains = table.setdefault(path.name.removesuffix(".lengths.csv.gz"), {})
        for num in slots:
            base = fmean(decode_steps(step, num, "given") for step in steps)
            gains[str(num)] = {
                order: round(base / fmean(decode_steps(step, num, order) for step in steps), 3) for order in ORDERS
            }
    if given.json:
        print(json.dumps(table))
        return
    print(f"{'recorded run':44}" + "".join(f"{num:>8} slots" for num in slots) + "   siblings (longest)")
    for name, gains in table.items():
        cells = (f"{gain['siblings']:.2f} ({gain['longest']:.2f})" for gain in gains.values())
        print(f"{name[:43]:44}" + "".join(f"{cell:>14}" for cell in cells))


if __name__ == "__main__":
    main()
