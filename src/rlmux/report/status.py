"""The state of a run at its log's last row: pipelines with their nodes, devices with their orders. Its keys are stable.

pipelines.NAME   status  step  num_steps  reward_first  reward_last  group  rollout_nodes  train_nodes
                 doing   reason   submitted_s   promise   score (of a filler alone)
                 hosts (machines of a program's workers, where it named some)
                 tries: number  of  failures (at_s  cause  reason)   (after a retry alone)
                 removed: parts  at_s  by  by_rule  freed_bytes   (after a removal alone)
                 rounds: short  long  cut_trajectories  queued_prompts   (under tail batching alone)
                 step_slowdown  slo_slowdown  keeps_slo  expected_slowdown  slo_probability  bound
                 estimate  slo_reason     (slos.py)
devices.ID       pool  pipeline  stage  step         null where nothing computes
                 adapters.PHASE: here  more          pipelines of one base that have their state there, and for how many
                                                     more there is memory, as measured when the last one was built
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from rlmux.core.model import PipelineId, Placement
from rlmux.report.slos import slo_fields
from rlmux.report.summary import StepTimes, step_times
from rlmux.report.timeline.build import build_timeline, end_of
from rlmux.report.timeline.history import History
from rlmux.report.timeline.records import STOPPED, OrderRecord, PipelineRecord

_UNDER_WAY = ("running", "waiting")


def status(history: History, *, is_going_on: bool, steps: StepTimes | None = None) -> dict[str, Any]:
    """`is_going_on`: a process carries the run on. Without one, what the log shows under way is stopped.

    `steps`: `step_times` of the history's timeline, if already computed.
    """
    running = history.running if is_going_on else []
    steps = step_times(build_timeline(history)) if steps is None else steps
    placements = {pin.pipeline: pin.placement for pin in history.pins if math.isinf(pin.end_s)}
    return {
        "policy": history.header.get("policy"),
        "backend": history.header.get("backend"),
        "is_going_on": is_going_on,
        "now_s": history.last_s,
        "pipelines": {
            str(name): {
                **_pipeline(record, placements.get(name), running, is_going_on=is_going_on),
                **slo_fields(record, steps[name], end_of(history)),
            }
            for name, record in history.pipelines.items()
        },
        "devices": _devices(history, running, placements),
    }


def _pipeline(
    record: PipelineRecord, placement: Placement | None, running: list[OrderRecord], *, is_going_on: bool
) -> dict[str, Any]:
    rewards = record.rewards
    is_stopped = not is_going_on and record.status in _UNDER_WAY
    return {
        "status": STOPPED if is_stopped else str(record.status),
        "step": max(record.published, default=record.pipeline.first_step - 1)
        if record.program_step is None
        else record.program_step,
        "num_steps": record.pipeline.num_steps,
        "reward_first": rewards[0] if rewards else None,
        "reward_last": rewards[-1] if rewards else None,
        "group": placement.group if placement and not record.pipeline.is_filler else None,
        "rollout_nodes": [str(node) for node in placement.rollout_nodes] if placement else [],
        "train_nodes": [str(node) for node in placement.train_nodes] if placement else [],
        "doing": _doing(record.pipeline.id, running),
        "reason": record.reason,
        "submitted_s": record.submitted_s,
        "promise": record.promise,
        **({"hosts": list(record.hosts)} if record.hosts else {}),
        **({"score": record.score} if record.pipeline.is_filler else {}),
        **({"tries": record.tries} if record.retries else {}),
        **({"removed": record.removed} if record.removals else {}),
        **({"rounds": rounds} if (rounds := record.rounds) is not None else {}),
    }


def _doing(pipeline: PipelineId, running: list[OrderRecord]) -> str:
    """Its stages under way, in words."""
    words = (
        f"{order.stage.value.replace('_', ' ')} {order.step}".removesuffix(" 0")
        for order in running
        if order.pipeline == pipeline
    )
    return ", ".join(dict.fromkeys(words))


def _devices(
    history: History, running: list[OrderRecord], placements: Mapping[PipelineId, Placement]
) -> dict[str, Any]:
    devices: dict[str, Any] = {
        f"{pool}-{node}.{index}": {"pool": pool, "pipeline": None, "stage": None, "step": None, "adapters": {}}
        for fields in (history.header.get("pools") or {}).values()
        for pool, node, index in fields.get("devices", ())
    }
    for order in running:
        for device in () if order.is_migration else order.devices:
            devices[str(device)] = {
                "pool": device.pool,
                "pipeline": order.pipeline,
                "stage": order.stage.value,
                "step": order.step,
                "adapters": {},
            }
    for (name, phase, base), room in history.adapter_rooms.items():
        node = name.rpartition(".")[0]
        here = sum(
            history.pipelines[pipeline].pipeline.base_of(phase) == base and node in map(str, placement.nodes_of(phase))
            for pipeline, placement in placements.items()
        )
        if here and name in devices:
            more = room.free_bytes // max(1, room.state_bytes)
            devices[name]["adapters"][str(phase)] = {"here": here, "more": more}
    return devices
