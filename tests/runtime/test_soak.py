"""Pipelines come and go for long: memory, files, processes and the log stay as they are."""

from __future__ import annotations

import gc
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
import pytest

from rlmux.policies import make_policy
from rlmux.runtime.local import SharedMemoryFolder
from rlmux.runtime.run import RunOptions, run_pipelines
from rlmux.runtime.workers.processes import fork_server_pid

NUM_PIPELINES = 14
NUM_STEPS = 3


@dataclass
class Reading:
    num_files: int
    num_processes: int
    num_threads: int
    resident_bytes: int
    log_tail_bytes: int


def workers() -> list[psutil.Process]:
    """Tests of other backends may have left servers of theirs running."""
    return psutil.Process(fork_server_pid()).children(recursive=True)


class Gauge:
    """Reads this process as each pipeline is over, and what came from its fork server."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.readings: list[Reading] = []
        self.num_over = 0

    def update(self, now_s, events, actions, notes) -> None:
        for action in actions:
            if type(action).__name__ != "Release":
                continue
            gc.collect()
            me = psutil.Process()
            self.readings.append(
                Reading(
                    num_files=me.num_fds(),
                    num_processes=len(workers()),
                    num_threads=me.num_threads(),
                    resident_bytes=me.memory_info().rss,
                    log_tail_bytes=(self.folder / "run.db-wal").stat().st_size,
                )
            )


@pytest.mark.slow
def test_pipelines_that_come_and_go_leave_nothing_behind(real, tmp_path):
    submissions = [
        replace(
            real.submission(f"p{number}", seed=number, num_steps=NUM_STEPS),
            submit_at_s=0.5 * number,
        )
        for number in range(NUM_PIPELINES)
    ]
    gauge = Gauge(tmp_path / "run")
    result = run_pipelines(
        real.cluster(), submissions, make_policy("rollmux"), tmp_path / "run", RunOptions(listeners=[gauge]), spec={}
    )
    assert result.is_complete
    assert {one["status"] for one in result.summary["pipelines"].values()} == {"finished"}
    assert len(gauge.readings) == NUM_PIPELINES
    early, late = gauge.readings[NUM_PIPELINES // 3], gauge.readings[-1]
    # The last to be over has no company: it holds at most what any before it held.
    assert late.num_files <= early.num_files + 2
    assert late.num_processes <= max(reading.num_processes for reading in gauge.readings[: NUM_PIPELINES // 2])
    assert late.num_threads <= early.num_threads + 1
    assert late.resident_bytes - early.resident_bytes < 16e6
    assert max(reading.log_tail_bytes for reading in gauge.readings) < 5e6, "1000 pages of 4 KiB"
    assert (tmp_path / "run" / "run.db").stat().st_size < NUM_PIPELINES * NUM_STEPS * 10_000 + 30_000
    assert psutil.wait_procs(workers(), timeout=60)[1] == [], "not even their remains are left"
    assert not SharedMemoryFolder.path_of(tmp_path / "run").exists()
    for name in ("p0", f"p{NUM_PIPELINES - 1}"):
        assert len(list((tmp_path / "run" / name).glob("step_*"))) <= 3


def test_a_chunk_costs_the_log_little(real, tmp_path):
    run_pipelines(
        real.cluster(), [real.submission("one", num_steps=6)], make_policy("rollmux"), tmp_path / "run", spec={}
    )
    assert (tmp_path / "run" / "run.db").stat().st_size < 6 * 20_000 + 30_000
