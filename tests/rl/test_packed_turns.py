"""Turns on their way through the controller stay what they are."""

from __future__ import annotations

import pickle

from rlmux.rl.packed_turns import NO_TURNS, PackedTurns
from rlmux.rl.types import FinishedTurn, TrajectoryId


def turn(sample: int, **fields: object) -> FinishedTurn:
    values = {"tokens": (3, 4), "is_sampled": (True, False), "logprobs": (-0.1, 0.0), "versions": (7, 7)}
    return FinishedTurn(
        id=TrajectoryId(2, 1, sample, "other"), **{**values, "stop_reason": "stop", "num_turns": 3, **fields}
    )


def test_turns_come_out_as_they_went_in_and_in_order() -> None:
    turns = [turn(5), turn(2, tokens=(), stop_reason="length"), turn(9, logprobs=(float("-inf"), 0.1 + 0.2))]
    packed = pickle.loads(pickle.dumps(PackedTurns.pack(turns)))
    assert packed.unpack() == turns
    assert packed.ids() == [each.id for each in turns]
    assert all(type(one) is TrajectoryId for one in packed.ids())


def test_nothing_is_packed_as_nothing() -> None:
    assert NO_TURNS.unpack() == NO_TURNS.ids() == []
