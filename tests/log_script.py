"""Logs to report on: a `LogScript` has the rows of a log, `alternating_run` makes up a run of two pipelines."""

from __future__ import annotations

import heapq
import math
import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlmux.core.actions import Action, Admit, Release, RunStage, Switch
from rlmux.core.events import (
    ChunkFinished,
    Event,
    PipelineFailed,
    PipelineSubmitted,
    StageFinished,
    StagePaused,
)
from rlmux.core.model import (
    AdmissionKind,
    Cluster,
    DeviceId,
    NodeId,
    Phase,
    Pipeline,
    Placement,
    Pool,
    Stage,
)
from rlmux.log.run_log import Entry, RunLog, run_header
from rlmux.report.timeline.build import Timeline, build_timeline
from rlmux.report.timeline.history import History

ROLLOUT = DeviceId("rollout", 0, 0)
TRAIN = DeviceId("train", 0, 0)
STAGES = (Stage.GENERATE, Stage.REWARD, Stage.OLD_LOGPROBS, Stage.UPDATE, Stage.PUBLISH)


@dataclass
class LogScript:
    """Rows of a log, as a driver would have written them."""

    num_rollout: int = 1
    num_train: int = 1
    policy: str = "rollmux"
    file: str = ""
    """The run's file, which its header keeps; empty: none."""
    rows: list[Entry] = field(default_factory=list)

    @property
    def header(self) -> dict[str, Any]:
        pools = {
            "rollout": Pool(name="rollout", phase=Phase.ROLLOUT, num_nodes=self.num_rollout),
            "train": Pool(name="train", phase=Phase.TRAIN, num_nodes=self.num_train),
        }
        spec = {"source": "demo.yaml", "resolved": self.file} if self.file else None
        return run_header(policy=self.policy, backend="local", cluster=Cluster(pools=pools), spec=spec)

    def event(self, event: Event, *actions: Action) -> None:
        self._add(event.time_s, "event", type(event).__name__, event)
        for action in actions:
            self._add(event.time_s, "action", type(action).__name__, action)

    def note(self, time_s: float, type: str, **fields: Any) -> None:
        self._add(time_s, "note", type, fields)

    def _add(self, time_s: float, kind: Any, type: str, value: Any) -> None:
        self.rows.append(Entry(len(self.rows) + 2, time_s, kind, type, value))

    def whole(self) -> Placement:
        """Every node of both pools."""
        return Placement(
            group=1,
            rollout_nodes=tuple(NodeId("rollout", index) for index in range(self.num_rollout)),
            train_nodes=tuple(NodeId("train", index) for index in range(self.num_train)),
        )

    def submit(self, time_s: float, name: str, *then: Action, **fields: Any) -> None:
        """Submitted and admitted to every node of both pools."""
        fields = {"num_steps": 2, "stages": STAGES} | fields
        admit = Admit(pipeline=name, placement=self.whole(), kind=AdmissionKind.NEW)
        self.event(PipelineSubmitted(time_s=time_s, pipeline=Pipeline(id=name, **fields)), admit, *then)

    def history(self) -> History:
        return History.of(self.header, self.rows)

    def timeline(self) -> Timeline:
        return build_timeline(self.history())

    def write(self, folder: Path, num_rows: int | None = None) -> Path:
        log = RunLog.create(folder, self.header)
        append(log, self.rows[:num_rows])
        log.close()
        return folder


def append(log: RunLog, rows: Iterable[Entry]) -> None:
    """Write rows as the controller does: an event and its orders in one transaction."""
    for row in rows:
        if row.kind == "event":
            log.commit()
            log.append_event(row.value)
        elif row.kind == "action":
            log.append_actions([row.value])
        else:
            log.note(row.type, row.time_s, **row.value)


def order(number: int, name: str, stage: Stage, *devices: DeviceId, step: int = 1, **fields: Any) -> RunStage:
    return RunStage(
        order=number,
        pipeline=name,
        step=step,
        stage=stage,
        devices=devices,
        weight_version=step - 1,
        **fields,
    )


