"""How two sub-stages on one device slow each other: a measured table, with an estimate behind its holes.

    profile file (JSON) ──load_interference──> InterferenceTable ──slowdowns(a, b, device fraction)──> (of a, of b)
                                  └──> warnings: another device's file, holes, impossible device fractions

The first sub-stage has the device fraction, the second has the rest. A device fraction of 1.0 is no split: both may use
the whole device. A table always answers: with the entry, with its mirror (b, a, 1 - device fraction), with the nearest
device fraction that the device can do, and last with `roofline_interference`; the warnings name the case.

The estimate splits the solo time of a sub-stage into a part bound by arithmetic, a part bound by memory bandwidth and a
rest of latencies. The first part stretches as 1 / device fraction. The second stretches only where the fraction is too
small to draw the whole bandwidth, or where both together ask for more than there is. The rest does not stretch. Without
a split, kernels that fill the device wait for the other's kernels that fill it too.

Invariant: a slowdown is at least 1, and over the splits that of the first does not rise with its device fraction.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import product
from pathlib import Path
from typing import Any

from rlmux.core.errors import UserError
from rlmux.core.model import SubStage
from rlmux.core.steps.colocation import SharingEntry, SharingTable
from rlmux.sim.models.hardware import gpu_spec

NO_SPLIT = 1.0
"""Device fraction at which both use the whole device."""
BANDWIDTH_FRACTION = 0.4
"""Fraction of a GPU's multiprocessors that is enough to draw its whole memory bandwidth (an assumption)."""
SCHEDULED_SUB_STAGES = tuple(one for one in SubStage if one is not SubStage.TOOL_WAIT)
"""Sub-stages that hold a device."""
OLD_NAMES: Mapping[str, SubStage] = {"old_log_probs": SubStage.OLD_LOGPROBS}
"""Names of sub-stages in profile files of version 0.1, with the sub-stage of today."""
_TOLERANCE = 1e-6


@dataclass(frozen=True, kw_only=True, slots=True)
class SubStageProfile:
    """What bounds a sub-stage that has the device to itself."""

    compute: float
    """Part of the solo time bound by arithmetic, in [0, 1]."""
    bandwidth: float
    """Part of the solo time bound by memory bandwidth; compute and bandwidth together are at most 1."""

    def __post_init__(self) -> None:
        if min(self.compute, self.bandwidth) < 0 or self.compute + self.bandwidth > 1 + _TOLERANCE:
            raise UserError(
                f"compute={self.compute} and bandwidth={self.bandwidth} must be at least 0 and at most 1 together"
            )


