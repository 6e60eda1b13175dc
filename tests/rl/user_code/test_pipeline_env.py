import asyncio
import pickle
import subprocess
import sys
from collections.abc import Callable
from random import Random

import pytest

from rlmux.core.errors import IllegalTransitionError, PipelineError, UserError
from rlmux.rl.batch_metrics import batch_metrics
from rlmux.rl.config import TrainingConfig
from rlmux.rl.demonstrations import Demonstration, demonstration_batch
from rlmux.rl.tasks import make_task
from rlmux.rl.tasks.calculator import Calculator
from rlmux.rl.types import FinishedTurn, TrainingBatch, TrajectoryId, TrajectoryRequest
from rlmux.rl.user_code.pipeline_env import PipelineEnv
from rlmux.rl.vocabulary import CharVocabulary

MakeConfig = Callable[..., TrainingConfig]
Finish = Callable[..., FinishedTurn]

VOCABULARY = CharVocabulary()
EOS = (VOCABULARY.eos_token,)


def spoken(text: str, *, ends: bool = False) -> tuple[tuple[int, ...], bool]:
    return VOCABULARY.encode(text) + (EOS if ends else ()), True


def heard(text: str) -> tuple[tuple[int, ...], bool]:
    return VOCABULARY.encode(text), False


def answers(config: TrainingConfig, finish: Finish, requests: list[TrajectoryRequest]) -> list[FinishedTurn]:
    """Right answers from even samples, a wrong first symbol from odd ones."""
    task = make_task(config.task, seed=config.seed, vocabulary=VOCABULARY)
    turns = []
    for request in requests:
        step, prompt, sample, _ = request.id
        answer = task.prompt((step - 1) * config.algorithm.prompts_per_step + prompt).answer or ""
        turns.append(finish(request, spoken("z" + answer[1:] if sample % 2 else answer, ends=True)))
    return turns


def test_requests_carry_the_config(make_config: MakeConfig) -> None:
    requests = PipelineEnv(make_config(seed=9)).begin_step(2)
    assert [request.id for request in requests] == [
        TrajectoryId(2, prompt, sample) for prompt in range(3) for sample in range(2)
    ]
    assert requests[0].prompt_tokens == requests[1].prompt_tokens != requests[2].prompt_tokens
    assert {(each.max_new_tokens, each.stop_tokens, each.seed) for each in requests} == {(32, EOS, 9)}


def test_a_batch_is_the_same_whatever_the_order_and_grouping(make_config: MakeConfig, finish: Finish) -> None:
    config = make_config(algorithm={"prompts_per_step": 4, "group_size": 4})
    batches: list[TrainingBatch] = []
    for seed in range(5):
        env = PipelineEnv(config)
        turns = answers(config, finish, env.begin_step(1))
        random = Random(seed)
        random.shuffle(turns)
        while turns:
            num = random.randint(1, 5)
            replies, released = env.on_turns(turns[:num])
            assert not replies
            assert released == sorted(turn.id for turn in turns[:num])
            del turns[:num]
        batches.append(env.finish_step(1))
    assert all(batch == batches[0] for batch in batches)
    assert [each.id for each in batches[0].trajectories] == sorted(each.id for each in batches[0].trajectories)
    assert [each.reward for each in batches[0].trajectories[:4]] == [1.0, 0.8, 1.0, 0.8]
    assert batches[0].advantages[0] > 0 > batches[0].advantages[1]
    assert pickle.loads(pickle.dumps(batches[0])) == batches[0]


def test_a_turn_delivered_twice_counts_once(make_config: MakeConfig, finish: Finish) -> None:
    config = make_config()
    env = PipelineEnv(config)
    requests = env.begin_step(1)
    turns = answers(config, finish, requests)
    env.on_turns(turns[:2])
    again = finish(requests[0], spoken("other", ends=True))
    assert env.on_turns([again, *turns[1:]]) == ([], [turn.id for turn in turns])
    batch = env.finish_step(1)
    assert batch.trajectories[0].tokens == turns[0].tokens
    assert len(batch.trajectories) == 6
    assert env.on_turns(turns[:1]) == ([], [turns[0].id])
    assert env.finish_step(1) == batch


def test_a_host_started_later_lets_go_of_what_was_before(make_config: MakeConfig, finish: Finish) -> None:
    config = make_config()
    late = finish(PipelineEnv(config).begin_step(4)[0], spoken("12", ends=True))
    env = PipelineEnv(config)
    env.begin_step(5)
    assert env.on_turns([late]) == ([], [late.id])
    with pytest.raises(IllegalTransitionError, match="step 6 is not under way"):
        env.on_turns([finish(PipelineEnv(config).begin_step(6)[0], spoken("12", ends=True))])


