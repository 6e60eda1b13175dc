"""What pages cost: the index of a log of a million rows, and the seconds that its answers take.

    python benchmarks/dashboard.py [--rows 1000000] [--json] [--keep DIR]

The log is made up: fifty pairs of devices on each of which four pipelines alternate in virtual time, written by the
product's own writer. It is indexed as the process of `rlmux serve` does, and asked by one client over loopback, from a
server that has just started.

    index          rows of the log a second, from nothing to all of them; goal: 40,000
    first answers  seconds of what the timeline page asks for when it opens: lanes, timeline, tiles of the whole run
    window         seconds of tiles and intervals of a narrow window, the slowest of twenty; goal: 0.15
"""

from __future__ import annotations

import argparse
import heapq
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx

from rlmux.core.actions import Admit, RunStage
from rlmux.core.events import ChunkFinished, PipelineSubmitted, StageFinished
from rlmux.core.model import (
    AdmissionKind,
    Cluster,
    DeviceId,
    GroupId,
    NodeId,
    OrderId,
    Phase,
    Pipeline,
    PipelineId,
    Placement,
    Pool,
    Stage,
)
from rlmux.report.log import RunLog, run_header
from rlmux.service.dashboard.access import Limits
from rlmux.service.dashboard.app import Dashboard
from rlmux.service.index.indexer import LaneIndexer
from rlmux.service.listening import Listening
from rlmux.service.server import Server

GOAL_ROWS_PER_S, GOAL_WINDOW_S = 40_000.0, 0.15
NUM_PAIRS = 50


def write_log(folder: Path, num_rows: int) -> int:
    """Write so many rows, at least; returns the last row's number."""
    pools = {
        name: Pool(name=name, phase=phase, num_nodes=NUM_PAIRS)
        for name, phase in (("rollout", Phase.ROLLOUT), ("train", Phase.TRAIN))
    }
    header = run_header(policy="rollmux", backend="local", cluster=Cluster(pools=pools))
    log = RunLog.create(folder, header)
    due: list[tuple[float, int, PipelineId, int, int]] = []
    for pair in range(NUM_PAIRS):
        nodes = (NodeId("rollout", pair),), (NodeId("train", pair),)
        placement = Placement(group=GroupId(pair + 1), rollout_nodes=nodes[0], train_nodes=nodes[1])
        for one in range(4):
            name = PipelineId(f"p{pair}-{one}")
            pipeline = Pipeline(id=name, num_steps=100_000, stages=(Stage.GENERATE, Stage.UPDATE))
            log.append_event(PipelineSubmitted(time_s=0.0, pipeline=pipeline))
            log.append_actions([Admit(pipeline=name, placement=placement, kind=AdmissionKind.NEW)])
            heapq.heappush(due, (10.0 * one + 0.1 * pair, pair, name, 1, 0))
    order = OrderId(0)
    while log.last_seq < num_rows:
        at_s, pair, name, step, stage = heapq.heappop(due)
        order = OrderId(order + 1)
        device = DeviceId(("rollout", "train")[stage], pair, 0)
        given = RunStage(
            order=order, pipeline=name, step=step, stage=(Stage.GENERATE, Stage.UPDATE)[stage], devices=(device,),
            weight_version=step - 1,
        )  # fmt: skip
        log.append_event(_chunk(at_s, OrderId(order - 1), 1.0))
        log.append_actions([given])
        for tick in range(1, 5 if stage == 0 else 1):
            log.append_event(_chunk(at_s + 2.0 * tick, order, 2.0 * tick))
        seconds = 9.0 if stage == 0 else 8.0
        log.append_event(StageFinished(time_s=at_s + seconds, order=order, seconds=seconds, switch_s=0.0, tokens=900))
        if stage == 1:
            log.note("step", at_s + seconds, pipeline=name, step=step, metrics={"reward_mean": 0.5, "kl": 0.01})
        heapq.heappush(due, (at_s + (10.0 if stage == 0 else 30.0), pair, name, step + stage, 1 - stage))
        log.commit()
    log.close()
    return log.last_seq


def _chunk(time_s: float, order: OrderId, seconds: float) -> ChunkFinished:
    return ChunkFinished(
        time_s=time_s,
        order=order,
        num_active=64,
        num_waiting=0,
        num_waiting_for_env=0,
        tokens=100,
        seconds=seconds,
    )


def measure(folder: Path, num_rows: int) -> dict[str, Any]:
    last_seq = write_log(folder, num_rows)
    begun_s = time.perf_counter()
    indexer = LaneIndexer(folder, folder / "index.db")
    indexer.catch_up()
    indexer.close()
    index_s = time.perf_counter() - begun_s
    server = Server(Listening())
    dashboard = Dashboard(folder, server, limits=Limits(requests_per_s=1e6, burst=1e6))
    server.start()
    dashboard.start()
    headers = {"Authorization": f"Bearer {dashboard.token}"}
    with httpx.Client(base_url=f"{server.url}/api/v1", headers=headers, timeout=120, verify=False) as client:
        answers = _answers(client, folder.name)
    server.close()
    dashboard.close()
    return {
        "rows": last_seq,
        "index_s": index_s,
        "rows_per_s": last_seq / index_s,
        "index_mb": (folder / "index.db").stat().st_size / 1e6,
        **answers,
    }


def _answers(client: httpx.Client, lane: str) -> dict[str, Any]:
    found: dict[str, Any] = {}

    def ask(name: str, path: str, **query: Any) -> Any:
        begun_s = time.perf_counter()
        answer = client.get(path, params=query)
        answer.raise_for_status()
        found[name] = max(found.get(name, 0.0), time.perf_counter() - begun_s)
        return answer

    ask("lanes_s", "/lanes")
    timeline = ask("timeline_s", f"/timeline/{lane}").json()
    span_s = timeline["end_s"] - timeline["start_s"]
    level = next(k for k, width_s in enumerate(timeline["bucket_s"]) if span_s / width_s <= 1200)
    whole = ask("tiles_whole_s", f"/timeline/{lane}/tiles", level=level)
    found["tiles_whole_kb"] = len(whole.content) / 1e3
    ask("devices_s", f"/lanes/{lane}/devices")
    ask("pipelines_s", "/pipelines")
    for part in range(20):
        at_s = timeline["start_s"] + span_s * part / 21
        ask("tiles_window_s", f"/timeline/{lane}/tiles", level=0, t0=at_s, t1=at_s + 250.0)
        ask("intervals_window_s", f"/timeline/{lane}/intervals", t0=at_s, t1=at_s + 250.0)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--keep", type=Path, help="folder to make the run in, which is kept")
    parser.add_argument("--json", action="store_true")
    words = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = measure(words.keep or Path(folder) / "run", words.rows)
    if words.json:
        print(json.dumps(found))
        return
    for name, value in found.items():
        print(f"{name:20} {value:12,.3f}")


if __name__ == "__main__":
    main()
