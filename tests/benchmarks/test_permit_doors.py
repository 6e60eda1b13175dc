"""benchmarks/permit_doors.py times turns by both doors of a real broker."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("grpc")
ROOT = Path(__file__).parent.parent.parent


def test_a_turn_is_timed_by_either_door():
    command = [sys.executable, str(ROOT / "benchmarks" / "permit_doors.py"), "--turns", "20", "--json"]
    told = json.loads(subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout)
    assert set(told) == {"rlmux.share", "gRPC"}
    assert all(0 < one["p50_ms"] <= one["p95_ms"] for one in told.values())
