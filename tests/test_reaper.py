"""Nothing outlives a controller that is killed: neither what it marked, nor a server with children that hide."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from tests.waiting import until

from rlmux.reaper import server_command

CONTROLLER = """
import subprocess, sys, time
from pathlib import Path
from rlmux.reaper import marking, server_command

with marking():
    marked = subprocess.Popen(["sleep", "600"], start_new_session=True)
    command = server_command(Path(sys.argv[1]), [sys.executable, "-S", "-c", sys.argv[2]])
    server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
print(marked.pid, server.pid, server.stdout.readline().decode(), flush=True)
time.sleep(600)
"""
SERVER = """
import os, signal, subprocess, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)  # its child does not hear it either
child = subprocess.Popen(["sleep", "600"], env={}, start_new_session=True)
print(os.getpid(), child.pid, flush=True)
time.sleep(600)
"""
ENDS_BY_ITSELF = """
import subprocess, sys
print(subprocess.Popen(["sleep", "600"], env={}, stdout=subprocess.DEVNULL, start_new_session=True).pid, flush=True)
sys.exit(3)
"""
linux_only = pytest.mark.skipif(sys.platform != "linux", reason="no process is found elsewhere")


@linux_only
def test_a_killed_controller_leaves_no_process_and_no_folder_of_a_server(tmp_path: Path) -> None:
    folder = tmp_path / "server"
    folder.mkdir()
    words = [sys.executable, "-c", CONTROLLER, str(folder), SERVER]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as controller:
        assert controller.stdout is not None
        family = [psutil.Process(int(pid)) for pid in controller.stdout.readline().split()]
        controller.kill()
    assert len(family) == 4, "what is marked, the server's reaper, the server and its child"
    assert psutil.wait_procs(family, timeout=60)[1] == []
    assert not folder.exists()


TEMPORARY = """
import time
from multiprocessing.util import get_temp_dir
from rlmux.reaper import marking

with marking():
    print(get_temp_dir(), flush=True)
time.sleep(600)
"""


@linux_only
def test_a_killed_controller_leaves_no_temporary_folder(tmp_path: Path) -> None:
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    words = [sys.executable, "-c", TEMPORARY]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=environment) as controller:
        assert controller.stdout is not None
        folder = Path(controller.stdout.readline().strip())
        assert folder.is_dir()
        controller.kill()
    until(lambda: not folder.exists(), f"{folder} is gone", limit_s=60.0)
    assert list(tmp_path.iterdir()) == []


@linux_only
def test_a_server_that_ends_takes_its_children_along_and_its_exit_code_is_told(tmp_path: Path) -> None:
    command = server_command(tmp_path / "server", [sys.executable, "-S", "-c", ENDS_BY_ITSELF])
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as reaper:
        assert reaper.stdout is not None
        child = int(reaper.stdout.readline())
        assert reaper.wait(timeout=60) == 3
    assert not psutil.pid_exists(child)
