"""Steps that vary: any workload with each step's seconds scaled by a factor of its own.

    Workload ── with_noise(workload, "0.1" | "measured", seed) ──▶ the same pipelines, log-normal factors of mean 1

    NUMBER      coefficient of variation, the same for every pipeline
    measured    that of the published log of the nearest model: 7B, 14B or 32B

Factors of different steps and pipelines are independent, and functions of (seed, pipeline, step) alone. A factor
scales rollout and training of its step together, on top of the workload's own drift. The scheduler is given the same
estimates as without noise. A pipeline whose model is unknown varies as 14B does.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import replace

from rlmux.core.errors import UserError
from rlmux.sim import data_tables
from rlmux.sim.workloads.arrivals import Arrival, Workload
from rlmux.sim.world import STEADY, Product, RandomVariation, TrueSeconds, Variation

MEASURED = "measured"
MAX_NOISE = 2.0
_UNKNOWN_SIZE = 14.0
"""Billions of parameters of a model whose size is not known."""


def with_noise(workload: Workload, noise: float | str, *, seed: int) -> Workload:
    """The workload with varying steps; itself where `noise` is 0.

    `noise`: coefficient of variation of a step's seconds, or `measured`. Raises UserError.
    """
    _check(workload, noise)
    if noise == 0.0:
        return workload
    arrivals = tuple(_varied(arrival, noise, seed) for arrival in workload.arrivals)
    words = "varying as measured" if noise == MEASURED else f"of coefficient of variation {noise:g}"
    about = f"{workload.about}, steps {words}" if workload.about else f"steps {words}"
    return replace(workload, arrivals=arrivals, about=about, seed=seed)


def noisy_maker(workload: Workload, noise: float | str) -> Workload | Callable[[int], Workload]:
    """The workload itself where `noise` is 0; else what makes it with the noise of a seed."""
    _check(workload, noise)
    return workload if noise == 0.0 else lambda seed: with_noise(workload, noise, seed=seed)


def _check(workload: Workload, noise: float | str) -> None:
    is_number = isinstance(noise, int | float) and not isinstance(noise, bool)
    if noise != MEASURED and not (is_number and 0.0 <= float(noise) <= MAX_NOISE):
        raise UserError(
            f"workload {workload.name!r}: noise is {noise!r}; accepted: 0 to {MAX_NOISE:g}, the coefficient of "
            f"variation of a step's seconds, or {MEASURED}"
        )
    sampled = next((arrival for arrival in workload.arrivals if type(arrival.world) is not TrueSeconds), None)
    if noise != 0.0 and sampled is not None:
        raise UserError(
            f"workload {workload.name!r}: noise is {noise!r}, and the steps of {sampled.pipeline.id} vary with their "
            "recorded response lengths already; accepted: 0"
        )


def _varied(arrival: Arrival, noise: float | str, seed: int) -> Arrival:
    cv = measured_cv(arrival.model) if noise == MEASURED else float(noise)
    number = random.Random(f"{seed}/noise/{arrival.pipeline.id}").getrandbits(32)
    factors = RandomVariation(seed=number, cv=cv)
    colocated = arrival.colocated_world
    return replace(
        arrival,
        world=_scaled(arrival.world, factors),
        colocated_world=None if colocated is None else _scaled(colocated, factors),
    )


def _scaled(world: TrueSeconds, factors: Variation) -> TrueSeconds:
    is_steady = world.variation is STEADY
    return replace(world, variation=factors if is_steady else Product(world.variation, factors))


def measured_cv(model: str) -> float:
    """Coefficient of variation of the published log nearest to the model, such as `8B`; "" for an unknown one."""
    cvs = {float(row["model"].removesuffix("B")): float(row["cv"]) for row in data_tables.rows("step_noise")}
    try:
        size = float(model.removesuffix("B"))
    except ValueError:
        size = _UNKNOWN_SIZE
    return cvs[min(cvs, key=lambda known: abs(math.log(known / size)))]
