"""A better partition of some groups' pipelines, and the way there: one move at a time, all SLOs kept in between.

    targets: groups as they should be ─▶ hosts: existing groups that become them ─▶ relocations in a valid order

A target's host is the existing group that shares most members with it and has as many training nodes; a
target without one is founded by its first mover. A move is valid when its new group keeps every SLO and has
the memory as things stand then. Where two groups wait for each other's room, one pipeline steps aside into
a group of its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from rlmux.core.errors import IllegalTransitionError
from rlmux.core.model import AdmissionKind, GroupId, NodeId, Phase, PipelineId, Placement
from rlmux.core.placement.choice import PlacementChoice, Relocation
from rlmux.core.placement.group_load import GroupLoad, slo_step_s
from rlmux.core.placement.placement_ledger import PlacementLedger
from rlmux.core.placement.view import PlacementView
from rlmux.policies.search.cycle_steps import CycleStepFinder
from rlmux.policies.search.partition import (
    CandidateGroup,
    NodePrices,
    PipelineDemand,
    candidate_groups,
    demand_of,
)
from rlmux.policies.search.set_partition import Partition, cheapest_partition

TIGHT_WEIGHT = 3.0
"""Moves that the move of a member without slack counts as."""


@dataclass(slots=True, kw_only=True)
class TargetGroup:
    """One group as it should be."""

    pins: Mapping[PipelineId, tuple[int, ...]]
    """Numbers of each member's rollout nodes within this target."""
    train_pins: Mapping[PipelineId, tuple[int, ...]]
    """Numbers of each member's training nodes within this target."""
    steps_per_cycle: Mapping[PipelineId, int]
    num_train_nodes: int
    is_colocated: bool
    host: GroupId | None = None
    nodes: dict[int, NodeId] = field(default_factory=dict)
    """Rollout nodes that exist already, by their number within this target."""
    train_nodes: dict[int, NodeId] = field(default_factory=dict)
    """Training nodes that exist already, by their number within this target."""


def targets_of(groups: Sequence[CandidateGroup], names: Sequence[PipelineId]) -> list[TargetGroup]:
    """The groups of a partition as targets; `names` are the pipelines of its demands."""
    return [
        TargetGroup(
            pins={names[i]: pins for i, pins in zip(candidate.members, candidate.pins, strict=True)},
            train_pins={
                names[i]: pins
                for i, pins in zip(
                    candidate.members,
                    candidate.train_pins or (tuple(range(candidate.num_train_nodes)),) * len(candidate.members),
                    strict=True,
                )
            },
            steps_per_cycle={
                names[i]: steps_per_cycle
                for i, steps_per_cycle in zip(
                    candidate.members, candidate.steps_per_cycle or (1,) * len(candidate.members), strict=True
                )
            },
            num_train_nodes=candidate.num_train_nodes,
            is_colocated=candidate.is_colocated,
        )
        for candidate in groups
    ]


def relocations_to(
    targets: Sequence[TargetGroup],
    ledger: PlacementLedger,
    max_detours: int = 2,
    accepts: Callable[[GroupLoad], bool] | None = None,
) -> tuple[Relocation, ...]:
    """Moves that lead the ledger, in a trial of the caller's, to the targets; () where no way is found.

    `accepts`: whether a group may be as a move leaves it; by default, whether its period keeps every SLO.
    """
    return _Regrouping(targets, ledger, accepts).run(max_detours)


