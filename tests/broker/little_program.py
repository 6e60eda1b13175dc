"""A program as others write it: it knows nothing of rlmux but `share.py`, and trains a few bytes on its "device".

    little_program.py NAME STEPS RECORD [hook=raise|hang|free_nothing] [pools=JSON] [also] [need=BYTES] [sleep=SECONDS]
                              [start=FILE] [between=FILE] [end=FILE]   it begins, goes on, ends once FILE is there
                              [safe]                                   it holds its pool, and gives way at safe points
                              [worker]                                 a process of its own stays on the pool after it

Its weights are bytes that a step changes as a function of all of them, so that a lost or doubled step shows. Whenever
they come to a device or leave it, and around each computation, RECORD gets (monotonic time, NAME@POOL, what, bytes).
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

SIZE = 1000


class LittleTrainer:
    """Weights on a "device", which is a place in this process that may be empty."""

    def __init__(self, name: str, record: Path, hook: str) -> None:
        self.name, self.record, self.hook = name, record, hook
        self.on_device: bytearray | None = bytearray(hashlib.sha256(name.encode()).digest() * 32)[:SIZE]
        self.on_host: bytearray | None = None
        self.is_here = False

    def write(self, what: str) -> None:
        with self.record.open("a", encoding="utf-8") as lines:
            resident = len(self.on_device) if self.on_device is not None and self.is_here else 0
            lines.write(json.dumps([time.monotonic(), self.name, what, resident]) + "\n")

    def arrive(self) -> None:
        """Its first permit: the weights are there from now on."""
        self.is_here = True
        self.write("loads")

    def offload(self) -> int:
        if self.hook == "raise":
            raise RuntimeError("the device is lost")
        if self.hook == "hang":
            self.write("hangs")
            time.sleep(3600)
        if self.hook == "free_nothing":
            return 0
        assert self.on_device is not None
        self.on_host, self.on_device = self.on_device, None
        self.write("leaves")
        return SIZE

    def onload(self) -> None:
        assert self.on_device is None
        self.on_device, self.on_host = self.on_host, None
        self.write("loads")

    def resident_bytes(self) -> int:
        return 0 if self.on_device is None else SIZE

    def step(self, number: int) -> None:
        assert self.on_device is not None, "computing with weights that are gone"
        digest = hashlib.sha256(self.on_device + bytes([number % 256])).digest()
        self.on_device[:] = (digest * 32)[:SIZE]

    def sha256(self) -> str:
        weights = self.on_device if self.on_device is not None else self.on_host
        assert weights is not None
        return hashlib.sha256(weights).hexdigest()


def main(name: str, steps: int, record: Path, **options: str) -> None:
    sys.path.insert(0, os.environ.get("SHARE_FOLDER", ""))
    import share

    sleep_s = float(options.get("sleep", 0.002))
    pools = json.loads(options.get("pools", '{"rollout": "gpu0", "train": "gpu0"}'))
    need = {pool: int(options["need"]) for pool in set(pools.values())} if "need" in options else None
    trainers = {pool: LittleTrainer(f"{name}@{pool}", record, options.get("hook", "")) for pool in pools.values()}
    job = share.join(name, pools, need_bytes=need)
    for pool, trainer in trainers.items():
        job.on_leave(pool, trainer)
    if "worker" in options:
        worker = subprocess.Popen(["sleep", "3600"], start_new_session=True)
        job.watch([(socket.gethostname(), worker.pid)])
    wait_for(options.get("start"))
    for number in range(1, steps + 1) if "safe" not in options else ():
        with job.phase("rollout", units=8, step=number):
            compute([trainers[pools["rollout"]]], number, sleep_s)
            with job.phase(None):
                wait_for(options.get("between"))
                time.sleep(sleep_s)
            also = ["rollout"] if "also" in options else []
            with job.phase("train", also=also):
                used = dict.fromkeys(pools[role] for role in ["train", *also])
                compute([trainers[pool] for pool in used], -number, sleep_s)
    if "safe" in options:
        with job.phase("train"):
            for number in range(1, steps + 1):
                compute([trainers[pools["train"]]], number, sleep_s)
                job.safe_point()
    wait_for(options.get("end"))
    sha256 = [trainers[pool].sha256() for pool in sorted(trainers)]
    for trainer in trainers.values():  # its memory goes with the process, and no broker grants the pool before
        trainer.is_here = False
        trainer.write("is over")
    print(json.dumps({"sha256": sha256, "threads": thread_names(), "is_shared": job.is_shared}), flush=True)


def wait_for(file: str | None) -> None:
    while file is not None and not Path(file).exists():
        time.sleep(0.01)


def compute(trainers: list[LittleTrainer], number: int, sleep_s: float) -> None:
    for trainer in trainers:
        if not trainer.is_here:
            trainer.arrive()
        trainer.write("begins")
    time.sleep(sleep_s)
    for trainer in trainers:
        trainer.step(number)
        trainer.write("ends")


def thread_names() -> list[str]:
    import threading

    return sorted(thread.name for thread in threading.enumerate())


if __name__ == "__main__":
    words = sys.argv[4:]
    main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]), **dict((*word.split("=", 1), "")[:2] for word in words))
