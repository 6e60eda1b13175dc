"""A regrouping that costs less for the work that is left, carried out part by part.

    most idle groups ─▶ columns: sets of pipelines at their cheapest layout within every budget ─▶ cheapest partition
                     ─▶ parts: groups and targets that exchange members ─▶ each by itself: does it pay for its moves?

A column's cost is what `Economy` counts: nodes, slowness, and the price of the moves that make it. A part of the new
partition is carried out if a way there is found and what it saves pays for its own moves, or if a member was beyond its
budget: one part that is blocked does not hold up another.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain

from rlmux.core.model import GroupId, PipelineId
from rlmux.core.placement.choice import Relocation
from rlmux.core.placement.group_load import GroupLoad, Member, group_load, solo_s
from rlmux.core.placement.placement_ledger import PlacementLedger
from rlmux.core.placement.view import PlacementView
from rlmux.policies.search.economy import Economy
from rlmux.policies.search.layouts import Layout, LayoutBook, MemberKind
from rlmux.policies.search.partition import CandidateGroup, demand_of
from rlmux.policies.search.ranking import BudgetWatch, GroupRanking
from rlmux.policies.search.regrouping import prices_of, relocations_to, targets_of
from rlmux.policies.search.set_partition import cheapest_partition

_ROUNDING = 1e-9
_MAX_DETOURS = 6
MOST_PLAYED_OUT = 8
"""Placed pipelines up to which a regrouping or a placement is played out to the end of their work."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchLimits:
    """How far one search goes."""

    max_pipelines: int = 16
    """Pipelines that are partitioned anew at once."""
    max_members: int = 5
    """Members of a group."""
    max_columns: int = 800
    """Sets of several pipelines that the partition chooses among."""
    max_nodes: int = 1_000
    """Nodes of the search tree that one partition may visit."""
    window: int = 4
    """Places in the order of budgets within which pipelines of one kind are combined."""


@dataclass(slots=True)
class Caches:
    """Cache from one decision to the next; dropping it changes no result."""

    layouts: LayoutBook = field(default_factory=LayoutBook)
    by_idle: GroupRanking = field(default_factory=GroupRanking)
    """Groups by their idle dollars."""
    budgets: BudgetWatch = field(default_factory=BudgetWatch)


def cheaper_regrouping(
    view: PlacementView, economy: Economy, caches: Caches, limits: SearchLimits
) -> tuple[Relocation, ...]:
    """Relocations, each valid after those before it, to a grouping that costs less; () where none is found."""
    groups = _neighbourhood(view, economy, caches, limits.max_pipelines)
    if not groups:
        return ()
    search = _Columns(groups=groups, view=view, economy=economy, book=caches.layouts, limits=limits)
    partition = cheapest_partition(
        search.columns,
        len(search.members),
        costs=search.costs,
        max_nodes=limits.max_nodes,
        upper=search.cost_now_usd - 1e-6,
    )
    if partition is None:
        return ()
    names = [member.pipeline.id for member in search.members]
    relocations: list[Relocation] = []
    with view.trial() as ledger:
        for part in _parts(partition.groups, groups, names):
            relocations += _carry_out(part, names, economy, ledger)
    return tuple(relocations)


def _neighbourhood(view: PlacementView, economy: Economy, caches: Caches, max_pipelines: int) -> list[GroupLoad]:
    """Groups with a member beyond its budget, then the most idle ones, up to so many pipelines; oldest first."""
    groups = tuple(view.groups())

    def waste(group: GroupLoad) -> float | None:
        return -economy.idle_usd(group) if all(solo_s(member.pipeline) for member in group.members) else None

    is_late = dict.fromkeys(group.id for group in caches.budgets.late_groups(groups, economy))
    by_waste = caches.by_idle.ranked(groups, waste, (economy.rollout_usd, economy.train_usd))
    late = [group for group in by_waste if group.id in is_late] if is_late else []
    taken: list[GroupLoad] = []
    num_members = 0
    for group in chain(late, (group for group in by_waste if group.id not in is_late)):
        if num_members + group.num_members <= max_pipelines:
            taken.append(group)
            num_members += group.num_members
        if num_members == max_pipelines:
            break
    return sorted(taken, key=lambda group: group.id)


