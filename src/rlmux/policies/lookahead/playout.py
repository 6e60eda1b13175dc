"""One schedule, played out: from now until every work item has ended.

    ready ──started along the list──▶ running ──tail begins, ends──▶ ended ──▶ its followers are ready

Whenever something ends, every ready work item is offered its devices in the order of the list. Two of them share a
device only if it helps by the table; both then run slower by the table's figures, and faster again when one
ends. A work item that finds its state gone from a device, because others were there since, takes its switch longer.
None is ever interrupted; a `SiblingMigration` ends a shard where its tail begins and lengthens a sibling's tail by
it, or gives a shard that has not begun to a sibling as a whole; an `IdleMigration` lets a shard run on another
device.

Score: seconds by which pipelines miss their deadlines, then makespan plus a little mean completion time, so that of
equal makespans the one with more throughput wins.

This is the kernel of the look-ahead, 3 to 7 µs a start: state is in lists by work item, sets of devices are bits, and
the loop over moments does itself what most starts and ends take; methods do what sharing and migrations add.
"""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Sequence

from rlmux.core.estimation.colocation import sub_stage_in
from rlmux.core.model import SubStage
from rlmux.policies.lookahead.priorities import Priorities, longest_paths
from rlmux.policies.lookahead.problem import BEFORE_NOW, NOT_YET, Problem, Schedule, SiblingMigration, WorkItem

_DONE_S = 1e-9
"""Solo seconds left below which a work item has ended."""
_ROUNDING = 1e-12
"""Part of the time since now that counts as rounding besides: less than that, added to it, may leave it as it is."""


class Setting:
    """What is the same in all playouts of one problem."""

    __slots__ = (
        "begins", "deadlines_s", "devices", "first_sub_stages", "followers", "gains", "is_sharing", "least_mean_s",
        "masks", "most_together", "no_begins", "num_devices", "num_needs", "paths_s", "problem", "rates", "seconds",
        "states", "switches_s", "tails_s", "targets", "widths",
    )  # fmt: skip

    def __init__(self, problem: Problem) -> None:
        work_items = problem.work_items
        self.problem = problem
        self.devices = [item.devices for item in work_items]
        self.masks = [sum(1 << device for device in devices) for devices in self.devices]
        self.num_devices = max(
            [mask.bit_length() for mask in self.masks] + [move.device + 1 for move in problem.idle_migrations],
            default=0,
        )
        self.num_needs = [len(item.needs) for item in work_items]
        self.followers: list[list[int]] = [[] for _ in work_items]
        for index, item in enumerate(work_items):
            for need in item.needs:
                self.followers[need].append(index)
        self.targets = [move.targets for move in problem.sibling_migrations]
        self.is_sharing = problem.sharing.allows_any or _is_device_shared(problem)
        """Whether a device may have several work items at once in a playout."""
        self.most_together = problem.sharing.most_together
        self.rates = problem.sharing.rates
        self.gains = problem.sharing.gains
        self.begins = [_begins(item) for item in work_items]
        """(solo seconds left when it begins, sub-stage) of each item's sub-stages after the first, in order, as
        `sharing` names them; so are the first ones."""
        self.first_sub_stages = [
            sub_stage_in(SubStage.TAIL_DECODE if item.seconds <= item.tail_s + _DONE_S else item.sub_stage, item.base)
            for item in work_items
        ]
        self.no_begins: list[tuple[tuple[float, str], ...]] = [()] * len(work_items)
        self.deadlines_s = [(i, item.deadline_s) for i, item in enumerate(work_items) if item.deadline_s is not None]
        self.seconds = [item.seconds for item in work_items]
        self.tails_s = [item.tail_s for item in work_items]
        self.states = [item.state for item in work_items]
        self.switches_s = [item.switch_s for item in work_items]
        self.widths = [len(devices) or 1 for devices in self.devices]
        least_s = self._least_seconds()
        self.paths_s = longest_paths(work_items, least_s)
        """Seconds at least from the start of each item until all that waits for it has ended."""
        self.least_mean_s = self._least_mean_s(least_s)

    def _least_seconds(self) -> list[float]:
        """Seconds of each work item in any playout: less what may migrate to a sibling."""
        least_s = self.seconds.copy()
        for move in self.problem.sibling_migrations:
            stays_s = 0.0 if move.is_whole else max(0.0, self.seconds[move.source] - self.tails_s[move.source])
            least_s[move.source] = min(least_s[move.source], stays_s)
        return least_s

    def _least_mean_s(self, least_s: list[float]) -> float:
        """What the mean end of the pipelines is at least: each with all its devices for itself."""
        ends_s: list[float] = []
        last_s: dict[int, float] = {}
        for index, item in enumerate(self.problem.work_items):
            ends_s.append(max([ends_s[need] for need in item.needs], default=0.0) + least_s[index])
            last_s[item.pipeline] = max(last_s.get(item.pipeline, 0.0), ends_s[index])
        return sum(last_s.values()) / max(len(last_s), 1)


