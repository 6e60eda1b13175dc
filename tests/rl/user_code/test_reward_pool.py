"""Rewards in processes of their own: the same results, beside each other, and each fault costs one process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
from tests.waiting import until

from rlmux.core.errors import PipelineError, UserError
from rlmux.rl.config import MisfitError, TaskConfig, TrainingConfig
from rlmux.rl.types import FinishedTurn, Prompt, TrainingBatch
from rlmux.rl.user_code.pipeline_env import PipelineEnv
from rlmux.rl.user_code.reward_pool import RewardPool, make_reward
from rlmux.rl.user_code.reward_preflight import complaint_about
from rlmux.rl.user_code.rewards import Response, Reward, RewardCall
from rlmux.rl.vocabulary import CharVocabulary

MakeConfig = Callable[..., TrainingConfig]
Finish = Callable[..., FinishedTurn]
MakePool = Callable[..., RewardPool]

NAME = "pooled_rewards"
SOURCE = """
import asyncio, ctypes, os, pathlib, re, signal, subprocess, sys, time

HERE = pathlib.Path(__file__).parent

def verl(data_source, solution_str, ground_truth, extra_info):
    return {"score": len(solution_str) / 7 + int(solution_str[-1]) / 3}

async def verl_async(data_source, solution_str, ground_truth, extra_info):
    await asyncio.sleep(0.001 * (5 - int(solution_str[-1])))
    return len(solution_str) / 7 + int(solution_str[-1]) / 3

def trl(prompts, completions, log_metric, log_extra, trainer_state, **columns):
    log_metric("length", len(completions[0]) / 3 + trainer_state.global_step)
    log_extra("last", [int(each[-1]) / 7 for each in completions])
    return [None if each == "1-1" else int(each[-1]) / 3 for each in completions]

async def trl_async(prompts, completions, log_metric, log_extra, trainer_state, **columns):
    await asyncio.sleep(0.001 * (5 - int(completions[0][0])))
    return trl(prompts, completions, log_metric, log_extra, trainer_state)

def of_text(solution_str):
    before, _, rest = solution_str.partition(" ")
    return FAULTS[before](rest)

def meet(rest):
    mine, other = rest.split()
    (HERE / mine).touch()
    while not (HERE / other).exists():
        time.sleep(0.001)
    return os.getpid()

def child(rest):
    (HERE / "child").write_text(str(subprocess.Popen(["sleep", "600"]).pid))
    os._exit(3)

def hang(rest):
    (HERE / "pool").write_text(str(os.getpid()))
    ctypes.PyDLL(None).sleep(600)  # in C, with the interpreter's lock

def hang_blocked(rest):
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    ctypes.PyDLL(None).sleep(600)

def write(rest):
    print("x" * 1000)
    (HERE / "large").write_bytes(bytes(int(rest)))
    return 1.0

def fill(rest):
    kept = []
    while True:
        kept.append(bytearray(100_000))

FAULTS = {
    "ok": lambda rest: float(rest),
    "meet": meet,
    "pid": lambda rest: os.getpid(),
    "modules": lambda rest: float("torch" in sys.modules),
    "raise": lambda rest: 1 / 0,
    "exit": lambda rest: os._exit(3),
    "leave": lambda rest: sys.exit("enough"),
    "kill": lambda rest: os.kill(os.getpid(), signal.SIGKILL),
    "abort": lambda rest: os.abort(),
    "child": child,
    "hang": hang,
    "hang_blocked": hang_blocked,
    "regex": lambda rest: re.match(r"(a+)+$", "a" * 64 + "b"),
    "large": lambda rest: float(len(bytearray(int(rest)))),
    "fill": fill,
    "write": write,
    "files": lambda rest: float(len(os.listdir("/proc/self/fd")) - 4),  # input, output, errors, and the list itself
}
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of the user's module."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / f"{NAME}.py").write_text(dedent(SOURCE))
    yield tmp_path
    sys.modules.pop(NAME, None)


@pytest.fixture
def make_pool(module: Path) -> Iterator[MakePool]:
    pools = []

    def make(function: str = "of_text", num_processes: int = 1, **fields: Any) -> RewardPool:
        pools.append(RewardPool(config_of(function, num_processes, **fields), 5))
        return pools[-1]

    yield make
    for pool in pools:
        pool.close()


def config_of(function: str = "of_text", num_processes: int = 1, **fields: Any) -> TaskConfig:
    return TaskConfig(name="sort", reward=f"{NAME}:{function}", num_reward_processes=num_processes, **fields)


def calls(*texts: str) -> list[RewardCall]:
    responses = [[Response(text=text, token_ids=(), turns=((True, text),))] for text in texts]
    prompt = Prompt(text="", answer=None)
    return [
        RewardCall(prompt=prompt, responses=each, step=1, places=[f"at {number}"])
        for number, each in enumerate(responses)
    ]


def outcomes(pool: RewardPool, *texts: str) -> list[str]:
    return [str(outcome) for outcome in pool.outcomes(calls(*texts))]