class _Regrouping:
    """One attempt: it moves pipelines in a trial, one at a time, and keeps the relocations that were valid."""

    def __init__(
        self, targets: Sequence[TargetGroup], ledger: PlacementLedger, accepts: Callable[[GroupLoad], bool] | None
    ) -> None:
        self.ledger = ledger
        self.accepts = accepts
        self.relocations: list[Relocation] = []
        self.target_of = {name: target for target in targets for name in target.pins}
        _choose_hosts(targets, ledger, may_change_train_nodes=accepts is not None)
        for target in targets:
            if target.host is not None and not target.is_colocated:
                _keep_nodes(target, ledger)

    def run(self, max_detours: int) -> tuple[Relocation, ...]:
        pending = [name for name in self.target_of if not self._is_there(name)]
        while pending:
            left = [name for name in pending if not self._move_to_target(name)]
            if len(left) == len(pending):
                if max_detours == 0 or not self._step_aside(left):
                    return ()
                max_detours -= 1
            pending = left
        return tuple(self.relocations) if self._have_steps_of_targets() else ()

    def _have_steps_of_targets(self) -> bool:
        """Whether every member has ended up with its target's steps per cycle.

        It has not where a change of steps per cycle was all: no member moved then.
        """
        return all(
            self.ledger.member(name).steps_per_cycle == target.steps_per_cycle[name]
            for name, target in self.target_of.items()
        )

    def _is_there(self, name: PipelineId) -> bool:
        target = self.target_of[name]
        placement = self.ledger.placement(name)
        if placement.group != target.host:
            return False
        return target.is_colocated or _has_pins(placement, target, name)

    def _move_to_target(self, name: PipelineId) -> bool:
        target = self.target_of[name]
        pins, train_pins = target.pins[name], target.train_pins[name]
        if target.host is None:
            choice = PlacementChoice(
                kind=AdmissionKind.NEW,
                group=None,
                num_new_rollout_nodes=len(pins),  # none where both phases run on the training nodes
                num_new_train_nodes=len(train_pins),
                is_colocated=target.is_colocated,
            )
        else:
            known = tuple(target.nodes[number] for number in pins if number in target.nodes)
            train_nodes = tuple(target.train_nodes[number] for number in train_pins if number in target.train_nodes)
            group = self.ledger.group(target.host)
            choice = PlacementChoice(
                kind=AdmissionKind.DIRECT if len(known) == len(pins) else AdmissionKind.SCALED,
                group=target.host,
                rollout_nodes=known,
                num_new_rollout_nodes=len(pins) - len(known),
                train_nodes=train_nodes,
                num_new_train_nodes=len(train_pins) - len(train_nodes),
                steps_per_cycle=_steps_per_cycle_of(target, group, name),
            )
        if not self._try(name, choice):
            return False
        placement = self.ledger.placement(name)
        target.host = placement.group
        _number(target.nodes, pins, placement.rollout_nodes[len(choice.rollout_nodes) :])
        _number(target.train_nodes, train_pins, placement.train_nodes[len(choice.train_nodes) :])
        return True

    def _try(self, name: PipelineId, choice: PlacementChoice) -> bool:
        pipeline = self.ledger.pipeline(name)
        joins = choice.group is not None and choice.group != self.ledger.placement(name).group
        if choice.group is not None and joins and self.accepts is None:
            group = self.ledger.group(choice.group)
            has_one_step_each = all(count == 1 for _, count in choice.steps_per_cycle)
            if has_one_step_each and not group.keeps_slos_with(
                pipeline, choice.rollout_nodes, choice.num_new_rollout_nodes
            ):
                return False
        with self.ledger.trial() as trial:
            try:
                placement, _ = self.ledger.relocate(name, choice)
            except IllegalTransitionError:
                return False
            after = self.ledger.group(placement.group)
            trial.is_kept = self.accepts(after) if self.accepts else after.period_s <= after.budget_s
        if trial.is_kept:
            self.relocations.append(Relocation(pipeline=name, choice=choice))
        return trial.is_kept

    def _step_aside(self, pending: Sequence[PipelineId]) -> bool:
        """A pipeline that is in another's way leaves for a group of its own; its second move comes later."""
        for name in pending:
            group = self.ledger.group(self.ledger.placement(name).group)
            pipeline = self.ledger.pipeline(name)
            is_in_the_way = any(target.host == group.id for target in self.target_of.values())
            if group.num_members > 1 and is_in_the_way:
                choice = PlacementChoice(
                    kind=AdmissionKind.NEW,
                    group=None,
                    num_new_rollout_nodes=pipeline.num_rollout_nodes,
                    num_new_train_nodes=pipeline.num_train_nodes,
                )
                if self._try(name, choice):
                    return True
        return False


def _has_pins(placement: Placement, target: TargetGroup, name: PipelineId) -> bool:
    """Whether the pipeline is on its nodes of the target; a training stage takes all of its nodes, in any order."""
    trains_there = {target.train_nodes.get(number) for number in target.train_pins[name]} == set(placement.train_nodes)
    return trains_there and placement.rollout_nodes == tuple(target.nodes.get(number) for number in target.pins[name])


def _number(nodes: dict[int, NodeId], pins: Sequence[int], new_nodes: Sequence[NodeId]) -> None:
    """Give new nodes the numbers of the pins that had none."""
    nodes.update(zip([number for number in pins if number not in nodes], new_nodes, strict=False))


def move_weight(reach_s: float, tightest_s: float) -> float:
    """What moving a member counts; `reach_s` is the longest period that it accepts, `tightest_s` the least in its
    group.

    A move costs a wait for its slot in the new group. A member without slack there cannot make up for it: it counts
    more.
    """
    return TIGHT_WEIGHT if reach_s < 1.05 * tightest_s else 1.0


def _steps_per_cycle_of(
    target: TargetGroup, group: GroupLoad, newcomer: PipelineId
) -> tuple[tuple[PipelineId, int], ...]:
    """The target's steps per cycle, in its order, for the members that will be there; () where all have and had one."""
    present = {member.pipeline.id: member.steps_per_cycle for member in group.members} | {newcomer: 1}
    steps_per_cycle = tuple((name, count) for name, count in target.steps_per_cycle.items() if name in present)
    has_several = any(count > 1 for _, count in steps_per_cycle) or any(count > 1 for count in present.values())
    return steps_per_cycle if has_several else ()


