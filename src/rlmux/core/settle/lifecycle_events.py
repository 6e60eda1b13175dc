"""Pipelines come, end and break: how each of these facts is applied.

PipelineSubmitted ─▶ it waits, with the seconds of pipelines alike where its user gave none; one that failed is retried
AlikeRestored ─▶ what such pipelines took in earlier parts of the run is known
PipelineCancelled, ClientFinished ─▶ what runs is paused; the last order that ends leaves it over
PipelineFailed ─▶ its orders end, and it is over
WorkerLost ─▶ what the worker had is to be done again
PipelineRestarted ─▶ the pipeline goes on from its last checkpoint, where it is
"""

from __future__ import annotations

from dataclasses import replace

from rlmux.core.actions import Action
from rlmux.core.events import (
    AlikeRestored,
    ClientFinished,
    PipelineCancelled,
    PipelineFailed,
    PipelineRestarted,
    PipelineSubmitted,
    WorkerLost,
)
from rlmux.core.model import DeviceId, Phase, PipelineStatus
from rlmux.core.pipeline_run import PipelineRun
from rlmux.core.queue.admission import HELD
from rlmux.core.settle import filler_placement, placer
from rlmux.core.settle.parts import Parts
from rlmux.core.steps.step_machine import PipelineInput
from rlmux.core.work import Order, RequestBatch


def on_submitted(parts: Parts, event: PipelineSubmitted) -> list[Action]:
    pipeline, state = event.pipeline, parts.state
    before = state.runs.get(pipeline.id)
    if before is not None and before.status is not PipelineStatus.FAILED:  # whose nodes went back as it failed
        raise parts.journal.illegal(f"pipeline {pipeline.id} was submitted before")
    if pipeline.tail is not None and not parts.policy.tails:
        pipeline = replace(pipeline, tail=None)  # its books do not count on what it does not do
    state.has_tails = state.has_tails or pipeline.tail is not None
    youngest = parts.placement.youngest_group()
    num_shared = len(youngest.rollout_nodes) if youngest is not None and youngest.is_shared else None
    of_alike = state.alike.of(pipeline, num_shared)
    if of_alike is not None:
        pipeline = replace(pipeline, estimate=of_alike.median, held=of_alike.held)
    run = PipelineRun(pipeline, event.time_s, state.next_in_sequence())
    run.estimates.of_alike = of_alike
    state.runs[pipeline.id] = run
    parts.queue.enter(run)
    parts.shares.note_submitted(pipeline)
    if run.admission.is_held:
        return parts.queue.refuse(run, HELD)
    if not pipeline.is_filler:
        state.dirty.balance = True
        if parts.queue.is_next(run):
            state.dirty.newcomer = run
        else:
            state.dirty.queue = True
    return []


def on_alike_restored(parts: Parts, event: AlikeRestored) -> list[Action]:
    for seconds in event.seconds:
        parts.state.alike.keep(seconds)
    return []


def on_cancelled(parts: Parts, event: PipelineCancelled) -> list[Action]:
    return _end_softly(parts, parts.run(event.pipeline), PipelineInput.CANCELLED)


def on_client_finished(parts: Parts, event: ClientFinished) -> list[Action]:
    run = parts.run(event.pipeline)
    parts.batches.check(run)
    return _end_softly(parts, run, PipelineInput.CLIENT_FINISHED)


def _end_softly(parts: Parts, run: PipelineRun, what: PipelineInput) -> list[Action]:
    """It begins nothing more; what runs is paused, and the last order that ends leaves it over."""
    was_running = run.status is PipelineStatus.RUNNING
    parts.steps.move_pipeline(run, what)
    parts.queue.leave(run)
    if not was_running:
        return []
    parts.steps.withdraw(run)
    orders = parts.orders.of(run)
    if not orders:
        parts.state.dirty.over[run.pipeline.id] = run
    elif run.pipeline.work_arrives:  # what its ready batches kept is free
        parts.state.mark_group(run)
    return [action for order in orders for action in parts.steps.order_pause(order)]


def on_failed(parts: Parts, event: PipelineFailed) -> list[Action]:
    run = parts.run(event.pipeline)
    if run.status in (PipelineStatus.WAITING, PipelineStatus.RUNNING):
        parts.queue.fail(run, event.reason)
    parts.steps.move_pipeline(run, PipelineInput.FAILED)
    parts.queue.leave(run)
    drain(parts, run, parts.orders.of(run))
    return []


def drain(parts: Parts, run: PipelineRun, ended: list[Order]) -> None:
    """End these orders of a pipeline that is over: others use their devices, and the last one leaves it over."""
    for order in ended:
        parts.orders.end(order)
    if run.nodes.placement is not None and parts.orders.of(run):
        parts.state.mark_group(run)
    elif run.nodes.placement is not None:
        parts.state.dirty.over[run.pipeline.id] = run


def on_worker_lost(parts: Parts, event: WorkerLost) -> list[Action]:
    run = parts.run(event.pipeline)
    if run.nodes.placement is None:
        return []  # it has ended, or waits for other nodes: nothing of it runs
    if run.status is not PipelineStatus.RUNNING:
        drain(parts, run, [order for order in parts.orders.of(run) if _runs_on(order, event.device)])
        return []
    for phase in (Phase.ROLLOUT, Phase.TRAIN) if run.pipeline.work_arrives else (Phase.ROLLOUT,):
        parts.leases.forget_state(run, phase, event.device)
    parts.batches.lose_orders(run, event.device)
    if event.device in run.step.shards:
        if run.waits_for_user_code:
            parts.groups.catch_up(run)
        parts.steps.lose_worker(run, run.step.shards[event.device])
    parts.state.mark_group(run)
    return []


def on_restarted(parts: Parts, event: PipelineRestarted) -> list[Action]:
    run = parts.run(event.pipeline)
    if run.nodes.placement is None:
        return []  # as above
    if run.status is not PipelineStatus.RUNNING:
        drain(parts, run, parts.orders.of(run))
    elif run.parking.is_leaving:  # its processes have ended for good
        parts.steps.note_left(run, event.restored_step)
    elif run.pipeline.is_filler:
        filler_placement.begin_again(parts, run, event.restored_step)
    else:
        _begin_again(parts, run, event.restored_step)
    return []


def _begin_again(parts: Parts, run: PipelineRun, restored_step: int) -> None:
    parts.orders.end_all(run)
    parts.steps.withdraw(run)
    parts.leases.forget_states(run)
    parts.groups.rejoin_cycle(run)
    placer.begin(parts, run, restored_step)
    parts.ledger.renew(run.pipeline.id)
    parts.state.mark_group(run)


def _runs_on(order: Order, device: DeviceId) -> bool:
    """Whether the order ended with the device's worker: it ran a shard or a batch there, or migrated from there."""
    if isinstance(order.work, RequestBatch):
        return device in order.devices
    return order.migrates_from == device or (order.phase is Phase.ROLLOUT and device in order.devices)
