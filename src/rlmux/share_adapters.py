"""Hooks that free a device's memory: torch, vLLM, SGLang, any process. Lies beside `share.py`, free to copy with it.

    torch_offload(model, optimizer)   hooks: parameters, buffers, gradients, optimizer state to host memory and back
    vllm_sleep(llm)                   hooks: an engine in this process sleeps and wakes
    http_sleep(url, "vllm"|"sglang")  hooks: the same for an engine behind HTTP
    cuda_checkpoint(pids)             hooks: all that processes have on their GPUs, by NVIDIA's tool of that name

Trainers have a file each that puts them into phases: share_trl.py, share_verl.py and so on.
Memory is given back by making the storage of tensors empty and filling it again: tensors, views of them and what
the optimizer refers to stay the objects they are. Storage that another owner shares (NumPy, a safetensors file, another
process) cannot be emptied; its tensors get other storage in its place, with one warning.
Python 3.9; torch and the frameworks are imported by the functions that need them.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import json
import os
import shutil
import socket
import subprocess
import urllib.parse
import urllib.request
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any


class TorchOffload:
    """Hooks that move tensors to host memory and back; see the module.

    `tensors` is called each time: an optimizer's state exists only after its first step.
    """

    def __init__(self, tensors: Callable[[], Iterable[Any]]) -> None:
        self._tensors = tensors
        self.rlmux_phases: list[str] = []
        """Phases of the program that bring the tensors back; `Job.on_leave` adds them."""
        self._classes: list[Any] = []
        """(tensor, its class) of all that is away."""
        self._away: list[Any] = []
        """(storage, its bytes on the host) of what was emptied; of what could not be, the tensors and their layouts in
        place of the storage."""
        self._buffers: dict[Any, Any] = {}
        """Host buffers kept for the next time, by device and size."""
        self._has_warned = False

    def resident_bytes(self) -> int:
        """Bytes on the device now."""
        return sum(storage.nbytes() for storage, _ in self._storages())

    def finish(self) -> None:
        """Wait for the device."""
        import torch

        if _has_cuda():
            torch.cuda.synchronize()

    def offload(self) -> int:
        """Copy everything to the host and free it. Where that fails, what was freed before comes back."""
        import torch

        freed_bytes, emptied = 0, []
        try:
            for storage, tensors in list(self._storages()):
                size = storage.nbytes()
                if size == 0:
                    continue
                host = self._host_buffer(storage)
                host.copy_(_bytes_of(storage))
                if storage.resizable():
                    self._away.append((storage, host))
                    storage.resize_(0)
                else:
                    self._warn_once(tensors)
                    self._away.append(
                        (
                            [(tensor, (tensor.storage_offset(), tensor.size(), tensor.stride())) for tensor in tensors],
                            host,
                        )
                    )
                    for tensor in tensors:
                        tensor.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
                freed_bytes += size
                emptied += tensors
        except BaseException:  # an interrupt, too, must not leave half a model away
            self.onload()
            raise
        if _has_cuda():
            torch.cuda.empty_cache()
        self._guard(emptied)
        return freed_bytes

    def _guard(self, tensors: list[Any]) -> None:
        """Have whatever reads these tensors raise: their memory is not there, and reading it would end the process."""
        import torch

        names = dict.fromkeys(self.rlmux_phases)
        phases = ", ".join(f"job.phase({name!r})" for name in names) or "a phase that has its pool"
        guards = {base: _away_class(base, phases) for base in (torch.Tensor, torch.nn.Parameter)}
        for tensor in tensors:
            if type(tensor) in guards:  # a subclass of others may read what it likes
                self._classes.append((tensor, type(tensor)))
                tensor.__class__ = guards[type(tensor)]

    def onload(self) -> None:
        """Bring everything back to where it was."""
        while self._classes:
            tensor, own_class = self._classes.pop()
            tensor.__class__ = own_class
        while self._away:
            place, host = self._away.pop()
            if isinstance(place, list):
                place = _new_storage(place, host.numel())
            else:
                place.resize_(host.numel())
            _bytes_of(place).copy_(host)
            self._buffers.setdefault((str(place.device), host.numel()), []).append(host)
        self.finish()

    def _storages(self) -> Iterator[tuple[Any, ...]]:
        """Each storage once, with the tensors that are views of it."""
        views: dict[Any, Any] = {}
        for tensor in self._tensors():
            storage = tensor.untyped_storage()
            views.setdefault(storage._cdata, (storage, []))[1].append(tensor)
        yield from views.values()

    def _host_buffer(self, storage: Any) -> Any:
        import torch

        kept = self._buffers.get((str(storage.device), storage.nbytes()))
        if kept:
            return kept.pop()
        return torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=storage.device.type == "cuda")

    def _warn_once(self, tensors: list[Any]) -> None:
        if not self._has_warned:
            self._has_warned = True
            shapes = ", ".join(str(tuple(tensor.shape)) for tensor in tensors[:3])
            text = f"tensors ({shapes}) lie in memory that another owner shares: it is freed when that lets go of it"
            warnings.warn(f"rlmux: {text}", stacklevel=3)


_SHAPES = frozenset(
    ("size", "dim", "numel", "nelement", "stride", "storage_offset", "element_size", "is_floating_point")
)
"""Methods of a tensor that read none of its memory; nor do its properties, but those that are views."""
_VIEWS = frozenset(("data", "T", "H", "mT", "mH", "real", "imag"))


def _away_class(base: Any, phases: str) -> Any:
    """A class for tensors of the class `base` whose memory is away; torch changes classes of parameters so, too."""
    import torch

    class Away(base):  # type: ignore[misc]
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            name = getattr(func, "__name__", "")
            is_property = name in ("__get__", "__set__") and func.__self__.__name__ not in _VIEWS
            if is_property or name in _SHAPES or name in ("untyped_storage", "__hash__"):
                with torch._C.DisableTorchFunctionSubclass():
                    return func(*args, **(kwargs or {}))
            raise RuntimeError(f"{name or func}: the tensor is offloaded with its pool; accepted: within {phases}")

    return Away


def _has_cuda() -> bool:
    """Whether this process uses a GPU; asking starts nothing there."""
    import torch

    return bool(torch.cuda.is_available() and torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


def _bytes_of(storage: Any) -> Any:
    import torch

    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _new_storage(layouts: list[Any], num_bytes: int) -> Any:
    """One storage for tensors that had one before, each with its place in it: views of one another stay so."""
    import torch

    storage = torch.UntypedStorage(num_bytes, device=layouts[0][0].device)  # type: ignore[no-untyped-call]
    for tensor, layout in layouts:
        tensor.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(storage, *layout)
    return storage


def torch_offload(model: Any, optimizer: Any = None) -> TorchOffload:
    """Hooks for a model and its optimizer: `job.on_leave(pool, share.torch_offload(model, optimizer))`."""
    return TorchOffload(lambda: tensors_of([model], optimizer))


def tensors_of(models: Iterable[Any], optimizer: Any) -> Iterator[Any]:
    """Parameters, buffers and gradients of models, and the state of an optimizer, but its counters."""
    import torch

    for model in models:
        for parameter in model.parameters():
            yield parameter
            if parameter.grad is not None:
                yield parameter.grad
        yield from model.buffers()
    for state in getattr(optimizer, "state", {}).values():
        yield from (tensor for tensor in state.values() if torch.is_tensor(tensor) and tensor.numel() > 1)


class EngineSleep:
    """Hooks that put an engine to sleep and wake it; asleep, it keeps nothing on the device but its context."""

    def __init__(self, sleep: Callable[[], Any], wake: Callable[[], Any]) -> None:
        self._sleep, self._wake = sleep, wake

    def offload(self) -> None:
        self._sleep()

    def onload(self) -> None:
        self._wake()


class CudaCheckpoint:
    """Hooks that move all that processes have on their GPUs to host memory and back, without their help.

    The driver stops their CUDA calls (`lock`), copies and frees (`checkpoint`), brings all back (`restore`) and lets
    them go on (`unlock`). A failed step is undone and raised with the tool's output.
    """

    def __init__(self, pids: Iterable[int], tool: str, limit_s: float) -> None:
        self._pids = list(pids)
        self._tool = tool
        self._limit_s = limit_s

    def offload(self) -> None:
        self._all(("lock", "unlock"), ("checkpoint", "restore"))

    def onload(self) -> None:
        self._all(("restore", "checkpoint"), ("unlock", "lock"))

    def _all(self, *steps: Any) -> None:
        """Every step, with what undoes it, for every process: the first step for all of them first."""
        done: list[Any] = []
        try:
            for step, undo in steps:
                for pid in self._pids:
                    self._act(step, pid)
                    done.append((undo, pid))
        except BaseException:  # an interrupt, too, must not leave a process locked
            for undo, pid in reversed(done):
                with contextlib.suppress(RuntimeError):  # the first failure is reported
                    self._act(undo, pid)
            raise

    def _act(self, action: str, pid: int) -> None:
        words = [self._tool, "--action", action, "--pid", str(pid)]
        if action == "lock":
            words += ["--timeout", str(int(1000 * self._limit_s))]
        process = subprocess.run(words, capture_output=True, text=True)
        if process.returncode != 0:
            text = " ".join((process.stderr or process.stdout).split())[:200]
            raise RuntimeError(f"{' '.join(words)} ended with {process.returncode}: {text}")


def cuda_checkpoint(
    pids: Iterable[int] = (),
    *,
    tool: str = "cuda-checkpoint",
    driver: str = "/proc/driver/nvidia",
    limit_s: float = 60.0,
) -> CudaCheckpoint:
    """Hooks for code that cannot be hooked: NVIDIA's `cuda-checkpoint` (driver 570 or newer) moves everything, also
    what could be dropped. `pids`: processes that compute; by default this one. `limit_s`: seconds to wait for calls of
    theirs to end. Raises RuntimeError where there is no such tool, or no GPU.

    Written after the tool's documentation; not run on a GPU.
    """
    found = shutil.which(tool)
    if found is None:
        raise RuntimeError(f"{tool} is not on PATH; accepted: NVIDIA's tool, or hooks of your own (job.on_leave)")
    if not os.path.isdir(driver):
        raise RuntimeError(f"no NVIDIA driver here ({driver} is not there); accepted: a machine with a GPU")
    return CudaCheckpoint(list(pids) or [os.getpid()], found, limit_s)


def vllm_sleep(llm: Any, level: int = 1) -> EngineSleep:
    """Hooks for a vLLM engine of this process, made with `enable_sleep_mode=True`. Level 1 keeps the weights in host
    memory; with 2 they are gone, and the program must load them again after it woke."""
    return EngineSleep(lambda: llm.sleep(level=level), llm.wake_up)


def http_sleep(url: str, engine: str, limit_s: float = 120.0) -> EngineSleep:
    """Hooks for an engine behind HTTP: "vllm" (started with VLLM_SERVER_DEV_MODE=1 and --enable-sleep-mode) or "sglang"
    (started with --enable-memory-saver). Raises OSError where it does not answer with success."""
    calls: dict[str, Any] = {
        "vllm": (("/sleep?level=1", None), ("/wake_up", None)),
        "sglang": (("/release_memory_occupation", {}), ("/resume_memory_occupation", {})),
    }
    if engine not in calls:
        raise ValueError(f"engine {engine!r}; accepted: {', '.join(calls)}")

    def post(path: str, body: Any) -> None:
        data = b"" if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(url.rstrip("/") + path, data=data, headers=headers, method="POST")
        with _opener(url).open(request, timeout=limit_s) as answer:
            answer.read()

    sleep, wake = calls[engine]
    return EngineSleep(lambda: post(*sleep), lambda: post(*wake))


def vllm_server_sleeps(url: str, limit_s: float = 30.0) -> bool:
    """Whether vLLM's server is asleep now. Raises TypeError for one that cannot sleep, with what is accepted."""

    def get(path: str) -> Any:
        with _opener(url).open(url.rstrip("/") + path, timeout=limit_s) as answer:
            return json.loads(answer.read())

    accepted = "accepted: vllm serve with VLLM_SERVER_DEV_MODE=1 and --enable-sleep-mode"
    try:
        is_asleep, server = get("/is_sleeping")["is_sleeping"], get("/server_info?config_format=json")
    except (OSError, ValueError, KeyError) as error:
        raise TypeError(f"the server at {url} does not answer whether it sleeps ({error}); {accepted}") from None
    if '"enable_sleep_mode": true' not in json.dumps(server):
        raise TypeError(f"the server at {url} cannot sleep: its memory could not leave; {accepted}")
    return bool(is_asleep)