class AlternatingRun:
    """Two pipelines alternate on a rollout and a training device, in virtual time.

    `sort` has a long tail; `tools` waits for its environment; the one named in `failing` dies in its
    second rollout. Devices serve in order of arrival.
    """

    def __init__(self, *, num_steps: int = 6, failing: str | None = None, seed: int = 0) -> None:
        self.script = LogScript()
        self._random = random.Random(seed)
        self._num_steps = num_steps
        self._failing = failing
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._queue: dict[DeviceId, deque[tuple[str, int, Stage]]] = {ROLLOUT: deque(), TRAIN: deque()}
        self._resident: dict[DeviceId, str] = {}
        self._started: set[tuple[str, DeviceId]] = set()
        self._busy: dict[DeviceId, bool] = {ROLLOUT: False, TRAIN: False}
        self._next_order = 1
        self._sequence = 0
        self._pending: list[Action] = []
        self._over: set[str] = set()
        for name in ("sort", "tools"):
            self.script.submit(0.0, name, num_steps=num_steps, slo_slowdown=1.5 if name == "sort" else math.inf)
            self._enqueue(0.0, name, 1, Stage.GENERATE)
            self.script.rows += [
                Entry(len(self.script.rows) + 2 + i, 0.0, "action", type(a).__name__, a)
                for i, a in enumerate(self._take())
            ]
        while self._events:
            time_s, _, then = heapq.heappop(self._events)
            then(time_s)
        end_s = self.script.rows[-1].time_s + 0.05
        for name in ("sort", "tools"):
            ending = ("failed", None) if name == failing else ("finished", f"{name}-sha")
            self.script.note(end_s, "pipeline_end", pipeline=name, status=ending[0], weights_sha256=ending[1])
        self.script.note(end_s, "end", control_s=0.31)

    def _take(self) -> list[Action]:
        actions, self._pending = self._pending, []
        return actions

    def _at(self, time_s: float, then: Callable[[float], None]) -> None:
        self._sequence += 1
        heapq.heappush(self._events, (time_s, self._sequence, then))

    def _enqueue(self, time_s: float, name: str, step: int, stage: Stage) -> None:
        device = {Stage.GENERATE: ROLLOUT, Stage.OLD_LOGPROBS: TRAIN, Stage.UPDATE: TRAIN}.get(stage)
        if device is None:
            self._start(time_s, name, step, stage, None)
        else:
            self._queue[device].append((name, step, stage))
            self._serve(time_s, device)

    def _serve(self, time_s: float, device: DeviceId) -> None:
        if not self._busy[device] and self._queue[device]:
            self._busy[device] = True
            self._start(time_s, *self._queue[device].popleft(), device)

    def _start(self, time_s: float, name: str, step: int, stage: Stage, device: DeviceId | None) -> None:
        number, self._next_order = self._next_order, self._next_order + 1
        switch, lead_s, switch_s = Switch.NONE, 0.002, 0.0
        if device is not None and self._resident.get(device) != name:
            cold = (name, device) not in self._started
            switch, lead_s, switch_s = (Switch.COLD, 0.9, 0.2) if cold else (Switch.WARM, 0.003, 0.06)
            self._started.add((name, device))
            self._resident[device] = name
        devices = () if device is None else (device,)
        self._pending.append(order(number, name, stage, *devices, step=step, switch=switch))
        begin_s = time_s + lead_s + switch_s
        if stage is Stage.GENERATE:
            self._roll_out(begin_s, number, name, step, switch_s)
            return
        seconds = {
            Stage.REWARD: 0.04,
            Stage.OLD_LOGPROBS: 0.25,
            Stage.UPDATE: 1.1 if name == "sort" else 1.5,
            Stage.PUBLISH: 0.03,
        }[stage]
        end_s = begin_s + seconds

        def finish(now_s: float) -> None:
            self._finish(
                StageFinished(time_s=now_s, order=number, seconds=seconds, switch_s=switch_s),
                name,
                step,
                stage,
            )

        self._at(end_s, finish)

    def _roll_out(self, begin_s: float, number: int, name: str, step: int, switch_s: float) -> None:
        """Sixteen slots: full, then fewer and fewer; chunks of 0.2 s of computing."""
        now_s, seconds, tokens = begin_s, 0.0, 0
        profile = [16, 16, 16, 15, 12, 8, 4, 2, 2, 1, 1] if name == "sort" else [16, 16, 14, 0, 12, 6, 0, 3, 1]
        for active in self._jitter(profile):
            now_s += 0.2 + 0.002
            seconds += 0.2
            tokens += 8 * max(active, 1)
            waiting = 16 if active == 0 else 0
            self._at(
                now_s,
                lambda t, a=active, p=waiting, k=tokens, s=seconds: self.script.event(
                    ChunkFinished(
                        time_s=t, order=number, num_active=a, num_waiting=0, num_waiting_for_env=p, tokens=k, seconds=s
                    )
                ),
            )
            if active == 0:
                now_s += 0.35
            if name == self._failing and step == 2 and seconds > 0.9:
                self._at(now_s + 0.1, lambda t: self._fail(t, name))
                return
        end_s, total = now_s + 0.1, seconds + 0.098

        def finish(t: float) -> None:
            self._finish(
                StageFinished(time_s=t, order=number, seconds=total, switch_s=switch_s, tokens=tokens + 8),
                name,
                step,
                Stage.GENERATE,
            )

        self._at(end_s, finish)

    def _jitter(self, profile: list[int]) -> Iterator[int]:
        for active in profile:
            yield active
            if active >= 14 and self._random.random() < 0.3:
                yield active

    def _finish(self, event: StageFinished | StagePaused, name: str, step: int, stage: Stage) -> None:
        now_s = event.time_s
        if stage in (Stage.GENERATE, Stage.OLD_LOGPROBS, Stage.UPDATE):
            self._busy[ROLLOUT if stage is Stage.GENERATE else TRAIN] = False
        position = STAGES.index(stage)
        if stage is Stage.PUBLISH:
            self._note_step(now_s, name, step)
        if stage is not Stage.PUBLISH:
            self._enqueue_first(now_s, name, step, STAGES[position + 1])
        elif step < self._num_steps:
            self._enqueue(now_s, name, step + 1, Stage.GENERATE)
        else:
            self._pending.append(Release(pipeline=name))
        for device in (ROLLOUT, TRAIN):
            self._serve(now_s, device)
        self.script.event(event, *self._take())

    def _enqueue_first(self, now_s: float, name: str, step: int, stage: Stage) -> None:
        """Stages of one phase stay together."""
        if stage is Stage.UPDATE:
            self._queue[TRAIN].appendleft((name, step, stage))
        else:
            self._enqueue(now_s, name, step, stage)

    def _note_step(self, now_s: float, name: str, step: int) -> None:
        reward = (0.9 if name == "sort" else 0.7) * (1 - math.exp(-step / 4)) + self._random.uniform(-0.03, 0.03)
        self.script.note(
            now_s,
            "step",
            pipeline=name,
            step=step,
            metrics={
                "reward_mean": reward,
                "tokens": 900,
                "trajectories": 64,
                "loss": 0.1,
                "kl": 0.01 * step,
            },
            **({"delivery": self._delivery(step)} if name == "sort" else {}),
        )

    def _delivery(self, step: int) -> dict[str, Any]:
        """Each version is loaded as it was published, but for version 3."""
        versions = [step - 1]
        loaded = {step - 1: ["old" if step == 4 else f"c{step - 1}"]} if step > 1 else {}
        return {"versions": versions, "allowed": versions * 2, "loaded": loaded, "published": {step: [f"c{step}"]}}

    def _fail(self, now_s: float, name: str) -> None:
        self._busy[ROLLOUT] = False
        self._pending.append(Release(pipeline=name))
        self._serve(now_s, ROLLOUT)
        reason = "its reward function raised ValueError: 'nine' is not a digit"
        self.script.note(now_s, "failure", pipeline=name, reason=reason)
        self.script.event(PipelineFailed(time_s=now_s, pipeline=name, reason=reason), *self._take())


