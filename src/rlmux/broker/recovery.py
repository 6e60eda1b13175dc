"""Recovery of programs from an ended broker's log.

    log ── notes `permit` ──▶ restore_programs ──▶ PermitManager: programs, processes, permits, residencies

A program whose process has ended since is restored too: the manager finds it gone and logs its end. A cancelled or
refused program stays so: it is no pipeline any more, but keeps what it holds until its process is gone.

A module of its own: it reads logs, which the permit manager never does.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rlmux.broker.permit_manager import PermitManager
from rlmux.broker.program_processes import Process
from rlmux.broker.program_roster import NO_MORE, PhaseRequest, Program, ProgramRank
from rlmux.core.actions import Refuse
from rlmux.core.events import PipelineCancelled
from rlmux.core.model import PipelineId
from rlmux.log.run_log import LogReader


def restore_programs(folder: Path, manager: PermitManager, now_s: float) -> None:
    """Restore the log's programs, before any message is handled."""
    programs: dict[str, Program] = {}
    lodged: dict[str, dict[str, None]] = {}
    refusals: dict[str, str] = {}
    with LogReader(folder) as log:
        entries = list(log.entries())
    notes = [entry.value for entry in entries if entry.kind == "note" and entry.type == "permit"]
    for entry in entries:
        match entry.value:
            case PipelineCancelled() as cancelled:
                refusals[cancelled.pipeline] = NO_MORE
            case Refuse() as refused:
                refusals[refused.pipeline] = refused.reason
    for fields in notes:
        assert isinstance(fields, dict)
        name = fields["pipeline"]
        manager.roster.use_name(name)
        match fields["what"]:
            case "program":
                programs[name], lodged[name] = _program(fields), {}
            case "joined":
                programs[name].ranks[fields["rank"]] = _rank(fields, now_s)
            case "granted" | "adopted":
                manager.ledger.next_fence = max(manager.ledger.next_fence, fields["fence"] + 1)
                programs[name].fence = fields["fence"]
                programs[name].request = _granted_request(fields, programs[name])
                lodged[name] |= dict.fromkeys(fields["pools"])
            case "ended":
                programs[name].fence, programs[name].request = None, None
                programs[name].last_fence = fields["fence"]
            case "left":
                lodged[name].pop(fields["pool"], None)
            case "gone":
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


def _program(fields: dict[str, Any]) -> Program:
    return Program(
        id=PipelineId(fields["pipeline"]),
        world=fields["world"],
        pools=fields["pools"],
        need_bytes=fields["need_bytes"],
        host_bytes=fields["host_bytes"],
        slo=fields["slo"],
        weight=fields.get("weight", 1.0),
    )


def _rank(fields: dict[str, Any], now_s: float) -> ProgramRank:
    process = fields["process"]
    return ProgramRank(
        number=fields["rank"],
        session=fields["session"],
        process=None if process is None else Process(*process),
        lost_s=now_s,
    )


def _granted_request(fields: dict[str, Any], program: Program) -> PhaseRequest:
    """The granted request, which its program may repeat if it missed the answer."""
    return PhaseRequest(
        number=fields.get("ask", 0),
        pools=tuple(fields["pools"]),
        phase=fields.get("phase", ""),
        kind=(),
        ranks=set(range(program.world)),
        is_open=True,
    )
