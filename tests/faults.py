"""A backend in virtual time that breaks: what a real one may say of orders, workers and nodes, in any order.

It keeps the promises of `runtime/workers/supervisor.py`: the orders of a pipeline that failed or began again have ended
with that; an order of a pipeline that is being moved is dropped, and `PipelineRestarted` says so later; an event that
was on its way when its pipeline ended still arrives.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TypeVar

from rlmux.core import invariants
from rlmux.core.actions import Admit, MigrateShard, Park, Pause, Release, Relocate, RunStage
from rlmux.core.events import (
    ChunkFinished,
    ClientFinished,
    Event,
    HoldReleased,
    NodeJoined,
    NodeLost,
    ParkRequested,
    PipelineCancelled,
    PipelineFailed,
    PipelineParked,
    PipelineRestarted,
    PipelineSubmitted,
    ReplyArrived,
    RewardOverdue,
    StageFinished,
    StagePaused,
    TrajectoriesMigrated,
    WorkArrived,
    WorkerLost,
    WorkWithdrawn,
)
from rlmux.core.model import (
    ARRIVING_KINDS,
    AdmissionKind,
    DeviceId,
    Footprint,
    NodeId,
    OrderId,
    Phase,
    PhaseSeconds,
    Pipeline,
    PipelineId,
    PipelineStatus,
    Placement,
    Stage,
)
from rlmux.core.placement.choice import PlacementChoice, Relocation
from rlmux.core.placement.view import PlacementView
from rlmux.core.scheduler import Scheduler
from rlmux.policies.baselines import Solo

T = TypeVar("T")
OVER = (PipelineStatus.FINISHED, PipelineStatus.CANCELLED, PipelineStatus.FAILED, PipelineStatus.REFUSED)


class BreakingBackend:
    """Carries out a scheduler's actions, and breaks where it is told to. Every choice is drawn from `draw`."""

    def __init__(self, scheduler: Scheduler, draw: random.Random, *, knows_seconds: bool = True) -> None:
        """`knows_seconds`: whether pipelines come with an estimate; without, they last until one is learned."""
        self.scheduler = scheduler
        self.draw = draw
        self.knows_seconds = knows_seconds
        self.now_s = 0.0
        self.orders: dict[OrderId, RunStage | MigrateShard] = {}
        """Orders under way."""
        self.pausing: dict[OrderId, None] = {}
        self.placements: dict[PipelineId, Placement] = {}
        """Pipelines that have processes."""
        self.moving: dict[PipelineId, None] = {}
        """Pipelines whose restart on other nodes the scheduler has not heard of; orders for them are dropped."""
        self.homeless: dict[PipelineId, None] = {}
        """Pipelines that lost a node and begin again where they are admitted next."""
        self.leaving: dict[PipelineId, None] = {}
        """Pipelines whose last checkpoint is being written: then their processes end."""
        self.lost: dict[NodeId, None] = {}
        self.story: list[Event] = []

    # ------------------------------------------------------------------ one event

    def send(self, event: Event) -> None:
        """Tell the scheduler, carry out what it says, and check that every order it counts on is under way."""
        self.story.append(event)
        for action in self.scheduler.handle(event):
            self._carry_out(action)
        invariants.check(self.scheduler)
        for order in self.scheduler.query.orders():
            is_known = order.id in self.orders or order.pipeline in self.moving
            assert is_known, f"order {order.id} of {order.pipeline} will never end"

    def _carry_out(self, action: object) -> None:
        match action:
            case Admit():
                self.placements[action.pipeline] = action.placement
                if action.pipeline in self.homeless:
                    del self.homeless[action.pipeline]
                    self.moving[action.pipeline] = None
            case Relocate():
                self.placements[action.pipeline] = action.placement
                self.moving[action.pipeline] = None
            case Park(is_awaited=True):
                self.leaving[action.pipeline] = None
            case Park():
                self._end(action.pipeline)
                self.homeless[action.pipeline] = None
            case Release():
                self._end(action.pipeline)
            case RunStage() | MigrateShard() if action.pipeline not in self.moving:
                self.orders[action.order] = action
            case Pause() if action.order in self.orders:
                self.pausing[action.order] = None

    def _end(self, pipeline: PipelineId) -> None:
        """Its processes and orders are gone."""
        self.placements.pop(pipeline, None)
        self.moving.pop(pipeline, None)
        self.leaving.pop(pipeline, None)
        self._drop_orders(pipeline)

    def _drop_orders(self, pipeline: PipelineId) -> None:
        for order in [order for order, action in self.orders.items() if action.pipeline == pipeline]:
            self._drop(order)

    def _drop(self, order: OrderId) -> None:
        del self.orders[order]
        self.pausing.pop(order, None)

    # ------------------------------------------------------------------ what goes well

    def go_on(self) -> bool:
        """One order ends, pauses or reports, or a restart is told. False when there is nothing to come."""
        self.now_s += self.draw.random()
        if self.moving and (not self.orders or self.draw.random() < 0.3):
            self._report_restart(self.draw.choice(list(self.moving)))
            return True
        if self.leaving and (not self.orders or self.draw.random() < 0.3):
            pipeline = self.draw.choice(list(self.leaving))
            self._end(pipeline)
            self.homeless[pipeline] = None
            self.send(PipelineParked(time_s=self.now_s, pipeline=pipeline))
            return True
        if not self.orders:
            return self._reply()
        order = self.draw.choice(list(self.orders))
        action = self.orders[order]
        if isinstance(action, MigrateShard):
            self._drop(order)
            self.send(TrajectoriesMigrated(time_s=self.now_s, order=order, num_trajectories=1, seconds=0.1))
        elif order in self.pausing and self.draw.random() < 0.8:
            self._drop(order)
            is_waiting = action.stage is Stage.GENERATE and self.draw.random() < 0.3
            self.send(StagePaused(time_s=self.now_s, order=order, seconds=0.5, is_waiting=is_waiting))
        elif action.stage is Stage.REWARD and self.draw.random() < 0.3:
            self.send(RewardOverdue(time_s=self.now_s, order=order))
        elif action.devices and self.draw.random() < 0.3:
            num_active = self.draw.choice([0, 1, 3, 40])
            self.send(ChunkFinished(time_s=self.now_s, order=order, num_active=num_active, num_waiting=0, seconds=0.2))
        else:
            self._drop(order)
            self.send(StageFinished(time_s=self.now_s, order=order, seconds=1.0))
        return True

    def _reply(self) -> bool:
        """Environments reply to the shards that wait for them. False where none does."""
        waiting = [work for work in self.scheduler.query.ready_work() if work.is_waiting]
        for work in waiting[:1]:
            self.send(ReplyArrived(time_s=self.now_s, pipeline=work.pipeline, device=work.devices[0]))
        return bool(waiting)

    # ------------------------------------------------------------------ what goes wrong

    def faults(self) -> dict[str, Callable[[], None]]:
        """Every fault that could happen now, by name."""
        return {
            "submit": self.submit_another,
            "cancel": self.cancel,
            "fail": self.fail,
            "worker lost": self.lose_worker,
            "restarted": self.restart,
            "node lost": self.lose_node,
            "node joined": self.regain_node,
            "park": self.park,
            "unpark": self.unpark,
            "late": self.tell_late,
        }

    def submit_another(self) -> None:
        name = PipelineId(f"late-{len(self.story)}")
        pipeline = some_pipeline(name, self.draw)
        if not self.knows_seconds:
            pipeline = replace(pipeline, num_steps=6, estimate=None, colocated_estimate=None)
        self.send(PipelineSubmitted(time_s=self.now_s, pipeline=pipeline))

    def cancel(self) -> None:
        for pipeline in self._some(self.scheduler.query.pipelines()):
            self.send(PipelineCancelled(time_s=self.now_s, pipeline=pipeline))

    def fail(self) -> None:
        for pipeline in self._some(self.placements):
            self._end(pipeline)
            self.send(PipelineFailed(time_s=self.now_s, pipeline=pipeline, reason="reward"))

    def lose_worker(self) -> None:
        for pipeline in self._some(self.placements):
            device = self.draw.choice(self._rollout_devices(pipeline))
            for order, action in list(self.orders.items()):
                is_of_it = action.pipeline == pipeline
                if (
                    is_of_it
                    and isinstance(action, RunStage)
                    and pipeline in self._clients()
                    and device in action.devices
                ):
                    self._drop(order)
                    continue
                if isinstance(action, MigrateShard):
                    is_hit = is_of_it and action.source == device
                else:
                    is_a_rollout = action.stage is Stage.GENERATE or pipeline in self._clients()
                    is_hit = is_of_it and is_a_rollout and device in action.devices
                if is_hit:
                    self._drop(order)
            self.send(WorkerLost(time_s=self.now_s, pipeline=pipeline, device=device))

    def restart(self) -> None:
        for pipeline in self._some(self.placements):
            self._report_restart(pipeline)

    def park(self) -> None:
        for pipeline in self._some(self.placements):
            self.send(ParkRequested(time_s=self.now_s, pipeline=pipeline))

    def unpark(self) -> None:
        query = self.scheduler.query
        for pipeline in self._some(one for one in query.pipelines() if query.is_held(one)):
            self.send(HoldReleased(time_s=self.now_s, pipeline=pipeline))

    def lose_node(self) -> None:
        """Any node: also one on which nothing runs yet, to which a pipeline is about to move."""
        for node in self._some([node for node in self._nodes() if node not in self.lost]):
            self.lost[node] = None
            for pipeline in [one for one, placement in self.placements.items() if node in placement.nodes]:
                self._end(pipeline)
                self.homeless[pipeline] = None
            self.send(NodeLost(time_s=self.now_s, node=node))

    def regain_node(self) -> None:
        for node in self._some(self.lost):
            del self.lost[node]
            self.send(NodeJoined(time_s=self.now_s, node=node))

    # ------------------------------------------------------------------ clients, whose work arrives

    def client_acts(self) -> dict[str, Callable[[], None]]:
        """All that the client of a pipeline whose work arrives may do now, by name."""
        return {
            "join": self.submit_client,
            "announce": self.announce,
            "announce more": self.announce,
            "withdraw": self.withdraw,
            "leave": self.finish_client,
        }

    def submit_client(self) -> None:
        client = some_client(PipelineId(f"client-{len(self.story)}"), self.draw)
        self.send(PipelineSubmitted(time_s=self.now_s, pipeline=client))

    def announce(self) -> None:
        for client in self._some(self._clients()):
            kind, units = self.draw.choice(ARRIVING_KINDS), self.draw.choice([0, 1, 50])
            self.send(WorkArrived(time_s=self.now_s, pipeline=client, phases=kind, units=units))

    def withdraw(self) -> None:
        for client in self._some(self._clients()):
            kind = self.draw.choice(ARRIVING_KINDS)
            self.send(WorkWithdrawn(time_s=self.now_s, pipeline=client, phases=kind))

    def finish_client(self) -> None:
        for client in self._some(self._clients()):
            self.send(ClientFinished(time_s=self.now_s, pipeline=client))

    def _clients(self) -> list[PipelineId]:
        query = self.scheduler.query
        return [one for one in query.pipelines() if query.pipeline(one).pipeline.work_arrives]

    def settle_clients(self) -> None:
        """No fault any more, every node back: all announced work is done, and then every client leaves."""
        while self.lost:
            self.regain_node()
        query = self.scheduler.query
        while clients := [one for one in self._clients() if query.status(one) not in OVER]:
            for _ in range(3000):
                if not (self.orders or self.moving or query.ready_work()):
                    break
                self.go_on()
            else:
                raise AssertionError("work neither ends nor stops")
            placed = [one for one in clients if query.status(one) is PipelineStatus.RUNNING]
            for client in (placed or clients)[:1]:
                self.send(ClientFinished(time_s=self.now_s, pipeline=client))

    # ------------------------------------------------------------------ late news

    def tell_late(self) -> None:
        """An event of a pipeline that ended in the same poll, before this event was read."""
        query = self.scheduler.query
        over = [one for one in query.pipelines() if query.status(one) in OVER and one not in self.placements]
        for pipeline in self._some(over):
            device = self.draw.choice(self._devices())
            late: list[Event] = [
                PipelineFailed(time_s=self.now_s, pipeline=pipeline, reason="late"),
                PipelineRestarted(time_s=self.now_s, pipeline=pipeline, restored_step=0),
                PipelineCancelled(time_s=self.now_s, pipeline=pipeline),
                WorkerLost(time_s=self.now_s, pipeline=pipeline, device=device),
                ReplyArrived(time_s=self.now_s, pipeline=pipeline, device=device),
            ]
            self.send(self.draw.choice(late))

    def _report_restart(self, pipeline: PipelineId) -> None:
        self._drop_orders(pipeline)
        self.moving.pop(pipeline, None)
        published = max(self.scheduler.query.pipeline(pipeline).published_version, 0)
        step = self.draw.randint(max(published - 1, 0), published)
        self.send(PipelineRestarted(time_s=self.now_s, pipeline=pipeline, restored_step=step))

    def _some(self, candidates: Iterable[T]) -> list[T]:
        """One of them, drawn; empty where there is none."""
        listed = list(candidates)
        return [self.draw.choice(listed)] if listed else []

    def _nodes(self) -> list[NodeId]:
        pools = self.scheduler.cluster.pools.values()
        return [NodeId(pool.name, index) for pool in pools for index in range(pool.num_nodes or 0)]

    def _devices(self) -> list[DeviceId]:
        pools = self.scheduler.cluster.pools
        return [device for node in self._nodes() for device in pools[node.pool].devices(node)]

    def _rollout_devices(self, pipeline: PipelineId) -> list[DeviceId]:
        pools = self.scheduler.cluster.pools
        nodes = self.placements[pipeline].rollout_nodes
        return [device for node in nodes for device in pools[node.pool].devices(node)]

    # ------------------------------------------------------------------ to the end

    def settle(self, max_events: int = 3000) -> None:
        """No fault any more, every node back: all that can go on goes on to its end."""
        while self.lost:
            self.regain_node()
        query = self.scheduler.query
        for _ in range(max_events):
            held = [one for one in query.pipelines() if query.is_held(one) and query.status(one) not in OVER]
            if not self.go_on() and not held:
                break
            for pipeline in held:
                self.send(HoldReleased(time_s=self.now_s, pipeline=pipeline))
        else:
            raise AssertionError("pipelines neither end nor stop")
        left = [f"{one} is {query.status(one)}" for one in query.pipelines() if query.status(one) not in OVER]
        assert not left, f"nothing will happen any more, and {left}"
        held = [device for device in query.devices() if query.held_fraction(device) != 0.0]
        assert not held, f"{held} are held when every pipeline is over"


