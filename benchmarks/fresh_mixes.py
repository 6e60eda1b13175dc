"""Small mixes drawn at random: is `rlmux` dearer than `solo` or `rollmux`, does it miss an SLO that `solo` keeps?

    python benchmarks/fresh_mixes.py [--mixes 1000] [--seed N] [--quick]

Each mix is drawn from its number alone: 2 to 12 pipelines on unlimited or counted nodes with a price, or on counted
nodes without one; their steps are steady, noisy, drifting, or twice as long from some step on. Without `--seed` the
numbers differ from run to run, and are printed, so that a mix that fails can be repeated.

    dearer    the bill of `rlmux` is above the smaller one of `solo` and `rollmux` by more than `TOLERANCE`, of those
              that keep as many SLOs as `rlmux`
    missed    pipelines whose SLO `solo` keeps and `rlmux` does not
"""

from __future__ import annotations

import argparse
import math
import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from rlmux.core.model import (
    DEFAULT_SLO_PROBABILITY,
    Cluster,
    Phase,
    PhaseSeconds,
    Pipeline,
    PipelineId,
    Pool,
)
from rlmux.sim.results.result import SimResult
from rlmux.sim.results.sweep import SimRun, sweep
from rlmux.sim.workloads.arrivals import SYNCED, Arrival, Workload
from rlmux.sim.world import (
    NO_SWITCH,
    STEADY,
    Drifting,
    RandomVariation,
    SwitchSeconds,
    TrueSeconds,
    Variation,
    drift_curve,
)

POLICIES = ("solo", "rollmux", "rlmux")
NODES = ("unlimited", "counted", "free")
STEPS = ("steady", "noisy", "drifting", "doubling")
TOLERANCE = 0.001


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """How `rlmux` did on one mix."""

    mix: Workload
    dearer: float
    """Bill of `rlmux` over the smaller of the others', less 1; hours where nodes have no price. NaN where neither keeps
    as many SLOs."""
    missed: tuple[PipelineId, ...]
    """Pipelines whose SLO `solo` keeps and `rlmux` does not."""

    @property
    def is_dearer(self) -> bool:
        return self.dearer > TOLERANCE


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mixes", type=int, default=1000)
    parser.add_argument("--seed", type=int, help="number of the first mix; by default one that changes from run to run")
    parser.add_argument("--quick", action="store_true", help="8 mixes")
    args = parser.parse_args()
    first = int(time.time()) if args.seed is None else args.seed
    num_mixes = 8 if args.quick else args.mixes
    print(f"mixes {first} to {first + num_mixes - 1} (--seed {first})")
    judged = judge([mix(number) for number in range(first, first + num_mixes)])
    for kind in sorted({one.mix.name for one in judged}):
        of_kind = [one for one in judged if one.mix.name == kind]
        print(_row(kind, of_kind))
    print(_row("all", judged))
    for one in judged:
        if one.is_dearer or one.missed:
            words = f"{100 * one.dearer:.1f} % dearer" if one.is_dearer else ""
            missed = f"misses {', '.join(map(str, one.missed))}" if one.missed else ""
            print(f"--seed {one.mix.seed} --mixes 1   {one.mix.name}, {one.mix.about}: {words} {missed}")


def _row(kind: str, judged: Sequence[Judged]) -> str:
    gains = [1.0 / (1.0 + one.dearer) for one in judged if math.isfinite(one.dearer)]
    mean = math.exp(math.fsum(map(math.log, gains)) / len(gains)) if gains else math.nan
    counts = Counter(dearer=sum(one.is_dearer for one in judged), missed=sum(len(one.missed) for one in judged))
    return (
        f"{kind:20} {len(judged):5} mixes   {counts['dearer']:4} dearer   {counts['missed']:4} SLOs missed   "
        f"others' bill over that of rlmux {mean:.3f}"
    )


def judge(mixes: Sequence[Workload]) -> list[Judged]:
    """Simulate each mix under the three policies, and compare."""
    results = sweep([SimRun(workload=one, policy=name) for one in mixes for name in POLICIES])
    for one in results:
        assert not one.num_policy_faults, f"mix {one.seed}: {one.first_policy_fault}"
    rows = zip(mixes, *(results[number :: len(POLICIES)] for number in range(len(POLICIES))), strict=True)
    return [_judged(one, solo, rollmux, rlmux) for one, solo, rollmux, rlmux in rows]


