"""The joined programs: their processes, requests and liveness.

    hello ─▶ Roster.join ─▶ Program ── ranks ─▶ Rank ── connection, process
                                    ── request, order, fence    one phase at a time

A program ends when all its processes are gone: on this machine the process itself, behind TCP its connection and the
lease after it. A lost connection is no end: the library reconnects with the same session.
"""

from __future__ import annotations

import socket
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rlmux.broker.program_processes import Process, end_process, is_alive, process_of
from rlmux.broker.server import ProgramConnection
from rlmux.core.actions import RunStage
from rlmux.core.errors import UserError
from rlmux.core.model import Phase, PipelineId
from rlmux.log.notes import ProgramNote

NO_MORE = "this program gets no permit any more: rlmux status has the reason"
"""Reason sent to a cancelled or ended program."""
_SEEN_HOLDS = 20
_OVERDUE_FACTOR = 10.0


@dataclass(eq=False, slots=True, kw_only=True)
class ProgramRank:
    """One process of a program."""

    number: int
    session: str
    """Random id of the process, the same in all its connections."""
    process: Process | None
    """The process on this machine; None behind TCP or if invisible."""
    connection: ProgramConnection | None = None
    lost_s: float | None = None
    """Time of the lost connection; None while connected."""
    has_signed_off: bool = False
    workers: tuple[str, ...] = ()
    """HOST/PID of other processes that hold memory for it."""
    worker_processes: tuple[Process, ...] = ()
    """Those on this machine, of a rank that is here itself."""

    def watch(self, workers: Sequence[str]) -> bool:
        """Take the processes that it names. Returns whether they are others than before."""
        was, self.workers = self.workers, tuple(workers)
        if self.workers != was and self.process is not None:
            places = [worker.rpartition("/") for worker in workers]
            found = [process_of(int(pid)) for host, _, pid in places if host == socket.gethostname()]
            self.worker_processes = tuple(process for process in found if process is not None)
        return self.workers != was

    def is_gone(self, now_s: float, lease_s: float) -> bool:
        """Whether it can hold nothing on a device any more."""
        if self.process is not None:
            return not any(map(is_alive, (self.process, *self.worker_processes)))
        return self.lost_s is not None and (self.has_signed_off or now_s - self.lost_s > lease_s)


@dataclass(eq=False, slots=True, kw_only=True)
class PhaseRequest:
    """A program's request for the pools of one phase."""

    number: int
    """Number given by the program."""
    pools: tuple[str, ...]
    phase: str
    kind: tuple[Phase, ...]
    """The scheduler's phases whose devices it needs."""
    units: int = 0
    step: int | None = None
    """Step by the program's own count."""
    need_bytes: dict[str, int] = field(default_factory=dict)
    ranks: set[int] = field(default_factory=set)
    """Ranks that have sent the request."""
    is_open: bool = False
    """Whether all ranks have sent it, so that the scheduler has it."""


