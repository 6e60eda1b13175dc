"""Nothing touches a device without a lease of it: no engine is built, no batch handed over, no weights handed out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rlmux.core.actions import Admit, RunStage
from rlmux.core.errors import IllegalTransitionError
from rlmux.core.model import AdmissionKind, DeviceId, GroupId, NodeId, OrderId, PipelineId, Placement, Stage
from rlmux.rl.batch_metrics import BatchMetrics
from rlmux.rl.types import TrainReport
from rlmux.runtime.local import local_backend
from rlmux.runtime.worker_backend import WorkerBackend
from rlmux.runtime.workers.worker_calls import StepBatch, TrainCallResult

TOUCHING = {"build", "run_chunk", "run_stage", "publish", "checkpoint", "offload"}
"""Calls that need the device; the other calls of device workers read files or wait for one."""
METRICS = BatchMetrics(
    num_trajectories=1, reward_mean=0.0, reward_std=0.0, response_tokens=1, response_tokens_mean=1.0,
    response_tokens_max=1, clip_ratio=0.0, turns_mean=1.0, token_runs=[[1]], logged={}, round=None, versions=[0],
    version_metrics={},
)  # fmt: skip


@pytest.mark.parametrize("staleness", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_in_a_real_run_no_worker_is_asked_to_touch_a_device_that_no_order_leases(
    real: Any, tmp_path: Path, staleness: int
) -> None:
    """As the scheduler has it when the call is made: it is asked, not the backend."""
    asked: list[tuple[str, str]] = []
    without_lease: list[tuple[str, str]] = []
    leased: dict[Any, Any] = {}

    def make_backend(*given: Any, **options: Any) -> WorkerBackend:
        backend = local_backend(*given, **options)
        spawn = backend.workplace.spawn

        def spawn_watched(name: str, *args: Any, device: DeviceId | None, **more: Any) -> Any:
            worker = spawn(name, *args, device=device, **more)
            call = worker.call

            def watched(now_s: float, method: str, *rest: Any) -> None:
                if device is not None:
                    asked.append((name, method))
                    if method in TOUCHING and not any(device in devices for devices in leased.values()):
                        without_lease.append((name, method))
                call(now_s, method, *rest)

            worker.call = watched
            return worker

        backend.workplace.spawn = spawn_watched
        execute, poll = backend.execute, backend.poll

        def execute_and_note(action: Any) -> None:
            if isinstance(action, RunStage):
                leased[action.order] = action.devices
            execute(action)

        def poll_and_note(timeout_s: float) -> Any:
            events, notes = poll(timeout_s)
            for event in events:
                if type(event).__name__ in ("StageFinished", "StagePaused"):
                    del leased[event.order]
            return events, notes

        backend.execute, backend.poll = execute_and_note, poll_and_note
        return backend

    given = [real.submission(name, seed=seed, num_steps=3, staleness=staleness) for seed, name in enumerate("ab")]
    run = real.run(tmp_path / "run", given, make_backend=make_backend)
    assert run.status == {"a": "finished", "b": "finished"}
    assert without_lease == []
    assert {method for _, method in asked} >= {"build", "run_chunk", "run_stage"}


@pytest.fixture
def backend(real: Any, tmp_path: Path) -> WorkerBackend:
    weights = tmp_path / "weights"
    weights.mkdir()
    backend = WorkerBackend(real.cluster(), tmp_path, real.Workplace(), weights)
    backend.add_pipeline(real.submission("p"))
    placement = Placement(group=GroupId(1), rollout_nodes=(NodeId("rollout", 0),), train_nodes=(NodeId("train", 0),))
    backend.execute(Admit(pipeline=PipelineId("p"), placement=placement, kind=AdmissionKind.NEW))
    return backend


def run_stage(backend: WorkerBackend, stage: Stage, *devices: DeviceId, order: int = 1) -> None:
    backend.execute(
        RunStage(order=OrderId(order), pipeline=PipelineId("p"), step=1, stage=stage, devices=devices, weight_version=0)
    )


def test_rewards_hand_nothing_to_the_trainer_and_the_first_call_of_training_brings_the_batch(
    backend: WorkerBackend,
) -> None:
    run_stage(backend, Stage.REWARD)
    workers = backend.workplace.workers
    workers["p/env"].answer("finish_step", StepBatch(payload=b"a step", metrics=METRICS))
    trainer = workers["p/train"]
    assert trainer.asked() == []
    for order, stage, payload in [(2, Stage.OLD_LOGPROBS, b"a step"), (3, Stage.UPDATE, None)]:
        backend.poll(0.0)
        run_stage(backend, stage, DeviceId("train", 0, 0), order=order)
        assert trainer.asked() == ["run_stage"], "one call: a second one would be a second way there and back"
        report = TrainReport(
            is_done=True, micro_batches_done=1, micro_batches_total=1, tokens=1, seconds=0.1, metrics={}
        )
        (call,) = trainer.answer("run_stage", TrainCallResult(report=report, load_s=0.0))
        assert (call.stage, call.payload) == (stage, payload)


def test_a_call_that_computes_without_a_lease_stops_the_run(backend: WorkerBackend) -> None:
    with pytest.raises(IllegalTransitionError, match=r"p/train was to build on train-0\.0, which no"):
        run_stage(backend, Stage.SFT_WARMUP, DeviceId("rollout", 0, 0))
