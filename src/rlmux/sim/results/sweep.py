"""Many simulations at once: every (workload, policy) of a sweep on all cores.

    tasks ─▶ process pool ─▶ results in the order of the tasks; `progress(done, total)` as they come in

A result depends on its task alone, so a sweep gives the same results on one core and on many. Workers end with the
sweep: when it is interrupted, and with its parent process, however that ended. They do not run its script.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import TypeVar

import psutil

from rlmux.core.decision.policy import Policy
from rlmux.core.errors import UserError
from rlmux.hidden_main import hidden_main
from rlmux.policies import make_policy
from rlmux.policies.without_moves import without_moves
from rlmux.sim.models.interference import InterferenceTable
from rlmux.sim.results.decision_cost import DecisionCost, Stopwatch
from rlmux.sim.results.result import SimResult
from rlmux.sim.simulator import simulate
from rlmux.sim.workloads.arrivals import Workload

PROCESS_BYTES = 50e6
PIPELINE_BYTES = 30e3
"""What a simulation takes for each pipeline of its workload, besides the process: 26 kB in the largest that was
measured (`benchmarks/simulator.py --cases day`)."""
T = TypeVar("T")
R = TypeVar("R")
Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class SimRun:
    """One simulation."""

    workload: Workload
    policy: str | Policy
    """A name of POLICIES, or the policy itself."""
    interference: InterferenceTable | None = None
    """Slowdowns of orders on one device; None: as `simulate` estimates them."""
    spans_until_s: float = 0.0
    counts_decisions: bool = False
    """Whether virtual time includes the measured decision time; results then vary with the machine."""
    without_moves: bool = False
    """Whether no pipeline is relocated: for the bill that relocations are compared with."""


def run_simulation(task: SimRun) -> SimResult:
    """The simulation of one task, in this process."""
    policy = task.policy
    if isinstance(policy, str):
        policy = make_policy(policy, seed=task.workload.seed)
    if task.without_moves:
        policy = without_moves(policy)
    decision_cost = None
    if task.counts_decisions:
        watch, neighbours = Stopwatch(), task.workload.neighbours
        simulate(task.workload, policy, interference=task.interference, decision_cost=watch)
        decision_cost = DecisionCost(seconds=watch.means(), takes_cores=neighbours is not None and neighbours.are_cores)
    return simulate(
        task.workload,
        policy,
        interference=task.interference,
        spans_until_s=task.spans_until_s,
        decision_cost=decision_cost,
    )


def sweep(
    tasks: Sequence[SimRun], *, progress: Progress | None = None, num_processes: int | None = None
) -> tuple[SimResult, ...]:
    """The results of all tasks, in their order; as many at once as the machine has memory for.

    Raises UserError where it has not enough for one of them.
    """
    if not tasks:
        return ()
    at_once = min(num_processes or len(os.sched_getaffinity(0)), num_fitting(tasks))
    return spread(run_simulation, tasks, progress=progress, num_processes=at_once)


def num_fitting(tasks: Sequence[SimRun]) -> int:
    """How many of these simulations fit in the memory that is available, whichever they are.

    Raises UserError where the largest does not.
    """
    largest = max((task.workload for task in tasks), key=lambda workload: len(workload.arrivals))
    need = PROCESS_BYTES + PIPELINE_BYTES * len(largest.arrivals)
    available = psutil.virtual_memory().available
    if need > available:
        most = max(0, int((available - PROCESS_BYTES) / PIPELINE_BYTES))
        raise UserError(
            f"workload {largest.name!r}: a simulation of {len(largest.arrivals):,} pipelines needs about "
            f"{need / 1e9:.1f} GB of memory, and {available / 1e9:.1f} GB are available; accepted: at most {most:,} "
            "pipelines on this machine"
        )
    return int(available / need)


def spread(
    function: Callable[[T], R],
    inputs: Sequence[T],
    *,
    progress: Progress | None = None,
    num_processes: int | None = None,
) -> tuple[R, ...]:
    """function(input) for all inputs, in their order. `num_processes=None` takes every core that is ours."""
    num_processes = min(len(inputs), num_processes or len(os.sched_getaffinity(0)))
    on_progress = progress or (lambda done, total: None)
    if num_processes <= 1:
        results = []
        for done, given in enumerate(inputs, 1):
            results.append(function(given))
            on_progress(done, len(inputs))
        return tuple(results)
    context = multiprocessing.get_context("forkserver")
    theirs, ours = context.Pipe(duplex=False)
    pool = ProcessPoolExecutor(num_processes, context, initializer=_end_with, initargs=(theirs,))
    with theirs, ours, pool:
        try:
            with hidden_main():  # workers are started as work is handed in
                futures = [pool.submit(function, given) for given in inputs]
            for done, future in enumerate(as_completed(futures), 1):
                future.result()
                on_progress(done, len(inputs))
        except BaseException:  # an interrupt, too: what the others compute is of no use to anyone, and takes minutes
            ours.close()
            raise
    return tuple(future.result() for future in futures)


def _end_with(pipe: Connection) -> None:
    """End this worker when the pipe closes: its sweep was interrupted, or the parent process is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the asking process's to answer

    def wait() -> None:
        pipe.poll(None)
        os._exit(1)

    threading.Thread(target=wait, name="end-with-pipe", daemon=True).start()
