"""What holds for programs in a folder and in namespaces alike: their end is the end of all that they started."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.waiting import until

from rlmux.core.errors import PipelineError, UserError
from rlmux.rl.sandboxes import KINDS, SandboxLimits, docker, make_sandbox, process

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes are found in /proc")
KINDS_HERE = pytest.mark.parametrize("kind", ["folder", "process"])
LEAVES_A_CHILD = """
import os, sys, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.environ.clear()
        os.execv(sys.executable, [sys.executable, "-c", "import time; open('is_there', 'w'); time.sleep(600)", MARK])
    os._exit(0)
while not os.path.exists("is_there"):
    time.sleep(0.01)
"""
GOES_ON = "\nopen('goes_on', 'w')\ntime.sleep(600)"


def leaving(mark: str, then: str = "") -> list[str]:
    return [sys.executable, "-c", LEAVES_A_CHILD.replace("MARK", repr(mark)) + then]


def running(mark: str) -> list[str]:
    """Processes of the whole machine with this word in their command, but for those with it in a longer word."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            words = (path / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if mark.encode() in words:
            found.append(path.name)
    return found


@pytest.fixture
def mark() -> str:
    return f"mark-{os.urandom(8).hex()}"


@KINDS_HERE
def test_a_program_ends_with_its_code_and_its_output_is_in_the_file(kind, make, run):
    assert run(make(kind), "bash", "-c", "echo out; echo err >&2; exit 7") == (7, "out\nerr\n")


@KINDS_HERE
def test_a_program_that_a_signal_ended_ends_with_its_number(kind, make, run):
    assert run(make(kind), "bash", "-c", "kill -SEGV $$")[0] == -signal.SIGSEGV


@KINDS_HERE
def test_a_program_that_is_not_there_ends_with_127_and_says_so(kind, make, run):
    code, said = run(make(kind), "no-such-program")
    assert code == 127
    assert "no-such-program: [Errno 2] No such file" in said


@KINDS_HERE
def test_a_program_has_its_own_home_and_little_of_our_environment(kind, make, run, monkeypatch):
    monkeypatch.setenv("MY_API_KEY", "secret")
    sandbox = make(kind)
    code, said = run(
        sandbox, "bash", "-c", "touch ~/in_home $TMPDIR/in_tmp; pwd; echo $GIVEN $MY_API_KEY", env={"GIVEN": "1"}
    )
    assert code == 0
    assert said.splitlines()[1:] == ["1"]
    assert said.splitlines()[0] == ("/app" if sandbox.has_own_root else str(sandbox.path("/app")))
    assert sandbox.path("/sandbox/in_home").exists()
    assert sandbox.path("/tmp/in_tmp").exists()


@KINDS_HERE
def test_what_a_program_leaves_behind_ends_with_it(kind, make, run, mark):
    sandbox = make(kind)
    assert run(sandbox, *leaving(mark))[0] == 0
    assert sandbox.path("/app/is_there").exists()
    assert running(mark) == []


@KINDS_HERE
def test_kill_ends_children_that_left_their_session(kind, make, mark, tmp_path):
    sandbox = make(kind)
    program = sandbox.start(leaving(mark, GOES_ON), env={}, output=tmp_path / "output")
    until(sandbox.path("/app/goes_on").exists, "its child", process=program)
    assert running(mark) != []
    assert program.poll() is None
    program.kill()
    assert running(mark) == []
    assert program.poll() == -signal.SIGKILL
    program.kill()


@KINDS_HERE
def test_close_ends_what_runs_and_removes_the_folder_and_may_be_called_again(kind, make, mark, tmp_path):
    sandbox = make(kind)
    program = sandbox.start(leaving(mark, GOES_ON), env={}, output=tmp_path / "output")
    until(sandbox.path("/app/goes_on").exists, "its child", process=program)
    sandbox.close()
    assert running(mark) == []
    assert list((tmp_path / "sandboxes").iterdir()) == []
    sandbox.close()


@KINDS_HERE
def test_close_removes_folders_that_a_program_closed_and_follows_no_link(kind, make, run, tmp_path):
    (tmp_path / "kept").mkdir(mode=0o750)
    (tmp_path / "kept" / "file").touch()
    sandbox = make(kind)
    script = f"mkdir -p a/b && touch a/b/c && ln -s {tmp_path / 'kept'} a/link && chmod 0 a/b a"
    assert run(sandbox, "bash", "-c", script)[0] == 0
    sandbox.close()
    assert list((tmp_path / "sandboxes").iterdir()) == []
    assert (tmp_path / "kept" / "file").exists()
    assert (tmp_path / "kept").stat().st_mode & 0o777 == 0o750


