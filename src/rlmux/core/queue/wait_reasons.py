"""Why a waiting pipeline waits, as one token with numbers, and which small change would start it now.

    held           its user holds it, or has parked it
    filler         it takes only what others leave, and no node has that now
    over_quota     its project or its user would have more than its quota
    budget_spent   its project or its user has spent its dollars of this period
    parking        it is the first, and others give their devices back for it
    reserved_for   it would fit, and the room is kept for the first in the queue
    behind         it does not fit, and another has the reservation
    no_room        it does not fit, and is the first

The changes are tried on the ledger and taken back: the result is the policy's own answer. The cheapest come first:
to release the hold, to accept a slower step, to request fewer nodes, to do without another pipeline of one's own, to
have a larger quota.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import StrEnum

from rlmux.core.model import Pipeline, PipelineId, PipelineStatus
from rlmux.core.pipeline_run import PipelineRun
from rlmux.core.placement.placement_ledger import PlacementLedger
from rlmux.core.queue.admission import AdmissionQueue
from rlmux.core.queue.fair_share import Shares
from rlmux.core.state import Reservation, SchedulerState

MAX_CHANGES = 3
"""Number of changes to list."""
_SLO_TENTHS = 30
"""Tenths by which an SLO slowdown is raised at most."""

_KEY_OF_LIMIT = {
    "max_running": "running",
    "max_devices": "devices",
    "device_hours_a_day": "device_hours_a_day",
    "max_usd_per_hour": "usd_per_hour",
    "budget_usd": "budget_usd.limit",
}
"""Keys of the section `shares` by fields of `Quota`."""


class WaitToken(StrEnum):
    """Why a pipeline waits."""

    HELD = "held"
    FILLER = "filler"
    OVER_QUOTA = "over_quota"
    BUDGET_SPENT = "budget_spent"
    PARKING = "parking"
    RESERVED_FOR = "reserved_for"
    BEHIND = "behind"
    NO_ROOM = "no_room"


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One change of a waiting pipeline or of its user's others."""

    key: str
    """What changes: `hold`, `slo_slowdown`, `rollout.workers`, `train.workers`, `without`, or `quota.` and a limit of a
    quota."""
    was: str | float
    """Value before; empty for `without`."""
    to: str | float
    """Value after; for `without` the name of the pipeline that is to be over."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """Why a pipeline waits."""

    token: WaitToken
    reason: str
    """One line for people, with the policy's numbers."""
    position: int
    """Place in the order of offers, from 1; 0 where it is held."""
    num_waiting: int
    """Pipelines in that order."""
    waited_s: float
    first: PipelineId | None
    """The pipeline that the next start is reserved for; None where there is none."""
    starts_s: float | None
    """Time of that start, by the estimates; None where it is unknown or there is none."""
    would_start_now_if: tuple[Change, ...]
    project: str = ""
    """Project that is charged for it; empty if unknown."""
    share: float | None = None
    """Dominant share of its project, of late; None where nothing is counted."""
    fair_share: float | None = None
    """Dominant share that each project would have had by its weight."""

    @property
    def is_over_share(self) -> bool:
        """Whether its project has used more of late than its weight entitles it to."""
        return is_over(self.share, self.fair_share)


def is_over(share: float | None, fair_share: float | None) -> bool:
    """Whether a share is beyond the fair one, by more than rounding."""
    return share is not None and fair_share is not None and share > fair_share * 1.001


def wait_of(
    run: PipelineRun, *, state: SchedulerState, ledger: PlacementLedger, queue: AdmissionQueue, shares: Shares
) -> Wait | None:
    """Why this pipeline waits, and what would start it now; None where it does not wait. Nothing is changed."""
    if run.status is not PipelineStatus.WAITING:
        return None
    in_order = [waiting.pipeline.id for waiting in shares.in_order()]
    reservation = state.reservation
    would_start = (
        change
        for change, pipeline in (() if run.pipeline.is_filler else _changes(run, state, shares))
        if _is_within_quota(run, change, pipeline, shares)
        and _starts_with(change, pipeline, ledger=ledger, queue=queue, reservation=reservation)
    )
    position = in_order.index(run.pipeline.id) + 1 if run.pipeline.id in in_order else 0
    return replace(_wait(run, position, len(in_order), state, queue, shares), would_start_now_if=_cheapest(would_start))


def waits(
    *, state: SchedulerState, queue: AdmissionQueue, shares: Shares, limit: int
) -> list[tuple[PipelineRun, Wait]]:
    """The first of the queue in the order of offers, then those that are held or over a quota, then fillers, without
    what would start them."""
    in_order = shares.in_order()
    offered = {run.pipeline.id for run in in_order}
    held = [run for run in state.waiting.values() if run.pipeline.id not in offered]
    held += state.waiting_fillers.values()
    placed = [*enumerate(in_order, 1), *((0, run) for run in held)][:limit]
    return [(run, _wait(run, position, len(in_order), state, queue, shares)) for position, run in placed]


