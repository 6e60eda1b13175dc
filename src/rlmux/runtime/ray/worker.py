"""The controller's side of an actor: its pending calls, and regular probes whether it lives.

busy    the reference of the answer    ──▶ fetch ──▶ receive ──▶ then(value)
busy for long   probes of the process's activity and of the call's signs of life
idle    the reference of a probe, one a second  ──▶ nothing, or the worker is lost; the first one returns its process id
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import ray
import ray.exceptions

from rlmux.core.errors import PipelineError, RlmuxError, WorkerLostError
from rlmux.runtime.ray.actor import Call, CallReply
from rlmux.runtime.ray.cluster import RayNode
from rlmux.runtime.workers.heartbeat import Activity

_UNAVAILABLE_LIMIT_S = 40.0
"""Seconds of unavailability before a worker is lost, more than Ray takes to declare a node dead."""
_KILL_LIMIT_S = 10.0
_CHECKPOINT_LIMIT_S = 600.0
"""Longest wait for a trainer's checkpoint at the end of a run."""
PROBE_EVERY_S = 1.0
"""Seconds between two probes of an idle worker, which delay the detection of its death."""


class RayWorker:
    """A worker behind an actor; one call of it is under way at a time."""

    def __init__(
        self,
        name: str,
        actor: Any,
        node: RayNode | None,
        call_limit_s: float,
        *,
        is_node_lost: Callable[[RayNode | None], bool],
        on_end: Callable[[RayWorker, ray.ObjectRef[Any]], None],
    ) -> None:
        self.name = name
        self.node = node
        self.address = node.address if node else "127.0.0.1"
        self.pid: int | None = None
        self.is_lost = False
        self.actor = actor
        self.call_limit_s = call_limit_s
        self._is_node_lost = is_node_lost
        self._on_end = on_end
        self._calls: deque[tuple[Call, Callable[[Any], None]]] = deque()
        self._pending: ray.ObjectRef[Any] | None = None
        self._probe: ray.ObjectRef[Any] | None = None
        self._probed_s = 0.0
        self._last_beat_s: float | None = None
        """Time at which the present call was sent, or last showed life; None between calls."""
        self.called_s: float | None = None
        """Time at which the present call was sent; None between calls."""
        self.num_beats = 0
        self._activity: Activity | None = None
        """Activity at the last probe."""
        self._beat_probe: ray.ObjectRef[Any] | None = None
        self._beat_probed_s = 0.0
        self._unavailable_since_s: float | None = None
        self._answer: Any = None

    @property
    def pipeline(self) -> str:
        return self.name.partition("/")[0]

    @property
    def is_trainer(self) -> bool:
        """Whether the worker is the first training rank, which publishes weights and writes checkpoints."""
        return self.name.endswith("/train")

    def call(self, now_s: float, method: str, args: tuple[Any, ...], then: Callable[[Any], None]) -> None:
        self._calls.append((Call(method=method, args=args), then))
        if len(self._calls) == 1:
            self._send(now_s)

    def _send(self, now_s: float) -> None:
        call, _ = self._calls[0]
        self.called_s = self._last_beat_s = now_s
        self._activity = None
        self._unavailable_since_s = None  # earlier probes do not count for this call
        self._pending = self.actor.answer.remote(call)

    def watched(self, probe_every_s: float = PROBE_EVERY_S) -> ray.ObjectRef[Any] | None:
        """The reference of its answer or probe; None if it is idle and was probed recently."""
        if self._pending is not None:
            return self._pending
        now_s = time.monotonic()
        if self._probe is None and now_s - self._probed_s >= probe_every_s:
            self._probe, self._probed_s = self.actor.is_there.remote(), now_s
        return self._probe

    def fetch(self) -> bool:
        """Fetch the reference's value. False if there is nothing to receive, or the probe is repeated."""
        is_probe = self._pending is None
        reference, self._probe = self._pending or self._probe, None
        try:
            self._answer = ray.get(reference)  # type: ignore[arg-type]
        except ray.exceptions.ActorUnavailableError as error:
            now_s = time.monotonic()
            since_s = self._unavailable_since_s = self._unavailable_since_s or now_s
            if now_s - since_s < _UNAVAILABLE_LIMIT_S and not self._is_node_lost(self.node):
                if not is_probe:
                    self._pending = self.actor.is_there.remote()
                time.sleep(0.1)
                return False
            self._answer = WorkerLostError(f"{self.name} is out of reach: {_first_line(error)}")
        except ray.exceptions.RayTaskError as error:
            self._answer = PipelineError(f"{self.name}: {_first_line(error.cause)}")
        except ray.exceptions.RayError as error:
            self._answer = WorkerLostError(f"{self.name} is gone: {_first_line(error)}")
        if is_probe and isinstance(self._answer, CallReply):
            self._unavailable_since_s = None
            if self._answer.error is None:
                return self.pid != self._answer.pid
        if self._unavailable_since_s is not None and not isinstance(self._answer, Exception):
            self._answer = WorkerLostError(f"{self.name} was out of reach; what it was doing is lost")
        self.is_lost = isinstance(self._answer, WorkerLostError)
        return True

    def lose(self, reason: str) -> None:
        """Make its next `receive` raise WorkerLostError."""
        self._answer, self.is_lost = WorkerLostError(f"{self.name}: {reason}"), True

    def receive(self, now_s: float) -> None:
        answer, self._answer = self._answer, None
        is_probe, self._pending = self._pending is None, None
        self.called_s = self._last_beat_s = None
        if isinstance(answer, RlmuxError):
            raise answer
        self.pid, self._probed_s = answer.pid, time.monotonic()
        if answer.error is not None:
            raise answer.error
        if is_probe:
            return
        _, then = self._calls.popleft()
        if self._calls:
            self._send(now_s)
        then(answer.value)

    def is_overdue(self, now_s: float) -> bool:
        if self._last_beat_s is None:
            return False
        if self.called_s is not None and now_s > self.called_s + min(PROBE_EVERY_S, self.call_limit_s / 2):
            self._probe_for_life(now_s)
        return now_s > self._last_beat_s + self.call_limit_s

    def activity(self) -> Activity | None:
        """Activity of its process at the last probe; None before a call's first probe."""
        return self._activity

    def _probe_for_life(self, now_s: float) -> None:
        """Probe the process's activity and its call's signs of life, which the actor reports during a call."""
        if self._beat_probe is None:
            if now_s - self._beat_probed_s >= min(PROBE_EVERY_S, self.call_limit_s / 8):
                self._beat_probe, self._beat_probed_s = self.actor.is_there.remote(), now_s
            return
        ready, _ = ray.wait([self._beat_probe], timeout=0)
        if not ready:
            return
        self._beat_probe = None
        with contextlib.suppress(ray.exceptions.RayError):  # the call's own answer has the error
            seen = ray.get(ready[0])
            self._activity = seen.activity
            if seen.num_beats > self.num_beats:
                self.num_beats, self._last_beat_s = seen.num_beats, now_s

    def end(self, *, finishes_checkpoint: bool = False) -> None:
        leaving = self._leave("end", finishes_checkpoint)
        if finishes_checkpoint and self.pid is not None and not self._is_node_lost(self.node):
            ray.wait([leaving], timeout=_CHECKPOINT_LIMIT_S, fetch_local=False)

    def kill(self) -> None:
        """End it now. The call waits for a trainer, which may be writing a checkpoint for its successor."""
        leaving = self._leave("kill")
        if self.is_trainer and self.pid is not None and not self._is_node_lost(self.node):
            ray.wait([leaving], timeout=_KILL_LIMIT_S, fetch_local=False)

    def _leave(self, how: str, *args: Any) -> ray.ObjectRef[Any]:
        leaving: ray.ObjectRef[Any] = getattr(self.actor, how).remote(*args)
        self._on_end(self, leaving)
        return leaving


def _first_line(error: BaseException | None) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
