"""The legs of an interruptible rollout, on the shards of its devices.

    open_step ──▶ assign ▶ chunks ──▶ take ──▶ the leg is over by the clock ────────▶ every shard hands back
                   ▲                                                                     │
                   ├── weights_arrived ◀── the step's own weights are not there yet ◀────┤
                   └─────────────────────────── they are ◀───────────────────────────────┤
                                                              the step is over ◀─────────┘

A device works under its own order alone: a shard whose order is paused hands back when it runs again. After the loss of
a worker, a shard first repeats its part of the leg.

A module of its own: only interruptible rollouts use it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rlmux.core.model import DeviceId
from rlmux.rl.types import FinishedTurn, PartialTrajectory, TrajectoryId, TrajectoryRequest
from rlmux.runtime.orders.prompt_sharding import assign_prompts
from rlmux.runtime.orders.rollout_epochs import RolloutEpochs
from rlmux.runtime.orders.rollout_shard import LiveShard
from rlmux.runtime.workers.worker_calls import RolloutChunkResult, StepOver


class RolloutLegs:
    """Drives one pipeline's shards through the legs of its steps."""

    def __init__(self, epochs: RolloutEpochs, newest_version: int, resume: Callable[[LiveShard], None]) -> None:
        """`newest_version`: newest loadable weights of rollout workers. `resume`: called for a shard with new work."""
        self._epochs = epochs
        self._newest_version = newest_version
        self._resume = resume
        self._step = 0
        self._shards: dict[DeviceId, LiveShard] = {}
        self._is_leg_ended = False
        """Whether the leg is over and every shard has handed back."""
        self._is_step_over = False

    @property
    def version(self) -> int:
        """The weight version used for sampling."""
        return self._epochs.clock.version

    @property
    def awaits_weights(self) -> bool:
        """Whether sampling waits for the weights of the previous step."""
        return self._is_leg_ended and not self._is_step_over

    @property
    def most_steps(self) -> float:
        """Most decode steps of a chunk: the leg may then be over."""
        return max(1, self._epochs.clock.ticks_left())

    def begun_from(self, id: TrajectoryId) -> PartialTrajectory | None:
        """An unfinished trajectory at the start of the leg; None if it had no token."""
        return self._epochs.begun_from(id)

    def open_step(
        self, step: int, requests: Sequence[TrajectoryRequest], shards: dict[DeviceId, LiveShard]
    ) -> list[FinishedTurn]:
        """Assign the first leg to devices. `shards`: of all devices; their owner keeps the mapping current. Returns
        turns of earlier steps that this step trains on."""
        self._step, self._shards, self._is_step_over = step, shards, False
        self._epochs.begin_step(step, requests)
        return self._assign()

    def take(self, shard: LiveShard, result: RolloutChunkResult) -> list[FinishedTurn]:
        """Record a chunk's result. Returns the turns to train on that were decided since the previous call."""
        finished = result.turns.unpack()
        for turn in finished:
            shard.end(turn.id)
        shard.note_chunk(result.report)
        kept = self._epochs.take(finished, result.report.progress)
        if result.partials is not None:
            self._epochs.hand_back(result.partials)
            shard.end_leg()
        return kept + self.settle()

    def is_over(self, shard: LiveShard) -> bool:
        """Whether the shard's device has no work left in this step."""
        clock = self._epochs.clock
        is_empty = not (shard.has_left or shard.has_input)
        return shard.is_over or (is_empty and clock.is_last_leg and not clock.is_leg_over)

    def weights_arrived(self, version: int) -> list[FinishedTurn]:
        """Record that rollout workers can load this version. Returns turns as `take` does."""
        self._newest_version = version
        return self._begin_last_leg() if self.awaits_weights else []

    def end_step(self) -> StepOver:
        return self._epochs.end_step()

    def settle(self) -> list[FinishedTurn]:
        """Collect the shards of a leg that is over, and begin the next leg after the last. Returns as `take` does."""
        clock = self._epochs.clock
        if not clock.is_leg_over or self._is_leg_ended:
            return []
        for shard in self._shards.values():
            if shard.is_back or not clock.has_enough({id: shard.made.get(id, 0) for id in shard.unfinished}):
                continue
            self._epochs.hand_back(shard.drop_waiting())
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
        return self._assign()

    def _assign(self) -> list[FinishedTurn]:
        """Assign the leg to the devices that take part in it."""
        self._is_leg_ended = False
        requests, partials = self._epochs.inputs()
        shards = {device: shard for device, shard in self._shards.items() if not shard.has_finished}
        dealt = assign_prompts(requests, list(shards))
        for number, (device, shard) in enumerate(shards.items()):
            shard.begin_leg(dealt[device], partials[number :: len(shards)])
        kept = self._epochs.take([], {})
        for shard in shards.values():
            self._resume(shard)
        return kept + self.settle()
