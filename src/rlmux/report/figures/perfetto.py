"""`trace.json` in the Chrome trace-event format: opens in ui.perfetto.dev and chrome://tracing.

    process per device       threads: its lanes (computing), and `gaps` (why nothing ran)
    process `pipelines`      thread per pipeline: rewards and publishing, steps
    counters                 active sequences per device, reward per pipeline
    flow arrows              a step's rollout ─▶ its training ─▶ its publishing
    instants                 failures, losses, restarts, migrations, resumptions

A trace of more than `MAX_SLICES` slices is *thinned*: slices shorter than a part of the makespan, about a pixel of the
whole run, are merged with their neighbours; a device's sequences are counted once in each such part, at the end of a
rollout if that comes last there; arrows of one name, and migrations of a pipeline, are at least as far apart.
`otherData` has that length as `shortest_slice_s`; a merged slice has the number of its slices, and the seconds of each
name.

Microseconds since the run began. Each pipeline has one colour throughout, as far as the format allows one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from rlmux.core.model import DeviceId, OrderId, PipelineId, Stage
from rlmux.report.summary import StepTimes, step_times
from rlmux.report.timeline.build import DeviceTimeline, Timeline
from rlmux.report.timeline.intervals import Cause, Interval, Kind
from rlmux.report.timeline.records import MIGRATIONS, OrderRecord

COLOURS = (
    "thread_state_running", "rail_animation", "thread_state_iowait", "rail_response",
    "thread_state_runnable", "cq_build_attempt_failed", "generic_work", "rail_load",
)  # fmt: skip
"""Reserved colour names of the format; pipelines take them in the order of their submission."""

MAX_SLICES = 50_000
"""Slices of a trace that is not thinned."""
_COLUMNS = (500, 4000)
"""Fewest and most parts that the makespan of a thinned trace is cut into: fewer on more devices."""

_GAP_COLOUR = {Kind.SWITCH: "yellow", Kind.BUBBLE: "terrible", Kind.IDLE: "grey"}
_BUSY = Kind.BUSY
_GENERATE, _PUBLISH = Stage.GENERATE, Stage.PUBLISH
"""Members that are looked at for every interval: to look one up in its class takes ten times a global's time."""

_GAPS_THREAD = 1000
_PIPELINES_PROCESS = 1


def trace(timeline: Timeline, steps: StepTimes | None = None) -> dict[str, Any]:
    """The contents of `trace.json`. `steps`: `step_times` of the timeline, if already computed."""
    shortest_s = _shortest_s(timeline)
    about = {key: timeline.header.get(key) for key in ("policy", "backend", "created", "rlmux_version")}
    return {
        "displayTimeUnit": "ms",
        "otherData": {**about, "shortest_slice_s": shortest_s} if shortest_s else about,
        "traceEvents": _Tracer(timeline, step_times(timeline) if steps is None else steps, shortest_s).events(),
    }


