"""What a pipeline's own user code takes is waited for by that pipeline alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rlmux.core.actions import Admit, RunStage, Switch
from rlmux.core.estimation.cycles import USER_CODE_PATIENCE_S
from rlmux.core.events import ReplyArrived, RewardOverdue, StageFinished, StagePaused
from rlmux.core.model import AdmissionKind, DeviceId, GroupId, NodeId, OrderId, PipelineId, Placement, Stage
from rlmux.rl.packed_turns import PackedTurns
from rlmux.rl.types import ChunkReport, FinishedTurn, TurnReply
from rlmux.rl.user_code.pipeline_env import PipelineEnv
from rlmux.runtime.worker_backend import WorkerBackend
from rlmux.runtime.workers.worker_calls import RolloutChunkResult

DEVICE = DeviceId("rollout", 0, 0)
REWARDS = """
import pathlib, time

def slow(data_source, solution_str, ground_truth, extra_info):
    gate = pathlib.Path("{gate}")
    gate.with_suffix(".asked").touch()
    while not gate.exists():
        time.sleep(0.01)
    return 0.0
"""


@pytest.mark.parametrize("policy", ["rollmux", "fifo"])
def test_neighbours_of_a_reward_that_hangs_go_through_all_their_steps(
    real: Any, make_backend: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, policy: str
) -> None:
    """The reward returns once the neighbour is over: were it waited for, it would run out of time and fail."""
    gate = tmp_path / "gate"
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "my_slow_rewards.py").write_text(REWARDS.format(gate=gate))
    monkeypatch.syspath_prepend(tmp_path / "code")
    slow, busy = real.submission("slow", seed=3, num_steps=2), real.submission("busy", num_steps=6)
    task = replace(slow.config.task, reward="my_slow_rewards:slow", reward_timeout_s=60.0)
    slow = replace(slow, config=replace(slow.config, task=task))

    def open_when_busy_is_over(backend: WorkerBackend, recorder: Any) -> bool:
        published = [event for event in recorder.notes if event.type == "step" and event.pipeline == "busy"]
        if len(published) == 6:
            gate.touch()
        return False

    run = real.run(
        tmp_path / "run", [slow, busy], policy=policy, watch=open_when_busy_is_over, make_backend=make_backend
    )
    assert run.status == {"slow": "finished", "busy": "finished"}, run.scheduler.query.reason("slow")
    assert gate.with_suffix(".asked").exists()
    if policy == "rollmux":  # under `fifo` the neighbour has no slot to wait for, and may be over within the patience
        assert any(isinstance(event, RewardOverdue) for event in run.recorder.events)


class Waiting:
    """A pipeline of one rollout device, its workers' answers and the time as the test has them."""

    def __init__(self, real: Any, tmp_path: Path) -> None:
        self.now_s = 0.0
        self.workplace = real.Workplace()
        weights = tmp_path / "weights"
        weights.mkdir()
        self.backend = WorkerBackend(real.cluster(), tmp_path, self.workplace, weights, clock=lambda: self.now_s)
        submission = real.submission("p", task="guess")
        self.backend.add_pipeline(submission)
        placement = Placement(
            group=GroupId(1), rollout_nodes=(NodeId("rollout", 0),), train_nodes=(NodeId("train", 0),)
        )
        self.backend.execute(Admit(pipeline=PipelineId("p"), placement=placement, kind=AdmissionKind.NEW))
        env = PipelineEnv(submission.config)
        self.requests, self.is_single_turn = env.begin_step(1), env.is_single_turn

    def run(self, order: int, stage: Stage = Stage.GENERATE, switch: Switch = Switch.NONE) -> None:
        devices = (DEVICE,) if stage is Stage.GENERATE else ()
        self.backend.execute(
            RunStage(
                order=OrderId(order), pipeline=PipelineId("p"), step=1, stage=stage, devices=devices,
                weight_version=0, switch=switch,
            )
        )  # fmt: skip

    def worker(self, role: str) -> Any:
        return self.workplace.workers[f"p/{role}"]

    @property
    def sampler(self) -> Any:
        return self.worker(f"rollout-{DEVICE}")

    def chunk(self, *, waiting: int, finished: Sequence[FinishedTurn]) -> Any:
        report = ChunkReport(
            finished=(), num_active=0, num_waiting=0, num_waiting_for_env=waiting, sampled_tokens=0,
            prefill_tokens=0, decode_steps=0, seconds=0.1,
        )  # fmt: skip
        result = RolloutChunkResult(report=report, turns=PackedTurns.pack(finished), load_s=0.0)
        (chunk,) = self.sampler.answer("run_chunk", result)
        return chunk

    def after(self, seconds: float) -> list[Any]:
        """All events of the time since, once it has passed."""
        self.now_s += seconds
        events = list(self.backend.poll(0.0)[0])
        return [*events, *self.backend.poll(0.0)[0]]


@pytest.fixture
def waiting(real: Any, tmp_path: Path) -> Waiting:
    return Waiting(real, tmp_path)


def turn_of(request: Any) -> FinishedTurn:
    return FinishedTurn(
        id=request.id, tokens=(3,), is_sampled=(True,), logprobs=(-1.0,), versions=(0,), stop_reason="stop", num_turns=1
    )


def test_a_device_is_let_go_of_while_only_prompts_are_waited_for(waiting: Waiting) -> None:
    waiting.run(1, switch=Switch.WARM)
    assert not [event for event in waiting.after(USER_CODE_PATIENCE_S / 2) if isinstance(event, StagePaused)]
    (paused,) = waiting.after(USER_CODE_PATIENCE_S)
    assert (type(paused), paused.is_waiting) == (StagePaused, True)
    waiting.worker("env").answer("begin_step", (waiting.requests, waiting.is_single_turn))
    (arrived,) = waiting.after(0.0)
    assert (type(arrived), arrived.device) == (ReplyArrived, DEVICE)
    waiting.run(2)
    chunk = waiting.chunk(waiting=0, finished=[])
    assert chunk.is_load_needed, "the first order made no call that could have loaded the state"
    assert len(chunk.requests) == len(waiting.requests)


def test_a_device_is_let_go_of_while_only_environments_are_waited_for(waiting: Waiting) -> None:
    waiting.run(1)
    waiting.worker("env").answer("begin_step", (waiting.requests, waiting.is_single_turn))
    turns = [turn_of(request) for request in waiting.requests]
    waiting.chunk(waiting=len(turns), finished=turns)
    waiting.after(0.0)
    (paused,) = waiting.after(2 * USER_CODE_PATIENCE_S)
    assert (type(paused), paused.is_waiting) == (StagePaused, True)
    waiting.worker("env").answer("on_turns", ([TurnReply(id=turns[0].id, tokens=(5,))], []))
    (arrived,) = waiting.after(0.0)
    assert type(arrived) is ReplyArrived


def test_rewards_are_told_overdue_once_and_still_end(waiting: Waiting) -> None:
    waiting.run(1)
    waiting.worker("env").answer("begin_step", (waiting.requests, waiting.is_single_turn))
    waiting.run(2, Stage.REWARD)
    assert [type(event) for event in waiting.after(2 * USER_CODE_PATIENCE_S)] == [RewardOverdue]
    assert waiting.after(60.0) == []
    waiting.worker("env").answer("finish_step", SimpleNamespace(payload=b""))
    assert StageFinished in [type(event) for event in waiting.after(0.0)]
