"""What holds for all tests: examples that hypothesis makes are the same in every run, and no clock judges them.

What tests start ends with them (guardian.py) and can be interrupted (signals.py); a fixture of a module is made once.
The garbage collector waits while tests are collected: their modules stay, and going through them takes seconds.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator

import pytest
from hypothesis import HealthCheck, settings
from tests import guardian, signals
from tests.examples import examples
from tests.log_script import AlternatingRun, LogScript, order

from rlmux.core.actions import RunStage

settings.register_profile(
    "steady",
    max_examples=examples(100),
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("steady")


def pytest_configure(config: pytest.Config) -> None:
    signals.hear()
    if "PYTEST_XDIST_WORKER" not in os.environ:  # those have the mark of the process that started them
        guardian.start()


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[object]:
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(tryfirst=True)  # before xdist reads the marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of a file that share a fixture of its module run in one process: others would make the fixture again.

    `--dist loadgroup` reads the mark. A group that a test names itself stays.
    """
    for item in items:
        if not isinstance(item, pytest.Function) or item.get_closest_marker("xdist_group"):
            continue
        definitions = (last for *_, last in item._fixtureinfo.name2fixturedefs.values())
        if any(definition.scope == "module" for definition in definitions):
            item.add_marker(pytest.mark.xdist_group(item.nodeid.split("::")[0]))


@pytest.fixture
def script() -> LogScript:
    return LogScript()


@pytest.fixture
def make_order() -> Callable[..., RunStage]:
    return order


@pytest.fixture(scope="session")
def alternating_run() -> Callable[..., LogScript]:
    return lambda **settings: AlternatingRun(**settings).script