SUB_STAGE_PROFILES: Mapping[SubStage, SubStageProfile] = {
    SubStage.PREFILL: SubStageProfile(compute=0.60, bandwidth=0.15),
    SubStage.DENSE_DECODE: SubStageProfile(compute=0.15, bandwidth=0.50),
    SubStage.TAIL_DECODE: SubStageProfile(compute=0.02, bandwidth=0.35),
    SubStage.REFERENCE: SubStageProfile(compute=0.45, bandwidth=0.20),
    SubStage.OLD_LOGPROBS: SubStageProfile(compute=0.45, bandwidth=0.20),
    SubStage.UPDATE: SubStageProfile(compute=0.50, bandwidth=0.25),
    SubStage.TOOL_WAIT: SubStageProfile(compute=0.0, bandwidth=0.0),
}
"""Typical sub-stages. The measured runs reach 16-42 % of peak arithmetic in prefill bursts, 4-15 % in dense
and 0.5-3 % in tail decoding, 10-29 % in updates; a tail step reads its weights for 20-50 % of its time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FractionGrid:
    """The device fractions that a device can do."""

    device: str
    num_units: int
    """Multiprocessors of a GPU, cores of a CPU device."""
    unit_step: int = 1
    """Units that are handed out together."""
    min_units: int = 1
    """Least units of either side."""

    def can_do(self, device_fraction: float) -> bool:
        return abs(self.nearest(device_fraction) - device_fraction) <= 0.5 / self.num_units + _TOLERANCE

    def nearest(self, device_fraction: float) -> float:
        """The closest device fraction that leaves both sides at least the minimum; 1.0 is no split."""
        if device_fraction >= NO_SPLIT:
            return NO_SPLIT
        last = (self.num_units - self.min_units) // self.unit_step * self.unit_step
        if last < self.min_units:
            return NO_SPLIT
        units = round(device_fraction * self.num_units / self.unit_step) * self.unit_step
        first = -(-self.min_units // self.unit_step) * self.unit_step
        return min(max(units, first), last) / self.num_units

    def usual(self) -> tuple[float, ...]:
        """Four even splits from 20 % to 90 %, as far as the device can do them, and no split."""
        wanted = [self.nearest(0.2 + 0.7 * i / 3) for i in range(4)]
        return (*sorted(set(wanted) - {NO_SPLIT}), NO_SPLIT)

    def with_half(self) -> tuple[float, ...]:
        """The same and the most even split."""
        return tuple(sorted({*self.usual(), self.nearest(0.5)}))


def fraction_grid(device: str, num_units: int | None = None) -> FractionGrid:
    """Splits of a known GPU; any other name is a device of `num_units` equal units (cores)."""
    if num_units is not None:
        return FractionGrid(device=device, num_units=num_units)
    spec = gpu_spec(device)
    # Compute capability 9 and later hands out multiprocessors by eight, 8 by two with a minimum of four.
    is_ampere_or_ada = spec.name.startswith(("A100", "L40"))
    return FractionGrid(
        device=spec.name,
        num_units=spec.num_sms,
        unit_step=2 if is_ampere_or_ada else 8,
        min_units=4 if is_ampere_or_ada else 8,
    )


def roofline_interference(
    sub_stage_a: SubStage | SubStageProfile, sub_stage_b: SubStage | SubStageProfile, device_fraction: float
) -> tuple[float, float]:
    """Estimated slowdowns of two sub-stages that run together, the first with that device fraction."""
    if not 0.0 < device_fraction <= 1.0:
        raise UserError(f"device fraction is {device_fraction}; accepted: above 0, up to 1 (no split)")
    return _estimate(_profile(sub_stage_a), _profile(sub_stage_b), device_fraction)


@lru_cache(maxsize=4096)
def _estimate(a: SubStageProfile, b: SubStageProfile, device_fraction: float) -> tuple[float, float]:
    slow_a, slow_b = (
        _alone(a, device_fraction),
        _alone(b, NO_SPLIT if device_fraction == NO_SPLIT else 1.0 - device_fraction),
    )
    alone_a, alone_b = slow_a, slow_b
    # Each side's demand falls as it is slowed: a few damped rounds reach the balance.
    for _ in range(20):
        if device_fraction == NO_SPLIT:
            # Kernels that fill the device queue behind each other.
            wait_a = (a.compute + a.bandwidth) * (b.compute + b.bandwidth) / slow_b
            wait_b = (a.compute + a.bandwidth) * (b.compute + b.bandwidth) / slow_a
        else:
            stretch = max(0.0, a.bandwidth / slow_a + b.bandwidth / slow_b - 1.0)
            wait_a, wait_b = a.bandwidth * stretch, b.bandwidth * stretch
        slow_a, slow_b = (slow_a + alone_a + wait_a) / 2, (slow_b + alone_b + wait_b) / 2
    return slow_a, slow_b


@dataclass(frozen=True, kw_only=True, slots=True)
class InterferenceTable:
    """Measured slowdowns of pairs on one device, with an estimate behind every hole."""

    device: str
    grid: FractionGrid
    """Device fractions of the device."""
    measured: Mapping[tuple[SubStage, SubStage, float], tuple[float, float]] = field(default_factory=dict)
    """(slowdown of the first, of the second) by (first sub-stage, second sub-stage, device fraction of the first)."""
    profiles: Mapping[SubStage, SubStageProfile] = field(default_factory=lambda: SUB_STAGE_PROFILES)
    """Bounds of each sub-stage, for the estimate."""
    _by_units: dict[tuple[SubStage, SubStage, int], tuple[float, float]] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        by_units = {(a, b, round(at * self.grid.num_units)): slow for (a, b, at), slow in self.measured.items()}
        object.__setattr__(self, "_by_units", by_units)

    def slowdowns(self, sub_stage_a: SubStage, sub_stage_b: SubStage, device_fraction: float) -> tuple[float, float]:
        """The answer for a pair; see the module for what stands in for a missing entry."""
        device_fraction = self.grid.nearest(device_fraction)
        found = self._entry(sub_stage_a, sub_stage_b, device_fraction)
        if found is not None:
            return found
        return roofline_interference(
            _profile(sub_stage_a, self.profiles), _profile(sub_stage_b, self.profiles), device_fraction
        )

    def slowdown_alone(self, sub_stage: SubStage, device_fraction: float) -> float:
        """Slowdown of a sub-stage that keeps to its device fraction while the rest is unused; always the estimate."""
        return _alone(_profile(sub_stage, self.profiles), self.grid.nearest(device_fraction))

    def is_measured(self, sub_stage_a: SubStage, sub_stage_b: SubStage, device_fraction: float) -> bool:
        return self._entry(sub_stage_a, sub_stage_b, self.grid.nearest(device_fraction)) is not None

    def holes(
        self, sub_stages: Iterable[SubStage], fractions: Iterable[float] | None = None
    ) -> list[tuple[SubStage, SubStage, float]]:
        """Pairs that a scheduler may query and that are only estimated."""
        fractions = self.grid.usual() if fractions is None else tuple(fractions)
        chosen = list(sub_stages)
        return [key for key in product(chosen, chosen, fractions) if not self.is_measured(*key)]

    def to_json(self) -> dict[str, Any]:
        return {
            "schema": 1,
            "device": self.device,
            "num_units": self.grid.num_units,
            "unit_step": self.grid.unit_step,
            "min_units": self.grid.min_units,
            "entries": [
                {"a": a, "b": b, "level": device_fraction, "slowdown_a": slow_a, "slowdown_b": slow_b}
                for (a, b, device_fraction), (slow_a, slow_b) in self.measured.items()
            ],
        }

    def save(self, path: str | Path) -> None:
        Path(path).write_text(json.dumps(self.to_json(), indent=1) + "\n", encoding="utf-8")

    def _entry(
        self, sub_stage_a: SubStage, sub_stage_b: SubStage, device_fraction: float
    ) -> tuple[float, float] | None:
        units = round(device_fraction * self.grid.num_units)
        if (sub_stage_a, sub_stage_b, units) in self._by_units:
            return self._by_units[sub_stage_a, sub_stage_b, units]
        mirror = units if device_fraction == NO_SPLIT else self.grid.num_units - units
        if (sub_stage_b, sub_stage_a, mirror) in self._by_units:
            slow_b, slow_a = self._by_units[sub_stage_b, sub_stage_a, mirror]
            return slow_a, slow_b
        return None


def estimated_table(grid: FractionGrid) -> InterferenceTable:
    """A table with nothing measured: every answer is the estimate."""
    return InterferenceTable(device=grid.device, grid=grid)


def sharing_table(table: InterferenceTable, fractions: tuple[float, ...] | None = None) -> SharingTable:
    """The scheduler's view of a table: every pair at every split, as in a profile of the device."""
    pairs = {
        (sub_stage_a, sub_stage_b, device_fraction): table.slowdowns(sub_stage_a, sub_stage_b, device_fraction)
        for device_fraction in fractions or table.grid.usual()
        for sub_stage_a, sub_stage_b in product(SCHEDULED_SUB_STAGES, repeat=2)
    }
    return SharingTable.of(sharing_entries(pairs))


