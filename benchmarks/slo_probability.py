"""How often a cycle takes no longer than planned, against the probability that was stated: `slo_probability`.

    python benchmarks/slo_probability.py [--groups 200] [--steps 200] [--seed 0]

Groups of pipelines of 200 s of rollout and 160 s of training in the mean make their steps together, on one node of each
kind, or, `apart`, with a rollout node each: the longest step is the cycle then, nothing averages out. Before each cycle
its length is planned by the bounds of the steps that were seen; then the steps come, and are within it or not.

    noise     log-normal, a tenth of the mean as deviation        drift    the measured curves of `drift-mixed`
    both      one times the other                                 double   noise, twice as long from the middle on

The phases of one step vary together. No scheduler, no policy: what `rlmux` does with the bounds is measured by
`rlmux simulate drift-mixed:slo_probability=0.95`.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable

from rlmux.core.estimation.step_bounds import StepBounds
from rlmux.core.model import PhaseSeconds, Pipeline, PipelineId
from rlmux.core.steps.cycles import PhaseLoad, meta_iteration_s
from rlmux.sim.workloads.arrivals import at_token_limit
from rlmux.sim.world import Drifting, RandomVariation, Variation, drift_curve

MEAN = PhaseSeconds(rollout_s=200.0, train_s=160.0)
PROBABILITIES = (0.8, 0.9, 0.95, 0.99)
SIZES = (2, 3, 5)
APART_TRAIN_S = 20.0
"""Seconds of training where rollout nodes are apart, so that the longest step is the cycle."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--groups", type=int, default=200)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    print("cycles within their plan, and (plan over what they took, mean), by the probability stated")
    print(f"{'steps':8} {'members':>7}      " + "".join(f"{probability:>16}" for probability in PROBABILITIES))
    for kind in KINDS:
        for size, is_apart in [*((size, False) for size in SIZES), (3, True)]:
            cells = []
            for probability in PROBABILITIES:
                kept, excess = attained(
                    kind, size, probability, args.groups // size, args.steps, args.seed, is_apart=is_apart
                )
                cells.append(f"{100 * kept:8.2f} % ({excess:.2f})")
            print(f"{kind:8} {size:7}{' apart' if is_apart else '      '}" + "".join(f"{cell:>16}" for cell in cells))


def attained(
    kind: str,
    size: int,
    probability: float,
    num_groups: int,
    num_steps: int,
    seed: int,
    *,
    is_apart: bool = False,
) -> tuple[float, float]:
    """(part of the cycles that took no longer than planned, mean of planned over taken)."""
    generator = random.Random(f"{seed}/{kind}/{size}")
    within, excess, count = 0, 0.0, 0
    for _ in range(num_groups):
        worlds = [KINDS[kind](generator, num_steps) for _ in range(size)]
        bounds = [StepBounds(_pipeline(probability)) for _ in range(size)]
        planned = [one.first_plan() for one in bounds]
        for step in range(1, num_steps + 1):
            factors = [world(step) for world in worlds]
            plan_s = _cycle_s([one.held or MEAN for one in planned], is_apart)
            taken_s = _cycle_s([_times(factor) for factor in factors], is_apart)
            within += taken_s <= plan_s * (1 + 1e-9)
            excess += plan_s / taken_s
            count += 1
            for index, factor in enumerate(factors):
                bounds[index].add(_times(factor), MEAN)
                planned[index] = bounds[index].plan(planned[index]) or planned[index]
    return within / count, excess / count


def _pipeline(probability: float) -> Pipeline:
    return Pipeline(
        id=PipelineId("a"), num_steps=None, estimate=MEAN, limit=at_token_limit(MEAN), slo_probability=probability
    )


def _times(factor: float) -> PhaseSeconds:
    return PhaseSeconds(rollout_s=factor * MEAN.rollout_s, train_s=factor * MEAN.train_s)


def _cycle_s(phases: list[PhaseSeconds], is_apart: bool) -> float:
    part = APART_TRAIN_S / MEAN.train_s if is_apart else 1.0
    return meta_iteration_s(
        [
            PhaseLoad(rollout_s=one.rollout_s, train_s=part * one.train_s, rollout_nodes=(index if is_apart else 0,))
            for index, one in enumerate(phases)
        ]
    )


Factor = Callable[[int], float]


def _noise(generator: random.Random, num_steps: int) -> Factor:
    return RandomVariation(seed=generator.getrandbits(32), cv=0.1).factor


def _drift(generator: random.Random, num_steps: int) -> Factor:
    curve = drift_curve(generator.choice(("7B", "14B")))
    amplitude = generator.choice((-1.5, -1.0, -0.5, 0.0, 0.5, 1.0, 1.5))
    drifting: Variation = Drifting(
        ratios=curve, amplitude=amplitude, steps_per_value=max(1, round(num_steps / len(curve)))
    )
    return drifting.factor


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
