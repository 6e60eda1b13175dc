"""A TRL trainer (GRPO, RLOO) in phases of a job: `share.trl(trainer, job)`. Free to copy, with share_adapters.py."""

from __future__ import annotations

import importlib
from typing import Any

_adapters = importlib.import_module(f"{__name__.rpartition('.')[0]}.share_adapters".lstrip("."))
TRL_KNOWN = "1.14 to 1.16"
"""Versions of TRL whose methods the adapter is known to wrap."""
_TRL_METHODS = ("train", "_generate", "_calculate_rewards", "training_step")


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
            f"{type(trainer).__name__} of TRL {_adapters.version_of('trl')} has no {', '.join(missing)}; "
            f"accepted: trainers that generate and score (GRPO, RLOO) of TRL {TRL_KNOWN}"
        )
    if getattr(trainer, "use_vllm", False) and not getattr(trainer.args, "vllm_enable_sleep_mode", False):
        raise TypeError("a trainer with vLLM in its process gives memory back only with vllm_enable_sleep_mode=True")

    if job.pools.get("rollout") != job.pools.get("train"):
        raise TypeError(f"pools {job.pools}: a TRL trainer generates with the model that it trains; accepted: one pool")

    def tensors() -> Any:
        models = [trainer.model, getattr(trainer, "ref_model", None), *_models_of(trainer)]
        return _adapters.tensors_of([model for model in models if model is not None], trainer.optimizer)

    job.on_leave("train", _adapters.TorchOffload(tensors))
    _adapters.wrap(trainer, "train", job.phase("train"))
    _adapters.wrap(trainer, "_generate", job.phase("rollout"))
    if not _models_of(trainer):
        _adapters.wrap(trainer, "_calculate_rewards", job.phase(None))
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
