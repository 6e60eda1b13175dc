"""The scheduler in virtual time: what a policy would do, what it would cost, and who would wait.

    heap of (time, priority, number, what) ─▶ event ─▶ Scheduler.handle ─▶ actions ─▶ orders under way ─┐
       ▲                                                                                                │
       └──────────── the next end, or news, of each order, at the pace it has beside the others ◀───────┘

At one instant, work ends before pipelines depart, these before nodes fail or return, these before pipelines
arrive; what is still equal goes in the order in which it was scheduled. So a run is a function of
(workload, policy) alone.

What is left of an order is a `Remaining` that the arrival's world made: a number of seconds, one for each trajectory,
or an engine with sequences, slots and tools (remaining.py). How fast it goes is a `Pace`'s affair (pace.py). Loading
state onto devices takes what the arrival's `SwitchSeconds` say.

Not modelled: contention of several loads for one host's memory bus, a step's network traffic, and the switch at a
change of device fraction.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Any

from rlmux.core import invariants
from rlmux.core.actions import (
    Action,
    Admit,
    MigrateShard,
    Pause,
    Prefetch,
    Queue,
    Refuse,
    Release,
    Relocate,
    RunStage,
    SetDeviceFraction,
    Switch,
)
from rlmux.core.events import (
    ChunkFinished,
    Event,
    NodeJoined,
    NodeLost,
    PipelineCancelled,
    PipelineSubmitted,
    ReplyArrived,
    StageFinished,
    StagePaused,
    TrajectoriesMigrated,
)
from rlmux.core.model import PHASE_BY_STAGE, DeviceId, NodeId, OrderId, PipelineId, PipelineStatus, Stage, SubStage
from rlmux.core.policy import Policy
from rlmux.core.scheduler import Scheduler
from rlmux.core.state import WorkState
from rlmux.policies import with_sharing
from rlmux.sim.decision_cost import Decisions
from rlmux.sim.metrics import Collector, SimResult, Span
from rlmux.sim.models.interference import InterferenceTable, estimated_table, fraction_grid, sharing_table
from rlmux.sim.models.rates import BesideNeighbours, ByFraction, ByInterference, Pace
from rlmux.sim.models.work import DONE_S, Remaining, SoloSeconds
from rlmux.sim.sim_state import Actor, Moving, Running, place_of
from rlmux.sim.workloads.arrivals import Arrival, Workload
from rlmux.sim.world import KIND_BY_STAGE

WORK_ENDS, DEPARTURE, NODE_CHANGE, ARRIVAL = range(4)
"""Priorities at one instant."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFailure:
    """A node that goes away and comes back."""

    node: NodeId
    at_s: float
    down_s: float


def simulate(
    workload: Workload,
    policy: Policy,
    *,
    failures: Sequence[NodeFailure] = (),
    rescales_training: bool = False,
    interference: InterferenceTable | None = None,
    spans_until_s: float = 0.0,
    observer: Callable[[Event, list[Action]], None] | None = None,
    checks: bool = False,
    decisions: Decisions | None = None,
) -> SimResult:
    """Run the workload under the policy until every pipeline is over.

    `rescales_training`: training on more nodes than the pipeline asks for is faster in proportion (the
    published replay does not do that). `interference`: what orders on one device do to each other, by default
    estimated where the worlds say on which GPU they run, else nothing; a policy that can share devices and was given no
    table gets this one. What busy neighbours cost is the workload's. `spans_until_s` keeps who computed where until
    then, for a Gantt chart. `observer` sees every event with the actions that answered it; `checks` looks at every
    invariant of the scheduler after each (slow). `decisions`: what they take, by default no time; or a stopwatch that
    finds out.
    """
    table = interference or _estimated(workload)
    pace: Pace[Running] = ByFraction() if table is None else ByInterference(table)
    simulation = _Simulation(
        workload,
        _with_table(policy, table),
        pace=pace if workload.neighbours is None else BesideNeighbours(workload.neighbours, pace),
        failures=failures,
        rescales_training=rescales_training,
        spans_until_s=spans_until_s,
        decisions=decisions,
    )
    simulation.observer = observer
    simulation.checks = checks
    return simulation.run()


def _estimated(workload: Workload) -> InterferenceTable | None:
    gpu = next((arrival.world.gpu for arrival in workload.arrivals if arrival.world.gpu), None)
    return None if gpu is None else estimated_table(fraction_grid(gpu))


