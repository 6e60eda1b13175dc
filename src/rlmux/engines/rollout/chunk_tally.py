"""Counts of one chunk of a rollout engine so far."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rlmux.core.errors import PipelineError
from rlmux.core.model import SubStage, decode_sub_stage
from rlmux.rl.types import FinishedTurn, SubStageIterations


@dataclass(slots=True, kw_only=True)
class ChunkTally:
    """Begins empty with `run_chunk` and becomes its `ChunkReport`."""

    dense_threshold: int
    """Trajectories from which a decode step counts as dense."""
    finished: list[FinishedTurn] = field(default_factory=list)
    failed: dict[str, PipelineError] = field(default_factory=dict)
    """First error of each adapter with a log-probability that is not finite."""
    decode_steps: int = 0
    sampled_tokens: Counter[str] = field(default_factory=Counter)
    """Tokens that the model sampled, by adapter."""
    _spent: dict[tuple[SubStage, int], tuple[int, float]] = field(default_factory=dict)
    """(iterations, ms) by sub-stage and rows computed."""
    _tokens: dict[tuple[SubStage, int], Counter[str]] = field(default_factory=dict)
    """Tokens of each adapter, by the same."""

    def prefill_tokens(self, adapter: str | None) -> int:
        """Tokens of prefilled contexts, padding left out. `adapter`: None: of all."""
        return sum(
            _of(tokens, adapter) for (sub_stage, _), tokens in self._tokens.items() if sub_stage is SubStage.PREFILL
        )

    def add_decode(
        self,
        num_rows: int,
        steps: int,
        num_active: int,
        *,
        made: Mapping[str, int],
        sampled: Mapping[str, int],
        seconds: float,
    ) -> None:
        """Count decode steps of a batch of `num_rows`, in which `num_active` trajectories took part.

        `made`: tokens by adapter, of which `sampled` did not come from the environment.
        """
        self.decode_steps += steps
        self.sampled_tokens.update(sampled)
        sub_stage = decode_sub_stage(num_active, self.dense_threshold)
        self.add_iterations(sub_stage, num_rows, iterations=steps, tokens=made, seconds=seconds)

    def add_iterations(
        self, sub_stage: SubStage, num_rows: int, *, iterations: int, tokens: Mapping[str, int], seconds: float
    ) -> None:
        """Count iterations that computed `num_rows` rows each; tokens, by adapter, and seconds are of all of them."""
        before = self._spent.get((sub_stage, num_rows), (0, 0.0))
        self._spent[sub_stage, num_rows] = before[0] + iterations, before[1] + 1e3 * seconds
        self._tokens.setdefault((sub_stage, num_rows), Counter()).update(tokens)

    def iterations(self, adapter: str | None) -> Sequence[SubStageIterations]:
        """Sorted by sub-stage, then by rows computed. `adapter`: those with tokens of it, counted alone; None: all."""
        counted = [(key, _of(self._tokens[key], adapter), spent) for key, spent in sorted(self._spent.items())]
        return [
            SubStageIterations(sub_stage, num_rows, num_iterations, tokens, ms)
            for (sub_stage, num_rows), tokens, (num_iterations, ms) in counted
            if tokens or adapter is None
        ]


def _of(tokens: Counter[str], adapter: str | None) -> int:
    return tokens.total() if adapter is None else tokens[adapter]
