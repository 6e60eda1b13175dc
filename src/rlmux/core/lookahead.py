"""What to start now, judged by how everything that is known of the future would then end.

    Problem (tasks of the next steps, what runs) ──plan──▶ Plan: the whole schedule; its first moment is the decision

    plan      list scheduling by longest remaining path, then local improvement of the list: tasks that stood in
              another's way trade places, hold back for it, tails are merged or not; least score wins
    greedy    at each moment the pair of ready tasks that does most work per second, nothing foreseen

A schedule is what a list produces when it is played out: whenever something ends, every ready task is offered its
devices in the order of the list. Two tasks share a device only if the table says that it helps; both then run slower
by the table's figures, and faster again when one ends. A task is never interrupted; a `Merge` ends one tail at once
and adds its work to another's.

Score: seconds by which pipelines miss their deadlines, then makespan plus a little mean completion time, so that of
equal makespans the one with more throughput wins. The improvement is bounded by a number of played-out task
starts, not by a clock, so a decision is a function of the problem.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass, field

from rlmux.core.sharing import NO_SHARING, SharingTable

_DONE = 1e-9
_MEAN_WEIGHT = 0.02
"""Of the mean completion time beside the makespan."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One uninterrupted piece of a pipeline on its devices."""

    pipeline: int
    kind: str
    """Its character, as in the sharing table."""
    devices: tuple[int, ...]
    """All at once; none for work that holds no device."""
    seconds: float
    """Solo seconds left."""
    tail_s: float = 0.0
    """The last of them are its tail: of that character, and what can be merged. 0: it has none."""
    needs: tuple[int, ...] = ()
    """Tasks that must have ended, by index; they come earlier in the list."""
    is_running: bool = False
    deadline_s: float | None = None
    """From now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Merge:
    """A possible move: the source's tail goes to the target, another share of the same rollout."""

    source: int
    target: int
    cost_s: float = 0.0
    """Added to the target: contexts computed again, or copied."""
    stretch: float = 1.0
    """The target's remaining seconds grow by this: more sequences in each iteration."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """All that is planned at one moment."""

    tasks: tuple[Task, ...]
    merges: tuple[Merge, ...] = ()
    sharing: SharingTable = NO_SHARING


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A schedule of the whole problem."""

    start_s: tuple[float, ...]
    end_s: tuple[float, ...]
    merges: tuple[int, ...]
    """Indices of the merges that are made."""
    merges_now: tuple[int, ...]
    score: tuple[float, float]
    num_tried: int

    @property
    def makespan_s(self) -> float:
        return max(self.end_s, default=0.0)

    @property
    def starts_now(self) -> tuple[int, ...]:
        """Tasks that start at this moment, running ones left out."""
        return tuple(index for index, start in enumerate(self.start_s) if start == 0.0)


@dataclass(slots=True)
class _List:
    """What determines a schedule."""

    rank: list[int]
    """Position of each task in the list."""
    after: dict[int, int] = field(default_factory=dict)
    """Task: the task that must have started before it may."""
    merges: tuple[int, ...] = ()
    not_shared: frozenset[int] = frozenset()
    """Tasks that share with nobody."""

    def changed(
        self,
        *,
        rank: list[int] | None = None,
        after: dict[int, int] | None = None,
        merges: tuple[int, ...] | None = None,
        not_shared: frozenset[int] | None = None,
    ) -> _List:
        return _List(
            self.rank if rank is None else rank,
            self.after if after is None else after,
            self.merges if merges is None else merges,
            self.not_shared if not_shared is None else not_shared,
        )


