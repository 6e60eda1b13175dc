"""Counts of one chunk of a rollout engine so far."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from rlmux.core.model import SubStage, decode_sub_stage
from rlmux.rl.types import FinishedTurn, SubStageIterations


@dataclass(slots=True, kw_only=True)
class ChunkTally:
    """Begins empty with `run_chunk` and becomes its `ChunkReport`."""

    dense_threshold: int
    """Trajectories from which a decode step counts as dense."""
    finished: list[FinishedTurn] = field(default_factory=list)
    decode_steps: int = 0
    sampled_tokens: int = 0
    _spent: dict[tuple[SubStage, int], tuple[int, int, float]] = field(default_factory=dict)
    """(iterations, tokens, ms) by sub-stage and rows computed."""

    @property
    def prefill_tokens(self) -> int:
        """Tokens of prefilled contexts, padding left out."""
        return sum(tokens for (sub_stage, _), (_, tokens, _) in self._spent.items() if sub_stage is SubStage.PREFILL)

    def add_decode(
        self, num_rows: int, steps: int, num_active: int, *, num_made: int, num_sampled: int, seconds: float
    ) -> None:
        """Count decode steps of a batch of `num_rows`, in which `num_active` trajectories took part.

        `num_made`: tokens, of which `num_sampled` did not come from the environment.
        """
        self.decode_steps += steps
        self.sampled_tokens += num_sampled
        sub_stage = decode_sub_stage(num_active, self.dense_threshold)
        self.add_iterations(sub_stage, num_rows, iterations=steps, tokens=num_made, seconds=seconds)

    def add_iterations(
        self, sub_stage: SubStage, num_rows: int, *, iterations: int, tokens: int, seconds: float
    ) -> None:
        """Count iterations that computed `num_rows` rows each; tokens and seconds are of all of them."""
        before = self._spent.get((sub_stage, num_rows), (0, 0, 0.0))
        self._spent[sub_stage, num_rows] = before[0] + iterations, before[1] + tokens, before[2] + 1e3 * seconds

    def iterations(self) -> Sequence[SubStageIterations]:
        """Sorted by sub-stage, then by rows computed."""
        return [
            SubStageIterations(sub_stage, num_rows, num_iterations, tokens, ms)
            for (sub_stage, num_rows), (num_iterations, tokens, ms) in sorted(self._spent.items())
        ]
