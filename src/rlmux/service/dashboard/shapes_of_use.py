"""Shapes of what projects and users have used: the answer of `/lanes/L/usage`."""

from __future__ import annotations

from rlmux.service.dashboard.shapes import Shape


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
