"""The broker behind gRPC, for clients written for the time-slice orchestrator: its four calls, on the same desk.

    a client ── Acquire ─▶ GrpcFront ── hello, ask ─▶ Desk      the messages of `wire.py`, as if through a socket
             ◀── success ──        ◀───── granted ───
             ── Yield ────▶        ── done ─▶       ◀── after ─ pending_waiters: how many waited at that moment

A job in a group is a program of its own, JOB.GROUP, beside those that join with `rlmux.share`: one desk, one policy,
one ledger. The front decides nothing. It runs in a thread with an event loop; calls wait as coroutines, and all that
concerns the desk is done in the desk's own thread (`do`).

How a permit is held: the protocol has no sign of life between `Acquire` and `Yield`. So the front looks for the process
behind the connection (`loopback.py`), and the permit is that process's, as one over the broker's unix socket is: it
ends with `Yield`, or when the process is gone, however it ended. A client whose process cannot be seen, or is of
another user, is refused; so the front listens inside the machine only.

What such a client does not get: it cannot be told to leave a pool. It is refused where a pool has `device_memory_gb`,
and its memory stays where it is.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import re
import socket
import threading
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any
from urllib.parse import unquote

import grpc
import grpc.aio

from rlmux.broker.backend import take_line
from rlmux.broker.desk import Desk
from rlmux.broker.group_view import GroupView, view_of
from rlmux.broker.grpc_messages import MESSAGES, ROLE_BACKGROUND, SERVICES, GroupState, JobState
from rlmux.broker.loopback import find_process, find_socket
from rlmux.broker.processes import Process, is_alive
from rlmux.broker.residency import Place
from rlmux.broker.server import Inside, Server
from rlmux.broker.wire import WIRE_VERSION, write_message
from rlmux.core.errors import UserError
from rlmux.core.model import Cluster, Phase

_ADDRESS = re.compile(r"(localhost|127\.\d{1,3}\.\d{1,3}\.\d{1,3}):(\d{1,5})")
_PEER = re.compile(r"ipv(?:4:|6:\[::ffff:)([\d.]+)\]?:(\d+)")
_LOOK_EVERY_S = 1.0
_OPTIONS = (
    ("grpc.so_reuseport", 0),  # or two brokers share a port, and neither says so
    ("grpc.keepalive_permit_without_calls", 1),  # clients that hold a permit are silent, and may ping
    ("grpc.http2.max_ping_strikes", 0),
)
_JOB_STATES = {
    Place.HOLDS: JobState.RUNNING,
    Place.STAYS: JobState.RUNNING,
    Place.LEAVING: JobState.TRANSITIONING,
    Place.STUCK: JobState.FAULTED,
    None: JobState.IDLE,
}

Do = Callable[[Callable[[], None]], None]
"""Have the desk's thread make a call."""


class _Refusal(Exception):
    """A call that is answered with a status other than OK."""

    def __init__(self, code: grpc.StatusCode, text: str) -> None:
        super().__init__(text)
        self.code = code


class _Member:
    """One job in one group: a program to the desk. All of it belongs to the front's event loop."""

    def __init__(self, front: GrpcFront, group: str, name: str, process: Process) -> None:
        self.group = group
        self.name = name
        self.process = process
        self.connection = Inside(pid=process.pid, deliver=lambda line: front.soon(lambda: self.take(line)))
        self.joined: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.fence: int | None = None
        """Permit that it holds."""
        self.granted_s = 0.0
        self.ask = 0
        """Number of its last ask."""
        self.granted: asyncio.Future[None] | None = None
        """What calls wait for that ask; None where none does."""
        self.num_waiting = 0
        """Calls that wait for it."""
        self.ending: tuple[int, asyncio.Future[None]] | None = None
        """Fence of a permit that was given back, and what waits for the answer."""
        self._front = front

    def tell(self, kind: str, **fields: Any) -> None:
        self._front.post(self.connection, write_message(kind, **fields))

    def take(self, line: bytes) -> None:
        """A message of the desk."""
        message = json.loads(line)
        match message["t"]:
            case "welcome":
                _settle(self.joined)
            case "refused":
                _settle(self.joined, _Refusal(grpc.StatusCode.INVALID_ARGUMENT, message["reason"]))
            case "granted" if self.granted is not None and message["id"] == self.ask:
                self.fence, self.granted_s = message["fence"], time.monotonic()
                _settle(self.granted)
                self.granted = None
            case "after" if self.ending is not None and self.ending[0] == message["fence"]:
                _settle(self.ending[1])
                self.ending = None
            case "error" if self.granted is not None and message.get("id") == self.ask:
                _settle(self.granted, _Refusal(grpc.StatusCode.FAILED_PRECONDITION, message["text"]))
                self.granted = None
            case "evict":
                error = "a client of the time-slice protocol cannot be told to leave"
                self.tell("failed_to_leave", pool=message["pool"], error=error)

    def end(self) -> None:
        """Its process is gone, or the front ends."""
        gone = _Refusal(grpc.StatusCode.UNAVAILABLE, "the process that this job began with is gone")
        for future in (self.joined, self.granted, self.ending and self.ending[1]):
            if future is not None:
                _settle(future, gone)
        self.granted = self.ending = None
        self._front.post(self.connection, None)


