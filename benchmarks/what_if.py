"""Is what `rlmux whatif` said of a live run what then happened?

    python benchmarks/what_if.py [--rounds 30] [--policies rollmux,rlmux,colocated] [--steps 40] [--ask-after 10]
                                 [--keep DIR]
    python benchmarks/what_if.py --recorded DIR [DIR ...] [--ask-after 10[,20...]]

Each round trains the demo pair under the next policy; when both have made `--ask-after` steps (and up to nine more),
asks when they will end as things are, and if a third pipeline like the first were submitted; submits such a one; and
compares the second answer with the run. A row for each pipeline: seconds to its end, said and seen, from the question,
for the third one from its submission. Then the median and the largest deviation, the part of the ends that came within
their range, and the ranges' median width as a part of the seconds seen; goals: a median of 5 %, 80 % within.

`--recorded`: runs that are over are cut after `--ask-after` steps and asked the same, with what was submitted later
submitted when it was. `said` goes on at the speed of the last steps; `at its speed` has every stage take what it then
took, so that what is left is not the machine's drift. Then where the deviation is, in seconds a step by stage. With
several `--ask-after`, each run is cut after each of them.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any, cast

import yaml

from rlmux.core.actions import Action
from rlmux.core.events import Event
from rlmux.core.model import PipelineId, Stage
from rlmux.log.run_log import LogReader, RunLog, run_header
from rlmux.policies import make_policy
from rlmux.report.reports import read_timeline
from rlmux.report.timeline.build import Timeline
from rlmux.runtime import launch
from rlmux.sim.simulator import simulate
from rlmux.sim.workloads.arrivals import Arrival
from rlmux.sim.workloads.ongoing import Ongoing, ongoing
from rlmux.sim.workloads.recorded import RecordedSeconds, recorded_arrival
from rlmux.sim.workloads.spread import Bound, at_bound

PAIR = Path("examples/01_two_pipelines.yaml")
RLMUX = (sys.executable, "-m", "rlmux")


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """The end of one pipeline, in seconds from the question or from its submission."""

    said_s: float
    low_s: float
    high_s: float
    seen_s: float

    @property
    def deviation(self) -> float:
        return self.said_s / self.seen_s - 1.0

    @property
    def is_within(self) -> bool:
        return self.low_s <= self.seen_s <= self.high_s

    @property
    def width(self) -> float:
        return (self.high_s - self.low_s) / self.seen_s

    def __str__(self) -> str:
        return (
            f"said {self.said_s:6.1f}, from {self.low_s:6.1f} to {self.high_s:6.1f}  seen {self.seen_s:6.1f}  "
            f"deviation {self.deviation:+.1%}, {'within' if self.is_within else 'OUTSIDE'}"
        )


def show(ends: Sequence[End]) -> None:
    errors = [abs(end.deviation) for end in ends]
    within = [end.is_within for end in ends]
    print(
        f"{len(ends)} ends: deviation {median(errors):.1%} median, {max(errors):.1%} largest; "
        f"{sum(within)} of {len(within)} within their range, whose width is {median(end.width for end in ends):.0%} "
        "of the seconds seen in the median"
    )


# --- live ---------------------------------------------------------------------------------------------------


def files(folder: Path, num_steps: int) -> tuple[Path, Path, str]:
    """The pair with so many steps, the third pipeline without a cluster, and the name of the one that it is like."""
    spec = yaml.safe_load(PAIR.read_text(encoding="utf-8"))
    spec["pipelines"] = [{**each, "steps": num_steps} for each in spec["pipelines"]]
    first = spec["pipelines"][0]
    third = {**first, "name": f"{first['name']}-2", "seed": 97}
    pair, more = folder / "pair.yaml", folder / "more.yaml"
    pair.write_text(yaml.safe_dump(spec), encoding="utf-8")
    rest = {key: value for key, value in spec.items() if key not in ("cluster", "pipelines", "policy")}
    more.write_text(yaml.safe_dump({**rest, "pipelines": [third]}), encoding="utf-8")
    return pair, more, first["name"]


class StepsDone:
    """Steps that every pipeline of a run has made; each look reads new rows alone, so that it costs the run little."""

    def __init__(self, run: Path) -> None:
        self._run = run
        self._seq = 0
        self._by_pipeline: dict[str, int] = {}

    def look(self) -> int:
        if not (self._run / "run.db").exists():
            return 0
        with LogReader(self._run) as log:
            for entry in log.entries(after=self._seq):
                self._seq = entry.seq
                if entry.type == "plan":
                    self._by_pipeline.setdefault(cast("Any", entry.value)["pipeline"], 0)
                elif entry.type == "step":
                    note = cast("Any", entry.value)
                    self._by_pipeline[note["pipeline"]] = int(note["step"])
        return min(self._by_pipeline.values(), default=0)


def answer(run: Path, *words: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(subprocess.check_output([*RLMUX, "whatif", str(run), *words, "--json"]))
    return found


def follow_up(folder: Path, policy: str, num_steps: int, ask_after: int) -> list[End]:
    """Train, ask, do what was asked about; each pipeline's end."""
    pair, more, name = files(folder, num_steps)
    run = folder / "run"
    with subprocess.Popen(
        [*RLMUX, "run", str(pair), "--policy", policy, "--out", str(run)], stdout=subprocess.DEVNULL
    ) as training:
        done = StepsDone(run)
        while training.poll() is None and done.look() < ask_after:
            time.sleep(1.0)
        started = time.perf_counter()
        said = answer(run, "--add", "1", "--like", name)
        took_s = time.perf_counter() - started
        subprocess.check_call([*RLMUX, "submit", str(more), "--to", str(run)], stdout=subprocess.DEVNULL)
        training.wait()
    timeline = read_timeline(run)
    third_s = max(record.submitted_s for record in timeline.pipelines.values()) - said["at_s"]
    print(
        f"policy {policy}, asked at second {said['at_s']:.1f}, answered in {took_s:.1f} s, submitted {third_s:.1f} s "
        "after the question"
    )
    ends = []
    for pipeline, record in timeline.pipelines.items():
        if pipeline not in said["then"]["pipelines"]:
            continue  # it was over
        seen_s = (record.ended_s or 0.0) - max(said["at_s"], record.submitted_s)
        now = said["now"]["pipelines"].get(pipeline, {}).get("ends_s")
        then = said["then"]["pipelines"][pipeline]
        alone = "-" if now is None else f"{now:.1f}"
        ends.append(
            End(said_s=then["ends_s"], low_s=then["low"]["ends_s"], high_s=then["high"]["ends_s"], seen_s=seen_s)
        )
        print(f"{pipeline:10} without the third {alone:>6}  with it {ends[-1]}", flush=True)
    return ends


