"""The log record of one step's rollout, sufficient to simulate it on other devices.

chunks ──▶ seconds of iterations, by rows     ┐
turns, replies ──▶ waits of each trajectory   ├─▶ note `rollout`  ──▶  sim/workloads/recorded.py
the step's batch ──▶ tokens of each           ┘
"""

from __future__ import annotations

from dataclasses import dataclass, field

from rlmux.core.model import PipelineId, SubStage
from rlmux.log.notes import RolloutNote
from rlmux.rl.types import ChunkReport, TrajectoryId
from rlmux.runtime.workers.worker_calls import StepBatch


@dataclass(slots=True)
class RolloutRecord:
    """One pipeline's step, over all its devices. Work of a lost worker counts, and so does its repetition."""

    _spent: dict[tuple[SubStage, int], tuple[int, int, float]] = field(default_factory=dict)
    """(iterations, tokens, ms) by sub-stage and rows computed."""
    _prompt_tokens: int = 0
    _cached_tokens: int = 0
    _sent_s: dict[TrajectoryId, float] = field(default_factory=dict)
    """End of the last turn, in seconds of the run, by trajectory that waits for its environment."""
    _waits_ms: dict[TrajectoryId, list[float]] = field(default_factory=dict)

    def computed(self, report: ChunkReport) -> None:
        self._prompt_tokens += report.prompt_tokens
        self._cached_tokens += report.cached_tokens
        for each in report.iterations:
            num_iterations, tokens, ms = self._spent.get((each.sub_stage, each.num_rows), (0, 0, 0.0))
            self._spent[each.sub_stage, each.num_rows] = (
                num_iterations + each.num_iterations,
                tokens + each.tokens,
                ms + each.ms,
            )

    @property
    def engine_metrics(self) -> dict[str, float]:
        """Share of the contexts' tokens that prefix caches served; empty where no engine reports it."""
        return {"prefix_cache_hits": self._cached_tokens / self._prompt_tokens} if self._prompt_tokens else {}

    def turn_ended(self, trajectory: TrajectoryId, now_s: float) -> None:
        self._sent_s[trajectory] = now_s

    def answered(self, trajectory: TrajectoryId, now_s: float) -> None:
        sent_s = self._sent_s.pop(trajectory, None)
        if sent_s is not None:
            self._waits_ms.setdefault(trajectory, []).append(round(1e3 * (now_s - sent_s), 1))

    def note(self, pipeline: PipelineId, step: int, batch: StepBatch, *, slots: int, group_size: int) -> RolloutNote:
        return RolloutNote(
            pipeline=pipeline,
            step=step,
            slots=slots,
            group_size=group_size,
            runs=batch.metrics.token_runs,
            iterations=[(*key, *spent[:2], round(spent[2], 3)) for key, spent in sorted(self._spent.items())],
            waits_ms=[self._waits_ms[trajectory] for trajectory in sorted(self._waits_ms)] or None,
        )