def _choose_hosts(targets: Sequence[TargetGroup], ledger: PlacementLedger, *, may_change_train_nodes: bool) -> None:
    """Each group hosts at most one target: the most to keep in place first, older groups first among equals."""
    offers: list[tuple[float, GroupId, int]] = []
    for number, target in enumerate(targets):
        shared: dict[GroupId, float] = {}
        reach_s = {
            name: steps_per_cycle * slo_step_s(ledger.pipeline(name))
            for name, steps_per_cycle in target.steps_per_cycle.items()
        }
        tightest_s = min(reach_s.values())
        for name in target.pins:
            group_id = ledger.placement(name).group
            shared[group_id] = shared.get(group_id, 0.0) + move_weight(reach_s[name], tightest_s)
        for group_id, count in shared.items():
            group = ledger.group(group_id)
            is_alike = group.is_colocated == target.is_colocated and (
                may_change_train_nodes or len(group.train_nodes) == target.num_train_nodes
            )
            if is_alike:
                offers.append((-count, group_id, number))
    taken: set[GroupId] = set()
    for _, group_id, number in sorted(offers):
        if targets[number].host is None and group_id not in taken:
            targets[number].host = group_id
            taken.add(group_id)


def _keep_nodes(target: TargetGroup, ledger: PlacementLedger) -> None:
    """Number the host's nodes as the target does, so that as many members as possible stay put.

    Only nodes that a staying member holds are kept: the others leave with their last member.
    """
    stayers = [(name, placement) for name in target.pins if (placement := ledger.placement(name)).group == target.host]
    _number_held(target.nodes, [(target.pins[name], placement.rollout_nodes) for name, placement in stayers])
    _number_held(target.train_nodes, [(target.train_pins[name], placement.train_nodes) for name, placement in stayers])
    held = {node for name, placement in stayers if _has_pins(placement, target, name) for node in placement.nodes}
    for nodes in (target.nodes, target.train_nodes):
        for number, node in list(nodes.items()):
            if node not in held:
                del nodes[number]


def _number_held(numbered: dict[int, NodeId], stayers: Sequence[tuple[tuple[int, ...], tuple[NodeId, ...]]]) -> None:
    """Number the nodes that the stayers hold as the target does; those with most nodes first."""
    used: dict[NodeId, None] = {}
    for pins, nodes in sorted(stayers, key=lambda stayer: -len(stayer[1])):
        for number, node in zip(pins, nodes, strict=False):
            if number not in numbered and node not in used:
                numbered[number] = node
                used[node] = None


# --- the partition -------------------------------------------------------------------------------------------


def partition_of(
    groups: Sequence[GroupLoad],
    view: PlacementView,
    *,
    usd_per_move: float,
    max_search_nodes: int,
    step_finder: CycleStepFinder | None,
    slo_margin: float,
) -> tuple[list[PipelineId], Partition | None]:
    """These groups' pipelines, and their cheapest partition if it is cheaper than now, each move charged.

    `step_finder` adds groups in which members have different steps per cycle; None: one step each.
    """
    members = [member for group in groups for member in group.members]
    demands, prices = [demand_of(member.pipeline, slo_margin) for member in members], prices_of(view)
    if view.num_nodes(Phase.TRAIN) < math.inf:
        demands = [demand._replace(colocated_s=math.inf) for demand in demands]  # no other pipeline could join it
    candidates = candidate_groups(demands, prices, pack=step_finder.packing.pack if step_finder else None)
    if step_finder is not None:
        candidates += step_finder.candidate_groups(demands, prices, candidates)
    groups_by_index = [member.placement.group for member in members]
    costs = [
        candidate.cost_usd + usd_per_move * _moving_weight(candidate, demands, groups_by_index)
        for candidate in candidates
    ]
    partition = cheapest_partition(
        candidates,
        len(members),
        costs=costs,
        max_nodes=max_search_nodes,
        upper=sum(group.usd_per_hour for group in groups) - 1e-6,
    )
    return [member.pipeline.id for member in members], partition


def _moving_weight(
    candidate: CandidateGroup, demands: Sequence[PipelineDemand], groups_by_index: Sequence[GroupId]
) -> float:
    """What the moves that make this group count: of every member that is not in the group that will host it."""
    members = candidate.members
    reach_s = [demands[i].budget_s for i in members]
    if candidate.steps_per_cycle:
        reach_s = [count * budget_s for count, budget_s in zip(candidate.steps_per_cycle, reach_s, strict=True)]
    tightest_s = min(reach_s)
    moving = 0.0
    staying: dict[GroupId, float] = {}
    for i, longest_s in zip(members, reach_s, strict=True):
        weight = move_weight(longest_s, tightest_s)
        moving += weight
        staying[groups_by_index[i]] = staying.get(groups_by_index[i], 0.0) + weight
    return moving - max(staying.values())


def prices_of(view: PlacementView) -> NodePrices:
    rollout, train = view.cluster.pool_for(Phase.ROLLOUT), view.cluster.pool_for(Phase.TRAIN)
    return NodePrices(
        rollout_usd=rollout.usd_per_node_hour if rollout else 0.0,
        train_usd=train.usd_per_node_hour if train else 0.0,
        rollout_host_bytes=rollout.host_memory_bytes if rollout else 0.0,
        train_host_bytes=train.host_memory_bytes if train else 0.0,
        rollout_device_bytes=rollout.device_memory_bytes if rollout else 0.0,
        train_device_bytes=train.device_memory_bytes if train else 0.0,
    )
