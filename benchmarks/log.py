"""What the log costs: megabytes a day at sixteen busy devices, and the seconds that its readers take.

    python benchmarks/log.py [RUN] [--rows 1000000] [--devices 16] [--record-s 180] [--keep DIR] [--json]

RUN is the folder of a real run; without one, two pipelines are trained on two devices for `--record-s` seconds first.
Its rows are then written by the product's own writer as if that run went on and on, on as many pairs of devices as it
takes: at the recorded rate, with the recorded noise in times and counts, until there are `--rows` rows. Ids of orders,
devices, pipelines and steps are made to differ; everything else is as it was recorded.

    rows a second       of one busy device, progress reports and others
    MB a day            of `--devices` busy devices: bytes of the whole log over the time it covers; goal: at most 150
    loose               the same as rows of JSON, as a log without blocks has them
    report              seconds of `rlmux report` (summary.json, trace.json, timeline.html); goal: 20 at a million rows;
                        again: of the same log, whose files are there
    resume              seconds that `rlmux resume` reads the log before it starts processes; goal: 2
    status              seconds until `rlmux status` first knows the run; again: with what it kept of it
    write               microseconds of CPU a row: encoding, committing every tick, packing and sealing
"""

from __future__ import annotations

import argparse
import heapq
import json
import math
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from rlmux.core.actions import Admit, Release
from rlmux.core.events import ChunkFinished, PipelineSubmitted
from rlmux.core.model import DeviceId, NodeId
from rlmux.log import value_codec
from rlmux.log.run_log import Entry, LogLimits, LogReader, RunLog
from rlmux.report.report_cache import MADE_NAME
from rlmux.report.reports import write_report
from rlmux.report.timeline.condensed_state import CACHE_NAME
from rlmux.report.timeline.history import History
from rlmux.runtime.control.run_control import submitted_to
from rlmux.runtime.control.run_status import StatusReader
from rlmux.runtime.launch import spec_of

DAY_S = 86400.0
GOAL_MB, GOAL_REPORT_S, GOAL_RESUME_S = 150.0, 20.0, 2.0
SPEC = """
cluster: {pools: {rollout: {devices: 1}, train: {devices: 1}}}
policy: rlmux
defaults:
  steps: 1000
  model: {hidden_size: 128, layers: 4, heads: 4, kv_heads: 2, intermediate_size: 256}
  sft_warmup: {updates: 10, batch_size: 8, learning_rate: 3e-3}
  algorithm: {name: grpo, prompts_per_step: 32, group_size: 8, learning_rate: 1e-4, micro_batch_size: 2}
  rollout: {max_new_tokens: 256, max_prompt_tokens: 256, slots: 64}
  task: {name: sort, min_digits: 2, mean_digits: 40, max_digits: 240}
pipelines: [{name: a, seed: 1}, {name: b, seed: 2}]
"""


def record(folder: Path, seconds: float) -> Path:
    """A real run that is stopped after so many seconds."""
    spec, run = folder / "busy.yaml", folder / "recorded"
    spec.write_text(SPEC)
    command = [sys.executable, "-m", "rlmux", "run", str(spec), "--out", str(run)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=120)
    if not (run / "run.db").exists():
        sys.exit(f"no run was recorded: {said.strip()}")
    return run


