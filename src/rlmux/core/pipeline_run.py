"""One pipeline as the scheduler sees it: its status, and a record for each concern.

    PipelineRun ── admission   its wait for nodes                       written by admission_queue
                ── parking     whether it gives its nodes back          written by parking
                ── nodes       where it is pinned                       written by groups; residency by leases;
                               what its relocations save                written by placer
                ── cycle       its slots in its group's cycle           written by groups
                ── step        the rollout and the training under way   written by step_machine, orders and batches
                ── estimates   what its steps are believed to take      written by expectations

Status changes in `StepMachine.move_pipeline` alone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from rlmux.core.estimation.estimates import StepHistory
from rlmux.core.estimation.measured_steps import DoneSteps, MeasuredSteps
from rlmux.core.estimation.on_demand_seconds import RequestBatchSeconds
from rlmux.core.model import (
    DeviceId,
    MeasuredSeconds,
    OrderId,
    Phase,
    Pipeline,
    PipelineId,
    PipelineStatus,
    Placement,
    Stage,
)
from rlmux.core.placement.step_bounds import StepBounds
from rlmux.core.work import Order, RequestBatch, RolloutShard, TrainingStage, WorkState


@dataclass(slots=True)
class Admission:
    """The wait of a pipeline for nodes."""

    is_held: bool
    """Whether its user keeps it from starting."""
    rank: int
    """Place among its account's own waiting pipelines; lower ones are offered room first."""
    waiting_since_s: float
    """Time from which on it waits, or waited, for its last admission."""
    reason: str = ""
    """Why it waits, failed or was refused; empty otherwise."""
    admitted_s: float = 0.0
    """Time of the last admission."""
    reserved_start_s: float = math.inf
    """Earliest start that was ever reserved for it: from then on no later pipeline is admitted before it."""
    restart_step: int = 0
    """The last step whose result is kept, from which it begins when it is placed; -1 before the SFT warm-up."""


@dataclass(slots=True)
class Parking:
    """Whether a pipeline gives its nodes back at its next step boundary."""

    is_parking: bool = False
    """Whether it does."""
    parks_for: PipelineId | None = None
    """Waiting pipeline that it makes room for; None where its user parks it, its quota or its turn."""
    is_leaving: bool = False
    """Whether `Park` was ordered and `PipelineParked` has not come."""
    num_parks: int = 0
    """How often it was parked to make room for another."""


@dataclass(slots=True)
class PinnedNodes:
    """Where a pipeline is pinned."""

    placement: Placement | None = None
    """Nodes and group; None while it is not placed."""
    next_placement: Placement | None = None
    """Placement from its next step boundary on, which the ledger counts already; None: it stays where it is."""
    rollout_devices: tuple[DeviceId, ...] = ()
    """Devices of its rollout nodes, one shard each."""
    train_devices: tuple[DeviceId, ...] = ()
    """Devices of its training nodes; a training stage takes all of them."""
    host_resident: set[tuple[Phase, DeviceId]] = field(default_factory=set)
    """Devices to which a load is warm, as state was there before (membership tests only)."""


@dataclass(slots=True)
class CycleCounts:
    """A pipeline's place in the cyclic order of its group."""

    steps_per_cycle: int = 1
    """Steps in each meta-iteration of its group."""
    cycle_index: int = 0
    """Number in the cyclic order of its group, from 0."""
    phases_started: dict[tuple[Phase, DeviceId], int] = field(default_factory=dict)
    """Phases begun on each device; they determine the next member of the meta-iteration."""


@dataclass(slots=True)
class StepProgress:
    """Where a pipeline is in its steps."""

    rollout_step: int = 0
    """The step whose rollout is open, or the last one generated."""
    shards: dict[DeviceId, RolloutShard] = field(default_factory=dict)
    """Shards of `rollout_step`, in the order of `rollout_devices`. Empty where no rollout is open."""
    generated_step: int = 0
    """Last step whose trajectories are all complete."""
    train_step: int = 0
    """The step in training, or the last one trained. 0 is the SFT warm-up."""
    training: TrainingStage = field(default_factory=TrainingStage)
    trained_step: int = -1
    """Last step whose training is complete; -1 before the SFT warm-up."""
    published_version: int = -1
    """Newest weight version that rollouts may sample from; -1 before the SFT warm-up."""
    is_reward_overdue: bool = False
    """Its group does not wait for its rewards any longer."""
    orders: dict[OrderId, Order] = field(default_factory=dict)
    """Its orders that have not ended, oldest first."""
    batches: dict[tuple[Phase, ...], RequestBatch] = field(default_factory=dict)
    """Work of each kind, where it arrives; empty for a pipeline with planned steps."""


