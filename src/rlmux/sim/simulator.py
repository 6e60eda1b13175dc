"""The scheduler in virtual time: what a policy decides, what it costs, and which pipelines it slows.

    Kernel ──entry──▶ event ──▶ Scheduler.handle ──▶ actions ──▶ RunningOrders, SimPipelines, Collector
      ▲                                                                    │
      └──────────── the next progress report or end of each order ◀────────┘

    kernel.py           virtual time and the order of simultaneous things
    sim_orders.py   how far each order is, and at what rate it runs
    sim_state.py        what is kept of a pipeline: its placement, its paused work, its truth
    metrics.py          cost, slowdowns, utilization

A run is a function of (workload, policy, failures) alone. Simulation turns entries of the kernel into events and
actions into changes of the world; of the scheduler it reads the answers of `Scheduler.query` alone.

Not modelled: contention of several loads for one host's memory bus, a step's network traffic, and the switch at a
change of device fraction.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from rlmux.core import invariants
from rlmux.core.actions import (
    Action,
    Admit,
    ExpectLoss,
    ExpectSteps,
    MigrateShard,
    Park,
    Pause,
    Queue,
    Refuse,
    Release,
    Relocate,
    Remind,
    ReportPolicyFault,
    RunStage,
    SetDeviceFraction,
    Switch,
)
from rlmux.core.decision.policy import Policy
from rlmux.core.estimation.cycles import USER_CODE_PATIENCE_S
from rlmux.core.events import (
    ClientFinished,
    Event,
    NodeJoined,
    NodeLost,
    PipelineCancelled,
    PipelineParked,
    PipelineSubmitted,
    ReplyArrived,
    RewardOverdue,
    SharesSet,
    StageFinished,
    StagePaused,
    TimeReached,
    TrajectoriesMigrated,
    WorkArrived,
)
from rlmux.core.model import PHASE_BY_STAGE, DeviceId, NodeId, OrderId, PipelineId, PipelineStatus, Stage
from rlmux.core.scheduler import Scheduler
from rlmux.core.work import WorkState
from rlmux.policies import with_sharing
from rlmux.policies.max_min_fairness import FairShares
from rlmux.sim.clients import ClientBatch, SimClient
from rlmux.sim.kernel import ARRIVAL, DEPARTURE, NODE_CHANGE, WORK_ENDS, Kernel
from rlmux.sim.models.interference import InterferenceTable, estimated_table, fraction_grid, sharing_table
from rlmux.sim.models.rates import FractionRates, InterferenceRates, NeighbourRates, Rates
from rlmux.sim.models.work import DONE_S
from rlmux.sim.node_changes import ExpectedLoss, NodeChanges, NodeFailure, SpotFigures
from rlmux.sim.pauses import Pauses, SafePoint
from rlmux.sim.results.decision_cost import DecisionCost
from rlmux.sim.results.metrics import Collector
from rlmux.sim.results.result import SimResult
from rlmux.sim.sim_orders import SimOrders
from rlmux.sim.sim_state import Migration, PausedWork, SimOrder, SimPipeline
from rlmux.sim.spot_trace import PriceChange
from rlmux.sim.workloads.arrivals import Arrival, Workload

Observer = Callable[[Event, list[Action]], None]
"""Called after each event with the actions that answered it."""


class _Announcement(NamedTuple):
    """A client's announcement to come."""

    pipeline: SimPipeline
    batch: ClientBatch


def simulate(
    workload: Workload,
    policy: Policy,
    *,
    failures: Sequence[NodeFailure] = (),
    rescales_training: bool = False,
    interference: InterferenceTable | None = None,
    spans_until_s: float = 0.0,
    observer: Observer | None = None,
    checks: bool = False,
    decision_cost: DecisionCost | None = None,
) -> SimResult:
    """Run the workload under the policy until every pipeline is over.

    `rescales_training`: training on more nodes than requested is faster in proportion (the published
    replay does not do that). `interference`: slowdowns of orders on one device; by default they are estimated where
    the worlds name their GPU, else there are none. A policy that can share devices and has no table gets this one.
    What busy neighbours cost is part of the workload. `spans_until_s`: orders that begin before are kept for a Gantt
    chart. `checks`: every invariant of the scheduler is looked at after each event (slow). `decision_cost`: by default
    decisions take no time.
    """
    table = interference or _estimated(workload)
    rates: Rates[SimOrder] = FractionRates() if table is None else InterferenceRates(table)
    return Simulation(
        workload,
        _with_table(policy, table),
        rates=rates if workload.neighbours is None else NeighbourRates(workload.neighbours, rates),
        failures=failures,
        rescales_training=rescales_training,
        spans_until_s=spans_until_s,
        observer=observer,
        checks=checks,
        decision_cost=decision_cost,
    ).run()


