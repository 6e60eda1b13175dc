"""On-demand pipelines: clients announce their work, the scheduler grants it, workers of this backend carry it out.

doors (any thread) ── Inbox ──▶ open, train, sample, withdraw, finish ─▶ OnDemandPipeline ─▶ WorkArrived
scheduler ── RunStage ────────▶ run ─▶ a request batch, on the backend's own call loop
workers ── answers ───────────▶ receive ─▶ the batch goes on; a lost worker's batch is repeated
Client ◀── on_result, on_checkpoint
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rlmux.core.actions import Park, RunStage
from rlmux.core.errors import RlmuxError, WorkerLostError
from rlmux.core.events import ClientFinished, PipelineFailed, PipelineSubmitted, WorkerLost
from rlmux.core.model import Pipeline, PipelineId, Resident
from rlmux.rl.client_requests import SampleRequest, TrainRequest
from rlmux.rl.config import TrainingConfig
from rlmux.runtime.orders.request_batches import Client, OnDemandPipeline, Surroundings
from rlmux.runtime.orders.running_orders import Carrier, OrderWork, RunningOrder
from rlmux.runtime.workers.call_loop import Future
from rlmux.runtime.workers.worker_pool import Worker


class OnDemandPipelines(Carrier):
    """Every on-demand pipeline of a run; lives in the controller's thread."""

    def __init__(self, surroundings: Surroundings) -> None:
        self._surroundings = surroundings
        self._outbox = surroundings.outbox
        self._pipelines: dict[PipelineId, OnDemandPipeline] = {}
        self._sha256: dict[PipelineId, str | None] = {}
        """Hashes of the newest weights of pipelines that are over."""

    def find(self, pipeline: PipelineId) -> OnDemandPipeline | None:
        """The pipeline; None if it is over or of another kind."""
        return self._pipelines.get(pipeline)

    def __contains__(self, pipeline: PipelineId) -> bool:
        return pipeline in self._pipelines

    def weights_sha256(self, pipeline: PipelineId) -> str | None:
        found = self._pipelines.get(pipeline)
        return self._sha256.get(pipeline) if found is None else found.sha256

    # --- from the doors; requests of pipelines that are over are dropped ---------------------------------------

    def open(
        self, pipeline: Pipeline, config: TrainingConfig, folder: Path, client: Client, restore_from: Path | None
    ) -> None:
        """Submit a pipeline. `folder` exists. `restore_from`: a checkpoint to resume from."""
        self._pipelines[pipeline.id] = OnDemandPipeline(
            pipeline.id, config, folder, client, self._surroundings, restore_from=restore_from
        )
        self._outbox.add(PipelineSubmitted(pipeline=pipeline))

    def train(self, pipeline: PipelineId, request_id: str, request: TrainRequest) -> None:
        """Carry out a training request; its result goes to the client."""
        if (found := self._pipelines.get(pipeline)) is not None:
            found.train(request_id, request)

    def sample(self, pipeline: PipelineId, request: SampleRequest, weights: Path | None) -> None:
        """Sample; the result goes to the client."""
        if (found := self._pipelines.get(pipeline)) is not None:
            found.sample(request, weights)

    def withdraw(self, pipeline: PipelineId, ids: Sequence[str]) -> None:
        """Cancel sampling requests that have not begun."""
        if (found := self._pipelines.get(pipeline)) is not None:
            found.withdraw(ids)

    def finish(self, pipeline: PipelineId) -> None:
        """Mark the client as done: the pipeline's devices are released once its running work is over."""
        if pipeline in self._pipelines:
            self._outbox.add(ClientFinished(pipeline=pipeline))

    # --- from the backend ---------------------------------------------------------------------------------------

    def run(self, order: RunningOrder) -> OrderWork:
        return self._pipelines[order.action.pipeline].run(order)

    def offload(self, resident: Resident, action: RunStage) -> Sequence[Future]:
        offloaded = self._pipelines[resident.pipeline].offload(resident.phase)
        return () if offloaded is None else (offloaded,)

    def park(self, action: Park) -> None:
        self._pipelines[action.pipeline].park()

    def release(self, pipeline: PipelineId) -> None:
        ended = self._pipelines.pop(pipeline)
        ended.park()
        self._sha256[pipeline] = ended.sha256

    def receive(self, worker: Worker) -> bool:
        owners = [each for each in self._pipelines.values() if worker in each.workers]
        if owners:
            try:
                worker.receive(self._outbox.now_s())
            except RlmuxError as error:
                self._lose(owners, worker, error)
        return bool(owners)

    def end_overdue_workers(self) -> None:
        now_s = self._outbox.now_s()
        overdue = [worker for each in self._pipelines.values() for worker in each.workers if worker.is_overdue(now_s)]
        for worker in dict.fromkeys(overdue):
            owners = [each for each in self._pipelines.values() if worker in each.workers]
            if owners:  # an earlier worker of the same pipeline may have ended this one
                self._lose(owners, worker, WorkerLostError(f"{worker.name} gave no answer in time"))

    def close(self) -> None:
        for each in self._pipelines.values():
            each.park()

    def _lose(self, owners: Sequence[OnDemandPipeline], worker: Worker, error: RlmuxError) -> None:
        if len(owners) == 1 and not isinstance(error, WorkerLostError):
            self._fail(owners[0], str(error))
            return
        for each in owners:
            if len(owners) > 1:
                each.stop_sharing()  # alone, each shows whether it was its own fault
            num_losses = each.count_loss(worker)
            if num_losses > self._surroundings.options.max_losses:
                self._fail(each, f"{error}, {num_losses} times in a row")
            else:
                self._outbox.add(WorkerLost(pipeline=each.id, device=each.forget(worker)))

    def _fail(self, pipeline: OnDemandPipeline, reason: str) -> None:
        self.release(pipeline.id)
        self._outbox.add(PipelineFailed(pipeline=pipeline.id, reason=reason))