@dataclass(slots=True)
class StepBeliefs:
    """What a pipeline's steps are believed to take."""

    history: StepHistory
    """Seconds of its last steps: estimates for the policies that plan ahead."""
    done: DoneSteps
    """What its steps that are done took alone."""
    bounds: StepBounds | None
    """Mean and spread of its coming steps, which it is planned with where it has a probability; None: it has none."""
    has_given_estimate: bool
    """Whether its user gave an estimate, which stands until its steps drift; one with `held` was measured before."""
    has_left_estimate: bool = False
    """Whether its steps have drifted from that estimate."""
    of_alike: MeasuredSeconds | None = None
    """What pipelines alike took, while it is planned with that."""
    measured: MeasuredSteps = field(default_factory=MeasuredSteps)
    """Solo seconds of its last whole steps, which it is planned with where its user gave no estimate."""
    batch_seconds: RequestBatchSeconds = field(default_factory=RequestBatchSeconds)
    """Seconds of its last batches, and of its client's thinking between them."""
    emitted_slowdown: float | None = None
    """Expected step slowdown as last emitted; None before the first."""
    emitted_probability: float | None = None
    """The probability that was last stated."""


@dataclass(slots=True)
class PipelineRun:
    """One pipeline; see the module."""

    pipeline: Pipeline
    """As it is planned with: its estimate is the newest."""
    submitted_s: float
    """Time of submission."""
    sequence: int
    """Place in the order of submission, in which waiting pipelines are tried."""
    status: PipelineStatus = PipelineStatus.WAITING
    submitted: Pipeline = field(init=False)
    """As it was submitted."""
    admission: Admission = field(init=False)
    parking: Parking = field(default_factory=Parking)
    nodes: PinnedNodes = field(default_factory=PinnedNodes)
    cycle: CycleCounts = field(default_factory=CycleCounts)
    step: StepProgress = field(default_factory=StepProgress)
    estimates: StepBeliefs = field(init=False)
    train_stages: tuple[Stage, ...] = field(init=False)
    """The pipeline's training stages, cached for every training order."""
    is_filler: bool = field(init=False)
    """Whether it takes only what no other pipeline wants, cached for every order."""

    def __post_init__(self) -> None:
        self.submitted = given = self.pipeline
        self.admission = Admission(given.is_held, given.rank, self.submitted_s)
        first_kept = given.first_step - 1
        self.admission.restart_step = -1 if given.has_sft_warmup and first_kept == 0 else first_kept
        bounds = None
        if given.slo_probability is not None and not given.work_arrives:
            bounds = StepBounds(given)
            self.pipeline = bounds.first_plan()
        self.estimates = StepBeliefs(
            StepHistory(self.pipeline),
            DoneSteps(given),
            bounds,
            has_given_estimate=given.estimate is not None and given.held is None,
            has_left_estimate=bounds is not None and self.pipeline.estimate != given.estimate,
        )
        self.train_stages = self.pipeline.train_stages
        self.is_filler = self.pipeline.is_filler

    @property
    def waits_for_user_code(self) -> bool:
        """Its open rollout has come to rest at its rewards, or at environments that have not replied, or it is being
        parked: no member of its group waits for it."""
        if self.step.is_reward_overdue or self.parking.is_leaving:
            return True
        left = [shard.state for shard in self.step.shards.values() if shard.state is not WorkState.DONE]
        return bool(left) and all(state is WorkState.WAITING_FOR_ENV for state in left)


def device_keys(run: PipelineRun) -> list[tuple[Phase, DeviceId]]:
    """Every device of the pipeline with the phase that it serves there, rollout first."""
    rollout = [(Phase.ROLLOUT, device) for device in run.nodes.rollout_devices]
    return rollout + [(Phase.TRAIN, device) for device in run.nodes.train_devices]
