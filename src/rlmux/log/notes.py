"""Notes: records of a run's log that the scheduler does not read. Reports, people and resumed runs do.

    StepNote(pipeline="sort", step=1, ...)  ──encode──▶  type "step", {"pipeline":"sort","step":1,...}
                                            ◀──decode──

A field with a default is omitted from the row where it has the default; the others are always written. Reading is
lenient (`value_codec.Record`), so that a log outlives changes of its notes: an unknown type decodes to None, unknown
fields are ignored, and an absent field has its default or the empty value of its type.

Times are in seconds since the run began, unless a field is documented otherwise.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import NoneType
from typing import Any, ClassVar, cast

from rlmux.core.model import DeviceId, FailureCause, OrderId, Phase, PipelineId
from rlmux.log import value_codec


class Note(value_codec.Record):
    """Base of all notes. The time is the row's."""

    __slots__ = ()
    type: ClassVar[str] = ""
    """Type of the row."""
    what: ClassVar[str] = ""
    """Key `what` of the row, by which notes of one type differ; empty: the type has one kind."""

    def __init_subclass__(cls, type: str = "", what: str = "") -> None:
        cls.type, cls.what = type or cls.type, what or cls.what  # slots make a class twice, then without its keywords
        _KINDS[cls.type, cls.what] = cls

    @classmethod
    def upgraded(cls, fields: Mapping[str, Any]) -> Mapping[str, Any]:
        """The fields of an older log in today's form."""
        return fields


_KINDS: dict[tuple[str, str], type[Note]] = {}


def encode(note: Note) -> dict[str, Any]:
    """Fields of the row."""
    row: dict[str, Any] = {}
    for field in dataclasses.fields(cast(Any, note)):
        value = getattr(note, field.name)
        if field.default is dataclasses.MISSING or value != field.default:
            row[field.name] = dataclasses.asdict(value) if isinstance(value, value_codec.Record) else value  # type: ignore[call-overload]
    return {**row, "what": note.what} if note.what else row


def decode(type: str, fields: Mapping[str, Any]) -> Note | None:
    """The note of a row; None for an unknown type. Raises LogError for a field of a wrong kind."""
    kind = _KINDS.get((type, str(fields.get("what", "")))) or _KINDS.get((type, ""))
    return None if kind is None else cast("Note", value_codec.reader(kind)(kind.upgraded(fields), type))


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineNote(Note):
    """Base of notes about one pipeline."""

    pipeline: PipelineId


# ---------------------------------------------------------------------- the run


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumedNote(Note, type="resumed"):
    """The run continues in a new process: every earlier order is over, and the time since the last row is down time."""

    pipelines: Sequence[PipelineId]
    """Unfinished pipelines."""
    retried: Sequence[PipelineId]
    """Failed pipelines that are unfinished again."""
    machines: Mapping[str, Sequence[str]] | None = None
    """`Pool.machines` by pool from now on; None: not known."""
    utc: str | None = None
    """ISO time of this note, so that later rows have a time of day; None: not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EndNote(Note, type="end"):
    """The run's process ended on purpose."""

    pipelines: Mapping[PipelineId, PipelineEndNote]
    """Ends of the pipelines that are over."""
    control_s: float | None
    """CPU seconds of the controller in this process; None in a log without them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DefectNote(Note, type="defect"):
    """A defect of rlmux or of a policy stops the run."""

    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SalvagedNote(Note, type="salvaged"):
    """The log was rewritten from a damaged one."""

    rows: int
    """Number of rows that were kept."""
    missing: Sequence[tuple[int, int]]
    """(first, last) row of each gap."""
    damage: Sequence[str]
    """A line for each damaged part."""
    left_out: int
    """Number of readable rows that were left out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NeighbourNote(Note, type="neighbour"):
    """Another run on the same devices."""

    pid: int
    folder: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageNote(Note, type="usage"):
    """Usage of projects and users, from which a resumed run continues."""

    at_s: float
    """Time as of which usage is decayed."""
    accounts: Sequence[tuple[str, str, str, float, float]]
    """(project, user, pool, decayed device-seconds, device-seconds of the day)."""
    spent: Sequence[tuple[str, str, float, float]] = ()
    """(project, user, USD, begin of the budget's period)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AccountsNote(Note, type="accounts"):
    """The same for people: the output of `rlmux usage --json`."""

    accounts: Sequence[Mapping[str, Any]]
    """A row for each project and user."""
    at_s: float
    half_life_hours: float
    held_hours: Mapping[str, float]
    """Device-hours by pool."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HardwareNote(Note, type="hardware"):
    """What the machine's own counters say, beside what rlmux counts of the same devices."""

    devices: Mapping[str, Mapping[str, float | None]]
    """By device: `use` (share of the last second or more in which it computed), `memory_bytes`, `memory_used_bytes`,
    `power_w` and `temperature_c`; a core has `use` alone."""
    host_memory_bytes: float
    host_memory_used_bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedBatchNote(Note, type="shared_batch"):
    """An on-demand pipeline's order also computed requests of other pipelines."""

    order: OrderId
    tokens: Mapping[str, int]
    """Number of tokens by pipeline."""
    seconds: float


