"""SkyRL in phases of a job: `trainer.override_entrypoint=rlmux.share_skyrl` of its command line, and nothing else.

    generate, eval                         rollout
    fwd_logprobs_values_reward, training,  train
      saving
    save_weights_for_sampler               train and rollout

Each permit stays until the next phase begins: what the loop does between two calls has a permit, too.
A class of experiments of your own: `share.skyrl_experiment(MyExp)(cfg).run()`. Free to copy, with share_adapters.py.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import functools
import importlib
import os
import sys
from collections.abc import Callable, Iterable
from typing import Any

_HERE = __name__.rpartition(".")[0]
_adapters = importlib.import_module(f"{_HERE}.share_adapters".lstrip("."))
SKYRL_KNOWN = "0.3.0 and 0.4.0"
"""Versions of SkyRL whose methods the adapter is known to wrap; the loop of 0.3.0 was run."""
_TRAINER = (
    *("train", "generate", "eval", "fwd_logprobs_values_reward", "save_checkpoints", "save_models"),
    *("update_ref_with_policy", "dispatch", "inference_engine_client"),
)
_DISPATCH = ("save_weights_for_sampler", "_offload", "_should_manage_offload", "_gpu_state", "_actor_groups")
_ENGINES = ("sleep", "wake_up")
_SERVER_GROUPS = ("_server_groups", "_prefill_server_groups", "_decode_server_groups")
"""Of an experiment; a group may be in two of them."""


def skyrl(trainer: Any, job: Any, servers: Iterable[Any] = ()) -> Any:
    """Put a trainer, its models built, into phases of the job; returns it. `servers`: Ray actors of its engines, whose
    memory counts until they are gone, as that of its models does. Raises TypeError where its memory could not leave, or
    a method that this wraps is missing. Without a broker nothing is wrapped."""
    if not job.is_shared:
        return trainer
    _check(trainer, job)
    is_colocated = trainer.colocate_all
    engines = _Engines(trainer.inference_engine_client, not is_colocated)
    models = _Models(trainer.dispatch)
    _adapters.watch_actors(job, [*models.handles(), *servers])
    if is_colocated:
        job.on_leave("train", _adapters.HooksInOrder(models, engines))
    else:
        job.on_leave("train", models)
        job.on_leave("rollout", engines)

    def leaving(role: Any) -> None:
        engines.is_awake = not is_colocated or role == "rollout"  # the loop has put them to sleep before all others

    turns = _adapters.Turns(job, leaving)
    step = functools.partial(_step_of, trainer)
    for name in ("generate", "eval"):
        turns.before(trainer, name, "rollout", step)
    for name in ("fwd_logprobs_values_reward", "save_checkpoints", "save_models", "update_ref_with_policy"):
        turns.before(trainer, name, "train", step)
    turns.before(trainer.dispatch, "save_weights_for_sampler", "train", step, also=("rollout",))
    train = trainer.train

    async def in_phases(*args: Any, **kwargs: Any) -> Any:
        with turns:
            turns.to("train", trainer.global_step, also=("rollout",))  # connects models and engines, loads checkpoints
            return await train(*args, **kwargs)

    trainer.train = functools.wraps(train)(in_phases)
    return trainer


def _step_of(trainer: Any, *_: Any, **__: Any) -> Any:
    return trainer.global_step


def _check(trainer: Any, job: Any) -> None:
    missing = _adapters.missing_of(trainer, _TRAINER)
    missing += _adapters.missing_of(getattr(trainer, "dispatch", None), _DISPATCH)
    missing += _adapters.missing_of(getattr(trainer, "inference_engine_client", None), _ENGINES)
    if missing:
        raise TypeError(
            f"{type(trainer).__name__} of SkyRL {_adapters.version_of('skyrl')} has no {', '.join(missing)}; accepted: "
            f"a RayPPOTrainer of SkyRL {SKYRL_KNOWN} after build_models"
        )
    if any(base.__name__ == "FullyAsyncRayPPOTrainer" for base in type(trainer).__mro__):
        raise TypeError(
            f"{type(trainer).__name__} generates while it trains; accepted: RayPPOTrainer, whose phases follow"
        )
    is_one_pool = job.pools.get("rollout") == job.pools.get("train")
    if bool(trainer.colocate_all) != is_one_pool:
        raise TypeError(
            f"trainer.placement.colocate_all={trainer.colocate_all} and pools {job.pools}; accepted: "
            "trainer.placement.colocate_all=true with one pool, =false with a pool for each role"
        )
    if not is_one_pool and not trainer.cfg.generator.inference_engine.engine_init_kwargs.get("enable_sleep_mode"):
        key = "generator.inference_engine.engine_init_kwargs.enable_sleep_mode"
        raise TypeError(f"{key} is not set: engines could not leave their pool; accepted: {key}=true")


class _Engines:
    """Hooks of the inference engines: asleep at level 1, their weights are in host memory."""

    def __init__(self, client: Any, is_awake: bool) -> None:
        self._client = client
        self.is_awake = is_awake
        self._has_slept = False

    def offload(self) -> None:
        if self.is_awake:
            _outside_loops(lambda: self._client.sleep(level=1))
            self._has_slept = True

    def onload(self) -> None:
        if self._has_slept:
            _outside_loops(self._client.wake_up)
            self._has_slept = False


class _Models:
    """Hooks of policy, critic and reference. What SkyRL itself moves comes back when SkyRL needs it."""

    def __init__(self, dispatch: Any) -> None:
        self._dispatch = dispatch
        self._away: list[Any] = []

    def handles(self) -> list[Any]:
        """Their Ray actors."""
        return [handle for group in self._dispatch._actor_groups.values() for handle in group._actor_handlers]

    def offload(self) -> None:
        for name, group in self._dispatch._actor_groups.items():
            if not self._dispatch.colocate_all:
                group.offload_to_cpu()
                self._away.append(group)
            elif self._dispatch._gpu_state[name].model_on_gpu or self._dispatch._gpu_state[name].optimizer_on_gpu:
                self._dispatch._offload(name)

    def onload(self) -> None:
        while self._away:
            self._away.pop().backload_to_gpu()


def _outside_loops(make: Callable[[], Any]) -> None:
    """Run a coroutine in a thread of its own: hooks also run where the trainer's loop waits, and could not serve it."""
    with concurrent.futures.ThreadPoolExecutor(1, "rlmux-engines") as thread:
        thread.submit(lambda: asyncio.run(make())).result()