# --- recorded -----------------------------------------------------------------------------------------------


def cut(run: Path, folder: Path, at_s: float) -> None:
    """The run's log up to that time, in another folder."""
    with LogReader(run) as reader, RunLog.create(folder, reader.header) as log:
        for entry in reader.entries():
            if entry.time_s > at_s:
                break
            value = cast("Any", entry.value)
            if entry.kind == "event":
                log.append_event(value)
            elif entry.kind == "action":
                log.append_actions([value])
            elif entry.kind == "note":
                log.note(entry.type, entry.time_s, **value)


def with_later(now: Ongoing, timeline: Timeline) -> list[Arrival]:
    """What is left, and what was submitted later, when it was, like the one that its name begins with."""
    arrivals = list(now.left.arrivals)
    for name, record in timeline.pipelines.items():
        if record.submitted_s > now.at_s:
            (like,) = now.like(name.rpartition("-")[0], 1)
            pipeline = replace(like.pipeline, id=name, num_steps=record.pipeline.num_steps)
            arrivals.append(replace(like, submit_s=record.submitted_s - now.at_s, pipeline=pipeline))
    return arrivals


def at_its_speed(arrivals: Iterable[Arrival], timeline: Timeline) -> list[Arrival]:
    """The same, but all that begins later takes what it then took."""
    found = []
    for one in arrivals:
        record = timeline.pipelines[one.pipeline.id]
        orders = [each for each in timeline.orders if each.pipeline == one.pipeline.id and each.counts]
        then, before = recorded_arrival(record, orders), one.world
        assert isinstance(then.world, RecordedSeconds)
        assert isinstance(before, RecordedSeconds)
        is_new = one.submit_s > 0.0
        open_step = one.pipeline.first_step
        begun = {} if is_new else {key: s for key, s in before.by_step.items() if key[1] >= open_step}
        rollouts = {step: each for step, each in then.world.rollouts.items() if (Stage.GENERATE, step) not in begun}
        world = replace(then.world, by_step={**then.world.by_step, **begun}, rollouts=rollouts)
        found.append(replace(one, world=world, switch=then.switch if is_new else one.switch))
    return found


