"""Rows of a file with an environment class of the user's."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from rlmux.core.errors import PipelineError, UserError
from rlmux.rl.config import OutcomesConfig, TrainingConfig
from rlmux.rl.episode import parts_of
from rlmux.rl.types import FinishedTurn
from rlmux.rl.user_code.pipeline_env import PipelineEnv
from rlmux.rl.user_code.reward_preflight import complaint_about
from rlmux.rl.vocabulary import CharVocabulary
from rlmux.runtime.checks.preflight import complaints_about

MakeConfig = Callable[..., TrainingConfig]
Finish = Callable[..., FinishedTurn]
MODULE = "user_environments"
GAME = """
    class Game:
        def __init__(self, row):
            self.row = row

        def reply(self, turn):
            if turn == self.row["answer"]:
                return None
            return "too low" if turn < self.row["answer"] else "too high"

    def score(solution_str, ground_truth, data_source, extra_info):
        return float(solution_str.endswith(ground_truth))
"""


@pytest.fixture
def config_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make_config: MakeConfig
) -> Iterator[Callable[..., TrainingConfig]]:
    """Config of a file task with the class `Game` and the reward `score` of this source."""
    monkeypatch.syspath_prepend(tmp_path)

    def make(source: str = GAME, **changes: Any) -> TrainingConfig:
        (tmp_path / f"{MODULE}.py").write_text(dedent(source))
        path = tmp_path / "rows.jsonl"
        path.write_text(json.dumps({"prompt": "guess:", "answer": "7"}) + "\n")
        task = {"path": str(path), "environment": f"{MODULE}:Game", "reward": f"{MODULE}:score", **changes}
        return make_config("file", **task)

    yield make
    sys.modules.pop(MODULE, None)


def tokens(text: str) -> tuple[int, ...]:
    return (*CharVocabulary().encode(text), CharVocabulary.eos_token)


def test_the_users_environment_answers_each_turn_until_it_is_over(config_of, finish: Finish) -> None:
    env = PipelineEnv(config_of())
    assert not env.is_single_turn
    request = env.begin_step(1)[0]
    (reply,), released = env.on_turns([finish(request, (tokens("3"), True))])
    assert (CharVocabulary().decode(reply.tokens), released) == ("too low", [])
    replies, released = env.on_turns([finish(request, (tokens("3"), True), (reply.tokens, False), (tokens("7"), True))])
    assert (replies, released) == ([], [request.id])


def test_each_trajectory_has_a_row_of_its_own(config_of, finish: Finish) -> None:
    source = GAME.replace(
        "self.row = row", 'self.row = row; row["seen"] = row.get("seen", 0) + 1; assert row["seen"] == 1'
    )
    env = PipelineEnv(config_of(source))
    replies, _ = env.on_turns([finish(request, (tokens("3"), True)) for request in env.begin_step(1)])
    assert len(replies) == 6


def test_a_sound_environment_passes_the_check_before_a_run(config_of) -> None:
    assert complaint_about(config_of()) is None


@pytest.mark.parametrize(
    ("before", "after", "complaint"),
    [
        ("class Game", "class Other", "task.environment: 'user_environments' has no class 'Game'; it has: Other"),
        ("self, row", "self", "is made from (); accepted: a class made from one argument, the row as a dict"),
        ("def reply", "def answer", "has no reply; accepted: a class with reply(turn)"),
        ("self, turn", "self", "on a sample raised TypeError"),
        ("return None", "return 7", "on a sample replied int 7; accepted: a text, or None when over"),
        ("return None", "raise KeyError(turn)", "environment user_environments:Game on a sample raised KeyError: '7'"),
    ],
)
def test_an_environment_that_cannot_work_is_refused(config_of, before: str, after: str, complaint: str) -> None:
    config = config_of(GAME.replace(before, after))
    found = complaint_about(config) or ""
    assert found.startswith("task.environment: ")
    assert complaint in found


def test_an_environment_without_a_reward_is_refused(config_of) -> None:
    with pytest.raises(UserError, match=r"^task\.environment: needs task\.reward"):
        PipelineEnv(config_of(reward=None))


@pytest.mark.parametrize(
    ("after", "complaint"),
    [
        ("import threading; threading.Event().wait()", "did not return within 0.2 s"),
        ("import os; os._exit(3)", "exit code 3"),
    ],
)
def test_one_that_hangs_or_ends_its_process_is_named(config_of, tmp_path: Path, after: str, complaint: str) -> None:
    limit_s = 0.2 if "0.2 s" in complaint else 60.0  # short only for what never returns
    config = config_of(GAME.replace("return None", after), reward_timeout_s=limit_s)
    (found,) = complaints_about([config], tmp_path)
    assert found is not None
    assert found.startswith(f"task.environment: environment {MODULE}:Game on a sample ")
    assert complaint in found


def test_an_empty_reply_is_a_reply_and_the_model_goes_on(config_of, finish: Finish) -> None:
    source = GAME.replace('return "too low" if turn < self.row["answer"] else "too high"', 'return ""')
    source += "        assert solution_str == '347', solution_str\n"
    env = PipelineEnv(config_of(source))
    request = env.begin_step(1)[0]
    assert env.on_turns([finish(request, (tokens("3"), True))])[0][0].tokens == ()
    replies, released = env.on_turns([finish(request, (tokens("3") + tokens("4"), True))])
    assert ([reply.tokens for reply in replies], released) == ([()], []), "each turn is told by itself"
    assert env.on_turns([finish(request, (tokens("3") + tokens("4") + tokens("7"), True))]) == ([], [request.id])


def test_a_reply_without_room_ends_its_trajectory_by_length(config_of, finish: Finish) -> None:
    env = PipelineEnv(config_of(GAME.replace('"too low"', '"l" * 40')))
    requests = env.begin_step(1)
    turns = [finish(request, (tokens("3"), True)) for request in requests]
    assert env.on_turns(turns) == ([], [request.id for request in requests])
    assert {each.stop_reason for each in env.finish_step(1).trajectories} == {"length"}


@pytest.mark.parametrize(
    ("reply", "complaint"),
    [
        ("5", "replied int 5; accepted: a text, or None when over"),
        ("b'ok'", "replied bytes b'ok'; accepted: a text, or None when over"),
        (
            "'half \\ud83d a pair'",
            r"replied str 'half \ud83d a pair': '\ud83d' in 'half \ud83d a pair' is half of a surrogate pair; "
            "accepted: whole characters",
        ),
        ("'é'", "replied str 'é': the character 'é' in 'é' is not in the built-in vocabulary"),
        ("10 ** 5000", "replied int; accepted"),
    ],
)
def test_a_reply_that_is_no_text_is_named_with_its_place(config_of, finish, reply: str, complaint: str) -> None:
    env = PipelineEnv(ending_with_failures(config_of(GAME.replace('"too low"', reply))))
    with pytest.raises(PipelineError) as caught:
        env.on_turns([finish(env.begin_step(1)[0], (tokens("3"), True))])
    assert str(caught.value).startswith(f"the environment at step 1 prompt 0 sample 0 {complaint}")
    assert "\n" not in str(caught.value)


def ending_with_failures(config: TrainingConfig) -> TrainingConfig:
    return replace(config, task=replace(config.task, outcomes=OutcomesConfig(failed="stop")))


FRAGILE = """
class Game:
    made = []

    def __init__(self, row):
        self.made.append(self)

    def reply(self, turn):
        self.seen = [*getattr(self, "seen", ()), turn]
        if len(self.made) <= FAILURES:
            raise OSError("the sandbox is gone")
        return "again" if len(self.seen) < 3 else None

