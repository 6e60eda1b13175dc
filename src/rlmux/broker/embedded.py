"""The broker in a server's or a command's process: programs take turns with its pipelines, under one scheduler.

    programs ── socket ─▶ EmbeddedBroker (a thread) ── submit, arrived, finished, left ─▶ ForeignFront ─▶ controller
        ▲                     │  Desk                                                                      │
        └── granted, evict ───┘◀──────────── begin, evict, release ── a driver for each program ◀──────────┘

The scheduler says which states leave a device for an order, whatever they are of. Nothing is said to a program before
the notes that it rests on are in the log: the controller's listener (`update`) counts them.

A broker that was killed finds programs that still hold a pool, or lie on it. To the scheduler, which begins anew, the
device is free: an order for it is held until they have left (`ForeignFront.leave_over`).
"""

from __future__ import annotations

import math
import queue
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rlmux.broker.backend import take_line
from rlmux.broker.desk import Desk
from rlmux.broker.programs import NO_MORE
from rlmux.broker.recall import recall
from rlmux.broker.server import Server
from rlmux.core.actions import Refuse, RunStage
from rlmux.core.events import Event, PipelineCancelled, PipelineFailed, PipelineSubmitted
from rlmux.core.model import Cluster, DeviceId, OrderId, Phase, Pipeline, PipelineId, Resident
from rlmux.runtime.backend import Note
from rlmux.runtime.foreign import ForeignFront, News
from rlmux.runtime.supervised import SupervisedThread

_LOOK_EVERY_S = 0.1


class EmbeddedBroker:
    """The thread that programs talk to; see the module's picture."""

    def __init__(self, cluster: Cluster, front: ForeignFront, server: Server, **options: Any) -> None:
        """`options`: those of a Desk, but its clock."""
        self._cluster = cluster
        self._front = front
        self._server = server
        self.desk = Desk(cluster, front.reserve, now_s=time.monotonic, **options)
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._looked_s = 0.0
        self._num_told = 0
        """Notes that were given to the controller."""
        self._num_committed = 0
        """Those of them that are in the log."""
        self._is_closing = False
        self.thread = SupervisedThread(self._run, "permits")

    @property
    def address(self) -> str:
        """What RLMUX_BROKER has to be."""
        return self._server.address

    def take_up(self, folder: Path) -> None:
        """Go on with what the log of a server that was killed knows of programs; before `start`."""
        recall(folder, self.desk, time.monotonic())
        for pool, lodgers in self.desk.ledger.lodgers.items():
            for name in lodgers:
                program = PipelineId(name)
                phase = self._cluster.pools[pool].phase
                self._front.leave_over(DeviceId(pool, 0, 0), Resident(program, phase), _Driver(self, program))

    def start(self) -> None:
        self.thread.start()

    def close(self) -> None:
        """End the thread, and every connection. Programs go on, and wait for the next server."""
        self._is_closing = True
        self._server.wake()
        if self.thread.is_alive():
            self.thread.join()
        self._server.close()

    def do(self, command: Callable[[], None]) -> None:
        """Have the thread make this call; from any other."""
        self._commands.put(command)
        self._server.wake()

    def pool_of(self, phase: Phase, devices: Sequence[DeviceId]) -> str:
        """The pool of these devices on which a program's state for the phase lies."""
        serving = self._cluster.pool_serving(phase)
        return next((one.pool for one in devices if serving and one.pool == serving.name), devices[0].pool)

    def tell_left(self, resident: Resident, order: OrderId) -> None:
        self._front.left(resident, order)

    # --- as a listener of the controller ------------------------------------------------------------------------

    def update(self, now_s: float, events: Sequence[object], actions: Sequence[object], notes: Sequence[Note]) -> None:
        """What was told up to these notes is in the log: what rests on it may be said. Raises ThreadDiedError."""
        self.thread.check()
        num_permits = sum(note.type == "permit" for note in notes)
        if num_permits:
            self._num_committed += num_permits
            self._server.wake()

    # --- this thread ---------------------------------------------------------------------------------------------

    def _run(self) -> None:
        self._pass_on()
        while not self._is_closing:
            for connection, line in self._server.receive(_LOOK_EVERY_S):
                take_line(self.desk, self._server, connection, line)
            while not self._commands.empty():
                self._commands.get()()
            if time.monotonic() - self._looked_s >= _LOOK_EVERY_S:
                self._looked_s = time.monotonic()
                self.desk.look_around()
            self._pass_on()
            if self._num_committed >= self._num_told:
                self.desk.settle()
            outgoing, self.desk.outgoing = self.desk.outgoing, []
            for connection, message in outgoing:
                self._server.send(connection, message)

    def _pass_on(self) -> None:
        events, notes = self.desk.take_news()
        self._num_told += len(notes)
        for note in notes:
            self._front.note(note.type, **note.fields)
        for event in events:
            self._say(event)
        if notes and not events:
            self._front.wake()

    def _say(self, event: Event) -> None:
        if isinstance(event, PipelineSubmitted):
            pipeline = self._sized(event.pipeline)
            self._front.submit(pipeline, _Driver(self, pipeline.id))
        else:
            self._front.say(event)

    def _sized(self, pipeline: Pipeline) -> Pipeline:
        """A program of unknown size fills its device; where the file gives devices no memory, it takes none."""
        if not all(math.isinf(pool.device_memory_bytes) for pool in self._cluster.pools.values()):
            return pipeline
        footprint = replace(pipeline.footprint, rollout_device_bytes=0.0, train_device_bytes=0.0)
        return replace(pipeline, footprint=footprint)


class _Driver:
    """Carries out the orders of one program; called in the controller's thread, returns at once."""

    def __init__(self, permits: EmbeddedBroker, name: PipelineId) -> None:
        self._permits = permits
        self._name = name

    def begin(self, order: RunStage) -> None:
        self._permits.do(lambda: self._permits.desk.begin(order))

    def pause(self, order: OrderId) -> None:
        """A phase ends by itself."""

    def evict(self, resident: Resident, devices: tuple[DeviceId, ...], order: OrderId) -> None:
        def tell() -> None:
            self._permits.tell_left(resident, order)

        pool = self._permits.pool_of(resident.phase, devices)
        self._permits.do(lambda: self._permits.desk.evict(self._name, pool, tell))

    def park(self) -> None:
        """Its one device is its place for good: there is no other to go to."""

    def release(self) -> None:
        self._refuse(NO_MORE)

    def tell(self, news: News) -> None:
        match news:
            case Refuse():
                self._refuse(news.reason)
            case PipelineCancelled() | PipelineFailed():
                self._refuse(NO_MORE)

    def weights_sha256(self) -> str | None:
        return None

    def _refuse(self, reason: str) -> None:
        self._permits.do(lambda: self._permits.desk.release(self._name, reason))
