"""Proof of delivery: whether the weights that sampled a step are those that were trained, from the notes `step`.

    versions     that made the step's tokens           compared with the versions that staleness allows
    loaded       checksums verified by engines         compared with `published`, of the same version
    published    checksums of the trainer              of all parameters, and of the file for rollout workers

Version 0 of a pipeline without SFT warm-up is built on both sides, never loaded: nothing is compared. An engine that
reports no checksum (a server, a user's engine) leaves `loaded` empty for its versions.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from rlmux.log.notes import WeightDelivery


class Checksum(StrEnum):
    """Result of the comparison of checksums."""

    EQUAL = "equal"
    DIFFERENT = "different"
    INITIAL = "initial"
    """The initial weights, which rollout and training build alike."""
    NOT_COMPARED = "not compared"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepDelivery:
    """What is known of the weights that sampled one step."""

    versions: Sequence[int]
    """Weight versions that made its tokens, in order."""
    allowed: tuple[int, int]
    """(oldest, newest) version that staleness allows."""
    checksum: Checksum
    loaded: Mapping[int, Sequence[str]]
    """Checksums verified by engines, by version."""
    published: Mapping[int, Sequence[str]]
    """Checksums of the trainer, by version."""
    logprob_gap: float | None
    """Largest difference in nats between the log-probs of rollout and training; None if no token was compared."""

    @property
    def is_allowed(self) -> bool:
        """Whether staleness allows every version."""
        oldest, newest = self.allowed
        return all(oldest <= version <= newest for version in self.versions)

    @property
    def is_ok(self) -> bool:
        """Whether nothing contradicts that these are the trained weights."""
        return self.is_allowed and self.checksum is not Checksum.DIFFERENT

    @property
    def text(self) -> str:
        """A table's cell: `v12 = trained · gap 2e-7`."""
        found = f"v{_range(self.versions)} {_SIGNS[self.checksum]}"
        allowed = "" if self.is_allowed else f" · allowed v{_range(self.allowed)}"
        return found + allowed + ("" if self.logprob_gap is None else f" · gap {short(self.logprob_gap)}")

    @property
    def says(self) -> str:
        """The same in sentences."""
        gap = (
            "No log-prob was compared."
            if self.logprob_gap is None
            else f"Largest difference between the log-probs of rollout and training: {short(self.logprob_gap)} nats."
        )
        allowed = f"Sampled by version {_range(self.versions)}; allowed: {_range(self.allowed)}."
        return f"{allowed} {_SENTENCES[self.checksum]} {gap}"

    def as_json(self) -> dict[str, Any]:
        """Field `delivery` of the table of steps."""
        return {
            "versions": list(self.versions),
            "allowed": list(self.allowed),
            "checksum": str(self.checksum),
            "loaded": {str(version): list(sums) for version, sums in self.loaded.items()},
            "published": {str(version): list(sums) for version, sums in self.published.items()},
            "logprob_gap": self.logprob_gap,
            "is_ok": self.is_ok,
            "text": self.text,
            "says": self.says,
        }


@dataclass(slots=True)
class Deliveries:
    """A pipeline's notes `step` as they come in."""

    versions: dict[int, tuple[Sequence[int], tuple[int, int]]] = field(default_factory=dict)
    """(weight versions that made its tokens, oldest and newest that staleness allows) by step."""
    loaded: dict[int, set[str]] = field(default_factory=dict)
    published: dict[int, set[str]] = field(default_factory=dict)

    def add(self, step: int, delivery: WeightDelivery) -> None:
        self.versions[step] = delivery.versions, delivery.allowed
        for sums, found in ((self.loaded, delivery.loaded), (self.published, delivery.published)):
            for version, checksums in found.items():
                sums.setdefault(version, set()).update(checksums)

    def forget_after(self, step: int) -> None:
        """Drop the steps after this one, which are done again, and their versions."""
        for by_number in (self.versions, self.loaded, self.published):
            for number in [number for number in by_number if number > step]:
                del by_number[number]

    def of(self, step: int, *, logprob_gap: float | None) -> StepDelivery | None:
        """Delivery of a step; None for a log that has none."""
        if step not in self.versions:
            return None
        versions, allowed = self.versions[step]
        return StepDelivery(
            versions=versions,
            allowed=allowed,
            checksum=self._checksum(versions),
            loaded={version: sorted(self.loaded[version]) for version in versions if version in self.loaded},
            published={version: sorted(self.published[version]) for version in versions if version in self.published},
            logprob_gap=logprob_gap,
        )

    def _checksum(self, versions: Iterable[int]) -> Checksum:
        found = {self._checksum_of(version) for version in versions}
        for each in (Checksum.DIFFERENT, Checksum.NOT_COMPARED, Checksum.EQUAL):
            if each in found:
                return each
        return Checksum.INITIAL

    def _checksum_of(self, version: int) -> Checksum:
        loaded, published = self.loaded.get(version), self.published.get(version)
        if version == 0 and loaded is None and published is None:
            return Checksum.INITIAL
        if not loaded or not published:
            return Checksum.NOT_COMPARED
        return Checksum.EQUAL if loaded <= published else Checksum.DIFFERENT