class GrpcFront:
    """Answers the calls of SERVICES; see the module. Raises UserError for an address that it cannot have."""

    def __init__(self, address: str, option: str) -> None:
        """`address`: HOST:PORT inside this machine; port 0 takes a free one. `option`: what named it, for errors."""
        found = _ADDRESS.fullmatch(address)
        if found is None or int(found[2]) > 65535:
            raise UserError(
                f"{option} {address}: accepted: 127.0.0.1:PORT (this protocol has no token, and the processes of "
                "other machines cannot be seen)"
            )
        self._host = "127.0.0.1" if found[1] == "localhost" else found[1]
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="grpc-front", daemon=True)
        self._thread.start()
        self._members: dict[tuple[str, str], _Member] = {}
        self._server: Any = None
        self._watch: asyncio.Task[None] | None = None
        self._cluster: Cluster
        self._desk: Desk
        self._lines: Server
        self._do: Do
        try:
            self._port = self._run(self._bind(int(found[2])))
        except (RuntimeError, OSError):
            self.close()
            raise UserError(f"{option} {address}: cannot listen there; accepted: a free port") from None

    @property
    def address(self) -> str:
        return f"{self._host}:{self._port}"

    def start(self, cluster: Cluster, desk: Desk, lines: Server, do: Do) -> None:
        """Answer calls from now on. `lines`: what sends the desk's answers."""
        self._cluster, self._desk, self._lines, self._do = cluster, desk, lines, do
        self._run(self._serve())

    def close(self) -> None:
        """Calls that wait are ended. Programs keep what they hold: the next broker knows them."""
        if self._server is not None:
            self._run(self._stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def soon(self, call: Callable[[], None]) -> None:
        """Have the event loop make a call; from the desk's thread."""
        with suppress(RuntimeError):  # it is closed: no call waits any more
            self._loop.call_soon_threadsafe(call)

    def post(self, connection: Inside, line: bytes | None) -> None:
        """A line of a member, to the desk; None: its connection has ended."""
        self._do(lambda: take_line(self._desk, self._lines, connection, line))

    # ------------------------------------------------------------------ the four calls

    async def _acquire(self, request: Any, peer: str) -> Any:
        inode = self._check(request, peer)
        if not math.isinf(self._cluster.pools[request.group_id].device_memory_bytes):
            raise _Refusal(
                grpc.StatusCode.FAILED_PRECONDITION,
                f"group {request.group_id!r} has device_memory_gb, so programs have to leave it for each other, and a "
                "client of this protocol cannot be told to; accepted: a pool without it, or rlmux.share",
            )
        began_s = time.monotonic()
        member = await self._join(request.job_id, request.group_id, inode)
        if member.ending is not None:
            await asyncio.shield(member.ending[1])
        if member.fence is None:  # a job that holds the group has it
            await self._wait_for_grant(member)
        waited_ms = round(1000 * (time.monotonic() - began_s))
        return MESSAGES["AcquireResponse"](success=True, waited_ms=waited_ms, context_restored=False)

    async def _yield(self, request: Any, peer: str) -> Any:
        inode = self._check(request, peer)
        name = _name(request.job_id, request.group_id)
        is_known = await self._ask_desk(lambda: self._desk.roster.of_session(_session(name)) is not None)
        member = await self._join(request.job_id, request.group_id, inode) if is_known else None
        if member is None or member.fence is None:
            raise _Refusal(
                grpc.StatusCode.PERMISSION_DENIED,
                f"job {request.job_id!r} does not hold group {request.group_id!r}; accepted: Acquire first",
            )
        fence, member.fence = member.fence, None
        ended: asyncio.Future[None] = self._loop.create_future()
        member.ending = (fence, ended)
        line = write_message("done", fence=fence, used_s=time.monotonic() - member.granted_s)

        def give_back() -> int:
            num_waiting = view_of(self._desk, request.group_id).num_waiting
            take_line(self._desk, self._lines, member.connection, line)
            return num_waiting

        num_waiting = await self._ask_desk(give_back)
        await asyncio.shield(ended)
        if member.fence is None and member.granted is None:
            member.tell("bye")  # it may end now, or ask again
        return MESSAGES["YieldResponse"](success=True, pending_waiters=num_waiting, snapshot_deferred=num_waiting == 0)

    async def _list_groups(self, request: Any, peer: str) -> Any:
        self._check_user(peer)
        return MESSAGES["ListGroupsResponse"](group_ids=list(self._cluster.pools))

    async def _get_group_status(self, request: Any, peer: str) -> Any:
        self._check_user(peer)
        self._check_group(request.group_id)
        view = await self._ask_desk(lambda: view_of(self._desk, request.group_id))
        return self._status(request.group_id, view)

    def _status(self, group: str, view: GroupView) -> Any:
        job = {member.name: job_id for (job_id, _), member in self._members.items()}  # as its client calls it
        if view.holder:
            state = GroupState.LOCKED
        elif any(place is Place.LEAVING for _, place in view.places):
            state = GroupState.SWITCHING
        else:
            state = GroupState.IDLE_YIELDED if view.last else GroupState.IDLE
        status = MESSAGES["GroupStatus"](
            group_id=group,
            group_state=state,
            locking_job=job.get(view.holder, view.holder),
            active_job=job.get(view.last, view.last),
            loaded_job=job.get(view.last, view.last),
            waiter_queue_depth=view.num_waiting,
        )
        if view.holder:
            status.state_timestamp.seconds = int(view.held_since)
            status.state_timestamp.nanos = int(view.held_since % 1 * 1e9)
        states = [
            MESSAGES["AgentJobState"](
                agent=socket.gethostname(), job_state=_JOB_STATES[place], job_id=job.get(name, name)
            )
            for name, place in view.places
        ]
        return MESSAGES["GetGroupStatusResponse"](group=status, agent_job_states=states)

    # ------------------------------------------------------------------ members

    async def _join(self, job: str, group: str, inode: str) -> _Member:
        """The job in the group: as it is known, or new, as that of the process that has the socket."""
        member = self._members.get((job, group))
        if member is not None and not is_alive(member.process):
            self._forget(job, group)
            member = None
        if member is None:
            process = find_process(inode)
            if process is None:
                raise _unseen()
            member = self._members[job, group] = _Member(self, group, _name(job, group), process)
            await self._say_hello(member)
        try:
            await asyncio.shield(member.joined)
        except _Refusal:
            if self._members.get((job, group)) is member:
                self._forget(job, group)
            raise
        return member

    async def _say_hello(self, member: _Member) -> None:
        """A broker that was started again may know it, with what it holds, and with the process that it had."""
        hello = {
            "v": WIRE_VERSION,
            "job": member.name,
            "rank": 0,
            "world": 1,
            "pid": member.process.pid,
            "host": socket.gethostname(),
            "session": _session(member.name),
            "pools": {self._phase(member.group): member.group},
        }

        def join() -> tuple[int | None, Process | None]:
            self._desk.look_around()  # an earlier process of the job may be gone since the last look
            known = self._desk.roster.of_session(_session(member.name))
            fence = known[0].fence if known else None
            holds = [] if fence is None else [member.group]
            line = write_message("hello", **hello, fence=fence, holds=holds)
            take_line(self._desk, self._lines, member.connection, line)
            return fence, known[1].process if known else None

        member.granted_s = time.monotonic()
        member.fence, process = await self._ask_desk(join)
        member.process = process or member.process

    async def _wait_for_grant(self, member: _Member) -> None:
        """Ask, unless another call of the same job has, and wait. Cancelled with the call: on its deadline, too."""
        if member.granted is None:
            member.ask += 1
            member.granted = self._loop.create_future()
            member.tell("ask", id=member.ask, pools=[member.group], phase=self._phase(member.group))
        granted = member.granted
        member.num_waiting += 1
        try:
            await asyncio.shield(granted)
        except asyncio.CancelledError:
            if member.num_waiting == 1:  # a permit that came at this very moment is given back, too
                member.granted = member.fence = None
                member.tell("withdraw", id=member.ask)
            raise
        finally:
            member.num_waiting -= 1

    def _forget(self, job: str, group: str) -> None:
        self._members.pop((job, group)).end()

    def _phase(self, group: str) -> str:
        """What the log says that it is granted for."""
        pool = self._cluster.pools[group]
        return Phase.TRAIN.value if pool.serves_both_phases else pool.phase.value

    # ------------------------------------------------------------------ what is refused

    def _check(self, request: Any, peer: str) -> str:
        """Inode of the client's end of its connection."""
        inode = self._check_user(peer)
        self._check_group(request.group_id)
        if not request.job_id:
            raise _Refusal(grpc.StatusCode.INVALID_ARGUMENT, "job_id is empty; accepted: the job's name")
        if request.role == ROLE_BACKGROUND:
            raise _Refusal(
                grpc.StatusCode.UNIMPLEMENTED,
                "role ROLE_BACKGROUND; accepted: ROLE_FOREGROUND, or none (rlmux lends nothing)",
            )
        return inode

    def _check_group(self, group: str) -> None:
        if group not in self._cluster.pools:
            raise _Refusal(
                grpc.StatusCode.NOT_FOUND,
                f"group {group!r}; accepted: the file's pools, {', '.join(self._cluster.pools)}",
            )

    def _check_user(self, peer: str) -> str:
        """Inode of the client's end of its connection. Refused: a client that is not of this machine and user."""
        found = _PEER.fullmatch(unquote(peer))
        end = None if found is None else find_socket(found[1], int(found[2]), self._port)
        if end is None or end.uid != os.getuid():
            raise _unseen()
        return end.inode

    # ------------------------------------------------------------------ threads

    async def _ask_desk(self, question: Callable[[], Any]) -> Any:
        """What the desk's thread answers."""
        answer: asyncio.Future[Any] = self._loop.create_future()

        def ask() -> None:
            found = question()
            self.soon(lambda: _settle(answer, found=found))

        self._do(ask)
        return await answer

    def _run(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    async def _bind(self, port: int) -> int:
        self._server = grpc.aio.server(options=_OPTIONS)
        calls = {
            "Acquire": self._acquire,
            "Yield": self._yield,
            "ListGroups": self._list_groups,
            "GetGroupStatus": self._get_group_status,
        }
        handlers = {
            name: grpc.unary_unary_rpc_method_handler(
                _answering(call),
                request_deserializer=MESSAGES[f"{name}Request"].FromString,
                response_serializer=MESSAGES[f"{name}Response"].SerializeToString,
            )
            for name, call in calls.items()
        }
        self._server.add_generic_rpc_handlers(
            [grpc.method_handlers_generic_handler(service, handlers) for service in SERVICES]
        )
        socket.create_server((self._host, port)).close()  # where it cannot be had, gRPC writes lines of its own
        bound = self._server.add_insecure_port(f"{self._host}:{port}")
        if not bound:
            raise OSError
        return int(bound)

    async def _serve(self) -> None:
        await self._server.start()
        self._watch = asyncio.create_task(self._look_around())

    async def _stop(self) -> None:
        if self._watch is None:
            await self._server.start()  # one that never ran would keep its port
        else:
            self._watch.cancel()
        await self._server.stop(grace=None)

    async def _look_around(self) -> None:
        """Forget jobs whose processes are gone: the desk ends their permits by itself."""
        while True:
            await asyncio.sleep(_LOOK_EVERY_S)
            for job, group in [key for key, member in self._members.items() if not is_alive(member.process)]:
                self._forget(job, group)


def _answering(call: Callable[[Any, str], Awaitable[Any]]) -> Callable[[Any, Any], Awaitable[Any]]:
    async def answer(request: Any, context: Any) -> Any:
        try:
            return await call(request, context.peer())
        except _Refusal as refusal:
            return await context.abort(refusal.code, str(refusal))

    return answer


def _settle(future: asyncio.Future[Any], error: Exception | None = None, found: Any = None) -> None:
    """Give a future its end, unless it has one: what waited for it may be gone."""
    if future.done():
        return
    if error is None:
        future.set_result(found)
    else:
        future.set_exception(error)
        future.exception()  # seen, where no call waits


def _unseen() -> _Refusal:
    return _Refusal(
        grpc.StatusCode.PERMISSION_DENIED,
        "this client's process cannot be seen; accepted: a process of this machine and of the broker's own user",
    )


def _name(job: str, group: str) -> str:
    """Name of a job in a group: it may hold several, one permit each."""
    return f"{job}.{group}"


def _session(name: str) -> str:
    """The same with every broker, so that one that was started again knows the job."""
    return f"grpc {name}"
