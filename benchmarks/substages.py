"""Real pipelines at the grain of sub-stages: two devices of this machine, every policy in turn.

    python benchmarks/substages.py [FILE ...] [--policies colocated,split,rollmux,jigsaw,rlmux] [--repeats 3]
                                   [--steps N] [--copies 3] [--chunk-s 0.05] [--set KEY=VALUE] [--json FILE]

Policies are run round after round and medians are taken, since machines drift. `split` gives each pipeline a device of
its own. With `--copies 3` a file's first pipeline runs three times, with seeds of its own, instead of the file's.

Steps take a fraction of a second here, so workers report every 0.05 s, under every policy; by default every 0.2 s.

    tokens/s    response tokens of all pipelines over the time in which any of them is in a step: SFT warm-up and
                the start of processes do not count
    slowdown    mean step over the one that phases measured alone would take (the run's own `step_slowdown`)
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rlmux.config import Spec, load_spec
from rlmux.core.actions import MigrateShard, RunStage
from rlmux.core.decision.policy import Policy
from rlmux.core.events import StageFinished
from rlmux.core.model import PHASE_BY_STAGE, Cluster, Phase, PipelineId, Stage
from rlmux.log.run_log import LogReader
from rlmux.policies import make_policy
from rlmux.runtime.backend import Submission, WorkerOptions
from rlmux.runtime.launch import header, submissions
from rlmux.runtime.run import RunOptions, run_pipelines

FILES = ("examples/05_long_tails.yaml", "examples/06_tool_waits.yaml")


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One run."""

    makespan_s: float
    in_steps_s: float
    tokens_per_s: float
    slowdown: Mapping[str, float]
    num_migrations: int
    num_moved: int
    """Trajectories that changed their device."""
    utilization: Mapping[str, float]
    sha256: Mapping[str, str]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", default=list(FILES))
    parser.add_argument("--policies", default="colocated,split,rollmux,jigsaw,rlmux")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", type=int, default=None)
    parser.add_argument("--copies", type=int, default=0)
    parser.add_argument("--chunk-s", type=float, default=0.05)
    parser.add_argument("--set", dest="sets", action="append", default=[])
    parser.add_argument("--json", type=Path, default=None)
    args = parser.parse_args()
    overrides = [*args.sets, *([] if args.steps is None else [f"defaults.steps={args.steps}"])]
    results = {}
    for file in args.files:
        spec = load_spec(file, overrides=overrides)
        given = with_copies(submissions(spec), args.copies)
        results[file] = measure_all(spec, given, args.policies.split(","), args.repeats, args.chunk_s)
        print(table(file, len(given), results[file]), flush=True)
    if args.json is not None:
        args.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


def with_copies(given: Sequence[Submission], num_copies: int) -> list[Submission]:
    """The first of these several times, with names and seeds of their own; 0 leaves all as they are."""
    if not num_copies:
        return list(given)
    first = given[0]
    names = [f"{first.config.name}-{number}" for number in range(num_copies)]
    return [
        replace(
            first,
            pipeline=replace(first.pipeline, id=PipelineId(name)),
            config=replace(first.config, name=name, seed=first.config.seed + number),
        )
        for number, name in enumerate(names)
    ]


def measure_all(
    spec: Spec, given: Sequence[Submission], policies: Sequence[str], num_repeats: int, chunk_s: float
) -> dict[str, Any]:
    runs: dict[str, list[Measured]] = defaultdict(list)
    for number in range(num_repeats):
        for policy in policies:
            print(f"round {number + 1} of {num_repeats}: {policy}", file=sys.stderr, flush=True)
            runs[policy].append(measure(spec, given, policy, chunk_s))
    hashes = {json.dumps(run.sha256, sort_keys=True) for of_policy in runs.values() for run in of_policy}
    return {
        "are_weights_equal": len(hashes) == 1,
        "policies": {policy: summary_of(of_policy) for policy, of_policy in runs.items()},
        "runs": {policy: [asdict(run) for run in of_policy] for policy, of_policy in runs.items()},
    }


def policy_named(name: str, cluster: Cluster) -> Policy:
    """`split` divides the devices there are: each pipeline has one."""
    if name != "split":
        return make_policy(name)
    num_devices = sum((pool.num_nodes or 0) * pool.devices_per_node for pool in cluster.pools.values())
    return make_policy("split", num_parts=num_devices)


