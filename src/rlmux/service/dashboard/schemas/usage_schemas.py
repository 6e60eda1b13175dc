"""Shapes of usage and of what-if questions: `/usage`, `/lanes/L/usage` and `/lanes/L/whatif`."""

from __future__ import annotations

from typing import Annotated

from pydantic import StringConstraints, model_validator

from rlmux.service.dashboard.schemas.run_schemas import Open, Shape, Taken

Text = Annotated[str, StringConstraints(max_length=100_000, pattern=r"^[^\x00]*$")]


class Quota(Shape):
    max_running: int | None
    max_waiting: int | None = None
    max_devices: float | None
    device_hours_a_day: float | None
    max_usd_per_hour: float | None = None
    budget_usd: float | None = None
    budget_days: float | None = None
    """Days of a period of the budget."""


class Account(Shape):
    project: str
    user: str
    weight: float
    guarantee: float
    share: float
    fair_share: float
    is_over_share: bool
    device_hours: dict[str, float]
    used_hours: dict[str, float]
    device_hours_today: float
    running: int
    waiting: int
    quota: Quota
    usd: float | None = None
    """Dollars of `device_hours`, at the pools' prices."""
    spent_usd: float | None = None
    """Dollars that the account of `quota` was charged in the present period of its budget."""
    budget_begins_s: float | None = None
    """When that budget begins anew, by the run's clock."""


class Usage(Shape):
    accounts: list[Account]
    at_s: float | None = None
    half_life_hours: float | None = None
    held_hours: dict[str, float] | None = None


class Spent(Open):
    """Device-hours by kind, and dollars; 0 without a price. The key that the rows are by has its value."""

    device_hours: float
    busy_hours: float
    switch_hours: float
    bubble_hours: float
    idle_hours: float
    usd: float


class IdleGap(Shape):
    device: str
    lane: str
    begins: str
    """UTC."""
    hours: float
    cause: str
    usd: float


class UsageOfTime(Shape):
    since: str
    until: str
    total: Spent
    by: dict[str, list[Spent]]
    """Rows by project, user, pipeline, cause, lane and pool, those with most device time first; `-`: none."""
    idle_gaps: list[IdleGap]
    """Longest stretches in which a device was idle."""
    left_out: dict[str, str]
    """Why runs could not be read, by lane."""


class Score(Shape):
    policies: list[str]
    num_scored: int
    median_error: float | None
    """Error as a part of the seconds that were predicted."""
    worst_error: float | None
    within_range: float | None
    """Part of the scored ends that lay within their range."""


class Question(Taken):
    file: Text | None = None
    """Text of YAML whose pipelines are added."""
    add: int | None = None
    """Number of pipelines to add."""
    like: Text | None = None
    """Pipeline that the added ones are copies of."""
    remove: list[Text] | None = None
    policy: Text | None = None
    set: list[Text] | None = None

    @model_validator(mode="after")
    def _asks(self) -> Question:
        if not self.model_fields_set:
            raise ValueError("no question")
        return self


class PipelineFigures(Shape):
    """What is predicted of one pipeline; seconds from the moment of the question."""

    ends_s: float | None
    queue_s: float | None
    step_slowdown: float | None


class PipelineRange(PipelineFigures):
    """Figures with steps like the mean of the last ones, and the least and the largest of three simulations."""

    low: PipelineFigures
    high: PipelineFigures


class Prediction(PipelineRange):
    """One pipeline on one side."""

    slo_slowdown: float | None
    keeps_slo: bool | None
    refused: str | None


class SideFigures(Open):
    makespan_s: float | None
    mean_step_slowdown: float | None
    max_step_slowdown: float | None
    mean_queue_s: float | None
    slo_attainment: float | None
    cost_usd: float | None
    cost_usd_per_hour: float | None


class SideRange(SideFigures):
    """Figures as in `PipelineRange`."""

    low: SideFigures
    high: SideFigures


class Side(SideRange):
    policy: str
    pipelines: dict[str, Prediction]


class Change(SideRange):
    """Then less now, in each of the simulations."""

    pipelines: dict[str, PipelineRange]
    """Those that are on both sides."""


class Answer(Shape):
    run: str
    at_s: float
    about: str
    notes: list[str]
    now: Side
    then: Side
    change: Change
    command: str
