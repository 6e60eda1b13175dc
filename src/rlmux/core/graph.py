"""The sub-stage graph: a step of a pipeline as pieces of one compute character, per worker.

    share on a worker       PREFILL ─▶ DENSE ─▶ TAIL ─┐                 order inside a worker
    share on another        PREFILL ─▶ DENSE ─▶ TAIL ─┼─▶ REFERENCE ─▶ OLD_LOGPROBS ─▶ UPDATE ─▶ PUBLISH
                            turns: TAIL ─▶ TOOL WAIT ─┘     barrier: training waits for every share
    next steps              PUBLISH n ─▶ first band of every share of step n + 1 + k     k: the staleness

Two ways to one: `graph_of_step` from what was recorded of a step, `predicted_graph` from estimates of the next ones.
There are no edges between pipelines: they meet on devices only, and that is the look-ahead's affair
(`lookahead_tasks` hands a graph over to it: a share's bands, which nothing may come between, become one task).

Invariant, checked on construction: edges go forward in the list of nodes, so the graph has no cycle; nodes of one
share follow each other; no two nodes have the same key.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from rlmux.core.estimates import StepEstimates
from rlmux.core.lookahead import Task
from rlmux.core.model import PHASE_BY_STAGE, DeviceId, Phase, PipelineId, Stage

DENSE_TOKENS = 128
PREFILL_TOKENS = 1024
"""Tokens of an engine iteration from which it counts as dense decode, and as prefill (JigsawRL's cuts)."""


class Band(StrEnum):
    """The compute character of a piece."""

    PREFILL = "prefill"
    DENSE = "dense"
    TAIL = "tail"
    TOOL_WAIT = "tool_wait"
    """Every unfinished trajectory waits for its environment: the device does nothing for them."""
    TRAIN = "train"
    SYNC = "sync"
    HOST = "host"


class SubStageKey(NamedTuple):
    """Which piece of which step."""

    pipeline: PipelineId
    step: int
    worker: DeviceId | None
    """Of a rollout share; None for stages that all training devices, or none, work on."""
    stage: Stage
    band: Band
    turn: int = 0
    """Counts bands that come again after a tool wait."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SubStage:
    """A node."""

    key: SubStageKey
    devices: tuple[DeviceId, ...]
    seconds: float
    """Solo, on whole devices."""
    seconds_by_level: tuple[tuple[float, float], ...] = ()
    """(level, solo seconds at it) of the levels prepared on its devices."""
    num_tokens: int = 0
    num_bytes: float | None = None
    """On each device while it runs; None: unknown."""
    begin_s: float | None = None
    """When it began, for a recorded one."""

    @property
    def end_s(self) -> float | None:
        return None if self.begin_s is None else self.begin_s + self.seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class SubStageGraph:
    """Nodes in a topological order, and who waits for whom."""

    nodes: tuple[SubStage, ...]
    edges: tuple[tuple[int, int], ...]
    """(earlier, later), indices of nodes."""

    def __post_init__(self) -> None:
        keys = [node.key for node in self.nodes]
        if len(set(keys)) != len(keys):
            twice = next(key for index, key in enumerate(keys) if key in keys[:index])
            raise ValueError(f"sub-stage {twice} is in the graph twice")
        for earlier, later in self.edges:
            if not 0 <= earlier < later < len(self.nodes):
                raise ValueError(f"edge ({earlier}, {later}) does not go forward among {len(self.nodes)} nodes")
        for node in self.nodes:
            if not node.seconds >= 0.0:
                raise ValueError(f"sub-stage {node.key} takes {node.seconds} seconds")

    def predecessors(self, index: int) -> tuple[int, ...]:
        return tuple(earlier for earlier, later in self.edges if later == index)

    def successors(self, index: int) -> tuple[int, ...]:
        return tuple(later for earlier, later in self.edges if earlier == index)

    def longest_paths(self) -> tuple[float, ...]:
        """Of each node: the seconds from its begin to the end of the longest chain after it."""
        longest = [node.seconds for node in self.nodes]
        for earlier, later in sorted(self.edges, reverse=True):
            longest[earlier] = max(longest[earlier], self.nodes[earlier].seconds + longest[later])
        return tuple(longest)

    def critical_path(self) -> tuple[int, ...]:
        """The chain that determines how soon everything can have ended, first node first."""
        if not self.nodes:
            return ()
        longest = self.longest_paths()
        sources = [index for index in range(len(self.nodes)) if not self.predecessors(index)]
        path = [max(sources, key=lambda index: longest[index])]
        while following := self.successors(path[-1]):
            path.append(max(following, key=lambda index: longest[index]))
        return tuple(path)

    @property
    def critical_path_s(self) -> float:
        return max(self.longest_paths(), default=0.0)


# --- from a record ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class ShareRecord:
    """What one worker did of a step's rollout."""

    device: DeviceId
    begin_s: float
    end_s: float
    reports: tuple[tuple[float, int, int], ...] = ()
    """(time, sequences decoding, sequences waiting for their environment) whenever it was reported."""
    num_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StageRecord:
    """Any other stage of the step."""

    stage: Stage
    devices: tuple[DeviceId, ...]
    begin_s: float
    end_s: float


def graph_of_step(
    pipeline: PipelineId,
    step: int,
    shares: Sequence[ShareRecord],
    stages: Sequence[StageRecord],
    *,
    dense_above: int = DENSE_TOKENS,
    min_part: float = 0.02,
) -> SubStageGraph:
    """The step as it went. Bands shorter than `min_part` of their share go to the one before them."""
    nodes: list[SubStage] = []
    edges: list[tuple[int, int]] = []
    lasts: list[int] = []
    for share in shares:
        previous = None
        for turn, (band, begin_s, end_s) in enumerate(_bands(share, dense_above, min_part)):
            part = (end_s - begin_s) / max(share.end_s - share.begin_s, 1e-12)
            nodes.append(
                SubStage(
                    key=SubStageKey(pipeline, step, share.device, Stage.GENERATE, band, turn),
                    devices=(share.device,),
                    seconds=end_s - begin_s,
                    num_tokens=round(share.num_tokens * part),
                    begin_s=begin_s,
                )
            )
            if previous is not None:
                edges.append((previous, len(nodes) - 1))
            previous = len(nodes) - 1
        if previous is not None:
            lasts.append(previous)
    for stage in sorted(stages, key=lambda record: record.begin_s):
        nodes.append(
            SubStage(
                key=SubStageKey(pipeline, step, None, stage.stage, _band_of(stage.stage)),
                devices=stage.devices,
                seconds=stage.end_s - stage.begin_s,
                begin_s=stage.begin_s,
            )
        )
        edges += [(last, len(nodes) - 1) for last in lasts]
        lasts = [len(nodes) - 1]
    return SubStageGraph(nodes=tuple(nodes), edges=tuple(edges))


def _bands(share: ShareRecord, dense_above: int, min_part: float) -> list[tuple[Band, float, float]]:
    """Consecutive reports of one character are one band."""
    found: list[tuple[Band, float, float]] = []
    times = [share.begin_s, *(at_s for at_s, _, _ in share.reports), share.end_s]
    first = share.reports[0][1] if share.reports else 0
    counts = [(first, 0), *((active, parked) for _, active, parked in share.reports)]
    for (active, parked), begin_s, end_s in zip(counts, times, times[1:], strict=False):
        if end_s <= begin_s:
            continue
        band = Band.TAIL
        if active == 0 and parked > 0:
            band = Band.TOOL_WAIT
        elif active >= dense_above:
            band = Band.DENSE
        is_short = end_s - begin_s < min_part * (share.end_s - share.begin_s)
        if found and (found[-1][0] is band or is_short):
            found[-1] = (found[-1][0], found[-1][1], end_s)
        else:
            found.append((band, begin_s, end_s))
    return found


def _band_of(stage: Stage) -> Band:
    return {Phase.TRAIN: Band.TRAIN, Phase.SYNC: Band.SYNC, Phase.HOST: Band.HOST}.get(
        PHASE_BY_STAGE[stage], Band.DENSE
    )


# --- from estimates -----------------------------------------------------------------------------------------


def predicted_graph(
    pipeline: PipelineId,
    estimates: StepEstimates,
    *,
    stages: Sequence[Stage],
    rollout_devices: Sequence[DeviceId],
    train_devices: Sequence[DeviceId],
    first_step: int = 1,
    num_steps: int = 1,
    staleness: int = 0,
) -> SubStageGraph:
    """The next steps as the last ones predict them."""
    nodes: list[SubStage] = []
    edges: list[tuple[int, int]] = []
    published: dict[int, int] = {}
    previous_lasts: dict[DeviceId, int] = {}
    trained: int | None = None
    for step in range(first_step, first_step + num_steps):
        lasts = []
        for device in rollout_devices:
            tail_s = estimates.tail_s
            whole_s = max(estimates.share_s, tail_s)
            before = previous_lasts.get(device)
            for band, seconds in ((Band.DENSE, whole_s - tail_s), (Band.TAIL, tail_s)):
                key = SubStageKey(pipeline, step, device, Stage.GENERATE, band)
                nodes.append(SubStage(key=key, devices=(device,), seconds=seconds))
                index = len(nodes) - 1
                if before is not None:
                    edges.append((before, index))
                version = published.get(step - 1 - staleness)
                if band is Band.DENSE and version is not None:
                    edges.append((version, index))
                before = index
            previous_lasts[device] = len(nodes) - 1
            lasts.append(len(nodes) - 1)
        if trained is not None:
            lasts.append(trained)
        for stage in stages:
            if stage is Stage.GENERATE:
                continue
            devices = tuple(train_devices) if PHASE_BY_STAGE[stage] is Phase.TRAIN else ()
            key = SubStageKey(pipeline, step, None, stage, _band_of(stage))
            nodes.append(SubStage(key=key, devices=devices, seconds=estimates.stage_s(stage)))
            edges += [(last, len(nodes) - 1) for last in lasts]
            lasts = [len(nodes) - 1]
            if devices:
                trained = len(nodes) - 1
        published[step] = lasts[0]
    return SubStageGraph(nodes=tuple(nodes), edges=tuple(edges))


def lookahead_tasks(graphs: Sequence[SubStageGraph]) -> tuple[Task, ...]:
    """All graphs as tasks of one problem: bands of a share that follow each other are one task with a tail."""
    numbers: dict[DeviceId, int] = {}
    tasks: list[Task] = []
    for number, graph in enumerate(graphs):
        task_of: dict[int, int] = {}
        for index, node in enumerate(graph.nodes):
            before = graph.predecessors(index)
            is_next_band = (
                len(before) == 1
                and node.key.worker is not None
                and graph.nodes[before[0]].key[:4] == node.key[:4]
            )
            devices = tuple(numbers.setdefault(device, len(numbers)) for device in node.devices)
            if is_next_band:
                task_of[index] = task_of[before[0]]
                tasks[task_of[index]] = _longer(tasks[task_of[index]], node)
                continue
            task_of[index] = len(tasks)
            kind = node.key.band.value
            tasks.append(
                Task(
                    pipeline=number,
                    kind=kind,
                    devices=devices,
                    seconds=node.seconds,
                    tail_s=node.seconds if node.key.band is Band.TAIL else 0.0,
                    needs=tuple(dict.fromkeys(task_of[one] for one in before)),
                )
            )
    return tuple(tasks)


def _longer(task: Task, node: SubStage) -> Task:
    """The task with one more band at its end."""
    is_tail = node.key.band is Band.TAIL
    return Task(
        pipeline=task.pipeline,
        kind=task.kind,
        devices=task.devices,
        seconds=task.seconds + node.seconds,
        tail_s=task.tail_s + node.seconds if is_tail else 0.0,
        needs=task.needs,
    )


def seconds_by_band(graph: SubStageGraph) -> Mapping[Band, float]:
    """Device seconds of each character: what there is to share or to fill."""
    total: dict[Band, float] = {}
    for node in graph.nodes:
        total[node.key.band] = total.get(node.key.band, 0.0) + node.seconds * max(1, len(node.devices))
    return total
