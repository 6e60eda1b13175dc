"""The scheduler in virtual time: what a policy would do, what it would cost, and who would wait.

    heap of (time, priority, number, what) ─▶ event ─▶ Scheduler.handle ─▶ actions ─▶ seconds of the world ─┐
       ▲                                                                                                    │
       └────────────────────────────────────────────────────────────────────────────────────────────────────┘

At one instant, work ends before pipelines depart, these before nodes fail or return, these before pipelines
arrive; what is still equal goes in the order in which it was scheduled. So a run is a function of
(workload, policy) alone.

What a step takes comes from the arrival's `TrueSeconds`; loading state onto devices from its
`SwitchSeconds`. A rollout with `finish_fractions` is simulated by trajectory, so that its workers fall idle
one by one, report their progress, and can hand their tails over. Everything else about a rollout is one
number per device.

Not modelled: contention of several loads for one host's memory bus, and a step's network traffic.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Any

from rlmux.core import invariants
from rlmux.core.actions import (
    Action,
    Admit,
    Migrate,
    Pause,
    Refuse,
    Release,
    Replace,
    RunStage,
    SetLevel,
    SetTimer,
    Switch,
    Wait,
)
from rlmux.core.events import (
    ChunkFinished,
    Event,
    NodeJoined,
    NodeLost,
    PipelineCancelled,
    PipelineSubmitted,
    StageFinished,
    StagePaused,
    TimerFired,
    TrajectoriesMoved,
)
from rlmux.core.model import (
    PHASE_BY_STAGE,
    DeviceId,
    NodeId,
    OrderId,
    PipelineId,
    PipelineStatus,
    Placement,
    Stage,
)
from rlmux.core.policies import Policy
from rlmux.core.scheduler import Scheduler
from rlmux.sim.arrivals import Arrival, Workload
from rlmux.sim.metrics import Collector, SimResult, Span
from rlmux.sim.world import TrueSeconds

WORK_ENDS, DEPARTURE, NODE_CHANGE, ARRIVAL, TIMER = range(5)
"""Priorities at one instant."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFailure:
    """A node that goes away and comes back."""

    node: NodeId
    at_s: float
    down_s: float


@dataclass(slots=True, eq=False)
class _Actor:
    """A pipeline as the world sees it."""

    arrival: Arrival
    last_stage: Stage
    """Its end is the end of a step."""
    placement: Placement | None = None
    world: TrueSeconds | None = None
    train_scale: float = 1.0
    left_s: dict[Any, list[float]] = field(default_factory=dict)
    """What paused work has left, by device (rollout) or stage (training): seconds of each trajectory, or
    one."""
    has_started: bool = False
    is_over: bool = False


@dataclass(slots=True)
class _Running:
    """An order under way."""

    order: OrderId
    actor: _Actor
    action: RunStage
    began_s: float
    switch_s: float
    left_s: list[float]
    """Seconds of computing left at `since_s` at full speed, ascending: of each trajectory, or just one."""
    since_s: float
    level: float
    sequence: int = 0
    """Of its entry in the heap; others are stale."""


def simulate(
    workload: Workload,
    policy: Policy,
    *,
    failures: Sequence[NodeFailure] = (),
    rescales_training: bool = False,
    spans_until_s: float = 0.0,
    observer: Callable[[Event, list[Action]], None] | None = None,
    checks: bool = False,
) -> SimResult:
    """Run the workload under the policy until every pipeline is over.

    `rescales_training`: training on more nodes than the pipeline asks for is faster in proportion (the
    published replay does not do that). `spans_until_s` keeps who computed where until then, for a Gantt
    chart. `observer` sees every
    event with the actions that answered it; `checks` looks at every invariant of the scheduler after each (slow).
    """
    simulation = _Simulation(workload, policy, failures, rescales_training, spans_until_s)
    simulation.observer = observer
    simulation.checks = checks
    return simulation.run()


