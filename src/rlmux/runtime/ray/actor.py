"""A Ray actor around a worker process (`processes.py`), and the transport of bytes that cannot go through files. The
actor only forwards calls; it ends with its worker, and the worker with it.

answer(call)   finish_step    its batch leaves as an object
               run_stage      a step's batch comes as such an object
                              across machines, the weights go to a file in this node's own memory
               run_chunk      across machines, they are read from such a file, delivered before (`weight_delivery.py`)
"""

from __future__ import annotations

import contextlib
import os
import pickle
import socket
import sys
import threading
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import ray

from rlmux.core.errors import RlmuxError, WorkerLostError
from rlmux.runtime.workers.heartbeat import Activity
from rlmux.runtime.workers.processes import WorkerProcess, borrow_fork_server, portable_error, warm_up
from rlmux.runtime.workers.worker_calls import HandOut, RolloutChunk, StepBatch, TrainCall

_MEMORY = Path("/dev/shm")


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeProbe:
    """A Ray node's description of itself."""

    machine: str
    """Name of its machine, or of its container where that has a shared memory of its own."""
    versions: tuple[str, str]
    """Of rlmux and torch, without the build (2.9.0+cpu is 2.9.0); "none" for a package that is not installed."""
    cores: tuple[int, ...]


def probe_node() -> NodeProbe:
    """Describe the node that this runs on."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    machine = boot.read_text().strip() if boot.exists() else socket.gethostname()
    namespace = os.stat(_MEMORY).st_dev if _MEMORY.exists() else 0
    cores = tuple(sorted(os.sched_getaffinity(0))) if hasattr(os, "sched_getaffinity") else ()
    versions = _version_of("rlmux"), _version_of("torch")
    return NodeProbe(machine=f"{machine}/{namespace}", versions=versions, cores=cores)


def _version_of(package: str) -> str:
    """By the package's metadata: an import of torch takes seconds."""
    try:
        return version(package).partition("+")[0]
    except PackageNotFoundError:
        return "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class RayWorkerSetup:
    """How to start a worker."""

    name: str
    work: bytes
    """(worker factory, its arguments), pickled, since they may name modules on the search path."""
    cores: tuple[int, ...]
    has_gpu: bool
    """Whether its device is of GPUs."""
    log_path: Path
    search_path: tuple[str, ...]
    """Folders in which the controller finds modules; reward functions lie there."""
    weights: tuple[Path, Path] | None
    """(the controller's folder of weights, the folder on this node), where they differ."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One call of a worker's method."""

    method: str
    args: tuple[Any, ...]

    def with_weights_in(self, theirs: Path, here: Path) -> Call:
        """The call, with paths of weights on this node."""

        def moved(path: Path) -> Path:
            return here / path.relative_to(theirs) if path.is_relative_to(theirs) else path

        match self.method, self.args:
            case "run_stage", (TrainCall(hand_out=HandOut() as hand_out) as call,):
                weights = moved(hand_out.weights)
                weights.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                return replace(self, args=(replace(call, hand_out=replace(hand_out, weights=weights)),))
            case "run_chunk", (RolloutChunk(weights=(path, version)) as chunk,):
                return replace(self, args=(replace(chunk, weights=(moved(path), version)),))
        return self

    def with_batch(self) -> Call:
        """The call, with its batch as bytes instead of a reference."""
        args = [_fetched(arg) if isinstance(arg, TrainCall) else arg for arg in self.args]
        return replace(self, args=tuple(args))


@dataclass(frozen=True, slots=True, kw_only=True)
class CallReply:
    """The result of a call."""

    pid: int | None
    """Process id of the worker; None where it could not be started."""
    value: Any = None
    error: RlmuxError | None = None
    num_beats: int = 0
    """Signs of life of the worker's calls so far."""
    activity: Activity | None = None
    """Activity of its process; None if unknown."""


class RayWorkerActor:
    """A worker process and its calls, one at a time; probes and the end run on other threads."""

    def __init__(self, setup: RayWorkerSetup, fork_server: str, gpus: str | None = None) -> None:
        """`fork_server`: address of the machine's fork server. `gpus`: of a device that has several; else Ray's."""
        self._setup = setup
        self._gpus = os.environ.get("CUDA_VISIBLE_DEVICES", "") if gpus is None else gpus
        self._process: WorkerProcess | None = None
        self._calling = threading.Lock()
        sys.path += [folder for folder in setup.search_path if folder not in sys.path]
        os.umask(0o077)
        setup.log_path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if os.access(fork_server, os.W_OK):
            borrow_fork_server(fork_server)
        else:  # another user's server: start one here, which has to import torch first
            warm_up()
        with contextlib.suppress(Exception):  # the first call raises the error
            self._start()

    def _start(self) -> WorkerProcess:
        setup = self._setup
        if self._process is None:
            self._process = WorkerProcess(
                setup.name,
                *pickle.loads(setup.work),
                cores=setup.cores,
                # No device, or one that is a core: no GPU is seen, whatever the machine has.
                gpu=self._gpus if setup.has_gpu else "",
                log_path=setup.log_path,
                call_limit_s=float("inf"),  # the controller keeps the limit
            )
        return self._process

    def is_there(self) -> CallReply:
        """Probe the worker: an error if it has died, else the signs of life of its present call."""
        process = self._process
        ending = process.ending() if process else None
        error = WorkerLostError(f"{self._setup.name} is gone ({ending})") if ending else None
        if process is None:
            return CallReply(pid=None, error=error)
        return CallReply(pid=process.pid, error=error, num_beats=process.num_beats, activity=process.activity())

    def answer(self, call: Call) -> CallReply:
        pid = None
        try:
            with self._calling:
                process = self._start()
                pid = process.pid
                return CallReply(pid=pid, value=_by_reference(self._call_process(process, call)))
        except Exception as error:  # what user code raises is one pipeline's fault
            return CallReply(pid=pid, error=portable_error(error))

    def _call_process(self, process: WorkerProcess, call: Call) -> Any:
        if self._setup.weights is not None:
            call = call.with_weights_in(*self._setup.weights)
        call = call.with_batch()
        answers: list[Any] = []
        process.call(0.0, call.method, call.args, answers.append)
        while not answers:
            wait([process.connection])
            process.receive(0.0)
        return answers[0]

    def end(self, finishes_checkpoint: bool = False) -> None:
        """Leave after the present call, or after the checkpoint that is being written."""
        with self._calling:
            self._leave(finishes_checkpoint=finishes_checkpoint)

    def kill(self) -> None:
        """Leave now."""
        self._leave(is_urgent=True)

    def _leave(self, *, is_urgent: bool = False, finishes_checkpoint: bool = False) -> None:
        if self._process is not None:
            self._process.kill() if is_urgent else self._process.end(finishes_checkpoint=finishes_checkpoint)
        leave: Any = ray.actor.exit_actor
        leave()


def _fetched(call: TrainCall) -> TrainCall:
    payload: Any = call.payload
    return replace(call, payload=ray.get(payload)) if isinstance(payload, ray.ObjectRef) else call


def _by_reference(value: Any) -> Any:
    """A batch stays on this node until the trainer fetches it."""
    if not isinstance(value, StepBatch):
        return value
    payload: Any = ray.put(value.payload)
    return replace(value, payload=payload)
