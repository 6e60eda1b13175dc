"""States leave a device and come back: what workers are asked for it, and what of it counts as the switch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from rlmux.core.actions import Admit, RunStage, Switch
from rlmux.core.events import StageFinished
from rlmux.core.model import (
    AdmissionKind,
    Cluster,
    DeviceId,
    Footprint,
    GroupId,
    NodeId,
    OrderId,
    Phase,
    PipelineId,
    Placement,
    Resident,
    Stage,
)
from rlmux.rl.types import TrainReport
from rlmux.runtime.worker_backend import WorkerBackend
from rlmux.runtime.workers.worker_calls import TrainCallResult

DEVICE = DeviceId("train", 0, 0)
PLACE = Placement(group=GroupId(1), rollout_nodes=(NodeId("rollout", 0),), train_nodes=(NodeId("train", 0),))
SIX = Footprint(rollout_device_bytes=6.0, train_device_bytes=6.0)


class Pair:
    """Two pipelines whose training states alternate on one device; host memory has room for `host_bytes` of them."""

    def __init__(self, real: Any, folder: Any, host_bytes: float) -> None:
        self.workplace = real.Workplace()
        pools = {
            name: replace(pool, spills_to_disk=True, host_memory_bytes=host_bytes)
            for name, pool in real.cluster().pools.items()
        }
        (folder / "weights").mkdir()
        self.now_s = 0.0
        self.backend = WorkerBackend(
            Cluster(pools=pools), folder, self.workplace, folder / "weights", clock=lambda: self.now_s
        )
        for name in "ab":
            given = real.submission(name)
            self.backend.add_pipeline(replace(given, pipeline=replace(given.pipeline, footprint=SIX)))
            self.backend.execute(Admit(pipeline=PipelineId(name), placement=PLACE, kind=AdmissionKind.NEW))

    def trainer(self, name: str) -> Any:
        return self.workplace.workers[f"{name}/train"]

    def sft_warmup(self, order: int, name: str, *, after: str | None = None) -> None:
        self.backend.execute(
            RunStage(
                order=OrderId(order),
                pipeline=PipelineId(name),
                step=0,
                stage=Stage.SFT_WARMUP,
                devices=(DEVICE,),
                weight_version=0,
                switch=Switch.WARM if after else Switch.COLD,
                evicted=(Resident(PipelineId(after), Phase.TRAIN),) if after else (),
            )
        )

    def trained(self, name: str) -> tuple[Any, ...]:
        report = TrainReport(
            is_done=True, micro_batches_done=1, micro_batches_total=1, tokens=1, seconds=0.1, metrics={}
        )
        return self.trainer(name).answer("run_stage", TrainCallResult(report=report, load_s=0.25, weights_checksum="0"))


def test_the_time_in_which_others_leave_is_part_of_the_switch(real: Any, tmp_path: Any) -> None:
    pair = Pair(real, tmp_path, 100.0)
    pair.sft_warmup(1, "a")
    pair.trained("a")
    pair.now_s = 10.0
    pair.sft_warmup(2, "b", after="a")
    assert pair.trainer("b").asked() == [], "the device is not free yet"
    pair.now_s = 12.0
    pair.trainer("a").answer("offload", 0)
    pair.trained("b")
    ended = [event for event in pair.backend.poll(0.0)[0] if isinstance(event, StageFinished)]
    assert [event.switch_s for event in ended] == [0.25, pytest.approx(2.25)]


def test_taking_in_a_batch_and_handing_out_weights_are_computing(real: Any, tmp_path: Any) -> None:
    pair = Pair(real, tmp_path, 100.0)
    pair.sft_warmup(1, "a")
    report = TrainReport(is_done=True, micro_batches_done=1, micro_batches_total=1, tokens=1, seconds=0.5, metrics={})
    result = TrainCallResult(report=report, load_s=0.0, input_s=0.25, hand_out_s=0.125, weights_checksum="0")
    pair.trainer("a").answer("run_stage", result)
    (ended,) = [event for event in pair.backend.poll(0.0)[0] if isinstance(event, StageFinished)]
    assert ended.seconds == 0.875


@pytest.mark.parametrize(("host_bytes", "is_spilled"), [(100.0, False), (5.0, True)])
def test_a_state_that_finds_no_host_memory_goes_to_a_file(
    real: Any, tmp_path: Any, host_bytes: float, is_spilled: bool
) -> None:
    pair = Pair(real, tmp_path, host_bytes)
    pair.sft_warmup(1, "a")
    pair.trained("a")
    pair.sft_warmup(2, "b", after="a")
    (spill_to,) = pair.trainer("a").answer("offload", 0)
    assert (spill_to is not None) == is_spilled
