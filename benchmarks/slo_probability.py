"""How often the steps to come are within what an SLO keeps in hand, against the stated `slo_probability`.

    python benchmarks/slo_probability.py [--groups 200] [--steps 200] [--seed 0]

Groups of pipelines of 200 s of rollout and 160 s of training in the mean, on one node of each kind. Every eighth step
mean and spread are learned from the steps so far, then the coming ones are compared with them, at most 64.

    within    the mean of the coming steps of every member is at most mean x spread
    kept      so is each member's slowdown: the group's cycle over its own steps, against the plan's x its spread
    spread    mean over members and moments

    noise     log-normal, a tenth of the mean as deviation        drift    the measured curves of `drift-mixed`
    both      one times the other                                 double   noise, twice as long from the middle on

Both phases of a step vary together. Neither scheduler nor policy takes part.
"""

from __future__ import annotations

import argparse
import math
import random
from collections.abc import Callable
from typing import NamedTuple

from rlmux.core.estimation.cycles import PhaseLoad, meta_iteration_s
from rlmux.core.model import PhaseSeconds, Pipeline, PipelineId
from rlmux.core.placement.step_bounds import StepBounds
from rlmux.sim.workloads.arrivals import at_token_limit
from rlmux.sim.world import Drifting, RandomVariation, drift_curve

MEAN = PhaseSeconds(rollout_s=200.0, train_s=160.0)
PROBABILITIES = (0.8, 0.9, 0.95, 0.99)
SIZES = (2, 3, 5)
MAX_AHEAD = 64
EVERY = 8
"""Steps from one comparison to the next."""

Factor = Callable[[int], float]


class Attained(NamedTuple):
    within: float
    kept: float
    spread: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--groups", type=int, default=200)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    print("% within / % kept (mean spread), by the stated probability")
    print(f"{'steps':8} {'members':>7} " + "".join(f"{probability:>21}" for probability in PROBABILITIES))
    for kind in KINDS:
        for size in SIZES:
            row = [attained(kind, size, each, args.groups, args.steps, args.seed) for each in PROBABILITIES]
            cells = [f"{100 * one.within:.1f} / {100 * one.kept:.1f} ({one.spread:.3f})" for one in row]
            print(f"{kind:8} {size:7} " + "".join(f"{cell:>21}" for cell in cells))


def attained(kind: str, size: int, probability: float, num_groups: int, num_steps: int, seed: int) -> Attained:
    """Parts of all comparisons, and the mean spread."""
    generator = random.Random(f"{seed}/{kind}/{size}")
    count, within, kept, spreads = 0, 0, 0, 0.0
    for _ in range(num_groups):
        makers = [KINDS[kind](generator, num_steps) for _ in range(size)]
        factors = [[maker(step) for step in range(1, num_steps + 1)] for maker in makers]
        cycles_s = [_cycle_s(step) for step in zip(*factors, strict=True)]
        bounds = [StepBounds(_pipeline(probability, num_steps)) for _ in range(size)]
        plans = [one.first_plan() for one in bounds]
        for done in range(num_steps):
            if done % EVERY == 0:
                ahead = slice(done, min(num_steps, done + MAX_AHEAD))
                planned = [plan.estimate.rollout_s / MEAN.rollout_s for plan in plans if plan.estimate]
                coming = [_mean(one[ahead]) for one in factors]
                slower, planned_s = _mean(cycles_s[ahead]), _cycle_s(planned)
                members = list(zip(plans, planned, coming, strict=True))
                count += 1
                within += all(own <= mean * plan.spread * (1 + 1e-9) for plan, mean, own in members)
                kept += all(slower / own <= planned_s / mean * plan.spread * (1 + 1e-9) for plan, mean, own in members)
                spreads += _mean([plan.spread for plan in plans])
            for index, one in enumerate(bounds):
                one.add(_times(factors[index][done]), MEAN)
                plans[index] = one.plan(plans[index], num_steps - done - 1) or plans[index]
    return Attained(within / count, kept / count, spreads / count)


def _pipeline(probability: float, num_steps: int) -> Pipeline:
    limit = at_token_limit(MEAN)
    return Pipeline(id=PipelineId("a"), num_steps=num_steps, estimate=MEAN, limit=limit, slo_probability=probability)


def _times(factor: float) -> PhaseSeconds:
    return PhaseSeconds(rollout_s=factor * MEAN.rollout_s, train_s=factor * MEAN.train_s)


def _cycle_s(factors: list[float] | tuple[float, ...]) -> float:
    """Seconds of the group's meta-iteration, in which each member makes one step that is so many times the mean."""
    steps = [_times(factor) for factor in factors]
    return meta_iteration_s(
        [PhaseLoad(rollout_s=one.rollout_s, train_s=one.train_s, rollout_nodes=(0,)) for one in steps]
    )


def _mean(values: list[float]) -> float:
    return math.fsum(values) / len(values)


def _noise(generator: random.Random, num_steps: int) -> Factor:
    return RandomVariation(seed=generator.getrandbits(32), cv=0.1).factor


def _drift(generator: random.Random, num_steps: int) -> Factor:
    curve = drift_curve(generator.choice(("7B", "14B")))
    amplitude = generator.choice((-1.5, -1.0, -0.5, 0.0, 0.5, 1.0, 1.5))
    return Drifting(ratios=curve, amplitude=amplitude, steps_per_value=max(1, round(num_steps / len(curve)))).factor


def _both(generator: random.Random, num_steps: int) -> Factor:
    noise, drift = _noise(generator, num_steps), _drift(generator, num_steps)
    return lambda step: noise(step) * drift(step)


def _double(generator: random.Random, num_steps: int) -> Factor:
    noise = _noise(generator, num_steps)
    return lambda step: noise(step) * (2.0 if step > num_steps // 2 else 1.0)


KINDS: dict[str, Callable[[random.Random, int], Factor]] = {
    "noise": _noise,
    "drift": _drift,
    "both": _both,
    "double": _double,
}

if __name__ == "__main__":
    main()