def plan(problem: Problem, *, budget: int = 2500) -> Plan:
    """The best schedule found by playing out at most about `budget` task starts."""
    tasks = problem.tasks
    if not tasks:
        return Plan(start_s=(), end_s=(), merges=(), merges_now=(), score=(0.0, 0.0), num_tried=0)
    game = _Game(problem)
    num_left = max(1, budget // len(tasks))
    paths = longest_paths(tasks)
    tried: list[tuple[_List, Plan]] = []

    def try_out(candidate: _List) -> Plan:
        nonlocal num_left
        num_left -= 1
        found = game.play(candidate)
        tried.append((candidate, found))
        return found

    by_path = _List(_ranked(paths))
    try_out(by_path)
    for candidate in _openings(problem, paths, by_path):
        if num_left <= 0:
            break
        try_out(candidate)
    best, best_plan = min(tried, key=lambda one: one[1].score)
    num_tried = len(tried)
    while num_left > 0:
        is_better = False
        for candidate in _neighbours(problem, best, best_plan):
            if num_left <= 0:
                break
            num_left -= 1
            num_tried += 1
            found = game.play(candidate)
            if _is_less(found.score, best_plan.score):
                best, best_plan, is_better = candidate, found, True
                break
        if not is_better:
            break
    return _with_tries(best_plan, num_tried)


def greedy(problem: Problem) -> Plan:
    """At each moment the most work per second; what it does to later moments is not looked at."""
    tasks = problem.tasks
    ranked = _List(_ranked([task.seconds * max(1, len(task.devices)) for task in tasks]))
    everything = tuple(range(len(problem.merges)))
    return _Game(problem).play(ranked.changed(merges=_compatible(problem, everything)))


def longest_paths(tasks: Sequence[Task]) -> list[float]:
    """Of each task: its seconds and those of the longest chain that waits for it."""
    paths = [task.seconds for task in tasks]
    for index in range(len(tasks) - 1, -1, -1):
        for need in tasks[index].needs:
            paths[need] = max(paths[need], tasks[need].seconds + paths[index])
    return paths


# --- lists to try -------------------------------------------------------------------------------------------


def _openings(problem: Problem, paths: list[float], by_path: _List) -> list[_List]:
    """Other lists worth a try whatever the problem: merges, pipelines first, long and short tasks first."""
    tasks = problem.tasks
    openings = []
    for number in range(len(problem.merges)):
        openings.append(by_path.changed(merges=_compatible(problem, (number,))))
    if len(problem.merges) > 1:
        openings.append(by_path.changed(merges=_compatible(problem, tuple(range(len(problem.merges))))))
    pipelines = sorted({task.pipeline for task in tasks})
    total = max(paths, default=0.0) + 1.0
    if len(pipelines) > 1:
        for first in pipelines:
            rank = _ranked([path + total * (task.pipeline == first) for task, path in zip(tasks, paths, strict=True)])
            openings.append(by_path.changed(rank=rank))
    openings.append(by_path.changed(rank=_ranked([task.seconds * len(task.devices) for task in tasks])))
    openings.append(by_path.changed(rank=_ranked([-task.seconds for task in tasks])))
    if problem.sharing.entries:
        openings.append(by_path.changed(not_shared=frozenset(range(len(tasks)))))
    return openings


def _neighbours(problem: Problem, current: _List, made: Plan) -> list[_List]:
    """Small changes, those at the first moments first: what is decided now matters most."""
    tasks = problem.tasks
    found: list[_List] = []
    for number in range(len(problem.merges)):
        if number in current.merges:
            found.append(current.changed(merges=tuple(m for m in current.merges if m != number)))
        else:
            found.append(current.changed(merges=_compatible(problem, (number, *current.merges))))
    order = sorted(range(len(tasks)), key=lambda index: (made.start_s[index], current.rank[index]))
    masks = [sum(1 << device for device in task.devices) for task in tasks]
    for place, later in enumerate(order):
        if later in current.after:
            found.append(current.changed(after={k: v for k, v in current.after.items() if k != later}))
        if problem.sharing.entries and not tasks[later].is_running:
            found.append(current.changed(not_shared=current.not_shared ^ {later}))
        for earlier in reversed(order[:place]):
            if not masks[earlier] & masks[later] or tasks[earlier].is_running:
                continue
            if made.end_s[earlier] < made.start_s[later] - _DONE and earlier in tasks[later].needs:
                continue
            rank = list(current.rank)
            rank[earlier], rank[later] = rank[later], rank[earlier]
            if current.rank[earlier] < current.rank[later]:
                found.append(current.changed(rank=rank))
            if later not in current.after and not _leads_to(tasks, earlier, later):
                found.append(current.changed(rank=rank, after={**current.after, earlier: later}))
    return found


def _leads_to(tasks: Sequence[Task], first: int, last: int) -> bool:
    """Does `last` need `first`, however indirectly?"""
    if first >= last:
        return False
    return any(need == first or _leads_to(tasks, first, need) for need in tasks[last].needs)


def _compatible(problem: Problem, merges: tuple[int, ...]) -> tuple[int, ...]:
    """Those, in this order, whose share neither goes twice nor takes another's after it went itself."""
    sources: set[int] = set()
    targets: set[int] = set()
    kept = []
    for number in merges:
        merge = problem.merges[number]
        if merge.source in sources or merge.source in targets or merge.target in sources:
            continue
        sources.add(merge.source)
        targets.add(merge.target)
        kept.append(number)
    return tuple(sorted(kept))


def _ranked(values: Sequence[float]) -> list[int]:
    """Position of each in descending order; ties keep their order."""
    rank = [0] * len(values)
    for position, index in enumerate(sorted(range(len(values)), key=lambda index: -values[index])):
        rank[index] = position
    return rank


def _is_less(score: tuple[float, float], than: tuple[float, float]) -> bool:
    return score[0] < than[0] - 1e-6 or (score[0] <= than[0] + 1e-6 and score[1] < than[1] - 1e-6)


def _with_tries(made: Plan, num_tried: int) -> Plan:
    return Plan(
        start_s=made.start_s,
        end_s=made.end_s,
        merges=made.merges,
        merges_now=made.merges_now,
        score=made.score,
        num_tried=num_tried,
    )


# --- playing a list out -------------------------------------------------------------------------------------


class _Game:
    """Plays lists of one problem; what is the same in all of them is prepared once."""

    def __init__(self, problem: Problem) -> None:
        tasks = problem.tasks
        self.problem = problem
        self.masks = [sum(1 << device for device in task.devices) for task in tasks]
        self.num_needs = [len(task.needs) for task in tasks]
        self.followers: list[list[int]] = [[] for _ in tasks]
        for index, task in enumerate(tasks):
            for need in task.needs:
                self.followers[need].append(index)
        self.is_sharing = bool(problem.sharing.entries)
        self.last_of: dict[int, int] = {}
        self.deadlines = [(i, t.deadline_s) for i, t in enumerate(tasks) if t.deadline_s is not None]

    def play(self, candidate: _List) -> Plan:
        tasks, masks = self.problem.tasks, self.masks
        num = len(tasks)
        left = [task.seconds for task in tasks]
        start = [-1.0] * num
        end = [-1.0] * num
        waits = list(self.num_needs)
        ready: list[tuple[int, int]] = []
        running: list[int] = []
        rates: dict[int, float] = {}
        taken = 0
        shared = 0
        now = 0.0
        merges = [self.problem.merges[number] for number in candidate.merges]
        open_merges = list(candidate.merges)
        merges_now: list[int] = []
        held = {merge.source for merge in merges if not tasks[merge.source].is_running}
        after = candidate.after
        for index, task in enumerate(tasks):
            if task.is_running:
                start[index] = -1e-12
                running.append(index)
                if self.is_sharing:
                    shared |= taken & masks[index]
                taken |= masks[index]
            elif not waits[index]:
                insort(ready, (candidate.rank[index], index))
        num_ended = 0
        while True:
            if open_merges:
                self._merge(open_merges, merges_now, left, start, end, waits, running, ready, candidate, now)
                for index in list(running):
                    if left[index] <= 0.0 and end[index] >= 0.0:
                        running.remove(index)
                taken, shared = self._masks_of(running)
                for index in range(num):
                    if end[index] == now and left[index] == -1.0:
                        left[index] = 0.0
                        num_ended += 1
                        for follower in self.followers[index]:
                            waits[follower] -= 1
                            if not waits[follower]:
                                insort(ready, (candidate.rank[follower], follower))
            started = True
            while started and ready:
                started = False
                for position, (_, index) in enumerate(ready):
                    mask = masks[index]
                    other = after.get(index)
                    if other is not None and start[other] < -0.5 and end[other] < 0.0:
                        continue
                    if index in held and any(n in open_merges for n in candidate.merges if self.problem.merges[n].source == index):
                        continue
                    if mask & taken:
                        if not self.is_sharing or mask & shared or not self._may_share(
                            index, running, left, candidate.not_shared
                        ):
                            continue
                    shared |= taken & mask
                    taken |= mask
                    start[index] = now
                    running.append(index)
                    del ready[position]
                    started = True
                    break
            if not running:
                if num_ended == num or not ready:
                    break
                if open_merges:
                    open_merges = []  # what they wait for cannot come before their sources run
                    continue
                after = {}
                continue
            rates = self._rates(running, left) if shared else {}
            step = min(self._until_change(index, left[index], rates.get(index, 1.0)) for index in running)
            now += step
            still = []
            for index in running:
                left[index] -= step * rates.get(index, 1.0)
                if left[index] > _DONE:
                    still.append(index)
                    continue
                end[index] = now
                left[index] = 0.0
                num_ended += 1
                for follower in self.followers[index]:
                    waits[follower] -= 1
                    if not waits[follower]:
                        insort(ready, (candidate.rank[follower], follower))
            if len(still) < len(running):
                running = still
                taken, shared = self._masks_of(running)
        return self._plan(candidate, start, end, merges_now)

    def _merge(
        self,
        open_merges: list[int],
        merges_now: list[int],
        left: list[float],
        start: list[float],
        end: list[float],
        waits: list[int],
        running: list[int],
        ready: list[tuple[int, int]],
        candidate: _List,
        now: float,
    ) -> None:
        """Make the merges whose both sides are in their tails."""
        for number in list(open_merges):
            merge = self.problem.merges[number]
            source, target = merge.source, merge.target
            if end[source] >= 0.0 or end[target] >= 0.0:
                open_merges.remove(number)
                continue
            if waits[source] or waits[target]:
                continue
            if not (self._is_tail(source, left[source]) and self._is_tail(target, left[target])):
                continue
            left[target] = max(left[source], left[target]) * merge.stretch + merge.cost_s
            left[source] = -1.0
            end[source] = now
            if start[source] < -0.5:
                start[source] = now - 1e-12
                ready.remove((candidate.rank[source], source))
            open_merges.remove(number)
            if now == 0.0:
                merges_now.append(number)

    def _is_tail(self, index: int, left_s: float) -> bool:
        return left_s <= self.problem.tasks[index].tail_s + _DONE

    def _masks_of(self, running: list[int]) -> tuple[int, int]:
        taken = shared = 0
        for index in running:
            mask = self.masks[index]
            shared |= taken & mask
            taken |= mask
        return taken, shared

    def _kind(self, index: int, left_s: float) -> str:
        task = self.problem.tasks[index]
        return "tail" if left_s <= task.tail_s + _DONE else task.kind

    def _may_share(self, index: int, running: list[int], left: list[float], not_shared: frozenset[int]) -> bool:
        if index in not_shared:
            return False
        mask = self.masks[index]
        kind = self._kind(index, left[index])
        for other in running:
            if not self.masks[other] & mask:
                continue
            if other in not_shared or self.problem.sharing.pace(kind, self._kind(other, left[other])) is None:
                return False
        return True

    def _rates(self, running: list[int], left: list[float]) -> dict[int, float]:
        """Of those that share: solo seconds per second, the slowest of their devices."""
        rates: dict[int, float] = {}
        pace = self.problem.sharing.pace
        for position, index in enumerate(running):
            for other in running[:position]:
                if self.masks[index] & self.masks[other]:
                    found = pace(self._kind(index, left[index]), self._kind(other, left[other]))
                    mine, theirs = (1 / found.slowdown, 1 / found.other_slowdown) if found else (0.5, 0.5)
                    rates[index] = min(rates.get(index, 1.0), mine)
                    rates[other] = min(rates.get(other, 1.0), theirs)
        return rates

    def _until_change(self, index: int, left_s: float, rate: float) -> float:
        """Seconds until it ends or its tail begins."""
        tail_s = self.problem.tasks[index].tail_s
        if tail_s and left_s > tail_s + _DONE:
            return (left_s - tail_s) / rate
        return left_s / rate

    def _plan(self, candidate: _List, start: list[float], end: list[float], merges_now: list[int]) -> Plan:
        tasks = self.problem.tasks
        last: dict[int, float] = {}
        for task, at in zip(tasks, end, strict=True):
            last[task.pipeline] = max(last.get(task.pipeline, 0.0), at)
        missed = sum(max(0.0, end[index] - deadline) for index, deadline in self.deadlines)
        makespan = max(end, default=0.0)
        mean = sum(last.values()) / max(len(last), 1)
        return Plan(
            start_s=tuple(start),
            end_s=tuple(end),
            merges=candidate.merges,
            merges_now=tuple(merges_now),
            score=(missed, makespan + _MEAN_WEIGHT * mean),
            num_tried=1,
        )
