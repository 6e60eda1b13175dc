"""Proof of delivery says of each step what was compared, and what was not."""

from __future__ import annotations

from typing import Any

import pytest

from rlmux.log.notes import WeightDelivery
from rlmux.log.value_codec import reader
from rlmux.report.timeline.delivery import Deliveries, delivery_summary, short


def deliveries(*steps: dict[str, Any]) -> Deliveries:
    """Steps from 1 on: by default on-policy, loaded as published."""
    found = Deliveries()
    for step, changes in enumerate(steps, 1):
        fields = {
            "versions": [step - 1],
            "allowed": [step - 1, step - 1],
            "loaded": {str(step - 1): [f"c{step - 1}"]} if step > 1 else {},
            "published": {str(step): [f"c{step}"]},
        }
        found.add(step, delivery({**fields, **changes}))
    return found


def delivery(fields: dict[str, Any]) -> WeightDelivery:
    """As a note of a log has it."""
    read: WeightDelivery = reader(WeightDelivery)(fields, "delivery")
    return read


def says(found: Deliveries, gap: float | None = 2e-7) -> str:
    steps = {step: one for step in found.versions if (one := found.of(step, logprob_gap=gap)) is not None}
    summary = delivery_summary(steps)
    assert summary is not None
    return str(summary["says"])


def text(found: Deliveries, step: int, gap: float | None = 2e-7) -> tuple[str, bool]:
    one = found.of(step, logprob_gap=gap)
    assert one is not None
    return one.text, one.is_ok


def test_weights_that_were_loaded_as_published_are_those_that_were_trained() -> None:
    found = deliveries({}, {}, {})
    assert [text(found, step) for step in (1, 2, 3)] == [
        ("v0 initial · gap 2e-7", True),
        ("v1 = trained · gap 2e-7", True),
        ("v2 = trained · gap 2e-7", True),
    ]
    assert says(found) == (
        "weights that sampled: those that were trained, in all 3 steps "
        "(version, checksum; initial weights in 1 step); largest log-prob gap 2e-7"
    )


def test_another_checksum_than_the_published_one_is_marked() -> None:
    found = deliveries({}, {"loaded": {"1": ["c1", "old"]}}, {})
    assert text(found, 2, None) == ("v1 ≠ trained", False)
    assert says(found, None) == (
        "weights that sampled: NOT those that were trained in 1 of 3 steps; step 2: v1 ≠ trained; no log-prob compared"
    )


def test_a_version_that_staleness_does_not_allow_is_marked() -> None:
    found = deliveries({}, {}, {"versions": [1, 2]}, {"versions": [2, 3], "allowed": [2, 3]})
    assert text(found, 3, None) == ("v1 to 2 = trained · allowed v2", False)
    assert text(found, 4, None) == ("v2 to 3 = trained", True)


def test_an_engine_without_checksums_is_checked_by_version_alone() -> None:
    found = deliveries({}, {"loaded": {"1": []}})
    assert text(found, 2, 3e-3) == ("v1 not compared · gap 3e-3", True)
    assert says(found, 3e-3) == (
        "weights that sampled: of an allowed version in all 2 steps "
        "(version; no checksum from the engine in 1 step; initial weights in 1 step); largest log-prob gap 3e-3"
    )


def test_a_version_that_is_loaded_again_counts_with_all_its_checksums_published() -> None:
    """The file for rollout workers is in bfloat16, and a resumed run loads the checkpoint in float32."""
    found = deliveries({"published": {"1": ["bfloat16", "float32"]}}, {"loaded": {"1": ["bfloat16"]}})
    found.add(
        2, delivery({"versions": [1], "allowed": [1, 1], "loaded": {"1": ["float32"]}, "published": {"2": ["c2"]}})
    )
    assert text(found, 2, None) == ("v1 = trained", True)


def test_steps_that_are_done_again_are_compared_with_their_own_publication() -> None:
    found = deliveries({}, {}, {})
    found.forget_after(1)
    assert found.of(2, logprob_gap=None) is None
    found.add(2, delivery({"versions": [1], "allowed": [1, 1], "loaded": {"1": ["c1"]}, "published": {"2": ["again"]}}))
    found.add(3, delivery({"versions": [2], "allowed": [2, 2], "loaded": {"2": ["again"]}, "published": {"3": ["c3"]}}))
    assert text(found, 3, None) == ("v2 = trained", True)


def test_a_log_without_deliveries_has_none() -> None:
    assert Deliveries().of(1, logprob_gap=None) is None
    assert delivery_summary({}) is None


@pytest.mark.parametrize(("value", "shown"), [(2.4e-7, "2e-7"), (0.0, "0"), (0.031, "0.03"), (12.0, "1e1")])
def test_a_gap_has_one_digit(value: float, shown: str) -> None:
    assert short(value) == shown
