"""A client of a pipeline whose work arrives, played again: it asks, waits, and thinks as long as it thought.

    burst i ends ── think_s of burst j ─▶ WorkArrived of j ── the scheduler's turn ─▶ burst j runs for its seconds

A client reacts: a recorded burst is announced so many seconds after the end of the burst that it followed, not at the
time of day at which it once was. When all have ended, the client is done.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from rlmux.core.model import Phase, Stage


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientBurst:
    """Work that the client announces once."""

    kind: tuple[Phase, ...]
    """Phases of whose devices it needs all."""
    seconds: float
    """Solo seconds on these devices."""
    after: int | None
    """Number of the burst, from 0, after whose end the client thinks before it announces this one; None: admission."""
    think_s: float
    """Seconds of that thinking."""


@dataclass(slots=True)
class SimClient:
    """Which bursts of one client are announced and which have ended."""

    bursts: Sequence[ClientBurst]
    open: dict[tuple[Phase, ...], int] = field(default_factory=dict)
    """Number of the announced burst of each kind that has not ended."""
    num_ended: int = 0

    def after(self, ended: int | None) -> list[ClientBurst]:
        """What is announced, each after its thinking, once that burst has ended (None: at admission)."""
        return [burst for burst in self.bursts if burst.after == ended]

    def announce(self, burst: ClientBurst) -> None:
        self.open[burst.kind] = next(number for number, one in enumerate(self.bursts) if one is burst)

    def burst_of(self, stage: Stage, devices: Sequence[object], num_train_devices: int) -> int:
        """Number of the open burst that such an order works on."""
        rollout, train, both = (Phase.ROLLOUT,), (Phase.TRAIN,), (Phase.ROLLOUT, Phase.TRAIN)
        if stage is Stage.GENERATE:
            return self.open[rollout]
        is_both = both in self.open and (train not in self.open or len(devices) > num_train_devices)
        return self.open[both if is_both else train]

    def end(self, number: int) -> bool:
        """The burst has ended. Returns whether it was the last."""
        del self.open[self.bursts[number].kind]
        self.num_ended += 1
        return self.num_ended == len(self.bursts)
