"""What the scheduler remembers. Mutable, and owned by `Scheduler` and its parts alone.

SchedulerState
├── runs:    pipeline ─▶ PipelineRun      where each pipeline is in its steps
│                        ├── shards       the open rollout: device ─▶ RolloutShard
│                        ├── training     TrainingStage, one at a time
│                        └── bursts       work that arrived instead: kind ─▶ Burst
├── groups:  group    ─▶ GroupState       its members in cyclic order, its ready work
├── devices: device   ─▶ DeviceState      which orders compute there, whose state is resident
├── orders:  order    ─▶ Order            what was ordered and has not ended
└── dirty:   Dirty                        what the event under way has left to settle

`work` has what shards, training stages, bursts and orders are.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from rlmux.core.burst_seconds import BurstSeconds
from rlmux.core.estimates import StepHistory
from rlmux.core.group_look import NO_MEMBERS, GroupLook, MemberFacts
from rlmux.core.measured_steps import MeasuredSteps
from rlmux.core.model import (
    Account,
    DeviceId,
    GroupId,
    OrderId,
    Phase,
    Pipeline,
    PipelineId,
    PipelineStatus,
    Placement,
    Stage,
    WorkLeft,
)
from rlmux.core.offers import AccountSpent, PipelineWait, Quota, Share, ShareSettings
from rlmux.core.step_bounds import StepBounds
from rlmux.core.turn_shares import TurnShares
from rlmux.core.usage import DecayedUsage
from rlmux.core.work import Burst, Order, ReadyWork, RolloutShard, TrainingStage, WorkState

FILLERS = GroupId(1_000_000_000)
"""The group that all fillers are in: beyond the numbers of groups that a policy makes."""


@dataclass(slots=True)
class DeviceState:
    """One device: the orders that compute there and the states that lie there."""

    id: DeviceId
    orders: dict[OrderId, float] = field(default_factory=dict)
    """Device fraction of each order computing here; they sum to at most 1."""
    residents: dict[tuple[PipelineId, Phase], float | None] = field(default_factory=dict)
    """Device bytes of each state kept here, least recently used first; None fills the device."""
    memory_bytes: float = math.inf
    """Memory of the device, in bytes."""
    filler: OrderId | None = None
    """The order of a filler that computes here, while no other does; None for none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reservation:
    """The start that is kept for the first pipeline in the queue for admission."""

    pipeline: PipelineId
    start_s: float
    """Time of the start, by the estimates; infinite where they do not say when room will be."""
    awaits: tuple[PipelineId, ...]
    """Pipelines that are to have ended by then, in the order of their estimated ends."""


