"""A measured profile for people: slowdowns of pairs, triples and neighbours, times of steps, switches, migrations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlmux.cli import tables
from rlmux.core.estimation.colocation import MIN_GAIN, SharingTable
from rlmux.core.model import SubStage
from rlmux.profiling.migration_times import MigrationTimes
from rlmux.profiling.profile_file import Profile
from rlmux.profiling.switch_times import SwitchTimes
from rlmux.sim.models.interference import NO_SPLIT, InterferenceTable, sharing_entries


def show(profile: Profile, path: Path, *, as_json: bool, without_neighbours: str | None = None) -> None:
    """Print what `path` now holds.

    One row for each pipeline's step. One for each pair: the slowdowns at each device fraction, and whether the best of
    them helps. The same for triples at their device fractions. Then the slowdowns of neighbours, or why there are none,
    one row for each state, and one for each pipeline's migrations.
    """
    if as_json:
        tables.print_json(profile.to_json())
        return
    device = profile.table.device
    if profile.estimates:
        print(f"{device}: seconds of a pipeline's step alone; at limit: every answer reaches the token limit")
        tables.print_rows(
            [{"step of": name, "in": times} for name, times in profile.estimates.items()],
            "step of | step s: in.step_s .3f | rollout s: in.rollout_s .3f | train s: in.train_s .3f | "
            "sync s: in.sync_s .3f | rollout s at limit: in.limit_rollout_s .3f | "
            "train s at limit: in.limit_train_s .3f",
        )
    print(f"{device}: slowdown of each of two side by side, by the first one's device fraction")
    tables.print_rows(_pair_rows(profile.table))
    print(f"best together: work in a second, over one after the other; {MIN_GAIN:g} or more helps")
    if profile.table.triples:
        print(f"{device}: slowdown of each of three side by side; helps: {MIN_GAIN:g} times the work of any two")
        tables.print_rows(_triple_rows(profile.table))
    if profile.neighbours is not None:
        print(f"{device}: slowdown of each on neighbouring devices, each on one of its own")
        tables.print_rows(_neighbour_rows(profile.neighbours.measured))
    elif without_neighbours:
        print(without_neighbours)
    print(f"{device}: seconds of a switch, another state of that size leaving included")
    tables.print_rows(_switch_rows(profile.switches))
    print(f"{device}: time of a migration for each token of context; KV with other bits is never recomputed")
    tables.print_rows(_migration_rows(profile.migrations))
    print(f"The profile took {profile.wall_s:.1f} s")
    print(f"Written: {path}")


def _pair_rows(table: InterferenceTable) -> list[dict[str, Any]]:
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    best: dict[tuple[str, str], float] = {}
    for (a, b, fraction), (slow_a, slow_b) in table.measured.items():
        row = rows.setdefault((a, b), {"beside": f"{a} | {b}"})
        row["whole" if fraction >= NO_SPLIT else f"{fraction:.2g}"] = f"{slow_a:.2f} {slow_b:.2f}"
        best[a, b] = max(best.get((a, b), 0.0), 1.0 / slow_a + 1.0 / slow_b)
    for pair, row in rows.items():
        row["best together"] = f"{best[pair]:.2f}" + (" helps" if best[pair] >= MIN_GAIN else "")
    return list(rows.values())


def _triple_rows(table: InterferenceTable) -> list[dict[str, Any]]:
    sharing = SharingTable.of(sharing_entries(table.measured), table.triples)
    return [
        {
            "beside": " | ".join(triple.sub_stages),
            "fractions": " ".join(f"{device_fraction:.2g}" for device_fraction in triple.device_fractions),
            "slowdowns": " ".join(f"{slowdown:.2f}" for slowdown in triple.slowdowns),
            "together": f"{triple.gain:.2f}" + (" helps" if sharing.rates_beside(first, others) else ""),
        }
        for triple in table.triples
        for first, *others in [triple.sub_stages]
    ]


def _neighbour_rows(measured: Mapping[tuple[SubStage, SubStage], float]) -> list[dict[str, Any]]:
    """One row for each sub-stage, a column for each neighbour."""
    rows: dict[str, dict[str, Any]] = {}
    for (kind, beside), slowdown in measured.items():
        rows.setdefault(kind, {"slowdown of": kind})[f"beside {beside}"] = f"{slowdown:.2f}"
    return list(rows.values())


def _switch_rows(measured: Mapping[str, Sequence[SwitchTimes]]) -> list[dict[str, Any]]:
    """One row for each state."""
    return [
        {
            "switch to": f"{name} | {measured.phase}",
            "MB": f"{measured.state_bytes / 1e6:.1f}",
            "warm s": f"{measured.warm_s:.4f}",
            "from disk s": f"{measured.spilled_s:.4f}",
            "from checkpoint s": f"{measured.checkpoint_s:.3f}",
            "warm GB/s": f"{measured.state_bytes / 1e9 / max(measured.warm_s, 1e-9):.1f}",
            "from disk GB/s": f"{measured.state_bytes / 1e9 / max(measured.spilled_s, 1e-9):.2f}",
        }
        for name, times in measured.items()
        for measured in times
    ]


def _migration_rows(measured: Mapping[str, MigrationTimes]) -> list[dict[str, Any]]:
    """One row for each pipeline."""
    return [
        {
            "migration of": name,
            "tokens": f"{times.context_tokens:.0f}",
            "KV bytes": f"{times.kv_bytes_per_token:,.0f}",
            "copied us": f"{1e6 * times.copy_s_per_token:.2f}",
            "recomputed us": f"{1e6 * times.recompute_s_per_token:.2f}",
            "recomputed bits": "same" if times.is_recompute_exact else "other",
        }
        for name, times in measured.items()
    ]