def score(solution_str, ground_truth, data_source, extra_info):
    return 1.0
"""


def through_one_trajectory(env: PipelineEnv, finish) -> None:
    """Two turns of the first trajectory, and the end of all."""
    first = env.begin_step(1)[0]
    begun = finish(first, (tokens("3"), True))
    (reply,), released = env.on_turns([begun])
    assert released == []
    replies, released = env.on_turns([finish(first, (tokens("3"), True), (reply.tokens, False), (tokens("4"), True))])
    assert [each.id for each in replies] == [first.id]


def test_an_environment_that_fails_is_made_anew_and_gets_all_turns_again(config_of, finish) -> None:
    env = PipelineEnv(config_of(FRAGILE.replace("FAILURES", "2")))
    through_one_trajectory(env, finish)


def test_an_environment_that_fails_too_often_is_masked_and_counted(config_of, finish) -> None:
    env = PipelineEnv(config_of(FRAGILE.replace("FAILURES", "3")))
    first, *others = env.begin_step(1)
    replies, released = env.on_turns([finish(first, (tokens("3"), True))])
    assert (replies, released) == ([], [first.id])
    for request in others:
        env.on_turns([finish(request, (tokens("3"), True), stop_reason="length")])
    batch = env.finish_step(1)
    assert [each.is_judged for each in batch.trajectories] == [False, *[True] * len(others)]
    assert len(batch.trajectories) == 1 + len(others), "each prompt counts as often as it was asked"
    assert batch.advantages[0] == 0.0
    assert batch.logged["outcomes/failed"] == 1
    assert batch.logged["outcomes/retries"] == 2
    assert batch.trajectories[0].outcome.startswith("raised OSError: the sandbox is gone (at ")


def test_environments_that_all_fail_end_the_pipeline_with_the_first_of_them(config_of, finish) -> None:
    env = PipelineEnv(config_of(FRAGILE.replace("FAILURES", "1000")))
    requests = env.begin_step(1)
    env.on_turns([finish(request, (tokens("3"), True)) for request in requests])
    with pytest.raises(PipelineError, match=rf"all {len(requests)} trajectories of step 1 failed, 3 times each .*gone"):
        env.finish_step(1)


def test_a_failure_counts_as_a_reward_of_its_own_where_the_file_says_so(config_of, finish) -> None:
    config = config_of(FRAGILE.replace("FAILURES", "3"))
    config = replace(config, task=replace(config.task, outcomes=OutcomesConfig(failed=-1.0)))
    env = PipelineEnv(config)
    requests = env.begin_step(1)
    env.on_turns([finish(requests[0], (tokens("3"), True))])
    for request in requests[1:]:
        env.on_turns([finish(request, (tokens("3"), True), stop_reason="length")])
    assert [each.reward for each in env.finish_step(1).trajectories] == [-1.0, *[1.0] * (len(requests) - 1)]


def test_parts_of_a_response_are_told_apart_by_their_stop_tokens() -> None:
    ours = (True, True, False, True, True)
    assert parts_of((5, 1, 6, 7, 1), ours, (1,)) == [(True, (5, 1)), (False, (6,)), (True, (7, 1))]
    assert parts_of((5, 1, 7, 1), (True,) * 4, (1,)) == [(True, (5, 1)), (False, ()), (True, (7, 1))]
    assert parts_of((5, 1, 7, 1), (True,) * 4, ()) == [(True, (5, 1, 7, 1))], "a response that no token ends"
    assert parts_of((), (), (1,)) == []
