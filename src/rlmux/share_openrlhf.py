"""OpenRLHF in phases of a job: `python -m rlmux.share_openrlhf` in place of `python -m openrlhf.cli.train_ppo_ray`.

    generate_samples, evaluate             rollout
    train_step, saving, broadcast_to_vllm  train

The trainer runs in this process instead of a Ray actor: one process makes engines and models, and holds the permits.
Each permit stays until the next phase begins. Free to copy, with share.py and share_adapters.py.
"""

from __future__ import annotations

import functools
import importlib
import runpy
from types import SimpleNamespace
from typing import Any

_HERE = __name__.rpartition(".")[0]
_adapters = importlib.import_module(f"{_HERE}.share_adapters".lstrip("."))
OPENRLHF_KNOWN = "0.11.2"
"""Version of OpenRLHF whose methods the adapter is known to wrap."""
_TRAINER = (
    *("fit", "train_step", "broadcast_to_vllm", "evaluate", "save_logs_and_checkpoints", "save_best_checkpoint"),
    *("samples_generator", "vllm_engines", "actor_model_group", "critic_model_group", "reward_model_group"),
    "reference_model_group",
)
_GENERATOR = ("generate_samples", "generate_eval_samples")
_FLAGS = (("train", "colocate_all"), ("vllm", "enable_sleep"), ("ds", "enable_sleep"))
"""Groups and names of the options that let memory leave."""


def openrlhf(trainer: Any, job: Any) -> Any:
    """Put a `PPOTrainer` (the class in the Ray actor) into phases of the job; returns it. Raises TypeError where its
    memory could not leave, or a method that this wraps is missing. Without a broker nothing is wrapped."""
    if job.is_shared:
        turns = _wrap(trainer, job)
        fit = trainer.fit

        def in_phases(*args: Any, **kwargs: Any) -> Any:
            with turns:
                return fit(*args, **kwargs)

        trainer.fit = functools.wraps(fit)(in_phases)
    return trainer


def _wrap(trainer: Any, job: Any, turns: Any = None) -> Any:
    _check(trainer, job)
    engines, workers = _VllmEngines(trainer), _Workers(trainer)
    job.on_leave("train", _adapters.HooksInOrder(workers, engines))
    _adapters.watch_actors(job, [*workers.handles, *engines.handles])
    turns = turns or _adapters.Turns(job)
    done = [0]
    """Number of the last step; generating belongs to the next."""

    def train_step(samples: Any, global_step: int = 0) -> int:
        done[0] = global_step + 1
        return done[0]

    def same_step(*_: Any, **__: Any) -> int:
        return done[0]

    def next_step(*_: Any, **__: Any) -> int:
        return done[0] + 1

    turns.before(trainer.samples_generator, "generate_samples", "rollout", next_step)
    turns.before(trainer, "train_step", "train", train_step)
    turns.before(trainer, "evaluate", "rollout", same_step)
    for name in ("broadcast_to_vllm", "save_logs_and_checkpoints", "save_best_checkpoint"):
        turns.before(trainer, name, "train", same_step)
    for owner, name, has_weights in (
        (trainer, "broadcast_to_vllm", True),
        (trainer.samples_generator, "generate_samples", False),
        (trainer.samples_generator, "generate_eval_samples", False),
    ):
        engines.watch(owner, name, has_weights)
    return turns


def _check(trainer: Any, job: Any) -> None:
    missing = _adapters.missing_of(trainer, _TRAINER)
    missing += _adapters.missing_of(getattr(trainer, "samples_generator", None), _GENERATOR)
    if missing:
        raise TypeError(
            f"{type(trainer).__name__} of OpenRLHF {_adapters.version_of('openrlhf')} has no {', '.join(missing)}; "
            f"accepted: the PPOTrainer of OpenRLHF {OPENRLHF_KNOWN}"
        )
    if job.pools.get("rollout") != job.pools.get("train"):
        raise TypeError(
            f"pools {job.pools}: OpenRLHF lets engines sleep only with --train.colocate_all; accepted: one pool"
        )
    for group, flag in _FLAGS:
        if not getattr(getattr(trainer.args, group, None), flag, False):
            option = f"--{group}.{flag}"
            raise TypeError(f"{option} is not set: what lies on the device could not leave it; accepted: {option}")


