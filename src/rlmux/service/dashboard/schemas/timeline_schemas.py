"""Bodies and answers of the addresses for timeline, submissions and trajectories; the others: `run_schemas.py`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from rlmux.service.dashboard.schemas.run_schemas import Charge, Kind, Listed, Open, Shape, Taken


class Place(Shape):
    id: str
    pool: str
    node: str


class Life(Shape):
    project: str
    begun_s: float | None
    """Time of its admission; null: it waits, or never began."""
    ended_s: float | None
    has_rewards: bool


class LifeColumns(Shape):
    """`lives` as columns, each by place in `pipelines`, in milliseconds."""

    projects: list[str]
    """Names that `project` has places of."""
    project: list[int]
    """Place in `projects`; -1: the caller may not see the pipeline."""
    begun_ms: list[int | None]
    """Time of its admission; null: it waits, or never began."""
    lasted_ms: list[int | None]
    """From its admission to its end; null: it has not ended."""
    has_no_rewards: list[int]
    """Places of the pipelines without a reward."""


class Timeline(Shape):
    lane: str
    start_s: float
    end_s: float
    is_over: bool
    is_going_on: bool
    created: str | None
    devices: list[Place]
    pipelines: list[str]
    lives: list[Life | None] | None = None
    """By place in `pipelines`; null within: the caller may not see the pipeline; null: `lives=columns`."""
    life_columns: LifeColumns | None = None
    """With `lives=columns`, the same as columns: a fifth of the bytes."""
    causes: list[str]
    kinds: list[Kind]
    kind_by_cause: list[int]
    stages: list[str]
    rev: int
    seq: int
    open_from: float | None
    """Second from which on things may change."""
    bucket_s: list[float]
    """Seconds of a bucket, by level."""
    num_intervals: int
    max_intervals: int
    max_buckets: int


class Measured(Shape):
    t0: float
    t1: float
    device_s: float
    items: list[Charge]
    as_of_seq: int


class Order(Shape):
    order: int
    pipeline: str
    step: int
    stage: str | None
    start_s: float
    end_s: float | None
    devices: list[str]


class Interval(Shape):
    device: str
    start_s: float
    end_s: float
    kind: Kind
    cause: str
    pipeline: str | None
    label: str
    is_open: bool


class Pinned(Shape):
    pipeline: str
    doing: list[Order]
    next: Order | None


class Other(Pinned):
    """A pipeline without the device's node that could have run there: pinned on another node of the pool, or queued."""

    nodes: list[str]
    """Its nodes of the pool; empty: it was queued."""
    submitted_s: float | None
    admitted_s: float | None


class Gap(Shape):
    interval: Interval
    before: Order | None
    after: Order | None
    pinned: list[Pinned]
    others: list[Other]
    """At most 16; empty while the device computes."""
    num_others: int
    ends_s: float
    as_of_seq: int


class StepCause(Shape):
    cause: str
    pipeline: str | None
    """The one that had the device, ran beside, or is waited for."""
    stage: str | None
    seconds: float
    """Of a mean step."""
    label: str
    """The cause in words."""


class StepCauses(Shape):
    first_step: int | None
    last_step: int | None
    num_steps: int
    """0: no step has ended."""
    step_s: float | None
    alone_s: float | None
    """It and the causes add up to `step_s`."""
    causes: list[StepCause]
    slowdown: float | None
    as_of_seq: int


class Submission(Taken):
    lane: Annotated[str, Field(min_length=1)]
    text: Annotated[str, Field(min_length=1)]
    """YAML with pipelines."""
    source: Annotated[str, Field(min_length=1, max_length=1000)]
    """Name of the file."""
    bundle: str | None = None
    """SHA-256 of the code and data that it names."""
    dry_run: bool = False
    """Whether it is checked alone, and nothing kept."""


class Became(Open):
    """What became of one pipeline, and more by outcome."""

    pipeline: str
    outcome: str
    reason: str | None = None
    rollout_nodes: list[str] | None = None
    train_nodes: list[str] | None = None
    at_s: float | None = None


class Planned(Shape):
    pipeline: str
    num_steps: int | None


class Submitted(Shape):
    id: str
    lane: str
    user: str
    source: str
    bundle: str | None
    state: Literal["accepted", "taken", "refused", "over_quota"]
    reason: str | None
    pipelines: list[Became]
    created: str


class Wrong(Shape):
    detail: str
    line: int | None
    accepted: str | None


class Checked(Shape):
    lane: str
    pipelines: list[Planned]
    is_lane_asked: bool
    wrong: Wrong | None


class Submissions(Listed[Submitted]):
    pass


class Bundle(Shape):
    sha256: str


class Found(Shape):
    step: int
    prompt: int
    sample: int
    reward: float
    advantage: float
    stop: str
    tokens: int
    turns: int
    first_version: int
    last_version: int
    start: str
    """Beginning of the answer."""


class Samples(Shape):
    items: list[Found]
    next: str | None
    first_step: int | None
    last_step: int | None


class Token(Shape):
    """A token that the model sampled."""

    text: str
    logprob: float
    """The rollout engine's."""
    version: int
    """Version of the weights that made it."""


class Turn(Shape):
    role: Literal["model", "environment"]
    text: str
    is_cut: bool
    """Whether the text is longer."""
    tokens: list[Token] | None = None


class Sibling(Shape):
    """A trajectory of the same prompt."""

    sample: int
    reward: float
    tokens: int
    stop: str


class Sample(Found):
    prompt_text: str
    is_cut: bool
    """Whether the prompt's text is longer."""
    said: list[Turn]
    group: list[Sibling]
