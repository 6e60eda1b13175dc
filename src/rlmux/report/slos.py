"""Each pipeline's SLO in a run: what it accepts, what it got, what was expected of it, and from which seconds.

    step_slowdown       mean of its steps over their solo estimate, as in `summary.py`; the first step is left out
    keeps_slo           whether the time since its first step, the one under way included, is within the SLO
    expected_slowdown   what the scheduler expected where the pipeline was last
    estimate            solo seconds that it was planned with: given in the file, or learned from its own steps

A pipeline that ended, or was stopped, without one step missed its SLO. Where nothing is known yet, a value is null.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlmux.core.model import PhaseSeconds, PipelineStatus
from rlmux.report.records import PipelineRecord


@dataclass(frozen=True, slots=True)
class StepTime:
    """One published step."""

    step: int
    end_s: float
    seconds: float
    solo_s: float


def slo_fields(record: PipelineRecord, steps: Sequence[StepTime], end_s: float) -> dict[str, Any]:
    """A pipeline's keys of the summary and of the status. `end_s`: the last known time of the run."""
    slo, expected = record.pipeline.slo_slowdown, record.expected
    steady = steps[1:] or steps
    solo_s = math.fsum(step.solo_s for step in steady)
    return {
        "step_slowdown": math.fsum(step.seconds for step in steady) / solo_s if solo_s > 0.0 else None,
        "slo_slowdown": slo if math.isfinite(slo) else None,
        "keeps_slo": _keeps_slo(record, steady, end_s) if math.isfinite(slo) else None,
        "expected_slowdown": expected.step_slowdown if expected else None,
        "estimate": _estimate(record),
        "slo_reason": expected.reason if expected else "",
    }


def slo_attainment(pipelines: Iterable[Mapping[str, Any]]) -> float | None:
    """The share of all submitted pipelines that stay within their SLO, one without accepting anything; None where none
    has one, or one is not known yet."""
    shown = list(pipelines)
    with_slo = [one["keeps_slo"] for one in shown if one["slo_slowdown"] is not None]
    if not with_slo or None in with_slo:
        return None
    return 1.0 - with_slo.count(False) / len(shown)


def _keeps_slo(record: PipelineRecord, steady: Sequence[StepTime], end_s: float) -> bool | None:
    is_under_way = record.status in (PipelineStatus.RUNNING, PipelineStatus.WAITING)
    if not steady:
        return None if is_under_way else False
    spent_s, count = math.fsum(step.seconds for step in steady), len(steady)
    mean_solo_s = math.fsum(step.solo_s for step in steady) / count
    open_s = max(0.0, (end_s if record.ended_s is None else record.ended_s) - steady[-1].end_s)
    if record.status != PipelineStatus.FINISHED:  # a step under way is late once it is, not when it ends
        spent_s, count = spent_s + open_s, count + 1
    return spent_s <= record.pipeline.slo_slowdown * mean_solo_s * count


def _estimate(record: PipelineRecord) -> dict[str, Any] | None:
    measured = record.expected.measured if record.expected else None
    if measured is not None:
        return {
            "source": "learned",
            **_seconds(measured.median),
            "low": _seconds(measured.low),
            "high": _seconds(measured.high),
            "num_steps": measured.num_steps,
        }
    given = record.pipeline.estimate
    return None if given is None else {"source": "given", **_seconds(given)}


def _seconds(seconds: PhaseSeconds) -> dict[str, float]:
    return {"rollout_s": seconds.rollout_s, "train_s": seconds.train_s}
