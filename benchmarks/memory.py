"""What a pipeline's workers really hold at most, beside what is added up before it is placed.

    python benchmarks/memory.py [--shapes weights,logits,...] [--workers rollout] [--json] [--device cuda]
    python benchmarks/memory.py --qwen3      counted, not measured: Qwen3 models on 1, 2, 4 and 8 GPUs

weights       wide layers, short answers            parameters, moments, the tree of gradient sums, the checkpoint
activations   many layers, long answers             what autograd keeps
logits        a checkpoint with a large vocabulary  logits and the embedding's gradients
attention     long answers without flash attention  probabilities of all pairs of tokens
kv            many slots of long answers            the rollout's cache
bfloat16      activations, with train.dtype         half of what training computes with, beside float32 weights
rounded       weights, with rollout.dtype           fused weights and loading in half the bytes
rounded_kv    kv, with rollout.dtype                half the cache
short_kv      kv, with rollout.kv_tokens            a quarter of the cache, and what left it for host memory
folder        logits, with both dtypes              a checkpoint that is fused tensor by tensor
checkpointing activations, recomputed               each layer's input, and one layer
chunks        logits, in chunks of 16 MB            one chunk of logits
experts       a mixture of experts                  all experts' weights, the picked ones' activations
sum           weights, with one gradient sum        train.equal_across_ranks: false
eightbit      weights, with moments of 8 bits       a byte each
adapter       weights, with a LoRA adapter          the frozen base

Each worker is a process of its own, from the fork server, and does what it does in a run: the train worker an SFT
warm-up, two steps whose answers all have the largest length, publishing, and a checkpoint that is still being written
while the next step is trained; the rollout worker two versions, all slots full to the last token. On a CPU the measured
peak is that of the process's resident memory above what it had before the engine was built (VmHWM in
/proc/PID/status); on a GPU it is torch's peak of allocated memory, and CUDA's context is what the driver has given
besides.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from rlmux.core.model import Stage
from rlmux.rl.config import (
    AdapterConfig,
    AlgorithmConfig,
    ModelConfig,
    RolloutConfig,
    SftWarmupConfig,
    TaskConfig,
    TrainConfig,
    TrainingConfig,
)
from rlmux.rl.memory.footprint import footprint_of, has_flash, host_parts
from rlmux.rl.memory.memory_parts import Parts, rollout_parts, total, train_parts
from rlmux.rl.types import TrainingBatch, Trajectory, TrajectoryId, TrajectoryRequest

SHAPES = (
    *("weights", "activations", "logits", "attention", "kv", "bfloat16", "checkpointing", "chunks", "experts"),
    *("rounded", "rounded_kv", "short_kv", "folder", "sum", "eightbit", "adapter"),
)
TRAINED_ALONE = ("sum", "eightbit", "adapter")
"""Shapes whose rollout worker is that of another shape."""
WORKERS = ("train", "rollout")
TOLERANCE = 0.15
LARGE_VOCABULARY = 32_000
_PEAK_HOST_PARTS = ("checkpoint being written",)
"""Of what only host memory holds, what is there at the fullest moment of training: versions in shared memory belong to
no process, and publishing happens while nothing is trained."""


def config_of(name: str, folder: Path) -> TrainingConfig:
    """The pipeline of a shape. `folder` takes the checkpoint of those that have one."""
    model = ModelConfig(hidden_size=256, num_layers=4, num_heads=4, num_kv_heads=2, intermediate_size=512)
    algorithm = AlgorithmConfig(prompts_per_step=2, group_size=8, micro_batch_size=4, kl_coef=0.01)
    rollout = RolloutConfig(max_prompt_tokens=32, max_new_tokens=32, num_slots=32)
    warmup = SftWarmupConfig(num_updates=1, batch_size=4)
    if name in ("weights", "rounded", "sum", "eightbit", "adapter"):
        model = ModelConfig(hidden_size=768, num_layers=4, num_heads=12, num_kv_heads=4, intermediate_size=2304)
    elif name in ("activations", "bfloat16", "checkpointing"):
        model = replace(model, num_layers=8)
        rollout = replace(rollout, max_new_tokens=480)
        algorithm = replace(algorithm, micro_batch_size=4, kl_coef=0.0)
    elif name == "experts":
        moe: dict[str, Any] = {"num_experts": 8, "num_experts_per_token": 2, "moe_intermediate_size": 256}
        model = replace(model, architecture="qwen3_moe", **moe)
        rollout = replace(rollout, max_new_tokens=224)
    elif name in ("logits", "chunks", "folder"):
        model = ModelConfig(path=str(_checkpoint(folder, replace(model, num_layers=2))))
        rollout = replace(rollout, max_new_tokens=24 if name == "folder" else 224)
    elif name == "attention":
        model = replace(model, num_layers=3, num_heads=8, num_kv_heads=2)
        rollout = replace(rollout, max_new_tokens=736)
        algorithm = replace(algorithm, prompts_per_step=1, group_size=4, micro_batch_size=2)
    elif name in ("kv", "short_kv", "rounded_kv"):
        model = replace(model, num_layers=6, num_kv_heads=4)
        rollout = RolloutConfig(max_prompt_tokens=256, max_new_tokens=224, num_slots=64)
        if name == "short_kv":
            rollout = replace(rollout, max_prompt_tokens=32, max_new_tokens=448, kv_tokens=7680)
        elif name == "rounded_kv":  # cores without bfloat16 decode slowly
            rollout = replace(rollout, max_prompt_tokens=448, max_new_tokens=32, num_slots=32)
    train = TrainConfig()
    if name in ("rounded", "rounded_kv", "folder"):
        rollout = replace(rollout, dtype="bfloat16")
    if name in ("bfloat16", "folder"):
        train = TrainConfig(dtype="bfloat16")
    elif name == "checkpointing":
        train = TrainConfig(activation_checkpointing=True)
    elif name == "chunks":
        train = TrainConfig(logits_chunk_mb=16)
    elif name == "sum":
        train = TrainConfig(equal_across_ranks=False)
    elif name == "eightbit":
        train = TrainConfig(optimizer_state="8bit")
    return TrainingConfig(
        name=name,
        train=train,
        adapter=AdapterConfig(rank=16, alpha=32.0) if name == "adapter" else None,
        model=model,
        algorithm=algorithm,
        rollout=rollout,
        sft_warmup=warmup,
        task=TaskConfig(name="sort"),
    )


def _checkpoint(folder: Path, model: ModelConfig) -> Path:
    """A model with a large vocabulary, as a checkpoint. Its tokenizer is never asked."""
    from rlmux.engines.model.model_io import build_model

    path = folder / "large-vocabulary"
    if not path.exists():
        build_model(model, LARGE_VOCABULARY, 0).save_pretrained(path)
    return path


def measure(name: str, *, workers: Sequence[str] = WORKERS, device: str = "cpu") -> list[dict[str, Any]]:
    """The shape's workers: estimated and measured bytes of each."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        config = config_of(name, Path(folder))
        flash = name != "attention" and has_flash(config, is_gpu=device == "cuda")
        for worker in workers:
            if worker == "rollout" and name in TRAINED_ALONE:
                continue
            parts = estimated_parts(config, worker, flash=flash, device=device)
            measured = _in_process(worker, config, flash, device, Path(folder))
            rows.append(
                {
                    "shape": name,
                    "worker": worker,
                    "estimated_bytes": total(parts),
                    "measured_bytes": measured["peak_bytes"],
                    "estimated_over_measured": total(parts) / measured["peak_bytes"],
                    "parts": dict(parts),
                    **{key: value for key, value in measured.items() if key != "peak_bytes"},
                }
            )
    return rows


