"""How many co-execution groups one controller carries: its real loop, scheduler and log, over workers that only count.

    python benchmarks/controller.py                       1, 10, 100 and 1000 groups of two pipelines, rollmux and rlmux
    python benchmarks/controller.py --groups 100 --json

Virtual workers end their stages and report a chunk every half second of virtual time; so a group of two devices has
some four events a second, as real ones have. One turn of the loop is one event here, with a commit of its own: what
is measured is the worst case, in which nothing that has happened meanwhile is taken together.

    turn_ms      one event: handled, decided on, logged, committed, its orders passed on
    carries      events a second of virtual time, of all groups, times the mean turn: share of one core
"""

from __future__ import annotations

import argparse
import heapq
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlmux.core.actions import Action, Pause, RunStage
from rlmux.core.events import ChunkFinished, Event, StageFinished, StagePaused
from rlmux.core.model import (
    PHASE_BY_STAGE,
    Cluster,
    OrderId,
    Phase,
    PhaseSeconds,
    Pipeline,
    PipelineId,
    Pool,
    Stage,
)
from rlmux.core.scheduler import Scheduler
from rlmux.policies import make_policy
from rlmux.report.log import RunLog, run_header
from rlmux.rl.config import TrainingConfig
from rlmux.runtime.backend import Note, Submission
from rlmux.runtime.controller import Controller

STAGES = (Stage.GENERATE, Stage.REWARD, Stage.OLD_LOGPROBS, Stage.UPDATE, Stage.PUBLISH)
CHUNK_S = 0.5
SECONDS = {Stage.GENERATE: 40.0, Stage.REWARD: 0.5, Stage.OLD_LOGPROBS: 5.0, Stage.UPDATE: 25.0, Stage.PUBLISH: 1.0}
"""Of a small real step; the longer it is, the more of all events are chunks."""


class CountingBackend:
    """Carries orders out in virtual time, with a report every chunk."""

    def __init__(self) -> None:
        self._now_s = 0.0
        self._due: list[tuple[float, int, OrderId]] = []
        self._running: dict[OrderId, tuple[RunStage, float, float]] = {}
        self._number = 0

    def now_s(self) -> float:
        return self._now_s

    def add_pipeline(self, submission: Submission) -> None:
        pass

    def execute(self, action: Action) -> None:
        match action:
            case RunStage():
                # Groups are not in step with each other, as real ones are not.
                seconds = SECONDS[action.stage] * (1.0 + (int(action.pipeline[1:]) % 97) / 97)
                self._running[action.order] = (action, self._now_s, self._now_s + seconds)
                self._next(action.order)
            case Pause(order=order) if order in self._running:
                action, begun_s, _ = self._running[order]
                self._running[order] = (action, begun_s, -1.0)
                self._push(self._now_s, order)

    def _next(self, order: OrderId) -> None:
        action, _, end_s = self._running[order]
        self._push(min(self._now_s + CHUNK_S, end_s) if action.devices else end_s, order)

    def _push(self, at_s: float, order: OrderId) -> None:
        self._number += 1
        heapq.heappush(self._due, (at_s, self._number, order))

    def poll(self, timeout_s: float) -> tuple[Sequence[Event], Sequence[Note]]:
        while self._due:
            at_s, _, order = heapq.heappop(self._due)
            if order not in self._running:
                continue
            self._now_s = at_s
            _, begun_s, end_s = self._running[order]
            seconds = at_s - begun_s
            if at_s < end_s:
                self._next(order)
                return [
                    ChunkFinished(time_s=at_s, order=order, num_active=8, num_waiting=0, tokens=1, seconds=seconds)
                ], ()
            del self._running[order]
            kind = StagePaused if end_s < 0.0 else StageFinished
            return [kind(time_s=at_s, order=order, seconds=seconds)], ()
        self._now_s += timeout_s
        return (), ()

    def weights_sha256(self, pipeline: PipelineId) -> str | None:
        return None

    def close(self) -> None:
        pass


class Turns:
    """When each turn of the loop ended."""

    def __init__(self) -> None:
        self.ended_s: list[float] = []

    def update(self, now_s: float, events: Sequence[Event], actions: Sequence[Action], notes: Sequence[Note]) -> None:
        self.ended_s.append(time.perf_counter())


def measured(num_groups: int, policy: str, num_turns: int) -> dict[str, Any]:
    pools = {
        "rollout": Pool(name="rollout", phase=Phase.ROLLOUT, num_nodes=num_groups),
        "train": Pool(name="train", phase=Phase.TRAIN, num_nodes=num_groups),
    }
    cluster = Cluster(pools=pools)
    scheduler, backend, turns = Scheduler(cluster, make_policy(policy)), CountingBackend(), Turns()
    with tempfile.TemporaryDirectory() as folder:
        header = run_header(policy=policy, backend="counting", cluster=cluster)
        with RunLog.create(Path(folder) / "run", header) as log:
            controller = Controller(scheduler, backend, log, [turns])
            given = [submission(f"p{number}") for number in range(2 * num_groups)]
            start_s = time.perf_counter()
            controller.run(given, until=lambda: len(turns.ended_s) >= 1)
            placing_s = time.perf_counter() - start_s
            begun_s = backend.now_s()
            turns.ended_s.clear()
            controller.run([], until=lambda: len(turns.ended_s) > num_turns)
    seconds = [after - before for before, after in zip(turns.ended_s, turns.ended_s[1:], strict=False)]
    rate = len(seconds) / (backend.now_s() - begun_s)
    return {
        "policy": policy,
        "groups": scheduler.query.placement.num_groups,
        "placing_s": placing_s,
        "turn_ms": statistics.median(seconds) * 1e3,
        "turn_p99_ms": sorted(seconds)[int(len(seconds) * 0.99)] * 1e3,
        "events_per_s": 1.0 / statistics.mean(seconds),
        "group_events_per_s": rate / num_groups,
        "carries": rate * statistics.mean(seconds),
    }


def submission(name: str) -> Submission:
    estimate = PhaseSeconds(
        **{
            f"{phase.value}_s": sum(SECONDS[one] for one in STAGES if PHASE_BY_STAGE[one] is phase)
            for phase in (Phase.ROLLOUT, Phase.TRAIN)
        }
    )
    pipeline = Pipeline(id=PipelineId(name), num_steps=1_000_000, stages=STAGES, estimate=estimate, slo_slowdown=2.0)
    return Submission(pipeline=pipeline, config=TrainingConfig(name=name, num_steps=1_000_000))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, nargs="+", default=[1, 10, 100, 1000])
    parser.add_argument("--policies", nargs="+", default=["rollmux", "rlmux"])
    parser.add_argument("--turns", type=int, default=5000)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    for policy in arguments.policies:
        for num_groups in arguments.groups:
            row = measured(num_groups, policy, arguments.turns)
            if arguments.json:
                print(json.dumps(row))
            else:
                print(" ".join(f"{name} {one if isinstance(one, str) else f'{one:.4g}'}" for name, one in row.items()))


if __name__ == "__main__":
    main()
