"""A process that several pipelines share, each through a worker of its own.

    spawn(..., tenancy=key) ─▶ Tenant "a" ─┐ call: queued here
    spawn(..., tenancy=key) ─▶ Tenant "b" ─┼─▶ SharedProcess ── serve(left, calls) ──▶ one process: the host
                                           │        at most one call of each tenant
              Tenant.receive ◀─────────────┴─────── a result or an error for each ◀───┘

Workers of one tenancy on one device are tenants of one process. Calls that have come together by the controller's next
wait leave in one `serve`. A tenant that is ended leaves with the next `serve`; the process ends with its last tenant. A
process that dies or is overdue is lost for all of them.

Invariant: a tenant is a `Worker` like any other: one call at a time, answered in order. No call waits for a tenant that
has left.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rlmux.core.errors import RlmuxError, WorkerLostError
from rlmux.core.model import DeviceId, NodeId
from rlmux.runtime.backend import DeviceParts
from rlmux.runtime.workers.heartbeat import Activity
from rlmux.runtime.workers.worker_pool import Worker, Workplace

_Key = tuple[str, DeviceId | None, float]
"""Tenancy, device, and limit of a call in seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantCall:
    """One call of a tenant, as the host gets it."""

    tenant: str
    method: str
    args: tuple[Any, ...]
    joins: tuple[Any, ...]
    """Arguments with which the tenant joins, where it has not."""
    log_path: Path
    """The log of the tenant's pipeline."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantResult:
    """The answer to a TenantCall."""

    value: Any = None
    error: RlmuxError | None = None


class SharedProcess:
    """One process, its tenants, and the calls that wait for it."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self.tenants: dict[str, Tenant] = {}
        self.error: WorkerLostError | None = None
        """How it was lost; None while it serves."""
        self.is_forgotten = False
        """Whether the workplace watches it no more; it ends next."""
        self.is_over = False
        self._left: list[str] = []
        """Tenants that left since the last `serve`."""
        self._serving: list[Tenant] | None = None
        """Tenants of the present `serve`; None between two."""

    def serves(self, tenant: Tenant) -> bool:
        """Whether a call of the tenant is being carried out."""
        return self._serving is not None and tenant in self._serving

    def leave(self, tenant: Tenant) -> None:
        """End a tenant; waits for nothing."""
        if self.tenants.get(tenant.key) is tenant:
            del self.tenants[tenant.key]
            if tenant.has_joined:
                self._left.append(tenant.key)

    def send(self, now_s: float) -> None:
        """Send the calls that wait, if the process is free."""
        callers = [tenant for tenant in self.tenants.values() if tenant.calls and tenant.result is None]
        if self._serving is not None or self.error is not None or not (callers or self._left):
            return
        left, self._left, self._serving = self._left, [], callers
        for tenant in callers:
            tenant.has_joined = True
        with contextlib.suppress(WorkerLostError):  # its pipe is closed: the next wait handles that
            self.worker.call(now_s, "serve", (left, [tenant.next_call() for tenant in callers]), self._distribute)

    def receive(self, now_s: float) -> None:
        """Handle an answer, a sign of life or the loss of the process."""
        try:
            self.worker.receive(now_s)
        except WorkerLostError as error:
            self.error = error
        except RlmuxError as error:
            self.error = WorkerLostError(f"{self.worker.name} failed: {error}")

    def _distribute(self, results: Sequence[TenantResult]) -> None:
        serving, self._serving = self._serving or [], None
        for tenant, result in zip(serving, results, strict=True):
            tenant.result = result

    @property
    def ready(self) -> list[Tenant]:
        """Tenants with an answer, or all of a lost process."""
        return [tenant for tenant in self.tenants.values() if self.error or tenant.result]


