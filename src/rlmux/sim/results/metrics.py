"""The figures of a simulated run, collected as it goes and without slowing it.

cost           the ledger's $/h between two changes of placement, integrated
unheld         dollars of counted nodes while no pipeline held them, from the first placement on: they are paid, too
parts of it    the bound, switches, idle nodes of each phase's pool, and what computes beyond the bound: they sum to it
solo hours     hours of the finished steps alone, each on its pipeline's requested nodes, wherever it ran
slowdowns      of a pipeline: time / solo time of the steps in it; `step_slowdown` from its first work,
               `completion_slowdown` from its submission, queueing included: this is held against the SLO.
               To its last step's end; where it left before its steps were done, to then, if that makes it larger:
               the open step counts as if it ended there
predicted      a member is late where its group's meta-iteration breaks its SLO; where it has a number of steps, also
               over all of them: those that are done with what they took
kept SLOs      part of all submitted pipelines; a refused one is missed, and one without a finished step if it was
               there longer than its first step may take
utilisation    of a pool: device time computing or switching / time its nodes were held
penalised      cost where a group's is multiplied by its worst predicted slowdown while that breaks an SLO:
               how the paper draws the baselines (section 8.2). No penalty is in any other figure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from rlmux.core.actions import Admit, Release, Relocate
from rlmux.core.model import Cluster, DeviceId, GroupId, NodeId, Phase, Pipeline, PipelineId
from rlmux.core.placement.group_load import GroupLoad, cold_start_s, solo_s
from rlmux.core.placement.view import PlacementView
from rlmux.report.slos import is_within_slo
from rlmux.sim.bounds import are_own_pools, work_usd
from rlmux.sim.fillers import FillerFigures
from rlmux.sim.node_changes import SpotFigures
from rlmux.sim.results.result import PipelineResult, PlacementSample, SimResult, Span, SpotResult
from rlmux.sim.workloads.arrivals import Arrival, Workload


@dataclass(slots=True)
class _Progress:
    arrival: Arrival
    admitted_s: float | None = None
    started_s: float | None = None
    last_step_s: float = 0.0
    steps: int = 0
    alone_s: float = 0.0
    overlapped_s: float = 0.0
    left_s: float | None = None
    refused: str = ""

    @property
    def is_done(self) -> bool:
        pipeline = self.arrival.pipeline
        return pipeline.num_steps is not None and self.steps > pipeline.num_steps - pipeline.first_step

    def slowdown_since(self, begin_s: float, end_s: float) -> float | None:
        """Time over solo time of the steps in it; an open step counts as if it ended now, if that makes it larger."""
        finished = (self.last_step_s - begin_s) / self.alone_s if self.alone_s else None
        if self.is_done:
            return finished
        next_step = self.arrival.pipeline.first_step + self.steps
        with_open = (end_s - begin_s) / max(self.alone_s + self.arrival.world.solo_s(next_step), 1e-9)
        if finished is None:
            return with_open if with_open > 1.0 else None
        return max(finished, with_open)


class Collector:
    """Told of each change by the simulation; `result` makes the figures."""

    def __init__(self, workload: Workload, policy: str, placement: PlacementView) -> None:
        self.spans: list[Span] = []
        self.decision_ms: list[float] = []
        self.num_migrations = 0
        self.num_waits = 0
        self._workload = workload
        self._fillers = FillerFigures(workload.cluster)
        self._is_filler = self._fillers.by_id
        self._policy = policy
        self._placement = placement
        self._progress: dict[PipelineId, _Progress] = {}
        self._admissions = {"direct": 0, "scaled": 0, "new": 0}
        self._num_moves = 0
        pools = workload.cluster.pools
        self._gpus_per_node = {name: pool.gpus_per_node for name, pool in pools.items()}
        self._devices_per_node = {name: pool.devices_per_node for name, pool in pools.items()}
        self._switch_device_s = dict.fromkeys(pools, 0.0)
        self._busy_device_s = dict.fromkeys(pools, 0.0)
        self._held_device_s = dict.fromkeys(pools, 0.0)
        self._usd_per_node_hour = {name: pool.usd_per_node_hour for name, pool in pools.items()}
        self._usd_by_pool = dict.fromkeys(pools, 0.0)
        self._nodes = dict.fromkeys(pools, 0)
        self._peak_nodes = dict.fromkeys(pools, 0)
        self._num_pins: dict[NodeId, int] = {}
        self._nodes_of: dict[PipelineId, tuple[NodeId, ...]] = {}
        self._usd_per_hour = 0.0
        self._penalty_by_group: dict[GroupId, float] = {}
        self._group_of: dict[PipelineId, GroupId] = {}
        self._predicted_late: dict[PipelineId, None] = {}
        self._cost_usd = 0.0
        self._unheld_usd_per_hour = 0.0
        self._unheld_usd = 0.0
        self._penalty_usd = 0.0
        self._changed_s = 0.0
        self._keeps_to_own_pools = True
        self._samples: list[PlacementSample] = []

    # ------------------------------------------------------------------ what happened

    def submit(self, pipeline: PipelineId, arrival: Arrival) -> None:
        if arrival.pipeline.is_filler:
            self._fillers.submit(pipeline, arrival.submit_s)
            return
        self._progress[pipeline] = _Progress(arrival)

    def place(self, action: Admit | Relocate, now_s: float) -> None:
        if action.pipeline in self._is_filler:
            return
        progress = self._progress[action.pipeline]
        if not are_own_pools(progress.arrival.pipeline, action.placement, self._workload.cluster):
            self._keeps_to_own_pools = False
        before = self._group_of.get(action.pipeline)
        self._group_of[action.pipeline] = action.placement.group
        self._book(now_s)
        self._pin(action.pipeline, action.placement.nodes)
        self._change(now_s, (before, action.placement.group))
        if isinstance(action, Relocate):
            self._num_moves += 1
        elif progress.admitted_s is None:
            progress.admitted_s = now_s
            self._admissions[action.kind] += 1

    def start(self, pipeline: PipelineId, now_s: float) -> None:
        if pipeline not in self._is_filler:
            self._progress[pipeline].started_s = now_s

    def release(self, action: Release, now_s: float) -> None:
        if action.pipeline in self._is_filler:
            return
        self._book(now_s)
        self._pin(action.pipeline, ())
        self._change(now_s, (self._group_of.pop(action.pipeline, None),))

    def lose_nodes(self, pipelines: Iterable[PipelineId], now_s: float) -> None:
        """These pipelines lost their nodes and wait; a failure may have ended any number of groups."""
        self._book(now_s)
        for pipeline in pipelines:
            self._pin(pipeline, ())
        self._change(now_s, tuple(self._penalty_by_group))

    def leave(self, pipeline: PipelineId, now_s: float) -> None:
        """The pipeline is over, wherever it was: trained, cancelled, refused."""
        if pipeline in self._is_filler:
            self._fillers.leave(pipeline, now_s)
        else:
            self._progress[pipeline].left_s = now_s

    def refuse(self, pipeline: PipelineId, reason: str) -> None:
        if pipeline in self._is_filler:
            self._fillers.refuse(pipeline, reason)
        else:
            self._progress[pipeline].refused = reason

    def end_step(self, pipeline: PipelineId, step: int, now_s: float) -> None:
        if pipeline in self._is_filler:
            self._fillers.end_step(pipeline)
            return
        progress = self._progress[pipeline]
        if step < 1:
            return
        progress.steps += 1
        progress.alone_s += progress.arrival.world.solo_s(step)
        progress.overlapped_s += progress.arrival.solo_s(step)
        progress.last_step_s = now_s

    def compute(self, pipeline: PipelineId, devices: tuple[DeviceId, ...], seconds: float, switch_s: float) -> None:
        """The devices computed so long, after so long a switch."""
        if pipeline in self._is_filler:
            self._fillers.compute(pipeline, devices, seconds + switch_s)
            return
        self._busy_device_s[devices[0].pool] += (seconds + switch_s) * len(devices)
        if switch_s:
            self._switch_device_s[devices[0].pool] += switch_s * len(devices)

    # ------------------------------------------------------------------ cost

    def set_price(self, pool: str, usd_per_gpu_hour: float, now_s: float) -> None:
        """Nodes of the pool cost this from now on."""
        self._book(now_s)
        self._usd_per_node_hour[pool] = usd_per_gpu_hour * self._gpus_per_node[pool]
        self._fillers.set_price(pool, self._usd_per_node_hour[pool] / self._devices_per_node[pool] / 3600)
        self._change(now_s, ())

    def _paid_cluster(self) -> Cluster:
        """The cluster with each pool's price as it was paid, in the mean over the node-hours that were held."""
        cluster = self._workload.cluster
        pools = dict(cluster.pools)
        for name in self._workload.spot.pools if self._workload.spot is not None else ():
            hours = self._held_device_s[name] / pools[name].devices_per_node / 3600 * pools[name].gpus_per_node
            if hours:
                pools[name] = replace(pools[name], usd_per_gpu_hour=self._usd_by_pool[name] / hours)
        return Cluster(pools=pools)

    def _spot_result(self, spot: SpotFigures | None) -> SpotResult:
        trace = self._workload.spot
        if spot is None or trace is None:
            return SpotResult()
        pools = self._workload.cluster.pools
        held_h = {name: self._held_device_s[name] / pools[name].devices_per_node / 3600 for name in trace.pools}
        return SpotResult(
            num_notices=spot.num_notices,
            num_moved=spot.num_moved,
            num_caught=spot.num_caught,
            lost_s=spot.lost_s,
            usd=sum(self._usd_by_pool[name] for name in trace.pools),
            list_usd=sum(hours * pools[name].usd_per_node_hour for name, hours in held_h.items()),
        )

    def _pin(self, pipeline: PipelineId, nodes: tuple[NodeId, ...]) -> None:
        pins = self._num_pins
        for node in nodes:
            pins[node] = pins.get(node, 0) + 1
            if pins[node] == 1:
                self._nodes[node.pool] += 1
        for node in self._nodes_of.pop(pipeline, ()):
            pins[node] -= 1
            if not pins[node]:
                del pins[node]
                self._nodes[node.pool] -= 1
        if nodes:
            self._nodes_of[pipeline] = nodes

    def _change(self, now_s: float, groups: tuple[GroupId | None, ...]) -> None:
        """Update $/h, peaks and penalties after a change of placement."""
        for group in groups:
            if group is not None:
                self._penalty_by_group[group] = self._penalty(group, now_s)
                if not self._penalty_by_group[group]:
                    del self._penalty_by_group[group]
        self._usd_per_hour = sum(count * self._usd_per_node_hour[name] for name, count in self._nodes.items())
        rented = () if self._workload.spot is None else self._workload.spot.pools
        self._unheld_usd_per_hour = sum(
            (self._placement.num_nodes(pool.phase) - self._nodes[name]) * self._usd_per_node_hour[name]
            for name, pool in self._workload.cluster.pools.items()
            if pool.num_nodes is not None and self._usd_per_node_hour[name] and name not in rented
        )
        for name, count in self._nodes.items():
            self._peak_nodes[name] = max(self._peak_nodes[name], count)
        sample = PlacementSample(
            time_s=now_s,
            gpus_by_pool={pool: count * self._gpus_per_node[pool] for pool, count in self._nodes.items()},
            usd_per_hour=self._usd_per_hour,
        )
        if self._samples and self._samples[-1].time_s == now_s:
            self._samples[-1] = sample
        else:
            self._samples.append(sample)

    def _book(self, now_s: float) -> None:
        elapsed_s = now_s - self._changed_s
        if elapsed_s <= 0.0:
            return
        self._changed_s = now_s
        self._cost_usd += self._usd_per_hour * elapsed_s / 3600
        self._unheld_usd += self._unheld_usd_per_hour * elapsed_s / 3600
        self._penalty_usd += sum(self._penalty_by_group.values()) * elapsed_s / 3600
        for pool, count in self._nodes.items():
            self._usd_by_pool[pool] += count * self._usd_per_node_hour[pool] * elapsed_s / 3600
            self._held_device_s[pool] += count * self._devices_per_node[pool] * elapsed_s

    def _penalty(self, group_id: GroupId, now_s: float) -> float:
        """$/h added to a group that breaks an SLO: its cost times (worst slowdown - 1)."""
        try:
            group = self._placement.group(group_id)
        except KeyError:
            return 0.0
        if group.period_s <= group.budget_s * (1 + 1e-9):
            return 0.0
        late = [member.pipeline.id for member in group.members if self._is_late_at(group, member.pipeline, now_s)]
        self._predicted_late.update(dict.fromkeys(late))
        return self._group_usd_per_hour(group) * (worst_slowdown(group) - 1.0) if late else 0.0

    def _is_late_at(self, group: GroupLoad, pipeline: Pipeline, now_s: float) -> bool:
        """Whether a member breaks its SLO at the group's pace: in a step, and over all its steps where it has a number
        of them."""
        slowdown, slo_slowdown = predicted_slowdown(group, pipeline), pipeline.slo_slowdown * (1 + 1e-9)
        if pipeline.num_steps is None:
            return slowdown > slo_slowdown
        progress = self._progress[pipeline.id]
        num_left = pipeline.num_steps - pipeline.first_step + 1 - progress.steps
        left_s = num_left * solo_s(pipeline)
        so_far_s = now_s - progress.arrival.submit_s
        if progress.started_s is None:
            so_far_s += cold_start_s(pipeline) + (solo_s(pipeline) if group.num_members > 1 else 0.0)
        return so_far_s + slowdown * left_s > slo_slowdown * (progress.alone_s + left_s)

    def _group_usd_per_hour(self, group: GroupLoad) -> float:
        pools = self._workload.cluster.pools
        nodes = dict.fromkeys(group.rollout_nodes + group.train_nodes)
        return sum(pools[node.pool].usd_per_node_hour for node in nodes)

    # ------------------------------------------------------------------ the end

    def result(self, now_s: float, num_events: int, wall_s: float, *, spot: SpotFigures | None = None) -> SimResult:
        fillers = self._fillers.results()
        if fillers and self._progress:  # the run is as long as the others'
            now_s = max(now_s if progress.left_s is None else progress.left_s for progress in self._progress.values())
        self._book(now_s)
        pipelines = tuple(_result_of(pipeline, progress, now_s) for pipeline, progress in self._progress.items())
        everyone = list(self._progress.values())
        slowdowns = [p.step_slowdown for p in pipelines if p.step_slowdown is not None]
        start_s = min((p.arrival.submit_s for p in everyone), default=0.0)
        paid = self._paid_cluster()
        bound_usd = sum(
            work_usd(p.arrival, paid, p.steps, keeps_to_own_pools=self._keeps_to_own_pools) for p in everyone
        )
        tokens = sum(p.steps * p.arrival.tokens_per_step for p in everyone)
        waits = [p.started_s - p.arrival.submit_s for p in everyone if p.started_s is not None]
        taken = [p for p in pipelines if not p.refused]
        return SimResult(
            workload=self._workload.name,
            policy=self._policy,
            seed=self._workload.seed,
            hours=(now_s - start_s) / 3600,
            cost_usd=self._cost_usd,
            unheld_usd=self._unheld_usd,
            penalised_cost_usd=self._cost_usd + self._penalty_usd,
            bound_usd=bound_usd,
            parts_usd=self._parts_usd(bound_usd, paid),
            solo_hours=sum(p.alone_s for p in everyone) / 3600,
            slo_attainment=sum(p.keeps_slo for p in pipelines) / len(pipelines) if pipelines else 1.0,
            paper_slo_attainment=_paper_slo_attainment(pipelines),
            predicted_slo_attainment=(len(taken) - len(self._predicted_late)) / len(pipelines) if pipelines else 1.0,
            mean_step_slowdown=sum(slowdowns) / len(slowdowns) if slowdowns else 1.0,
            max_step_slowdown=max(slowdowns, default=1.0),
            tokens_per_s=tokens / (now_s - start_s) if tokens and now_s > start_s else None,
            peak_gpus=self._by_phase(self._peak_nodes),
            admissions=self._admissions,
            utilization=self._utilization(),
            num_refused=sum(bool(p.refused) for p in pipelines),
            num_migrations=self.num_migrations,
            num_moves=self._num_moves,
            mean_wait_s=sum(waits) / len(waits) if waits else 0.0,
            mean_queue_s=sum(p.queue_s for p in taken) / len(taken) if taken else 0.0,
            events=num_events,
            wall_s=wall_s,
            decision_ms=tuple(self.decision_ms),
            pipelines=pipelines,
            fillers=fillers,
            spot=self._spot_result(spot),
            samples=tuple(self._samples),
            spans=tuple(self.spans),
        )

    def _parts_usd(self, bound_usd: float, paid: Cluster) -> dict[str, float]:
        """What the dollars were paid for; see `SimResult.parts_usd`."""
        parts = {"bound": bound_usd, "switches": 0.0, "rollout_idle": 0.0, "train_idle": 0.0}
        for name, pool in paid.pools.items():
            usd_per_device_s = pool.usd_per_node_hour / pool.devices_per_node / 3600
            parts["switches"] += self._switch_device_s[name] * usd_per_device_s
            idle_s = self._held_device_s[name] - self._busy_device_s[name]
            parts[f"{pool.phase.value}_idle"] += max(0.0, idle_s) * usd_per_device_s
        other_usd = self._cost_usd - sum(parts.values())
        return {**parts, "other": other_usd if other_usd > 1e-9 * self._cost_usd else 0.0}  # less is rounding

    def _by_phase(self, nodes_by_pool: Mapping[str, int]) -> dict[str, int]:
        gpus = {Phase.ROLLOUT.value: 0, Phase.TRAIN.value: 0}
        for name, count in nodes_by_pool.items():
            gpus[self._workload.cluster.pools[name].phase.value] += count * self._gpus_per_node[name]
        return gpus

    def _utilization(self) -> dict[str, float]:
        busy = {Phase.ROLLOUT.value: 0.0, Phase.TRAIN.value: 0.0}
        held = dict(busy)
        for name, pool in self._workload.cluster.pools.items():
            busy[pool.phase.value] += self._busy_device_s[name]
            held[pool.phase.value] += self._held_device_s[name]
        return {phase: busy[phase] / held[phase] if held[phase] else 0.0 for phase in busy}


