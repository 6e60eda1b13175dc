"""Real programs, started once a trajectory: their rewards, their failures, their limits, and their end."""

from __future__ import annotations

import json
import os
import shlex
import socket
import threading
import urllib.request
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from textwrap import dedent
from types import SimpleNamespace
from typing import Any

import pytest
from tests.rl.agents.conftest import PROLOGUE, Pipelines
from tests.rl.agents.fake_engine import play
from tests.waiting import until

from rlmux.core.errors import PipelineError
from rlmux.rl.agents import programs
from rlmux.rl.config import OutcomesConfig
from rlmux.rl.sandboxes import process

SUITE = Path(__file__).parents[3] / "examples/harbor/suite"
HANGS = "import threading; threading.Event().wait()"


def is_running(pid: int) -> bool:
    """Whether a process is there, and not a zombie that its parent has not read yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def in_words(program: str) -> str:
    """A command with the whole program in it: files of the test lie in /tmp, which namespaces hide."""
    return f"python -c {shlex.quote(PROLOGUE + dedent(program))}"


def pids(pipelines: Pipelines) -> list[int]:
    return [int(line) for line in pipelines.log()]


def test_a_number_in_the_reward_file_is_the_reward(pipelines: Pipelines) -> None:
    batch = pipelines.play("first = ask('Well?'); ask('Well?', first, 'So?'); report(TASK['sample'] + 0.5)")
    assert [each.reward for each in batch.trajectories] == [0.5, 1.5]
    assert batch.advantages[0] < 0 < batch.advantages[1]
    for each in batch.trajectories:
        assert (each.num_turns, each.outcome, each.stop_reason) == (2, "ended", "stop")
        assert [message["content"] for message in each.messages or ()] == ["Well?", "yes", "So?", "yes"]
    assert batch.logged["outcomes/failed"] == 0


def test_a_reward_is_taken_by_post(pipelines: Pipelines) -> None:
    batch = pipelines.play("ask('Well?'); post('/reward', {'reward': 0.25})")
    assert [each.reward for each in batch.trajectories] == [0.25, 0.25]


def test_an_exit_code_is_a_reward_where_it_is_asked_for(pipelines: Pipelines) -> None:
    batch = pipelines.play("ask('Well?'); sys.exit(TASK['sample'] * 3)", reward_from="exit_code", num_retries=0)
    assert [each.reward for each in batch.trajectories] == [1.0, 0.0]
    assert {each.outcome for each in batch.trajectories} == {"ended"}


def test_a_reward_function_gets_the_session(pipelines: Pipelines, monkeypatch: pytest.MonkeyPatch) -> None:
    source = """
        def score(data_source, solution_str, ground_truth, extra_info):
            assert [each["role"] for each in extra_info["session"]] == ["user", "assistant"], extra_info
            assert ground_truth == "yes", ground_truth
            return float(extra_info["session"][1]["content"] == ground_truth)
    """
    (pipelines.folder / "rewards_of_programs.py").write_text(dedent(source))
    monkeypatch.syspath_prepend(pipelines.folder)
    batch = pipelines.play(
        "ask('Well?')", reward="rewards_of_programs:score", rows=[{"prompt": "Well?", "answer": "yes"}]
    )
    assert [each.reward for each in batch.trajectories] == [1.0, 1.0]


@pytest.mark.parametrize("word", ["def", "async def"])
def test_a_function_is_a_program(pipelines: Pipelines, word: str) -> None:
    source = f"""
        import numpy
        {word} solve(task):
            assert task["row"] == TASK["row"]
            return numpy.float64(len(ask(task["row"]["prompt"])) / 4)
    """
    (pipelines.code / "solver.py").write_text(PROLOGUE + dedent(source))
    batch = pipelines.play(function="solver:solve")
    assert [(each.reward, each.outcome) for each in batch.trajectories] == [(0.75, "ended")] * 2


def test_a_function_may_report_a_reward_itself(pipelines: Pipelines) -> None:
    (pipelines.code / "solver.py").write_text(PROLOGUE + "def solve(task):\n    ask('Well?'); report(2)\n")
    assert [each.reward for each in pipelines.play(function="solver:solve").trajectories] == [2.0, 2.0]


@pytest.fixture
def agent_server() -> Iterator[tuple[str, list[Callable[[dict[str, Any]], tuple[int, Any]]]]]:
    """(address, a list whose first entry answers a trajectory with a status and a body)."""
    answering: list[Callable[[dict[str, Any]], tuple[int, Any]]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            task = json.loads(self.rfile.read(int(self.headers["content-length"])))
            status, body = answering[0](task)
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body.encode() if isinstance(body, str) else json.dumps(body).encode())

        def log_message(self, format: str, *args: Any) -> None:
            pass

    class Server(ThreadingHTTPServer):
        def handle_error(self, request: Any, client_address: Any) -> None:
            pass  # of one that was given up

    server = Server(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/run", answering
    server.shutdown()
    thread.join()
    server.server_close()


def ask_as(task: dict[str, Any], path: str, body: dict[str, Any]) -> Any:
    headers = {"authorization": f"Bearer {task['api_key']}"}
    request = urllib.request.Request(task["openai_base_url"] + path, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request) as response:
        return json.load(response)


def test_an_agent_at_an_address_is_a_program(pipelines: Pipelines, agent_server: Any) -> None:
    url, answering = agent_server

    def answer(task: dict[str, Any]) -> tuple[int, Any]:
        ask_as(task, "/chat/completions", {"messages": [{"role": "user", "content": task["row"]["prompt"]}]})
        if task["sample"] == 0:
            return 200, {"reward": 0.75}
        ask_as(task, "/reward", {"reward": 0.25})
        return 200, "fine"

    answering.append(answer)
    batch = pipelines.play(url=url)
    assert [(each.reward, each.outcome) for each in batch.trajectories] == [(0.75, "ended"), (0.25, "ended")]


def test_an_agent_that_answers_with_an_error_has_failed(pipelines: Pipelines, agent_server: Any) -> None:
    url, answering = agent_server
    answering.append(lambda task: (500, "no\nluck"))
    with pytest.raises(PipelineError) as caught:
        pipelines.play(url=url, num_retries=1)
    assert str(caught.value).endswith(f"2 times each (task.retries); the first: {url} answered 500: no luck")


def test_an_agent_that_does_not_answer_has_failed(pipelines: Pipelines, agent_server: Any) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))  # and listens to none
        url = f"http://127.0.0.1:{other.getsockname()[1]}"
        with pytest.raises(PipelineError, match=f"the first: {url} did not answer: ConnectError"):
            pipelines.play(url=url, num_retries=0)


def test_an_agent_that_hangs_is_given_up_after_its_time(pipelines: Pipelines, agent_server: Any) -> None:
    url, answering = agent_server
    is_over = threading.Event()
    answering.append(lambda task: (is_over.wait(), (200, "late"))[1])
    batch = pipelines.play(url=url, time_limit_s=0.3)
    is_over.set()
    assert {each.outcome for each in batch.trajectories} == {"was ended after 0.3 s (task.time_limit_s)"}


def test_a_program_that_raises_is_started_again_with_the_same_numbers(pipelines: Pipelines) -> None:
    batch = pipelines.play(
        """
        note(f"{TASK['sample']} {os.environ['RLMUX_SEED']} {ask('Well?')}")
        count = open(__file__ + str(TASK['sample']), "a+"); count.write("x"); count.seek(0)
        if len(count.read()) < 3:
            raise RuntimeError("no luck")
        report(1)
        """,
        say=None,
    )
    for sample, each in enumerate(batch.trajectories):
        lines = [line for line in pipelines.log() if line.startswith(str(sample))]
        assert len(lines) == 3
        assert len(set(lines)) == 1, "the same seed, and the same answer"
        assert (each.reward, each.num_turns, each.branches) == (1.0, 1, ())
    assert batch.logged["outcomes/retries"] == 4


FAILS = "note('begun'); answer = ask('Well?')\nif TASK['sample'] == 0: raise RuntimeError('no luck')\nreport(1)"
NO_LUCK = "ended with exit code 1: RuntimeError: no luck"


def test_a_failure_is_masked_after_its_retries(pipelines: Pipelines) -> None:
    batch = pipelines.play(FAILS, num_retries=1, group_size=3, rows=[{"prompt": "a"}, {"prompt": "b"}])
    assert len(pipelines.log()) == 2 * (2 + 1 + 1)
    failed = [each for each in batch.trajectories if each.id.sample == 0]
    assert [(each.is_judged, each.outcome) for each in failed] == [(False, NO_LUCK)] * 2
    assert [each.id[:3] for each in batch.trajectories] == [(1, row, sample) for row in (0, 1) for sample in range(3)]
    assert set(batch.advantages) == {0.0}, "the others of its group are compared among themselves"
    assert (batch.logged["outcomes/failed"], batch.logged["outcomes/retries"]) == (2, 2)


def test_a_failure_may_have_a_reward(pipelines: Pipelines) -> None:
    batch = pipelines.play(FAILS, num_retries=0, outcomes=OutcomesConfig(failed=-1.0))
    assert [(each.reward, each.is_judged) for each in batch.trajectories] == [(-1.0, True), (1.0, True)]


def test_a_failure_may_be_the_end_of_the_pipeline(pipelines: Pipelines) -> None:
    with pytest.raises(PipelineError) as caught:
        pipelines.play(FAILS, num_retries=0, outcomes=OutcomesConfig(failed="stop"))
    assert str(caught.value) == f"the program at step 1 prompt 0 sample 0 {NO_LUCK} (task.outcomes.failed: stop)"


@pytest.mark.parametrize(
    ("program", "why"),
    [
        ("ask('Well?'); os.kill(os.getpid(), 9)", "was killed by signal 9"),
        ("report(1)", "ended without a question that was answered"),
        ("ask('Well?')", "gave no reward; accepted: a number in $RLMUX_REWARD_FILE"),
        ("ask('Well?'); report('good')", "gave no reward: it reported 'good'; accepted: a finite number"),
        ("ask('Well?'); report('nan')", "gave no reward: it reported 'nan'; accepted: a finite number"),
        (
            "try: ask('Well?', model='gpt-5')\nexcept Exception as error: print(error.read().decode())",
            "ended without a question that was answered: model: 'gpt-5'; accepted: 'p' (task.model_name)",
        ),
        (
            "ask('Well?', tools=[{'type': 'function', 'function': {'name': 'find'}}])",
            "HTTP Error 400: Bad Request; its first refused question: tools: the model has no chat template",
        ),
        ("ask('\\u00e9')", "its first refused question: messages: the character '\u00e9'"),
        ("print('x' * 300 + '\\n' * 9 + 'y' * 300 + ' ' * 900); sys.exit(3)", f"ended with exit code 3: {'y' * 200}"),
        ("import no_such_module", "ModuleNotFoundError: No module named 'no_such_module'"),
    ],
)
def test_a_program_that_cannot_be_judged_has_failed_and_says_why(pipelines: Pipelines, program: str, why: str) -> None:
    with pytest.raises(PipelineError) as caught:
        pipelines.play(program, num_retries=0)
    assert str(caught.value).startswith("all 2 trajectories of step 1 failed, 1 times each (task.retries); the first: ")
    assert why in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_command_that_is_not_there_has_failed(pipelines: Pipelines) -> None:
    with pytest.raises(PipelineError, match="ended with exit code 127"):
        pipelines.play(command="no-such-program", num_retries=0)


def test_a_limit_of_turns_keeps_the_reward(pipelines: Pipelines) -> None:
    program = """
        try:
            for number in range(9): ask(f"{number}?")
        except urllib.error.HTTPError as error:
            note(json.load(error)["error"]["code"])
        report(0.5)
    """
    batch = pipelines.play(program, max_turns=3)
    assert [(each.reward, len(each.sequences)) for each in batch.trajectories] == [(0.5, 3)] * 2
    assert pipelines.log() == ["turn_limit"] * 2
    assert batch.logged["outcomes/turns"] == 2
    assert "has had its 3 turns" in (batch.trajectories[0].outcome or "")


def test_a_full_window_is_an_outcome_even_where_the_program_fails_for_it(pipelines: Pipelines) -> None:
    batch = pipelines.play("ask('x' * 2000)", outcomes=OutcomesConfig(tokens=-0.5))
    assert [(each.reward, each.is_judged) for each in batch.trajectories] == [(-0.5, True)] * 2
    assert (batch.logged["outcomes/tokens"], batch.logged["outcomes/retries"]) == (2, 0)


def test_a_program_that_hangs_is_ended_after_its_time(pipelines: Pipelines) -> None:
    batch = pipelines.play(f"note(os.getpid()); {HANGS}", time_limit_s=0.3)
    assert [(each.reward, each.is_judged) for each in batch.trajectories] == [(0.0, True)] * 2
    assert batch.trajectories[0].outcome == "was ended after 0.3 s (task.time_limit_s)"
    assert batch.logged["outcomes/time"] == 2
    assert not any(map(is_running, pids(pipelines)))


class Clock:
    """In place of `time`: goes on when it is told to."""

    def __init__(self) -> None:
        self.now, self.num_looks = 0.0, 0

    def monotonic(self) -> float:
        self.num_looks += 1
        return self.now


def test_time_in_which_a_program_waits_for_its_model_is_not_its_own(
    pipelines: Pipelines, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    monkeypatch.setattr(programs, "time", SimpleNamespace(monotonic=clock.monotonic))

    def say(before: str) -> str:
        clock.now += 1000
        looks = clock.num_looks
        until(lambda: clock.num_looks > looks + 1, "a look at the program")
        return "yes"

    batch = pipelines.play("ask('Well?'); report(1)", say=say, group_size=1, time_limit_s=600.0)
    assert [(each.reward, each.outcome) for each in batch.trajectories] == [(1.0, "ended")]


def test_what_a_program_leaves_behind_is_gone(pipelines: Pipelines) -> None:
    batch = pipelines.play(
        f"""
        ask('Well?')
        ready, other = os.pipe()
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                note(os.getpid())
                os.write(other, b"x")
                {HANGS}
            os._exit(0)
        os.read(ready, 1)
        report(1)
        """
    )
    assert [each.reward for each in batch.trajectories] == [1.0, 1.0]
    assert len(pids(pipelines)) == 2
    assert not any(map(is_running, pids(pipelines)))


def test_no_more_programs_run_at_once_than_are_asked_for(pipelines: Pipelines) -> None:
    batch = pipelines.play("note(1); ask('Well?'); note(-1); report(1)", num_programs=2, group_size=5)
    assert len(batch.trajectories) == 5
    running, most = 0, 0
    for line in pipelines.log():
        running += int(line)
        most = max(most, running)
    assert most <= 2
    assert len(pipelines.log()) == 10


@pytest.mark.parametrize("end", ["drop_step", "close"])
def test_the_end_of_a_step_or_pipeline_ends_its_programs(pipelines: Pipelines, end: str) -> None:
    env, _ = pipelines.make(f"note(os.getpid()); {HANGS}", group_size=3, num_programs=2)
    env.begin_step(1)
    until(lambda: len(pipelines.log()) == 2, "two programs")
    conversations: Any = env._conversations
    if end == "drop_step":
        conversations.drop_step(1)
        until(lambda: not any(map(is_running, pids(pipelines))), "their end")
    else:
        conversations.close()
        assert not any(map(is_running, pids(pipelines)))
    assert len(pipelines.log()) == 2, "the third one is not begun"


def test_a_program_that_is_just_being_started_is_ended_too(
    pipelines: Pipelines, monkeypatch: pytest.MonkeyPatch
) -> None:
    env, _ = pipelines.make(f"note(os.getpid()); {HANGS}", group_size=2)
    board: Any = env._conversations
    is_starting, may_go_on = threading.Event(), threading.Event()
    start = board._programs._started

    def slow(*args: Any) -> Any:
        is_starting.set()
        may_go_on.wait()
        return start(*args)

    monkeypatch.setattr(board._programs, "_started", slow)
    env.begin_step(1)
    is_starting.wait()
    board.drop_step(1)
    may_go_on.set()
    board.close()
    assert not any(map(is_running, pids(pipelines)))
    assert not list(board._programs._folder.glob("program-*"))


def test_a_late_turn_of_a_step_that_is_over_is_released(pipelines: Pipelines) -> None:
    env, engine = pipelines.make("ask('Well?'); report(1)")
    requests = env.begin_step(1)
    late = [engine.open(request) for request in requests]
    play(env, engine)
    assert env.on_turns(late, patience_s=0.0) == ([], [request.id for request in requests])


def test_a_step_is_waited_for_and_not_asked_about_on_and_on(pipelines: Pipelines) -> None:
    env, engine = pipelines.make(
        """
        ask('Well?')
        if TASK['sample'] == 1:
            post('/reward', {'reward': 1}); note(os.getpid()); import threading; threading.Event().wait()
        report(1)
        """
    )
    turns = [engine.open(request) for request in env.begin_step(1)]
    released: list[Any] = []
    while not released or not pipelines.log():
        replies, over = env.on_turns(turns, patience_s=0.05)
        released += over
        turns = [engine.reply(reply) for reply in replies]
    board: Any = env._conversations
    assert not board._is_any_ready(), "the one that is over has been told"


def test_the_steps_of_a_pipeline_follow_each_other(pipelines: Pipelines) -> None:
    env, engine = pipelines.make("report(TASK['step'] + len(ask('Well?')))")
    assert [play(env, engine, step).trajectories[0].reward for step in (1, 2)] == [4.0, 5.0]


def test_columns_of_a_row_are_words_of_the_command(pipelines: Pipelines) -> None:
    batch = pipelines.play(
        "note(sys.argv[1:]); ask('Well?'); report(1)",
        command="python agent.py {prompt} --level={level} '{no} {such}' {language}",
        rows=[{"prompt": "Is {level} high?\n", "level": 3, "language": "python"}],
        group_size=1,
    )
    assert [each.reward for each in batch.trajectories] == [1.0]
    assert pipelines.log() == [repr(["Is {level} high?\n", "--level=3", "{no} {such}", "python"])]


def test_a_command_may_have_long_words(pipelines: Pipelines) -> None:
    batch = pipelines.play(command=in_words("ask('Well?'); report(1)" + " " * 9000), group_size=1)
    assert [each.outcome for each in batch.trajectories] == ["ended"]


def test_a_program_finds_no_key_of_another_model(pipelines: Pipelines, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_ORG_ID", "ours")
    monkeypatch.setenv("ANTHROPIC_AUTH_TOKEN", "secret")
    monkeypatch.setenv("PROGRAMS_SEE", "this")
    names = ("OPENAI_ORG_ID", "ANTHROPIC_AUTH_TOKEN", "PROGRAMS_SEE")
    pipelines.play(f"note([os.environ.get(name) for name in {names!r}]); ask('Well?'); report(1)", group_size=1)
    assert pipelines.log() == ["[None, None, 'this']"]


def test_a_program_in_namespaces_finds_its_model(pipelines: Pipelines) -> None:
    if (reason := process.unavailable_reason()) is not None:
        pytest.skip(f"no namespaces here: {reason}")
    batch = pipelines.play(command=in_words("ask('Well?'); report(1)"), sandbox="process")
    assert [(each.reward, each.outcome) for each in batch.trajectories] == [(1.0, "ended")] * 2


SOLVED = """
    import subprocess
    instruction = TASK["row"]["instruction"]
    ask(instruction)
    if TASK["sample"] == 0 and TASK["row"]["name"] == "count-lines":
        subprocess.run("wc -l < notes.txt > count.txt", shell=True, check=True)
