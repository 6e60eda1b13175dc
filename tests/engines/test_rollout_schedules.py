"""Any schedule of chunks, pauses, migrations, offloads (to disk too) over two engines gives the undisturbed answers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.examples import examples

from rlmux.engines.rollout.slot_engine import SlotRolloutEngine
from rlmux.rl.types import FinishedTurn, TrajectoryRequest, TurnReply

NUM_REPLIES = 2

Move = tuple[str, int, int]
"""What to do, with which engine, and a number whose meaning the move decides."""

moves = st.lists(
    st.tuples(
        st.sampled_from(["run", "run", "run", "submit", "offload", "spill", "load", "migrate"]),
        st.integers(0, 1),
        st.integers(1, 9),
    ),
    max_size=25,
)


class TwoEngines:
    """Plays a schedule, answers turns at once, and collects the trajectories that are over."""

    def __init__(self, engines: list[SlotRolloutEngine], requests: list[TrajectoryRequest]) -> None:
        self.engines = engines
        self.unsubmitted = list(requests)
        self.over: list[FinishedTurn] = []

    def play(self, schedule: list[Move]) -> list[FinishedTurn]:
        for name, index, number in schedule:
            getattr(self, name)(index, number)
        self.submit(0, len(self.unsubmitted))
        for index in (0, 1):
            while self.run(index, 10_000):
                pass
        return sorted(self.over, key=lambda turn: turn.id)

    def run(self, index: int, number: int) -> int:
        engine = self.engines[index]
        engine.load()
        report = engine.run_chunk(max_decode_steps=number, max_seconds=60.0)
        replies, released = [], []
        for turn in report.finished:
            if turn.stop_reason == "stop" and turn.num_turns <= NUM_REPLIES:
                replies.append(TurnReply(id=turn.id, tokens=(len(turn.tokens) % 7, 9)))
            else:
                self.over.append(turn)
                released.append(turn.id)
        engine.reply(replies, released)
        return report.num_active + report.num_waiting + len(replies)

    def submit(self, index: int, number: int) -> None:
        self.engines[index].submit(self.unsubmitted[:number])
        del self.unsubmitted[:number]

    def offload(self, index: int, number: int) -> None:
        self.engines[index].offload()

    def spill(self, index: int, number: int) -> None:
        with TemporaryDirectory() as folder:
            self.engines[index].offload(spill_to=Path(folder) / "spilled")

    def load(self, index: int, number: int) -> None:
        self.engines[index].load()

    def migrate(self, index: int, number: int) -> None:
        """Every `number`-th trajectory, in the order the engine gives them."""
        engine, other = self.engines[index], self.engines[1 - index]
        partials = engine.take_partials(None, with_kv=True)
        other.continue_from(partials[::number])
        engine.continue_from([partial for i, partial in enumerate(partials) if i % number])


@pytest.mark.parametrize(
    ("dtype", "kv_tokens"),
    [
        ("float32", None),
        pytest.param("bfloat16", None, marks=pytest.mark.slow),
        pytest.param("float32", 160, marks=pytest.mark.slow),
        ("bfloat16", 160),
    ],
)
@settings(
    max_examples=examples(40),
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(schedule=moves)
def test_no_schedule_changes_a_trajectory(
    schedule: list[Move],
    new_engine: Callable[..., SlotRolloutEngine],
    new_requests: Callable[..., list[TrajectoryRequest]],
) -> None:
    requests = new_requests(9, stop_tokens=(5, 6, 7))

    calm = TwoEngines([new_engine(is_single_turn=False) for _ in range(2)], requests)
    ways = ((1, "longest"), (5, "given"))
    engines = [new_engine(is_single_turn=False, steps_at_once=steps, order=order) for steps, order in ways]
    disturbed = TwoEngines(engines, requests)
    assert disturbed.play(schedule) == calm.play([])
