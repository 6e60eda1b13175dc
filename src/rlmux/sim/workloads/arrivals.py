"""The input of a simulation: pipelines with their arrivals, what the scheduler believes of them, and what is true.

    Workload = Cluster + Arrivals            Arrival = Pipeline (estimates) + TrueSeconds + costs + its end

The measured profiles (phase means of real pipelines) and the costs of switching between them are here too,
since an arrival is mostly made from one: `profiled_arrival`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from rlmux.core.errors import UserError
from rlmux.core.events import UsageRestored
from rlmux.core.model import (
    Cluster,
    Footprint,
    Phase,
    PhaseSeconds,
    Pipeline,
    PipelineId,
    Pool,
    RolloutTail,
    Stage,
)
from rlmux.core.queue_order import ShareSettings
from rlmux.sim import data_tables
from rlmux.sim.clients import ClientBatch
from rlmux.sim.models.neighbour_slowdown import Neighbours
from rlmux.sim.spot_trace import SpotTrace
from rlmux.sim.world import NO_SWITCH, STEADY, SwitchSeconds, TrueSeconds, Variation

H20_USD_PER_GPU_HOUR = 1.76
H800_USD_PER_GPU_HOUR = 5.28
GPUS_PER_NODE = 8
LIMIT_FACTOR = 2.0
"""Default ratio of a step's seconds with all answers at the token limit to its mean seconds: our choice."""
SYNCED = (Stage.GENERATE, Stage.UPDATE, Stage.PUBLISH)
"""Stages of a step whose weight sync takes seconds."""
_GB = 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """One pipeline's appearance, and the truth about it."""

    submit_s: float
    pipeline: Pipeline
    world: TrueSeconds
    depart_s: float | None = None
    """Time at which the pipeline is cancelled; None: it leaves when its steps are done."""
    colocated_world: TrueSeconds | None = None
    """True durations with both phases on the training pool's GPUs; None: as `world`."""
    switch: SwitchSeconds = NO_SWITCH
    batches: tuple[ClientBatch, ...] = ()
    """What its client announces, where its work arrives; it is done when all have ended."""
    safe_point_s: float = 0.0
    """Seconds from a Pause of a filler's rollout until it stops; 0 for other pipelines, which stop at once."""
    tokens_per_step: float = 0.0
    """Mean prompt and response tokens of a step; 0 where they are unknown."""
    model: str = ""
    """Size of its model, such as `7B`; empty where it is unknown."""

    def solo_s(self, step: int) -> float:
        """Seconds of a step alone, as a run's summary counts them: with staleness its rollout overlaps the rest."""
        whole_s = self.world.solo_s(step)
        if not self.pipeline.staleness:
            return whole_s
        rollout_s = self.world.seconds(Stage.GENERATE, step)
        return max(rollout_s, whole_s - rollout_s)


MAX_STEPS = 10_000_000
"""Steps of a pipeline that a simulation takes on: some 40 million events."""
MAX_NODES = 1000
"""Nodes of a phase of a pipeline that a simulation takes on: each has a shard in every step, and placement weighs them
against each other."""
MAX_TIME_S = 1e10
"""Latest time of a trace, in seconds: with later ones a step's seconds would be lost in rounding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Everything a simulation needs but the policy."""

    name: str
    cluster: Cluster
    arrivals: tuple[Arrival, ...]
    """Arrivals in order of submission."""
    seed: int = 0
    shares: ShareSettings | None = None
    """What users and projects are entitled to; None: nothing was set."""
    spot: SpotTrace | None = None
    """Prices over time and nodes that are taken back; None: prices are the cluster's, and all nodes stay."""
    about: str = ""
    """One line for tables and pictures."""
    neighbours: Neighbours | None = None
    """Slowdowns of orders on devices of one machine; None: there are none."""
    notes: tuple[str, ...] = ()
    """What of the figures' terms was not given, and what was taken instead: a line each."""
    usage: UsageRestored | None = None
    """What users and projects had used before second 0; None: nothing."""

    @property
    def end_s(self) -> float | None:
        """Time at which the last pipeline has left, where all departures are given: cost is averaged until then."""
        departures = [arrival.depart_s for arrival in self.arrivals if arrival.depart_s is not None]
        return max(departures) if len(departures) == len(self.arrivals) else None


