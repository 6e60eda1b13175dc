"""What `plan` shows of memory: what each worker of a pipeline holds at its fullest moment, part by part.

The figures are the ones that `run` adds up before it places a pipeline (rl/memory/memory_parts.py), for the workers of
one pipeline. A `footprint` in the file is not known by part.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rlmux.config import Spec
from rlmux.core.model import Phase
from rlmux.rl.memory.footprint import device_parts, host_parts
from rlmux.rl.memory.memory_parts import Parts, num_trained, total
from rlmux.rl.memory.model_shape import shape_of

HUGE = 30 * 10**9
"""Parameters from which training usually wants more than shards."""

MemoryOfPipeline = dict[str, Any]
"""Value of `memory_of` for one pipeline."""


def memory_of(spec: Spec) -> dict[str, MemoryOfPipeline]:
    """Parameters and the bytes of each part, by pipeline; one without a task, which is only planned, is absent.

    {"parameters", "active_parameters", "rollout": {part: bytes}, "train": {part: bytes}, "train_host": {part: bytes}}
    """
    from rlmux.runtime.memory.memory_budget import has_gpu_sized_devices

    found, is_gpu = {}, has_gpu_sized_devices(spec.cluster)
    pool = spec.cluster.pool_serving(Phase.ROLLOUT)
    num_gpus = 1 if pool is None else pool.gpus_per_device
    for pipeline in spec.pipelines:
        if pipeline.training is not None:
            shape = shape_of(pipeline.training.model)
            found[pipeline.name] = {
                "parameters": shape.num_parameters,
                "active_parameters": shape.num_active_parameters,
                "rollout": _present(device_parts(pipeline.training, Phase.ROLLOUT, is_gpu=is_gpu, num_gpus=num_gpus)),
                "train": _present(device_parts(pipeline.training, Phase.TRAIN, is_gpu=is_gpu)),
                "train_host": _present(host_parts(pipeline.training)),
            }
    return found


def notes_of(spec: Spec) -> list[str]:
    """A line about the pipelines that train so much that other trainers may do better; none without them."""
    trained = [each for each in spec.pipelines if each.training is not None and not each.keys.is_filler]
    names = [each.name for each in trained if num_trained(each.config) >= HUGE]
    if not names:
        return []
    return [
        f"{', '.join(names)}: {HUGE / 1e9:.0f}B parameters or more are trained, in shards (FSDP2): Megatron's tensor, "
        "pipeline, expert and context parallelism are not rlmux's own; a trainer that has them takes turns under "
        "permits (docs/how-to/your-trainer.md)"
    ]


def rows_of(memory: dict[str, MemoryOfPipeline]) -> Sequence[dict[str, Any]]:
    """One row for each worker, and one for each of its parts."""
    rows: list[dict[str, Any]] = []
    for name, own in memory.items():
        for worker in ("rollout", "train", "train_host"):
            parts = own[worker]
            rows.append(_row(name, worker.replace("_", " "), "all", total(parts)))
            rows += [_row("", "", part, size) for part, size in parts.items()]
    return rows


def _present(parts: Parts) -> Parts:
    return {part: size for part, size in parts.items() if size}


def _row(pipeline: str, worker: str, part: str, num_bytes: float) -> dict[str, Any]:
    return {"pipeline": pipeline, "worker": worker, "part": part, "MB": f"{num_bytes / 1e6:,.1f}"}
