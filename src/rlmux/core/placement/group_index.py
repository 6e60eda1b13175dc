"""Groups by what they have room for, so that a placement need not look at those that are full.

    (room of the training nodes, period)  ─▶ groups        both in quarter octaves

A newcomer needs T_train <= room = budget - T_load of the training nodes, and period <= its own budget. Most groups of a
busy cluster have no such room: of 628 groups that 2,000 pipelines make, some 2 are left to be tried.

A module of its own: it is an index that must agree with the groups, and is checked against them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from rlmux.core.model import GroupId
from rlmux.core.placement.group_load import GroupLoad
from rlmux.core.placement.rollback import Undo

_PER_OCTAVE = 4
_ROUNDING = 1e-9


class GroupIndex:
    """Kept beside the groups by the ledger, which reports every change to it."""

    def __init__(self, groups: Iterable[GroupLoad], undo: Undo) -> None:
        self._undo = undo
        self._cells: dict[tuple[int, int], dict[GroupId, GroupLoad]] = {}
        self._cell_of: dict[GroupId, tuple[int, int]] = {}
        for group in groups:
            self.put(group)

    def put(self, group: GroupLoad) -> None:
        """A new group, or an old one that has changed."""
        self.drop(group.id)
        if group.is_colocated:
            return  # pipelines join there only by sharing everything
        cell = (_bucket(group.budget_s - group.train_load_s), _bucket(group.period_s))
        if cell not in self._cells:
            self._undo.put(self._cells, cell, {})
        self._undo.put(self._cells[cell], group.id, group)
        self._undo.put(self._cell_of, group.id, cell)

    def drop(self, group_id: GroupId) -> None:
        if group_id in self._cell_of:
            cell = self._undo.remove(self._cell_of, group_id)
            self._undo.remove(self._cells[cell], group_id)
            if not self._cells[cell]:
                self._undo.remove(self._cells, cell)

    def with_room(self, train_s: float, budget_s: float) -> list[GroupLoad]:
        """Every group that may take so much training within the budget, and some that may not; oldest first."""
        least_room, longest = _bucket(train_s * (1 - _ROUNDING)), _bucket(budget_s)
        found = [
            group
            for (room, period), groups in self._cells.items()
            if room >= least_room and period <= longest
            for group in groups.values()
        ]
        found.sort(key=lambda group: group.id)
        return found

    def check(self, groups: Mapping[GroupId, GroupLoad]) -> None:
        """Raises AssertionError where it differs from one that is made anew."""
        assert self._cells == GroupIndex(groups.values(), Undo())._cells, "the index of groups is stale"


def _bucket(seconds: float) -> int:
    """The number of the quarter octave that the seconds lie in; it grows with them."""
    if seconds < 0.0:
        return -(1 << 20)
    if seconds < 1e-9:
        return -(1 << 19)
    return 1 << 20 if seconds == math.inf else math.floor(_PER_OCTAVE * math.log2(seconds))