@dataclass(slots=True)
class PipelineRun:
    """One pipeline: its status, its nodes, and where it is in its steps."""

    pipeline: Pipeline
    submitted_s: float
    """Time of submission."""
    sequence: int
    """Place in the order of submission, in which waiting pipelines are tried."""
    is_held: bool = field(init=False)
    """Whether its user keeps it from starting."""
    rank: int = field(init=False)
    """Place among its account's own waiting pipelines; lower ones are offered room first."""
    status: PipelineStatus = PipelineStatus.WAITING
    """Changed by `StepMachine.move_pipeline` alone."""
    reason: str = ""
    """Why it waits, failed or was refused; empty otherwise."""
    placement: Placement | None = None
    """Nodes and group; None while it is not placed."""
    waiting_since_s: float = field(init=False)
    """Time from which on it waits, or waited, for its last admission."""
    is_parking: bool = False
    """Whether it gives its nodes back at its next step boundary."""
    parks_for: PipelineId | None = None
    """Waiting pipeline that it makes room for so; None where its user parks it, or its quota."""
    is_leaving: bool = False
    """Whether `Park` was ordered and `PipelineParked` has not come."""
    num_parks: int = 0
    """How often it was parked to make room for another."""
    next_placement: Placement | None = None
    """Placement from its next step boundary on, which the ledger counts already; None: it stays where it is."""
    rollout_devices: tuple[DeviceId, ...] = ()
    """Devices of its rollout nodes, one shard each."""
    train_devices: tuple[DeviceId, ...] = ()
    """Devices of its training nodes; a training stage takes all of them."""
    rollout_step: int = 0
    """The step whose rollout is open, or the last one generated."""
    shards: dict[DeviceId, RolloutShard] = field(default_factory=dict)
    """Shards of `rollout_step`, in the order of `rollout_devices`. Empty where no rollout is open."""
    generated_step: int = 0
    """Last step whose trajectories are all complete."""
    train_step: int = 0
    """The step in training, or the last one trained. 0 is the SFT warm-up."""
    training: TrainingStage = field(default_factory=TrainingStage)
    orders: dict[OrderId, Order] = field(default_factory=dict)
    """Its orders that have not ended, oldest first."""
    bursts: dict[tuple[Phase, ...], Burst] = field(default_factory=dict)
    """Work of each kind, where it arrives; empty for a pipeline with planned steps."""
    trained_step: int = -1
    """Last step whose training is complete; -1 before the SFT warm-up."""
    published_version: int = -1
    """Newest weight version that rollouts may sample from; -1 before the SFT warm-up."""
    steps_per_cycle: int = 1
    """Steps in each meta-iteration of its group."""
    cycle_index: int = 0
    """Number in the cyclic order of its group, from 0."""
    phases_started: dict[tuple[Phase, DeviceId], int] = field(default_factory=dict)
    """Phases begun on each device: they say which member is next in the meta-iteration."""
    host_resident: set[tuple[Phase, DeviceId]] = field(default_factory=set)
    """Devices to which a load is warm, as state was there before (membership tests only)."""
    admitted_s: float = 0.0
    """Time of the last admission."""
    is_reward_overdue: bool = False
    """Its group does not wait for its rewards any longer."""
    promised_s: float = math.inf
    """Earliest start that was ever reserved for it: from then on no later pipeline is admitted before it."""
    history: StepHistory = field(init=False)
    """Seconds of its last steps: estimates for the policies that plan ahead."""
    measured: MeasuredSteps = field(default_factory=MeasuredSteps)
    """Solo seconds of its last whole steps, which it is planned with where its user gave no estimate."""
    burst_seconds: BurstSeconds = field(default_factory=BurstSeconds)
    """Seconds of its last bursts, and of its client's thinking between them."""
    told_slowdown: float | None = None
    """The step slowdown that was last said to be expected; None where nothing was said."""
    bounds: StepBounds | None = field(init=False)
    """Bounds of its next step, which it is planned with where it states a probability."""
    told_probability: float | None = None
    """The probability that was last stated."""
    has_given_estimate: bool = field(init=False)
    """Whether its user gave an estimate, which stands until its steps drift; one with `held` was measured before."""
    has_left_estimate: bool = False
    """Whether they have."""
    restart_step: int = 0
    """The last step whose result is kept, from which it begins when it is placed; -1 before the SFT warm-up."""
    train_stages: tuple[Stage, ...] = field(init=False)
    """The pipeline's training stages, kept because every training order asks for them."""
    is_filler: bool = field(init=False)
    """Whether it takes only what no other pipeline wants, kept because every order asks for it."""

    def __post_init__(self) -> None:
        self.is_held, self.rank = self.pipeline.is_held, self.pipeline.rank
        self.waiting_since_s = self.submitted_s
        self.has_given_estimate = self.pipeline.estimate is not None and self.pipeline.held is None
        self.bounds = None
        if self.pipeline.slo_probability is not None and not self.pipeline.work_arrives:
            self.bounds = StepBounds(self.pipeline)
            self.pipeline = self.bounds.first_plan()
            self.has_left_estimate = self.pipeline.estimate != self.bounds.given.estimate
        self.history = StepHistory(self.pipeline)
        self.train_stages = self.pipeline.train_stages
        self.is_filler = self.pipeline.is_filler

    @property
    def waits_for_user_code(self) -> bool:
        """Its open rollout has come to rest at its rewards, or at environments that have not replied, or it is being
        parked: no member of its group waits for it."""
        if self.is_reward_overdue or self.is_leaving:
            return True
        left = [shard.state for shard in self.shards.values() if shard.state is not WorkState.DONE]
        return bool(left) and all(state is WorkState.WAITING_FOR_ENV for state in left)


