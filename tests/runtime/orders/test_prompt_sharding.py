"""Each prompt goes whole to one device; where lengths are known, devices get alike many tokens."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rlmux.core.model import DeviceId
from rlmux.rl.types import TrajectoryId, TrajectoryRequest
from rlmux.runtime.orders.prompt_sharding import assign_prompts

DEVICES = [DeviceId("rollout", 0, index) for index in range(3)]


def requests(*expected: int, group_size: int = 2) -> list[TrajectoryRequest]:
    return [
        TrajectoryRequest(
            id=TrajectoryId(1, prompt, sample),
            prompt_tokens=(prompt,),
            max_new_tokens=9,
            stop_tokens=(),
            seed=0,
            expected_tokens=tokens,
        )
        for prompt, tokens in enumerate(expected)
        for sample in range(group_size)
    ]


def prompts(dealt, place: int) -> list[int]:
    return list(dict.fromkeys(request.id.prompt for request in dealt[DEVICES[place]]))


def test_prompts_of_unknown_length_go_round():
    dealt = assign_prompts(requests(0, 0, 0, 0, 0), DEVICES)
    assert [prompts(dealt, place) for place in range(3)] == [[0, 3], [1, 4], [2]]


def test_the_longest_prompts_go_to_different_devices():
    dealt = assign_prompts(requests(10, 90, 80, 10, 10, 70), DEVICES)
    assert [prompts(dealt, place) for place in range(3)] == [[1], [2, 3], [0, 4, 5]]


def test_a_prompt_of_unknown_length_counts_as_the_mean_of_the_others():
    dealt = assign_prompts(requests(0, 10, 30, 0), DEVICES[:2])
    assert [prompts(dealt, place) for place in range(2)] == [[1, 2], [0, 3]]


@given(expected=st.lists(st.integers(0, 1000), min_size=1, max_size=30), num_devices=st.integers(1, 3))
def test_every_request_goes_once_with_its_whole_group(expected, num_devices):
    given = requests(*expected)
    dealt = assign_prompts(given, DEVICES[:num_devices])
    assert list(dealt) == DEVICES[:num_devices]
    assert sorted(request.id for part in dealt.values() for request in part) == [request.id for request in given]
    places = [{request.id.prompt for request in part} for part in dealt.values()]
    assert sum(map(len, places)) == len(expected)
