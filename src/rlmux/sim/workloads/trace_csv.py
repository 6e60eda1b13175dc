"""A workload from a CSV file: one pipeline a row; rows out of the order of time are sorted, with a note.

    pipeline,submit_s,duration_s,profile,slo_slowdown
    sales,0,86400,7B_8k,1.5

| column | what it is |
|---|---|
| `pipeline` | its name, once in the file |
| `submit_s` | seconds since the trace began, 0 or more |
| `num_steps` | it leaves after so many steps, 1 or more. A row has exactly one of this and the next two |
| `duration_s` | it leaves after as many steps as it makes alone in that time, above 0, so every policy does the same |
| `depart_s` | seconds; it leaves then, so a slower policy does less |
| `profile` | a measured profile such as `7B_8k`, or empty with the next two |
| `rollout_s`, `train_s` | solo seconds of a step's phases, above 0 |
| `colocated_rollout_s`, `colocated_train_s` | the same with both phases on training GPUs (optional) |
| `slo_slowdown` | 1 or more (optional: none) |
| `num_rollout_nodes`, `num_train_nodes` | 1 or more (optional: the profile's, else 1) |
| `sync_s` | seconds of weight sync (optional: the profile's, else 0) |
| `rollout_switch_s`, `train_switch_s` | seconds of a warm switch to each state (optional: the profile's, else 0) |
| `cold_rollout_switch_s`, `cold_train_switch_s` | seconds of a first load (optional: the profile's, else as warm) |
| `rollout_host_gb`, `train_host_gb` | what it keeps resident on each node (optional) |
| `tokens_per_step` | for tokens per second (optional) |

A mistake is one line: file, row (as an editor numbers lines), column, value, and what is accepted.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Sequence
from dataclasses import replace
from difflib import get_close_matches
from itertools import pairwise
from pathlib import Path

from rlmux.core.errors import UserError
from rlmux.core.model import Cluster, Footprint, PhaseSeconds, Pipeline, PipelineId
from rlmux.sim.workloads.arrivals import (
    MAX_STEPS,
    SYNCED,
    Arrival,
    Workload,
    free_of_costs,
    h20_h800_cluster,
    profiles,
    steps_of,
    switch_seconds,
    sync_seconds,
)
from rlmux.sim.workloads.csv_rows import CsvRow, numbered_lines
from rlmux.sim.world import NO_SWITCH, SwitchSeconds, TrueSeconds

_ENDS = ("depart_s", "duration_s", "num_steps")
_OPTIONAL = (
    "profile",
    "rollout_s",
    "train_s",
    "colocated_rollout_s",
    "colocated_train_s",
    "slo_slowdown",
    "num_rollout_nodes",
    "num_train_nodes",
    "sync_s",
    "rollout_switch_s",
    "train_switch_s",
    "cold_rollout_switch_s",
    "cold_train_switch_s",
    "rollout_host_gb",
    "train_host_gb",
    "tokens_per_step",
)
COLUMNS = ("pipeline", "submit_s", *_ENDS, *_OPTIONAL)


def load(path: Path | str, *, cluster: Cluster | None = None) -> Workload:
    """Read the file. Without a cluster: as many H20 and H800 nodes as requested."""
    path = Path(path)
    lines = numbered_lines(path)
    if not lines:
        raise UserError(f"{path}: it is empty; accepted: a header with {', '.join(COLUMNS)}, then a row per pipeline")
    header = [name.strip() for name in next(csv.reader([lines[0][1]]))]
    _check_header(path, header)
    if len(lines) == 1:
        raise UserError(f"{path}: it has a header and no row; accepted: a row per pipeline")
    arrivals = []
    line_by_name: dict[str, int] = {}
    for number, line in lines[1:]:
        row = CsvRow(path, number, header, next(csv.reader([line])))
        name = row.text("pipeline")
        if name in line_by_name:
            raise row.error("pipeline", f"was given before, in row {line_by_name[name]}; accepted: each name once")
        line_by_name[name] = number
        arrivals.append(_arrival(row))
    order = _order_note(arrivals, [number for number, _ in lines[1:]])
    arrivals.sort(key=lambda arrival: arrival.submit_s)
    cluster = cluster or h20_h800_cluster()
    return Workload(
        name=path.stem,
        cluster=cluster,
        arrivals=tuple(arrivals),
        about=f"{len(arrivals)} pipelines from {path.name}",
        notes=(_nodes_of(cluster), *order, *_departure_note(arrivals), *free_of_costs(arrivals)),
    )


def _nodes_of(cluster: Cluster) -> str:
    """The nodes that the trace is priced on: it describes none."""
    pools = [
        f"{pool.name} for {pool.phase} ({pool.gpus_per_node} GPUs a node, ${pool.usd_per_gpu_hour:g} for a GPU-hour, "
        f"{_node_count(pool.num_nodes)})"
        for pool in cluster.pools.values()
    ]
    first = next(iter(cluster.pools))
    return f"priced on nodes of {' and '.join(pools)}; others: --set cluster.pools.{first}.usd_per_gpu_hour=2"


def _node_count(num_nodes: int | None) -> str:
    if num_nodes is None:
        return "as many as are asked for"
    return f"{num_nodes} node{'s' if num_nodes > 1 else ''}"


def _order_note(arrivals: Sequence[Arrival], rows: Sequence[int]) -> tuple[str, ...]:
    """A line on rows that come before the one above them, which may be a mistake of the file's."""
    for (before_row, row), (before, arrival) in zip(pairwise(rows), pairwise(arrivals), strict=True):
        if arrival.submit_s < before.submit_s:
            found = f"row {row}: submit_s is {arrival.submit_s:g}, before row {before_row}; rows were sorted"
            return (f"{found}; accepted: {before.submit_s:g} or later",)
    return ()


