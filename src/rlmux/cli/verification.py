"""What `rlmux verify` shows: progress, and a line or a row of JSON for each pipeline; and the receipt line of a run."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from rlmux.cli import tables
from rlmux.rl.determinism_class import DeterminismClass
from rlmux.runtime.checks.replay_verification import STEPS_PER_SAMPLED, PrintLine, Verdict, result_of, verify
from rlmux.runtime.records.folders import is_hosted
from rlmux.runtime.run import LOCAL

_START_S = 5.0
"""Seconds in which the processes of a sample's parts start."""


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


def receipt(summary: Mapping[str, Any], folder: Path) -> str:
    """The command that verifies a run, with an estimate of its seconds; empty if a pipeline cannot be verified."""
    pipelines = summary["pipelines"].values()
    if not pipelines or summary["backend"] != LOCAL or not all(map(_is_verifiable, pipelines)):
        return ""
    seconds = f"{math.fsum(map(_sample_s, pipelines)):,.0f}"
    return f"receipt: rlmux verify {folder} (about {seconds} s without SFT warm-up)"


def _is_verifiable(its: Mapping[str, Any]) -> bool:
    """Whether a pipeline finished training, and promises the same weights under any schedule. A filler has a score."""
    has_weights = its["status"] == "finished" and its["steps"] > 0 and "score" not in its
    return has_weights and its["promise"] == DeterminismClass.EXACT


def _sample_s(its: Mapping[str, Any]) -> float:
    """Estimated seconds of a pipeline's sample, from its solo steps."""
    solo_s: float = its["step_s_mean"] / (its["step_slowdown"] or 1.0)
    num_steps: int = math.ceil(its["steps"] / STEPS_PER_SAMPLED)
    return _START_S + num_steps * solo_s