@dataclass(slots=True)
class GroupState:
    """One co-execution group: its members and their work."""

    id: GroupId
    members: dict[PipelineId, PipelineRun] = field(default_factory=dict)
    """Pipelines of the group, in the order of joining."""
    ready: dict[int, ReadyWork] = field(default_factory=dict)
    """Work of its READY and WAITING_FOR_ENV shards and READY training stages, by sequence."""
    running: dict[OrderId, Order] = field(default_factory=dict)
    """Orders of its members that compute, in the order they were given."""
    members_by_device: dict[tuple[Phase, DeviceId], dict[PipelineId, PipelineRun]] = field(default_factory=dict)
    """Pipelines pinned to each device for each phase."""
    facts: MemberFacts = NO_MEMBERS
    """What its members say together; `Groups` keeps it."""
    planned: GroupLook | None = None
    """Look of the group when its policy last planned it; None before the first time."""
    planned_s: float = 0.0
    """Time of that plan."""
    announced: dict[int, None] = field(default_factory=dict)
    """Ready work, by sequence, whose state the driver was told to read ahead."""
    tail_left: int = 0
    """Trajectories of a step at which its members' rollouts leave their nodes to the next; 0: they keep them."""


@dataclass(slots=True)
class HeldDevice:
    """A device that a pipeline is pinned to, while what accounts use is counted."""

    group: GroupState
    """The group whose members are pinned to it."""
    since_s: float
    """Time up to which its seconds are charged."""


@dataclass(slots=True)
class Dirty:
    """What facts have left to settle, in the order in which `Scheduler.settle` takes it up. Empty between events."""

    over: dict[PipelineId, PipelineRun] = field(default_factory=dict)
    """Pipelines that have ended and run nothing more: their nodes go back."""
    boundaries: dict[PipelineId, PipelineRun] = field(default_factory=dict)
    """Pipelines that may be at a step boundary: they park, relocate, or open their next rollout."""
    newcomer: PipelineRun | None = None
    """Pipeline that was submitted and comes last in the queue: it is tried before the queue is tried as a whole."""
    queue: bool = False
    """The whole queue for admission is to be tried."""
    balance: bool = False
    """The policy is to be asked for relocations."""
    expectations: bool = False
    """What is expected of pipelines may be new."""
    groups: dict[GroupId, GroupState] = field(default_factory=dict)
    """Groups whose policy is to be asked what starts."""
    fillers: bool = False
    """Nodes, or what is pinned to them, may have changed: fillers are placed again."""

    def mark_nodes(self) -> None:
        """Nodes are free that were not: all tiers of placement look again."""
        self.queue = self.balance = self.fillers = True


