"""Workers come from a fork server that has imported torch, whoever started one before."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
from multiprocessing import forkserver, get_context
from rlmux.runtime.processes import warm_up

if __name__ == "__main__":
    bare = get_context("forkserver").Process(target=print)
    bare.start()
    bare.join()
    pids = [forkserver._forkserver._forkserver_pid]
    for _ in range(2):
        warm_up()
        pids.append(forkserver._forkserver._forkserver_pid)
    assert pids[0] != pids[1], "the server without torch was kept"
    assert pids[1] == pids[2], "a good server was thrown away"
"""


def test_a_server_that_somebody_else_started_is_replaced_once(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
