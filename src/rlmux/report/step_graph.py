"""The sub-stage graph: a step of a pipeline as pieces of one compute character, per worker.

    share on a worker       PREFILL ─▶ DENSE ─▶ TAIL ─┐                 order inside a worker
    share on another        PREFILL ─▶ DENSE ─▶ TAIL ─┼─▶ REFERENCE ─▶ OLD_LOGPROBS ─▶ UPDATE ─▶ PUBLISH
                            turns: TAIL ─▶ TOOL WAIT ─┘     barrier: training waits for every share
    next steps              PUBLISH n ─▶ first band of every share of step n + 1 + k     k: the staleness

`graph_of_step` makes it from what was recorded of a step. There are no edges between pipelines: they meet on devices
only, and that is the look-ahead's affair.

Invariant, checked on construction: edges go forward in the list of nodes, so the graph has no cycle; nodes of one
share follow each other; no two nodes have the same key.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from rlmux.core.model import DENSE_DECODE_MIN, PHASE_BY_STAGE, DeviceId, Phase, PipelineId, Stage


class Band(StrEnum):
    """The compute character of a piece."""

    PREFILL = "prefill"
    DENSE = "dense"
    TAIL = "tail"
    TOOL_WAIT = "tool_wait"
    """Every unfinished trajectory waits for its environment: the device does nothing for them."""
    TRAIN = "train"
    SYNC = "sync"
    ENV = "host"


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
    seconds_by_fraction: tuple[tuple[float, float], ...] = ()
    """(device_fraction, solo seconds at it) of the levels prepared on its devices."""
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
    dense_above: int = DENSE_DECODE_MIN,
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
    return {Phase.TRAIN: Band.TRAIN, Phase.SYNC: Band.SYNC, Phase.ENV: Band.ENV}.get(PHASE_BY_STAGE[stage], Band.DENSE)


def seconds_by_band(graph: SubStageGraph) -> Mapping[Band, float]:
    """Device seconds of each character: what there is to share or to fill."""
    total: dict[Band, float] = {}
    for node in graph.nodes:
        total[node.key.band] = total.get(node.key.band, 0.0) + node.seconds * max(1, len(node.devices))
    return total