def predicted_slowdown(group: GroupLoad, pipeline: Pipeline) -> float:
    """Step slowdown of a member in its group's strict meta-iteration; 1 where nothing is known.

    Relative to the solo time on its requested nodes, wherever it is placed.
    """
    return group.slowdown_of(pipeline.id)


def worst_slowdown(group: GroupLoad) -> float:
    """The largest predicted step slowdown among its members."""
    return max(predicted_slowdown(group, member.pipeline) for member in group.members)


def _paper_slo_attainment(pipelines: Sequence[PipelineResult]) -> float:
    admitted = [pipeline for pipeline in pipelines if pipeline.admitted_s is not None]
    kept = [
        pipeline
        for pipeline in admitted
        if pipeline.finished_slowdown is None or is_within_slo(pipeline.finished_slowdown, 1.0, pipeline.slo_slowdown)
    ]
    return len(kept) / len(admitted) if admitted else 1.0


def _finished_slowdown(progress: _Progress) -> float | None:
    if progress.started_s is None or not progress.alone_s:
        return None
    return (progress.last_step_s - progress.started_s) / progress.alone_s


def _result_of(pipeline: PipelineId, progress: _Progress, now_s: float) -> PipelineResult:
    submit_s, started_s = progress.arrival.submit_s, progress.started_s
    end_s = now_s if progress.left_s is None else progress.left_s
    return PipelineResult(
        pipeline=pipeline,
        submit_s=submit_s,
        admitted_s=progress.admitted_s,
        left_s=progress.left_s,
        steps=progress.steps,
        solo_s=progress.alone_s,
        overlapped_solo_s=progress.overlapped_s,
        step_slowdown=None if started_s is None else progress.slowdown_since(started_s, end_s),
        completion_slowdown=None if progress.refused else progress.slowdown_since(submit_s, end_s),
        finished_slowdown=_finished_slowdown(progress),
        queue_s=(end_s if progress.admitted_s is None else progress.admitted_s) - submit_s,
        slo_slowdown=progress.arrival.pipeline.slo_slowdown,
        refused=progress.refused,
    )