def sharing_entries(
    pairs: Mapping[tuple[SubStage, SubStage, float], tuple[float, float]],
) -> Iterator[SharingEntry]:
    """The scheduler's view of pairs, keyed as in `InterferenceTable.measured`; those without a split are left out."""
    for (sub_stage_a, sub_stage_b, device_fraction), (slow_a, slow_b) in pairs.items():
        if device_fraction < NO_SPLIT:
            yield SharingEntry(
                sub_stage_a=sub_stage_a,
                sub_stage_b=sub_stage_b,
                device_fraction=device_fraction,
                slowdown_a=max(1.0, slow_a),
                slowdown_b=max(1.0, slow_b),
            )


def load_interference(
    path: str | Path | None,
    grid: FractionGrid,
    sub_stages: Iterable[SubStage] = tuple(SUB_STAGE_PROFILES),
    *,
    fractions: Iterable[float] | None = None,
) -> tuple[InterferenceTable, list[str]]:
    """The table of a profile file for one device, and warnings: what the file lacks, and what is used instead.

    Holes are counted at the given device fractions, by default the usual ones. A file for another device costs accuracy
    and is a warning. Raises UserError for a file that is no profile.
    """
    if path is None:
        return estimated_table(grid), [f"no interference profile for {grid.device}: every pair is estimated"]
    content = read_profile(Path(path))
    if content["device"] != grid.device:
        return estimated_table(grid), [
            f"{path} was measured on {content['device']!r}, not on {grid.device!r}: "
            "nothing of it is used, every pair is estimated"
        ]
    measured, warnings = _measured(path, content["entries"], grid)
    table = InterferenceTable(device=grid.device, grid=grid, measured=measured)
    holes = table.holes(sub_stages, fractions)
    if holes:
        named = ", ".join(f"({a}, {b}, {device_fraction:.3g})" for a, b, device_fraction in holes[:4])
        more = f" and {len(holes) - 4} more" if len(holes) > 4 else ""
        warnings.append(f"{path} has {len(holes)} holes: {named}{more}; these are estimated")
    return table, warnings