def estimated_parts(config: TrainingConfig, worker: str, *, flash: bool, device: str) -> Parts:
    """What is counted of what the measured process holds."""
    if worker == "rollout":
        return rollout_parts(config, is_gpu=device == "cuda")
    parts = dict(train_parts(config, has_flash=flash))
    if device == "cpu":
        parts |= {part: size for part, size in host_parts(config).items() if part in _PEAK_HOST_PARTS}
    return parts


def _in_process(worker: str, config: TrainingConfig, flash: bool, device: str, folder: Path) -> Mapping[str, float]:
    context = get_context("forkserver")
    context.set_forkserver_preload(["rlmux.runtime.workers.fork_server_imports"])
    ours, theirs = context.Pipe()
    process = context.Process(target=_measured, args=(theirs, worker, config, flash, device, folder))
    process.start()
    theirs.close()
    try:
        result: Mapping[str, float] = ours.recv()
    except EOFError:
        raise SystemExit(f"the {worker} worker of {config.name} ended without a figure") from None
    finally:
        process.join()
    return result


def _measured(pipe: Any, worker: str, config: TrainingConfig, flash: bool, device: str, folder: Path) -> None:
    import torch

    torch.set_num_threads(1)
    work = _train if worker == "train" else _roll_out
    with _attention(flash):
        small = replace(
            config,
            model=ModelConfig(),
            algorithm=replace(config.algorithm, micro_batch_size=2),
            rollout=replace(config.rollout, max_prompt_tokens=16, max_new_tokens=16, num_slots=4),
        )
        work(small, device, folder)  # libraries take what they need once
        watch = Watch(device)
        work(config, device, folder)
        pipe.send(watch.result())


