"""What `share.py` can do for torch, vLLM, SGLang, TRL, verl and slime. It lies beside `share.py`, free to copy with it.

    torch_offload(model, optimizer)   hooks: parameters, buffers, gradients, optimizer state to host memory and back
    vllm_sleep(llm)                   hooks: an engine in this process sleeps and wakes
    http_sleep(url, "vllm"|"sglang")  hooks: the same for an engine behind HTTP
    cuda_checkpoint(pids)             hooks: all that processes have on their GPUs, by NVIDIA's tool of that name
    trl(trainer, job)                 a TRL trainer (GRPO, RLOO) in phases, with hooks for all that it keeps
    slime(job)                        a callback of slime's phases (begin, end) that takes and gives back permits
    verl_trainer(base, join)          verl's synchronous trainer with permits; `share_verl.py` registers it

Memory is given back by making the storage of tensors empty and filling it again: tensors, views of them and what
the optimizer refers to stay the objects they are. Storage that another owner shares (NumPy, a safetensors file, another
process) cannot be emptied; its tensors get other storage in its place, with one warning.
Python 3.9; torch and the frameworks are imported by the functions that need them.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import shutil
import subprocess
import urllib.parse
import urllib.request
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

TRL_KNOWN = "1.14 to 1.16"
"""Versions of TRL whose methods the adapter is known to wrap."""
_TRL_METHODS = ("train", "_generate", "_calculate_rewards", "training_step")


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


def _opener(url: str) -> urllib.request.OpenerDirector:
    """Use the environment's proxy, except for this machine's addresses."""
    host = urllib.parse.urlsplit(url).hostname or ""
    is_here = host in ("localhost", "::1") or host.startswith("127.")
    return urllib.request.build_opener(*([urllib.request.ProxyHandler({})] if is_here else []))


def trl(trainer: Any, job: Any) -> Any:
    """Put a TRL trainer into phases of the job, which has one pool for both; returns the trainer.

    It holds its pool for all of `train()`, saving, evaluation and logging included, and gives way where rewards are
    computed and as each step begins. What it keeps there (parameters, buffers, gradients, optimizer state, a reference
    model) leaves with it. Rewards that are models compute on the device, and do not give way.
    Raises TypeError for a trainer without the methods that it wraps.
    """
    missing = [name for name in _TRL_METHODS if not callable(getattr(trainer, name, None))]
    if missing:
        raise TypeError(
            f"{type(trainer).__name__} of TRL {_version('trl')} has no {', '.join(missing)}; "
            f"accepted: trainers that generate and score (GRPO, RLOO) of TRL {TRL_KNOWN}"
        )
    if getattr(trainer, "use_vllm", False) and not getattr(trainer.args, "vllm_enable_sleep_mode", False):
        raise TypeError("a trainer with vLLM in its process gives memory back only with vllm_enable_sleep_mode=True")

    if job.pools.get("rollout") != job.pools.get("train"):
        raise TypeError(f"pools {job.pools}: a TRL trainer generates with the model that it trains; accepted: one pool")

    def tensors() -> Iterator[Any]:
        models = [trainer.model, getattr(trainer, "ref_model", None), *_models_of(trainer)]
        return tensors_of([model for model in models if model is not None], trainer.optimizer)

    job.on_leave("train", TorchOffload(tensors))
    _wrap(trainer, "train", job.phase("train"))
    _wrap(trainer, "_generate", job.phase("rollout"))
    if not _models_of(trainer):
        _wrap(trainer, "_calculate_rewards", job.phase(None))
    trainer.add_callback(_step_callback(job))
    return trainer


def _models_of(trainer: Any) -> list[Any]:
    """Rewards that are models."""
    import torch

    return [reward for reward in getattr(trainer, "reward_funcs", []) if isinstance(reward, torch.nn.Module)]


def _step_callback(job: Any) -> Any:
    from transformers import TrainerCallback

    class GiveWay(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            job.safe_point()

    return GiveWay()


_SLIME_ROLES: Any = {"sampler": ("rollout", ()), "trainer": ("train", ()), "both": ("train", ("rollout",))}
"""(role of the pool that a phase of slime needs, roles of those beside it), by slime's name of the role."""


