"""Short rounds, long rounds and the queue between them: every prompt is trained on once."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.examples import examples

from rlmux.core.errors import CheckpointError, UserError
from rlmux.rl.config import AlgorithmConfig, RolloutConfig, TailBatchingConfig, TaskConfig, TrainingConfig
from rlmux.rl.prompts.prompt_rounds import PromptQueue, Round, more_than
from rlmux.rl.user_code.pipeline_env import PipelineEnv


def config(
    *, per_step: int = 8, group_size: int = 4, steps: int = 100, task: str = "sort", **batching
) -> TrainingConfig:
    return TrainingConfig(
        name="p",
        num_steps=steps,
        task=TaskConfig(name=task),
        algorithm=AlgorithmConfig(prompts_per_step=per_step, group_size=group_size),
        rollout=RolloutConfig(tail_batching=TailBatchingConfig(**batching)),
    )


def play(one: TrainingConfig, lose, steps: int | None = None) -> tuple[list[Round], list[list[int]]]:
    """All rounds and what each trained on; `lose(round)` says which places lose a short one."""
    queue, rounds, trained = PromptQueue(), [], []
    for step in range(1, (steps or one.num_steps) + 1):
        round = queue.round(step, one)
        wanted = one.algorithm.prompts_per_step
        lost = () if round.is_long else lose(round)
        places = [place for place in range(len(round.prompts)) if place not in lost][:wanted]
        queue = PromptQueue.of_fields(json.loads(json.dumps(queue.after(round, places).fields())), "here")
        rounds.append(round)
        trained.append([round.prompts[place] for place in places])
    return rounds, trained


def test_the_fifth_round_is_the_first_long_one_and_made_of_what_lost_before():
    rounds, _ = play(config(), lose=lambda round: (0, 1), steps=10)
    assert [round.is_long for round in rounds] == 2 * ([False] * 4 + [True])
    assert [(len(round.prompts), round.group_size) for round in rounds[:5]] == [(10, 5)] * 4 + [(8, 4)]
    assert rounds[4].prompts == (0, 1, 10, 11, 20, 21, 30, 31)


@settings(max_examples=examples(100), deadline=None)
@given(st.randoms(use_true_random=False), st.integers(1, 9), st.integers(1, 12), st.floats(1.0, 3.0))
def test_a_run_trains_on_every_prompt_of_a_plain_one_exactly_once(draw, per_step, steps, factor):
    one = config(per_step=per_step, steps=steps, prompts=factor, samples=1.5)
    _, trained = play(one, lose=lambda round: draw.sample(range(len(round.prompts)), len(round.prompts) - per_step))
    assert all(len(step) == per_step for step in trained)
    assert sorted(prompt for step in trained for prompt in step) == list(range(steps * per_step))


@pytest.mark.parametrize(("count", "factor", "most"), [(8, 1.25, 10), (10, 1.1, 11), (3, 1.25, 4), (4, 1.0, 4)])
def test_the_product_is_rounded_up_but_for_its_rounding_error(count, factor, most):
    assert more_than(count, factor) == most


def test_a_checkpoint_without_a_queue_is_refused_by_name():
    with pytest.raises(CheckpointError, match=r"step_3 has no queue of prompts"):
        PromptQueue.of_fields(None, "step_3")


def test_a_task_of_several_turns_is_refused_with_one_line():
    with pytest.raises(UserError, match=r"rollout.tail_batching: does not go with task 'calculator', .*accepted: "):
        PipelineEnv(config(task="calculator"))
