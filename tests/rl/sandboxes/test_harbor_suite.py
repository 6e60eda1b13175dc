"""Suites in Harbor's layout: what is read, what is refused, and that each of ours is solved by its solution alone."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from rlmux.core.errors import UserError
from rlmux.rl.sandboxes.harbor_suite import HarborVerdict, prepare, read_suite, read_task, solve, verify

SUITE = Path(__file__).parents[3] / "examples" / "harbor" / "suite"
TASKS = read_suite(SUITE)
KINDS_HERE = pytest.mark.parametrize("kind", ["folder", "process"])


@pytest.fixture
def prepared(make, task):
    """The small task in a sandbox."""

    def prepared(kind="process"):
        sandbox = make(kind, environment=task)
        prepare(task, sandbox)
        return sandbox

    return prepared


def test_the_suite_has_ten_tasks_with_short_instructions():
    assert len(TASKS) == 10
    assert [task.name for task in TASKS] == sorted(task.name for task in TASKS)
    assert max(len(task.instruction) for task in TASKS) < 200


@KINDS_HERE
@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)
def test_the_solution_alone_earns_one(task, kind, make, tmp_path):
    sandbox = make(kind, environment=task)
    prepare(task, sandbox)
    before = verify(task, sandbox, tmp_path / "before")
    assert before.problem is None
    assert before.reward < 1
    assert solve(task, sandbox, tmp_path / "solution") == 0, (tmp_path / "solution").read_text()
    assert verify(task, sandbox, tmp_path / "tests") == HarborVerdict(reward=1.0, problem=None)


def test_keys_have_harbors_names_units_and_defaults(task):
    assert (task.agent_timeout_s, task.verifier_timeout_s, task.build_timeout_s) == (None, 60, 600)
    assert (task.cpus, task.memory_bytes, task.allow_internet, task.docker_image) == (None, None, True, None)
    assert task.instruction == "Write yes to answer.txt."
    (task.folder / "task.toml").write_text(
        'new_key = 1\n[agent]\ntimeout_sec = 5\n[environment]\ncpus = 2\nmemory = "2G"\nnetwork_mode = "no-network"\n'
        'env = { A = "${NOT_SET_HERE:-a}", B = "b" }\n[metadata]\nanything = []\n'
    )
    read = read_task(task.folder)
    assert (read.agent_timeout_s, read.cpus, read.memory_bytes, read.allow_internet) == (5, 2, 2 * 2**30, False)
    assert read.environment == {"A": "a", "B": "b"}


def test_a_path_that_is_a_task_is_a_suite_of_one(task):
    assert read_suite(task.folder) == read_suite(task.folder.parent) == [task]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[agent]\ntimeout_sec = '5'", "task.toml: agent.timeout_sec: '5'; accepted: a number of seconds"),
        ("[agent]\ntimeout_sec = -1", "task.toml: agent.timeout_sec: -1; accepted: a number of seconds"),
        ("[verifier]\ntimeout_sec = true", "verifier.timeout_sec: True; accepted: a number of seconds"),
        ("[environment]\nallow_internet = 1", "environment.allow_internet: 1; accepted: true or false"),
        ("[environment]\nmemory = 'much'", "environment.memory: 'much'; accepted: a size such as '2G'"),
        ("[environment.env]\nA = 1", "environment.env.A: 1; accepted: a text"),
        ("[verifier.env]\nA = '${NOT_SET_HERE}'", r"verifier.env: \$\{NOT_SET_HERE\}: not set"),
        ("agent = 1", "task.toml: agent: 1; accepted: a table"),
        ("[[steps]]\nname = 'a'", "task.toml: steps: a task of several steps; accepted: tasks of one"),
        ("[agent", "task.toml: .* accepted: TOML"),
    ],
)
def test_a_wrong_task_toml_is_refused_with_file_and_key(text, said, task):
    (task.folder / "task.toml").write_text(text)
    with pytest.raises(UserError, match=said):
        read_task(task.folder)


@pytest.mark.parametrize("name", ["instruction.md", "tests/test.sh"])
def test_a_task_without_a_needed_file_is_refused(name, task):
    (task.folder / name).unlink()
    with pytest.raises(UserError, match=f"{name}: no such file"):
        read_suite(task.folder.parent)


def test_a_folder_without_tasks_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"no tasks; accepted: a folder whose sub-folders have a task\.toml"):
        read_suite(tmp_path)
    with pytest.raises(UserError, match="no such folder"):
        read_suite(tmp_path / "none")


def test_tests_and_solution_are_not_there_while_the_program_runs(prepared, task, run):
    sandbox = prepared()
    _, said = run(sandbox, "bash", "-c", f"find /tests /solution; ls -A {task.folder}")
    assert said.splitlines()[:2] == ["/tests", "/solution"]
    assert "test.sh" not in said
    assert "solve.sh" not in said


def test_a_reward_that_the_program_wrote_itself_does_not_count(prepared, task, run, tmp_path):
    (task.folder / "tests" / "test.sh").write_text("true\n")
    sandbox = prepared()
    script = "mkdir -p /logs/verifier && echo 1 > /logs/verifier/reward.txt && echo exit > /tests/test.sh"
    assert run(sandbox, "bash", "-c", script)[0] == 0
    verdict = verify(task, sandbox, tmp_path / "tests")
    assert verdict.problem == "wrote no reward to /logs/verifier/reward.txt; tests/test.sh ended with 0"


@pytest.mark.parametrize(
    ("script", "reward", "said"),
    [
        ("echo 0.25 > reward.txt", 0.25, None),
        ("echo 0.25 > reward.txt; exit 3", 0.25, None),
        ("echo abc > reward.txt", None, "reward.txt holds 'abc'; accepted: a number"),
        ("echo nan > reward.txt", None, "reward.txt holds 'nan'; accepted: a number"),
        (": > reward.txt", None, "reward.txt holds ''; accepted: a number"),
        ("exit 3", None, "wrote no reward to /logs/verifier/reward.txt; tests/test.sh ended with 3"),
        ("""echo '{"reward": 0.5, "speed": 3}' > reward.json; echo 1 > reward.txt""", 0.5, None),
        ("""echo '{"score": 0.5}' > reward.json""", 0.5, None),
        ("""echo '{"passed": 3, "failed": 1}' > reward.json; echo 0.75 > reward.txt""", 0.75, None),
        ("""echo '{"a": 1, "b": 2}' > reward.json""", None, "accepted: an object with a number 'reward'"),
        ("echo '[1]' > reward.json", None, "accepted: an object with a number 'reward'"),
        ("echo '{' > reward.json", None, "reward.json holds '{\\n'; accepted: an object of numbers"),
        ("mkfifo reward.txt", None, "wrote no reward"),
        ("ln -s /etc/hostname reward.txt", None, "a link"),
        ("rmdir /logs/verifier; ln -s /etc /logs/verifier", None, "a link"),
    ],
)
def test_the_reward_is_read_as_harbor_does_or_the_problem_is_one_line(script, reward, said, prepared, task, tmp_path):
    (task.folder / "tests" / "test.sh").write_text(f"cd /logs/verifier\n{script}\n")
    verdict = verify(task, prepared(), tmp_path / "tests")
    assert verdict.reward == reward
    assert said is None if verdict.problem is None else said in verdict.problem


@KINDS_HERE
def test_tests_that_do_not_end_are_ended(kind, prepared, task, tmp_path):
    (task.folder / "tests" / "test.sh").write_text("sleep 600\n")
    (task.folder / "task.toml").write_text("[verifier]\ntimeout_sec = 0.5\n")
    verdict = verify(read_task(task.folder), prepared(kind), tmp_path / "tests")
    assert verdict == HarborVerdict(reward=None, problem="tests/test.sh did not finish within 0.5 s")


def test_a_task_without_a_solution_is_refused(prepared, task, tmp_path):
    (task.folder / "solution" / "solve.sh").unlink()
    assert not task.has_solution
    with pytest.raises(UserError, match=r"solve\.sh: no such file; accepted: a task with a solution"):
        solve(task, prepared("folder"), tmp_path / "output")


def test_variables_of_the_task_are_each_programs_own(make, task, tmp_path):
    (task.folder / "task.toml").write_text("[environment.env]\nA = 'a'\n[verifier.env]\nB = '0.5'\n")
    (task.folder / "tests" / "test.sh").write_text('[ "$A" = a ] && echo "$B" > /logs/verifier/reward.txt\n')
    read = read_task(task.folder)
    sandbox = make("process", environment=read)
    prepare(read, sandbox)
    assert verify(read, sandbox, tmp_path / "tests").reward == 0.5
    assert "B" not in os.environ
