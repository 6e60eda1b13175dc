"""Many simulations at once: in the order of the tasks, and by processes that end with the one that asked."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from types import SimpleNamespace

import psutil
import pytest
from tests.waiting import until

from rlmux.core.errors import UserError
from rlmux.sim.results.sweep import PIPELINE_BYTES, PROCESS_BYTES, SimRun, num_fitting, spread, sweep
from rlmux.sim.workloads import catalog

BUSY = """
import timeit
from rlmux.sim.results.sweep import spread
work = "print('busy', file=open('told', 'a'))\\nwhile True: pass"
spread(timeit.timeit, [work] * 5, num_processes=2)
"""
UNGUARDED = """
from rlmux.sim.results.sweep import spread
print("once")
print(spread(abs, [-3, -1], num_processes=2))
"""
LIMIT_S = 120.0


def test_a_simulation_too_large_for_the_memory_is_refused_before_it_starts(monkeypatch):
    available = PROCESS_BYTES + 100 * PIPELINE_BYTES
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=available))
    with pytest.raises(UserError, match=r"200 pipelines needs about .* accepted: at most 100 pipelines"):
        sweep([SimRun(workload=catalog.build("weave"), policy="solo")])
    assert num_fitting([SimRun(workload=catalog.build("pair"), policy="solo")]) == 1


def test_results_come_in_the_order_of_the_inputs():
    told: list[tuple[int, int]] = []
    assert spread(abs, [-3, -1, -2], num_processes=2, progress=lambda *done: told.append(done)) == (3, 1, 2)
    assert told == [(1, 3), (2, 3), (3, 3)]


@pytest.mark.parametrize("is_piped", [False, True])
def test_workers_do_not_run_the_script_that_asked(tmp_path, is_piped):
    script = tmp_path / "script.py"
    script.write_text(UNGUARDED)
    asked = {"input": UNGUARDED} if is_piped else {}
    words = [sys.executable] if is_piped else [sys.executable, str(script)]
    done = subprocess.run(words, **asked, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert (done.returncode, done.stdout) == (0, "once\n(3, 1)\n"), done.stderr


@pytest.mark.parametrize(
    "number", [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.slow), signal.SIGINT]
)
def test_no_worker_outlives_a_parent_that_a_signal_ends(tmp_path, number):
    told = tmp_path / "told"
    with subprocess.Popen([sys.executable, "-c", BUSY], cwd=tmp_path, start_new_session=True) as parent:
        until(lambda: told.exists() and len(told.read_text().splitlines()) >= 2, "two busy workers", process=parent)
        family = psutil.Process(parent.pid).children(recursive=True)  # fork server, resource tracker, two workers
        if number == signal.SIGINT:
            os.killpg(parent.pid, number)  # as Ctrl-C in a terminal
        else:
            parent.send_signal(number)
        _, alive = psutil.wait_procs(family, timeout=LIMIT_S)
        for one in alive:
            one.kill()
    assert not alive
