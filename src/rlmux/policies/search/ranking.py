"""What a regrouping looks at first, kept between decisions: of thousands of groups few change at a time.

    GroupRanking   groups in the order of a key that each has by itself
    BudgetWatch    groups with a member beyond its budget, which only time brings about

A group's summary is a frozen value that is made anew when anything in the group changes, so one that is the same object
has the same key. Both are caches: dropping them changes no result.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Hashable, Sequence

from rlmux.core.model import GroupId
from rlmux.core.placement.group_load import GroupLoad
from rlmux.policies.search.economy import Economy, keeps_budget_until

Key = Callable[[GroupLoad], float | None]


class GroupRanking:
    """Groups by a key, the smallest first, then by age."""

    def __init__(self) -> None:
        self._group_by_id: dict[GroupId, GroupLoad] = {}
        self._rank_by_id: dict[GroupId, tuple[float, GroupId]] = {}
        self._ranks: list[tuple[float, GroupId]] = []
        self._ranked: list[GroupLoad] = []
        """The groups of `_ranks`."""
        self._terms: Hashable = None

    def ranked(self, groups: Sequence[GroupLoad], key: Key, terms: Hashable = None) -> Sequence[GroupLoad]:
        """The groups in order, without those whose key is None; the next call changes what this one returned.

        `terms`: what the key depends on beside the group; with other terms everything is ranked anew.
        """
        if terms != self._terms:
            self._terms = terms
            for group_id in list(self._group_by_id):
                self._forget(group_id)
        known = self._group_by_id
        changed = [group for group in groups if known.get(group.id) is not group]
        num_new = sum(group.id not in known for group in changed)
        if len(groups) != len(known) + num_new:
            present = {group.id for group in groups}
            for group_id in [group_id for group_id in known if group_id not in present]:
                self._forget(group_id)
        for group in changed:
            self._forget(group.id)
            self._add(group, key(group))
        return self._ranked

    def _add(self, group: GroupLoad, value: float | None) -> None:
        self._group_by_id[group.id] = group
        if value is not None:
            rank = self._rank_by_id[group.id] = (value, group.id)
            place = bisect_left(self._ranks, rank)
            self._ranks.insert(place, rank)
            self._ranked.insert(place, group)

    def _forget(self, group_id: GroupId) -> None:
        self._group_by_id.pop(group_id, None)
        rank = self._rank_by_id.pop(group_id, None)
        if rank is not None:
            place = bisect_left(self._ranks, rank)
            del self._ranks[place]
            del self._ranked[place]


class BudgetWatch:
    """Finds which groups break a budget; checks each again only once time can have changed it."""

    def __init__(self) -> None:
        self._safe: dict[GroupId, tuple[GroupLoad, float]] = {}
        """Groups that kept every budget when they were last checked, and the time until which they surely do."""

    def late_groups(self, groups: Sequence[GroupLoad], economy: Economy) -> list[GroupLoad]:
        """Groups with a member beyond its budget, oldest first."""
        late: list[GroupLoad] = []
        now_s = _now_s(groups, economy)
        for group in groups:
            safe = self._safe.get(group.id)
            if safe is not None and safe[0] is group and now_s < safe[1]:
                continue
            if economy.keeps_budgets(group):
                self._safe[group.id] = (group, _safe_until(group, economy))
            else:
                late.append(group)
        if len(self._safe) > 2 * len(groups) + 64:
            self._safe.clear()
        return late


def _now_s(groups: Sequence[GroupLoad], economy: Economy) -> float:
    """The time of the decision, from a pipeline with steps left; no budget moves with time where none has."""
    lefts = (economy.view.work_left(member.pipeline.id) for group in groups for member in group.members)
    return next((left.now_s for left in lefts if left is not None), 0.0)


def _safe_until(group: GroupLoad, economy: Economy) -> float:
    """Time until which no member can come to be beyond its budget, however few steps it makes."""
    return min(
        (
            keeps_budget_until(
                member.pipeline, economy.view.work_left(member.pipeline.id), group.period_s / member.steps_per_cycle
            )
            for member in group.members
        ),
        default=math.inf,
    )
