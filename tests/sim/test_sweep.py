"""Many simulations at once: in the order of the tasks, and by processes that end with the one that asked."""

from __future__ import annotations

import signal
import subprocess
import sys

import psutil
import pytest

from rlmux.sim.sweep import spread

ASLEEP = """
import time
from rlmux.sim.sweep import spread
print("asleep", flush=True)
spread(time.sleep, [600.0] * 2, num_processes=2)
"""
LIMIT_S = 60.0


def test_results_come_in_the_order_of_the_inputs():
    told: list[tuple[int, int]] = []
    assert spread(abs, [-3, -1, -2], num_processes=2, progress=lambda *done: told.append(done)) == (3, 1, 2)
    assert told == [(1, 3), (2, 3), (3, 3)]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_no_worker_outlives_a_parent_that_a_signal_ends(number):
    with subprocess.Popen([sys.executable, "-c", ASLEEP], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        parent.stdout.readline()
        family: list[psutil.Process] = []
        while len(family) < 4:  # fork server, resource tracker, two workers
            family = psutil.Process(parent.pid).children(recursive=True)
        parent.send_signal(number)
    _, alive = psutil.wait_procs(family, timeout=LIMIT_S)
    for one in alive:
        one.kill()
    assert not alive
