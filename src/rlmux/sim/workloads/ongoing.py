"""What is left of a run that goes on, as a workload: when would its pipelines end?

    run.db ─▶ pipelines that are not over ─▶ their steps left, each as long as those before it ─▶ Workload

All of them are submitted at second 0 in the order in which the run placed them, with their processes there: first
starts cost what a warm switch costs. A step under way counts as not begun, so a prediction is late by less than a step
of each pipeline.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import count, islice
from pathlib import Path

from rlmux.core.errors import UserError
from rlmux.core.model import Cluster, PhaseSeconds, PipelineId, Stage
from rlmux.report.api import read_timeline
from rlmux.report.records import PipelineRecord
from rlmux.report.timeline import Timeline
from rlmux.sim.workloads.arrivals import Arrival, Workload
from rlmux.sim.workloads.recorded import recorded_arrival
from rlmux.sim.world import SwitchSeconds, TrueSeconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Ongoing:
    """A run at one moment."""

    at_s: float
    """Last known time on the run's clock."""
    policy: str
    left: Workload
    """What is left to do."""
    whole: Mapping[PipelineId, Arrival]
    """The same pipelines from their first step and first start on."""

    def like(self, name: str, number: int) -> list[Arrival]:
        """So many new pipelines that take what this one takes, with names of their own. Raises UserError."""
        if name not in self.whole:
            raise UserError(f"--like {name}: not a pipeline that goes on; accepted: {', '.join(self.whole)}")
        model = self.whole[PipelineId(name)]
        names = (PipelineId(f"{name}-{index}") for index in count(2))
        free = (each for each in names if each not in self.whole)
        return [replace(model, pipeline=replace(model.pipeline, id=each)) for each in islice(free, number)]


def ongoing(folder: str | Path, cluster: Cluster) -> Ongoing:
    """A run as far as its log goes. `cluster`: that of its file, as prices and memory are not in the log.

    What cannot be predicted is left out, with a note. Raises UserError where nothing is left.
    """
    timeline = read_timeline(folder)
    records = [record for record in timeline.pipelines.values() if not record.is_over]
    whole: dict[PipelineId, Arrival] = {}
    left, notes = [], []
    for record in sorted(records, key=_place_in_line):
        name = record.pipeline.id
        arrival = None if record.pipeline.work_arrives else _whole(timeline, record)
        if arrival is not None:
            whole[name] = arrival
            left.append(_left(arrival, record))
        elif record.pipeline.work_arrives:
            notes.append(f"{name} is left out: what its client will ask for is not known")
        else:
            notes.append(f"{name} is left out: it has ended no step yet, and its file has no estimate")
    if not left:
        raise UserError("; ".join([f"{folder}: nothing to predict", *(notes or ["all its pipelines are over"])]))
    about = f"from second {timeline.end_s:.0f} on, each step as long as those before it"
    workload = Workload(
        name=Path(folder).absolute().name, cluster=cluster, arrivals=tuple(left), about=about, notes=tuple(notes)
    )
    return Ongoing(at_s=timeline.end_s, policy=str(timeline.header.get("policy")), left=workload, whole=whole)


def _place_in_line(record: PipelineRecord) -> tuple[bool, float, PipelineId]:
    is_waiting = record.admitted_s is None
    return is_waiting, record.submitted_s if record.admitted_s is None else record.admitted_s, record.pipeline.id


def _whole(timeline: Timeline, record: PipelineRecord) -> Arrival | None:
    """The pipeline from its first step on; None where nothing is known of its seconds."""
    pipeline = record.pipeline
    done = max(record.published, default=0)
    orders = [order for order in timeline.orders if order.pipeline == pipeline.id and order.counts]
    if done >= pipeline.first_step:
        arrival = recorded_arrival(record, [order for order in orders if order.step <= done])
        seconds = arrival.world.by_stage
        measured = PhaseSeconds(
            rollout_s=seconds.get(Stage.GENERATE, 0.0),
            train_s=sum(seconds.get(stage, 0.0) for stage in pipeline.train_stages),
        )
        return replace(arrival, submit_s=0.0, pipeline=replace(pipeline, estimate=measured, first_step=1))
    if pipeline.estimate is None:
        return None
    return Arrival(
        submit_s=0.0,
        pipeline=pipeline,
        world=TrueSeconds.of_phases(pipeline.estimate, sync_s=pipeline.estimate.sync_s),
    )


def _left(arrival: Arrival, record: PipelineRecord) -> Arrival:
    """Its steps that are not published; its processes are there."""
    done = max(record.published, default=0)
    switch = arrival.switch
    if record.admitted_s is not None:
        switch = SwitchSeconds(
            cold_rollout_s=switch.warm_rollout_s,
            cold_train_s=switch.warm_train_s,
            warm_rollout_s=switch.warm_rollout_s,
            warm_train_s=switch.warm_train_s,
        )
    has_sft_warmup = arrival.pipeline.has_sft_warmup and not done
    pipeline = replace(arrival.pipeline, first_step=done + 1, has_sft_warmup=has_sft_warmup)
    return replace(arrival, pipeline=pipeline, switch=switch)
