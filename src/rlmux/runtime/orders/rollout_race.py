"""The race of a short round (tail batching): which trajectories a step trains on, and which can stop.

    chunks of all devices ──▶ RolloutRace ──▶ turns that are kept, as soon as their prompt group is done
                                   └──▶ lost trajectories: their shards cut them with the next chunk

The plan clock decides (rl/prompts/plan_clock.py). This module holds only finished turns that are not decided yet.

A module of its own: only tail batching uses it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rlmux.rl.config import TrainingConfig
from rlmux.rl.prompts.plan_clock import PlanClock
from rlmux.rl.types import FinishedTurn, TrajectoryId, TrajectoryRequest


class RolloutRace:
    """One step's race, independent of devices."""

    def __init__(self, clock: PlanClock) -> None:
        self._clock = clock
        self._undecided: dict[TrajectoryId, FinishedTurn] = {}
        """Finished turns of trajectories that are neither kept nor lost yet."""

    @classmethod
    def of(cls, requests: Sequence[TrajectoryRequest], config: TrainingConfig) -> RolloutRace | None:
        """The race of these requests, in id order; None if all are trained on."""
        algorithm, batching = config.algorithm, config.rollout.tail_batching
        if batching is None or len(requests) == algorithm.prompts_per_step * algorithm.group_size:
            return None
        clock = PlanClock(
            [request.id for request in requests],
            num_groups=algorithm.prompts_per_step,
            group_size=algorithm.group_size,
            num_slots=batching.num_slots or config.rollout.num_slots,
        )
        return cls(clock)

    def is_lost(self, id: TrajectoryId) -> bool:
        """Whether the trajectory is excluded from training."""
        return self._clock.is_lost(id)

    def take(self, finished: Sequence[FinishedTurn], progress: Mapping[TrajectoryId, int]) -> list[FinishedTurn]:
        """Record a chunk's finished turns, and the token counts of its unfinished trajectories.

        Returns the turns to train on that were decided since the previous call.
        """
        for id, num_tokens in progress.items():
            self._clock.note_progress(id, num_tokens)
        for turn in finished:
            self._clock.note_end(turn.id, len(turn.tokens))
            self._undecided[turn.id] = turn
        kept = [self._undecided.pop(id) for group in self._clock.advance() for id in group]
        for id in [id for id in self._undecided if self._clock.is_lost(id)]:
            del self._undecided[id]
        return kept
