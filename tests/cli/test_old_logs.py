"""A run folder from before the log's names changed: every command that reads its log says what wrote it."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path

import pytest

OLD_SCHEMA = """
PRAGMA application_id = 0x726C6D78;
PRAGMA user_version = 1;
CREATE TABLE log (
    seq    INTEGER PRIMARY KEY,
    time_s REAL NOT NULL,
    kind   TEXT NOT NULL CHECK (kind IN ('header', 'event', 'action', 'note')),
    type   TEXT NOT NULL,
    json   TEXT NOT NULL
);
"""
OLD_HEADER = {
    "schema_version": 1,
    "policy": "rlmux",
    "backend": "local",
    "rlmux_version": "0.1.0",
    "pools": {"rollout": {"phase": "rollout", "devices": [["rollout", 0, 0]]}},
    "spec": {"source": "old.yaml", "resolved": "pipelines: []"},
}
OLD_PIPELINE = {
    "id": "sort",
    "num_steps": 2,
    "stages": ["generate", "reward", "update", "publish"],
    "has_warm_start": True,
}
OLD_ROWS = [
    (0.0, "event", "PipelineSubmitted", {"pipeline": OLD_PIPELINE}),
    (0.0, "action", "Wait", {"pipeline": "sort", "reason": "no free node"}),
    (1.0, "event", "ChunkFinished", {"order": 1, "num_active": 2, "num_waiting": 0, "num_parked": 3, "tokens": 9}),
    (1.0, "action", "SetLevel", {"order": 1, "level": 0.5}),
]


@pytest.fixture
def old_run(folder: Path) -> Path:
    """The folder of a run as rlmux 0.1.0 left it."""
    run = folder / "old"
    run.mkdir()
    connection = sqlite3.connect(run / "run.db")
    connection.executescript(OLD_SCHEMA)
    insert = "INSERT INTO log (time_s, kind, type, json) VALUES (?, ?, ?, ?)"
    connection.execute(insert, (0.0, "header", "header", json.dumps(OLD_HEADER)))
    for time_s, kind, type_name, fields in OLD_ROWS:
        told = {"type": type_name, **({"time_s": time_s} if kind == "event" else {}), **fields}
        connection.execute(insert, (time_s, kind, type_name, json.dumps(told)))
    connection.commit()
    connection.close()
    return run


@pytest.mark.parametrize(
    "words",
    [
        ("resume", "old"),
        ("report", "old"),
        ("report", "old", "--graph", "sort:1"),
        ("status", "old", "--once"),
        ("status", "old", "--json"),
        ("logs", "old", "sort"),
        ("simulate", "--from-run", "old"),
    ],
)
def test_an_old_run_is_refused_in_one_line_that_says_which_version_wrote_it(rlmux, old_run, words):
    before = {path.name: path.read_bytes() for path in old_run.iterdir()}
    said = rlmux(*words)
    assert (said.code, said.out) == (2, "")
    assert said.err.startswith(
        "rlmux: old/run.db: written by rlmux 0.1.0 (log schema 1); to resume it: pip install rlmux==0.1.0; this rlmux "
    )
    assert said.err.endswith(" reads schema 5\n")
    assert said.err.count("\n") == 1
    assert {path.name: path.read_bytes() for path in old_run.iterdir()} == before, "the old run was touched"
