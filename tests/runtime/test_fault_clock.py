"""The wall clock jumps by days, in every process of a run: nothing notices."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import pytest
from tests.command_line import command

from rlmux.log.run_log import LogReader

SOURCE = Path(__file__).parents[2] / "src" / "rlmux"

JUMPING = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <sys/time.h>
#include <time.h>

static long num_calls;

/* Every 7th look the clock is somewhere else, within ten days of the truth. */
static long jump(void) { return ((num_calls++ / 7 * 7919) % 20 - 10) * 86400L; }

int clock_gettime(clockid_t id, struct timespec *at) {
    static int (*real)(clockid_t, struct timespec *);
    if (!real) real = dlsym(RTLD_NEXT, "clock_gettime");
    int result = real(id, at);
    if (id == CLOCK_REALTIME || id == CLOCK_REALTIME_COARSE) at->tv_sec += jump();
    return result;
}
int gettimeofday(struct timeval *restrict at, void *restrict zone) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    at->tv_sec = now.tv_sec;
    at->tv_usec = now.tv_nsec / 1000;
    return 0;
}
time_t time(time_t *at) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (at) *at = now.tv_sec;
    return now.tv_sec;
}
"""

FILE = """
cluster:
  pools:
    rollout: {devices: 1}
    train: {devices: 1}
policy: rollmux
defaults:
  steps: 4
  model: {hidden_size: 32, layers: 2, heads: 2, kv_heads: 1, intermediate_size: 64}
  sft_warmup: {updates: 4, batch_size: 16}
  rollout: {max_new_tokens: 16, slots: 8}
  algorithm: {prompts_per_step: 4, group_size: 4, micro_batch_size: 4}
pipelines:
  - {name: sort, seed: 1, task: sort}
  - {name: timed, seed: 2, task: {name: sort, reward: "clock_rewards:score", reward_timeout_s: 20}}
"""

REWARDS = """
import time
from itertools import pairwise
from pathlib import Path

def score(data_source, solution_str, ground_truth, extra_info):
    with Path("%s").open("a") as looks:
        looks.write(f"{time.time()}\\n")
    return len(solution_str) / 16
"""


def run(folder: Path, rlmux: Sequence[str], **environment: str) -> dict:
    """`rlmux`: the words of a command line, up to those for rlmux."""
    file, out = str(folder / "file.yaml"), str(folder / "run")
    words = [*rlmux, "run", file, "--out", out, "--json"]
    (folder / "file.yaml").write_text(FILE)
    (folder / "clock_rewards.py").write_text(REWARDS % (folder / "looks"))
    done = subprocess.run(words, env={**os.environ, **environment}, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("cc") is None or sys.platform != "linux", reason="needs a C compiler on Linux")
def test_weights_limits_and_timeline_are_the_same_while_the_clock_jumps(tmp_path):
    (tmp_path / "jumping.c").write_text(JUMPING)
    library = tmp_path / "jumping.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", library, tmp_path / "jumping.c", "-ldl"], check=True)
    calm, jumping = tmp_path / "calm", tmp_path / "jumping"
    calm.mkdir()
    jumping.mkdir()
    undisturbed = run(calm, command())
    started_s = time.monotonic()
    summary = run(jumping, [sys.executable, "-m", "rlmux"], LD_PRELOAD=str(library))
    took_s = time.monotonic() - started_s

    looks = [float(line) for line in (jumping / "looks").read_text().splitlines()]
    steps = [after - before for before, after in pairwise(looks)]
    assert min(steps) < -86_000 < 86_000 < max(steps), "the clock did not jump"
    assert {name: one["weights_sha256"] for name, one in summary["pipelines"].items()} == {
        name: one["weights_sha256"] for name, one in undisturbed["pipelines"].items()
    }
    assert 0 < summary["makespan_s"] < took_s
    for device in summary["devices"].values():
        parts_s = [device[key] for key in ("busy_s", "switch_s", "bubble_s", "idle_s")]
        assert all(0 <= part_s <= took_s for part_s in parts_s)
    with LogReader(jumping / "run") as log:
        times = [entry.time_s for entry in log.entries() if entry.kind == "event"]
    assert times == sorted(times)
    assert 0 <= times[0] <= times[-1] < took_s


def test_no_decision_and_no_limit_reads_the_wall_clock():
    for path in [path for room in ("core", "engines", "rl", "runtime") for path in (SOURCE / room).rglob("*.py")]:
        text = path.read_text()
        if path.name != "metrics_writer.py":  # dates TensorBoard's events, which decides nothing
            assert "time.time(" not in text, path
        if path.name != "folders.py":  # names a run's folder after the time of day, which decides nothing
            assert "datetime.now" not in text, path