def _departure_note(arrivals: Sequence[Arrival]) -> tuple[str, ...]:
    number = sum(arrival.depart_s is not None for arrival in arrivals)
    if not number:
        return ()
    return (f"{number} of {len(arrivals)} pipelines leave at depart_s: a slower policy does less of their work",)


def _check_header(path: Path, header: list[str]) -> None:
    for name in header:
        if name not in COLUMNS:
            near = get_close_matches(name, COLUMNS, n=1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise UserError(f"{path}: row 1: column {name!r} is unknown; {hint}accepted: {', '.join(COLUMNS)}")
        if header.count(name) > 1:
            raise UserError(f"{path}: row 1: column {name!r} is there {header.count(name)} times; accepted: once")
    missing = [name for name in ("pipeline", "submit_s") if name not in header]
    if not any(name in header for name in _ENDS):
        missing.append("depart_s (or duration_s, or num_steps)")
    if "profile" not in header and not {"rollout_s", "train_s"} <= set(header):
        missing.append("profile (or rollout_s and train_s)")
    if missing:
        raise UserError(f"{path}: row 1: missing column {missing[0]}; found: {', '.join(header)}")


def _arrival(row: CsvRow) -> Arrival:
    submit_s = row.time_of("submit_s")
    given = [column for column in _ENDS if row.optional(column)]
    if len(given) != 1:
        what = "are all empty" if not given else f"has {', '.join(given)} together"
        raise row.error(" / ".join(_ENDS), f"{what}; accepted: exactly one of them")
    num_steps, depart_s, duration_s = None, None, None
    if given[0] == "num_steps":
        num_steps = row.count("num_steps")
    elif given[0] == "duration_s":
        duration_s = row.number_of("duration_s", at_least=0, above=True)
    else:
        depart_s = row.time_of("depart_s")
        if depart_s <= submit_s:
            raise row.error("depart_s", f"is {depart_s:g}, not after submit_s {submit_s:g}; accepted: a later time")
    phases, colocated, num_nodes, model = _phases(row)
    sync_s, switch = _costs(row, model)
    if duration_s is not None:
        num_steps = max(1, round(duration_s / phases.solo_s))
    steps = steps_of(num_steps, submit_s, depart_s, phases.solo_s)
    if steps > MAX_STEPS:
        what = f"is {row.text(given[0])}: {steps:.4g} steps, which no simulation ends"
        raise row.error(given[0], f"{what}; accepted: what makes at most {MAX_STEPS:,}")
    phases = replace(phases, sync_s=sync_s)
    pipeline = Pipeline(
        id=PipelineId(row.text("pipeline")),
        num_steps=num_steps,
        stages=SYNCED,
        num_rollout_nodes=row.count("num_rollout_nodes", default=num_nodes),
        num_train_nodes=row.count("num_train_nodes", default=num_nodes),
        estimate=phases,
        colocated_estimate=colocated,
        slo_slowdown=row.number_of("slo_slowdown", at_least=1) if row.optional("slo_slowdown") else math.inf,
        switch=None if switch == NO_SWITCH else switch.estimate,
        footprint=Footprint(
            rollout_host_bytes=row.number_of("rollout_host_gb", at_least=0, default=0.0) * 1e9,
            train_host_bytes=row.number_of("train_host_gb", at_least=0, default=0.0) * 1e9,
        ),
    )
    return Arrival(
        submit_s=submit_s,
        depart_s=depart_s,
        pipeline=pipeline,
        world=TrueSeconds.of_phases(phases, sync_s=sync_s),
        colocated_world=TrueSeconds.of_phases(colocated) if colocated else None,
        switch=switch,
        model=model or "",
        tokens_per_step=row.number_of("tokens_per_step", at_least=0, default=0.0),
    )


def _costs(row: CsvRow, model: str | None) -> tuple[float, SwitchSeconds]:
    """Seconds of weight sync and of switches: the row's own, else the profile's, else none."""
    known = NO_SWITCH if model is None else switch_seconds(model)

    def seconds(column: str, otherwise: float) -> float:
        return row.number_of(column, at_least=0, default=otherwise)

    warm_rollout_s = seconds("rollout_switch_s", known.warm_rollout_s)
    warm_train_s = seconds("train_switch_s", known.warm_train_s)
    return seconds("sync_s", 0.0 if model is None else sync_seconds(model)), SwitchSeconds(
        cold_rollout_s=seconds("cold_rollout_switch_s", known.cold_rollout_s or warm_rollout_s),
        cold_train_s=seconds("cold_train_switch_s", known.cold_train_s or warm_train_s),
        warm_rollout_s=warm_rollout_s,
        warm_train_s=warm_train_s,
    )


def _phases(row: CsvRow) -> tuple[PhaseSeconds, PhaseSeconds | None, int, str | None]:
    """Solo seconds, colocated seconds, the nodes a profile was measured on, and its model."""
    name = row.optional("profile")
    if name:
        profile = profiles().get(name)
        if profile is None:
            near = get_close_matches(name, profiles(), n=1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise row.error("profile", f"is {name!r}; {hint}accepted: {', '.join(profiles())}")
        return profile.disaggregated, profile.colocated, profile.num_nodes, profile.model
    phases = PhaseSeconds(
        rollout_s=row.number_of("rollout_s", at_least=0, above=True),
        train_s=row.number_of("train_s", at_least=0, above=True),
    )
    colocated = None
    if row.optional("colocated_rollout_s") or row.optional("colocated_train_s"):
        colocated = PhaseSeconds(
            rollout_s=row.number_of("colocated_rollout_s", at_least=0, above=True),
            train_s=row.number_of("colocated_train_s", at_least=0, above=True),
        )
    return phases, colocated, 1, None
