"""What is left of an order, and at what rate it runs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rlmux.core.estimation.colocation import SharingTriple
from rlmux.core.model import DeviceId
from rlmux.sim.models.interference import estimated_table, fraction_grid
from rlmux.sim.models.rates import FractionRates, InterferenceRates
from rlmux.sim.models.work import SoloSeconds, TrajectorySeconds

TABLE = estimated_table(fraction_grid("H100"))


class Order:
    """All that rates may see of a running order."""

    def __init__(self, sub_stage, *devices, device_fraction=1.0):
        self.sub_stage, self.device_fraction, self.base = sub_stage, device_fraction, ""
        self.devices = tuple(DeviceId("gpu", 0, index) for index in devices)


def test_half_the_rate_takes_twice_as_long():
    work = SoloSeconds(10.0, "update")
    assert work.until_over(0.5) == 20.0
    work.advance(10.0, 0.5)
    assert work.until_over(1.0) == pytest.approx(5.0)


def test_a_pause_costs_nothing_and_gains_nothing():
    work = TrajectorySeconds([1.0, 4.0])
    work.advance(100.0, 0.0)
    assert work.until_over(1.0) == 4.0
    assert not work.is_over


def test_trajectories_end_one_by_one_and_each_is_reported():
    work = TrajectorySeconds([3.0, 1.0, 2.0])
    seen = []
    while not work.is_over:
        work.advance(work.until_report(1.0), 1.0)
        seen.append(work.report())
    assert seen == [(2, 0, 0), (1, 0, 0), (0, 0, 0)]


def test_what_is_taken_is_given_whole():
    source, target = TrajectorySeconds([5.0, 7.0]), TrajectorySeconds([1.0])
    source.advance(2.0, 1.0)
    target.give(source.take(), 0.5)
    assert source.is_over
    assert target.report() == (3, 0, 0)
    assert target.until_over(1.0) == pytest.approx(5.5)


def test_without_a_table_the_rate_is_the_device_fraction_beside_any_order():
    rates, first, second = (
        FractionRates(),
        Order("dense", 0, device_fraction=0.3),
        Order("update", 0, device_fraction=0.7),
    )
    assert list(rates.begin(first)) == [first]
    rates.begin(second)
    assert (rates.rate(first), rates.rate(second)) == (0.3, 0.7)
    assert list(rates.end(first)) == []


def test_with_a_table_orders_on_a_device_update_each_other_and_the_worst_device_counts():
    rates = InterferenceRates(TABLE)
    tail, wide, alone = (
        Order("tail", 0, device_fraction=0.2),
        Order("update", 0, 1, device_fraction=0.8),
        Order("dense", 2),
    )
    for one in (tail, alone):
        rates.begin(one)
    assert rates.rate(tail) == pytest.approx(1.0 / TABLE.slowdown_alone("tail", 0.2))
    assert list(rates.begin(wide)) == [tail, wide]
    assert rates.rate(wide) == pytest.approx(
        min(1 / TABLE.slowdowns("update", "tail", 0.8)[0], 1 / TABLE.slowdown_alone("update", 0.8))
    )
    assert rates.rate(alone) == 1.0
    assert list(rates.end(tail)) == [wide]
    assert list(rates.end(wide)) == []


def test_with_a_table_three_orders_on_a_device_run_at_the_rates_of_their_triple():
    names, fractions = ("tail", "dense", "update"), (40 / 132, 40 / 132, 48 / 132)
    triple = SharingTriple(sub_stages=names, device_fractions=fractions, slowdowns=(1.25, 2.0, 2.5))
    rates = InterferenceRates(replace(TABLE, triples=(triple,)))
    tail, dense, update = (
        Order(name, 0, device_fraction=fraction) for name, fraction in zip(names, fractions, strict=True)
    )
    for one in (update, tail, dense):
        rates.begin(one)
    assert [rates.rate(one) for one in (tail, dense, update)] == [0.8, 0.5, 0.4]
    update.sub_stage = "prefill"  # not measured beside the others
    estimated = TABLE.slowdowns_together([(one.sub_stage, one.device_fraction) for one in (tail, dense, update)])
    assert [rates.rate(one) for one in (tail, dense, update)] == pytest.approx([1 / slow for slow in estimated])
    assert list(rates.end(update)) == [tail, dense]
    assert rates.rate(dense) == pytest.approx(1 / TABLE.slowdowns("dense", "tail", fractions[1])[0])


def test_an_order_that_holds_no_device_is_not_slowed():
    rates, publishing = InterferenceRates(TABLE), Order("update", device_fraction=1.0)
    assert list(rates.begin(publishing)) == [publishing]
    assert rates.rate(publishing) == 1.0
