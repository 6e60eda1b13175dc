"""Workers come from a fork server that has imported torch, also where another one was started before."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from rlmux.runtime.workers.processes import fork_server_address, fork_server_pid

IMPORTED = """
import sys
import rlmux.runtime.workers.fork_server_imports

assert {"transformers", "peft"} <= sys.modules.keys()
workers = {"planned_workers", "request_workers", "tenant_hosts"}
assert {f"rlmux.runtime.workers.{name}" for name in workers} <= sys.modules.keys(), "each worker would import them"
assert not any(name.partition(".")[0] == "torchao" for name in sys.modules), "its import initializes CUDA"
import torchao
"""


def test_the_fork_server_imports_what_every_worker_needs_and_no_torchao() -> None:
    pytest.importorskip("torchao")
    subprocess.run([sys.executable, "-c", IMPORTED], check=True, timeout=120)


SCRIPT = """
from multiprocessing import get_context
from rlmux.runtime.workers import processes
from rlmux.runtime.workers.processes import fork_server_pid, warm_up

processes._IMPORTS = "json"  # which modules are imported is of no account here, and torch takes long
if __name__ == "__main__":
    bare = get_context("forkserver").Process(target=print)
    bare.start()
    bare.join()
    pids = [fork_server_pid()]
    for _ in range(2):
        warm_up()
        pids.append(fork_server_pid())
    assert pids[0] != pids[1], "the server without our imports was kept"
    assert pids[1] == pids[2], "a good server was thrown away"
"""


EARLY = """
import os, signal
from rlmux.runtime.workers import processes
from rlmux.runtime.workers.processes import fork_server_pid, warming_up

processes._IMPORTS = "json"  # which modules are imported is of no account here, and torch takes long
def failed_start():
    try:
        with warming_up():
            pid = fork_server_pid()
            raise ValueError
    except ValueError:
        return pid

first = failed_start()
ended = os.waitid(os.P_PID, first, os.WEXITED | os.WNOWAIT)
assert ended.si_status == signal.SIGKILL, "it would import on, after the end of its process"
with warming_up():
    second = fork_server_pid()
assert first != second == failed_start()
assert os.waitid(os.P_PID, second, os.WEXITED | os.WNOWAIT | os.WNOHANG) is None, "others use it"
"""


def test_a_fork_server_that_was_started_early_ends_with_a_failed_start(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(EARLY)
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


UNGUARDED = """
import os, signal
from pathlib import Path
from rlmux.runtime.workers.processes import WorkerProcess, fork_server_pid, warm_up

with Path("runs").open("a") as runs:
    runs.write("again ")
warm_up()
server = fork_server_pid()
os.kill(server, signal.SIGINT)  # Ctrl-C in a terminal while it imports torch
workers = [WorkerProcess("w", __import__, ("os",), cores=(), log_path=Path("log"), call_limit_s=60.0) for _ in range(2)]
for worker in workers:
    said = []
    worker.call(0.0, "getpid", (), said.append)
    worker.receive(0.0)
    assert said == [worker.pid]
    worker.end()
collector = WorkerProcess("c", __import__, ("gc",), cores=(), log_path=Path("log"), call_limit_s=60.0)
said = []
for what in ("isenabled", "get_freeze_count"):
    collector.call(0.0, what, (), said.append)
    collector.receive(0.0)
collector.end()
assert fork_server_pid() == server, "Ctrl-C ended the fork server"
assert said[0], "garbage piles up in workers"
assert said[1] > 0, "what was imported is looked at in each of them"
"""


@pytest.mark.slow
def test_workers_do_not_run_the_script_that_starts_them_again(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(UNGUARDED)
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=300, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    assert (tmp_path / "runs").read_text() == "again "


def test_a_server_that_was_started_without_our_imports_is_replaced_once(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


BORROWER = """
import os, sys
from pathlib import Path
from rlmux.runtime.workers.processes import WorkerProcess, borrow_fork_server

borrow_fork_server(sys.argv[1])
worker = WorkerProcess("w", __import__, ("os",), cores=(), log_path=Path("log"), call_limit_s=60.0)
said = []
worker.call(0.0, "getppid", (), said.append)
worker.receive(0.0)
assert worker.ending() is None
os.kill(worker.pid, 9)
worker.process.join(300)
assert worker.ending() == "killed by SIGKILL"
silent, still_open = os.pipe()
os.dup2(silent, worker.process.sentinel)
assert worker.ending() == "killed by SIGKILL", "told once, though the server has yet to close its end"
print(*said)
"""


BOTH_AT_ONCE = """
import os, sys, threading
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import forkserver
from pathlib import Path
from rlmux.runtime.workers.processes import WorkerProcess, borrow_fork_server

borrow_fork_server(sys.argv[1])
worker = WorkerProcess("w", __import__, ("os",), cores=(), log_path=Path("log"), call_limit_s=60.0)
both, read_signed = threading.Barrier(2), forkserver.read_signed

def when_both_are_about_to_read(sentinel):
    try:
        both.wait(0.5)
    except threading.BrokenBarrierError:
        pass  # the other one waits
    return read_signed(sentinel)

