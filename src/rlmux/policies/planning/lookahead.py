"""What to start now, judged by how everything that is known of the future would then end.

    Problem (work_items of the next steps, what runs) ──plan──▶ Schedule: the whole schedule; its first moment is the decision

    plan      list scheduling by longest remaining_time path, then local improvement of the list: work_items that stood in
              another's way trade places, hold back for it, tails are merged or not; least score wins
    greedy    at each moment the pair of ready work_items that does most work per second, nothing foreseen

A schedule is what a list produces when it is played out: whenever something ends, every ready task is offered its
devices in the order of the list. Two work_items share a device only if the table says that it helps; both then run slower
by the table's figures, and faster again when one ends. A task that finds its state gone from a device, because others
were there since, takes its switch longer. A task is never interrupted; a `Merge` ends a share where its
tail begins and lengthens a sibling's tail by it, or hands a share that has not begun to a sibling as a whole; a
`Migration` lets a share run on another device.

Score: seconds by which pipelines miss their deadlines, then makespan plus a little mean completion time, so that of
equal makespans the one with more throughput wins. The improvement is bounded by a number of played-out task
starts, not by a clock, so a decision is a function of the problem.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from rlmux.core.model import SubStage
from rlmux.core.sharing import NO_SHARING, SharingTable

_DONE = 1e-9
_NEVER, _BEFORE = -1.0, -0.5
"""Instead of a time: not yet, and before now."""
_MEAN_WEIGHT = 0.1
"""Of the mean completion time beside the makespan."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkItem:
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
    state: int = -1
    """What it needs on its devices, by number."""
    switch_s: float = 0.0
    """To bring that there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Merge:
    """A possible move: the source's tail goes to the target, another share of the same rollout."""

    source: int
    target: int
    cost_s: float = 0.0
    """Added to the target: contexts computed again, or copied."""
    stretch: float = 1.0
    """The target's remaining_time seconds grow by this: more sequences in each iteration."""
    is_whole: bool = False
    """The source goes before it begins, and the target grows by `cost_s` alone; else its tail goes."""
    is_later: bool = False
    """Of a rollout to come: it can be planned, not yet made."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Migration:
    """A possible move: a share runs on another device than its own from now on."""

    task: int
    """Ready or running."""
    device: int
    cost_s: float = 0.0
    """Added to it: contexts go along."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """All that is planned at one moment."""

    work_items: tuple[WorkItem, ...]
    merges: tuple[Merge, ...] = ()
    migrations: tuple[Migration, ...] = ()
    """At most one of each task."""
    sharing: SharingTable = NO_SHARING
    kept: tuple[tuple[int, ...], ...] = ()
    """By device: the states there, most recently used first; () counts no switches."""
    num_kept: tuple[float, ...] = ()
    """By device: how many states fit there at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """A schedule of the whole problem."""

    start_s: tuple[float, ...]
    end_s: tuple[float, ...]
    merges: tuple[int, ...]
    """Indices of the merges that are made."""
    merges_now: tuple[int, ...]
    migrations_now: tuple[int, ...]
    """Of work_items that start at this moment, or run."""
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
    """WorkItem: the task that must have started before it may."""
    merges: tuple[int, ...] = ()
    not_shared: frozenset[int] = frozenset()
    """Tasks that share with nobody."""
    migrations: frozenset[int] = frozenset()

    def changed(
        self,
        *,
        rank: list[int] | None = None,
        after: dict[int, int] | None = None,
        merges: tuple[int, ...] | None = None,
        not_shared: frozenset[int] | None = None,
        migrations: frozenset[int] | None = None,
    ) -> _List:
        return _List(
            self.rank if rank is None else rank,
            self.after if after is None else after,
            self.merges if merges is None else merges,
            self.not_shared if not_shared is None else not_shared,
            self.migrations if migrations is None else migrations,
        )


BUDGET = 400
"""Starts on one device that a decision may play out: about 3 ms of one core."""


def plan(problem: Problem, *, budget: int = BUDGET) -> Schedule:
    """The best schedule found by playing out about `budget` starts, a task counting once for each device."""
    work_items = problem.work_items
    if not work_items:
        return Schedule(
            start_s=(), end_s=(), merges=(), merges_now=(), migrations_now=(), score=(0.0, 0.0), num_tried=0
        )
    num_starts = sum(max(1, len(task.devices)) for task in work_items)
    # On whole devices a start takes half the time: there are no paces to keep.
    num_plays = (budget if problem.sharing.entries else 2 * budget) // num_starts
    search = _Search(problem, max(1, num_plays))
    return search.best()