def test_steps_may_overlap(make_config: MakeConfig, finish: Finish) -> None:
    config = make_config(algorithm={"staleness": 1})
    env = PipelineEnv(config)
    first, second = env.begin_step(1), env.begin_step(2)
    env.on_turns([*answers(config, finish, second), *answers(config, finish, first)[:-1]])
    assert env.is_step_complete(2)
    assert not env.is_step_complete(1)
    assert env.unfinished_requests(1) == first[-1:]
    with pytest.raises(IllegalTransitionError, match="1 trajectories unscored"):
        env.finish_step(1)
    env.on_turns(answers(config, finish, first)[-1:])
    assert (env.finish_step(1).step, env.finish_step(2).step) == (1, 2)


def test_a_step_under_way_begins_again_without_forgetting(make_config: MakeConfig, finish: Finish) -> None:
    config = make_config()
    env = PipelineEnv(config)
    requests = env.begin_step(1)
    env.on_turns(answers(config, finish, requests)[:2])
    assert env.begin_step(1) == requests
    assert env.unfinished_requests(1) == requests[2:]


@pytest.mark.parametrize("order", ["given", "longest"])
def test_a_prompt_that_comes_again_is_expected_to_be_answered_as_before(make_config, finish, order):
    config = make_config(params={"digits": 1}, algorithm={"prompts_per_step": 10}, rollout={"order": order})
    env = PipelineEnv(config)
    first = env.begin_step(1)
    assert {request.expected_tokens for request in first} == {0}
    env.on_turns(answers(config, finish, first))
    env.finish_step(1)
    seen = {request.prompt_tokens for request in first}
    again = [request for request in env.begin_step(2) if request.prompt_tokens in seen]
    assert again
    assert {request.expected_tokens for request in again} == {2 if order == "longest" else 0}, "a digit and the end"


def test_a_prompt_that_does_not_fit_is_named(make_config: MakeConfig) -> None:
    env = PipelineEnv(make_config(rollout={"max_prompt_tokens": 7}))
    with pytest.raises(PipelineError, match=r"prompt 0 of task 'sort' has 8 tokens.*max_prompt_tokens 7"):
        env.begin_step(1)


def test_an_unknown_algorithm_names_the_nearest(make_config: MakeConfig) -> None:
    with pytest.raises(UserError, match="did you mean 'grpo'"):
        PipelineEnv(make_config(algorithm={"name": "gpro"}))
    with pytest.raises(UserError, match="group_size: 0; accepted: 1 or more"):
        PipelineEnv(make_config(algorithm={"group_size": 0}))


def test_metrics_say_what_the_step_was_like(make_config: MakeConfig, finish: Finish) -> None:
    config = make_config()
    env = PipelineEnv(config)
    env.on_turns(answers(config, finish, env.begin_step(1)))
    metrics = batch_metrics(env.finish_step(1))
    assert metrics.reward_mean == pytest.approx(0.9)
    assert metrics.reward_std == pytest.approx(0.1)
    assert (metrics.num_trajectories, metrics.turns_mean) == (6, 1)
    assert (metrics.response_tokens, metrics.response_tokens_mean, metrics.response_tokens_max) == (36, 6, 6)
    assert metrics.token_runs == [[6]] * 6
    assert metrics.clip_ratio == 0.0


def demonstrations(config: TrainingConfig, update_index: int) -> list[Demonstration]:
    task = make_task(config.task, seed=config.seed, vocabulary=VOCABULARY)
    return demonstration_batch(config, task, VOCABULARY, update_index)


def test_demonstrations_follow_the_task_and_mask_the_tool(make_config: MakeConfig) -> None:
    config = make_config("calculator")
    batch = demonstrations(config, 1)
    assert len(batch) == 4
    assert batch == demonstrations(config, 1) != demonstrations(config, 0)
    prompt_tokens, tokens, is_sampled = batch[0]
    question = VOCABULARY.decode(prompt_tokens)[2:-1]
    result = str(eval(question))
    assert VOCABULARY.decode(tokens) == f"<{question}>{result}|{result}"
    hidden = [VOCABULARY.decode([token]) for token, seen in zip(tokens, is_sampled, strict=True) if not seen]
    assert "".join(hidden) == f"{result}|"
    assert tokens[-1] == VOCABULARY.eos_token
    assert is_sampled[-1]


def test_a_demonstration_beyond_the_budget_is_refused(make_config: MakeConfig) -> None:
    with pytest.raises(PipelineError, match=r"takes 6 tokens, more than rollout.max_new_tokens 5"):
        demonstrations(make_config(rollout={"max_new_tokens": 5}), 0)