"""


def test_a_harbor_suite_gives_the_reward_of_its_own_tests(pipelines: Pipelines) -> None:
    if (reason := process.unavailable_reason()) is not None:
        pytest.skip(f"no namespaces here: {reason}")
    suite = pipelines.folder / "suite"
    suite.mkdir()
    os.symlink(SUITE / "count-lines", suite / "count-lines")
    batch = pipelines.play(command=in_words(SOLVED), name="harbor", path=str(suite), say=lambda before: "I shall.")
    assert [(each.reward, each.outcome) for each in batch.trajectories] == [(1.0, "ended"), (0.0, "ended")]


def test_a_program_of_a_harbor_suite_that_cannot_begin_says_why(pipelines: Pipelines) -> None:
    if (reason := process.unavailable_reason()) is not None:
        pytest.skip(f"no namespaces here: {reason}")
    with pytest.raises(PipelineError, match="ended with exit code 1: ModuleNotFoundError: No module named 'no_such'"):
        pipelines.play(command="python -c 'import no_such'", name="harbor", path=str(SUITE), num_retries=0)


def test_the_default_program_of_a_harbor_suite_runs_what_the_model_says(pipelines: Pipelines) -> None:
    if (reason := process.unavailable_reason()) is not None:
        pytest.skip(f"no namespaces here: {reason}")
    suite = pipelines.folder / "suite"
    suite.mkdir()
    os.symlink(SUITE / "count-lines", suite / "count-lines")

    def say(before: str) -> str:
        return "Done." if "exit code 0" in before else "```bash\nwc -l < notes.txt > count.txt\n```"

    batch = pipelines.play(name="harbor", path=str(suite), say=say, rollout={"max_prompt_tokens": 1000})
    assert [(each.reward, each.num_turns) for each in batch.trajectories] == [(1.0, 2)] * 2
