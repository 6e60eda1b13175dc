"""The docker kind against a stand-in for the command: its container is a folder, and it writes down its words."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from tests.waiting import until

from rlmux.core.errors import PipelineError, UserError
from rlmux.rl.sandboxes import Gateway, SandboxLimits, docker, make_sandbox
from rlmux.rl.sandboxes.harbor_suite import HarborVerdict, prepare, verify

STAND_IN = r"""#!{python}
import json, os, shutil, signal, sys
from pathlib import Path
state, words = Path({state!r}), sys.argv[1:]
with open(state / "words", "a") as file:
    file.write(json.dumps(words) + "\n")
inside = lambda path: state / "root" / path.lstrip("/")
match words:
    case ["version"] if (state / "no_daemon").exists():
        sys.exit("Cannot connect to the Docker daemon. Is the docker daemon running?")
    case ["image", "inspect", tag]:
        sys.exit(not (state / tag).exists())
    case ["build", "-t", tag, folder]:
        if "RUN false" in (Path(folder) / "Dockerfile").read_text():
            sys.exit("ERROR: process did not complete\n")
        (state / tag).touch()
    case ["run", *_]:
        if (state / "no_container").exists():
            sys.exit("docker: no space left on device")
        print("up", flush=True)
        sys.stdin.read()
    case ["exec", "-u", "0", _, "mkdir", "-p", path]:
        inside(path).mkdir(parents=True, exist_ok=True)
    case ["exec", "-u", "0", _, "sh", "-c", script, *rest]:
        if script == "kill -9 -1":  # of programs in the container alone
            for pid in (state / "pids").read_text().split() if (state / "pids").exists() else ():
                try:
                    os.kill(int(pid), signal.SIGKILL)
                except ProcessLookupError:
                    pass
        else:
            assert script.startswith("rm -rf")
            shutil.rmtree(inside(rest[0]), ignore_errors=True)
            inside(rest[0]).mkdir(parents=True)
    case ["exec", *rest]:
        while rest[0].startswith("-"):
            rest = rest[2:] if rest[0] == "-w" else rest[1:]
        with open(state / "pids", "a") as file:
            file.write(str(os.getpid()) + "\n")
        if rest[1:] == ["bash", "/tests/test.sh"]:
            assert inside("/tests/test.sh").is_file()
            inside("/logs/verifier/reward.txt").write_text("0.75\n")
        else:
            os.execvp(rest[1], rest[1:])
    case ["cp", source, target]:
        if ":" in source:
            found = inside(source.partition(":")[2])
            if not found.exists():
                sys.exit("Could not find the file in container")
            shutil.copytree(found, target) if found.is_dir() else shutil.copy(found, target)
        elif source.endswith("/."):
            shutil.copytree(source, inside(target.partition(":")[2]), dirs_exist_ok=True)
        else:
            shutil.copy(source, inside(target.partition(":")[2]))
"""


@pytest.fixture
def state(tmp_path, monkeypatch) -> Path:
    """The folder of the stand-in, which is the only `docker` on PATH."""
    folder = tmp_path / "state"
    (folder / "root").mkdir(parents=True)
    command = tmp_path / "bin" / "docker"
    command.parent.mkdir()
    command.write_text(STAND_IN.replace("{python}", sys.executable).replace("{state!r}", repr(str(folder))))
    command.chmod(0o755)
    monkeypatch.setenv("PATH", f"{command.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(docker.tempfile, "gettempdir", lambda: str(tmp_path))
    docker.unavailable_reason.cache_clear()
    yield folder
    docker.unavailable_reason.cache_clear()


def said_to(state: Path, first: str) -> list[list[str]]:
    lines = (state / "words").read_text().splitlines()
    return [words for words in map(json.loads, lines) if words[0] == first]


@pytest.fixture
def container(state, tmp_path, task):
    made = []

    def container(changed=task, **limits):
        root = tmp_path / "sandboxes" / str(len(made))
        made.append(make_sandbox("docker", root, limits=SandboxLimits(**limits), environment=changed))
        return made[-1]

    yield container
    for sandbox in made:
        sandbox.close()


def test_no_command_and_no_daemon_are_reasons(state, tmp_path, task, monkeypatch):
    (state / "no_daemon").touch()
    with pytest.raises(UserError, match="Is the docker daemon running"):
        make_sandbox("docker", tmp_path / "x", limits=SandboxLimits(), environment=task)
    docker.unavailable_reason.cache_clear()
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert docker.unavailable_reason() == "no `docker` on PATH"


def test_an_image_is_built_once_for_the_same_files(state, task):
    tag = docker.image_of(task)
    assert docker.image_of(task) == tag
    assert len(said_to(state, "build")) == 1
    (task.folder / "environment" / "data").write_text("new")
    assert docker.image_of(task) != tag
    assert len(said_to(state, "build")) == 2
    assert docker.image_of(replace(task, docker_image="ready:1")) == "ready:1"


def test_an_image_that_cannot_be_built_is_the_users_mistake(state, task):
    (task.folder / "environment" / "Dockerfile").write_text("FROM x\nRUN false\n")
    with pytest.raises(UserError, match="Dockerfile: docker build: ERROR: process did not complete"):
        docker.image_of(task)


def test_a_container_has_the_limits_and_ends_when_it_is_closed(container, state, task, run):
    sandbox = container(
        replace(task, cpus=2, memory_bytes=1000), memory_bytes=5000, num_processes=9, file_bytes=100_000
    )
    assert run(sandbox, "echo", "hi", env={"A": "b c"}, cwd="/x") == (0, "hi\n")
    (words,) = said_to(state, "run")
    limits = {"--memory=1000", "--pids-limit=9", "--cpus=2", "--network=host", "--ulimit=fsize=100000", "--rm", "-i"}
    assert limits <= set(words)
    name = next(word for word in words if word.startswith("--name=")).partition("=")[2]
    assert said_to(state, "exec")[0] == ["exec", "-w", "/x", "-eA=b c", name, "echo", "hi"]
    sandbox.close()
    sandbox.close()
    assert said_to(state, "rm") == [["rm", "-f", name]]


@pytest.mark.parametrize(("has_gateway", "network"), [(True, "host"), (False, "none")])
def test_a_task_without_internet_has_a_network_for_a_gateway_alone(has_gateway, network, container, state, task, run):
    sandbox = container(replace(task, allow_internet=False))
    gateway = Gateway(port=1, socket=Path("/none"))
    run(sandbox, "true", gateway=gateway if has_gateway else None)
    assert f"--network={network}" in said_to(state, "run")[0]
    if not has_gateway:
        with pytest.raises(PipelineError, match="has no network"):
            run(sandbox, "true", gateway=gateway)


def test_a_container_that_does_not_start_is_named_with_the_reason(container, state, run):
    (state / "no_container").touch()
    with pytest.raises(PipelineError, match="docker run: docker: no space left on device"):
        run(container(), "true")


def test_kill_ends_the_program_in_the_container(container, state, tmp_path):
    program = container().start(["sleep", "600"], env={}, output=tmp_path / "output")
    until((state / "pids").exists, "the program", process=program)
    program.kill()
    assert program.poll() == -signal.SIGKILL
    assert said_to(state, "exec")[-1][-3:] == ["sh", "-c", "kill -9 -1"]


def test_tests_are_copied_in_and_the_reward_out(container, state, task, tmp_path):
    sandbox = container()
    prepare(task, sandbox)
    assert verify(task, sandbox, tmp_path / "tests") == HarborVerdict(reward=0.75, problem=None)
    assert (state / "root" / "tests" / "test.sh").read_text() == (task.folder / "tests" / "test.sh").read_text()
