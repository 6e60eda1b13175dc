"""The vocabulary of the scheduler: pipelines, pools, nodes, devices, stages, placements.

    cluster ── pools ── nodes ── devices          pipeline ── steps ── stages ── (phase)
                         │         │
               placement pins      an order leases
               to nodes            devices

A **node** is what placement hands out and what has host memory; a **device** is what an order leases: a GPU,
the GPUs that act as one, a set of CPU cores, or (in cluster-scale simulations) a whole node.

One step of a pipeline with staleness k (0 = on-policy), where step n trains version n-1 into version n:

    GENERATE n ─▶ REWARD ─▶ REFERENCE_LOGPROBS ─▶ OLD_LOGPROBS ─▶ UPDATE ─▶ PUBLISH n
        ▲                                                                       │
        └────────────────── needs version max(0, n-1-k), exactly ◀──────────────┘

A pipeline has the stages that it computes: reference log-probs with a KL penalty, old ones with several updates a step.
The version is fixed by the step, not by what happens to be newest: so the result does not depend on timing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import NamedTuple, NewType

PipelineId = NewType("PipelineId", str)
"""The pipeline's name in the user's file."""

GroupId = NewType("GroupId", int)
OrderId = NewType("OrderId", int)


class NodeId(NamedTuple):
    """A node: its pool's name and its number there."""

    pool: str
    index: int  # type: ignore[assignment]  # hides tuple.index, which no caller needs of an id

    def __str__(self) -> str:
        return f"{self.pool}-{self.index}"


class DeviceId(NamedTuple):
    """A device: its node's pool and number, and its own number there."""

    pool: str
    node: int
    index: int  # type: ignore[assignment]  # as above

    @property
    def node_id(self) -> NodeId:
        return NodeId(self.pool, self.node)

    def __str__(self) -> str:
        return f"{self.pool}-{self.node}.{self.index}"


class Phase(StrEnum):
    """A kind of work with one resource profile that devices are pooled for."""

    __hash__ = str.__hash__  # an Enum's own is Python code, and these are in the keys of every decision

    ROLLOUT = "rollout"
    TRAIN = "train"
    ENV = "env"
    """Rewards, in the pipeline's env worker. Holds no device."""
    SYNC = "sync"
    """Publications and migrations, which carry weights and trajectories. Holds no device."""


class Resident(NamedTuple):
    """A pipeline's state for one phase, as it lies on a device: a rollout worker's or a trainer's."""

    pipeline: PipelineId
    phase: Phase


class Stage(StrEnum):
    """A node of a step's dataflow."""

    __hash__ = str.__hash__  # as above

    SFT_WARMUP = "sft_warmup"
    GENERATE = "generate"
    REWARD = "reward"
    REFERENCE_LOGPROBS = "reference_logprobs"
    OLD_LOGPROBS = "old_logprobs"
    UPDATE = "update"
    PUBLISH = "publish"


class SubStage(StrEnum):
    """A piece of a stage on one worker, with one compute and memory character (JigsawRL section 3)."""

    __hash__ = str.__hash__  # as above

    PREFILL = "prefill"
    DENSE_DECODE = "dense"
    """Decode of half the slots or more at once."""
    TAIL_DECODE = "tail"
    """Decode of fewer sequences: bound by latency and memory."""
    TOOL_WAIT = "tool_wait"
    """Every unfinished trajectory waits for its environment: the device computes nothing."""
    REFERENCE = "reference"
    OLD_LOGPROBS = "old_logprobs"
    UPDATE = "update"
    """Stands for all of training where only one character of it was measured."""


ARRIVING_KINDS: tuple[tuple[Phase, ...], ...] = (
    (Phase.ROLLOUT,),
    (Phase.TRAIN,),
    (Phase.ROLLOUT, Phase.TRAIN),
)
"""The kinds of work that can arrive: for the devices of one phase, or of both, which are then granted together."""


