"""Which pairs of sub-stages may share a device, at which device fraction, and how much each slows the other.

    rlmux profile / a simulated device ── entries ─▶ SharingTable ── pair_rates(a, b) ─▶ PairRates or None

Sub-stages are named as `SubStage` does; `update` stands for all of training where no more is measured. A pair is in the
table only if it was measured to help: together they do more work in a second than one after the other. An empty table
allows no sharing: every order then has its devices alone.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

MIN_GAIN = 1.05
"""Work done together over work done one after the other, below which sharing is not worth its switches."""


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


@dataclass(frozen=True, slots=True)
class PairRates:
    """How two sub-stages run side by side."""

    device_fraction: float
    """Part of the device that the first of the two has."""
    slowdown: float
    """Seconds of the first beside the second, over its seconds alone."""
    other_slowdown: float
    """Seconds of the second beside the first, over its seconds alone."""


@dataclass(frozen=True, slots=True)
class SharingTable:
    """The best device fraction of every pair that helps; see the module."""

    entries: tuple[SharingEntry, ...] = ()
    _pair_rates: dict[tuple[str, str], PairRates] = field(init=False, repr=False, compare=False)
    _rates: dict[tuple[str, str], float] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        best: dict[tuple[str, str], tuple[float, PairRates]] = {}
        for entry in self.entries:
            if not 0.0 < entry.device_fraction < 1.0 or min(entry.slowdown_a, entry.slowdown_b) < 1.0:
                raise ValueError(f"{entry} is no measured pair: 0 < device_fraction < 1, slowdowns at least 1")
            if entry.sub_stage_a == entry.sub_stage_b:
                entry = _even(entry)
            if entry.gain < MIN_GAIN:
                continue
            forward = PairRates(entry.device_fraction, entry.slowdown_a, entry.slowdown_b)
            backward = PairRates(1.0 - entry.device_fraction, entry.slowdown_b, entry.slowdown_a)
            for key, pair_rates in (
                ((entry.sub_stage_a, entry.sub_stage_b), forward),
                ((entry.sub_stage_b, entry.sub_stage_a), backward),
            ):
                if key not in best or entry.gain > best[key][0]:
                    best[key] = (entry.gain, pair_rates)
        object.__setattr__(self, "_pair_rates", {key: pair_rates for key, (_, pair_rates) in best.items()})
        object.__setattr__(self, "_rates", {key: 1.0 / pair_rates.slowdown for key, (_, pair_rates) in best.items()})

    @classmethod
    def of(cls, entries: Iterable[SharingEntry]) -> SharingTable:
        return cls(tuple(entries))

    @property
    def rates(self) -> dict[tuple[str, str], float]:
        """Solo seconds per second of the first beside the second, for every pair that helps."""
        return self._rates

    def pair_rates(self, sub_stage: str, other: str) -> PairRates | None:
        """How `sub_stage` runs beside `other`; None where sharing was not measured to help."""
        return self._pair_rates.get((sub_stage, other))


def _even(entry: SharingEntry) -> SharingEntry:
    """Two alike cannot be distinguished, so both get what the smaller device fraction was measured with."""
    is_first_smaller = entry.device_fraction <= 0.5
    slowdown = entry.slowdown_a if is_first_smaller else entry.slowdown_b
    device_fraction = entry.device_fraction if is_first_smaller else 1.0 - entry.device_fraction
    return replace(entry, device_fraction=device_fraction, slowdown_a=slowdown, slowdown_b=slowdown)


NO_SHARING = SharingTable()
