"""Rates of orders that are neighbours; for orders that share a device see test_work.py."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from rlmux.core.model import DeviceId
from rlmux.sim.models.neighbour_slowdown import Neighbours
from rlmux.sim.models.rates import FractionRates, NeighbourRates

HERE, THERE, ELSEWHERE = DeviceId("rollout", 0, 0), DeviceId("rollout", 0, 1), DeviceId("train", 0, 0)
TABLE = Neighbours(device="a cpu", measured={("dense", "dense"): 1.25, ("dense", "update"): 2.0})


@dataclass(eq=False)
class Order:
    """All that rates may see of a running order."""

    devices: tuple[DeviceId, ...]
    sub_stage: str = "dense"
    device_fraction: float = 1.0
    is_waiting: bool = False
    base: str = ""


def rates_of(*orders, table=TABLE):
    rates = NeighbourRates(table, FractionRates())
    for order in orders:
        rates.begin(order)
    return [rates.rate(order) for order in orders]


def test_neighbours_slow_each_other_as_measured():
    assert rates_of(Order((HERE,)), Order((THERE,))) == pytest.approx([0.8, 0.8])
    assert rates_of(Order((HERE,)), Order((THERE,), "update")) == pytest.approx([0.5, 1.0])


def test_alone_and_beside_another_machine_it_is_as_fast_as_ever():
    assert rates_of(Order((HERE,))) == [1.0]
    assert rates_of(Order((HERE,)), Order((ELSEWHERE,))) == [1.0, 1.0]


def test_nodes_of_one_machine_are_neighbours():
    one = Neighbours(device="a cpu", measured=TABLE.measured, is_one_machine=True)
    assert rates_of(Order((HERE,)), Order((ELSEWHERE,)), table=one) == pytest.approx([0.8, 0.8])


def test_an_order_that_waits_for_an_environment_slows_no_other():
    assert rates_of(Order((HERE,)), Order((THERE,), is_waiting=True))[0] == 1.0


def test_an_order_without_devices_slows_no_other_and_is_not_slowed():
    assert rates_of(Order(()), Order((HERE,))) == [1.0, 1.0]


def test_orders_on_one_device_are_no_neighbours_and_device_fractions_still_count():
    assert rates_of(Order((HERE,), device_fraction=0.25), Order((HERE,), device_fraction=0.75)) == [0.25, 0.75]
    assert rates_of(Order((HERE,), device_fraction=0.25), Order((THERE,)))[0] == pytest.approx(0.25 * 0.8)


def test_an_order_that_begins_changes_or_ends_updates_its_neighbours_and_no_others():
    rates = NeighbourRates(TABLE, FractionRates())
    far, mine, other = Order((ELSEWHERE,)), Order((HERE,)), Order((THERE,))
    assert rates.begin(far) == [far]
    assert rates.begin(mine) == [mine]
    assert rates.begin(other) == [other, mine]
    assert rates.change(mine) == [mine, other]
    assert rates.end(other) == [mine]
    assert rates.rate(mine) == 1.0