forkserver.read_signed = when_both_are_about_to_read
os.kill(worker.pid, 9)
with ThreadPoolExecutor(2) as threads:
    print([each.result() for each in [threads.submit(worker.how_it_ended) for _ in range(2)]])
"""


SERVER_KILLED = """
import os, signal
from pathlib import Path
from rlmux.runtime.workers import processes
from rlmux.runtime.workers.processes import WorkerProcess, fork_server_pid, warm_up

processes._IMPORTS = "json"  # which modules are imported is of no account here, and torch takes long
warm_up()
def start():
    return WorkerProcess("w", __import__, ("os",), cores=(), log_path=Path("log"), call_limit_s=60.0)

first, second, server = start(), start(), fork_server_pid()
os.kill(server, signal.SIGKILL)
endings = [first.how_it_ended()]
third = start()
assert fork_server_pid() != server
endings.append(second.how_it_ended())
said = f"its fork server, process {server}, was killed by SIGKILL; a new one is started"
assert endings == [said, said], endings
third.kill()
leaves = start()
leaves.call(0.0, "_exit", (255,), print)
assert leaves.how_it_ended() == "exit code 255", "its own doing"
"""


def test_a_worker_that_ends_with_its_fork_server_says_so(tmp_path):
    """Also where a new server was started meanwhile; the exit code alone, 255, says nothing."""
    script = tmp_path / "script.py"
    script.write_text(SERVER_KILLED)
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=300, cwd=tmp_path)
    assert done.returncode == 0, done.stderr


def run_as_borrower(code: str, tmp_path: Path) -> str:
    """What a script says that borrows this process's fork server."""
    script = tmp_path / "script.py"
    script.write_text(code)
    words = [sys.executable, str(script), fork_server_address()]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_two_threads_that_ask_at_once_how_a_worker_ended_are_told_the_same(tmp_path):
    assert run_as_borrower(BOTH_AT_ONCE, tmp_path) == "['killed by SIGKILL', 'killed by SIGKILL']\n"


def test_a_process_may_borrow_the_server_of_another(tmp_path):
    address = fork_server_address()
    assert int(run_as_borrower(BORROWER, tmp_path)) == fork_server_pid()
    assert fork_server_address() == address, "it goes on"


STRANGER = """
from pathlib import Path
from rlmux import plugins
from rlmux.runtime.workers import processes
from rlmux.runtime.workers.processes import WorkerProcess, warm_up

processes._IMPORTS = "rlmux.runtime.checks.preflight"  # torch takes long
plugins.look_in(Path.cwd(), is_first=True)
warm_up()
import queue, statistics
worker = WorkerProcess("w", __import__, ("os",), cores=(), log_path=Path("log"), call_limit_s=60.0)
said = []
worker.call(0.0, "getenv", ("PYTHONSAFEPATH",), said.append)
worker.receive(0.0)
worker.end()
assert said == [None], "programs of the user's would not find their own modules"
import helpers
assert helpers.IS_MINE
"""


def test_files_beside_the_spec_with_names_of_other_modules_disturb_nothing(tmp_path):
    """Not in the fork server, nor in what watches it, nor where rlmux imports late."""
    script, folder = tmp_path / "script.py", tmp_path / "mine"
    script.write_text(STRANGER)
    folder.mkdir()
    for name in ("rlmux", "types", "random", "secrets", "statistics", "queue", "signal"):
        (folder / f"{name}.py").write_text("raise RuntimeError('a module of the user was imported')")
    (folder / "helpers.py").write_text("IS_MINE = True")
    done = subprocess.run([sys.executable, str(script)], cwd=folder, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stderr) == (0, "")


FEW_FILES = """
import os, resource
from pathlib import Path
from rlmux.core.errors import StorageError
from rlmux.runtime.workers import processes
from rlmux.runtime.workers.processes import WorkerProcess, fork_server_pid, warm_up

processes._IMPORTS = "json"  # which modules are imported is of no account here, and torch takes long
warm_up()
resource.setrlimit(resource.RLIMIT_NOFILE, (40, 40))
workers = []
try:
    while True:
        workers.append(WorkerProcess("w", __import__, ("os",), cores=(), log_path=Path("log"), call_limit_s=60.0))
except StorageError as error:
    print(error)
for worker in workers:
    said = []
    worker.call(0.0, "getpid", (), said.append)
    worker.receive(0.0)
    worker.end()
assert os.waitid(os.P_PID, fork_server_pid(), os.WEXITED | os.WNOWAIT | os.WNOHANG) is None
"""


def test_where_no_file_is_left_for_a_worker_the_fork_server_and_the_others_stay(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(FEW_FILES)
    done = subprocess.run([sys.executable, str(script)], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("w: no file is left for another worker: 40 may be open; accepted: a higher limit")


LEAVES_SEMAPHORES = """
from multiprocessing import resource_tracker
from rlmux.runtime.workers import processes
from rlmux.runtime.workers.processes import warm_up

processes._IMPORTS = "json"  # which modules are imported is of no account here, and torch takes long
warm_up()
resource_tracker.register("/rlmux-test-left", "semaphore")
"""


def test_semaphores_that_killed_user_code_leaves_are_not_warned_of(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(LEAVES_SEMAPHORES)
    done = subprocess.run([sys.executable, str(script)], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stderr) == (0, "")