def long_lane(num_pipelines: int, *, days: float = 10.0, num_steps: int = 4) -> LogScript:
    """A lane that stays open: pipelines one after another on a pair of devices; every eighth fails in its last step."""
    script = LogScript(file="cluster: {pools: {rollout: {devices: 1}, train: {devices: 1}}}")
    step_s = days * 86400.0 / num_pipelines / num_steps
    number = 0
    for place in range(num_pipelines):
        name, begin_s = f"job-{place:04}", place * step_s * num_steps
        script.submit(begin_s, name, num_steps=num_steps, project=f"team-{place % 5}", user=f"user-{place % 17}")
        for step in range(1, num_steps + 1):
            now_s = begin_s + (step - 1) * step_s
            is_failing = place % 8 == 7 and step == num_steps
            for stage, device, part in (
                (Stage.GENERATE, ROLLOUT, 0.6),
                (Stage.UPDATE, TRAIN, 0.3),
                (Stage.PUBLISH, None, 0.01),
            ):
                number += 1
                devices = () if device is None else (device,)
                script.rows.append(
                    Entry(
                        len(script.rows) + 2,
                        now_s,
                        "action",
                        "RunStage",
                        order(number, name, stage, *devices, step=step),
                    )
                )
                now_s += part * step_s
                if is_failing:
                    reason = f"its reward function raised ValueError: row {place} is not a number"
                    script.note(now_s, "failure", pipeline=name, reason=reason)
                    script.event(PipelineFailed(time_s=now_s, pipeline=name, reason=reason), Release(pipeline=name))
                    break
                if stage is Stage.PUBLISH:
                    metrics = {"reward_mean": 0.2 * step, "tokens": 900.0}
                    script.note(now_s, "step", pipeline=name, step=step, metrics=metrics)
                ends = [Release(pipeline=name)] if stage is Stage.PUBLISH and step == num_steps else []
                finished = StageFinished(time_s=now_s, order=number, seconds=part * step_s, tokens=900)
                script.event(finished, *ends)
    return script
