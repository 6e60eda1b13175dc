"""What pages show of a run beside its timeline, as JSON: the lane, devices, pipelines, steps. Keys are stable.

Follower ─▶ lane_row  device_rows  pipeline_rows      figures: those of `report.status` and `report.summary`
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from rlmux.core.actions import Switch
from rlmux.core.model import DeviceId, PipelineId
from rlmux.report.slos import StepTime, mean_step_s, slo_attainment
from rlmux.report.status import status
from rlmux.report.timeline.build import Name
from rlmux.report.timeline.history import HardwareReading, History
from rlmux.report.timeline.intervals import Cause, Interval, Kind, label_of
from rlmux.report.timeline.live_timeline import Follower, Look
from rlmux.report.timeline.records import MIGRATIONS, TAIL_MIGRATION, Instant, PipelineRecord

OTHERS = PipelineId("*")
"""In a lane's charges: all pipelines that are not named; no pipeline has this name."""
_MAX_NAMED = 8
"""Pipelines that a lane's charges name."""
_MAX_REWARDS = 32
"""Points of the small curve beside a pipeline's name."""


def lane_row(follower: Follower, look: Look, pipelines: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The row of the whole run."""
    history = follower.history
    every = follower.seconds()
    seconds = _by_kind([pair for named in every.values() for pair in named.items()])
    statuses = [row["status"] for row in pipelines.values()]
    makespan_s = look.end_s - look.start_s
    control_s = math.fsum(
        spent_s for named in every.values() for (_, cause, _), spent_s in named.items() if cause is Cause.CONTROL
    )
    return {
        **{key: history.header.get(key) for key in ("policy", "backend", "run_id", "created", "rlmux_version")},
        "clock": history.clock.to_json(),
        "start_s": look.start_s,
        "now_s": look.end_s,
        "is_over": history.is_over,
        "makespan_s": makespan_s,
        "pools": {
            name: {
                "phase": pool.get("phase"),
                "devices": len(pool.get("devices", ())),
                "usd_per_node_hour": pool.get("usd_per_node_hour"),
            }
            for name, pool in (history.header.get("pools") or {}).items()
        },
        "num_devices": len(every),
        "host_memory": _host_memory(history),
        "pipelines": {each: statuses.count(each) for each in sorted({*_STATUSES, *statuses})},
        "seconds": seconds,
        "num_switches": sum(order.switch is not Switch.NONE for order in history.orders),
        "num_migrations": sum(instant.what in MIGRATIONS for instant in history.instants),
        "num_tail_migrations": sum(instant.what == TAIL_MIGRATION for instant in history.instants),
        "control_overhead": control_s / (makespan_s * len(every)) if every and makespan_s > 0.0 else None,
        "slo_attainment": slo_attainment(pipelines.values()),
        "charges": charges(_with_others([pair for named in every.values() for pair in named.items()])),
    }


def _host_memory(history: History) -> dict[str, float] | None:
    """Of the controller's machine, as of the newest reading."""
    if not history.hardware:
        return None
    note = history.hardware[-1].note
    return {"bytes": note.host_memory_bytes, "used_bytes": note.host_memory_used_bytes}


_STATUSES = ("waiting", "running", "finished", "failed", "cancelled", "refused", "stopped")


def _with_others(named: Sequence[tuple[Name, float]]) -> list[tuple[Name, float]]:
    """The names of the pipelines with most seconds; all others are one, without a name of its own."""
    by_pipeline: dict[PipelineId, float] = {}
    for (_, _, pipeline), seconds in named:
        if pipeline is not None:
            by_pipeline[pipeline] = by_pipeline.get(pipeline, 0.0) + seconds
    largest = sorted(by_pipeline, key=lambda name: (-by_pipeline[name], name))[:_MAX_NAMED]
    kept = {name: name for name in largest}
    return [((kind, cause, name and kept.get(name, OTHERS)), seconds) for (kind, cause, name), seconds in named]


def charges(named: Sequence[tuple[Name, float]]) -> list[dict[str, Any]]:
    """Seconds by what they are put down to, the largest first."""
    sums: dict[Name, list[float]] = {}
    for name, seconds in named:
        sums.setdefault(name, []).append(seconds)
    total = math.fsum(seconds for _, seconds in named)
    rows = [
        {
            "kind": kind.value,
            "cause": cause.value,
            "pipeline": pipeline,
            "label": label_of(cause, PipelineId("others") if pipeline == OTHERS else pipeline),
            "seconds": math.fsum(each),
            "share": math.fsum(each) / total if total > 0.0 else None,
        }
        for (kind, cause, pipeline), each in sums.items()
    ]
    return sorted(rows, key=lambda row: (-float(row["seconds"] or 0.0), str(row["label"])))


def settled_rows(follower: Follower) -> list[dict[str, Any]]:
    """Settled seconds by pool, kind and cause."""
    sums: dict[tuple[str, str, str], list[float]] = {}
    for device, named in follower.settled_seconds().items():
        for (kind, cause, _), seconds in named.items():
            sums.setdefault((device.pool, kind.value, cause.value), []).append(seconds)
    return [
        {"pool": pool, "kind": kind, "cause": cause, "seconds": math.fsum(each)}
        for (pool, kind, cause), each in sorted(sums.items())
    ]


def device_rows(follower: Follower, look: Look, *, is_going_on: bool) -> dict[DeviceId, dict[str, Any]]:
    """What each device does now, and the sums of the whole run.

    A log ends where nothing more happens: what its last row says goes on only while a pipeline is placed.
    """
    is_placed = any(record.status == "running" for record in follower.history.pipelines.values())
    quiet = Cause.DOWN if not is_going_on else None if is_placed else Cause.NOTHING_ADMITTED
    last: dict[DeviceId, Interval] = {}
    for device, interval in [*look.settled, *look.open]:
        if device not in last or interval.end_s >= last[device].end_s:
            last[device] = interval
    makespan_s = look.end_s - look.start_s
    readings = list(follower.history.hardware) if is_going_on else []
    rows = {}
    for device, named in follower.seconds().items():
        now, seconds = last.get(device), _by_kind(list(named.items()))
        if now is not None and quiet is not None:
            now = Interval(now.end_s, look.end_s, Kind.IDLE, quiet)
        rows[device] = {
            "id": str(device),
            "pool": device.pool,
            "node": str(device.node_id),
            "kind": now.kind.value if now else None,
            "cause": now.cause.value if now else None,
            "label": now.label if now else None,
            "pipeline": now.pipeline if now else None,
            "stage": now.stage.value if now and now.stage else None,
            "step": now.step or None if now else None,
            "order": now.order if now else None,
            "since_s": now.start_s if now else None,
            "seconds": seconds,
            "utilization": seconds[Kind.BUSY.value] / makespan_s if makespan_s > 0.0 else None,
            "hardware": _hardware(str(device), readings),
        }
    return rows


def _hardware(device: str, readings: Sequence[HardwareReading]) -> dict[str, Any] | None:
    """The device's newest counters, and its use in the last quarter of an hour."""
    newest = readings[-1].note.devices.get(device) if readings else None
    if newest is None:
        return None
    return {
        **{key: newest.get(key) for key in ("use", "memory_bytes", "memory_used_bytes", "power_w", "temperature_c")},
        "uses": [each.note.devices.get(device, {}).get("use") for each in readings],
        "at_s": readings[-1].time_s,
    }


def pipeline_rows(
    follower: Follower, plans: Mapping[str, str], configs: Mapping[str, Mapping[str, Any]], *, is_going_on: bool
) -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
    """(row, what the page of one pipeline adds) by name.

    `plans`: hash of each pipeline's plan. `configs`: values of each pipeline's part of the file.
    """
    history, steps = follower.history, follower.steps.times
    shown = status(history, is_going_on=is_going_on, steps=steps)["pipelines"]
    waits: dict[str, list[tuple[Name, float]]] = {}
    for named in follower.seconds().values():
        for name, seconds in named.items():
            if name[0] is Kind.BUBBLE and name[2] is not None:
                waits.setdefault(name[2], []).append((name, seconds))
    return {
        str(name): (
            {
                **_row(shown[name], record, steps.get(name, ()), follower.steps.tokens(name)),
                "task": str(configs.get(str(name), {}).get("task.name") or ""),
                "submitted_at": history.clock.utc(record.submitted_s),
            },
            {
                "plan_sha256": plans.get(str(name)),
                "config": configs.get(str(name), {}),
                **_detail(shown[name], record, waits.get(name, [])),
            },
        )
        for name, record in history.pipelines.items()
    }


def _row(shown: Mapping[str, Any], record: PipelineRecord, steps: Sequence[StepTime], tokens: int) -> dict[str, Any]:
    step_s = mean_step_s(steps)
    num_left = max(0, shown["num_steps"] - shown["step"]) if shown["num_steps"] else None
    is_under_way = shown["status"] == "running" and num_left is not None and step_s is not None
    keys = (
        *("status", "reason", "step", "num_steps", "doing", "group", "reward_first", "reward_last"),
        *("step_slowdown", "slo_slowdown", "keeps_slo", "promise", "submitted_s"),
    )
    return {
        "name": str(record.pipeline.id),
        "project": record.pipeline.account.project,
        "user": record.pipeline.account.user,
        "visibility": record.pipeline.visibility.value,
        **{key: shown[key] for key in keys},
        "tries": shown.get("tries"),
        "removed": shown.get("removed"),
        "rewards": _small_curve(record),
        "admitted_s": record.admitted_s,
        "ended_s": record.ended_s,
        "tokens": tokens or int(sum(each.get("tokens", 0.0) for each in record.metrics.values())),
        "step_s_mean": step_s,
        "eta_s": num_left * step_s if is_under_way and num_left is not None and step_s is not None else None,
    }


def _detail(shown: Mapping[str, Any], record: PipelineRecord, waits: Sequence[tuple[Name, float]]) -> dict[str, Any]:
    names = dict.fromkeys(name for figures in record.metrics.values() for name in figures)
    keys = ("rollout_nodes", "train_nodes", "expected_slowdown", "slo_probability", "bound", "estimate", "slo_reason")
    return {
        **{key: shown[key] for key in keys},
        "weights_sha256": record.weights_sha256,
        "trajectories": int(sum(each.get("trajectories", 0.0) for each in record.metrics.values())),
        "waits": [{key: charge[key] for key in ("cause", "label", "seconds")} for charge in charges(waits)],
        "metrics": list(names),
    }


def _small_curve(record: PipelineRecord) -> list[float]:
    rewards = record.rewards
    size = -(-len(rewards) // _MAX_REWARDS) if rewards else 1
    return [math.fsum(part) / len(part) for part in (rewards[at : at + size] for at in range(0, len(rewards), size))]


def instant_row(instant: Instant) -> dict[str, Any]:
    return {
        "time_s": instant.time_s,
        "what": instant.what,
        "pipeline": instant.pipeline,
        "device": None if instant.device is None else str(instant.device),
        "text": instant.text,
    }


def _by_kind(named: Sequence[tuple[Name, float]]) -> dict[str, float]:
    return {kind.value: math.fsum(seconds for (its, _, _), seconds in named if its is kind) for kind in Kind}