def played(now: Ongoing, arrivals: Iterable[Arrival], folder: Path) -> Timeline:
    """What is left, simulated; its times count from the cut."""
    with RunLog.create(folder, run_header(policy=now.policy, backend="local", cluster=now.left.cluster)) as log:

        def write(event: Event, actions: list[Action]) -> None:
            log.append_event(event)
            log.append_actions(actions)

        simulate(replace(now.left, arrivals=tuple(arrivals)), make_policy(now.policy), observer=write)
    return read_timeline(folder)


def seconds_a_step(timeline: Timeline, name: PipelineId, first: int) -> dict[str, float]:
    """Seconds of each stage from its order to its end, a step, from that step on; switches are in them."""
    spent: dict[str, float] = {}
    orders = [one for one in timeline.orders if one.pipeline == name and one.step >= first and not one.is_migration]
    num_steps = len({one.step for one in orders})
    for order in orders:
        per_device_s = (min(order.end_s, timeline.end_s) - order.start_s) / num_steps
        spent[order.stage] = spent.get(order.stage, 0.0) + per_device_s
    return spent


def recorded(run: Path, ask_after: int) -> list[tuple[End, float]]:
    """(the end, deviation at its speed) of each pipeline."""
    timeline = read_timeline(run)
    first = [record for record in timeline.pipelines.values() if record.submitted_s < 1.0]
    at_s = max(record.published[ask_after] for record in first)
    found = []
    with tempfile.TemporaryDirectory(prefix="rlmux-whatif-") as name:
        folder = Path(name)
        cut(run, folder / "cut", at_s)
        now = ongoing(folder / "cut", launch.spec_of(run).cluster)
        if now.left.notes:
            print(f"{run}: not asked after step {ask_after}: {'; '.join(now.left.notes)}")
            return []
        arrivals = with_later(now, timeline)
        said = played(now, arrivals, folder / "said")
        low, high = (played(now, [at_bound(one, bound) for one in arrivals], folder / bound.name) for bound in Bound)
        then = played(now, at_its_speed(arrivals, timeline), folder / "then")
    print(f"{run}: policy {now.policy}, asked at second {now.at_s:.1f}, after step {ask_after}")
    for pipeline, record in timeline.pipelines.items():
        if record.ended_s is None or record.ended_s <= now.at_s:
            continue
        begin_s = max(record.submitted_s - now.at_s, 0.0)
        said_s, low_s, high_s, then_s = (
            (played.pipelines[pipeline].ended_s or 0.0) - begin_s for played in (said, low, high, then)
        )
        end = End(
            said_s=said_s,
            low_s=min(said_s, low_s),
            high_s=max(said_s, high_s),
            seen_s=record.ended_s - now.at_s - begin_s,
        )
        found.append((end, then_s / end.seen_s - 1))
        print(f"{pipeline:10} {end}, at its speed {found[-1][1]:+.1%}")
        open_step = min(one.step for one in said.orders if one.pipeline == pipeline) + 1
        of_said, of_seen = (seconds_a_step(one, pipeline, open_step) for one in (said, timeline))
        parts = [f"{key} {of_said.get(key, 0.0):.3f}/{of_seen[key]:.3f}" for key in of_seen]
        print(f"{'':10} seconds a step, said/seen: {', '.join(parts)}", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--policies", default="rollmux,rlmux,colocated")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--ask-after", default="10")
    parser.add_argument("--keep", type=Path, help="folder for the runs")
    parser.add_argument("--recorded", type=Path, nargs="+", metavar="DIR")
    asked = parser.parse_args()
    first, *others = map(int, asked.ask_after.split(","))
    if asked.recorded:
        both = [pair for run in asked.recorded for step in (first, *others) for pair in recorded(run, step)]
        show([end for end, _ in both])
        print(f"at its speed: deviation {median(abs(then) for _, then in both):.1%} median")
        return
    policies = asked.policies.split(",")
    ends: list[End] = []
    for number in range(asked.rounds):
        with tempfile.TemporaryDirectory(prefix="rlmux-whatif-") as name:
            folder = Path(name) if asked.keep is None else asked.keep / f"{number}"
            folder.mkdir(parents=True, exist_ok=True)
            policy = policies[number % len(policies)]
            ends += follow_up(folder, policy, asked.steps, first + number % 10)
    show(ends)


if __name__ == "__main__":
    main()
