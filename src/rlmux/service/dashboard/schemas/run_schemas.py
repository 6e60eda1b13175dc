"""What the addresses answer and take, as types: the document of the API is made of them; tests hold answers to them.

Seconds are of the run's clock, whose second 0 is `created`. What does not exist is null. A field with a default may be
missing. Keys are added, never renamed: clients ignore unknown ones.
"""

from __future__ import annotations

from typing import Annotated, Any, Generic, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, model_validator

Kind = Literal["busy", "switch", "bubble", "idle"]
Item = TypeVar("Item")


class Shape(BaseModel):
    """An object of JSON."""

    model_config = ConfigDict(use_attribute_docstrings=True)


class Open(Shape):
    """An object of JSON that may have more fields than are named."""

    model_config = ConfigDict(extra="allow")


class Taken(Shape):
    """An object of JSON that a client sends: it has these fields alone, each of its own type."""

    model_config = ConfigDict(extra="forbid", strict=True)


class Listed(Shape, Generic[Item]):
    """Rows, all of them."""

    items: list[Item]
    as_of_seq: int | None
    """Last row of the log that they are made of; null where there is no one log."""


class Page(Listed[Item], Generic[Item]):
    """Some of the rows."""

    next: str | None
    """The `cursor` of the rows that follow; null after the last."""


class Problem(Shape):
    """An error (RFC 9457)."""

    type: str
    title: str
    status: int
    detail: str
    where: str
    """Part of the request that is wrong."""
    accepted: str | None
    """What would be accepted instead."""
    request_id: str
    line: int | None = None
    """Line of the file in the request that is wrong."""


# ---------------------------------------------------------------------- the service


class LaneHealth(Shape):
    up: bool
    seq: int | None
    index_seq: int | None
    lag_s: float | None


class Health(Shape):
    ok: bool
    lanes: dict[str, LaneHealth] | None = None
    """State of each lane; with a token alone."""


class Version(Shape):
    version: str
    api: int
    log_schema: int
    oidc: str | None = None
    """Address that begins a login by a provider; null without one."""


class WhoAmI(Shape):
    user: str
    scopes: list[str]
    expires_at: str | None
    """Time (RFC 3339) at which the session ends without another request."""
    role: str
    projects: list[str]
    may_run_code: bool


class AuditRow(Shape):
    at: str
    user: str
    by: str
    """How the user is known: `token`, `session` or `proxy`; empty where none is."""
    token: str
    """Id of the token, if any."""
    address: str
    method: str
    path: str
    status: int | None
    """Status of the answer; null where the server ended before it."""
    left_out: int
    """Refused reads before this one that were not written."""


class Login(Taken):
    ticket: str | None = None
    token: str | None = None

    @model_validator(mode="after")
    def _is_one(self) -> Login:
        if (self.ticket is None) == (self.token is None):
            raise ValueError("one of ticket and token is needed")
        return self


# ---------------------------------------------------------------------- lanes


class Charge(Shape):
    kind: Kind
    cause: str
    pipeline: str | None
    """`*` in a lane's charges: all but the eight with most seconds."""
    label: str
    seconds: float
    share: float | None
    """Part of all device-seconds."""


class Pool(Shape):
    phase: str | None
    devices: int
    usd_per_node_hour: float | None


class ClockMark(Shape):
    at_s: float
    utc: str | None
    """ISO time; null for a resume whose time of day is not known."""


class NewLane(Shape):
    """A lane without an index."""

    name: str
    state: Literal["unknown"]
    banner: str | None
    is_indexing: bool
    takes_submissions: bool


class KeptPipeline(Shape):
    name: str
    status: str | None
    steps: int | None
    reward_first: float | None
    reward_last: float | None


class KeptFigures(Shape):
    """What the summary.json of a lane has whose log cannot be read."""

    makespan_s: float | None
    pipelines: list[KeptPipeline]


