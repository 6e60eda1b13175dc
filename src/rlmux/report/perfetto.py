"""`trace.json` in the Chrome trace-event format: opens in ui.perfetto.dev and chrome://tracing.

    process per device       threads: its lanes (computing), and `gaps` (why nothing ran)
    process `pipelines`      thread per pipeline: rewards and publishing, steps
    counters                 active sequences per device, reward per pipeline
    flow arrows              a step's rollout ─▶ its training ─▶ its publishing
    instants                 failures, losses, restarts, migrations, resumptions

Microseconds since the run began. Each pipeline has one colour throughout, as far as the format allows one.
"""

from __future__ import annotations

import math
from typing import Any

from rlmux.core.model import DeviceId, OrderId, PipelineId, Stage
from rlmux.report.intervals import Interval, Kind
from rlmux.report.records import OrderRecord
from rlmux.report.summary import StepTimes, step_times
from rlmux.report.timeline import DeviceTimeline, Timeline

COLOURS = (
    "thread_state_running", "rail_animation", "thread_state_iowait", "rail_response",
    "thread_state_runnable", "cq_build_attempt_failed", "generic_work", "rail_load",
)  # fmt: skip
"""Reserved colour names of the format; pipelines take them in the order of their submission."""

_GAP_COLOUR = {Kind.SWITCH: "yellow", Kind.BUBBLE: "terrible", Kind.IDLE: "grey"}
_GAPS_THREAD = 1000
_PIPELINES_PROCESS = 1


def trace(timeline: Timeline, steps: StepTimes | None = None) -> dict[str, Any]:
    """The contents of `trace.json`. `steps`: what `step_times` says of the timeline, where it is known."""
    return {
        "displayTimeUnit": "ms",
        "otherData": {key: timeline.header.get(key) for key in ("policy", "backend", "created", "rlmux_version")},
        "traceEvents": _Tracer(timeline, step_times(timeline) if steps is None else steps).events(),
    }


