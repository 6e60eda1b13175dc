"""A TRL trainer (GRPO, RLOO) in phases of a job: `share.trl(trainer, job)`. Free to copy, with share_adapters.py.

    one pool   train: all of train(); gives way for rewards and as each step begins
    two pools  train and rollout: weights to the server ─▶ rollout: generation ─▶ train: the rest of the step

Two pools need vLLM as a server (vllm_mode="server"): it sleeps at level 1 while another program has its pool, and wakes
when this one sends weights or generates. vLLM in the process sleeps by TRL's own mode from the end of a generation on.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import importlib
import threading
from collections.abc import Callable
from typing import Any

_adapters = importlib.import_module(f"{__name__.rpartition('.')[0]}.share_adapters".lstrip("."))
TRL_KNOWN = "1.14 to 1.16"
"""Versions of TRL whose methods the adapter is known to wrap."""
_TRL_METHODS = ("train", "_generate", "_calculate_rewards", "training_step")
_VLLM_METHODS = ("sync_weights", "generate")
_IN_PROCESS = ("llm", "_llm_weights_sleeping")


def trl(trainer: Any, job: Any) -> Any:
    """Put a TRL trainer into phases of the job; returns the trainer. One pool for both phases, or with vLLM as a server
    one for each.

    It holds its pool for all of `train()`, saving, evaluation and logging included, and gives way where rewards are
    computed and as each step begins. What it keeps there (parameters, buffers, gradients, optimizer state, a reference
    model) leaves with it. Rewards that are models compute on the device, and do not give way.
    Raises TypeError for a trainer without the methods that it wraps, or with memory that could not leave.
    """
    engine = _engine_of(trainer, job, _check(trainer, job))

    def tensors() -> Any:
        models = [trainer.model, getattr(trainer, "ref_model", None), *_models_of(trainer)]
        return _adapters.tensors_of([model for model in models if model is not None], trainer.optimizer)

    if job.pools.get("rollout") == job.pools.get("train"):
        job.on_leave("train", _TrainerOffload(tensors, engine))
        engine.wake_before(*_VLLM_METHODS)
        _adapters.wrap(trainer, "train", job.phase("train"))
        _adapters.wrap(trainer, "_generate", job.phase("rollout"))
    else:
        job.on_leave("train", _adapters.TorchOffload(tensors))
        job.on_leave("rollout", engine.offload, lambda: None)
        engine.wake_before(*_VLLM_METHODS)
        _in_two_pools(trainer, job)
    if not _models_of(trainer):
        _adapters.wrap(trainer, "_calculate_rewards", job.phase(None))
    trainer.add_callback(_step_callback(job))
    return trainer


def _check(trainer: Any, job: Any) -> str:
    """Where vLLM runs: "colocate", "server", or "" without it. Raises TypeError for what the adapter cannot do."""
    if hasattr(trainer, "_generate_completions"):
        raise TypeError(
            f"{type(trainer).__name__} of ms-swift inherits TRL's methods and calls its own; accepted: TRL's trainers"
        )
    mode = getattr(trainer, "vllm_mode", "colocate") if getattr(trainer, "use_vllm", False) else ""
    missing = [name for name in _TRL_METHODS if not callable(getattr(trainer, name, None))]
    if mode:
        names = (*_VLLM_METHODS, *(_IN_PROCESS if mode == "colocate" else ()))
        missing += _adapters.missing_of(getattr(trainer, "vllm_generation", None), names)
    if missing:
        raise TypeError(
            f"{type(trainer).__name__} of TRL {_adapters.version_of('trl')} has no {', '.join(missing)}; "
            f"accepted: trainers that generate and score (GRPO, RLOO) of TRL {TRL_KNOWN}"
        )
    if mode == "colocate" and not getattr(trainer.args, "vllm_enable_sleep_mode", False):
        raise TypeError("a trainer with vLLM in its process gives memory back only with vllm_enable_sleep_mode=True")
    if job.pools.get("rollout") == job.pools.get("train"):
        return str(mode)
    if mode != "server":
        raise TypeError(
            f"pools {job.pools}: a TRL trainer generates on the devices that it trains on; "
            'accepted: one pool, or vllm_mode="server"'
        )
    if getattr(trainer, "rollout_func", None) is not None:
        raise TypeError(f"pools {job.pools}: a rollout_func may call the server at any time; accepted: one pool")
    return str(mode)


def _in_two_pools(trainer: Any, job: Any) -> None:
    """Have each permit stay until the next begins: between sending weights and generation no other is asked for."""
    turns = _adapters.Turns(job)
    generation = trainer.vllm_generation
    sync_weights, generate = generation.sync_weights, generation.generate

    def step() -> int:
        """Steps count from 1; an evaluation belongs to the step before it."""
        return int(trainer.state.global_step + bool(trainer.model.training))

    def in_turns(method: Any) -> Any:
        def calling(*args: Any, **kwargs: Any) -> Any:
            if turns.is_open:
                return method(*args, **kwargs)
            with job.phase(None), turns:  # a pool that the script holds around this would be taken at each turn
                turns.to("train", step())
                return method(*args, **kwargs)

        return functools.wraps(method)(calling)

    def syncing(*args: Any, **kwargs: Any) -> Any:
        turns.to("train", step(), also=("rollout",))
        return sync_weights(*args, **kwargs)

    def generating(*args: Any, **kwargs: Any) -> Any:
        turns.to("rollout", step())
        result = generate(*args, **kwargs)
        turns.to("train", step())
        return result

    generation.sync_weights, generation.generate = in_turns(syncing), in_turns(generating)
    for name in ("train", "evaluate", "predict"):
        setattr(trainer, name, in_turns(getattr(trainer, name)))


class _NoEngine:
    """The trainer's own model generates."""

    def offload(self) -> bool:
        """Free the device. Returns whether anything was there."""
        return False

    def wake_before(self, *names: str) -> None:
        """Have calls of TRL's methods of these names find an engine that is awake."""