# ---------------------------------------------------------------------- a pipeline comes and goes


@dataclass(frozen=True, slots=True, kw_only=True)
class SubmittedNote(Note, type="submitted"):
    """A file was submitted to the run in progress."""

    pipelines: Sequence[PipelineId]
    at_s: float
    source: str
    """Name of the file."""
    resolved: str
    """Text of the file, defaults and overrides worked in."""
    id: str | None = None
    """The client's id of the submission, by which it may be repeated."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanNote(PipelineNote, type="plan"):
    """Hash of what the pipeline trains, the mark of its checkpoints."""

    plan_sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AlertsNote(PipelineNote, type="alerts"):
    """Alert rules that the pipeline's file overrides."""

    rules: Mapping[str, Mapping[str, Any]]
    """Keys `level` and `steps` by rule."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InputsNote(PipelineNote, type="inputs"):
    """Files that the pipeline reads."""

    files: Mapping[str, str]
    """SHA-256 by path."""
    changed: Sequence[str] = ()
    """A few words for each file that differs from the last note."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StandingNote(PipelineNote, type="standing"):
    """A user's change to a waiting pipeline; None: unchanged."""

    is_held: bool | None = None
    rank: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StartReservedNote(PipelineNote, type="start_promised"):
    """Reserved start of a waiting pipeline."""

    start_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineEndNote(PipelineNote, type="pipeline_end"):
    """The pipeline is over."""

    status: str
    """A `PipelineStatus`."""
    reason: str
    """Empty for a pipeline that finished."""
    weights_sha256: str | None
    """Hash of the newest checkpoint's weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RetriedNote(PipelineNote, type="retried"):
    """A failed pipeline was submitted again, from its newest checkpoint: it is over no longer."""

    number: int
    """Which try begins; the first one that is noted is 2."""
    of: int | None
    """Tries in all that its rule has, those that a user asked for included; None: it has no rule."""
    by_rule: bool
    """Whether its own rule (`retries`) says so; else a user does."""
    cause: FailureCause
    """Cause of the failure before."""
    reason: str
    """The failure before."""
    failed_s: float
    """Its time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RemovedNote(PipelineNote, type="removed"):
    """Files of a pipeline that is over are removed: they are from this note on, and what it used stays counted."""

    parts: str
    """`all`, `checkpoints` or `samples`."""
    by: str
    """The user who asked for it; empty where the rule `keep` did."""
    by_rule: bool
    """Whether the rule says so."""
    freed_bytes: int


# ---------------------------------------------------------------------- steps


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightDelivery(value_codec.Record):
    """Weights that sampled a step, and those that the trainer published."""

    versions: Sequence[int]
    """Weight versions that made the step's tokens, in order."""
    allowed: tuple[int, int]
    """(oldest, newest) version that staleness allows."""
    loaded: Mapping[int, Sequence[str]]
    """Checksums verified by engines, by version."""
    published: Mapping[int, Sequence[str]]
    """Checksums of the trainer by version: of all parameters, and of the file for rollout workers."""


Metrics = Mapping[str, float | None]


def _read_metrics(metrics: dict[str, Any], path: str) -> Metrics:
    """The metrics that are numbers, finite or written as text because they are not, and those without a value."""
    if {*map(type, metrics.values())} <= {float, int, NoneType}:
        return metrics
    texts = {name: float(value) for name, value in metrics.items() if value in value_codec.NONFINITE}
    return {name: texts.get(name, value) for name, value in metrics.items() if name in texts or _is_number(value)}


def _is_number(value: object) -> bool:
    return isinstance(value, float | int | None) and not isinstance(value, bool)


value_codec.add_reader(Metrics, _read_metrics)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepNote(PipelineNote, type="step"):
    """A step's metrics and weights, once these are published; without training, once it is scored."""

    step: int
    metrics: Metrics
    """Number by metric; None if there was nothing to measure."""
    delivery: WeightDelivery | None = None
    """None without training."""
    weights_checksum: str | None = None
    """Checksum of the published weights."""
    weights_sha256: str | None = None
    """Hash of the weights, in logs of rlmux 0.1.0 only."""
    from_checkpoint: bool = False
    """Whether the note comes from a checkpoint: the run or a worker was killed before the publication's end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutNote(PipelineNote, type="rollout"):
    """A step's rollout, sufficient to simulate it on other devices."""

    step: int
    slots: int
    """Most sequences that a device decodes at once."""
    group_size: int
    runs: Sequence[Sequence[int]]
    """Lengths in tokens of the alternating given and sampled parts of each trajectory, in the order of ids."""
    iterations: Sequence[tuple[str, int, int, int, float]]
    """(sub-stage, rows computed, iterations, tokens, milliseconds)."""
    waits_ms: Sequence[Sequence[float]] | None = None
    """Milliseconds, for each trajectory in the order of ids, from the end of each turn until its environment replied or
    the trajectory was released. None for single-turn tasks, which have no such waits."""

    @classmethod
    def upgraded(cls, fields: Mapping[str, Any]) -> Mapping[str, Any]:
        """`bands` is the key of `iterations` in older logs, which have only one decode."""
        return {**fields, "iterations": fields["bands"]} if "bands" in fields else fields


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointNote(PipelineNote, type="checkpoint"):
    """A checkpoint is durable."""

    step: int
    seconds: float
    """Seconds from the snapshot to durability, beside other work."""
    stall_s: float
    """Seconds that training waited for the previous checkpoint and the snapshot."""
    weights_sha256: str


