"""A job of AReaL: areal_program.py NAME STEPS RECORD [hold=PHASE] [colocated] [KEY=false]

The trainer is AReaL's own PPOTrainer: its `__init__`, its loop, its dataloader, saver, evaluator and statistics. Only
engines, which need GPUs, are stand-ins, and what makes them. A stand-in computes one number with what it got, refuses
to work while it is offloaded, and writes to RECORD what it does: (monotonic time, NAME@POOL, what, bytes).
With `hold=PHASE` the second step of that phase waits until it is killed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import areal.trainer.rl_trainer as rl_trainer
from areal.api.cli_args import GRPOConfig, PPOActorConfig, TrainDatasetConfig, ValidDatasetConfig

from rlmux import share

SIZE = 1000
NAME, STEPS, RECORD = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
WORDS = dict(word.partition("=")[::2] for word in sys.argv[4:])


def write(pool: str, what: str, size: int) -> None:
    with RECORD.open("a", encoding="utf-8") as lines:
        lines.write(json.dumps([time.monotonic(), f"{NAME}@{pool}", what, size]) + "\n")


class Engine:
    """What both engines have: a place on devices, and a process there, which goes on when its driver is killed."""

    def __init__(self, pool: str) -> None:
        if "workers" in WORDS:
            write(pool, f"begins {subprocess.Popen(['sleep', '3600'], start_new_session=True).pid}", 0)
        self.pool, self.is_here, self.number = pool, True, 0
        write(pool, "loads", SIZE)

    def offload(self) -> None:
        assert self.is_here, "offloaded twice"
        self.is_here = False
        write(self.pool, "leaves", 0)

    def onload(self, tags: object = None) -> None:
        assert not self.is_here, "onloaded twice"
        self.is_here = True
        write(self.pool, "loads", SIZE)

    def compute(self, phase: str) -> None:
        assert self.is_here, f"{phase} without its memory"
        write(self.pool, "begins", SIZE)
        write(self.pool, f"computes {phase} {self.number}", SIZE)
        while WORDS.get("hold") == phase and self.number == 2:
            time.sleep(0.01)
        write(self.pool, "ends", SIZE)

    def __getattr__(self, name: str) -> object:
        """Calls of the loop that compute nothing: versions, schedules, statistics."""
        if name.startswith("__") or name in ("data_generator",):
            raise AttributeError(name)
        return lambda *_, **__: None


class Rollout(Engine):
    def __init__(self) -> None:
        super().__init__("rollout")
        self.weights, self.is_paused, self.is_stopped = 1.0, False, False
        self.staleness_manager = None
        self.server_infos = [None]

    def pause(self) -> None:
        self.is_paused = True

    def resume(self) -> None:
        self.is_paused = False

    async def pause_generation(self) -> None:
        self.is_stopped = True

    async def continue_generation(self) -> None:
        self.is_stopped = False

    def generate(self, rows: list[dict[str, float]], phase: str) -> list[dict[str, float]]:
        assert not self.is_stopped
        self.number += phase == "rollout"
        self.compute(phase)
        return [{"reward": row["x"] * self.weights} for row in rows]

    def export_stats(self) -> dict[str, float]:
        assert self.is_paused, "rollouts go on after their phase"
        assert self.is_stopped or "RLMUX_BROKER" not in os.environ
        return {"rollout/weights": self.weights}


class EvalRollout(Rollout):
    """Another front of the same servers."""

    def __init__(self, rollout: Rollout) -> None:
        self.__dict__.update(rollout=rollout, rows=[])
        for name in ("offload", "onload", "pause_generation", "continue_generation"):
            setattr(self, name, getattr(rollout, name))

    def submit(self, row: dict[str, float], *_: object, **__: object) -> None:
        self.rows.append(row)

    def wait(self, count: int, timeout: object) -> None:
        assert len(self.rows) == count
        self.rollout.generate(self.rows, "evaluation")
        self.rows.clear()

    def export_stats(self) -> dict[str, float]:
        return {}


class Actor(Engine):
    data_parallel_rank, data_parallel_world_size = 0, 1

    def __init__(self) -> None:
        super().__init__("train")
        self.weights, self.rows = 1.0, None

    def connect_engine(self, rollout: Rollout, meta: object) -> None:
        self.rollout = rollout

    def is_data_parallel_head(self) -> bool:
        return True

    def prepare_batch(self, dataloader: object, **_: object) -> list[dict[str, float]]:
        assert not self.rollout.is_paused
        if self.rows is None:
            self.rows = (row for _ in iter(int, 1) for batch in dataloader for row in batch)
        return self.rollout.generate([next(self.rows) for _ in range(2)], "rollout")

    def compute_logp(self, batch: list[dict[str, float]]) -> list[float]:
        assert self.is_here
        return [0.0 for _ in batch]

    def compute_advantages(self, batch: list[dict[str, float]]) -> list[float]:
        return [each["reward"] for each in batch]

    def ppo_update(self, advantages: list[float]) -> None:
        self.number += 1
        self.compute("train")
        self.weights = 0.9 * self.weights + 0.01 * sum(advantages)

    def update_weights(self, meta: object) -> None:
        assert self.is_here
        assert self.rollout.is_here or "colocated" in WORDS  # there AReaL updates an engine that is offloaded
        assert self.rollout.is_paused
        self.compute("update")
        self.rollout.weights = self.weights
        self.rollout.is_stopped = False  # AReaL's own engines let the servers go on

    def get_device_stats(self) -> SimpleNamespace:
        return SimpleNamespace(log=lambda _: None)

    def export_stats(self) -> dict[str, float]:
        return {"weights": self.weights}


class Trainer(rl_trainer.PPOTrainer):
    def _init_scheduler(self) -> None:
        return None

    def _create_train_engine(self, config: object, alloc: object) -> Actor:
        return Actor()

    def _init_rollout(self, config: object, is_eval: bool = False, lora_path: object = None) -> Rollout:
        return EvalRollout(self.rollout) if is_eval else Rollout()


def config_of(folder: Path) -> GRPOConfig:
    config = GRPOConfig(
        experiment_name="e",
        trial_name=NAME,
        total_train_epochs=1,
        total_train_steps=STEPS,
        tokenizer_path="none",
        enable_offload=WORDS.get("enable_offload", "true") == "true",
        actor=PPOActorConfig(experiment_name="e", trial_name=NAME, path="none", backend="fsdp:d1"),
        train_dataset=TrainDatasetConfig(path="none", type="rl", batch_size=2, shuffle=True),
        valid_dataset=ValidDatasetConfig(path="none", type="rl", batch_size=2),
    )
    config.actor.kl_ctl = 0.0
    config.actor.weight_update_mode = "disk"
    config.rollout.backend = "vllm:d1"
    config.vllm.enable_sleep_mode = WORDS.get("vllm.enable_sleep_mode", "true") == "true"
    config.evaluator.freq_steps = 2
    if "colocated" in WORDS:
        config.rollout.scheduling_strategy.type = "colocation"
        config.rollout.scheduling_strategy.target = "actor"
    for section in (config.cluster, config.stats_logger, config.saver, config.recover, config.evaluator):
        if hasattr(section, "fileroot"):
            section.fileroot = str(folder)
        if hasattr(section, "experiment_name"):
            section.experiment_name, section.trial_name = "e", NAME
    return config


class Stats:
    """In place of the trackers of statistics."""

    def __init__(self, *_: object) -> None: ...

    def commit(self, epoch: int, step: int, global_step: int, stats: dict[str, float]) -> None:
        print("step", global_step, stats["weights"], flush=True)

    def close(self) -> None: ...

    get_log_path = staticmethod(rl_trainer.StatsLogger.get_log_path)

    def load_state_dict(self, _: object) -> None: ...

    def state_dict(self) -> dict[str, int]:
        return {}


def main() -> None:
    rl_trainer.load_hf_processor_and_tokenizer = lambda _: (None, None)
    rl_trainer.StatsLogger = Stats
    pools = {"rollout": "one", "train": "one"} if "colocated" in WORDS else {"rollout": "rollout", "train": "train"}
    job = share.join(NAME, pools)
    rows = [{"x": float(number)} for number in range(2 * STEPS)]
    with share.areal(Trainer, job)(config_of(RECORD.parent / NAME), rows, rows[:2]) as trainer:
        trainer.train(workflow=lambda: None, eval_workflow=lambda: None)
    print("weights", trainer.actor.weights, flush=True)


if __name__ == "__main__":
    main()
