"""The rates of running orders: solo seconds per second, at a device fraction, beside other orders.

    FractionRates       the order's device fraction, whatever else runs there; of pipelines of one base on a device,
                        that of one in their batch
    InterferenceRates   1 alone on whole devices; else one over the slowdown of a table beside the orders that it
                        shares a device with: the worst of the order's devices
    NeighbourRates      the rate of one of the above, over the slowdown by orders that compute on other devices of the
                        same machine; an order that only waits for an environment slows no other

The simulation reports which order begins, changes or ends; the result is the orders whose rate has to be updated.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Generic, Protocol, TypeVar

from rlmux.core.model import DeviceId, SubStage
from rlmux.sim.models.interference import InterferenceTable
from rlmux.sim.models.neighbour_slowdown import Neighbours


class Computing(Protocol):
    """The state of a running order that rates depend on."""

    device_fraction: float

    @property
    def devices(self) -> tuple[DeviceId, ...]: ...

    @property
    def sub_stage(self) -> SubStage: ...

    @property
    def base(self) -> str:
        """Key of the pipelines with which it computes in one batch; empty: none."""

    def slowdown_in_batch(self, num_together: int) -> float:
        """Its seconds in a batch of so many of its base, over its seconds alone."""

    @property
    def is_waiting(self) -> bool:
        """Whether there is nothing to compute until an environment replies."""


C = TypeVar("C", bound=Computing)


class Rates(Protocol[C]):
    @property
    def depends_on_sub_stage(self) -> bool:
        """Whether an order that begins, ends or changes its sub-stage changes the rates of others."""

    def begin(self, order: C) -> Sequence[C]:
        """Add an order; returns the orders whose rate has to be updated, this one included."""

    def change(self, order: C) -> Sequence[C]:
        """The orders whose rate has to be updated after a change of this one, this one included."""

    def end(self, order: C) -> Sequence[C]:
        """Remove an order; returns the orders whose rate has to be updated."""

    def rate(self, order: C) -> float: ...


class FractionRates:
    """Orders do not slow each other."""

    depends_on_sub_stage = False

    def begin(self, order: C) -> Sequence[C]:
        return (order,)

    def change(self, order: C) -> Sequence[C]:
        return (order,)

    def end(self, order: C) -> Sequence[C]:
        return ()

    def rate(self, order: Computing) -> float:
        fraction = order.device_fraction
        return 1.0 / order.slowdown_in_batch(round(1.0 / fraction)) if fraction < 1.0 and order.base else fraction


class InterferenceRates(Generic[C]):
    """Orders that share a device slow each other by the table."""

    depends_on_sub_stage = True

    def __init__(self, table: InterferenceTable) -> None:
        self._table = table
        self._orders_by_device: dict[DeviceId, list[C]] = {}

    def orders_on(self, device: DeviceId) -> Sequence[C]:
        """The orders that hold the device."""
        return self._orders_by_device.get(device, ())

    def begin(self, order: C) -> Sequence[C]:
        for device in order.devices:
            self._orders_by_device.setdefault(device, []).append(order)
        return self.change(order)

    def change(self, order: C) -> Sequence[C]:
        if not order.devices:
            return (order,)
        return list({id(other): other for device in order.devices for other in self._orders_by_device[device]}.values())

    def end(self, order: C) -> Sequence[C]:
        for device in order.devices:
            self._orders_by_device[device].remove(order)
        return self.change(order) if order.devices else ()

    def rate(self, order: C) -> float:
        return min((self._rate_on(device, order) for device in order.devices), default=1.0)

    def _rate_on(self, device: DeviceId, order: C) -> float:
        table, fraction = self._table, order.device_fraction
        others = [other for other in self._orders_by_device[device] if other is not order]
        if others and order.base and all(other.base == order.base for other in others):
            return 1.0 / order.slowdown_in_batch(1 + len(others))
        if len(others) > 1:
            together = [(running.sub_stage, running.device_fraction) for running in (order, *others)]
            return 1.0 / table.slowdowns_together(together)[0]
        if others:
            return 1.0 / table.slowdowns(order.sub_stage, others[0].sub_stage, fraction)[0]
        return 1.0 if fraction >= 1.0 else 1.0 / table.slowdown_alone(order.sub_stage, fraction)


class NeighbourRates(Generic[C]):
    """Orders on different devices of one machine slow each other too."""

    depends_on_sub_stage = True

    def __init__(self, neighbours: Neighbours, rates: Rates[C]) -> None:
        """`rates`: those without neighbours."""
        self._neighbours = neighbours
        self._rates = rates
        self._orders_by_machine: dict[Hashable, list[C]] = {}

    def begin(self, order: C) -> Sequence[C]:
        for machine in self._machines(order):
            self._orders_by_machine.setdefault(machine, []).append(order)
        return self._with_neighbours(order, self._rates.begin(order))

    def change(self, order: C) -> Sequence[C]:
        return self._with_neighbours(order, self._rates.change(order))

    def end(self, order: C) -> Sequence[C]:
        for machine in self._machines(order):
            self._orders_by_machine[machine].remove(order)
        return self._with_neighbours(order, self._rates.end(order))

    def rate(self, order: C) -> float:
        slowdowns = [
            self._neighbours.slowdown(order.sub_stage, (other.sub_stage for other in self._beside(order, device)))
            for device in order.devices
        ]
        return self._rates.rate(order) / max(slowdowns, default=1.0)

    def _machines(self, order: C) -> Sequence[Hashable]:
        return list(dict.fromkeys(self._neighbours.machine(device) for device in order.devices))

    def _with_neighbours(self, order: C, others: Sequence[C]) -> Sequence[C]:
        found = {id(other): other for other in others}
        for machine in self._machines(order):
            found.update((id(other), other) for other in self._orders_by_machine[machine])
        return list(found.values())

    def _beside(self, order: C, device: DeviceId) -> list[C]:
        """The orders that compute on other devices of this device's machine."""
        return [
            other
            for other in self._orders_by_machine[self._neighbours.machine(device)]
            if other is not order and not other.is_waiting and any(theirs != device for theirs in other.devices)
        ]
