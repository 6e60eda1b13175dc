"""Jobs of other trainers under a broker: makespan against one after the other, permits a step, seconds a permit.

    python benchmarks/permits.py RUN                                            of a broker's folder, a GPU's too
    python benchmarks/permits.py --pools pools.yaml --job 'a: CMD' --job 'b: CMD'   each alone, then all together
    PYTHONPATH=. python benchmarks/permits.py --trainer verl --python .venv-verl/bin/python

With `--job` or `--trainer` each job runs alone under a broker of its own, then all under one. Seconds count from the
first permit of a step to the end of the last: a job's own start is left out, the later start of a second one is not.
`--trainer` takes the programs of tests/broker: verl's own command on cores, the loops of the others with what stands in
for their engines.
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
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rlmux.log.run_log import LogReader

Start = Callable[[str, str], "subprocess.Popen[Any]"]
"""Begins the job of a name under the broker of an address."""
VERL_STEPS = (
    "trainer.total_training_steps=24",
    "trainer.total_epochs=24",
    "trainer.test_freq=-1",
    "trainer.save_freq=-1",
)
TRAINERS = ("verl", "verl_separate", "trl", "skyrl", "openrlhf", "areal")


def permits_of(folder: Path) -> list[dict[str, Any]]:
    """Each permit that ended: job, phase, step, seconds waited, held, and to come back; bytes given back after it."""
    open_by_fence: dict[int, dict[str, Any]] = {}
    last_of: dict[tuple[str, str], dict[str, Any]] = {}
    permits = []
    with LogReader(folder) as log:
        notes = [
            (entry.time_s, entry.value) for entry in log.entries() if entry.kind == "note" and entry.type == "permit"
        ]
    for time_s, note in notes:
        if note["what"] == "granted":
            open_by_fence[note["fence"]] = note | {"begin_s": time_s}
        elif note["what"] == "ended" and note["fence"] in open_by_fence:
            permit = open_by_fence.pop(note["fence"])
            permit |= {
                "end_s": time_s,
                "held_s": time_s - permit["begin_s"],
                "restore_s": note["restore_s"],
                "bytes": None,
            }
            permits.append(permit)
            last_of.update({(note["pipeline"], pool): permit for pool in note["pools"]})
        elif note["what"] == "left" and (permit := last_of.get((note["pipeline"], note["pool"]))) is not None:
            permit["left_s"] = time_s - permit["end_s"]
            if note["freed_bytes"] is not None:
                permit["bytes"] = (permit["bytes"] or 0.0) + note["freed_bytes"]
    return permits


def rows_of(permits: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row for each job and phase."""
    groups: defaultdict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    for permit in permits:
        if permit.get("step"):
            groups[permit["pipeline"], "+".join(sorted(permit["pools"])) + " " + permit["phase"]].append(permit)
    rows = []
    for (job, phase), own in groups.items():
        freed = [permit["bytes"] for permit in own if permit["bytes"] is not None]
        switches = [permit["left_s"] + permit["restore_s"] for permit in own if "left_s" in permit]
        rows.append(
            {
                "job": job,
                "pool and phase": phase,
                "permits a step": len(own) / len({permit["step"] for permit in own}),
                "held s": statistics.median(permit["held_s"] for permit in own),
                "p99": quantile([permit["held_s"] for permit in own], 0.99),
                "waited s": statistics.median(permit["waited_s"] for permit in own),
                "p99 waited": quantile([permit["waited_s"] for permit in own], 0.99),
                "given up s": statistics.median(switches) if switches else None,
                "given back MB": statistics.median(freed) / 1e6 if freed else None,
            }
        )
    return rows


def quantile(values: Sequence[float], part: float) -> float:
    return sorted(values)[min(len(values) - 1, int(part * len(values)))]


def span_s(permits: Sequence[dict[str, Any]]) -> float:
    """From the permit of the first step of any job to the end of the last permit."""
    begins_s = [permit["begin_s"] for permit in permits if permit.get("step")]
    if not begins_s:
        raise SystemExit("no permit with a step; accepted: jobs that name their steps, as job.phase(..., step=3)")
    return max(permit["end_s"] for permit in permits) - min(begins_s)


def run(names: Sequence[str], pools: str, start: Start, policy: str, folder: Path) -> list[dict[str, Any]]:
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
    from tests.broker import test_areal, test_trl, test_verl, trainer_room

    room = rooms.Room(folder / "room") if (folder / "room").mkdir() is None else None
    assert room is not None
    pools: Any = trainer_room.POOLS["one"]
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
        if framework == "trl":
            return test_trl.start(room, name, ord(name), is_shared=True)
        if framework == "areal":
            return test_areal.start(room, name)
        return trainer_room.start(room, python, f"{framework}_program.py", name, "one")

    if framework == "areal":
        pools = {phase: {"phase": phase, "device_memory_gb": test_areal.MEMORY_GB} for phase in ("rollout", "train")}
    return json.dumps({"cluster": {"pools": pools}}), start


def of_commands(given: Sequence[str], pools: Path) -> tuple[str, Start, list[str]]:
    commands = {name.strip(): command for name, _, command in (job.partition(":") for job in given)}

    def start(name: str, address: str) -> subprocess.Popen[Any]:
        environ = {**os.environ, "RLMUX_BROKER": address, "RLMUX_JOB": name}
        return subprocess.Popen(shlex.split(commands[name]), env=environ)

    return pools.read_text(encoding="utf-8"), start, list(commands)


def show(rows: Sequence[dict[str, Any]]) -> None:
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
        result = {
            "alone_s": alone_s,
            "together_s": span_s(together),
            "gain": sum(alone_s.values()) / span_s(together),
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
