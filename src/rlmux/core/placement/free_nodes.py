"""Free nodes of one pool: which numbers a pipeline gets.

FreeNumbers        no machines known: the lowest number first; an unbounded pool counts on as needed
FreeByMachine      machines known: a gang within one machine wherever one has room for it

    machines a a a a b b b b, gang of 4    3 free on a, 4 free on b      ─▶ b
    gang of 2                              3 free on a, 4 free on b      ─▶ a: the best fit keeps b whole
    gang of 6                              3 free on a, 4 free on b      ─▶ all of b, 2 of a

A module of its own: the choice is compared with a model of it, apart from uses and losses.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Mapping, Sequence
from typing import Any

from rlmux.core.model import Pool
from rlmux.core.placement.rollback import Undo


class FreeNumbers:
    """Free numbers, the lowest first. Those from `_next` on were never in use."""

    def __init__(self, lost: Mapping[int, None]) -> None:
        self._lost = lost
        self._returned: list[int] = []
        """A heap of the free numbers below `_next`."""
        self._next = 0

    def take(self, count: int) -> tuple[int, ...]:
        """The lowest numbers. Seconds grow with the logarithm of the free nodes."""
        return tuple(self._take_one() for _ in range(count))

    def _take_one(self) -> int:
        while True:
            index = heapq.heappop(self._returned) if self._returned else self._count_on()
            if index not in self._lost:
                return index

    def _count_on(self) -> int:
        self._next += 1
        return self._next - 1

    def add(self, index: int) -> None:
        """The number is free from now on."""
        if index < self._next:
            heapq.heappush(self._returned, index)

    def remove(self, index: int) -> None:
        """The number, which need not be free, is not handed out."""
        self._returned = [other for other in self._returned if other != index]
        heapq.heapify(self._returned)

    def numbers(self) -> tuple[list[int], int]:
        """(free numbers in any order, bound below which each number is free, in use or lost)."""
        return self._returned, self._next

    def mark(self) -> Any:
        """State that `take_back` restores in addition to the trial's changes."""
        return self._next, list(self._returned)

    def take_back(self, mark: Any) -> None:
        """Roll back to the mark."""
        self._next, self._returned = mark


class FreeByMachine:
    """Free numbers by machine: a gang lies within one machine wherever one has room for it.

    Methods as in `FreeNumbers`. A search is a bisection of the machines, a change moves their references in memory.
    """

    def __init__(self, machines: Sequence[str], undo: Undo) -> None:
        """`machines`: the machine's name for each number."""
        self._machines = machines
        self._undo = undo
        by_machine: dict[str, list[int]] = {}
        for index, machine in enumerate(machines):
            by_machine.setdefault(machine, []).append(index)
        self._free = {machine: tuple(numbers) for machine, numbers in by_machine.items()}
        """Free numbers of each machine, ascending."""
        self._ranking = self._ranked()
        """(number of free nodes, free numbers) of each machine that has any, ascending."""

    def take(self, count: int) -> tuple[int, ...]:
        """The machine with the fewest free nodes that suffice, ties by the lowest number; the lowest numbers of it.

        Where none has enough, the machine with the most is taken whole, and the rest in the same way: so the gang lies
        on as few machines as possible, the largest part first. It does not wait for a machine that others may leave:
        free devices are worth more than a short way between them.
        """
        taken: tuple[int, ...] = ()
        while left := count - len(taken):
            place = bisect_left(self._ranking, (left,))
            if place == len(self._ranking):
                place = bisect_left(self._ranking, (self._ranking[-1][0],))
            numbers = self._ranking[place][1]
            taken += numbers[:left]
            self._put(self._machines[numbers[0]], numbers[left:])
        return taken

    def add(self, index: int) -> None:
        numbers = list(self._free[self._machines[index]])
        insort(numbers, index)
        self._put(self._machines[index], tuple(numbers))

    def remove(self, index: int) -> None:
        machine = self._machines[index]
        self._put(machine, tuple(other for other in self._free[machine] if other != index))

    def numbers(self) -> tuple[list[int], int]:
        assert self._ranking == self._ranked()
        return [index for numbers in self._free.values() for index in numbers], len(self._machines)

    def mark(self) -> Any:
        return list(self._ranking)

    def take_back(self, mark: Any) -> None:
        self._ranking = mark

    def _put(self, machine: str, numbers: tuple[int, ...]) -> None:
        before = self._free[machine]
        if before:
            del self._ranking[bisect_left(self._ranking, (len(before), before))]
        if numbers:
            insort(self._ranking, (len(numbers), numbers))
        self._undo.put(self._free, machine, numbers)

    def _ranked(self) -> list[tuple[int, tuple[int, ...]]]:
        return sorted((len(numbers), numbers) for numbers in self._free.values() if numbers)


FreeNodes = FreeNumbers | FreeByMachine


def free_nodes(pool: Pool, lost: Mapping[int, None], undo: Undo) -> FreeNodes:
    """All nodes of the pool, free. `lost`: the pool's lost nodes, as they are at each call."""
    if len(set(pool.machines)) > 1:
        return FreeByMachine(pool.machines, undo)
    return FreeNumbers(lost)