STARTER = """
import sys, time
from pathlib import Path
from rlmux.rl.sandboxes import SandboxLimits, make_sandbox
kind, root, output, *argv = sys.argv[1:]
program = make_sandbox(kind, Path(root), limits=SandboxLimits()).start(argv, env={}, output=Path(output))
time.sleep(600)
"""


@KINDS_HERE
def test_programs_die_with_the_process_that_started_them(kind, make, mark, tmp_path):
    make(kind)  # or skip
    root = tmp_path / "sandboxes" / "other"
    words = [kind, str(root), str(tmp_path / "output"), *leaving(mark, GOES_ON)]
    starter = subprocess.Popen([sys.executable, "-c", STARTER, *words])
    try:
        until((root / "app" / "goes_on").exists, "its child", process=starter)
        before = running(mark)
    finally:
        starter.kill()
        starter.wait()
    assert before != []
    until(lambda: not running(mark), "the end of its programs")


@KINDS_HERE
def test_a_guard_leaves_nothing_when_it_is_asked_to_go(kind, make, mark, tmp_path):
    sandbox = make(kind)
    program = sandbox.start(leaving(mark, GOES_ON), env={}, output=tmp_path / "output")
    until(sandbox.path("/app/goes_on").exists, "its child", process=program)
    os.kill(program.pid, signal.SIGTERM)
    program.kill()
    assert running(mark) == []


@KINDS_HERE
def test_signals_have_their_usual_effect_on_a_program(kind, make, run):
    for name in ("TERM", "INT", "HUP", "PIPE", "XFSZ"):
        assert run(make(kind), "bash", "-c", f"kill -{name} $$")[0] == -getattr(signal, f"SIG{name}")


@KINDS_HERE
def test_a_file_ends_at_the_limit_and_so_does_the_output(kind, make, run):
    sandbox = make(kind, file_bytes=50_000)
    assert run(sandbox, "bash", "-c", "head -c 100000 /dev/zero > big")[0] not in (0, None)
    assert sandbox.path("/app/big").stat().st_size == 50_000
    code, said = run(sandbox, "head", "-c", "100000", "/dev/zero")
    assert code == -signal.SIGXFSZ
    assert len(said) == 50_000


@KINDS_HERE
def test_memory_ends_at_the_limit(kind, make, run):
    sandbox = make(kind, memory_bytes=200 * 2**20)
    program = "import sys; b = bytearray(int(sys.argv[1])); print('ok')"
    assert run(sandbox, sys.executable, "-c", program, str(50 * 2**20)) == (0, "ok\n")
    code, said = run(sandbox, sys.executable, "-c", program, str(250 * 2**20))
    assert code == 1
    assert "MemoryError" in said


@KINDS_HERE
def test_a_link_on_the_way_is_not_followed_from_outside(kind, make, run, tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "file").write_text("kept")
    sandbox = make(kind)
    assert run(sandbox, "bash", "-c", f"ln -s {outside} link; ln -s {outside / 'file'} name")[0] == 0
    for path in ("/app/link/file", "/app/link", "/app/name"):
        with pytest.raises(PipelineError, match="link"):
            sandbox.path(path)
    (tmp_path / "new").write_text("new")
    sandbox.put(tmp_path / "new", "/app/name")
    sandbox.clear("/app/link")
    assert sandbox.path("/app/name").read_text() == "new"
    assert sandbox.path("/app/link").is_dir()
    assert (outside / "file").read_text() == "kept"


def test_an_unknown_kind_is_refused_with_those_that_are_accepted(tmp_path):
    with pytest.raises(UserError, match=f"unknown kind 'jail'; accepted: {', '.join(KINDS)}"):
        make_sandbox("jail", tmp_path / "x", limits=SandboxLimits())


@pytest.mark.parametrize(("module", "accepted"), [(process, "docker, or folder"), (docker, "process, or folder")])
def test_a_kind_that_this_machine_does_not_have_is_refused_with_the_reason(
    module, accepted, tmp_path, monkeypatch, task
):
    monkeypatch.setattr(module, "unavailable_reason", lambda: "not today")
    kind = module.__name__.rpartition(".")[2]
    with pytest.raises(UserError, match=f"sandbox: {kind}: not on this machine: not today; accepted: {accepted}"):
        make_sandbox(kind, tmp_path / "x", limits=SandboxLimits(), environment=task)


def test_docker_needs_a_task(tmp_path):
    with pytest.raises(UserError, match="accepted: a Harbor suite, or process"):
        make_sandbox("docker", tmp_path / "x", limits=SandboxLimits())
