"""Other systems that train one pipeline, in virtual time and true to their mechanism: play("areal", world, ...).

    recorded lengths, model costs ─▶ virtual devices ── ended answers ─▶ a system's own rules ─▶ RivalResult

    verl         synchronous on all devices          synchronous.py
    rollpacker   short and long rounds               synchronous.py
    streamrl     streamed groups, dispatch by rank   streamed.py
    asyncflow    delayed parameter update            streamed.py
    areal        interruptible rollouts              areal.py
    laminar      one version for each trajectory     areal.py

Every system has the same devices, lengths and costs as the simulator's pipelines (`sim/models/substages.py`): its
figures differ by its rules alone. A result is a function of the world, its seed and the options.

Reading order: virtual_device, trainer, synchronous, streamed, areal.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from rlmux.core.errors import UserError
from rlmux.papers.rivals.areal import areal
from rlmux.papers.rivals.streamed import asyncflow, streamrl
from rlmux.papers.rivals.synchronous import rollpacker, verl
from rlmux.papers.rivals.trainer import RivalResult
from rlmux.sim.models.substages import SubStageWorld

RIVALS: Mapping[str, Callable[..., RivalResult]] = {
    "verl": verl,
    "rollpacker": rollpacker,
    "streamrl": streamrl,
    "asyncflow": asyncflow,
    "areal": areal,
    "laminar": partial(areal, on_weights="drain"),
}
"""Systems by name."""
_ON_POOLS = ("streamrl", "asyncflow", "areal", "laminar")


def play(system: str, world: SubStageWorld, *, num_devices: int, num_steps: int, **options: Any) -> RivalResult:
    """One pipeline under a system of `RIVALS`, with the system's options. Raises UserError."""
    if system not in RIVALS:
        raise UserError(f"system {system!r} is unknown; accepted: {', '.join(RIVALS)}")
    if world.tools is not None:
        raise UserError(f"system {system!r}: the pipeline waits for tools; accepted: trajectories of one turn")
    least = 2 if system in _ON_POOLS else 1
    if num_devices < least or num_steps < 1:
        raise UserError(
            f"system {system!r}: {num_devices} devices, {num_steps} steps; accepted: devices from {least}, steps from 1"
        )
    return RIVALS[system](world, num_devices=num_devices, num_steps=num_steps, **options)


def best_division(
    system: str, world: SubStageWorld, *, num_devices: int, num_steps: int, **options: Any
) -> RivalResult:
    """The same with the fastest division of all devices into rollout and training."""
    divisions = [(num_rollout, num_devices - num_rollout) for num_rollout in range(1, num_devices)]
    runs = [
        play(system, world, num_devices=num_devices, num_steps=num_steps, split=split, **options) for split in divisions
    ]
    return max(runs, key=lambda run: run.tokens_per_s)
