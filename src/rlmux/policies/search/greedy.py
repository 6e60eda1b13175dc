"""The rule without foresight that the look-ahead is compared with.

At each moment the work item, or the pair of them, that does most work per second starts; what that does to later
moments is not looked at. Shards migrate to siblings whenever they can.
"""

from __future__ import annotations

from collections.abc import Iterator

from rlmux.policies.lookahead.playout import Playout, Setting
from rlmux.policies.lookahead.priorities import Priorities, compatible_migrations, rank_descending
from rlmux.policies.lookahead.problem import Problem, Schedule


def greedy(problem: Problem) -> Schedule:
    """The schedule in which every moment does the most work that it can."""
    everything = tuple(range(len(problem.sibling_migrations)))
    priorities = Priorities(
        rank_descending([item.seconds * max(1, len(item.devices)) for item in problem.work_items]),
        sibling_migrations=compatible_migrations(problem, everything),
    )
    return _GreedyPlayout(Setting(problem), priorities).schedule()


class _GreedyPlayout(Playout):
    """Starts what adds most work per second, again and again, until nothing adds any."""

    __slots__ = ()

    def _start_ready(self, limit_s: float) -> bool:
        while True:
            options = [(self._gain(chosen), -place, chosen) for place, chosen in enumerate(self._options())]
            gain, _, chosen = max(options, default=(0.0, 0, ()))
            if gain <= 0.0:
                return True
            for index in chosen:
                self.ready.remove((self.rank[index], index))
                self.start_s[index] = self.now_s
                self._begin(index)

    def _options(self) -> Iterator[tuple[int, ...]]:
        """Every ready work item that may start, and every pair of them that may start together."""
        masks = self.masks
        ready = [index for _, index in self.ready]
        able = [i for i in ready if not masks[i] & self.taken or (self.setting.is_sharing and self._fits_beside(i))]
        for place, first in enumerate(able):
            yield (first,)
            for second in able[place + 1 :]:
                is_pair = (self.sub_stage[first], self.sub_stage[second]) in self.setting.rates
                if is_pair and masks[first] & masks[second] and not (masks[first] | masks[second]) & self.taken:
                    yield (first, second)

    def _fits_beside(self, index: int) -> bool:
        return not self.masks[index] & self.shared and self._may_share(index)

    def _gain(self, chosen: tuple[int, ...]) -> float:
        """Solo seconds per second and device that are added, less what work items already there lose."""
        rates = self.setting.rates
        if len(chosen) == 2:
            a, b = self.sub_stage[chosen[0]], self.sub_stage[chosen[1]]
            return max(1, len(self.devices[chosen[0]])) * (rates[a, b] + rates[b, a])
        index = chosen[0]
        added = 0.0
        for device in self.devices[index]:
            added += 1.0
            for other in self.holders[device] if self.setting.is_sharing else ():
                added += rates[self.sub_stage[index], self.sub_stage[other]] - 1.0
                added += rates[self.sub_stage[other], self.sub_stage[index]] - self.rate[other]
        return added if self.devices[index] else 1.0