class OtherLane(Shape):
    """A lane whose log another version of rlmux wrote, of a schema that this one does not read."""

    name: str
    state: Literal["other_version"]
    banner: str
    """Which version wrote it, and which one resumes it."""
    is_indexing: bool
    takes_submissions: bool
    kept: KeptFigures | None
    """Null without a summary, and for a caller who does not see all."""
    files: list[Literal["timeline.html", "summary.json"]]
    """Those that can be downloaded at `/lanes/LANE/FILE`."""


class MemoryInUse(Shape):
    bytes: float
    used_bytes: float


class Lane(Shape):
    name: str
    state: Literal["running", "resuming", "not_answering", "stopped", "over"]
    is_going_on: bool
    seq: int
    index_seq: int
    rev: int
    """Number that rises when settled intervals change."""
    index_lag_s: float
    is_indexing: bool
    policy: str | None
    backend: str | None
    run_id: str | None
    created: str | None
    rlmux_version: str | None
    clock: list[ClockMark]
    """Time of day at the beginning, and where a process resumed the run; empty where it is not known."""
    start_s: float
    now_s: float
    is_over: bool
    makespan_s: float
    pools: dict[str, Pool]
    num_devices: int
    host_memory: MemoryInUse | None = None
    """Memory of the controller's machine, as of its newest reading."""
    pipelines: dict[str, int]
    """Number of pipelines by status."""
    seconds: dict[Kind, float]
    num_switches: int
    num_migrations: int
    num_tail_migrations: int
    """Those of trajectories that had begun."""
    control_overhead: float | None
    slo_attainment: float | None
    charges: list[Charge]
    banner: str | None
    takes_submissions: bool


class Lanes(Listed[Lane | NewLane | OtherLane]):
    pass


class Hardware(Shape):
    """A device's own counters; null where the machine has none."""

    use: float | None
    memory_bytes: float | None
    memory_used_bytes: float | None
    power_w: float | None
    temperature_c: float | None
    uses: list[float | None]
    """`use` in the last quarter of an hour, oldest first."""
    at_s: float


class Device(Shape):
    id: str
    pool: str
    node: str
    kind: Kind | None
    cause: str | None
    label: str | None
    pipeline: str | None
    stage: str | None
    step: int | None
    order: int | None
    since_s: float | None
    seconds: dict[Kind, float]
    utilization: float | None
    hardware: Hardware | None = None


class Seen(Shape):
    by: str
    at: str


class Alert(Shape):
    rule: str
    level: Literal["critical", "warning", "info"]
    pipeline: str | None
    step: int | None
    text: str
    advice: str
    acknowledged: Seen | None


class AlertsSeen(Shape):
    items: list[Alert]


class Acknowledge(Taken):
    rule: str
    pipeline: str | None = None
    """Name of one pipeline; null: the alerts of all."""


class Happening(Shape):
    time_s: float
    what: str
    pipeline: str | None
    device: str | None
    text: str


class Sums(Shape):
    paid: float
    alone: float
    computing: float


class Cost(Shape):
    unit: Literal["usd_per_hour", "devices"]
    x: list[float]
    """Ends of buckets, in seconds."""
    paid: list[float]
    alone: list[float]
    computing: list[float]
    sums: Sums
    as_of_seq: int


class Upcoming(Shape):
    pipeline: str
    at_s: float
    project: str
    user: str
    visibility: str


class Change(Shape):
    key: str
    was: str | float | None
    to: str | float | None


class Waiting(Shape):
    pipeline: str
    status: str
    token: str | None
    """Reason in one word; null for one that does not wait, and then the fields below are missing."""
    reason: str | None = None
    position: int | None = None
    num_waiting: int | None = None
    waited_s: float | None = None
    first: str | None = None
    starts_s: float | None = None
    project: str | None = None
    share: float | None = None
    fair_share: float | None = None
    is_over_share: bool | None = None
    released_by: str | None = None
    """Command after which a held pipeline may start, `unpark` or `release`; null for one that is not held."""


class Why(Waiting):
    would_start_now_if: list[Change]


class Queue(Shape):
    now_s: float
    items: list[Waiting]
    upcoming: list[Upcoming]


