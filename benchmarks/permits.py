"""Jobs of other trainers under a broker: makespan against one after the other, permits a step, seconds a permit.

    python benchmarks/permits.py RUN                                            of a broker's folder, a GPU's too
    python benchmarks/permits.py --pools pools.yaml --job 'a: CMD' --job 'b: CMD'   each alone, then all together
    PYTHONPATH=. python benchmarks/permits.py --trainer verl --python .venv-verl/bin/python

With `--job` or `--trainer` each job runs alone under a broker of its own, then all under one. Seconds count from the
first permit of a step to the end of the last: a job's own start is left out, the later start of a second one is not,
but for the gain while all are there.
`--trainer` takes the programs of tests/broker: verl's own command on cores; AReaL's loop, with stand-ins for engines.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rlmux.log.notes import PermitEndedNote, PermitGrantedNote, PoolLeftNote
from rlmux.log.run_log import LogReader

Row = dict[str, str | float | None]
Start = Callable[[str, str], "subprocess.Popen[Any]"]
"""Begins the job of a name under the broker of an address."""
VERL_STEPS = (
    "trainer.total_training_steps=24",
    "trainer.total_epochs=24",
    "trainer.test_freq=-1",
    "trainer.save_freq=-1",
)
TRAINERS = ("verl", "verl_separate", "areal")


class Permit(NamedTuple):
    """One permit that ended."""

    job: str
    pools: tuple[str, ...]
    phase: str
    step: int
    """0 where the job named none."""
    begin_s: float
    end_s: float
    restore_s: float
    left_s: float | None
    """Seconds from its end until the job had left a pool; None where it stayed."""
    freed_bytes: float | None
    """Bytes given back after it; None where it stayed, or reported none."""


def permits_of(folder: Path) -> list[Permit]:
    """Permits of a broker's log, in the order of their ends."""
    granted: dict[int, tuple[float, PermitGrantedNote]] = {}
    permits: list[Permit] = []
    last_of: dict[tuple[str, str], int] = {}
    """Index of a job's last permit, by job and pool."""
    with LogReader(folder) as log:
        notes = [(entry.time_s, entry.note) for entry in log.entries() if entry.kind == "note"]
    for time_s, note in notes:
        match note:
            case PermitGrantedNote():
                granted[note.fence] = time_s, note
            case PermitEndedNote() if note.fence in granted:
                begin_s, had = granted.pop(note.fence)
                last_of.update({(note.pipeline, pool): len(permits) for pool in had.pools})
                permits.append(
                    Permit(note.pipeline, tuple(sorted(had.pools)), had.phase, had.step or 0, begin_s, time_s,
                           note.restore_s, None, None)
                )  # fmt: skip
            case PoolLeftNote() if (note.pipeline, note.pool) in last_of:
                index = last_of[note.pipeline, note.pool]
                permit = permits[index]
                freed = permit.freed_bytes if note.freed_bytes is None else (permit.freed_bytes or 0) + note.freed_bytes
                permits[index] = permit._replace(left_s=time_s - permit.end_s, freed_bytes=freed)
    return permits


def rows_of(permits: Sequence[Permit]) -> list[Row]:
    """One row for each job and phase."""
    groups: defaultdict[tuple[str, str], list[Permit]] = defaultdict(list)
    for permit in permits:
        if permit.step:
            groups[permit.job, f"{'+'.join(permit.pools)}: {permit.phase}"].append(permit)
    rows: list[Row] = []
    for (job, phase), own in groups.items():
        freed = [permit.freed_bytes for permit in own if permit.freed_bytes is not None]
        switches_s = [permit.left_s + permit.restore_s for permit in own if permit.left_s is not None]
        held_s = [permit.end_s - permit.begin_s for permit in own]
        rows.append(
            {
                "job": job,
                "pool and phase": phase,
                "permits a step": len(own) / len({permit.step for permit in own}),
                "held s": statistics.median(held_s),
                "p99": quantile(held_s, 0.99),
                "switch s": statistics.median(switches_s) if switches_s else None,
                "given back MB": statistics.median(freed) / 1e6 if freed else None,
            }
        )
    return rows


def quantile(values: Sequence[float], part: float) -> float:
    return sorted(values)[min(len(values) - 1, int(part * len(values)))]


def span_s(permits: Sequence[Permit]) -> float:
    """From the permit of the first step of any job to the end of the last permit."""
    begins_s = [permit.begin_s for permit in permits if permit.step]
    if not begins_s:
        raise SystemExit("no permit with a step; accepted: jobs that name their steps, as job.phase(..., step=3)")
    return max(permit.end_s for permit in permits) - min(begins_s)


def gain_of_both(permits: Sequence[Permit], alone_s: Mapping[str, float]) -> float:
    """Steps while all jobs are there, in their seconds alone, over the seconds that passed: no start, and no end alone.
    `alone_s`: seconds of a step of each job alone."""
    steps = {job: [permit for permit in permits if permit.job == job and permit.step] for job in alone_s}
    begin_s = max(min(permit.begin_s for permit in own) for own in steps.values())
    end_s = min(max(permit.end_s for permit in own) for own in steps.values())
    done = {job: {p.step for p in own if begin_s < p.end_s <= end_s} for job, own in steps.items()}
    return sum(len(done[job]) * seconds for job, seconds in alone_s.items()) / (end_s - begin_s)


