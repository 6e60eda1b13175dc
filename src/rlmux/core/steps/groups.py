"""Co-execution groups as they run: their members by device, and which member is next in the cycle.

    join ─▶ member ─▶ leave            the first member founds the group, the last one dissolves it

A pipeline counts the phases it has begun on each of its devices. In a strict meta-iteration the member is next whose
count, over its steps per cycle, is the smallest.
"""

from __future__ import annotations

import math

from rlmux.core.decision.views import GroupView
from rlmux.core.model import Cluster, DeviceId, GroupId, Phase, Placement
from rlmux.core.pipeline_run import PipelineRun, device_keys
from rlmux.core.placement.group_snapshot import NO_MEMBERS, MemberFacts
from rlmux.core.placement.placement_ledger import PlacementLedger
from rlmux.core.queue.fair_share import Shares
from rlmux.core.state import GroupState, SchedulerState
from rlmux.core.steps.leases import Leases
from rlmux.core.work import ReadyWork


class Groups:
    """Owns the groups' members and the counts of the cycle; see the module."""

    def __init__(
        self, cluster: Cluster, state: SchedulerState, ledger: PlacementLedger, leases: Leases, shares: Shares
    ) -> None:
        self._cluster = cluster
        self._state = state
        self._ledger = ledger
        self._leases = leases
        self._shares = shares
        self._views: dict[GroupId, GroupView] = {}

    def view(self, group: GroupState) -> GroupView:
        """What a policy sees of the group."""
        return self._views[group.id]

    def join(self, run: PipelineRun, placement: Placement) -> None:
        """Make the pipeline a member of the group that its placement names."""
        self._pin(run, placement)
        group = self._state.groups.setdefault(placement.group, GroupState(placement.group))
        if group.id not in self._views:
            self._views[group.id] = GroupView(self._state, group)
        self._shares.hold(run.nodes.rollout_devices + run.nodes.train_devices, group)
        _begin_as_newcomer(group, run)
        for key in run.cycle.phases_started:
            group.members_by_device.setdefault(key, {})[run.pipeline.id] = run
        group.members[run.pipeline.id] = run
        group.facts = _facts_of(group)
        self.refresh_cycle(group, has_newcomer=True)

    def leave(self, run: PipelineRun) -> GroupState:
        """Take the pipeline, which has no ready work, out of its group; returns the group."""
        group = self._state.group_of(run)
        self._shares.charge(run.nodes.rollout_devices + run.nodes.train_devices)
        for key in device_keys(run):
            pinned = group.members_by_device[key]
            del pinned[run.pipeline.id]
            if not pinned:
                del group.members_by_device[key]
        del group.members[run.pipeline.id]
        group.facts = _facts_of(group)
        self._shares.let_go(run.nodes.rollout_devices + run.nodes.train_devices)
        if not group.members:
            del self._state.groups[group.id]
            del self._views[group.id]
        self._leases.forget_states(run)
        run.nodes.placement = None
        run.cycle.phases_started.clear()
        run.cycle.steps_per_cycle = 1
        return group

    def join_fillers(self, run: PipelineRun, placement: Placement) -> None:
        """Pin a filler; no policy sees it."""
        self._pin(run, placement)
        self._state.fillers.members[run.pipeline.id] = run

    def leave_fillers(self, run: PipelineRun) -> None:
        self._leases.forget_states(run)
        del self._state.fillers.members[run.pipeline.id]
        run.nodes.placement, run.nodes.rollout_devices = None, ()

    def plan_move(self, run: PipelineRun, placement: Placement | None) -> None:
        """Have the pipeline relocate there at its next step boundary; None: it stays."""
        run.nodes.next_placement = placement

    def count_begun(self, run: PipelineRun, phase: Phase, device: DeviceId) -> None:
        """The pipeline begins its phase on the device, which is one slot of its cycle."""
        run.cycle.phases_started[phase, device] += 1

    def _pin(self, run: PipelineRun, placement: Placement) -> None:
        pools = self._cluster.pools
        run.nodes.placement = placement
        run.nodes.rollout_devices = tuple(d for node in placement.rollout_nodes for d in pools[node.pool].devices(node))
        run.nodes.train_devices = tuple(d for node in placement.train_nodes for d in pools[node.pool].devices(node))
        self._leases.add_devices(placement)

    def rejoin_cycle(self, run: PipelineRun) -> None:
        """Count a member that was restarted as a newcomer."""
        group = self._state.group_of(run)
        _begin_as_newcomer(group, run)
        self.refresh_cycle(group, has_newcomer=True)

    def catch_up(self, run: PipelineRun) -> None:
        """Give a member that was passed over while it waited for its user code the slots of the cycle under way.

        It counts as begun what the others went ahead of it by whole cycles, and is next. Otherwise they would wait
        until it had caught up with all that they did meanwhile.
        """
        group = self._state.group_of(run)
        if len(group.members) == 1 or not run.nodes.train_devices:
            return
        if group.facts.has_arriving_work:
            for key in device_keys(run):
                _level(group, run, key)
            return
        ahead = min(_cycles_ahead(other, run) for other in group.members.values() if other is not run)
        if ahead > 0:
            shift = ahead * run.cycle.steps_per_cycle
            run.cycle.phases_started = {key: count + shift for key, count in run.cycle.phases_started.items()}

    def level(self, run: PipelineRun, work: ReadyWork) -> None:
        """Give work that arrived the last slot of the cycle under way: what its client's thinking let pass is lost.

        Otherwise the others would wait until it had caught up with all that they did meanwhile.
        """
        group = self._state.group_of(run)
        for device in work.devices:
            _level(group, run, (work.phase, device))

    def refresh_cycle(self, group: GroupState, *, has_newcomer: bool = False) -> None:
        """Copy the members' steps per cycle and order from the ledger; where they changed, the meta-iteration begins
        anew.

        A rollout that a member has begun and not trained on yet stays counted; the phases of a client have nothing to
        do with each other, and all of them begin anew. A member with fewer steps per cycle
        than others and no trajectories to train on yet comes last: the others go through their steps while it rolls
        out.
        """
        if not self._ledger.has_group(group.id):
            return  # in the ledger all members are relocated; their last steps end here
        has_changed = False
        self.refresh_tails(group)
        for cycle_index, member in enumerate(self._ledger.group(group.id).members):
            run = group.members.get(member.pipeline.id)
            if run is not None:
                has_changed |= run.cycle.steps_per_cycle != member.steps_per_cycle
                run.cycle.cycle_index, run.cycle.steps_per_cycle = cycle_index, member.steps_per_cycle
        most_steps_per_cycle = max((run.cycle.steps_per_cycle for run in group.members.values()), default=1)
        if has_changed or (most_steps_per_cycle > 1 and has_newcomer):
            for run in group.members.values():
                is_last = run.cycle.steps_per_cycle < most_steps_per_cycle and not run.step.training.is_open
                first, least = run.cycle.steps_per_cycle if is_last else 0, min(run.cycle.phases_started.values())
                for key, count in run.cycle.phases_started.items():
                    run.cycle.phases_started[key] = first + (0 if run.pipeline.work_arrives else count - least)

    def refresh_tails(self, group: GroupState) -> None:
        """Copy from the ledger when rollouts of the group leave their nodes to the next member's."""
        if self._ledger.has_group(group.id):
            group.tail_left = self._ledger.group(group.id).tail_left


