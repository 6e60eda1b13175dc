"""What conftest.py says of all tests."""

from __future__ import annotations

import os

import pytest


@pytest.fixture(scope="module")
def shared() -> object:
    return object()


@pytest.mark.skipif("PYTEST_XDIST_WORKER" not in os.environ, reason="in one process there are no groups")
def test_those_that_share_a_fixture_of_their_module_are_one_group_of_xdist(
    shared: object, request: pytest.FixtureRequest
) -> None:
    assert request.node.nodeid.endswith("@tests/test_conftest.py")
