"""Examples that hypothesis makes are the same in every run, and no clock judges them: a busy machine fails nothing.

What tests start ends with them (guardian.py).
"""

import os

import pytest
from hypothesis import HealthCheck, settings
from tests import guardian

settings.register_profile("steady", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("steady")


def pytest_configure(config: pytest.Config) -> None:
    if "PYTEST_XDIST_WORKER" not in os.environ:  # those have the mark of the process that started them
        guardian.start()
