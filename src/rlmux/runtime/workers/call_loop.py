"""Work that waits for workers: generators in one thread, each resumed by the awaited answer.

    work ── yield calls.call(worker, method, ...) ──▶ CallLoop ── call ──▶ worker
      ▲                                                  │
      └── send(result) ◀──────── ready, in order ◀───────┴── answer
      └── throw(WorkerLostError) ◀── ... ◀── the worker was ended

An order is such a generator: it yields bounded calls, with a safe point between two of them. Pausing an order omits its
next call; ending a pipeline closes its generators. A WorkerLostError that leaves a generator ends it: the supervisor
has handled the loss already.

Started work runs at once, up to its first wait. Resumed work runs in the order of the answers, never inside other work.
"""

from __future__ import annotations

import contextlib
import heapq
from collections import deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from rlmux.core.errors import WorkerLostError
from rlmux.core.model import PipelineId
from rlmux.runtime.workers.worker_pool import Worker, Workplace


class Future:
    """A pending result, a value or an error; work yields it to wait."""

    def __init__(self, loop: CallLoop) -> None:
        self._loop = loop
        self.is_done = False
        self.value: Any = None
        self.error: WorkerLostError | None = None
        self.task: LoopTask | None = None
        """The work that waits for it."""

    def set_result(self, value: Any = None) -> None:
        self.is_done, self.value = True, value
        self._loop.resume(self)

    def set_error(self, error: WorkerLostError) -> None:
        self.is_done, self.error = True, error
        self._loop.resume(self)


Work = Generator[Future, Any, None]


@dataclass(slots=True, eq=False)
class LoopTask:
    """Work that was started."""

    work: Work
    pipeline: PipelineId | None
    """Pipeline whose end closes the work; None for work that outlives a pipeline's processes."""
    is_over: bool = False


class CallLoop:
    """Runs work, and resumes it when its future is done."""

    def __init__(
        self,
        workplace: Workplace,
        now_s: Callable[[], float],
        *,
        check: Callable[[Worker, str], None] = lambda worker, method: None,
    ) -> None:
        """`check`: raises for a call that is not allowed now."""
        self._workplace = workplace
        self._check = check
        self._now_s = now_s
        self._unanswered: dict[Worker, list[Future]] = {}
        self._tasks: dict[LoopTask, None] = {}
        self._ready: deque[Future] = deque()
        self._later: list[LoopTask] = []
        self._timers: list[tuple[float, int, Future]] = []
        """A heap of the times at which futures are due."""
        self._numbers = count()
        self._is_running = False

    def call(self, worker: Worker, method: str, *args: Any) -> Future:
        """Call a worker's method. Waiting for the answer is optional: a failing call ends its pipeline anyway."""
        self._check(worker, method)
        future = Future(self)
        unanswered = self._unanswered.setdefault(worker, [])
        unanswered.append(future)

        def on_answer(value: Any) -> None:
            unanswered.remove(future)
            future.set_result(value)

        with contextlib.suppress(WorkerLostError):  # its pipe is closed: the next poll handles that
            worker.call(self._now_s(), method, args, on_answer)
        return future

    def senders(self, trainers: Sequence[Worker]) -> Sequence[int]:
        """Ranks of a pipeline's trainers that write its weights, to send parts of them."""
        return self._workplace.senders(trainers)

    def deliver(self, path: Path, senders: Sequence[Worker], receivers: Sequence[Worker]) -> Future:
        """Deliver weights from the trainers that wrote them to the receivers; done once they have arrived."""
        future = Future(self)
        self._workplace.deliver(path, senders, receivers, future.set_result)
        return future

    def future(self) -> Future:
        """A future completed by other work of this thread."""
        return Future(self)

    def after(self, seconds: float) -> Future:
        """A future that `fire_timers` completes after the time, unless it is done by then."""
        future = Future(self)
        heapq.heappush(self._timers, (self._now_s() + seconds, next(self._numbers), future))
        return future

    def seconds_to_wait(self, limit_s: float) -> float:
        """Seconds until the next timer is due, at most `limit_s`."""
        return min(limit_s, max(0.0, self._timers[0][0] - self._now_s())) if self._timers else limit_s

    def fire_timers(self) -> None:
        """Complete the futures of timers that are due."""
        now_s = self._now_s()
        while self._timers and self._timers[0][0] <= now_s:
            future = heapq.heappop(self._timers)[2]
            if not future.is_done:
                future.set_result()

    def start(self, work: Work, *, pipeline: PipelineId | None) -> LoopTask:
        """Run work up to its first wait; results resume it from there."""
        task = LoopTask(work, pipeline)
        self._tasks[task] = None
        self._begin(task)
        return task

    def _begin(self, task: LoopTask) -> None:
        was_running, self._is_running = self._is_running, True
        try:
            self._step(task, None)
        finally:
            self._is_running = was_running
        self._run_ready()

    def start_soon(self, work: Work, *, pipeline: PipelineId | None) -> LoopTask:
        """Queue work for `start_later_work`, as it takes a core that a device's next order may need."""
        task = LoopTask(work, pipeline)
        self._tasks[task] = None
        self._later.append(task)
        return task

    def start_later_work(self) -> None:
        """Run queued work up to its first wait, without work closed meanwhile."""
        later, self._later = self._later, []
        for task in later:
            self._begin(task)

    def close(self, task: LoopTask) -> None:
        """End work where it waits. Nothing happens if it is over."""
        task.is_over = True
        task.work.close()
        self._tasks.pop(task, None)

    def close_all_of(self, pipeline: PipelineId) -> None:
        """End all work of a pipeline where it waits."""
        for task in [task for task in self._tasks if task.pipeline == pipeline]:
            self.close(task)

    def fail_calls(self, worker: Worker) -> None:
        """Throw WorkerLostError into all work that waits for answers of an ended worker."""
        for future in self._unanswered.pop(worker, []):
            future.set_error(WorkerLostError(f"{worker.name} was ended"))

    def resume(self, future: Future) -> None:
        """Resume the work that waits for a completed future, once the running work waits."""
        if future.task is not None:
            self._ready.append(future)
            self._run_ready()

    def _run_ready(self) -> None:
        if self._is_running:
            return
        self._is_running = True
        try:
            while self._ready:
                future = self._ready.popleft()
                assert future.task is not None
                self._step(future.task, future)
        finally:
            self._is_running = False

    def _step(self, task: LoopTask, future: Future | None) -> None:
        """Run work from its present answer to its next wait."""
        while not task.is_over:
            try:
                if future is None:
                    awaited = next(task.work)
                elif future.error is not None:
                    awaited = task.work.throw(future.error)
                else:
                    awaited = task.work.send(future.value)
            except (StopIteration, WorkerLostError):
                task.is_over = True
                self._tasks.pop(task, None)
                return
            if not awaited.is_done:
                awaited.task = task
                return
            future = awaited
