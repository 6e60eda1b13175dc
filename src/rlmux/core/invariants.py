"""All is well: what must hold after every event, checked from scratch.

1. A device's leases never exceed it, and every lease belongs to an order that computes there.
2. State resident on a device fits it, and the state that an order computes with is resident there, but that of a tail
   which has left its node to others.
3. Every order belongs to a running (or cancelled, draining) pipeline of the device's group, and its seconds count from
   its begin.
4. A shard, a training stage or a batch is in its group's ready work exactly while it is READY or WAITING_FOR_ENV, and
   has an order exactly while it is RUNNING, PAUSING or MIGRATING; that order names it.
5. On-policy: a rollout that is open samples from a version that is published, within the staleness bound.
6. A requested migration belongs to a rollout that is pausing, and its target has a shard of the same step.
   No trajectories are on their way to a shard that is migrating itself.
7. Placement adds up (the ledger's own check), and it plans with what is believed of each pipeline now.
8. The first pipeline in the queue for admission waits because its policy does not place it, and a start is reserved for
   it if others are to make room for it.
9. A filler computes alone on its device, and leaves it where a group wants it.
10. No device is free beside ready work, but where and for how long the policy allows it (`core/steps/idle_check.py`).
"""

from __future__ import annotations

from rlmux.core.estimation.tail_gain import is_tail
from rlmux.core.model import Phase, PipelineStatus
from rlmux.core.pipeline_run import PipelineRun
from rlmux.core.placement.choice import Refusal
from rlmux.core.scheduler import Scheduler
from rlmux.core.state import DeviceState, SchedulerState
from rlmux.core.steps.idle_check import check_idling
from rlmux.core.work import ReadyWork, Work, WorkState

_TOLERANCE = 1e-9


def check(scheduler: Scheduler) -> None:
    """Raises AssertionError naming the first invariant that does not hold."""
    state = scheduler.state
    _check_devices(scheduler)
    _check_ready_work(state)
    _check_requested_migrations(state)
    for run in state.runs.values():
        if run.status is PipelineStatus.RUNNING:
            _check_run(state, run)
        waiting = state.waiting_fillers if run.pipeline.is_filler else state.waiting
        assert (run.status is PipelineStatus.WAITING) == (run.pipeline.id in waiting), f"{run.pipeline.id} waits"
        if run.pipeline.id in scheduler.ledger:
            assert scheduler.ledger.pipeline(run.pipeline.id) == run.pipeline, f"{run.pipeline.id} is planned otherwise"
    scheduler.ledger.check()
    _check_queue(scheduler)
    for view in scheduler.query.groups():
        policy = scheduler.policy
        check_idling(state, view, policy.idling(view))


def _check_devices(scheduler: Scheduler) -> None:
    state = scheduler.state
    for device in state.devices.values():
        _check_filler(state, device)
        held = sum(device.orders.values())
        assert held <= 1.0 + _TOLERANCE, f"{device.id} is leased {held:.3f} times: {device.orders}"
        capacity = scheduler.cluster.pools[device.id.pool].device_memory_bytes
        known = [size for size in device.residents.values() if size is not None]
        assert sum(known) <= capacity, f"{device.id} holds {sum(known)} of {capacity} bytes: {device.residents}"
        if len(known) < len(device.residents):
            assert len(device.residents) == 1, f"{device.id}: a state of unknown size shares it: {device.residents}"
        for order_id in device.orders:
            order = state.orders[order_id]
            assert device.id in order.devices, f"order {order_id} leases {device.id} without computing there"
            is_apart = order.phase is Phase.ROLLOUT and is_tail(
                state.runs[order.pipeline].pipeline, order.device_fraction
            )
            assert is_apart != ((order.pipeline, order.phase_on(device.id)) in device.residents), (
                f"{order.pipeline} is {'still' if is_apart else 'not'} loaded on {device.id}"
            )
    of_runs = {order.id: order for run in state.runs.values() for order in run.step.orders.values()}
    assert of_runs == state.orders, f"pipelines have orders {sorted(of_runs)}, of {sorted(state.orders)}"
    for order in state.orders.values():
        assert order.rate_since_s >= order.started_s, f"order {order.id} counts seconds from before it began"
        if order.migrates_from is None:
            for device_id in order.devices:
                device = state.devices[device_id]
                is_leased = order.id in device.orders or device.filler == order.id
                assert is_leased, f"order {order.id} computes without a lease"


def _check_filler(state: SchedulerState, device: DeviceState) -> None:
    wanted_by = state.wanted_by.get(device.id)
    if device.filler is None:
        assert wanted_by is None, f"{device.id} is free and kept for group {wanted_by}"
        return
    order = state.orders[device.filler]
    assert order.pipeline in state.fillers.members, f"order {order.id} is of no filler"
    assert not device.orders, f"{device.id}: a filler computes beside {device.orders}"
    assert (order.pipeline, Phase.ROLLOUT) in device.residents, f"{order.pipeline} is not loaded on {device.id}"
    assert wanted_by is None or order.is_pausing, f"{device.id}: group {wanted_by} wants it, and order {order.id} stays"


