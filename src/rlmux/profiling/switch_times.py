"""Measures how long a pipeline's states take to leave a device and to come back.

    warm         device ─▶ host memory ─▶ device
    spilled      device ─▶ disk ─▶ device, and nothing of it in the system's cache
    checkpoint   a new engine with what a checkpoint has: what a cold switch has to do

The engines are those of the pipeline's own config. Rounds are interleaved, and medians of them count.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from time import perf_counter

import torch

from rlmux.core.model import Phase
from rlmux.engines.rollout.slot_engine import SlotRolloutEngine
from rlmux.engines.train.train_engine import TorchTrainEngine
from rlmux.profiling.micro_benchmarks import usual_sizes
from rlmux.profiling.step_estimates import model_of
from rlmux.rl.config import AlgorithmConfig, RolloutConfig, TrainingConfig
from rlmux.rl.memory.footprint import footprint_of
from rlmux.rl.vocabulary import load_vocabulary

USUAL = "usual sizes"
"""Name of the pipeline in a profile that no file was given for; pipelines of a file have no space in their names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SwitchTimes:
    """Seconds that one phase's state takes to leave and to enter one device."""

    phase: Phase
    model: str = ""
    """The measured model, as `model_of` describes it; empty: not known, an older version wrote the file."""
    num_slots: int = 0
    """Slots of the pipeline's rollout engine."""
    state_bytes: float
    """Bytes that the state holds on the device."""
    footprint_bytes: float
    """Most device bytes of the state by its config, for comparison with states of other configs."""
    offload_s: float
    """Seconds from the device to host memory."""
    load_s: float
    """Seconds from host memory to the device."""
    spill_s: float
    """Seconds from the device to disk."""
    reload_s: float
    """Seconds from disk to the device."""
    checkpoint_s: float
    """Seconds to make a new engine from its checkpoint."""

    @property
    def warm_s(self) -> float:
        return self.offload_s + self.load_s

    @property
    def spilled_s(self) -> float:
        return self.spill_s + self.reload_s


def usual_config(device: str) -> TrainingConfig:
    """A pipeline of the sizes that micro-benchmarks use, for a profile that no file is given for."""
    sizes = usual_sizes(device)
    return TrainingConfig(
        name=USUAL,
        model=sizes.model,
        rollout=RolloutConfig(
            max_new_tokens=sizes.new_tokens, max_prompt_tokens=sizes.prompt_tokens, num_slots=sizes.num_slots
        ),
        algorithm=AlgorithmConfig(micro_batch_size=sizes.micro_batch_size),
    )


def unlike(configs: Sequence[TrainingConfig]) -> list[TrainingConfig]:
    """The first config of those that cost the same."""
    costs_alike = {(footprint_of(config), model_of(config)): config for config in reversed(configs)}
    return list(costs_alike.values())[::-1]


def measure_switches(
    configs: Sequence[TrainingConfig],
    device: str,
    folder: Path,
    *,
    num_rounds: int = 5,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, list[SwitchTimes]]:
    """Switch times by pipeline; pipelines whose states are alike are measured once, under the first one's name.

    `folder`: on the disk that states spill to. `progress`: called with (rounds done, rounds in all).
    """
    pipelines = unlike(configs)
    num_done = 0

    def count_round() -> None:
        nonlocal num_done
        num_done += 1
        if progress is not None:
            progress(num_done, 2 * num_rounds * len(pipelines))

    return {
        config.name: switch_times(config, device, folder, num_rounds=num_rounds, tick=count_round)
        for config in pipelines
    }


def switch_times(
    config: TrainingConfig, device: str, folder: Path, *, num_rounds: int = 5, tick: Callable[[], None] = lambda: None
) -> list[SwitchTimes]:
    """Times of the config's rollout state and of its training state, in that order.

    `folder`: where spilled states go. `tick`: called after every round of either state.
    """
    footprint = footprint_of(config)
    with worker_threads(config.train.num_threads), tempfile.TemporaryDirectory(dir=folder) as scratch:
        measured = [
            _measured(Phase.ROLLOUT, rollout_engine_of(config, device), footprint.rollout_device_bytes or 0.0,
                      num_rounds, Path(scratch), device, tick),
            _measured(Phase.TRAIN, _train_engine(config, device, Path(scratch)), footprint.train_device_bytes or 0.0,
                      num_rounds, Path(scratch), device, tick),
        ]  # fmt: skip
    return [replace(times, model=model_of(config), num_slots=config.rollout.num_slots) for times in measured]


@contextmanager
def worker_threads(num_threads: int) -> Iterator[None]:
    """As many threads as a worker of the pipeline computes with."""
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


_Engine = SlotRolloutEngine | TorchTrainEngine


def rollout_engine_of(config: TrainingConfig, device: str) -> Callable[[], SlotRolloutEngine]:
    """A maker of the pipeline's rollout engine."""
    vocab_size = load_vocabulary(config.model).vocab_size
    return lambda: SlotRolloutEngine(
        config.model, config.rollout, vocab_size=vocab_size, seed=config.seed, device=device
    )


def _train_engine(config: TrainingConfig, device: str, folder: Path) -> Callable[[], _Engine]:
    checkpoint = folder / "checkpoint"
    TorchTrainEngine(config, device=device).save(checkpoint)

    def restored() -> TorchTrainEngine:
        engine = TorchTrainEngine(config, device=device)
        engine.restore(checkpoint)
        return engine

    return restored


def _measured(
    phase: Phase,
    make: Callable[[], _Engine],
    footprint_bytes: float,
    num_rounds: int,
    folder: Path,
    device: str,
    tick: Callable[[], None],
) -> SwitchTimes:
    def seconds(act: Callable[[], object]) -> float:
        start = perf_counter()
        act()
        if device.startswith("cuda"):
            torch.cuda.synchronize()
        return perf_counter() - start

    made_s: list[float] = []
    spent: list[tuple[float, float, float, float]] = []
    state_bytes = 0
    for number in range(num_rounds):
        start = perf_counter()
        engine = make()
        made_s.append(perf_counter() - start)
        state_bytes = engine.resident_bytes()
        warm = seconds(engine.offload), seconds(engine.load)
        spill_s = seconds(lambda engine=engine, number=number: engine.offload(spill_to=folder / f"spilled-{number}"))  # type: ignore[misc]
        engine.leave_cache()
        spent.append((*warm, spill_s, seconds(engine.load)))
        del engine
        tick()
    offload_s, load_s, spill_s, reload_s = (median(column) for column in zip(*spent, strict=True))
    return SwitchTimes(
        phase=phase,
        state_bytes=state_bytes,
        footprint_bytes=footprint_bytes,
        offload_s=offload_s,
        load_s=load_s,
        spill_s=spill_s,
        reload_s=reload_s,
        checkpoint_s=median(made_s),
    )
