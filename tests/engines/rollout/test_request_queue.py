"""The next trajectory is the one that its order promises, and none is lost or doubled on the way."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rlmux.engines.rollout.recorded_trajectory import RecordedTrajectory
from rlmux.engines.rollout.request_queue import WaitingQueue
from rlmux.rl.types import TrajectoryId, TrajectoryRequest


def waiting(prompt: int, sample: int, *, tokens: int = 0, expected: int = 0, adapter: str = "") -> RecordedTrajectory:
    request = TrajectoryRequest(
        id=TrajectoryId(1, prompt, sample, adapter),
        prompt_tokens=(1,),
        max_new_tokens=9,
        stop_tokens=(),
        seed=0,
        expected_tokens=expected,
    )
    return RecordedTrajectory(request=request, tokens=[1] * tokens)


def queue_of(order, num_prompts: int, num_samples: int) -> WaitingQueue[RecordedTrajectory]:
    queue: WaitingQueue[RecordedTrajectory] = WaitingQueue(order)
    for prompt in range(num_prompts):
        for sample in range(num_samples):
            queue.append(waiting(prompt, sample))
    return queue


def popped(queue, count: int) -> list[tuple[int, int]]:
    return [queue.pop().request.id[1:3] for _ in range(count)]


def test_given_is_the_order_of_submission_whatever_ends():
    queue = queue_of("given", 2, 2)
    first = popped(queue, 2)
    queue.note_end(TrajectoryId(1, 0, 1), 9)
    assert first + popped(queue, 2) == [(0, 0), (0, 1), (1, 0), (1, 1)]


def test_adapters_take_turns_whatever_was_submitted_before_and_what_has_begun_is_first():
    queue: WaitingQueue[RecordedTrajectory] = WaitingQueue("given")
    for sample in range(6):
        queue.append(waiting(0, sample, adapter="flood"))
    assert popped(queue, 2) == [(0, 0), (0, 1)]
    queue.append(waiting(1, 0, adapter="other"))
    queue.append(waiting(1, 1, adapter="other"))
    assert popped(queue, 2) == [(1, 0), (0, 2)]
    queue.append(waiting(2, 0, tokens=3, adapter="flood"))
    assert popped(queue, 4) == [(2, 0), (1, 1), (0, 3), (0, 4)]


def test_longest_begins_with_one_of_each_prompt():
    assert popped(queue_of("longest", 3, 2), 3) == [(0, 0), (1, 0), (2, 0)]


def test_longest_goes_on_with_prompts_without_an_answer_and_then_by_the_longest_answer():
    queue = queue_of("longest", 3, 3)
    popped(queue, 3)
    queue.note_end(TrajectoryId(1, 0, 0), 4)
    queue.note_end(TrajectoryId(1, 1, 0), 7)
    assert popped(queue, 3) == [(2, 1), (2, 2), (1, 1)]
    queue.note_end(TrajectoryId(1, 0, 0), 8)
    assert popped(queue, 3) == [(0, 1), (0, 2), (1, 2)]


def test_longest_goes_by_what_is_expected_and_asks_one_of_each_unknown_prompt_first():
    queue: WaitingQueue[RecordedTrajectory] = WaitingQueue("longest")
    for prompt, expected in ((0, 5), (1, 8), (2, 0)):
        for sample in range(2):
            queue.append(waiting(prompt, sample, expected=expected))
    assert popped(queue, 3) == [(2, 0), (2, 1), (1, 0)]
    queue.note_end(TrajectoryId(1, 0, 0), 99)
    assert popped(queue, 3) == [(1, 1), (0, 0), (0, 1)], "no trajectory of prompt 0 had a slot: it is not its answer"


def test_what_has_begun_comes_before_what_has_not():
    for order in ("given", "longest"):
        queue = queue_of(order, 2, 1)
        queue.continue_with(waiting(7, 0, tokens=3))
        queue.put_back([waiting(8, 0, tokens=2), waiting(8, 1, tokens=1)])
        assert popped(queue, 5) == [(8, 0), (8, 1), (7, 0), (0, 0), (1, 0)]


def test_the_next_ones_can_be_looked_at_and_stay():
    queue = queue_of("longest", 2, 2)
    assert [live.request.id[1:3] for live in queue.first(2)] == [(0, 0), (1, 0)]
    assert [live.request.id[1:3] for live in queue.after(2)] == [(0, 1), (1, 1)]
    assert len(queue) == 4


@given(
    order=st.sampled_from(["given", "longest"]),
    sizes=st.tuples(st.integers(1, 5), st.integers(1, 5)),
    lengths=st.lists(st.integers(1, 99), min_size=25, max_size=25),
    gone=st.sets(st.integers(0, 24)),
)
def test_each_that_is_not_discarded_comes_out_once(order, sizes, lengths, gone):
    queue = queue_of(order, *sizes)
    ids = [live.request.id for live in queue]
    discarded = {id for place, id in enumerate(ids) if place in gone}
    queue.discard(discarded)
    out = []
    for length in lengths[: len(queue)]:
        out.append(queue.pop().request.id)
        queue.note_end(out[-1], length)
    assert sorted(out) == sorted(set(ids) - discarded)
    assert not queue