def _shortest_s(timeline: Timeline) -> float:
    """Seconds below which a slice is merged with its neighbours; 0.0 for a trace that is not thinned."""
    num_slices = sum(len(device.intervals) for device in timeline.devices.values())
    num_slices += sum(not order.devices for order in timeline.orders)
    if num_slices <= MAX_SLICES:
        return 0.0
    fewest, most = _COLUMNS
    num_threads = 2 * max(1, len(timeline.devices))  # work and gaps
    return timeline.makespan_s / max(fewest, min(most, MAX_SLICES // num_threads))


class _Merged:
    """A slice that stands for several."""

    __slots__ = ("end_us", "event", "num_slices", "start_us", "us_by_name")

    def __init__(self, event: dict[str, Any], start_us: int) -> None:
        self.event = event
        self.start_us = self.end_us = start_us
        self.num_slices = 0
        self.us_by_name: dict[str, int] = {}

    def add(self, name: str, end_us: int, num_us: int) -> None:
        """Stand for one more, of so many microseconds."""
        if end_us > self.end_us:
            self.end_us = end_us
        self.num_slices += 1
        by_name = self.us_by_name
        by_name[name] = by_name.get(name, 0) + num_us

    def finish(self) -> None:
        """Complete the event: it has the name of most of its time."""
        self.event["name"] = max(self.us_by_name, key=self.us_by_name.__getitem__)
        self.event["dur"] = self.end_us - self.start_us
        seconds = {name: us / 1e6 for name, us in self.us_by_name.items()}
        self.event["args"] = {"slices": self.num_slices, "seconds": seconds}


class _Tracer:
    def __init__(self, timeline: Timeline, steps: StepTimes, shortest_s: float) -> None:
        self._timeline = timeline
        self._shortest_s = shortest_s
        self._shortest_us = round(shortest_s * 1e6)
        self._merged: list[_Merged] = []
        """Slices that stand for several."""
        self._names: dict[tuple[Stage | Cause | None, PipelineId | None], str] = {}
        """What is shown of a stage, or of a cause, and a pipeline."""
        self._growing: dict[tuple[int, int], _Merged] = {}
        """The merged slice at the end of a process' thread, where its last slice was short."""
        self._last_s: dict[str, float] = {}
        """Time of the last arrow, or migration, of each name."""
        self._counts: dict[int, dict[int, tuple[float, int, int]]] = {}
        """Sequences in each part of a thinned trace, by process: time, active, waiting."""
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
        for merged in self._merged:
            merged.finish()
        for process, counts in self._counts.items():
            for time_s, active, waiting in counts.values():
                self._count(process, "sequences", time_s, active=active, waiting_for_env=waiting)
        self._add_steps()
        self._add_flows()
        for instant in self._timeline.instants:
            if instant.what in MIGRATIONS and not self._has_room(f"migration of {instant.pipeline}", instant.time_s):
                continue
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
        start_us: int,
        num_us: int,
        colour: str | None,
        **args: Any,
    ) -> None:
        self._growing.pop((process, thread), None)
        event = {
            "ph": "X",
            "name": name,
            "pid": process,
            "tid": thread,
            "ts": start_us,
            "dur": num_us,
            "args": args,
        }
        if colour is not None:
            event["cname"] = colour
        self._events.append(event)

    def _merge(self, place: tuple[int, int], name: str, start_us: int, num_us: int) -> None:
        """Add a short slice to its neighbours, until together they are long enough."""
        merged = self._growing.get(place)
        if merged is None or start_us >= merged.start_us + self._shortest_us:
            process, thread = place
            event = {"ph": "X", "name": name, "pid": process, "tid": thread, "ts": start_us, "dur": 0}
            merged = self._growing[place] = _Merged(event, start_us)
            self._merged.append(merged)
            self._events.append(event)
        merged.add(name, start_us + num_us, num_us)

    def _add_device(self, device: DeviceTimeline) -> None:
        process = self._process[device.id]
        self._name_process(process, f"{device.id} ({device.pool})", process)
        for lane in range(device.num_lanes):
            self._name_thread(process, lane, "work" if device.num_lanes == 1 else f"work {lane + 1}")
        self._name_thread(process, _GAPS_THREAD, "gaps")
        self._add_intervals(process, device.intervals)

    def _add_intervals(self, process: int, intervals: Sequence[Interval]) -> None:
        origin_s, shortest_us, names = self._timeline.start_s, self._shortest_us, self._names
        growing, places, merge = self._growing, self._place, self._merge
        for interval in intervals:
            start_s, end_s, kind, cause, pipeline, _, stage, order, _, lane, _ = interval
            thread = _GAPS_THREAD if stage is None else lane
            is_busy = kind is _BUSY
            of_name = (stage if is_busy else cause, pipeline)
            name = names.get(of_name)
            if name is None:
                name = names[of_name] = f"{pipeline} {stage}" if is_busy else interval.label
            start_us = round((start_s - origin_s) * 1e6)
            end_us = round((end_s - origin_s) * 1e6)
            if end_us < start_us:
                end_us = start_us
            num_us = end_us - start_us
            if num_us >= shortest_us:
                self._add_slice_of(process, thread, name, start_us, num_us, interval)
            else:
                merged = growing.get((process, thread))
                if merged is None or start_us >= merged.start_us + shortest_us:
                    merge((process, thread), name, start_us, num_us)
                else:
                    merged.add(name, end_us, num_us)
            if is_busy and order is not None:
                places[order] = (process, thread, (start_s + end_s) / 2)

    def _add_slice_of(
        self, process: int, thread: int, name: str, start_us: int, num_us: int, interval: Interval
    ) -> None:
        if interval.stage is None:
            self._slice(process, thread, name, start_us, num_us, _GAP_COLOUR[interval.kind], kind=interval.kind)
            return
        assert interval.pipeline is not None
        is_busy = interval.kind is _BUSY
        self._slice(
            process, thread, name, start_us, num_us,
            self._colour.get(interval.pipeline) if is_busy else _GAP_COLOUR[interval.kind],
            pipeline=interval.pipeline, step=interval.step, stage=interval.stage, order=interval.order,
            cause=interval.cause, device_fraction=interval.device_fraction, open=interval.is_open,
        )  # fmt: skip

    def _add_order(self, order: OrderRecord) -> None:
        if not order.devices and not order.is_migration:
            end_s = min(order.end_s, self._timeline.end_s)
            thread = self._thread.get(order.pipeline, 0)
            colour = self._colour.get(order.pipeline)
            start_us = self._us(order.start_s)
            num_us = max(0, self._us(end_s) - start_us)
            if num_us < self._shortest_us:
                self._merge((_PIPELINES_PROCESS, thread), order.stage, start_us, num_us)
            else:
                self._slice(_PIPELINES_PROCESS, thread, order.stage, start_us, num_us, colour, step=order.step)
            self._place[order.id] = (_PIPELINES_PROCESS, thread, (order.start_s + end_s) / 2)
        elif order.stage is _GENERATE and not order.is_migration:
            self._add_active(order.devices[0], order)

    def _add_active(self, device: DeviceId, order: OrderRecord) -> None:
        process = self._process[device]
        chunks = order.chunks.spaced(self._shortest_s) if self._shortest_s else order.chunks.drawn()
        samples = [(chunk[0], chunk[1], chunk[3]) for chunk in chunks]
        if math.isfinite(order.end_s):
            samples.append((order.end_s, 0, 0))
        if self._shortest_s:
            counts = self._counts.setdefault(process, {})
            for sample in samples:
                counts[int(sample[0] / self._shortest_s)] = sample
            return
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
                if order.stage is _GENERATE or order.stage is _PUBLISH:
                    chain[order.stage] = order.id
                elif order.devices:
                    chain.setdefault("first", order.id)
                    chain["last"] = order.id
        number = 0
        for (name, _), chain in chains.items():
            for source, target, what in (
                (_GENERATE, "first", "trajectories"),
                ("last", _PUBLISH, "weights"),
            ):
                if (
                    source in chain
                    and target in chain
                    and self._has_room(f"{what} of {name}", self._place[chain[target]][2])
                ):
                    number += 1
                    self._flow(number, f"{what} of {name}", chain[source], chain[target])

    def _has_room(self, name: str, time_s: float) -> bool:
        """Whether an arrow or a mark of this name is far enough from the last one."""
        if time_s < self._last_s.get(name, -math.inf) + self._shortest_s:
            return False
        self._last_s[name] = time_s
        return True

    def _flow(self, number: int, name: str, source: OrderId, target: OrderId) -> None:
        for phase, order in (("s", source), ("f", target)):
            process, thread, time_s = self._place[order]
            event = {"ph": phase, "cat": "step", "id": number, "name": name, "pid": process, "tid": thread}
            event["ts"] = self._us(time_s)
            if phase == "f":
                event["bp"] = "e"
            self._events.append(event)
