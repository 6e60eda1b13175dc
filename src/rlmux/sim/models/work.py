"""The work of an order, in solo seconds: one small protocol with several implementations.

    SoloSeconds         a number of seconds: training, publishing, a rollout of which nothing more is known
    TailedSeconds       a number of seconds whose tail may go on on a part of the node that is its device
    TrajectorySeconds   one number per trajectory of a rollout shard: trajectories end one by one, and can migrate
    Decoder             a rollout shard as sequences, slots and contexts (decoder.py)
    TurnDecoder         the same with turns, and waits for an environment between them (multi_turn.py)

A solo second is a second of the order alone on whole devices. Work advances by seconds that pass and a rate, in solo
seconds per second; a rate of 0 is a pause. A wait for an environment passes in plain seconds, at every rate. The world
makes these objects (world.py), and rates are decided elsewhere (rates.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from rlmux.core.model import RolloutTail, SubStage

DONE_S = 1e-6
"""Seconds that count as rounding: work with no more than this left is over."""
_ROUNDING = 1e-9


class Work(Protocol):
    """What an order, or a paused rollout shard, still has to do."""

    @property
    def sub_stage(self) -> SubStage:
        """Compute and memory character of the work at this moment."""

    @property
    def is_over(self) -> bool: ...

    @property
    def idle_s(self) -> float:
        """Seconds until an environment replies and there is something to compute again; 0 if there is now."""

    def until_over(self, rate: float) -> float:
        """Seconds until all of it is done."""

    def until_report(self, rate: float) -> float:
        """Seconds until `report` or `sub_stage` changes in a way worth a progress report, or all is done."""

    def advance(self, seconds: float, rate: float) -> float:
        """Let so many seconds pass; returns the seconds in which it computed."""

    def report(self) -> tuple[int, int, int] | None:
        """Trajectories that (decode, wait for a slot, wait for their environment); None: nothing to report."""

    def take(self) -> list[Any]:
        """Remove and return all unfinished trajectories."""

    def give(self, trajectories: Sequence[Any], cost_s: float) -> None:
        """Add what another object's `take` returned; `cost_s` solo seconds go into making their contexts again."""


class SoloSeconds:
    """A number of seconds with nothing inside. As a rollout shard it is one trajectory."""

    __slots__ = ("left_s", "sub_stage")

    idle_s = 0.0

    def __init__(self, seconds: float, sub_stage: SubStage) -> None:
        self.left_s = seconds
        self.sub_stage = sub_stage

    @property
    def is_over(self) -> bool:
        return self.left_s <= DONE_S

    def until_over(self, rate: float) -> float:
        return self.left_s / rate

    def until_report(self, rate: float) -> float:
        return self.left_s / rate

    def advance(self, seconds: float, rate: float) -> float:
        left_s = self.left_s - seconds * rate
        self.left_s = left_s if left_s > 0.0 else 0.0
        return seconds

    def report(self) -> None:
        return None

    def take(self) -> list[float]:
        left_s, self.left_s = self.left_s, 0.0
        return [left_s] if left_s > DONE_S else []

    def give(self, trajectories: Sequence[float], cost_s: float) -> None:
        """Run trajectories one after the other, as they may not fit beside each other."""
        self.left_s += sum(trajectories) + cost_s


class TailedSeconds:
    """A rollout on a node of several GPUs that is one device, with the moments at which its tail may leave the rest
    of the node. With no more than the tail's part of it from such a moment on it is as much later as was measured, and
    loses nothing else; with more than that it is as slow as its part is small, tail or not."""

    __slots__ = ("_left_s", "_seconds", "_tail", "_tail_left")

    sub_stage = SubStage.DENSE_DECODE
    idle_s = 0.0

    def __init__(self, seconds: float, tail: RolloutTail) -> None:
        self._seconds = self._left_s = seconds
        self._tail = tail
        self._tail_left: int | None = None
        """Trajectories left when the tail left the node; None before."""

    @property
    def is_over(self) -> bool:
        return self._left_s <= DONE_S

    def until_over(self, rate: float) -> float:
        return self._left_s / self._pace(rate)

    def until_report(self, rate: float) -> float:
        pace = self._pace(rate)
        if self._tail_left is None:
            for point in self._tail.points:
                to_go_s = point.begins * self._seconds - (self._seconds - self._left_s)
                if to_go_s > DONE_S:
                    return to_go_s / pace
        return self._left_s / pace

    def advance(self, seconds: float, rate: float) -> float:
        self._left_s = max(0.0, self._left_s - seconds * self._pace(rate)) if rate else self._left_s
        return seconds

    def report(self) -> tuple[int, int, int] | None:
        num_left = self._num_left() if self._tail_left is None else self._tail_left
        return None if num_left is None else (num_left, 0, 0)

    def take(self) -> list[float]:
        left_s, self._left_s = self._left_s, 0.0
        return [left_s] if left_s > DONE_S else []

    def give(self, trajectories: Sequence[float], cost_s: float) -> None:
        """As `SoloSeconds`: one after the other, and without a tail from then on."""
        self._left_s += sum(trajectories) + cost_s
        self._tail_left = 0

    def _pace(self, rate: float) -> float:
        """Solo seconds per second. A rate that is the tail's part of the node, or less, makes the tail leave."""
        if self._tail_left == 0 or rate > self._tail.device_fraction * (1.0 + _ROUNDING):
            return rate
        if self._tail_left is None:
            num_left = self._num_left()
            if num_left is None:
                return rate
            point = self._tail.at(num_left)
            self._tail_left = num_left
            self._left_s += point.growth * self._seconds if point else 0.0
        return 1.0

    def _num_left(self) -> int | None:
        """Trajectories left at the last given moment; None before the first."""
        done_s = self._seconds - self._left_s + DONE_S
        passed = [point.num_left for point in self._tail.points if point.begins * self._seconds <= done_s]
        return passed[-1] if passed else None


class TrajectorySeconds:
    """Seconds of each trajectory of a rollout shard; all run at once, and none slows another."""

    __slots__ = ("_left_s",)

    sub_stage = SubStage.DENSE_DECODE
    idle_s = 0.0

    def __init__(self, seconds: Sequence[float]) -> None:
        self._left_s = sorted(seconds)

    @property
    def is_over(self) -> bool:
        return not self._left_s or self._left_s[-1] <= DONE_S

    def until_over(self, rate: float) -> float:
        return self._left_s[-1] / rate if self._left_s else 0.0

    def until_report(self, rate: float) -> float:
        return self._left_s[0] / rate if self._left_s else 0.0

    def advance(self, seconds: float, rate: float) -> float:
        done_s = seconds * rate
        self._left_s = [left_s - done_s for left_s in self._left_s if left_s - done_s > DONE_S]
        return seconds

    def report(self) -> tuple[int, int, int]:
        return len(self._left_s), 0, 0

    def take(self) -> list[float]:
        taken, self._left_s = self._left_s, []
        return taken

    def give(self, trajectories: Sequence[float], cost_s: float) -> None:
        self._left_s = sorted([*self._left_s, *(left_s + cost_s for left_s in trajectories)])
