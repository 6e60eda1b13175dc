"""One rank of a program whose ranks add up by torch.distributed: gang_program.py NAME STEPS RECORD STORE GO.

It begins when the file GO is there. Every step has a collective in its rollout and one in its training, and gives way
between them. A rank that were granted without the others would wait in a collective for ever, with all others kept out.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

SIZE = 250


def weights_alone(steps: int, world: int) -> list[float]:
    """What every rank ends with."""
    weights = [float(one) for one in range(SIZE)]
    for number in range(1, steps + 1):
        answers = world * weights[-1]
        added = sum(rank + number for rank in range(world))
        weights = [one / 2 + added + answers / 1024 for one in weights]
    return weights


def main(name: str, steps: int, record: Path, store: str, go: Path) -> None:
    import torch
    from torch import distributed

    sys.path.insert(0, os.environ["SHARE_FOLDER"])
    import share
    from share_adapters import torch_offload

    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    model = torch.nn.Module()
    model.weights = torch.nn.Parameter(torch.arange(float(SIZE)))

    def write(what: str) -> None:
        with record.open("a", encoding="utf-8") as lines:
            lines.write(json.dumps([time.monotonic(), f"{name}.{rank}@gpu0", what, 4 * SIZE]) + "\n")

    def add_up(value: torch.Tensor) -> torch.Tensor:
        distributed.all_reduce(value)
        return value

    job = share.join(name, {"rollout": "gpu0", "train": "gpu0"})
    job.on_leave("gpu0", torch_offload(model))
    while not go.exists():
        time.sleep(0.01)
    with torch.no_grad():
        for number in range(1, steps + 1):
            with job.phase("rollout"):
                write("begins")
                answers = add_up(model.weights[-1:].clone())
                write("ends")
                with job.phase(None):
                    pass
                write("begins")
                added = add_up(torch.tensor([float(rank + number)]))
                model.weights.mul_(0.5).add_(added).add_(answers / 1024)
                write("ends")
        with job.phase("train"):
            print(json.dumps({"weights": model.weights.tolist(), "is_shared": job.is_shared}), flush=True)
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4], Path(sys.argv[5]))