def some_client(name: PipelineId, draw: random.Random) -> Pipeline:
    return Pipeline(
        id=name,
        num_steps=None,
        work_arrives=True,
        num_rollout_nodes=draw.choice([1, 1, 2]),
        slo_slowdown=draw.choice([3.0, float("inf")]),
        footprint=Footprint(rollout_device_bytes=draw.choice([None, 1.0]), train_device_bytes=draw.choice([None, 1.0])),
    )


class Restless(Solo):
    """`solo` that relocates a pipeline to other free nodes whenever it is asked, for no reason."""

    def rebalance(self, view: PlacementView) -> tuple[Relocation, ...]:
        for group in view.groups():
            pipeline = group.members[0].pipeline
            num_free = {phase: view.num_free_nodes(phase) for phase in (Phase.ROLLOUT, Phase.TRAIN)}
            if num_free[Phase.ROLLOUT] >= pipeline.num_rollout_nodes and num_free[Phase.TRAIN] >= 1:
                choice = PlacementChoice(
                    kind=AdmissionKind.NEW,
                    group=None,
                    num_new_rollout_nodes=pipeline.num_rollout_nodes,
                    num_new_train_nodes=1,
                )
                return (Relocation(pipeline=pipeline.id, choice=choice),)
        return ()


def some_pipeline(name: PipelineId, draw: random.Random) -> Pipeline:
    stages = [Stage.GENERATE, Stage.REWARD, Stage.OLD_LOGPROBS, Stage.UPDATE, Stage.PUBLISH]
    return Pipeline(
        id=name,
        num_steps=draw.choice([1, 2, 3]),
        stages=tuple(stages),
        has_sft_warmup=draw.random() < 0.3,
        num_rollout_nodes=draw.choice([1, 1, 2]),
        estimate=PhaseSeconds(rollout_s=draw.choice([1.0, 4.0]), train_s=draw.choice([1.0, 3.0])),
        colocated_estimate=PhaseSeconds(rollout_s=2.0, train_s=2.0),
        slo_slowdown=draw.choice([1.2, 3.0, float("inf")]),
        staleness=draw.choice([0, 0, 1]),
        footprint=Footprint(rollout_device_bytes=draw.choice([None, 1.0]), train_device_bytes=draw.choice([None, 1.0])),
    )
