"""What interruptible rollouts gain over synchronous ones: recorded lengths on the plan clock, counted, not timed.

    RLMUX_DATA=<folder> python benchmarks/interruptible.py [--prompts N] [--train X] [--json]

The prompts of a recorded run in order, its four answers of each; one rollout device with a slot for each answer of a
synchronous step. A decode step takes milliseconds by its rows, a token of KV that is computed anew its share of a
prefill: lines through the run's recorded iterations, or those of GSM8K with Qwen3 4B where it has none. Training takes
`--train` times the mean synchronous rollout, on devices of its own. Prompts are prefilled in all modes, and left out.

    synchronous    rollout + training            one-step-off    the longer of the two (staleness 1, whole steps)
    partial        interruptible, overlap_ticks 0: rollout + training
    overlapped     interruptible, as many ticks as training takes: first leg beside training, then the last leg

Speed is of the run: trained tokens over seconds, relative to synchronous. In brackets the mean staleness of a trained
trajectory, in versions.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import json
import math
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, linear_regression
from typing import Any

from rlmux.rl.epoch_clock import EpochClock, EpochSizes
from rlmux.rl.types import TrajectoryId

GROUP = 4
"""Recorded answers of each prompt."""
STALENESS = (1, 2, 4, 8)
LARGE = 1000
"""Tokens of a prefill whose time goes with them: whole contexts are computed anew, many at once."""


@dataclass(frozen=True, slots=True)
class Rates:
    """Milliseconds of a rollout device."""

    step_ms: float
    """A decode step of no rows."""
    row_ms: float
    """Each row of it."""
    prefill_ms: float
    """Each token of a prefill."""


def rates_of(path: Path) -> Rates:
    """Lines through a run's recorded iterations."""
    with gzip.open(path, "rt") as file:
        rows = list(csv.DictReader(file))
    decoded = [(int(row["batch_size"]), float(row["forward_time_ms"])) for row in rows if row["mode"] == "DECODE"]
    slope, base = linear_regression(*zip(*decoded, strict=True))
    filled = [(int(row["prefill_tokens"]), float(row["forward_time_ms"])) for row in rows if row["mode"] == "EXTEND"]
    large = [(tokens, ms) for tokens, ms in filled[1:] if tokens >= LARGE]  # the first warms the server up
    prefill_ms = sum(ms for _, ms in large) / sum(tokens for tokens, _ in large)
    return Rates(base, slope, prefill_ms)


def recorded(path: Path) -> list[list[int]]:
    """Lengths of a run's answers by prompt; none of one whose answers have several turns."""
    with gzip.open(path, "rt") as file:
        rows = list(csv.DictReader(file))
    if len({row["turn"] for row in rows}) > 1:
        return []
    found = [int(row["length"]) for row in rows]
    return [found[start : start + GROUP] for start in range(0, len(found) - GROUP + 1, GROUP)]


class Flow:
    """An interruptible run over recorded lengths: seconds, tokens and staleness."""

    def __init__(self, lengths: dict[TrajectoryId, int], sizes: EpochSizes, rates: Rates, train_ms: float) -> None:
        self._lengths, self._rates, self._sizes = lengths, rates, sizes
        self._clock = EpochClock(sizes)
        self._first_version: dict[TrajectoryId, int] = {}
        self._num_made = self._num_trained = 0
        """Tokens."""
        self.ms = 0.0
        self.staleness: list[int] = []
        for step in range(1, sizes.num_steps + 1):
            self._clock.begin_step(step)
            is_overlapped = not self._clock.is_last_leg
            first_ms = self._leg_ms()
            if is_overlapped:  # training began with it
                self.ms += max(first_ms, train_ms) + (0.0 if self._clock.is_step_over else self._last_leg_ms())
            else:
                self.ms += first_ms + (0.0 if sizes.overlap_ticks else train_ms)
            batch = self._clock.end_step()
            self._num_trained += sum(lengths[id] for id in batch)
            self.staleness += [step - 1 - self._first_version.pop(id) for id in batch]
        self.ms += train_ms if sizes.overlap_ticks else 0.0

    def _last_leg_ms(self) -> float:
        self._clock.begin_last_leg()
        return self._leg_ms()

    def _leg_ms(self) -> float:
        """Sample a whole leg."""
        clock, lengths = self._clock, self._lengths
        refilled = sum(clock.state().tokens_by_seated.values())
        for id in clock.wanted():
            clock.note_end(id, lengths[id])
        clock.advance()
        assert clock.is_leg_over
        standing, ended = clock.standing(), clock.ended()
        for id in (*standing, *ended):
            self._first_version.setdefault(id, clock.version)
        made = self._num_trained + sum(lengths[id] for id in ended) + sum(standing.values())
        tokens, self._num_made = made - self._num_made, made
        rates, ticks = self._rates, clock.ticks
        clock.end_leg()
        return rates.step_ms * ticks + rates.row_ms * tokens + rates.prefill_ms * refilled


