"""Permits beside other pipelines: one controller and one ledger of devices, for programs and what a server runs itself.

    programs ── socket ─▶ PermitsBeside (a thread) ── submit, arrived, finished, left ─▶ ForeignFront ─▶ controller
        ▲                     │  SharedDesk                                                                │
        └── granted, evict ───┘◀──────────── begin, evict, release ── a driver for each program ◀──────────┘

The scheduler says which states leave a device for an order, whatever they are of, so the desk's own ledger has no limit
here: it keeps the fences, and what lies where. Nothing is said to a program before the notes that it rests on are in
the log: the controller's listener (`update`) counts them.

A server that was killed finds programs that still hold a pool, or lie on it. To the scheduler, which begins anew, the
device is free: an order for it is held until they have left (`ForeignFront.leave_over`).
"""

from __future__ import annotations

import math
import queue
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rlmux.broker.backend import take_line
from rlmux.broker.desk import Desk
from rlmux.broker.programs import NO_MORE, Program, Rank
from rlmux.broker.recall import recall
from rlmux.broker.residency import Place, Residency
from rlmux.broker.server import Server
from rlmux.core.actions import Refuse, RunStage
from rlmux.core.events import Event, PipelineCancelled, PipelineFailed, PipelineSubmitted
from rlmux.core.model import Cluster, DeviceId, OrderId, Phase, Pipeline, PipelineId, Resident
from rlmux.runtime.backend import Note
from rlmux.runtime.foreign import ForeignFront, News
from rlmux.runtime.supervised import SupervisedThread

_LOOK_EVERY_S = 0.1
_ANOTHER = PipelineId("another pipeline")
"""What a program is told that it makes room for: the order that waits may be of any."""


class SharedDesk(Desk):
    """A desk that leaves it to the scheduler who has to leave, and tells when that is done."""

    def __init__(self, cluster: Cluster, reserve: Callable[[PipelineId], None], **options: Any) -> None:
        """`reserve`: takes the name of a program before it joins. Raises UserError where a pipeline has it."""
        super().__init__(cluster, **options)
        self._reserve = reserve
        self.ledger = Residency(dict.fromkeys(cluster.pools, math.inf), next_fence=options.get("first_fence", 1))
        self._once_left: defaultdict[tuple[PipelineId, str], list[Callable[[], None]]] = defaultdict(list)
        """Calls that wait for a program to leave a pool."""

    def submit(self, program: Program) -> None:
        """Raises UserError for a name that a pipeline beside the programs has: that program alone is refused."""
        self._reserve(program.id)
        super().submit(program)

    def evict(self, name: PipelineId, pool: str, then: Callable[[], None]) -> None:
        """Have a program leave a pool for another pipeline; `then` is called once it has, or is gone. Where the file
        says nothing of the pool's memory there is room for all: it has to end its permit only."""
        program, lodger = self.roster.programs.get(name), self.ledger.lodgers[pool].get(name)
        if program is None or lodger is None or (lodger.place is not Place.HOLDS and self._has_room(pool)):
            then()
            return
        self._once_left[name, pool].append(then)
        if lodger.place in (Place.STAYS, Place.STUCK):  # one that holds the pool is told at its phase's end
            self._tell_to_leave(program, pool, _ANOTHER)

    def _end_permit_of(self, program: Program, rank: Rank, message: dict[str, Any]) -> None:
        super()._end_permit_of(program, rank, message)
        for name, pool in [each for each in self._once_left if each[0] == program.id]:
            lodger = self.ledger.lodgers[pool].get(name)
            if lodger is None or lodger.place is not Place.STAYS:
                continue
            if self._has_room(pool):
                self._call_waiting(name, pool)
            else:
                self._tell_to_leave(program, pool, _ANOTHER)

    def _on_left(self, program: Program, rank: Rank, message: dict[str, Any]) -> None:
        super()._on_left(program, rank, message)
        self._tell_of(program.id, message["pool"])

    def _lose_rank(self, program: Program, rank: Rank) -> None:
        super()._lose_rank(program, rank)
        for name, pool in list(self._once_left):
            if name == program.id:
                self._tell_of(name, pool)

    def _tell_of(self, name: PipelineId, pool: str) -> None:
        if name not in self.ledger.lodgers[pool]:
            self._call_waiting(name, pool)

    def _call_waiting(self, name: PipelineId, pool: str) -> None:
        for then in self._once_left.pop((name, pool), []):
            then()

    def _has_room(self, pool: str) -> bool:
        return math.isinf(self._cluster.pools[pool].device_memory_bytes)


class PermitsBeside:
    """The thread that programs talk to; see the module's picture."""

    def __init__(self, cluster: Cluster, front: ForeignFront, server: Server, **options: Any) -> None:
        """`options`: those of a Desk, but its clock."""
        self._cluster = cluster
        self._front = front
        self._server = server
        self.desk = SharedDesk(cluster, front.reserve, now_s=time.monotonic, **options)
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

    def __init__(self, permits: PermitsBeside, name: PipelineId) -> None:
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
