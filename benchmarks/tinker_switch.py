"""What a switch of a Tinker tenant moves: an adapter of `parameters: lora` against a whole model of `parameters: full`.

    python benchmarks/tinker_switch.py [--sizes 1M,5M,20M] [--rank 32] [--serve [--steps 6]]

switch      megabytes that leave a device with a tenant's state, and seconds of leaving and coming back, best of five:
            of its train worker after an update (weights, moments), and of its rollout worker (weights, tables)
snapshot    megabytes of `save_weights_for_sampler`, which each step of a client's loop writes and its sampler reads
checkpoint  megabytes of the folder that each update writes

Engines are those of a server's workers, on one core. With --serve, a server whose one device both phases share, and two
loops of the SDK on it, of rank 8 (tests/tinker/loop.py, in this Python): orders, median of their switches, and seconds
until both loops are done.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml

from rlmux.core.events import StageFinished, StagePaused
from rlmux.engines.datum_train import DatumTrainEngine
from rlmux.engines.rollout import SlotRolloutEngine
from rlmux.report.log import LogReader
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
LOOP = Path(__file__).parent.parent / "tests" / "tinker" / "loop.py"
MEMORY_GB = {"1M": 0.06, "5M": 0.25, "20M": 0.8}
"""Memory of the device that loops share: room for one state at a time."""
LOOP_RANK = 8
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


def serve(size: str, rank: int | None, steps: int, folder: Path) -> Mapping[str, float]:
    """Two loops on one device; see the module."""
    model = SIZES[size]
    keys = {"hidden_size": model.hidden_size, "layers": model.num_layers, "heads": model.num_heads}
    keys |= {"kv_heads": model.num_kv_heads, "intermediate_size": model.intermediate_size}
    served = {"model": keys, "max_prompt_tokens": 64, "max_new_tokens": 64, "slots": 16}
    file = {
        "cluster": {"pools": {"both": {"phase": "both", "devices": 1, "device_memory_gb": MEMORY_GB[size]}}},
        "serve": {"models": {"rlmux/tiny": served}, "parameters": "full" if rank is None else "lora"},
    }
    (folder / "serve.yaml").write_text(yaml.safe_dump(file))
    out = folder / "out"
    words = ["serve", str(folder / "serve.yaml"), "--listen", "127.0.0.1:0", "--out", str(out)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TINKER_API_KEY": "tml-bench", "TINKER_TELEMETRY": "0"}
    server = subprocess.Popen([sys.executable, "-m", "rlmux", *words], stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    url = server.stdout.readline().strip().partition("=")[2]
    environment |= {"TINKER_BASE_URL": url, "HF_HUB_OFFLINE": "1"}
    began = time.perf_counter()
    loops = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", str(LOOP), "rlmux/tiny", str(seed), str(steps)],
            env=environment, cwd=out / "tokenizers", stdout=subprocess.DEVNULL,
        )
        for seed in (1, 2)
    ]  # fmt: skip
    assert [one.wait() for one in loops] == [0, 0]
    seconds = time.perf_counter() - began
    server.send_signal(signal.SIGINT)
    server.wait()
    with LogReader(out) as log:
        ended = [entry.value for entry in log.entries() if isinstance(entry.value, StageFinished | StagePaused)]
    switch_s = statistics.median(one.switch_s for one in ended)
    return {"orders": len(ended), "switch ms": 1e3 * switch_s, "loops s": seconds}


def size_of(path: Path) -> float:
    files = [path] if path.is_file() else list(path.rglob("*"))
    return sum(file.stat().st_size for file in files if file.is_file()) / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default="1M,5M,20M")
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument("--serve", action="store_true")
    parser.add_argument("--steps", type=int, default=6)
    given = parser.parse_args()
    torch.set_num_threads(1)
    for size in given.sizes.split(","):
        for rank in (None, given.rank):
            folder = Path(tempfile.mkdtemp(prefix="rlmux-switch-", dir="/dev/shm"))
            try:
                found = serve(size, rank, given.steps, folder) if given.serve else measure(size, rank, folder)
            finally:
                shutil.rmtree(folder)
            kind = "full" if rank is None else f"lora {LOOP_RANK if given.serve else rank}"
            print(f"{size:4} {kind:8}", *(f"{name} {value:8.2f}" for name, value in found.items()))


if __name__ == "__main__":
    main()
