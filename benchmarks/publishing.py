"""Seconds in which a version of weights reaches a rollout worker of the same machine, by size, checksums apart.

    python benchmarks/publishing.py [--sizes 20MB,1GB] [--repeats 5] [--device cpu|cuda] [--json]

    write   the trainer's checksum and its file in shared memory        sizes: 20MB, 1GB, 4GB; on a GPU also 0.6B, 8B,
    read    the rollout worker's checksum, and its fused weights        the shapes of Qwen3, bfloat16
    first   the same of the first version, whose memory is new: later ones take that of versions nobody needs
    copy    as many bytes copied once between memory that is mapped already: no version is faster

Each in turn with a checksum over all tensors (`whole`), and over the version's sample, which versions above 64 MB have
unless `train.whole_checksums` asks for more.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Mapping
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import torch

from rlmux.engines.model.decoder_shape import DecoderShape
from rlmux.engines.model.transformer import DecoderWeights
from rlmux.engines.model.weight_checksum import CHECKSUM, WHOLE, Sample, weights_checksum
from rlmux.engines.model.weight_layout import file_sizes
from rlmux.engines.model.weights import publish_tensors, read_weights
from rlmux.engines.spare_files import retire

_QWEN3 = DecoderShape(
    vocab_size=151_936,
    hidden_size=1024,
    num_layers=28,
    num_kv_heads=8,
    group_size=2,
    head_dim=128,
    intermediate_size=3072,
    has_head_norms=True,
    has_tied_embeddings=True,
    norm_epsilon=1e-6,
)
"""Qwen3-0.6B."""
_8B = {
    "hidden_size": 4096,
    "intermediate_size": 12_288,
    "num_layers": 36,
    "group_size": 4,
    "has_tied_embeddings": False,
}
_LARGE = replace(_QWEN3, hidden_size=4096, intermediate_size=12_288, num_layers=36, group_size=4)
NUM_NEEDED = 2
"""Versions in memory beside the one that is written."""
SHAPES = {
    "20MB": (torch.float32, replace(_QWEN3, vocab_size=512, hidden_size=256, intermediate_size=768, num_layers=2)),
    "1GB": (torch.float32, replace(_QWEN3, vocab_size=8192, num_layers=16)),
    "4GB": (torch.float32, replace(_QWEN3, vocab_size=8192, num_layers=65)),
    "0.6B": (torch.bfloat16, _QWEN3),
    "8B": (torch.bfloat16, replace(_LARGE, has_tied_embeddings=False)),
}
"""Dtype of the file, and the model's sizes."""


def publishing(size: str, device: str, num_repeats: int) -> dict[str, Any]:
    """{"bytes", "whole": {"write_s", "read_s"}, "sample": {...}}, medians."""
    dtype, shape = SHAPES[size]
    generator = torch.Generator(device).manual_seed(0)
    tensors = {
        name: torch.randn(each, generator=generator, device=device).to(dtype)
        for name, each in file_sizes(shape).items()
    }
    weights = DecoderWeights(shape, torch.device(device), dtype)
    figures: dict[str, Any] = {"bytes": sum(each.numel() * each.element_size() for each in tensors.values())}
    figures["copy_s"] = _copy_seconds(tensors, device)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        paths = (Path(folder) / f"{number}.safetensors" for number in count())
        written: list[Path] = []
        taken: dict[str, list[tuple[float, float]]] = {"whole": [], "sample": []}
        for turn in range(num_repeats):
            for kind, seconds in taken.items():
                version = turn + 2
                sample = WHOLE if kind == "whole" else Sample(every=16, first=version % 16)
                if len(written) == NUM_NEEDED:
                    retire(written.pop(0))
                written.append(path := next(paths))
                begin_s = _now(device)
                checksum = weights_checksum(tensors, sample)
                publish_tensors(path, tensors, {"version": str(version), CHECKSUM: checksum})
                written_s = _now(device)
                weights.refresh(read_weights(path, version))
                seconds.append((written_s - begin_s, _now(device) - written_s))
    figures["first"] = dict(zip(("write_s", "read_s"), taken["whole"][0], strict=True))
    for kind, seconds in taken.items():
        later = seconds[NUM_NEEDED:] or seconds  # those that took memory over
        write_s, read_s = (statistics.median(each) for each in zip(*later, strict=True))
        figures[kind] = {"write_s": write_s, "read_s": read_s}
    return figures


def _copy_seconds(tensors: Mapping[str, torch.Tensor], device: str) -> float:
    largest = max(tensors.values(), key=torch.Tensor.numel)
    target = torch.zeros_like(largest)
    begin_s = _now(device)
    for _ in range(10):
        target.copy_(largest)
    num_bytes = sum(each.numel() * each.element_size() for each in tensors.values())
    return (_now(device) - begin_s) / 10 / (largest.numel() * largest.element_size()) * num_bytes


def _now(device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default="20MB,1GB")
    parser.add_argument("--repeats", type=int, default=6)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    found = {size: publishing(size, asked.device, asked.repeats) for size in asked.sizes.split(",")}
    if asked.json:
        print(json.dumps(found, indent=1))
        return
    print(f"{'size':6} {'MB':>8} {'checksum':>9} {'write s':>8} {'read s':>8}")
    for size, figures in found.items():
        for kind in ("first", "whole", "sample"):
            print(
                f"{size:6} {figures['bytes'] / 1e6:8,.0f} {kind:>9} {figures[kind]['write_s']:8.3f} "
                f"{figures[kind]['read_s']:8.3f}"
            )
        print(f"{size:6} {figures['bytes'] / 1e6:8,.0f} {'copy':>9} {figures['copy_s']:8.3f}")


if __name__ == "__main__":
    main()
