"""`rlmux whatif`: the words of a question as a change of a run, and its answer as a table."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlmux.cli import inputs, tables
from rlmux.config import Purpose
from rlmux.core.errors import UserError

Figures = dict[str, Any]


def answer(
    run: Path,
    *,
    file: str | None,
    like: str | None,
    number: int | None,
    removed: Sequence[str],
    policy: str | None,
    sets: Sequence[str],
) -> dict[str, Any]:
    """What is left of the run, now and with the change. Raises UserError."""
    from rlmux.runtime import launch
    from rlmux.runtime.records import folders
    from rlmux.sim.what_if import WhatIfChange, what_if
    from rlmux.sim.workloads.ongoing import ongoing
    from rlmux.sim.workloads.spec_file import workload_of

    if (number is None) != (like is None):
        raise UserError("--add and --like go together, such as --add 40 --like NAME")
    if not (file or number or removed or policy or sets):
        raise UserError("nothing would change; accepted: FILE, --add N --like NAME, --remove, --policy or --set")
    for given in sets:
        if not given.startswith("cluster."):
            raise UserError(f"--set {given}: accepted: keys of the cluster, such as cluster.pools.rollout.devices=2")
    if policy is not None:
        inputs.check_policy("--policy", policy)
    folders.check_run(run)
    now = ongoing(run, launch.cluster_of(run))
    added = [] if number is None or like is None else now.like(like, number)
    if file is not None:
        added += workload_of(inputs.load(file, purpose=Purpose.PLAN, cluster_of=launch.spec_of(run))).arrivals
    change = WhatIfChange(
        added=added,
        removed=removed,
        policy=policy,
        cluster=launch.spec_of(run, sets).cluster if sets else None,
    )
    return what_if(now, change)


def show(result: dict[str, Any], *, as_json: bool) -> None:
    """One row for each figure, one for each pipeline; now, then, and the difference, each as a range."""
    if as_json:
        tables.print_json(result)
        return
    now, then, change = result["now"], result["then"], result["change"]
    print(f"{result['run']}, {result['about']}; a range is from quick to slow steps\n")
    tables.print_rows(
        [
            {"": what, "now": _range(now, key), "then": _range(then, key), "change": _range(change, key, sign="+")}
            for what, key in (
                ("all ended in s", "makespan_s"),
                ("slowdown, mean", "mean_step_slowdown"),
                ("slowdown, largest", "max_step_slowdown"),
                ("queued s, mean", "mean_queue_s"),
                ("SLOs kept", "slo_attainment"),
                ("$", "cost_usd"),
                ("$ per hour", "cost_usd_per_hour"),
            )
            if now["high"][key] or then["high"][key]
        ]
    )
    print()
    names = dict.fromkeys([*now["pipelines"], *then["pipelines"]])
    tables.print_rows([_row(name, *(side["pipelines"].get(name) for side in (now, then, change))) for name in names])
    for name, row in then["pipelines"].items():
        if row["refused"]:
            print(f"{name}: {row['refused']}")
    for note in result["notes"]:
        print(f"note: {note}")


def _row(name: str, now: Figures | None, then: Figures | None, change: Figures | None) -> Figures:
    return {
        "pipeline": name,
        "ends in s": _range(now, "ends_s"),
        "then": _range(then, "ends_s"),
        "later by": _range(change, "ends_s", sign="+"),
        "slowdown": _range(now, "step_slowdown"),
        "slowdown then": _range(then, "step_slowdown"),
        "queued s": _range(then, "queue_s"),
        "SLO": "" if then is None or then["slo_slowdown"] == float("inf") else _SLO[then["keeps_slo"]],
        "": "refused" if then and then["refused"] else "new" if now is None else "gone" if then is None else "",
    }


_SLO = {True: "kept", False: "missed"}


def _range(figures: Figures | None, key: str, *, sign: str = "") -> str:
    """Both ends with three digits that matter; one where both read the same."""
    ends = [] if figures is None else [figures["low"][key], figures["high"][key]]
    if not ends or None in ends:
        return "-"
    words = (f"{value:{sign},.0f}" if abs(value) >= 100 else f"{value:{sign}.3g}" for value in ends)
    return " to ".join(dict.fromkeys(words))
