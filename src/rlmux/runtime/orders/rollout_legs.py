"""The legs of an interruptible rollout, on the shards of its devices.

    open_step ──▶ deal ──▶ chunks ──▶ take ──▶ the clock says that the leg is over ──▶ every shard hands back
                   ▲                                                                     │
                   ├── weights_arrived ◀── the step's own weights are not there yet ◀────┤
                   └─────────────────────────── they are ◀───────────────────────────────┤
                                                              the step is over ◀─────────┘

A device is touched under its own order alone: a shard whose order is paused hands back when it runs again. One whose
worker was lost first makes again what the leg gives its trajectories.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rlmux.core.model import DeviceId
from rlmux.rl.types import FinishedTurn, PartialTrajectory, TrajectoryId, TrajectoryRequest
from rlmux.runtime.orders.prompt_sharding import deal_out
from rlmux.runtime.orders.rollout_epochs import RolloutEpochs, StepOver
from rlmux.runtime.orders.rollout_shard import RolloutShard
from rlmux.runtime.workers.worker_calls import RolloutChunkResult


class RolloutLegs:
    """Takes one pipeline's shards through the legs of its steps."""

    def __init__(self, epochs: RolloutEpochs, newest_version: int, resume: Callable[[RolloutShard], None]) -> None:
        """`newest_version`: of the weights that rollout workers can load. `resume`: called for a shard that has
        something to do now."""
        self._epochs = epochs
        self._newest_version = newest_version
        self._resume = resume
        self._step = 0
        self._shards: dict[DeviceId, RolloutShard] = {}
        self._is_leg_ended = False
        """It is over, and every shard has handed back."""
        self._is_step_over = False

    @property
    def version(self) -> int:
        """The weight version that devices sample by."""
        return self._epochs.clock.version

    @property
    def awaits_weights(self) -> bool:
        """Nothing can be sampled before the weights of the step before are there."""
        return self._is_leg_ended and not self._is_step_over

    @property
    def most_steps(self) -> float:
        """Decode steps after which the leg may be over: no chunk is longer."""
        return max(1, self._epochs.clock.ticks_left())

    def begun_from(self, id: TrajectoryId) -> PartialTrajectory | None:
        """An unfinished trajectory as the leg began; None for one that had no token."""
        return self._epochs.begun_from(id)

    def open_step(
        self, step: int, requests: Sequence[TrajectoryRequest], shards: dict[DeviceId, RolloutShard]
    ) -> list[FinishedTurn]:
        """Deal out the first leg. `shards`: of all devices; their owner keeps the mapping up to date. Returns turns of
        earlier steps that this one trains on."""
        self._step, self._shards, self._is_step_over = step, shards, False
        self._epochs.begin_step(step, requests)
        return self._deal()

    def take(self, shard: RolloutShard, result: RolloutChunkResult) -> list[FinishedTurn]:
        """Take in what a chunk did. Returns the turns that are known to be trained on since the call before."""
        finished = result.turns.unpack()
        for turn in finished:
            shard.end(turn.id)
        shard.note_chunk(result.report)
        kept = self._epochs.take(finished, result.report.progress)
        if result.partials is not None:
            self._epochs.hand_back(result.partials)
            shard.end_leg()
        return kept + self.settle()

    def is_over(self, shard: RolloutShard) -> bool:
        """Nothing is left to do on the shard's device in this step."""
        clock = self._epochs.clock
        is_empty = not (shard.has_left or shard.has_input)
        return shard.is_over or (is_empty and clock.is_last_leg and not clock.is_leg_over)

    def weights_arrived(self, version: int) -> list[FinishedTurn]:
        """Rollout workers can load this version. Returns turns as `take` does."""
        self._newest_version = version
        return self._begin_last_leg() if self.awaits_weights else []

    def end_step(self) -> StepOver:
        return self._epochs.end_step()

    def settle(self) -> list[FinishedTurn]:
        """Have shards hand back where the leg is over, and go on where all have. Returns turns as `take` does."""
        clock = self._epochs.clock
        if not clock.is_leg_over or self._is_leg_ended:
            return []
        for shard in self._shards.values():
            if shard.is_back or not clock.has_enough({id: shard.made.get(id, 0) for id in shard.unfinished}):
                continue
            self._epochs.hand_back(shard.give_up_waiting())
            if not shard.has_left:
                shard.end_leg()
            elif not shard.hands_back:
                shard.hands_back = True
                self._resume(shard)
        return self._end_leg() if all(shard.is_back for shard in self._shards.values()) else []

    # ------------------------------------------------------------------ helpers

    def _end_leg(self) -> list[FinishedTurn]:
        self._epochs.end_leg()
        self._is_leg_ended, self._is_step_over = True, self._epochs.clock.is_step_over
        if self._is_step_over:
            for shard in self._shards.values():
                shard.is_over = True
                self._resume(shard)
            return []
        return self._begin_last_leg() if self._newest_version >= self._step - 1 else []

    def _begin_last_leg(self) -> list[FinishedTurn]:
        self._epochs.clock.begin_last_leg()
        return self._deal()

    def _deal(self) -> list[FinishedTurn]:
        """Deal the leg out to the devices that take part in it."""
        self._is_leg_ended = False
        requests, partials = self._epochs.inputs()
        shards = {device: shard for device, shard in self._shards.items() if not shard.has_finished}
        dealt = deal_out(requests, list(shards))
        for number, (device, shard) in enumerate(shards.items()):
            shard.begin_leg(dealt[device], partials[number :: len(shards)])
        kept = self._epochs.take([], {})
        for shard in shards.values():
            self._resume(shard)
        return kept + self.settle()
