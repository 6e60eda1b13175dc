"""A reward written for TRL's GRPOTrainer gets what that passes, for each kind of dataset."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from rlmux.rl.batch_metrics import batch_metrics
from rlmux.rl.config import TrainingConfig
from rlmux.rl.types import FinishedTurn, TrajectoryRequest
from rlmux.rl.user_code.pipeline_env import PipelineEnv
from rlmux.rl.user_code.reward_preflight import complaint_about
from rlmux.rl.vocabulary import CharVocabulary

MakeConfig = Callable[..., TrainingConfig]
Finish = Callable[..., FinishedTurn]
MODULE = "trl_rewards"

CONVERSATIONAL = """
    def score(completions, **kwargs):
        return [1.0 if completion[0]["content"] == "b" else 0.0 for completion in completions]
"""


@pytest.fixture
def rewarded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make_config: MakeConfig
) -> Iterator[Callable[..., TrainingConfig]]:
    """Config of a file task with these rows and the reward `score` of this source."""
    monkeypatch.syspath_prepend(tmp_path)

    def make(source: str, *rows: dict[str, Any]) -> TrainingConfig:
        (tmp_path / f"{MODULE}.py").write_text(dedent(source))
        path = tmp_path / "rows.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return make_config("file", path=str(path), reward=f"{MODULE}:score")

    yield make
    sys.modules.pop(MODULE, None)


def rewards(config: TrainingConfig, finish: Finish, *said: str, step: int = 1) -> list[float]:
    """Rewards of a step of which each sample says one of these."""
    vocabulary = CharVocabulary()
    env = PipelineEnv(config)
    requests = env.begin_step(step)
    eos = (vocabulary.eos_token,)
    env.on_turns([finish(each, (vocabulary.encode(said[each.id.sample]) + eos, True)) for each in requests])
    return [trajectory.reward for trajectory in env.finish_step(step).trajectories]


def test_a_conversational_row_gives_completions_as_messages(rewarded, finish: Finish) -> None:
    config = rewarded(CONVERSATIONAL, {"prompt": [{"role": "user", "content": "a?"}], "answer": "b"})
    assert rewards(config, finish, "b", "c") == [1.0, 0.0] * 3


def test_such_a_reward_passes_the_check_before_a_run(rewarded) -> None:
    config = rewarded(CONVERSATIONAL, {"prompt": [{"role": "user", "content": "a?"}], "answer": "b"})
    assert complaint_about(config) is None


def test_a_row_of_text_gives_texts(rewarded, finish: Finish) -> None:
    source = """
        def score(prompts, completions, **kwargs):
            assert prompts == ["a?", "a?"]
            return [float(completion == "b") for completion in completions]
    """
    assert rewards(rewarded(source, {"prompt": "a?", "answer": "b"}), finish, "b", "c") == [1.0, 0.0] * 3


def test_prompts_ids_columns_and_the_trainers_state_are_those_of_trl(rewarded, finish: Finish) -> None:
    source = """
        def score(prompts, completions, completion_ids, trainer_state, level, **kwargs):
            assert prompts == [[{"role": "user", "content": "a?"}]] * 2
            assert completions == [[{"role": "assistant", "content": text}] for text in ("b", "cc")]
            assert [len(ids) for ids in completion_ids] == [2, 3], "with the token that stopped it"
            assert (trainer_state.global_step, trainer_state.max_steps) == (1, 100)
            assert level == [7, 7]
            assert not {"prompt", "completion"} & set(kwargs)
            return [1.0, 2.0]
    """
    row = {"prompt": [{"role": "user", "content": "a?"}], "answer": "b", "level": 7, "completion": "unused"}
    assert rewards(rewarded(source, row), finish, "b", "cc", step=2) == [1.0, 2.0] * 3


def test_what_a_row_begins_for_the_assistant_is_part_of_its_first_message(rewarded, finish: Finish) -> None:
    source = """
        def score(prompts, completions, **kwargs):
            assert prompts[0] == [{"role": "user", "content": "a?"}]
            return [float(completion[0]["content"] == "I say b") for completion in completions]
    """
    messages = [{"role": "user", "content": "a?"}, {"role": "assistant", "content": "I say "}]
    assert rewards(rewarded(source, {"prompt": messages, "answer": "b"}), finish, "b", "c") == [1.0, 0.0] * 3


def test_one_rewards_changes_to_its_messages_do_not_reach_the_next_group(rewarded, finish: Finish) -> None:
    source = """
        def score(prompts, completions, **kwargs):
            assert prompts[0][0]["content"] == "a?"
            prompts[0][0]["content"] = completions[0][0]["content"] = "changed"
            return [1.0, 2.0]
    """
    config = rewarded(source, {"prompt": [{"role": "user", "content": "a?"}], "answer": "b"})
    assert rewards(config, finish, "b", "c") == [1.0, 2.0] * 3


def test_what_a_reward_logs_stands_in_the_steps_metrics(rewarded, finish: Finish) -> None:
    source = """
        def score(completions, log_metric, log_extra, **kwargs):
            lengths = [len(completion) for completion in completions]
            log_metric("longest", max(lengths))
            log_extra("length", lengths)
            log_extra("said", completions)
            return [float(length) for length in lengths]
    """
    config = rewarded(source, {"prompt": "a?", "answer": "b"})
    assert complaint_about(config) is None
    env = PipelineEnv(config)
    said = ("b", "ccc")
    env.on_turns([finish(each, (CharVocabulary().encode(said[each.id.sample]), True)) for each in env.begin_step(1)])
    assert batch_metrics(env.finish_step(1)).logged == {"reward/length": 2.0, "reward/longest": 3.0}


@pytest.mark.parametrize("logged", ['"name", "text"', '"name", float("nan")'])
def test_a_logged_metric_that_is_no_number_is_named(rewarded, logged: str) -> None:
    source = f"""
        def score(completions, log_metric, **kwargs):
            log_metric({logged})
            return [0.0 for _ in completions]
    """
    found = complaint_about(rewarded(source, {"prompt": "a?", "answer": "b"})) or ""
    assert "reward trl_rewards:score logged" in found
    assert "accepted: a finite number" in found


def test_a_completion_without_a_reward_is_in_no_mean_and_has_no_advantage(rewarded, finish: Finish) -> None:
    source = """
        def score(completions, **columns):
            return [{"a": 1.0, "b": 0.5}.get(text) for text in completions]
    """
    config = rewarded(source, {"prompt": "a?", "answer": "b"})
    config = replace(config, algorithm=replace(config.algorithm, name="dr-grpo", prompts_per_step=1, group_size=3))
    (env, requests), eos = begun(config), (CharVocabulary.eos_token,)
    env.on_turns([finish(each, (CharVocabulary().encode("abx"[each.id.sample]) + eos, True)) for each in requests])
    batch = env.finish_step(1)
    assert batch.advantages == (0.25, -0.25, 0.0)
    assert [each.is_judged for each in batch.trajectories] == [True, True, False]
    metrics = batch_metrics(batch)
    assert (metrics.num_trajectories, metrics.reward_mean, metrics.reward_std) == (3, 0.75, 0.25)


@pytest.mark.parametrize("signature", ["solution_str, ground_truth", "completions, answer, gold"])
def test_an_answer_reaches_a_reward_as_its_row_has_it(rewarded, finish: Finish, signature: str) -> None:
    source = f"""
        def score({signature}):
            if "completions" == "{signature[:11]}":
                assert answer == gold
                return [float(each == ["4", 4.5]) for each in answer]
            return float(ground_truth == ["4", 4.5])
    """
    config = rewarded(source, {"prompt": "a?", "gold": ["4", 4.5]})
    config = replace(config, task=replace(config.task, answer_key="gold"))
    assert rewards(config, finish, "b", "c") == [1.0] * 6


@pytest.mark.parametrize("said", ["axx", "xxx"])
def test_a_group_with_nothing_to_compare_teaches_nothing(rewarded, finish: Finish, said: str) -> None:
    source = """
        def score(completions, **columns):
            return [{"a": 1.0}.get(text) for text in completions]
    """
    config = rewarded(source, {"prompt": "a?", "answer": "a"})
    config = replace(config, algorithm=replace(config.algorithm, name="rloo", prompts_per_step=1, group_size=3))
    (env, requests), eos = begun(config), (CharVocabulary.eos_token,)
    env.on_turns([finish(each, (CharVocabulary().encode(said[each.id.sample]) + eos, True)) for each in requests])
    batch = env.finish_step(1)
    assert batch.advantages == (0.0, 0.0, 0.0)
    assert batch_metrics(batch).reward_mean == (1.0 if "a" in said else 0.0)


def begun(config: TrainingConfig) -> tuple[PipelineEnv, Sequence[TrajectoryRequest]]:
    """An env in its first step, and that step's requests."""
    env = PipelineEnv(config)
    return env, env.begin_step(1)
