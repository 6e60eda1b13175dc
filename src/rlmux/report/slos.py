"""Each pipeline's SLO in a run: what it accepts, what it got, what was expected of it, and from which seconds.

    step_slowdown       mean of its steps over their solo estimate, as in `summary.py`; the first step is left out
    keeps_slo           whether its seconds in the queue and those since its first step, the one under way included, are
                        within the SLO; `simulate` judges so, too, and has no processes to start in a first step
    queue_s             seconds from its submission to its admission, or to the end where there was none
    expected_slowdown   what the scheduler expected where the pipeline was last
    slo_probability     with which the mean of the steps that are left keeps its SLO, as last stated; null where none
                        was requested, or none can be stated
    bound               solo seconds of each phase that the mean of its coming steps stays below with the probability
                        that was requested; null where none was
    moves               of each relocation the seconds of a step that were expected there, and those that came
    estimate            solo seconds that it was planned with: given in the file, or learned from its own steps

A pipeline that ended, or was stopped, without one step missed its SLO. Where nothing is known yet, a value is null.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlmux.core.model import PhaseSeconds, PipelineStatus
from rlmux.report.timeline.records import PipelineRecord

SLO_TOLERANCE = 1e-3
"""Relative, for rounding: a slowdown this far above the SLO still keeps it."""
NOT_ESTIMATED = ("saves_usd_per_hour", "expected_saving_usd", "saved_usd")
"""Keys of a relocation that are null: what moves save is the difference of two bills, which a run alone does not have
(`rlmux simulate --moves-saved`)."""
_PHASES = ("rollout_s", "train_s")


def is_within_slo(spent_s: float, solo_s: float, slo_slowdown: float) -> bool:
    """Whether work that takes so many seconds alone kept its SLO, in runs and in the simulator."""
    return spent_s <= slo_slowdown * solo_s * (1 + SLO_TOLERANCE)


def probability_words(probability: float) -> str:
    """The probability that is stated of a pipeline's SLO, in a line."""
    if probability == 1.0:
        return "alone in its group, so no other pipeline can break its SLO"
    return f"keeps its SLO over the steps that are left, with a probability of {probability:.6g}"


def bound_words(bound: Mapping[str, float] | None, mean: Mapping[str, Any] | None) -> str:
    """The upper bounds on the mean of a pipeline's coming steps, beside its estimate; "" where nothing is in hand."""
    if bound is None or (mean is not None and all(bound[key] <= mean[key] * (1 + SLO_TOLERANCE) for key in _PHASES)):
        return ""
    most = f"at most {bound['rollout_s']:.3g} s of rollout and {bound['train_s']:.3g} s of training"
    estimate = "" if mean is None else f" (estimate: {mean['rollout_s']:.3g} s and {mean['train_s']:.3g} s)"
    return f"mean of its coming steps: {most}{estimate}"


def slo_words(pipeline: Mapping[str, Any]) -> str:
    """The stated probability of a pipeline and its bounds, from its keys of summary, status or plan; "" without an
    SLO."""
    if not math.isfinite(pipeline["slo_slowdown"] or math.inf):
        return ""
    stated = "" if pipeline["slo_probability"] is None else probability_words(pipeline["slo_probability"])
    return "; ".join(filter(None, (stated, bound_words(pipeline["bound"], pipeline["estimate"]))))


