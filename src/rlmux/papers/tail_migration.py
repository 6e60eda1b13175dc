"""Long-tail migration between two pipelines that share a rollout node (RollMux sections 4.3 and 8.5).

    GPUs 0-6   [ A dense ][ B dense        ]..........[ A dense ]
    GPU 7      [ A dense ][ A's tail  ]...............[ A dense ]      the tail still gates A's training
    training                           [ A trains ][ B ...

Policy `rollmux` runs the pair in the simulator, once with `tails` and once without: one H20 node of eight
GPUs, each a device, and one training node. The end of each of 128 responses is the measured one; how much slower a GPU
decodes that has more of them than it had then comes from the decode-cost model. Migrated contexts are computed again.

A module of its own: a test of the policies uses its pipelines, too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rlmux.core.errors import UserError
from rlmux.core.model import MigrationEstimate, PhaseSeconds, Pipeline, PipelineId, Stage
from rlmux.policies import make_policy
from rlmux.sim.models.decoder import Decoder, Unfinished, copy_s, recompute_s
from rlmux.sim.simulator import simulate
from rlmux.sim.workloads.arrivals import Arrival, Workload, h20_h800_cluster, profiles, switch_seconds
from rlmux.sim.workloads.rollout_tails import COST_MODELS, NUM_GPUS, MeasuredPace, measured_pace
from rlmux.sim.world import SwitchSeconds, TrueSeconds

_PROFILE_BATCH = 256
_FRESH = -1.0
"""Context of a response that has not begun: its prompt's prefill is in its measured end."""

PUBLISHED = {
    ("7B_4k", "7B_4k"): 1.12,
    ("7B_8k", "7B_8k"): 1.19,
    ("7B_8k", "14B_8k"): 1.06,
    ("14B_8k", "14B_8k"): 1.28,
}
"""Throughput with migration over throughput without, by pair."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TailedPipeline(TrueSeconds):
    """One of the two pipelines: a world in which responses end as they were measured to."""

    by_stage: Mapping[Stage, float] = field(default_factory=dict)
    name: str
    pace: MeasuredPace
    train_s: float
    switch: SwitchSeconds

    @property
    def rollout_s(self) -> float:
        return self.pace.finish_s[-1]

    def shard(self, step: int, index: int, num_devices: int) -> Decoder:
        mine = self.pace.finish_s[index::num_devices]
        sequences = [Unfinished(end_s * self.pace.tokens_per_s, _FRESH) for end_s in mine]
        return Decoder(self.pace, sequences, slots=len(self.pace.finish_s))

    def migration_s(self, moved: Sequence[Unfinished], *, copies_kv: bool) -> tuple[float, float]:
        return (copy_s(self.pace.costs, moved), 0.0) if copies_kv else (0.0, recompute_s(self.pace.costs, moved))

    @property
    def _in_its_tail(self) -> Unfinished:
        """A response in the middle of the rollout."""
        return Unfinished(1.0, self.rollout_s * self.pace.tokens_per_s / 2)

    def arrival(self, number: int, num_steps: int) -> Arrival:
        """It comes at the begin and makes so many steps."""
        return Arrival(
            submit_s=0.0,
            pipeline=Pipeline(
                id=PipelineId(f"{self.name} {number}"),
                num_steps=num_steps,
                estimate=PhaseSeconds(rollout_s=self.rollout_s, train_s=self.train_s),
                switch=self.switch.estimate,
                migration=MigrationEstimate(recompute_s=recompute_s(self.pace.costs, [self._in_its_tail])),
            ),
            world=self,
            switch=self.switch,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TailGain:
    """One pair with and without migration."""

    pair: tuple[str, str]
    seconds_without: float
    """Seconds of one meta-iteration in the steady state, without migration."""
    seconds_with: float
    published: float | None

    @property
    def gain(self) -> float:
        return self.seconds_without / self.seconds_with


def tailed_pipeline(profile: str) -> TailedPipeline:
    """A pipeline with the measured finish times of `7B_8k` or `14B_8k`; `7B_4k` is 7B's cut at 4,096 tokens.

    Training is the profile's, scaled from its batch of 256 to these 128.
    """
    model, _, cap = profile.partition("_")
    if model not in COST_MODELS or cap not in ("4k", "8k"):
        raise UserError(f"no rollout of {profile!r} was measured; accepted: 7B_4k, 7B_8k, 14B_4k, 14B_8k")
    pace = measured_pace(model, 4096 if cap == "4k" else 8192)
    train_s = profiles()[profile].disaggregated.train_s * len(pace.finish_s) / _PROFILE_BATCH
    return TailedPipeline(
        by_stage={Stage.GENERATE: pace.finish_s[-1], Stage.UPDATE: train_s},
        name=profile,
        pace=pace,
        train_s=train_s,
        switch=switch_seconds(model),
    )


def migration_gain(first: str, second: str) -> TailGain:
    """How much shorter a meta-iteration of the two gets."""
    pair = (tailed_pipeline(first), tailed_pipeline(second))
    return TailGain(
        pair=(first, second),
        seconds_without=meta_iteration_s(pair, migrates=False),
        seconds_with=meta_iteration_s(pair, migrates=True),
        published=PUBLISHED.get((first, second)),
    )


def meta_iteration_s(pair: tuple[TailedPipeline, ...], *, migrates: bool, num_cycles: int = 40) -> float:
    """Mean of the second half of the cycles, under `rollmux`."""
    half_s, all_s = (_makespan_s(pair, count, migrates=migrates) for count in (num_cycles // 2, num_cycles))
    return (all_s - half_s) / (num_cycles - num_cycles // 2)


def _makespan_s(pair: tuple[TailedPipeline, ...], num_steps: int, *, migrates: bool) -> float:
    workload = Workload(
        name="tails",
        cluster=h20_h800_cluster(num_rollout_nodes=1, num_train_nodes=1, devices_per_node=NUM_GPUS),
        arrivals=tuple(recorded.arrival(number, num_steps) for number, recorded in enumerate(pair)),
    )
    return simulate(workload, make_policy("rollmux", tails=migrates)).hours * 3600.0