def _estimated(workload: Workload) -> InterferenceTable | None:
    gpu = next((arrival.world.gpu for arrival in workload.arrivals if arrival.world.gpu), None)
    return None if gpu is None else estimated_table(fraction_grid(gpu))


def _with_table(policy: Policy, table: InterferenceTable | None) -> Policy:
    """The policy with this table, unless it was given one."""
    if table is None or policy.sharing is None or policy.sharing.entries:
        return policy
    has_halves = policy.splits_evenly
    return with_sharing(policy, sharing_table(table, table.grid.with_half() if has_halves else table.grid.usual()))


class Simulation:
    """One run of a workload under a policy; `simulate` makes one from the usual arguments."""

    def __init__(
        self,
        workload: Workload,
        policy: Policy,
        *,
        rates: Rates[SimOrder] | None = None,
        failures: Sequence[NodeFailure] = (),
        rescales_training: bool = False,
        spans_until_s: float = 0.0,
        observer: Observer | None = None,
        checks: bool = False,
        decision_cost: DecisionCost | None = None,
    ) -> None:
        """`rates`: by default orders do not slow each other."""
        self.scheduler = Scheduler(workload.cluster, policy, FairShares(), raises_policy_faults=checks)
        self.pipelines: dict[PipelineId, SimPipeline] = {}
        self.migrations: dict[OrderId, Migration] = {}
        """Migrations by order, until their trajectories arrive."""
        self.collector = Collector(workload, policy.name, self.scheduler.query.placement)
        self._kernel = Kernel()
        self.running = SimOrders(
            self._kernel,
            rates or FractionRates(),
            self.collector,
            reacts_to_progress=policy.reacts_to_progress,
            spans_until_s=spans_until_s,
        )
        self._pauses = Pauses(self._kernel, self.running, self._schedule_reply)
        self._workload = workload
        self._rescales_training = rescales_training
        self._decision_cost = decision_cost
        self._observer = observer
        self._checks = checks
        self._num_devices = sum(
            (pool.num_nodes or 0) * pool.devices_per_node for pool in workload.cluster.pools.values()
        )
        self._num_over = 0
        self._carry_out: dict[type, Callable[[Any], None]] = {
            RunStage: self._run_stage,
            Admit: self._admit,
            Relocate: self._admit,
            Park: self._park,
            Remind: self._remind,
            ExpectLoss: lambda action: self._nodes.expect_loss(action),
            Release: self._release,
            Refuse: self._refuse,
            Queue: self._count_wait,
            Pause: lambda action: self._pauses.pause(action.order),
            MigrateShard: self._migrate,
            SetDeviceFraction: self._set_device_fraction,
            ExpectSteps: lambda _: None,  # the collector reads what is expected from the placements
            ReportPolicyFault: lambda _: None,  # the result counts all of them, not only those that are reported
        }
        self._nodes = NodeChanges(self._kernel, workload.cluster, workload.spot, failures)
        self._spot_figures = SpotFigures(self.scheduler.query, self._pinned_to)
        self._schedule_inputs()

    def _schedule_inputs(self) -> None:
        """Schedule what comes from outside: arrivals, and what users are entitled to."""
        schedule = self._kernel.schedule
        for arrival in self._workload.arrivals:
            schedule(arrival.submit_s, ARRIVAL, arrival)
        if self._workload.shares is not None:
            schedule(0.0, NODE_CHANGE, SharesSet(time_s=0.0, shares=self._workload.shares))
        if self._workload.usage is not None:
            schedule(0.0, NODE_CHANGE, replace(self._workload.usage, time_s=0.0))

    def run(self) -> SimResult:
        """Handle one event after another until every pipeline is over."""
        began = time.perf_counter()
        carry_out, num_arrivals = self._carry_out, len(self._workload.arrivals)
        is_watched, has_spot = self._observer is not None or self._checks, self._workload.spot is not None
        num_events = 0
        while self._num_over < num_arrivals and (event := self._next_event()) is not None:
            num_events += 1
            if has_spot:
                self._spot_figures.observe(event)
            actions = self._decide(event)
            for action in actions:
                carry_out[type(action)](action)
            if is_watched:
                self._observe(event, actions)
            if type(event) is NodeLost or type(event) is PipelineParked:
                status = self.scheduler.query.status
                waiting = [name for name in self.pipelines if status(name) is PipelineStatus.WAITING]
                self.collector.lose_nodes(waiting, self._kernel.now_s)
        result = self.collector.result(
            self._kernel.now_s, num_events, time.perf_counter() - began, spot=self._spot_figures
        )
        query = self.scheduler.query
        return replace(result, num_policy_faults=query.num_policy_faults, first_policy_fault=query.first_policy_fault)

    def _next_event(self) -> Event | None:
        """What happens next; None when nothing is left to happen."""
        kernel = self._kernel
        while kernel:
            what, entry = kernel.pop()
            event = self.running.next_event(what, entry) if type(what) is SimOrder else self._event_of(what)
            if event is not None:
                if type(event) is StageFinished and what.pipeline.client is not None:
                    self._resume_client(what.pipeline, what.pipeline.batch_of(what.action))
                return event
        return None

    def _observe(self, event: Event, actions: list[Action]) -> None:
        if self._observer is not None:
            self._observer(event, actions)
        if self._checks:
            invariants.check(self.scheduler)

    # ------------------------------------------------------------------ decisions

    def _decide(self, event: Event) -> list[Action]:
        if type(event) is PipelineSubmitted:
            return self._decide_on_arrival(event)
        if self._decision_cost is not None:
            return self._decide_at_a_cost(event, self._decision_cost)
        return self.scheduler.handle(event)

    def _decide_on_arrival(self, event: Event) -> list[Action]:
        """Handle an arrival against the clock: what a placement takes is one of the figures."""
        began = time.perf_counter()
        actions = self.scheduler.handle(event)
        self.collector.decision_ms.append((time.perf_counter() - began) * 1e3)
        return actions

    def _decide_at_a_cost(self, event: Event, decision_cost: DecisionCost) -> list[Action]:
        """Where the controller needs a core and every core is busy, each order loses its part of the seconds."""
        actions, seconds = decision_cost.decide(self.scheduler.handle, event, self._kernel.now_s)
        if seconds > 0.0 and decision_cost.takes_cores:
            busy = [order for order in self.running if order.devices and not order.is_waiting]
            if len({device for order in busy for device in order.devices}) >= self._num_devices:
                self.running.delay_computing(busy, seconds / self._num_devices)
        return actions

    # ------------------------------------------------------------------ from the kernel to events

    def _event_of(self, what: Any) -> Event | None:
        """The event of an entry that is no running order; None: it is stale."""
        match what:
            case Arrival():
                return self._submit(what)
            case SimPipeline():
                return self._depart(what)
            case ExpectedLoss():
                loss = self._nodes.loss(what)
                return None if loss is None else self._lose(loss)
            case NodeLost():
                return self._lose(what)
            case NodeJoined():
                self._nodes.forget(what.node)
            case PriceChange():
                self.collector.set_price(what.pool, what.usd_per_gpu_hour, self._kernel.now_s)
                return None
            case _Announcement():
                return self._announce(what)
            case SafePoint():
                return self._pauses.at(what)
            case StagePaused():
                if not self._pauses.take(what):
                    return None
            case ReplyArrived():
                if not self._is_awaited(what):
                    return None
            case RewardOverdue():
                if not self.scheduler.query.has_order(what.order):
                    return None
            case TrajectoriesMigrated():
                migration = self.migrations.pop(what.order, None)
                if migration is None:
                    return None
                self._deliver(migration)
        event: Event = what
        return event

    def _submit(self, arrival: Arrival) -> Event:
        pipeline = arrival.pipeline
        sim_pipeline = self.pipelines[pipeline.id] = SimPipeline(arrival, pipeline.stages[-1], arrival.world)
        sim_pipeline.client = SimClient(arrival.batches) if pipeline.work_arrives else None
        if arrival.depart_s is not None:
            self._kernel.schedule(arrival.depart_s, DEPARTURE, sim_pipeline)
        self.collector.submit(pipeline.id, arrival)
        return PipelineSubmitted(time_s=self._kernel.now_s, pipeline=pipeline)

    def _resume_client(self, sim_pipeline: SimPipeline, ended: int | None) -> None:
        """A batch of the client has ended, or (None) its pipeline is admitted: it thinks, then announces the next."""
        client, now_s = sim_pipeline.client, self._kernel.now_s
        assert client is not None
        if ended is not None and client.end(ended):
            done = ClientFinished(time_s=now_s, pipeline=sim_pipeline.arrival.pipeline.id)
            self._kernel.schedule(now_s, WORK_ENDS, done)
        for batch in client.after(ended):
            self._kernel.schedule(now_s + batch.think_s, WORK_ENDS, _Announcement(sim_pipeline, batch))

    def _announce(self, announcement: _Announcement) -> Event | None:
        sim_pipeline, batch = announcement
        assert sim_pipeline.client is not None
        sim_pipeline.client.announce(batch)
        return WorkArrived(time_s=self._kernel.now_s, pipeline=sim_pipeline.arrival.pipeline.id, phases=batch.kind)

    def _depart(self, sim_pipeline: SimPipeline) -> Event | None:
        if sim_pipeline.is_over:
            return None
        pipeline = sim_pipeline.arrival.pipeline.id
        if self.scheduler.query.status(pipeline) is PipelineStatus.WAITING:
            self._end(sim_pipeline)
        return PipelineCancelled(time_s=self._kernel.now_s, pipeline=pipeline)

    def _is_awaited(self, reply: ReplyArrived) -> bool:
        """Whether the scheduler still waits for this reply, and not for one after a later pause."""
        state = self.scheduler.query.shard_state(reply.pipeline, reply.device)
        paused = self.pipelines[reply.pipeline].paused.get(reply.device)
        if state is not WorkState.WAITING_FOR_ENV or paused is None:
            return False
        return paused.work.idle_s - (self._kernel.now_s - paused.advanced_to_s) <= DONE_S

    def _lose(self, loss: NodeLost) -> Event:
        """Drop what every pipeline pinned to the node was doing; the scheduler takes those orders as ended."""
        self._nodes.forget(loss.node)
        self._drop_work(self._pinned_to(loss.node))
        return loss

    def _drop_work(self, hit: Sequence[SimPipeline]) -> None:
        for sim_pipeline in hit:
            sim_pipeline.paused.clear()
        for running in self.running:
            if running.pipeline in hit:
                self.running.advance(running)
                self.running.stop(running)
        self.migrations = {order: moving for order, moving in self.migrations.items() if moving.pipeline not in hit}
        self._pauses.drop(hit)

    def _pinned_to(self, node: NodeId) -> list[SimPipeline]:
        """Pipelines and fillers on the node, or about to relocate to it."""
        return [pinned for pinned in self.pipelines.values() if not pinned.is_over and self._is_pinned(pinned, node)]

    def _is_pinned(self, sim_pipeline: SimPipeline, node: NodeId) -> bool:
        """Whether the pipeline is on the node, or about to relocate to it."""
        pipeline, placements = sim_pipeline.arrival.pipeline.id, self.scheduler.query.placement
        if sim_pipeline.placement is None or pipeline not in placements:
            return False
        return node in sim_pipeline.placement.nodes or node in placements.placement(pipeline).nodes

    # ------------------------------------------------------------------ from actions to the world: placement

    def _admit(self, action: Admit | Relocate) -> None:
        sim_pipeline = self.pipelines[action.pipeline]
        is_first = sim_pipeline.placement is None
        sim_pipeline.placement = placement = action.placement
        pools = self._workload.cluster.pools
        sim_pipeline.rollout_devices = tuple(
            device for node in placement.rollout_nodes for device in pools[node.pool].devices(node)
        )
        sim_pipeline.num_train_devices = sum(pools[node.pool].devices_per_node for node in placement.train_nodes)
        if sim_pipeline.client is not None and is_first:
            self._resume_client(sim_pipeline, None)
        arrival = sim_pipeline.arrival
        is_colocated = set(placement.train_nodes) <= set(placement.rollout_nodes)
        sim_pipeline.world = (arrival.colocated_world if is_colocated else None) or arrival.world
        if self._rescales_training and not is_colocated:
            sim_pipeline.train_scale = arrival.pipeline.num_train_nodes / len(placement.train_nodes)
        self.collector.place(action, self._kernel.now_s)

    def _park(self, action: Park) -> None:
        """Park it at once: at a step boundary it has no work; a filler leaves what it has begun."""
        if not action.is_awaited:
            self._drop_work([self.pipelines[action.pipeline]])
        else:
            now_s = self._kernel.now_s
            self._kernel.schedule(now_s, NODE_CHANGE, PipelineParked(time_s=now_s, pipeline=action.pipeline))

    def _remind(self, action: Remind) -> None:
        self._kernel.schedule(action.at_s, NODE_CHANGE, TimeReached(time_s=action.at_s))

    def _release(self, action: Release) -> None:
        self.collector.release(action, self._kernel.now_s)
        self._end(self.pipelines[action.pipeline])

    def _refuse(self, action: Refuse) -> None:
        self.collector.refuse(action.pipeline, action.reason)
        self._end(self.pipelines[action.pipeline])

    def _count_wait(self, action: Queue) -> None:
        self.collector.num_waits += 1

    def _end(self, sim_pipeline: SimPipeline) -> None:
        sim_pipeline.is_over = True
        self.collector.leave(sim_pipeline.arrival.pipeline.id, self._kernel.now_s)
        self._num_over += 1

    # ------------------------------------------------------------------ from actions to the world: work

    def _run_stage(self, action: RunStage) -> None:
        sim_pipeline, now_s = self.pipelines[action.pipeline], self._kernel.now_s
        if not sim_pipeline.has_started:
            sim_pipeline.has_started = True
            self.collector.start(action.pipeline, now_s)
        switch_s = 0.0
        if action.switch is not Switch.NONE:
            is_warm = action.switch is Switch.WARM
            switch_s = sim_pipeline.arrival.switch.seconds(PHASE_BY_STAGE[action.stage], is_warm=is_warm)
        work = sim_pipeline.resume(action, now_s + switch_s) or sim_pipeline.fresh_work(action)
        running = SimOrder(action, sim_pipeline, work, now_s, switch_s, now_s + switch_s, action.device_fraction or 1.0)
        if self._decision_cost is not None:
            self.running.delay(running, self._decision_cost.delay_s(now_s))
        self.running.begin(running)
        if action.stage is Stage.REWARD and work.until_over(1.0) > USER_CODE_PATIENCE_S:
            overdue_s = now_s + USER_CODE_PATIENCE_S
            self._kernel.schedule(overdue_s, WORK_ENDS, RewardOverdue(time_s=overdue_s, order=action.order))

    def _set_device_fraction(self, action: SetDeviceFraction) -> None:
        self.running.set_device_fraction(action.order, action.device_fraction)

    def _schedule_reply(self, pipeline: PipelineId, device: DeviceId, idle_s: float) -> None:
        """Let an environment reply to the rollout shard that is paused on the device."""
        reply_s = self._kernel.now_s + idle_s
        self._kernel.schedule(reply_s, WORK_ENDS, ReplyArrived(time_s=reply_s, pipeline=pipeline, device=device))

    def _migrate(self, action: MigrateShard) -> None:
        sim_pipeline, now_s = self.pipelines[action.pipeline], self._kernel.now_s
        paused = sim_pipeline.paused.pop(action.source, None)
        if paused is None:  # not begun: there is no context to move or to compute again
            moved = sim_pipeline.fresh_shard(action.step, action.source).take()
            on_the_way_s = cost_s = 0.0
        else:
            paused.advance(now_s)
            moved = paused.work.take()
            on_the_way_s, cost_s = sim_pipeline.world.migration_s(moved, copies_kv=action.copies_kv)
        self.migrations[action.order] = Migration(action, sim_pipeline, moved, cost_s)
        self.collector.num_migrations += 1
        done = TrajectoriesMigrated(
            time_s=now_s + on_the_way_s,
            order=action.order,
            num_trajectories=len(moved),
            seconds=on_the_way_s + cost_s,
            num_begun=0 if paused is None else len(moved),
        )
        self._kernel.schedule(done.time_s, WORK_ENDS, done)

    def _deliver(self, migration: Migration) -> None:
        """Spread migrated trajectories over the targets."""
        targets, moved = migration.action.targets, migration.trajectories
        for number, target in enumerate(targets):
            part = moved[number :: len(targets)]
            self._give(migration, target, part, migration.cost_s * len(part) / max(len(moved), 1))

    def _give(self, migration: Migration, target: DeviceId, moved: Sequence[Any], cost_s: float) -> None:
        """Give trajectories to the order that decodes on the target, or keep them there as paused work."""
        action, sim_pipeline = migration.action, migration.pipeline
        for running in self.running:
            if running.pipeline is sim_pipeline and running.devices == (target,) and running.is_rollout:
                self.running.advance(running)
                running.work.give(moved, cost_s)
                self.running.change(running)
                return
        now_s = self._kernel.now_s
        paused = sim_pipeline.paused.get(target)
        if paused is None:
            paused = PausedWork(sim_pipeline.fresh_shard(action.step, target), now_s)
            if self.scheduler.query.shard_state(action.pipeline, target) in (None, WorkState.DONE):
                paused.work.take()  # none of the target's own trajectories is left
            sim_pipeline.paused[target] = paused
        paused.advance(now_s)
        paused.work.give(moved, cost_s)
        self._schedule_reply(action.pipeline, target, paused.work.idle_s)
