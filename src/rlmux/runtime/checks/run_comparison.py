"""Trains the same pipelines under one policy after another: what a policy does to time, and to nothing else.

    FOLDER/solo/run.db ...      a whole run each; FOLDER/1/solo, FOLDER/2/solo ... of several rounds
    FOLDER/rollmux/run.db ...
    FOLDER/compare.json         the table

Every run has the same devices, so time ratios are cost ratios too: `solo` runs one pipeline after another,
which costs as many device-seconds as dedicated devices for each would. Machines drift: rounds run all policies in
turn, figures are medians over them, and ratios are taken within a round.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean, median
from typing import Any

from rlmux.config import Spec
from rlmux.core.errors import UserError
from rlmux.log.folder_lock import FolderLock
from rlmux.runtime.records.run_folder import empty_folder
from rlmux.runtime.run import RunResult

_TABLE = "compare.json"


def run_each(
    spec: Spec,
    policies: Sequence[str],
    folder: Path,
    start: Callable[[Spec, Path], RunResult],
    *,
    num_rounds: int = 1,
    is_overwriting: bool,
) -> dict[str, Any]:
    """Train under each policy, one after another, in each round; returns and writes the table.

    `start`: trains one file in one folder, such as `launch.start_run` with a policy made for it.
    Raises UserError for a folder that cannot be used, and KeyboardInterrupt as soon as a run is stopped.
    """
    with _prepare(folder, is_overwriting=is_overwriting):
        rounds: list[dict[str, Mapping[str, Any]]] = []
        for number in range(1, num_rounds + 1):
            into = folder if num_rounds == 1 else folder / str(number)
            rounds.append({})
            for policy in policies:
                result = start(replace(spec, policy=policy), into / policy)
                if not result.is_complete:
                    raise KeyboardInterrupt
                rounds[-1][policy] = result.summary
        table = {"folder": str(folder), "policies": compare(rounds)}
        (folder / _TABLE).write_text(json.dumps(table, indent=2), encoding="utf-8")
        return table


def compare(rounds: Sequence[Mapping[str, Mapping[str, Any]]]) -> dict[str, dict[str, Any]]:
    """Figures of each policy from its summary in each round. Ratios are to the first policy: above 1 is faster."""
    return {policy: _figures(policy, rounds) for policy in rounds[0]}


def _figures(policy: str, rounds: Sequence[Mapping[str, Mapping[str, Any]]]) -> dict[str, Any]:
    mine = [of_round[policy] for of_round in rounds]
    firsts = [next(iter(of_round.values())) for of_round in rounds]
    slowdowns = [
        pipeline["step_slowdown"]
        for summary in mine
        for pipeline in summary["pipelines"].values()
        if pipeline["step_slowdown"] is not None
    ]
    pairs = list(zip(mine, firsts, strict=True))
    return {
        "makespan_s": _median(summary["makespan_s"] for summary in mine),
        "speedup": _median(_ratio(first["makespan_s"], summary["makespan_s"]) for summary, first in pairs),
        "tokens_per_s": _median(summary["tokens_per_s"] for summary in mine),
        "tokens_ratio": _median(_ratio(summary["tokens_per_s"], first["tokens_per_s"]) for summary, first in pairs),
        "mean_step_slowdown": fmean(slowdowns) if slowdowns else None,
        "max_step_slowdown": max(slowdowns, default=None),
        "utilization": _utilization(mine),
        "control_overhead": _median(summary["control_overhead"] for summary in mine),
        "same_weights": _same_weights(mine, firsts[0]),
        "makespans_s": [summary["makespan_s"] for summary in mine],
        "mechanisms": _mechanisms(mine),
    }


def _same_weights(mine: Sequence[Mapping[str, Any]], first: Mapping[str, Any]) -> bool | None:
    """Weights are equal bit for bit in every pipeline and round; None where a pipeline ended without any."""
    pairs = [
        (pipeline["weights_sha256"], first["pipelines"][name]["weights_sha256"])
        for summary in mine
        for name, pipeline in summary["pipelines"].items()
    ]
    if any(None in pair for pair in pairs):
        return None
    return all(mine == theirs for mine, theirs in pairs)


def _utilization(mine: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Mean utilization over the devices of each pool."""
    by_pool: dict[str, list[float]] = {}
    for summary in mine:
        for device in summary["devices"].values():
            by_pool.setdefault(device["pool"], []).append(device["utilization"] or 0.0)
    return {pool: fmean(shares) for pool, shares in by_pool.items()}


def _mechanisms(mine: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """What each mechanism did, in the mean of the rounds."""
    counted = [summary["mechanisms"] for summary in mine]
    return {
        name: {what: fmean(each[name][what] for each in counted) for what in figures}
        for name, figures in counted[0].items()
    }


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None


def _ratio(above: float | None, below: float | None) -> float | None:
    return above / below if above is not None and below else None


def _prepare(folder: Path, *, is_overwriting: bool) -> FolderLock:
    """Make an empty folder, and lock it. Only a folder that holds a comparison is ever overwritten."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = FolderLock.take(folder)
        try:
            _empty(folder, is_overwriting=is_overwriting)
            lock.sign()
            (folder / _TABLE).write_text("{}", encoding="utf-8")
        except BaseException:  # an interrupt, too: a lock that nothing releases would keep the folder
            lock.release()
            raise
    except OSError as error:
        raise UserError(f"--out {folder}: {error.strerror}; accepted: a folder that can be made and written") from None
    return lock


def _empty(folder: Path, *, is_overwriting: bool) -> None:
    if not any(folder.iterdir()):
        return
    if not (folder / _TABLE).is_file():
        raise UserError(f"--out {folder}: not empty and holds no comparison; accepted: a new or empty folder")
    if not is_overwriting:
        raise UserError(f"--out {folder}: holds a comparison; accepted: another folder, or --overwrite")
    empty_folder(folder)
