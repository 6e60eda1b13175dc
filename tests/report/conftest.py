"""Logs to report on, of `tests.log_script`."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tests.log_script import AlternatingRun, LogScript, order

from rlmux.core.actions import RunStage


@pytest.fixture
def script() -> LogScript:
    return LogScript()


@pytest.fixture
def make_order() -> Callable[..., RunStage]:
    return order


@pytest.fixture(scope="session")
def alternating_run() -> Callable[..., LogScript]:
    return lambda **settings: AlternatingRun(**settings).script
