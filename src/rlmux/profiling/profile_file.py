"""The profile file: what was measured on this machine's devices, and what a policy may use of it.

    Profile ──save──▶ profile.json ──load_sharing──▶ SharingTable ──▶ a policy that shares devices
                                   ──load_costs──▶ DeviceCosts ──▶ Pipeline.switch, Pipeline.migration
                                   ──load_estimates──▶ StepEstimates ──▶ files without estimates (step_estimates.py)
                                   ──sim.models──▶ what a prediction uses

A policy gets only pairs, triples and device fractions that were measured on this device and that helped: all
together did more in a second than one after the other. What a file has beyond that is named in a warning, with what is
used instead. A file of another device, or of other models than a run's, is refused.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from rlmux.core.errors import UserError
from rlmux.core.estimation.colocation import MIN_GAIN, SharingTable
from rlmux.core.model import Phase, Pipeline, Stage, SubStage
from rlmux.engines.device_fraction import DeviceFractions
from rlmux.profiling.device_costs import DeviceCosts
from rlmux.profiling.interference_probe import fraction_grid_of
from rlmux.profiling.micro_benchmarks import BENCHMARK_SUB_STAGES
from rlmux.profiling.migration_times import MigrationTimes
from rlmux.profiling.step_estimates import ACCEPTED, StepTimes, model_of, refuse_other_device
from rlmux.profiling.switch_times import USUAL, SwitchTimes
from rlmux.rl.config import TrainingConfig
from rlmux.sim.models.interference import (
    NO_SPLIT,
    InterferenceTable,
    load_interference,
    read_profile,
    sharing_entries,
)
from rlmux.sim.models.neighbour_slowdown import Neighbours

_SWITCHES = "switches"
_MIGRATIONS = "migrations"
_ESTIMATES = "estimates"
_SECONDS = tuple(key.name for key in fields(SwitchTimes) if key.name.endswith("_s"))
_NUMBERS = ("state_bytes", "footprint_bytes", *_SECONDS)
_MIGRATION_NUMBERS = tuple(
    key.name for key in fields(MigrationTimes) if key.name not in ("model", "is_recompute_exact")
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """All that was measured of one kind of device."""

    table: InterferenceTable
    switches: Mapping[str, Sequence[SwitchTimes]] = field(default_factory=dict)
    """Times of the rollout state and of the training state, by pipeline."""
    migrations: Mapping[str, MigrationTimes] = field(default_factory=dict)
    """Times of a trajectory's migration, by pipeline."""
    neighbours: Neighbours | None = None
    """None where the machine has no two devices of the kind."""
    estimates: Mapping[str, StepTimes] = field(default_factory=dict)
    """Times of a step, by pipeline; empty without a file."""
    wall_s: float = 0.0
    """Seconds that the whole profile took."""

    def to_json(self) -> dict[str, Any]:
        """The content of the profile file."""
        content = {
            **self.table.to_json(),
            _SWITCHES: _switches_to_json(self.switches),
            _MIGRATIONS: [{"pipeline": name, **asdict(times)} for name, times in self.migrations.items()],
            _ESTIMATES: [{"pipeline": name, **asdict(times)} for name, times in self.estimates.items()],
            "wall_s": self.wall_s,
        }
        return content if self.neighbours is None else {**content, "neighbours": self.neighbours.to_json()}

    def save(self, path: Path) -> None:
        """Write the profile file."""
        path.write_text(json.dumps(self.to_json(), indent=1) + "\n", encoding="utf-8")


def _switches_to_json(measured: Mapping[str, Sequence[SwitchTimes]]) -> list[dict[str, Any]]:
    """Seconds, and the bytes a second that they amount to."""
    return [
        {
            "pipeline": name,
            **asdict(switch),
            "warm_bytes_per_s": switch.state_bytes / max(switch.warm_s, 1e-9),
            "spilled_bytes_per_s": switch.state_bytes / max(switch.spilled_s, 1e-9),
            "checkpoint_bytes_per_s": switch.state_bytes / max(switch.checkpoint_s, 1e-9),
        }
        for name, times in measured.items()
        for switch in times
    ]


def sub_stages_of(pipelines: Iterable[Pipeline]) -> Sequence[SubStage]:
    """The measured sub-stages that pipelines run. A reference forward goes by that of old log-probs."""
    has_forwards = any(
        stage in pipeline.stages for pipeline in pipelines for stage in (Stage.REFERENCE_LOGPROBS, Stage.OLD_LOGPROBS)
    )
    return [sub_stage for sub_stage in BENCHMARK_SUB_STAGES if has_forwards or sub_stage is not SubStage.OLD_LOGPROBS]


