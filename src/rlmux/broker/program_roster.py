"""The programs that joined: their processes, what they ask for, and whether they are still there.

    hello ─▶ Roster.join ─▶ Program ── ranks ─▶ Rank ── connection, process
                                    ── ask, order, fence        one phase at a time

A program ends when all its processes are gone: on this machine the process itself, behind TCP its connection and the
lease after it. A connection that ends is no end: the library connects anew and says the same session again.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field
from typing import Any

from rlmux.broker.program_processes import Process, end_process, is_alive, process_of
from rlmux.broker.server import Connection
from rlmux.core.actions import RunStage
from rlmux.core.errors import UserError
from rlmux.core.model import Phase, PipelineId

NO_MORE = "this program gets no permit any more: rlmux status says why"
"""What a program is told that was cancelled, or is over to the scheduler."""
_SEEN_HOLDS = 20
_OVERDUE_FACTOR = 10.0


@dataclass(eq=False, slots=True, kw_only=True)
class Rank:
    """One process of a program."""

    number: int
    session: str
    """Random text that the process made up, the same in all its connections."""
    process: Process | None
    """The process on this machine; None behind TCP, or where it cannot be seen."""
    connection: Connection | None = None
    lost_s: float | None = None
    """Time at which its connection ended; None while there is one."""
    has_signed_off: bool = False

    def is_gone(self, now_s: float, lease_s: float) -> bool:
        """Whether nothing of it can be on a device any more."""
        if self.process is not None:
            return not is_alive(self.process)
        return self.lost_s is not None and (self.has_signed_off or now_s - self.lost_s > lease_s)


@dataclass(eq=False, slots=True, kw_only=True)
class PhaseRequest:
    """What a program asks for."""

    number: int
    """Number that the program gave it."""
    pools: tuple[str, ...]
    phase: str
    kind: tuple[Phase, ...]
    """Phases whose devices it needs all, as the scheduler knows them."""
    units: int = 0
    need_bytes: dict[str, int] = field(default_factory=dict)
    ranks: set[int] = field(default_factory=set)
    """Ranks that have asked."""
    is_open: bool = False
    """Whether all ranks have, and the scheduler knows of it."""


@dataclass(eq=False, slots=True, kw_only=True)
class Program:
    """One program as the broker knows it."""

    id: PipelineId
    """Name under which the log has it: its own, or with a number where an earlier program had that."""
    world: int
    pools: dict[str, str]
    """Pool of each role."""
    need_bytes: dict[str, int]
    host_bytes: int
    slo: float | None = None
    """Largest slowdown of its steps that it accepts; None: any."""
    weight: float = 1.0
    """Turns that it takes for one of a program of weight 1, by its own account."""
    ranks: dict[int, Rank] = field(default_factory=dict)
    request: PhaseRequest | None = None
    order: RunStage | None = None
    """Order of the scheduler that the ask became; None before it, and for a permit of an earlier broker."""
    begun_s: float = 0.0
    """Time of that order."""
    fence: int | None = None
    """Permit that it holds."""
    granted_s: float = 0.0
    done: dict[int, dict[str, Any]] = field(default_factory=dict)
    """What the ranks said that are done with the permit."""
    unanswered: int | None = None
    """Fence of a permit that is over, and of which the ranks wait to hear whether they have to leave."""
    last_fence: int | None = None
    """Its last permit that is over."""
    pools_to_leave: list[str] = field(default_factory=list)
    """Pools that they are told to leave in that answer."""
    leaving: dict[str, set[int]] = field(default_factory=dict)
    """Ranks that have not left yet, by the pool that they are to leave."""
    leave_until_s: dict[str, float] = field(default_factory=dict)
    holds_s: list[float] = field(default_factory=list)
    """Seconds of its last permits."""
    marks: dict[str, str] = field(default_factory=dict)
    """What is wrong with it, by the pool that it is wrong with."""
    refusal: str = ""
    """Why it gets no permit any more; empty while it does."""
    end_reason: str = ""
    """Why the broker ended it; empty where it did not."""
    is_over: bool = False

    @property
    def connected(self) -> list[Rank]:
        return [rank for rank in self.ranks.values() if rank.connection is not None]

    def described(self) -> dict[str, Any]:
        """What the log has to know of it, for a broker that is started again."""
        names = ("world", "pools", "need_bytes", "host_bytes", "slo", "weight")
        return {name: getattr(self, name) for name in names}

    def end_processes(self, reason: str) -> None:
        """End it; those of its processes that are on another machine cannot be."""
        self.end_reason = reason
        for rank in self.ranks.values():
            if rank.process is not None:
                end_process(rank.process)

    def need(self, pool: str) -> int | None:
        """Bytes that it needs on the pool for what it asks; None: it fills the pool."""
        own = self.need_bytes.get(pool)
        return own if self.request is None else self.request.need_bytes.get(pool, own)

    def is_overdue(self, now_s: float) -> bool:
        """Whether it holds its pools for ten times as long as it mostly does."""
        if self.fence is None or len(self.holds_s) < 3:
            return False
        return now_s - self.granted_s > _OVERDUE_FACTOR * max(1e-3, statistics.median(self.holds_s))

    def forget_leaving(self, pool: str) -> None:
        """It has left the pool, or cannot."""
        self.leaving.pop(pool, None)
        self.leave_until_s.pop(pool, None)

    def mark(self, what: str, reason: str) -> bool:
        """Set what is wrong, or with no reason that it is not any more. Whether that is news."""
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

    def of_session(self, session: str) -> tuple[Program, Rank] | None:
        """The process that said this session before."""
        for program in self.programs.values():
            for rank in program.ranks.values():
                if rank.session == session:
                    return program, rank
        return None

    def gang_of(self, name: str, world: int, rank: int) -> Program | None:
        """The program of that name that still misses this rank. Raises UserError where a living one has it."""
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

    def gone_ranks(self, now_s: float) -> list[tuple[Program, Rank]]:
        """Processes that are there no more."""
        return [
            (program, rank)
            for program in self.programs.values()
            for rank in program.ranks.values()
            if rank.is_gone(now_s, self._lease_s)
        ]


def rank_of(hello: dict[str, Any], connection: Connection) -> Rank:
    """The process at the other end. The system's word on its number counts, not its own."""
    process = None if connection.pid is None else process_of(connection.pid)
    return Rank(number=hello["rank"], session=hello["session"], process=process, connection=connection)
