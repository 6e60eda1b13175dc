"""A process sandbox shows the machine read-only, no other sandbox, and no network but the gateway."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import threading
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from tests.waiting import until

from rlmux.core.errors import PipelineError, UserError
from rlmux.rl.sandboxes import Gateway, SandboxLimits
from rlmux.rl.sandboxes.process import ProcessSandbox
from rlmux.rl.sandboxes.sandbox import start_guarded

CHECKOUT = Path(__file__).parents[3]
DEVICES = "null zero full random urandom tty fd stdin stdout stderr ptmx pts shm"


@pytest.fixture
def sandbox(make):
    return make("process")


def test_files_of_the_machine_cannot_be_written(sandbox, run):
    target = Path(sys.prefix) / "written_by_a_program"
    code, said = run(sandbox, "bash", "-c", f"ls {sys.prefix}; touch {target}")
    assert code != 0
    assert "bin" in said
    assert "Read-only file system" in said
    assert not target.exists()


def test_a_shown_folder_in_tmp_can_be_read_and_a_hidden_one_in_it_is_empty(tmp_path, run):
    """`tmp_path` lies in the machine's own /tmp."""
    shown = tmp_path / "code"
    (shown / "suite").mkdir(parents=True)
    (shown / "agent.py").write_text("print('here')")
    (shown / "suite" / "solve.sh").write_text("secret")
    sandbox = ProcessSandbox(tmp_path / "all" / "one", SandboxLimits(), hidden=(shown / "suite",), shown=(shown,))
    try:
        assert run(sandbox, "cat", str(shown / "agent.py"))[1].strip() == "print('here')"
        assert run(sandbox, "ls", "-A", str(shown / "suite")) == (0, "")
        code, said = run(sandbox, "touch", str(shown / "new"))
        assert (code != 0, "Read-only" in said) == (True, True)
    finally:
        sandbox.close()


@pytest.mark.parametrize(
    "script",
    [
        "mount -o remount,rw,bind /usr",
        "umount /proc",
        "mkdir /new",
        "touch /etc/x",
        "echo core > /proc/sys/kernel/core_pattern",
        f"unshare -Urm bash -c 'mount -o remount,rw,bind / && touch {CHECKOUT}/x'",
    ],
)
def test_a_program_cannot_undo_its_sandbox(sandbox, run, script):
    code, _ = run(sandbox, "bash", "-c", script)
    assert code not in (0, None)


def test_a_program_has_no_capability(sandbox, run):
    _, said = run(sandbox, "grep", "-E", "^Cap(Prm|Eff|Bnd|Amb)", "/proc/self/status")
    assert {line.split()[1] for line in said.splitlines()} == {"0" * 16}


def test_the_devices_that_programs_expect_are_there_and_no_disk(sandbox, run):
    script = "echo x > /dev/null; head -c 1 /dev/urandom > /dev/shm/x; ls /dev"
    code, said = run(sandbox, "bash", "-c", script)
    assert code == 0
    assert set(said.split()) <= {*DEVICES.split()}


def test_two_sandboxes_do_not_see_each_others_files_or_processes(make, run, tmp_path):
    one, other = make("process"), make("process")
    program = one.start(["bash", "-c", "echo secret > file; sleep 600"], env={}, output=tmp_path / "first")
    until(one.path("/app/file").exists, "its file", process=program)
    outside = one.path("/app/file")
    assert run(other, "cat", str(outside))[0] == 1
    assert run(other, "bash", "-c", "ls -A /app /tmp; cat /proc/[0-9]*/cmdline")[1].count("sleep") == 0
    assert run(other, "bash", "-c", "sleep 600 & kill -9 -1")[0] == 0, "which reaches its own processes alone"
    assert program.poll() is None


def test_the_folder_of_sandboxes_and_hidden_folders_are_seen_empty(make, run, tmp_path):
    make("process")  # or skip
    with TemporaryDirectory(dir="/var/tmp", prefix="rlmux-test-") as outside:  # /tmp is another one inside
        folder = Path(outside)
        for name in ("sandboxes/other", "hidden", "seen"):
            (folder / name).mkdir(parents=True)
            (folder / name / "file").touch()
        hiding = ProcessSandbox(folder / "sandboxes" / "a", SandboxLimits(), hidden=[folder / "hidden"])
        try:
            _, said = run(hiding, "bash", "-c", f"cd {folder} && find . | sort; touch /app/x")
        finally:
            hiding.close()
    assert said.split() == [".", "./hidden", "./sandboxes", "./seen", "./seen/file"]


def test_programs_start_one_after_another_over_the_same_files(sandbox, run):
    assert run(sandbox, "bash", "-c", "echo 1 > a; echo $$") == (0, "2\n")
    assert run(sandbox, "bash", "-c", "cat a; echo $$") == (0, "1\n2\n")


