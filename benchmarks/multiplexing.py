"""Two real pipelines on two devices of this machine: what sharing gains, and what it costs.

    python benchmarks/multiplexing.py [FILE] [--policies solo,colocated,rollmux] [--repeats 3] [--steps N] [--json]

Policies are run in turn, round after round, and medians are taken, since machines drift. All times are steady state:
of the steps after each pipeline's first, which waits for the SFT warm-up of all.

    gain    solo device-seconds per step of every pipeline, over what the shared devices take for one step of each
    bound   sum(T_roll + T_train) / max(T_cycle, T_load), from the phases measured alone (docs/how-it-works/design.md)
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from rlmux.config import Spec, load_spec
from rlmux.core.actions import RunStage
from rlmux.core.events import StageFinished
from rlmux.core.model import PHASE_BY_STAGE, Phase, PipelineId, Stage
from rlmux.log.run_log import LogReader
from rlmux.policies import make_policy
from rlmux.runtime.launch import header, submissions
from rlmux.runtime.run import run_pipelines


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One run."""

    policy: str
    makespan_s: float
    control_overhead: float
    cycle_s: float
    """Longest mean step of the steady state: what one step of every pipeline takes."""
    step_s: Mapping[PipelineId, float]
    rollout_s: Mapping[PipelineId, float]
    """Mean seconds of the rollout phase by pipeline, from the order to its end."""
    train_s: Mapping[PipelineId, float]
    utilization: Mapping[str, float]
    sha256: Mapping[PipelineId, str]
    peak_rss_bytes: Mapping[str, int]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", nargs="?", default="examples/01_two_pipelines.yaml")
    parser.add_argument("--policies", default="solo,colocated,rollmux")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", type=int, default=None)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    overrides = [] if args.steps is None else [f"defaults.steps={args.steps}"]
    spec = load_spec(args.file, overrides=overrides)
    policies = args.policies.split(",")
    runs: dict[str, list[Measured]] = defaultdict(list)
    for round_number in range(args.repeats):
        for policy in policies:
            print(f"round {round_number + 1} of {args.repeats}: {policy}", file=sys.stderr, flush=True)
            runs[policy].append(measure(spec, policy))
    hashes = {json.dumps(run.sha256, sort_keys=True) for of_policy in runs.values() for run in of_policy}
    result = {
        "file": args.file,
        "are_weights_equal": len(hashes) == 1,
        "first_token_s": statistics.median(first_token_s(args.file) for _ in range(args.repeats)),
        "policies": {policy: summary_of(of_policy, runs.get("solo")) for policy, of_policy in runs.items()},
    }
    print(json.dumps(result, indent=1) if args.json else table(result))


def measure(spec: Spec, policy: str) -> Measured:
    with tempfile.TemporaryDirectory() as name, PeakMemory() as memory:
        folder = Path(name) / "run"
        result = run_pipelines(spec.cluster, submissions(spec), make_policy(policy), folder, spec=header(spec))
        phases = phase_seconds(folder)
        pipelines: Mapping[PipelineId, Any] = result.summary["pipelines"]
        steps = {name: fields["step_s_mean"] for name, fields in pipelines.items()}
        return Measured(
            policy=policy,
            makespan_s=result.summary["makespan_s"],
            control_overhead=result.summary["control_overhead"],
            cycle_s=max(steps.values()),
            step_s=steps,
            rollout_s={name: phases[name, Phase.ROLLOUT] for name in pipelines},
            train_s={name: phases[name, Phase.TRAIN] for name in pipelines},
            utilization={name: fields["utilization"] for name, fields in result.summary["devices"].items()},
            sha256={name: fields["weights_sha256"] for name, fields in pipelines.items()},
            peak_rss_bytes=dict(memory.peak_by_role),
        )


def phase_seconds(folder: Path) -> dict[tuple[PipelineId, Phase], float]:
    """Mean seconds of each pipeline's phases after its first step: from the first order's start to the last end."""
    started: dict[int, tuple[RunStage, float]] = {}
    begin: dict[tuple[PipelineId, Phase, int], float] = {}
    end: dict[tuple[PipelineId, Phase, int], float] = {}
    with LogReader(folder) as log:
        for entry in log.entries():
            if isinstance(entry.value, RunStage):
                started[entry.value.order] = (entry.value, entry.time_s)
            elif isinstance(entry.value, StageFinished):
                order, time_s = started[entry.value.order]
                if order.step > 1 and order.stage is not Stage.SFT_WARMUP:
                    key = (order.pipeline, PHASE_BY_STAGE[order.stage], order.step)
                    begin.setdefault(key, time_s)
                    end[key] = entry.time_s
    seconds: dict[tuple[PipelineId, Phase], list[float]] = defaultdict(list)
    for (pipeline, phase, step), begin_s in begin.items():
        seconds[pipeline, phase].append(end[pipeline, phase, step] - begin_s)
    return {key: statistics.fmean(values) for key, values in seconds.items()}