def greedy(problem: Problem) -> Schedule:
    """At each moment the task or pair that does most work per second; what it does to later moments is not looked at.

    Tails are merged whenever they can be.
    """
    ranked = _List(_ranked([task.seconds * max(1, len(task.devices)) for task in problem.work_items]))
    everything = tuple(range(len(problem.merges)))
    return _GreedyPlay(_Game(problem), ranked.changed(merges=_compatible(problem, everything))).result()


def longest_paths(work_items: Sequence[WorkItem]) -> list[float]:
    """Of each task: its seconds and those of the longest chain that waits for it."""
    paths = [task.seconds for task in work_items]
    for index in range(len(work_items) - 1, -1, -1):
        for need in work_items[index].needs:
            paths[need] = max(paths[need], work_items[need].seconds + paths[index])
    return paths


# --- lists to try -------------------------------------------------------------------------------------------


class _Search:
    """Openings first, then improvement of the best of them, then of the next, while plays are left."""

    def __init__(self, problem: Problem, num_plays: int) -> None:
        self.problem = problem
        self.game = _Game(problem)
        self.num_left = num_plays
        self.num_tried = 0

    def best(self) -> Schedule:
        tried = []
        for candidate in _openings(self.problem):
            tried.append((candidate, self.try_out(candidate)))
            if self.num_left <= 0:
                break
        tried.sort(key=lambda one: one[1].score)
        best = tried[0][1]
        for candidate, made in tried:
            if self.num_left <= 0:
                break
            improved = self.improved(candidate, made)
            if _is_less(improved.score, best.score):
                best = improved
        return replace(best, num_tried=self.num_tried)

    def try_out(self, candidate: _List) -> Schedule:
        self.num_left -= 1
        self.num_tried += 1
        return _Play(self.game, candidate).result()

    def improved(self, current: _List, made: Schedule) -> Schedule:
        """The first small change that helps, again and again, until none does."""
        is_better = True
        while is_better and self.num_left > 0:
            is_better = False
            for candidate in _neighbours(self.problem, current, made):
                found = self.try_out(candidate)
                if _is_less(found.score, made.score):
                    current, made, is_better = candidate, found, True
                    break
                if self.num_left <= 0:
                    break
        return made


def _openings(problem: Problem) -> Iterator[_List]:
    """Lists worth a try whatever the problem: by path, merges, pipelines first, long and short work_items first."""
    work_items = problem.work_items
    paths = longest_paths(work_items)
    by_path = _List(_ranked(paths))
    yield by_path
    later = tuple(number for number, merge in enumerate(problem.merges) if merge.is_later)
    if later:
        by_path = by_path.changed(merges=later)
        yield by_path
    subsets = [
        _compatible(problem, (number, *later)) for number, merge in enumerate(problem.merges) if not merge.is_later
    ]
    if len(subsets) > 1:
        subsets.append(_compatible(problem, tuple(range(len(problem.merges)))))
    pipelines = sorted({task.pipeline for task in work_items})
    total = max(paths, default=0.0) + 1.0
    firsts = [
        by_path.changed(
            rank=_ranked(
                [path + total * (task.pipeline == first) for task, path in zip(work_items, paths, strict=True)]
            )
        )
        for first in pipelines
        if len(pipelines) > 1
    ]
    if problem.migrations:
        yield by_path.changed(migrations=frozenset(range(len(problem.migrations))))
    for subset in subsets:
        yield by_path.changed(merges=subset)
    yield from firsts
    if problem.sharing.entries:
        yield by_path.changed(not_shared=frozenset(range(len(work_items))))
    yield by_path.changed(rank=_ranked([task.seconds * len(task.devices) for task in work_items]))
    yield by_path.changed(rank=_ranked([-task.seconds for task in work_items]))
    for first in firsts:
        for subset in subsets:
            yield first.changed(merges=subset)


def _neighbours(problem: Problem, current: _List, made: Schedule) -> Iterator[_List]:
    """Small changes, those at the first moments first: what is decided now matters most."""
    work_items = problem.work_items
    for number in range(len(problem.migrations)):
        yield current.changed(migrations=current.migrations ^ {number})
    for number in range(len(problem.merges)):
        if number in current.merges:
            yield current.changed(merges=tuple(m for m in current.merges if m != number))
        else:
            yield current.changed(merges=_compatible(problem, (number, *current.merges)))
    order = sorted(range(len(work_items)), key=lambda index: (made.start_s[index], current.rank[index]))
    masks = [sum(1 << device for device in task.devices) for task in work_items]
    for place, later in enumerate(order):
        if work_items[later].is_running:
            continue
        if later in current.after:
            yield current.changed(after={k: v for k, v in current.after.items() if k != later})
        if problem.sharing.entries:
            yield current.changed(not_shared=current.not_shared ^ {later})
        for earlier in reversed(order[:place]):
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