class Shares(Taken):
    text: str
    """YAML."""
    source: str
    """Name of the file."""


class File(Shape):
    source: str
    """Name of the file."""
    text: str
    """YAML."""


class AdapterRoom(Shape):
    here: int
    """Pipelines of one base whose adapters lie on the device's node."""
    more: int
    """Number of further pipelines of that base that there is memory for."""


class DeviceStatus(Shape):
    pool: str
    pipeline: str | None
    stage: str | None
    step: int | None
    adapters: dict[str, AdapterRoom] = {}
    """Room for adapters by phase."""


class Status(Shape):
    policy: str | None
    backend: str | None
    is_going_on: bool
    now_s: float
    pipelines: dict[str, dict[str, Any]]
    devices: dict[str, DeviceStatus]
    alerts: list[Alert]
    pid: int | None
    is_kept_open: bool
    upcoming: list[Upcoming]


class Outcome(Shape):
    outcome: str
    pipeline: str | None = None


# ---------------------------------------------------------------------- pipelines


class FailedTry(Shape):
    at_s: float
    cause: Literal["lost_worker", "out_of_memory", "user_code", "other"]
    reason: str


class Tries(Shape):
    number: int
    """Which try the pipeline is in."""
    of: int | None
    """Tries that its `retries` give, those that a user asked for included; null: it has no such rule."""
    failures: list[FailedTry]
    """How the tries before ended, the first one first."""


class Removed(Shape):
    parts: Literal["all", "checkpoints", "samples"]
    at_s: float
    by: str
    """The user who asked for it; empty where the rule `keep` of the file did."""
    by_rule: bool
    freed_bytes: int


class Pipeline(Shape):
    lane: str
    name: str
    project: str
    user: str
    visibility: str
    status: str
    reason: str
    tries: Tries | None = None
    """Null in its first try."""
    removed: list[Removed] | None = None
    """What was removed of its files, oldest first; null: nothing was."""
    step: int
    num_steps: int | None
    doing: str | None
    group: int | str | None
    reward_first: float | None
    reward_last: float | None
    step_slowdown: float | None
    slo_slowdown: float | None
    keeps_slo: bool | None
    promise: str | None
    submitted_s: float | None
    rewards: list[float | None]
    admitted_s: float | None
    ended_s: float | None
    tokens: int
    step_s_mean: float | None
    eta_s: float | None
    labels: list[str]
    task: str
    """Name of its task in the file; empty for a program's."""
    submitted_at: str | None
    """UTC time of its submission, in ISO form."""


class FilterValue(Shape):
    value: str
    """`-`: none."""
    pipelines: int


class Pipelines(Page[Pipeline]):
    total: int
    num_removed: int
    """Pipelines that the list leaves out since all of their files are removed."""
    facets: dict[str, list[FilterValue]] | None = None
    """Values by filter, each with the number of pipelines that all other filters let pass."""


class Group(Shape):
    key: str
    """Value of the group; `-`: none. A day is a UTC date."""
    pipelines: int
    running: int
    steps: int
    tokens: int
    device_hours: float
    """Computing, switches, and waits of devices for it."""
    busy_hours: float
    switch_hours: float
    wait_hours: float
    usd: float | None
    """Null where no pool has a price."""


class GroupList(Listed[Group]):
    by: str
    total: Group
    """All pipelines that match, each once."""
    num_more: int
    """Groups that are left out, those with least device time."""
    other_hours: float
    """Device-hours that are put down to no pipeline that matches."""


class Wait(Shape):
    cause: str
    label: str
    seconds: float


class Phases(Open):
    rollout_s: float
    train_s: float


class Detail(Pipeline):
    plan_sha256: str | None
    rollout_nodes: list[str]
    train_nodes: list[str]
    expected_slowdown: float | None
    slo_probability: float | None
    """Probability with which the mean of the steps that are left keeps its SLO; null: none is stated."""
    bound: Phases | None
    """Solo seconds of each phase that the mean of its coming steps stays below with the requested probability."""
    estimate: Phases | None
    """Solo seconds of each phase: given in the file, or the median of its last steps."""
    slo_reason: str
    weights_sha256: str | None
    trajectories: int
    waits: list[Wait]
    metrics: list[str]
    seconds: dict[str, float]
    """Seconds by stage, of all steps."""
    has_log: bool
    has_samples: bool
    note: str
    spec: str | None
    as_of_seq: int