def summary_of(runs: Sequence[Measured], solo: Sequence[Measured] | None) -> dict[str, Any]:
    """Medians over the rounds; gain and bound where `solo` was measured in the same command."""
    median = statistics.median
    names = list(runs[0].step_s)
    summary: dict[str, Any] = {
        "makespan_s": median(run.makespan_s for run in runs),
        "control_overhead": median(run.control_overhead for run in runs),
        "cycle_s": median(run.cycle_s for run in runs),
        "utilization": {device: median(run.utilization[device] for run in runs) for device in runs[0].utilization},
        "peak_rss_mb": {
            role: round(max(run.peak_rss_bytes.get(role, 0) for run in runs) / 1e6) for role in runs[0].peak_rss_bytes
        },
    }
    if solo:
        alone_s = {name: median(run.step_s[name] for run in solo) for name in names}
        rollout_s = {name: median(run.rollout_s[name] for run in solo) for name in names}
        train_s = {name: median(run.train_s[name] for run in solo) for name in names}
        period_s = max(*alone_s.values(), sum(rollout_s.values()), sum(train_s.values()))
        steps_s = {name: median(run.step_s[name] for run in runs) for name in names}
        is_one_by_one = runs[0].policy in ("solo", "colocated")  # one pipeline after the other on all devices
        summary["gain"] = sum(alone_s.values()) / (sum(steps_s.values()) if is_one_by_one else summary["cycle_s"])
        summary["bound"] = sum(rollout_s[name] + train_s[name] for name in names) / period_s
        summary["of_bound"] = summary["gain"] / summary["bound"]
        summary["step_slowdown"] = {name: median(run.step_s[name] for run in runs) / alone_s[name] for name in names}
        summary["solo_phases_s"] = {name: [rollout_s[name], train_s[name]] for name in names}
    return summary


def first_token_s(file: str) -> float:
    """Seconds from `rlmux run` to the first sampled token in the log, without an SFT warm-up in between."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "run"
        command = [sys.executable, "-m", "rlmux", "run", file, "--out", str(folder), "--json"]
        command += ["--set", "defaults.steps=1", "--set", "defaults.sft_warmup.updates=0"]
        start_s = time.time()
        subprocess.run(command, check=True, capture_output=True)
        took_s = time.time() - start_s
        with LogReader(folder) as log:
            entries = list(log.entries())
    first = next(entry.time_s for entry in entries if getattr(entry.value, "tokens", 0))
    return took_s - (entries[-1].time_s - first)


class PeakMemory:
    """Samples the proportional memory of every process below this one."""

    def __init__(self) -> None:
        self.peak_by_role: dict[str, int] = {}
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> PeakMemory:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()

    def _watch(self) -> None:
        me = psutil.Process()
        while not self._is_over.wait(1.0):
            processes = [me, *me.children(recursive=True)]
            for index, process in enumerate(processes):
                try:
                    used = process.memory_full_info().pss
                except psutil.Error:
                    continue
                role = "controller" if index == 0 else f"process {index}"
                self.peak_by_role[role] = max(self.peak_by_role.get(role, 0), used)


def table(result: Mapping[str, Any]) -> str:
    lines = [
        f"{result['file']}: weights equal under all policies and rounds: {result['are_weights_equal']}; "
        f"first token {result['first_token_s']:.1f} s after the command",
        f"{'policy':<12}{'makespan':>10}{'cycle ms':>10}{'gain':>7}{'bound':>7}{'of it':>7}{'control':>9}  "
        "slowdown / utilization",
    ]
    for policy, row in result["policies"].items():
        slow = "  ".join(f"{name} {value:.2f}x" for name, value in row.get("step_slowdown", {}).items())
        used = "  ".join(f"{name} {value:.0%}" for name, value in row["utilization"].items())
        lines.append(
            f"{policy:<12}{row['makespan_s']:>9.1f}s{row['cycle_s'] * 1e3:>10.0f}{row.get('gain', 0):>7.2f}"
            f"{row.get('bound', 0):>7.2f}{row.get('of_bound', 0):>7.2f}{row['control_overhead']:>9.1%}  {slow} / {used}"
        )
        memory = "  ".join(f"{role} {mb}" for role, mb in row["peak_rss_mb"].items())
        lines.append(f"{'':<12}peak memory, MB (proportional): {memory}")
        for name, (rollout_s, train_s) in row.get("solo_phases_s", {}).items() if policy == "solo" else ():
            lines.append(f"{'':<12}alone, {name}: rollout {rollout_s * 1e3:.0f} ms, training {train_s * 1e3:.0f} ms")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
