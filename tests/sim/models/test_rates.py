"""Paces of orders that are neighbours; those of orders that share a device: test_substages.py."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from rlmux.core.model import DeviceId
from rlmux.sim.models.neighbours import Neighbours
from rlmux.sim.models.rates import BesideNeighbours, ByFraction

HERE, THERE, ELSEWHERE = DeviceId("rollout", 0, 0), DeviceId("rollout", 0, 1), DeviceId("train", 0, 0)
TABLE = Neighbours(device="a cpu", measured={("dense", "dense"): 1.25, ("dense", "update"): 2.0})


@dataclass(eq=False)
class Order:
    """All that a pace may see of one."""

    devices: tuple[DeviceId, ...]
    kind: str = "dense"
    device_fraction: float = 1.0
    is_waiting: bool = False


def paces(*orders, table=TABLE):
    pace = BesideNeighbours(table, ByFraction())
    for order in orders:
        pace.begins(order)
    return [pace.of(order) for order in orders]


def test_neighbours_slow_each_other_as_measured():
    assert paces(Order((HERE,)), Order((THERE,))) == pytest.approx([0.8, 0.8])
    assert paces(Order((HERE,)), Order((THERE,), "update")) == pytest.approx([0.5, 1.0])


def test_alone_and_beside_another_machine_it_is_as_fast_as_ever():
    assert paces(Order((HERE,))) == [1.0]
    assert paces(Order((HERE,)), Order((ELSEWHERE,))) == [1.0, 1.0]


def test_nodes_of_one_machine_are_neighbours():
    one = Neighbours(device="a cpu", measured=TABLE.measured, is_one_machine=True)
    assert paces(Order((HERE,)), Order((ELSEWHERE,)), table=one) == pytest.approx([0.8, 0.8])


def test_who_waits_for_an_environment_slows_nobody():
    assert paces(Order((HERE,)), Order((THERE,), is_waiting=True))[0] == 1.0


def test_who_holds_no_device_slows_nobody_and_is_not_slowed():
    assert paces(Order(()), Order((HERE,))) == [1.0, 1.0]


def test_who_shares_the_only_device_is_no_neighbour_and_levels_count_as_before():
    assert paces(Order((HERE,), device_fraction=0.25), Order((HERE,), device_fraction=0.75)) == [0.25, 0.75]
    assert paces(Order((HERE,), device_fraction=0.25), Order((THERE,)))[0] == pytest.approx(0.25 * 0.8)


def test_whoever_begins_changes_or_ends_concerns_its_neighbours_and_no_others():
    pace = BesideNeighbours(TABLE, ByFraction())
    far, mine, other = Order((ELSEWHERE,)), Order((HERE,)), Order((THERE,))
    assert pace.begins(far) == [far]
    assert pace.begins(mine) == [mine]
    assert pace.begins(other) == [other, mine]
    assert pace.changes(mine) == [mine, other]
    assert pace.ends(other) == [mine]
    assert pace.of(mine) == 1.0
