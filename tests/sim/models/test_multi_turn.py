"""Rollouts that wait for tools: nothing is decoded meanwhile, nothing is lost, and the device can go to others."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.examples import examples

from rlmux.core.errors import UserError
from rlmux.core.estimation.colocation import SharingEntry, SharingTable
from rlmux.core.events import ReplyArrived, StageFinished, StagePaused
from rlmux.core.model import Stage
from rlmux.policies import make_policy
from rlmux.sim.models.costs import rollout_costs
from rlmux.sim.models.decoder import Decoder, LaterTurn, Unfinished
from rlmux.sim.models.multi_turn import ToolUse, TurnDecoder
from rlmux.sim.simulator import simulate
from rlmux.sim.workloads.substage_pairs import GSM8K_06B, crowd

COSTS = rollout_costs("qwen3-4b")


def calling(tokens: int, wait_s: float, later_tokens: int) -> Unfinished:
    """Generates, waits for its tool, generates again."""
    return Unfinished(tokens, -100.0, (LaterTurn(wait_s, 10, later_tokens),))


def shard(*trajectories: Unfinished, slots: int = 8, **options) -> TurnDecoder:
    return TurnDecoder(COSTS, trajectories, slots=slots, **options)


def tokens_of(work: TurnDecoder) -> float:
    return sum(one.left + sum(turn.tokens for turn in one.later) for one in work.sequences())


def test_without_tools_it_takes_as_long_as_the_decoder_without_turns():
    trajectories = [Unfinished(n, -100.0) for n in (5, 40, 41, 200, 300)]
    plain = Decoder(COSTS, trajectories, slots=3)
    assert shard(*trajectories, slots=3).until_over(1.0) == pytest.approx(plain.seconds_left, rel=0.01)


def test_a_trajectory_that_waits_decodes_nothing_and_holds_no_slot():
    work = shard(calling(10, 1000.0, 10), Unfinished(500, -100.0), slots=1)
    work.advance(work.until_report(1.0), 1.0)  # its prompt is prefilled
    assert work.report() == (1, 1, 0)
    while work.report() != (1, 0, 1):
        work.advance(0.01, 1.0)
    assert work.sequences()[0].left > 450


def test_an_engine_that_keeps_slots_lets_the_next_one_wait():
    work = shard(calling(10, 1000.0, 10), Unfinished(500, -100.0), slots=1, keeps_slots=True)
    work.advance(500.0, 1.0)
    assert work.report() == (0, 1, 1)
    assert work.sub_stage == "tool_wait"


def test_a_shard_whose_trajectories_all_wait_computes_nothing_and_pausing_it_loses_nothing():
    work = shard(calling(10, 50.0, 10), calling(10, 50.0, 10))
    computed_s = work.advance(20.0, 1.0)
    assert work.report() == (0, 0, 2)
    assert computed_s < 5.0
    assert work.advance(10.0, 0.0) == 0.0
    assert work.until_report(1.0) == pytest.approx(50.0 - (30.0 - computed_s), abs=0.1)
    assert work.advance(60.0, 0.0) == 0.0
    assert work.report() == (2, 0, 0), "the tools have replied, and nothing was decoded since"
    assert tokens_of(work) == 20


def test_waits_take_their_time_at_any_rate_and_decoding_does_not():
    busy_s = shard(calling(100, 0.001, 100)).until_over(1.0)
    waiting = shard(calling(100, 40.0, 100))
    assert waiting.until_over(1.0) == pytest.approx(busy_s + 40.0, rel=0.01)
    assert waiting.until_over(0.5) == pytest.approx(2 * busy_s + 40.0, rel=0.01)


def test_looking_ahead_changes_nothing():
    work = shard(calling(30, 2.0, 50), Unfinished(80, -100.0))
    before = (work.report(), work.sequences(), work.sub_stage)
    work.until_report(1.0)
    work.until_over(0.3)
    assert (work.report(), work.sequences(), work.sub_stage) == before


@settings(max_examples=examples(60), deadline=None)
@given(
    lengths=st.lists(st.integers(1, 300), min_size=1, max_size=20),
    slots=st.integers(1, 12),
    parts=st.lists(st.tuples(st.floats(0.0, 0.8), st.sampled_from([0.0, 0.4, 1.0])), max_size=5),
    keeps_slots=st.booleans(),
    seed=st.integers(0, 99),
)
def test_no_trajectory_and_no_token_is_lost_by_pauses_and_moves(lengths, slots, parts, keeps_slots, seed):
    turns = ToolUse(mean_calls=1.5, wait_s=3.0).turns_of(lengths, np.random.default_rng(seed))
    assert [first + sum(turn.tokens for turn in later) for first, later in turns] == lengths
    source = shard(*(Unfinished(a, -50.0, b) for a, b in turns), slots=slots, keeps_slots=keeps_slots)
    target = shard(Unfinished(9, -50.0), calling(3, 5.0, 3), slots=slots, keeps_slots=keeps_slots)
    for part, rate in parts:
        before, count = tokens_of(source) + tokens_of(target), len(source.sequences()) + len(target.sequences())
        target.give(source.take(), 0.5)
        assert source.is_over
        assert (tokens_of(target), len(target.sequences())) == (pytest.approx(before), count)
        target.advance(part * target.until_over(1.0), rate)
        assert tokens_of(target) <= before + 1e-6
        source, target = target, source
    total_s = source.until_over(1.0)
    source.advance(total_s + 1e-3, 1.0)
    assert source.is_over


def test_reports_come_when_the_sub_stage_changes_and_not_with_every_reply():
    turns = ToolUse(mean_calls=2.0, wait_s=1.0).turns_of(range(20, 220), np.random.default_rng(0))
    work = shard(*(Unfinished(a, -50.0, b) for a, b in turns), slots=64)
    num_reports = 0
    while not work.is_over:
        work.advance(work.until_report(1.0), 1.0)
        num_reports += 1
    assert 5 <= num_reports <= 40


def test_impossible_tools_are_refused():
    with pytest.raises(UserError, match="wait_s=-1"):
        ToolUse(wait_s=-1.0)


def test_a_paused_shard_knows_when_it_has_something_to_compute_again():
    work = shard(calling(10, 50.0, 10), calling(10, 80.0, 10))
    assert work.idle_s == 0.0
    work.advance(work.until_report(1.0), 1.0)  # prefilled
    work.advance(work.until_report(1.0), 1.0)
    assert work.report()[0] == 0
    idle_s = work.idle_s
    assert 40.0 < idle_s <= 50.0
    work.advance(idle_s - 1.0, 0.0)
    assert work.idle_s == pytest.approx(1.0)
    work.advance(1.0, 0.0)
    assert (work.idle_s, work.report()) == (0.0, (1, 0, 1))


def test_devices_go_to_others_while_tools_work():
    """Whole devices only: what is gained is gained in the waits."""
    nothing_helps = SharingTable.of(
        [SharingEntry(sub_stage_a="x", sub_stage_b="y", device_fraction=0.5, slowdown_a=1.0, slowdown_b=1.0)]
    )
    workload = crowd(
        [GSM8K_06B] * 2, num_gpus=4, num_steps=3, sequences_per_device=16, tools=ToolUse(mean_calls=2.0, wait_s=30.0)
    )
    seen = []
    shared = simulate(
        workload,
        make_policy("jigsaw", sharing=nothing_helps),
        observer=lambda event, actions: seen.append(event),
        checks=True,
    )
    yielded = [event for event in seen if isinstance(event, StagePaused) and event.is_waiting]
    replies = [event for event in seen if isinstance(event, ReplyArrived)]
    assert yielded
    assert replies
    assert len(replies) <= len(yielded)
    assert [one.steps for one in shared.pipelines] == [3, 3]
    in_turn = simulate(workload, make_policy("colocated"))
    assert shared.hours < 0.7 * in_turn.hours


def test_waiting_is_not_computing_in_what_is_reported_and_what_is_counted():
    workload = crowd(
        [GSM8K_06B], num_gpus=4, num_steps=1, sequences_per_device=8, tools=ToolUse(mean_calls=3.0, wait_s=100.0)
    )
    ends = []
    result = simulate(
        workload, make_policy("colocated"), observer=lambda event, _: ends.append(event), spans_until_s=1e9
    )
    rollout = next(span for span in result.spans if span.stage is Stage.GENERATE)
    end = next(event for event in ends if isinstance(event, StageFinished))
    assert rollout.end_s - rollout.begin_s > 100.0
    assert end.seconds < 0.2 * (rollout.end_s - rollout.begin_s)
    assert result.utilization["train"] < 0.8


def test_device_fractions_stay_within_a_device_while_an_order_that_waits_is_paused():
    """Another order is given more only after `StagePaused`."""
    workload = crowd(
        [GSM8K_06B] * 3, num_gpus=8, num_steps=3, sequences_per_device=64, tools=ToolUse(mean_calls=2.0, wait_s=20.0)
    )
    assert [one.steps for one in simulate(workload, make_policy("jigsaw")).pipelines] == [3, 3, 3]


@pytest.mark.slow
def test_with_tool_waits_sub_stages_gain_more_over_whole_devices_and_over_split_ones():
    """Three pipelines on two devices: alone on all of them in turn, on one each in turn, or beside each other."""

    def gains(tools: ToolUse | None) -> tuple[float, float]:
        def speed(policy: str, num_parts: int = 1) -> float:
            workload = crowd(
                [GSM8K_06B] * 3, num_gpus=8, num_steps=3, sequences_per_device=32, num_parts=num_parts, tools=tools
            )
            result = simulate(workload, make_policy(policy), checks=True)
            assert [one.steps for one in result.pipelines] == [3, 3, 3]
            assert result.tokens_per_s is not None
            return result.tokens_per_s

        return speed("jigsaw") / speed("colocated"), speed("jigsaw") / speed("colocated", num_parts=2)

    over_whole, over_split = gains(ToolUse(mean_calls=2.0, wait_s=20.0))
    assert over_whole > 1.6
    assert over_split > 1.2
    assert (over_whole, over_split) > gains(None)
