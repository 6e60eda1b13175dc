"""Futures of requests: their waiters, and the conversion of engine results.

expect(id, future) ─▶ settle(id, value or error) ─▶ ledger ─▶ all that wait
                      settle_all(...)             ─▶ one commit ─▶ all that wait
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rlmux.core.model import PipelineId
from rlmux.service.tinker.ledger import ERROR, PROTOBUF, SERVER_ERROR, Ledger, Result
from rlmux.service.tinker.registry import ClientSampler


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingFuture:
    """A request that has no result yet."""

    pipeline: PipelineId
    encode: Callable[[Any], Result]
    """The result for clients of what an engine answered."""
    project: str
    num_bytes: int = 0
    """Bytes of its body that are held until it is done."""
    sampler: ClientSampler | None = None
    """The sampler of a sampling request."""
    then: Callable[[bool], None] | None = None
    """Called before the result is delivered; True: the request was carried out."""


@dataclass(slots=True)
class PendingLoad:
    """What a project has without a result."""

    num_samples: int = 0
    """Sampling requests."""
    num_others: int = 0
    """Requests of models."""
    num_bytes: int = 0
    """Bytes of their bodies."""


class Futures:
    """Requests without a result; results are the ledger's."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._pending: dict[str, PendingFuture] = {}
        self._waiters: dict[str, list[Callable[[], None]]] = {}
        self._waiting: dict[str, PendingLoad] = {}

    @property
    def num_pending(self) -> int:
        """Requests without a result."""
        return len(self._pending)

    def __contains__(self, request_id: str) -> bool:
        """The request has no result yet."""
        return request_id in self._pending

    def expect(self, request_id: str, future: PendingFuture) -> None:
        """A request was taken. One that has its result already, from before a restart, has no future any more."""
        if self._ledger.result(request_id) is None:
            self._pending[request_id] = future
            self._count(future, 1)

    def then(self, request_id: str, call: Callable[[bool], None]) -> None:
        """Add a callback before the request's result is delivered; called at once for an existing result."""
        known = self._ledger.result(request_id)
        if known is not None:
            call(not known.is_error)
        elif request_id in self._pending:
            self._pending[request_id] = replace(self._pending[request_id], then=call)

    def result(self, request_id: str) -> Result | None:
        """The result of a request, once there is one. Raises KeyError for an id that was never given."""
        found = self._ledger.result(request_id)
        if found is None and request_id not in self._pending and self._ledger.project(request_id) is None:
            raise KeyError(request_id)
        return found

    def mark_delivered(self, request_id: str, result: Result) -> None:
        """A client gets this result."""
        if result.kind == PROTOBUF:
            self._ledger.mark_delivered(request_id, time.time())

    def when_settled(self, request_id: str, then: Callable[[], None]) -> None:
        """Call back once the request has a result."""
        self._waiters.setdefault(request_id, []).append(then)

    def forget_waiter(self, request_id: str, then: Callable[[], None]) -> None:
        """What was to be called back waits no more."""
        waiting = self._waiters.get(request_id, [])
        if then in waiting:
            waiting.remove(then)

    def waiting_of(self, project: str) -> PendingLoad:
        """What a project has without a result."""
        return self._waiting.setdefault(project, PendingLoad())

    def _count(self, future: PendingFuture, sign: int) -> None:
        waiting = self.waiting_of(future.project)
        waiting.num_bytes += sign * future.num_bytes
        if future.sampler is not None:
            waiting.num_samples += sign
        else:
            waiting.num_others += sign

    def samplers(self) -> list[ClientSampler]:
        """Samplers of requests without a result."""
        return [each.sampler for each in self._pending.values() if each.sampler is not None]

    def pending(self, request_id: str) -> PendingFuture | None:
        """What is known of a request without a result."""
        return self._pending.get(request_id)

    def of_pipeline(self, pipeline: PipelineId) -> list[str]:
        """Requests that wait for a pipeline."""
        return [each for each, future in self._pending.items() if future.pipeline == pipeline]

    def settle(self, request_id: str, value: Any, error: str | None) -> None:
        """What became of a request."""
        self.settle_all([(request_id, value, error, ERROR)])

    def settle_all(self, ended: Sequence[tuple[str, Any, str | None, str]]) -> None:
        """Results as (id, value, error, kind of error), written in one commit and then delivered."""
        results = {}
        for request_id, value, error, kind in ended:
            future = self._pending.pop(request_id, None)
            if future is None:  # done again after a restart
                continue
            self._count(future, -1)
            if future.then is not None:
                future.then(error is None)
            failed = None if error is None else Result(error.encode(), kind)
            results[request_id] = failed or future.encode(value)
        if results:
            self._keep(results)

    def skip(self, request_id: str, reason: str) -> None:
        """A request of the ledger cannot be applied any more: the reason is its result, unless it has one."""
        future = self._pending.pop(request_id, None)
        if future is not None:
            self._count(future, -1)
        self._ledger.settle(request_id, Result(reason.encode(), SERVER_ERROR))

    def fail_pipeline(self, pipeline: PipelineId, reason: str, kind: str = SERVER_ERROR) -> None:
        """Every future of a pipeline that is over is settled with the reason."""
        self.settle_all([(request_id, None, reason, kind) for request_id in self.of_pipeline(pipeline)])

    def _keep(self, results: Mapping[str, Result]) -> None:
        """Write results and notify all waiters."""
        with self._ledger.together():
            for request_id, result in results.items():
                self._ledger.settle(request_id, result)
        for request_id in results:
            for then in self._waiters.pop(request_id, []):
                then()
