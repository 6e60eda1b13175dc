"""All is well: what must hold after every event, checked from scratch.

1. A device's leases never exceed it, and every lease belongs to an order that computes there.
2. State resident on a device fits it, and whoever computes there is resident there.
3. Every order belongs to a running (or cancelled, draining) pipeline of the device's group.
4. A rollout share is in exactly one place: ready, ordered, or done; a training stage likewise.
5. On-policy: a rollout that is open samples from a version that is published, within the staleness bound.
6. A migration that was asked for belongs to a rollout that is pausing, and its target has a shard of the same step.
7. Placement adds up (the ledger's own check).
"""

from __future__ import annotations

from rlmux.core.model import Phase, PipelineStatus
from rlmux.core.scheduler import Scheduler
from rlmux.core.state import OrderStatus, PipelineRun, ReadyWork, SchedulerState

_TOLERANCE = 1e-9


def check(scheduler: Scheduler) -> None:
    """Raises AssertionError naming the first invariant that does not hold."""
    state = scheduler.state
    _check_devices(scheduler)
    _check_ready_lists(state)
    _check_asked_migrations(state)
    for run in state.runs.values():
        if run.status is PipelineStatus.RUNNING:
            _check_run(state, run)
    scheduler.ledger.check()


def _check_devices(scheduler: Scheduler) -> None:
    state = scheduler.state
    for device in state.devices.values():
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
            assert (order.pipeline, order.phase) in device.residents, f"{order.pipeline} is not loaded on {device.id}"
    for order in state.orders.values():
        if order.migrates_from is None:
            for device_id in order.devices:
                assert order.id in state.devices[device_id].orders, f"order {order.id} computes without a lease"


def _check_ready_lists(state: SchedulerState) -> None:
    for group in state.groups.values():
        assert group.members, f"group {group.id} is empty"
        for sequence, work in group.ready.items():
            assert sequence == work.sequence
            run = group.members[work.pipeline]
            place = run.open_shares.get(work.devices[0]) if work.phase is Phase.ROLLOUT else run.train_work
            assert place is work, f"{work} is listed as ready, but its pipeline says {place}"


def _check_asked_migrations(state: SchedulerState) -> None:
    for order in state.orders.values():
        if order.migrate_to is not None and state.runs[order.pipeline].status is PipelineStatus.RUNNING:
            assert order.status is OrderStatus.PAUSING, f"order {order.id} is to migrate without being paused"
            assert order.phase is Phase.ROLLOUT, f"order {order.id} is to migrate and is no rollout"
            assert order.migrate_to not in order.devices, f"order {order.id} is to migrate to where it is"
            shards = state.runs[order.pipeline].open_shares
            assert order.migrate_to in shards, f"order {order.id} is to migrate to {order.migrate_to}, without a shard"
    for group in state.groups.values():
        for work in group.ready.values():
            assert work.migrate_to is None, f"{work} is still to migrate"


def _check_run(state: SchedulerState, run: PipelineRun) -> None:
    pipeline = run.pipeline
    assert run.placement is not None
    group = state.groups[run.placement.group]
    for device, share in run.open_shares.items():
        if isinstance(share, ReadyWork):
            assert group.ready.get(share.sequence) is share, f"{pipeline.id}: share {share} is in no ready list"
        elif share is not None:
            order = state.orders[share]
            places = (*order.devices, order.migrates_from)
            assert device in places, f"{pipeline.id}: share on {device} has order {order}"
    if isinstance(run.train_work, ReadyWork):
        assert group.ready.get(run.train_work.sequence) is run.train_work
    elif run.train_work is not None:
        assert state.orders[run.train_work].phase is Phase.TRAIN
    if run.open_shares:
        lag = run.rollout_step - 1 - max(run.published_version, 0)
        assert run.published_version >= 0, f"{pipeline.id} samples before its first version is published"
        assert lag <= pipeline.staleness, f"{pipeline.id} samples step {run.rollout_step} {lag} versions behind"
    assert run.trained_step <= run.generated_step <= run.rollout_step
    assert run.published_version <= run.trained_step or run.trained_step < 0