def skyrl_experiment(base: Any, join: Any = None) -> Any:
    """A class over SkyRL's `BasePPOExp`, or one of your own, whose engines and models are made with a permit."""
    join = join or importlib.import_module(f"{_HERE}.share".lstrip(".")).join

    class RlmuxExp(base):  # type: ignore[misc]
        def _setup_trainer(self) -> Any:
            job = join("skyrl", rank=0, world=1)  # one job for the driver and all its workers
            with job.phase("train", also=("rollout",), step=0):
                trainer = super()._setup_trainer()
                groups = [group for name in _SERVER_GROUPS for group in getattr(self, name, None) or ()]
                servers = {id(actor): actor for group in groups for actor in group.get_actors()}
                return skyrl(trainer, job, servers.values())

    return RlmuxExp


def _run(cfg: Any) -> None:
    from skyrl.train.entrypoints.main_base import BasePPOExp

    skyrl_experiment(BasePPOExp)(cfg).run()


def main() -> None:
    """What SkyRL calls for `trainer.override_entrypoint`: its own entry point, with experiments in phases."""
    import ray
    from skyrl.train.entrypoints import main_base

    environ = {name: value for name, value in os.environ.items() if name.startswith("RLMUX_")}
    task = ray.remote(num_cpus=1, runtime_env={"env_vars": environ})(_run)
    main_base.skyrl_entrypoint = task
    sys.argv[1:] = [word for word in sys.argv[1:] if not word.startswith("trainer.override_entrypoint=")]
    main_base.main()
