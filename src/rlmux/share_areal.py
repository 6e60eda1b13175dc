"""An AReaL trainer (PPO, GRPO) in phases of a job: `share.areal(PPOTrainer, job)`. Free to copy, beside `share.py`.

    prepare_batch ── "rollout" ──▶ the rest of a step ── "train" ──▶ update_weights ── both ──▶ save ── "train"
                                                                     evaluation, where one is due ── "rollout"

The driver holds the permits; engines are in other processes, and leave their devices by their own `offload`. Rollouts
are paused whenever the rollout pool is not held, so they never overlap training of the same job: the largest staleness
that the user set still holds, and less of it is used.
"""

from __future__ import annotations

import contextlib
import glob
import inspect
import os
import socket
from collections.abc import Iterable, Iterator
from typing import Any

AREAL_KNOWN = "1.0.4"
"""Version of AReaL whose methods the adapter is known to call."""
_TRAINER = ("train", "_evaluate_fn", "_is_actor_rollout_colocated")
_ENGINE = ("offload", "onload")
_ROLLOUT = (*_ENGINE, "pause", "resume", "pause_generation", "continue_generation")
_ACTOR = (*_ENGINE, "prepare_batch", "update_weights")
_FLAGS = {"vllm": "enable_sleep_mode", "sglang": "enable_memory_saver"}
"""By the rollout's backend: the flag, in the section of that name, with which its memory can leave."""


def areal(base: Any, job: Any) -> Any:
    """The trainer class with its phases in the job; itself where nothing is shared.

    `base`: AReaL's PPOTrainer, or a class of yours over it. Raises TypeError for a class without the methods that are
    called here. Making a trainer takes both pools, and raises TypeError, before any engine is made, where memory could
    not leave or the driver does not control all ranks.
    """
    _check_methods(base, base.__name__, _TRAINER)
    if not job.is_shared:
        return base

    class SharingTrainer(base):  # type: ignore[misc]
        def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
            _check_config(config)
            if self._is_actor_rollout_colocated(config) and job.pools.get("rollout") != job.pools.get("train"):
                raise TypeError(f"pools {job.pools}: actor and rollout are colocated; accepted: one pool for both")
            with job.phase("train", also=["rollout"]):  # engines are made on the devices
                super().__init__(config, *args, **kwargs)
                self._phases = _Phases(self, job)
            job.watch((socket.gethostname(), pid) for pid in _descendants())

        def train(self, *args: Any, **kwargs: Any) -> Any:
            recovered = self.recover_info
            step = 1 if recovered is None else recovered.last_step_info.next().global_step + 1
            self._phases.begin(step)
            try:
                return super().train(*args, **kwargs)
            finally:
                self._phases.end()

        def _evaluate_fn(self, *args: Any, **kwargs: Any) -> Any:
            with self._phases.generating():
                return super()._evaluate_fn(*args, **kwargs)

    SharingTrainer.__name__ = SharingTrainer.__qualname__ = base.__name__
    return SharingTrainer


def _descendants() -> Iterator[int]:
    """Processes that this one has begun, and theirs, where there is /proc: AReaL's local workers and servers go on when
    their driver is killed."""
    children: dict[int, list[int]] = {}
    for path in glob.glob("/proc/[0-9]*/stat"):
        with contextlib.suppress(OSError), open(path, encoding="utf-8", errors="replace") as stat:
            fields = stat.read().rpartition(")")[2].split()  # the name before it may hold anything
            children.setdefault(int(fields[1]), []).append(int(path.split("/")[2]))
    below = list(children.get(os.getpid(), ()))
    while below:
        pid = below.pop()
        below += children.get(pid, ())
        yield pid


def _check_methods(owner: Any, name: str, methods: Iterable[str]) -> None:
    missing = [method for method in methods if not callable(getattr(owner, method, None))]
    if missing:
        from importlib import metadata

        try:
            version = metadata.version("areal")
        except metadata.PackageNotFoundError:
            version = "that is not installed"
        raise TypeError(f"{name} of AReaL {version} has no {', '.join(missing)}; accepted: AReaL {AREAL_KNOWN}")


def _check_config(config: Any) -> None:
    if os.environ.get("AREAL_SPMD_MODE", "").lower() in ("1", "true"):
        raise TypeError("AREAL_SPMD_MODE is set: each rank is a driver; accepted: the single controller, without it")
    backend = str(config.rollout.backend).partition(":")[0]
    keys = ["enable_offload", *([f"{backend}.{_FLAGS[backend]}"] if backend in _FLAGS else [])]
    for key in keys:
        value = config
        for name in key.split("."):
            value = getattr(value, name, False)
        if not value:
            raise TypeError(f"{key} is not set: what lies on the device could not leave it; accepted: {key}=true")


