"""The broker between programs and the scheduler: messages become events, orders become permits.

    program ── ask ──▶ WorkArrived ──▶ scheduler ── RunStage ──▶ begin ──▶ others leave ──▶ granted ──▶ program
            ── done ─▶ StageFinished ─▶ scheduler ── RunStage for another? ──▶ settle ──▶ after: leave or stay
            ── left ─▶ the order that waited for its room begins
            gone ────▶ PipelineFailed | ClientFinished

The scheduler chooses the next program, under the file's policy, and evicts others for it (`evict`). A message is sent
after its cause is in the log: messages wait for `settle`, which follows the commit. A program requests, receives and
leaves with all its ranks: it has left when all have.

This module owns no socket and never blocks. It ends a program only for a permit held longer than the file's
`max_hold_s`.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

from rlmux.broker.permit_ledger import Permit, PoolState, Residency
from rlmux.broker.program_roster import PhaseRequest, Program, ProgramRank, Roster, rank_of
from rlmux.broker.registration import check_hello, parse_request, pipeline_of, program_of, roles_of
from rlmux.broker.server import ProgramConnection
from rlmux.broker.wire import WIRE_VERSION, WireError, write_message
from rlmux.core.actions import RunStage
from rlmux.core.errors import UserError
from rlmux.core.events import (
    ChunkFinished,
    ClientFinished,
    PipelineFailed,
    PipelineSubmitted,
    StageFinished,
    WorkArrived,
    WorkWithdrawn,
)
from rlmux.core.model import Cluster, PipelineId
from rlmux.log.notes import (
    LeaveRequestedNote,
    Note,
    PermitAdoptedNote,
    PermitEndedNote,
    PermitGrantedNote,
    PoolLeftNote,
    ProgramGoneNote,
    ProgramMarkedNote,
    RankJoinedNote,
    WorkersNote,
)
from rlmux.runtime.orders.external_programs import Report

_ANOTHER = PipelineId("another pipeline")
"""Alias of the waiting pipeline in messages to programs."""


class PermitManager:
    """Handles messages and orders; results are in `events`, `notes` and `outgoing`."""

    def __init__(
        self,
        cluster: Cluster,
        reserve: Callable[[PipelineId], None],
        *,
        policy: str,
        now_s: Callable[[], float],
        is_allowed: Callable[[ProgramConnection, str | None], bool],
        leave_limit_s: float,
        lease_s: float,
        max_hold_s: float | None = None,
        first_fence: int = 1,
    ) -> None:
        """`reserve`: reserves a program's name before it joins; raises UserError for a pipeline's name. `is_allowed`:
        whether a connection may register with this proof."""
        self._reserve = reserve
        self._cluster = cluster
        self._policy = policy
        self._now_s = now_s
        self._is_allowed = is_allowed
        self._leave_limit_s = leave_limit_s
        self._max_hold_s = math.inf if max_hold_s is None else max_hold_s
        self._roles = roles_of(cluster)
        self.ledger = Residency(cluster.pools, next_fence=first_fence)
        self._on_left_callbacks: defaultdict[tuple[PipelineId, str], list[Callable[[], None]]] = defaultdict(list)
        """Callbacks for a program's departure from a pool."""
        self.roster = Roster(lease_s=lease_s)
        self._rank_by_connection: dict[ProgramConnection, tuple[Program, ProgramRank]] = {}
        self.events: list[PipelineSubmitted | Report] = []
        self.notes: list[Note] = []
        self.outgoing: list[tuple[ProgramConnection, bytes]] = []
        """Messages ready to send, oldest first."""
        self._held_back: list[tuple[ProgramRank, bytes]] = []
        """Messages waiting for the log's commit."""

    # ------------------------------------------------------------------ from the programs

    def take_message(self, connection: ProgramConnection, message: dict[str, Any]) -> None:
        """Handle a message of `read_message`. Raises WireError, without any change, for an invalid one."""
        kind = message["t"]
        if kind == "hello":
            self._on_hello(connection, message)
            return
        if connection not in self._rank_by_connection:
            raise WireError("no_hello", f"{kind} before hello; accepted: hello first")
        program, rank = self._rank_by_connection[connection]
        if kind == "ping":
            self.outgoing.append((connection, write_message("ping")))
            return
        if kind == "bye":
            rank.has_signed_off = True
            return
        handlers: Mapping[str, Callable[[Program, ProgramRank, dict[str, Any]], None]] = {
            "ask": self._on_ask,
            "withdraw": self._on_withdraw,
            "progress": self._on_progress,
            "done": self._on_done,
            "left": self._on_left,
            "failed_to_leave": self._on_failed_to_leave,
            "workers": self._on_workers,
        }
        handlers[kind](program, rank, message)

    def lose_connection(self, connection: ProgramConnection) -> None:
        """Record a lost connection; the program's permits last until its processes are gone."""
        found = self._rank_by_connection.pop(connection, None)
        if found is not None and found[1].connection is connection:
            found[1].connection, found[1].lost_s = None, self._now_s()

    def poll_programs(self) -> None:
        """Find programs that are gone, slow to leave or overdue with their permit."""
        now_s = self._now_s()
        for program, rank in self.roster.gone_ranks(now_s):
            if not program.is_over:
                self._lose_rank(program, rank)
        for program in list(self.roster.programs.values()):
            for pool, until_s in list(program.leave_until_s.items()):
                if now_s > until_s and pool in program.leaving:
                    del program.leave_until_s[pool]
                    reason = f"it was told to leave {pool} {self._leave_limit_s:g} s ago and has not"
                    self._get_stuck(program, pool, reason)
            held_s = 0.0 if program.fence is None else now_s - program.granted_s
            if held_s > self._max_hold_s and not program.end_reason:
                pools = ", ".join(self.ledger.permits[program.fence or 0].pools)
                reason = f"it held {pools} for longer than max_hold_s, {self._max_hold_s:g} s, and was ended"
                self._mark(program, "max_hold_s", reason)
                program.end_processes(reason)
            if program.is_overdue(now_s) and "overdue" not in program.marks:
                self._mark(program, "overdue", f"it holds its permit for {held_s:.1f} s, ten times its median")

    def _on_hello(self, connection: ProgramConnection, hello: dict[str, Any]) -> None:
        if connection in self._rank_by_connection:
            raise WireError("again", "hello, a second time on one connection")
        try:
            program, rank = self._join(connection, hello)
        except UserError as error:
            self.outgoing.append((connection, write_message("refused", reason=str(error))))
            return
        self._rank_by_connection[connection] = (program, rank)
        rank.connection, rank.lost_s, rank.has_signed_off = connection, None, False
        line = write_message("welcome", v=WIRE_VERSION, policy=self._policy, pools=self._roles, id=program.id)
        self.outgoing.append((connection, line))
        self._take_over(program, rank, hello)

    def _join(self, connection: ProgramConnection, hello: dict[str, Any]) -> tuple[Program, ProgramRank]:
        """The program and its rank, new or known. Raises UserError for a refused one."""
        if not self._is_allowed(connection, hello.get("proof")):
            raise UserError("the token is not this broker's; accepted: RLMUX_TOKEN as the broker has it")
        known = self.roster.of_session(hello["session"])
        if known is not None:
            return known
        check_hello(hello, self._cluster, list(self.roster.programs.values()))
        rank = rank_of(hello, connection)
        program = self.roster.gang_of(hello["job"], hello["world"], hello["rank"])
        if program is None:
            program = self._add_program(hello)
        program.ranks[rank.number] = rank
        joined = RankJoinedNote(pipeline=program.id, rank=rank.number, session=rank.session, process=rank.process)
        self.notes.append(joined)
        return program, rank

    def _add_program(self, hello: dict[str, Any]) -> Program:
        program = program_of(hello, self.roster.free_name(hello["job"]), self._roles)
        self.submit(program)
        self.notes.append(program.note())
        return program

    def submit(self, program: Program) -> None:
        """Submit a program to the scheduler. Raises UserError for a pipeline's name; only this program is refused."""
        self._reserve(program.id)
        self.roster.add(program)
        self.events.append(PipelineSubmitted(pipeline=pipeline_of(program)))

    def _take_over(self, program: Program, rank: ProgramRank, hello: dict[str, Any]) -> None:
        """Restore what a reconnected process holds; an earlier broker may have granted it."""
        if "workers" in hello:
            self._on_workers(program, rank, hello)
        fence, held = hello.get("fence"), [pool for pool in hello.get("holds", []) if pool in self._cluster.pools]
        for pool in hello.get("resident", []):
            if pool not in held:
                self.ledger.lodge(program.id, pool)
        if fence is not None and held and fence not in self.ledger.permits and program.last_fence != fence:
            self._adopt(program, fence, held)
        elif fence is None and program.fence is not None and hello.get("asking") != _number(program.request):
            self._end_permit_of(program, rank, {"used_s": 0.0})
        if fence is None:  # else the answer to `done` lists the evictions
            self._held_back += [(rank, _evict(pool)) for pool, ranks in program.leaving.items() if rank.number in ranks]

    def _adopt(self, program: Program, fence: int, held: list[str]) -> None:
        """Adopt an unknown permit. If an earlier broker logged its end, only the answer to `done` was lost."""
        if any(self.ledger.holder(pool) not in (None, program.id) for pool in held):
            program.last_fence = fence
            return
        self.ledger.adopt(program.id, held, fence)
        program.fence, program.granted_s = fence, self._now_s()
        self.notes.append(PermitAdoptedNote(pipeline=program.id, fence=fence, pools=held))

    def _on_ask(self, program: Program, rank: ProgramRank, message: dict[str, Any]) -> None:
        request, rank.has_signed_off = program.request, False
        if program.refusal and program.fence is None:
            self._refuse(rank, message, program.refusal)
            return
        if request is not None and request.number == message["id"] and set(request.pools) == set(message["pools"]):
            self._repeat(program, rank, request)
            return
        if request is not None or program.fence is not None:
            held = f"permit {program.fence}" if program.fence is not None else f"ask {_number(request)}"
            self._refuse(rank, message, f"ask {message['id']} beside {held}; accepted: one phase at a time")
            return
        try:
            program.request = parse_request(message, self._cluster)
        except UserError as error:
            self._refuse(rank, message, str(error))
            return
        self._repeat(program, rank, program.request)

    def _repeat(self, program: Program, rank: ProgramRank, request: PhaseRequest) -> None:
        """Handle a rank's request, new or repeated after a lost connection."""
        if rank.number in request.ranks and program.fence is not None:
            self._send_granted(program, rank)
        request.ranks.add(rank.number)
        if len(request.ranks) == program.world and not request.is_open:
            request.is_open = True
            arrived = WorkArrived(pipeline=program.id, phases=request.kind, units=request.units, step=request.step)
            self.events.append(arrived)

    def _on_withdraw(self, program: Program, rank: ProgramRank, message: dict[str, Any]) -> None:
        request = program.request
        if request is None or request.number != message["id"]:
            return
        if program.fence is not None:
            self._end_permit_of(program, rank, {"used_s": 0.0})
            return
        self._withdraw(program)

    def _withdraw(self, program: Program) -> None:
        """Withdraw the program's request and end its order, if any."""
        request, program.request = program.request, None
        if program.order is not None:
            self._finish_order(program, 0.0, 0.0)
        elif request is not None and request.is_open:
            self.events.append(WorkWithdrawn(pipeline=program.id, phases=request.kind))

    def _on_progress(self, program: Program, rank: ProgramRank, message: dict[str, Any]) -> None:
        if program.fence != message["fence"] or program.order is None or rank.number != min(program.ranks):
            return
        left, held_s = max(0, message["total"] - message["done"]), self._now_s() - program.granted_s
        order = program.order.order
        self.events.append(ChunkFinished(order=order, num_active=left, num_waiting=0, seconds=held_s))

    def _on_workers(self, program: Program, rank: ProgramRank, message: dict[str, Any]) -> None:
        if rank.watch(message["workers"]):
            self.notes.append(
                WorkersNote(
                    pipeline=program.id, rank=rank.number, workers=rank.workers, processes=rank.worker_processes
                )
            )

    def _on_done(self, program: Program, rank: ProgramRank, message: dict[str, Any]) -> None:
        fence = message["fence"]
        if program.fence == fence:
            self._end_permit_of(program, rank, message)
        elif program.last_fence != fence:
            raise WireError("old_fence", f"done with fence {fence}; accepted: {program.fence or 'ask first'}")
        elif program.unanswered is None:  # the answer was lost with its connection
            leaving = [pool for pool, ranks in program.leaving.items() if rank.number in ranks]
            line = write_message("after", fence=fence, leave=bool(leaving), pools=leaving)
            self._held_back.append((rank, line))

    def _end_permit_of(self, program: Program, rank: ProgramRank, message: dict[str, Any]) -> None:
        """Record that a rank is done; the last rank ends the permit."""
        program.done[rank.number] = message
        fence = program.fence
        if len(program.done) < program.world or fence is None:
            return
        reports = list(program.done.values())
        sizes: dict[str, float] = {}
        for report in reports:
            for pool, size in report.get("resident_bytes", {}).items():
                sizes[pool] = sizes.get(pool, 0.0) + size
        permit = self.ledger.end(fence, sizes)
        used_s, restore_s = (max(report.get(key, 0.0) for report in reports) for key in ("used_s", "restore_s"))
        program.add_hold(self._now_s() - program.granted_s)
        program.marks.pop("overdue", None)
        program.fence, program.request, program.pools_to_leave = None, None, []
        program.unanswered = program.last_fence = fence
        program.done = {}
        note = PermitEndedNote(
            pipeline=program.id, fence=fence, pools=list(permit.pools), used_s=used_s, restore_s=restore_s
        )
        self.notes.append(note)
        if program.order is not None:
            self._finish_order(program, used_s, max(0.0, program.granted_s - program.begun_s) + restore_s)
        self._try_to_grant()
        for name, pool in [each for each in self._on_left_callbacks if each[0] == program.id]:
            self._have_left(name, pool)

    def _finish_order(self, program: Program, seconds: float, switch_s: float) -> None:
        order, program.order = program.order, None
        assert order is not None
        self.events.append(StageFinished(order=order.order, seconds=seconds, switch_s=switch_s))

    def _on_left(self, program: Program, rank: ProgramRank, message: dict[str, Any]) -> None:
        pool = message["pool"]
        if rank.number not in program.leaving.get(pool, ()):
            raise WireError("not_asked", f"left {pool!r}, which it was not told to leave")
        lodger = self.ledger.lodgers[pool][program.id]
        if message.get("freed_bytes") == 0 and lodger.num_bytes > 0:
            self._get_stuck(program, pool, f"it left {pool} and freed nothing of {lodger.num_bytes / 1e9:g} GB there")
            return
        program.leaving[pool].discard(rank.number)
        if not program.leaving[pool]:
            program.forget_leaving(pool)
            self.ledger.left(program.id, pool)
            self._mark(program, pool, "")
            self.notes.append(PoolLeftNote(pipeline=program.id, pool=pool, freed_bytes=message.get("freed_bytes")))
            self._call_waiting(program.id, pool)
            self._try_to_grant()

    def _on_failed_to_leave(self, program: Program, rank: ProgramRank, message: dict[str, Any]) -> None:
        pool = message["pool"]
        if rank.number not in program.leaving.get(pool, ()):
            raise WireError("not_asked", f"failed to leave {pool!r}, which it was not told to leave")
        self._get_stuck(program, pool, f"it cannot leave {pool}: {message['error']}")

    # ------------------------------------------------------------------ from the scheduler

    def begin(self, order: RunStage) -> None:
        """Start an order on devices that others have left: grant the request once none holds them."""
        program = self.roster.programs.get(order.pipeline)
        if program is None:
            return
        program.order, program.begun_s = order, self._now_s()
        if program.request is None or not program.request.is_open:  # it was withdrawn meanwhile
            self._finish_order(program, 0.0, 0.0)
            return
        self._try_to_grant()

    def evict(self, name: PipelineId, pool: str, on_left: Callable[[], None]) -> None:
        """Evict a program from a pool for another pipeline; `on_left` is called once it has left or is gone.

        Without a resident state, or a memory size in the file, it has to end its permit only.
        """
        if name not in self.roster.programs or name not in self.ledger.lodgers[pool]:
            on_left()
            return
        self._on_left_callbacks[name, pool].append(on_left)
        self._have_left(name, pool)

    def release(self, pipeline: PipelineId, reason: str) -> None:
        """Refuse all further permits: the scheduler has cancelled or refused the program."""
        program = self.roster.programs.get(pipeline)
        if program is None:
            return
        program.order, program.refusal = None, reason
        request = program.request
        if request is not None and program.fence is None:
            program.request = None
            for rank in program.connected:
                if rank.number in request.ranks:
                    self._held_back.append((rank, _refusal(request.number, reason)))

    def settle(self) -> None:
        """Send the held-back messages: the log has everything up to now, and its orders have begun."""
        for program in self.roster.programs.values():
            if program.unanswered is not None:
                fence, program.unanswered = program.unanswered, None
                line = write_message(
                    "after", fence=fence, leave=bool(program.pools_to_leave), pools=program.pools_to_leave
                )
                self._held_back += [(rank, line) for rank in program.connected]
                program.pools_to_leave = []
        for rank, line in self._held_back:
            if rank.connection is not None:
                self.outgoing.append((rank.connection, line))
        self._held_back.clear()

    def drain(self) -> tuple[list[PipelineSubmitted | Report], list[Note]]:
        """Take the events and notes since the last call."""
        events, notes = self.events, self.notes
        self.events, self.notes = [], []
        return events, notes

    # ------------------------------------------------------------------ who leaves, who is granted

    def _try_to_grant(self) -> None:
        """Grant every waiting order with free pools, oldest first."""
        waiting = [
            program for program in self.roster.programs.values() if program.order is not None and program.fence is None
        ]
        for program in sorted(
            waiting, key=lambda program: (program.begun_s, program.order.order if program.order else 0)
        ):
            request = program.request
            if request is None or any(pool in program.leaving for pool in request.pools):
                continue
            if self.ledger.is_free(program.id, request.pools):
                self._grant(program, request)

    def _grant(self, program: Program, request: PhaseRequest) -> None:
        permit = self.ledger.grant(program.id, {pool: program.need(pool) for pool in request.pools})
        program.fence, program.granted_s, program.done = permit.fence, self._now_s(), {}
        waited_s = self._now_s() - program.begun_s
        self.notes.append(PermitGrantedNote(
            pipeline=program.id, fence=permit.fence, pools=list(request.pools), phase=request.phase,
            ask=request.number, waited_s=waited_s, step=request.step,
        ))  # fmt: skip
        for rank in program.ranks.values():
            self._send_granted(program, rank)

    def _send_granted(self, program: Program, rank: ProgramRank) -> None:
        request = program.request
        assert request is not None
        line = write_message("granted", id=request.number, fence=program.fence, pools=list(request.pools))
        self._held_back.append((rank, line))

    def _have_left(self, name: PipelineId, pool: str) -> None:
        """Evict a program from a pool that others wait for; a holder leaves at its phase's end."""
        lodger = self.ledger.lodgers[pool].get(name)
        if lodger is None or (lodger.state is PoolState.STAYS and self._has_room(pool)):
            self._call_waiting(name, pool)
        elif lodger.state in (PoolState.STAYS, PoolState.STUCK):
            self._request_leave(self.roster.programs[name], pool)

    def _call_waiting(self, name: PipelineId, pool: str) -> None:
        for on_left in self._on_left_callbacks.pop((name, pool), []):
            on_left()

    def _has_room(self, pool: str) -> bool:
        return math.isinf(self._cluster.pools[pool].device_memory_bytes)

    def _request_leave(self, program: Program, pool: str) -> None:
        self.ledger.request_leave(program.id, pool)
        program.leaving[pool] = set(program.ranks)
        program.leave_until_s[pool] = self._now_s() + self._leave_limit_s
        self.notes.append(LeaveRequestedNote(pipeline=program.id, pool=pool, waiting=_ANOTHER))
        if program.unanswered is not None:
            program.pools_to_leave.append(pool)
        else:
            self._held_back += [(rank, _evict(pool, _ANOTHER)) for rank in program.ranks.values()]

    def _get_stuck(self, program: Program, pool: str, reason: str) -> None:
        """Mark a program that does not leave: no other is granted the pool until it has left or is gone."""
        self.ledger.fail_to_leave(program.id, pool, reason)
        if program.leave_until_s.get(pool, math.inf) > self._now_s():
            program.forget_leaving(pool)
        self._mark(program, pool, reason)

    # ------------------------------------------------------------------ ends

    def _lose_rank(self, program: Program, rank: ProgramRank) -> None:
        del program.ranks[rank.number]
        if program.ranks:
            self._mark(
                program, "rank", f"rank {rank.number} is gone, {len(program.ranks)} of {program.world} are there"
            )
            return
        held = self.ledger.permits.get(program.fence or 0)
        self.ledger.remove(program.id)
        self.roster.end(program)
        self.notes.append(ProgramGoneNote(pipeline=program.id, said_bye=rank.has_signed_off))
        if program.refusal:
            pass  # its pipeline is over already
        elif rank.has_signed_off and held is None:
            if program.order is not None:
                self._finish_order(program, 0.0, 0.0)
            self.events.append(ClientFinished(pipeline=program.id))
        else:
            reason = program.end_reason or _how_it_ended(rank, held)
            self.events.append(PipelineFailed(pipeline=program.id, reason=reason))
        for name, pool in [each for each in self._on_left_callbacks if each[0] == program.id]:
            self._call_waiting(name, pool)
        self._try_to_grant()

    # ------------------------------------------------------------------ small things

    def _refuse(self, rank: ProgramRank, message: dict[str, Any], text: str) -> None:
        if rank.connection is not None:
            self.outgoing.append((rank.connection, _refusal(message["id"], text)))

    def _mark(self, program: Program, what: str, reason: str) -> None:
        if program.mark(what, reason):  # a new problem, or the end of one
            self.notes.append(ProgramMarkedNote(pipeline=program.id, reason="; ".join(program.marks.values())))


def _how_it_ended(rank: ProgramRank, held: Permit | None) -> str:
    name = f"process {rank.process.pid}" if rank.process else "its connection"
    return f"{name} ended " + (f"while it held {', '.join(held.pools)}" if held else "without a word")


def _refusal(request: int, text: str) -> bytes:
    return write_message("error", code="not_possible", id=request, text=text)


def _evict(pool: str, waiting: PipelineId | None = None) -> bytes:
    return write_message("evict", pool=pool, **({"for": waiting} if waiting else {}))


def _number(request: PhaseRequest | None) -> int | None:
    return None if request is None else request.number
