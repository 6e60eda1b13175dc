"""Which of the machine's devices each lane of a service has: its own, and no other's.

    lanes a (2 devices), b (1 device)  ── on cores 0 1 2 3 ──▶  a: 0 1   b: 2        GPUs alike, by name

A lane that had devices before keeps them, whatever the file's order is now: its controller may still live. One lane
alone is not held to its part: it may have more devices than the machine has cores, as `rlmux run` may.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rlmux.config.load import Spec
from rlmux.core.errors import UserError
from rlmux.log.folder_lock import living_owner
from rlmux.runtime.gpus_here import visible_gpus
from rlmux.runtime.local import SharedMemoryFolder, neighbours_on
from rlmux.runtime.workers.worker_pool import Neighbour

_KEPT = "devices.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneDevices:
    """What a lane's controller may use."""

    gpus: tuple[str, ...] = ()
    """Names as CUDA_VISIBLE_DEVICES has them; empty where lanes are on cores, or not held to a part."""
    cores: tuple[int, ...] = ()
    """Cores that its processes are kept on; empty where lanes are on GPUs, or not held to a part."""


NOT_HELD = LaneDevices()
"""The whole machine."""


def check_devices(specs: Mapping[str, Spec], devices: Sequence[str] | None = None) -> None:
    """Raises UserError where the lanes have more devices together than the machine (`devices`: names, for tests)."""
    _check({name: num_devices(spec) for name, spec in specs.items()}, _source(specs), devices)


def parts_of(root: Path, specs: Mapping[str, Spec], devices: Sequence[str] | None = None) -> dict[str, LaneDevices]:
    """The part of each lane, as the service's folder keeps it. Raises UserError where there are too few devices."""
    every = list(devices) if devices is not None else machine_devices()
    wanted = {name: num_devices(spec) for name, spec in specs.items()}
    before = _kept(root)
    held = {name: its for name, its in before.items() if name not in wanted and living_owner(root / name) is not None}
    _check({**{name: len(its) for name, its in held.items()}, **wanted}, _source(specs), every)
    kept = {
        name: before[name] for name, num in wanted.items() if len(before.get(name, ())) == min(num, len(every))
    } | held
    kept = {name: its for name, its in kept.items() if set(its) <= set(every)}
    free = [device for device in every if not any(device in its for its in kept.values())]
    for name, num in wanted.items():
        if name not in kept:
            kept[name], free = free[:num], free[num:]
    aside = root / f".{_KEPT}"
    aside.write_text(json.dumps(kept), encoding="utf-8")
    aside.rename(root / _KEPT)
    if len(kept) == 1:
        return dict.fromkeys(wanted, NOT_HELD)
    return {name: _part(kept[name]) for name in wanted}


def neighbours_of(root: Path, names: Collection[str]) -> list[Neighbour]:
    """Runs and lanes of other services that have devices of these lanes, as the service's folder keeps them."""
    devices = {device for name, its in _kept(root).items() if name in names for device in its}
    own = [SharedMemoryFolder.path_of(root / name) for name in names]
    return neighbours_on(own[0].parent, devices, but=own) if own else []


def num_devices(spec: Spec) -> int:
    """GPUs (or cores) of all devices in a lane's file; a pool without a number of nodes counts none (`rlmux run`
    refuses it)."""
    return sum(pool.num_gpus or 0 for pool in spec.cluster.pools.values())


def _check(num_by_lane: Mapping[str, int], source: str, devices: Sequence[str] | None = None) -> None:
    every = list(devices) if devices is not None else machine_devices()
    total = sum(num_by_lane.values())
    if len(num_by_lane) > 1 and total > len(every):
        lanes = ", ".join(f"{name} ({num})" for name, num in num_by_lane.items())
        kind = "GPUs" if every[:1] and every[0].startswith("GPU ") else "cores"
        raise UserError(
            f"{source}: lanes {lanes} have {total} devices together; accepted: at most {len(every)}, the {kind} that "
            "this machine has, as no two lanes share a device"
        )


def machine_devices() -> list[str]:
    """Names of this machine's devices: its GPUs, else the cores that this process may use."""
    gpus = visible_gpus()
    return [f"GPU {gpu}" for gpu in gpus] or [f"core {core}" for core in sorted(os.sched_getaffinity(0))]


def _part(devices: Sequence[str]) -> LaneDevices:
    gpus = tuple(name.removeprefix("GPU ") for name in devices if name.startswith("GPU "))
    cores = tuple(int(name.removeprefix("core ")) for name in devices if name.startswith("core "))
    return LaneDevices(gpus=gpus, cores=cores)


def _kept(root: Path) -> dict[str, list[str]]:
    try:
        kept: dict[str, list[str]] = json.loads((root / _KEPT).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except ValueError as error:
        path = root / _KEPT
        raise UserError(
            f"{path}: not JSON ({error}); accepted: remove it where no controller of a lane lives"
        ) from None
    return kept


def _source(specs: Mapping[str, Spec]) -> str:
    return next(iter(specs.values())).source
