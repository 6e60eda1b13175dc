"""Which sub-stages may share a device, at which device fractions, and how much each slows the others.

    rlmux profile / a simulated device ── entries ─▶ SharingTable ── rates_beside(a, (b,)) ─▶ SharedRates or None
    pipelines of one base ── BaseBatches ─────┘

Sub-stages are named as `SubStage` does. Where no more is measured, `old_logprobs` stands for every forward of training
and `update` for all of training. A pair is in the table only if it was measured to help: together they do more work in
a second than one after the other. Three are in it if they do more than the best two of them. An empty table allows no
sharing: every order then has its devices alone.

Pipelines with adapters of one base compute in one batch where they share a device: `sub_stage_in` names a sub-stage of
such a pipeline. It shares as the plain one does, and with its like of the same base by `BaseBatches`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations, combinations_with_replacement, pairwise, product, takewhile
from operator import itemgetter

from rlmux.core.model import SubStage

MIN_GAIN = 1.05
"""Work done together over work done one after the other, below which sharing is not worth its switches."""
_STAND_INS: Mapping[str, Sequence[str]] = {
    SubStage.REFERENCE: (SubStage.OLD_LOGPROBS, SubStage.UPDATE),
    SubStage.OLD_LOGPROBS: (SubStage.UPDATE,),
}
"""Measured sub-stages by one that was not measured and is like them, the most alike first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SharingEntry:
    """Two sub-stages that were measured side by side on one device."""

    sub_stage_a: str
    sub_stage_b: str
    device_fraction: float
    """Part of the device that `sub_stage_a` has; the other has the rest."""
    slowdown_a: float
    """Seconds of `sub_stage_a` beside the other, over its seconds alone."""
    slowdown_b: float
    """Seconds of `sub_stage_b` beside the other, over its seconds alone."""

    @property
    def gain(self) -> float:
        """Work done together over work done one after the other."""
        return 1.0 / self.slowdown_a + 1.0 / self.slowdown_b


@dataclass(frozen=True, slots=True, kw_only=True)
class SharingTriple:
    """Three sub-stages that were measured side by side on one device."""

    sub_stages: tuple[str, str, str]
    device_fractions: tuple[float, float, float]
    """Part of the device that each has."""
    slowdowns: tuple[float, float, float]
    """Seconds of each beside the two others, over its seconds alone."""

    @property
    def gain(self) -> float:
        """Work done together over work done one after the other."""
        return sum(1.0 / slowdown for slowdown in self.slowdowns)


@dataclass(frozen=True, slots=True, kw_only=True)
class BaseBatches:
    """Sub-stages that pipelines of one base compute in one batch."""

    base: str
    sub_stages: tuple[SubStage, ...]
    slowdowns: tuple[float, ...] = ()
    """Seconds in a batch of 2, 3, ... pipelines, over the seconds alone; up to the most that may be together."""

    def helpful(self) -> tuple[float, ...]:
        """The slowdowns of batches of which each does more work in a second than the one of a pipeline less."""
        gains = [1.0, *(number / slowdown for number, slowdown in enumerate(self.slowdowns, 2))]
        is_worth = [after >= MIN_GAIN * before for before, after in pairwise(gains)]
        return tuple(slowdown for slowdown, _ in takewhile(itemgetter(1), zip(self.slowdowns, is_worth, strict=True)))


def sub_stage_in(sub_stage: SubStage, base: str) -> str:
    """The name in a table of a sub-stage of a pipeline whose adapter stands on the base; empty: on none."""
    return f"{sub_stage} on {base}" if base else sub_stage


@dataclass(frozen=True, slots=True)
class SharedRates:
    """How a sub-stage runs beside others."""

    device_fraction: float
    """Part of the device that it has."""
    slowdown: float
    """Its seconds beside the others, over its seconds alone."""