def move_totals(moves: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The number of relocations; their dollars are null, as those of each (`NOT_ESTIMATED`)."""
    return {"num_moves": len(moves), "moves_expected_usd": None, "moves_saved_usd": None}


def move_words(num_moves: float) -> str:
    """The relocations in a line; "" without any."""
    return f"moves: {num_moves:g}" if num_moves else ""


@dataclass(frozen=True, slots=True)
class StepTime:
    """One published step."""

    step: int
    end_s: float
    seconds: float
    solo_s: float


def mean_step_s(steps: Sequence[StepTime]) -> float | None:
    """Mean seconds of a step, the first left out where there are others; None before there is one."""
    steady = steps[1:] or steps
    return math.fsum(step.seconds for step in steady) / len(steady) if steady else None


def slo_fields(record: PipelineRecord, steps: Sequence[StepTime], end_s: float) -> dict[str, Any]:
    """A pipeline's keys of the summary and of the status. `end_s`: the last known time of the run."""
    slo, expected = record.pipeline.slo_slowdown, record.expected
    steady = steps[1:] or steps
    solo_s = math.fsum(step.solo_s for step in steady)
    return {
        "step_slowdown": math.fsum(step.seconds for step in steady) / solo_s if solo_s > 0.0 else None,
        "slo_slowdown": slo if math.isfinite(slo) else None,
        "keeps_slo": _keeps_slo(record, steady, end_s) if math.isfinite(slo) else None,
        "queue_s": _queue_s(record, end_s),
        "expected_slowdown": expected.step_slowdown if expected else None,
        "slo_probability": expected.probability if expected else None,
        "bound": phase_fields(expected.bounded.bound) if expected and expected.bounded else None,
        "estimate": _estimate(record),
        "slo_reason": expected.reason if expected else "",
        "moves": _moves(record, steps),
    }


def slo_attainment(pipelines: Iterable[Mapping[str, Any]]) -> float | None:
    """The share of the pipelines with an SLO that keep it; None where none has one, or one is not known yet."""
    with_slo = [pipeline["keeps_slo"] for pipeline in pipelines if pipeline["slo_slowdown"] is not None]
    if not with_slo or None in with_slo:
        return None
    return with_slo.count(True) / len(with_slo)


def _keeps_slo(record: PipelineRecord, steady: Sequence[StepTime], end_s: float) -> bool | None:
    is_under_way = record.status in (PipelineStatus.RUNNING, PipelineStatus.WAITING)
    if not steady:
        return None if is_under_way else False
    spent_s, count = _queue_s(record, end_s) + math.fsum(step.seconds for step in steady), len(steady)
    mean_solo_s = math.fsum(step.solo_s for step in steady) / count
    open_s = max(0.0, (end_s if record.ended_s is None else record.ended_s) - steady[-1].end_s)
    if record.status != PipelineStatus.FINISHED:  # a step under way is late once it is, not when it ends
        spent_s, count = spent_s + open_s, count + 1
    return is_within_slo(spent_s, mean_solo_s * count, record.pipeline.slo_slowdown)


def _moves(record: PipelineRecord, steps: Sequence[StepTime]) -> list[dict[str, Any]]:
    """What was expected of each relocation, and what came: the mean of the whole steps until the next one."""
    ends_s = [*(move.time_s for move in record.moves[1:]), math.inf]
    rows = []
    for move, until_s in zip(record.moves, ends_s, strict=False):  # without a move one end is left over
        there = [step.seconds for step in steps if step.end_s - step.seconds >= move.time_s and step.end_s <= until_s]
        rows.append(
            {
                "time_s": move.time_s,
                "expected_step_s": move.expected_step_s,
                "step_s": math.fsum(there) / len(there) if there else None,
                "num_steps": len(there),
                **dict.fromkeys(NOT_ESTIMATED),
            }
        )
    return rows


def _queue_s(record: PipelineRecord, end_s: float) -> float:
    over_s = end_s if record.ended_s is None else record.ended_s
    return (over_s if record.admitted_s is None else record.admitted_s) - record.submitted_s


def _estimate(record: PipelineRecord) -> dict[str, Any] | None:
    measured = record.expected.measured if record.expected else None
    if measured is not None:
        return {
            "source": "learned",
            **phase_fields(measured.median),
            "low": phase_fields(measured.low),
            "high": phase_fields(measured.high),
            "num_steps": measured.num_steps,
        }
    pipeline = record.pipeline
    if pipeline.estimate is None:
        return None
    return {"source": "given" if pipeline.held is None else "learned", **phase_fields(pipeline.estimate)}


def phase_fields(seconds: PhaseSeconds) -> dict[str, float]:
    """Seconds of its phases, as summary, status and plan have them."""
    return {"rollout_s": seconds.rollout_s, "train_s": seconds.train_s}
