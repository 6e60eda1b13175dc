"""What `rlmux verify` shows: progress, and a line or a row of JSON for each pipeline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Protocol

from rlmux.cli import tables
from rlmux.runtime.checks.replay_verification import PrintLine, Verdict, verify
from rlmux.runtime.records.folders import is_hosted


class Verification(Protocol):
    """Trains pipelines of a folder again, each alone."""

    def __call__(self, folder: Path, names: Sequence[str], *, print_line: PrintLine) -> list[Verdict]: ...


def chosen(folder: Path) -> Verification:
    """The verification for a run's or a server's folder."""
    if is_hosted(folder):
        from rlmux.service.served_verification import verify_served

        return verify_served
    return verify


def show(verdicts: Sequence[Verdict], *, as_json: bool) -> int:
    """Print what came of the pipelines; returns the exit code."""
    is_equal = bool(verdicts) and all(verdict.is_equal for verdict in verdicts)
    if as_json:
        rows = {
            verdict.pipeline: {
                "is_equal": verdict.is_equal,
                "steps_equal": verdict.num_equal,
                "steps": verdict.num_steps,
                "steps_equal_by_sum": dict(verdict.num_equal_by_sum),
                "first_difference": asdict(verdict.difference) if verdict.difference else None,
                "promise": verdict.promise,
                "reason": verdict.reason if not verdict.is_equal else "",
            }
            for verdict in verdicts
        }
        tables.print_json({"is_equal": is_equal, "pipelines": rows})
    else:
        for verdict in verdicts:
            print(verdict.line())
    return 0 if is_equal else 1
