"""The scheduler in virtual time at the grain of sub-stages: what happens *inside* a rollout, and on a shared device.

    heap ─▶ event ─▶ Scheduler.handle ─▶ actions ─▶ work under way, each with a pace ─▶ next end or band border ─┐
      ▲                                                                                                          │
      └──────────────────────────────────────────────────────────────────────────────────────────────────────────┘

Work moves on in solo seconds. Its pace is 1 alone on whole devices; at a level, or beside another, it is one over the
slowdown of an `InterferenceTable`, the worst of its devices. Whenever someone on a device begins, ends, changes its
level or its character, the paces there are taken anew. Progress is reported at band borders only, so a rollout of a
thousand sequences costs some ten events.

A run is a function of (workload, policy) alone. Not modelled: tools, and the switch at a change of level.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, is_dataclass, replace
from heapq import heappop, heappush
from typing import Any

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
    PipelineSubmitted,
    StageFinished,
    StagePaused,
    TimerFired,
    TrajectoriesMoved,
)
from rlmux.core.model import PHASE_BY_STAGE, DeviceId, OrderId, PipelineId, Stage
from rlmux.core.policies import Policy
from rlmux.core.scheduler import Scheduler
from rlmux.core.sharing import SharingEntry, SharingTable
from rlmux.sim.arrivals import Arrival, Workload
from rlmux.sim.costs import MEASURED_GPU, rollout_costs
from rlmux.sim.interference import NO_SPLIT, InterferenceTable, estimated_table, share_levels
from rlmux.sim.metrics import Collector, SimResult, Span
from rlmux.sim.substages import COST_NAME_BY_STAGE, Decoder, SubStageWorld, Unfinished, copy_s, recompute_s

DENSE_ABOVE = 128
SHARED_KINDS = {"prefill": "prefill", "dense": "dense", "tail": "tail", "train": "update"}
"""The scheduler's characters, and whose interference stands for each."""
WORK_ENDS, ARRIVAL, TIMER = range(3)
_DONE = 1e-6


@dataclass(slots=True)
class _Work:
    """An order under way."""

    order: OrderId
    action: RunStage
    world: SubStageWorld
    began_s: float
    switch_s: float
    decoder: Decoder | None
    left_s: float
    """Solo seconds left of a stage that is no rollout."""
    level: float
    since_s: float
    """Up to when it was moved on."""
    pace: float = 1.0
    reported: int = -1
    busy_s: float = 0.0
    sequence: int = 0
    """Of its entry in the heap; others are stale."""

    @property
    def kind(self) -> str:
        if self.decoder is None:
            return COST_NAME_BY_STAGE.get(self.action.stage, "update")
        if self.decoder.is_prefilling:
            return "prefill"
        return "dense" if self.decoder.num_active >= DENSE_ABOVE else "tail"

    @property
    def seconds_left(self) -> float:
        return self.left_s if self.decoder is None else self.decoder.seconds_left

    def until_change(self) -> float:
        return self.left_s if self.decoder is None else self.decoder.until_report()


@dataclass(slots=True)
class _Actor:
    """A pipeline as the world sees it."""

    arrival: Arrival
    world: SubStageWorld
    last_stage: Stage
    stored: dict[DeviceId, Decoder] = field(default_factory=dict)
    """Shares that were paused, or got trajectories while nobody ran there."""
    left_s: dict[Stage, float] = field(default_factory=dict)
    """Of paused training."""


def has_sub_stages(workload: Workload) -> bool:
    return any(isinstance(arrival.world, SubStageWorld) for arrival in workload.arrivals)


def sharing_table(interference: InterferenceTable, levels: tuple[float, ...] | None = None) -> SharingTable:
    """What the scheduler may know of a table: every pair at every level, as a profile of the device would list it."""
    entries = []
    for level in levels or interference.levels.usual():
        if level >= NO_SPLIT:
            continue
        for first, kind_a in SHARED_KINDS.items():
            for second, kind_b in SHARED_KINDS.items():
                slow_a, slow_b = interference.slowdowns(kind_a, kind_b, level)
                entries.append(
                    SharingEntry(kind_a=first, kind_b=second, level=level, slowdown_a=slow_a, slowdown_b=slow_b)
                )
    return SharingTable.of(entries)


