"""A server of others as rollout engine: seconds to its first token, of a version and of a switch, and bytes on disk.

    python benchmarks/server_engine.py --python .venv-vllm/bin/python [--engine vllm] [--size 0.6B] [--versions 3]
                                       [--tensor-parallel 2] [--adapter-rank 8]

The model is a random Qwen3 of the size. Each version is written to shared memory as a trainer publishes it, in
bfloat16, and loaded; the gap is between the server's log-probs and those of a forward pass with the version's file. The
switch is offload and load, where sleep frees memory. `restart` is what a version costs with a server that takes none.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import psutil
import torch

from rlmux.engines.adapters.lora import inject_adapter, trained_parameters
from rlmux.engines.model.model_io import build_model
from rlmux.engines.model.weights import publish_tensors
from rlmux.engines.servers.factory import make_server_engine
from rlmux.engines.servers.server_engine import ServerRolloutEngine
from rlmux.rl.config import AdapterConfig, EngineConfig, ModelConfig, RolloutConfig, TrainingConfig

SIZES = {
    "tiny": (512, ModelConfig(hidden_size=128, intermediate_size=256)),
    "0.6B": (
        151_936,
        ModelConfig(hidden_size=1024, num_layers=28, num_heads=16, num_kv_heads=8, intermediate_size=3072),
    ),
    "8B": (
        151_936,
        ModelConfig(hidden_size=4096, num_layers=36, num_heads=32, num_kv_heads=8, intermediate_size=12288),
    ),
}
PROMPT = (1, 2, 3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=["vllm", "sglang"], default="vllm")
    parser.add_argument("--python", type=Path, required=True, help="of the engine's environment")
    parser.add_argument("--size", choices=SIZES, default="0.6B")
    parser.add_argument("--versions", type=int, default=3)
    parser.add_argument("--tensor-parallel", type=int, default=1)
    parser.add_argument("--adapter-rank", type=int, default=0)
    args = parser.parse_args()
    vocab_size, model = SIZES[args.size]
    config = TrainingConfig(
        name="benchmark",
        model=model,
        adapter=AdapterConfig(rank=args.adapter_rank, alpha=2.0 * args.adapter_rank) if args.adapter_rank else None,
        rollout=RolloutConfig(
            num_slots=8,
            max_new_tokens=8,
            max_prompt_tokens=64,
            dtype="bfloat16",
            tensor_parallel=args.tensor_parallel,
            engine=EngineConfig(name=args.engine, python=str(args.python.absolute())),
        ),
    )
    device = "cuda" if torch.cuda.is_available() else "cpu"
    for is_first in (True, False):
        began, on_disk = time.perf_counter(), _written()
        engine = make_server_engine(
            config, vocab_size=vocab_size, is_single_turn=True, device=device, is_remeasured=is_first
        )
        try:
            engine.sample(PROMPT, seed=1, max_tokens=2)
            what = "measured for the first time" if is_first else "recalled"
            _row(f"to the first token, {what}", time.perf_counter() - began, _written() - on_disk)
            if is_first:
                print(
                    f"{args.engine} {engine.server_version}, {args.size}, {device}: {engine.capabilities}", flush=True
                )
            else:
                _measure(engine, config, vocab_size, args.versions)
        finally:
            engine.close()


def _measure(engine: ServerRolloutEngine, config: TrainingConfig, vocab_size: int, num_versions: int) -> None:
    model = build_model(config.model, vocab_size, 0)
    if config.adapter is not None:
        inject_adapter(model, config.adapter, 0)
    trained = trained_parameters(model)
    generator = torch.Generator().manual_seed(2)
    root = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(dir=root) as folder:
        for version in range(1, num_versions + 1):
            with torch.no_grad():
                for parameter in trained.values():
                    parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.002)
            path = Path(folder, f"{version}.safetensors")
            dtype = torch.float32 if config.adapter else torch.bfloat16
            tensors = {name: parameter.detach().to(dtype) for name, parameter in trained.items()}
            publish_tensors(path, tensors, {"version": str(version)})
            began, on_disk = time.perf_counter(), _written()
            engine.load_weights(path, version)
            seconds, num_bytes = time.perf_counter() - began, _written() - on_disk
            piece = engine.sample(PROMPT, seed=version, max_tokens=8)
            gap = (engine.folder.logprobs(PROMPT, piece.tokens) - torch.tensor(piece.logprobs)).abs().max()
            _row(f"version {version}", seconds, num_bytes, f"log-probs {float(gap):.3g} nats off")
        began = time.perf_counter()
        engine.offload()
        left_s, began = time.perf_counter() - began, time.perf_counter()
        engine.load()
        _row("a switch: to leave", left_s, 0)
        _row("a switch: to come back", time.perf_counter() - began, 0)
        if config.adapter is None:
            began = time.perf_counter()
            engine.restart()
            engine.sample(PROMPT, seed=1, max_tokens=2)
            _row("restart", time.perf_counter() - began, 0)


def _row(what: str, seconds: float, num_bytes: float, more: str = "") -> None:
    print(f"{what:45} {seconds:8.2f} s  {num_bytes / 1e6:10.1f} MB on disk  {more}".rstrip(), flush=True)


def _written() -> float:
    """Bytes that this machine has written to its disks."""
    counters = psutil.disk_io_counters()
    return float(counters.write_bytes) if counters is not None else 0.0


if __name__ == "__main__":
    main()
