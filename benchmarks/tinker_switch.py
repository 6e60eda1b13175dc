"""What a switch of a Tinker tenant moves: an adapter of `parameters: lora` against a whole model of `parameters: full`.

    python benchmarks/tinker_switch.py [--sizes 1M,5M,20M] [--rank 32]

switch      megabytes that leave a device with a tenant's state, and seconds of leaving and coming back, best of five:
            of its train worker after an update (weights, moments), and of its rollout worker (weights, tables)
snapshot    megabytes of `save_weights_for_sampler`, which each step of a client's loop writes and its sampler reads
checkpoint  megabytes of the folder that each update writes

Engines are those of a server's workers, on one core.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rlmux.engines.datum_train import DatumTrainEngine
from rlmux.engines.rollout import SlotRolloutEngine
from rlmux.rl.arriving import Datum, ForwardBackward, OptimizerStep
from rlmux.rl.config import ModelConfig
from rlmux.rl.vocabulary import load_vocabulary
from rlmux.service.tinker.bodies import LoraConfig
from rlmux.service.tinker.served import ServedModel

SIZES = {
    "1M": ModelConfig(hidden_size=128, num_layers=4, num_heads=4, num_kv_heads=2, intermediate_size=384),
    "5M": ModelConfig(hidden_size=256, num_layers=6, num_heads=4, num_kv_heads=2, intermediate_size=768),
    "20M": ModelConfig(hidden_size=512, num_layers=6, num_heads=8, num_kv_heads=4, intermediate_size=1536),
}
STEP = OptimizerStep(learning_rate=1e-3, betas=(0.9, 0.95), epsilon=1e-12, weight_decay=0.0, grad_clip=0.0)


def measure(size: str, rank: int | None, folder: Path) -> Mapping[str, float]:
    """`rank` None: the whole model."""
    model = SIZES[size]
    vocabulary = load_vocabulary(model)
    served = ServedModel(
        name="rlmux/tiny", model=model, vocab_size=vocabulary.vocab_size, stop_tokens=(1,), max_prompt_tokens=64,
        max_new_tokens=64, num_slots=16, parameters="full" if rank is None else "lora",
    )  # fmt: skip
    config = served.training("m", served.adapter(None if rank is None else LoraConfig(rank=rank)))
    trainer = DatumTrainEngine(config, bases=folder / "bases")
    tokens = np.arange(2, 42, dtype=np.int64)
    datum = Datum(tokens=tokens[:-1], inputs={"target_tokens": tokens[1:]})
    for _ in trainer.forward_backward(
        ForwardBackward(datums=[datum], loss="cross_entropy", config={}, is_forward_only=False)
    ):
        pass
    trainer.optimizer_step(STEP)
    snapshot = folder / "snapshot.safetensors"
    trainer.save_weights(snapshot)
    trainer.save_state(folder / "state")
    sampler = SlotRolloutEngine(
        config.model, config.rollout, vocab_size=vocabulary.vocab_size, seed=config.model_seed,
        adapter=config.adapter, bases=folder / "bases",
    )  # fmt: skip
    sampler.load_weights(snapshot, 1)
    found = {"snapshot MB": size_of(snapshot), "checkpoint MB": size_of(folder / "state")}
    for name, engine in (("train", trainer), ("rollout", sampler)):
        found[f"{name} MB"], found[f"{name} ms"] = switch(engine)
    return found


def switch(engine: Any) -> tuple[float, float]:
    """(megabytes that leave with a state, milliseconds of leaving to host memory and coming back)"""
    engine.offload()
    kept = getattr(engine, "_state", engine)._offloaded
    moved = sum(tensor.nbytes for tensor in kept) / 1e6
    engine.load()
    seconds = []
    for _ in range(5):
        began = time.perf_counter()
        engine.offload()
        engine.load()
        seconds.append(time.perf_counter() - began)
    return moved, 1e3 * min(seconds)


def size_of(path: Path) -> float:
    files = [path] if path.is_file() else list(path.rglob("*"))
    return sum(file.stat().st_size for file in files if file.is_file()) / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default="1M,5M,20M")
    parser.add_argument("--rank", type=int, default=32)
    given = parser.parse_args()
    torch.set_num_threads(1)
    for size in given.sizes.split(","):
        for rank in (None, given.rank):
            folder = Path(tempfile.mkdtemp(prefix="rlmux-switch-", dir="/dev/shm"))
            try:
                found = measure(size, rank, folder)
            finally:
                shutil.rmtree(folder)
            kind = "full" if rank is None else f"lora {rank}"
            print(f"{size:4} {kind:8}", *(f"{name} {value:8.2f}" for name, value in found.items()))


if __name__ == "__main__":
    main()
