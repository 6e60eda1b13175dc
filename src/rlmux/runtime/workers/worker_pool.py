"""The backend's interface to workers: processes of this machine, or actors of a cluster.

call(method, args, then) ──▶ worker        one call at a time, answered in order; further ones queue
receive()                ──▶ then(result)  or raises what the method raised; or handles a sign of life
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from rlmux.core.model import DeviceId, NodeId
from rlmux.runtime.backend import DeviceParts
from rlmux.runtime.workers.heartbeat import Activity


class Worker(Protocol):
    """One worker: bounded calls, answered in order."""

    name: str

    @property
    def pid(self) -> int | None:
        """Its process id; None until it is known."""

    @property
    def address(self) -> str:
        """Its machine, as workers of the same pipeline reach it."""

    @property
    def call_limit_s(self) -> float:
        """Seconds within which each call must be answered, or show that it lives."""

    @property
    def num_beats(self) -> int:
        """Signs of life of its calls so far."""

    @property
    def called_s(self) -> float | None:
        """Time at which its present call was sent; None between calls."""

    def call(self, now_s: float, method: str, args: tuple[Any, ...], then: Callable[[Any], None]) -> None:
        """Call a method; `then` gets the result. Raises WorkerLostError if the worker is gone."""

    def receive(self, now_s: float) -> None:
        """Handle the available answer. Raises what the method raised, WorkerLostError if the worker is gone."""

    def is_overdue(self, now_s: float) -> bool:
        """Whether it has neither answered nor shown life within its limit."""

    def activity(self) -> Activity | None:
        """Activity of its process; None if unknown."""

    def end(self, *, finishes_checkpoint: bool = False) -> None:
        """End it after its present call, or after the checkpoint that it is writing."""

    def kill(self) -> None:
        """End it now."""


class Workplace(Protocol):
    """The place where workers live."""

    bases: Path | None
    """Folder in shared memory for the frozen bases of adapters; None with several machines, which each have one."""

    @property
    def parts(self) -> Mapping[DeviceId, DeviceParts]:
        """What of this machine each device is; empty with several machines."""

    def spawn(
        self,
        name: str,
        make_worker: Callable[..., Any],
        args: tuple[Any, ...],
        *,
        device: DeviceId | None,
        log_path: Path,
        call_limit_s: float,
    ) -> Worker:
        """Start a worker, pinned to its device."""

    def wait(self, timeout_s: float) -> Sequence[Worker]:
        """Workers that have answered or died, waiting for the first."""

    def wake(self) -> None:
        """Make the present or next `wait` return soon. May be called from any thread."""

    def senders(self, trainers: Sequence[Worker]) -> Sequence[int]:
        """Ranks of a pipeline's trainers that write its weights, to send parts of them: one a machine, rank 0 first."""

    def deliver(
        self, path: Path, senders: Sequence[Worker], receivers: Sequence[Worker], then: Callable[[], None]
    ) -> None:
        """Deliver the senders' weights to the receivers, then call `then`; never waits."""

    def forget(self, worker: Worker) -> None:
        """Stop watching a worker that is about to be ended."""

    def node_changes(self) -> Sequence[tuple[NodeId, bool]]:
        """(node, whether it is present) for every node that left or joined since the last call."""

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Neighbour:
    """Another run that has devices of this one."""

    pid: int
    folder: str
    devices: Sequence[str]
    """Devices that both have, such as `core 0`."""
    is_computing: bool = True
    """Whether it had workers there when it was seen; a lane without a pipeline has none."""

    def __str__(self) -> str:
        which = f"{', '.join(self.devices)}: pid {self.pid}"
        if self.is_computing:
            return f"{which} computes there too ({self.folder}): both runs take longer, with the same results"
        return (
            f"{which} has a lane or run there too ({self.folder}), idle now: while both compute, both take longer, "
            "with the same results"
        )
