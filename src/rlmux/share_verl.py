"""verl by phase: the trainers "rlmux" and "rlmux_separate" take a permit for each part of a step (verl 0.9).

    trainer_mode=rlmux           over `sync`: one pool
      a step: rollout (new weights, sampling) ─▶ servers sleep ─▶ train (log-probs, update, checkpoint) ─▶ given back
    trainer_mode=rlmux_separate  over `separate_async` without hybrid servers: a pool of each phase
      a step: rollout until the batch is full ─▶ servers are held ─▶ train ─▶ both pools: new weights ─▶ given back

verl loads this file by its entry point `verl.plugins`, in every process, and calls nothing of it: it registers both
once verl's trainers are imported, which only a driver does. Without rlmux installed: `share.py`, `share_adapters.py`
and this file on the path, and VERL_USE_EXTERNAL_MODULES=share_verl.

The driver holds the permits, for its workers and servers too. Between two calls of a worker its parameters and
optimizer are on the host by verl's own offload, which has to be on; servers sleep by verl's own calls, and wake with
the weights of the last finished step. Staleness of `separate_async` is the user's.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.util
import logging
import re
import sys
from collections.abc import Iterable, Sequence
from typing import Any

VERL_KNOWN = "0.9"
"""Versions of verl whose trainers these are known to stand on."""
_TRAINERS = "verl.trainer.ppo.v1"
_HOOKS = ("init", "fit", "on_init_end", "on_step_begin", "on_step_end", "on_sample_begin", "on_sample_end",
          "on_validate_begin", "on_validate_end")  # fmt: skip
_HERE = __name__.rpartition(".")[0]
_share = importlib.import_module(f"{_HERE}.share".lstrip("."))
_adapters = importlib.import_module(f"{_HERE}.share_adapters".lstrip("."))


class _PermitHolder:
    """What both trainers share: the job, and the pools that the driver holds now."""

    global_steps = 0

    def _join(self, config: Any, mode: str) -> None:
        """Join the broker's programs by the experiment's name, and be verl's trainer `mode` to the rest of verl. Raises
        TypeError, with what is accepted, for a verl without the hooks or settings that keep memory on the devices."""
        missing = [name for name in _HOOKS if not callable(getattr(type(self), name, None))]
        if missing:
            found = getattr(sys.modules.get("verl"), "__version__", "unknown")
            raise TypeError(f"{mode} trainer of verl {found} has no {', '.join(missing)}; accepted: verl {VERL_KNOWN}")
        _check_memory_is_given_back(config)
        config.trainer.v1.trainer_mode = mode  # its replay buffer and agent loops ask for their own modes
        name = re.sub(r"[^A-Za-z0-9_.-]", "-", str(config.trainer.get("experiment_name", "") or "verl"))[:64]
        self._job = _share.join(name, rank=0, world=1)  # one for the driver and all its workers
        self._turns = _adapters.Turns(self._job)

    def _hold(self, role: str | None, *also: str) -> None:
        """Give back what is held, then take the pools of these roles. With None nothing is held afterwards."""
        self._turns.close()
        if role is not None:
            self._turns.to(role, self.global_steps, also)

    def fit(self, *args: Any, **kwargs: Any) -> Any:
        """verl's loop. Its failure is raised as it is; then all is given back as the processes end."""
        result = super().fit(*args, **kwargs)  # type: ignore[misc]
        self._hold(None)
        self._job.close()
        return result

    def _watch(self, *groups: Any) -> None:
        """Tell the broker the processes that have memory on the devices, besides the driver."""
        actors = [
            actor for group in groups for name in ("workers", "servers") for actor in getattr(group, name, None) or ()
        ]
        _adapters.watch_actors(self._job, actors)


def _check_memory_is_given_back(config: Any) -> None:
    actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    strategy = str(getattr(actor, "strategy", "fsdp"))
    name = "fsdp_config" if strategy.startswith("fsdp") else strategy
    needed = [(getattr(actor, name, None), f"actor_rollout_ref.actor.{name}", "param_offload"),
              (getattr(actor, name, None), f"actor_rollout_ref.actor.{name}", "optimizer_offload"),
              (rollout, "actor_rollout_ref.rollout", "free_cache_engine")]  # fmt: skip
    for section, place, flag in needed:
        if not getattr(section, flag, False):
            key = f"{place}.{flag}"
            raise TypeError(f"{key} is not set: what lies on the device could not leave it; accepted: {key}=True")


def _sync(base: Any) -> Any:
    """A class over verl's `PPOTrainerSync`."""

    class RlmuxTrainer(_PermitHolder, base):  # type: ignore[misc]
        """One pool for both roles: permits of a step are rollout, train."""

        def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
            self._join(config, "sync")
            if self._job.pools.get("rollout") != self._job.pools.get("train"):
                raise TypeError(
                    f"pools {self._job.pools}: rlmux is colocated; accepted: one pool of both phases, or rlmux_separate"
                )
            self._is_awake = False
            self._finished_step = 0
            self._job.on_leave("train", self._sleep, lambda: None)  # a rollout wakes its servers itself
            super().__init__(config, *args, **kwargs)

        def init(self) -> None:
            self._hold("train")  # workers and servers are made on the devices
            super().init()
            self._watch(
                self.actor_rollout_wg, getattr(self, "critic_wg", None), *self.llm_server_manager.get_replicas()
            )
            self._hold(None)

        def on_init_end(self) -> None:
            self._finished_step = self.global_steps

        def on_validate_begin(self) -> None:
            self._sample()
            super().on_validate_begin()

        def on_validate_end(self) -> None:
            super().on_validate_end()
            self._hold(None)

        def on_step_begin(self) -> None:
            self._sample()  # verl submits its prompts before `on_sample_begin`
            super().on_step_begin()

        def on_sample_begin(self) -> None:
            if not self._is_awake:  # a further mini-batch of the step
                self._sample()
            super().on_sample_begin()

        def on_sample_end(self) -> None:
            super().on_sample_end()
            self._is_awake = False
            self._hold("train")

        def on_step_end(self) -> None:
            """verl would wake the servers here, for the next step; they wake when that has its permit."""
            self._finished_step = self.global_steps
            self._hold(None)

        def _sample(self) -> None:
            self._hold("rollout")
            if not self._is_awake:
                self._is_awake = True
                self.checkpoint_manager.update_weights(self._finished_step)

        def _sleep(self) -> None:
            if self._is_awake:
                self.checkpoint_manager.sleep_replicas()
                self._is_awake = False

    return RlmuxTrainer