# ---------------------------------------------------------------------- workers


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerNote(PipelineNote, type="worker"):
    """A worker process was started."""

    role: str
    """`env`, or `rollout` or `train` with the rank or device."""
    pid: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class LossNote(PipelineNote, type="loss"):
    """A worker was lost, and is replaced or ends the pipeline."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureNote(PipelineNote, type="failure"):
    """The pipeline failed."""

    reason: str
    traceback: str
    """Path of the workers' output."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WarningNote(PipelineNote, type="warning"):
    """A problem that the run survives."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StandstillNote(PipelineNote, type="standstill"):
    """A worker's standstill is over."""

    worker: str
    devices: Sequence[DeviceId]
    began_s: float
    seconds: float
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SpillNote(PipelineNote, type="spill"):
    """A worker's state goes to disk."""

    worker: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterRoomNote(PipelineNote, type="adapter_room"):
    """Memory of an adapter's worker beside the shared base."""

    device: str
    phase: Phase
    state_bytes: int
    """Device bytes of the adapter's own state."""
    free_bytes: int
    """Bytes left on the device, or on the machine where devices are cores."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeterminismNote(PipelineNote, type="promise"):
    """Determinism class that the probes of the pipeline's engines found."""

    promise: str
    """A `DeterminismClass`."""
    checks: Mapping[str, bool]
    """Whether the compared bits were equal, by check."""
    server: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Version of a server engine, and what was measured of it (engines/servers/capabilities.py); empty for others."""


# ---------------------------------------------------------------------- permits: programs that are not ours


@dataclass(frozen=True, slots=True, kw_only=True)
class PermitNote(PipelineNote, type="permit"):
    """Base of notes about a program that shares devices through permits; its pipeline has the program's name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramNote(PermitNote, what="program"):
    """A program's first rank joined."""

    world: int
    """Number of its ranks."""
    pools: Mapping[str, str]
    """Pool by role."""
    need_bytes: Mapping[str, float]
    """Device bytes by pool."""
    host_bytes: float
    slo: float | None
    """Largest accepted step slowdown; None: any."""
    weight: float
    """Turns per turn of a program of weight 1."""

    @classmethod
    def upgraded(cls, fields: Mapping[str, Any]) -> Mapping[str, Any]:
        return {"weight": 1.0, **fields}


@dataclass(frozen=True, slots=True, kw_only=True)
class RankJoinedNote(PermitNote, what="joined"):
    """A rank of a program joined."""

    rank: int
    session: str
    process: tuple[int, int] | None
    """(pid, clock ticks from the machine's start to the process's); None: it is on another machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkersNote(PermitNote, what="workers"):
    """A rank named the processes that hold memory for it."""

    rank: int
    workers: Sequence[str]
    """HOST/PID of each."""
    processes: Sequence[tuple[int, int]]
    """(pid, clock ticks from the machine's start to the process's) of those on the broker's machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PermitAdoptedNote(PermitNote, what="adopted"):
    """A program holds a permit of an earlier broker that the log does not have."""

    fence: int
    """Number of the permit."""
    pools: Sequence[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class PermitGrantedNote(PermitNote, what="granted"):
    """A program has a permit."""

    fence: int
    pools: Sequence[str]
    phase: str
    ask: int
    """Number of the request."""
    waited_s: float
    step: int | None = None
    """Step by the program's own count; None where it named none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PermitEndedNote(PermitNote, what="ended"):
    """A permit is over."""

    fence: int
    pools: Sequence[str]
    used_s: float
    restore_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaveRequestedNote(PermitNote, what="told_to_leave"):
    """A program is to leave a pool."""

    pool: str
    waiting: str
    """What waits for the pool."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolLeftNote(PermitNote, what="left"):
    """A program has left a pool."""

    pool: str
    freed_bytes: float | None
    """Bytes freed by its last rank; None: not reported."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramGoneNote(PermitNote, what="gone"):
    """A program's last rank is gone."""

    said_bye: bool
    """Whether it signed off."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramMarkedNote(PermitNote, what="marked"):
    """A program's problems changed."""

    reason: str
    """All of them, by `; `; empty: none is left."""
