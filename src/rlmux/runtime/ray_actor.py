"""What runs in an actor's process: a worker behind one method, and the carrying of bytes that no file can do.

    answer(call)   begin_step     its batch comes as an object
                   finish_step    its batch leaves as an object
                   publish        across machines, the weights leave as an object
                   run_chunk      across machines, they come as one, and lie in this machine's memory while loaded
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import socket
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import ray

from rlmux.core.errors import RlmuxError
from rlmux.runtime.processes import portable_error, write_output_to
from rlmux.runtime.workers import RolloutChunk, StepBatch

_MEMORY = Path("/dev/shm")


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeProbe:
    """What a Ray node says of itself."""

    machine: str
    version: str
    cores: tuple[int, ...]


def probe_node() -> NodeProbe:
    """Of the node that this runs on."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    machine = boot.read_text().strip() if boot.exists() else socket.gethostname()
    namespace = os.stat(_MEMORY).st_dev if _MEMORY.exists() else 0
    cores = tuple(sorted(os.sched_getaffinity(0))) if hasattr(os, "sched_getaffinity") else ()
    return NodeProbe(machine=f"{machine}/{namespace}", version=version("rlmux"), cores=cores)


@dataclass(frozen=True, slots=True, kw_only=True)
class RayWorkerSetup:
    """How to become a worker."""

    make_worker: Callable[..., Any]
    args: tuple[Any, ...]
    cores: tuple[int, ...]
    log_path: Path
    search_path: tuple[str, ...]
    """Where the controller finds modules: reward functions lie there."""
    is_sharing_memory: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One call of a worker's method."""

    method: str
    args: tuple[Any, ...]

    @property
    def weights(self) -> tuple[Path, ...]:
        """Files of weights that it reads or writes."""
        match self.method, self.args:
            case "publish", (Path() as path,):
                return (path,)
            case "run_chunk", (RolloutChunk(weights=(path, _)),):
                return (path,)
        return ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a call came to."""

    pid: int
    value: Any = None
    error: RlmuxError | None = None
    weights: ray.ObjectRef[Any] | None = None
    """Published ones, where no file can carry them."""


class RayWorkerActor:
    """A worker. It is made at its first call, so that its own failure to start is an answer."""

    def __init__(self, setup: RayWorkerSetup) -> None:
        self._setup = setup
        self._worker: Any = None
        sys.path += [folder for folder in setup.search_path if folder not in sys.path]
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # devices are cores here, whatever the machine has
        os.umask(0o077)
        if setup.cores and hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(0, setup.cores)
        setup.log_path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_output_to(str(setup.log_path))
        faulthandler.enable()

    def is_there(self) -> bool:
        """Comes after whatever call was under way."""
        return True

    def answer(self, call: Call, weights: Sequence[ray.ObjectRef[Any]]) -> Answer:
        pid = os.getpid()
        try:
            if self._worker is None:
                self._worker = self._setup.make_worker(*self._setup.args)
            return self._carry_out(call, weights, pid)
        except (Exception, SystemExit) as error:  # what user code raises is one pipeline's fault
            traceback.print_exc()
            return Answer(pid=pid, error=portable_error(error))

    def _carry_out(self, call: Call, weights: Sequence[ray.ObjectRef[Any]], pid: int) -> Answer:
        args = tuple(ray.get(arg) if isinstance(arg, ray.ObjectRef) else arg for arg in call.args)
        if self._setup.is_sharing_memory:
            for path in call.weights:
                path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            return Answer(pid=pid, value=_by_reference(getattr(self._worker, call.method)(*args)))
        if call.method == "publish":
            with _own_file() as path:
                value = self._worker.publish(path)
                return Answer(pid=pid, value=value, weights=ray.put(path.read_bytes()))
        if weights:
            (chunk,) = args
            with _own_file() as path:
                path.write_bytes(ray.get(weights[0]))
                return Answer(pid=pid, value=self._worker.run_chunk(replace(chunk, weights=(path, chunk.weights[1]))))
        return Answer(pid=pid, value=_by_reference(getattr(self._worker, call.method)(*args)))


def _by_reference(value: Any) -> Any:
    """A batch stays on this node until the trainer fetches it."""
    if not isinstance(value, StepBatch):
        return value
    payload: Any = ray.put(value.payload)
    return replace(value, payload=payload)


@contextlib.contextmanager
def _own_file() -> Iterator[Path]:
    """In this machine's memory, for as long as it takes."""
    parent = _MEMORY if os.access(_MEMORY, os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="rlmux-", dir=parent) as folder:
        yield Path(folder) / "weights.safetensors"
