"""Whether a policy's choices for a group are allowed: each after those before it, and all before any is carried out.

    RunWork         ready work, once; free parts of its devices, whose memory has room for its state
    PauseOrder      an order of the group that computes; its shard may migrate only inside its rollout
    ChangeFraction  an order of the group that computes; a part of its devices that is free
    MigrateWork     a ready shard, once; no trajectories on their way to it, and targets that stay

A module of its own: what is checked here is all that carrying choices out (`dispatch`) takes for granted.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from rlmux.core.decision.plan import ChangeFraction, Choice, MarkPlanned, MigrateWork, PauseOrder, RunWork
from rlmux.core.decision.views import Planned
from rlmux.core.estimation.tail_gain import is_tail
from rlmux.core.model import DeviceId, OrderId, Phase, PipelineId
from rlmux.core.settle.parts import Parts
from rlmux.core.state import GroupState
from rlmux.core.steps.leases import FRACTION_TOLERANCE
from rlmux.core.work import Order, ReadyWork

_ACCEPTED = "RunWork, ChangeFraction, PauseOrder, MigrateWork, MarkPlanned"


def enter(parts: Parts, group: GroupState, planned: Planned, choice: Choice) -> None:
    """Add one more choice to what is planned. Raises PolicyError where it is not allowed."""
    if isinstance(choice, RunWork):
        _enter_start(parts, group, planned, choice)
    elif isinstance(choice, PauseOrder):
        _enter_pause(parts, group, planned, choice)
    elif isinstance(choice, MigrateWork):
        _enter_migration(parts, group, planned, choice)
    elif isinstance(choice, ChangeFraction):
        _enter_fraction(parts, group, planned, choice)
    elif not isinstance(choice, MarkPlanned):
        raise parts.journal.illegal_choice(f"chose {choice!r}; accepted: {_ACCEPTED}")


def _enter_start(parts: Parts, group: GroupState, planned: Planned, choice: RunWork) -> None:
    work = choice.work
    if not isinstance(work, ReadyWork) or work.sequence in planned.gone or group.ready.get(work.sequence) is not work:
        raise parts.journal.illegal_choice(f"starts {work}, which is not ready")
    _check_slowdown(parts, choice.slowdown)
    for device in work.devices:
        held, others = _fractions(parts, planned, device), planned.held.get(device, 0.0)
        if not _is_free(choice.device_fraction, sum(held.values()) + others):
            beside = f"{held}" + (f", and {others} by the same plan" if others else "")
            raise parts.journal.illegal_choice(f"leases {choice.device_fraction} of {device}, held by {beside}")
        if held or others:
            _check_memory(parts, planned, work, device)
    planned.gone.add(work.sequence)
    for device in work.devices:
        planned.held[device] = planned.held.get(device, 0.0) + choice.device_fraction
        state = (work.pipeline, work.phase_on(device))
        planned.states.setdefault(device, {})[state] = _device_bytes(parts, state)
        if work.takes_slot:
            planned.begun.add((work.pipeline, work.phase, device))


def _enter_pause(parts: Parts, group: GroupState, planned: Planned, choice: PauseOrder) -> None:
    order = _computing(parts, group, choice.order, "pauses")
    target = choice.migrate_to
    if target is not None:
        shards = parts.state.runs[order.pipeline].step.shards
        if order.phase is not Phase.ROLLOUT or target not in shards or target in order.devices:
            raise parts.journal.illegal_choice(f"pauses {order} to migrate its shard to {target}")
    planned.pauses[order.id] = target


def _enter_fraction(parts: Parts, group: GroupState, planned: Planned, choice: ChangeFraction) -> None:
    order = _computing(parts, group, choice.order, "changes the fraction of")
    _check_slowdown(parts, choice.slowdown)
    for device in order.devices:
        held = _fractions(parts, planned, device)
        others = sum(fraction for other, fraction in held.items() if other != order.id)
        if not _is_free(choice.device_fraction, others + planned.held.get(device, 0.0)):
            raise parts.journal.illegal_choice(f"gives order {order.id} {choice.device_fraction} of {device}")
    planned.fractions[order.id] = choice.device_fraction


def _enter_migration(parts: Parts, group: GroupState, planned: Planned, choice: MigrateWork) -> None:
    run, source, targets = group.members.get(choice.pipeline), choice.source, choice.targets
    if run is None:
        raise parts.journal.illegal_choice(f"migrates {choice}: the group has no such pipeline")
    shard = run.step.shards.get(source)
    is_ready = shard is not None and shard.is_ready and shard.work.sequence not in planned.gone
    if shard is None or not is_ready or source in targets or not all(to in run.step.shards for to in targets):
        raise parts.journal.illegal_choice(f"migrates {choice}: the source must be a ready shard")
    if len(set(targets)) < len(targets):
        raise parts.journal.illegal_choice(f"migrates {choice}: it names a target twice")
    for target in targets:
        is_settled = planned.allows_migration(run.pipeline.id, source, target)
        if not is_settled or not parts.state.can_migrate(run, source, target):
            raise parts.journal.illegal_choice(f"migrates {choice}: trajectories are on their way to one that leaves")
    planned.gone.add(shard.work.sequence)
    planned.targets[run.pipeline.id, source] = targets
    if shard.work.takes_slot:  # its phase begins elsewhere: the device owes it no slot in this cycle
        planned.begun.add((run.pipeline.id, Phase.ROLLOUT, source))


# ------------------------------------------------------------------ helpers, in the order they are called


def _check_slowdown(parts: Parts, slowdown: float) -> None:
    if not 0.0 < slowdown < math.inf:
        raise parts.journal.illegal_choice(f"expects a slowdown of {slowdown!r}; accepted: a number above 0")


def _fractions(parts: Parts, planned: Planned, device: DeviceId) -> Mapping[OrderId, float]:
    """What orders hold of the device once the plan is carried out."""
    held = parts.state.devices[device].orders
    if not planned.fractions:
        return held
    return {order: planned.fractions.get(order, fraction) for order, fraction in held.items()}


def _is_free(device_fraction: float, held: float) -> bool:
    return device_fraction > 0.0 and held + device_fraction <= 1.0 + FRACTION_TOLERANCE


def _check_memory(parts: Parts, planned: Planned, work: ReadyWork, device: DeviceId) -> None:
    """All states that compute on the device at once must fit. One alone always does."""
    mine = (work.pipeline, work.phase_on(device))
    computing = {mine: _device_bytes(parts, mine), **planned.states.get(device, {})}
    kept = parts.state.devices[device].residents
    for order_id in parts.state.devices[device].orders:
        order = parts.state.orders[order_id]
        state = (order.pipeline, order.phase_on(device))
        if state in kept and not _leaves_node(parts, planned, order):
            computing[state] = kept[state]
    if len(computing) < 2:
        return
    known = [size for size in computing.values() if size is not None]
    if len(known) < len(computing) or sum(known) > parts.state.devices[device].memory_bytes:
        raise parts.journal.illegal_choice(f"computes with {sorted(computing)} at once on {device}: they do not fit")


def _device_bytes(parts: Parts, state: tuple[PipelineId, Phase]) -> float | None:
    """Device bytes of a state; None is unknown."""
    name, phase = state
    footprint = parts.state.runs[name].pipeline.footprint
    return footprint.rollout_device_bytes if phase is Phase.ROLLOUT else footprint.train_device_bytes


def _leaves_node(parts: Parts, planned: Planned, order: Order) -> bool:
    """Whether its state is no longer the device's by this plan: the tail of a rollout that goes on apart."""
    if order.phase is not Phase.ROLLOUT or order.id not in planned.fractions:
        return False
    return is_tail(parts.state.runs[order.pipeline].pipeline, planned.fractions[order.id])


def _computing(parts: Parts, group: GroupState, order_id: OrderId, what: str) -> Order:
    order = group.running.get(order_id)
    if order is None:
        raise parts.journal.illegal_choice(f"{what} order {order_id!r}, which does not compute in this group")
    return order