def test_there_is_no_network(sandbox, run):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        socket.create_connection(("127.0.0.1", port)).close()
        code, said = run(sandbox, "bash", "-c", f"cat < /dev/tcp/127.0.0.1/{port}")
        assert code == 1
        assert "Connection refused" in said
    code, said = run(sandbox, "bash", "-c", "cat < /dev/tcp/192.0.2.1/80")
    assert code == 1
    assert "unreachable" in said


def test_abstract_sockets_of_the_machine_are_out_of_reach(sandbox, run):
    name = f"\0rlmux-{os.urandom(6).hex()}"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(name)
        listener.listen()
        code, said = run(
            sandbox, sys.executable, "-c", f"import socket; socket.socket(socket.AF_UNIX).connect({name!r})"
        )
    assert code == 1
    assert "ConnectionRefusedError" in said


@pytest.fixture
def gateway(tmp_path):
    """An HTTP server on a unix socket, which answers with the body; its port is closed outside."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    path = tmp_path / "gateway.socket"
    loop = asyncio.new_event_loop()
    is_listening = threading.Event()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        length = int(head.partition("content-length: ")[2].partition("\r")[0])
        body = await reader.readexactly(length)
        writer.write(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n" + body[::-1])
        await writer.drain()
        writer.close()

    async def serve() -> None:
        async with await asyncio.start_unix_server(answer, path, limit=2**20):
            is_listening.set()
            await ended.wait()

    ended = asyncio.Event()
    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    is_listening.wait()
    yield Gateway(port=port, socket=path)
    loop.call_soon_threadsafe(ended.set)
    thread.join()
    loop.close()


ASKS = """
import sys, os, urllib.request
from concurrent.futures import ThreadPoolExecutor
def ask(number):
    body = (str(number) * 50_000).encode()
    with urllib.request.urlopen(os.environ["OPENAI_BASE_URL"], data=body) as answer:
        return answer.read() == body[::-1]
with ThreadPoolExecutor(4) as pool:
    print(list(pool.map(ask, range(4))))
"""


def test_a_program_reaches_the_gateway_under_its_address_outside(sandbox, run, gateway):
    env = {"OPENAI_BASE_URL": f"http://127.0.0.1:{gateway.port}/v1"}
    assert run(sandbox, sys.executable, "-c", ASKS, env=env, gateway=gateway) == (0, "[True, True, True, True]\n")
    assert run(sandbox, sys.executable, "-c", ASKS, env=env)[0] == 1, "the next program has none"


def test_a_gateway_that_is_gone_ends_the_connection(sandbox, run, tmp_path):
    gateway = Gateway(port=8080, socket=tmp_path / "none")
    _, said = run(sandbox, "bash", "-c", "cat < /dev/tcp/127.0.0.1/8080; echo ended", gateway=gateway)
    assert said.splitlines()[-1] == "ended"


def test_folders_of_the_machine_are_refused_with_what_is_accepted(sandbox, tmp_path):
    with pytest.raises(UserError, match="/usr/src/app is the machine's own; accepted: paths in /app, /tests"):
        sandbox.path("/usr/src/app")
    sandbox.path("/workspace").mkdir()


def test_a_folder_that_the_machine_does_not_have_can_be_one_of_the_sandbox(sandbox, run):
    sandbox.path("/workspace-of-a-test").mkdir()
    assert run(sandbox, "bash", "-c", "pwd; touch x", cwd="/workspace-of-a-test") == (0, "/workspace-of-a-test\n")
    assert sandbox.path("/workspace-of-a-test/x").exists()


def test_the_end_of_the_guard_is_the_end_of_the_programs(sandbox, tmp_path):
    word = os.urandom(6).hex()
    program = sandbox.start(["bash", "-c", f": {word}; touch on; sleep 600; :"], env={}, output=tmp_path / "output")
    until(sandbox.path("/app/on").exists, "the program", process=program)
    os.kill(program.pid, signal.SIGKILL)
    until(lambda: word not in commands(), "its end")


def commands() -> str:
    """The command lines of all processes of the machine."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            found.append(path.read_text(errors="replace"))
    return "\n".join(found)


def test_a_sandbox_that_cannot_be_made_says_why(sandbox, tmp_path):
    namespaces = {"folders": {"app": "/no/such/folder"}, "hidden": [], "port": None, "socket": None}
    with pytest.raises(PipelineError, match=r"sandbox: .* No such file or directory: '/no/such/folder'"):
        start_guarded(
            ["true"], env={}, output=tmp_path / "output", cwd="/", limits=SandboxLimits(), namespaces=namespaces
        )


@pytest.mark.skipif(os.geteuid() == 0, reason="the system exempts root")
def test_the_number_of_processes_is_limited(make, run):
    code, said = run(make("process", num_processes=20), "bash", "-c", "for i in $(seq 40); do sleep 600 & done")
    assert code != 0
    assert "Resource temporarily unavailable" in said
