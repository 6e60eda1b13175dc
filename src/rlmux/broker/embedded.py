"""The broker in a server's or a command's process: programs take turns with its pipelines, under one scheduler.

    programs ── socket ─▶ EmbeddedBroker (a thread) ── events, notes ─▶ Inbox ─▶ ExternalPrograms ─▶ controller
        ▲                     │  PermitManager                                          │
        └── granted, evict ───┘◀──────── begin, evict ── _ExternalProgram ◀─────────────┘

The scheduler decides which states leave a device for an order, in any pipeline. A message goes to a program once the
notes behind it are in the log: `update`, a listener of the controller, counts them.

After a kill, programs may still hold a pool or be resident on it. The restarted scheduler counts the device as free:
its orders wait until they have left (`ExternalPrograms.add_leftover`).
"""

from __future__ import annotations

import hmac
import math
import queue
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rlmux.broker.permit_manager import PermitManager
from rlmux.broker.program_roster import NO_MORE
from rlmux.broker.recovery import restore_programs
from rlmux.broker.server import PermitServer, ProgramConnection
from rlmux.broker.wire import WireError, read_message, write_message
from rlmux.core.actions import Refuse, Release, RunStage
from rlmux.core.events import PipelineCancelled, PipelineFailed, PipelineSubmitted
from rlmux.core.model import Cluster, DeviceId, Phase, Pipeline, PipelineId, Resident
from rlmux.log.notes import Note, PermitNote
from rlmux.runtime.control.inbox import Command, Inbox
from rlmux.runtime.control.supervised_thread import SupervisedThread
from rlmux.runtime.orders.external_programs import Report
from rlmux.share import prove

_LOOK_EVERY_S = 0.1
_MAX_ERRORS = 100
"""Invalid lines after which a connection is dropped."""