def _leads_to(work_items: Sequence[WorkItem], first: int, last: int) -> bool:
    """Does `last` need `first`, however indirectly?"""
    if first >= last:
        return False
    return any(need == first or _leads_to(work_items, first, need) for need in work_items[last].needs)


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


# --- playing a list out -------------------------------------------------------------------------------------


class _Game:
    """What is the same in all plays of one problem."""

    __slots__ = (
        "deadlines", "devices", "followers", "is_sharing", "masks", "num_devices", "num_needs", "problem", "rates",
    )  # fmt: skip

    def __init__(self, problem: Problem) -> None:
        work_items = problem.work_items
        self.problem = problem
        self.devices = [task.devices for task in work_items]
        self.masks = [sum(1 << device for device in devices) for devices in self.devices]
        self.num_devices = max(
            [mask.bit_length() for mask in self.masks] + [move.device + 1 for move in problem.migrations], default=0
        )
        self.num_needs = [len(task.needs) for task in work_items]
        self.followers: list[list[int]] = [[] for _ in work_items]
        for index, task in enumerate(work_items):
            for need in task.needs:
                self.followers[need].append(index)
        self.is_sharing = bool(problem.sharing.entries)
        self.rates = problem.sharing.rates
        self.deadlines = [(i, t.deadline_s) for i, t in enumerate(work_items) if t.deadline_s is not None]


