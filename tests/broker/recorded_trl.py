"""examples/own_trl.py, which measures itself what it has in memory: recorded_trl.py RECORD [words of the example].

Every tensor that the garbage collector knows counts, once for each storage, and without regard to what the adapter
thinks that there is. Bytes that the hooks keep on the host are told from others by their type, which nothing else has.
It prints what its model takes, by the shapes of its tensors.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent.parent / "examples"))
import own_trl

MIN_BYTES = 1024
"""Storages below this are counters, lengths and the like."""


def resident_bytes() -> int:
    sizes = {}
    for one in gc.get_objects():
        if isinstance(one, torch.Tensor) and one.dtype != torch.uint8 and one.dtype.is_floating_point:
            storage = one.untyped_storage()
            sizes[storage._cdata] = storage.nbytes()
    return sum(size for size in sizes.values() if size >= MIN_BYTES)


def num_bytes(tensors) -> int:
    return sum(one.numel() * one.element_size() for one in tensors)


def main(record: Path) -> None:
    from rlmux import share

    name = os.environ.get("RLMUX_JOB", "alone")

    def write(what: str) -> None:
        with record.open("a", encoding="utf-8") as lines:
            lines.write(json.dumps([time.monotonic(), name, what, resident_bytes()]) + "\n")

    def told(original, what_before: str, what_after: str):
        def hook(*args, **kwargs):
            write(what_before)
            answer = original(*args, **kwargs)
            write(what_after)
            return answer

        return hook

    trl = share.trl

    def recording(trainer, job):
        parameters, buffers = num_bytes(trainer.model.parameters()), num_bytes(trainer.model.buffers())
        print(f"parameters {parameters}, buffers {buffers}")
        trainer._generate = told(trainer._generate, "generates", "has generated")
        trainer.training_step = told(trainer.training_step, "steps", "has stepped")
        trainer._calculate_rewards = told(trainer._calculate_rewards, "scores", "has scored")
        made = trl(trainer, job)
        hooks = job._hooks.get("gpu0")
        if hooks is not None:
            on_device = told(hooks.onload, "returns", "has returned")
            job._hooks["gpu0"] = hooks._replace(offload=told(hooks.offload, "leaves", "has left"), onload=on_device)
        return made

    share.trl = recording
    own_trl.main()


if __name__ == "__main__":
    path = Path(sys.argv.pop(1))
    main(path)
