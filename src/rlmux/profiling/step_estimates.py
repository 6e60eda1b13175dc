"""What a profile says of a pipeline's step, and the estimate that a file without one gets from it.

    profile.json ──load_estimates──▶ StepEstimates ──of(pipeline)──▶ EstimateConfig

An estimate counts for the pipeline of the same name with the same model, sizes and devices. Nothing here needs torch
or the profile's device: a file is planned on one machine for another.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from rlmux.config.tree import EstimateConfig, PipelineConfig
from rlmux.core.errors import UserError
from rlmux.rl.config import PipelineKeys
from rlmux.rl.memory.model_shape import shape_of
from rlmux.sim.models.interference import read_profile

ACCEPTED = "accepted: what `rlmux profile FILE` writes on this machine (with --device cuda where it has a GPU)"
_SECONDS = ("rollout_s", "train_s", "sync_s", "limit_rollout_s", "limit_train_s")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """Seconds of one step of a pipeline alone, and the settings that it was measured with."""

    model: str
    """The measured model, as `model_of` describes it."""
    num_rollout_nodes: int
    num_train_nodes: int
    prompts_per_step: int
    group_size: int
    max_prompt_tokens: int
    max_new_tokens: int
    num_slots: int
    rollout_s: float
    """Seconds of rollout, on the device that took longest."""
    train_s: float
    """Seconds of log-probs and of the update."""
    sync_s: float
    """Seconds that hold no device: rewards, and new weights on their way."""
    limit_rollout_s: float
    """Seconds of rollout if every answer reaches the token limit."""
    limit_train_s: float
    """Seconds of training on answers that all reached the token limit."""

    @property
    def step_s(self) -> float:
        return self.rollout_s + self.train_s + self.sync_s


_SETTINGS = tuple(key.name for key in fields(StepTimes) if key.name not in _SECONDS)
_COUNTS = _SETTINGS[1:]


def model_of(config: PipelineKeys) -> str:
    """The sizes of the pipeline's model, in one line that a profile file keeps."""
    shape = shape_of(config.model)
    sizes = {
        "hidden_size": shape.hidden_size,
        "num_layers": shape.num_layers,
        "num_heads": shape.num_heads,
        "num_kv_heads": shape.num_kv_heads,
        "intermediate_size": shape.intermediate_size,
        "vocab_size": shape.vocab_size,
        "num_experts": shape.num_experts,
    }
    return ", ".join(f"{name} {size}" for name, size in sizes.items() if size)


def settings_of(config: PipelineKeys) -> dict[str, Any]:
    """The settings that a step's seconds depend on, by the fields of `StepTimes`."""
    return {
        "model": model_of(config),
        "num_rollout_nodes": config.rollout.num_workers,
        "num_train_nodes": config.train.num_workers,
        "prompts_per_step": config.algorithm.prompts_per_step,
        "group_size": config.algorithm.group_size,
        "max_prompt_tokens": config.rollout.max_prompt_tokens,
        "max_new_tokens": config.rollout.max_new_tokens,
        "num_slots": config.rollout.num_slots,
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class StepEstimates:
    """The estimates of one profile file."""

    path: Path
    device: str
    """Name of the hardware that they were measured on."""
    by_pipeline: Mapping[str, StepTimes]

    def of(self, pipeline: PipelineConfig) -> EstimateConfig:
        """The pipeline's estimate. Raises UserError for one that was not measured, or was with other settings."""
        times = self.by_pipeline.get(pipeline.name)
        accepted = "accepted: what `rlmux profile` writes of this file, or an estimate in the file"
        if times is None:
            there = f"estimates of {', '.join(self.by_pipeline)}" if self.by_pipeline else "no estimates"
            raise UserError(f"--profile {self.path} has {there}, and none of pipeline {pipeline.name}; {accepted}")
        for name, value in settings_of(pipeline).items():
            measured = getattr(times, name)
            if measured != value:
                named = "" if name == "model" else f"{name} "
                raise UserError(
                    f"--profile {self.path} measured pipeline {pipeline.name} with {named}{measured}, and it has "
                    f"{named}{value}; {accepted}"
                )
        return EstimateConfig(**{name: getattr(times, name) for name in _SECONDS})


def load_estimates(path: Path) -> StepEstimates:
    """The estimates of a profile file; an older version wrote none.

    Raises UserError for a file that is no profile, and for an entry without the settings or with wrong seconds.
    """
    content = read_profile(path)
    entries = content.get("estimates", [])
    entries = entries if isinstance(entries, list) else [entries]
    read = [_read(path, number, entry) for number, entry in enumerate(entries, 1)]
    return StepEstimates(path=path, device=content["device"], by_pipeline=dict(read))


def refuse_other_device(path: Path, measured_on: str, device: str) -> None:
    """Raises UserError for a profile that was measured on another device than `device`, this machine's."""
    if measured_on != device:
        raise UserError(
            f"--profile {path} was measured on {measured_on!r}, and this machine has {device!r}; {ACCEPTED}"
        )


def _read(path: Path, number: int, entry: Any) -> tuple[str, StepTimes]:
    if not _is_entry(entry):
        raise UserError(
            f"{path}: estimate {number} is {entry!r}; expected pipeline, model, whole numbers of 1 or more for "
            f"{', '.join(_COUNTS)}, and seconds above 0 for {', '.join(_SECONDS)} (sync_s may be 0), at the limit no "
            "fewer"
        )
    return entry["pipeline"], StepTimes(**{key.name: entry[key.name] for key in fields(StepTimes)})


def _is_entry(entry: Any) -> bool:
    return (
        isinstance(entry, dict)
        and all(isinstance(entry.get(name), str) for name in ("pipeline", "model"))
        and all(type(entry.get(name)) is int and entry[name] >= 1 for name in _COUNTS)
        and all(_is_seconds(entry.get(name), or_none=name == "sync_s") for name in _SECONDS)
        and all(entry[f"limit_{name}"] >= entry[name] for name in ("rollout_s", "train_s"))
    )


def _is_seconds(value: object, *, or_none: bool) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and (0.0 < value < math.inf or (or_none and value == 0.0))  # type: ignore[operator]
