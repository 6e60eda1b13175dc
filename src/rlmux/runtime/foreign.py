"""Pipelines of other programs beside our own: what their clients announce goes in, what is granted goes out.

    a front (HTTP, permits) ── submit, arrived, finished, ... ──▶ ForeignFront ── events, at the next poll ─▶ controller
            ▲                        from any thread                                                            │
            └── begin, pause, evict, park, release ── ForeignDriver ◀── ForeignBackend ◀── actions ──────────────┘
                                                                             └── actions of our own ─▶ WorkerBackend

Each foreign pipeline has a driver, an object of the front's. Its methods are called in the controller's thread, which
waits for them: they must return at once. The front answers through `ForeignFront`, from whatever thread.

A device's memory is one for all. An order begins when every state that it evicts has left: our own workers offload
theirs, and a driver that is told to `evict` says `left` when its memory is free. Until then the order is held here.

What a front says of an order that has ended meanwhile (its pipeline was cancelled, its node was lost) is dropped.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from rlmux.core.actions import (
    Action,
    Admit,
    ExpectSteps,
    Park,
    Pause,
    Queue,
    Refuse,
    Release,
    Relocate,
    RunStage,
    SetDeviceFraction,
)
from rlmux.core.errors import UserError
from rlmux.core.events import (
    ChunkFinished,
    ClientFinished,
    Event,
    NodeLost,
    PipelineCancelled,
    PipelineFailed,
    PipelineRestarted,
    PipelineSubmitted,
    StageFinished,
    StagePaused,
    WorkArrived,
    WorkerLost,
    WorkWithdrawn,
)
from rlmux.core.model import DeviceId, OrderId, Phase, Pipeline, PipelineId, Resident
from rlmux.runtime.backend import Backend, Note, Submission

News = Admit | Relocate | Queue | Refuse | ExpectSteps | PipelineCancelled | PipelineFailed
"""What a driver is told of its pipeline besides orders."""


class ForeignDriver(Protocol):
    """Carries out the orders of one foreign pipeline. No method may wait."""

    def begin(self, order: RunStage) -> None:
        """The devices are the pipeline's: work, and say `finished`. An order of a step that was paused goes on with it.

        `evicted` may name the pipeline's own other state, which the driver then offloads itself.
        """

    def pause(self, order: OrderId) -> None:
        """Stop at the next safe point, and say `paused`; or `finished`, where nothing is left."""

    def evict(self, resident: Resident, devices: tuple[DeviceId, ...], order: OrderId) -> None:
        """Another's order needs the memory of this state of the pipeline: leave these devices, and say `left`."""

    def park(self) -> None:
        """The pipeline loses its nodes: its orders have ended, and nothing of it is on a device. It is placed again."""

    def release(self) -> None:
        """The pipeline is over: its orders have ended, and nothing of it may stay on a device."""

    def tell(self, news: News) -> None:
        """Where the pipeline is placed, why it waits or was refused, that it was cancelled or failed."""

    def weights_sha256(self) -> str | None:
        """Hash of its newest weights, for the log; None where the program keeps its weights to itself."""


class MakesRoom(Backend, Protocol):
    """A backend that others can share devices with."""

    def make_room(self, action: RunStage, then: Callable[[float], None]) -> None:
        """Have its own states that the order evicts leave the devices; `then` gets the seconds that took."""

    def wake(self) -> None:
        """Make a poll that waits, or the next one, return soon. May be called from any thread."""