class Tenant:
    """One pipeline's worker in a shared process."""

    def __init__(self, name: str, process: SharedProcess, joins: tuple[Any, ...], log_path: Path) -> None:
        self.name = name
        self.key = name.partition("/")[0]
        """Name of the pipeline, and of the tenant in the host."""
        self.process = process
        self.pid = process.worker.pid
        """Id of the process, as of the last answer; an actor's is known by its first one."""
        self.has_joined = False
        """Whether a call of it was sent."""
        self.result: TenantResult | None = None
        """Answer to its present call that was not handled yet."""
        self.calls: deque[tuple[str, tuple[Any, ...], Callable[[Any], None]]] = deque()
        """The present call, if any, and those that wait."""
        self._joins, self._log_path = joins, log_path

    @property
    def address(self) -> str:
        return self.process.worker.address

    @property
    def call_limit_s(self) -> float:
        return self.process.worker.call_limit_s

    @property
    def num_beats(self) -> int:
        return self.process.worker.num_beats

    @property
    def called_s(self) -> float | None:
        return self.process.worker.called_s if self.process.serves(self) else None

    def next_call(self) -> TenantCall:
        """The call at the head of its queue."""
        method, args, _ = self.calls[0]
        return TenantCall(tenant=self.key, method=method, args=args, joins=self._joins, log_path=self._log_path)

    def call(self, now_s: float, method: str, args: tuple[Any, ...], then: Callable[[Any], None]) -> None:
        """Queue a call, which leaves at the next wait."""
        self.calls.append((method, args, then))

    def receive(self, now_s: float) -> None:
        """Handle the available answer. Raises what the method raised, WorkerLostError if the process is gone."""
        result, self.result = self.result, None
        if result is None:
            if self.process.error is not None:
                raise self.process.error
            return
        self.pid = self.process.worker.pid
        _, _, then = self.calls.popleft()
        if result.error is not None:
            raise result.error
        then(result.value)

    def is_overdue(self, now_s: float) -> bool:
        """Whether the process is: it is then lost for all of its tenants."""
        is_overdue = self.process.worker.is_overdue(now_s)
        if is_overdue and self.process.error is None:
            self.process.error = WorkerLostError(f"{self.process.worker.name} gave no answer in time")
        return is_overdue

    def activity(self) -> Activity | None:
        return self.process.worker.activity()

    def end(self, *, finishes_checkpoint: bool = False) -> None:
        self._end(partial(self.process.worker.end, finishes_checkpoint=finishes_checkpoint))

    def kill(self) -> None:
        self._end(self.process.worker.kill)

    def _end(self, end: Callable[[], None]) -> None:
        """End the process of the last tenant, or a lost one."""
        if self.process.is_forgotten and not self.process.is_over:
            self.process.is_over = True
            end()


class TenantWorkplace:
    """A workplace whose workers may be tenants of one process."""

    def __init__(self, workplace: Workplace, now_s: Callable[[], float]) -> None:
        self.bases = workplace.bases
        self._workplace = workplace
        self._now_s = now_s
        self._processes: dict[_Key, SharedProcess] = {}
        """Processes that new tenants can join."""
        self._process_by_worker: dict[Worker, SharedProcess] = {}

    @property
    def parts(self) -> Mapping[DeviceId, DeviceParts]:
        return self._workplace.parts

    def spawn(
        self,
        name: str,
        make_worker: Callable[..., Any],
        args: tuple[Any, ...],
        *,
        device: DeviceId | None,
        log_path: Path,
        call_limit_s: float,
        tenancy: str | None = None,
    ) -> Worker:
        """Start a worker. `tenancy`: it is a tenant, which joins with `args`, and `make_worker` makes the host."""
        if tenancy is None:
            return self._workplace.spawn(
                name, make_worker, args, device=device, log_path=log_path, call_limit_s=call_limit_s
            )
        key = tenancy, device, call_limit_s
        process = self._processes.get(key)
        if process is None or process.error is not None:
            shared_name = f"shared/{name.partition('/')[2]}"
            worker = self._workplace.spawn(
                shared_name, make_worker, (), device=device, log_path=log_path, call_limit_s=call_limit_s
            )
            process = self._processes[key] = self._process_by_worker[worker] = SharedProcess(worker)
        tenant = Tenant(name, process, args, log_path)
        process.tenants[tenant.key] = tenant
        return tenant

    def wait(self, timeout_s: float) -> Sequence[Worker]:
        """Workers that have answered or died, after the calls of tenants have left."""
        for process in self._process_by_worker.values():
            process.send(self._now_s())
        is_any_lost = any(process.ready for process in self._process_by_worker.values())
        ready: list[Worker] = []
        for worker in self._workplace.wait(0.0 if is_any_lost else timeout_s):
            process_of = self._process_by_worker.get(worker)
            if process_of is None:
                ready.append(worker)
            else:
                process_of.receive(self._now_s())
        return ready + [tenant for process in self._process_by_worker.values() for tenant in process.ready]

    def wake(self) -> None:
        self._workplace.wake()

    def senders(self, trainers: Sequence[Worker]) -> Sequence[int]:
        return self._workplace.senders(trainers)

    def deliver(
        self, path: Path, senders: Sequence[Worker], receivers: Sequence[Worker], then: Callable[[], None]
    ) -> None:
        self._workplace.deliver(path, senders, [_process_of(worker) for worker in receivers], then)

    def forget(self, worker: Worker) -> None:
        if not isinstance(worker, Tenant):
            self._workplace.forget(worker)
            return
        process = worker.process
        process.leave(worker)
        is_ending = not process.tenants or process.error is not None
        if is_ending and not process.is_forgotten:
            process.is_forgotten = True
            self._processes = {key: each for key, each in self._processes.items() if each is not process}
            self._workplace.forget(process.worker)
        if not process.tenants:
            del self._process_by_worker[process.worker]

    def node_changes(self) -> Sequence[tuple[NodeId, bool]]:
        return self._workplace.node_changes()

    def close(self) -> None:
        self._workplace.close()


def _process_of(worker: Worker) -> Worker:
    return worker.process.worker if isinstance(worker, Tenant) else worker