class _Play:
    """One list, from now until everything has ended."""

    __slots__ = (
        "after",
        "change_s",
        "devices",
        "end",
        "game",
        "holders",
        "kept",
        "kind",
        "left",
        "masks",
        "merges",
        "merges_now",
        "migrations",
        "not_shared",
        "now",
        "open_merges",
        "rank",
        "rate",
        "ready",
        "running",
        "shared",
        "since",
        "start",
        "tail_s",
        "taken",
        "waits",
        "work_items",
    )  # fmt: skip

    def __init__(self, game: _Game, candidate: _List) -> None:
        work_items = game.problem.work_items
        self.game = game
        self.work_items = work_items
        self.rank = candidate.rank
        self.after = candidate.after
        self.not_shared = candidate.not_shared
        self.merges = candidate.merges
        self.open_merges = list(candidate.merges)
        self.migrations = candidate.migrations
        self.merges_now: list[int] = []
        self.now = 0.0
        self.left = [task.seconds for task in work_items]
        self.tail_s = [task.tail_s for task in work_items]
        self.kind = [SubStage.TAIL_DECODE if task.seconds <= task.tail_s + _DONE else task.kind for task in work_items]
        self.start = [_NEVER] * len(work_items)
        self.end = [_NEVER] * len(work_items)
        self.since = [0.0] * len(work_items)
        self.rate = [1.0] * len(work_items)
        self.change_s = [0.0] * len(work_items)
        """When each running task ends or begins its tail."""
        self.kept = list(game.problem.kept)
        self.waits = list(game.num_needs)
        self.ready: list[tuple[int, int]] = []
        self.running: list[int] = []
        self.holders: list[list[int]] = [[] for _ in range(game.num_devices)]
        self.taken = 0
        """Bits of devices that someone holds; in `shared`, that two hold."""
        self.shared = 0
        self.masks = game.masks
        self.devices = game.devices
        if candidate.migrations:
            self._migrate(candidate.migrations)

    def _migrate(self, migrations: frozenset[int]) -> None:
        self.masks, self.devices = list(self.masks), list(self.devices)
        for number in migrations:
            move = self.game.problem.migrations[number]
            self.masks[move.task] = 1 << move.device
            self.devices[move.task] = (move.device,)
            self.left[move.task] += move.cost_s

    def result(self) -> Schedule:
        for index, task in enumerate(self.work_items):
            if task.is_running:
                self._begin(index)
                self.start[index] = _BEFORE
            elif not self.waits[index]:
                insort(self.ready, (self.rank[index], index))
        while True:
            if self.open_merges:
                self._make_merges()
            if self.ready:
                self._start_ready()
            if not self.running:
                if not self.ready:
                    return self._plan()
                # Only what a list holds back is left: it may not hold back for ever.
                self.after, self.open_merges = {}, []
                continue
            change_s = self.change_s
            now = self.now = min([change_s[index] for index in self.running])
            for index in [index for index in self.running if change_s[index] <= now + _DONE]:
                if index in self.running:
                    self._change(index)

    def _start_ready(self) -> None:
        """Offer the devices to every ready task in the order of the list."""
        masks, after, taken_all = self.masks, self.after, (1 << self.game.num_devices) - 1
        is_sharing = self.game.is_sharing
        position = 0
        ready = self.ready
        while position < len(ready):
            index = ready[position][1]
            mask = masks[index]
            if mask & self.taken:
                if not is_sharing and self.taken == taken_all:
                    return
                if not is_sharing or mask & self.shared or not self._may_share(index):
                    position += 1
                    continue
            if after and index in after:
                other = after[index]
                if self.start[other] == _NEVER and self.end[other] == _NEVER:
                    position += 1
                    continue
            del ready[position]
            self.start[index] = self.now
            self._begin(index)
            if not mask:
                position = 0

    def _begin(self, index: int) -> None:
        mask = self.masks[index]
        both = self.taken & mask
        self.shared |= both
        self.taken |= mask
        if self.kept:
            self._bring_state(self.work_items[index], self.devices[index], index)
        self.running.append(index)
        self.since[index] = self.now
        if self.game.is_sharing:
            for device in self.devices[index]:
                self.holders[device].append(index)
            if both:
                for device in self.devices[index]:
                    for other in self.holders[device]:
                        if other != index:
                            self._repace(other)
                self.rate[index] = self._rate(index)
        self._foresee(index)

    def _bring_state(self, task: WorkItem, devices: tuple[int, ...], index: int) -> None:
        state, kept = task.state, self.kept
        num_kept = self.game.problem.num_kept
        if any(state not in kept[device] for device in devices):
            self.left[index] += task.switch_s
        for device in devices:
            others = [other for other in kept[device] if other != state]
            kept[device] = (state, *others)[: int(min(num_kept[device], len(others) + 1))]

    def _change(self, index: int) -> None:
        """It ends, or its tail begins."""
        self._settle(index)
        if self.left[index] > _DONE:
            self.kind[index] = SubStage.TAIL_DECODE
            self._foresee(index)
            if self.shared & self.masks[index]:
                self._repace_all(index)
            return
        self._finish(index)

    def _finish(self, index: int) -> None:
        self.end[index] = self.now
        self.left[index] = 0.0
        self.running.remove(index)
        mask = self.masks[index]
        if self.game.is_sharing:
            for device in self.devices[index]:
                self.holders[device].remove(index)
            both = self.shared & mask
            self.taken &= ~(mask & ~both)
            self.shared &= ~mask
            if both:
                self._repace_all(index)
        else:
            self.taken &= ~mask
        self._release(index)

    def _release(self, index: int) -> None:
        """Those that waited for it alone are ready."""
        for follower in self.game.followers[index]:
            self.waits[follower] -= 1
            if not self.waits[follower]:
                insort(self.ready, (self.rank[follower], follower))

    # paces

    def _settle(self, index: int) -> None:
        self.left[index] -= (self.now - self.since[index]) * self.rate[index]
        self.since[index] = self.now

    def _foresee(self, index: int) -> None:
        left, tail_s = self.left[index], self.tail_s[index]
        until = left - tail_s if tail_s and left > tail_s + _DONE else left
        self.change_s[index] = self.since[index] + until / self.rate[index]

    def _repace(self, index: int) -> None:
        rate = self._rate(index)
        if rate != self.rate[index]:
            self._settle(index)
            self.rate[index] = rate
            self._foresee(index)

    def _repace_all(self, index: int) -> None:
        """Of everyone on the task's devices, itself included."""
        for device in self.devices[index]:
            for holder in self.holders[device]:
                self._repace(holder)

    def _rate(self, index: int) -> float:
        """Solo seconds per second: what the slowest of its devices gives."""
        rate = 1.0
        kind = self.kind[index]
        for device in self.devices[index]:
            for other in self.holders[device]:
                if other != index:
                    rate = min(rate, self.game.rates.get((kind, self.kind[other]), 0.5))
        return rate

    def _may_share(self, index: int) -> bool:
        not_shared = self.not_shared
        if index in not_shared:
            return False
        kind = self.kind[index]
        for device in self.devices[index]:
            for other in self.holders[device]:
                if other in not_shared or (kind, self.kind[other]) not in self.game.rates:
                    return False
        return True

    # merges

    def _make_merges(self) -> None:
        """Those whose source has come to its tail while its sibling can still take it."""
        for number in list(self.open_merges):
            merge = self.game.problem.merges[number]
            source, target = merge.source, merge.target
            if self.end[source] != _NEVER or self.end[target] != _NEVER:
                self.open_merges.remove(number)
            elif not self.waits[source] and not self.waits[target]:
                if merge.is_whole and self.start[source] != _NEVER:
                    self.open_merges.remove(number)
                    continue
                for side in (source, target):
                    if self.start[side] != _NEVER:
                        self._settle(side)
                if merge.is_whole or self.left[source] <= self.tail_s[source] + _DONE:
                    self.open_merges.remove(number)
                    self._merge(merge)
                    if self.now == 0.0 and not merge.is_later:
                        self.merges_now.append(number)

    def _merge(self, merge: Merge) -> None:
        source, target = merge.source, merge.target
        if merge.is_whole:
            self.left[target] += merge.cost_s
        else:
            tail_s = min(self.tail_s[target], self.left[target])
            before_s = self.left[target] - tail_s
            self.tail_s[target] = max(self.left[source], tail_s) * merge.stretch + merge.cost_s
            self.left[target] = before_s + self.tail_s[target]
        if self.start[target] != _NEVER:
            self._foresee(target)
        if self.start[source] != _NEVER:
            self._finish(source)
        else:
            self.ready.remove((self.rank[source], source))
            self.start[source] = _BEFORE
            self.end[source] = self.now
            self._release(source)

    def _migrations_now(self) -> tuple[int, ...]:
        moves = self.game.problem.migrations
        return tuple(number for number in sorted(self.migrations) if self.start[moves[number].task] in (0.0, _BEFORE))

    # the score

    def _plan(self) -> Schedule:
        last: dict[int, float] = {}
        for task, at in zip(self.work_items, self.end, strict=True):
            if at > last.get(task.pipeline, 0.0):
                last[task.pipeline] = at
        missed = sum(max(0.0, self.end[index] - deadline) for index, deadline in self.game.deadlines)
        mean = sum(last.values()) / max(len(last), 1)
        return Schedule(
            start_s=tuple(self.start),
            end_s=tuple(self.end),
            merges=self.merges,
            merges_now=tuple(self.merges_now),
            migrations_now=self._migrations_now(),
            score=(missed, max(self.end, default=0.0) + _MEAN_WEIGHT * mean),
            num_tried=1,
        )


