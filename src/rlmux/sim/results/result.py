"""What a simulated run comes to: values that `metrics.py` makes, and tables, pictures and papers read.

SimResult ── pipelines: PipelineResult ── fillers: FillerResult ── samples: Sample ── spans: Span
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rlmux.core.model import DeviceId, PipelineId, Stage
from rlmux.report.slos import is_within_slo
from rlmux.sim.fillers import FillerResult, totals


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """An order's time on its devices."""

    pipeline: PipelineId
    devices: tuple[DeviceId, ...]
    stage: Stage
    step: int
    begin_s: float
    end_s: float
    switch_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineResult:
    """What one pipeline got."""

    pipeline: PipelineId
    submit_s: float
    admitted_s: float | None
    left_s: float | None
    steps: int
    solo_s: float
    """Seconds that its finished steps take alone on its requested nodes, one phase after the other: what SLOs
    are planned by."""
    overlapped_solo_s: float
    """The same as a run's summary counts it: with staleness a rollout overlaps the rest of a step."""
    step_slowdown: float | None
    """Time from its first work over solo time of the steps in it; None while no step has ended or is late."""
    completion_slowdown: float | None
    """The same from its submission: with the seconds in which it queued."""
    finished_slowdown: float | None
    """Mean over its finished steps, from its first work: what the RollMux paper holds against the SLO."""
    queue_s: float
    """Seconds from its submission to its admission, or to the end where there was none."""
    slo_slowdown: float
    refused: str = ""

    @property
    def shown_slowdown(self) -> float | None:
        """`step_slowdown` as in a run's summary."""
        if self.step_slowdown is None or not self.overlapped_solo_s:
            return self.step_slowdown
        return self.step_slowdown * self.solo_s / self.overlapped_solo_s

    @property
    def keeps_slo(self) -> bool:
        if self.refused:
            return False
        return self.completion_slowdown is None or is_within_slo(self.completion_slowdown, 1.0, self.slo_slowdown)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementSample:
    """The cluster after a change of placement."""

    time_s: float
    gpus_by_pool: Mapping[str, int]
    usd_per_hour: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SpotResult:
    """What spot nodes came to in a run."""

    num_notices: int = 0
    num_moved: int = 0
    """Times that a pipeline left a node before it went, with a checkpoint."""
    num_caught: int = 0
    """Times that a pipeline was still there when its node went."""
    lost_s: float = 0.0
    """Seconds since the open step of each of these began: work that was made again."""
    usd: float = 0.0
    """Dollars paid for nodes of pools with a price over time."""
    list_usd: float = 0.0
    """What these node-hours cost at the price that the cluster has for the pool."""

    def figures(self) -> Mapping[str, float]:
        return {
            "num_notices": self.num_notices,
            "num_moved": self.num_moved,
            "num_caught": self.num_caught,
            "lost_s": self.lost_s,
            "usd": self.usd,
            "list_usd": self.list_usd,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class SimResult:
    """One workload under one policy and seed."""

    workload: str
    policy: str
    seed: int
    hours: float
    """Hours from the first submission to the last end; fillers do not count."""
    cost_usd: float
    """Dollars of nodes while pipelines held them."""
    unheld_usd: float = 0.0
    """Dollars of counted nodes while no pipeline held them."""
    penalised_cost_usd: float
    bound_usd: float
    """Dollars of the finished steps on nodes that are never idle: `bounds.work_usd`."""
    parts_usd: Mapping[str, float]
    """Dollars by what they are paid for: `bound`, `switches`, `rollout_idle`, `train_idle`, and `other`, which is
    computing beyond the bound, such as rollouts on training nodes. Their sum is the cost."""
    solo_hours: float
    """Hours that the finished steps take alone, summed over the pipelines."""
    slo_attainment: float
    paper_slo_attainment: float
    """Part of the admitted pipelines whose finished steps keep the SLO in the mean, from their first work: as the
    RollMux paper accounts, without queueing, open steps, and pipelines that were refused or starved."""
    predicted_slo_attainment: float
    mean_step_slowdown: float
    max_step_slowdown: float
    tokens_per_s: float | None
    peak_gpus: Mapping[str, int]
    """Most GPUs held at one moment, by phase of the pool."""
    admissions: Mapping[str, int]
    utilization: Mapping[str, float]
    num_refused: int
    num_policy_faults: int = 0
    """Decisions of the policy that failed, and that the plain order of work stood in for."""
    first_policy_fault: str = ""
    """Error of the first of them, in one line."""
    num_migrations: int
    num_moves: int
    mean_wait_s: float
    """Mean seconds from submission to the first work: waits for nodes, and then in the cycle."""
    mean_queue_s: float
    """Mean seconds from submission to admission: waits for nodes alone."""
    events: int
    wall_s: float
    decision_ms: tuple[float, ...] = field(repr=False)
    """Milliseconds of each arrival: its submission is applied, it is placed, its first work is started."""
    pipelines: tuple[PipelineResult, ...] = field(repr=False)
    samples: tuple[PlacementSample, ...] = field(repr=False)
    fillers: tuple[FillerResult, ...] = field(repr=False, default=())
    """Pipelines that took what the others left; no other figure counts them."""
    spot: SpotResult = field(default_factory=SpotResult)
    """What came of spot nodes."""
    unmoved_usd: float | None = None
    """`paid_usd` of the same simulation without relocations; None where that was not simulated."""
    spans: tuple[Span, ...] = field(repr=False)

    @property
    def cost_usd_per_hour(self) -> float:
        return self.cost_usd / self.hours if self.hours else 0.0

    @property
    def penalised_cost_usd_per_hour(self) -> float:
        return self.penalised_cost_usd / self.hours if self.hours else 0.0

    @property
    def cost_usd_per_solo_hour(self) -> float | None:
        """Dollars for an hour of solo work; None where no step has ended."""
        return self.cost_usd / self.solo_hours if self.solo_hours else None

    @property
    def paid_usd(self) -> float:
        """Dollars of all paid nodes; counted pools are paid even if unused."""
        return self.cost_usd + self.unheld_usd

    @property
    def paid_usd_per_solo_hour(self) -> float | None:
        """Dollars paid for an hour of solo work; None where no step has ended."""
        return self.paid_usd / self.solo_hours if self.solo_hours else None

    @property
    def moves_saved_usd(self) -> float | None:
        """Dollars that relocations saved: the bill without them less the bill. None where only one bill is known, and
        where nodes have no price."""
        return self.unmoved_usd - self.paid_usd if self.unmoved_usd else None

    def figures(self) -> dict[str, Any]:
        """The numbers of `simulate --json`, for this seed."""
        ordered_ms = sorted(self.decision_ms)
        return {
            "cost_usd_per_hour": self.cost_usd_per_hour,
            "cost_usd": self.cost_usd,
            "cost_usd_per_solo_hour": self.cost_usd_per_solo_hour,
            "paid_usd": self.paid_usd,
            "paid_usd_per_solo_hour": self.paid_usd_per_solo_hour,
            "bound_usd": self.bound_usd,
            "parts_usd": dict(self.parts_usd),
            "penalised_cost_usd_per_hour": self.penalised_cost_usd_per_hour,
            "slo_attainment": self.slo_attainment,
            "predicted_slo_attainment": self.predicted_slo_attainment,
            "mean_step_slowdown": self.mean_step_slowdown,
            "max_step_slowdown": self.max_step_slowdown,
            "makespan_s": self.hours * 3600,
            "tokens_per_s": self.tokens_per_s,
            "peak_gpus": dict(self.peak_gpus),
            "admissions": dict(self.admissions),
            "utilization": dict(self.utilization),
            "num_refused": self.num_refused,
            "fillers": dict(totals(self.fillers)),
            "spot": dict(self.spot.figures()),
            "num_migrations": self.num_migrations,
            "num_moves": self.num_moves,
            "moves_expected_usd": None,  # a documented key; nothing estimates it
            "moves_saved_usd": self.moves_saved_usd,
            "mean_wait_s": self.mean_wait_s,
            "mean_queue_s": self.mean_queue_s,
            "decision_ms": {"p50": quantile(ordered_ms, 0.5), "p99": quantile(ordered_ms, 0.99)},
            "events": self.events,
            "wall_s": self.wall_s,
        }


def quantile(ordered: list[float], q: float) -> float:
    """The smallest value that at least a fraction q of the ordered values does not exceed; 0 without values."""
    return ordered[max(0, math.ceil(q * len(ordered)) - 1)] if ordered else 0.0