class _InProcess(_NoEngine):
    """vLLM in this process: TRL wakes and sleeps it. A generation that raised leaves it awake, as does a `rollout_func`
    that does not call TRL's own; this is for them."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    def offload(self) -> bool:
        generation = self._trainer.vllm_generation
        if generation._llm_weights_sleeping:
            return False
        generation.llm.wake_up(tags=["kv_cache"])  # vLLM takes an engine that is half awake for one that sleeps
        generation.llm.sleep(level=2)  # as TRL does: the weights are gone, and TRL sends them before it generates
        generation._llm_weights_sleeping = True
        self._trainer._last_loaded_step = -1
        return True


class _Server(_NoEngine):
    """vLLM behind HTTP; of several ranks the first one calls it, as in TRL. It wakes when it is called."""

    def __init__(self, generation: Any, url: str) -> None:
        self._generation = generation
        self._is_awake = not _adapters.vllm_server_sleeps(url)
        self._hooks = _adapters.http_sleep(url, "vllm")
        self._one_call = threading.Lock()
        atexit.register(self._sleep_at_exit)

    def offload(self) -> bool:
        with self._one_call:
            was_awake = self._is_awake
            if was_awake:
                self._hooks.offload()
                self._is_awake = False
            return was_awake

    def _sleep_at_exit(self) -> None:
        """The server outlives this process, whose pools are free then."""
        with contextlib.suppress(OSError):  # it has ended, too
            self.offload()

    def wake_before(self, *names: str) -> None:
        for name in names:
            setattr(self._generation, name, self._waking(getattr(self._generation, name)))

    def _waking(self, method: Any) -> Any:
        def calling(*args: Any, **kwargs: Any) -> Any:
            with self._one_call:
                if not self._is_awake:
                    self._is_awake = True  # also where it fails: it may have memory then
                    self._hooks.onload()
            return method(*args, **kwargs)

        return functools.wraps(method)(calling)


def _engine_of(trainer: Any, job: Any, mode: str) -> Any:
    if mode == "colocate":
        return _InProcess(trainer)
    if mode == "server" and job.is_shared and trainer.accelerator.is_main_process:
        args = trainer.args
        url = args.vllm_server_base_url or f"http://{args.vllm_server_host}:{args.vllm_server_port}"
        return _Server(trainer.vllm_generation, url)
    return _NoEngine()


class _TrainerOffload(_adapters.TorchOffload):  # type: ignore[misc, name-defined]
    """Hooks of a pool that has the engine, too. The bytes of an engine are unknown."""

    def __init__(self, tensors: Callable[[], Any], engine: Any) -> None:
        super().__init__(tensors)
        self._engine = engine

    def offload(self) -> Any:
        was_awake = self._engine.offload()
        freed_bytes = super().offload()
        return None if was_awake else freed_bytes


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
