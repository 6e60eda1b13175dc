"""The run in numbers: `summary.json`, and what `run --json` prints. Its keys are stable.

    step_s_mean     from when the first rollout computed to the last published step, over the steps published:
                    a step lasts from its predecessor's end to its own
    step_slowdown   step_s_mean over the mean solo estimate of the same steps
    solo estimate   what one step takes with nobody in the way, from this run's own measurements:
                        the rollout worker that computed and waited for its environment longest
                      + the reward, training and publish stages
                    a pipeline with staleness overlaps the two, alone too: the larger of them. Switches and gaps
                    are left out. Where orders shared a device by level, their seconds contain the interference,
                    so the estimate is high and the slowdown is low
    utilization     busy_s over the makespan
    control_overhead
                    seconds of `control` on all devices, over makespan times devices: neither computing nor a
                    declared switch, although an order was given or could have been
    tokens          sampled in rollouts whose result counts; work that was lost or done again counts once

Everything is there for an unfinished run too, as of the last row; what is not known is null.
"""

from __future__ import annotations

import math
from typing import Any

from rlmux.core.model import DeviceId, Phase, Stage
from rlmux.report.history import OrderRecord, PipelineRecord
from rlmux.report.intervals import Cause, Kind
from rlmux.report.timeline import Timeline


def summarize(timeline: Timeline) -> dict[str, Any]:
    """The contents of `summary.json`."""
    makespan_s = timeline.makespan_s
    pipelines = {
        str(name): _pipeline(timeline, record, orders)
        for (name, record), orders in zip(
            timeline.pipelines.items(), _orders_by_pipeline(timeline).values(), strict=True
        )
    }
    num_device_seconds = makespan_s * len(timeline.devices)
    return {
        "policy": timeline.header.get("policy"),
        "backend": timeline.header.get("backend"),
        "makespan_s": makespan_s,
        "tokens_per_s": _ratio(sum(pipeline["tokens"] for pipeline in pipelines.values()), makespan_s),
        "pipelines": pipelines,
        "devices": {str(device): _device(timeline, device) for device in timeline.devices},
        "num_migrations": sum(instant.what == "migration" for instant in timeline.instants),
        "num_switches": sum(order.switch.value != "none" for order in timeline.orders),
        "control_overhead": _ratio(timeline.seconds(Cause.CONTROL), num_device_seconds),
    }


def step_seconds(record: PipelineRecord, orders: list[OrderRecord]) -> dict[int, float]:
    """How long each published step took, from its predecessor's end; the first from its rollout's first computing."""
    begins = [
        order.start_s + max(0.0, min(order.end_s, order.start_s + _held_s(order)) - order.start_s - _used_s(order))
        for order in orders
        if order.stage is Stage.GENERATE and not order.is_migration
    ]
    if not begins:
        return {}
    seconds, previous_s = {}, min(begins)
    for step, end_s in sorted(record.published.items()):
        seconds[step] = max(0.0, end_s - previous_s)
        previous_s = max(previous_s, end_s)
    return seconds


def solo_seconds(record: PipelineRecord, orders: list[OrderRecord]) -> dict[int, float]:
    """The solo estimate of each published step."""
    rollout: dict[int, dict[DeviceId, float]] = {}
    rest: dict[int, float] = {}
    for order in orders:
        if not order.counts or order.is_migration or order.step not in record.published:
            continue
        if order.phase is Phase.ROLLOUT:
            by_device = rollout.setdefault(order.step, {})
            device = order.devices[0]
            by_device[device] = by_device.get(device, 0.0) + order.seconds + _tool_wait_s(order)
        else:
            computed_s = order.seconds if order.devices else max(order.seconds, _held_s(order))
            rest[order.step] = rest.get(order.step, 0.0) + computed_s
    combine = max if record.pipeline.staleness else _add
    return {
        step: combine(max(rollout.get(step, {}).values(), default=0.0), rest.get(step, 0.0))
        for step in sorted(record.published)
    }


def _pipeline(timeline: Timeline, record: PipelineRecord, orders: list[OrderRecord]) -> dict[str, Any]:
    step_s = step_seconds(record, orders)
    solo_s = solo_seconds(record, orders)
    rewards = [
        metrics["reward_mean"]
        for _, metrics in sorted(record.metrics.items())
        if math.isfinite(metrics.get("reward_mean", math.nan))
    ]
    num_tokens = sum(order.tokens for order in orders if order.stage is Stage.GENERATE and order.counts)
    slo = record.pipeline.slo_slowdown
    return {
        "steps": max(record.published, default=0),
        "tokens": num_tokens or int(sum(metrics.get("tokens", 0) for metrics in record.metrics.values())),
        "trajectories": int(sum(metrics.get("trajectories", 0) for metrics in record.metrics.values())),
        "reward_first": rewards[0] if rewards else None,
        "reward_last": rewards[-1] if rewards else None,
        "step_s_mean": _ratio(sum(step_s.values()), len(step_s)),
        "step_slowdown": _ratio(sum(step_s.values()), sum(solo_s.values())) if step_s else None,
        "slo_slowdown": slo if math.isfinite(slo) else None,
        "weights_sha256": record.weights_sha256,
        "status": str(record.status),
    }


def _device(timeline: Timeline, device: DeviceId) -> dict[str, Any]:
    seconds = timeline.devices[device].seconds_by_kind
    return {
        "pool": device.pool,
        **{f"{kind}_s": seconds[kind] for kind in Kind},
        "utilization": _ratio(seconds[Kind.BUSY], timeline.makespan_s),
    }


def _orders_by_pipeline(timeline: Timeline) -> dict[str, list[OrderRecord]]:
    orders: dict[str, list[OrderRecord]] = {name: [] for name in timeline.pipelines}
    for order in timeline.orders:
        if order.pipeline in orders:
            orders[order.pipeline].append(order)
    return orders


def _held_s(order: OrderRecord) -> float:
    return order.end_s - order.start_s if math.isfinite(order.end_s) else order.seconds + order.switch_s


def _used_s(order: OrderRecord) -> float:
    return min(order.seconds + _tool_wait_s(order), _held_s(order))


def _tool_wait_s(order: OrderRecord) -> float:
    """What its environment made it wait beyond the seconds it reports."""
    waited_s = 0.0
    for before, after in zip(order.chunks, order.chunks[1:], strict=False):
        if before.num_active == 0 and before.num_waiting == 0 and before.num_parked > 0:
            waited_s += max(0.0, after.time_s - before.time_s - (after.seconds - before.seconds))
    return waited_s


def _add(rollout_s: float, rest_s: float) -> float:
    return rollout_s + rest_s


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole > 0.0 else None
