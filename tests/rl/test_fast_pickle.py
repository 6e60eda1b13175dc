"""What crosses processes as a row comes out as it went in."""

from __future__ import annotations

import copy
import pickle
from dataclasses import FrozenInstanceError, dataclass, replace

import pytest

from rlmux.rl.fast_pickle import fast_pickled
from rlmux.rl.types import Trajectory, TrajectoryId, TrajectoryRequest

REQUEST = TrajectoryRequest(
    id=TrajectoryId(1, 2, 3, "adapter"), prompt_tokens=(4, 5), max_new_tokens=6, stop_tokens=(7,), seed=8,
    drawn_as=TrajectoryId(9, 9, 9), temperature=0.5, stop_texts=("end",), expected_tokens=10,
)  # fmt: skip
TRAJECTORY = Trajectory(
    id=TrajectoryId(1, 2, 3), prompt_tokens=(4,), tokens=(5, 6), is_sampled=(True, False), logprobs=(-0.1, 0.0),
    versions=(7, 7), reward=0.1 + 0.2, stop_reason="stop", num_turns=2,
)  # fmt: skip


@fast_pickled
@dataclass(frozen=True, slots=True)
class Point:
    x: int
    y: int


@dataclass(frozen=True, slots=True)
class NamedPoint(Point):
    name: str


@pytest.mark.parametrize("value", [REQUEST, TRAJECTORY, Point(1, 2), NamedPoint(1, 2, "here")])
@pytest.mark.parametrize("protocol", [2, pickle.HIGHEST_PROTOCOL])
def test_a_value_comes_out_as_it_went_in(value: object, protocol: int) -> None:
    for again in (pickle.loads(pickle.dumps(value, protocol)), copy.deepcopy(value), copy.copy(value)):
        assert again == value
        assert type(again) is type(value)
        assert hash(again) == hash(value)


def test_what_came_out_is_as_frozen_as_before() -> None:
    again = pickle.loads(pickle.dumps(REQUEST))
    with pytest.raises(FrozenInstanceError):
        again.seed = 9
    assert replace(again, seed=9) == replace(REQUEST, seed=9)


def test_requests_of_one_prompt_share_its_tokens() -> None:
    requests = [replace(REQUEST, id=TrajectoryId(1, 2, sample)) for sample in range(8)]
    again = pickle.loads(pickle.dumps(requests))
    assert again == requests
    assert len({id(one.prompt_tokens) for one in again}) == 1
