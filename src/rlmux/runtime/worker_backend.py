"""The backend that runs workers: dispatches actions to its parts and collects their events and notes.

                          a Carrier, found by the pipeline
                             ┌─▶ ExternalPrograms   permits of programs with their own engines
    execute(action) ─────────┼─▶ OnDemandPipelines  request batches of Tinker clients
                             ├─▶ PlannedPipelines   rollouts and training, step by step
                             └─▶ ResidentStates     states on devices, in host memory, on disk, of all three
    poll() ◀── Outbox ◀── all of them
                  ▲
    workers ──────┴── answers ───▶ CallLoop ──▶ resumes the order that waits
    other threads ── commands ──▶ Inbox ─────▶ run by the next poll

    weights         train worker ──▶ a file in shared memory ──▶ rollout workers     (never through here)
    trajectories    rollout worker ──▶ here ──▶ env worker;     env worker ──▶ bytes ──▶ here ──▶ train worker

An order is a generator of bounded calls (call_loop.py). Between two calls is a safe point: a Pause takes effect there,
progress is reported there, and a lost worker falls back to it. Everything runs in one thread.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from rlmux.core.actions import (
    Action,
    Admit,
    ExpectLoss,
    MigrateShard,
    Park,
    Pause,
    Refuse,
    Release,
    Relocate,
    RunStage,
    SetDeviceFraction,
)
from rlmux.core.errors import IllegalTransitionError
from rlmux.core.estimation.cycles import USER_CODE_PATIENCE_S
from rlmux.core.events import Event, RewardOverdue
from rlmux.core.model import Cluster, NodeId, PipelineId, Stage
from rlmux.log.notes import NeighbourNote, Note
from rlmux.runtime.backend import Submission, WorkerOptions
from rlmux.runtime.control.inbox import Inbox
from rlmux.runtime.memory.memory_budget import HostMemory
from rlmux.runtime.orders.external_programs import ExternalPrograms
from rlmux.runtime.orders.on_demand import OnDemandPipelines
from rlmux.runtime.orders.planned_pipelines import PlannedPipelines
from rlmux.runtime.orders.request_batches import BatchOptions, Surroundings
from rlmux.runtime.orders.resident_states import ResidentStates
from rlmux.runtime.orders.running_orders import Carrier, RunningOrder, RunningOrders
from rlmux.runtime.orders.shared_training import SharedTrainers
from rlmux.runtime.workers.call_loop import CallLoop, Work
from rlmux.runtime.workers.outbox import Outbox
from rlmux.runtime.workers.pipeline_workers import PipelineWorkers
from rlmux.runtime.workers.tenant_process import TenantWorkplace
from rlmux.runtime.workers.worker_pool import Neighbour, Worker, Workplace

_TOUCHING_CALLS = frozenset({"build", "probe", "join_ranks", "run_chunk", "run_stage", "offload"})
"""Calls of device workers that compute, or that move a state to or from the device. The others touch none: they read
files, wait for one, or pick up trajectories that lie still (`take_partials`, while the shard is being migrated)."""


class WorkerBackend:
    """See the module's picture. Everything it starts ends with `close`."""

    def __init__(
        self,
        cluster: Cluster,
        folder: Path,
        workplace: Workplace,
        weights_folder: Path,
        *,
        options: WorkerOptions | None = None,
        start_s: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
        neighbours: Sequence[Neighbour] = (),
        batch_options: BatchOptions = BatchOptions(),
    ) -> None:
        """`neighbours`: other runs on the same devices, noted in the log."""
        self.workplace = workplace
        self._inbox = Inbox()
        self._weights_folder = weights_folder
        self._options = options or WorkerOptions()
        self._outbox = Outbox(start_s, clock)
        for each in neighbours:
            self._outbox.add_note(NeighbourNote(pid=each.pid, folder=each.folder, reason=str(each)))
        self._places = TenantWorkplace(workplace, self._outbox.now_s)
        self._calls = CallLoop(self._places, self._outbox.now_s, check=self._check_lease)
        self._orders = RunningOrders()
        self.external = ExternalPrograms(self._calls, self._outbox)
        self.on_demand = OnDemandPipelines(
            Surroundings(
                workplace=self._places,
                calls=self._calls,
                outbox=self._outbox,
                trainers=SharedTrainers(self._calls),
                options=batch_options,
            )
        )
        self._states = ResidentStates(self._outbox, HostMemory(cluster), self.external, self._carrier_of)
        self._planned = PlannedPipelines(
            cluster,
            folder,
            weights_folder,
            workplace=self._places,
            calls=self._calls,
            outbox=self._outbox,
            orders=self._orders,
            states=self._states,
            options=self._options,
        )
        self._supervisor = self._planned.supervisor
        self._carriers: tuple[Carrier, ...] = (self.external, self.on_demand, self._planned)
        self._expected_losses: dict[NodeId, float] = {}
        """Expected time of loss, by node with a notice."""
        self._lost_nodes: set[NodeId] = set()
        """Nodes reported as lost (membership tests only)."""

    @property
    def workers_by_pipeline(self) -> Mapping[PipelineId, PipelineWorkers]:
        """Every admitted pipeline's processes."""
        return self._supervisor.workers_by_pipeline

    def now_s(self) -> float:
        return self._outbox.now_s()

    def connect(self, inbox: Inbox) -> None:
        """Run the commands of an inbox from now on."""
        self._inbox = inbox
        inbox.connect(self.workplace.wake)

    def add_note(self, note: Note) -> None:
        """A note for the log, from a command."""
        self._outbox.add_note(note)

    def add_pipeline(self, submission: Submission) -> None:
        if not self._supervisor.knows(submission.pipeline.id):  # else it failed, and is retried
            self._inbox.claim(submission.pipeline.id)
        self._supervisor.add_pipeline(submission)

    def weights_sha256(self, pipeline: PipelineId) -> str | None:
        return next(filter(None, (each.weights_sha256(pipeline) for each in self._carriers)), None)

    def execute(self, action: Action) -> None:
        match action:
            case RunStage() | MigrateShard() if self._supervisor.is_restarting(action.pipeline):
                pass  # the scheduler withdraws it once it handles the restart
            case RunStage():
                self._run(action)
            case MigrateShard():
                self._planned.migrate(action)
            case Pause():
                if (order := self._orders.find(action.order)) is not None:  # else its end is in the outbox
                    order.pause()
            case SetDeviceFraction():
                if (order := self._orders.find(action.order)) is not None:
                    order.device_fraction = action.device_fraction
            case ExpectLoss():
                self._expect_loss(action)
            case Admit():
                self._lost_nodes.difference_update(action.placement.nodes)  # a user may report a node as back
                self._carrier_of(action.pipeline).admit(action)
            case Relocate():
                self._carrier_of(action.pipeline).relocate(action)
            case Park():
                self._carrier_of(action.pipeline).park(action)
            case Release() | Refuse():
                self._carrier_of(action.pipeline).release(action.pipeline)
            case _:
                pass  # Queue is the controller's to show

    def _carrier_of(self, pipeline: PipelineId) -> Carrier:
        return next(each for each in self._carriers if pipeline in each)

    def poll(self, timeout_s: float) -> tuple[Sequence[Event], Sequence[Note]]:
        has_events = self._outbox.has_events()  # of actions since the last poll
        self._run_commands()
        if not has_events:
            self._calls.start_later_work()  # the orders that answered the last events are out
            ready = self._places.wait(self._seconds_to_wait(timeout_s))
            self._report_node_changes()
            for worker in ready:
                next(carrier for carrier in self._carriers if carrier.receive(worker))
            for carrier in self._carriers:
                carrier.end_overdue_workers()
            self._calls.fire_timers()
            self._report_long_waits()
            self._run_commands()
        events, notes = self._outbox.take()
        self._supervisor.events_are_taken(events)
        return events, notes

    def _seconds_to_wait(self, limit_s: float) -> float:
        return 0.0 if self._outbox.has_events() else self._calls.seconds_to_wait(limit_s)

    def _run_commands(self) -> None:
        for command in self._inbox.take():
            command(self)

    def _expect_loss(self, action: ExpectLoss) -> None:
        if action.at_s is None:
            self._expected_losses.pop(action.node, None)
        else:
            self._expected_losses[action.node] = action.at_s

    def _report_node_changes(self) -> None:
        """Report nodes that the workplace lost or found, and nodes whose notice has expired."""
        now_s = self._outbox.now_s()
        due = [node for node, at_s in self._expected_losses.items() if at_s <= now_s]
        for node, is_there in (*self.workplace.node_changes(), *((node, False) for node in due)):
            if is_there or node not in self._lost_nodes:
                self._supervisor.change_node(node, is_there=is_there)
                for order in () if is_there else self._orders.on_node(node):
                    carrier = self._carrier_of(order.action.pipeline)
                    if carrier is not self._planned:  # whose orders there have ended
                        carrier.park(Park(pipeline=order.action.pipeline))
            self._expected_losses.pop(node, None)
            if is_there:
                self._lost_nodes.discard(node)
            else:
                self._lost_nodes.add(node)

    def close(self) -> None:
        for carrier in self._carriers:
            carrier.close()
        self.workplace.close()
        shutil.rmtree(self._weights_folder, ignore_errors=True)

    # ------------------------------------------------------------------ orders

    def _run(self, action: RunStage) -> None:
        order = self._orders.begin(action)
        order.task = self._calls.start(self._carry_out(order), pipeline=action.pipeline)

    def _carry_out(self, order: RunningOrder) -> Work:
        """The life of an order; closing it, or a lost worker, ends it without an event."""
        carrier = self._carrier_of(order.action.pipeline)
        try:
            if not carrier.makes_room:
                yield from self._states.make_room(order)
            event = yield from carrier.run(order)
        finally:
            self._orders.end(order)
        self._outbox.add(event)

    def _check_lease(self, worker: Worker, method: str) -> None:
        """Raises IllegalTransitionError for a call that touches a device without a lease.

        A worker computes under an order of its own pipeline; its state leaves under the order that needs the room.
        """
        if method not in _TOUCHING_CALLS:
            return
        workers = self._supervisor.owner(worker)
        if workers is None or not (devices := workers.devices_of(worker)):
            return  # an env worker has no device; calls to an ended worker are dropped
        orders = [order for device in devices for order in self._orders.on_device(device)]
        if method != "offload":
            orders = [order for order in orders if order.action.pipeline == workers.id]
        if not orders:
            raise IllegalTransitionError(f"{worker.name} was to {method} on {devices[0]}, which no order of it leases")

    def _report_long_waits(self) -> None:
        """Release devices and cycle slots of pipelines that only wait for their own user code."""
        for order in self._orders.waiting_since(self._outbox.now_s() - USER_CODE_PATIENCE_S):
            order.waits_since_s = None
            if order.action.stage is Stage.REWARD:
                self._outbox.add(RewardOverdue(order=order.action.order))
            else:
                order.pause()