class Match(Shape):
    field: str
    """`name`, `user`, `project`, `label`, `note`, or a key of the pipeline's part of the file: `task.name`."""
    text: str


class FoundRun(Shape):
    lane: str
    name: str
    status: str
    submitted_s: float | None
    labels: list[str]
    matches: list[Match]


class Search(Listed[FoundRun]):
    total: int


Label = Annotated[str, Field(min_length=1, max_length=64, pattern=r"^[^\s,]+( [^\s,]+)*$")]
"""Words without commas, with one blank between two."""


class Labels(Taken):
    labels: Annotated[list[Label], Field(max_length=20)]
    note: Annotated[str, Field(max_length=10_000)]


class LabelsSet(Shape):
    labels: list[str]
    note: str


class Checkpoint(Shape):
    step: int
    path: str
    size_bytes: int


class Checkpoints(Shape):
    run: str
    """Folder of the run, on the server's machine."""
    items: list[Checkpoint]


class Identity(Shape):
    is_same_plan: bool | None
    num_compared: int
    last_equal: int | None
    first_other: int | None
    says: str


class ComparedPipeline(Pipeline):
    place: int
    """Place among the pipelines of its lane, in the order of the log."""


class Compared(Shape):
    items: list[ComparedPipeline]
    differs: dict[str, list[Any]]
    """Values by key of the pipelines' parts of their files, where two differ, in the order of `items`."""
    groups: list[list[int]]
    """Places in `items` of pipelines that differ in `seed` alone."""
    identity: Identity | None
    """Of two pipelines; null for more."""


class Delivery(Shape):
    versions: list[int]
    """Weight versions that made the step's tokens."""
    allowed: tuple[int, int]
    """Oldest and newest version that staleness allows."""
    checksum: Literal["equal", "different", "initial", "not compared"]
    """Loaded weights against published ones."""
    loaded: dict[str, list[str]]
    """Checksums verified by engines, by version."""
    published: dict[str, list[str]]
    """Checksums of the trainer, by version."""
    logprob_gap: float | None
    is_ok: bool
    text: str
    says: str


class Step(Shape):
    step: int
    end_s: float
    seconds: float
    solo_s: float | None
    slowdown: float | None
    weights_checksum: str | None
    """Checksum of the weights that the step published; null in logs of older versions."""
    weights_sha256: str | None
    """SHA-256 of the same weights, once their checkpoint is durable; null before, and where there is none."""
    metrics: dict[str, float | None]
    stages: dict[str, float]
    delivery: Delivery | None = None
    """The weights that sampled the step; null in logs of older versions."""


class Curve(Shape):
    x: list[float | None]
    y: list[float | None]
    min: list[float | None] = []
    """Missing where each point is a step, as `max`."""
    max: list[float | None] = []


class Metrics(Shape):
    x: Literal["step", "time_s"]
    names: list[str]
    series: dict[str, Curve]
    steps: int
    as_of_seq: int


class Log(Shape):
    offset: int
    next_offset: int
    size: int
    text: str
    is_end: bool


class Rank(Taken):
    rank: int


class Removal(Taken):
    parts: Literal["all", "checkpoints", "samples"] = "all"
    dry_run: bool = False
    """Answer with the bytes alone."""


class LaneRemoval(Taken):
    dry_run: bool = False
    """Answer with the bytes alone."""


class RemovalOutcome(Shape):
    pipeline: str
    outcome: Literal["removed", "would be removed"]
    parts: Literal["all", "checkpoints", "samples"]
    freed_bytes: int


class LaneRemoved(Shape):
    outcome: Literal["removed", "would be removed"]
    freed_bytes: int


class Nothing(Taken):
    """An empty object, or no body."""