@dataclass(frozen=True, slots=True)
class Recorded:
    """The rows of a real run, from its first order to its last row."""

    header: dict[str, Any]
    begin: list[Entry]
    """Submissions and admissions, once for each copy."""
    lap: list[Entry]
    """What is repeated: everything from the first order on."""
    seconds: float
    """Seconds that a lap takes."""
    num_orders: int
    num_steps: int
    devices: list[DeviceId]
    busy_s: float
    """Seconds that devices had an order, summed."""

    @classmethod
    def of(cls, folder: Path) -> Recorded:
        with LogReader(folder) as reader:
            rows = [row for row in reader.entries() if row.kind != "header"]
            history = History.of(reader.header, rows)
            header = reader.header
        once = (PipelineSubmitted, Admit, Release)
        notes = ("step", "rollout", "checkpoint")
        start_s = min(order.start_s for order in history.orders)
        open_orders = {order.id for order in history.running}  # a run that goes on ends what it began
        lap = [
            row
            for row in rows
            if row.time_s >= start_s
            and (row.type in notes if row.kind == "note" else not isinstance(row.value, once))
            and (row.kind == "note" or getattr(row.value, "order", None) not in open_orders)
        ]
        orders = [order for order in history.orders if order.devices and not order.is_migration]
        return cls(
            header=header,
            begin=[row for row in rows if isinstance(row.value, PipelineSubmitted | Admit)],
            lap=lap,
            seconds=rows[-1].time_s - start_s,
            num_orders=max(order.id for order in history.orders),
            num_steps=max(order.step for order in history.orders),
            devices=list(dict.fromkeys(device for order in orders for device in order.devices)),
            busy_s=math.fsum(
                (min(order.end_s, history.last_s) - order.start_s) * len(order.devices) for order in orders
            ),
        )

    def rates(self) -> tuple[float, float]:
        """(progress reports, other rows) of a busy device each second."""
        num_reports = sum(isinstance(row.value, ChunkFinished) for row in self.lap)
        return num_reports / self.busy_s, (len(self.lap) - num_reports) / self.busy_s

    def copies(self, num: int) -> Iterator[Entry]:
        """The run going on for ever, on so many sets of its devices, in the order of time."""
        for copy in range(num):
            for row in self.begin:
                yield _renamed(row, self._names(copy, 0, 0.0, 1.0, random.Random()))
        streams = [self._stream(copy) for copy in range(num)]
        yield from heapq.merge(*streams, key=lambda row: row.time_s)

    def _stream(self, copy: int) -> Iterator[Entry]:
        """Laps of slightly different length: no two are alike to the microsecond, as no two steps are."""
        draw, lap, begin_s = random.Random(copy), 0, copy * self.seconds / 17
        while True:
            stretch = 1.0 + 0.02 * draw.random()
            names = self._names(copy, lap, begin_s - self.lap[0].time_s * stretch, stretch, draw)
            for row in self.lap:
                yield _renamed(row, names)
            lap, begin_s = lap + 1, begin_s + self.seconds * stretch

    def _names(
        self, copy: int, lap: int, offset_s: float, stretch: float, draw: random.Random
    ) -> Callable[[str, Any], Any]:
        first_order = (lap * 1000 + copy) * (self.num_orders + 1)

        def name(field: str, value: Any) -> Any:
            if field == "time_s":
                return round(value * stretch + offset_s, 6)
            if field in ("seconds", "switch_s"):
                return round(value * stretch, 6)
            if field == "tokens":
                return int(value * stretch)
            if field == "runs":
                return draw.sample(value, len(value))
            if field == "metrics":
                return {key: one * stretch if isinstance(one, float) else one for key, one in value.items()}
            if field == "weights_sha256":
                return f"{draw.getrandbits(256):064x}"
            if field == "weights_checksum":
                return f"{draw.getrandbits(128):032x}"
            if field == "order":
                return first_order + value
            if field in ("step", "weight_version"):
                return lap * self.num_steps + value
            if field == "pipeline":
                return f"{value}{copy}" if isinstance(value, str) else replace(value, id=f"{value.id}{copy}")
            if isinstance(value, DeviceId):
                return value._replace(node=value.node + copy * 100)
            if isinstance(value, tuple) and value and isinstance(value[0], DeviceId):
                return tuple(name("", one) for one in value)
            if field == "placement":
                nodes = {
                    key: tuple(NodeId(node.pool, node.index + copy * 100) for node in getattr(value, key))
                    for key in ("rollout_nodes", "train_nodes")
                }
                return replace(value, group=value.group + copy * 100, **nodes)
            return value

        return name


def _renamed(row: Entry, name: Callable[[str, Any], Any]) -> Entry:
    time_s = name("time_s", row.time_s)
    if row.kind == "note":
        value: Any = {field: name(field, one) for field, one in row.value.items()}  # type: ignore[union-attr]
    else:
        kept = {field.name: getattr(row.value, field.name) for field in fields(row.value)}  # type: ignore[arg-type]
        value = type(row.value)(**{field: name(field, one) for field, one in kept.items()})
    return row._replace(time_s=time_s, value=value)