class EmbeddedBroker:
    """The thread that programs talk to; see the module's picture."""

    def __init__(self, cluster: Cluster, inbox: Inbox, server: PermitServer, **options: Any) -> None:
        """`options`: of the PermitManager, except its clock."""
        self._cluster = cluster
        self._inbox = inbox
        self._server = server
        self.manager = PermitManager(cluster, inbox.claim, now_s=time.monotonic, **options)
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._looked_s = 0.0
        self._num_noted = 0
        """Notes passed to the controller."""
        self._num_committed = 0
        """Notes committed to the log."""
        self._is_closing = False
        self.thread = SupervisedThread(self._run, "permits")

    @property
    def address(self) -> str:
        """Value of RLMUX_BROKER."""
        return self._server.address

    def restore(self, folder: Path) -> None:
        """Restore the programs in a killed server's log; before `start`."""
        restore_programs(folder, self.manager, time.monotonic())
        for pool, lodgers in self.manager.ledger.lodgers.items():
            for name in lodgers:
                self._add_leftover(DeviceId(pool, 0, 0), PipelineId(name), self._cluster.pools[pool].phase)

    def _add_leftover(self, device: DeviceId, name: PipelineId, phase: Phase) -> None:
        program = _ExternalProgram(self, name)
        self.call_controller(lambda backend: backend.external.add_leftover(device, Resident(name, phase), program))

    def start(self) -> None:
        self.thread.start()

    def close(self) -> None:
        """End the thread and every connection. Programs continue and wait for the next server."""
        self._is_closing = True
        self._server.wake()
        if self.thread.is_alive():
            self.thread.join()
        self._server.close()

    def do(self, command: Callable[[], None]) -> None:
        """Run this call in the broker's thread. Thread-safe."""
        self._commands.put(command)
        self._server.wake()

    def pool_of(self, phase: Phase, devices: Sequence[DeviceId]) -> str:
        """The pool of these devices and the phase."""
        serving = self._cluster.pool_serving(phase)
        return next((device.pool for device in devices if serving and device.pool == serving.name), devices[0].pool)

    def call_controller(self, command: Command) -> None:
        """Run this call in the controller's thread."""
        self._inbox.call_soon(command)

    # --- as a listener of the controller ------------------------------------------------------------------------

    def update(self, now_s: float, events: Sequence[object], actions: Sequence[object], notes: Sequence[Note]) -> None:
        """Count committed notes, which releases the messages behind them. Raises ThreadDiedError."""
        self.thread.check()
        for each in (*events, *actions):
            match each:
                case Refuse():
                    self._release(each.pipeline, each.reason)
                case PipelineCancelled() | PipelineFailed() | Release():
                    self._release(each.pipeline, NO_MORE)
        num_permits = sum(isinstance(note, PermitNote) for note in notes)
        if num_permits:
            self._num_committed += num_permits
            self._server.wake()

    # --- this thread ---------------------------------------------------------------------------------------------

    def _run(self) -> None:
        self._forward()
        while not self._is_closing:
            for connection, line in self._server.receive(_LOOK_EVERY_S):
                take_line(self.manager, self._server, connection, line)
            while not self._commands.empty():
                self._commands.get()()
            if time.monotonic() - self._looked_s >= _LOOK_EVERY_S:
                self._looked_s = time.monotonic()
                self.manager.poll_programs()
            self._forward()
            if self._num_committed >= self._num_noted:
                self.manager.settle()
            outgoing, self.manager.outgoing = self.manager.outgoing, []
            for connection, message in outgoing:
                self._server.send(connection, message)

    def _release(self, name: PipelineId, reason: str) -> None:
        self.do(lambda: self.manager.release(name, reason))

    def _forward(self) -> None:
        events, notes = self.manager.drain()
        self._num_noted += len(notes)
        for note in notes:
            self._note(note)
        for event in events:
            self._emit(event)

    def _note(self, note: Note) -> None:
        self.call_controller(lambda backend: backend.add_note(note))

    def _emit(self, event: PipelineSubmitted | Report) -> None:
        if not isinstance(event, PipelineSubmitted):
            self.call_controller(lambda backend: backend.external.report(event))
            return
        pipeline = self._sized(event.pipeline)
        program = _ExternalProgram(self, pipeline.id)
        self.call_controller(lambda backend: backend.external.add(pipeline, program))

    def _sized(self, pipeline: Pipeline) -> Pipeline:
        """A program of unknown size fills its device; it takes no memory if the file gives devices none."""
        if not all(math.isinf(pool.device_memory_bytes) for pool in self._cluster.pools.values()):
            return pipeline
        footprint = replace(pipeline.footprint, rollout_device_bytes=0.0, train_device_bytes=0.0)
        return replace(pipeline, footprint=footprint)


class _ExternalProgram:
    """Carries out the orders of one program; called in the controller's thread, returns at once."""

    def __init__(self, broker: EmbeddedBroker, name: PipelineId) -> None:
        self._broker = broker
        self._name = name

    def begin(self, order: RunStage) -> None:
        self._broker.do(lambda: self._broker.manager.begin(order))

    def evict(self, resident: Resident, devices: Sequence[DeviceId], on_left: Callable[[], None]) -> None:
        def report_left() -> None:
            self._broker.call_controller(lambda backend: on_left())

        pool = self._broker.pool_of(resident.phase, devices)
        self._broker.do(lambda: self._broker.manager.evict(self._name, pool, report_left))


def take_line(manager: PermitManager, server: PermitServer, connection: ProgramConnection, line: bytes | None) -> None:
    """Handle a received line; None: the connection has ended."""
    if line is None:
        manager.lose_connection(connection)
        return
    message = None
    try:
        message = read_message(line)
        manager.take_message(connection, message)
    except WireError as error:
        about = {key: message[key] for key in ("id", "fence") if message and key in message}
        server.send(connection, write_message("error", code=error.code, text=str(error), **about))
        connection.num_errors += 1
        if connection.num_errors >= _MAX_ERRORS:
            connection.is_gone = True


def token_check(token: str) -> Callable[[ProgramConnection, str | None], bool]:
    """Whether a connection may register: any on a unix socket, one with the token over TCP."""

    def is_allowed(connection: ProgramConnection, proof: str | None) -> bool:
        return not connection.nonce or hmac.compare_digest(prove(token, connection.nonce), proof or "")

    return is_allowed