def _measured(
    path: str | Path, entries: Iterable[Mapping[str, Any]], grid: FractionGrid
) -> tuple[dict[tuple[SubStage, SubStage, float], tuple[float, float]], list[str]]:
    """Entries at device fractions that the device can do, and warnings about the others and about old names."""
    measured, warnings = {}, []
    renamed: dict[str, None] = {}
    for entry in entries:
        renamed.update((entry[side], None) for side in ("a", "b") if entry[side] in OLD_NAMES)
        sub_stage_a, sub_stage_b = (sub_stage_named(entry[side], path) for side in ("a", "b"))
        if not grid.can_do(entry["level"]):
            warnings.append(
                f"{path}: {grid.device} cannot do fraction {entry['level']:g} "
                f"of ({sub_stage_a}, {sub_stage_b}); the entry is left out, "
                f"{grid.nearest(entry['level']):.3g} is the nearest it can do"
            )
            continue
        measured[sub_stage_a, sub_stage_b, entry["level"]] = (entry["slowdown_a"], entry["slowdown_b"])
    hints = [f"{path}: {name!r} is called {str(OLD_NAMES[name])!r} now; it is read as that" for name in renamed]
    return measured, [*hints, *warnings]


def sub_stage_named(name: str, path: str | Path) -> SubStage:
    """The sub-stage that a profile file names; names of version 0.1 are accepted. Raises UserError for any other."""
    if name in OLD_NAMES:
        return OLD_NAMES[name]
    try:
        return SubStage(name)
    except ValueError:
        raise UserError(f"{path}: sub-stage {name!r} is unknown; accepted: {', '.join(SubStage)}") from None


def read_profile(path: Path) -> dict[str, Any]:
    """The content of a profile file. Raises UserError for a file that is no profile."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError) as error:
        raise UserError(f"interference profile {path} cannot be read: {error}") from error
    if not isinstance(content, dict) or content.get("schema") != 1 or not isinstance(content.get("entries"), list):
        raise UserError(f"{path} is not an interference profile: expected schema 1 with 'device' and 'entries'")
    for number, entry in enumerate(content["entries"], 1):
        if not _is_entry(entry):
            raise UserError(
                f"{path}: entry {number} is {entry!r}; "
                "expected a, b, level in (0, 1], slowdown_a and slowdown_b above 0"
            )
    return {**content, "device": str(content.get("device", ""))}


def _is_entry(entry: object) -> bool:
    if not isinstance(entry, dict) or not all(isinstance(entry.get(side), str) for side in ("a", "b")):
        return False
    numbers = [entry.get(key) for key in ("level", "slowdown_a", "slowdown_b")]
    if not all(isinstance(number, int | float) and 0 < number < math.inf for number in numbers):
        return False
    return bool(entry["level"] <= 1)


def _profile(
    sub_stage: SubStage | SubStageProfile, profiles: Mapping[SubStage, SubStageProfile] = SUB_STAGE_PROFILES
) -> SubStageProfile:
    if isinstance(sub_stage, SubStageProfile):
        return sub_stage
    if sub_stage not in profiles:
        raise UserError(f"sub-stage {sub_stage!r} is unknown; known: {', '.join(profiles)}")
    return profiles[sub_stage]


def _alone(profile: SubStageProfile, device_fraction: float) -> float:
    """Slowdown by the device fraction alone, while the rest is unused."""
    rest = 1.0 - profile.compute - profile.bandwidth
    stretched = profile.bandwidth * max(1.0, BANDWIDTH_FRACTION / device_fraction)
    return profile.compute / device_fraction + stretched + rest
