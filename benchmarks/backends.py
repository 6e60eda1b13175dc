"""What a backend costs: one call's round trip, a run's control overhead, how soon a placed pipeline samples.

    python benchmarks/backends.py                    local and ray (where it is installed)
    python benchmarks/backends.py --steps 20 --repeats 3 --json

The demo pair, without its warm start, runs under each backend in turn; medians. A round trip is a call for
the worker's process id. Placement to first token: from a pipeline's Admit to its first rollout report, workers
started and weights made on the way. Control overhead is the run's own figure (docs/report.md).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from rlmux.core.actions import Admit, RunStage
from rlmux.core.events import ChunkFinished, StageFinished
from rlmux.core.model import DeviceId, Stage
from rlmux.core.policies import POLICIES
from rlmux.report.log import LogReader
from rlmux.runtime.backend import Submission
from rlmux.runtime.local import local_backend
from rlmux.runtime.run import run_pipelines
from rlmux.spec.load import load_spec

EXAMPLE = Path(__file__).parent.parent / "examples" / "two_pipelines.yaml"
NUM_CALLS = 300


def round_trips_s(make_backend: Callable[..., Any], spec: Any) -> tuple[list[float], float]:
    """(of calls one after another, the first, which starts the worker, left out; processor seconds of this process
    for one of them)."""
    with tempfile.TemporaryDirectory() as folder:
        backend = make_backend(spec.cluster, Path(folder), options=None)
        workplace = backend._workplace
        worker = workplace.spawn(
            "nothing", __import__, ("os",), device=DeviceId("rollout", 0, 0),
            log_path=Path(folder) / "log", call_limit_s=60.0,
        )  # fmt: skip
        seconds = []
        for _ in range(NUM_CALLS):
            answered: list[Any] = []
            start_s = time.perf_counter()
            worker.call(0.0, "getpid", (), answered.append)
            while not answered:
                for ready in workplace.wait(1.0):
                    ready.receive(0.0)
            seconds.append(time.perf_counter() - start_s)
            if len(seconds) == 1:
                cpu_s = -time.process_time()
        cpu_s += time.process_time()
        workplace.forget(worker)
        worker.end()
        backend.close()
    return seconds[1:], cpu_s / (NUM_CALLS - 1)


def one_run(name: str, make_backend: Callable[..., Any], spec: Any) -> dict[str, Any]:
    """Figures of one run of the pair."""
    submissions = [Submission(pipeline=one.pipeline, plan=one.plan) for one in spec.pipelines]
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent) / "run"
        result = run_pipelines(
            spec.cluster, submissions, POLICIES["rollmux"](), folder,
            spec={}, backend_name=name, make_backend=make_backend,
        )  # fmt: skip
        summary = result.summary
        return {
            "makespan_s": summary["makespan_s"],
            "control_overhead": summary["control_overhead"],
            "first_token_s": max(first_tokens_s(folder).values()),
            "weights": {one: fields["weights_sha256"] for one, fields in summary["pipelines"].items()},
        }


def first_tokens_s(folder: Path) -> dict[str, float]:
    admitted: dict[str, float] = {}
    first: dict[str, float] = {}
    rollouts: dict[int, str] = {}
    with LogReader(folder) as log:
        for entry in log.entries():
            match entry.value:
                case Admit(pipeline=pipeline):
                    admitted[pipeline] = entry.time_s
                case RunStage(stage=Stage.GENERATE, pipeline=pipeline, order=order):
                    rollouts[order] = pipeline
                case ChunkFinished(order=order) | StageFinished(order=order) if order in rollouts:
                    first.setdefault(rollouts[order], entry.time_s - admitted[rollouts[order]])
    return first


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    sets = [f"pipelines.*.steps={arguments.steps}", "pipelines.*.warm_start.updates=0"]
    spec = load_spec(EXAMPLE, overrides=sets)
    backends: dict[str, Callable[..., Any]] = {"local": local_backend}
    try:
        from rlmux.runtime.ray_backend import ray_backend
    except ModuleNotFoundError:
        print("ray is not installed: local only")
    else:
        os.environ.setdefault("RAY_AUTH_MODE", "disabled")
        backends["ray"] = partial(ray_backend, address="local")
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in backends}
    for _ in range(arguments.repeats):
        for name, make_backend in backends.items():
            runs[name].append(one_run(name, make_backend, spec))
    rows: dict[str, dict[str, Any]] = {}
    for name, make_backend in backends.items():
        trips, cpu_s = round_trips_s(make_backend, spec)
        rows[name] = {
            "round_trip_ms": statistics.median(trips) * 1e3,
            "round_trip_p95_ms": sorted(trips)[int(len(trips) * 0.95)] * 1e3,
            "call_cpu_ms": cpu_s * 1e3,
            **{
                key: statistics.median(run[key] for run in runs[name])
                for key in ("makespan_s", "control_overhead", "first_token_s")
            },
            "same_weights": all(run["weights"] == runs["local"][0]["weights"] for run in runs[name]),
        }
    if arguments.json:
        print(json.dumps(rows))
    else:
        for name, row in rows.items():
            print(name, " ".join(f"{key} {value:.4g}" for key, value in row.items()))


if __name__ == "__main__":
    main()