class ForeignFront:
    """The way from a front's threads to the controller; see the module. Every method may be called from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._events: list[Event] = []
        self._notes: list[Note] = []
        self._left: list[tuple[Resident, OrderId]] = []
        self._drivers: dict[PipelineId, ForeignDriver] = {}
        self._names: dict[PipelineId, None] = {}
        self._reserved: set[PipelineId] = set()
        """Names that were taken for pipelines that are not submitted yet (membership tests only)."""
        self._left_over: dict[DeviceId, dict[Resident, ForeignDriver]] = {}
        self.wake: Callable[[], None] = lambda: None
        """Wakes the controller; set by the backend that takes what comes."""

    # ------------------------------------------------------------------ for the front

    def reserve(self, pipeline: PipelineId) -> None:
        """Take a name for a pipeline that is submitted later. Raises UserError for one that the run knows already."""
        with self._lock:
            self._take_new_name(pipeline)
            self._reserved.add(pipeline)

    def submit(self, pipeline: Pipeline, driver: ForeignDriver) -> None:
        """Have a pipeline whose work arrives admitted. Raises UserError for a name that the run knows already."""
        self.submit_made(pipeline, lambda: driver)

    def submit_made(self, pipeline: Pipeline, make_driver: Callable[[], ForeignDriver]) -> None:
        """`submit`, with a driver that is made once the name is the pipeline's; the name is free again where that
        fails."""
        with self._lock:
            if pipeline.id in self._reserved:
                self._reserved.remove(pipeline.id)
            else:
                self._take_new_name(pipeline.id)
        try:
            driver = make_driver()
        except BaseException:
            with self._lock:
                del self._names[pipeline.id]
            raise
        with self._lock:
            self._drivers[pipeline.id] = driver
        self._say(PipelineSubmitted(pipeline=pipeline))

    def _take_new_name(self, pipeline: PipelineId) -> None:
        if pipeline in self._names:
            raise UserError(f"pipeline {pipeline!r} is in this run already; accepted: a name of its own")
        self._names[pipeline] = None

    def arrived(self, pipeline: PipelineId, phases: tuple[Phase, ...], units: int = 0) -> None:
        """Work is there; see `WorkArrived`."""
        self._say(WorkArrived(pipeline=pipeline, phases=phases, units=units))

    def withdrawn(self, pipeline: PipelineId, phases: tuple[Phase, ...]) -> None:
        """Work that does not run is taken back."""
        self._say(WorkWithdrawn(pipeline=pipeline, phases=phases))

    def client_finished(self, pipeline: PipelineId) -> None:
        """The program is done."""
        self._say(ClientFinished(pipeline=pipeline))

    def cancelled(self, pipeline: PipelineId) -> None:
        """Its user wants it gone."""
        self._say(PipelineCancelled(pipeline=pipeline))

    def failed(self, pipeline: PipelineId, reason: str) -> None:
        """Its own fault ends it, and its orders with it. `reason` is one line."""
        self._say(PipelineFailed(pipeline=pipeline, reason=reason))

    def worker_lost(self, pipeline: PipelineId, device: DeviceId) -> None:
        """What it ran on the device has ended and is to be done again."""
        self._say(WorkerLost(pipeline=pipeline, device=device))

    def restarted(self, pipeline: PipelineId) -> None:
        """All that it ran has ended and is to be done again."""
        self._say(PipelineRestarted(pipeline=pipeline, restored_step=0))

    def finished(self, order: OrderId, *, seconds: float, switch_s: float = 0.0, tokens: int = 0) -> None:
        """The order's work is complete; seconds as in `StageFinished`."""
        self._say(StageFinished(order=order, seconds=seconds, switch_s=switch_s, tokens=tokens))

    def paused(self, order: OrderId, *, seconds: float, switch_s: float = 0.0, tokens: int = 0) -> None:
        """The order stopped at a safe point with work left."""
        self._say(StagePaused(order=order, seconds=seconds, switch_s=switch_s, tokens=tokens))

    def progress(
        self, order: OrderId, *, num_active: int, num_waiting: int = 0, tokens: int = 0, seconds: float = 0.0
    ) -> None:
        """The order goes on; fields as in `ChunkFinished`."""
        self._say(
            ChunkFinished(order=order, num_active=num_active, num_waiting=num_waiting, tokens=tokens, seconds=seconds)
        )

    def left(self, resident: Resident, order: OrderId) -> None:
        """The state that was to leave for that order is off its devices."""
        with self._lock:
            self._left.append((resident, order))
        self.wake()

    def leave_over(self, device: DeviceId, resident: Resident, driver: ForeignDriver) -> None:
        """A state of a part of the run that was killed is on a device still, which the scheduler does not know of: the
        first order of another pipeline there has the driver evict it, and begins once it has left."""
        with self._lock:
            self._left_over.setdefault(device, {})[resident] = driver

    def note(self, type: str, **fields: Any) -> None:
        """A record for the log, which no decision depends on."""
        with self._lock:
            self._notes.append(Note(type=type, fields=fields))

    def say(self, event: Event) -> None:
        """Any other fact about a foreign pipeline; its time is set when it is taken."""
        self._say(event)

    # ------------------------------------------------------------------ for the backend

    def left_over(self, devices: Sequence[DeviceId], pipeline: PipelineId) -> dict[Resident, ForeignDriver]:
        """States that are on the devices beside the scheduler's knowledge, those of the pipeline left out: it takes its
        own up again."""
        found: dict[Resident, ForeignDriver] = {}
        with self._lock:
            for device in devices:
                here = self._left_over.get(device, {})
                for resident in [one for one in here if one.pipeline == pipeline]:
                    del here[resident]
                found |= here
        return found

    def take_name(self, pipeline: PipelineId) -> None:
        """A pipeline of our own has this name."""
        with self._lock:
            self._names[pipeline] = None

    def driver(self, pipeline: PipelineId) -> ForeignDriver | None:
        """None for a pipeline of our own, and for one that is over."""
        with self._lock:
            return self._drivers.get(pipeline)

    def drop_driver(self, pipeline: PipelineId) -> ForeignDriver | None:
        with self._lock:
            return self._drivers.pop(pipeline, None)

    def drivers(self) -> list[ForeignDriver]:
        with self._lock:
            return list(self._drivers.values())

    def has_news(self) -> bool:
        """Whether there is an event that the backend has not taken."""
        with self._lock:
            return bool(self._events)

    def take(self) -> tuple[list[Event], list[Note], list[tuple[Resident, OrderId]]]:
        """(events, notes, states that have left) since the last call."""
        with self._lock:
            taken = self._events, self._notes, self._left
            self._events, self._notes, self._left = [], [], []
            for resident, _ in taken[2]:
                for here in self._left_over.values():
                    here.pop(resident, None)
        return taken

    def _say(self, event: Event) -> None:
        with self._lock:
            self._events.append(event)
        self.wake()


