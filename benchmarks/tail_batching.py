"""What tail batching gains over plain rounds: decode steps of recorded lengths, counted, and seconds of real runs.

    RLMUX_DATA=<folder> python benchmarks/tail_batching.py [--prompts N] [--samples N] [--json]    counts
    python benchmarks/tail_batching.py --real [--steps N] [--pairs N] [--json]                   trains on two cores

Counts: the prompts of a recorded run in order, `samples` of the four answers of each; a decode step gives every seated
trajectory a token, and prefill costs nothing. Seconds, where a run has its decode steps on record, are by the line
through those: milliseconds by rows, longer contexts left out. Plain rounds sample what they train on; tail batching
1.25 times the prompts, and up to 1.25 times, rounded up, the answers. Both train on the same prompts, long rounds
included. On few slots time goes with tokens, on many with the longest answer.

Real: a new model whose answers are long-tailed (task `sort`, hardly warmed up), alone, with plain rounds and then with
tail batching, as many steps. Seconds and decode steps are those of its rollouts, means over all steps but the first,
medians over pairs of such runs.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean, linear_regression, median
from typing import Any

from rlmux.rl.config import (
    AlgorithmConfig,
    ModelConfig,
    RolloutConfig,
    SftWarmupConfig,
    TailBatchingConfig,
    TaskConfig,
    TrainingConfig,
)
from rlmux.rl.plan_clock import PlanClock
from rlmux.rl.prompt_rounds import PromptQueue
from rlmux.rl.types import TrajectoryId

GROUP = 4
"""Recorded answers of each prompt."""


Line = tuple[float, float]
"""Milliseconds of a decode step of no rows, and of each row."""


class Sampled:
    """An engine in decode steps: slots filled in id order, losers cut at once."""

    def __init__(
        self, lengths: dict[TrajectoryId, int], num_slots: int, clock: PlanClock | None, ms_of: Line = (0.0, 0.0)
    ) -> None:
        self.steps = self.tokens = 0
        self.ms = 0.0
        self.kept: list[TrajectoryId] = [] if clock else list(lengths)
        waiting, made = list(lengths), dict[TrajectoryId, int]()
        while (waiting or made) and not (clock and clock.is_decided):
            while waiting and len(made) < num_slots:
                made[waiting.pop(0)] = 0
            stride = min(lengths[id] - done for id, done in made.items())
            self.steps, self.tokens = self.steps + stride, self.tokens + stride * len(made)
            self.ms += stride * (ms_of[0] + ms_of[1] * len(made))
            made = {id: done + stride for id, done in made.items()}
            for id in [id for id in made if made[id] == lengths[id]]:
                del made[id]
                if clock:
                    clock.note_end(id, lengths[id])
            if clock:
                for id, done in made.items():
                    clock.note_progress(id, done)
                self.kept += [id for group in clock.advance() for id in group]
                waiting = [id for id in waiting if not clock.is_lost(id)]
                made = {id: done for id, done in made.items() if not clock.is_lost(id)}


def counted(
    lengths: Sequence[Sequence[int]], config: TrainingConfig, num_slots: int, ms_of: Line | None
) -> dict[str, Any]:
    """A whole run of so many steps over recorded prompts, with and without tail batching."""
    per_step, group_size = config.algorithm.prompts_per_step, config.algorithm.group_size
    plain, raced, kinds = [], [], []
    queue = PromptQueue()
    for step in range(1, config.num_steps + 1):
        mine = lengths[(step - 1) * per_step : step * per_step]
        plain.append(Sampled(named(mine, group_size), num_slots, None, ms_of or (0.0, 0.0)))
        round = queue.round(step, config)
        launched = named([lengths[prompt] for prompt in round.prompts], round.group_size)
        sizes = {"num_groups": per_step, "group_size": group_size, "num_slots": num_slots}
        clock = None if round.is_long else PlanClock(list(launched), **sizes)
        done = Sampled(launched, num_slots, clock, ms_of or (0.0, 0.0))
        raced.append(done)
        kinds.append(round.is_long)
        queue = queue.after(round, {id.prompt for id in done.kept})
    assert not queue.queued
    before, after = sum(one.steps for one in plain), sum(one.steps for one in raced)
    return {
        "gain": round_to(before / after),
        "seconds": round_to(sum(one.ms for one in plain) / sum(one.ms for one in raced)) if ms_of else None,
        "short": round_to(fmean(one.steps for one, is_long in zip(raced, kinds, strict=True) if not is_long)),
        "long": round_to(fmean(one.steps for one, is_long in zip(raced, kinds, strict=True) if is_long)),
        "plain": round_to(before / len(plain)),
        "tokens": round_to(sum(one.tokens for one in raced) / sum(one.tokens for one in plain)),
    }


def round_to(number: float) -> float:
    return round(number, 2 if number < 100 else 0)


def named(groups: Sequence[Sequence[int]], samples: int) -> dict[TrajectoryId, int]:
    return {
        TrajectoryId(1, prompt, sample): length
        for prompt, group in enumerate(groups)
        for sample, length in enumerate(group[:samples])
    }


def recorded(path: Path) -> list[list[int]]:
    """Lengths of a run's answers by prompt; none of one whose answers have several turns."""
    with gzip.open(path, "rt") as file:
        rows = list(csv.DictReader(file))
    if len({row["turn"] for row in rows}) > 1:
        return []
    found = [int(row["length"]) for row in rows]
    return [found[start : start + GROUP] for start in range(0, len(found) - GROUP + 1, GROUP)]


