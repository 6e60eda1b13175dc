"""How sub-stages on one device slow each other: a measured table, with an estimate behind its holes.

    profile file (JSON) ──load_interference──> InterferenceTable ──slowdowns(a, b, device fraction)──> (of a, of b)
                                  │             └──slowdowns_together([(a, device fraction), ...])──> (of a, ...)
                                  └──> warnings: another device's file, holes, impossible device fractions

The first sub-stage has the device fraction, the second has the rest. A device fraction of 1.0 is no split: both may use
the whole device. A table always answers: with the entry, with its mirror (b, a, 1 - device fraction), with the nearest
device fraction that the device can do, and last with `roofline_interference`; the warnings name the case. Three or more
have a device fraction each; the answer is the measured triple, or the estimate.

The estimate splits the solo time of a sub-stage into a part bound by arithmetic, a part bound by memory bandwidth and a
rest of latencies. The first part stretches as 1 / device fraction. The second stretches only where the fraction is too
small to draw the whole bandwidth, or where all together ask for more than there is. The rest does not stretch. Without
a split, kernels that fill the device wait for the others' kernels that fill it too.

Invariants: a slowdown is at least 1, and over the splits that of the first does not rise with its device fraction. One
more on the device, at a fraction that was free, makes none faster.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import combinations_with_replacement, product
from pathlib import Path
from typing import Any

from rlmux.core.errors import UserError
from rlmux.core.estimation.colocation import SharingEntry, SharingTable, SharingTriple
from rlmux.core.json_text import parse_json
from rlmux.core.model import SubStage
from rlmux.sim import data_tables
from rlmux.sim.models.hardware import gpu_spec

NO_SPLIT = 1.0
"""Device fraction at which both use the whole device."""
BANDWIDTH_FRACTION = 0.4
"""Fraction of a GPU's multiprocessors that is enough to draw its whole memory bandwidth (an assumption)."""
SCHEDULED_SUB_STAGES: tuple[SubStage, ...] = tuple(member for member in SubStage if member is not SubStage.TOOL_WAIT)
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

    def near_thirds(self) -> tuple[float, ...]:
        """The closest to a third that the device can do, from below and from above."""
        below = self.num_units // 3 // self.unit_step * self.unit_step
        return tuple(units / self.num_units for units in (below, below + self.unit_step) if units >= self.min_units)

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


def roofline_interference(together: Sequence[tuple[SubStage | SubStageProfile, float]]) -> tuple[float, ...]:
    """Estimated slowdowns of sub-stages that run together, each with its device fraction; 1.0 is no split."""
    for _, device_fraction in together:
        if not 0.0 < device_fraction <= 1.0:
            raise UserError(f"device fraction is {device_fraction}; accepted: above 0, up to 1 (no split)")
    return _estimate(tuple((_profile(sub_stage), device_fraction) for sub_stage, device_fraction in together))


@lru_cache(maxsize=4096)
def _estimate(together: tuple[tuple[SubStageProfile, float], ...]) -> tuple[float, ...]:
    is_split = sum(device_fraction for _, device_fraction in together) <= 1.0 + _TOLERANCE
    alone = [_alone(profile, device_fraction) for profile, device_fraction in together]
    slowdowns = alone
    # Each side's demand falls as it is slowed: a few damped rounds reach the balance.
    for _ in range(20):
        if is_split:
            demand = sum(profile.bandwidth / slow for (profile, _), slow in zip(together, slowdowns, strict=True))
            waits = [profile.bandwidth * max(0.0, demand - 1.0) for profile, _ in together]
        else:
            # Kernels that fill the device queue behind each other.
            busy = [profile.compute + profile.bandwidth for profile, _ in together]
            waits = [
                sum(mine * busy[other] / slowdowns[other] for other in range(len(busy)) if other != place)
                for place, mine in enumerate(busy)
            ]
        slowdowns = [(slow + own + wait) / 2 for slow, own, wait in zip(slowdowns, alone, waits, strict=True)]
    return tuple(slowdowns)


def rest_of(device_fraction: float) -> float:
    """Device fraction of the second of two; without a split, both have the whole device."""
    return NO_SPLIT if device_fraction == NO_SPLIT else 1.0 - device_fraction