def _facts_of(group: GroupState) -> MemberFacts:
    runs = list(group.members.values())
    if not runs:
        return NO_MEMBERS
    return MemberFacts(
        has_arriving_work=any(run.pipeline.work_arrives for run in runs),
        has_wide_rollouts=any(len(run.nodes.rollout_devices) > 1 for run in runs),
        has_tails=any(run.pipeline.tail is not None for run in runs),
        serves_both_phases=set(runs[0].nodes.train_devices) <= set(runs[0].nodes.rollout_devices),
    )


def _cycles_ahead(other: PipelineRun, run: PipelineRun) -> int:
    """Whole cycles by which the other's next training slot is beyond where the cyclic order has it."""
    cycle, other_cycle = (
        min(each.cycle.phases_started[Phase.TRAIN, device] for device in each.nodes.train_devices)
        // each.cycle.steps_per_cycle
        for each in (run, other)
    )
    return other_cycle - cycle - (other.cycle.cycle_index < run.cycle.cycle_index)


def _begin_as_newcomer(group: GroupState, run: PipelineRun) -> None:
    """Give a member the last slot of the cycle under way. Clients keep no more than one cycle of what they are ahead:
    they would wait until it had caught up."""
    num_started = _newcomer_phases_started(group)
    for other in group.members.values():
        if other.pipeline.work_arrives:
            for key, count in other.cycle.phases_started.items():
                other.cycle.phases_started[key] = min(count, num_started + 1)
    run.cycle.phases_started = dict.fromkeys(device_keys(run), num_started)


def _newcomer_phases_started(group: GroupState) -> int:
    """What a newcomer counts as begun: it takes the last slot of the cycle under way.

    One number for all its devices, so that its slots in rollout and in training belong to the same cycle. Were its
    first training phase counted into another cycle than its first rollout, each pool would wait for the other and the
    group would run one phase at a time for ever.
    """
    planned = [run for run in group.members.values() if not run.pipeline.work_arrives]
    started = [
        count
        for run in planned or group.members.values()
        for (phase, _), count in run.cycle.phases_started.items()
        if phase is Phase.ROLLOUT
    ]
    return max(0, min(max(started) - 1, min(started))) if started else 0  # a member that filled gaps is ahead


def _level(group: GroupState, run: PipelineRun, key: tuple[Phase, DeviceId]) -> None:
    """Count as begun, on one device, all but the last cycle that the member furthest ahead there has begun."""
    furthest = (
        max(
            other.cycle.phases_started[key] / other.cycle.steps_per_cycle
            for pipeline, other in group.members_by_device[key].items()
            if pipeline != run.pipeline.id
        )
        if len(group.members_by_device[key]) > 1
        else 0.0
    )
    least = math.floor((furthest - 1.0) * run.cycle.steps_per_cycle)
    run.cycle.phases_started[key] = max(run.cycle.phases_started[key], least)
