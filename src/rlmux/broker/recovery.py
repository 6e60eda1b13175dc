"""Recovery of programs from an ended broker's log.

    log ── notes `permit` ──▶ restore_programs ──▶ PermitManager: programs, processes, permits, residencies

A program whose process has ended since is restored too: the manager finds it gone and logs its end. A cancelled or
refused program stays so: it is no pipeline any more, but keeps what it holds until its process is gone.

A module of its own: it reads logs, which the permit manager never does.
"""

from __future__ import annotations

from pathlib import Path

from rlmux.broker.permit_manager import PermitManager
from rlmux.broker.program_processes import Process
from rlmux.broker.program_roster import NO_MORE, PhaseRequest, Program, ProgramRank
from rlmux.core.actions import Refuse
from rlmux.core.events import PipelineCancelled
from rlmux.core.model import PipelineId
from rlmux.log.notes import (
    PermitAdoptedNote,
    PermitEndedNote,
    PermitGrantedNote,
    PermitNote,
    PoolLeftNote,
    ProgramGoneNote,
    ProgramNote,
    RankJoinedNote,
    WorkersNote,
)
from rlmux.log.run_log import LogReader


def restore_programs(folder: Path, manager: PermitManager, now_s: float) -> None:
    """Restore the log's programs, before any message is handled."""
    programs: dict[PipelineId, Program] = {}
    lodged: dict[PipelineId, dict[str, None]] = {}
    refusals: dict[str, str] = {}
    with LogReader(folder) as log:
        entries = list(log.entries())
    for entry in entries:
        match entry.value:
            case PipelineCancelled() as cancelled:
                refusals[cancelled.pipeline] = NO_MORE
            case Refuse() as refused:
                refusals[refused.pipeline] = refused.reason
    for note in (entry.note for entry in entries if entry.type == PermitNote.type):
        assert isinstance(note, PermitNote)
        name = note.pipeline
        manager.roster.use_name(name)
        match note:
            case ProgramNote():
                programs[name], lodged[name] = _program(note), {}
            case RankJoinedNote():
                programs[name].ranks[note.rank] = _rank(note, now_s)
            case WorkersNote():
                rank = programs[name].ranks[note.rank]
                rank.workers, rank.worker_processes = (
                    tuple(note.workers),
                    tuple(Process(*each) for each in note.processes),
                )
            case PermitGrantedNote() | PermitAdoptedNote():
                manager.ledger.next_fence = max(manager.ledger.next_fence, note.fence + 1)
                programs[name].fence = note.fence
                programs[name].request = _granted_request(note, programs[name])
                lodged[name] |= dict.fromkeys(note.pools)
            case PermitEndedNote():
                programs[name].fence, programs[name].request = None, None
                programs[name].last_fence = note.fence
            case PoolLeftNote():
                lodged[name].pop(note.pool, None)
            case ProgramGoneNote():
                del programs[name], lodged[name]
    for name, program in programs.items():
        if name in refusals:
            program.refusal = refusals[name]
            manager.roster.add(program)
        else:
            manager.submit(program)
        held = program.request.pools if program.request else ()
        for pool in lodged[name]:
            if pool not in held:
                manager.ledger.lodge(name, pool)
        if program.fence is not None:
            manager.ledger.adopt(name, held, program.fence)
            program.granted_s = now_s


def _program(note: ProgramNote) -> Program:
    return Program(
        id=note.pipeline,
        world=note.world,
        pools=dict(note.pools),
        need_bytes={pool: int(size) for pool, size in note.need_bytes.items()},
        host_bytes=int(note.host_bytes),
        slo=note.slo,
        weight=note.weight,
    )


def _rank(note: RankJoinedNote, now_s: float) -> ProgramRank:
    process = None if note.process is None else Process(*note.process)
    return ProgramRank(number=note.rank, session=note.session, process=process, lost_s=now_s)


def _granted_request(note: PermitGrantedNote | PermitAdoptedNote, program: Program) -> PhaseRequest:
    """The granted request, which its program may repeat if it missed the answer."""
    return PhaseRequest(
        number=note.ask if isinstance(note, PermitGrantedNote) else 0,
        pools=tuple(note.pools),
        phase=note.phase if isinstance(note, PermitGrantedNote) else "",
        kind=(),
        ranks=set(range(program.world)),
        is_open=True,
    )