def _opener(url: str) -> urllib.request.OpenerDirector:
    """Use the environment's proxy, except for this machine's addresses."""
    host = urllib.parse.urlsplit(url).hostname or ""
    is_here = host in ("localhost", "::1", "0.0.0.0") or host.startswith("127.")
    return urllib.request.build_opener(*([urllib.request.ProxyHandler({})] if is_here else []))


# ------------------------------------------------------------------ for the files that put trainers into phases


def wrap(owner: Any, name: str, phase: Any) -> None:
    """Have each call of the owner's method of that name in a phase."""
    setattr(owner, name, functools.wraps(getattr(owner, name))(phase(getattr(owner, name))))


class Turns:
    """One permit after another, for a loop that has no place for a `with` each: one stays until the next phase begins.
    `with turns:` around the loop gives the last one back."""

    def __init__(self, job: Any, leaving: Callable[[Any], Any] = lambda role: None) -> None:
        """`leaving`: called with the role of the next phase (None: the end) before a permit is given back."""
        self._job, self._leaving = job, leaving
        self._open: Any = None
        self._now: Any = None
        """(role, step, roles) of the open phase."""

    def to(self, role: str, step: Any, also: Iterable[str] = ()) -> None:
        """Begin a phase, unless the open one is it, with all that it needs."""
        roles = {role, *also}
        if self._now is not None and self._now[:2] == (role, step) and self._pools(roles) <= self._pools(self._now[2]):
            return
        self.close(role)
        region = self._job.phase(role, step=step, also=also)
        region.__enter__()
        self._open, self._now = region, (role, step, roles)

    @property
    def is_open(self) -> bool:
        """Whether a phase is open."""
        return self._open is not None

    def _pools(self, roles: Iterable[str]) -> set[str]:
        return {self._job.pools.get(role, role) for role in roles}

    def __enter__(self) -> Turns:
        return self

    def __exit__(self, kind: Any, *_: object) -> None:
        self.close(failed=kind is not None)

    def close(self, role: Any = None, failed: bool = False) -> None:
        """Give the permit back. With `failed` an error of the trainer is on its way: no other takes its place."""
        region, self._open, self._now = self._open, None, None
        if region is None:
            return
        if failed:
            with contextlib.suppress(Exception):
                region.__exit__(None, None, None)
        else:
            self._leaving(role)
            region.__exit__(None, None, None)

    def before(self, owner: Any, name: str, role: str, step: Callable[..., Any], also: Iterable[str] = ()) -> None:
        """Have each call of the owner's method of that name begin a phase; `step` gets the call's arguments."""
        method = getattr(owner, name)

        async def awaiting(*args: Any, **kwargs: Any) -> Any:
            import asyncio

            begin = functools.partial(self.to, role, step(*args, **kwargs), also)
            await asyncio.get_running_loop().run_in_executor(None, begin)
            return await method(*args, **kwargs)

        def calling(*args: Any, **kwargs: Any) -> Any:
            self.to(role, step(*args, **kwargs), also)
            return method(*args, **kwargs)

        setattr(owner, name, functools.wraps(method)(awaiting if inspect.iscoroutinefunction(method) else calling))


class HooksInOrder:
    """Hooks of several things on one pool, one after another; they come back in the opposite order."""

    def __init__(self, *hooks: Any) -> None:
        self._hooks = hooks

    def offload(self) -> None:
        for hooks in self._hooks:
            hooks.offload()

    def onload(self) -> None:
        for hooks in reversed(self._hooks):
            hooks.onload()


def watch_actors(job: Any, handles: Iterable[Any]) -> None:
    """Name the processes of these Ray actors, which have memory on the job's pools, to the broker."""
    handles = list(handles)
    if job.is_shared and handles:
        import ray

        job.watch(ray.get([handle.__ray_call__.remote(_place) for handle in handles]))


def _place(_: Any) -> tuple[str, int]:
    """(host, process) of an actor."""
    return socket.gethostname(), os.getpid()


def missing_of(owner: Any, names: Iterable[str]) -> list[str]:
    """Names that the owner lacks."""
    return [name for name in names if not hasattr(owner, name)]


def version_of(package: str) -> str:
    """The installed version, for messages."""
    from importlib import metadata

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "that is not installed"