def delivery_summary(steps: Mapping[int, StepDelivery]) -> dict[str, Any] | None:
    """Key `delivery` of a pipeline in `summary.json`, of its steps in order; None without any."""
    if not steps:
        return None
    of_checksum = {each: sum(of_step.checksum is each for of_step in steps.values()) for each in Checksum}
    wrong = [step for step, of_step in steps.items() if not of_step.is_ok]
    gaps = [of_step.logprob_gap for of_step in steps.values() if of_step.logprob_gap is not None]
    largest = max(gaps, default=None)
    return {
        "num_steps": len(steps),
        "num_equal": of_checksum[Checksum.EQUAL],
        "num_initial": of_checksum[Checksum.INITIAL],
        "num_not_compared": of_checksum[Checksum.NOT_COMPARED],
        "wrong_steps": wrong,
        "logprob_gap_max": largest,
        "says": _line(steps, of_checksum, wrong, largest),
    }


def _line(
    steps: Mapping[int, StepDelivery], of_checksum: Mapping[Checksum, int], wrong: Sequence[int], largest: float | None
) -> str:
    gap = "no log-prob compared" if largest is None else f"largest log-prob gap {short(largest)}"
    if wrong:
        found = f"NOT those that were trained in {len(wrong)} of {len(steps)} steps; step {wrong[0]}: "
        return f"weights that sampled: {found}{steps[wrong[0]].text}; {gap}"
    num_initial, num_unknown = of_checksum[Checksum.INITIAL], of_checksum[Checksum.NOT_COMPARED]
    initial = f"; initial weights in {_steps(num_initial)}" if num_initial else ""
    if num_unknown == 0:
        found = f"those that were trained, in all {_steps(len(steps))} (version, checksum{initial})"
    else:
        unknown = f"no checksum from the engine in {_steps(num_unknown)}"
        found = f"of an allowed version in all {_steps(len(steps))} (version; {unknown}{initial})"
    return f"weights that sampled: {found}; {gap}"


def short(value: float) -> str:
    """A number with one digit: `2e-7`."""
    mantissa, exponent = f"{value:.0e}".split("e")
    return f"{mantissa}e{int(exponent)}" if value and not 0.01 <= abs(value) < 10 else f"{value:.1g}"


def _steps(count: int) -> str:
    return f"{count} step" if count == 1 else f"{count} steps"


def _range(versions: Sequence[int]) -> str:
    first, last = (versions[0], versions[-1]) if versions else ("?", "?")
    return str(first) if first == last else f"{first} to {last}"


_SIGNS = {
    Checksum.EQUAL: "= trained",
    Checksum.DIFFERENT: "≠ trained",
    Checksum.INITIAL: "initial",
    Checksum.NOT_COMPARED: "not compared",
}
_SENTENCES = {
    Checksum.EQUAL: "The rollout engines loaded weights with the checksum that the trainer published.",
    Checksum.DIFFERENT: "The rollout engines loaded weights with another checksum than the trainer published.",
    Checksum.INITIAL: "Initial weights are built by rollout and training alike, and have no checksum.",
    Checksum.NOT_COMPARED: "The checksum of the loaded weights was not reported, so only the version was checked.",
}
