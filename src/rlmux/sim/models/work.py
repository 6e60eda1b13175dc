"""What is left of an order: one small interface, whatever is inside.

    SoloSeconds         a number of seconds: training, publishing, a rollout of which nothing more is known
    TrajectorySeconds   one number for each trajectory of a share: they end one by one, and can be moved
    Decoder             a share by sequences, slots and contexts (decoder.py)
    TurnDecoder         the same with turns, and waits for tools between them (turns.py)

Work is counted in solo seconds: what it takes alone on whole devices. It moves on by the seconds that pass and a pace,
solo seconds per second; a pace of 0 is a pause. What waits for an environment waits in seconds that pass, at any pace.
Who made it, and how fast it may go, is no matter of these classes: that is the world's (world.py) and the pace's
(pace.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from rlmux.core.model import SubStage

DONE_S = 1e-6
"""Less than this is rounding: whoever has no more left is over."""
ROLLOUT_KIND = SubStage.DENSE_DECODE
"""Character of a rollout of which only seconds are known."""


class Remaining(Protocol):
    """The work that an order, or a paused share, still has to do."""

    @property
    def kind(self) -> str:
        """Its compute character now, as an interference table names it."""

    @property
    def is_over(self) -> bool: ...

    @property
    def idle_s(self) -> float:
        """Seconds until there is something to compute: an environment has to reply first. 0: there is now."""

    def until_over(self, pace: float) -> float:
        """Seconds until all of it is done."""

    def until_news(self, pace: float) -> float:
        """Seconds until `report` or `kind` changes in a way worth telling, or all is done."""

    def advance(self, seconds: float, pace: float) -> float:
        """Let so many seconds pass; returns those in which it computed."""

    def report(self) -> tuple[int, int, int] | None:
        """Trajectories (decoding, waiting for a slot, waiting for their environment); None: there is nothing to say."""

    def take(self) -> list[Any]:
        """All unfinished trajectories; nothing is left afterwards."""

    def give(self, trajectories: Sequence[Any], cost_s: float) -> None:
        """Take over what another's `take` gave; `cost_s` solo seconds go into making their contexts again."""


class SoloSeconds:
    """So many seconds and nothing inside. As a share it is one trajectory."""

    __slots__ = ("kind", "left_s")

    idle_s = 0.0

    def __init__(self, seconds: float, kind: str) -> None:
        self.left_s = seconds
        self.kind = kind

    @property
    def is_over(self) -> bool:
        return self.left_s <= DONE_S

    def until_over(self, pace: float) -> float:
        return self.left_s / pace

    def until_news(self, pace: float) -> float:
        return self.left_s / pace

    def advance(self, seconds: float, pace: float) -> float:
        left_s = self.left_s - seconds * pace
        self.left_s = left_s if left_s > 0.0 else 0.0
        return seconds

    def report(self) -> None:
        return None

    def take(self) -> list[float]:
        left_s, self.left_s = self.left_s, 0.0
        return [left_s] if left_s > DONE_S else []

    def give(self, trajectories: Sequence[float], cost_s: float) -> None:
        """One after the other: nothing says that they would fit beside each other."""
        self.left_s += sum(trajectories) + cost_s


class TrajectorySeconds:
    """Seconds of each trajectory of a share; all go on at once, none slows another."""

    __slots__ = ("_left_s",)

    kind = ROLLOUT_KIND
    idle_s = 0.0

    def __init__(self, seconds: Sequence[float]) -> None:
        self._left_s = sorted(seconds)

    @property
    def is_over(self) -> bool:
        return not self._left_s or self._left_s[-1] <= DONE_S

    def until_over(self, pace: float) -> float:
        return self._left_s[-1] / pace if self._left_s else 0.0

    def until_news(self, pace: float) -> float:
        return self._left_s[0] / pace if self._left_s else 0.0

    def advance(self, seconds: float, pace: float) -> float:
        done_s = seconds * pace
        self._left_s = [left_s - done_s for left_s in self._left_s if left_s - done_s > DONE_S]
        return seconds

    def report(self) -> tuple[int, int, int]:
        return len(self._left_s), 0, 0

    def take(self) -> list[float]:
        taken, self._left_s = self._left_s, []
        return taken

    def give(self, trajectories: Sequence[float], cost_s: float) -> None:
        self._left_s = sorted([*self._left_s, *(left_s + cost_s for left_s in trajectories)])