def _is_device_shared(problem: Problem) -> bool:
    """Whether running work items have a device together, or would if shards migrated: they stay there whatever the
    table says, such as a tail that left the rest of its node beside the next rollout."""
    there = [device for item in problem.work_items if item.is_running for device in item.devices]
    there += [move.device for move in problem.idle_migrations if problem.work_items[move.item].is_running]
    return len(set(there)) < len(there)


def _begins(item: WorkItem) -> tuple[tuple[float, str], ...]:
    """Its later sub-stages, and its tail, which is one of its own even after tail decoding that may not migrate."""
    later = item.later
    if 0.0 < item.tail_s < item.seconds - _DONE_S:
        before = tuple(entry for entry in item.later if entry[0] > item.tail_s + _DONE_S)
        later = (*before, (item.tail_s, SubStage.TAIL_DECODE))
    elif item.tail_s:
        later = ()
    return tuple((left_s, sub_stage_in(sub_stage, item.base)) for left_s, sub_stage in later) if item.base else later


class Playout:
    """Priorities become a schedule. Its lists are by work item."""

    __slots__ = (
        "advanced_s",
        "after",
        "begins",
        "begun",
        "change_s",
        "crowded",
        "devices",
        "end_s",
        "grown_s",
        "holders",
        "idle_migrations",
        "kept",
        "least_gain",
        "left_s",
        "masks",
        "now_s",
        "num_missing",
        "num_started",
        "open_migrations",
        "rank",
        "rate",
        "rate_on",
        "ready",
        "running",
        "setting",
        "shared",
        "sibling_migrations",
        "sibling_migrations_now",
        "start_s",
        "sub_stage",
        "tail_s",
        "taken",
        "unshared",
    )  # fmt: skip

    def __init__(self, setting: Setting, priorities: Priorities) -> None:
        num = len(setting.seconds)
        self.setting = setting
        self.rank = priorities.rank
        self.after = priorities.after
        self.unshared = priorities.unshared
        self.least_gain = priorities.least_gain
        self.sibling_migrations = priorities.sibling_migrations
        self.open_migrations = list(priorities.sibling_migrations)
        self.idle_migrations = priorities.idle_migrations
        self.sibling_migrations_now: list[int] = []
        self.now_s = 0.0
        self.num_started = 0
        """Starts so far, a work item counting once for each device."""
        self.left_s = setting.seconds.copy()
        """Solo seconds left, as of `advanced_s`."""
        self.tail_s = setting.tails_s.copy()
        self.sub_stage = setting.first_sub_stages.copy()
        has_sub_stages = setting.is_sharing or bool(priorities.sibling_migrations)
        self.begins = setting.begins if has_sub_stages else setting.no_begins
        """`Setting.begins`, where anything depends on an item's sub-stage."""
        self.begun = [0] * num
        """Sub-stages after the first that have begun."""
        self.grown_s = [0.0] * num
        """Seconds by which its tail has grown."""
        self.start_s = [NOT_YET] * num
        self.end_s = [NOT_YET] * num
        self.advanced_s = [0.0] * num
        self.rate = [1.0] * num
        """Solo seconds per second."""
        self.rate_on: list[dict[int, float]] = [{} for _ in range(num)] if setting.is_sharing else []
        """The same on each device that is shared, or was."""
        self.change_s = [0.0] * num
        """When a running work item ends or begins its next sub-stage."""
        self.kept = list(setting.problem.kept)
        self.num_missing = setting.num_needs.copy()
        """Needs that have not ended."""
        self.ready: list[tuple[int, int]] = []
        """(rank, work item), ascending."""
        self.running: list[int] = []
        self.holders: list[list[int]] = [[] for _ in range(setting.num_devices)] if setting.is_sharing else []
        """Work items that hold each device; kept only where devices may be shared."""
        self.taken = 0
        """Bits of the devices that a work item holds; `shared` has those that several hold, `crowded` those that as
        many hold as may."""
        self.shared = 0
        self.crowded = 0
        self.masks = setting.masks
        self.devices = setting.devices
        if priorities.idle_migrations:
            self._migrate_to_idle_devices(priorities.idle_migrations)

    def _migrate_to_idle_devices(self, numbers: frozenset[int]) -> None:
        self.masks, self.devices = list(self.masks), list(self.devices)
        for number in numbers:
            migration = self.setting.problem.idle_migrations[number]
            self.masks[migration.item] = 1 << migration.device
            self.devices[migration.item] = (migration.device,)
            self.left_s[migration.item] += migration.cost_s

    def schedule(self) -> Schedule:
        """Play everything out; to be called once."""
        schedule = self.schedule_before(None)
        assert schedule is not None, "nothing is to be beaten, so it is played to its end"
        return schedule

    def schedule_before(self, beaten: tuple[float, float] | None) -> Schedule | None:
        """The same; None where its score is not less than this one, which shows before the end as a rule."""
        limit_s = math.inf
        if beaten is not None and not beaten[0]:  # to miss fewer deadlines, a schedule may take longer
            problem = self.setting.problem
            limit_s = beaten[1] - problem.mean_weight * self.setting.least_mean_s
        if not self._play_until(limit_s):
            return None
        score, mean_s = self._score()
        if beaten is not None and not is_less(score, beaten):
            return None
        return self._scored_schedule(score, mean_s)

    def _play_until(self, limit_s: float) -> bool:
        """Play from now on; False where it cannot have ended by then."""
        setting, running, ready = self.setting, self.running, self.ready
        change_s, end_s, left_s, masks = self.change_s, self.end_s, self.left_s, self.masks
        num_missing, followers, rank = self.num_missing, setting.followers, self.rank
        is_whole = not setting.is_sharing and self.begins is setting.no_begins
        for index, item in enumerate(setting.problem.work_items):
            if item.is_running:
                self._begin(index)
                self.start_s[index] = BEFORE_NOW
            elif not num_missing[index]:
                insort(ready, (rank[index], index))
        while True:
            if self.open_migrations:
                self._migrate_to_siblings()
            if ready and not self._start_ready(limit_s):
                return False
            if not running:
                if not ready:
                    return True
                # Only what is held back is left: it may not be held back for ever.
                self.after, self.open_migrations = {}, []
                continue
            now_s = self.now_s = min(map(change_s.__getitem__, running))
            if now_s > limit_s:
                return False
            soon_s = now_s + _DONE_S
            for index in [index for index in running if change_s[index] <= soon_s]:
                if not is_whole:
                    self._end_or_go_on(index)
                    continue
                end_s[index] = now_s
                left_s[index] = 0.0
                running.remove(index)
                self.taken &= ~masks[index]
                for follower in followers[index]:
                    num_missing[follower] -= 1
                    if not num_missing[follower]:
                        insort(ready, (rank[follower], follower))

    # starting and ending

    def _start_ready(self, limit_s: float) -> bool:
        """Offer the devices to every ready work item in the order of the list; False where it, or what waits for it,
        ends later than that."""
        setting, ready = self.setting, self.ready
        masks, after, paths_s = self.masks, self.after, setting.paths_s
        is_sharing, taken_all = setting.is_sharing, (1 << setting.num_devices) - 1
        start_s, now_s = self.start_s, self.now_s
        latest_s = limit_s - now_s
        position = 0
        while position < len(ready):
            index = ready[position][1]
            mask = masks[index]
            if mask & self.taken:
                if not is_sharing and self.taken == taken_all:
                    return True
                if not is_sharing or mask & self.crowded or not self._may_share(index):
                    position += 1
                    continue
            if after and index in after:
                other = after[index]
                if start_s[other] == NOT_YET and self.end_s[other] == NOT_YET:
                    position += 1
                    continue
            if paths_s[index] > latest_s:
                return False
            del ready[position]
            start_s[index] = now_s
            if is_sharing:
                self._begin(index)
            else:
                self.taken |= mask
                if self.kept:
                    self._bring_state(index)
                self.running.append(index)
                self.num_started += setting.widths[index]
                self.advanced_s[index] = now_s
                if self.begins[index]:
                    self._schedule_end(index)
                else:
                    self.change_s[index] = now_s + self.left_s[index]
            if not mask:
                position = 0
        return True

    def _begin(self, index: int) -> None:
        mask = self.masks[index]
        both = self.taken & mask
        self.shared |= both
        self.taken |= mask
        if self.kept:
            self._bring_state(index)
        self.running.append(index)
        self.num_started += self.setting.widths[index]
        self.advanced_s[index] = self.now_s
        if self.setting.is_sharing:
            most = self.setting.most_together
            for device in self.devices[index]:
                self.holders[device].append(index)
                if len(self.holders[device]) >= most:
                    self.crowded |= 1 << device
        self._schedule_end(index)
        if both:
            self._update_rates(index, both)

    def _bring_state(self, index: int) -> None:
        """The work item's state is there from now on, most recently used; it takes a switch longer if it was not."""
        state, kept, is_there = self.setting.states[index], self.kept, True
        for device in self.devices[index]:
            there = kept[device]
            if there and there[0] == state:
                continue
            is_there = is_there and state in there
            most = self.setting.problem.num_kept[device]
            others = [other for other in there if other != state] if most > 1.0 else ()
            kept[device] = (state, *others)[: int(min(most, len(others) + 1))]
        if not is_there:
            self.left_s[index] += self.setting.switches_s[index]

    def _end_or_go_on(self, index: int) -> None:
        self._advance(index)
        if self.left_s[index] > self._rounding_s():
            begins, begun = self.begins[index], self.begun[index]
            if begun < len(begins):
                self.sub_stage[index] = begins[begun][1]
                self.begun[index] = begun + 1
            self._schedule_end(index)
            if self.shared & self.masks[index]:
                self._update_rates(index, self.shared)
            return
        self._end(index)

    def _end(self, index: int) -> None:
        self.end_s[index] = self.now_s
        self.left_s[index] = 0.0
        self.running.remove(index)
        mask = self.masks[index]
        if self.setting.is_sharing:
            for device in self.devices[index]:
                self.holders[device].remove(index)
            both = self.shared & mask
            self.taken &= ~(mask & ~both)
            self.crowded &= ~mask
            for device in self.devices[index] if both else ():
                if len(self.holders[device]) == 1:
                    self.shared &= ~(1 << device)
            if both:
                self._update_rates(index, both)
        else:
            self.taken &= ~mask
        self._release_followers(index)

    def _release_followers(self, index: int) -> None:
        """Work items that waited for this one alone are ready."""
        for follower in self.setting.followers[index]:
            self.num_missing[follower] -= 1
            if not self.num_missing[follower]:
                insort(self.ready, (self.rank[follower], follower))

    # rates

    def _advance(self, index: int) -> None:
        """Count what was done since it was last advanced."""
        self.left_s[index] -= (self.now_s - self.advanced_s[index]) * self.rate[index]
        self.advanced_s[index] = self.now_s

    def _rounding_s(self) -> float:
        """Solo seconds that are none at this moment of the playout."""
        return _DONE_S + _ROUNDING * self.now_s

    def _schedule_end(self, index: int) -> None:
        """Know when it ends at its present rate, or begins its next sub-stage."""
        until_s = self.left_s[index]
        begins, begun = self.begins[index], self.begun[index]
        if begun < len(begins):
            until_s = max(0.0, until_s - begins[begun][0] - self.grown_s[index])
        self.change_s[index] = self.advanced_s[index] + until_s / self.rate[index]

    def _update_rates(self, index: int, mask: int) -> None:
        """The rates of all work items on those of its devices that are in the mask, its own included."""
        rates, sub_stages = self.setting.rates, self.sub_stage
        for device in self.devices[index]:
            if not mask >> device & 1:
                continue
            holders = self.holders[device]
            if len(holders) == 2:
                a, b = holders
                kind_a, kind_b = sub_stages[a], sub_stages[b]
                self._set_rate_on(device, a, rates.get((kind_a, kind_b), 0.5))
                self._set_rate_on(device, b, rates.get((kind_b, kind_a), 0.5))
            elif len(holders) == 1:
                self._set_rate_on(device, holders[0], 1.0)
            else:
                for holder in holders:
                    others = sorted(sub_stages[other] for other in holders if other != holder)
                    self._set_rate_on(device, holder, rates.get((sub_stages[holder], *others), 1.0 / len(holders)))

    def _set_rate_on(self, device: int, index: int, rate: float) -> None:
        """The device gives the work item so much; the slowest of its devices sets its pace."""
        rate_on = self.rate_on[index]
        if rate_on.get(device, 1.0) == rate:
            return
        rate_on[device] = rate
        slowest = min(rate_on.values())
        if slowest != self.rate[index]:
            self._advance(index)
            self.rate[index] = slowest
            self._schedule_end(index)

    def _may_share(self, index: int) -> bool:
        unshared = self.unshared
        if index in unshared:
            return False
        gains, sub_stages, mine = self.setting.gains, self.sub_stage, self.sub_stage[index]
        for device in self.devices[index]:
            holders = self.holders[device]
            if not holders:
                continue
            if not unshared.isdisjoint(holders):
                return False
            if len(holders) == 1:
                key: tuple[str, ...] = (mine, sub_stages[holders[0]])
            else:
                key = (mine, *sorted(sub_stages[other] for other in holders))
            if gains.get(key, -1.0) < self.least_gain:
                return False
        return True

    # migrations to siblings

    def _migrate_to_siblings(self) -> None:
        """Make those whose source has come to its tail while its sibling can still take it over."""
        for number in list(self.open_migrations):
            migration = self.setting.problem.sibling_migrations[number]
            source, targets = migration.source, self.setting.targets[number]
            if self.end_s[source] != NOT_YET or any([self.end_s[target] != NOT_YET for target in targets]):  # noqa: C419 - hot
                self.open_migrations.remove(number)
            elif not self.num_missing[source] and not self.num_missing[migration.target]:
                if migration.is_whole and self.start_s[source] != NOT_YET:
                    self.open_migrations.remove(number)
                    continue
                for side in (source, *targets):
                    if self.start_s[side] != NOT_YET:
                        self._advance(side)
                if migration.is_whole or self.left_s[source] <= self.tail_s[source] + self._rounding_s():
                    self.open_migrations.remove(number)
                    self._migrate_to_sibling(migration, targets)
                    if self.now_s == 0.0 and not migration.is_later:
                        self.sibling_migrations_now.append(number)

    def _migrate_to_sibling(self, migration: SiblingMigration, targets: Sequence[int]) -> None:
        source = migration.source
        for target in targets:
            if migration.is_whole:
                self.left_s[target] += migration.cost_s
            else:
                tail_s = min(self.tail_s[target], self.left_s[target])
                before_s = self.left_s[target] - tail_s
                grown_s = max(self.left_s[source], tail_s) * migration.stretch + migration.cost_s
                self.grown_s[target] += grown_s - self.tail_s[target]
                self.tail_s[target] = grown_s
                self.left_s[target] = before_s + grown_s
            if self.start_s[target] != NOT_YET:
                self._schedule_end(target)
        if self.start_s[source] != NOT_YET:
            self._end(source)
        else:
            self.ready.remove((self.rank[source], source))
            self.start_s[source] = BEFORE_NOW
            self.end_s[source] = self.now_s
            self._release_followers(source)

    # the result

    def _score(self) -> tuple[tuple[float, float], float]:
        """`Schedule.score`, and the mean end."""
        last_s: dict[int, float] = {}
        for item, at_s in zip(self.setting.problem.work_items, self.end_s, strict=True):
            if at_s > last_s.get(item.pipeline, 0.0):
                last_s[item.pipeline] = at_s
        missed_s = sum(max(0.0, self.end_s[index] - deadline_s) for index, deadline_s in self.setting.deadlines_s)
        mean_s = sum(last_s.values()) / max(len(last_s), 1)
        makespan_s = max(last_s.values(), default=0.0)
        return (missed_s, makespan_s + self.setting.problem.mean_weight * mean_s), mean_s

    def _scored_schedule(self, score: tuple[float, float], mean_s: float) -> Schedule:
        return Schedule(
            start_s=tuple(self.start_s),
            end_s=tuple(self.end_s),
            sibling_migrations=self.sibling_migrations,
            sibling_migrations_now=tuple(self.sibling_migrations_now),
            idle_migrations_now=self._idle_migrations_now(),
            score=score,
            mean_end_s=mean_s,
            num_tried=1,
        )

    def _idle_migrations_now(self) -> tuple[int, ...]:
        migrations = self.setting.problem.idle_migrations
        return tuple(
            number
            for number in sorted(self.idle_migrations)
            if self.start_s[migrations[number].item] in (0.0, BEFORE_NOW)
        )


def is_less(score: tuple[float, float], than: tuple[float, float]) -> bool:
    """Whether a schedule with this score is better, beyond rounding."""
    return score[0] < than[0] - 1e-6 or (score[0] <= than[0] + 1e-6 and score[1] < than[1] - 1e-6)