def _separate(base: Any) -> Any:
    """A class over verl's `PPOTrainerSeparateAsync`."""

    class RlmuxSeparateTrainer(_PermitHolder, base):  # type: ignore[misc]
        """A pool for each role: permits are rollout and train for each mini-batch, then both. Without a broker
        servers go on while it trains, as verl's do."""

        def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
            if config.actor_rollout_ref.get("hybrid_engine", True):
                key = "actor_rollout_ref.hybrid_engine"
                raise TypeError(f"{key} is set: its servers would sample on the training pool; accepted: {key}=False")
            self._join(config, "separate_async")
            if self._job.is_shared and self._job.pools.get("rollout") == self._job.pools.get("train"):
                raise TypeError(f"pools {self._job.pools}: accepted: a pool of each phase, or the trainer rlmux")
            # verl 0.9.1 ends in a call of this logger where there are no hybrid servers.
            logging.getLogger(f"{_TRAINERS}.trainer_separate_async").setLevel(logging.WARNING)
            self._is_awake = True
            self._job.on_leave("rollout", self._sleep, lambda: None)  # a phase wakes its servers itself
            self._job.on_leave("train", lambda: None, lambda: None)  # verl has offloaded what was there
            super().__init__(config, *args, **kwargs)

        def init(self) -> None:
            self._hold("train", "rollout")
            super().init()
            self._watch(self.actor_rollout_wg, getattr(self, "critic_wg", None), *self._replicas)
            self._release()

        def on_validate_begin(self) -> None:
            self._sample()
            super().on_validate_begin()

        def on_validate_end(self) -> None:
            super().on_validate_end()
            self._release()

        def on_sample_begin(self) -> None:
            self._sample()
            super().on_sample_begin()

        def on_sample_end(self) -> None:
            super().on_sample_end()
            self._release("train")

        def on_step_end(self) -> None:
            self._take("train", "rollout")
            super().on_step_end()  # sends the weights, and lets the servers go on
            self._release()

        @property
        def _replicas(self) -> Sequence[Any]:
            return self.standalone_server_manager.get_replicas()  # type: ignore[no-any-return]

        def _take(self, role: str, *also: str) -> None:
            """Hold these pools, with servers that are there."""
            self._hold(role, *also)
            if not self._is_awake:
                self._is_awake = True
                _call_servers(self.config, self._replicas, is_waking=True)

        def _sample(self) -> None:
            self._take("rollout")
            if self._job.is_shared:
                self.standalone_checkpoint_manager.resume_generation_replicas()

        def _release(self, role: str | None = None) -> None:
            """Hold the servers' requests with their partial answers, then give the pool back, for that of `role`."""
            if self._job.is_shared:
                self.standalone_checkpoint_manager.abort_replicas()
            self._hold(role)

        def _sleep(self) -> None:
            if self._is_awake:
                _call_servers(self.config, self._replicas, is_waking=False)
                self._is_awake = False

    return RlmuxSeparateTrainer


def _call_servers(config: Any, replicas: Iterable[Any], *, is_waking: bool) -> None:
    """Free the devices of servers that answer no request, or bring them back.

    verl's own `sleep` does nothing to a standalone server. vLLM's workers sleep at level 1, with their weights on the
    host. Of SGLang's only the KV cache leaves, and of a server with several data-parallel engines: one call does not
    reach them all.
    """
    import ray

    rollout = config.actor_rollout_ref.rollout
    servers = [server for replica in replicas for server in replica.servers]
    if rollout.name == "sglang" or rollout.get("data_parallel_size", 1) > 1:
        calls = [(server.resume_kv_cache if is_waking else server.release_kv_cache).remote() for server in servers]
    else:
        name, level = ("wake_up", {}) if is_waking else ("sleep", {"level": 1})
        calls = [server.collective_rpc.remote(name, kwargs=level) for server in servers]
    ray.get(calls)


class _AfterImport(importlib.abc.MetaPathFinder):
    """Registers the trainers once verl's are imported: that takes 3 s, which no other process of verl has to spend."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        if fullname != _TRAINERS:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def run_and_register(module: Any) -> None:
                run(module)
                _register()

            spec.loader.exec_module = run_and_register  # type: ignore[method-assign]
        return spec


def _register() -> None:
    base = importlib.import_module(f"{_TRAINERS}.trainer_base")
    for name, make, module, own in (
        ("rlmux", _sync, "trainer_sync", "PPOTrainerSync"),
        ("rlmux_separate", _separate, "trainer_separate_async", "PPOTrainerSeparateAsync"),
    ):
        base.register_trainer(name)(make(getattr(importlib.import_module(f"{_TRAINERS}.{module}"), own)))


if _TRAINERS in sys.modules:
    _register()
else:
    sys.meta_path.insert(0, _AfterImport())