def dense_threshold_of(num_slots: int) -> int:
    """Sequences in one engine iteration from which decode counts as dense rather than as a tail: half of the slots
    (JigsawRL cuts at 128 of 256)."""
    return max(1, (num_slots + 1) // 2)


def decode_sub_stage(num_active: int, dense_threshold: int) -> SubStage:
    """Dense or tail, by the sequences that one iteration decodes."""
    return SubStage.DENSE_DECODE if num_active >= dense_threshold else SubStage.TAIL_DECODE


PHASE_BY_STAGE: Mapping[Stage, Phase] = {
    Stage.SFT_WARMUP: Phase.TRAIN,
    Stage.GENERATE: Phase.ROLLOUT,
    Stage.REWARD: Phase.ENV,
    Stage.REFERENCE_LOGPROBS: Phase.TRAIN,
    Stage.OLD_LOGPROBS: Phase.TRAIN,
    Stage.UPDATE: Phase.TRAIN,
    Stage.PUBLISH: Phase.SYNC,
}

SUB_STAGE_BY_STAGE: Mapping[Stage, SubStage] = {
    Stage.SFT_WARMUP: SubStage.UPDATE,
    Stage.REFERENCE_LOGPROBS: SubStage.REFERENCE,
    Stage.OLD_LOGPROBS: SubStage.OLD_LOGPROBS,
    Stage.UPDATE: SubStage.UPDATE,
}
"""The one sub-stage of each training stage. A rollout has several, and other stages hold no device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """Interchangeable nodes kept for one phase, or for both."""

    name: str
    phase: Phase
    serves_both_phases: bool = False
    """Whether rollouts run here too; its phase is then TRAIN, and the cluster has no other pool."""
    num_nodes: int | None = None
    """Nodes that there are; None for as many as are paid for (a what-if on a cloud)."""
    devices_per_node: int = 1
    gpus_per_node: int = 1
    """GPUs of a node, for counting and billing: a device may stand for several."""
    usd_per_gpu_hour: float = 0.0
    host_memory_bytes: float = math.inf
    """Host memory of one node, in bytes: what all pipelines pinned to it may keep resident together."""
    device_memory_bytes: float = math.inf
    """Memory of one device, of all its GPUs, in bytes."""
    spills_to_disk: bool = False
    """Whether states that are off their device go to disk where host memory is full: only processes must fit in it."""
    shares_hardware: bool = False
    """Whether the cluster has more devices than there are GPUs, or cores to spare: each takes time from others."""
    machines: tuple[str, ...] = ()
    """Name of each node's machine, by the node's number; empty: all nodes are on one machine, or it is unknown."""

    def __post_init__(self) -> None:
        if self.machines and len(self.machines) != self.num_nodes:
            raise ValueError(f"pool {self.name}: machines names {len(self.machines)} of {self.num_nodes} nodes")

    @property
    def usd_per_node_hour(self) -> float:
        return self.usd_per_gpu_hour * self.gpus_per_node

    @property
    def gpus_per_device(self) -> int:
        """GPUs that a worker on one device may compute on; a training worker computes on one."""
        return max(1, self.gpus_per_node // self.devices_per_node) if self.phase is Phase.ROLLOUT else 1

    @property
    def num_gpus(self) -> int | None:
        """GPUs of all devices, as workers compute on them; None without a number of nodes."""
        return None if self.num_nodes is None else self.num_nodes * self.devices_per_node * self.gpus_per_device

    def devices(self, node: NodeId) -> tuple[DeviceId, ...]:
        return tuple(DeviceId(node.pool, node.index, index) for index in range(self.devices_per_node))


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Every pool, by name, in the order of the file."""

    pools: Mapping[str, Pool]

    def pool_for(self, phase: Phase) -> Pool | None:
        """The first pool kept for this phase."""
        return next((pool for pool in self.pools.values() if pool.phase is phase), None)

    def pool_serving(self, phase: Phase) -> Pool | None:
        """The pool whose nodes do this phase's work: the one kept for it, or else the training pool."""
        return self.pool_for(phase) or self.pool_for(Phase.TRAIN)

    def has_node(self, node: NodeId) -> bool:
        """Whether there is such a node; an uncounted pool has every number."""
        pool = self.pools.get(node.pool)
        return pool is not None and 0 <= node.index < (math.inf if pool.num_nodes is None else pool.num_nodes)

    @property
    def machines(self) -> Mapping[str, Sequence[str]]:
        """`Pool.machines` by pool, where they are known."""
        return {name: pool.machines for name, pool in self.pools.items() if pool.machines}

    def with_machines(self, machines: Mapping[str, Sequence[str]]) -> Cluster:
        """The cluster with these machines by pool, unknown for other pools and those without a number of nodes."""
        pools = {
            name: replace(pool, machines=() if pool.num_nodes is None else tuple(machines.get(name, ())))
            for name, pool in self.pools.items()
        }
        return Cluster(pools=pools)

    def machine_of(self, node: NodeId) -> str | None:
        """Name of the node's machine; None where it is not known."""
        machines = self.pools[node.pool].machines
        return machines[node.index] if machines else None

    def node_names(self) -> str:
        """The names of all nodes, in words: `rollout-0 to rollout-3, train-0`."""
        return ", ".join(_node_names(pool) for pool in self.pools.values() if pool.num_nodes != 0)

    @property
    def is_one_pool(self) -> bool:
        """Whether its nodes serve both phases, in one pool."""
        return any(pool.serves_both_phases for pool in self.pools.values())


def _node_names(pool: Pool) -> str:
    if pool.num_nodes is None:
        return f"{pool.name}-0 and all that follow"
    return f"{pool.name}-0" + (f" to {pool.name}-{pool.num_nodes - 1}" if pool.num_nodes > 1 else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseSeconds:
    """Solo seconds of one step's two phases, on the nodes that the pipeline requests."""

    rollout_s: float
    train_s: float
    sync_s: float = 0.0
    """Seconds between the end of training and the next rollout, which hold no device: the new weights are published."""

    @property
    def solo_s(self) -> float:
        """T_solo = T_roll + T_train (RollMux section 4.1), and the sync where it is known."""
        return self.rollout_s + self.train_s + self.sync_s


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredSeconds:
    """Solo seconds that a pipeline's own last steps took, as a distribution."""

    num_steps: int
    """Steps that the quantiles are of."""
    low: PhaseSeconds
    """10 % quantile of each phase."""
    median: PhaseSeconds
    high: PhaseSeconds
    """90 % quantile of each phase."""
    held: PhaseSeconds
    """Median of the seconds for which each phase held its devices: computing and hand-overs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AlikeSeconds:
    """What the steps of pipelines alike took, as the newest of them measured it."""

    alike: str
    """Their `Pipeline.alike`."""
    num_rollout_nodes: int
    num_train_nodes: int
    is_colocated: bool
    """Whether the training nodes were rollout nodes, too."""
    measured: MeasuredSeconds


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundedSteps:
    """Upper bounds on the mean of a pipeline's coming steps, and the steps that they follow from."""

    bound: PhaseSeconds
    """Solo seconds of each phase that the mean of its coming steps stays below with the stated probability."""
    seen: tuple[tuple[float, float], ...] = ()
    """Solo seconds of rollout and of training of its last steps, oldest first, on the nodes that it requests."""
    num_rollout_nodes: int = 0
    """Nodes that these steps rolled out on; 0 before the first."""
    is_limit_exceeded: bool = False
    """Whether a step has taken longer than one at the token limit: the limit bounds nothing from then on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SwitchEstimate:
    """Seconds of a warm switch to each phase's state: another state leaves the device, and this one comes back."""

    rollout_s: float
    train_s: float
    cold_rollout_s: float = 0.0
    """Seconds of the first start of its rollouts on a node, where they are known."""
    cold_train_s: float = 0.0
    """Seconds of the first start of its training on a node, where they are known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MigrationEstimate:
    """Seconds for each unfinished trajectory that migrates with its context."""

    copy_s: float = math.inf
    """Seconds to copy its KV cache to the target; infinite where that is impossible."""
    recompute_s: float = math.inf
    """Seconds in which the target computes its KV cache again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TailPoint:
    """A moment of a rollout at which what is left of it may go on on a part of its node."""

    num_left: int
    """Trajectories of the step that are left."""
    begins: float
    """Part of the rollout's seconds after which no more are left."""
    growth: float
    """Part of the rollout's seconds by which it ends later if they go on there from then on, their contexts computed
    again included."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutTail:
    """How a rollout ends on nodes of several GPUs of which each is one device."""

    points: tuple[TailPoint, ...]
    """Moments at which its tail may leave the rest of its nodes, the earliest first."""
    device_fraction: float
    """Part of each node that the tail keeps."""

    def at(self, num_left: int) -> TailPoint | None:
        """The first moment at which no more trajectories are left than so many; None where it has none."""
        return next((point for point in self.points if point.num_left <= num_left), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """Bytes a resident pipeline keeps on each node it is pinned to."""

    rollout_host_bytes: float = 0.0
    train_host_bytes: float = 0.0
    rollout_device_bytes: float | None = None
    """Bytes on each device while its rollout state is there; None: unknown, it fills the device."""
    train_device_bytes: float | None = None
    """Bytes on each device while its training state is there; None: unknown, it fills the device."""


class Urgency(StrEnum):
    """Urgency of a waiting pipeline: the more urgent is offered room first."""

    __hash__ = str.__hash__  # as above

    URGENT = "urgent"
    NORMAL = "normal"
    BACKGROUND = "background"
    FILLER = "filler"
    """It takes only what no other pipeline wants, in no queue: `core/settle/filler_placement.py`."""


QUEUED = (Urgency.URGENT, Urgency.NORMAL, Urgency.BACKGROUND)
"""Urgencies of pipelines that wait in the queue for admission."""


class Visibility(StrEnum):
    """Which users of a server are shown a pipeline."""

    __hash__ = str.__hash__  # as above

    PRIVATE = "private"
    PROJECT = "project"
    PUBLIC = "public"


class Account(NamedTuple):
    """Project and user of a pipeline."""

    project: str
    user: str

    def __str__(self) -> str:
        return "/".join(filter(None, self)) or "no user"


DEFAULT_SLO_PROBABILITY = 0.95
"""`Pipeline.slo_probability` where its user asks for none."""
MEAN = "mean"
"""`slo_probability` in a file that plans with means alone: nothing is kept in hand, no probability is stated."""


class PipelineKind(StrEnum):
    """How a pipeline's work comes about."""

    __hash__ = str.__hash__  # as above

    PLANNED = "planned"
    """It has steps, which the scheduler orders stage by stage."""
    ON_DEMAND = "on_demand"
    """Its work is announced by events: a client's requests, or the phases of a program with its own engine."""
    FILLER = "filler"
    """It takes only what no other pipeline wants, and trains nothing."""


_ABSENT: Mapping[PipelineKind, Mapping[str, object]] = {
    PipelineKind.PLANNED: {},
    PipelineKind.ON_DEMAND: {
        "num_steps": None,
        "has_sft_warmup": False,
        "staleness": 0,
        "first_step": 1,
        "stages": (Stage.GENERATE, Stage.UPDATE),
    },
    PipelineKind.FILLER: {
        "work_arrives": False,
        "has_sft_warmup": False,
        "staleness": 0,
        "slo_slowdown": math.inf,
        "slo_probability": None,
    },
}
"""Fields that a pipeline of a kind does not have, with the value that stands for that."""
_WHY_ABSENT = {
    PipelineKind.ON_DEMAND: "its work arrives, so nothing of it is planned",
    PipelineKind.FILLER: "a filler trains nothing and is promised nothing",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """What the scheduler knows about a pipeline. Estimates only: the truth is with the driver."""

    id: PipelineId
    num_steps: int | None
    """Steps to train; None: it runs until it is cancelled."""
    stages: tuple[Stage, ...] = (Stage.GENERATE, Stage.UPDATE)
    """Stages of one step, in order. Stages of one phase are adjacent."""
    has_sft_warmup: bool = False
    num_rollout_nodes: int = 1
    num_train_nodes: int = 1
    estimate: PhaseSeconds | None = None
    """Solo seconds of a step; None: what steps of pipelines alike took, and its own first steps are measured."""
    held: PhaseSeconds | None = None
    """Seconds for which each phase holds its devices, hand-overs included, where they were measured; None: as
    `estimate`. They are its load in a meta-iteration; its budget is by what it computes."""
    colocated_estimate: PhaseSeconds | None = None
    """Solo seconds of a step with both phases on the training pool's GPUs; None: as `estimate`."""
    slo_slowdown: float = math.inf
    """Largest step slowdown that it accepts, 1.0 or more."""
    slo_probability: float | None = None
    """Probability with which the steps that are left keep its SLO as planned (`core/placement/step_bounds.py`). None:
    planned with the mean of its steps."""
    spread: float = 1.0
    """Factor on its estimate that the mean of its coming steps stays below with that probability, 1.0 or more."""
    limit: PhaseSeconds | None = None
    """Solo seconds of a step whose answers all reach the token limit; None: not known."""
    alike: str = ""
    """Key of the pipelines whose steps are expected to take as long, on as many nodes; empty: none are known."""
    bounded: BoundedSteps | None = None
    """Bounds and steps of an earlier part of its run; None: there was none, or it had no bounds."""
    footprint: Footprint = field(default_factory=Footprint)
    dense_threshold: int | None = None
    """Sequences from which a decode iteration counts as dense; None: half of those that its shards begin with."""
    switch: SwitchEstimate | None = None
    """Seconds of its switches; None: not measured. Placement then counts nothing, dispatch what switches take."""
    migration: MigrationEstimate | None = None
    """Seconds of its migrations, by which the cheaper way is chosen; None: not known, KV caches are copied."""
    tail: RolloutTail | None = None
    """How its rollouts end, where a device stands for a node of several GPUs; None: not known, they keep it."""
    staleness: int = 0
    """Versions by which its rollouts lag behind, always; 0: on-policy."""
    first_step: int = 1
    """First step to run; above 1 after a resume: the steps before it are done and their version is published."""
    rollout_base: str = ""
    """Key of the pipelines with which its rollouts may run in one batch: adapters of one frozen base; empty: none."""
    train_base: str = ""
    """Key of the pipelines with which it may train in one step; empty: none."""
    work_arrives: bool = False
    """Whether its work is announced by events (`WorkArrived`) instead of planned: it has no steps of its own."""
    user: str = ""
    """Name of the user; empty if unknown."""
    project: str = ""
    """Name of the project that is charged for it; empty: its user is."""
    urgency: Urgency = Urgency.NORMAL
    rank: int = 0
    """Its place among its user's own waiting pipelines: lower ones are offered room first."""
    is_held: bool = False
    """Whether it does not start before `HoldReleased`."""
    visibility: Visibility = Visibility.PROJECT
    """Users that a server shows it to, beside its own; decides nothing else."""

    def __post_init__(self) -> None:
        if not self.slo_slowdown >= 1.0:
            raise ValueError(f"pipeline {self.id}: slo_slowdown is {self.slo_slowdown}; it must be 1.0 or more")
        if self.slo_probability is not None and not 0.0 < self.slo_probability < 1.0:
            raise ValueError(
                f"pipeline {self.id}: slo_probability is {self.slo_probability}; it must be above 0 and below 1"
            )
        if self.num_rollout_nodes < 1 or self.num_train_nodes < 1:
            raise ValueError(f"pipeline {self.id}: it needs at least one node for each phase")
        for name, absent in _ABSENT[self.kind].items():
            if (value := getattr(self, name)) != absent:
                raise ValueError(f"pipeline {self.id}: {_WHY_ABSENT[self.kind]}: its {name} is {value}, not {absent}")
        if self.kind is PipelineKind.FILLER:
            if self.train_stages or Stage.PUBLISH in self.stages:
                raise ValueError(f"pipeline {self.id}: a filler trains nothing: its stages are generate and reward")
        elif not self.train_stages:
            raise ValueError(f"pipeline {self.id}: it has no training stage; accepted with urgency filler")

    @property
    def kind(self) -> PipelineKind:
        if self.is_filler:
            return PipelineKind.FILLER
        return PipelineKind.ON_DEMAND if self.work_arrives else PipelineKind.PLANNED

    @property
    def is_filler(self) -> bool:
        """Whether it takes only what no other pipeline wants."""
        return self.urgency is Urgency.FILLER

    @property
    def account(self) -> Account:
        return Account(self.project or self.user, self.user)

    @property
    def copies_kv(self) -> bool:
        """Whether trajectories that migrate take their KV cache along: that is not dearer than computing it again."""
        return self.migration is None or self.migration.copy_s <= self.migration.recompute_s

    def base_of(self, phase: Phase) -> str:
        """Key of the pipelines with which it may compute in one batch; empty: none."""
        return self.rollout_base if phase is Phase.ROLLOUT else self.train_base

    @property
    def train_stages(self) -> tuple[Stage, ...]:
        return tuple(stage for stage in self.stages if PHASE_BY_STAGE[stage] is Phase.TRAIN)


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Where a pipeline is pinned. Both phases may name the same nodes."""

    group: GroupId
    rollout_nodes: tuple[NodeId, ...]
    train_nodes: tuple[NodeId, ...]

    def nodes_of(self, phase: Phase) -> tuple[NodeId, ...]:
        """Nodes of its rollouts, or of its training."""
        return self.rollout_nodes if phase is Phase.ROLLOUT else self.train_nodes

    @property
    def nodes(self) -> tuple[NodeId, ...]:
        """Each node once, rollout nodes first."""
        return tuple(dict.fromkeys(self.rollout_nodes + self.train_nodes))


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkLeft:
    """What is left of a pipeline whose number of steps is known, at one moment."""

    now_s: float
    """Time at which this holds."""
    submitted_s: float
    """Time of its submission, from which its SLO counts."""
    num_left: int
    """Steps that are not trained yet, the open one among them."""
    done_solo_s: float
    """Solo seconds of the steps that are trained, as measured."""
    has_begun: bool = True
    """Whether it runs: one that was placed in this event relocates for nothing."""


class PipelineStatus(StrEnum):
    """Where a pipeline is in its life; `step_machine.py` has the legal moves."""

    WAITING = "waiting"
    """Submitted; no free node would take it yet."""
    RUNNING = "running"
    FINISHED = "finished"
    CANCELLED = "cancelled"
    FAILED = "failed"
    REFUSED = "refused"


class FailureCause(StrEnum):
    """What made a pipeline fail, as far as a rule about retries tells apart."""

    LOST_WORKER = "lost_worker"
    """One of its workers was lost again and again."""
    OUT_OF_MEMORY = "out_of_memory"
    """A device or the machine had too little memory."""
    USER_CODE = "user_code"
    """Its task, reward or environment raised, returned nonsense or did not return."""
    OTHER = "other"
    """Numbers that are not finite, files that are gone, and all else."""


class AdmissionKind(StrEnum):
    """How a pipeline got its nodes (RollMux section 4.2, candidates 1-3)."""

    DIRECT = "direct"
    """It joined the bubbles of an existing group: no new node."""
    SCALED = "scaled"
    """It shares an existing group's training nodes and took new rollout nodes."""
    NEW = "new"
    """A group of its own."""