def measure(spec: Spec, given: Sequence[Submission], policy: str, chunk_s: float) -> Measured:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "run"
        options = WorkerOptions(chunk_s=chunk_s)
        chosen = policy_named(policy, spec.cluster)
        result = run_pipelines(spec.cluster, given, chosen, folder, RunOptions(workers=options), spec=header(spec))
        if not result.is_complete:
            raise SystemExit(f"{policy}: stopped before its end")
        in_steps_s, num_migrations, num_moved = from_log(folder)
    pipelines: Mapping[str, Any] = result.summary["pipelines"]
    for name, fields in pipelines.items():
        if fields["status"] != "finished":
            raise SystemExit(f"{policy}: pipeline {name} ended as {fields['status']}; rlmux run on the file says why")
    return Measured(
        makespan_s=result.summary["makespan_s"],
        in_steps_s=in_steps_s,
        tokens_per_s=sum(fields["tokens"] for fields in pipelines.values()) / in_steps_s,
        slowdown={name: fields["step_slowdown"] or 0.0 for name, fields in pipelines.items()},
        num_migrations=num_migrations,
        num_moved=num_moved,
        utilization={name: fields["utilization"] for name, fields in result.summary["devices"].items()},
        sha256={name: fields["weights_sha256"] for name, fields in pipelines.items()},
    )


def from_log(folder: Path) -> tuple[float, int, int]:
    """(seconds in which any pipeline is in a step, migrations, trajectories moved)."""
    begin: dict[tuple[PipelineId, int], float] = {}
    end: dict[tuple[PipelineId, int], float] = {}
    orders: dict[int, RunStage] = {}
    num_migrations = num_moved = 0
    with LogReader(folder) as log:
        for entry in log.entries():
            if isinstance(entry.value, RunStage):
                orders[entry.value.order] = entry.value
                if entry.value.step > 0 and PHASE_BY_STAGE[entry.value.stage] is Phase.ROLLOUT:
                    begin.setdefault((entry.value.pipeline, entry.value.step), entry.time_s)
            elif isinstance(entry.value, StageFinished):
                order = orders[entry.value.order]
                if order.step > 0 and order.stage is Stage.PUBLISH:
                    end[order.pipeline, order.step] = entry.time_s
            elif isinstance(entry.value, MigrateShard):
                num_migrations += 1
            else:
                num_moved += getattr(entry.value, "num_trajectories", 0)
    spans = sorted((begin[step], end[step]) for step in end)
    covered_s, last_s = 0.0, 0.0
    for begin_s, end_s in spans:
        covered_s += max(0.0, end_s - max(begin_s, last_s))
        last_s = max(last_s, end_s)
    return covered_s, num_migrations, num_moved


def summary_of(runs: Sequence[Measured]) -> dict[str, Any]:
    median = statistics.median
    return {
        "tokens_per_s": median(run.tokens_per_s for run in runs),
        "tokens_per_s_range": [min(run.tokens_per_s for run in runs), max(run.tokens_per_s for run in runs)],
        "makespan_s": median(run.makespan_s for run in runs),
        "slowdown": {name: median(run.slowdown[name] for run in runs) for name in runs[0].slowdown},
        "num_migrations": median(run.num_migrations for run in runs),
        "num_moved": median(run.num_moved for run in runs),
        "utilization": {device: median(run.utilization[device] for run in runs) for device in runs[0].utilization},
    }


def table(file: str, num_pipelines: int, result: Mapping[str, Any]) -> str:
    rows: Mapping[str, Any] = result["policies"]
    first = next(iter(rows.values()))["tokens_per_s"]
    lines = [
        f"{file}, {num_pipelines} pipelines: weights equal under all policies and rounds: "
        f"{result['are_weights_equal']}",
        f"{'policy':<11}{'tokens/s':>9}{'range':>15}{'ratio':>7}{'makespan':>10}{'moves':>7}{'moved':>7}  "
        "slowdown / utilization",
    ]
    for policy, row in rows.items():
        low, high = row["tokens_per_s_range"]
        slow = " ".join(f"{name} {value:.2f}" for name, value in row["slowdown"].items())
        used = " ".join(f"{name} {value:.0%}" for name, value in row["utilization"].items())
        lines.append(
            f"{policy:<11}{row['tokens_per_s']:>9.0f}{f'{low:.0f}..{high:.0f}':>15}"
            f"{row['tokens_per_s'] / first:>7.2f}{row['makespan_s']:>9.1f}s{row['num_migrations']:>7.0f}"
            f"{row['num_moved']:>7.0f}  {slow} / {used}"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
