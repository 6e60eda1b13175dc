"""Orders end, pause and report, and work arrives: how each of these facts takes a pipeline through its steps."""

from __future__ import annotations

from rlmux.core.actions import Action, Switch
from rlmux.core.events import (
    ChunkFinished,
    ReplyArrived,
    RewardOverdue,
    StageFinished,
    StagePaused,
    TrajectoriesMigrated,
    WorkArrived,
    WorkWithdrawn,
)
from rlmux.core.model import OrderId, Phase, PipelineStatus, Stage
from rlmux.core.pipeline_run import PipelineRun
from rlmux.core.settle.lifecycle_events import drain
from rlmux.core.settle.parts import Parts
from rlmux.core.work import Order, RequestBatch, WorkState


def on_stage_finished(parts: Parts, event: StageFinished) -> list[Action]:
    order, run = _end_named(parts, event.order)
    parts.shares.charge_by_tokens(order, event.batches)
    if run.status is not PipelineStatus.RUNNING:
        return []
    actions: list[Action] = []
    if order.stage is Stage.REWARD and run.step.is_reward_overdue:
        parts.steps.note_reward(run, is_overdue=False)
        parts.groups.catch_up(run)
    solo_s = _measure(parts, run, order, event)
    if isinstance(order.work, RequestBatch):
        parts.batches.finish(run, order)
        has_new_seconds = parts.expectations.learn_batches(run)
    else:
        if order.phase is Phase.ROLLOUT:
            waited_s = _waited_s(parts, order, event)
            run.estimates.history.end_shard(order.devices[0], solo_s, _solo_prefill_s(event, solo_s), waited_s)
        else:
            run.estimates.history.end_stage(order.stage, solo_s)
        actions += parts.steps.finish(run, order)
        is_trained = order.phase is Phase.TRAIN and run.step.trained_step == order.step
        has_new_seconds = is_trained and parts.expectations.learn(run, order.step)
        if is_trained and run.pipeline.slo_probability is not None:  # its budget has moved
            parts.state.dirty.queue |= parts.queue.does_head_fit()
    if has_new_seconds:
        parts.state.dirty.queue = parts.state.dirty.balance = True
    if run.status is PipelineStatus.RUNNING:
        parts.state.mark_group(run)
    return actions


def on_stage_paused(parts: Parts, event: StagePaused) -> list[Action]:
    order, run = _end_named(parts, event.order)
    parts.shares.charge_by_tokens(order, event.batches)
    if run.status is not PipelineStatus.RUNNING:
        return []
    solo_s = _measure(parts, run, order, event)
    parts.state.mark_group(run)
    if isinstance(order.work, RequestBatch):
        parts.batches.pause(run, order)
        return []
    if order.phase is Phase.ROLLOUT:
        waited_s = _waited_s(parts, order, event)
        run.estimates.history.add_pause(order.devices[0], solo_s, _solo_prefill_s(event, solo_s), waited_s)
    parts.steps.pause(run, order, is_waiting=event.is_waiting)
    return []


def on_work_announced(parts: Parts, event: WorkArrived | WorkWithdrawn) -> list[Action]:
    run = parts.run(event.pipeline)
    parts.batches.handle(run, event)
    if run.status is PipelineStatus.RUNNING:
        parts.state.mark_group(run)
    return []


def on_reply_arrived(parts: Parts, event: ReplyArrived) -> list[Action]:
    run = parts.run(event.pipeline)
    shard = run.step.shards.get(event.device)
    if run.status is not PipelineStatus.RUNNING or shard is None or shard.state is not WorkState.WAITING_FOR_ENV:
        return []  # it has been started, migrated or begun anew since
    waited_s = parts.state.now_s - shard.work.since_s
    run.estimates.history.add_wait(event.device, waited_s)
    run.estimates.measured.add_rollout(run.step.rollout_step, event.device, waited_s, 0.0)
    if run.waits_for_user_code:
        parts.groups.catch_up(run)
    parts.steps.reply(run, shard)
    parts.state.mark_group(run)
    return []


def on_reward_overdue(parts: Parts, event: RewardOverdue) -> list[Action]:
    run = parts.state.runs[parts.orders.named(event.order).pipeline]
    if run.status is PipelineStatus.RUNNING:
        parts.steps.note_reward(run, is_overdue=True)
        parts.state.mark_group(run)
    return []


def on_chunk_finished(parts: Parts, event: ChunkFinished) -> list[Action]:
    order = parts.orders.named(event.order)
    parts.orders.note_progress(order, event)
    run = parts.state.runs[order.pipeline]
    if order.stage is Stage.GENERATE:
        num_left = event.num_active + event.num_waiting + event.num_waiting_for_env
        run.estimates.history.add_progress(order.devices[0], num_left, parts.orders.solo_s(order, event.seconds))
    if parts.policy.reacts_to_progress:
        parts.state.mark_group(run)
    return []


def on_trajectories_migrated(parts: Parts, event: TrajectoriesMigrated) -> list[Action]:
    order, run = _end_named(parts, event.order)
    if run.status is not PipelineStatus.RUNNING:
        return []
    source = order.migrates_from
    if source is None:
        raise parts.journal.illegal(f"order {order.id} is no migration")
    run.estimates.measured.add_migration(order.step)
    run.estimates.history.add_migration(
        source, order.devices, event.num_trajectories, event.seconds, is_fresh=order.is_fresh
    )
    actions = parts.steps.finish_migration(run, order)
    parts.state.mark_group(run)
    return actions


def _end_named(parts: Parts, order_id: OrderId) -> tuple[Order, PipelineRun]:
    """End the order that an event names. A cancelled pipeline is over with its last one."""
    order = parts.orders.named(order_id)
    run = parts.state.runs[order.pipeline]
    if run.status is PipelineStatus.RUNNING:
        parts.orders.end(order)
    else:
        drain(parts, run, [order])
    return order, run


def _solo_prefill_s(event: StageFinished | StagePaused, solo_s: float) -> float:
    """Solo seconds of its prefill: slowed by neighbours as the rest of it."""
    return event.prefill_s * solo_s / event.seconds if event.seconds > 0.0 else 0.0


def _waited_s(parts: Parts, order: Order, event: StageFinished | StagePaused) -> float:
    """Seconds of the order in which it neither computed nor switched."""
    return max(0.0, parts.state.now_s - order.started_s - event.switch_s - event.seconds)


def _measure(parts: Parts, run: PipelineRun, order: Order, event: StageFinished | StagePaused) -> float:
    """Learn from an order that has ended; returns its solo seconds."""
    is_warm = order.switch is Switch.WARM
    if is_warm or (event.switch_s > 0.0 and order.devices and order.switch is Switch.NONE):
        run.estimates.history.add_switch(order.phase, event.switch_s, is_warm=is_warm)
    if event.decoded:
        run.estimates.history.add_decoded(event.decoded)
    solo_s = parts.orders.solo_s(order, event.seconds)
    parts.orders.measure(run, order, solo_s, event.switch_s)
    if run.pipeline.base_of(order.phase):
        parts.state.batch_slowdowns.observe(
            run.pipeline, order.phase, tokens=event.tokens, seconds=event.seconds, batches=event.batches
        )
    return solo_s