def run(names: Sequence[str], pools: str, start: Start, policy: str, folder: Path) -> list[Permit]:
    """These jobs under one broker, until all have ended. Returns their permits."""
    folder.mkdir()
    (folder / "pools.yaml").write_text(pools, encoding="utf-8")
    words = ["broker", str(folder / "pools.yaml"), "--policy", policy, "--out", str(folder / "out")]
    broker = subprocess.Popen(
        [sys.executable, "-m", "rlmux", *words, "--listen", f"unix:{folder / 's'}"], stdout=subprocess.PIPE, text=True
    )
    assert broker.stdout is not None
    address = broker.stdout.readline().strip().partition("=")[2]
    programs = {name: start(name, address) for name in names}
    for name, program in programs.items():
        if program.wait() != 0:
            broker.kill()
            raise SystemExit(f"job {name} ended with {program.returncode}: {folder}")
    broker.terminate()
    broker.wait()
    return permits_of(folder / "out")


def of_trainer(trainer: str, python: str, folder: Path) -> tuple[str, Start]:
    """Pools and start of the programs with which the tests run a trainer."""
    framework = trainer.partition("_")[0]
    os.environ[f"RLMUX_{framework.upper()}_PYTHON"] = str(Path(python).absolute())
    from tests.broker import room as rooms
    from tests.broker import test_areal, test_verl

    (folder / "room").mkdir()
    room = rooms.Room(folder / "room")
    pools: Any = {phase: {"phase": phase, "device_memory_gb": test_areal.MEMORY_GB} for phase in ("rollout", "train")}
    if framework == "verl":
        pools = test_verl.TWO_POOLS if "separate" in trainer else test_verl.ONE_POOL
        for seed, name in enumerate("ab"):
            model = [python, str(rooms.HERE / "verl_model.py"), str(folder / name), str(seed)]
            subprocess.run(model, check=True, capture_output=True)

    def start(name: str, address: str) -> subprocess.Popen[Any]:
        room.address, room.socket = address, Path(address.partition(":")[2])
        if framework == "verl":
            mode, options = ("rlmux_separate", test_verl.SEPARATE) if "separate" in trainer else ("rlmux", ())
            return test_verl.start(room, name, folder / name, mode, *options, *VERL_STEPS)
        return test_areal.start(room, name)

    return json.dumps({"cluster": {"pools": pools}}), start


def of_commands(given: Sequence[str], pools: Path) -> tuple[str, Start, list[str]]:
    commands = {name.strip(): command for name, _, command in (job.partition(":") for job in given)}

    def start(name: str, address: str) -> subprocess.Popen[Any]:
        environ = {**os.environ, "RLMUX_BROKER": address, "RLMUX_JOB": name}
        return subprocess.Popen(shlex.split(commands[name]), env=environ)

    return pools.read_text(encoding="utf-8"), start, list(commands)


def show(rows: Sequence[Row]) -> None:
    print("| " + " | ".join(rows[0]) + " |\n|" + "---|" * len(rows[0]))
    for row in rows:
        cells = ("-" if v is None else v if isinstance(v, str) else f"{v:.3g}" for v in row.values())
        print("| " + " | ".join(cells) + " |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", nargs="?", type=Path, help="folder of a broker")
    parser.add_argument("--pools", type=Path, help="file of a broker")
    parser.add_argument("--job", action="append", help="NAME: COMMAND")
    parser.add_argument("--trainer", choices=TRAINERS)
    parser.add_argument("--python", default="", help="Python with the trainer")
    parser.add_argument("--policy", default="rollmux")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    if args.run is not None:
        permits = permits_of(args.run)
        result: dict[str, Any] = {"together_s": span_s(permits), "permits": rows_of(permits)}
    else:
        if args.trainer is None and (args.pools is None or not args.job):
            parser.error("accepted: RUN, --trainer with --python, or --pools with --job")
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            if args.trainer is not None:
                pools, start = of_trainer(args.trainer, args.python, folder)
                names = ["a", "b"]
            else:
                pools, start, names = of_commands(args.job, args.pools)
            alone = {each: run([each], pools, start, args.policy, folder / f"alone-{each}") for each in names}
            together = run(names, pools, start, args.policy, folder / "together")
        alone_s = {each: span_s(permits) for each, permits in alone.items()}
        step_s = {each: alone_s[each] / len({p.step for p in permits if p.step}) for each, permits in alone.items()}
        result = {
            "alone_s": alone_s,
            "together_s": span_s(together),
            "gain": sum(alone_s.values()) / span_s(together),
            "gain_while_all_are_there": gain_of_both(together, step_s),
            "permits": rows_of(together),
        }
    if args.json:
        print(json.dumps(result))
        return
    print(", ".join(f"{key} {value:.3g}" for key, value in result.items() if isinstance(value, float)))
    if "alone_s" in result:
        print("alone: " + ", ".join(f"{job} {seconds:.3g} s" for job, seconds in result["alone_s"].items()))
    show(result["permits"])


if __name__ == "__main__":
    main()
