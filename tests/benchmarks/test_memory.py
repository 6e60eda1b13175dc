"""What is counted before a pipeline is placed, against the measured peak of its workers."""

from __future__ import annotations

import memory
import pytest


@pytest.mark.slow
@pytest.mark.parametrize("shape", memory.SHAPES)
def test_counted_memory_is_within_fifteen_percent_of_the_measured_peak(shape):
    for row in memory.measure(shape):
        ratio = row["estimated_over_measured"]
        assert abs(ratio - 1.0) <= memory.TOLERANCE, f"{row['worker']}: {ratio:.2f}: {memory.table([row])}"


def test_the_table_shows_every_part_in_one_unit():
    row = {
        "shape": "kv",
        "worker": "rollout",
        "estimated_bytes": 3e6,
        "measured_bytes": 2.5e6,
        "estimated_over_measured": 1.2,
        "parts": {"weights": 1e6, "KV cache": 2e6, "logits": 0.0},
    }
    text = memory.table([row])
    assert "3.0" in text
    assert "2.5" in text
    assert "1.20" in text
    assert "KV cache" in text
    assert "logits" not in text
