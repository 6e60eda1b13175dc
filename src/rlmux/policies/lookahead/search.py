"""What to start now, judged by how everything that is known of the future would then end.

    Problem ─▶ look_ahead ─▶ priorities ⇄ playout ──▶ Schedule: its first moment is the decision

The search is list scheduling: along the longest remaining path, in turns as a group's cycle has them, one pipeline
first, sharing devices only where it gains more than so much. Then local improvement of the list: shards migrate or not,
work items that stood in another's way trade places, hold back for it, share or not; the least score wins. It is bounded
by the number of starts that are played out, not by a clock, so a decision is a function of the problem.

`playout.py` turns a list into a schedule and scores it; `greedy.py` is the rule without foresight that this is
compared with.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from rlmux.policies.lookahead.playout import Playout, Setting, is_less
from rlmux.policies.lookahead.priorities import Priorities, compatible_migrations, longest_paths, rank_descending
from rlmux.policies.lookahead.problem import EMPTY_SCHEDULE, Problem, Schedule, WorkItem

_SAME_S = 1e-6
"""Seconds within which two moments of a schedule are one."""
BUDGET = 400
"""Starts on one device that a decision may play out: about 2 ms of one core. Twice as many change 2 in 810 decisions of
a day of production pipelines on whole devices."""


def look_ahead(problem: Problem, *, budget: int = BUDGET, openings: Sequence[Priorities] = ()) -> Schedule:
    """The best schedule found by playing out about `budget` starts, a work item counting once for each device.

    `openings`: priorities that are tried before all others, so that the schedule is never worse than theirs.
    """
    return _PlayoutSearch(problem, budget, openings).best() if problem.work_items else EMPTY_SCHEDULE


def play_out(problem: Problem, priorities: Priorities) -> Schedule:
    """The schedule that these priorities make."""
    return Playout(Setting(problem), priorities).schedule()


_NUM_MOVED = 3
"""Openings whose migrations are tried one by one, before any list is improved."""


class _PlayoutSearch:
    """Openings, then migrations of the best few, then improvement of the best, then of the next, while starts are
    left."""

    def __init__(self, problem: Problem, num_starts: int, openings: Sequence[Priorities]) -> None:
        self.problem = problem
        self.openings = openings
        self.setting = Setting(problem)
        self.num_left = num_starts
        self.num_tried = 0

    def best(self) -> Schedule:
        tried = []
        for priorities in (*self.openings, *_openings(self.problem)):
            schedule = self.try_out(priorities)
            assert schedule is not None, "nothing is to be beaten"
            tried.append((priorities, schedule))
            if self.num_left <= 0:
                break
        tried.sort(key=lambda pair: pair[1].score)
        tried[:_NUM_MOVED] = sorted(
            (self.migrate(*pair) for pair in tried[:_NUM_MOVED]), key=lambda pair: pair[1].score
        )
        best = tried[0][1]
        for priorities, schedule in tried:
            if self.num_left <= 0:
                break
            improved = self.improve(priorities, schedule)
            if is_less(improved.score, best.score):
                best = improved
        return replace(best, num_tried=self.num_tried)

    def try_out(self, priorities: Priorities, than: Schedule | None = None) -> Schedule | None:
        """The schedule of these priorities; None where it is no better than the other."""
        playout = Playout(self.setting, priorities)
        schedule = playout.schedule_before(None if than is None else than.score)
        self.num_left -= playout.num_started
        self.num_tried += 1
        return schedule

    def migrate(self, current: Priorities, schedule: Schedule) -> tuple[Priorities, Schedule]:
        """Each migration once: made or not, whichever is better with those before it."""
        for number in range(len(self.problem.idle_migrations) + len(self.problem.sibling_migrations)):
            if self.num_left <= 0:
                break
            candidate = _with_other_migration(self.problem, current, number)
            found = self.try_out(candidate, schedule)
            if found is not None:
                current, schedule = candidate, found
        return current, schedule

    def improve(self, current: Priorities, schedule: Schedule) -> Schedule:
        """The first small change that helps, again and again, until none does."""
        is_better = True
        while is_better and self.num_left > 0:
            is_better = False
            for candidate in _neighbours(self.problem, current, schedule):
                found = self.try_out(candidate, schedule)
                if found is not None:
                    current, schedule, is_better = candidate, found, True
                    break
                if self.num_left <= 0:
                    break
        return schedule


def _openings(problem: Problem) -> Iterator[Priorities]:
    """Priorities worth a try whatever the problem: by path, migrations, pipelines first, long and short items first."""
    work_items = problem.work_items
    paths = longest_paths(work_items, [item.seconds for item in work_items])
    by_path = Priorities(rank_descending(paths))
    yield by_path
    later = tuple(number for number, move in enumerate(problem.sibling_migrations) if move.is_later)
    if later:
        by_path = by_path.changed(sibling_migrations=later)
        yield by_path
    subsets = [
        compatible_migrations(problem, (number, *later))
        for number, move in enumerate(problem.sibling_migrations)
        if not move.is_later
    ]
    if len(subsets) > 1:
        subsets.append(compatible_migrations(problem, tuple(range(len(problem.sibling_migrations)))))
    firsts = [*_in_turns(work_items, paths, by_path), *_pipelines_first(work_items, paths, by_path)]
    gains = problem.sharing.gain_levels[1:]
    if problem.idle_migrations:
        yield by_path.changed(idle_migrations=frozenset(range(len(problem.idle_migrations))))
    for subset in subsets:
        yield by_path.changed(sibling_migrations=subset)
    yield from firsts
    if problem.sharing.allows_any:
        for gain in gains:
            yield by_path.changed(least_gain=gain)
        yield by_path.changed(unshared=frozenset(range(len(work_items))))
    for first in firsts:
        if subsets:
            yield first.changed(sibling_migrations=subsets[-1])
        for gain in gains:
            yield first.changed(least_gain=gain)


def _pipelines_first(
    work_items: Sequence[WorkItem], paths: Sequence[float], by_path: Priorities
) -> Iterator[Priorities]:
    """One candidate a pipeline: all its work items before all others', by path among themselves."""
    pipelines = sorted({item.pipeline for item in work_items})
    if len(pipelines) < 2:
        return
    total_s = max(paths, default=0.0) + 1.0
    for first in pipelines:
        values = [path + total_s * (item.pipeline == first) for item, path in zip(work_items, paths, strict=True)]
        yield by_path.changed(rank=rank_descending(values))