class Watch:
    """The most memory that this process had since the watch was made."""

    def __init__(self, device: str) -> None:
        import torch

        self._device = device
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        if device == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            free, there_is = torch.cuda.mem_get_info()
            self._context = there_is - free - torch.cuda.memory_reserved()
        else:
            Path("/proc/self/clear_refs").write_text("5")
            self._before = _status("VmRSS")

    def result(self) -> dict[str, float]:
        """Peak bytes; on a GPU also those of CUDA's context, where no other program uses it."""
        import torch

        if self._device == "cuda":
            return {"peak_bytes": torch.cuda.max_memory_allocated(), "cuda_context_bytes": self._context}
        return {"peak_bytes": _status("VmHWM") - self._before}


def _status(key: str) -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key + ":"):
            return float(line.split()[1]) * 1024
    raise SystemExit(f"/proc/self/status has no {key}: a Linux machine is needed")


@contextlib.contextmanager
def _attention(flash: bool) -> Iterator[None]:
    """Without flash attention: torch's plain kernels, as on a GPU with float32 and grouped heads."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    with contextlib.nullcontext() if flash else sdpa_kernel(SDPBackend.MATH):
        yield


def _train(config: TrainingConfig, device: str, folder: Path) -> None:
    from rlmux.engines.train.train_engine import RL_STAGES, TorchTrainEngine
    from rlmux.rl.vocabulary import CharVocabulary

    engine = TorchTrainEngine(config, vocabulary=CharVocabulary(), device=device)
    while not engine.run_stage(Stage.SFT_WARMUP, max_seconds=1e9).is_done:
        pass
    for step in (1, 2):
        snapshot = engine.snapshot()
        engine.begin_step(_longest_batch(config, step))
        for stage in RL_STAGES:
            while not engine.run_stage(stage, max_seconds=1e9).is_done:
                pass
        snapshot.write(folder / f"{config.name}-checkpoint")
        del snapshot
        engine.export_weights(folder / "published.safetensors")


def _longest_batch(config: TrainingConfig, step: int) -> TrainingBatch:
    """Trajectories of the largest length."""
    algorithm, rollout = config.algorithm, config.rollout
    num_tokens = rollout.max_new_tokens
    trajectories = [
        Trajectory(
            id=TrajectoryId(step, prompt, sample),
            prompt_tokens=(5,) * rollout.max_prompt_tokens,
            tokens=(6,) * num_tokens,
            is_sampled=(True,) * num_tokens,
            logprobs=(-1.0,) * num_tokens,
            versions=(step - 1,) * num_tokens,
            reward=float(sample % 2),
            stop_reason="length",
            num_turns=1,
        )
        for prompt in range(algorithm.prompts_per_step)
        for sample in range(algorithm.group_size)
    ]
    advantages = [1.0 if each.id.sample % 2 else -1.0 for each in trajectories]
    return TrainingBatch(step=step, trajectories=trajectories, advantages=advantages)


def _roll_out(config: TrainingConfig, device: str, folder: Path) -> None:
    import torch

    from rlmux.engines.model.model_io import build_model
    from rlmux.engines.model.weights import write_tensors
    from rlmux.engines.rollout.slot_engine import SlotRolloutEngine

    vocab_size = _vocab_size(config)
    published = folder / f"{config.rollout.num_slots}.safetensors"
    if os.fork() == 0:  # another process writes the weights, as a trainer does
        tensors = dict(build_model(config.model, vocab_size, 0).named_parameters())
        dtype = getattr(torch, config.train.dtype)
        write_tensors(published, {name: tensor.to(dtype) for name, tensor in tensors.items()}, {"version": "1"})
        os._exit(0)
    os.wait()
    engine = SlotRolloutEngine(config.model, config.rollout, vocab_size=vocab_size, seed=0, device=device)
    for version in (0, 1):
        if version:
            engine.load_weights(published, version)
        requests = [
            TrajectoryRequest(
                id=TrajectoryId(version + 1, prompt, sample),
                prompt_tokens=tuple(5 + (prompt + place) % 50 for place in range(config.rollout.max_prompt_tokens)),
                max_new_tokens=config.rollout.max_new_tokens,
                stop_tokens=(),
                seed=0,
            )
            for prompt in range(config.algorithm.prompts_per_step)
            for sample in range(-(-config.rollout.num_slots // config.algorithm.prompts_per_step))
        ]
        engine.submit(requests)
        while engine.run_chunk(max_decode_steps=10**6, max_seconds=1e9).num_active:
            pass


def _vocab_size(config: TrainingConfig) -> int:
    from rlmux.rl.vocabulary import CharVocabulary

    return CharVocabulary().vocab_size if config.model.path is None else LARGE_VOCABULARY


QWEN3 = {
    "0.6B": (1024, 28, 16, 8, 3072),
    "1.7B": (2048, 28, 16, 8, 6144),
    "4B": (2560, 36, 32, 8, 9728),
    "8B": (4096, 36, 32, 8, 12_288),
    "14B": (5120, 40, 40, 8, 17_408),
    "32B": (5120, 64, 64, 8, 25_600),
    "30B-A3B": (2048, 48, 32, 4, 6144),
}
"""Hidden size, layers, heads, key and value heads and feed-forward width of each model (its config.json)."""
_EXPERTS = {"model_type": "qwen3_moe", "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768}


def counted_qwen3() -> str:
    """GB of a rollout worker, and of a train rank on its GPU and in host memory, by the number of ranks."""
    lines = ["| Qwen3 | rollout worker | " + " | ".join(f"train, {num} GPU" for num in (1, 2, 4, 8)) + " |"]
    lines.append("|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        for name, sizes in QWEN3.items():
            model = ModelConfig(path=str(_sizes_alone(Path(folder) / name, name, sizes)))
            ranks = [footprint_of(_on_gpus(model, num), is_gpu=True) for num in (1, 2, 4, 8)]
            cells = [_gigabytes(ranks[0].rollout_device_bytes)]
            for each in ranks:
                cells.append(f"{_gigabytes(each.train_device_bytes)}, host {each.train_host_bytes / 1e9:.0f}")
            lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _sizes_alone(folder: Path, name: str, sizes: Sequence[int]) -> Path:
    """A checkpoint folder with a config.json alone."""
    keys = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "intermediate_size")
    fields = dict(zip(keys, sizes, strict=True)) | {"model_type": "qwen3", "head_dim": 128, "vocab_size": 151_936}
    fields |= {"tie_word_embeddings": name in ("0.6B", "1.7B", "4B")} | (_EXPERTS if "A3B" in name else {})
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(fields))
    return folder


def _on_gpus(model: ModelConfig, num_gpus: int) -> TrainingConfig:
    """As in examples/14_eight_gpus.yaml, trained on so many GPUs."""
    return TrainingConfig(
        name="counted",
        model=model,
        algorithm=AlgorithmConfig(prompts_per_step=32, group_size=8, micro_batch_size=1),
        rollout=RolloutConfig(
            num_slots=64, kv_tokens=260_000, max_prompt_tokens=1024, max_new_tokens=7168, dtype="bfloat16"
        ),
        train=TrainConfig(
            num_workers=num_gpus,
            dtype="bfloat16",
            activation_checkpointing=True,
            optimizer_state="8bit",
            sharding="shard" if num_gpus > 1 else "replicate",
        ),
    )


def _gigabytes(num_bytes: float | None) -> str:
    """Bold above what a GPU of 80 GB has."""
    text = f"{(num_bytes or 0.0) / 1e9:.1f}"
    return f"**{text}**" if (num_bytes or 0.0) > 80e9 else text


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as text, parts below each."""
    lines = [f"{'shape':12} {'worker':8} {'estimated MB':>13} {'measured MB':>12} {'ratio':>6}"]
    for row in rows:
        lines.append(
            f"{row['shape']:12} {row['worker']:8} {row['estimated_bytes'] / 1e6:13.1f} "
            f"{row['measured_bytes'] / 1e6:12.1f} {row['estimated_over_measured']:6.2f}"
        )
        lines += [f"    {part:28} {size / 1e6:10.1f}" for part, size in row["parts"].items() if size]
        if "cuda_context_bytes" in row:
            lines.append(f"    {'(CUDA context, measured)':28} {row['cuda_context_bytes'] / 1e6:10.1f}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default=",".join(SHAPES), help="names, separated by commas")
    parser.add_argument("--workers", default=",".join(WORKERS), help="train, rollout, or both")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--qwen3", action="store_true", help="count Qwen3 models on GPUs, and measure nothing")
    options = parser.parse_args()
    if options.qwen3:
        print(counted_qwen3())
        return
    names = options.shapes.split(",")
    unknown = [name for name in names if name not in SHAPES]
    if unknown:
        sys.exit(f"--shapes {unknown[0]}: accepted: {', '.join(SHAPES)}")
    rows = []
    for name in names:
        found = measure(name, workers=options.workers.split(","), device=options.device)
        if not options.json:
            print(table(found), flush=True)
        rows += found
    if options.json:
        print(json.dumps(rows, indent=2))


if __name__ == "__main__":
    main()
