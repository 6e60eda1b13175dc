"""Nothing that a test started outlives a test run that is killed."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

PARENT = """
import subprocess, sys, time
from tests import guardian
guardian.start()
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
print(child.pid, flush=True)
while sys.argv[1:]:
    time.sleep(0.1)  # a signal that comes just before the call does not end it
"""


@pytest.mark.skipif(sys.platform != "linux", reason="guards by /proc")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT, None], ids=["killed", "interrupted", "done"])
def test_what_was_started_in_a_session_of_its_own_ends_with_the_tests(number):
    words = [sys.executable, "-c", PARENT, *(["stays"] if number else [])]
    root = Path(__file__).parent.parent
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, cwd=root) as parent:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        if number is not None:
            parent.send_signal(number)
    _, alive = psutil.wait_procs([child], timeout=60)
    child.kill() if alive else None
    assert not alive
