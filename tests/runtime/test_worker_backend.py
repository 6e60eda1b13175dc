"""What the backend asks of workers, and when: workers answer here in the order that a test wants."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from rlmux.core.actions import Admit, MigrateShard, Park, Pause, Release, Relocate, RunStage, Switch
from rlmux.core.events import (
    Event,
    PipelineRestarted,
    ReplyArrived,
    StageFinished,
    StagePaused,
    TrajectoriesMigrated,
    WorkerLost,
)
from rlmux.core.model import (
    AdmissionKind,
    DeviceId,
    GroupId,
    NodeId,
    OrderId,
    Phase,
    PipelineId,
    Placement,
    Resident,
    Stage,
)
from rlmux.rl.config import TailBatchingConfig
from rlmux.rl.packed_turns import PackedTurns
from rlmux.rl.types import ChunkReport, FinishedTurn, TrajectoryId, TrajectoryRequest, TurnReply
from rlmux.rl.user_code.pipeline_env import PipelineEnv
from rlmux.runtime.worker_backend import WorkerBackend
from rlmux.runtime.workers.worker_calls import RolloutChunk, RolloutChunkResult

LEFT, RIGHT = DeviceId("rollout", 0, 0), DeviceId("rollout", 1, 0)


class Rollout:
    """One pipeline with a rollout worker on each of two devices; its first step is about to begin."""

    def __init__(self, real: Any, tmp_path: Any, *, task: str, tail_batching: TailBatchingConfig | None = None) -> None:
        self.said: list[Event] = []
        self.workplace = real.Workplace()
        weights = tmp_path / "weights"
        weights.mkdir()
        self.backend = WorkerBackend(real.cluster(rollout=2), tmp_path, self.workplace, weights)
        submission = real.submission("p", task=task, num_rollout_nodes=2)
        rollout = real.replace(submission.config.rollout, tail_batching=tail_batching)
        submission = real.replace(submission, config=real.replace(submission.config, rollout=rollout))
        self.backend.add_pipeline(submission)
        nodes = (NodeId("rollout", 0), NodeId("rollout", 1))
        placement = Placement(group=GroupId(1), rollout_nodes=nodes, train_nodes=(NodeId("train", 0),))
        self.backend.execute(Admit(pipeline=PipelineId("p"), placement=placement, kind=AdmissionKind.NEW))
        env = PipelineEnv(submission.config)
        self.requests, self.is_single_turn = env.begin_step(1), env.is_single_turn

    def run(self, order: int, device: DeviceId) -> None:
        self.backend.execute(
            RunStage(
                order=OrderId(order),
                pipeline=PipelineId("p"),
                step=1,
                stage=Stage.GENERATE,
                devices=(device,),
                weight_version=0,
            )
        )

    def migrate(self, order: int, source: DeviceId, target: DeviceId) -> None:
        self.backend.execute(
            MigrateShard(
                order=OrderId(order), pipeline=PipelineId("p"), step=1, source=source, target=target, copies_kv=True
            )
        )

    def assign_prompts(self) -> None:
        self.worker("env").answer("begin_step", (self.requests, self.is_single_turn))

    def worker(self, role: str | DeviceId) -> Any:
        return self.workplace.workers[f"p/{role}" if isinstance(role, str) else f"p/rollout-{role}"]

    def chunk(
        self, device: DeviceId, *, active: int = 0, waiting: int = 0, finished: Sequence[FinishedTurn] = ()
    ) -> list[TrajectoryRequest]:
        """Its worker answers; returns the requests that it had been given."""
        return list(self.answer_chunk(device, finished, active=active, waiting=waiting).requests)

    def answer_chunk(
        self,
        device: DeviceId,
        finished: Sequence[FinishedTurn],
        *,
        active: int = 0,
        waiting: int = 0,
        progress: Mapping[TrajectoryId, int] | None = None,
    ) -> RolloutChunk:
        """Its worker answers; returns what it had been asked."""
        report = ChunkReport(
            finished=(), num_active=active, num_waiting=0, num_waiting_for_env=waiting, sampled_tokens=0,
            prefill_tokens=0, decode_steps=0, seconds=0.1, progress=progress or {},
        )  # fmt: skip
        result = RolloutChunkResult(report=report, turns=PackedTurns.pack(finished), load_s=0.0)
        (chunk,) = self.worker(device).answer("run_chunk", result)
        assert isinstance(chunk, RolloutChunk)
        return chunk

    def turns_answered(self, replies: Sequence[TurnReply], over: Sequence[TrajectoryId]) -> list[TrajectoryId]:
        """The env worker answers; returns the trajectories whose turns it was asked about."""
        turns, _ = self.worker("env").answer("on_turns", (replies, over))
        return [one for packed in turns for one in packed.ids()]

    def settle(self) -> None:
        """The events so far are handled, and what waits for the orders that answer them begins."""
        for _ in range(2):
            self.said += self.backend.poll(0.0)[0]

    def lose(self, device: DeviceId) -> list[Any]:
        """Its worker dies; returns all events of that."""
        self.workplace.lost.append(self.worker(device))
        return list(self.backend.poll(0.0)[0])

    def events(self, kind: type) -> list[Any]:
        self.settle()
        said, self.said = self.said, []
        return [event for event in said if isinstance(event, kind)]


def turn_of(request: TrajectoryRequest) -> FinishedTurn:
    return FinishedTurn(
        id=request.id, tokens=(3,), is_sampled=(True,), logprobs=(-1.0,), versions=(0,), stop_reason="stop", num_turns=1
    )


@pytest.fixture
def rollout(real: Any, tmp_path: Any) -> Rollout:
    return Rollout(real, tmp_path, task="guess")


def test_a_shard_migrated_before_requests_are_dealt_out_is_sampled_by_its_target(rollout: Rollout) -> None:
    rollout.migrate(1, LEFT, RIGHT)
    rollout.run(2, RIGHT)
    assert not rollout.worker(LEFT).calls, "there is nothing to take yet"
    rollout.assign_prompts()
    (moved,) = rollout.events(TrajectoriesMigrated)
    given = rollout.chunk(RIGHT, active=1)
    given += rollout.chunk(RIGHT, active=1)
    assert sorted(request.id for request in given) == [request.id for request in rollout.requests]
    assert moved.num_trajectories == len(rollout.requests) // 2


def test_a_worker_is_not_asked_for_a_shard_that_it_was_not_given(rollout: Rollout) -> None:
    rollout.run(1, RIGHT)
    rollout.assign_prompts()
    rollout.migrate(2, LEFT, RIGHT)
    assert not rollout.worker(LEFT).calls
    (moved,) = rollout.events(TrajectoriesMigrated)
    assert moved.num_trajectories == len(rollout.requests) // 2
    rollout.run(3, LEFT)
    rollout.chunk(RIGHT, active=1)
    rollout.chunk(RIGHT, active=1)
    rollout.migrate(4, RIGHT, LEFT)
    assert "take_partials" in rollout.worker(RIGHT).asked()


def test_a_shard_that_is_given_another_in_its_last_chunk_goes_on(rollout: Rollout) -> None:
    rollout.run(1, RIGHT)
    rollout.assign_prompts()
    rollout.migrate(2, LEFT, RIGHT)
    rollout.chunk(RIGHT)  # all that it had is over
    assert not rollout.events(StageFinished)
    assert len(rollout.chunk(RIGHT)) == len(rollout.requests) // 2
    assert rollout.events(StageFinished)


def test_turns_that_end_while_environments_think_are_asked_together(rollout: Rollout) -> None:
    rollout.run(1, LEFT)
    rollout.run(2, RIGHT)
    rollout.assign_prompts()
    first, second, third = (turn_of(rollout.requests[place]) for place in (0, 4, 8))
    rollout.chunk(LEFT, active=3, waiting=1, finished=[first])
    rollout.settle()
    rollout.chunk(RIGHT, active=3, waiting=1, finished=[second])
    rollout.chunk(LEFT, active=2, waiting=2, finished=[third])
    assert rollout.turns_answered([], [first.id]) == [first.id]
    assert rollout.turns_answered([TurnReply(id=third.id, tokens=(5,))], [second.id]) == [second.id, third.id]
    (_, (chunk,), _) = rollout.worker(LEFT).calls[-1]
    assert not chunk.replies, "it was sent before"
    rollout.chunk(LEFT, active=2, waiting=2)
    (_, (chunk,), _) = rollout.worker(LEFT).calls[-1]
    assert ([reply.id for reply in chunk.replies], list(chunk.released)) == ([third.id], [first.id])


def test_a_devices_next_order_is_out_before_environments_are_asked(rollout: Rollout) -> None:
    rollout.run(1, LEFT)
    rollout.assign_prompts()
    rollout.chunk(LEFT, finished=[turn_of(request) for request in rollout.requests if request.id.prompt % 2 == 0])
    assert [type(event) for event in rollout.backend.poll(0.0)[0]] == [StageFinished]
    assert not rollout.worker("env").asked()
    rollout.run(2, RIGHT)
    assert rollout.worker(RIGHT).asked() == ["run_chunk"]
    rollout.settle()
    assert rollout.worker("env").asked() == ["on_turns"]


def test_scores_are_asked_for_after_every_turn(rollout: Rollout) -> None:
    rollout.run(1, LEFT)
    rollout.assign_prompts()
    rollout.chunk(LEFT, active=1, finished=[turn_of(rollout.requests[0])])
    rollout.settle()
    rollout.chunk(LEFT, active=1, finished=[turn_of(rollout.requests[1])])
    rollout.backend.execute(
        RunStage(order=OrderId(3), pipeline=PipelineId("p"), step=1, stage=Stage.REWARD, devices=(), weight_version=0)
    )
    assert [method for method, *_ in rollout.worker("env").calls] == ["on_turns", "on_turns", "finish_step"]


def test_a_paused_shard_waits_until_its_first_reply(rollout: Rollout) -> None:
    rollout.run(1, LEFT)
    rollout.assign_prompts()
    turn = turn_of(rollout.requests[0])
    rollout.chunk(LEFT, waiting=1, finished=[turn])
    rollout.backend.execute(Pause(order=OrderId(1)))
    assert [event.is_waiting for event in rollout.events(StagePaused)] == [True]
    rollout.turns_answered([TurnReply(id=turn.id, tokens=(5,))], [])
    assert [event.device for event in rollout.events(ReplyArrived)] == [LEFT]


def test_a_lost_rollout_workers_successor_begins_anew_all_that_is_not_over(rollout: Rollout) -> None:
    rollout.run(1, LEFT)
    rollout.assign_prompts()
    over, thinking, *others = [request for request in rollout.requests if request.id.prompt % 2 == 0]
    rollout.chunk(LEFT, active=1, waiting=1, finished=[turn_of(over), turn_of(thinking)])
    rollout.settle()
    rollout.turns_answered([], [over.id])
    rollout.settle()
    assert [type(event) for event in rollout.lose(LEFT)] == [WorkerLost], "its order ended with it"
    rollout.run(2, LEFT)
    rollout.turns_answered([TurnReply(id=thinking.id, tokens=(5,))], [])
    (_, (chunk,), _) = rollout.worker(LEFT).calls[-1]
    assert [request.id for request in chunk.requests] == [request.id for request in (thinking, *others)]
    rollout.chunk(LEFT, active=1)
    (_, (chunk,), _) = rollout.worker(LEFT).calls[-1]
    assert not chunk.replies, "that was for a trajectory that has begun anew"


@pytest.mark.parametrize("is_dealt_out", [False, True])
def test_a_migration_ends_with_its_sources_worker(rollout: Rollout, is_dealt_out: bool) -> None:
    if is_dealt_out:
        rollout.run(1, LEFT)
        rollout.assign_prompts()
        rollout.backend.execute(Pause(order=OrderId(1)))
        rollout.chunk(LEFT, active=1)
        rollout.backend.poll(0.0)
    rollout.migrate(2, LEFT, RIGHT)
    assert [type(event) for event in rollout.lose(LEFT)] == [WorkerLost]
    rollout.run(3, LEFT)
    if not is_dealt_out:
        rollout.assign_prompts()
    assert not rollout.events(TrajectoriesMigrated)
    assert len(rollout.chunk(LEFT, active=1)) == len(rollout.requests) // 2


def test_evicted_states_of_a_lost_worker_have_left(rollout: Rollout) -> None:
    rollout.run(7, LEFT)
    rollout.assign_prompts()
    rollout.backend.execute(Pause(order=OrderId(7)))
    rollout.chunk(LEFT, active=1)
    rollout.backend.poll(0.0)
    rollout.backend.execute(
        RunStage(
            order=OrderId(1), pipeline=PipelineId("p"), step=0, stage=Stage.SFT_WARMUP,
            devices=(LEFT, DeviceId("train", 0, 0)),
            weight_version=0, switch=Switch.COLD, evicted=(Resident(PipelineId("p"), Phase.ROLLOUT),),
        )
    )  # fmt: skip
    assert (rollout.worker(LEFT).asked(), rollout.worker("train").asked()) == (["offload"], [])
    rollout.lose(LEFT)
    assert rollout.worker("train").asked() == ["run_stage"]


ELSEWHERE = Placement(group=GroupId(2), rollout_nodes=(NodeId("rollout", 1),), train_nodes=(NodeId("train", 0),))


def test_a_relocation_of_a_pipeline_that_lost_its_processes_meanwhile_is_left_alone(rollout: Rollout) -> None:
    rollout.backend.execute(Park(pipeline=PipelineId("p")))
    rollout.backend.execute(Relocate(pipeline=PipelineId("p"), placement=ELSEWHERE))
    assert not rollout.backend.workers_by_pipeline


def test_a_parked_pipeline_goes_on_from_a_checkpoint_where_it_is_admitted_next(rollout: Rollout) -> None:
    first = rollout.worker("env")
    rollout.backend.execute(Park(pipeline=PipelineId("p")))
    assert not rollout.backend.workers_by_pipeline
    rollout.backend.execute(Admit(pipeline=PipelineId("p"), placement=ELSEWHERE, kind=AdmissionKind.NEW))
    assert rollout.worker("env") is not first
    (restarted,) = rollout.events(PipelineRestarted)
    assert (restarted.pipeline, restarted.restored_step) == ("p", -1)


def test_a_pipeline_released_while_it_moves_can_be_submitted_again(rollout: Rollout) -> None:
    rollout.backend.execute(Relocate(pipeline=PipelineId("p"), placement=ELSEWHERE))
    rollout.backend.execute(Release(pipeline=PipelineId("p")))
    rollout.backend.execute(Admit(pipeline=PipelineId("p"), placement=ELSEWHERE, kind=AdmissionKind.NEW))
    rollout.run(9, RIGHT)
    assert "begin_step" in [method for method, *_ in rollout.worker("env").calls]


def test_what_loses_a_race_is_cut_on_every_device_and_only_what_is_kept_is_scored(real: Any, tmp_path: Any) -> None:
    """The left device has prompts 0, 2 and 4, the right one 1 and 3; four answers of each of four prompts are kept."""
    rollout = Rollout(real, tmp_path, task="sort", tail_batching=TailBatchingConfig(num_slots=25))
    rollout.run(1, LEFT)
    rollout.assign_prompts()
    rollout.run(2, RIGHT)
    mine = [request for request in rollout.requests if request.id.prompt % 2 == 0]
    theirs = [request for request in rollout.requests if request.id.prompt % 2 == 1]
    assert (len(mine), len(theirs)) == (15, 10)
    short = [request for request in mine if request.id.prompt < 4]
    rollout.answer_chunk(LEFT, [turn_of(request) for request in short], active=5, progress={r.id: 3 for r in mine[10:]})
    rollout.settle()
    assert rollout.worker("env").asked() == [], "the right device may have shorter ones"
    rollout.answer_chunk(RIGHT, [turn_of(request) for request in theirs[:9]], active=1, progress={theirs[9].id: 1})
    rollout.settle()
    kept = rollout.turns_answered([], [])
    assert sorted(kept) == [TrajectoryId(1, prompt, sample) for prompt in range(4) for sample in range(4)]
    cut = {LEFT: [request.id for request in mine[10:]], RIGHT: [theirs[9].id]}
    rollout.answer_chunk(LEFT, [], active=5, progress={r.id: 5 for r in mine[10:]})  # it ran while they were cut
    for device in (LEFT, RIGHT):
        assert list(rollout.answer_chunk(device, []).cut) == cut[device]
    assert [event.order for event in rollout.events(StageFinished)] == [1, 2]
