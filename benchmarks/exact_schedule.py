"""The best that any schedule could do for a look-ahead problem, by constraint programming: what `plan` is judged by.

    Problem ── intervals, overlaps, precedence ──▶ CP-SAT ──▶ least makespan

The model is that of `policies/lookahead/playout.py`: work items are never interrupted; two may overlap on a device if
the table says so, and each then loses (1 - rate) of the time of the overlap; a migration takes a tail, or a whole
shard, away and lengthens its siblings; one to an idle device takes an item there. Where an item on several devices is
slowed on more than one of them at once, the model takes the worst device's total, which no schedule can beat: so the
answer is a lower bound, and the optimum wherever work items on several devices share with at most one at a time.

Needs the `solver` extra.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from rlmux.core.errors import UserError
from rlmux.core.estimation.colocation import NO_SHARING, SharingEntry, SharingTable
from rlmux.core.model import SubStage
from rlmux.policies.lookahead.problem import IdleMigration, Problem, SiblingMigration, WorkItem

UNITS_PER_S = 50
_PERCENT = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Exact:
    """What the solver found."""

    makespan_s: float
    """Makespan of the best schedule that was found."""
    bound_s: float
    """Seconds that no schedule ends before."""
    is_proved: bool


def least_makespan(problem: Problem, *, limit_s: float = 10.0, upper_s: float | None = None) -> Exact:
    """The least makespan of a small problem in which nothing runs yet; `upper_s` is one that can be had.

    Raises UserError where OR-tools is missing, or where `limit_s` seconds are not enough to find any schedule.
    """
    try:
        from ortools.sat.python import cp_model
    except ImportError:
        raise UserError("the exact schedule needs OR-tools: pip install 'rlmux[solver]'") from None
    builder = _Model(problem, cp_model.CpModel(), upper_s)
    builder.build()
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = limit_s
    solver.parameters.num_workers = 1
    status = solver.solve(builder.model)
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        raise UserError(f"no exact schedule within {limit_s:g} s")
    return Exact(
        makespan_s=solver.objective_value / UNITS_PER_S,
        bound_s=solver.best_objective_bound / UNITS_PER_S,
        is_proved=status == cp_model.OPTIMAL,
    )


class _Model:
    """A problem as intervals. A shard is two of them back to back: before its tail, and its tail."""

    def __init__(self, problem: Problem, model: Any, upper_s: float | None = None) -> None:
        self.problem = problem
        self.model = model
        total_s = sum(item.seconds for item in problem.work_items)
        slowest = 1.0 / min([1.0, *problem.sharing.rates.values()])
        self.horizon = (
            int(
                (
                    total_s * slowest
                    + sum(move.cost_s for move in problem.sibling_migrations)
                    + sum(move.cost_s for move in problem.idle_migrations)
                )
                * UNITS_PER_S
                * 2
            )
            + 10
        )
        if upper_s is not None:
            # Rounding of every piece may add a unit.
            self.horizon = min(self.horizon, int(upper_s * UNITS_PER_S) + 2 * len(problem.work_items) + 2)

    def build(self) -> None:
        model, work_items = self.model, self.problem.work_items
        self.is_made = [
            model.new_bool_var(f"migration{number}") for number in range(len(self.problem.sibling_migrations))
        ]
        self.pieces: list[list[tuple[str, Any, Any, Any, int]]] = []
        """Parts of each work item: (sub_stage, start, end, duration, seconds in units)."""
        self.gone: dict[int, list[Any]] = {}
        """Migrations that take the tail of each source away."""
        self.gone_whole: dict[int, list[Any]] = {}
        """Migrations that take all of each source away."""
        for number, migration in enumerate(self.problem.sibling_migrations):
            gone = self.gone_whole if migration.is_whole else self.gone
            gone.setdefault(migration.source, []).append(self.is_made[number])
        self.elsewhere = {
            move.item: (move, model.new_bool_var(f"idle_migration{number}"))
            for number, move in enumerate(self.problem.idle_migrations)
        }
        """The migration of an item to an idle device, and whether it is made."""
        for index, item in enumerate(work_items):
            self.pieces.append(self._pieces_of(index, item))
        self._exclude_migrations()
        delays = self._overlaps()
        for index, item in enumerate(work_items):
            self._durations(index, item, delays)
            for need in item.needs:
                model.add(self.pieces[index][0][1] >= self.pieces[need][-1][2])
        makespan = model.new_int_var(0, self.horizon, "makespan")
        for pieces in self.pieces:
            model.add(makespan >= pieces[-1][2])
        model.minimize(makespan)

    def _pieces_of(self, index: int, item: WorkItem) -> list[tuple[str, Any, Any, Any, int]]:
        model = self.model
        tail = round(min(item.tail_s, item.seconds) * UNITS_PER_S)
        parts = [(item.sub_stage, round(item.seconds * UNITS_PER_S) - tail), (SubStage.TAIL_DECODE, tail)]
        found: list[tuple[str, Any, Any, Any, int]] = []
        for sub_stage, units in parts:
            if units <= 0:
                continue
            name = f"{sub_stage}{index}"
            start = model.new_int_var(0, self.horizon, f"start_{name}")
            end = model.new_int_var(0, self.horizon, f"end_{name}")
            duration = model.new_int_var(0, self.horizon, f"duration_{name}")
            model.add(end == start + duration)
            if found:
                model.add(start == found[-1][2])
            found.append((sub_stage, start, end, duration, units))
        return found

    def _exclude_migrations(self) -> None:
        for first, second in combinations(range(len(self.problem.sibling_migrations)), 2):
            a, b = self.problem.sibling_migrations[first], self.problem.sibling_migrations[second]
            if a.source in (b.source, *b.targets) or b.source in a.targets:
                self.model.add(self.is_made[first] + self.is_made[second] <= 1)

    def _overlaps(self) -> dict[tuple[int, int], list[tuple[int, Any, int]]]:
        """(device, overlap in units, percent lost) of each part with every other that it may overlap with."""
        model, work_items = self.model, self.problem.work_items
        delays: dict[tuple[int, int], list[tuple[int, Any, int]]] = {}
        by_device: dict[int, list[Any]] = {}
        for index in range(len(work_items)):
            for number, (_, start, end, duration, _) in enumerate(self.pieces[index]):
                for device, is_there in self._places(index):
                    interval = model.new_optional_interval_var(
                        start, duration, end, is_there, f"interval{index}_{number}_{device}"
                    )
                    by_device.setdefault(device, []).append(interval)
        for intervals in by_device.values():
            model.add_cumulative(intervals, [1] * len(intervals), 2)
        for first, second in combinations(range(len(work_items)), 2):
            places, others = dict(self._places(first)), dict(self._places(second))
            if self._is_before(first, second):
                continue
            for device in sorted(places.keys() & others.keys()):
                stay = [flag.negated() for index in (first, second) for flag in self.gone_whole.get(index, [])]
                both = [places[device], others[device], *stay]
                for i, piece_a in enumerate(self.pieces[first]):
                    for j, piece_b in enumerate(self.pieces[second]):
                        overlap = self._overlap(piece_a, piece_b, both)
                        if overlap is None:
                            continue
                        lost_a, lost_b = self._lost(piece_a[0], piece_b[0])
                        delays.setdefault((first, i), []).append((device, overlap, lost_a))
                        delays.setdefault((second, j), []).append((device, overlap, lost_b))
        return delays

    def _places(self, index: int) -> list[tuple[int, Any]]:
        """Devices that the item may run on, each with whether it does."""
        stays: Any = True
        places: list[tuple[int, Any]] = []
        if index in self.elsewhere:
            move, is_made = self.elsewhere[index]
            stays = is_made.negated()
            places = [(move.device, is_made)]
        return [*((device, stays) for device in self.problem.work_items[index].devices), *places]

    def _is_before(self, first: int, second: int) -> bool:
        needs = self.problem.work_items[second].needs
        return any(need == first or self._is_before(first, need) for need in needs)

    def _overlap(
        self, a: tuple[str, Any, Any, Any, int], b: tuple[str, Any, Any, Any, int], both: Sequence[Any]
    ) -> Any:
        """How long both run at once on a device where they are if `both` hold, or None where they must not."""
        model = self.model
        before, after = model.new_bool_var(""), model.new_bool_var("")
        model.add(a[2] <= b[1]).only_enforce_if(before)
        model.add(b[2] <= a[1]).only_enforce_if(after)
        if (a[0], b[0]) not in self.problem.sharing.rates:
            model.add_bool_or(before, after).only_enforce_if(*both)
            return None
        overlap = model.new_int_var(0, self.horizon, "")
        latest_start = model.new_int_var(0, self.horizon, "")
        earliest_end = model.new_int_var(0, self.horizon, "")
        model.add_max_equality(latest_start, [a[1], b[1]])
        model.add_min_equality(earliest_end, [a[2], b[2]])
        model.add(overlap >= earliest_end - latest_start).only_enforce_if(*both)
        model.add(overlap == 0).only_enforce_if(before)
        model.add(overlap == 0).only_enforce_if(after)
        model.add(overlap == earliest_end - latest_start).only_enforce_if(before.negated(), after.negated(), *both)
        return overlap

    def _lost(self, sub_stage_a: str, sub_stage_b: str) -> tuple[int, int]:
        rates = self.problem.sharing.rates
        return (
            round(_PERCENT * (1 - rates[sub_stage_a, sub_stage_b])),
            round(_PERCENT * (1 - rates[sub_stage_b, sub_stage_a])),
        )

    def _durations(self, index: int, item: WorkItem, delays: dict[tuple[int, int], list[tuple[int, Any, int]]]) -> None:
        """Solo seconds, and what each overlap costs; the worst device counts."""
        model = self.model
        for number, (_, _, _, duration, units) in enumerate(self.pieces[index]):
            is_tail = number == len(self.pieces[index]) - 1
            base: Any = self._tail_units(index, units) if is_tail else self._body_units(index, units)
            if is_tail and index in self.elsewhere:
                move, is_made = self.elsewhere[index]
                base = base + round(move.cost_s * UNITS_PER_S) * is_made
            slowed = delays.get((index, number), [])
            if not slowed:
                model.add(duration == base)
            for device in sorted({at for at, _, _ in slowed}):
                lost = sum(overlap * percent for at, overlap, percent in slowed if at == device)
                model.add(_PERCENT * duration >= _PERCENT * base + lost)

    def _body_units(self, index: int, units: int) -> Any:
        """What comes before the tail: nothing where the whole shard is taken away."""
        return units * self._stays(index)

    def _stays(self, index: int) -> Any:
        """1 unless the whole shard is taken away: at most one migration does."""
        return 1 - sum(self.gone_whole.get(index, []))

    def _tail_units(self, index: int, units: int) -> Any:
        """A tail that is taken away has none; one that takes over has the longer of the two, stretched."""
        model = self.model
        incoming = [
            (n, migration) for n, migration in enumerate(self.problem.sibling_migrations) if index in migration.targets
        ]
        gone = [*self.gone.get(index, []), *self.gone_whole.get(index, [])]
        if not incoming and not gone:
            return units
        base = model.new_int_var(0, self.horizon, "")
        none_in = [self.is_made[n].negated() for n, _ in incoming]
        model.add(base == units).only_enforce_if(*none_in, *(flag.negated() for flag in gone))
        for flag in gone:
            model.add(base == 0).only_enforce_if(flag)
        grown: Any = sum(
            self.is_made[number] * round(migration.cost_s * UNITS_PER_S)
            for number, migration in incoming
            if migration.is_whole
        )
        model.add(base >= units + grown).only_enforce_if(*(flag.negated() for flag in gone))
        for number, migration in incoming:
            if migration.is_whole:
                continue
            source = self.problem.work_items[migration.source]
            moved, stretch = round(min(source.tail_s, source.seconds) * UNITS_PER_S), round(100 * migration.stretch)
            cost = round(migration.cost_s * UNITS_PER_S)
            # The source has come to its tail; of the target's own tail so much is done by then.
            done: Any = 0
            if not self.problem.sharing.allows_any:
                done = model.new_int_var(0, units, "")
            behind = self.pieces[migration.source][-1][1] - self.pieces[index][-1][1]
            model.add(behind <= done).only_enforce_if(self.is_made[number])
            for longest in (moved, units - done):
                model.add(100 * base >= 100 * (done + grown + cost) + stretch * longest).only_enforce_if(
                    self.is_made[number]
                )
        return base


def random_problem(generator: random.Random, *, is_sharing: bool = True, has_moves: bool = False) -> Problem:
    """A small graph like those of pipelines: rollouts by device with tails, training, a step or two ahead.

    `has_moves`: shards may also move before they begin, to several siblings at once, and to an idle device.
    """
    num_pipelines = 2 if is_sharing else generator.randint(2, 3)
    num_devices = generator.randint(1, 2 if is_sharing else 3)
    work_items: list[WorkItem] = []
    migrations: list[SiblingMigration] = []
    for pipeline in range(num_pipelines):
        needs: tuple[int, ...] = ()
        train_devices = tuple(range(num_devices)) if generator.random() < 0.5 else (generator.randrange(num_devices),)
        rollout_s, train_s = generator.uniform(2, 8), generator.uniform(1, 8)
        for _ in range(2 if num_pipelines * num_devices <= (2 if is_sharing else 4) else 1):
            shards = []
            for device in range(num_devices):
                seconds = round(rollout_s * generator.uniform(0.6, 1.4), 1)
                tail_s = round(seconds * generator.uniform(0.2, 0.7), 1)
                item = WorkItem(
                    pipeline=pipeline,
                    sub_stage=SubStage.DENSE_DECODE,
                    devices=(device,),
                    seconds=seconds,
                    tail_s=tail_s,
                    needs=needs,
                )
                work_items.append(item)
                shards.append(len(work_items) - 1)
            target = max(shards, key=lambda index: work_items[index].seconds)
            if num_devices > 1 and generator.random() < 0.6:
                source = next(index for index in shards if index != target)
                migrations.append(SiblingMigration(source=source, target=target, cost_s=0.2, stretch=1.1))
            work_items.append(
                WorkItem(
                    pipeline=pipeline, sub_stage=SubStage.UPDATE, devices=train_devices, seconds=round(train_s, 1),
                    needs=tuple(shards),
                )
            )  # fmt: skip
            needs = (len(work_items) - 1,)
    idle_migrations: tuple[IdleMigration, ...] = ()
    if has_moves:
        idle_migrations = _add_moves(generator, work_items, migrations, num_devices)
    return Problem(
        work_items=tuple(work_items),
        sibling_migrations=tuple(migrations),
        idle_migrations=idle_migrations,
        sharing=_random_sharing(generator) if is_sharing else NO_SHARING,
    )


def _add_moves(
    generator: random.Random, work_items: list[WorkItem], migrations: list[SiblingMigration], num_devices: int
) -> tuple[IdleMigration, ...]:
    """Whole shards to all siblings, and first shards to a device that no work item has."""
    rollouts: dict[tuple[int, tuple[int, ...]], list[int]] = {}
    for index, item in enumerate(work_items):
        if item.tail_s:
            rollouts.setdefault((item.pipeline, item.needs), []).append(index)
    idle = []
    for shards in rollouts.values():
        source, *others = generator.sample(shards, len(shards))
        item = work_items[source]
        if others:
            cost_s = round(item.seconds * generator.uniform(0.3, 0.9) / len(others), 1)
            migrations.append(
                SiblingMigration(
                    source=source, target=others[0], others=tuple(others[1:]), cost_s=cost_s, is_whole=True,
                    is_later=bool(item.needs),
                )
            )  # fmt: skip
        if not item.needs and generator.random() < 0.5:
            idle.append(IdleMigration(item=source, device=num_devices, cost_s=0.3))
    return tuple(idle)


def _random_sharing(generator: random.Random) -> SharingTable:
    """Training beside decoding helps, decoding beside decoding more, training beside training does not."""
    entries = []
    dense, tail, update = SubStage.DENSE_DECODE, SubStage.TAIL_DECODE, SubStage.UPDATE
    for sub_stage_a, sub_stage_b, low, high in (
        (update, tail, 1.1, 1.6), (update, dense, 1.3, 2.2), (tail, tail, 1.0, 1.3),
        (dense, tail, 1.1, 1.6), (dense, dense, 1.4, 2.2),
    ):  # fmt: skip
        slow_a, slow_b = generator.uniform(low, high), generator.uniform(low, high)
        if sub_stage_a == sub_stage_b:
            slow_b = slow_a
        entries.append(
            SharingEntry(
                sub_stage_a=sub_stage_a,
                sub_stage_b=sub_stage_b,
                device_fraction=0.5,
                slowdown_a=slow_a,
                slowdown_b=slow_b,
            )
        )
    return SharingTable.of(entries)
