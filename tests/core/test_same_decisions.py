"""The scheduler decides as version 0.1.0 did: its recorded events, fed in again, give its recorded actions.

Each file of tests/data/decisions is one run of 0.1.0 under one policy: a first row with cluster, policy, seed and
sharing table, then one row for each event with the actions that followed. `micro-*`, `pair` and `weave` were
simulated, `run-*` are real runs of the examples. The rows have the names that the log had then; `renamed` gives them
today's. It took decode for dense from 128 sequences on. `Queue` rows are today's: a wait is explained with what would
end it. Runs in which the look-ahead of `jigsaw` and `rlmux` decides otherwise today, by the whole Sub-Stage Graph, are
left out, and those of `rlmux` and `optimal` on counted nodes with prices, which are sunk cost today. Pipelines are
placed before any group is dispatched: a `Queue` stands before the `RunStage` of its instant in one event each of
`micro-b`. A pipeline begins where the relocations of its instant leave it: so runs of `rlmux` with relocations are
left out, too, and a `Queue` may stand before an `Admit` of its instant.
"""

from __future__ import annotations

import json
import lzma
from pathlib import Path
from typing import Any

import pytest

from rlmux.core import invariants
from rlmux.core.estimation.colocation import SharingEntry, SharingTable
from rlmux.core.model import Cluster, Phase, Pool
from rlmux.core.scheduler import Scheduler
from rlmux.log import value_codec
from rlmux.policies import make_policy

RECORDINGS = sorted((Path(__file__).parent.parent / "data" / "decisions").glob("*.jsonl.xz"))
NEW_POLICIES = {"gavel": "gavel-steps"}
"""Names of policies that have another one since 0.1.0."""
CHECK_EVERY = 60
"""Events between two checks of every invariant: each takes longer than a decision."""

NEW_TYPES = {
    "Replace": "Relocate",
    "Wait": "Queue",
    "Migrate": "MigrateShard",
    "TrajectoriesMoved": "TrajectoriesMigrated",
    "SetLevel": "SetDeviceFraction",
}
NEW_FIELDS = {"level": "device_fraction", "num_parked": "num_waiting_for_env", "has_warm_start": "has_sft_warmup"}
NEW_ENTRY_FIELDS = {"kind_a": "sub_stage_a", "kind_b": "sub_stage_b", "level": "device_fraction"}


def renamed(row: dict[str, Any]) -> dict[str, Any]:
    """An event or action of 0.1.0 in today's names."""
    new = {NEW_FIELDS.get(key, key): value for key, value in row.items()}
    new["type"] = NEW_TYPES.get(row["type"], row["type"])
    if "stage" in new:
        new["stage"] = new["stage"].replace("warm_start", "sft_warmup")
    if isinstance(new.get("measured"), dict):  # seconds of phases have a sync besides, of which no recording knew
        new["measured"] = {
            key: {"sync_s": 0.0, **value} if isinstance(value, dict) else value
            for key, value in new["measured"].items()
        }
    if isinstance(new.get("pipeline"), dict):
        new["pipeline"] = {NEW_FIELDS.get(key, key): value for key, value in new["pipeline"].items()}
        new["pipeline"]["dense_threshold"] = 128
    return new


def cluster_of(row: dict[str, Any]) -> Cluster:
    pools = {}
    for name, fields in row["pools"].items():
        values = {key: float(value) if value == "inf" else value for key, value in fields.items()}
        pools[name] = Pool(**{**values, "phase": Phase(values["phase"])})
    return Cluster(pools=pools)


def sharing_of(rows: list[dict[str, Any]] | None) -> SharingTable | None:
    if rows is None:
        return None
    entries = []
    for row in rows:
        fields = {NEW_ENTRY_FIELDS.get(key, key): value for key, value in row.items()}
        for side in ("sub_stage_a", "sub_stage_b"):
            fields[side] = fields[side].replace("train", "update")
        entries.append(SharingEntry(**fields))
    return SharingTable.of(entries)


def queued_last(actions: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return sorted(actions, key=lambda action: action["type"] == "Queue")


@pytest.mark.parametrize("path", RECORDINGS, ids=lambda path: path.name.removesuffix(".jsonl.xz"))
def test_recorded_events_give_the_recorded_actions(path):
    first, *rows = map(json.loads, lzma.decompress(path.read_bytes()).decode("utf-8").splitlines())
    sharing = sharing_of(first["sharing"])
    options = {} if sharing is None else {"sharing": sharing}
    name = NEW_POLICIES.get(first["policy"], first["policy"])
    policy = make_policy(name, seed=first["seed"], **options)
    scheduler = Scheduler(cluster_of(first["cluster"]), policy)
    for number, row in enumerate(rows):
        event = value_codec.decode(json.dumps(renamed(row["event"])))
        actions = [json.loads(value_codec.encode(action)) for action in scheduler.handle(event)]
        for action in actions:
            action.pop("expected_step_s", None)
            action.pop("probability", None)  # 0.1.0 stated none
            action.pop("bounded", None)
            action.pop("alike", None)
        recorded = [renamed(action) for action in row["actions"]]
        assert queued_last(actions) == queued_last(recorded), f"after event {number}: {row['event']}"
        if number % CHECK_EVERY == 0:
            invariants.check(scheduler)


def test_there_are_recordings_of_every_kind():
    kinds = {path.name.partition(".")[0].partition("-")[0] for path in RECORDINGS}
    assert kinds == {"micro", "pair", "weave", "run"}
