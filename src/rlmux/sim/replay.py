"""Replay of arrivals and departures through a placement policy, without running a single step.

    submissions in time order ─▶ policy.place ─▶ ledger ─▶ dollars, GPUs, predicted slowdowns

Durations are wall time in the trace and do not stretch with the predicted slowdown (so published replays do
it). After each change the policy may rebalance; a moving pipeline waits for the end of its step, so the
nodes that a move gives back are billed for one more meta-iteration of the pipeline that leaves them, plus
its switch.

Use it to iterate on placement policies: the two-week trace of 200 pipelines takes milliseconds. What the
pipelines really do between two placements is the event simulator's business.
"""

from __future__ import annotations

import heapq
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from rlmux.core.model import AdmissionKind, Cluster, GroupId, Phase, Pipeline, PipelineId
from rlmux.core.placement import GroupLoad, PlacementLedger, Refusal, solo_s
from rlmux.core.policies import Policy
from rlmux.sim.workloads import Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """A pipeline, when it comes, and how long it stays once placed."""

    submit_s: float
    duration_s: float
    pipeline: Pipeline


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayResult:
    policy: str
    cost_usd: float
    penalized_usd: float
    """Each group that breaks an SLO charged by its worst slowdown, as the paper's baselines are."""
    hours: float
    """From the first submission to the last departure."""
    admissions: dict[AdmissionKind, int]
    num_moves: int
    num_refused: int
    slo_attainment: float
    """Share of the placed pipelines whose predicted step slowdown never exceeded their SLO."""
    mean_slowdown: float
    """Predicted, over pipelines, each weighted by its duration."""
    peak_nodes_by_pool: dict[str, int]
    decision_ms: tuple[float, ...] = field(repr=False)
    """One per placement, rebalancing left out."""
    rebalance_ms: tuple[float, ...] = field(repr=False, default=())

    @property
    def usd_per_hour(self) -> float:
        return self.cost_usd / self.hours


def submissions_of(workload: Workload) -> tuple[Submission, ...]:
    """A workload whose pipelines have departure times."""
    return tuple(
        Submission(
            submit_s=arrival.submit_s,
            duration_s=arrival.depart_s - arrival.submit_s,
            pipeline=arrival.pipeline,
        )
        for arrival in workload.arrivals
        if arrival.depart_s is not None
    )


def replay(
    submissions: Sequence[Submission],
    cluster: Cluster,
    policy: Policy,
    *,
    switch_s: float = 0.0,
    checks: bool = False,
) -> ReplayResult:
    """Play the trace through the policy; `switch_s` is a move's cost beside the wait for its step's end."""
    run = _Replay(cluster, policy, switch_s, checks)
    pending = sorted(submissions, key=lambda item: item.submit_s)
    for item in pending:
        run.depart_until(item.submit_s)
        run.submit(item)
    run.depart_until(float("inf"))
    return run.result(pending[0].submit_s if pending else 0.0)