def _in_turns(work_items: Sequence[WorkItem], paths: Sequence[float], by_path: Priorities) -> Iterator[Priorities]:
    """One candidate a pipeline: phase after phase, with the same turns in each, that pipeline first."""
    pipelines = sorted({item.pipeline for item in work_items})
    if len(pipelines) < 2:
        return
    depths: list[int] = []
    for item in work_items:
        depths.append(1 + max([depths[need] for need in item.needs], default=-1))
    most_s = max(paths) + 1.0
    for place in range(len(pipelines)):
        turns = {pipeline: turn for turn, pipeline in enumerate(pipelines[place:] + pipelines[:place])}
        values = [
            path - most_s * (depth * len(pipelines) + turns[item.pipeline])
            for item, depth, path in zip(work_items, depths, paths, strict=True)
        ]
        yield by_path.changed(rank=rank_descending(values))


def _neighbours(problem: Problem, current: Priorities, schedule: Schedule) -> Iterator[Priorities]:
    """Small changes, those at the first moments first: what is decided now matters most."""
    for number in range(len(problem.idle_migrations) + len(problem.sibling_migrations)):
        yield _with_other_migration(problem, current, number)
    yield from _reordered(problem, current, schedule)


def _with_other_migration(problem: Problem, current: Priorities, number: int) -> Priorities:
    """The migration of that number, those to idle devices before those to siblings, is made or no longer made."""
    if number < len(problem.idle_migrations):
        return current.changed(idle_migrations=current.idle_migrations ^ {number})
    number -= len(problem.idle_migrations)
    made = current.sibling_migrations
    if number in made:
        return current.changed(sibling_migrations=tuple(other for other in made if other != number))
    return current.changed(sibling_migrations=compatible_migrations(problem, (number, *made)))


def _reordered(problem: Problem, current: Priorities, schedule: Schedule) -> Iterator[Priorities]:
    """One work item shares or not, is no longer held back, trades places with an earlier one, or goes before it."""
    work_items = problem.work_items
    order = sorted(range(len(work_items)), key=lambda index: (schedule.start_s[index], current.rank[index]))
    masks = [sum(1 << device for device in item.devices) for item in work_items]
    critical = _critical(work_items, masks, schedule)
    places = sorted(range(len(order)), key=lambda place: order[place] not in critical)
    for position in places:
        later = order[position]
        if work_items[later].is_running:
            continue
        if later in current.after:
            yield current.changed(after={k: v for k, v in current.after.items() if k != later})
        if problem.sharing.allows_any:
            yield current.changed(unshared=current.unshared ^ {later})
        for earlier in reversed(order[:position]):
            if (
                not masks[earlier] & masks[later]
                or work_items[earlier].is_running
                or _leads_to(work_items, earlier, later)
            ):
                continue
            rank = list(current.rank)
            rank[earlier], rank[later] = rank[later], rank[earlier]
            if current.rank[earlier] < current.rank[later]:
                yield current.changed(rank=rank)
            if later not in current.after:
                yield current.changed(rank=rank, after={**current.after, earlier: later})


def _critical(work_items: Sequence[WorkItem], masks: Sequence[int], schedule: Schedule) -> set[int]:
    """The work items without which the last one could have ended sooner: each began as another of them ended, which it
    needs or whose device it has."""
    start_s, end_s = schedule.start_s, schedule.end_s
    left = [max(range(len(work_items)), key=end_s.__getitem__)]
    critical: set[int] = set()
    while left:
        index = left.pop()
        if index in critical:
            continue
        critical.add(index)
        if start_s[index] > 0.0:
            left += [
                other
                for other in range(len(work_items))
                if abs(end_s[other] - start_s[index]) < _SAME_S
                and (masks[other] & masks[index] or other in work_items[index].needs)
            ]
    return critical


def _leads_to(work_items: Sequence[WorkItem], first: int, last: int) -> bool:
    """Whether `last` needs `first`, however indirectly."""
    if first >= last:
        return False
    return any(need == first or _leads_to(work_items, first, need) for need in work_items[last].needs)
