"""A request batch waits for a client that comes back at once, and not for one that thinks."""

from __future__ import annotations

import pytest

from rlmux.runtime.orders.idle_timeout import IdleTimeout


@pytest.mark.parametrize(
    ("gaps", "expected"),
    [
        ([0.001] * 3, 0.05),
        ([1.0] * 8, 0.0),
        ([0.002, 0.01, 0.004, 0.001], 0.015),
        ([0.04] * 8, 0.05),
        ([0.01, 0.01, 0.01, 1.0] * 4, 0.015),
        ([0.01, 1.0, 1.0, 1.0, 1.0] * 3, 0.0),
        ([1.0] * 30 + [0.01] * 16, 0.015),
    ],
    ids=["too few", "it thinks", "at once", "no longer than it may", "turns, then thought", "seldom", "of late"],
)
def test_a_batch_waits_as_long_as_its_client_was_seen_to_take_where_that_pays(gaps, expected):
    timeout = IdleTimeout()
    for gap in gaps:
        timeout.observe(gap)
    assert timeout.seconds(0.05) == pytest.approx(expected)
