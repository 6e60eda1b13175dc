"""The benchmark of the log makes a long run of a recorded one, and nothing of it is counted twice."""

from __future__ import annotations

from pathlib import Path

from log import Recorded, write
from rlmux.core.actions import Admit, RunStage
from rlmux.core.events import ChunkFinished, PipelineSubmitted, StageFinished
from rlmux.core.model import AdmissionKind, Cluster, DeviceId, NodeId, Phase, Pipeline, Placement, Pool, Stage
from rlmux.log.run_log import LogReader, RunLog, run_header
from rlmux.report.timeline.history import History

NODES = {"rollout": NodeId("rollout", 0), "train": NodeId("train", 0)}


def recorded_run(folder: Path) -> Path:
    pools = {phase.value: Pool(name=phase.value, phase=phase, num_nodes=1) for phase in (Phase.ROLLOUT, Phase.TRAIN)}
    header = run_header(policy="rollmux", backend="local", cluster=Cluster(pools=pools))
    placement = Placement(group=1, rollout_nodes=(NODES["rollout"],), train_nodes=(NODES["train"],))
    with RunLog.create(folder, header) as log:
        stages = (Stage.GENERATE, Stage.UPDATE)
        log.append_event(PipelineSubmitted(time_s=0.0, pipeline=Pipeline(id="a", num_steps=9, stages=stages)))
        log.append_actions([Admit(pipeline="a", placement=placement, kind=AdmissionKind.NEW)])
        for number, stage in enumerate((Stage.GENERATE, Stage.UPDATE), 1):
            pool = "rollout" if stage is Stage.GENERATE else "train"
            devices = (DeviceId(pool, 0, 0),)
            log.append_actions(
                [RunStage(order=number, pipeline="a", step=1, stage=stage, devices=devices, weight_version=0)]
            )
            for half in range(1, 9):
                at_s = 4.0 * number - 4.0 + 0.5 * half
                log.append_event(ChunkFinished(time_s=at_s, order=number, num_active=9 - half, num_waiting=0))
            log.append_event(StageFinished(time_s=4.0 * number, order=number, seconds=4.0))
        log.note("step", 8.0, pipeline="a", step=1, metrics={"loss": 0.5}, weights_sha256="0" * 64)
    return folder


def test_a_long_run_has_every_order_once_and_the_recorded_rate(tmp_path: Path) -> None:
    recorded = Recorded.of(recorded_run(tmp_path / "short"))
    figures = write(recorded, tmp_path / "long", num_rows=500, num_devices=6)
    with LogReader(tmp_path / "long") as reader:
        rows = [row for row in reader.entries() if row.kind != "header"]
        history = History.of(reader.header, reader.parts())
    ended = [order for order in history.orders if order.end_s < float("inf")]
    assert len(rows) == 501
    assert len({order.id for order in history.orders}) == len(history.orders) > 6
    assert {len(order.chunks) for order in ended} == {8}
    assert {device for order in history.orders for device in order.devices} == {
        DeviceId(pool, 100 * copy, 0) for pool in ("rollout", "train") for copy in range(3)
    }
    assert recorded.rates() == (2.0, 5 / 8.0)
    num_hours = 500 / (3 * (2.0 + 5 / 8.0)) / 3600
    assert abs(figures["hours"] / num_hours - 1.0) < 0.1
