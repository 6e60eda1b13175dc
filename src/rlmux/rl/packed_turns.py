"""Finished turns in transit through the controller: ids, and the rest as opaque bytes.

    rollout worker ── pack ──▶ PackedTurns ──▶ controller ──▶ PackedTurns ── unpack ──▶ env worker

A device waits while its worker's answer is in transit. Pickled one by one, frozen dataclasses take five times as long
to write as rows of plain values, and the controller would read and write them once more.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from rlmux.rl.types import FinishedTurn, TrajectoryId

_FIELDS = ("id", "tokens", "is_sampled", "logprobs", "versions", "stop_reason", "num_turns")
_values_of = attrgetter(*_FIELDS[1:])


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedTurns:
    """Turns of one chunk."""

    id_rows: Sequence[tuple[Any, ...]]
    """The fields of each trajectory's id."""
    payload: bytes
    """Pickled rows of all other fields, in the same order."""

    @classmethod
    def pack(cls, turns: Iterable[FinishedTurn]) -> PackedTurns:
        turns = list(turns)
        return cls(
            id_rows=[tuple(turn.id) for turn in turns],
            payload=pickle.dumps([_values_of(turn) for turn in turns], protocol=pickle.HIGHEST_PROTOCOL),
        )

    def ids(self) -> list[TrajectoryId]:
        """The trajectories whose turns these are, in order."""
        return [TrajectoryId(*row) for row in self.id_rows]

    def unpack(self) -> list[FinishedTurn]:
        """The turns as they were packed."""
        rows = zip(self.ids(), pickle.loads(self.payload), strict=True)
        return [FinishedTurn(**dict(zip(_FIELDS, (first, *values), strict=True))) for first, values in rows]


NO_TURNS = PackedTurns.pack(())
