"""What a backend costs: one call's round trip, a run's control overhead, how soon a placed pipeline samples.

    python benchmarks/backends.py                    local and ray (where it is installed): a minute and a half
    python benchmarks/backends.py --steps 20 --repeats 3 --json

The demo pair, without its warm start, runs under each backend in turn; medians. A round trip is a call for
the worker's process id. Placement to first token: from a pipeline's Admit to its first rollout report, workers
started and weights made on the way. Control overhead is the run's own figure (docs/report.md). Ray is started anew for
each run, which none of the figures but `start_s` has in it.
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

from rlmux.config.load import load_spec
from rlmux.core.actions import Admit, RunStage
from rlmux.core.events import ChunkFinished, StageFinished
from rlmux.core.model import DeviceId, Stage
from rlmux.policies import make_policy
from rlmux.report.log import LogReader
from rlmux.runtime.backend import Submission
from rlmux.runtime.local import local_backend
from rlmux.runtime.run import run_pipelines

EXAMPLE = Path(__file__).parent.parent / "examples" / "01_two_pipelines.yaml"
NUM_CALLS = 100
ROWS = {
    "round_trip_ms": "round trip of an empty call, median, ms",
    "round_trip_p95_ms": "  95th percentile, ms",
    "call_cpu_ms": "  the controller's processor time for it, ms",
    "control_overhead": "control overhead of the run",
    "first_token_s": "placement to first rollout report, the first pipeline, s",
    "last_first_token_s": "  the last one, s",
    "makespan_s": "makespan of the run, s",
    "start_s": "until the backend is there, s",
    "same_weights": "the weights of every run are the same",
}


class RoundTrips:
    """Of calls one after another; the first, which starts the worker, is left out."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.cpu_s = 0.0
        """Of this process, for all of them."""

    def measure(self, make_backend: Callable[..., Any], spec: Any) -> None:
        with tempfile.TemporaryDirectory() as folder:
            backend = make_backend(spec.cluster, Path(folder), options=None)
            workplace = backend.workplace
            worker = workplace.spawn(
                "nothing/rollout", __import__, ("os",), device=DeviceId("rollout", 0, 0),
                log_path=Path(folder) / "log", call_limit_s=60.0,
            )  # fmt: skip
            _call(workplace, worker)
            cpu_s = time.process_time()
            self.seconds += [_call(workplace, worker) for _ in range(NUM_CALLS)]
            self.cpu_s += time.process_time() - cpu_s
            workplace.forget(worker)
            worker.end()
            backend.close()


def _call(workplace: Any, worker: Any) -> float:
    answered: list[Any] = []
    start_s = time.perf_counter()
    worker.call(0.0, "getpid", (), answered.append)
    while not answered:
        for ready in workplace.wait(1.0):
            ready.receive(0.0)
    return time.perf_counter() - start_s


def one_run(name: str, make_backend: Callable[..., Any], spec: Any) -> dict[str, Any]:
    """Figures of one run of the pair."""
    submissions = [Submission(pipeline=one.pipeline, config=one.config) for one in spec.pipelines]
    start_s = 0.0

    def timed(*given: Any, **options: Any) -> Any:
        nonlocal start_s
        begun_s = time.perf_counter()
        backend = make_backend(*given, **options)
        start_s = time.perf_counter() - begun_s
        return backend

    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent) / "run"
        result = run_pipelines(
            spec.cluster, submissions, make_policy("rollmux"), folder,
            spec={}, backend_name=name, make_backend=timed,
        )  # fmt: skip
        summary = result.summary
        first = first_tokens_s(folder).values()
    return {
        "makespan_s": summary["makespan_s"],
        "control_overhead": summary["control_overhead"],
        "first_token_s": min(first),
        "last_first_token_s": max(first),
        "start_s": start_s,
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
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    sets = [f"pipelines.*.steps={arguments.steps}", "pipelines.*.sft_warmup.updates=0"]
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
    trips = {name: RoundTrips() for name in backends}
    for _ in range(arguments.repeats):
        for name, make_backend in backends.items():
            trips[name].measure(make_backend, spec)
            runs[name].append(one_run(name, make_backend, spec))
    print_figures({name: figures(runs[name], trips[name], runs["local"]) for name in backends}, arguments.json)


def figures(runs: list[dict[str, Any]], trips: RoundTrips, reference: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians."""
    return {
        "round_trip_ms": statistics.median(trips.seconds) * 1e3,
        "round_trip_p95_ms": sorted(trips.seconds)[int(len(trips.seconds) * 0.95)] * 1e3,
        "call_cpu_ms": trips.cpu_s / len(trips.seconds) * 1e3,
        **{key: statistics.median(run[key] for run in runs) for key in ROWS if key in runs[0]},
        "same_weights": all(run["weights"] == reference[0]["weights"] for run in runs),
    }


def print_figures(figures_by_backend: dict[str, dict[str, Any]], is_json: bool) -> None:
    if is_json:
        print(json.dumps(figures_by_backend))
        return
    print(f"{'':58}" + "".join(f"{name:>10}" for name in figures_by_backend))
    for key, words in ROWS.items():
        print(f"{words:58}" + "".join(f"{row[key]!s:>10.6}" for row in figures_by_backend.values()))


if __name__ == "__main__":
    main()
