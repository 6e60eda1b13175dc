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

This is the kernel of the look-ahead, some 7 µs a start: state is in lists by work item, sets of devices are bits.
"""

from __future__ import annotations

import math
from bisect import insort

from rlmux.core.model import SubStage
from rlmux.core.steps.colocation import sub_stage_in
from rlmux.policies.lookahead.priorities import Priorities
from rlmux.policies.lookahead.problem import BEFORE_NOW, NOT_YET, Problem, Schedule, SiblingMigration, WorkItem

_DONE_S = 1e-9
"""Solo seconds left below which a work item has ended."""
_ROUNDING = 1e-12
"""Part of the time since now that counts as rounding besides: less than that, added to it, may leave it as it is."""


class Setting:
    """What is the same in all playouts of one problem."""

    __slots__ = (
        "begins", "deadlines_s", "devices", "first_sub_stages", "followers", "is_sharing", "masks", "most_together",
        "num_devices", "num_needs", "problem", "rates",
    )  # fmt: skip

    def __init__(self, problem: Problem) -> None:
        work_items = problem.work_items
        self.problem = problem
        self.devices = [item.devices for item in work_items]
        self.masks = [sum(1 << device for device in devices) for devices in self.devices]
        self.num_devices = max(
            [mask.bit_length() for mask in self.masks] + [one.device + 1 for one in problem.idle_migrations], default=0
        )
        self.num_needs = [len(item.needs) for item in work_items]
        self.followers: list[list[int]] = [[] for _ in work_items]
        for index, item in enumerate(work_items):
            for need in item.needs:
                self.followers[need].append(index)
        self.is_sharing = problem.sharing.allows_any
        self.most_together = problem.sharing.most_together
        self.rates = problem.sharing.rates
        self.begins = [_begins(item) for item in work_items]
        """(solo seconds left when it begins, sub-stage) of each item's sub-stages after the first, in order, as
        `sharing` names them; so are the first ones."""
        self.first_sub_stages = [
            sub_stage_in(SubStage.TAIL_DECODE if item.seconds <= item.tail_s + _DONE_S else item.sub_stage, item.base)
            for item in work_items
        ]
        self.deadlines_s = [(i, item.deadline_s) for i, item in enumerate(work_items) if item.deadline_s is not None]


def _begins(item: WorkItem) -> tuple[tuple[float, str], ...]:
    """Its later sub-stages, and its tail, which is one of its own even after tail decoding that may not migrate."""
    later = item.later
    if 0.0 < item.tail_s < item.seconds - _DONE_S:
        before = tuple(one for one in item.later if one[0] > item.tail_s + _DONE_S)
        later = (*before, (item.tail_s, SubStage.TAIL_DECODE))
    elif item.tail_s:
        later = ()
    return tuple((left_s, sub_stage_in(sub_stage, item.base)) for left_s, sub_stage in later) if item.base else later


class Playout:
    """Priorities become a schedule. Its lists are by work item."""

    __slots__ = (
        "advanced_s",
        "after",
        "begun",
        "change_s",
        "crowded",
        "devices",
        "end_s",
        "grown_s",
        "holders",
        "idle_migrations",
        "kept",
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
        "work_items",
    )  # fmt: skip

    def __init__(self, setting: Setting, priorities: Priorities) -> None:
        work_items = setting.problem.work_items
        self.setting = setting
        self.work_items = work_items
        self.rank = priorities.rank
        self.after = priorities.after
        self.unshared = priorities.unshared
        self.sibling_migrations = priorities.sibling_migrations
        self.open_migrations = list(priorities.sibling_migrations)
        self.idle_migrations = priorities.idle_migrations
        self.sibling_migrations_now: list[int] = []
        self.now_s = 0.0
        self.num_started = 0
        """Starts so far, a work item counting once for each device."""
        self.left_s = [item.seconds for item in work_items]
        """Solo seconds left, as of `advanced_s`."""
        self.tail_s = [item.tail_s for item in work_items]
        self.sub_stage = list(setting.first_sub_stages)
        self.begun = [0] * len(work_items)
        """Sub-stages after the first that have begun."""
        self.grown_s = [0.0] * len(work_items)
        """Seconds by which its tail has grown."""
        self.start_s = [NOT_YET] * len(work_items)
        self.end_s = [NOT_YET] * len(work_items)
        self.advanced_s = [0.0] * len(work_items)
        self.rate = [1.0] * len(work_items)
        """Solo seconds per second."""
        self.rate_on: list[dict[int, float]] = [{} for _ in work_items] if setting.is_sharing else []
        """The same on each device that is shared, or was."""
        self.change_s = [0.0] * len(work_items)
        """When a running work item ends or begins its next sub-stage."""
        self.kept = list(setting.problem.kept)
        self.num_missing = list(setting.num_needs)
        """Needs that have not ended."""
        self.ready: list[tuple[int, int]] = []
        """(rank, work item), ascending."""
        self.running: list[int] = []
        self.holders: list[list[int]] = [[] for _ in range(setting.num_devices)]
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
        schedule = self.schedule_before(math.inf)
        assert schedule is not None, "without a limit it is played to its end"
        return schedule

    def schedule_before(self, limit_s: float) -> Schedule | None:
        """The same; None where not everything has ended by then."""
        for index, item in enumerate(self.work_items):
            if item.is_running:
                self._begin(index)
                self.start_s[index] = BEFORE_NOW
            elif not self.num_missing[index]:
                insort(self.ready, (self.rank[index], index))
        while True:
            if self.open_migrations:
                self._migrate_to_siblings()
            if self.ready:
                self._start_ready()
            if not self.running:
                if not self.ready:
                    return self._scored_schedule()
                # Only what is held back is left: it may not be held back for ever.
                self.after, self.open_migrations = {}, []
                continue
            change_s = self.change_s
            now_s = self.now_s = min([change_s[index] for index in self.running])
            if now_s > limit_s:
                return None
            for index in [index for index in self.running if change_s[index] <= now_s + _DONE_S]:
                if index in self.running:
                    self._end_or_go_on(index)

    # starting and ending

    def _start_ready(self) -> None:
        """Offer the devices to every ready work item in the order of the list."""
        masks, after, taken_all = self.masks, self.after, (1 << self.setting.num_devices) - 1
        is_sharing = self.setting.is_sharing
        position = 0
        ready = self.ready
        while position < len(ready):
            index = ready[position][1]
            mask = masks[index]
            if mask & self.taken:
                if not is_sharing and self.taken == taken_all:
                    return
                if not is_sharing or mask & self.crowded or not self._may_share(index):
                    position += 1
                    continue
            if after and index in after:
                other = after[index]
                if self.start_s[other] == NOT_YET and self.end_s[other] == NOT_YET:
                    position += 1
                    continue
            del ready[position]
            self.start_s[index] = self.now_s
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
        self.num_started += len(self.devices[index]) or 1
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

    def _bring_state(self, item: WorkItem, devices: tuple[int, ...], index: int) -> None:
        """The work item's state is there from now on, most recently used; it takes a switch longer if it was not."""
        state, kept = item.state, self.kept
        num_kept = self.setting.problem.num_kept
        if any(state not in kept[device] for device in devices):
            self.left_s[index] += item.switch_s
        for device in devices:
            others = [other for other in kept[device] if other != state]
            kept[device] = (state, *others)[: int(min(num_kept[device], len(others) + 1))]

    def _end_or_go_on(self, index: int) -> None:
        self._advance(index)
        if self.left_s[index] > self._rounding_s():
            begins, begun = self.setting.begins[index], self.begun[index]
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
        begins, begun = self.setting.begins[index], self.begun[index]
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
        rates, sub_stages, mine = self.setting.rates, self.sub_stage, self.sub_stage[index]
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
            if key not in rates:
                return False
        return True

    # migrations to siblings

    def _migrate_to_siblings(self) -> None:
        """Make those whose source has come to its tail while its sibling can still take it over."""
        for number in list(self.open_migrations):
            migration = self.setting.problem.sibling_migrations[number]
            source, target = migration.source, migration.target
            if self.end_s[source] != NOT_YET or self.end_s[target] != NOT_YET:
                self.open_migrations.remove(number)
            elif not self.num_missing[source] and not self.num_missing[target]:
                if migration.is_whole and self.start_s[source] != NOT_YET:
                    self.open_migrations.remove(number)
                    continue
                for side in (source, target):
                    if self.start_s[side] != NOT_YET:
                        self._advance(side)
                if migration.is_whole or self.left_s[source] <= self.tail_s[source] + self._rounding_s():
                    self.open_migrations.remove(number)
                    self._migrate_to_sibling(migration)
                    if self.now_s == 0.0 and not migration.is_later:
                        self.sibling_migrations_now.append(number)

    def _migrate_to_sibling(self, migration: SiblingMigration) -> None:
        source, target = migration.source, migration.target
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

    def _scored_schedule(self) -> Schedule:
        last_s: dict[int, float] = {}
        for item, at_s in zip(self.work_items, self.end_s, strict=True):
            if at_s > last_s.get(item.pipeline, 0.0):
                last_s[item.pipeline] = at_s
        missed_s = sum(max(0.0, self.end_s[index] - deadline_s) for index, deadline_s in self.setting.deadlines_s)
        mean_s = sum(last_s.values()) / max(len(last_s), 1)
        return Schedule(
            start_s=tuple(self.start_s),
            end_s=tuple(self.end_s),
            sibling_migrations=self.sibling_migrations,
            sibling_migrations_now=tuple(self.sibling_migrations_now),
            idle_migrations_now=self._idle_migrations_now(),
            score=(missed_s, max(self.end_s, default=0.0) + self.setting.problem.mean_weight * mean_s),
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
