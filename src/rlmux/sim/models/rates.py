"""How fast orders run: solo seconds per second, at a device fraction, beside others.

    ByFraction            as fast as its device fraction says, whoever else is there
    ByInterference     1 alone on whole devices; else one over the slowdown of a table, the worst of its devices and
                       of those that it shares them with
    BesideNeighbours   as fast as another of these says, over the slowdown by who computes on other devices of its
                       machine; who only waits for an environment slows nobody

The simulation tells who begins, ends or changes; the answer is whose pace is to be taken anew.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Generic, Protocol, TypeVar

from rlmux.core.model import DeviceId
from rlmux.sim.models.interference import InterferenceTable
from rlmux.sim.models.neighbours import Neighbours


class Computing(Protocol):
    """An order under way, as far as paces go."""

    device_fraction: float

    @property
    def devices(self) -> tuple[DeviceId, ...]: ...

    @property
    def kind(self) -> str: ...

    @property
    def is_waiting(self) -> bool:
        """There is nothing to compute until an environment replies."""


C = TypeVar("C", bound=Computing)


class Pace(Protocol[C]):
    @property
    def depends_on_kind(self) -> bool:
        """Whether a change of an order's character changes paces."""

    def begins(self, one: C) -> Sequence[C]:
        """Whose pace is to be taken anew, itself included; so too for `changes`."""

    def changes(self, one: C) -> Sequence[C]: ...

    def ends(self, one: C) -> Sequence[C]:
        """Whose pace is to be taken anew, now that it is gone."""

    def of(self, one: C) -> float: ...


class ByFraction:
    """Orders do not slow each other."""

    depends_on_kind = False

    def begins(self, one: C) -> Sequence[C]:
        return (one,)

    def changes(self, one: C) -> Sequence[C]:
        return (one,)

    def ends(self, one: C) -> Sequence[C]:
        return ()

    def of(self, one: Computing) -> float:
        return one.device_fraction


class ByInterference(Generic[C]):
    """Orders that share a device slow each other as the table says."""

    depends_on_kind = True

    def __init__(self, table: InterferenceTable) -> None:
        self._table = table
        self._on_device: dict[DeviceId, list[C]] = {}

    def on(self, device: DeviceId) -> Sequence[C]:
        """Who computes there."""
        return self._on_device.get(device, ())

    def begins(self, one: C) -> Sequence[C]:
        for device in one.devices:
            self._on_device.setdefault(device, []).append(one)
        return self.changes(one)

    def changes(self, one: C) -> Sequence[C]:
        if not one.devices:
            return (one,)
        return list({id(other): other for device in one.devices for other in self._on_device[device]}.values())

    def ends(self, one: C) -> Sequence[C]:
        for device in one.devices:
            self._on_device[device].remove(one)
        return self.changes(one) if one.devices else ()

    def of(self, one: C) -> float:
        return min((self._on(device, one) for device in one.devices), default=1.0)

    def _on(self, device: DeviceId, one: C) -> float:
        others = [other for other in self._on_device[device] if other is not one]
        if not others:
            return (
                1.0 if one.device_fraction >= 1.0 else 1.0 / self._table.slowdown_alone(one.kind, one.device_fraction)
            )
        return 1.0 / max(self._table.slowdowns(one.kind, other.kind, one.device_fraction)[0] for other in others)


class BesideNeighbours(Generic[C]):
    """Orders on different devices of one machine slow each other too."""

    depends_on_kind = True

    def __init__(self, neighbours: Neighbours, pace: Pace[C]) -> None:
        """`pace`: what it is without neighbours."""
        self._neighbours = neighbours
        self._pace = pace
        self._on_machine: dict[Hashable, list[C]] = {}

    def begins(self, one: C) -> Sequence[C]:
        for machine in self._machines(one):
            self._on_machine.setdefault(machine, []).append(one)
        return self._with_neighbours(one, self._pace.begins(one))

    def changes(self, one: C) -> Sequence[C]:
        return self._with_neighbours(one, self._pace.changes(one))

    def ends(self, one: C) -> Sequence[C]:
        for machine in self._machines(one):
            self._on_machine[machine].remove(one)
        return self._with_neighbours(one, self._pace.ends(one))

    def of(self, one: C) -> float:
        pace = self._pace.of(one)
        slowdowns = [
            self._neighbours.slowdown(one.kind, (other.kind for other in self._beside(one, device)))
            for device in one.devices
        ]
        return pace / max(slowdowns, default=1.0)

    def _machines(self, one: C) -> Sequence[Hashable]:
        return list(dict.fromkeys(self._neighbours.machine(device) for device in one.devices))

    def _with_neighbours(self, one: C, others: Sequence[C]) -> Sequence[C]:
        found = {id(other): other for other in others}
        for machine in self._machines(one):
            found.update((id(other), other) for other in self._on_machine[machine])
        return list(found.values())

    def _beside(self, one: C, device: DeviceId) -> list[C]:
        """Those that compute on other devices of this one's machine."""
        return [
            other
            for other in self._on_machine[self._neighbours.machine(device)]
            if other is not one and not other.is_waiting and any(theirs != device for theirs in other.devices)
        ]