def _wait(
    run: PipelineRun, position: int, num_waiting: int, state: SchedulerState, queue: AdmissionQueue, shares: Shares
) -> Wait:
    reservation = state.reservation
    starts_s = reservation.start_s if reservation is not None else math.inf
    share, fair_share = shares.standing_of(run.pipeline.account) if shares.are_set else (None, None)
    return Wait(
        token=_token(run, queue, reservation, state, shares),
        reason=run.admission.reason,
        position=position,
        num_waiting=num_waiting,
        waited_s=state.now_s - run.admission.waiting_since_s,
        first=None if reservation is None else reservation.pipeline,
        starts_s=starts_s if starts_s < math.inf else None,
        would_start_now_if=(),
        project=run.pipeline.account.project,
        share=share,
        fair_share=fair_share,
    )


def _token(
    run: PipelineRun,
    queue: AdmissionQueue,
    reservation: Reservation | None,
    state: SchedulerState,
    shares: Shares,
) -> WaitToken:
    if run.admission.is_held:
        return WaitToken.HELD
    if run.pipeline.is_filler:
        return WaitToken.FILLER
    excess = shares.quotas.excess_of(run)
    if excess is not None:
        return WaitToken.BUDGET_SPENT if excess.limit == "budget_usd" else WaitToken.OVER_QUOTA
    running = (member for group in state.groups.values() for member in group.members.values())
    if any(member.parking.parks_for == run.pipeline.id for member in running):
        return WaitToken.PARKING
    if reservation is None or reservation.pipeline == run.pipeline.id:
        return WaitToken.NO_ROOM
    return WaitToken.RESERVED_FOR if queue.fits(run.pipeline) else WaitToken.BEHIND


def _changes(run: PipelineRun, state: SchedulerState, shares: Shares) -> Iterator[tuple[Change, Pipeline]]:
    """Changes from the cheapest to the dearest, each with the pipeline as it would be."""
    pipeline = run.pipeline
    if run.admission.is_held:
        yield Change(key="hold", was="held", to="released"), pipeline
        return  # nothing else starts it
    if pipeline.slo_slowdown < math.inf:
        for tenths in range(1, _SLO_TENTHS + 1):
            slo = round(pipeline.slo_slowdown + tenths / 10, 6)
            changed = replace(pipeline, slo_slowdown=slo)
            yield Change(key="slo_slowdown", was=pipeline.slo_slowdown, to=slo), changed
    for count in range(pipeline.num_rollout_nodes - 1, 0, -1):
        changed = replace(pipeline, num_rollout_nodes=count)
        yield Change(key="rollout.workers", was=pipeline.num_rollout_nodes, to=count), changed
    for count in range(pipeline.num_train_nodes - 1, 0, -1):
        changed = replace(pipeline, num_train_nodes=count)
        yield Change(key="train.workers", was=pipeline.num_train_nodes, to=count), changed
    for other in state.runs.values():
        if other.nodes.placement is not None and other.pipeline.account == pipeline.account:
            yield Change(key="without", was="", to=other.pipeline.id), pipeline
    excess = shares.quotas.excess_of(run)
    if excess is not None:
        yield Change(key=f"quota.{_KEY_OF_LIMIT[excess.limit]}", was=excess.was, to=excess.needed), pipeline


def _is_within_quota(run: PipelineRun, change: Change, pipeline: Pipeline, shares: Shares) -> bool:
    """Whether no limit keeps the pipeline waiting once it is changed like this."""
    quotas = shares.quotas
    without = PipelineId(str(change.to)) if change.key == "without" else None
    raised = quotas.excess_of(run) if change.key.startswith("quota.") else None
    return quotas.excess_of(run, pipeline, without=without, raised=raised) is None


def _starts_with(
    change: Change,
    pipeline: Pipeline,
    *,
    ledger: PlacementLedger,
    queue: AdmissionQueue,
    reservation: Reservation | None,
) -> bool:
    """Whether the pipeline would be admitted now, changed like this."""
    with ledger.trial():
        if change.key == "without":
            ledger.depart(PipelineId(str(change.to)))
        return queue.would_start(pipeline, reservation)


def _cheapest(changes: Iterator[Change]) -> tuple[Change, ...]:
    """The first change of each key, for the first few keys."""
    by_key: dict[str, Change] = {}
    for change in changes:
        by_key.setdefault(change.key, change)
        if len(by_key) == MAX_CHANGES:
            break
    return tuple(by_key.values())