def batch_of(config: TrainingConfig, finish: Finish, order: Sequence[int]) -> TrainingBatch:
    """The first step's batch of answers 'prompt-sample', all at once or one by one."""
    vocabulary, env = CharVocabulary(), PipelineEnv(config)
    turns = [
        finish(request, (vocabulary.encode(f"{request.id.prompt}-{request.id.sample}"), True))
        for request in env.begin_step(1)
    ]
    for first in order:
        env.on_turns([turns[first]])
    env.on_turns(turns)
    return env.finish_step(1)


@pytest.mark.parametrize("function", ["verl", "verl_async", "trl", "trl_async"])
@pytest.mark.parametrize("order", [(), (5, 3, 4, 0)], ids=["at-once", "backwards"])
def test_a_batch_is_the_same_with_any_number_of_processes(
    make_config: MakeConfig, finish: Finish, module: Path, function: str, order: Sequence[int]
) -> None:
    without, with_two = (
        batch_of(make_config(reward=f"{NAME}:{function}", num_reward_processes=number), finish, order)
        for number in (0, 2)
    )
    assert with_two == without
    assert {each.reward for each in without.trajectories} != {0.0}
    assert set(without.logged) == ({"reward/length", "reward/last"} if "trl" in function else set())


def test_the_env_worker_does_not_import_the_users_module(make_config: MakeConfig, finish: Finish, module: Path) -> None:
    batch_of(make_config(reward=f"{NAME}:verl", num_reward_processes=1), finish, ())
    assert NAME not in sys.modules


def test_calls_run_beside_each_other_and_come_in_order(make_pool: MakePool) -> None:
    pool = make_pool(num_processes=2)
    first, second, *others = outcomes(pool, "meet a b", "meet b a", "ok 2", "ok 3")
    assert first != second
    assert others == ["[2.0]", "[3.0]"]


def test_each_answer_is_reported(make_pool: MakePool) -> None:
    answered: list[None] = []
    list(make_pool().outcomes(calls("ok 1", "raise", "ok 2"), lambda: answered.append(None)))
    assert len(answered) == 3


@pytest.mark.parametrize(
    ("text", "reason", "fields"),
    [
        ("exit", "ended its process (exit code 3)", {}),
        ("kill", "was killed by SIGKILL", {}),
        ("abort", "was killed by SIGABRT", {}),
        ("leave", "raised SystemExit: enough", {}),
        ("raise", "raised ZeroDivisionError: division by zero (at ", {}),
        ("hang", "did not return within 0.2 s (task.reward_timeout_s)", {"reward_timeout_s": 0.2}),
        ("hang_blocked", "did not return within 0.2 s (task.reward_timeout_s)", {"reward_timeout_s": 0.2}),
        ("regex", "did not return within 0.2 s (task.reward_timeout_s)", {"reward_timeout_s": 0.2}),
        ("large 400000000", "used more than 0.2 GB (task.reward_memory_gb)", {"reward_memory_gb": 0.2}),
        ("fill", "used more than 0.2 GB (task.reward_memory_gb)", {"reward_memory_gb": 0.2}),
        ("write 2000", "wrote more than 1e-06 GB to a file (task.reward_file_gb)", {"reward_file_gb": 1e-6}),
    ],
)
def test_a_call_that_goes_wrong_is_one_line_and_the_next_ones_are_served(
    make_pool: MakePool, text: str, reason: str, fields: dict[str, float]
) -> None:
    pool = make_pool(**fields)
    failed, served = outcomes(pool, text, "ok 1")
    assert failed.startswith(f"reward {NAME}:of_text at 0 {reason}")
    assert "\n" not in failed
    assert served == "[1.0]"
    assert outcomes(pool, "ok 2") == ["[2.0]"]


def test_only_the_process_of_the_failing_call_is_replaced(make_pool: MakePool) -> None:
    pool = make_pool(num_processes=2)
    before = {*outcomes(pool, "meet a b", "meet b a")}
    outcomes(pool, "exit")
    after = {*outcomes(pool, "meet c d", "meet d c")}
    assert (len(before), len(before & after), len(after)) == (2, 1, 2)


def test_a_process_that_dies_between_two_calls_fails_none(make_pool: MakePool) -> None:
    pool = make_pool()
    (pid,) = outcomes(pool, "pid")
    number = int(float(pid.strip("[]")))
    os.kill(number, signal.SIGKILL)
    until(lambda: "State:\tZ" in Path(f"/proc/{number}/status").read_text(), "the death of the process")
    assert outcomes(pool, "ok 1") == ["[1.0]"]