def write(recorded: Recorded, folder: Path, num_rows: int, num_devices: int) -> dict[str, float]:
    """A log of so many rows; returns what writing it took."""
    num_copies = math.ceil(num_devices / len(recorded.devices))
    loose_bytes, spent_s, last_s, num_written = 0, 0.0, 0.0, 0
    listed = [device._replace(node=device.node + 100 * c) for c in range(num_copies) for device in recorded.devices]
    pools = {
        pool: {**told, "devices": [list(device) for device in listed if device.pool == pool]}
        for pool, told in recorded.header["pools"].items()
    }
    header = {key: value for key, value in recorded.header.items() if key != "schema_version"}
    with RunLog.create(folder, {**header, "pools": pools}, limits=LogLimits()) as log:
        for row in recorded.copies(num_copies):
            begin_s = time.thread_time()
            if row.kind == "event":
                log.commit()
                log.append_event(row.value)  # type: ignore[arg-type]
            elif row.kind == "action":
                log.append_actions([row.value])  # type: ignore[list-item]
            else:
                log.note(row.type, row.time_s, **row.value)  # type: ignore[arg-type]
            spent_s += time.thread_time() - begin_s
            if num_written % 100 == 0:
                text = value_codec.dumps(row.value) if row.kind == "note" else value_codec.encode(row.value)  # type: ignore[arg-type]
                loose_bytes += 100 * (len(text) + len(row.type) + len(row.kind) + 16)
            last_s, num_written = row.time_s, num_written + 1
            if num_written == num_rows:
                break
        log.note("end", last_s, control_s=0.0)
    num_bytes = sum(path.stat().st_size for path in folder.glob("run*.db"))
    num_busy = num_copies * recorded.busy_s / recorded.seconds
    busy_days = last_s / DAY_S * num_busy / num_devices
    return {
        "hours": last_s / 3600,
        "segments": len(list(folder.glob("run.*.db"))),
        "bytes_per_row": num_bytes / num_written,
        "mb_per_day": num_bytes / 1e6 / busy_days,
        "loose_mb_per_day": loose_bytes / 1e6 / busy_days,
        "write_us": 1e6 * spent_s / num_written,
    }


def read(folder: Path) -> dict[str, float]:
    """Seconds of each reader, each from the beginning."""

    def resume() -> None:
        with LogReader(folder) as reader:
            reader.header.get("backend")
            reader.state()
        spec_of(folder)
        submitted_to(folder)
        RunLog.open(folder).close()

    def show_status() -> None:
        reader = StatusReader(folder)
        reader.read()
        reader.close()

    for name in (CACHE_NAME, MADE_NAME):
        (folder / name).unlink(missing_ok=True)
    return {
        "resume_s": seconds_of(resume),
        "status_s": seconds_of(show_status),
        "status_again_s": seconds_of(show_status),
        "report_s": seconds_of(lambda: write_report(folder)),
        "report_again_s": seconds_of(lambda: write_report(folder)),
    }


def seconds_of(work: Callable[[], object]) -> float:
    begin_s = time.perf_counter()
    work()
    return time.perf_counter() - begin_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", nargs="?", type=Path)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--devices", type=int, default=16)
    parser.add_argument("--record-s", type=float, default=180.0)
    parser.add_argument("--keep", type=Path, help="folder that the long log is left in; one that is there is read")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    figures: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as scratch:
        long = arguments.keep or Path(scratch) / "long"
        if not (long / "run.db").exists():
            recorded = Recorded.of(arguments.run or record(Path(scratch), arguments.record_s))
            figures["reports_per_device_s"], figures["other_rows_per_device_s"] = recorded.rates()
            figures |= write(recorded, long, arguments.rows, arguments.devices)
        figures |= read(long)
    if arguments.json:
        print(json.dumps(figures))
        return
    goals = {"mb_per_day": GOAL_MB, "report_s": GOAL_REPORT_S, "resume_s": GOAL_RESUME_S}
    for name, value in figures.items():
        goal = f"goal: at most {goals[name]:g}" if name in goals else ""
        print(f"{name:24} {value:12.4g}  {goal}")


if __name__ == "__main__":
    main()
