"""verl's plug-in: importing this module registers the trainer "rlmux" (`trainer.v1.trainer_mode=rlmux`).

    import verl ── entry point `verl.plugins` ──▶ this module ──▶ register_trainer("rlmux")

verl only loads an entry point, and calls nothing of it, so the registration is what the import does. Without rlmux
installed: `share.py` and this file on the path, and VERL_USE_EXTERNAL_MODULES=share_verl.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from verl.trainer.ppo.v1.trainer_base import register_trainer
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync

_HERE = __name__.rpartition(".")[0]
_share = importlib.import_module(f"{_HERE}.share".lstrip("."))


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


RlmuxTrainer = register_trainer("rlmux")(verl_trainer(PPOTrainerSync, _share.join))