def is_gone(path: Path) -> bool:
    try:
        return "State:\tZ" in Path(f"/proc/{path.read_text()}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return True


def test_programs_that_a_call_has_started_end_with_its_process(make_pool: MakePool, module: Path) -> None:
    outcomes(make_pool(), "child")
    until(lambda: is_gone(module / "child"), "the end of the child")


def test_a_process_has_the_files_of_no_other_and_no_torch(make_pool: MakePool) -> None:
    assert outcomes(make_pool(num_processes=2), "files", "files", "modules") == ["[1.0]", "[1.0]", "[0.0]"]


def test_closed_outcomes_end_the_calls_under_way(make_pool: MakePool, module: Path) -> None:
    pool = make_pool(num_processes=2)
    with closing(pool.outcomes(calls("meet a pool", "hang"))) as found:
        assert not isinstance(next(found), PipelineError)
        until(lambda: (module / "pool").read_text(), "the id of its process")
    until(lambda: is_gone(module / "pool"), "the end of the call")
    assert outcomes(pool, "ok 1", "ok 2", "ok 3") == ["[1.0]", "[2.0]", "[3.0]"]


def test_the_processes_of_an_env_worker_that_is_killed_end_with_it(module: Path) -> None:
    code = f"""
        import sys
        sys.path.insert(0, {str(module)!r})
        from tests.rl.user_code.test_reward_pool import calls, config_of
        from rlmux.rl.user_code.reward_pool import RewardPool
        list(RewardPool(config_of(num_processes=2), 5).outcomes(calls("hang")))
    """
    root = str(Path(__file__).parents[3])
    worker = subprocess.Popen([sys.executable, "-c", dedent(code)], cwd=root, env={**os.environ, "PYTHONSAFEPATH": ""})
    try:
        until(lambda: (module / "pool").exists() and (module / "pool").read_text(), "a call", process=worker)
        assert not is_gone(module / "pool")
    finally:
        worker.kill()
        worker.wait()
    until(lambda: is_gone(module / "pool"), "the end of the process in C")


def test_what_is_printed_is_no_file_of_the_limit(make_pool: MakePool, capfd: pytest.CaptureFixture[str]) -> None:
    assert outcomes(make_pool(reward_file_gb=1e-6), "write 500", "write 500") == ["[1.0]", "[1.0]"]
    assert capfd.readouterr().err.count("x" * 1000) == 2


def test_a_call_that_cannot_be_sent_fails_alone(make_pool: MakePool) -> None:
    first, second = calls("ok 1", "ok 2")
    prompt = Prompt(text="", answer=None, data={"function": lambda: None})
    unsent = RewardCall(prompt=prompt, responses=first.responses, step=1, places=["at 0"])
    failed, served = make_pool().outcomes([unsent, second])
    assert isinstance(failed, PipelineError)
    assert "at 0 cannot be sent to a process (task.reward_processes)" in str(failed)
    assert served == [2.0]


@pytest.mark.parametrize(
    ("function", "text"),
    [("absent", "has no function 'absent'"), ("meet", r"takes \(rest\); accepted: verl's")],
)
def test_a_function_that_cannot_be_loaded_is_a_users_error_here_too(
    make_pool: MakePool, function: str, text: str
) -> None:
    with pytest.raises(UserError, match=text):
        make_pool(function, 2)


def test_a_module_that_ends_its_process_is_named(module: Path) -> None:
    (module / f"{NAME}.py").write_text("import os; os._exit(4)")
    with pytest.raises(PipelineError, match=f"importing {NAME}:of_text ended its process .exit code 4."):
        RewardPool(config_of(), 5)


def test_a_module_that_breaks_later_fails_the_calls_that_need_it(make_pool: MakePool, module: Path) -> None:
    pool = make_pool()
    (module / f"{NAME}.py").write_text("1 / 0")
    failed, second = outcomes(pool, "exit", "ok 1")
    assert "exit code 3" in failed
    assert "ZeroDivisionError" in second


def test_the_check_before_the_run_uses_a_process_where_the_run_does(make_config: MakeConfig, module: Path) -> None:
    for body, text in [
        ("return 1.0", None),
        ("import os; os._exit(5)", "on a sample ended its process (exit code 5)"),
        ("return 'good'", "on a sample returned str 'good'"),
    ]:
        (module / f"{NAME}.py").write_text(f"def of_text(solution_str):\n    {body}\n")
        found = complaint_about(make_config(reward=f"{NAME}:of_text", num_reward_processes=2))
        assert found == (None if text is None else found)
        assert text is None or (found is not None and found.startswith("task.reward: reward") and text in found)


def test_scores_of_our_own_tasks_stay_and_a_users_task_is_refused() -> None:
    ours = TaskConfig(name="sort", num_reward_processes=3)
    assert isinstance(make_reward(object(), ours, 1), Reward)  # type: ignore[arg-type]
    theirs = TaskConfig(name="my_module:Task", num_reward_processes=3)
    with pytest.raises(UserError, match=r"task.reward_processes: the task 'my_module:Task' scores in its env worker"):
        make_reward(object(), theirs, 1)  # type: ignore[arg-type]


@pytest.mark.parametrize("key", ["reward_memory_gb", "reward_file_gb"])
def test_limits_without_processes_are_refused(key: str) -> None:
    with pytest.raises(MisfitError, match=f"{key}: .* accepted with reward_processes 1 or more"):
        TaskConfig(name="sort", reward="a:b", **{key: 1.0})
