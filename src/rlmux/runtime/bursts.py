"""One pipeline whose work arrives: what is asked of it, and the bursts in which its workers do that.

    train(request) ─▶ waiting ─▶ arrived(TRAIN) ─▶ begin(order) ─▶ training burst: up to an optimizer step, and what is
                                                                   saved behind it ─▶ finished(order)
    sample(request) ─▶ waiting ─▶ arrived(ROLLOUT) ─▶ begin(order) ─▶ sampling burst: all that waits ─▶ finished(order)

A burst takes along what comes while it runs, up to `burst_s` of sampling or of losses without gradients, and lingers
a moment for more before it ends: a program that asks again at once keeps its device, one that thinks gives it up.
Clients wait for samples and for saved weights: weights are loaded before requests for them are handed over, so that
those that come meanwhile are in the same batch; what an update made is kept behind the saves that follow it.
Requests that were carried out since the newest checkpoint are kept: a train worker that is lost begins again there and
does them once more, to the same bits.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Generator, Iterable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any, Protocol

from rlmux.core.actions import RunStage, Switch
from rlmux.core.model import DeviceId, OrderId, Phase, PipelineId, Resident, Stage
from rlmux.rl.arriving import Loss, OptimizerStep, SampleRequest, SaveState, SaveWeights, TrainRequest
from rlmux.rl.config import TrainingConfig
from rlmux.runtime.burst_workers import Answer, BurstReport, DatumWorker, SampleWorker
from rlmux.runtime.call_loop import Answer as CallAnswer
from rlmux.runtime.call_loop import CallLoop, Task
from rlmux.runtime.linger import Linger
from rlmux.runtime.sampling import SampleQueue, Sampler, Samplers, shared_base
from rlmux.runtime.workplace import Worker, Workplace

Burst = Generator[CallAnswer, Any, None]


class BurstFront(Protocol):
    """What grants devices to bursts. All of it may be called from any thread."""

    def arrived(self, pipeline: PipelineId, phases: tuple[Phase, ...], units: int = 0) -> None: ...
    def finished(self, order: OrderId, *, seconds: float, switch_s: float = 0.0, tokens: int = 0) -> None: ...
    def paused(self, order: OrderId, *, seconds: float, switch_s: float = 0.0, tokens: int = 0) -> None: ...
    def left(self, resident: Resident, order: OrderId) -> None: ...
    def note(self, type: str, **fields: Any) -> None: ...
    def client_finished(self, pipeline: PipelineId) -> None: ...
    def failed(self, pipeline: PipelineId, reason: str) -> None: ...
    def worker_lost(self, pipeline: PipelineId, device: DeviceId) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class BurstOptions:
    """How bursts are run; none of it can change a result."""

    chunk_s: float = 0.5
    """Longest uninterrupted piece of work, in seconds."""
    burst_s: float = 2.0
    """Seconds of work without gradients after which a burst ends with work left: it is another's turn, if there is
    another."""
    step_s: float = 20.0
    """Seconds after which a training burst ends between the losses of one step, whose gradients then move with it."""
    linger_s: float = 0.05
    """Longest wait of a burst for more before it ends, in seconds, where a switch costs less; see linger.py."""
    call_limit_s: float = 120.0
    """Seconds within which a call of a worker must be answered, or show that it lives."""


class Listener(Protocol):
    """What hears of a pipeline and its work, in the host's thread."""

    def admitted(self, pipeline_id: PipelineId) -> None: ...
    def answered(self, pipeline_id: PipelineId, answer: Answer) -> None: ...
    def checkpointed(self, pipeline_id: PipelineId, request_id: str, folder: Path, sha256: str) -> None: ...
    def over(self, pipeline_id: PipelineId, reason: str) -> None: ...


@dataclass(slots=True)
class _Spent:
    """Time and work of an order so far."""

    seconds: float = 0.0
    switch_s: float = 0.0
    tokens: int = 0

    def add(self, seconds: float, tokens: int) -> None:
        self.seconds += seconds
        self.tokens += tokens

    def fields(self) -> dict[str, Any]:
        return {"seconds": self.seconds, "switch_s": self.switch_s, "tokens": self.tokens}