def check_ends(workload: Workload) -> None:
    """Raises UserError for a pipeline that no simulation gets to the end of."""
    check_nodes(workload)
    for arrival in workload.arrivals:
        pipeline = arrival.pipeline
        if pipeline.work_arrives:
            continue
        if pipeline.num_steps is None and arrival.depart_s is None:
            raise UserError(
                f"workload {workload.name!r}: pipeline {pipeline.id} never ends: it has neither a number of steps nor "
                "a time at which it leaves; accepted: one of them"
            )
        steps = steps_of(pipeline.num_steps, arrival.submit_s, arrival.depart_s, arrival.world.solo_s(1))
        if steps > MAX_STEPS:
            raise UserError(
                f"workload {workload.name!r}: pipeline {pipeline.id} makes {steps:.4g} steps; accepted in a "
                f"simulation: at most {MAX_STEPS:,}"
            )
        shards = steps * pipeline.num_rollout_nodes
        if shards > MAX_STEPS:
            raise UserError(
                f"workload {workload.name!r}: pipeline {pipeline.id} has {shards:.4g} rollout shards, one a node "
                f"and step; accepted in a simulation: at most {MAX_STEPS:,}"
            )


def check_nodes(workload: Workload) -> None:
    """Raises UserError for a pipeline of more nodes than placement can weigh."""
    for arrival in workload.arrivals:
        given = arrival.pipeline
        for phase, num_nodes in ((Phase.ROLLOUT, given.num_rollout_nodes), (Phase.TRAIN, given.num_train_nodes)):
            if num_nodes > MAX_NODES:
                raise UserError(
                    f"workload {workload.name!r}: pipeline {given.id} requests {num_nodes:,} {phase} nodes; "
                    f"accepted in a simulation: at most {MAX_NODES:,}"
                )


def steps_of(num_steps: int | None, submit_s: float, depart_s: float | None, solo_s: float) -> float:
    """Steps that a pipeline makes at most; a time at which it leaves may come first."""
    by_clock = math.inf if depart_s is None else (depart_s - submit_s) / max(solo_s, 1e-9)
    return min(by_clock, math.inf if num_steps is None else num_steps)


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseProfile:
    """Mean phase seconds of one model at one response cap."""

    name: str
    disaggregated: PhaseSeconds
    colocated: PhaseSeconds

    @property
    def model(self) -> str:
        return self.name.partition("_")[0]

    @property
    def num_nodes(self) -> int:
        """Nodes per pool in the measured set-up."""
        return 2 if self.model == "32B" else 1


def notes_of_prices(cluster: Cluster, spot_pools: Sequence[str] = ()) -> tuple[str, ...]:
    """A line for each pool without a price beside one with a price. `spot_pools`: pools with a price over time."""
    free = [name for name, pool in cluster.pools.items() if not pool.usd_per_gpu_hour and name not in spot_pools]
    if len(free) == len(cluster.pools):
        return ()
    return tuple(
        f"nodes of pool {name} cost nothing, as it has no price; accepted: cluster.pools.{name}.usd_per_gpu_hour"
        for name in free
    )


def free_of_costs(arrivals: Sequence[Arrival]) -> tuple[str, ...]:
    """A line for the pipelines whose switches are not known, and therefore free; of these, those whose sync is, too."""
    free = [arrival for arrival in arrivals if arrival.switch == NO_SWITCH]
    if not free:
        return ()
    which = "every pipeline" if len(free) == len(arrivals) else f"{len(free)} of {len(arrivals)} pipelines"
    if any(arrival.pipeline.estimate is not None and arrival.pipeline.estimate.sync_s for arrival in free):
        return (f"switches are free for {which}: their seconds are missing (rollout_switch_s, train_switch_s, ...)",)
    return (
        f"switches and weight sync are free for {which}: their seconds are missing (rollout_switch_s, sync_s, ...)",
    )


def profiles() -> Mapping[str, PhaseProfile]:
    """The 16 measured profiles, by name such as `7B_8k`."""
    return {
        row["profile"]: PhaseProfile(
            name=row["profile"],
            disaggregated=PhaseSeconds(rollout_s=float(row["rollout_s"]), train_s=float(row["train_s"])),
            colocated=PhaseSeconds(
                rollout_s=float(row["colocated_rollout_s"]), train_s=float(row["colocated_train_s"])
            ),
        )
        for row in data_tables.rows("weave_profiles")
    }


