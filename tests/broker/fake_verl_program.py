"""A driver of the shape of verl's synchronous trainer: fake_verl_program.py NAME STEPS RECORD GO.

The classes stand where verl has its own (`verl.trainer.ppo.v1`, release 0.9) and call the hooks in the order of its
loop: on_init_end; for each step on_step_begin, on_sample_begin, on_sample_end, the update, on_step_end; each second
time a validation. Its replicas are on the device from `update_weights` to `sleep_replicas`, as verl's are. This is not
verl, which takes minutes: `make test-verl` has that.
"""

from __future__ import annotations

import importlib
import json
import sys
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace

SIZE = 1000
TRAINERS: dict[str, type] = {}


class CheckpointManager:
    def __init__(self, name: str, record: Path) -> None:
        self.name, self.record, self.size = name, record, 0

    def write(self, what: str) -> None:
        with self.record.open("a", encoding="utf-8") as lines:
            lines.write(json.dumps([time.monotonic(), f"{self.name}@gpu0", what, self.size]) + "\n")

    def update_weights(self, step: int) -> None:
        self.size = SIZE
        self.write(f"wakes {step}")

    def sleep_replicas(self) -> None:
        self.size = 0
        self.write("sleeps")


class PPOTrainer:
    def __init__(self, config: Config) -> None:
        self.config = config
        assert config.trainer.v1.trainer_mode == "sync", "verl makes the buffer of a synchronous trainer by this name"
        self.global_steps = 0

    def init(self) -> None:
        self.checkpoint_manager = CheckpointManager(self.config.name, self.config.record)
        self.actor_rollout_wg = SimpleNamespace(workers=[])
        self.llm_server_manager = SimpleNamespace(get_replicas=list)
        self.on_init_end()

    def fit(self, agent_loop_manager: object) -> None:
        while self.global_steps < self.config.steps:
            self.global_steps += 1
            self.on_step_begin()
            self.checkpoint_manager.write("begins")
            assert self.checkpoint_manager.size == SIZE, "prompts for replicas that sleep"
            self.on_sample_begin()
            time.sleep(0.002)
            self.checkpoint_manager.write("ends")
            self.on_sample_end()
            assert self.checkpoint_manager.size == 0
            time.sleep(0.002)
            self.on_step_end()
            if self.global_steps % 2 == 0:
                self.on_validate_begin()
                assert self.checkpoint_manager.size == SIZE
                self.on_validate_end()

    def on_init_end(self) -> None: ...

    def on_step_begin(self) -> None: ...

    def on_sample_begin(self) -> None: ...

    def on_sample_end(self) -> None: ...

    def on_step_end(self) -> None: ...

    def on_validate_begin(self) -> None: ...

    def on_validate_end(self) -> None: ...


class PPOTrainerSync(PPOTrainer):
    def on_init_end(self) -> None:
        self.checkpoint_manager.update_weights(self.global_steps)

    def on_sample_end(self) -> None:
        self.checkpoint_manager.sleep_replicas()

    def on_step_end(self) -> None:
        self.checkpoint_manager.update_weights(self.global_steps)


def register_trainer(name: str):
    def register(trainer: type) -> type:
        TRAINERS[name] = trainer
        return trainer

    return register


class Config(SimpleNamespace):
    def get(self, name: str, default: object = None) -> object:
        return getattr(self, name, default)


def config_of(name: str, steps: int, record: Path, **flags: bool) -> Config:
    fsdp = SimpleNamespace(**{"param_offload": True, "optimizer_offload": True, **flags})
    actor = SimpleNamespace(strategy="fsdp2", fsdp_config=fsdp)
    shape = SimpleNamespace(actor=actor, rollout=SimpleNamespace(free_cache_engine=True))
    trainer = Config(v1=SimpleNamespace(trainer_mode="rlmux"), experiment_name="an experiment")
    return Config(actor_rollout_ref=shape, trainer=trainer, name=name, steps=steps, record=record)


def main(name: str, steps: int, record: Path, go: Path) -> None:
    for module, names in {
        "verl": {"__version__": "0.9.1"},
        "verl.trainer": {},
        "verl.trainer.ppo": {},
        "verl.trainer.ppo.v1": {},
        "verl.trainer.ppo.v1.trainer_base": {"register_trainer": register_trainer},
        "verl.trainer.ppo.v1.trainer_sync": {"PPOTrainerSync": PPOTrainerSync},
        "verl.trainer.ppo.v1.trainer_separate_async": {"PPOTrainerSeparateAsync": PPOTrainer},
    }.items():
        sys.modules[module] = ModuleType(module)
        vars(sys.modules[module]).update(names)
    importlib.import_module("share_verl")
    try:
        TRAINERS["rlmux"](config_of(name, steps, record, optimizer_offload=False))
    except TypeError as error:
        print(error)
    trainer = TRAINERS["rlmux"](config_of(name, steps, record))
    trainer.init()
    while not go.exists():
        time.sleep(0.01)
    trainer.fit(None)
    trainer.checkpoint_manager.size = 0  # its memory goes with the process, and no broker grants the pool before
    trainer.checkpoint_manager.write("is over")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]), Path(sys.argv[4]))
