"""A rollout from the log of a real run, decoded again on any number of devices.

    tokens of each trajectory, waits of each turn   ┐
    seconds of an iteration, by rows computed       ├─▶ RecordedRollout ── shard(i, n) ──▶ Decoder | TurnDecoder
    seconds before decoding begins                  ┘

Prompt groups are dealt to devices as the runtime deals them. Half of the trajectories do not decode in half of the
seconds: the longest one decodes to its end wherever it is, and an iteration of few rows is not much cheaper than one of
many.

A module of its own: it is tested without a log.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from statistics import median

from rlmux.core.model import SubStage
from rlmux.log.notes import RolloutNote
from rlmux.sim.models.decoder import Decoder, LaterTurn, Unfinished
from rlmux.sim.models.multi_turn import TurnDecoder
from rlmux.sim.models.work import Work

_FRESH = -1.0
"""Context of a trajectory that has not begun: `Iterations` counts prompts instead of their tokens."""
_NUM_FITS = 3
"""Fits after which computing and waiting, which depend on each other, are close to the recorded ones."""


@dataclass(frozen=True, slots=True)
class Iterations:
    """Measured seconds of an engine: the costs of a decoder."""

    rows: tuple[int, ...]
    """Batch widths that were seen, ascending."""
    seconds: tuple[float, ...]
    """Seconds of one decode iteration at each width."""
    prompt_s: float
    """Seconds to prefill the prompt of one trajectory."""

    @classmethod
    def of_notes(cls, notes: Iterable[RolloutNote]) -> Iterations:
        """Means over all steps."""
        spent: dict[int, tuple[int, float]] = {}
        prefill_s, num_trajectories = 0.0, 0
        for note in notes:
            num_trajectories += len(note.runs)
            for sub_stage, width, iterations, _, ms in note.iterations:
                if sub_stage == SubStage.PREFILL:
                    prefill_s += ms * 1e-3
                else:
                    before = spent.get(width, (0, 0.0))
                    spent[width] = before[0] + iterations, before[1] + ms * 1e-3
        rows = tuple(sorted(spent))
        seconds = tuple(total_s / iterations for iterations, total_s in (spent[each] for each in rows))
        return cls(rows, seconds, prefill_s / max(num_trajectories, 1))

    def decode_span_s(self, active: float, context: float, num_iterations: float) -> float:
        """Seconds at the least width that was seen and has room for all."""
        index = min(bisect_left(self.rows, active), len(self.rows) - 1)
        return num_iterations * self.seconds[index]

    def prefill_s(self, tokens: float) -> float:
        """Seconds of prefill; `tokens` counts prompts (see `_FRESH`)."""
        return tokens * self.prompt_s

    def scaled(self, factor: float) -> Iterations:
        return Iterations(self.rows, tuple(factor * seconds for seconds in self.seconds), factor * self.prompt_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedRollout:
    """One step's rollout."""

    trajectories: Sequence[Unfinished]
    """Trajectories in the order of their ids: `group_size` of each prompt."""
    group_size: int
    slots: int
    iterations: Iterations
    fixed_s: float
    """Seconds of each rollout shard before anything is decoded."""

    @classmethod
    def of_note(cls, note: RolloutNote, iterations: Iterations, fixed_s: float) -> RecordedRollout:
        waits = _waits_s(note)
        return cls(
            trajectories=tuple(_trajectory(own, waits_s) for own, waits_s in zip(note.runs, waits, strict=True)),
            group_size=note.group_size,
            slots=note.slots,
            iterations=iterations,
            fixed_s=fixed_s,
        )

    def fitted_to(self, computed_s: float, waited_s: float | None, num_devices: int) -> RecordedRollout:
        """The same rollout with all iterations scaled by one factor and all waits by another.

        So many devices then compute and wait for so many seconds in all. `waited_s=None` leaves the waits as they are.
        """
        fitted = self
        for _ in range(_NUM_FITS if self._has_turns else 1):
            modelled_s, idle_s = fitted._computed_and_waited_s(num_devices)
            if modelled_s > 0.0:
                fitted = replace(fitted, iterations=fitted.iterations.scaled(computed_s / modelled_s))
            if idle_s > 0.0 and waited_s:
                stretched = tuple(_with_waits(trajectory, waited_s / idle_s) for trajectory in fitted.trajectories)
                fitted = replace(fitted, trajectories=stretched)
        return fitted

    def scaled(self, factor: float) -> RecordedRollout:
        """The same rollout with all its seconds times this."""
        return replace(
            self,
            trajectories=tuple(_with_waits(trajectory, factor) for trajectory in self.trajectories),
            iterations=self.iterations.scaled(factor),
            fixed_s=factor * self.fixed_s,
        )

    def shard(self, index: int, num_devices: int) -> Work:
        """The rollout shard of the `index`-th of so many devices, with nothing of it done."""
        mine = [
            trajectory for n, trajectory in enumerate(self.trajectories) if n // self.group_size % num_devices == index
        ]
        if self._has_turns:
            return TurnDecoder(self.iterations, mine, slots=self.slots, first_s=self.fixed_s)
        return Decoder(self.iterations, mine, slots=self.slots, first_s=self.fixed_s)

    @property
    def _has_turns(self) -> bool:
        return any(trajectory.later for trajectory in self.trajectories)

    def _computed_and_waited_s(self, num_devices: int) -> tuple[float, float]:
        computed_s = waited_s = 0.0
        for index in range(num_devices):
            shard = self.shard(index, num_devices)
            total_s = shard.until_over(1.0)
            busy_s = shard.advance(total_s, 1.0)
            computed_s += busy_s - self.fixed_s
            waited_s += total_s - busy_s
        return computed_s, waited_s


def _waits_s(note: RolloutNote) -> list[list[float]]:
    """Seconds that each trajectory waits after each of its turns. Where a crash lost some, all wait for the median."""
    waits_ms = note.waits_ms
    if waits_ms is None:
        return [[]] * len(note.runs)
    if len(waits_ms) == len(note.runs):
        return [[wait_ms * 1e-3 for wait_ms in own] for own in waits_ms]
    usual_s = median(wait_ms for own in waits_ms for wait_ms in own) * 1e-3
    return [[usual_s] * (len(own) // 2 + 1) for own in note.runs]


def _with_waits(trajectory: Unfinished, factor: float) -> Unfinished:
    return replace(trajectory, later=tuple(replace(turn, wait_s=factor * turn.wait_s) for turn in trajectory.later))


def _trajectory(runs: Sequence[int], waits_s: Sequence[float]) -> Unfinished:
    """A trajectory of the log.

    The tokens of a reply are fed one by one, like those that are sampled. After its last turn a trajectory keeps its
    slot until its environment replies. A program that never asked counts as one token.
    """
    later = tuple(
        LaterTurn(wait_s, 0, reply + sampled)
        for wait_s, reply, sampled in zip_longest(waits_s, runs[1::2], runs[2::2], fillvalue=0)
    )
    return Unfinished(max(1, runs[0]) if runs else 1, _FRESH, later)
