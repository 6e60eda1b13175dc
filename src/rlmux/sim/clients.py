"""A replayed client of an on-demand pipeline: it sends requests, waits, and thinks as long as recorded.

    batch i ends ── think_s of batch j ─▶ WorkArrived of j ── the scheduler's turn ─▶ batch j runs for its seconds

A client reacts: a recorded batch is announced so many seconds after the end of the batch that it followed, not at the
time of day at which it once was. When all have ended, the client is done.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from rlmux.core.model import Phase, Stage


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientBatch:
    """Work that the client announces once."""

    kind: tuple[Phase, ...]
    """Phases of whose devices it needs all."""
    seconds: float
    """Solo seconds on these devices."""
    after: int | None
    """Number of the batch, from 0, after whose end the client thinks before it announces this one; None: admission."""
    think_s: float
    """Seconds of that thinking."""


@dataclass(slots=True)
class SimClient:
    """Which batches of one client are announced and which have ended."""

    batches: Sequence[ClientBatch]
    open: dict[tuple[Phase, ...], int] = field(default_factory=dict)
    """Number of the announced batch of each kind that has not ended."""
    num_ended: int = 0

    def after(self, ended: int | None) -> list[ClientBatch]:
        """What is announced, each after its thinking, once that batch has ended (None: at admission)."""
        return [batch for batch in self.batches if batch.after == ended]

    def announce(self, batch: ClientBatch) -> None:
        self.open[batch.kind] = next(number for number, known in enumerate(self.batches) if known is batch)

    def batch_of(self, stage: Stage, devices: Sequence[object], num_train_devices: int) -> int:
        """Number of the open batch that such an order works on."""
        rollout, train, both = (Phase.ROLLOUT,), (Phase.TRAIN,), (Phase.ROLLOUT, Phase.TRAIN)
        if stage is Stage.GENERATE:
            return self.open[rollout]
        is_both = both in self.open and (train not in self.open or len(devices) > num_train_devices)
        return self.open[both if is_both else train]

    def end(self, number: int) -> bool:
        """The batch has ended. Returns whether it was the last."""
        del self.open[self.batches[number].kind]
        self.num_ended += 1
        return self.num_ended == len(self.batches)