@dataclass(slots=True, kw_only=True)
class _Columns:
    """The sets of pipelines that a partition may choose, with what they cost."""

    groups: Sequence[GroupLoad]
    view: PlacementView
    economy: Economy
    book: LayoutBook
    limits: SearchLimits
    members: list[Member] = field(init=False)
    """Members of the groups: by training nodes, most first, then by kind, and by budget among those of one kind."""
    columns: list[CandidateGroup] = field(init=False, default_factory=list)
    costs: list[float] = field(init=False, default_factory=list)
    """Dollars per hour of each column, with the moves that make it."""
    cost_now_usd: float = field(init=False, default=0.0)
    """Dollars per hour of the groups as they are; infinite where a member is beyond its budget."""
    _kinds: list[int] = field(init=False)
    _budgets_s: list[float] = field(init=False)
    _train_s: list[float] = field(init=False)
    """Seconds of training, summed over the nodes."""
    _solo_s: list[float] = field(init=False)
    _places: list[int] = field(init=False)
    """Index of each member among members of its kind."""
    _moves_usd: list[float] = field(init=False)
    _alone_usd: list[float] = field(init=False)
    _found: list[tuple[float, float, CandidateGroup]] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        prices = prices_of(self.view)
        self.book.use(prices)
        kinds = {
            member.pipeline.id: self.book.number_of(
                MemberKind(
                    demand_of(member.pipeline)._replace(budget_s=0.0), self.economy.slowness_usd(member.pipeline)
                )
            )
            for group in self.groups
            for member in group.members
        }
        self.members = sorted(
            (member for group in self.groups for member in group.members),
            key=lambda member: (
                -member.pipeline.num_train_nodes,
                kinds[member.pipeline.id],
                self.economy.budget_s(member.pipeline),
                member.pipeline.id,
            ),
        )
        pipelines = [member.pipeline for member in self.members]
        self._kinds = [kinds[pipeline.id] for pipeline in pipelines]
        self._budgets_s = [self.economy.budget_s(pipeline) * (1.0 + _ROUNDING) for pipeline in pipelines]
        demands = [demand_of(pipeline) for pipeline in pipelines]
        self._train_s = [demand.train_s * demand.num_train_nodes for demand in demands]
        self._solo_s = [demand.solo_s for demand in demands]
        self._places = [index - self._kinds.index(kind) for index, kind in enumerate(self._kinds)]
        self._moves_usd = [self.economy.move_usd(pipeline) for pipeline in pipelines]
        self._add_present()
        self._alone_usd = [self._add_alone(index) for index in range(len(self.members))]
        for index in range(len(self.members)):
            self._grow(index, (index,), self._budgets_s[index], self._train_s[index])
        self._found.sort(key=lambda found: (-found[0], found[2].mask))
        for _, cost, column in self._found[: self.limits.max_columns]:
            self._add(column, cost)

    def _add(self, column: CandidateGroup, cost: float) -> None:
        self.columns.append(column)
        self.costs.append(cost)

    def _add_present(self) -> None:
        """The groups as they are, which take no move; not those with a member beyond its budget."""
        index_of = {member.pipeline.id: index for index, member in enumerate(self.members)}
        for group in self.groups:
            indices = tuple(sorted(index_of[member.pipeline.id] for member in group.members))
            cost = self.economy.cost_usd(group)
            if not self.economy.keeps_budgets(group):
                self.cost_now_usd = math.inf
                continue
            self.cost_now_usd += cost
            column = CandidateGroup(
                mask=sum(1 << index for index in indices),
                members=indices,
                cost_usd=cost,
                num_train_nodes=len(group.train_nodes),
                num_rollout_nodes=len(group.rollout_nodes),
                pins=((),) * len(indices),
                is_colocated=group.is_colocated,
                group=group.id,
            )
            self._add(column, cost)

    def _add_alone(self, index: int) -> float:
        """The pipeline by itself; returns what that costs without the move."""
        layout = self._cheapest((index,), self._budgets_s[index])
        if layout is None:
            layout = min(self.book.layouts((self._kinds[index],)), key=lambda layout: layout.period_s)
        self._add(_column((index,), layout), layout.cost_usd + self._price_of_moves((index,), layout))
        return layout.cost_usd

    def _grow(self, last: int, indices: tuple[int, ...], budget_s: float, train_s: float) -> None:
        """Every set that begins with these and fits, by members in their order; the first trains on the most nodes."""
        num_train = self.members[indices[0]].pipeline.num_train_nodes
        for later in range(last + 1, len(self.members)):
            if (
                self._kinds[later] == self._kinds[last]
                and self._places[later] - self._places[last] > self.limits.window
            ):
                continue
            least_s = min(budget_s, self._budgets_s[later])
            load_s = train_s + self._train_s[later]
            if (
                load_s > least_s * num_train
                or self._solo_s[later] > least_s
                or max(self._solo_s[i] for i in indices) > least_s
            ):
                continue
            grown = (*indices, later)
            layout = self._cheapest(grown, least_s)
            if layout is None:
                continue
            self._offer(grown, layout)
            if len(grown) < self.limits.max_members:
                self._grow(later, grown, least_s, load_s)

    def _cheapest(self, indices: tuple[int, ...], budget_s: float) -> Layout | None:
        layouts = self.book.layouts(tuple([self._kinds[index] for index in indices]))
        for layout in layouts:
            if layout.period_s <= budget_s:
                return layout
        return None

    def _offer(self, indices: tuple[int, ...], layout: Layout) -> None:
        saved_usd = sum([self._alone_usd[index] for index in indices]) - layout.cost_usd
        if saved_usd <= 0.0:
            return
        moves_usd = self._price_of_moves(indices, layout)
        rank = (saved_usd - moves_usd) / len(indices)
        self._found.append((rank, layout.cost_usd + moves_usd, _column(indices, layout)))

    def _price_of_moves(self, indices: tuple[int, ...], layout: Layout) -> float:
        """The moves of all that are not in the group that can become this one and holds most of them."""
        staying: dict[GroupId, float] = {}
        for index in indices:
            placement = self.members[index].placement
            staying[placement.group] = staying.get(placement.group, 0.0) + self._moves_usd[index]
        most = 0.0
        for group_id, usd in staying.items():
            if usd > most:
                group = self.view.group(group_id)
                if group.is_colocated == layout.is_colocated:
                    most = usd
        return sum([self._moves_usd[index] for index in indices]) - most


