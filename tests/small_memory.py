"""The memory of the small server's members: a process for each GPU of a gang, with maps in place of weights and KV.

server ──"drop weights"──▶ member ──"done"──▶ server        one ends ──▶ all end
"""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
import threading

PART_BYTES = {"weights": 12_000_000, "kv_cache": 12_000_000}
"""Memory of each member that stands for weights and KV cache on a device: given back asleep, by vLLM's tags."""
DEAD = "EngineCore encountered an issue. See stack trace (above) for the root cause"


class Memory:
    """The parts of one member that are on its device: pages that are really there, and really gone when closed."""

    def __init__(self) -> None:
        self.parts = {part: new_ballast(size) for part, size in PART_BYTES.items()}

    def drop(self, part: str) -> None:
        self.parts[part].close()

    def take(self, part: str) -> None:
        if self.parts[part].closed:
            self.parts[part] = new_ballast(PART_BYTES[part])


def new_ballast(size: int) -> mmap.mmap:
    """An allocator might keep what is freed; a map is gone when it is closed."""
    ballast = mmap.mmap(-1, size)
    ballast.write(b"1" * size)
    return ballast


class Members:
    """The processes of a gang: this one, and idle ones that only hold memory. When one dies, the server ends."""

    def __init__(self, num: int) -> None:
        self.own = Memory()
        self.lock = threading.Lock()
        command = [sys.executable, __file__]
        self.others = [
            subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(num - 1)
        ]
        for number, process in enumerate(self.others, 1):
            assert process.stdout is not None
            process.stdout.readline()
            threading.Thread(target=self.watch, args=(number, process), daemon=True).start()

    def watch(self, number: int, process: subprocess.Popen[str]) -> None:
        code = process.wait()
        end_process(f"Worker proc VllmWorker-{number} died unexpectedly (exit code {code}), shutting down executor.")

    def apply(self, verb: str, part: str) -> None:
        """`drop` or `take` a part of every member's memory."""
        with self.lock:
            getattr(self.own, verb)(part)
            for process in self.others:
                assert process.stdin is not None
                assert process.stdout is not None
                process.stdin.write(f"{verb} {part}\n")
                process.stdin.flush()
                process.stdout.readline()


def be_member() -> None:
    """A process of `Members`: it ends with the server, whose pipe it reads."""
    memory = Memory()
    print("ready", flush=True)
    for line in sys.stdin:
        verb, part = line.split()
        getattr(memory, verb)(part)
        print("done", flush=True)


def end_process(reason: str) -> None:
    """The end of a server whose engine is gone."""
    print(f"ERROR {reason}\nEngineDeadError: {DEAD}.", file=sys.stderr, flush=True)
    os._exit(1)


if __name__ == "__main__":
    be_member()
