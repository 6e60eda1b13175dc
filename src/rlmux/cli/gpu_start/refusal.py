"""One line for a model that fits no split of the GPUs: what is lacking, and what would do, each tried."""

from __future__ import annotations

from dataclasses import replace

from rlmux.cli.gpu_start.machine import machine_of
from rlmux.cli.memory_rows import HUGE
from rlmux.core.errors import UserError
from rlmux.core.model import Phase
from rlmux.profiling.gpu_choice import Wanted, choose, lacks

OTHER_TRAINERS = "a trainer with tensor, pipeline or expert parallelism under permits (docs/how-to/your-trainer.md)"
"""What rlmux schedules and does not do itself."""
_OFFERED = sorted((number * memory, f"{number}x{memory}") for number in (1, 2, 4, 8) for memory in (80, 141))
"""(GB, `--gpus`) of larger machines, the smallest first."""


def refusal(wanted: Wanted) -> UserError:
    """The error of a model that does not fit."""
    lack = min(lacks(wanted), key=lambda each: each.need_bytes / wanted.free_bytes(each.split))
    what = "training an adapter of" if wanted.has_adapter else "training all of"
    num_gpus = lack.split.num_train
    if lack.phase is Phase.ROLLOUT:
        what, num_gpus = "sampling with", lack.split.tensor_parallel
    parameters = f"its {wanted.shape.num_parameters / 1e9:.1f}B parameters"
    beside = " beside the base that adapters share" if lack.is_beside_base else ""
    *most, last = _offers(wanted)
    offered = f"{', '.join(most)}{', or ' if len(most) > 1 else ' or '}{last}" if most else last
    return UserError(
        f"{wanted.model.name} on {wanted.machine}: {what} {parameters}{beside} needs {lack.need_bytes / 1e9:.0f} GB on "
        f"{'one GPU' if num_gpus == 1 else f'each of {num_gpus} GPUs'}, and there are "
        f"{wanted.free_bytes(lack.split) / 1e9:.0f} of {wanted.machine.memory_gb:g}; accepted: {offered}"
    )


def _offers(wanted: Wanted) -> list[str]:
    """Words with which the model fits: an adapter, the smallest larger machine, a trainer of others."""
    with_adapter = replace(wanted, has_adapter=True)
    adapter = ["--lora"] if not wanted.has_adapter and choose(with_adapter) is not None else []
    here = wanted.machine.num_gpus * wanted.machine.memory_gb
    larger = (
        text
        for size, text in _OFFERED
        if size >= here and choose(replace(wanted, machine=machine_of(text))) is not None
    )
    machine = [f"--gpus {text}" for text in [next(larger, None)] if text is not None]
    is_huge = wanted.shape.num_parameters >= HUGE or not (adapter or machine)
    return [*adapter, *machine, *([OTHER_TRAINERS] if is_huge else [])]
