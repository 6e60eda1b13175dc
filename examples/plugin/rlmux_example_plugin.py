"""A policy, a task, a rollout engine and a workload for rlmux, in one package: `pyproject.toml` gives their names."""

from dataclasses import dataclass, replace

from rlmux.core.model import PhaseSeconds, Pipeline, PipelineId
from rlmux.policy import (
    GroupPlan,
    PlacementChoice,
    PlacementView,
    Policy,
    Refusal,
    impossible,
    queue,
    sharing_everything,
    start_where_free,
)
from rlmux.rl.tasks.base import SingleTurnTask, random_at
from rlmux.rl.types import Prompt
from rlmux.sim.workloads.arrivals import Arrival, Workload, h20_h800_cluster
from rlmux.sim.world import TrueSeconds


@dataclass(frozen=True, slots=True, kw_only=True)
class NewestFirst(Policy):
    """One set of nodes for all; of ready work, what became ready last starts first."""

    name: str = "newest-first"

    def place(self, pipeline: Pipeline, view: PlacementView) -> PlacementChoice | Refusal:
        return impossible(pipeline, view) or sharing_everything(pipeline, view) or queue(pipeline, view)

    def dispatch(self, plan: GroupPlan) -> GroupPlan:
        return plan.choose(*start_where_free(plan, sorted(plan.ready, key=lambda work: -work.sequence)))


class CountUp(SingleTurnTask):
    """Write the next numbers: `c:3=` wants `456`. Option: `numbers`."""

    def __init__(self, params: dict, seed: int) -> None:
        self._numbers, self._seed = int(params.get("numbers", 3)), seed

    def prompt(self, index: int) -> Prompt:
        first = random_at("count-up", self._seed, index).randrange(10)
        return Prompt(text=f"c:{first}=", answer="".join(str((first + 1 + n) % 10) for n in range(self._numbers)))


def two_at_a_time(config, *, vocab_size: int, is_single_turn: bool, device: str):
    """Our own engine with two slots. What any engine has to do: `rlmux.engines.rollout.protocol.RolloutEngine`."""
    from rlmux.engines.rollout.slot_engine import SlotRolloutEngine  # here: simulations need no torch

    return SlotRolloutEngine(
        config.model, replace(config.rollout, num_slots=2), vocab_size=vocab_size, seed=config.model_seed,
        staleness=config.algorithm.staleness, is_single_turn=is_single_turn, device=device,
    )  # fmt: skip


def two_sizes(*, seed: int = 0, pairs: int = 2) -> Workload:
    """Pairs of a small and a large pipeline, all submitted at once."""
    arrivals = []
    for number, seconds in enumerate([PhaseSeconds(rollout_s=60, train_s=30), PhaseSeconds(rollout_s=200, train_s=90)]):
        for pair in range(pairs):
            pipeline = Pipeline(id=PipelineId(f"{number}-{pair}"), num_steps=20, estimate=seconds, slo_slowdown=2.0)
            arrivals.append(Arrival(submit_s=0.0, pipeline=pipeline, world=TrueSeconds.of_phases(seconds)))
    return Workload(name="two-sizes", cluster=h20_h800_cluster(), arrivals=tuple(arrivals), seed=seed)
