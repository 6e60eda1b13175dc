"""What busy neighbours cost: how two orders that compute on two devices of one machine slow each other.

    profile file (JSON) ──load_neighbours──▶ Neighbours ──slowdown(sub-stage, others)──▶ NeighbourRates (rates.py)
                               └──▶ warnings         └───── seconds_lost(busy) ──▶ a log without it (recorded.py)

Each order has a device of its own, and yet what the devices share (caches, memory, power, the processor below a virtual
machine) makes both slower. Two sub-stages are measured, dense decoding and update; each of the others goes by one of
them. Of several neighbours the worst counts: only pairs were measured, and a product over seven neighbours would make a
third of a few percent. Invariant: a slowdown is at least 1, and 1 without neighbours.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlmux.core.errors import UserError
from rlmux.core.model import DeviceId, SubStage
from rlmux.sim.models.interference import read_profile, sub_stage_named

MEASURED_SUB_STAGES = (SubStage.DENSE_DECODE, SubStage.UPDATE)
"""Sub-stages whose slowdowns are measured."""
_MEASURED_AS: Mapping[SubStage, SubStage] = {
    SubStage.PREFILL: SubStage.DENSE_DECODE,
    SubStage.TAIL_DECODE: SubStage.DENSE_DECODE,
    SubStage.REFERENCE: SubStage.UPDATE,
    SubStage.OLD_LOGPROBS: SubStage.UPDATE,
}
_KEY = "neighbours"


@dataclass(frozen=True, slots=True, kw_only=True)
class Neighbours:
    """Slowdowns of orders on devices of one machine."""

    device: str
    """Name of the hardware."""
    measured: Mapping[tuple[SubStage, SubStage], float]
    """Slowdown by (sub-stage slowed, sub-stage beside it); a pair that is missing costs nothing."""
    is_one_machine: bool = False
    """Whether all nodes are one machine, as under the local backend; else neighbours are devices of one node."""

    @property
    def are_cores(self) -> bool:
        """Whether the devices are cores of the machine that the controller runs on."""
        return self.is_one_machine and self.device.startswith("cpu")

    def machine(self, device: DeviceId) -> Hashable:
        """A key of the device's machine, equal for neighbours."""
        return None if self.is_one_machine else device.node_id

    def slowdown(self, sub_stage: SubStage, others: Iterable[SubStage]) -> float:
        """Slowdown of a sub-stage while these compute on other devices of its machine."""
        mine = _MEASURED_AS.get(sub_stage, sub_stage)
        return max((self.measured.get((mine, _MEASURED_AS.get(other, other)), 1.0) for other in others), default=1.0)

    def to_json(self) -> list[dict[str, Any]]:
        return [
            {"kind": sub_stage, "beside": beside, "slowdown": slowdown}
            for (sub_stage, beside), slowdown in self.measured.items()
        ]


def load_neighbours(path: str | Path, device: str) -> tuple[Neighbours | None, list[str]]:
    """A profile file's figures of neighbouring devices, or None with the reason for their absence.

    Raises UserError for a file that is no profile, and for entries that are no slowdowns.
    """
    content = read_profile(Path(path))
    used_instead = "busy neighbours are taken to cost nothing"
    if content["device"] != device:
        return None, [f"{path} was measured on {content['device']!r}, not on {device!r}: {used_instead}"]
    if _KEY not in content:
        return None, [f"{path} has nothing of neighbouring devices: {used_instead}"]
    return Neighbours(device=device, measured=_measured(path, content[_KEY])), []


def _measured(path: str | Path, entries: Any) -> dict[tuple[SubStage, SubStage], float]:
    measured = {}
    for number, entry in enumerate(entries if isinstance(entries, list) else [entries], 1):
        if not _is_entry(entry):
            raise UserError(
                f"{path}: neighbour {number} is {entry!r}; expected kind, beside and a slowdown of 1 or more"
            )
        key = sub_stage_named(entry["kind"], path), sub_stage_named(entry["beside"], path)
        measured[key] = float(entry["slowdown"])
    return measured


def _is_entry(entry: object) -> bool:
    if not isinstance(entry, dict) or not all(isinstance(entry.get(side), str) for side in ("kind", "beside")):
        return False
    slowdown = entry.get("slowdown")
    return isinstance(slowdown, int | float) and not isinstance(slowdown, bool) and 1.0 <= slowdown < math.inf


# --- of a log -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Busy:
    """A stretch of time in which an order computed on a device without a break."""

    order: int | None
    """Number of the order; None for work that belongs to none: it slows others and loses nothing itself."""
    device: DeviceId
    sub_stage: SubStage
    start_s: float
    end_s: float


def seconds_lost(busy: Sequence[Busy], neighbours: Neighbours) -> dict[int, float]:
    """Seconds that each order lost to orders computing beside it; on several devices those lost on the worst.

    An order's seconds minus these are what it would have taken alone.
    """
    by_machine: dict[Hashable, list[Busy]] = {}
    for stretch in busy:
        by_machine.setdefault(neighbours.machine(stretch.device), []).append(stretch)
    lost: dict[tuple[int | None, DeviceId], float] = {}
    for on_machine in by_machine.values():
        for together, seconds in _stretches(on_machine):
            for stretch in together:
                others = [
                    other.sub_stage
                    for other in together
                    if other.device != stretch.device and (other.order is None or other.order != stretch.order)
                ]
                key = stretch.order, stretch.device
                lost[key] = lost.get(key, 0.0) + seconds * (1.0 - 1.0 / neighbours.slowdown(stretch.sub_stage, others))
    worst: dict[int, float] = {}
    for (order, _), seconds in lost.items():
        if order is not None:
            worst[order] = max(seconds, worst.get(order, 0.0))
    return worst


def _stretches(busy: Sequence[Busy]) -> Iterator[tuple[list[Busy], float]]:
    """(what computes at once, seconds until one of it ends or another begins), wherever it is two or more."""
    edges = sorted(
        (at_s, is_start, number)
        for number, stretch in enumerate(busy)
        for at_s, is_start in ((stretch.start_s, True), (stretch.end_s, False))
        if stretch.end_s > stretch.start_s
    )
    here: dict[int, Busy] = {}
    before_s = 0.0
    for at_s, is_start, number in edges:
        if len(here) > 1 and at_s > before_s:
            yield list(here.values()), at_s - before_s
        before_s = at_s
        if is_start:
            here[number] = busy[number]
        else:
            del here[number]
