"""Each rival against its own rules: bounds, limits that equal another mode, and the real mode's plan."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from rlmux.core.errors import UserError
from rlmux.core.model import Stage
from rlmux.papers import rivals
from rlmux.papers.rivals.areal import three_to_one
from rlmux.papers.rivals.streamed import RECALL, _by_rank, ranked, searched_split
from rlmux.papers.rivals.synchronous import Rounds
from rlmux.papers.rivals.trainer import VirtualTrainer
from rlmux.papers.rivals.virtual_device import VirtualEngine, answers_of, by_index
from rlmux.policies import make_policy
from rlmux.rl.config import AlgorithmConfig, RolloutConfig, TailBatchingConfig, TaskConfig, TrainingConfig
from rlmux.rl.prompts.prompt_rounds import PromptQueue
from rlmux.sim.models.lengths import length_distribution
from rlmux.sim.simulator import simulate
from rlmux.sim.workloads.substage_pairs import GSM8K_4B, HOMOGENEOUS, MATH_06B, MATH_4B, crowd

NUM_DEVICES = 4


def make_world(recorded=GSM8K_4B, *, num_sequences=512, seed=0, **changes):
    world = crowd((recorded,), num_gpus=4 * NUM_DEVICES, seed=seed).arrivals[0].world
    return replace(world, num_sequences=num_sequences, **changes)


def play(system, world, *, num_steps=3, num_devices=NUM_DEVICES, **options):
    return rivals.play(system, world, num_devices=num_devices, num_steps=num_steps, **options)


@pytest.mark.parametrize("system", rivals.RIVALS)
def test_a_run_is_a_function_of_the_world_and_every_answer_is_trained_on(system):
    world = make_world()
    run = play(system, world)
    assert run == play(system, world)
    assert run != play(system, replace(world, seed=1))
    assert list(run.step_ends_s) == sorted(run.step_ends_s)
    assert len(run.step_ends_s) == 3
    assert 0.0 < run.bubble_share < 1.0
    assert run.tokens_per_s > 0.0
    if system != "rollpacker":
        assert run.trained_tokens == pytest.approx(sum(world.tokens(step) for step in (1, 2, 3)), abs=3)
        assert run.decoded_tokens == sum(sum(world.lengths(step)) for step in (1, 2, 3))


@pytest.mark.parametrize(
    ("system", "options", "named"),
    [("deepspeed", {}, "verl"), ("areal", {"num_devices": 1}, "devices from 2"), ("areal", {"eta": -1}, "0 or more")],
)
def test_a_bad_request_names_what_is_accepted(system, options, named):
    with pytest.raises(UserError, match=named):
        play(system, make_world(), **options)


# --- verl


@pytest.mark.parametrize("recorded", [GSM8K_4B, MATH_06B])
def test_verl_takes_the_solo_seconds_of_the_simulators_world(recorded):
    world = make_world(recorded, num_sequences=2048)
    # Both round a prefill's tokens to iterations, one from a product and one from a sum.
    ends = play("verl", world).step_ends_s
    assert ends == pytest.approx(np.cumsum([world.solo_s(step) for step in (1, 2, 3)]), rel=1e-4)


def test_verl_alone_is_the_simulators_colocated_pipeline():
    workload = crowd((MATH_4B,), num_gpus=16, num_steps=3)
    run = play("verl", workload.arrivals[0].world)
    result = simulate(workload, make_policy("colocated"))
    assert run.tokens_per_s == pytest.approx(
        result.tokens_per_s, rel=0.02
    )  # the simulator publishes beside the rollout


# --- StreamRL


@pytest.mark.parametrize("recorded", HOMOGENEOUS)
@pytest.mark.parametrize(("num_devices", "waves"), [(3, 2), (10, 2), (12, 1)])
def test_dispatch_by_rank_never_ends_later_than_dealing_by_index(recorded, num_devices, waves):
    world = make_world(recorded, num_sequences=256 * waves * num_devices)
    answers = answers_of(world, 1)

    def rollout_s(by_device):
        engine = VirtualEngine(world, num_devices, has_one_queue=False)
        engine.deal(by_device, 0.0)
        return max(one.end_s for one in engine.run())

    assert rollout_s(_by_rank(world, RECALL)(1, answers, num_devices)) <= rollout_s(by_index(answers, num_devices))


@pytest.mark.parametrize("recall", [0.5, RECALL, 1.0])
def test_the_ranker_finds_the_part_of_the_longest_fifth_that_it_should(recall):
    answers = answers_of(make_world(num_sequences=2048), 1)
    num_long = round(0.2 * len(answers))
    longest = sorted(answers, key=lambda one: (-one.length, one.number))[:num_long]
    ranks = ranked(answers, recall, np.random.default_rng(0))
    assert sorted(ranks, key=lambda one: one.number) == answers
    found = len(set(longest) & set(ranks[:num_long])) / num_long
    assert recall <= found <= recall + 0.02


@pytest.mark.parametrize("recorded", [GSM8K_4B, MATH_06B])
def test_the_searched_division_has_the_shortest_longer_phase(recorded):
    world = make_world(recorded)
    profile = replace(world, seed=world.seed + 7919)
    by_division = {
        (x, NUM_DEVICES - x): max(
            replace(profile, num_rollout_devices=x).rollout_s(1),
            replace(profile, num_train_devices=NUM_DEVICES - x).train_s(1),
        )
        for x in range(1, NUM_DEVICES)
    }
    assert searched_split(world, NUM_DEVICES) == min(by_division, key=by_division.get)


# --- AsyncFlow


@pytest.mark.parametrize(("fraction", "is_async"), [(0.0, False), (1.0, True)])
def test_fractions_0_and_1_equal_the_whole_modes_but_for_the_exposed_copy(fraction, is_async):
    world, split = make_world(), (2, 2)
    flow = play("asyncflow", world, split=split, fraction=fraction)
    whole = play("streamrl", world, split=split, is_async=is_async, dispatches=False)
    assert flow.staleness_mean == whole.staleness_mean
    assert flow.step_ends_s[0] == whole.step_ends_s[0]
    assert flow.step_ends_s == pytest.approx(whole.step_ends_s, abs=3 * 0.05)


@pytest.mark.parametrize("recorded", [GSM8K_4B, MATH_4B, MATH_06B])
@pytest.mark.parametrize("split", [(1, 3), (2, 2), (3, 1)])
def test_one_step_off_gains_at_most_both_phases_over_the_longer(recorded, split):
    world = make_world(recorded)
    sync_s, async_s = (play("asyncflow", world, split=split, fraction=f, num_steps=6).seconds for f in (0.0, 1.0))
    trainer = VirtualTrainer(world, split[1])
    rollouts = [replace(world, num_rollout_devices=split[0]).rollout_s(step) for step in range(1, 7)]
    trains = [trainer.train_s(world.tokens(step)) + trainer.publish_s + 0.05 for step in range(1, 7)]
    assert sync_s <= sum(rollouts) + sum(trains)
    assert 1.0 <= sync_s / async_s <= (sum(rollouts) + sum(trains)) / max(sum(rollouts), sum(trains) - trains[0])


def test_half_a_step_is_sampled_one_version_earlier():
    world = make_world()
    early = play("asyncflow", world, fraction=0.5, num_steps=4)
    assert early.staleness_mean == pytest.approx(0.5 * 3 / 4)  # the first step has no earlier version
    assert early.staleness_max == 1


# --- AReaL


@pytest.mark.parametrize("recorded", [GSM8K_4B, MATH_06B])
@pytest.mark.parametrize("split", [(1, 3), (3, 1)])
def test_eta_0_equals_the_synchronous_pipeline_on_the_same_division(recorded, split):
    world = make_world(recorded, num_sequences=1024)
    sync = play("verl", world, split=split, has_one_queue=True)
    areal = play("areal", world, split=split, eta=0)
    assert replace(areal, system="verl", bubble_share=0.0) == replace(sync, bubble_share=0.0)


@pytest.mark.parametrize("recorded", [GSM8K_4B, MATH_06B])
def test_throughput_does_not_fall_with_eta_where_slots_are_free(recorded):
    world = make_world(recorded, num_sequences=256)
    rates = [play("areal", world, eta=eta, num_steps=12).tokens_per_s for eta in (0, 1, 2, 4)]
    assert all(more >= less * (1.0 - 0.01) for less, more in pairwise(rates))
    assert rates[1] > 1.1 * rates[0]


def test_answers_under_interrupts_have_several_versions_and_drained_ones_have_one():
    world = make_world(MATH_06B, num_sequences=256)
    interrupted = play("areal", world, eta=4, num_steps=8)
    drained = play("laminar", world, eta=4, num_steps=8)
    assert interrupted.num_mixed > 0
    assert drained.num_mixed == 0
    assert interrupted.trained_tokens == drained.trained_tokens


def test_interrupts_cost_the_seated_contexts_again():
    """An engine by hand: two answers, interrupted halfway."""
    world = make_world(num_sequences=2)
    plain, interrupted = (VirtualEngine(world, 1, has_one_queue=True) for _ in range(2))
    answers = answers_of(world, 1)
    for engine in (plain, interrupted):
        engine.submit(answers, 0.0)
    interrupted.devices[0].load(1, interrupted.next_end_s / 2)
    ended = interrupted.run()
    assert {(one.first_version, one.last_version) for one in ended} == {(0, 1)}
    assert ended[-1].end_s > plain.run()[-1].end_s
    assert interrupted.decoded_tokens == plain.decoded_tokens == sum(one.length for one in answers)


@pytest.mark.parametrize(("num_devices", "split"), [(2, (1, 1)), (4, (3, 1)), (8, (6, 2))])
def test_three_of_four_devices_roll_out(num_devices, split):
    assert three_to_one(num_devices) == split


# --- RollPacker


def test_each_fifth_round_is_long_and_every_prompt_is_trained_on_once():
    rounds, kinds, trained = Rounds(10, 8, 4, 1.25, 1.25), [], []
    for _ in range(10):
        one = rounds.next()
        kinds.append(one.is_long)
        trained += one.prompts[:8]
        assert one.group_size == (4 if one.is_long else 5)
        rounds.lose(() if one.is_long else one.prompts[8:])
    assert kinds == [False, False, False, False, True] * 2
    assert sorted(trained) == list(range(80))


def test_rounds_are_those_of_the_real_mode():
    rounds, queue = Rounds(13, 8, 4, 1.25, 1.25), PromptQueue()
    config = TrainingConfig(
        name="p",
        num_steps=13,
        task=TaskConfig(name="sort"),
        algorithm=AlgorithmConfig(prompts_per_step=8, group_size=4),
        rollout=RolloutConfig(tail_batching=TailBatchingConfig()),
    )
    for step in range(1, 14):
        ours, real = rounds.next(), queue.round(step, config)
        assert (ours.prompts, ours.group_size, ours.is_long) == (real.prompts, real.group_size, real.is_long)
        done = set(range(len(real.prompts))) - ({1, 5} if not real.is_long else set())
        queue = queue.after(real, done)
        rounds.lose([] if ours.is_long else [ours.prompts[1], ours.prompts[5]])


def test_factors_of_1_are_verl_on_the_same_answers():
    world = make_world()
    run = play("rollpacker", world, prompts=1.0, samples=1.0)
    prompt_tokens = 3 * 512 * length_distribution(world.lengths_of).prompt_tokens
    assert run.decoded_tokens == pytest.approx(run.trained_tokens - prompt_tokens, abs=3)
    assert run.mean_step_s == pytest.approx(play("verl", world).mean_step_s, rel=0.15)


def test_short_rounds_end_sooner_and_decode_more_than_they_train_on():
    world = make_world(num_sequences=64)
    plain = play("rollpacker", world, prompts=1.0, samples=1.0, num_steps=10)
    packed = play("rollpacker", world, num_steps=10)
    assert packed.mean_step_s < plain.mean_step_s
    assert packed.decoded_tokens / packed.trained_tokens > plain.decoded_tokens / plain.trained_tokens


def test_publishing_is_charged_as_the_simulator_does():
    world = make_world()
    assert VirtualTrainer(world, 4).publish_s == world.stage_s(Stage.PUBLISH, 1, 4)


def test_a_trainer_that_never_offloads_pays_for_tokens_alone():
    world = make_world()
    kept = replace(world, fixed_part=0.0)
    trainer, kept_trainer = VirtualTrainer(world, 4), VirtualTrainer(kept, 4)
    assert kept_trainer.fixed_s == 0.0
    assert kept.train_s(1) == pytest.approx(world.train_s(1) - trainer.fixed_s)
    assert kept.stage_s(Stage.PUBLISH, 1, 4) == world.stage_s(Stage.PUBLISH, 1, 4)