@dataclass(eq=False, slots=True, kw_only=True)
class Program:
    """One joined program."""

    id: PipelineId
    """Name in the log: its own, with a number if an earlier program had that."""
    world: int
    pools: dict[str, str]
    """Pool of each role."""
    need_bytes: dict[str, int]
    host_bytes: int
    slo: float | None = None
    """Largest slowdown of its steps that it accepts; None: any."""
    weight: float = 1.0
    """Turns per turn of a program of weight 1."""
    ranks: dict[int, ProgramRank] = field(default_factory=dict)
    request: PhaseRequest | None = None
    order: RunStage | None = None
    """The scheduler's order for the request; None before it and for an earlier broker's permit."""
    begun_s: float = 0.0
    """Time of that order."""
    fence: int | None = None
    """Permit that it holds."""
    granted_s: float = 0.0
    done: dict[int, dict[str, Any]] = field(default_factory=dict)
    """`done` messages of the finished ranks."""
    unanswered: int | None = None
    """Fence of an ended permit whose ranks still wait for `after`."""
    last_fence: int | None = None
    """Its last permit that is over."""
    pools_to_leave: list[str] = field(default_factory=list)
    """Pools to leave, named in that answer."""
    leaving: dict[str, set[int]] = field(default_factory=dict)
    """Ranks that have not left yet, by the pool that they are to leave."""
    leave_until_s: dict[str, float] = field(default_factory=dict)
    holds_s: list[float] = field(default_factory=list)
    """Seconds of its last permits."""
    marks: dict[str, str] = field(default_factory=dict)
    """Problems by pool."""
    refusal: str = ""
    """Reason for no further permits; empty while it gets them."""
    end_reason: str = ""
    """Reason why the broker ended it; empty if it did not."""
    is_over: bool = False

    @property
    def connected(self) -> list[ProgramRank]:
        return [rank for rank in self.ranks.values() if rank.connection is not None]

    def note(self) -> ProgramNote:
        """The log's record for a restarted broker."""
        names = ("world", "pools", "need_bytes", "host_bytes", "slo", "weight")
        return ProgramNote(pipeline=self.id, **{name: getattr(self, name) for name in names})

    def end_processes(self, reason: str) -> None:
        """End its processes on this machine."""
        self.end_reason = reason
        for rank in self.ranks.values():
            for process in (rank.process, *rank.worker_processes):
                if process is not None:
                    end_process(process)

    def need(self, pool: str) -> int | None:
        """Bytes that its request needs on the pool; None: the whole pool."""
        own = self.need_bytes.get(pool)
        return own if self.request is None else self.request.need_bytes.get(pool, own)

    def is_overdue(self, now_s: float) -> bool:
        """Whether it has held its pools for ten times its median."""
        if self.fence is None or len(self.holds_s) < 3:
            return False
        return now_s - self.granted_s > _OVERDUE_FACTOR * max(1e-3, statistics.median(self.holds_s))

    def forget_leaving(self, pool: str) -> None:
        """End an eviction: the program has left or cannot."""
        self.leaving.pop(pool, None)
        self.leave_until_s.pop(pool, None)

    def mark(self, what: str, reason: str) -> bool:
        """Set a problem, or clear it with an empty reason. Returns whether it changed."""
        was = self.marks.pop(what, "")
        if reason:
            self.marks[what] = reason
        return reason != was

    def add_hold(self, seconds: float) -> None:
        self.holds_s = [*self.holds_s[1 - _SEEN_HOLDS :], seconds]


class Roster:
    """Every program that is not over, and the names that were used."""

    def __init__(self, *, lease_s: float) -> None:
        self._lease_s = lease_s
        self.programs: dict[PipelineId, Program] = {}
        """Programs that are not over, in the order of joining."""
        self._names: set[str] = set()

    def use_name(self, name: str) -> None:
        """Keep a name from being given again."""
        self._names.add(name)

    def add(self, program: Program) -> None:
        self.use_name(program.id)
        self.programs[program.id] = program

    def end(self, program: Program) -> None:
        program.is_over = True
        del self.programs[program.id]

    def free_name(self, name: str) -> PipelineId:
        """The name, with a number where an earlier program has had it."""
        number, free = 1, name
        while free in self._names:
            number += 1
            free = f"{name}-{number}"
        return PipelineId(free)

    def of_session(self, session: str) -> tuple[Program, ProgramRank] | None:
        """The program and rank of this session."""
        for program in self.programs.values():
            for rank in program.ranks.values():
                if rank.session == session:
                    return program, rank
        return None

    def gang_of(self, name: str, world: int, rank: int) -> Program | None:
        """The program of that name without this rank. Raises UserError if a live process has it."""
        for program in self.programs.values():
            base = str(program.id)
            if base != name and not (base.startswith(f"{name}-") and base[len(name) + 1 :].isdigit()):
                continue
            if program.world == world and rank not in program.ranks:
                return program
            raise UserError(
                f"a program named {name!r} has joined and lives, rank {rank} of {program.world} with it; "
                f"accepted: another name (RLMUX_JOB=...), or ranks 0 to {program.world - 1}, each once"
            )
        return None

    def gone_ranks(self, now_s: float) -> list[tuple[Program, ProgramRank]]:
        """Ranks whose processes are gone."""
        return [
            (program, rank)
            for program in self.programs.values()
            for rank in program.ranks.values()
            if rank.is_gone(now_s, self._lease_s)
        ]


def rank_of(hello: dict[str, Any], connection: ProgramConnection) -> ProgramRank:
    """The rank at the other end, with the process number that the system reports."""
    process = None if connection.pid is None else process_of(connection.pid)
    return ProgramRank(number=hello["rank"], session=hello["session"], process=process, connection=connection)