@dataclass(slots=True)
class SchedulerState:
    """Everything that decisions depend on, but the placement ledger."""

    runs: dict[PipelineId, PipelineRun] = field(default_factory=dict)
    """Every pipeline that was submitted, in that order."""
    has_tails: bool = False
    """Whether one was submitted whose tails may leave their nodes; groups are looked through for them only then."""
    waiting: dict[PipelineId, PipelineRun] = field(default_factory=dict)
    """The pipelines of status WAITING that are no fillers."""
    restored_waits: dict[PipelineId, PipelineWait] = field(default_factory=dict)
    """Waits of earlier parts of the run, of pipelines that have not been submitted again."""
    reservation: Reservation | None = None
    """Start kept for the first of the waiting pipelines that others make room for; None where there is none."""
    groups: dict[GroupId, GroupState] = field(default_factory=dict)
    """Every group that has a member."""
    fillers: GroupState = field(default_factory=lambda: GroupState(FILLERS))
    """The fillers that are placed and their work: no policy sees them."""
    waiting_fillers: dict[PipelineId, PipelineRun] = field(default_factory=dict)
    """Fillers of status WAITING, in the order of submission."""
    wanted_by: dict[DeviceId, GroupId] = field(default_factory=dict)
    """Devices that a filler was told to leave, and the group whose work starts there then."""
    devices: dict[DeviceId, DeviceState] = field(default_factory=dict)
    """Every device that a pipeline was ever pinned to."""
    orders: dict[OrderId, Order] = field(default_factory=dict)
    """Every order that has not ended, oldest first."""
    dirty: Dirty = field(default_factory=Dirty)
    beyond_slo: dict[PipelineId, None] = field(default_factory=dict)
    """Placed pipelines of which was said that their SLO cannot be promised where they are."""
    share_by_account: dict[Account, Share] = field(default_factory=dict)
    """Shares that were set."""
    settings: ShareSettings | None = None
    """The settings that they are part of; None where none were set."""
    quota_by_account: dict[Account, Quota] = field(default_factory=dict)
    """Limits that were set, of projects (no user) and of users (no project)."""
    day: int = 0
    """Day of the run's clock that `charged_today` is of, from 0."""
    charged_today: dict[Account, dict[str, float]] = field(default_factory=dict)
    """Device-seconds of each pool that each account is charged on that day; only where a quota asks for them."""
    spent_by_account: dict[Account, AccountSpent] = field(default_factory=dict)
    """Dollars that each project or user with a budget was charged in the last period in which it was charged any."""
    reminders: dict[float, None] = field(default_factory=dict)
    """Times to come for which a reminder was asked for."""
    usage_by_account: dict[Account, dict[str, DecayedUsage]] = field(default_factory=dict)
    """What each account has used of each pool of late."""
    charged_by_pipeline: dict[PipelineId, dict[str, float]] = field(default_factory=dict)
    """Device-seconds of each pool that each pipeline is charged."""
    held_by_pool: dict[str, float] = field(default_factory=dict)
    """Device-seconds of each pool for which devices were held, counted by device: what all charges add up to."""
    held_devices: dict[DeviceId, HeldDevice] = field(default_factory=dict)
    """Devices whose seconds are being charged: all that a pipeline is pinned to, once accounts are counted."""
    turns: TurnShares = field(default_factory=TurnShares)
    """What pipelines are to receive and received, where they hold nodes by turns."""
    now_s: float = 0.0
    """Time of the last event."""
    next_order: int = 1
    """Id of the next order."""
    next_sequence: int = 1
    """Next number of the total order of becoming ready and of being submitted."""

    def group_of(self, run: PipelineRun) -> GroupState:
        """The co-execution group of a pipeline that is placed."""
        assert run.placement is not None
        return self.groups.get(run.placement.group, self.fillers)

    def mark_group(self, run: PipelineRun) -> None:
        """Have the policy asked what starts in the pipeline's group."""
        group = self.group_of(run)
        self.dirty.groups[group.id] = group

    def work_left(self, pipeline: PipelineId) -> WorkLeft | None:
        """What is left of a submitted pipeline's steps; None where it has no number of them."""
        run = self.runs[pipeline]
        last_step = run.pipeline.num_steps
        if last_step is None:
            return None
        num_before = run.pipeline.first_step - 1
        return WorkLeft(
            now_s=self.now_s,
            submitted_s=run.submitted_s,
            num_steps=last_step - num_before,
            num_left=last_step - max(num_before, run.trained_step),
            done_solo_s=None if run.bounds is None else run.bounds.done_solo_s(run.trained_step),
        )

    def can_migrate(self, run: PipelineRun, source: DeviceId, target: DeviceId) -> bool:
        """Whether the source's trajectories may leave for the target: none are still to come, the target's own stay."""
        if run.shards[target].state is WorkState.MIGRATING:
            return False
        return not any(order.migrates_from is not None and order.devices[0] == source for order in run.orders.values())

    def next_in_sequence(self) -> int:
        """Take the next number of the total order."""
        self.next_sequence += 1
        return self.next_sequence - 1