def profiled_arrival(
    name: str,
    profile: PhaseProfile,
    *,
    submit_s: float,
    slo_slowdown: float,
    depart_s: float | None = None,
    num_steps: int | None = None,
    num_rollout_nodes: int | None = None,
    num_train_nodes: int | None = None,
    costs: bool = True,
    has_footprint: bool = False,
    variation: Variation = STEADY,
    slo_probability: float | None = None,
    tail: RolloutTail | None = None,
) -> Arrival:
    """A pipeline whose estimate is the profile's means, in a world where these hold up to the variation.

    `costs`: switches and weight sync take what was measured for the model, in the world and in the estimate alike.
    `tail`: how rollouts end, likewise; with both phases on training nodes they keep these.
    """
    row = _switch_row(profile.model)
    sync_s = sync_seconds(profile.model) if costs else 0.0
    switch = switch_seconds(profile.model) if costs else NO_SWITCH
    footprint = Footprint()
    if has_footprint:
        footprint = Footprint(
            rollout_host_bytes=float(row["rollout_host_gb"]) * _GB,
            train_host_bytes=float(row["train_host_gb"]) * _GB,
        )
    return Arrival(
        submit_s=submit_s,
        depart_s=depart_s,
        pipeline=Pipeline(
            id=PipelineId(name),
            num_steps=num_steps,
            stages=SYNCED if costs else (Stage.GENERATE, Stage.UPDATE),
            num_rollout_nodes=num_rollout_nodes or profile.num_nodes,
            num_train_nodes=num_train_nodes or profile.num_nodes,
            estimate=replace(profile.disaggregated, sync_s=sync_s),
            colocated_estimate=profile.colocated,
            slo_slowdown=slo_slowdown,
            slo_probability=slo_probability,
            limit=None if slo_probability is None else at_token_limit(profile.disaggregated),
            footprint=footprint,
            switch=switch.estimate if costs else None,
            tail=tail,
        ),
        world=TrueSeconds.of_phases(profile.disaggregated, sync_s=sync_s, variation=variation, tail=tail),
        colocated_world=TrueSeconds.of_phases(profile.colocated, variation=variation),
        switch=switch,
        model=profile.model,
    )


def at_token_limit(phases: PhaseSeconds) -> PhaseSeconds:
    """Seconds of a step whose answers all reach the token limit, without data on these."""
    return PhaseSeconds(rollout_s=LIMIT_FACTOR * phases.rollout_s, train_s=LIMIT_FACTOR * phases.train_s)


def sync_seconds(model: str) -> float:
    """Seconds in which new weights reach the rollout nodes."""
    return float(_switch_row(model)["sync_s"])


def switch_seconds(model: str) -> SwitchSeconds:
    """Cold and warm starts of one 8-GPU node, of `3B`, `4B`, `7B`, `8B`, `14B` or `32B`."""
    row = _switch_row(model)
    return SwitchSeconds(
        cold_rollout_s=float(row["cold_rollout_s"]),
        cold_train_s=float(row["cold_train_s"]),
        warm_rollout_s=float(row["warm_rollout_s"]),
        warm_train_s=float(row["warm_train_s"]),
    )


def h20_h800_cluster(
    *,
    num_rollout_nodes: int | None = None,
    num_train_nodes: int | None = None,
    host_memory_gb: float | None = None,
    devices_per_node: int = 1,
) -> Cluster:
    """Rollout on H20, training on H800, 8 GPUs a node; the prices of the paper's curves (H20 = H800 / 3)."""
    memory_bytes = math.inf if host_memory_gb is None else host_memory_gb * _GB
    pools = (
        Pool(
            name="h20", phase=Phase.ROLLOUT, num_nodes=num_rollout_nodes, gpus_per_node=GPUS_PER_NODE,
            devices_per_node=devices_per_node, usd_per_gpu_hour=H20_USD_PER_GPU_HOUR,
            host_memory_bytes=memory_bytes,
        ),
        Pool(
            name="h800", phase=Phase.TRAIN, num_nodes=num_train_nodes, gpus_per_node=GPUS_PER_NODE,
            usd_per_gpu_hour=H800_USD_PER_GPU_HOUR, host_memory_bytes=memory_bytes,
        ),
    )  # fmt: skip
    return Cluster(pools={pool.name: pool for pool in pools})


def _switch_row(model: str) -> Mapping[str, str]:
    nearest = {"4B": "3B", "8B": "7B"}.get(model, model)
    return next(row for row in data_tables.rows("switch_costs") if row["model"] == nearest)