@dataclass(slots=True, eq=False)
class _Held:
    """An order that waits for states to leave its devices."""

    action: RunStage
    awaited: dict[Resident, None] = field(default_factory=dict)
    """States of foreign pipelines that are there still."""
    awaits_own: bool = False
    """Whether states of our own workers are."""
    is_pausing: bool = False


class ForeignBackend:
    """A backend beside another: foreign pipelines to their drivers, all else to `own`; see the module."""

    def __init__(self, own: MakesRoom, front: ForeignFront) -> None:
        self._own = own
        self._front = front
        self._running: dict[OrderId, RunStage] = {}
        """Orders of foreign pipelines that have begun, or are held."""
        self._held: dict[OrderId, _Held] = {}
        self._said: list[Event] = []
        """Events of this class's own, for the next poll."""
        self._ended: dict[PipelineId, ForeignDriver] = {}
        """Drivers of pipelines that are over, until what ended them was told."""
        front.wake = own.wake

    def now_s(self) -> float:
        return self._own.now_s()

    def add_pipeline(self, submission: Submission) -> None:
        self._front.take_name(submission.pipeline.id)
        self._own.add_pipeline(submission)

    def weights_sha256(self, pipeline: PipelineId) -> str | None:
        driver = self._driver_or_ended(pipeline)
        return self._own.weights_sha256(pipeline) if driver is None else driver.weights_sha256()

    def execute(self, action: Action) -> None:
        match action:
            case RunStage():
                self._run(action)
            case Pause() if action.order in self._held or action.order in self._running:
                self._pause(action)
            case SetDeviceFraction() if action.order in self._running:
                pass  # its driver has whole devices
            case Admit() | Relocate() | Queue() | Refuse() | ExpectSteps() | Park() | Release():
                self._place(action)
            case _ if (named := getattr(action, "pipeline", None)) is None or self._front.driver(named) is None:
                self._own.execute(action)

    def poll(self, timeout_s: float) -> tuple[Sequence[Event], Sequence[Note]]:
        events, notes = self._own.poll(0.0 if self._said else timeout_s)
        for event in events:
            self._note_own(event)
        said, more_notes, left = self._front.take()
        for resident, order in left:
            self._leave(resident, order)
        said, self._said = [*self._said, *said], []
        true = [event for event in said if self._is_true(event)]
        return [*events, *true], [*notes, *more_notes]

    def close(self) -> None:
        for driver in self._front.drivers():
            driver.release()
        self._own.close()

    # ------------------------------------------------------------------ orders

    def _run(self, action: RunStage) -> None:
        """Begin the order, or hold it until what it evicts has left."""
        is_foreign = self._front.driver(action.pipeline) is not None
        if is_foreign:
            self._running[action.order] = action
        left_over = self._front.left_over(action.devices, action.pipeline)
        held = _Held(action, awaited=dict.fromkeys(left_over))
        for resident in action.evicted:
            if resident.pipeline == action.pipeline:
                continue
            if self._front.driver(resident.pipeline) is not None:
                held.awaited[resident] = None
            elif is_foreign:
                held.awaits_own = True
        if not held.awaited and not held.awaits_own:
            self._begin(action)
            return
        self._held[action.order] = held
        if held.awaits_own:
            self._own.make_room(action, lambda seconds: self._have_own_left(action.order))
        for resident in list(held.awaited):
            driver = left_over.get(resident) or self._front.driver(resident.pipeline)
            assert driver is not None
            driver.evict(resident, action.devices, action.order)

    def _begin(self, action: RunStage) -> None:
        driver = self._front.driver(action.pipeline)
        if driver is None:
            self._own.execute(action)
        else:
            driver.begin(action)

    def _have_own_left(self, order: OrderId) -> None:
        held = self._held.get(order)
        if held is not None:
            held.awaits_own = False
            self._begin_if_free(held)

    def _leave(self, resident: Resident, order: OrderId) -> None:
        held = self._held.get(order)
        if held is not None:
            held.awaited.pop(resident, None)
            self._begin_if_free(held)

    def _begin_if_free(self, held: _Held) -> None:
        if held.awaited or held.awaits_own:
            return
        del self._held[held.action.order]
        self._begin(held.action)
        if held.is_pausing:
            self.execute(Pause(order=held.action.order))

    def _pause(self, action: Pause) -> None:
        held = self._held.get(action.order)
        if held is not None:
            held.is_pausing = True  # what leaves for it is on its way: it begins, and pauses at once
            return
        driver = self._front.driver(self._running[action.order].pipeline)
        if driver is not None:
            driver.pause(action.order)

    # ------------------------------------------------------------------ pipelines come and go

    def _place(self, action: Admit | Relocate | Queue | Refuse | ExpectSteps | Park | Release) -> None:
        driver = self._front.driver(action.pipeline)
        if driver is None:
            if isinstance(action, Park | Release):
                self._drop_orders(action.pipeline)
            self._own.execute(action)
            return
        match action:
            case Park():
                self._park(action.pipeline, driver)
            case Release():
                self._drop_orders(action.pipeline)
                self._end(action.pipeline)
            case Refuse():
                driver.tell(action)
                self._end(action.pipeline)
            case _:
                driver.tell(action)

    def _park(self, pipeline: PipelineId, driver: ForeignDriver) -> None:
        self._drop_orders(pipeline)
        driver.park()
        self._forget_states(pipeline)

    def _end(self, pipeline: PipelineId) -> None:
        driver = self._front.drop_driver(pipeline)
        if driver is not None:
            driver.release()
            self._ended[pipeline] = driver
        self._forget_states(pipeline)

    def _forget_states(self, pipeline: PipelineId) -> None:
        """States of the pipeline that others wait for are gone with it."""
        for held in list(self._held.values()):
            for resident in [one for one in held.awaited if one.pipeline == pipeline]:
                self._leave(resident, held.action.order)

    def _drop_orders(self, pipeline: PipelineId, device: DeviceId | None = None) -> None:
        """Orders of the pipeline have ended without an event that names them."""
        for orders in (self._running, {order: held.action for order, held in self._held.items()}):
            for order, action in list(orders.items()):
                if action.pipeline == pipeline and (device is None or device in action.devices):
                    self._running.pop(order, None)
                    self._held.pop(order, None)

    # ------------------------------------------------------------------ what is said

    def _note_own(self, event: Event) -> None:
        """Something that `own` says may end orders that are held for it, or those of foreign pipelines."""
        match event:
            case PipelineFailed() | PipelineRestarted():
                self._drop_orders(event.pipeline)
            case WorkerLost():
                self._drop_orders(event.pipeline, event.device)
            case NodeLost():
                lost = [one.pipeline for one in self._running.values() if _is_on(one, event)]
                for pipeline in dict.fromkeys(lost):
                    driver = self._front.driver(pipeline)
                    if driver is not None:
                        self._park(pipeline, driver)

    def _is_true(self, event: Event) -> bool:
        """Whether what a front said still holds; the orders that it ends are forgotten."""
        match event:
            case StageFinished() | StagePaused():
                return self._running.pop(event.order, None) is not None
            case ChunkFinished():
                return event.order in self._running
            case PipelineFailed() | PipelineRestarted():
                self._drop_orders(event.pipeline)
                return self._front.driver(event.pipeline) is not None
            case WorkerLost():
                self._drop_orders(event.pipeline, event.device)
                return self._front.driver(event.pipeline) is not None
            case WorkArrived() | WorkWithdrawn() | ClientFinished() | PipelineCancelled():
                return self._front.driver(event.pipeline) is not None
        return True

    # ------------------------------------------------------------------ as a listener of the controller

    def update(self, now_s: float, events: Sequence[Event], actions: Sequence[Action], notes: Sequence[Note]) -> None:
        """Tell drivers what ended their pipelines. The last listener: others ask for the weights of what is over."""
        for event in events:
            if isinstance(event, PipelineCancelled | PipelineFailed):
                driver = self._driver_or_ended(event.pipeline)
                if driver is not None:
                    driver.tell(event)
        self._ended.clear()

    def _driver_or_ended(self, pipeline: PipelineId) -> ForeignDriver | None:
        return self._front.driver(pipeline) or self._ended.get(pipeline)


def _is_on(action: RunStage, event: NodeLost) -> bool:
    return any(device.node_id == event.node for device in action.devices)