def simulate_sub_stages(
    workload: Workload,
    policy: Policy,
    *,
    interference: InterferenceTable | None = None,
    spans_until_s: float = 0.0,
    observer: Callable[[Event, list[Action]], None] | None = None,
) -> SimResult:
    """Run a workload of `SubStageWorld`s under the policy until every pipeline is over.

    A policy that can share devices and was given no table gets the simulated devices' own.
    """
    table = interference or estimated_table(share_levels(_gpu_of(workload)))
    if is_dataclass(policy) and getattr(policy, "sharing", None) == SharingTable():
        policy = replace(policy, sharing=sharing_table(table))
    return _Simulation(workload, policy, table, spans_until_s, observer).run()


class _Simulation:
    def __init__(
        self,
        workload: Workload,
        policy: Policy,
        interference: InterferenceTable,
        spans_until_s: float,
        observer: Callable[[Event, list[Action]], None] | None,
    ) -> None:
        self._workload = workload
        self._interference = interference
        self._scheduler = Scheduler(workload.cluster, policy)
        self._spans_until_s = spans_until_s
        self._observer = observer
        self._now_s = 0.0
        self._sequence = 0
        self._heap: list[tuple[float, int, int, Any]] = []
        self._actors: dict[PipelineId, _Actor] = {}
        self._works: dict[OrderId, _Work] = {}
        self._on_device: dict[DeviceId, list[_Work]] = {}
        self._on_the_way: dict[OrderId, tuple[Migrate, list[Unfinished], float]] = {}
        self._num_over = 0
        self._collector = Collector(workload, policy.name, self._scheduler.ledger)
        self._carry_out: Mapping[type, Callable[[Any], None]] = {
            RunStage: self._run_stage,
            Admit: self._admit,
            Replace: self._admit,
            Release: self._release,
            Refuse: self._refuse,
            Wait: lambda action: None,
            Pause: self._pause,
            Migrate: self._migrate,
            SetLevel: self._set_level,
            SetTimer: self._set_timer,
        }
        for arrival in workload.arrivals:
            self._schedule(arrival.submit_s, ARRIVAL, arrival)

    def run(self) -> SimResult:
        began = time.perf_counter()
        num_events = 0
        while self._heap and self._num_over < len(self._workload.arrivals):
            self._now_s, _, sequence, what = heappop(self._heap)
            event = self._event_of(what, sequence)
            if event is None:
                continue
            num_events += 1
            decided = time.perf_counter()
            actions = self._scheduler.handle(event)
            self._collector.decision_ms.append((time.perf_counter() - decided) * 1e3)
            for action in actions:
                self._carry_out[type(action)](action)
            if self._observer is not None:
                self._observer(event, actions)
        return self._collector.result(self._now_s, num_events, time.perf_counter() - began)

    # ------------------------------------------------------------------ from the heap to events

    def _schedule(self, time_s: float, priority: int, what: Any) -> int:
        self._sequence += 1
        heappush(self._heap, (time_s, priority, self._sequence, what))
        return self._sequence

    def _event_of(self, what: Any, sequence: int) -> Event | None:
        if isinstance(what, _Work):
            return self._progress(what) if what.sequence == sequence else None
        if isinstance(what, Arrival):
            return self._submit(what)
        if isinstance(what, TrajectoriesMoved):
            self._arrive(what)
        event: Event = what
        return event

    def _submit(self, arrival: Arrival) -> Event:
        pipeline = arrival.pipeline
        assert isinstance(arrival.world, SubStageWorld)
        last_stage = Stage.PUBLISH if Stage.PUBLISH in pipeline.stages else pipeline.train_stages[-1]
        self._actors[pipeline.id] = _Actor(arrival, arrival.world, last_stage)
        self._collector.submit(pipeline.id, arrival)
        return PipelineSubmitted(time_s=self._now_s, pipeline=pipeline)

    def _progress(self, work: _Work) -> Event | None:
        """It ended, or a band of it did."""
        self._settle(work)
        if work.seconds_left <= _DONE:
            return self._finish(work)
        decoder = work.decoder
        assert decoder is not None
        self._repace(work.action.devices)
        num_left = decoder.num_active + decoder.num_waiting
        if num_left == work.reported or decoder.is_prefilling:
            return None
        work.reported = num_left
        return ChunkFinished(
            time_s=self._now_s,
            order=work.order,
            num_active=decoder.num_active,
            num_waiting=decoder.num_waiting,
            seconds=max(0.0, self._now_s - work.began_s - work.switch_s),
        )

    def _finish(self, work: _Work) -> Event:
        self._stop(work)
        if work.action.stage is self._actors[work.action.pipeline].last_stage:
            self._collector.end_step(work.action.pipeline, work.action.step, self._now_s)
        return StageFinished(
            time_s=self._now_s,
            order=work.order,
            seconds=max(0.0, self._now_s - work.began_s - work.switch_s),
            switch_s=work.switch_s,
        )

    # ------------------------------------------------------------------ from actions to the world

    def _run_stage(self, action: RunStage) -> None:
        actor = self._actors[action.pipeline]
        decoder, left_s = None, 0.0
        if action.stage is Stage.GENERATE:
            device = action.devices[0]
            decoder = actor.stored.pop(device, None)
            if decoder is None:
                devices = self._scheduler.state.runs[action.pipeline].rollout_devices
                decoder = actor.world.decoder(action.step, devices.index(device), len(devices))
        else:
            left_s = actor.left_s.pop(action.stage, -1.0)
            if left_s < 0.0 and action.stage in COST_NAME_BY_STAGE:
                num_devices = len(action.devices) or actor.world.num_train_devices
                left_s = actor.world.stage_s(action.stage, action.step, num_devices)
        switch_s = 0.0
        if action.switch is not Switch.NONE:
            switch_s = actor.arrival.switch.seconds(
                PHASE_BY_STAGE[action.stage], is_warm=action.switch is Switch.WARM
            )
        work = _Work(
            action.order, action, actor.world, self._now_s, switch_s, decoder, max(left_s, 0.0), action.level,
            self._now_s + switch_s,
        )  # fmt: skip
        self._works[action.order] = work
        for device in action.devices:
            self._on_device.setdefault(device, []).append(work)
        self._repace(action.devices)
        if not action.devices:
            self._schedule_change(work)

    def _pause(self, action: Pause) -> None:
        work = self._works[action.order]
        self._settle(work)
        self._stop(work)
        actor = self._actors[work.action.pipeline]
        if work.decoder is not None:
            actor.stored[work.action.devices[0]] = work.decoder
        else:
            actor.left_s[work.action.stage] = work.left_s
        seconds = max(0.0, self._now_s - work.began_s - work.switch_s)
        paused = StagePaused(time_s=self._now_s, order=work.order, seconds=seconds, switch_s=work.switch_s)
        self._schedule(self._now_s, WORK_ENDS, paused)

    def _migrate(self, action: Migrate) -> None:
        actor = self._actors[action.pipeline]
        source = actor.stored.pop(action.source, None)
        if source is None:  # it never began
            devices = self._scheduler.state.runs[action.pipeline].rollout_devices
            source = actor.world.decoder(action.step, devices.index(action.source), len(devices))
        moved = source.take()
        costs = rollout_costs(actor.world.model, actor.world.gpu, actor.world.tp)
        copying_s = copy_s(costs, moved) if action.copies_kv else 0.0
        on_target_s = 0.0 if action.copies_kv else recompute_s(costs, moved)
        self._on_the_way[action.order] = (action, moved, on_target_s)
        self._collector.num_migrations += 1
        done = TrajectoriesMoved(
            time_s=self._now_s + copying_s,
            order=action.order,
            num_trajectories=len(moved),
            seconds=copying_s + on_target_s,
        )
        self._schedule(done.time_s, WORK_ENDS, done)

    def _arrive(self, event: TrajectoriesMoved) -> None:
        """What was moved goes to whoever decodes on the target, or waits there."""
        action, moved, cost_s = self._on_the_way.pop(event.order)
        actor = self._actors[action.pipeline]
        for work in self._on_device.get(action.target, []):
            if work.action.pipeline == action.pipeline and work.decoder is not None:
                self._settle(work)
                work.decoder.give(moved, cost_s)
                self._repace(work.action.devices)
                return
        if action.target in actor.stored:
            actor.stored[action.target].give(moved, cost_s)
            return
        run = self._scheduler.state.runs[action.pipeline]
        is_fresh = run.open_shares.get(action.target) is not None
        devices = run.rollout_devices
        target = actor.world.decoder(action.step, devices.index(action.target), len(devices))
        if not is_fresh:
            target.take()
        target.give(moved, cost_s)
        actor.stored[action.target] = target

    def _set_level(self, action: SetLevel) -> None:
        work = self._works[action.order]
        self._settle(work)
        work.level = action.level
        self._repace(work.action.devices)

    def _set_timer(self, action: SetTimer) -> None:
        self._schedule(action.at_s, TIMER, TimerFired(time_s=action.at_s))

    def _admit(self, action: Admit | Replace) -> None:
        self._collector.place(action, self._now_s, self._actors[action.pipeline].world)

    def _release(self, action: Release) -> None:
        self._collector.release(action.pipeline, self._now_s)
        self._num_over += 1

    def _refuse(self, action: Refuse) -> None:
        self._collector.refuse(action.pipeline, action.reason)
        self._num_over += 1

    # ------------------------------------------------------------------ paces

    def _settle(self, work: _Work) -> None:
        """Move it on to now at the pace it had."""
        elapsed = self._now_s - work.since_s
        if elapsed <= 0.0:
            return
        solo_s = elapsed * work.pace
        work.busy_s += elapsed * work.level
        if work.decoder is not None:
            work.decoder.advance(solo_s)
        else:
            work.left_s = max(0.0, work.left_s - solo_s)
        work.since_s = self._now_s

    def _repace(self, devices: tuple[DeviceId, ...]) -> None:
        """Take anew the paces of all that compute on these devices."""
        touched: dict[OrderId, _Work] = {}
        for device in devices:
            for work in self._on_device[device]:
                touched[work.order] = work
        for work in touched.values():
            self._settle(work)
            work.pace = min((self._pace_on(work, device) for device in work.action.devices), default=1.0)
            self._schedule_change(work)

    def _pace_on(self, work: _Work, device: DeviceId) -> float:
        others = [other for other in self._on_device[device] if other is not work]
        if not others:
            return 1.0 if work.level >= 1.0 else 1.0 / self._interference.slowdown_alone(work.kind, work.level)
        slowest = max(self._interference.slowdowns(work.kind, other.kind, work.level)[0] for other in others)
        return 1.0 / slowest

    def _schedule_change(self, work: _Work) -> None:
        at_s = max(work.since_s, self._now_s) + work.until_change() / work.pace
        work.sequence = self._schedule(at_s, WORK_ENDS, work)

    def _stop(self, work: _Work) -> None:
        del self._works[work.order]
        work.sequence = -1
        devices = work.action.devices
        if not devices:
            return
        for device in devices:
            self._on_device[device].remove(work)
        self._repace(devices)
        self._collector.compute(devices, work.busy_s + min(work.switch_s, self._now_s - work.began_s))
        if work.began_s < self._spans_until_s:
            self._collector.spans.append(
                Span(
                    pipeline=work.action.pipeline,
                    devices=devices,
                    stage=work.action.stage,
                    step=work.action.step,
                    begin_s=work.began_s,
                    end_s=self._now_s,
                    switch_s=min(work.switch_s, self._now_s - work.began_s),
                )
            )


def _gpu_of(workload: Workload) -> str:
    for arrival in workload.arrivals:
        if isinstance(arrival.world, SubStageWorld):
            return arrival.world.gpu
    return MEASURED_GPU