class _Residency:
    """Whether an engine is on its devices: a second call of its `offload` or `onload` in turn does nothing."""

    def __init__(self, engine: Any, is_here: bool) -> None:
        self.is_here = is_here
        self._offload, self._onload = engine.offload, engine.onload

    def offload(self) -> None:
        if self.is_here:
            self._offload()
            self.is_here = False

    def onload(self, *args: Any, **kwargs: Any) -> None:
        if not self.is_here:
            self._onload(*args, **kwargs)
            self.is_here = True


class _Leaving:
    """Hooks of a pool: what is there leaves, and only this comes back."""

    def __init__(self, engines: list[_Residency]) -> None:
        self._engines = engines
        self._left: list[_Residency] = []

    def offload(self) -> None:
        self._left = [engine for engine in self._engines if engine.is_here]
        for engine in self._left:
            engine.offload()

    def onload(self) -> None:
        for engine in self._left:
            engine.onload()


class _Phases:
    """The phases of one trainer, around the calls of its loop."""

    def __init__(self, trainer: Any, job: Any) -> None:
        self._job = job
        self._rollout = trainer.rollout
        self._step = 0
        self._training: Any = None
        """The region of training that is open."""
        self._is_generating = False
        _check_methods(trainer.rollout, "rollout", _ROLLOUT)
        _check_methods(trainer.actor, "actor", _ACTOR)
        rollout = _Residency(trainer.rollout, not trainer._should_offload_rollout)
        trained = []
        for role in ("actor", "critic", "ref", "teacher"):
            engine = getattr(trainer, role)
            if engine is not None:
                _check_methods(engine, role, _ENGINE)
                trained.append(_Residency(engine, not getattr(trainer, f"_should_offload_{role}")))
                engine.offload, engine.onload = trained[-1].offload, trained[-1].onload
        for engine in (trainer.rollout, trainer.eval_rollout):  # the same servers
            if engine is not None:
                engine.offload, engine.onload = rollout.offload, rollout.onload
        if job.pools.get("rollout") == job.pools.get("train"):
            job.on_leave("train", _Leaving([rollout, *trained]))
        else:
            job.on_leave("rollout", _Leaving([rollout]))
            job.on_leave("train", _Leaving(trained))
        self._resume, trainer.rollout.resume = trainer.rollout.resume, self._resume_if_generating
        self._prepare, trainer.actor.prepare_batch = trainer.actor.prepare_batch, self._prepare_batch
        self._update, trainer.actor.update_weights = trainer.actor.update_weights, self._update_weights
        self._stop()

    def begin(self, step: int) -> None:
        """Training begins with this step."""
        self._step = step - 1
        self._open()

    def end(self) -> None:
        """Nothing more is computed."""
        if self._training is not None:
            region, self._training = self._training, None
            region.__exit__(None, None, None)

    def generating(self) -> _Generating:
        """A region in which the servers generate, and the train pool is given back."""
        return _Generating(self, self._job.phase("rollout", step=self._step))

    def _open(self) -> None:
        region = self._job.phase("train", step=max(1, self._step))
        region.__enter__()
        self._training = region

    def _prepare_batch(self, *args: Any, **kwargs: Any) -> Any:
        self._step += 1
        self.end()
        with self.generating():
            self._is_generating = True
            try:
                self._resume()
                batch = self._prepare(*args, **kwargs)
            finally:
                self._is_generating = False
                self._rollout.pause()
        self._open()
        return batch

    def _update_weights(self, *args: Any, **kwargs: Any) -> Any:
        with self._job.phase("train", also=["rollout"], step=self._step):
            try:
                return self._update(*args, **kwargs)
            finally:  # it lets the servers go on
                _wait_for(self._rollout.pause_generation())

    def _resume_if_generating(self) -> None:
        """In place of the rollout's `resume`, which the loop calls at the end of a step."""
        if self._is_generating:
            self._resume()

    def _stop(self) -> None:
        self._rollout.pause()
        _wait_for(self._rollout.pause_generation())


class _Generating:
    """See _Phases.generating."""

    def __init__(self, phases: _Phases, region: Any) -> None:
        self._phases, self._region = phases, region

    def __enter__(self) -> None:
        self._region.__enter__()
        _wait_for(self._phases._rollout.continue_generation())

    def __exit__(self, *_: object) -> None:
        try:
            _wait_for(self._phases._rollout.pause_generation())
        finally:
            self._region.__exit__(None, None, None)


def _wait_for(result: Any) -> None:
    """Requests of AReaL's controllers are coroutines, and those of its engines are not."""
    if inspect.isawaitable(result):
        from areal.infra.utils.concurrent import call_maybe_async

        call_maybe_async(lambda: result)
