"""A step as the scheduler had planned it when its rollout was opened: its log decides again.

    events of the log ──▶ Scheduler ──▶ orders, which must be the logged ones
                              └─ MemberView.step_plan ──graph_of_plan──▶ PlannedStep

A module of its own: it decides again and draws nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import cast

from rlmux.core.actions import RunStage
from rlmux.core.decision.views import MemberView
from rlmux.core.errors import UserError
from rlmux.core.events import Event
from rlmux.core.model import PipelineId
from rlmux.core.scheduler import Scheduler
from rlmux.log.block_codec import Entry
from rlmux.report.figures.step_graph import SubStageGraph, graph_of_plan
from rlmux.report.figures.svg import seconds_text


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedStep:
    """The plan of one step."""

    at_s: float
    """Time at which its rollout was opened, on the run's clock."""
    graph: SubStageGraph
    """Empty where nothing was known of the pipeline's steps."""


def planned_step(
    rows: Iterable[Entry], new_scheduler: Callable[..., Scheduler], pipeline: PipelineId, step: int, begin_s: float
) -> PlannedStep:
    """The plan of the step whose first order began at `begin_s`.

    `rows`: of the run's log, from the first on. `new_scheduler`: makes one as it was before the first event, given
    the fields of the note that the run was resumed, where it was; one decides for each process that the run had.
    Raises UserError where the scheduler opens no rollout for the step or gives other orders than the logged ones,
    IllegalTransitionError for an event that does not fit, and what `new_scheduler` raises.
    """
    scheduler, planned, was_open = new_scheduler(), None, False
    for row, logged in _with_orders(rows):
        if row.time_s > begin_s:
            break
        if row.kind == "note":
            scheduler, was_open = new_scheduler(row.value), False
            continue
        if [action for action in scheduler.handle(cast("Event", row.value)) if isinstance(action, RunStage)] != logged:
            raise UserError(f"at {seconds_text(row.time_s)} the scheduler decides otherwise than the log")
        member = scheduler.query.pipeline(pipeline) if pipeline in scheduler.query else None
        is_open = member is not None and member.is_rollout_open and member.rollout_step == step
        if member is not None and is_open and not was_open:
            planned = PlannedStep(at_s=row.time_s, graph=_graph(member, step))
        was_open = is_open
    if planned is None:
        raise UserError(f"the scheduler opened no rollout for step {step}")
    return planned


def _with_orders(rows: Iterable[Entry]) -> Iterator[tuple[Entry, list[RunStage]]]:
    """Every event, with the orders for stages that answered it, and every note of a resumed run."""
    first, orders = None, list[RunStage]()
    for row in rows:
        if row.kind == "event" or row.type == "resumed":
            if first is not None:
                yield first, orders
            first, orders = row, []
        elif isinstance(row.value, RunStage):
            orders.append(row.value)
    if first is not None:
        yield first, orders


def _graph(member: MemberView, step: int) -> SubStageGraph:
    if not member.estimates.curves and member.pipeline.estimate is None:
        return SubStageGraph(nodes=(), edges=())
    return graph_of_plan(member.id, step, member.rollout_devices, member.train_devices, member.step_plan)
