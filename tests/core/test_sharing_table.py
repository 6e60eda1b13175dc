"""What a policy may know of sharing a device."""

from __future__ import annotations

from rlmux.core.steps.colocation import SharingEntry, SharingTable


def entry(a, b, device_fraction, slow_a, slow_b):
    return SharingEntry(
        sub_stage_a=a, sub_stage_b=b, device_fraction=device_fraction, slowdown_a=slow_a, slowdown_b=slow_b
    )


def test_the_two_sides_of_a_pair_never_have_more_than_the_device():
    table = SharingTable.of(
        entry(a, b, device_fraction, 1.1, 1.4)
        for a in ("x", "y")
        for b in ("x", "y")
        for device_fraction in (0.25, 0.75, 0.9)
    )
    for a in ("x", "y"):
        for b in ("x", "y"):
            assert table.pair_rates(a, b).device_fraction + table.pair_rates(b, a).device_fraction <= 1.0


def test_two_alike_both_get_the_smaller_fraction_and_its_slowdown():
    pair_rates = SharingTable.of([entry("x", "x", 0.75, 1.1, 1.7)]).pair_rates("x", "x")
    assert (pair_rates.device_fraction, pair_rates.slowdown, pair_rates.other_slowdown) == (0.25, 1.7, 1.7)


def test_a_pair_that_does_no_more_together_than_one_after_the_other_is_not_in_the_table():
    assert SharingTable.of([entry("x", "y", 0.5, 2.0, 2.0)]).pair_rates("x", "y") is None
    assert SharingTable.of([entry("x", "x", 0.75, 1.1, 2.2)]).pair_rates("x", "x") is None
