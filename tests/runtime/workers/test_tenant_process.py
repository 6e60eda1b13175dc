"""A process that several pipelines share: which calls leave together, and where each result and loss arrives."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from rlmux.core.errors import PipelineError, WorkerLostError
from rlmux.core.model import DeviceId
from rlmux.runtime.workers.tenant_process import TenantResult, TenantWorkplace

DEVICE = DeviceId("rollout", 0, 0)


class Process:
    """Stands in for a process: keeps its calls until a test answers."""

    pid = 7
    address = "127.0.0.1"
    call_limit_s = 60.0
    num_beats = 0

    def __init__(self, name: str) -> None:
        self.name = name
        self.called_s: float | None = None
        self.calls: list[tuple[list[str], list[tuple[str, str, tuple[Any, ...]]], Any]] = []
        self.answers: list[Sequence[TenantResult]] = []
        self.is_lost = self.hangs = False
        self.ended: list[str] = []

    def call(self, now_s: float, method: str, args: tuple[Any, ...], then: Any) -> None:
        assert method == "serve"
        left, calls = args
        self.called_s = now_s
        self.calls.append((left, [(one.tenant, one.method, one.args) for one in calls], then))

    def receive(self, now_s: float) -> None:
        if self.is_lost:
            raise WorkerLostError(f"{self.name} is gone (killed by SIGKILL)")
        if self.answers:
            self.called_s = None
            self.calls[-1][2](self.answers.pop())

    def is_overdue(self, now_s: float) -> bool:
        return self.hangs

    def activity(self) -> None:
        return None

    def end(self, *, finishes_checkpoint: bool = False) -> None:
        self.ended.append("end")

    def kill(self) -> None:
        self.ended.append("kill")


class Workplace:
    bases = None

    def __init__(self) -> None:
        self.processes: list[Process] = []
        self.ready: list[Process] = []
        self.forgotten: list[Process] = []

    def spawn(self, name: str, make_worker: Any, args: tuple[Any, ...], **where: Any) -> Process:
        self.processes.append(Process(name))
        return self.processes[-1]

    def wait(self, timeout_s: float) -> list[Process]:
        ready, self.ready = self.ready, []
        return ready

    def forget(self, worker: Process) -> None:
        self.forgotten.append(worker)


class Room:
    """Tenants of one process, and the results that each got."""

    def __init__(self, *names: str) -> None:
        self.workplace = Workplace()
        self.places = TenantWorkplace(self.workplace, lambda: 1.0)  # type: ignore[arg-type]
        self.got: dict[str, list[Any]] = {}
        self.tenants = {name: self.spawn(name) for name in names}
        self.process = self.workplace.processes[0]

    def spawn(self, name: str, tenancy: str | None = "base", device: DeviceId = DEVICE) -> Any:
        self.got.setdefault(name, [])
        return self.places.spawn(
            f"{name}/rollout-0",
            object,
            (name,),
            device=device,
            log_path=Path("log"),
            call_limit_s=60.0,
            tenancy=tenancy,
        )

    def call(self, name: str, method: str = "run_chunk") -> None:
        self.tenants[name].call(1.0, method, (), self.got[name].append)

    def answer(self, *results: TenantResult) -> list[Any]:
        """Answer the present call; the tenants that are ready then."""
        self.process.answers.append(results)
        self.workplace.ready.append(self.process)
        return list(self.places.wait(0.0))

    def sent(self) -> list[tuple[list[str], list[tuple[str, str]]]]:
        """What left so far: tenants that left, and (tenant, method) of each call."""
        return [(left, [(tenant, method) for tenant, method, _ in calls]) for left, calls, _ in self.process.calls]


def test_workers_of_one_tenancy_on_one_device_share_a_process():
    room = Room("a", "b")
    room.spawn("c", tenancy="another base")
    room.spawn("d", device=DeviceId("rollout", 1, 0))
    plain = room.spawn("e", tenancy=None)
    assert [one.name for one in room.workplace.processes] == [*["shared/rollout-0"] * 3, "e/rollout-0"]
    assert plain is room.workplace.processes[-1]
    assert room.tenants["a"].pid == room.tenants["b"].pid == 7


def test_calls_that_came_together_leave_together_at_the_next_wait_one_of_each_tenant():
    room = Room("a", "b", "c")
    for name in ("a", "a", "b"):
        room.call(name)
    assert not room.sent()
    room.places.wait(0.0)
    assert room.sent() == [([], [("a", "run_chunk"), ("b", "run_chunk")])]
    assert [room.tenants[name].called_s for name in "abc"] == [1.0, 1.0, None]
    room.call("c")
    room.places.wait(0.0)
    assert len(room.sent()) == 1, "the process is busy"
    for tenant in room.answer(TenantResult(value=1), TenantResult(value=2)):
        tenant.receive(1.0)
    assert room.got == {"a": [1], "b": [2], "c": []}
    room.places.wait(0.0)
    assert room.sent()[1] == ([], [("a", "run_chunk"), ("c", "run_chunk")])


def test_an_error_of_a_tenants_call_is_raised_for_that_tenant_alone():
    room = Room("a", "b")
    room.call("a")
    room.call("b")
    room.places.wait(0.0)
    a, b = room.answer(TenantResult(error=PipelineError("not finite")), TenantResult(value=2))
    with pytest.raises(PipelineError, match="not finite"):
        a.receive(1.0)
    b.receive(1.0)
    assert room.got == {"a": [], "b": [2]}


def test_a_tenant_leaves_without_waiting_and_its_answer_is_dropped():
    room = Room("a", "b")
    room.call("a")
    room.call("b")
    room.places.wait(0.0)
    room.places.forget(room.tenants["a"])
    room.tenants["a"].kill()
    room.call("b")
    assert room.answer(TenantResult(value=1), TenantResult(value=2)) == [room.tenants["b"]]
    room.tenants["b"].receive(1.0)
    room.places.wait(0.0)
    assert room.sent()[1] == (["a"], [("b", "run_chunk")])
    assert room.got == {"a": [], "b": [2]}
    assert not room.process.ended


def test_a_tenant_leaves_and_its_successor_joins_in_one_call():
    room = Room("a", "b")
    room.call("a")
    room.places.wait(0.0)
    room.places.forget(room.tenants["a"])
    room.tenants["a"].end()
    room.tenants["a"] = room.spawn("a")
    room.call("a", "build")
    room.answer(TenantResult(value=1))
    room.places.wait(0.0)
    assert room.sent()[1] == (["a"], [("a", "build")])


def test_the_process_ends_with_its_last_tenant():
    room = Room("a", "b")
    for name, ends in (("a", []), ("b", ["kill"])):
        room.places.forget(room.tenants[name])
        room.tenants[name].kill()
        assert room.process.ended == ends
    assert room.workplace.forgotten == [room.process]
    assert room.spawn("a").process.worker is not room.process


def test_a_process_that_dies_is_lost_for_each_of_its_tenants_and_replaced_once():
    room = Room("a", "b")
    room.call("a")
    room.places.wait(0.0)
    room.process.is_lost = True
    room.workplace.ready.append(room.process)
    ready = list(room.places.wait(0.0))
    assert ready == list(room.tenants.values())
    successors = []
    for tenant in ready:
        with pytest.raises(WorkerLostError, match="SIGKILL"):
            tenant.receive(1.0)
        room.places.forget(tenant)
        tenant.kill()
        successors.append(room.spawn(tenant.key))
    assert room.process.ended == ["kill"]
    assert room.workplace.forgotten == [room.process]
    assert {one.process.worker for one in successors} == {room.workplace.processes[1]}
    assert not room.places.wait(0.0)


def test_an_overdue_process_is_killed_and_lost_for_tenants_without_a_call_too():
    room = Room("a", "b")
    room.call("a")
    room.places.wait(0.0)
    room.process.hangs = True
    assert room.tenants["a"].is_overdue(100.0)
    room.places.forget(room.tenants["a"])
    room.tenants["a"].kill()
    assert room.process.ended == ["kill"]
    assert list(room.places.wait(0.0)) == [room.tenants["b"]]
    with pytest.raises(WorkerLostError, match="no answer in time"):
        room.tenants["b"].receive(1.0)
