import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from textwrap import dedent

import pytest

from rlmux.core.errors import PipelineError, UserError
from rlmux.rl.config import TrainingConfig
from rlmux.rl.types import FinishedTurn
from rlmux.rl.user_code.pipeline_env import PipelineEnv
from rlmux.rl.user_code.rewards import load_reward
from rlmux.rl.vocabulary import CharVocabulary

MakeConfig = Callable[..., TrainingConfig]
Finish = Callable[..., FinishedTurn]
Write = Callable[[str], str]

VERL = "data_source, solution_str, ground_truth, extra_info=None"


@pytest.fixture
def write_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Write]:
    """Writes the user's module and returns its name."""
    monkeypatch.syspath_prepend(tmp_path)
    name = "users_rewards"

    def write(source: str) -> str:
        (tmp_path / f"{name}.py").write_text(dedent(source))
        return name

    yield write
    sys.modules.pop(name, None)


def run(config: TrainingConfig, finish: Finish, backwards: bool = False) -> list[float]:
    """Rewards of one step in which sample s of prompt p says 'p-s'."""
    vocabulary = CharVocabulary()
    env = PipelineEnv(config)
    turns = [
        finish(request, (vocabulary.encode(f"{request.id.prompt}-{request.id.sample}"), True))
        for request in env.begin_step(1)
    ]
    for turn in turns[::-1] if backwards else turns:
        env.on_turns([turn])
    return [trajectory.reward for trajectory in env.finish_step(1).trajectories]


def test_verls_signature_gets_one_response_and_its_columns(
    make_config: MakeConfig, finish: Finish, write_module: Write
) -> None:
    name = write_module(f"""
        def score({VERL}):
            assert data_source == "sort" and ground_truth.isdigit() and extra_info == {{}}
            return {{"score": int(solution_str[0]) + int(solution_str[2]) / 10, "note": "ignored"}}
    """)
    assert run(make_config(reward=f"{name}:score"), finish) == [0.0, 0.1, 1.0, 1.1, 2.0, 2.1]


@pytest.mark.parametrize("backwards", [False, True])
def test_trls_signature_gets_whole_groups_in_sample_order(
    make_config: MakeConfig, finish: Finish, write_module: Write, backwards: bool
) -> None:
    name = write_module("""
        def score(prompts, completions, answer, **columns):
            assert len(set(prompts)) == 1 and len(answer) == len(prompts)
            prompt = completions[0][0]
            assert completions == [f"{prompt}-{sample}" for sample in range(len(prompts))]
            return [float(f"{prompt}.{sample}") for sample in range(len(prompts))]
    """)
    assert run(make_config(reward=f"{name}:score"), finish, backwards) == [0.0, 0.1, 1.0, 1.1, 2.0, 2.1]


def test_a_reward_may_be_asynchronous(make_config: MakeConfig, finish: Finish, write_module: Write) -> None:
    name = write_module(f"""
        import asyncio
        async def score({VERL}):
            await asyncio.sleep(0.001)
            return len(solution_str)
    """)
    assert run(make_config(reward=f"{name}:score"), finish) == [3.0] * 6


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ("return 1 / 0", r"step 1 prompt 0 sample 0 raised ZeroDivisionError: .*users_rewards.py:2"),
        ("return float('nan')", r"at step 1 prompt 0 sample 0 returned nan; accepted: a finite number"),
        ("return float('-inf')", r"returned -inf"),
        ("return 'good'", r"returned str 'good'; accepted: a finite number"),
        ("return 10 ** 400", r"returned int '1000"),
        ("return 10 ** 5000", r"returned int; accepted: a finite number"),
        ("return '0.5'", r"returned str '0.5'"),
        ("return b'0.5'", r"returned bytes \"b'0.5'\""),
        ("return None if solution_str == '0-1' else 1.0", r"at step 1 prompt 0 sample 1 returned None; accepted"),
        ("return {'reward': 1}", r"dict with reward; accepted: one with 'score'"),
        ("import threading; threading.Event().wait()", r"did not return within 0.2 s"),
        ("while True: pass", r"did not return within 0.2 s"),
    ],
)
def test_a_reward_that_misbehaves_stops_its_pipeline_with_one_line(
    make_config: MakeConfig, finish: Finish, write_module: Write, body: str, text: str
) -> None:
    name = write_module(f"def score({VERL}):\n    {body}\n")
    limit_s = 0.2 if "0.2 s" in text else 60.0  # short only for what never returns
    with pytest.raises(PipelineError, match=text) as caught:
        run(make_config(reward=f"{name}:score", reward_timeout_s=limit_s), finish)
    assert "\n" not in str(caught.value)
    assert f"reward {name}:score" in str(caught.value)


def test_a_swallowed_alarm_rings_again(make_config: MakeConfig, finish: Finish, write_module: Write) -> None:
    name = write_module(f"""
        import threading
        def score({VERL}):
            try:
                threading.Event().wait()
            except BaseException:
                threading.Event().wait()
    """)
    with pytest.raises(PipelineError, match="did not return within"):
        run(make_config(reward=f"{name}:score", reward_timeout_s=0.05), finish)


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ("return [1.0]", "returned 1 rewards for 2 completions"),
        ("return 1.0", "returned 1.0; accepted: a list of numbers"),
        ("return None", "at step 1 prompt 0 sample 0 returned None; accepted: a list of numbers"),
        ("return [1.0, float('inf')]", "at step 1 prompt 0 sample 1 returned inf"),
        ("return [1.0, '0.5']", "at step 1 prompt 0 sample 1 returned str '0.5'"),
    ],
)
def test_a_group_reward_that_misbehaves_is_named(
    make_config: MakeConfig, finish: Finish, write_module: Write, body: str, text: str
) -> None:
    name = write_module(f"def score(prompts, completions, **columns):\n    {body}\n")
    with pytest.raises(PipelineError, match=text):
        run(make_config(reward=f"{name}:score"), finish)


def test_an_awaitable_that_hangs_is_named(make_config: MakeConfig, finish: Finish, write_module: Write) -> None:
    name = write_module(f"""
        import asyncio
        async def score({VERL}):
            await asyncio.Event().wait()
    """)
    with pytest.raises(PipelineError, match=r"sample 0 did not return within 0.1 s"):
        run(make_config(reward=f"{name}:score", reward_timeout_s=0.1), finish)


def test_a_reward_that_cannot_be_loaded_is_a_users_error(write_module: Write) -> None:
    name = write_module("""
        def other(text): return 0.0
        number = 5
    """)
    for spec, text in [
        ("score", "accepted: module:function"),
        ("absent_module_xyz:score", "no module 'absent_module_xyz'"),
        (f"{name}:score", "has no function 'score'; it has: other"),
        (f"{name}:other", r"takes \(text\); accepted: verl's"),
    ]:
        with pytest.raises(UserError, match=text):
            load_reward(spec)


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("import absent_xyz", "imports 'absent_xyz'"),
        ("1 / 0", "importing 'users_rewards' raised ZeroDivision"),
    ],
)
def test_a_module_that_fails_to_import_is_a_users_error(write_module: Write, source: str, text: str) -> None:
    with pytest.raises(UserError, match=text):
        load_reward(f"{write_module(source)}:score")