def _column(indices: tuple[int, ...], layout: Layout) -> CandidateGroup:
    return CandidateGroup(
        mask=sum([1 << index for index in indices]),
        members=indices,
        cost_usd=layout.cost_usd,
        num_train_nodes=layout.num_train_nodes,
        num_rollout_nodes=layout.num_rollout_nodes,
        pins=layout.pins,
        train_pins=layout.train_pins,
        is_colocated=layout.is_colocated,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """Groups that exchange members, and their new composition."""

    groups: tuple[GroupLoad, ...]
    targets: tuple[CandidateGroup, ...]


def _parts(
    targets: Sequence[CandidateGroup], groups: Sequence[GroupLoad], names: Sequence[PipelineId]
) -> Iterator[_Part]:
    """The parts of a new partition in which something changes."""
    group_of = {member.pipeline.id: group for group in groups for member in group.members}
    open_targets = [target for target in targets if target.group is None]
    while open_targets:
        part = [open_targets.pop(0)]
        touched = {group_of[names[index]].id: group_of[names[index]] for index in part[0].members}
        grows = True
        while grows:
            joined = [
                target
                for target in open_targets
                if any(group_of[names[index]].id in touched for index in target.members)
            ]
            grows = bool(joined)
            open_targets = [target for target in open_targets if target not in joined]
            part += joined
            for target in joined:
                touched |= {group_of[names[index]].id: group_of[names[index]] for index in target.members}
        yield _Part(groups=tuple(touched[group_id] for group_id in sorted(touched)), targets=tuple(part))


def _carry_out(
    part: _Part, names: Sequence[PipelineId], economy: Economy, ledger: PlacementLedger
) -> tuple[Relocation, ...]:
    """Relocations of one part; () and an unchanged ledger where no way is found or they do not pay."""
    pipelines = [member.pipeline for group in part.groups for member in group.members]
    before_usd = sum(economy.cost_usd(group) for group in part.groups)
    is_late = not all(economy.keeps_budgets(group) for group in part.groups)
    with ledger.trial() as trial:
        relocations = relocations_to(
            targets_of(part.targets, names), ledger, max_detours=_MAX_DETOURS, accepts=economy.keeps_budgets
        )
        if relocations:
            after = {ledger.placement(pipeline.id).group: None for pipeline in pipelines}
            after_usd = sum(economy.cost_usd(ledger.group(group_id)) for group_id in after)
            moves_usd = sum(economy.move_usd(ledger.pipeline(relocation.pipeline)) for relocation in relocations)
            saves = before_usd - after_usd >= moves_usd
            trial.is_kept = is_late or (
                saves
                and _saves_to_the_end(part.groups, [ledger.group(group_id) for group_id in after], relocations, economy)
            )
    return relocations if trial.is_kept else ()


def _saves_to_the_end(
    before: Sequence[GroupLoad], after: Sequence[GroupLoad], relocations: Sequence[Relocation], economy: Economy
) -> bool:
    """Whether the moves still pay when all work that is left has been done, if no other pipeline comes.

    The price of slowness is that of a cluster on which others come; a pipeline that outlasts its group pays for whole
    nodes. True where so many pipelines are placed that others will.
    """
    view = economy.view
    if view.num_pipelines > MOST_PLAYED_OUT:
        return True
    once_usd = sum(economy.move_once_usd(view.pipeline(relocation.pipeline)) for relocation in relocations)
    after_usd = once_usd + sum(usd_to_the_end(group, view) for group in after)
    return after_usd <= sum(usd_to_the_end(group, view) for group in before)


def usd_to_the_end(group: GroupLoad, view: PlacementView) -> float:
    """Dollars of the group's nodes until its members' work is done, if none moves; infinite where that has no end."""
    lefts = {member.pipeline.id: view.work_left(member.pipeline.id) for member in group.members}
    num_left = {name: float(max(1, left.num_left)) if left else math.inf for name, left in lefts.items()}
    members, usd = group.members, 0.0
    while members:
        now = group_load(
            group.id,
            members,
            tuple(
                node
                for node in group.rollout_nodes
                if any(node in member.placement.rollout_nodes for member in members)
            ),
            tuple(
                node for node in group.train_nodes if any(node in member.placement.train_nodes for member in members)
            ),
            view.cluster,
        )
        step_s = {member.pipeline.id: now.period_s / member.steps_per_cycle for member in members}
        until_s = min(num_left[name] * step_s[name] for name in step_s)
        usd += now.usd_per_hour * until_s / 3600.0
        if until_s == math.inf:
            return usd
        num_left = {name: num_left[name] - until_s / step_s[name] for name in step_s}
        members = tuple(member for member in members if num_left[member.pipeline.id] > _ROUNDING)
    return usd
