"""What busy neighbours cost: how two orders slow each other that compute on two devices of one machine.

    profile file (JSON) ──load_neighbours──▶ Neighbours ──slowdown(kind, others)──▶ a pace (pace.py)
                               └──▶ warnings         └───── seconds_lost(pieces) ──▶ a log without it (recorded.py)

Each has a device of its own, and yet what they share (caches, memory, power, the processor below a virtual machine)
makes both slower. Two characters are told apart, decoding and training: the other sub-stages go by one of them. Of
several neighbours the worst counts: pairs are what was measured, and a product over seven neighbours would make a third
of a few percent. Invariant: a slowdown is at least 1, and 1 beside nobody.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlmux.core.errors import UserError
from rlmux.core.model import DeviceId, SubStage
from rlmux.sim.models.interference import read_profile

KINDS = (SubStage.DENSE_DECODE, SubStage.UPDATE)
"""What is measured."""
_STANDS_FOR: Mapping[str, str] = {
    SubStage.PREFILL: SubStage.DENSE_DECODE,
    SubStage.TAIL_DECODE: SubStage.DENSE_DECODE,
    SubStage.REFERENCE: SubStage.UPDATE,
    SubStage.OLD_LOGPROBS: SubStage.UPDATE,
}
_KEY = "neighbours"


@dataclass(frozen=True, slots=True, kw_only=True)
class Neighbours:
    """Slowdowns on devices of one machine, measured by (who, beside whom); a pair that is not there costs nothing."""

    device: str
    """Name of the hardware."""
    measured: Mapping[tuple[str, str], float]
    is_one_machine: bool = False
    """All nodes are one machine, as the local backend has it; else neighbours are on one node."""

    @property
    def are_cores(self) -> bool:
        """The devices are cores of the machine on which the controller is, too."""
        return self.is_one_machine and self.device.startswith("cpu")

    def machine(self, device: DeviceId) -> Hashable:
        """Equal for neighbours."""
        return None if self.is_one_machine else device.node_id

    def slowdown(self, kind: str, others: Iterable[str]) -> float:
        """Of a sub-stage while these compute on other devices of its machine."""
        mine = _STANDS_FOR.get(kind, kind)
        return max((self.measured.get((mine, _STANDS_FOR.get(other, other)), 1.0) for other in others), default=1.0)

    def to_json(self) -> list[dict[str, Any]]:
        return [
            {"kind": kind, "beside": beside, "slowdown": slowdown} for (kind, beside), slowdown in self.measured.items()
        ]


def load_neighbours(path: str | Path, device: str) -> tuple[Neighbours | None, list[str]]:
    """What a profile file says of neighbouring devices, or None and why there is nothing for this device.

    Raises UserError for a file that is no profile, or entries that are no slowdowns.
    """
    content = read_profile(Path(path))
    used_instead = "busy neighbours are taken to cost nothing"
    if content["device"] != device:
        return None, [f"{path} was measured on {content['device']!r}, not on {device!r}: {used_instead}"]
    if _KEY not in content:
        return None, [f"{path} has nothing of neighbouring devices: {used_instead}"]
    return Neighbours(device=device, measured=_measured(path, content[_KEY])), []


def _measured(path: str | Path, entries: Any) -> dict[tuple[str, str], float]:
    measured = {}
    for number, entry in enumerate(entries if isinstance(entries, list) else [entries], 1):
        if not _is_entry(entry):
            raise UserError(
                f"{path}: neighbour {number} is {entry!r}; expected kind, beside and a slowdown of 1 or more"
            )
        measured[entry["kind"], entry["beside"]] = float(entry["slowdown"])
    return measured


def _is_entry(entry: object) -> bool:
    if not isinstance(entry, dict) or not all(isinstance(entry.get(side), str) for side in ("kind", "beside")):
        return False
    slowdown = entry.get("slowdown")
    return isinstance(slowdown, int | float) and not isinstance(slowdown, bool) and 1.0 <= slowdown < math.inf


# --- of a log -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Busy:
    """An order computed there without a break."""

    order: int | None
    """None: whoever it was, it loses nothing itself."""
    device: DeviceId
    kind: str
    start_s: float
    end_s: float


def seconds_lost(pieces: Sequence[Busy], neighbours: Neighbours) -> dict[int, float]:
    """What each order lost to those that computed beside it, by order; on several devices what it lost on the worst.

    An order's seconds less these are what it would have taken alone.
    """
    by_machine: dict[Hashable, list[Busy]] = {}
    for piece in pieces:
        by_machine.setdefault(neighbours.machine(piece.device), []).append(piece)
    lost: dict[tuple[int | None, DeviceId], float] = {}
    for on_machine in by_machine.values():
        for here, seconds in _moments(on_machine):
            for piece in here:
                others = [
                    other.kind
                    for other in here
                    if other.device != piece.device and (other.order is None or other.order != piece.order)
                ]
                key = piece.order, piece.device
                lost[key] = lost.get(key, 0.0) + seconds * (1.0 - 1.0 / neighbours.slowdown(piece.kind, others))
    worst: dict[int, float] = {}
    for (order, _), seconds in lost.items():
        if order is not None:
            worst[order] = max(seconds, worst.get(order, 0.0))
    return worst


def _moments(pieces: Sequence[Busy]) -> Iterator[tuple[list[Busy], float]]:
    """Who computes, and for how long nobody begins or ends, wherever there are two or more."""
    edges = sorted(
        (at_s, is_start, number)
        for number, piece in enumerate(pieces)
        for at_s, is_start in ((piece.start_s, True), (piece.end_s, False))
        if piece.end_s > piece.start_s
    )
    here: dict[int, Busy] = {}
    before_s = 0.0
    for at_s, is_start, number in edges:
        if len(here) > 1 and at_s > before_s:
            yield list(here.values()), at_s - before_s
        before_s = at_s
        if is_start:
            here[number] = pieces[number]
        else:
            del here[number]