def synchronous_ms(lengths: Sequence[int], num_slots: int, rates: Rates) -> float:
    """One rollout, its slots filled in order."""
    waiting, ms = list(lengths), 0.0
    made: list[int] = []
    while waiting or made:
        while waiting and len(made) < num_slots:
            made.append(waiting.pop(0))
        stride = min(made)
        ms += stride * (rates.step_ms + rates.row_ms * len(made))
        made = [left - stride for left in made if left > stride]
    return ms


def compared(groups: Sequence[Sequence[int]], per_step: int, rates: Rates, train: float) -> dict[str, Any]:
    """Speeds over synchronous, by mode."""
    num_steps, slots = len(groups) // per_step, per_step * GROUP
    rollouts = [
        synchronous_ms([length for group in groups[first : first + per_step] for length in group], slots, rates)
        for first in range(0, num_steps * per_step, per_step)
    ]
    train_ms = train * fmean(rollouts)
    whole = sum(rollouts) + num_steps * train_ms
    one_off = rollouts[0] + sum(max(each, train_ms) for each in rollouts[1:]) + train_ms
    lengths = {
        TrajectoryId(1 + number // per_step, number % per_step, sample): length
        for number, group in enumerate(groups[: num_steps * per_step])
        for sample, length in enumerate(group)
    }
    ticks = math.ceil(train_ms / (rates.step_ms + rates.row_ms * slots))
    row: dict[str, Any] = {"steps": num_steps, "rollout_s": round(fmean(rollouts) / 1e3, 1), "overlap_ticks": ticks}
    row["one-step-off"] = round(whole / one_off, 2)
    for name, overlap in (("partial", 0), ("overlapped", ticks)):
        for staleness in STALENESS:
            sizes = EpochSizes(
                num_steps=num_steps,
                groups_per_step=per_step,
                group_size=GROUP,
                staleness=staleness,
                num_slots=slots,
                overlap_ticks=overlap,
            )
            flow = Flow(lengths, sizes, rates, train_ms)
            row[f"{name} {staleness}"] = [round(whole / flow.ms, 2), round(fmean(flow.staleness), 2)]
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=32, help="prompts of a step, of 4 answers each")
    parser.add_argument("--train", type=float, default=0.5, help="training, as a part of the synchronous rollout")
    parser.add_argument("--json", action="store_true", help="print JSON")
    given = parser.parse_args()
    folder = Path(os.environ.get("RLMUX_DATA", "")) / "rl_runs"
    if not folder.is_dir():
        sys.exit(f"RLMUX_DATA={os.environ.get('RLMUX_DATA', '')!r}: accepted: a folder with rl_runs/")
    table: dict[str, Any] = {}
    for path in sorted(folder.glob("*.lengths.csv.gz")):
        groups = recorded(path)
        if len(groups) < 8 * given.prompts:
            continue
        own = path.with_name(path.name.replace(".lengths.", ".iterations."))
        rates = rates_of(own if own.is_file() else folder / "gsm8k_qwen3_4b.iterations.csv.gz")
        table[path.name.removesuffix(".lengths.csv.gz")] = compared(groups, given.prompts, rates, given.train)
    if given.json:
        print(json.dumps(table))
        return
    print(f"{given.prompts} prompts of {GROUP} answers; speed over synchronous steps (mean staleness)")
    columns = [f"{name} {staleness}" for name in ("partial", "overlapped") for staleness in STALENESS]
    print(f"{'':32}{'one-step-off':>14}" + "".join(f"{column:>15}" for column in columns))
    for name, row in table.items():
        cells = [f"{row[column][0]} ({row[column][1]})" for column in columns]
        print(f"{name[:31]:32}{row['one-step-off']:>14}" + "".join(f"{cell:>15}" for cell in cells))


if __name__ == "__main__":
    main()