class _Tracer:
    def __init__(self, timeline: Timeline, steps: StepTimes) -> None:
        self._timeline = timeline
        self._steps = steps
        self._events: list[dict[str, Any]] = []
        self._process = {device: number for number, device in enumerate(timeline.devices, _PIPELINES_PROCESS + 1)}
        self._colour = {name: COLOURS[number % len(COLOURS)] for number, name in enumerate(timeline.pipelines)}
        self._thread = {name: number for number, name in enumerate(timeline.pipelines, 1)}
        self._place: dict[OrderId, tuple[int, int, float]] = {}
        """Process, thread and middle of each order's computing: where arrows end."""

    def events(self) -> list[dict[str, Any]]:
        self._name_process(_PIPELINES_PROCESS, "pipelines", 10_000)
        for name, thread in self._thread.items():
            self._name_thread(_PIPELINES_PROCESS, thread, name)
        for device in self._timeline.devices.values():
            self._add_device(device)
        for order in self._timeline.orders:
            self._add_order(order)
        self._add_steps()
        self._add_flows()
        for instant in self._timeline.instants:
            self._events.append(
                {
                    "ph": "i",
                    "s": "g" if instant.pipeline is None else "p",
                    "name": f"{instant.what}: {instant.pipeline}" if instant.pipeline else instant.what,
                    "pid": self._process.get(instant.device, _PIPELINES_PROCESS)
                    if instant.device
                    else _PIPELINES_PROCESS,
                    "tid": 0 if instant.device else self._thread.get(instant.pipeline or PipelineId(""), 0),
                    "ts": self._us(instant.time_s),
                    "args": {"text": instant.text},
                }
            )
        return self._events

    def _us(self, time_s: float) -> int:
        return round((time_s - self._timeline.start_s) * 1e6)

    def _name_process(self, process: int, name: str, order: int) -> None:
        self._events.append({"ph": "M", "name": "process_name", "pid": process, "args": {"name": name}})
        self._events.append({"ph": "M", "name": "process_sort_index", "pid": process, "args": {"sort_index": order}})

    def _name_thread(self, process: int, thread: int, name: str) -> None:
        self._events.append({"ph": "M", "name": "thread_name", "pid": process, "tid": thread, "args": {"name": name}})

    def _slice(
        self,
        process: int,
        thread: int,
        name: str,
        start_s: float,
        end_s: float,
        colour: str | None,
        **args: Any,
    ) -> None:
        start_us = self._us(start_s)
        event = {
            "ph": "X",
            "name": name,
            "pid": process,
            "tid": thread,
            "ts": start_us,
            "dur": max(0, self._us(end_s) - start_us),
            "args": args,
        }
        if colour is not None:
            event["cname"] = colour
        self._events.append(event)

    def _add_device(self, device: DeviceTimeline) -> None:
        process = self._process[device.id]
        self._name_process(process, f"{device.id} ({device.pool})", process)
        for lane in range(device.num_lanes):
            self._name_thread(process, lane, "work" if device.num_lanes == 1 else f"work {lane + 1}")
        self._name_thread(process, _GAPS_THREAD, "gaps")
        for interval in device.intervals:
            self._add_interval(process, interval)

    def _add_interval(self, process: int, interval: Interval) -> None:
        if interval.stage is None:
            self._slice(
                process, _GAPS_THREAD, interval.label, interval.start_s, interval.end_s,
                _GAP_COLOUR[interval.kind], kind=interval.kind,
            )  # fmt: skip
            return
        assert interval.pipeline is not None
        is_busy = interval.kind is Kind.BUSY
        name = f"{interval.pipeline} {interval.stage}" if is_busy else interval.label
        colour = self._colour.get(interval.pipeline) if is_busy else _GAP_COLOUR[interval.kind]
        self._slice(
            process, interval.lane, name, interval.start_s, interval.end_s, colour,
            pipeline=interval.pipeline, step=interval.step, stage=interval.stage, order=interval.order,
            cause=interval.cause, device_fraction=interval.device_fraction, open=interval.is_open,
        )  # fmt: skip
        if is_busy and interval.order is not None:
            middle_s = (interval.start_s + interval.end_s) / 2
            self._place[interval.order] = (process, interval.lane, middle_s)

    def _add_order(self, order: OrderRecord) -> None:
        if not order.devices and not order.is_migration:
            end_s = min(order.end_s, self._timeline.end_s)
            thread = self._thread.get(order.pipeline, 0)
            colour = self._colour.get(order.pipeline)
            self._slice(_PIPELINES_PROCESS, thread, order.stage, order.start_s, end_s, colour, step=order.step)
            self._place[order.id] = (_PIPELINES_PROCESS, thread, (order.start_s + end_s) / 2)
        elif order.stage is Stage.GENERATE and not order.is_migration:
            self._add_active(order.devices[0], order)

    def _add_active(self, device: DeviceId, order: OrderRecord) -> None:
        process = self._process[device]
        samples = [(chunk.time_s, chunk.num_active, chunk.num_waiting_for_env) for chunk in order.chunks.drawn()]
        if math.isfinite(order.end_s):
            samples.append((order.end_s, 0, 0))
        for time_s, active, waiting in samples:
            self._count(process, "sequences", time_s, active=active, waiting_for_env=waiting)

    def _count(self, process: int, name: str, time_s: float, **values: float) -> None:
        self._events.append({"ph": "C", "name": name, "pid": process, "ts": self._us(time_s), "args": values})

    def _add_steps(self) -> None:
        for name, steps in self._steps.items():
            for step in steps:
                reward = self._timeline.pipelines[name].metrics.get(step.step, {}).get("reward_mean", math.nan)
                if math.isfinite(reward):
                    self._count(_PIPELINES_PROCESS, f"reward {name}", step.end_s, reward=reward)

    def _add_flows(self) -> None:
        """Each step's last rollout to its first training order, its last training order to its publishing."""
        chains: dict[tuple[PipelineId, int], dict[str, OrderId]] = {}
        for order in self._timeline.orders:
            if order.counts and order.id in self._place:
                chain = chains.setdefault((order.pipeline, order.step), {})
                if order.stage is Stage.GENERATE or order.stage is Stage.PUBLISH:
                    chain[order.stage] = order.id
                elif order.devices:
                    chain.setdefault("first", order.id)
                    chain["last"] = order.id
        number = 0
        for (name, _), chain in chains.items():
            for source, target, what in (
                (Stage.GENERATE, "first", "trajectories"),
                ("last", Stage.PUBLISH, "weights"),
            ):
                if source in chain and target in chain:
                    number += 1
                    self._flow(number, f"{what} of {name}", chain[source], chain[target])

    def _flow(self, number: int, name: str, source: OrderId, target: OrderId) -> None:
        for phase, order in (("s", source), ("f", target)):
            process, thread, time_s = self._place[order]
            event = {"ph": phase, "cat": "step", "id": number, "name": name, "pid": process, "tid": thread}
            event["ts"] = self._us(time_s)
            if phase == "f":
                event["bp"] = "e"
            self._events.append(event)