class SlimePhases:
    """A callback of slime's phases (`--phase-callback-path`, which forks of slime have): a permit for each.

    The sampler's phases take the pool of role "rollout", the trainer's that of "train", and "both" takes the two. What
    lies on them leaves by slime's own offload calls in its phases, or by hooks given with `job.on_leave`.
    """

    def __init__(self, job: Any) -> None:
        self._job = job
        self._open: list[Any] = []
        """(phase, role, permit's region) of the phases that have begun, outermost first."""

    def on_phase_begin(self, phase: str, role: str) -> None:
        """Returns once the role's pools are granted. Raises ValueError for a role that there is not."""
        if role not in _SLIME_ROLES:
            raise ValueError(f"role {role!r} of phase {phase!r}; accepted: {', '.join(_SLIME_ROLES)}")
        name, also = _SLIME_ROLES[role]
        region = self._job.phase(name, also=also)
        region.__enter__()
        self._open.append((phase, role, region))

    def on_phase_end(self, phase: str, role: str) -> None:
        """Gives the pools back. Raises ValueError for a phase that is not the one that began last."""
        if not self._open or self._open[-1][:2] != (phase, role):
            last = self._open[-1][:2] if self._open else None
            raise ValueError(f"phase {(phase, role)} ends, and {last} began last; accepted: the one that began last")
        self._open.pop()[2].__exit__(None, None, None)


def slime(job: Any) -> SlimePhases:
    """The callback of slime's phases for this job."""
    return SlimePhases(job)


def verl_trainer(base: Any, join: Callable[..., Any]) -> Any:
    """A class over verl's `PPOTrainerSync` that has a pool for the whole run, and gives way as each step begins.

    Then the rollout replicas sleep, and wake with the weights that they had. Parameters and optimizer are on the host
    between steps by verl's own offload, which has to be on: the driver, which holds the permit, has no tensors itself.
    `join`: share.join. Making one raises TypeError where offload is off, or the job has a pool for each phase.
    """

    class RlmuxTrainer(base):  # type: ignore[misc]
        def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
            _check_verl_offload(config)
            self._job = join("verl", rank=0, world=1)  # one job for the driver and all its workers
            if self._job.pools.get("rollout") != self._job.pools.get("train"):
                raise TypeError(f"pools {self._job.pools}: sync trainers of verl are colocated; accepted: one pool")
            self._synced_step: Any = None
            self._job.on_leave("train", self._sleep, self._wake)
            self._job.phase("train").__enter__()  # workers are made on the device, and held until the process ends
            super().__init__(config, *args, **kwargs)
            self.trainer_mode = "sync"  # verl's name for colocated trainers

        def on_init_end(self) -> None:
            super().on_init_end()
            self._synced_step = self.global_steps

        def on_step_begin(self) -> None:
            self._job.safe_point()
            super().on_step_begin()

        def on_step_end(self) -> None:
            super().on_step_end()
            self._synced_step = self.global_steps

        def _sleep(self) -> None:
            self.checkpoint_manager.sleep_replicas()

        def _wake(self) -> None:
            self.checkpoint_manager.update_weights(self._synced_step)

    return RlmuxTrainer


def _check_verl_offload(config: Any) -> None:
    actor = config.actor_rollout_ref.actor
    name = "megatron" if getattr(actor, "strategy", "") == "megatron" else "fsdp_config"
    for flag in ("param_offload", "optimizer_offload"):
        if not getattr(getattr(actor, name, None), flag, False):
            key = f"actor_rollout_ref.actor.{name}.{flag}"
            raise TypeError(f"{key} is not set: what lies on the device could not leave it; accepted: {key}=True")


def _wrap(owner: Any, name: str, phase: Any) -> None:
    setattr(owner, name, functools.wraps(getattr(owner, name))(phase(getattr(owner, name))))


def _version(package: str) -> str:
    from importlib import metadata

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "that is not installed"
