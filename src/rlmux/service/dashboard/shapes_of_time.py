"""What the timeline's addresses and those of submissions answer and take, as types; the others are in `shapes.py`."""

from __future__ import annotations

from typing import Any, Literal

from rlmux.service.dashboard.shapes import Charge, Kind, Listed, Shape


class Place(Shape):
    id: str
    pool: str
    node: str


class Timeline(Shape):
    lane: str
    start_s: float
    end_s: float
    is_over: bool
    is_going_on: bool
    created: str | None
    devices: list[Place]
    pipelines: list[str]
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


class Gap(Shape):
    interval: Interval
    before: Order | None
    after: Order | None
    pinned: list[Pinned]
    ends_s: float
    as_of_seq: int


class Submission(Shape):
    lane: str
    text: str
    """YAML with pipelines."""
    source: str
    """Name of the file."""
    bundle: str | None = None
    """SHA-256 of the code and data that it names."""
    dry_run: bool = False
    """Whether it is checked alone, and nothing kept."""


class Submitted(Shape):
    id: str
    lane: str
    user: str
    source: str
    bundle: str | None
    state: Literal["accepted", "taken", "refused", "over_quota"]
    reason: str | None
    pipelines: list[dict[str, Any]]
    """What became of each: `pipeline`, `outcome`, and more by outcome."""
    created: str


class Wrong(Shape):
    detail: str
    line: int | None
    accepted: str | None


class Checked(Shape):
    lane: str
    pipelines: list[dict[str, Any]]
    is_lane_asked: bool
    wrong: Wrong | None


class Submissions(Listed[Submitted]):
    pass


class Bundle(Shape):
    sha256: str
