"""Bursts of a pipeline whose work arrives, against workers that answer at once: what is said, and in which order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from rlmux.core.actions import RunStage, Switch
from rlmux.core.model import DeviceId, OrderId, Phase, PipelineId, Stage
from rlmux.rl.arriving import SampleRequest
from rlmux.rl.config import TrainingConfig
from rlmux.rl.types import TrajectoryId, TrajectoryRequest
from rlmux.runtime.burst_workers import Answer, BurstReport
from rlmux.runtime.bursts import BurstOptions, PipelineBursts
from rlmux.runtime.call_loop import CallLoop

CHUNK_S = 1.0
DEVICE = DeviceId("rollout", 0, 0)


class Prompt:
    """A worker that answers one request in each chunk, and says that it took a second."""

    def __init__(self) -> None:
        self.ids: list[str] = []

    def call(self, now_s: float, method: str, args: tuple[Any, ...], then: Callable[[Any], None]) -> None:
        then(getattr(self, method)(*args))

    def build(self) -> None:
        pass

    def load(self) -> None:
        pass

    def add(self, requests: Sequence[SampleRequest], weights: Path | None) -> list[Answer]:
        self.ids += [request.id for request in requests]
        return []

    def run_chunk(self, max_seconds: float) -> BurstReport:
        answers = [Answer(id=self.ids.pop(0))]
        return BurstReport(
            answers=answers, num_active=len(self.ids), num_waiting=0, tokens=4, seconds=CHUNK_S, load_s=0.0
        )


class Heard:
    """Where workers live, what grants devices, and what hears of answers: one list of what was said."""

    def __init__(self) -> None:
        self.said: list[tuple[Any, ...]] = []

    def spawn(self, *args: Any, **options: Any) -> Prompt:
        return Prompt()

    def arrived(self, pipeline: PipelineId, phases: tuple[Phase, ...], units: int = 0) -> None:
        self.said.append(("arrived", units))

    def finished(self, order: OrderId, *, seconds: float, switch_s: float = 0.0, tokens: int = 0) -> None:
        self.said.append(("finished", order, seconds))

    def answered(self, pipeline_id: PipelineId, answer: Answer) -> None:
        self.said.append((answer.id, answer.error))


@pytest.fixture
def heard() -> Heard:
    return Heard()


@pytest.fixture
def bursts(heard: Heard, tmp_path: Path) -> PipelineBursts:
    calls = CallLoop(heard, lambda: 0.0)
    return PipelineBursts(
        PipelineId("a"),
        TrainingConfig(name="a"),
        tmp_path,
        restore_from=None,
        front=heard,
        listener=heard,
        workplace=heard,
        calls=calls,
        options=BurstOptions(burst_s=2 * CHUNK_S),
        start_timer=lambda seconds, answer: answer.arrive(),
        now_s=lambda: 0.0,
    )


def sampling(name: str) -> SampleRequest:
    request = TrajectoryRequest(id=TrajectoryId(0, 0, 0), prompt_tokens=(1,), max_new_tokens=4, stop_tokens=(), seed=0)
    return SampleRequest(id=name, trajectories=[request], prompt_tokens=(1,), num_scored=0)


def order(number: int) -> RunStage:
    return RunStage(
        order=OrderId(number), pipeline=PipelineId("a"), step=number, stage=Stage.GENERATE, devices=(DEVICE,),
        weight_version=0, switch=Switch.NONE,
    )  # fmt: skip


def test_a_burst_of_many_requests_ends_with_work_left_so_that_others_have_their_turn(bursts, heard):
    for name in ("r1", "r2", "r3"):
        bursts.sample(sampling(name), None)
    heard.said.clear()
    bursts.begin(order(1))
    assert heard.said == [("r1", None), ("r2", None), ("arrived", 4), ("finished", 1, 2 * CHUNK_S)]
    heard.said.clear()
    bursts.begin(order(2))
    assert heard.said == [("r3", None), ("finished", 2, CHUNK_S)], "what the worker had begun goes on"


def test_a_request_that_is_withdrawn_before_it_began_is_answered(bursts, heard):
    for name in ("r1", "r2"):
        bursts.sample(sampling(name), None)
    heard.said.clear()
    bursts.withdraw(["r1", "r7"])
    assert heard.said == [("r1", "it was cancelled before it began")]
    bursts.begin(order(1))
    assert heard.said[1:] == [("r2", None), ("finished", 1, CHUNK_S)]
