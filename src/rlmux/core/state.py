"""What the scheduler remembers. Mutable, and owned by `Scheduler` and its parts alone.

SchedulerState
├── runs:    pipeline ─▶ PipelineRun      where each pipeline is in its steps
│                        ├── shards       the open rollout: device ─▶ RolloutShard
│                        ├── training     TrainingStage, one at a time
│                        └── batches      work that arrived instead: kind ─▶ RequestBatch
├── groups:  group    ─▶ GroupState       its members in cyclic order, its ready work
├── devices: device   ─▶ DeviceState      which orders compute there, whose state is resident
├── orders:  order    ─▶ Order            what was ordered and has not ended
└── dirty:   Dirty                        what the event under way has left to settle

`work` has what shards, training stages, batches and orders are.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from typing import Any

from rlmux.core.decayed_usage import DecayedUsage
from rlmux.core.estimation.alike_seconds import KeptSeconds
from rlmux.core.estimation.batch_slowdowns import BatchSlowdowns
from rlmux.core.model import (
    Account,
    AdmissionKind,
    DeviceId,
    GroupId,
    OrderId,
    Phase,
    PipelineId,
    WorkLeft,
)
from rlmux.core.pipeline_run import PipelineRun
from rlmux.core.placement.group_snapshot import NO_MEMBERS, GroupLook, MemberFacts
from rlmux.core.queue_order import AccountSpent, PipelineWait, Quota, Share, ShareSettings
from rlmux.core.work import Order, ReadyWork, WorkState

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
    """Time of the start, by the estimates; infinite where they do not tell when there is room."""
    awaits: tuple[PipelineId, ...]
    """Pipelines that are to have ended by then, in the order of their estimated ends."""


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
    """Facts about its members; kept by `Groups`."""
    planned: GroupLook | None = None
    """Look of the group when its policy last planned it; None before the first time."""
    planned_s: float = 0.0
    """Time of that plan."""
    has_requested_migrations: bool = False
    """Whether ready work of it was paused to migrate, and its policy chooses about that next."""
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
    newcomer: PipelineRun | None = None
    """Pipeline that was submitted and comes last in the queue: it is tried before the queue is tried as a whole."""
    queue: bool = False
    """The whole queue for admission is to be tried."""
    balance: bool = False
    """Whether the policy is to choose relocations."""
    admitted: dict[PipelineId, tuple[PipelineRun, AdmissionKind]] = field(default_factory=dict)
    """Pipelines that were placed in this event: they begin where the relocations of this event leave them."""
    boundaries: dict[PipelineId, PipelineRun] = field(default_factory=dict)
    """Pipelines that may be at a step boundary: they park, relocate, or open their next rollout."""
    expectations: bool = False
    """What is expected of pipelines may be new."""
    groups: dict[GroupId, GroupState] = field(default_factory=dict)
    """Groups whose policy is to choose what starts."""
    fillers: bool = False
    """Nodes, or what is pinned to them, may have changed: fillers are placed again."""
    policy_faults: list[tuple[str, str]] = field(default_factory=list)
    """Method and error of failed decisions of the policy that are to be reported."""

    def marked(self) -> str:
        """What is dirty, in words."""
        return ", ".join(
            f"{item.name} {', '.join(map(str, value))}" if isinstance(value, dict) else item.name
            for item in fields(self)
            if (value := getattr(self, item.name))
        )

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
    head_tried_s: float = -math.inf
    """Time at which it was last looked whether the head of the queue fits: budgets move with time."""
    groups: dict[GroupId, GroupState] = field(default_factory=dict)
    """Every group that has a member."""
    fillers: GroupState = field(default_factory=lambda: GroupState(FILLERS))
    """The fillers that are placed and their work: no policy sees them."""
    waiting_fillers: dict[PipelineId, PipelineRun] = field(default_factory=dict)
    """Fillers of status WAITING, in the order of submission."""
    wanted_by: dict[DeviceId, GroupId] = field(default_factory=dict)
    """Devices that a filler is to leave, and the group whose work starts there then."""
    devices: dict[DeviceId, DeviceState] = field(default_factory=dict)
    """Every device that a pipeline was ever pinned to."""
    orders: dict[OrderId, Order] = field(default_factory=dict)
    """Every order that has not ended, oldest first."""
    dirty: Dirty = field(default_factory=Dirty)
    beyond_slo: dict[PipelineId, None] = field(default_factory=dict)
    """Placed pipelines whose SLO cannot be promised where they are, as emitted."""
    share_by_account: dict[Account, Share] = field(default_factory=dict)
    """Shares that were set."""
    settings: ShareSettings | None = None
    """The settings that they are part of; None where none were set."""
    quota_by_account: dict[Account, Quota] = field(default_factory=dict)
    """Limits that were set, of projects (no user) and of users (no project)."""
    day: int = 0
    """Day of the run's clock that `charged_today` is of, from 0."""
    charged_today: dict[Account, dict[str, float]] = field(default_factory=dict)
    """Device-seconds of each pool that each account is charged on that day; only where a quota needs them."""
    spent_by_account: dict[Account, AccountSpent] = field(default_factory=dict)
    """Dollars that each project or user with a budget was charged in the last period in which it was charged any."""
    reminders: dict[float, None] = field(default_factory=dict)
    """Future times for which a reminder was requested."""
    usage_by_account: dict[Account, dict[str, DecayedUsage]] = field(default_factory=dict)
    """What each account has used of each pool of late."""
    charged_by_pipeline: dict[PipelineId, dict[str, float]] = field(default_factory=dict)
    """Device-seconds of each pool that each pipeline is charged."""
    held_by_pool: dict[str, float] = field(default_factory=dict)
    """Device-seconds of each pool for which devices were held, counted by device: what all charges add up to."""
    held_devices: dict[DeviceId, HeldDevice] = field(default_factory=dict)
    """Devices whose seconds are being charged: all that a pipeline is pinned to, once accounts are counted."""
    batch_slowdowns: BatchSlowdowns = field(default_factory=BatchSlowdowns)
    """What pipelines of one base lose in one batch."""
    alike: KeptSeconds = field(default_factory=KeptSeconds)
    """What steps of pipelines took, for the next ones alike."""
    num_policy_faults: int = 0
    """Decisions of the policy that failed."""
    policy_faults: dict[tuple[str, str], None] = field(default_factory=dict)
    """Methods and errors of these that were reported, in order."""
    clock: Any = None
    """What a policy counts that gives nodes by turns, and that it alone reads; None under any other."""
    policy_caches: dict[str, Any] = field(default_factory=dict)
    """Caches of the policy, which keeps nothing itself, by their names."""
    now_s: float = 0.0
    """Time of the last event."""
    next_order: int = 1
    """Id of the next order."""
    next_sequence: int = 1
    """Next number of the total order of becoming ready and of being submitted."""

    def group_of(self, run: PipelineRun) -> GroupState:
        """The co-execution group of a pipeline that is placed."""
        assert run.nodes.placement is not None
        return self.groups.get(run.nodes.placement.group, self.fillers)

    def mark_group(self, run: PipelineRun) -> None:
        """Have the policy choose what starts in the pipeline's group."""
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
            num_left=last_step - max(num_before, run.step.trained_step),
            done_solo_s=run.estimates.done.solo_s(run.step.trained_step),
            has_begun=pipeline not in self.dirty.admitted,
        )

    def can_migrate(self, run: PipelineRun, source: DeviceId, target: DeviceId) -> bool:
        """Whether the source's trajectories may leave for the target: none are still to come, the target's own stay."""
        if run.step.shards[target].state is WorkState.MIGRATING:
            return False
        return not any(
            order.migrates_from is not None and source in order.devices for order in run.step.orders.values()
        )

    def next_in_sequence(self) -> int:
        """Take the next number of the total order."""
        self.next_sequence += 1
        return self.next_sequence - 1