def _judged(mix: Workload, solo: SimResult, rollmux: SimResult, rlmux: SimResult) -> Judged:
    kept = {name: _kept(result) for name, result in zip(POLICIES, (solo, rollmux, rlmux), strict=True)}
    fair = [one for one, name in ((solo, "solo"), (rollmux, "rollmux")) if len(kept[name]) >= len(kept["rlmux"])]
    least = min((_bill(one) for one in fair), default=math.nan)
    return Judged(
        mix=mix,
        dearer=_bill(rlmux) / least - 1.0,
        missed=tuple(name for name in kept["solo"] if name not in kept["rlmux"]),
    )


def _bill(result: SimResult) -> float:
    return result.paid_usd or result.hours


def _kept(result: SimResult) -> list[PipelineId]:
    return [one.pipeline for one in result.pipelines if one.keeps_slo]


def mix(number: int) -> Workload:
    """The mix of this number."""
    generator = random.Random(f"mix/{number}")
    nodes, steps = generator.choice(NODES), generator.choice(STEPS)
    num_pipelines = generator.randint(2, 12)
    num_pairs = None if nodes == "unlimited" else generator.randint(1, max(2, num_pipelines // 2))
    usd = 0.0 if nodes == "free" else 4.0
    pools = (
        Pool(name="rollout", phase=Phase.ROLLOUT, num_nodes=num_pairs, gpus_per_node=8, usd_per_gpu_hour=usd / 2),
        Pool(name="train", phase=Phase.TRAIN, num_nodes=num_pairs, gpus_per_node=8, usd_per_gpu_hour=usd),
    )
    has_costs = generator.random() < 0.5
    arrivals = [_arrival(generator, f"p{index}", steps, has_costs) for index in range(num_pipelines)]
    arrivals.sort(key=lambda one: one.submit_s)
    return Workload(
        name=f"{nodes}, {steps}",
        cluster=Cluster(pools={pool.name: pool for pool in pools}),
        arrivals=tuple(arrivals),
        seed=number,
        about=f"{num_pipelines} pipelines on {num_pairs or 'as many'} pairs{', with switches' if has_costs else ''}",
    )


def _arrival(generator: random.Random, name: str, steps: str, has_costs: bool) -> Arrival:
    rollout_s, train_s = (math.exp(generator.uniform(math.log(20.0), math.log(600.0))) for _ in range(2))
    sync_s = generator.uniform(0.0, 0.01) * (rollout_s + train_s) if has_costs else 0.0
    estimate = PhaseSeconds(rollout_s=rollout_s, train_s=train_s, sync_s=sync_s)
    num_steps = round(math.exp(generator.uniform(math.log(3.0), math.log(80.0))))
    limit = generator.uniform(1.2, 4.0)
    switch = _switch(generator) if has_costs else NO_SWITCH
    return Arrival(
        submit_s=generator.choice((0.0, generator.uniform(0.0, 20_000.0))),
        pipeline=Pipeline(
            id=PipelineId(name),
            num_steps=num_steps,
            stages=SYNCED,
            estimate=estimate,
            slo_slowdown=generator.choice((generator.uniform(1.05, 1.5), generator.uniform(1.5, 3.0), math.inf)),
            slo_probability=DEFAULT_SLO_PROBABILITY,
            limit=PhaseSeconds(rollout_s=limit * rollout_s, train_s=limit * train_s),
            switch=switch.estimate if has_costs else None,
        ),
        world=TrueSeconds.of_phases(estimate, sync_s=sync_s, variation=_variation(generator, steps, num_steps)),
        switch=switch,
    )


def _switch(generator: random.Random) -> SwitchSeconds:
    cold_s, warm_s = generator.uniform(10.0, 80.0), generator.uniform(0.5, 5.0)
    return SwitchSeconds(cold_rollout_s=cold_s, cold_train_s=cold_s, warm_rollout_s=warm_s, warm_train_s=warm_s)


def _variation(generator: random.Random, steps: str, num_steps: int) -> Variation:
    if steps == "noisy":
        return RandomVariation(seed=generator.getrandbits(32), cv=generator.uniform(0.02, 0.3))
    if steps == "drifting":
        curve = drift_curve(generator.choice(("7B", "14B")))
        amplitude = generator.choice((-1.5, -1.0, -0.5, 0.5, 1.0, 1.5))
        return Drifting(ratios=curve, amplitude=amplitude, steps_per_value=max(1, round(num_steps / len(curve))))
    if steps == "doubling":
        before = generator.randint(1, num_steps)
        return Drifting(ratios=(*[1.0] * before, 2.0))
    return STEADY


if __name__ == "__main__":
    main()