class PipelineBursts:
    """The queues, workers and orders of one pipeline; lives in the host's thread."""

    def __init__(
        self,
        pipeline_id: PipelineId,
        config: TrainingConfig,
        folder: Path,
        *,
        restore_from: Path | None,
        front: BurstFront,
        listener: Listener,
        workplace: Workplace,
        calls: CallLoop,
        samplers: Samplers,
        options: BurstOptions,
        start_timer: Callable[[float, CallAnswer], None],
        now_s: Callable[[], float],
    ) -> None:
        self.id = pipeline_id
        self.is_over = False
        self._config = config
        self._folder = folder
        self._front = front
        self._listener = listener
        self._workplace = workplace
        self._calls = calls
        self._samplers = samplers
        self._base = shared_base(config)
        self._sampler: Sampler | None = None
        self._samples = SampleQueue(pipeline_id, config.adapter, self._answer_sample)
        self._options = options
        self._start_timer = start_timer
        self._now_s = now_s
        self._checkpoint = restore_from
        self._num_updates = 0 if restore_from is None else int(restore_from.name.rpartition("-")[2])
        self._to_train: deque[tuple[str, TrainRequest]] = deque()
        self._since_checkpoint: list[tuple[str, TrainRequest]] = []
        self._num_handed_over = 0
        """Requests that the train worker has and has not answered; they are the last of `_since_checkpoint`."""
        self._answered_since_checkpoint: set[str] = set()
        """Ids of requests of `_since_checkpoint` that some worker has answered."""
        self._num_losses: Counter[Phase] = Counter()
        """Workers lost in a row, by phase: without an answer in between that none before had given."""
        self._worker_by_phase: dict[Phase, tuple[Worker, DeviceId]] = {}
        self._task_by_order: dict[OrderId, Task] = {}
        self._order_by_phase: dict[Phase, OrderId] = {}
        self._pausing: set[OrderId] = set()
        self._lingering: dict[Phase, CallAnswer] = {}
        self._linger_by_kind: dict[tuple[Phase, bool], Linger] = {}
        self._done_by_phase: dict[Phase, tuple[Linger, float]] = {}
        """Time at which all work of a phase was done, until more comes."""
        self._load_s = 0.0
        """Seconds that loading a state took when that was last done."""
        self.sha256: str | None = None
        """Hash of the newest checkpoint's weights; None before the first."""
        self.waits_for: str | None = None
        """The scheduler's reason why it is not placed; None: it is, or will be at once."""

    # --- what is asked ----------------------------------------------------------------------------------------

    def train(self, request_id: str, request: TrainRequest) -> None:
        """Carry out a training request behind those before it."""
        self._to_train.append((request_id, request))
        self._tell(Phase.TRAIN, _train_units(request))

    def sample(self, request: SampleRequest, weights: Path | None) -> None:
        """Sample with the weights of a file; None: with the model's first."""
        self._samples.waiting.append((request, weights))
        self._tell(Phase.ROLLOUT, request.max_new_tokens)

    def withdraw(self, ids: Sequence[str]) -> None:
        """Forget sampling requests that wait, which is told. What a worker has begun is finished and answered."""
        self._samples.withdraw(ids)

    def _tell(self, phase: Phase, units: int) -> None:
        """Have the running burst take new work along, or announce it."""
        if self.is_over:
            return
        if (done := self._done_by_phase.pop(phase, None)) is not None:
            done[0].saw(self._now_s() - done[1])
        if (lingering := self._lingering.pop(phase, None)) is not None:
            lingering.arrive()
        elif phase not in self._order_by_phase:
            self._front.arrived(self.id, (phase,), units)

    def wait_for(self, reason: str) -> None:
        """The pipeline waits for its place."""
        self.waits_for = reason

    def have_place(self) -> None:
        """The pipeline is placed."""
        self.waits_for = None
        self._listener.admitted(self.id)

    # --- orders -----------------------------------------------------------------------------------------------

    def begin(self, order: RunStage) -> None:
        """The order's devices are ours until it is finished or paused."""
        phase = Phase.ROLLOUT if order.stage is Stage.GENERATE else Phase.TRAIN
        self._order_by_phase[phase] = order.order
        burst = self._sample_burst(order) if phase is Phase.ROLLOUT else self._train_burst(order)
        task = self._calls.start(burst, pipeline=self.id)
        if not task.is_over:
            self._task_by_order[order.order] = task

    def pause(self, order: OrderId) -> None:
        """Stop an order at its next safe point."""
        if order in self._task_by_order:
            self._pausing.add(order)
            for phase, running in list(self._order_by_phase.items()):
                if running == order and (lingering := self._lingering.pop(phase, None)) is not None:
                    lingering.arrive()

    def evict(self, resident: Resident, order: OrderId) -> None:
        """Leave the devices that a state lies on, for another's order."""
        self._calls.start(self._leave(resident, order), pipeline=None)

    def _leave(self, resident: Resident, order: OrderId) -> Burst:
        yield from self._offload(resident.phase)
        self._front.left(resident, order)

    def _offload(self, phase: Phase) -> Burst:
        """Have a state leave its device; a worker stays while others that it serves are there."""
        worker = self._worker_by_phase.get(phase)
        is_needed = phase is Phase.ROLLOUT and self._sampler is not None and not self._sampler.leave_device(self.id)
        if worker is not None and not is_needed:
            yield self._calls.call(worker[0], "offload")

    def _sample_burst(self, order: RunStage) -> Burst:
        spent = _Spent()
        yield from self._worker_on(order, Phase.ROLLOUT, spent)
        sampler, samples, has_begun = self._sampler, self._samples, False
        assert sampler is not None
        while order.order not in self._pausing and spent.seconds < self._options.burst_s:
            # nothing is there at once where orders of others have done it all
            if not samples.has_work and not (has_begun and (yield from self._has_more(Phase.ROLLOUT))):
                break
            report: BurstReport = yield sampler.run_round(self._options.chunk_s)
            has_begun = True
            spent.add(report.seconds, 0)
            self._note_others(order, report)
        spent.tokens = samples.tell_tokens()
        self._end(order, Phase.ROLLOUT, spent, has_more=samples.has_work)

    def _note_others(self, order: RunStage, report: BurstReport) -> None:
        """Put into the log whose requests an order of this pipeline took along."""
        tokens = {name: count for name, count in sorted(report.tokens_by_tenant.items()) if count}
        if any(name not in ("", self.id) for name in tokens):
            self._front.note("shared_batch", order=order.order, tokens=tokens, seconds=report.seconds)

    def _train_burst(self, order: RunStage) -> Burst:
        spent, has_stepped = _Spent(), False
        worker = yield from self._worker_on(order, Phase.TRAIN, spent)
        while order.order not in self._pausing:
            if not self._num_handed_over:
                taken = list(self._take_segment(has_stepped=has_stepped))
                if not taken and (self._to_train or not (yield from self._has_more(Phase.TRAIN, has_stepped))):
                    break
                yield from self._hand_over_training(worker, taken)
                has_stepped |= any(isinstance(request, OptimizerStep) for _, request in taken)
                continue
            report: BurstReport = yield self._calls.call(worker, "run_chunk", self._options.chunk_s)
            spent.add(report.seconds, report.tokens)
            self._num_handed_over = report.num_active + report.num_waiting
            self._answer_trained(report.answers)
            if not self._num_handed_over and (update := self._newest_update()) is not None:
                if saves := list(self._take_saves()):
                    yield from self._hand_over_training(worker, saves)
                else:
                    yield from self._keep_checkpoint(worker, update)
            if spent.seconds >= self._longest_train_s():
                break
        self._end(order, Phase.TRAIN, spent, has_more=bool(self._num_handed_over or self._to_train))

    def _answer_trained(self, answers: Sequence[Answer]) -> None:
        for answer in answers:
            self._listener.answered(self.id, answer)
        answered = {answer.id for answer in answers}
        if answered - self._answered_since_checkpoint:
            self._num_losses[Phase.TRAIN] = 0
        self._forget_forwards(answered)
        self._answered_since_checkpoint |= answered & {name for name, _ in self._since_checkpoint}

    def _answer_sample(self, answer: Answer) -> None:
        self._num_losses[Phase.ROLLOUT] = 0
        self._listener.answered(self.id, answer)

    def _forget_forwards(self, answered: AbstractSet[str]) -> None:
        """Answered losses without gradients changed nothing: they need not be done again."""
        self._since_checkpoint = [
            (name, request)
            for name, request in self._since_checkpoint
            if name not in answered or not (isinstance(request, Loss) and request.is_forward_only)
        ]

    def _longest_train_s(self) -> float:
        """Seconds of computing after which a training burst ends with work left."""
        holds_gradients = any(_is_of_step(request) for _, request in self._since_checkpoint)
        return self._options.step_s if holds_gradients else self._options.burst_s

    def _hand_over_training(self, worker: Worker, taken: Sequence[tuple[str, TrainRequest]]) -> Burst:
        self._since_checkpoint += taken
        self._num_handed_over = len(taken)
        if taken:
            yield self._calls.call(worker, "add", taken)

    def _take_segment(self, *, has_stepped: bool) -> Iterable[tuple[str, TrainRequest]]:
        """Requests up to the next optimizer step and the saves behind it; behind one, only what begins no other."""
        if has_stepped:
            behind = list(takewhile(lambda one: not _is_of_step(one[1]), self._to_train))
        else:
            steps = (n for n, one in enumerate(self._to_train, 1) if isinstance(one[1], OptimizerStep))
            behind = list(self._to_train)[: next(steps, len(self._to_train))]
        for _ in behind:
            yield self._to_train.popleft()
        if behind and isinstance(behind[-1][1], OptimizerStep):
            yield from self._take_saves()

    def _take_saves(self) -> Iterable[tuple[str, TrainRequest]]:
        """Saves that come next: they change nothing, and a client waits for them."""
        while self._to_train and _is_save(self._to_train[0][1]):
            yield self._to_train.popleft()

    def _newest_update(self) -> str | None:
        """The optimizer step that made a state which no checkpoint has; None where something else made the state."""
        newest = next((one for one in reversed(self._since_checkpoint) if not _is_save(one[1])), None)
        return newest[0] if newest is not None and isinstance(newest[1], OptimizerStep) else None

    def _keep_checkpoint(self, worker: Worker, request_id: str) -> Burst:
        """Write what the update of this request made, so that nothing before it is ever done again."""
        folder, previous = self._folder / f"update-{self._num_updates + 1}", self._checkpoint
        self._num_updates += 1
        kept = [each for each in (previous, folder) if each is not None]
        self.sha256 = yield self._calls.call(worker, "keep_update", folder, kept)
        self._checkpoint, self._since_checkpoint = folder, []
        self._answered_since_checkpoint = set()
        self._num_losses[Phase.TRAIN] = 0
        self._listener.checkpointed(self.id, request_id, folder, self.sha256)

    def _has_more(self, phase: Phase, has_stepped: bool = False) -> Generator[CallAnswer, Any, bool]:
        """Wait a moment for more work; returns whether some came."""
        if not (self._samples.waiting if phase is Phase.ROLLOUT else self._to_train):
            linger = self._linger_by_kind.setdefault((phase, has_stepped), Linger())
            self._done_by_phase[phase] = linger, self._now_s()
            seconds = linger.seconds(max(self._options.linger_s, self._load_s))
            if not seconds:
                return False
            moment = self._calls.promise()
            self._lingering[phase] = moment
            self._start_timer(seconds, moment)
            yield moment
            self._lingering.pop(phase, None)
        return bool(self._samples.waiting if phase is Phase.ROLLOUT else self._to_train)

    def _end(self, order: RunStage, phase: Phase, spent: _Spent, *, has_more: bool) -> None:
        is_paused = order.order in self._pausing and has_more
        self._pausing.discard(order.order)
        self._task_by_order.pop(order.order, None)
        del self._order_by_phase[phase]
        if is_paused:
            self._front.paused(order.order, **spent.fields())
            return
        if has_more:  # before the end, so that the client is not taken for thinking
            samples = [request.max_new_tokens for request in self._samples.all_work()]
            trained = [_train_units(request) for _, request in self._to_train]
            self._front.arrived(self.id, (phase,), sum(samples if phase is Phase.ROLLOUT else trained))
        self._front.finished(order.order, **spent.fields())

    # --- workers ----------------------------------------------------------------------------------------------

    def _worker_on(self, order: RunStage, phase: Phase, spent: _Spent) -> Generator[CallAnswer, Any, Worker]:
        """The worker of a phase on the order's device, with its state there."""
        start, device = self._now_s(), order.devices[0]
        for resident in order.evicted:  # another's leaves before the order begins
            if resident.pipeline == self.id:
                yield from self._offload(resident.phase)
        found = self._worker_by_phase.get(phase)
        if found is not None and found[1] != device:
            self._end_worker(phase)
            found = None
        shared = self._samplers.find(self._base, device) if phase is Phase.ROLLOUT and found is None else None
        if shared is not None:
            worker = shared.worker
            self._have_sampler(shared, device)
            yield self._calls.call(worker, "load")
        elif found is None:
            worker = self._spawn(phase, device)
            yield self._calls.call(worker, "build")
        else:
            worker = found[0]
            if order.switch is not Switch.NONE:
                load_from_s = self._now_s()
                yield self._calls.call(worker, "load")
                self._load_s = self._now_s() - load_from_s
        if phase is Phase.ROLLOUT and self._sampler is not None:
            yield from self._sampler.join(self._samples)
        spent.switch_s += self._now_s() - start
        return worker

    def _spawn(self, phase: Phase, device: DeviceId) -> Worker:
        make, args = (
            (SampleWorker, (self._config, self._folder, self._workplace.bases))
            if phase is Phase.ROLLOUT
            else (DatumWorker, (self._config, self._checkpoint, self._workplace.bases))
        )
        worker = self._workplace.spawn(
            f"{self.id} {phase}",
            make,
            args,
            device=device,
            log_path=self._folder / "workers.log",
            call_limit_s=self._options.call_limit_s,
        )
        self._worker_by_phase[phase] = worker, device
        if phase is Phase.ROLLOUT:
            sampler = Sampler(worker, self._calls)
            self._samplers.keep(self._base, device, sampler)
            self._have_sampler(sampler, device)
        return worker

    def _have_sampler(self, sampler: Sampler, device: DeviceId) -> None:
        self._worker_by_phase[Phase.ROLLOUT] = sampler.worker, device
        self._sampler = sampler
        sampler.take_in(self.id)

    def share_no_more(self) -> None:
        """Sample by a worker of its own from now on: one that it shared has failed, perhaps by another's fault."""
        self._base = None

    def owns(self, worker: Worker) -> bool:
        """It is one of the pipeline's workers."""
        return any(mine is worker for mine, _ in self._worker_by_phase.values())

    def count_loss(self, worker: Worker) -> int:
        """A worker was lost; returns how many of its phase were, in a row. What is done again does not break a row: a
        request that ends every worker would else be tried for ever."""
        phase = self._phase_of(worker)
        self._num_losses[phase] += 1
        return self._num_losses[phase]

    def forget(self, worker: Worker) -> tuple[Phase, DeviceId]:
        """A worker was lost: what it had not answered is to be done again. Returns its phase and device."""
        phase = self._phase_of(worker)
        device = self._worker_by_phase[phase][1]
        self._end_worker(phase)
        return phase, device

    def _phase_of(self, worker: Worker) -> Phase:
        return next(phase for phase, (mine, _) in self._worker_by_phase.items() if mine is worker)

    def _end_worker(self, phase: Phase) -> None:
        worker, _ = self._worker_by_phase.pop(phase)
        if phase is Phase.TRAIN or self._leave_sampler():
            self._workplace.forget(worker)
            self._calls.give_up(worker)
            worker.kill()
        if (order := self._order_by_phase.pop(phase, None)) is not None:
            self._task_by_order.pop(order, None)
            self._pausing.discard(order)
        self._lingering.pop(phase, None)
        if phase is Phase.TRAIN:
            self._to_train.extendleft(reversed(self._since_checkpoint))
            self._since_checkpoint, self._num_handed_over = [], 0

    def _leave_sampler(self) -> bool:
        """Leave the sampling worker; returns whether nothing else is served by it."""
        sampler, self._sampler = self._sampler, None
        assert sampler is not None
        sampler.leave(self._samples)
        if sampler.is_unused:
            self._samplers.drop(sampler)
        return sampler.is_unused

    def end_workers(self) -> None:
        """End all its processes; what they had not answered is to be done again."""
        for phase in list(self._worker_by_phase):
            self._end_worker(phase)

    def park(self) -> None:
        """Hold no device until the next order; what was not answered is done again then."""
        self._calls.close_all_of(self.id)
        self.end_workers()

    def release(self, reason: str) -> None:
        """Hold nothing from now on."""
        if not self.is_over:
            self.is_over = True
            self.park()
            self._listener.over(self.id, reason)


def _is_of_step(request: TrainRequest) -> bool:
    return isinstance(request, OptimizerStep) or (isinstance(request, Loss) and not request.is_forward_only)


def _is_save(request: TrainRequest) -> bool:
    return isinstance(request, SaveWeights | SaveState)


def _train_units(request: TrainRequest) -> int:
    """Tokens of a training request."""
    return request.num_tokens if isinstance(request, Loss) else 0