class _Replay:
    def __init__(self, cluster: Cluster, policy: Policy, switch_s: float, checks: bool) -> None:
        self.ledger = PlacementLedger(cluster)
        self.view = self.ledger.view()
        self.policy = policy
        self.switch_s = switch_s
        self.checks = checks
        self.now_s = 0.0
        self.cost_usd = 0.0
        self.penalty_usd = 0.0
        self.admissions: Counter[AdmissionKind] = Counter()
        self.num_moves = 0
        self.num_refused = 0
        self.departures: list[tuple[float, int, PipelineId]] = []
        self.waiting: list[Submission] = []
        self.stretched: dict[PipelineId, float] = {}
        self.lasted: dict[PipelineId, float] = {}
        self.violated: dict[PipelineId, None] = {}
        self.decision_ms: list[float] = []
        self.rebalance_ms: list[float] = []

    def depart_until(self, time_s: float) -> None:
        while self.departures and self.departures[0][0] <= time_s:
            at_s, _, pipeline_id = heapq.heappop(self.departures)
            self._advance(at_s)
            self.ledger.depart(pipeline_id)
            for item in list(self.waiting):
                if self._try_to_place(item):
                    self.waiting.remove(item)
            self._rebalance()
        if time_s < float("inf"):
            self._advance(time_s)

    def submit(self, item: Submission) -> None:
        if self._try_to_place(item):
            self._rebalance()
        else:
            self.waiting.append(item)

    def result(self, start_s: float) -> ReplayResult:
        total_s = sum(self.lasted.values())
        prices = self.ledger.cluster.pools
        return ReplayResult(
            policy=self.policy.name,
            cost_usd=self.cost_usd,
            penalized_usd=self.cost_usd + self.penalty_usd,
            hours=(self.now_s - start_s) / 3600,
            admissions={kind: self.admissions[kind] for kind in AdmissionKind},
            num_moves=self.num_moves,
            num_refused=self.num_refused,
            slo_attainment=1 - len(self.violated) / max(1, len(self.lasted)),
            mean_slowdown=sum(self.stretched.values()) / total_s if total_s else 1.0,
            peak_nodes_by_pool={name: self.ledger.peak_nodes_by_pool[name] for name in prices},
            decision_ms=tuple(self.decision_ms),
            rebalance_ms=tuple(self.rebalance_ms),
        )

    def _advance(self, time_s: float) -> None:
        elapsed_s = time_s - self.now_s
        self.cost_usd += self.ledger.usd_per_hour * elapsed_s / 3600
        self.now_s = time_s
        if elapsed_s <= 0:
            return
        for group in self.ledger.groups():
            worst = 1.0
            for member in group.members:
                name = member.pipeline.id
                slowdown = predicted_slowdown(group, member.pipeline)
                self.stretched[name] = self.stretched.get(name, 0.0) + slowdown * elapsed_s
                self.lasted[name] = self.lasted.get(name, 0.0) + elapsed_s
                if slowdown > member.pipeline.slo_slowdown * (1 + 1e-9):
                    self.violated[name] = None
                    worst = max(worst, slowdown)
            pools = self.ledger.cluster.pools
            nodes = dict.fromkeys(group.rollout_nodes + group.train_nodes)
            usd_per_hour = sum(pools[node.pool].usd_per_node_hour for node in nodes)
            self.penalty_usd += (worst - 1.0) * usd_per_hour * elapsed_s / 3600

    def _try_to_place(self, item: Submission) -> bool:
        began = time.perf_counter()
        choice = self.policy.place(item.pipeline, self.view)
        self.decision_ms.append((time.perf_counter() - began) * 1e3)
        if isinstance(choice, Refusal):
            self.num_refused += choice.is_final
            return choice.is_final
        self.ledger.admit(item.pipeline, choice)
        self.admissions[choice.kind] += 1
        leaves_s = self.now_s + item.duration_s
        heapq.heappush(self.departures, (leaves_s, len(self.decision_ms), item.pipeline.id))
        self._check()
        return True

    def _rebalance(self) -> None:
        began = time.perf_counter()
        relocations = self.policy.rebalance(self.view)
        self.rebalance_ms.append((time.perf_counter() - began) * 1e3)
        done_s: dict[GroupId | PipelineId, float] = {}
        for relocation in relocations:
            name = relocation.pipeline
            source = self.ledger.group(self.ledger.placement(name).group)
            step_s = source.period_s / self.ledger.member(name).turns
            placement, released = self.ledger.move(name, relocation.choice)
            begun_s = max(done_s.get(placement.group, 0.0), done_s.get(name, 0.0))
            ends_s = begun_s + step_s + self.switch_s
            for key in (source.id, placement.group, name):
                done_s[key] = max(done_s.get(key, 0.0), ends_s)
            pools = self.ledger.cluster.pools
            self.cost_usd += sum(pools[node.pool].usd_per_node_hour for node in released) * ends_s / 3600
            self.num_moves += 1
            self._check()
        for relocation in relocations:
            self.ledger.settle(relocation.pipeline)

    def _check(self) -> None:
        if self.checks:
            self.ledger.check()


def predicted_slowdown(group: GroupLoad, pipeline: Pipeline) -> float:
    """A step's mean in the group's strict meta-iteration over T_solo; 1.0 where nothing is known."""
    alone_s = solo_s(pipeline)
    turns = next(member.turns for member in group.members if member.pipeline.id == pipeline.id)
    return group.period_s / (turns * alone_s) if alone_s else 1.0


def nodes_in_use(ledger: PlacementLedger, phase: Phase) -> int:
    pool = ledger.cluster.pool_for(phase)
    return ledger.num_nodes_in_use(pool.name) if pool else 0
