"""Priorities determine a schedule: which work item is offered a device first, what is held back, what migrates.

The search changes priorities; the playout turns them into a schedule.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from rlmux.policies.lookahead.problem import Problem, WorkItem


@dataclass(slots=True)
class Priorities:
    """What determines a schedule of one problem."""

    rank: list[int]
    """Position of each work item in the list that devices are offered along."""
    after: dict[int, int] = field(default_factory=dict)
    """Each work item that is held back, with the one that must have started before it."""
    sibling_migrations: tuple[int, ...] = ()
    """Indices of the migrations to siblings that are made, ascending."""
    unshared: frozenset[int] = frozenset()
    """Work items that have their devices alone."""
    idle_migrations: frozenset[int] = frozenset()
    """Indices of the migrations to idle devices that are made."""
    least_gain: float = 0.0
    """Sub-stages that do less work together than so many do one after the other have no device in common."""

    def changed(
        self,
        *,
        rank: list[int] | None = None,
        after: dict[int, int] | None = None,
        sibling_migrations: tuple[int, ...] | None = None,
        unshared: frozenset[int] | None = None,
        idle_migrations: frozenset[int] | None = None,
        least_gain: float | None = None,
    ) -> Priorities:
        """A copy with these values in place of its own."""
        return Priorities(
            self.rank if rank is None else rank,
            self.after if after is None else after,
            self.sibling_migrations if sibling_migrations is None else sibling_migrations,
            self.unshared if unshared is None else unshared,
            self.idle_migrations if idle_migrations is None else idle_migrations,
            self.least_gain if least_gain is None else least_gain,
        )


def rank_descending(values: Sequence[float]) -> list[int]:
    """Position of each value in descending order; ties keep their order."""
    rank = [0] * len(values)
    for position, index in enumerate(sorted(range(len(values)), key=lambda index: -values[index])):
        rank[index] = position
    return rank


def longest_paths(work_items: Sequence[WorkItem], seconds: Sequence[float]) -> list[float]:
    """Seconds of each work item, as given, and of the longest chain that waits for it."""
    paths = list(seconds)
    for index in range(len(work_items) - 1, -1, -1):
        for need in work_items[index].needs:
            paths[need] = max(paths[need], seconds[need] + paths[index])
    return paths


def compatible_migrations(problem: Problem, numbers: tuple[int, ...]) -> tuple[int, ...]:
    """Those of these migrations to siblings, earlier ones preferred, in which no shard migrates twice or takes another
    one over after it migrated itself."""
    sources: set[int] = set()
    targets: set[int] = set()
    kept = []
    for number in numbers:
        migration = problem.sibling_migrations[number]
        if migration.source in sources or migration.source in targets or not sources.isdisjoint(migration.targets):
            continue
        sources.add(migration.source)
        targets.update(migration.targets)
        kept.append(number)
    return tuple(sorted(kept))
