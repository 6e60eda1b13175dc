"""Measures how two pieces of work on one device slow each other, and reads back what was measured.

What is measured of switches and of neighbouring devices goes into the same file: `switch_costs`, `neighbour_costs`.

    measure ──▶ InterferenceTable ──save──▶ profile.json ──sharing_of──▶ SharingTable ──▶ a policy that shares devices

A policy is only told of pairs and levels that were measured on this very device and helped: both together did more in
a second than one after the other. What a file has beyond that is named, with what is used instead.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from rlmux.cli import neighbour_costs, switch_costs, tables
from rlmux.core.errors import UserError
from rlmux.core.model import SubStage
from rlmux.core.policy import Policy
from rlmux.core.sharing import MIN_GAIN, SharingEntry, SharingTable
from rlmux.engines.device_fraction import DeviceFractions, probe
from rlmux.policies import POLICIES
from rlmux.profiling.micro_benchmarks import PIECES, PieceSizes, piece_processes, rates, usual_sizes
from rlmux.profiling.switch_times import SwitchTimes
from rlmux.sim.models.interference import NO_SPLIT, FractionGrid, InterferenceTable, load_interference
from rlmux.sim.models.neighbours import Neighbours

DEVICES = ("cpu", "cuda")
Switches = Mapping[str, Sequence[SwitchTimes]]
"""By pipeline: of its rollout state and of its training state."""
QUICK: Mapping[str, Any] = {"window_s": 0.05, "num_rounds": 1}
"""Enough to see that it works."""
_CHARACTER: Mapping[str, str] = {SubStage.OLD_LOGPROBS: SubStage.UPDATE, SubStage.REFERENCE: SubStage.UPDATE}
"""Pieces that the scheduler does not tell apart; the others keep their names."""


def check_device(device: str) -> None:
    """Raises UserError for a device that is not here."""
    if device not in DEVICES:
        raise UserError(f"--device {device}; accepted: {' or '.join(DEVICES)}")
    if device == "cuda":
        found = probe("cuda")
        if not found.num_units > 1:
            raise UserError(f"--device cuda: {found.missing}; accepted here: cpu")


def measure(
    device: str,
    *,
    kinds: Sequence[str] = PIECES,
    sizes: PieceSizes | None = None,
    window_s: float = 0.2,
    num_rounds: int = 3,
    progress: Callable[[int, int], None] | None = None,
) -> InterferenceTable:
    """Every pair of kinds, side by side on one core or one GPU, at every device fraction that is prepared here.

    Rounds are interleaved, since machines drift. A slowdown is of the median rate beside the best rate alone: where
    rates are noisy, sharing looks worse than it is, never better.
    """
    levels = probe(device)
    is_core = device == "cpu"
    core = min(os.sched_getaffinity(0)) if is_core else None
    pairs = [(a, b) for place, a in enumerate(kinds) for b in kinds[place:]]
    alone: dict[str, list[float]] = {kind: [] for kind in kinds}
    beside: dict[tuple[str, str, float], list[list[float]]] = {}
    with piece_processes(kinds, sizes or usual_sizes(device), device, core) as processes:
        for turn in range(num_rounds):
            for done, (a, b) in enumerate(pairs):
                if progress is not None:
                    progress(turn * len(pairs) + done, num_rounds * len(pairs))
                for kind in dict.fromkeys((a, b)):
                    alone[kind] += rates([(processes[kind][0], NO_SPLIT)], window_s, is_core=is_core)
                for share in (*levels.shares, NO_SPLIT):
                    rest = NO_SPLIT if share == NO_SPLIT else 1.0 - share
                    working = [(processes[a][0], share), (processes[b][1], rest)]
                    beside.setdefault((a, b, share), []).append(rates(working, window_s, is_core=is_core))
    measured = {
        (a, b, share): (
            max(1.0, max(alone[a]) / median(first for first, _ in rounds)),
            max(1.0, max(alone[b]) / median(second for _, second in rounds)),
        )
        for (a, b, share), rounds in beside.items()
    }
    return InterferenceTable(device=levels.device, levels=fraction_grid_of(levels), measured=measured)


def fraction_grid_of(levels: DeviceFractions) -> FractionGrid:
    return FractionGrid(
        device=levels.device, num_units=levels.num_units, unit_step=levels.unit_step, min_units=levels.min_units
    )


def sharing_of(path: Path, levels: DeviceFractions) -> tuple[SharingTable, list[str]]:
    """What a profile file lets policies do on this device, and what of it cannot be used.

    Raises UserError for a file that is no profile.
    """
    asked = (*levels.shares, NO_SPLIT)
    table, warnings = load_interference(path, fraction_grid_of(levels), PIECES, asked=asked)
    if not levels.shares:
        return SharingTable(), [*warnings, f"{levels.device} has no levels ({levels.missing}): devices are not shared"]
    entries: dict[tuple[str, str, float], SharingEntry] = {}
    unprepared: dict[float, None] = {}
    for (a, b, device_fraction), (slow_a, slow_b) in table.measured.items():
        if device_fraction >= NO_SPLIT:
            continue
        if all(abs(device_fraction - share) > 0.5 / levels.num_units for share in levels.shares):
            unprepared[device_fraction] = None
            continue
        key = (_CHARACTER.get(a, a), _CHARACTER.get(b, b), device_fraction)
        worst = entries.get(key)
        entries[key] = SharingEntry(
            sub_stage_a=key[0],
            sub_stage_b=key[1],
            device_fraction=device_fraction,
            slowdown_a=max(slow_a, 1.0, worst.slowdown_a if worst else 1.0),
            slowdown_b=max(slow_b, 1.0, worst.slowdown_b if worst else 1.0),
        )
    if unprepared:
        named = ", ".join(f"{device_fraction:g}" for device_fraction in unprepared)
        prepared = ", ".join(f"{device_fraction:g}" for device_fraction in levels.shares)
        warnings.append(f"{path}: fraction {named} is not prepared here; used instead: {prepared}, where measured")
    sharing = SharingTable.of(entries.values())
    if not sharing.rates:
        warnings.append(f"{path}: no pair gains {_least_gain()} by sharing; every order has its devices alone")
    return sharing, warnings


def fractions_here() -> DeviceFractions:
    """Of the GPU, where there is one."""
    gpu = probe("cuda")
    return gpu if gpu.num_units > 1 else probe("cpu")


def policy_named(name: str, profile: Path) -> tuple[Policy, list[str]]:
    """The policy, told what the profile has for it if it can share devices; and what cannot be used."""
    policy = POLICIES[name]()
    sharing, warnings = sharing_of(profile, fractions_here())
    if is_dataclass(policy) and any(one.name == "sharing" for one in fields(policy)):
        shared: Any = policy
        return replace(shared, sharing=sharing), warnings
    return policy, [*warnings, f"--profile: policy {name} gives devices as a whole: only its switches are used"]


def save(table: InterferenceTable, switches: Switches, path: Path, neighbours: Neighbours | None = None) -> None:
    path.write_text(json.dumps(_to_json(table, switches, neighbours), indent=1) + "\n", encoding="utf-8")


def _to_json(table: InterferenceTable, switches: Switches, neighbours: Neighbours | None) -> dict[str, Any]:
    found = {} if neighbours is None else {"neighbours": neighbours.to_json()}
    return {**table.to_json(), "switches": switch_costs.to_json(switches), **found}


def show(
    table: InterferenceTable,
    switches: Switches,
    path: Path,
    neighbours: Neighbours | None = None,
    *,
    as_json: bool,
    without_neighbours: str | None = None,
) -> None:
    """One row for each pair: the slowdowns at each device fraction, and whether the best of them helps. Then the slowdowns of
    neighbours, or why there are none, and one row for each state."""
    if as_json:
        tables.print_json(_to_json(table, switches, neighbours))
        return
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    for (a, b, device_fraction), (slow_a, slow_b) in table.measured.items():
        row = rows.setdefault((a, b), {"beside": f"{a} | {b}"})
        row["whole" if device_fraction >= NO_SPLIT else f"{device_fraction:.2g}"] = f"{slow_a:.2f} {slow_b:.2f}"
        gain = 1.0 / slow_a + 1.0 / slow_b
        row["best together"] = max(gain, row.get("best together", 0.0))
    for row in rows.values():
        gain = row.pop("best together")
        row["best together"] = f"{gain:.2f}" + (" helps" if gain >= MIN_GAIN else "")
    print(f"{table.device}: slowdown of each of two side by side, by the first one's share")
    tables.print_rows(list(rows.values()))
    print(f"best together: work in a second, over one after the other; {_least_gain()} helps")
    if neighbours is not None:
        print(f"{table.device}: slowdown of each on neighbouring devices, each on one of its own")
        tables.print_rows(neighbour_costs.rows(neighbours.measured))
    elif without_neighbours:
        print(without_neighbours)
    print(f"{table.device}: seconds of a switch, another state of that size leaving included")
    tables.print_rows(switch_costs.rows(switches))
    print(f"Written: {path}")


def _least_gain() -> str:
    return f"{MIN_GAIN:g} or more"