def _check_ready_work(state: SchedulerState) -> None:
    for group in (*state.groups.values(), state.fillers):
        assert group.members or group is state.fillers, f"group {group.id} is empty"
        for sequence, ready in group.ready.items():
            assert sequence == ready.sequence
            run = group.members[ready.pipeline]
            work: Work
            if ready.is_batch:
                work = run.step.batches[ready.kind]
            else:
                work = run.step.shards[ready.devices[0]] if ready.phase is Phase.ROLLOUT else run.step.training
            assert work.work is ready, f"{ready} is listed as ready, but its pipeline has {work}"
            _check_work(state, group.ready, work)


def _check_work(state: SchedulerState, ready: dict[int, ReadyWork], work: Work) -> None:
    is_ready = work.state in (WorkState.READY, WorkState.WAITING_FOR_ENV)
    is_listed = work.work is not None and ready.get(work.work.sequence) is work.work
    assert is_ready == is_listed, f"{work} is listed as ready: {is_listed}"
    if is_ready and work.work is not None:
        assert work.work.is_waiting == (work.state is WorkState.WAITING_FOR_ENV), f"{work} is seen as {work.work}"
    is_ordered = work.state in (WorkState.RUNNING, WorkState.PAUSING, WorkState.MIGRATING)
    assert is_ordered == (work.order is not None), f"{work} has order {work.order}"
    if work.order is not None:
        order = state.orders[work.order]
        assert order.work is work, f"order {order} does not name {work}"
        assert (order.migrates_from is not None) == (work.state is WorkState.MIGRATING), f"{work} has order {order}"


def _check_requested_migrations(state: SchedulerState) -> None:
    for run in state.runs.values():
        for shard in run.step.shards.values():
            if shard.migrate_to is not None:
                assert shard.state is WorkState.PAUSING, f"{shard} is to migrate without being paused"
                assert shard.migrate_to != shard.device, f"{shard} is to migrate to where it is"
                assert shard.migrate_to in run.step.shards, (
                    f"{shard} is to migrate to {shard.migrate_to}, without a shard"
                )
    for order in state.orders.values():
        shards = state.runs[order.pipeline].step.shards
        for device in order.devices if order.migrates_from is not None else ():
            if (target := shards.get(device)) is not None:
                assert target.state is not WorkState.MIGRATING, f"order {order.id} brings trajectories to {target}"
    for group in state.groups.values():
        for work in group.ready.values():
            assert work.migrate_to is None, f"{work} is still to migrate"


def _check_run(state: SchedulerState, run: PipelineRun) -> None:
    pipeline = run.pipeline
    assert run.nodes.placement is not None
    group = state.group_of(run)
    for device, shard in run.step.shards.items():
        assert shard.device == device, f"{pipeline.id}: {shard} is filed under {device}"
        assert shard.work.step == run.step.rollout_step, f"{pipeline.id}: {shard} is of another step"
        _check_work(state, group.ready, shard)
        if shard.order is not None:
            order = state.orders[shard.order]
            assert device in (*order.devices, order.migrates_from), f"{pipeline.id}: {shard} has order {order}"
    _check_work(state, group.ready, run.step.training)
    assert pipeline.work_arrives or not run.step.batches, (
        f"{pipeline.id} has planned steps and batches: {run.step.batches}"
    )
    for kind, batch in run.step.batches.items():
        _check_work(state, group.ready, batch)
        assert batch.kind == kind, f"{pipeline.id}: {batch} is filed under {kind}"
        assert not batch.is_due, f"{pipeline.id}: {batch} is due and does not open"
        assert batch.next_units is None or batch.order is not None, f"{pipeline.id}: {batch} keeps work while none runs"
    if run.step.training.order is not None:
        assert state.orders[run.step.training.order].phase is Phase.TRAIN
    if run.step.shards:
        lag = run.step.rollout_step - 1 - max(run.step.published_version, 0)
        assert run.step.published_version >= 0, f"{pipeline.id} samples before its first version is published"
        assert lag <= pipeline.staleness, f"{pipeline.id} samples step {run.step.rollout_step} {lag} versions behind"
    assert run.step.trained_step <= run.step.generated_step <= run.step.rollout_step
    assert run.step.published_version <= run.step.trained_step or run.step.trained_step < 0


def _check_queue(scheduler: Scheduler) -> None:
    state = scheduler.state
    reservation = state.reservation
    if reservation is None:
        return
    assert reservation.pipeline in state.waiting, f"{reservation} is kept for a pipeline that does not wait"
    run = state.waiting[reservation.pipeline]
    assert run.admission.reserved_start_s <= reservation.start_s, (
        f"{reservation} has a reserved start of {run.admission.reserved_start_s}"
    )
    if state.num_policy_faults:
        return  # a pipeline whose placement has failed waits, though it may fit
    has_moving_budgets = any(other.pipeline.slo_probability is not None for other in state.runs.values())
    if has_moving_budgets and state.head_tried_s < state.now_s:
        return  # it is tried again when a step ends
    choice = scheduler.policy.place(run.pipeline, scheduler.query.placement)
    assert isinstance(choice, Refusal), f"{run.pipeline.id} waits, and its policy would place it: {choice}"
