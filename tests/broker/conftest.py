"""What tests of the broker share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.broker.room import Room


@pytest.fixture
def room(tmp_path: Path) -> Iterator[Room]:
    """A broker of one device; a test that needs another kind makes its own."""
    room = Room(tmp_path)
    yield room
    room.end()