class _VllmEngines:
    """Hooks of the vLLM engines. Between two calls of the trainer they sleep, or have their weights and no cache."""

    def __init__(self, trainer: Any) -> None:
        self.handles = trainer.vllm_engines or []
        self._has_weights = self._has_slept = False

    def watch(self, owner: Any, name: str, has_weights: bool) -> None:
        """After the owner's method of that name engines have weights, or sleep."""
        method = getattr(owner, name)

        def watched(*args: Any, **kwargs: Any) -> Any:
            result = method(*args, **kwargs)
            self._has_weights = has_weights
            return result

        setattr(owner, name, functools.wraps(method)(watched))

    def offload(self) -> None:
        if self._has_weights:
            self._call("wake_up", tags=["kv_cache"])  # vLLM takes an engine that is half awake for one that sleeps
            self._call("sleep")
            self._has_slept = True

    def onload(self) -> None:
        if self._has_slept:
            self._call("wake_up", tags=["weights"])
            self._has_slept = False

    def _call(self, name: str, **kwargs: Any) -> None:
        import ray

        ray.get([getattr(engine, name).remote(**kwargs) for engine in self.handles])


class _Workers:
    """Hooks of the workers: OpenRLHF moves optimizers and gradients, and leaves parameters on the device."""

    def __init__(self, trainer: Any) -> None:
        names = ("actor_model_group", "critic_model_group", "reward_model_group", "reference_model_group")
        groups = [getattr(trainer, name) for name in names]
        self.handles = [handle for group in groups if group is not None for handle in group._actor_handlers]

    def offload(self) -> None:
        self._call(_leave)

    def onload(self) -> None:
        self._call(_come_back)

    def _call(self, function: Any) -> None:
        import ray

        ray.get([handle.__ray_call__.remote(function) for handle in self.handles])


def _leave(worker: Any) -> None:
    """In a worker's process."""
    if not hasattr(worker, "_rlmux_hooks"):
        worker._rlmux_hooks = _adapters.TorchOffload(lambda: _parameters_of(worker))
    worker._rlmux_hooks.offload()


def _come_back(worker: Any) -> None:
    if hasattr(worker, "_rlmux_hooks"):
        worker._rlmux_hooks.onload()


def _parameters_of(worker: Any) -> Any:
    """Parameters and buffers of the worker's models; with ZeRO 3 the partition that it has of each."""
    import torch

    for model in list(vars(worker).values()):
        if isinstance(model, torch.nn.Module):
            for parameter in model.parameters():
                yield parameter
                if hasattr(parameter, "ds_tensor"):
                    yield parameter.ds_tensor
            yield from model.buffers()


class _InThisProcess:
    """In the place of the Ray actor's class: `PPOTrainer.remote(...)`, and methods of what it returns."""

    def __init__(self, actor: Any, job: Any, turns: Any) -> None:
        self._class = actor.__ray_metadata__.modified_class
        self._job, self._turns = job, turns

    def remote(self, *args: Any, **kwargs: Any) -> Any:
        import ray

        trainer = self._class(*args, **kwargs)
        _wrap(trainer, self._job, self._turns)

        def fit() -> Any:
            trainer.fit()
            self._turns.to("train", None)  # the script saves the model now
            return ray.put(None)

        max_steps = SimpleNamespace(remote=lambda: ray.put(trainer.get_max_steps()))
        return SimpleNamespace(get_max_steps=max_steps, fit=SimpleNamespace(remote=fit))


def main(join: Any = None) -> None:
    """OpenRLHF's command line in phases: a permit from before engines and models are made until the model is saved."""
    from openrlhf.trainer import ppo_trainer

    join = join or importlib.import_module(f"{_HERE}.share".lstrip(".")).join
    job = join("openrlhf", rank=0, world=1)  # one job for this process and all its workers
    run = functools.partial(runpy.run_module, "openrlhf.cli.train_ppo_ray", run_name="__main__", alter_sys=True)
    if not job.is_shared:
        run()
        return
    turns = _adapters.Turns(job)
    ppo_trainer.PPOTrainer = _InThisProcess(ppo_trainer.PPOTrainer, job, turns)
    with turns:
        turns.to("train", 0)
        run()


if __name__ == "__main__":
    main()
