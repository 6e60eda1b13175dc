"""What `rlmux verify` shows: progress, and a line or a row of JSON for each pipeline."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Protocol

from rlmux.cli import tables
from rlmux.runtime.checks.replay_verification import PrintLine, Verdict, result_of, verify
from rlmux.runtime.records.folders import is_hosted


class Verification(Protocol):
    """Trains pipelines of a folder again, each alone."""

    def __call__(self, folder: Path, names: Sequence[str], *, print_line: PrintLine) -> list[Verdict]: ...


def chosen(folder: Path, *, sample_seed: int | None) -> Verification:
    """The verification for the folder of a run or a lane. `sample_seed`: as for `verify`; models are verified whole."""
    if is_hosted(folder):
        from rlmux.service.served_verification import verify_served

        return verify_served
    return partial(verify, sample_seed=sample_seed)


def show(verdicts: Sequence[Verdict], *, as_json: bool) -> int:
    """Print what came of the pipelines; returns the exit code."""
    result = result_of(verdicts)
    if as_json:
        tables.print_json(result)
    else:
        for verdict in verdicts:
            print(verdict.line())
    return 0 if result["is_equal"] else 1
