"""A policy's choices for a group become orders; each is checked here first.

GroupView ──▶ Policy.dispatch ──▶ RunWork | PauseOrder | MigrateWork | ChangeFraction ──▶ Orders, by the step machine

No policy sees fillers. Where one computes on a device that is chosen, it is told to pause, and the policy is asked
again once it has.
"""

from __future__ import annotations

from rlmux.core.groups import Groups
from rlmux.core.journal import Journal
from rlmux.core.leases import Leases
from rlmux.core.model import Phase
from rlmux.core.orders import Orders
from rlmux.core.policy import Policy
from rlmux.core.state import GroupState, ReadyWork, SchedulerState
from rlmux.core.step_machine import StepMachine
from rlmux.core.views import MarkPlanned, MigrateWork, PauseOrder, RunWork


class Dispatcher:
    """Carries out what the policy chooses; see the module. Raises IllegalTransitionError for what is not allowed."""

    def __init__(
        self,
        state: SchedulerState,
        policy: Policy,
        groups: Groups,
        orders: Orders,
        steps: StepMachine,
        leases: Leases,
        journal: Journal,
    ) -> None:
        self._state = state
        self._policy = policy
        self._groups = groups
        self._orders = orders
        self._steps = steps
        self._leases = leases
        self._journal = journal

    def dispatch(self, group: GroupState) -> None:
        """Ask the policy what of the group starts, pauses or migrates now, and order it."""
        if group is self._state.fillers:
            return  # `Fillers` starts their work, at the end of each event
        if not group.ready and not (self._policy.reacts_to_progress and group.running):
            return
        view = self._groups.view(group)
        is_all_started, planned = True, (group.planned, group.planned_s)
        for choice in self._policy.dispatch(view):
            if isinstance(choice, RunWork):
                is_all_started &= self._start(group, choice)
            elif isinstance(choice, PauseOrder):
                self._pause(choice)
            elif isinstance(choice, MigrateWork):
                self._migrate(choice)
            elif isinstance(choice, MarkPlanned):
                group.planned, group.planned_s = view.look, self._state.now_s
            else:
                self._orders.change_fraction(self._orders.named(choice.order), choice.device_fraction, choice.slowdown)
        if not is_all_started:  # a filler is leaving: then the policy plans again
            group.planned, group.planned_s = planned
        self._leases.prefetch(group)

    def _start(self, group: GroupState, choice: RunWork) -> bool:
        """Start the work, or have fillers leave its devices for it; returns whether it was started."""
        work = choice.work
        if group.ready.get(work.sequence) is not work:
            raise self._journal.illegal_choice(f"starts {work}, which is not ready")
        if self._state.fillers.running and self._sends_fillers_away(group, work):
            return False
        del group.ready[work.sequence]
        run = self._state.runs[work.pipeline]
        self._steps.start(run, work, choice.device_fraction, choice.slowdown)
        if work.takes_slot:
            for device in work.devices:
                run.phases_started[work.phase, device] += 1
        return True

    def _sends_fillers_away(self, group: GroupState, work: ReadyWork) -> bool:
        """Whether a filler computes on a device of the work: it leaves at its next safe point."""
        is_any_there = False
        for device in work.devices:
            filler = self._state.devices[device].filler
            if filler is not None:
                is_any_there = True
                self._state.wanted_by[device] = group.id
                self._steps.order_pause(self._orders.named(filler))
        return is_any_there

    def _pause(self, choice: PauseOrder) -> None:
        order = self._orders.named(choice.order)
        target = choice.migrate_to
        if target is not None:
            shards = self._state.runs[order.pipeline].shards
            if order.phase is not Phase.ROLLOUT or target not in shards or target in order.devices:
                raise self._journal.illegal_choice(f"pauses {order} to migrate its shard to {target}")
        self._steps.order_pause(order, migrate_to=target)

    def _migrate(self, choice: MigrateWork) -> None:
        run = self._state.runs.get(choice.pipeline)
        if run is None:
            raise self._journal.illegal_choice(f"migrates {choice}: no such pipeline was submitted")
        shard = run.shards.get(choice.source)
        if shard is None or not shard.is_ready or choice.target not in run.shards or choice.target == choice.source:
            raise self._journal.illegal_choice(f"migrates {choice}: the source must be a ready shard")
        if not self._state.can_migrate(run, choice.source, choice.target):
            raise self._journal.illegal_choice(f"migrates {choice}: trajectories are on their way to one that leaves")
        if shard.work.takes_slot:  # its phase begins elsewhere: the device owes it no slot in this cycle
            run.phases_started[Phase.ROLLOUT, choice.source] += 1
        self._steps.order_migration(run, shard, choice.target, copies_kv=choice.copies_kv)