class _Simulation:
    def __init__(
        self,
        workload: Workload,
        policy: Policy,
        failures: Sequence[NodeFailure],
        rescales_training: bool,
        spans_until_s: float,
    ) -> None:
        self.observer: Callable[[Event, list[Action]], None] | None = None
        self.checks = False
        self._workload = workload
        self._scheduler = Scheduler(workload.cluster, policy)
        self._policy = policy
        self._rescales_training = rescales_training
        self._spans_until_s = spans_until_s
        self._now_s = 0.0
        self._sequence = 0
        self._heap: list[tuple[float, int, int, Any]] = []
        self._actors: dict[PipelineId, _Actor] = {}
        self._running: dict[OrderId, _Running] = {}
        self._moving: dict[OrderId, _Actor] = {}
        self._num_over = 0
        self._collector = Collector(workload, policy.name, self._scheduler.ledger)
        self._carry_out: dict[type, Callable[[Any], None]] = {
            RunStage: self._run_stage,
            Admit: self._admit,
            Replace: self._admit,
            Release: self._release,
            Refuse: self._refuse,
            Wait: self._note_wait,
            Pause: self._pause,
            Migrate: self._migrate,
            SetLevel: self._set_level,
            SetTimer: self._set_timer,
        }
        for arrival in workload.arrivals:
            self._schedule(arrival.submit_s, ARRIVAL, arrival)
        for failure in failures:
            self._schedule(failure.at_s, NODE_CHANGE, NodeLost(time_s=failure.at_s, node=failure.node))
            back_s = failure.at_s + failure.down_s
            self._schedule(back_s, NODE_CHANGE, NodeJoined(time_s=back_s, node=failure.node))

    def run(self) -> SimResult:
        began = time.perf_counter()
        heap, handle, carry_out = self._heap, self._scheduler.handle, self._carry_out
        num_arrivals = len(self._workload.arrivals)
        num_events = 0
        while heap and self._num_over < num_arrivals:
            self._now_s, _, sequence, what = heappop(heap)
            event = self._finish(what, sequence) if type(what) is _Running else self._event_of(what)
            if event is None:
                continue
            num_events += 1
            if type(event) is PipelineSubmitted:
                actions = self._decide(event)
            else:
                actions = handle(event)
            for action in actions:
                carry_out[type(action)](action)
            if self.observer is not None:
                self.observer(event, actions)
            if self.checks:
                invariants.check(self._scheduler)
            if type(event) is NodeLost:
                self._collector.lose_nodes(self._waiting_again(), self._now_s)
        return self._collector.result(self._now_s, num_events, time.perf_counter() - began)

    def _decide(self, event: Event) -> list[Action]:
        """Handle an arrival against the clock: what a decision takes is one of the results."""
        began = time.perf_counter()
        actions = self._scheduler.handle(event)
        self._collector.decision_ms.append((time.perf_counter() - began) * 1e3)
        return actions

    # ------------------------------------------------------------------ from the heap to events

    def _schedule(self, time_s: float, priority: int, what: Any) -> int:
        self._sequence += 1
        heappush(self._heap, (time_s, priority, self._sequence, what))
        return self._sequence

    def _finish(self, running: _Running, sequence: int) -> Event | None:
        """The order's last trajectory ended, or one of several, or the entry is stale."""
        if running.sequence != sequence:
            return None
        if len(running.left_s) > 1 and self._policy.reacts_to_progress:
            return self._report_progress(running)
        now_s = self._now_s
        action = running.action
        del self._running[running.order]
        seconds = now_s - running.began_s - running.switch_s
        self._count(running, now_s)
        actor = running.actor
        if action.stage is actor.last_stage:
            self._collector.end_step(action.pipeline, action.step, now_s)
        return StageFinished(time_s=now_s, order=running.order, seconds=seconds, switch_s=running.switch_s, tokens=0)

    def _report_progress(self, running: _Running) -> Event | None:
        """The first of several trajectories ended."""
        self._settle(running)
        while running.left_s and running.left_s[0] <= 1e-9:
            running.left_s.pop(0)
        if not running.left_s:
            running.left_s.append(0.0)
        self._schedule_end(running)
        return ChunkFinished(
            time_s=self._now_s,
            order=running.order,
            num_active=len(running.left_s),
            num_waiting=0,
            seconds=self._now_s - running.began_s - running.switch_s,
        )

    def _event_of(self, what: Any) -> Event | None:
        if isinstance(what, Arrival):
            return self._submit(what)
        if isinstance(what, _Actor):
            if what.is_over:
                return None
            pipeline = what.arrival.pipeline.id
            if self._scheduler.status(pipeline) is PipelineStatus.WAITING:
                self._over(what)
            return PipelineCancelled(time_s=self._now_s, pipeline=pipeline)
        if isinstance(what, NodeLost):
            self._stop_orders_on(what.node)
        if isinstance(what, StagePaused) and self._running.pop(what.order, None) is None:
            return None
        if isinstance(what, TrajectoriesMoved) and self._moving.pop(what.order, None) is None:
            return None
        event: Event = what
        return event

    def _submit(self, arrival: Arrival) -> Event:
        pipeline = arrival.pipeline
        stages = pipeline.stages
        last_stage = Stage.PUBLISH if Stage.PUBLISH in stages else pipeline.train_stages[-1]
        actor = self._actors[pipeline.id] = _Actor(arrival, last_stage)
        if arrival.depart_s is not None:
            self._schedule(arrival.depart_s, DEPARTURE, actor)
        self._collector.submit(pipeline.id, arrival)
        return PipelineSubmitted(time_s=self._now_s, pipeline=pipeline)

    def _waiting_again(self) -> list[PipelineId]:
        """Placed once, and waiting now."""
        status = self._scheduler.status
        return [
            pipeline
            for pipeline, actor in self._actors.items()
            if actor.placement is not None and not actor.is_over and status(pipeline) is PipelineStatus.WAITING
        ]

    def _stop_orders_on(self, node: NodeId) -> None:
        """Whoever is pinned to the node loses what it was doing; the scheduler takes those orders as
        ended."""
        stopped = [actor for actor in self._actors.values() if not actor.is_over and self._is_pinned(actor, node)]
        for actor in stopped:
            actor.left_s.clear()
        for order, running in list(self._running.items()):
            if running.actor in stopped:
                self._count(running, self._now_s)
                running.sequence = -1
                del self._running[order]
        for order, actor in list(self._moving.items()):
            if actor in stopped:
                del self._moving[order]

    def _is_pinned(self, actor: _Actor, node: NodeId) -> bool:
        """Where it is, or where it is about to move."""
        pipeline = actor.arrival.pipeline.id
        if actor.placement is None or pipeline not in self._scheduler.ledger:
            return False
        return node in actor.placement.nodes or node in self._scheduler.ledger.placement(pipeline).nodes

    # ------------------------------------------------------------------ from actions to the world

    def _run_stage(self, action: RunStage) -> None:
        actor = self._actors[action.pipeline]
        if not actor.has_started:
            actor.has_started = True
            self._collector.start(action.pipeline, self._now_s)
        is_rollout = action.stage is Stage.GENERATE
        left_s = None
        if actor.left_s:
            left_s = actor.left_s.pop(action.devices[0] if is_rollout else action.stage, None)
        if left_s is None:
            left_s = self._fresh_work(actor, action, is_rollout)
        switch_s = 0.0
        if action.switch is not Switch.NONE:
            switch_s = actor.arrival.switch.seconds(PHASE_BY_STAGE[action.stage], is_warm=action.switch is Switch.WARM)
        now_s = self._now_s
        running = _Running(action.order, actor, action, now_s, switch_s, left_s, now_s + switch_s, action.level or 1.0)
        self._running[action.order] = running
        self._schedule_end(running)

    def _fresh_work(self, actor: _Actor, action: RunStage, is_rollout: bool) -> list[float]:
        if is_rollout:
            return self._fresh_share(actor, action.pipeline, action.step, action.devices[0])
        assert actor.world is not None
        seconds = actor.world.seconds(action.stage, action.step)
        return [seconds * actor.train_scale if action.devices else seconds]

    def _fresh_share(self, actor: _Actor, pipeline: PipelineId, step: int, device: DeviceId) -> list[float]:
        """One device's share of a rollout: seconds of each of its trajectories, or one number."""
        assert actor.world is not None
        seconds = actor.world.seconds(Stage.GENERATE, step)
        fractions = actor.arrival.finish_fractions
        if not fractions:
            return [seconds]
        devices = self._scheduler.state.runs[pipeline].rollout_devices
        mine = fractions[devices.index(device) :: len(devices)]
        return [seconds * fraction for fraction in mine] or [0.0]

    def _schedule_end(self, running: _Running) -> None:
        """When the next thing about it happens: a trajectory's end if somebody listens, else the last
        one's."""
        left_s = running.left_s[0] if self._policy.reacts_to_progress else running.left_s[-1]
        running.sequence = self._schedule(running.since_s + left_s / running.level, WORK_ENDS, running)

    def _settle(self, running: _Running) -> None:
        """Book the computing done since the last change."""
        done_s = max(0.0, (self._now_s - running.since_s) * running.level)
        running.left_s = [max(0.0, left_s - done_s) for left_s in running.left_s]
        running.since_s = max(running.since_s, self._now_s)

    def _pause(self, action: Pause) -> None:
        running = self._running[action.order]
        self._settle(running)
        running.sequence = -1
        stage, devices = running.action.stage, running.action.devices
        left_s = [left for left in running.left_s if left > 0.0]
        running.actor.left_s[devices[0] if stage is Stage.GENERATE else stage] = left_s or [0.0]
        self._count(running, self._now_s)
        seconds = max(0.0, self._now_s - running.began_s - running.switch_s)
        paused = StagePaused(time_s=self._now_s, order=action.order, seconds=seconds, switch_s=running.switch_s)
        self._schedule(self._now_s, WORK_ENDS, paused)

    def _migrate(self, action: Migrate) -> None:
        actor = self._actors[action.pipeline]
        moved = actor.left_s.pop(action.source, None)
        delay_s = actor.arrival.migration_s
        if moved is None:  # not begun: nothing to compute again
            moved, delay_s = self._fresh_share(actor, action.pipeline, action.step, action.source), 0.0
        moved = [left_s + delay_s for left_s in moved]
        target = next(
            (
                running
                for running in self._running.values()
                if running.actor is actor and running.action.devices == (action.target,)
                and running.action.stage is Stage.GENERATE
            ),
            None,
        )  # fmt: skip
        if target is not None:
            self._settle(target)
            target.left_s = sorted([*target.left_s, *moved])
            self._schedule_end(target)
        else:
            actor.left_s[action.target] = sorted([*actor.left_s.get(action.target, []), *moved])
        self._collector.num_migrations += 1
        self._moving[action.order] = actor
        done = TrajectoriesMoved(time_s=self._now_s, order=action.order, num_trajectories=len(moved), seconds=delay_s)
        self._schedule(self._now_s, WORK_ENDS, done)

    def _set_level(self, action: SetLevel) -> None:
        running = self._running[action.order]
        self._settle(running)
        running.level = action.level
        self._schedule_end(running)

    def _set_timer(self, action: SetTimer) -> None:
        self._schedule(action.at_s, TIMER, TimerFired(time_s=action.at_s))

    def _admit(self, action: Admit | Replace) -> None:
        actor = self._actors[action.pipeline]
        actor.placement = placement = action.placement
        arrival = actor.arrival
        is_colocated = set(placement.train_nodes) <= set(placement.rollout_nodes)
        actor.world = (arrival.colocated_world if is_colocated else None) or arrival.world
        if self._rescales_training and not is_colocated:
            actor.train_scale = arrival.pipeline.num_train_nodes / len(placement.train_nodes)
        self._collector.place(action, self._now_s, actor.world)

    def _release(self, action: Release) -> None:
        self._collector.release(action.pipeline, self._now_s)
        self._over(self._actors[action.pipeline])

    def _refuse(self, action: Refuse) -> None:
        self._collector.refuse(action.pipeline, action.reason)
        self._over(self._actors[action.pipeline])

    def _note_wait(self, action: Wait) -> None:
        self._collector.num_waits += 1

    def _over(self, actor: _Actor) -> None:
        actor.is_over = True
        self._num_over += 1

    def _count(self, running: _Running, end_s: float) -> None:
        """Book the device time of an order that ends now."""
        action = running.action
        devices = action.devices
        if not devices:
            return
        self._collector.compute(devices, end_s - running.began_s)
        if running.began_s < self._spans_until_s:
            self._collector.spans.append(_span(running, devices, end_s))


def _span(running: _Running, devices: tuple[DeviceId, ...], end_s: float) -> Span:
    action = running.action
    return Span(
        pipeline=action.pipeline,
        devices=devices,
        stage=action.stage,
        step=action.step,
        begin_s=running.began_s,
        end_s=end_s,
        switch_s=min(running.switch_s, end_s - running.began_s),
    )
