"""The order in which waiting trajectories get a rollout engine's free slots.

    given      as submitted
    longest    the longest expected answer first, so that it does not begin last. The expected length comes with the
               request, from the prompt's previous answers (as in RhymeRL). Of a prompt without any, one trajectory is
               sampled before all others; the rest follow by the prompt's longest answer so far, or first if it has
               none yet (Seer, arXiv 2511.14617: answers of one prompt are alike in length)

In both, begun trajectories (evicted, or back from their environment) come before new ones. Adapters take turns: the
adapter whose last turn is longest ago is next.
No order changes a trajectory; it changes when the last one ends.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import islice, zip_longest
from typing import Generic, Literal, TypeVar

from rlmux.engines.rollout.recorded_trajectory import RecordedTrajectory
from rlmux.rl.types import TrajectoryId

Order = Literal["given", "longest"]
Waiting = TypeVar("Waiting", bound=RecordedTrajectory)
_Group = tuple[str, int, int]
"""Adapter, step and prompt of the trajectories that answer one prompt."""


class WaitingQueue(Generic[Waiting]):
    """Trajectories that are ready for a slot, in the order they get one. See the module docstring."""

    def __init__(self, order: Order) -> None:
        self._order = order
        self._waiting: list[Waiting] = []
        """Next first, where `_is_sorted`."""
        self._is_sorted = True
        self._begun: dict[_Group, int] = {}
        """Prompts one of whose trajectories got a slot: tokens of the longest answer or as expected; 0: unknown."""
        self._turns: dict[str, int] = {}
        """Number of the last turn of adapters that have had one."""
        self._num_turns = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Waiting]:
        """The next one first."""
        self._sort()
        return iter(self._waiting)

    def append(self, live: Waiting) -> None:
        """Add a trajectory behind all others."""
        self._waiting.append(live)
        self._is_sorted = False

    def put_back(self, lives: Sequence[Waiting]) -> None:
        """Add trajectories before all others, in their own order."""
        self._sort()
        self._waiting[:0] = lives

    def continue_with(self, live: Waiting) -> None:
        """Add a trajectory before all new ones."""
        self._sort()
        self._waiting.insert(sum(other.has_begun for other in self._waiting), live)

    def discard(self, gone: Collection[TrajectoryId]) -> None:
        """Remove trajectories by id."""
        self._waiting = [live for live in self._waiting if live.request.id not in gone]

    def take(self, adapters: Collection[str]) -> list[Waiting]:
        """Remove and return the trajectories of these adapters."""
        taken = [live for live in self if live.request.id.adapter in adapters]
        self.discard({live.request.id for live in taken})
        return taken

    def first(self, count: int) -> Iterable[Waiting]:
        """The next `count`."""
        return islice(self, count)

    def after(self, count: int) -> Iterable[Waiting]:
        """All but the next `count`."""
        return islice(self, count, None)

    def pop(self) -> Waiting:
        """Remove and return the next trajectory, for a slot. Raises IndexError if none waits."""
        self._sort()
        live = self._waiting.pop(0)
        self._num_turns += 1
        self._turns[live.request.id.adapter] = self._num_turns
        if self._order == "longest":
            self._begun.setdefault(_group_of(live.request.id), live.request.expected_tokens)
        return live

    def note_end(self, id: TrajectoryId, num_tokens: int) -> None:
        """Record a finished turn with `num_tokens` response tokens in total."""
        group = _group_of(id)
        if num_tokens > self._begun.get(group, num_tokens):
            self._begun[group] = num_tokens
            self._is_sorted = False

    def _sort(self) -> None:
        if not self._is_sorted and self._order == "longest":
            groups = {_group_of(live.request.id) for live in self._waiting}  # membership tests only
            self._begun = {group: longest for group, longest in self._begun.items() if group in groups}
            ranks = _ranks(self._waiting, self._begun)
            self._waiting = [self._waiting[place] for place in sorted(range(len(ranks)), key=ranks.__getitem__)]
        if not self._is_sorted:
            self._waiting = _by_turns(self._waiting, self._turns)
        self._is_sorted = True


def _ranks(waiting: Iterable[RecordedTrajectory], begun: dict[_Group, int]) -> list[tuple[int, float]]:
    """What to sort by: begun, then the first of a prompt of which nothing is known, then the longest expected."""
    ranks: list[tuple[int, float]] = []
    probed: set[_Group] = set()
    for live in waiting:
        group = _group_of(live.request.id)
        if live.has_begun:
            ranks.append((0, 0.0))
        elif live.request.expected_tokens or group in begun or group in probed:
            ranks.append((2, -(begun.get(group, live.request.expected_tokens) or math.inf)))
        else:
            probed.add(group)
            ranks.append((1, 0.0))
    return ranks


def _by_turns(waiting: list[Waiting], turns: dict[str, int]) -> list[Waiting]:
    """What has begun, then one of each adapter in turn, each adapter's in the given order."""
    by_adapter: dict[str, list[Waiting]] = {}
    for live in waiting:
        if not live.has_begun:
            by_adapter.setdefault(live.request.id.adapter, []).append(live)
    if len(by_adapter) < 2:
        return waiting
    longest_ago = sorted(by_adapter, key=lambda adapter: turns.get(adapter, 0))
    rounds = zip_longest(*(by_adapter[adapter] for adapter in longest_ago))
    begun = [live for live in waiting if live.has_begun]
    return begun + [live for each in rounds for live in each if live is not None]


def _group_of(id: TrajectoryId) -> _Group:
    return id.adapter, id.step, id.prompt
