"""Seconds of a start, by the clock and of CPU: commands, the fork server's imports, a run to its first sampled token.

    python benchmarks/start.py [--rounds N] [SOURCE...]

    SOURCE   a folder `src` of rlmux, such as one of another commit; by default this one. Sources take turns.

`run` trains one step of the demo pair without SFT warm-up. Its clock stops where the first chunk begins to sample; its
CPU seconds are those of the whole run, workers included. A round before the first compiles modules. Medians.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from rlmux.core.events import ChunkFinished, StageFinished
from rlmux.log.run_log import LogReader

ROOT = Path(__file__).parents[1]
RLMUX = (sys.executable, "-m", "rlmux")
PAIR = "examples/01_two_pipelines.yaml"
COMMANDS = {
    "--help": (*RLMUX, "--help"),
    "plan": (*RLMUX, "plan", "examples/07_cluster_what_if.yaml"),
    "check": (*RLMUX, "check", PAIR),
    "fork server": (sys.executable, "-c", "import rlmux.runtime.workers.fork_server_imports"),
    "run": (*RLMUX, "run", PAIR, "--set", "defaults.steps=1", "--set", "defaults.sft_warmup.updates=0", "--out"),
}


def measure(name: str, source: Path) -> tuple[float, float]:
    """(seconds, CPU seconds) of a command with all that it started."""
    with tempfile.TemporaryDirectory() as scratch:
        command = [*COMMANDS[name], *([scratch + "/run"] if name == "run" else [])]
        os.environ["PYTHONPATH"] = str(source)
        before, start_s = os.times(), time.monotonic()
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        assert process.stderr is not None
        line_s = next((time.monotonic() for line in process.stderr if "step 1/1" in line), 0.0)
        assert process.wait() == 0, command
        seconds = time.monotonic() - start_s
        with suppress(ChildProcessError):
            while os.wait():  # orphans of the command, such as its fork server
                pass
        if name == "run":
            seconds = line_s - start_s - _sampled_before_s(Path(scratch, "run"))
    after = os.times()
    return seconds, sum(after[2:4]) - sum(before[2:4])  # of children


def _sampled_before_s(folder: Path) -> float:
    """Seconds from the first sampled token to the first finished step, whose line is printed at once."""
    entries = list(LogReader(folder).entries())
    first = next(entry.value for entry in entries if isinstance(entry.value, ChunkFinished | StageFinished))
    return next(entry.time_s for entry in entries if entry.type == "step") - (first.time_s - first.seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("sources", nargs="*", type=Path, default=[ROOT / "src"], metavar="SOURCE")
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    ctypes.CDLL(None).prctl(36, 1)  # PR_SET_CHILD_SUBREAPER: orphans become our children
    for name in COMMANDS:
        rounds = [[measure(name, source.absolute()) for source in given.sources] for _ in range(given.rounds + 1)]
        for source, measured in zip(given.sources, zip(*rounds[1:], strict=True), strict=True):
            seconds, cpu_s = map(statistics.median, zip(*measured, strict=True))
            print(f"{name:12} {seconds:6.2f} s {cpu_s:6.2f} CPU s  {source}", flush=True)


if __name__ == "__main__":
    main()