def ms_line(path: Path) -> Line | None:
    """The line through a run's recorded decode steps, milliseconds by rows; None where none were recorded."""
    if not path.is_file():
        return None
    with gzip.open(path, "rt") as file:
        rows = [
            (int(row["batch_size"]), float(row["forward_time_ms"]))
            for row in csv.DictReader(file)
            if row["mode"] == "DECODE"
        ]
    slope, base = linear_regression(*zip(*rows, strict=True))
    return base, slope


def config_of(per_step: int, group_size: int, steps: int, samples: float) -> TrainingConfig:
    return TrainingConfig(
        name="counted",
        num_steps=steps,
        algorithm=AlgorithmConfig(prompts_per_step=per_step, group_size=group_size),
        rollout=RolloutConfig(tail_batching=TailBatchingConfig(samples=samples)),
    )


def counts(folder: Path, per_step: int, group_size: int) -> dict[str, Any]:
    """By run, and by slots as parts of the answers of a plain step."""
    table: dict[str, Any] = {}
    for path in sorted(folder.glob("*.lengths.csv.gz")):
        lengths = recorded(path)
        steps = min(20, len(lengths) // per_step)
        if steps < 5:
            continue
        name, wanted = path.name.removesuffix(".lengths.csv.gz"), per_step * group_size
        samples = min(1.25, GROUP / group_size)
        config = config_of(per_step, group_size, steps, samples)
        most = 2 * wanted
        ms_of = ms_line(path.with_name(path.name.replace(".lengths.", ".iterations.")))
        table[name] = {
            label: counted(lengths, config, slots, ms_of)
            for label, slots in (("a quarter", max(1, wanted // 4)), ("each", wanted), ("all", most))
        }
    return table


def real(steps: int, pairs: int) -> dict[str, Any]:
    """Pairs of runs of one pipeline alone, after one another; medians over the pairs."""
    from rlmux.core.events import StageFinished, StagePaused
    from rlmux.core.model import Cluster, Phase, Pipeline, PipelineId, Pool, Stage
    from rlmux.core.scheduler import Scheduler
    from rlmux.policies import make_policy
    from rlmux.runtime.backend import Submission
    from rlmux.runtime.controller import Controller
    from rlmux.runtime.local import local_backend

    class Listener:
        def __init__(self) -> None:
            self.seconds: dict[int, float] = {}
            self.metrics: dict[int, dict[str, float]] = {}
            self.steps: dict[int, int] = {}
            self._orders: dict[Any, int] = {}

        def update(self, now_s: float, events: Any, actions: Any, notes: Any) -> None:
            for action in actions:
                if getattr(action, "stage", None) is Stage.GENERATE:
                    self._orders[action.order] = action.step
            for event in events:
                if isinstance(event, StageFinished | StagePaused) and event.order in self._orders:
                    step = self._orders.pop(event.order)
                    self.seconds[step] = self.seconds.get(step, 0.0) + event.seconds
            for note in notes:
                if note.type == "step":
                    self.metrics[note.fields["step"]] = note.fields["metrics"]
                if note.type == "rollout":
                    rows = note.fields["iterations"]
                    self.steps[note.fields["step"]] = sum(row[2] for row in rows if row[0] != "prefill")

        def means(self, steps: range) -> dict[str, float]:
            """Over these steps."""
            rounds = [self.metrics[step] for step in steps]
            return {
                "rollout_s": fmean(self.seconds[step] for step in steps),
                "decode_steps": fmean(self.steps[step] for step in steps),
                "longest": fmean(one["response_len_max"] for one in rounds),
                "mean": fmean(one["response_len_mean"] for one in rounds),
                "long_rounds": sum(one.get("is_long_round", 0) for one in rounds),
            }

    config = TrainingConfig(
        name="sort",
        seed=3,
        num_steps=steps,
        model=ModelConfig(hidden_size=128, num_layers=4, num_heads=4, num_kv_heads=2, intermediate_size=256),
        task=TaskConfig(name="sort", params={"digits": 8}),
        sft_warmup=SftWarmupConfig(num_updates=6, batch_size=32),
        algorithm=AlgorithmConfig(prompts_per_step=16, group_size=4, learning_rate=1e-5),
        rollout=RolloutConfig(max_new_tokens=512, num_slots=100),
    )
    stages = (Stage.GENERATE, Stage.REWARD, Stage.UPDATE, Stage.PUBLISH)
    pipeline = Pipeline(id=PipelineId("sort"), num_steps=steps, stages=stages, has_sft_warmup=True)
    pools = {
        name: Pool(name=name, phase=phase, num_nodes=1)
        for name, phase in (("rollout", Phase.ROLLOUT), ("train", Phase.TRAIN))
    }
    runs: dict[str, list[dict[str, float]]] = {"plain": [], "tail batching": []}
    for _ in range(pairs):
        for name, batching in (("plain", None), ("tail batching", TailBatchingConfig())):
            mine = replace(config, rollout=replace(config.rollout, tail_batching=batching))
            listener, scheduler = Listener(), Scheduler(Cluster(pools=pools), make_policy("solo"))
            with tempfile.TemporaryDirectory(prefix="rlmux-tails-") as scratch:
                backend = local_backend(Cluster(pools=pools), Path(scratch))
                try:
                    Controller(scheduler, backend, None, [listener]).run([Submission(pipeline=pipeline, config=mine)])
                finally:
                    backend.close()
            runs[name].append(listener.means(range(2, steps + 1)))
    found: dict[str, Any] = {
        name: {key: round(median(run[key] for run in of), 3) for key in of[0]} for name, of in runs.items()
    }
    plain, raced = found["plain"], found["tail batching"]
    found["gain"] = {key: round(plain[key] / raced[key], 2) for key in ("rollout_s", "decode_steps")}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=64, help="prompts of a step")
    parser.add_argument("--samples", type=int, default=3, help="answers of each that are trained on, 2 to 4")
    parser.add_argument("--real", action="store_true", help="train for real instead of counting")
    parser.add_argument("--steps", type=int, default=11, help="steps of each real run")
    parser.add_argument("--pairs", type=int, default=3, help="pairs of real runs")
    parser.add_argument("--json", action="store_true", help="print JSON")
    given = parser.parse_args()
    if given.real:
        table: dict[str, Any] = real(given.steps, given.pairs)
        print(json.dumps(table) if given.json else "\n".join(f"{name:14} {row}" for name, row in table.items()))
        return
    folder = Path(os.environ.get("RLMUX_DATA", "")) / "rl_runs"
    if not folder.is_dir():
        sys.exit(f"RLMUX_DATA={os.environ.get('RLMUX_DATA', '')!r}: accepted: a folder with rl_runs/")
    table = counts(folder, given.prompts, given.samples)
    if given.json:
        print(json.dumps(table))
        return
    print(
        f"{given.prompts} prompts of {given.samples} answers; decode steps of plain rounds over those of tail batching "
        "(tokens of tail batching over those of plain rounds, seconds as the steps)"
    )
    print(
        f"{'slots, of the answers of a plain step':44}"
        + "".join(f"{label:>24}" for label in ("a quarter", "each", "all"))
    )
    for name, row in table.items():
        cells = [
            f"{one['gain']:.2f} ({one['tokens']:.2f}, {'-' if one['seconds'] is None else one['seconds']})"
            for one in row.values()
        ]
        print(f"{name[:43]:44}" + "".join(f"{cell:>24}" for cell in cells))


if __name__ == "__main__":
    main()
