"""What a shard hands over when it migrates: to which of its siblings each trajectory goes, and what follows it."""

from __future__ import annotations

from collections import Counter

from rlmux.rl.types import PartialTrajectory, TrajectoryId, TrajectoryRequest, TurnReply
from rlmux.runtime.orders.rollout_shard import LiveShard


def request(prompt: int, sample: int) -> TrajectoryRequest:
    return TrajectoryRequest(
        id=TrajectoryId(1, prompt, sample), prompt_tokens=(1, 2, 3), max_new_tokens=9, stop_tokens=(), seed=0
    )


def begun(prompt: int, sample: int, *, num_tokens: int = 2, kv: bytes | None = b"1234") -> PartialTrajectory:
    return PartialTrajectory(
        request=request(prompt, sample),
        tokens=(5,) * num_tokens,
        is_sampled=(True,) * num_tokens,
        logprobs=(0.0,) * num_tokens,
        versions=(0,) * num_tokens,
        pending_tokens=(),
        num_turns=0,
        is_waiting_for_reply=False,
        kv=kv,
    )


def shard(*ids: tuple[int, int]) -> LiveShard:
    made = LiveShard(1)
    for prompt, sample in ids:
        made.add(request(prompt, sample))
    return made


def test_prompts_that_have_not_begun_stay_together_and_go_where_the_fewest_are():
    source = shard(*((prompt, sample) for prompt in range(4) for sample in range(4)))
    busy, idle = shard(*((9, sample) for sample in range(8))), shard()
    moved = source.migrate_to([busy, idle], [])
    assert moved == {"num_trajectories": 16, "num_begun": 0, "tokens": 0, "kv_bytes": 0}
    assert len(busy.unfinished) == len(idle.unfinished) == 12
    for prompt in range(4):
        assert len({id(source.holder(TrajectoryId(1, prompt, sample))) for sample in range(4)}) == 1


def test_fewer_prompts_than_targets_are_split():
    source, targets = shard(*((0, sample) for sample in range(6))), [shard() for _ in range(3)]
    source.migrate_to(targets, [])
    assert [len(target.to_submit) for target in targets] == [2, 2, 2]


def test_begun_trajectories_are_spread_one_by_one_and_counted_with_their_contexts():
    source = shard((0, 0), (0, 1), (0, 2), (0, 3))
    source.take_inputs()
    targets = [shard(), shard()]
    moved = source.migrate_to(targets, [begun(0, sample) for sample in range(4)])
    assert moved == {"num_trajectories": 4, "num_begun": 4, "tokens": 20, "kv_bytes": 16}
    assert [len(target.partials) for target in targets] == [2, 2]
    assert [sorted(target.made.values()) for target in targets] == [[2, 2], [2, 2]]


def test_what_was_cut_meanwhile_does_not_move():
    source, target = shard((0, 0), (0, 1)), shard()
    source.take_inputs()
    source.cut(lambda id: id.sample == 1)
    moved = source.migrate_to([target], [begun(0, 0), begun(0, 1)])
    assert moved["num_trajectories"] == 1
    assert list(target.unfinished) == [TrajectoryId(1, 0, 0)]


def test_replies_follow_their_trajectories_through_two_migrations():
    source, targets, last = shard((0, 0), (1, 0), (2, 0)), [shard(), shard()], shard()
    source.take_inputs()
    reply = TurnReply(id=TrajectoryId(1, 1, 0), tokens=(7,))
    source.replies.append(reply)
    source.migrate_to(targets, [begun(prompt, 0) for prompt in range(3)])
    assert Counter(len(target.replies) for target in targets) == {0: 1, 1: 1}
    holder = source.holder(reply.id)
    assert holder.replies == [reply]
    holder.migrate_to([last], holder.partials)
    assert source.holder(reply.id) is last
    assert last.replies == [reply]
    assert source.holder(TrajectoryId(1, 5, 5)) in (*targets, last)