class _GreedyPlay(_Play):
    """Starts what adds most work per second, again and again, until nothing adds any."""

    __slots__ = ()

    def _start_ready(self) -> None:
        while True:
            options = [(self._gain(chosen), -place, chosen) for place, chosen in enumerate(self._options())]
            if not options:
                return
            gain, _, chosen = max(options)
            if gain <= 0.0:
                return
            for index in chosen:
                self.ready.remove((self.rank[index], index))
                self.start[index] = self.now
                self._begin(index)

    def _options(self) -> Iterator[tuple[int, ...]]:
        """Every ready task that may start, and every pair of them that may start together."""
        masks = self.masks
        ready = [index for _, index in self.ready]
        able = [i for i in ready if not masks[i] & self.taken or (self.game.is_sharing and self._fits_beside(i))]
        for place, first in enumerate(able):
            yield (first,)
            for second in able[place + 1 :]:
                is_pair = (self.kind[first], self.kind[second]) in self.game.rates
                if is_pair and masks[first] & masks[second] and not (masks[first] | masks[second]) & self.taken:
                    yield (first, second)

    def _fits_beside(self, index: int) -> bool:
        return not self.masks[index] & self.shared and self._may_share(index)

    def _gain(self, chosen: tuple[int, ...]) -> float:
        """Solo seconds per second and device that are added, less what those who are there lose."""
        rates = self.game.rates
        if len(chosen) == 2:
            a, b = self.kind[chosen[0]], self.kind[chosen[1]]
            return max(1, len(self.devices[chosen[0]])) * (rates[a, b] + rates[b, a])
        index = chosen[0]
        added = 0.0
        for device in self.devices[index]:
            added += 1.0
            for other in self.holders[device]:
                added += rates[self.kind[index], self.kind[other]] - 1.0
                added += rates[self.kind[other], self.kind[index]] - self.rate[other]
        return added if self.devices[index] else 1.0