@dataclass(frozen=True, slots=True)
class SharingTable:
    """The best device fractions of every pair and triple that helps; see the module."""

    entries: tuple[SharingEntry, ...] = ()
    triples: tuple[SharingTriple, ...] = ()
    batches: tuple[BaseBatches, ...] = ()
    _shared: dict[tuple[str, ...], SharedRates] = field(init=False, repr=False, compare=False)
    most_together: int = field(init=False, repr=False, compare=False)
    """Sub-stages that share a device at most; 1 where none may."""
    _rates: dict[tuple[str, ...], float] = field(init=False, repr=False, compare=False)
    gains: dict[tuple[str, ...], float] = field(init=False, repr=False, compare=False)
    """Work done together over work done one after the other, by the keys of `rates`."""
    gain_levels: tuple[float, ...] = field(init=False, repr=False, compare=False)
    """The different gains, ascending."""

    def __post_init__(self) -> None:
        shared: dict[tuple[str, ...], SharedRates] = {}
        gains: dict[frozenset[str], float] = {}
        for entry in _with_stand_ins(self.entries):
            if not 0.0 < entry.device_fraction < 1.0 or min(entry.slowdown_a, entry.slowdown_b) < 1.0:
                raise ValueError(f"{entry} is no measured pair: 0 < device_fraction < 1, slowdowns at least 1")
            a, b = entry.sub_stage_a, entry.sub_stage_b
            if a == b:
                entry = _even(entry)
            if entry.gain < MIN_GAIN or entry.gain <= gains.get(frozenset((a, b)), 0.0):
                continue
            gains[frozenset((a, b))] = entry.gain
            shared[b, a] = SharedRates(1.0 - entry.device_fraction, entry.slowdown_b)
            shared[a, b] = SharedRates(entry.device_fraction, entry.slowdown_a)
        for triple in sorted(self.triples, key=lambda triple: triple.gain):
            best_pair = max(gains.get(frozenset(pair), 1.0) for pair in combinations(triple.sub_stages, 2))
            if triple.gain < MIN_GAIN * best_pair:
                continue
            for place, sub_stage in enumerate(triple.sub_stages):
                others = sorted(triple.sub_stages[:place] + triple.sub_stages[place + 1 :])
                shared[sub_stage, *others] = SharedRates(triple.device_fractions[place], triple.slowdowns[place])
        for base_batches in self.batches:
            shared.update(_on_base(shared, base_batches))
        for base_batches in self.batches:
            shared.update(_in_batches(base_batches))
        object.__setattr__(self, "_shared", shared)
        object.__setattr__(self, "_rates", {key: 1.0 / rates.slowdown for key, rates in shared.items()})
        object.__setattr__(self, "gains", _gains(self._rates))
        object.__setattr__(self, "gain_levels", tuple(sorted(set(self.gains.values()))))
        object.__setattr__(self, "most_together", max(map(len, shared), default=1))

    @classmethod
    def of(cls, entries: Iterable[SharingEntry], triples: Iterable[SharingTriple] = ()) -> SharingTable:
        return cls(tuple(entries), tuple(triples))

    @property
    def rates(self) -> dict[tuple[str, ...], float]:
        """Solo seconds per second of the first beside the others, which are sorted, for all that helps."""
        return self._rates

    def up_to(self, num_together: int) -> SharingTable:
        """The same where no more than so many states fit a device together."""
        if num_together < 2:
            return NO_SHARING
        if num_together >= self.most_together:
            return self
        batches = [
            replace(base_batches, slowdowns=base_batches.slowdowns[: num_together - 1]) for base_batches in self.batches
        ]
        return SharingTable(self.entries, self.triples if num_together > 2 else (), tuple(batches))

    @property
    def allows_any(self) -> bool:
        """Whether any sub-stages may share a device."""
        return self.most_together > 1

    def rates_beside(self, sub_stage: str, others: Iterable[str]) -> SharedRates | None:
        """How `sub_stage` runs beside the others; None where sharing was not measured to help."""
        return self._shared.get((sub_stage, *sorted(others)))


def _gains(rates: Mapping[tuple[str, ...], float]) -> dict[tuple[str, ...], float]:
    """Solo seconds per second of all that are together, by each of them beside the others."""
    gains = {}
    for together in rates:
        others_of = [(each, *sorted(together[:place] + together[place + 1 :])) for place, each in enumerate(together)]
        gains[together] = round(sum(rates[key] for key in others_of), 9)
    return gains


def _on_base(shared: Mapping[tuple[str, ...], SharedRates], batches: BaseBatches) -> dict[tuple[str, ...], SharedRates]:
    """What holds for pairs of plain sub-stages, for pairs of which some are on the base."""
    names = {str(sub_stage): (sub_stage, sub_stage_in(sub_stage, batches.base)) for sub_stage in batches.sub_stages}
    return {
        (first, second): rates
        for (a, *others), rates in shared.items()
        if len(others) == 1
        for first in names.get(a, (a,))
        for second in names.get(others[0], (others[0],))
    }


def _in_batches(batches: BaseBatches) -> dict[tuple[str, ...], SharedRates]:
    """Any sub-stages on the base in one batch: each pipeline has an equal part of the device."""
    names = sorted(sub_stage_in(sub_stage, batches.base) for sub_stage in batches.sub_stages)
    return {
        (first, *others): SharedRates(1.0 / number, slowdown)
        for number, slowdown in enumerate(batches.helpful(), 2)
        for first in names
        for others in combinations_with_replacement(names, number - 1)
    }


def _with_stand_ins(entries: tuple[SharingEntry, ...]) -> Iterator[SharingEntry]:
    """The entries, and the same for sub-stages that were not measured."""
    known = {name for entry in entries for name in (entry.sub_stage_a, entry.sub_stage_b)}
    names: dict[str, list[str]] = {name: [name] for name in known}
    for missing, stand_ins in _STAND_INS.items():
        stand_in = next((candidate for candidate in stand_ins if candidate in known), None)
        if missing not in known and stand_in is not None:
            names[stand_in].append(missing)
    for entry in entries:
        for a, b in product(names[entry.sub_stage_a], names[entry.sub_stage_b]):
            yield replace(entry, sub_stage_a=a, sub_stage_b=b)


def _even(entry: SharingEntry) -> SharingEntry:
    """Two alike cannot be distinguished, so both get what the smaller device fraction was measured with."""
    is_first_smaller = entry.device_fraction <= 0.5
    slowdown = entry.slowdown_a if is_first_smaller else entry.slowdown_b
    device_fraction = entry.device_fraction if is_first_smaller else 1.0 - entry.device_fraction
    return replace(entry, device_fraction=device_fraction, slowdown_a=slowdown, slowdown_b=slowdown)


NO_SHARING = SharingTable()