@dataclass(frozen=True, kw_only=True, slots=True)
class InterferenceTable:
    """Measured slowdowns of pairs and triples on one device, with an estimate behind every hole."""

    device: str
    grid: FractionGrid
    """Device fractions of the device."""
    measured: Mapping[tuple[SubStage, SubStage, float], tuple[float, float]] = field(default_factory=dict)
    """(slowdown of the first, of the second) by (first sub-stage, second sub-stage, device fraction of the first)."""
    triples: tuple[SharingTriple, ...] = ()
    """Measured triples."""
    profiles: Mapping[SubStage, SubStageProfile] = field(default_factory=lambda: SUB_STAGE_PROFILES)
    """Bounds of each sub-stage, for the estimate."""
    _by_units: dict[tuple[SubStage, SubStage, int], tuple[float, float]] = field(init=False, repr=False, compare=False)
    _triples_by_units: dict[tuple[tuple[str, int], ...], dict[tuple[str, int], float]] = field(
        init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        by_units = {(a, b, round(at * self.grid.num_units)): slow for (a, b, at), slow in self.measured.items()}
        object.__setattr__(self, "_by_units", by_units)
        triples = {}
        for triple in self.triples:
            sides = self._in_units(zip(triple.sub_stages, triple.device_fractions, strict=True))
            triples[tuple(sorted(sides))] = dict(zip(sides, triple.slowdowns, strict=True))
        object.__setattr__(self, "_triples_by_units", triples)

    def slowdowns(self, sub_stage_a: SubStage, sub_stage_b: SubStage, device_fraction: float) -> tuple[float, float]:
        """Result for sub-stages with a device fraction each: the measured triple, else the estimate."""
        device_fraction = self.grid.nearest(device_fraction)
        found = self._entry(sub_stage_a, sub_stage_b, device_fraction)
        if found is not None:
            return found
        slow_a, slow_b = self._estimate([(sub_stage_a, device_fraction), (sub_stage_b, rest_of(device_fraction))])
        return slow_a, slow_b

    def slowdowns_together(self, together: Sequence[tuple[SubStage, float]]) -> tuple[float, ...]:
        """The answer for sub-stages with a device fraction each: that of the measured triple, else the estimate."""
        sides = self._in_units(together)
        found = self._triples_by_units.get(tuple(sorted(sides)))
        return self._estimate(together) if found is None else tuple(found[side] for side in sides)

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
            "triples": [
                {"sub_stages": triple.sub_stages, "levels": triple.device_fractions, "slowdowns": triple.slowdowns}
                for triple in self.triples
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

    def _estimate(self, together: Iterable[tuple[SubStage, float]]) -> tuple[float, ...]:
        return roofline_interference([(_profile(name, self.profiles), fraction) for name, fraction in together])

    def _in_units(self, together: Iterable[tuple[str, float]]) -> list[tuple[str, int]]:
        return [(sub_stage, round(device_fraction * self.grid.num_units)) for sub_stage, device_fraction in together]


def estimated_table(grid: FractionGrid) -> InterferenceTable:
    """A table with nothing measured: every answer is the estimate."""
    return InterferenceTable(device=grid.device, grid=grid)


def measured_table(grid: FractionGrid) -> InterferenceTable:
    """`data/interference_h100.csv`: pairs measured on one H100, with the estimate behind its holes. A reference pass is
    measured as the old log-probs, whose work it does."""
    also = {SubStage.OLD_LOGPROBS: (SubStage.OLD_LOGPROBS, SubStage.REFERENCE)}
    measured = {}
    for row in data_tables.rows("interference_h100"):
        slowdowns = (max(1.0, float(row["slowdown_a"])), max(1.0, float(row["slowdown_b"])))
        a, b = SubStage(row["a"]), SubStage(row["b"])
        for pair in product(also.get(a, (a,)), also.get(b, (b,))):
            measured[(*pair, grid.nearest(float(row["device_fraction"])))] = slowdowns
    return InterferenceTable(device=grid.device, grid=grid, measured=measured)


def table_without_interference(grid: FractionGrid) -> InterferenceTable:
    """Sub-stages that do not slow each other: a bound from above for any sharing."""
    nothing = SubStageProfile(compute=0.0, bandwidth=0.0)
    return InterferenceTable(device=grid.device, grid=grid, profiles=dict.fromkeys(SUB_STAGE_PROFILES, nothing))


def sharing_table(table: InterferenceTable, fractions: tuple[float, ...] | None = None) -> SharingTable:
    """The scheduler's view of a table: every pair at every split, and every three that were measured or near thirds."""
    pairs = {
        (sub_stage_a, sub_stage_b, device_fraction): table.slowdowns(sub_stage_a, sub_stage_b, device_fraction)
        for device_fraction in fractions or table.grid.usual()
        for sub_stage_a, sub_stage_b in product(SCHEDULED_SUB_STAGES, repeat=2)
    }
    return SharingTable.of(sharing_entries(pairs), [*table.triples, *_estimated_triples(table)])


def _estimated_triples(table: InterferenceTable) -> Iterator[SharingTriple]:
    """Every three sub-stages that were not measured together, at near thirds of the device."""
    measured = {tuple(sorted(triple.sub_stages)) for triple in table.triples}
    for sub_stages in combinations_with_replacement(SCHEDULED_SUB_STAGES, 3):
        split = split_of_three(table, sub_stages, table.grid.near_thirds())
        if split is not None and tuple(sorted(sub_stages)) not in measured:
            slow_a, slow_b, slow_c = table.slowdowns_together(list(zip(sub_stages, split, strict=True)))
            yield SharingTriple(sub_stages=sub_stages, device_fractions=split, slowdowns=(slow_a, slow_b, slow_c))


def split_of_three(
    table: InterferenceTable, sub_stages: tuple[SubStage, SubStage, SubStage], fractions: Collection[float]
) -> tuple[float, float, float] | None:
    """The device fractions of three, chosen from `fractions` as close to a third each as fits; None where none fit.

    Two alike have the same, since the scheduler does not distinguish them. Of splits that are equally close, the one
    with the most work in a second is chosen.
    """

    def rank(split: tuple[float, float, float]) -> tuple[float, float]:
        slowdowns = table.slowdowns_together(list(zip(sub_stages, split, strict=True)))
        distance = sum(abs(device_fraction - 1 / 3) for device_fraction in split)
        return round(distance, 6), -sum(1.0 / slowdown for slowdown in slowdowns)

    splits = [
        split
        for split in product(fractions, fractions, fractions)
        if sum(split) <= 1.0 + _TOLERANCE and len({*zip(sub_stages, split, strict=True)}) == len({*sub_stages})
    ]
    return min(splits, key=rank, default=None)


def sharing_entries(pairs: Mapping[tuple[SubStage, SubStage, float], tuple[float, float]]) -> Iterator[SharingEntry]:
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
    triples, cannot_do = _measured_triples(path, content["triples"], grid)
    warnings += cannot_do
    table = InterferenceTable(device=grid.device, grid=grid, measured=measured, triples=triples)
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


def _measured_triples(
    path: str | Path, entries: Iterable[Mapping[str, Any]], grid: FractionGrid
) -> tuple[tuple[SharingTriple, ...], list[str]]:
    """Triples at device fractions that the device can do, and warnings about the others."""
    triples, warnings = [], []
    for entry in entries:
        a, b, c = (sub_stage_named(name, path) for name in entry["sub_stages"])
        triple = SharingTriple(
            sub_stages=(a, b, c), device_fractions=tuple(entry["levels"]), slowdowns=tuple(entry["slowdowns"])
        )
        if all(grid.can_do(device_fraction) for device_fraction in triple.device_fractions):
            triples.append(triple)
        else:
            named = ", ".join(f"{device_fraction:g}" for device_fraction in triple.device_fractions)
            warnings.append(f"{path}: {grid.device} cannot do fractions {named} of ({a}, {b}, {c}); they are left out")
    return tuple(triples), warnings


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
        content = parse_json(path.read_bytes())
    except (OSError, ValueError) as error:
        raise UserError(f"interference profile {path} cannot be read: {error}") from error
    if not isinstance(content, dict) or content.get("schema") != 1 or not isinstance(content.get("entries"), list):
        raise UserError(f"{path} is not an interference profile: expected schema 1 with 'device' and 'entries'")
    for number, entry in enumerate(content["entries"], 1):
        if not _is_entry(entry):
            raise UserError(
                f"{path}: entry {number} is {entry!r}; "
                "expected a, b, level in (0, 1], slowdown_a and slowdown_b above 0"
            )
    triples = content.get("triples", [])
    for number, entry in enumerate(triples if isinstance(triples, list) else [triples], 1):
        if not _is_triple(entry):
            raise UserError(
                f"{path}: triple {number} is {entry!r}; expected three sub_stages, three levels above 0 (1 or less "
                "together, equal for equal sub_stages) and three slowdowns of 1 or more"
            )
    return {**content, "device": str(content.get("device", "")), "triples": triples}


def _is_entry(entry: object) -> bool:
    if not isinstance(entry, dict) or not all(isinstance(entry.get(side), str) for side in ("a", "b")):
        return False
    numbers = [entry.get(key) for key in ("level", "slowdown_a", "slowdown_b")]
    if not all(isinstance(number, int | float) and 0 < number < math.inf for number in numbers):
        return False
    return bool(entry["level"] <= 1)


def _is_triple(entry: object) -> bool:
    sides = [entry.get(key) for key in ("sub_stages", "levels", "slowdowns")] if isinstance(entry, dict) else []
    lists = [side for side in sides if isinstance(side, list) and len(side) == 3]
    if len(lists) < 3:
        return False
    sub_stages, levels, slowdowns = lists
    if not all(isinstance(name, str) for name in sub_stages):
        return False
    if not all(isinstance(number, int | float) for number in (*levels, *slowdowns)):
        return False
    are_fractions = min(levels) > 0 and sum(levels) <= 1 + _TOLERANCE
    are_even = len({*zip(sub_stages, levels, strict=True)}) == len({*sub_stages})
    return are_fractions and are_even and all(1 <= slowdown < math.inf for slowdown in slowdowns)


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
