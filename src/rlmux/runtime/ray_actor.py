"""What runs in an actor's process: a worker behind one method, and the carrying of bytes that no file can do.

answer(call)   begin_step     its batch comes as an object
               finish_step    its batch leaves as an object
               publish        across machines, the weights go to a file in this node's own memory
               run_chunk      across machines, they are read from such a file, delivered before (`ray_sync.py`)
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import os
import socket
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import ray

from rlmux.core.errors import RlmuxError
from rlmux.runtime.processes import portable_error, write_output_to
from rlmux.runtime.workers import RolloutChunk, StepBatch

_MEMORY = Path("/dev/shm")
_PRELOAD = "rlmux.runtime.preload"
"""Takes seconds: all workers of a pipeline do it at once, while the first of them are not needed yet."""


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
    has_gpu: bool
    """Ray has named it in CUDA_VISIBLE_DEVICES."""
    log_path: Path
    search_path: tuple[str, ...]
    """Where the controller finds modules: reward functions lie there."""
    weights: tuple[Path, Path] | None
    """Where the controller's folder of weights is another one here: (its, the one on this node)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One call of a worker's method."""

    method: str
    args: tuple[Any, ...]

    def with_weights_in(self, theirs: Path, here: Path) -> Call:
        """With the files of weights that it names where they are on this node."""

        def moved(path: Path) -> Path:
            return here / path.relative_to(theirs) if path.is_relative_to(theirs) else path

        match self.method, self.args:
            case "publish", (Path() as path,):
                moved(path).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                return replace(self, args=(moved(path),))
            case "run_chunk", (RolloutChunk(weights=(path, version)) as chunk,):
                return replace(self, args=(replace(chunk, weights=(moved(path), version)),))
        return self


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a call came to."""

    pid: int
    value: Any = None
    error: RlmuxError | None = None


class RayWorkerActor:
    """A worker. It is made at its first call, so that its own failure to start is an answer."""

    def __init__(self, setup: RayWorkerSetup) -> None:
        self._setup = setup
        self._worker: Any = None
        sys.path += [folder for folder in setup.search_path if folder not in sys.path]
        if not setup.has_gpu:
            os.environ["CUDA_VISIBLE_DEVICES"] = ""  # its device is a core, whatever the machine has
        os.umask(0o077)
        if setup.cores and hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(0, setup.cores)
        setup.log_path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_output_to(str(setup.log_path))
        faulthandler.enable()
        with contextlib.suppress(Exception):  # the first call says what is wrong
            importlib.import_module(_PRELOAD)

    def is_there(self) -> bool:
        """Comes after whatever call was under way."""
        return True

    def answer(self, call: Call) -> Answer:
        pid = os.getpid()
        try:
            if self._worker is None:
                self._worker = self._setup.make_worker(*self._setup.args)
            if self._setup.weights is not None:
                call = call.with_weights_in(*self._setup.weights)
            args = [ray.get(arg) if isinstance(arg, ray.ObjectRef) else arg for arg in call.args]
            return Answer(pid=pid, value=_by_reference(getattr(self._worker, call.method)(*args)))
        except (Exception, SystemExit) as error:  # what user code raises is one pipeline's fault
            traceback.print_exc()
            return Answer(pid=pid, error=portable_error(error))


def _by_reference(value: Any) -> Any:
    """A batch stays on this node until the trainer fetches it."""
    if not isinstance(value, StepBatch):
        return value
    payload: Any = ray.put(value.payload)
    return replace(value, payload=payload)