def load_sharing(
    path: Path, fractions: DeviceFractions, sub_stages: Sequence[SubStage] = BENCHMARK_SUB_STAGES
) -> tuple[SharingTable, list[str]]:
    """What a profile file lets policies do on this device with these sub-stages, and warnings of what cannot be used.

    Raises UserError for a file that is no profile.
    """
    usable = (*fractions.prepared, NO_SPLIT)
    table, warnings = load_interference(path, fraction_grid_of(fractions), sub_stages, fractions=usable)
    if not fractions.prepared:
        reason = f"{fractions.device} cannot be shared here ({fractions.missing})"
        return SharingTable(), [f"{path}: {reason}; every order has its devices alone"]

    def can_use(names: Iterable[str], *levels: float) -> bool:
        return {*names} <= {*sub_stages} and all(_is_prepared(level, fractions) for level in levels)

    pairs = {key: slowdowns for key, slowdowns in table.measured.items() if can_use(key[:2], key[2])}
    triples = [triple for triple in table.triples if can_use(triple.sub_stages, *triple.device_fractions)]
    levels = [key[2] for key in table.measured]
    levels += [level for triple in table.triples for level in triple.device_fractions]
    others = [level for level in levels if level < NO_SPLIT and not _is_prepared(level, fractions)]
    if others:
        named = ", ".join(f"{fraction:g}" for fraction in dict.fromkeys(others))
        accepted = ", ".join(f"{fraction:g}" for fraction in fractions.prepared)
        warnings.append(f"{path}: fraction {named} is not prepared here; used instead: {accepted}, where measured")
    sharing = SharingTable.of(sharing_entries(pairs), triples)
    if not sharing.rates:
        warnings.append(f"{path}: no pair gains {MIN_GAIN:g} or more by sharing; every order has its devices alone")
    return sharing, warnings


def _is_prepared(fraction: float, fractions: DeviceFractions) -> bool:
    """Engines can be held to this fraction here; no split needs no preparation and shares nothing."""
    return fraction < NO_SPLIT and any(
        abs(fraction - prepared) <= 0.5 / fractions.num_units for prepared in fractions.prepared
    )


def load_costs(path: Path, device: str, configs: Sequence[TrainingConfig] = ()) -> tuple[DeviceCosts, list[str]]:
    """Costs that a profile file has of `device` (as profiles name it), and warnings of what is missing.

    Raises UserError for a file that is no profile, that was measured on another device or with none of the models of
    one of `configs`, and for costs that are no numbers.
    """
    content = read_profile(path)
    refuse_other_device(path, content["device"], device)
    entries = {name: content.get(name, []) for name in (_SWITCHES, _MIGRATIONS)}
    costs = DeviceCosts(
        tuple(_read_switch(path, number, entry) for number, entry in enumerate(entries[_SWITCHES], 1)),
        tuple(_read_migration(path, number, entry) for number, entry in enumerate(entries[_MIGRATIONS], 1)),
    )
    instead = {
        _SWITCHES: "switches count as nothing until the run has seen what its own take",
        _MIGRATIONS: "KV caches are copied",
        _ESTIMATES: "a run measures pipelines without an estimate",
    }
    missing = [
        f"{path} has no {name}, an older version wrote it: {instead[name]}" for name in instead if name not in content
    ]
    return costs, [*missing, *_check_models(path, entries[_SWITCHES], configs)]


def _check_models(path: Path, switches: Sequence[Mapping[str, Any]], configs: Sequence[TrainingConfig]) -> list[str]:
    """A warning where the file does not say which models it measured. Raises UserError for models that it has not."""
    measured = dict.fromkeys(str(entry.get("model") or "") for entry in switches)
    if any(entry.get("pipeline") == USUAL for entry in switches):
        return [f"{path} was measured without a file: switches are scaled from those of a usual model"]
    if not switches or "" in measured:
        return [f"{path} names no models, an older version wrote it: switches are scaled by size"] if switches else []
    for config in configs:
        if model_of(config) not in measured:
            raise UserError(
                f"--profile {path} was measured with {'; '.join(measured)}, and pipeline {config.name} has "
                f"{model_of(config)}; {ACCEPTED}"
            )
    return []


def _read_switch(path: Path, number: int, entry: Any) -> SwitchTimes:
    phases = [phase.value for phase in (Phase.ROLLOUT, Phase.TRAIN)]
    is_entry = isinstance(entry, dict) and entry.get("phase") in phases and _is_amount(entry.get("num_slots", 0))
    if not is_entry or not all(_is_amount(entry.get(name)) for name in _NUMBERS):
        raise UserError(
            f"{path}: switch {number} is {entry!r}; expected phase rollout or train, and numbers of 0 or more for "
            f"{', '.join(_NUMBERS)}"
        )
    return SwitchTimes(
        phase=Phase(entry["phase"]),
        model=str(entry.get("model") or ""),
        num_slots=entry.get("num_slots", 0),
        **{name: float(entry[name]) for name in _NUMBERS},
    )


def _read_migration(path: Path, number: int, entry: Any) -> MigrationTimes:
    is_entry = isinstance(entry, dict) and isinstance(entry.get("is_recompute_exact"), bool) and "model" in entry
    if not is_entry or not all(_is_amount(entry.get(name)) for name in _MIGRATION_NUMBERS):
        raise UserError(
            f"{path}: migration {number} is {entry!r}; expected model, is_recompute_exact, and numbers of 0 or more "
            f"for {', '.join(_MIGRATION_NUMBERS)}"
        )
    return MigrationTimes(**{key.name: entry[key.name] for key in fields(MigrationTimes)})


def _is_amount(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0.0 <= value < math.inf