def _with_table(policy: Policy, table: InterferenceTable | None) -> Policy:
    """The policy with this table, unless it was given one."""
    if table is None or policy.sharing is None or policy.sharing.entries:
        return policy
    return with_sharing(policy, sharing_table(table))


class _Simulation:
    def __init__(
        self,
        workload: Workload,
        policy: Policy,
        *,
        pace: Pace[Running] | None = None,
        failures: Sequence[NodeFailure] = (),
        rescales_training: bool = False,
        spans_until_s: float = 0.0,
        decisions: Decisions | None = None,
    ) -> None:
        self.observer: Callable[[Event, list[Action]], None] | None = None
        self.checks = False
        self.scheduler = Scheduler(workload.cluster, policy)
        self.actors: dict[PipelineId, Actor] = {}
        self.running: dict[OrderId, Running] = {}
        self.moving: dict[OrderId, Moving] = {}
        self._pausing: dict[OrderId, Actor] = {}
        self._workload = workload
        self._pace: Pace[Running] = pace or ByFraction()
        self._are_apart = not self._pace.depends_on_kind
        """Orders do not slow each other: who begins or ends concerns nobody else."""
        self._wants_news = policy.reacts_to_progress or not self._are_apart
        self._rescales_training = rescales_training
        self._spans_until_s = spans_until_s
        self._decisions = decisions
        self._num_devices = sum(
            (pool.num_nodes or 0) * pool.devices_per_node for pool in workload.cluster.pools.values()
        )
        self._now_s = 0.0
        self._sequence = 0
        self._heap: list[tuple[float, int, int, Any]] = []
        self._num_over = 0
        self._collector = Collector(workload, policy.name, self.scheduler.query.placement)
        self._carry_out: dict[type, Callable[[Any], None]] = {
            RunStage: self._run_stage,
            Admit: self._admit,
            Relocate: self._admit,
            Release: self._release,
            Refuse: self._refuse,
            Queue: self._note_wait,
            Pause: self._pause,
            MigrateShard: self._migrate,
            SetDeviceFraction: self._set_device_fraction,
            Prefetch: lambda _: None,
        }
        for arrival in workload.arrivals:
            self._schedule(arrival.submit_s, ARRIVAL, arrival)
        for failure in failures:
            self._schedule(failure.at_s, NODE_CHANGE, NodeLost(time_s=failure.at_s, node=failure.node))
            back_s = failure.at_s + failure.down_s
            self._schedule(back_s, NODE_CHANGE, NodeJoined(time_s=back_s, node=failure.node))

    def run(self) -> SimResult:
        began = time.perf_counter()
        heap, carry_out = self._heap, self._carry_out
        handle = self.scheduler.handle if self._decisions is None else self._handle_in_time
        num_arrivals = len(self._workload.arrivals)
        is_watched = self.observer is not None or self.checks
        num_events = 0
        while heap and self._num_over < num_arrivals:
            self._now_s, _, sequence, what = heappop(heap)
            event = self._progress(what, sequence) if type(what) is Running else self._event_of(what)
            if event is None:
                continue
            num_events += 1
            kind = type(event)
            actions = self._decide(event) if kind is PipelineSubmitted else handle(event)
            for action in actions:
                carry_out[type(action)](action)
            if is_watched:
                self._look(event, actions)
            if kind is NodeLost:
                self._collector.lose_nodes(self._waiting_again(), self._now_s)
        return self._collector.result(self._now_s, num_events, time.perf_counter() - began)

    def _decide(self, event: Event) -> list[Action]:
        """Handle an arrival against the clock: what a decision takes is one of the results."""
        began = time.perf_counter()
        actions = self.scheduler.handle(event)
        self._collector.decision_ms.append((time.perf_counter() - began) * 1e3)
        return actions

    def _handle_in_time(self, event: Event) -> list[Action]:
        """Where decisions take time: orders begin that much later, and others may lose a core to them."""
        assert self._decisions is not None
        actions, seconds = self._decisions.decide(self.scheduler.handle, event, self._now_s)
        if seconds > 0.0 and self._decisions.takes_cores:
            busy = [one for one in self.running.values() if one.devices and not one.is_waiting]
            if len({device for one in busy for device in one.devices}) >= self._num_devices:
                for running in busy:
                    self._settle(running)
                    self._hold_up(running, seconds / self._num_devices)
                    self._foresee(running)
        return actions

    def _hold_up(self, running: Running, seconds: float) -> None:
        """It computes nothing for so long."""
        running.since_s += seconds
        running.waited_s += seconds

    def _look(self, event: Event, actions: list[Action]) -> None:
        if self.observer is not None:
            self.observer(event, actions)
        if self.checks:
            invariants.check(self.scheduler)

    # ------------------------------------------------------------------ from the heap to events

    def _schedule(self, time_s: float, priority: int, what: Any) -> int:
        self._sequence += 1
        heappush(self._heap, (time_s, priority, self._sequence, what))
        return self._sequence

    def _progress(self, running: Running, sequence: int) -> Event | None:
        """An order ended, or there is news of it, or the entry is stale."""
        if running.sequence != sequence:
            return None
        work = running.work
        if type(work) is SoloSeconds:  # of it there is no news but its end
            running.busy_s += (self._now_s - running.since_s) * running.device_fraction
            return self._finish(running)
        self._settle(running)
        if work.is_over:
            return self._finish(running)
        self._repace(self._pace.changes(running))
        counts = work.report()
        if counts is None or counts == running.reported:
            return None
        running.reported = counts
        num_active, num_waiting, num_waiting_for_env = counts
        return ChunkFinished(
            time_s=self._now_s,
            order=running.action.order,
            num_active=num_active,
            num_waiting=num_waiting,
            num_waiting_for_env=num_waiting_for_env,
            seconds=self._computed_s(running),
        )

    def _finish(self, running: Running) -> Event:
        self._stop(running)
        action = running.action
        if action.stage is running.actor.last_stage:
            self._collector.end_step(action.pipeline, action.step, self._now_s)
        return StageFinished(
            time_s=self._now_s,
            order=action.order,
            seconds=self._computed_s(running),
            switch_s=running.switch_s,
        )

    def _computed_s(self, running: Running) -> float:
        seconds = self._now_s - running.began_s - running.switch_s - running.waited_s
        return seconds if seconds > 0.0 else 0.0

    def _event_of(self, what: Any) -> Event | None:
        if isinstance(what, Arrival):
            return self._submit(what)
        if isinstance(what, Actor):
            if what.is_over:
                return None
            pipeline = what.arrival.pipeline.id
            if self.scheduler.query.status(pipeline) is PipelineStatus.WAITING:
                self._over(what)
            return PipelineCancelled(time_s=self._now_s, pipeline=pipeline)
        if isinstance(what, NodeLost):
            self._stop_orders_on(what.node)
        if isinstance(what, StagePaused) and self._pausing.pop(what.order, None) is None:
            return None
        if isinstance(what, ReplyArrived) and not self._is_awaited(what):
            return None
        if isinstance(what, TrajectoriesMigrated):
            if what.order not in self.moving:
                return None
            self._arrive(self.moving.pop(what.order))
        event: Event = what
        return event

    def _is_awaited(self, reply: ReplyArrived) -> bool:
        """Its share is still paused with nothing to compute, as far as the scheduler knows."""
        state = self.scheduler.query.shard_state(reply.pipeline, reply.device)
        stored = self.actors[reply.pipeline].stored.get(reply.device)
        if state is not WorkState.WAITING_FOR_ENV or stored is None:
            return False
        work, since_s = stored
        return work.idle_s - (self._now_s - since_s) <= DONE_S  # else another, of an earlier pause

    def _submit(self, arrival: Arrival) -> Event:
        pipeline = arrival.pipeline
        last_stage = Stage.PUBLISH if Stage.PUBLISH in pipeline.stages else pipeline.train_stages[-1]
        actor = self.actors[pipeline.id] = Actor(arrival, last_stage, arrival.world)
        if arrival.depart_s is not None:
            self._schedule(arrival.depart_s, DEPARTURE, actor)
        self._collector.submit(pipeline.id, arrival)
        return PipelineSubmitted(time_s=self._now_s, pipeline=pipeline)

    def _waiting_again(self) -> list[PipelineId]:
        """Placed once, and waiting now."""
        status = self.scheduler.query.status
        return [
            pipeline
            for pipeline, actor in self.actors.items()
            if actor.placement is not None and not actor.is_over and status(pipeline) is PipelineStatus.WAITING
        ]

    def _stop_orders_on(self, node: NodeId) -> None:
        """Whoever is pinned to the node loses what it was doing; the scheduler takes those orders as
        ended."""
        stopped = [actor for actor in self.actors.values() if not actor.is_over and self._is_pinned(actor, node)]
        for actor in stopped:
            actor.stored.clear()
        for running in list(self.running.values()):
            if running.actor in stopped:
                self._settle(running)
                self._stop(running)
        self.moving = {order: moving for order, moving in self.moving.items() if moving.actor not in stopped}
        self._pausing = {order: actor for order, actor in self._pausing.items() if actor not in stopped}

    def _is_pinned(self, actor: Actor, node: NodeId) -> bool:
        """Where it is, or where it is about to move."""
        pipeline = actor.arrival.pipeline.id
        if actor.placement is None or pipeline not in self.scheduler.query.placement:
            return False
        return node in actor.placement.nodes or node in self.scheduler.query.placement.placement(pipeline).nodes

    # ------------------------------------------------------------------ from actions to the world

    def _run_stage(self, action: RunStage) -> None:
        actor = self.actors[action.pipeline]
        now_s = self._now_s
        if not actor.has_started:
            actor.has_started = True
            self._collector.start(action.pipeline, now_s)
        switch_s = 0.0
        if action.switch is not Switch.NONE:
            switch_s = actor.arrival.switch.seconds(PHASE_BY_STAGE[action.stage], is_warm=action.switch is Switch.WARM)
        stored = actor.stored.pop(place_of(action), None) if actor.stored else None
        if stored is None:
            work = self._fresh_work(actor, action)
        else:
            work, since_s = stored
            work.advance(now_s + switch_s - since_s, 0.0)
        running = Running(action, actor, work, now_s, switch_s, now_s + switch_s, action.device_fraction or 1.0)
        if self._decisions is not None:
            self._hold_up(running, self._decisions.left_s(now_s))
        self.running[action.order] = running
        if self._are_apart:
            self._foresee(running)
        else:
            self._repace(self._pace.begins(running))

    def _fresh_work(self, actor: Actor, action: RunStage) -> Remaining:
        stage = action.stage
        if stage is Stage.GENERATE:
            return self._fresh_share(actor, action.pipeline, action.step, action.devices[0])
        seconds = actor.world.stage_s(stage, action.step, len(action.devices))
        if action.devices:
            seconds *= actor.train_scale
        return SoloSeconds(seconds, KIND_BY_STAGE.get(stage, SubStage.UPDATE))

    def _fresh_share(self, actor: Actor, pipeline: PipelineId, step: int, device: DeviceId) -> Remaining:
        devices = self.scheduler.query.pipeline(pipeline).rollout_devices
        num_devices = len(devices)
        return actor.world.share(step, devices.index(device) if num_devices > 1 else 0, num_devices)

    def _pause(self, action: Pause) -> None:
        running = self.running[action.order]
        self._settle(running)
        self._stop(running)
        running.actor.stored[running.place] = (running.work, self._now_s)
        self._pausing[action.order] = running.actor
        idle_s = running.work.idle_s
        paused = StagePaused(
            time_s=self._now_s,
            order=action.order,
            seconds=self._computed_s(running),
            switch_s=running.switch_s,
            is_waiting=idle_s > 0.0,
        )
        self._schedule(self._now_s, WORK_ENDS, paused)
        if idle_s > 0.0:
            self._schedule_reply(running.action.pipeline, running.devices[0], idle_s)

    def _schedule_reply(self, pipeline: PipelineId, device: DeviceId, idle_s: float) -> None:
        """Of the share that is stored there, to whoever waits for it."""
        reply_s = self._now_s + idle_s
        self._schedule(reply_s, WORK_ENDS, ReplyArrived(time_s=reply_s, pipeline=pipeline, device=device))

    def _migrate(self, action: MigrateShard) -> None:
        actor = self.actors[action.pipeline]
        stored = actor.stored.pop(action.source, None)
        if stored is None:  # not begun: there is no context to move or to compute again
            moved = self._fresh_share(actor, action.pipeline, action.step, action.source).take()
            on_the_way_s = cost_s = 0.0
        else:
            stored[0].advance(self._now_s - stored[1], 0.0)
            moved = stored[0].take()
            on_the_way_s, cost_s = actor.world.moving_s(moved, copies_kv=action.copies_kv)
        self.moving[action.order] = Moving(action, actor, moved, cost_s)
        self._collector.num_migrations += 1
        done = TrajectoriesMigrated(
            time_s=self._now_s + on_the_way_s,
            order=action.order,
            num_trajectories=len(moved),
            seconds=on_the_way_s + cost_s,
        )
        self._schedule(done.time_s, WORK_ENDS, done)

    def _arrive(self, moving: Moving) -> None:
        """What was moved goes to whoever decodes on the target, or waits there."""
        action, actor = moving.action, moving.actor
        for running in self.running.values():
            if running.actor is actor and running.devices == (action.target,) and running.is_share:
                self._settle(running)
                running.work.give(moving.trajectories, moving.cost_s)
                self._repace(self._pace.changes(running))
                return
        stored = actor.stored.get(action.target)
        if stored is None:
            work = self._fresh_share(actor, action.pipeline, action.step, action.target)
            if self.scheduler.query.shard_state(action.pipeline, action.target) in (None, WorkState.DONE):
                work.take()  # its own have ended
        else:
            work = stored[0]
            work.advance(self._now_s - stored[1], 0.0)
        work.give(moving.trajectories, moving.cost_s)
        actor.stored[action.target] = (work, self._now_s)
        self._schedule_reply(action.pipeline, action.target, work.idle_s)

    def _set_device_fraction(self, action: SetDeviceFraction) -> None:
        running = self.running[action.order]
        self._settle(running)
        running.device_fraction = action.device_fraction
        self._repace(self._pace.changes(running))

    def _admit(self, action: Admit | Relocate) -> None:
        actor = self.actors[action.pipeline]
        actor.placement = placement = action.placement
        arrival = actor.arrival
        is_colocated = set(placement.train_nodes) <= set(placement.rollout_nodes)
        actor.world = (arrival.colocated_world if is_colocated else None) or arrival.world
        if self._rescales_training and not is_colocated:
            actor.train_scale = arrival.pipeline.num_train_nodes / len(placement.train_nodes)
        self._collector.place(action, self._now_s, actor.world)

    def _release(self, action: Release) -> None:
        self._collector.release(action.pipeline, self._now_s)
        self._over(self.actors[action.pipeline])

    def _refuse(self, action: Refuse) -> None:
        self._collector.refuse(action.pipeline, action.reason)
        self._over(self.actors[action.pipeline])

    def _note_wait(self, action: Queue) -> None:
        self._collector.num_waits += 1

    def _over(self, actor: Actor) -> None:
        actor.is_over = True
        self._num_over += 1

    # ------------------------------------------------------------------ orders go on

    def _settle(self, running: Running) -> None:
        """Move it on to now at the pace it had."""
        elapsed_s = self._now_s - running.since_s
        if elapsed_s > 0.0:
            computed_s = running.work.advance(elapsed_s, running.pace)
            running.busy_s += computed_s * running.device_fraction
            if computed_s < elapsed_s:
                running.waited_s += elapsed_s - computed_s
            running.since_s = self._now_s

    def _repace(self, orders: Sequence[Running]) -> None:
        """Take their paces anew, and thereby when they are next to be looked at."""
        for running in orders:
            self._settle(running)
            self._foresee(running)

    def _foresee(self, running: Running) -> None:
        """When it is next to be looked at."""
        pace = running.pace = running.device_fraction if self._are_apart else self._pace.of(running)
        work = running.work
        if type(work) is SoloSeconds:
            next_s = work.left_s / pace
        else:
            next_s = work.until_news(pace) if self._wants_news else work.until_over(pace)
        sequence = self._sequence = running.sequence = self._sequence + 1
        heappush(self._heap, (running.since_s + next_s, WORK_ENDS, sequence, running))

    def _stop(self, running: Running) -> None:
        """It computes no more: book its device time, let others take its place."""
        action = running.action
        del self.running[action.order]
        running.sequence = -1
        if not self._are_apart:
            self._repace(self._pace.ends(running))
        devices = action.devices
        if not devices:
            return
        switch_s = running.switch_s
        if switch_s > 0.0:
            switch_s = min(switch_s, self._now_s - running.began_s)
        self._collector.compute(devices, running.busy_s + switch_s)
        if running.began_s < self._spans_until_s:
            self._collector.spans.append(
                Span(
                    pipeline=action.pipeline,
                    devices=devices,
                    stage=action.stage,
                    step=action.step,
                    begin_s=running.began_s,
                    end_s=self._now_s,
                    switch_s=switch_s,
                )
            )