def test_a_host_imports_nothing_heavy() -> None:
    code = (
        "import sys; from rlmux.rl.user_code.pipeline_env import PipelineEnv; "
        "from rlmux.rl.config import TrainingConfig; "
        "PipelineEnv(TrainingConfig(name='p')).begin_step(1); "
        "print([name for name in ('torch', 'transformers', 'pyarrow') if name in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "[]\n"


# Several turns.


def test_the_calculator_answers_and_the_last_word_is_scored(make_config: MakeConfig, finish: Finish) -> None:
    env = PipelineEnv(make_config("calculator"))
    request, other, *rest = env.begin_step(1)
    assert request.stop_tokens == (*EOS, *VOCABULARY.encode(">"))
    question = VOCABULARY.decode(request.prompt_tokens)[2:-1]
    result = str(eval(question))
    first = [spoken(f"<{question}>")]
    replies, released = env.on_turns([finish(request, *first), finish(other, spoken("7", ends=True))])
    assert ([reply.id for reply in replies], released) == ([request.id], [other.id])
    assert VOCABULARY.decode(replies[0].tokens) == f"{result}|"
    second = [*first, heard(f"{result}|"), spoken(result, ends=True)]
    assert env.on_turns([finish(request, *second)]) == ([], [request.id])
    env.on_turns([finish(each, spoken("7", ends=True)) for each in rest])
    trajectories = env.finish_step(1).trajectories
    assert [each.reward for each in trajectories[:2]] == [1.0, 0.0]
    assert sum(trajectories[0].is_sampled) == len(trajectories[0].tokens) - len(result) - 1


def test_a_turn_delivered_twice_gets_the_same_reply(make_config: MakeConfig, finish: Finish) -> None:
    env = PipelineEnv(make_config("calculator", params={"max_calls": 1}))
    request = env.begin_step(1)[0]
    turn = finish(request, spoken("<1+2>"))
    assert env.on_turns([turn]) == env.on_turns([turn])
    later = finish(request, spoken("<1+2>"), heard("3|"), spoken("<3+4>"))
    assert env.on_turns([turn])[1] == []
    assert env.on_turns([later]) == ([], [request.id])


def test_other_turns_than_before_a_crash_are_replayed(make_config: MakeConfig, finish: Finish) -> None:
    env = PipelineEnv(make_config("calculator", params={"max_calls": 2}))
    request = env.begin_step(1)[0]
    env.on_turns([finish(request, spoken("<1+2>"))])
    env.on_turns([finish(request, spoken("<1+2>"), heard("3|"), spoken("<5+5>"))])
    other = finish(request, spoken("<2+2>"), heard("4|"), spoken("<4+4>"))
    replies, _ = env.on_turns([other])
    assert VOCABULARY.decode(replies[0].tokens) == "8|"


@pytest.fixture
def waiting_env(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> tuple[PipelineEnv, dict[str, asyncio.Event]]:
    """A env whose environments reply to a question once its event is set; so that no clock decides."""
    events: dict[str, asyncio.Event] = {}

    async def reply(self: object, text: str) -> str:
        await events.setdefault(text, asyncio.Event()).wait()
        return f"{len(text)}|"

    env = PipelineEnv(make_config("calculator", params={"wait_s": 0.1}))
    monkeypatch.setattr(Calculator, "reply", reply)
    return env, events


def test_replies_that_wait_wait_together(waiting_env, finish: Finish, monkeypatch: pytest.MonkeyPatch) -> None:
    """No environment replies before all were asked."""
    env, _ = waiting_env
    requests = env.begin_step(1)
    all_asked = asyncio.Barrier(len(requests))

    async def reply(self: object, text: str) -> str:
        await all_asked.wait()
        return f"{len(text)}|"

    monkeypatch.setattr(Calculator, "reply", reply)
    replies, _ = env.on_turns([finish(request, spoken("<1+2>")) for request in requests])
    assert [reply.id for reply in replies] == [request.id for request in requests]


def set_already() -> asyncio.Event:
    event = asyncio.Event()
    event.set()
    return event


def test_an_environment_that_waits_holds_back_no_other_reply(waiting_env, finish: Finish) -> None:
    env, events = waiting_env
    first, second, *_ = env.begin_step(1)
    events["<22>"] = set_already()
    turns = [finish(first, spoken("<1>")), finish(second, spoken("<22>"))]
    replies, released = env.on_turns(turns, 0.01)
    assert ([reply.id for reply in replies], released) == ([second.id], [])
    assert env.on_turns([], 0.0) == ([], [])
    events["<1>"].set()
    replies, _ = env.on_turns([])
    assert [(reply.id, VOCABULARY.decode(reply.tokens)) for reply in replies] == [(first.id, "3|")]
    assert env.on_turns([]) == ([], [])


def test_a_turn_that_comes_again_while_its_reply_is_pending_is_answered_once(waiting_env, finish: Finish) -> None:
    env, events = waiting_env
    request = env.begin_step(1)[0]
    turn = finish(request, spoken("<1>"))
    assert env.on_turns([turn], 0.0) == env.on_turns([turn], 0.0) == ([], [])
    events["<1>"].set()
    assert [reply.id for reply in env.on_turns([turn])[0]] == [request.id]
    assert env.on_turns([]) == ([], [])


def test_a_pending_reply_to_a_turn_that_was_taken_back_is_dropped(waiting_env, finish: Finish) -> None:
    """A worker was lost after its second turn: its trajectory begins anew, and the first turn is answered at once."""
    env, events = waiting_env
    request = env.begin_step(1)[0]
    events["<1>"] = set_already()
    first, second = finish(request, spoken("<1>")), finish(request, spoken("<1>"), heard("3|"), spoken("<22>"))
    (told,), _ = env.on_turns([first])
    assert env.on_turns([second], 0.0) == ([], [])
    assert env.on_turns([first], 0.0) == ([told], [])
    events["<22>"].set()
    assert env.on_turns([], 0.1) == ([], [])
    assert [VOCABULARY.decode(reply.tokens) for reply in env.on_turns([second])[0]] == ["4|"]


def test_other_turns_than_those_whose_reply_is_pending_get_a_fresh_environment(waiting_env, finish: Finish) -> None:
    env, events = waiting_env
    request = env.begin_step(1)[0]
    assert env.on_turns([finish(request, spoken("<1>"))], 0.0) == ([], [])
    events["<333>"] = set_already()
    replies, _ = env.on_turns([finish(request, spoken("<333>"))])
    assert [VOCABULARY.decode(reply.tokens) for reply in replies] == ["5|"]


def test_a_reply_that_is_pending_when_its_step_is_over_is_dropped(waiting_env, finish: Finish) -> None:
    """The trajectory began anew after a crash, and this time its budget ran out before it asked."""
    env, events = waiting_env
    requests = env.begin_step(1)
    assert env.on_turns([finish(requests[0], spoken("<1>"))], 0.0) == ([], [])
    env.on_turns([finish(request, spoken("7" * 32), stop_reason="length") for request in requests], 0.0)
    assert env.finish_step(1).step == 1
    events["<1>"].set()
    env.begin_step(2)
    assert env.on_turns([], 0.1) == ([], [])


def test_an_environment_that_fails_late_is_masked(waiting_env, finish: Finish, monkeypatch: pytest.MonkeyPatch) -> None:
    env, _ = waiting_env
    request = env.begin_step(1)[0]

    async def fails(self: object, text: str) -> str:
        await asyncio.sleep(0)
        raise KeyError(text)

    monkeypatch.setattr(Calculator, "reply", fails)
    assert env.on_turns([finish(request, spoken("<1>"))]) == ([], [request.id])
    others = [finish(each, spoken("<1>"), stop_reason="length") for each in env.begin_step(1)[1:]]
    env.on_turns(others)
    first, *_ = env.finish_step(1).trajectories
    assert not first.is_judged


def test_a_used_up_budget_ends_the_trajectory(make_config: MakeConfig, finish: Finish) -> None:
    env = PipelineEnv(make_config("calculator", rollout={"max_new_tokens": 7}))
    first, second, third, *_ = env.begin_step(1)
    cut = finish(first, spoken("<11+11>"), stop_reason="length")
    no_room = finish(second, spoken("<1+2>"))
    with_room = finish(third, spoken("<>"))
    replies, released = env.on_turns([cut, no_room, with_room])
    assert released == [first.id, second.id]
    assert [reply.id for reply in replies] == [third.id]


def test_answers_without_room_count_as_clipped(make_config: MakeConfig, finish: Finish) -> None:
    """Those whose own tokens filled it, and those whose reply would have."""
    env = PipelineEnv(make_config("calculator", rollout={"max_new_tokens": 7}))
    cut, no_room, *others = env.begin_step(1)
    turns = [finish(cut, spoken("<11+11>"), stop_reason="length"), finish(no_room, spoken("<1+2>"))]
    env.on_turns([*turns, *(finish(each, spoken("1")) for each in others)])
    assert batch_metrics(env.finish_step(1)).clip_ratio == 2 / (2 + len(others))


def test_guessing_goes_on_until_the_number_is_found(make_config: MakeConfig, finish: Finish) -> None:
    config = make_config("guess", params={"largest": 7, "max_guesses": 3})
    env = PipelineEnv(config)
    request = env.begin_step(1)[0]
    prompt = make_task(config.task, seed=0, vocabulary=VOCABULARY).prompt(0)
    secret = int(prompt.answer or 0)
    wrong = 0 if secret else 7
    hint = ">" if secret else "<"
    replies, _ = env.on_turns([finish(request, spoken(f"{wrong}?"))])
    assert VOCABULARY.decode(replies[0].tokens) == hint
    end = finish(request, spoken(f"{wrong}?"), heard(hint), spoken(f"{secret}?"))
    assert env.on_turns([end]) == ([], [request.id])
