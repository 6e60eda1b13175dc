"""Tests of the scheduler share one set of builders and one driver in virtual time."""

from tests.scheduling import builders

__all__ = ["builders"]
