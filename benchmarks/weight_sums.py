"""Processor seconds of the sums that prove weights: the checksum of every version, and the SHA-256 of checkpoints.

    python benchmarks/weight_sums.py [--megabytes 100] [--rounds N] [--quick] [--json]

Tensors of a model's sizes: forty matrices and sixty norms. `copy` is what copying them costs, for comparison; `publish`
writes them to a file in shared memory with one of the sums, as a train worker does. One thread; rounds interleave all
rows, medians.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from rlmux.engines.weight_checksum import CHECKSUM, weights_checksum
from rlmux.engines.weights import SHA256, own_copies, weights_sha256, write_tensors

NUM_MATRICES, NUM_NORMS = 40, 60
NORM_ELEMENTS = 64


def tensors_of(num_bytes: int, dtype: torch.dtype) -> dict[str, Tensor]:
    each = num_bytes // NUM_MATRICES // dtype.itemsize
    matrices = {f"matrix.{place}": torch.randn(each).to(dtype) for place in range(NUM_MATRICES)}
    return matrices | {f"norm.{place}": torch.randn(NORM_ELEMENTS).to(dtype) for place in range(NUM_NORMS)}


def publish(path: Path, tensors: dict[str, Tensor], key: str, compute: Callable[[dict[str, Tensor]], str]) -> None:
    write_tensors(path, tensors, {key: compute(tensors)})


def measure(num_bytes: int, num_rounds: int, folder: Path) -> list[dict[str, object]]:
    found = []
    for dtype in (torch.float32, torch.bfloat16):
        tensors, path = tensors_of(num_bytes, dtype), folder / "weights.safetensors"
        work: dict[str, Callable[[], object]] = {
            "copy": partial(own_copies, tensors),
            "checksum": partial(weights_checksum, tensors),
            "SHA-256": partial(weights_sha256, tensors),
            "publish, checksum": partial(publish, path, tensors, CHECKSUM, weights_checksum),
            "publish, SHA-256": partial(publish, path, tensors, SHA256, weights_sha256),
        }
        seconds: dict[str, list[float]] = {name: [] for name in work}
        for _ in range(num_rounds):
            for name, do in work.items():
                begun_s = time.process_time()
                do()
                seconds[name].append(time.process_time() - begun_s)
        for name, its in seconds.items():
            per_100_mb = statistics.median(its) * 1e8 / num_bytes
            found.append({"dtype": str(dtype), "what": name, "cpu_s_per_100_mb": round(per_100_mb, 4)})
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--quick", action="store_true", help="few and small: whether it runs")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    megabytes, rounds = (4, 2) if given.quick else (given.megabytes, given.rounds)
    torch.set_num_threads(1)
    shared_memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=shared_memory if shared_memory.is_dir() else None) as folder:
        rows = measure(megabytes * 10**6, rounds, Path(folder))
    if given.json:
        print(json.dumps(rows, indent=1))
        return
    for row in rows:
        print(f"{row['dtype']:<16}{row['what']:<20}{row['cpu_s_per_100_mb']:>8} s of processor per 100 MB")


if __name__ == "__main__":
    main()
