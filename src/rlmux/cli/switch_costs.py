"""What switches of the file's own states cost here: measured, kept in the profile, and told to the scheduler.

    measure ──▶ SwitchTimes ──▶ profile.json "switches" ──load──▶ SwitchCosts ──estimate_of(config)──▶ Pipeline.switch

A state of another size takes time in proportion to its bytes, after the measured one whose size is nearest. In a pool
that spills, a switch counts as one from disk, until the run has seen what its own take.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from rlmux.core.errors import UserError
from rlmux.core.model import Cluster, Phase, SwitchEstimate
from rlmux.profiling.micro_benchmarks import PieceSizes, usual_sizes
from rlmux.profiling.switch_times import SwitchTimes, switch_times
from rlmux.rl.config import AlgorithmConfig, RolloutConfig, TrainingConfig
from rlmux.rl.footprint import footprint_of
from rlmux.runtime.backend import Submission

_KEY = "switches"
_SECONDS = tuple(field.name for field in fields(SwitchTimes) if field.name.endswith("_s"))
_NUMBERS = ("state_bytes", "footprint_bytes", *_SECONDS)


def usual_plan(device: str) -> TrainingConfig:
    """Of the pieces that are profiled where no file is given."""
    sizes: PieceSizes = usual_sizes(device)
    return TrainingConfig(
        name="usual sizes",
        model=sizes.model,
        rollout=RolloutConfig(
            max_new_tokens=sizes.new_tokens, max_prompt_tokens=sizes.prompt_tokens, num_slots=sizes.num_slots
        ),
        algorithm=AlgorithmConfig(micro_batch_size=sizes.micro_batch_size),
    )


def measure(
    configs: Sequence[TrainingConfig],
    device: str,
    folder: Path,
    *,
    num_rounds: int = 5,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, list[SwitchTimes]]:
    """By pipeline; those whose states are alike are measured once. `folder`: on the disk that states spill to."""
    unlike = list({footprint_of(config): config for config in reversed(configs)}.values())[::-1]
    measured: dict[str, list[SwitchTimes]] = {}
    num_done = 0

    def tick() -> None:
        nonlocal num_done
        num_done += 1
        if progress is not None:
            progress(num_done, 2 * num_rounds * len(unlike))

    for config in unlike:
        measured[config.name] = switch_times(config, device, folder, num_rounds=num_rounds, tick=tick)
    return measured


def to_json(measured: Mapping[str, Sequence[SwitchTimes]]) -> list[dict[str, Any]]:
    """Seconds, and what they come to in bytes a second."""
    return [
        {
            "pipeline": name,
            **asdict(one),
            "warm_bytes_per_s": one.state_bytes / max(one.warm_s, 1e-9),
            "spilled_bytes_per_s": one.state_bytes / max(one.spilled_s, 1e-9),
            "checkpoint_bytes_per_s": one.state_bytes / max(one.checkpoint_s, 1e-9),
        }
        for name, times in measured.items()
        for one in times
    ]


def rows(measured: Mapping[str, Sequence[SwitchTimes]]) -> list[dict[str, Any]]:
    """For people: one for each state."""
    return [
        {
            "switch to": f"{name} | {one.phase}",
            "MB": f"{one.state_bytes / 1e6:.1f}",
            "warm s": f"{one.warm_s:.4f}",
            "from disk s": f"{one.spilled_s:.4f}",
            "from checkpoint s": f"{one.checkpoint_s:.3f}",
            "warm GB/s": f"{one.state_bytes / 1e9 / max(one.warm_s, 1e-9):.1f}",
            "from disk GB/s": f"{one.state_bytes / 1e9 / max(one.spilled_s, 1e-9):.2f}",
        }
        for name, times in measured.items()
        for one in times
    ]


@dataclass(frozen=True, slots=True)
class SwitchCosts:
    """What a profile says of switches on the device that is here."""

    measured: tuple[SwitchTimes, ...] = ()

    def seconds(self, phase: Phase, footprint_bytes: float, *, is_spilled: bool) -> float | None:
        """None where no state of this phase was measured."""
        alike = [one for one in self.measured if one.phase is phase]
        if not alike:
            return None
        nearest = min(alike, key=lambda one: abs(math.log(max(footprint_bytes, 1.0) / max(one.footprint_bytes, 1.0))))
        seconds = nearest.spilled_s if is_spilled else nearest.warm_s
        return seconds * footprint_bytes / max(nearest.footprint_bytes, 1.0)

    def applied_to(self, submission: Submission, cluster: Cluster) -> Submission:
        """The submission, its pipeline told what its switches take."""
        footprint = footprint_of(submission.config)
        seconds = {
            phase: self.seconds(phase, size or 0.0, is_spilled=_spills(cluster, phase))
            for phase, size in (
                (Phase.ROLLOUT, footprint.rollout_device_bytes),
                (Phase.TRAIN, footprint.train_device_bytes),
            )
        }
        rollout_s, train_s = seconds[Phase.ROLLOUT], seconds[Phase.TRAIN]
        if rollout_s is None or train_s is None:
            return submission
        switch = SwitchEstimate(rollout_s=rollout_s, train_s=train_s)
        return replace(submission, pipeline=replace(submission.pipeline, switch=switch))


def _spills(cluster: Cluster, phase: Phase) -> bool:
    pool = cluster.pool_for(phase) or cluster.pool_for(Phase.TRAIN)
    return pool is not None and pool.spills_to_disk


def load(path: Path, device: str) -> tuple[SwitchCosts, list[str]]:
    """What of a profile file holds for this device, by the name that profiles give it; and what does not.

    Raises UserError for switches that are no numbers.
    """
    used_instead = "switches count as nothing until the run has seen what its own take"
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"profile {path} cannot be read: {error}") from error
    if content.get("device") != device:
        return SwitchCosts(), [f"{path} was measured on {content.get('device')!r}, not on {device!r}: {used_instead}"]
    if _KEY not in content:
        return SwitchCosts(), [f"{path} has no switches, it was written before they were measured: {used_instead}"]
    return SwitchCosts(tuple(_read(path, number, one) for number, one in enumerate(content[_KEY], 1))), []


def _read(path: Path, number: int, entry: Any) -> SwitchTimes:
    phases = [phase.value for phase in (Phase.ROLLOUT, Phase.TRAIN)]
    is_entry = isinstance(entry, dict) and entry.get("phase") in phases
    if not is_entry or not all(_is_amount(entry.get(name)) for name in _NUMBERS):
        raise UserError(
            f"{path}: switch {number} is {entry!r}; expected phase rollout or train, and numbers of 0 or more for "
            f"{', '.join(_NUMBERS)}"
        )
    return SwitchTimes(phase=Phase(entry["phase"]), **{name: float(entry[name]) for name in _NUMBERS})


def _is_amount(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0.0 <= value < math.inf
