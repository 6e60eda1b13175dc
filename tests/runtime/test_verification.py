"""A pipeline of a finished run is trained again alone: equal at every step, or the first step that differs is named."""

from __future__ import annotations

import shutil
import sqlite3
from pathlib import Path

import pytest
from tests.small_files import small_file

from rlmux.config.load import parse_spec
from rlmux.core.errors import UserError
from rlmux.policies import make_policy
from rlmux.report.folder_lock import FolderLock
from rlmux.report.segments import row_checksum
from rlmux.runtime import launch
from rlmux.runtime.verification import verify

pytest.importorskip("torch")

SMALL = small_file("{name: a, seed: 11, task: sort}", "{name: b, seed: 12, task: reverse}", steps=2)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two pipelines on the same devices."""
    folder = tmp_path_factory.mktemp("shared")
    spec = parse_spec(SMALL, source="small.yaml", folder=folder)
    launch.start_run(spec, folder / "run", policy=make_policy("rollmux"))
    return folder / "run"


def tampered(run: Path, folder: Path, where: str, old: str, new: str) -> Path:
    """A copy of the run in whose log some rows say something else."""
    copy = shutil.copytree(run, folder / "tampered", ignore=shutil.ignore_patterns("pipelines"))
    with sqlite3.connect(copy / "run.db") as log:
        log.execute("DROP TRIGGER log_keeps_facts")
        log.create_function("checksum", 5, row_checksum)
        changed = log.execute(f"UPDATE log SET json = replace(json, ?, ?) WHERE {where}", (old, new))
        assert changed.rowcount
        log.execute(f"UPDATE log SET crc32 = checksum(seq, time_s, kind, type, json) WHERE {where}")
    log.close()
    return copy


def logged_hash(run: Path, pipeline: str, step: int) -> str:
    with sqlite3.connect(run / "run.db") as log:
        query = (
            "SELECT json_extract(json, '$.weights_sha256') FROM log WHERE type = 'step' "
            "AND json_extract(json, '$.pipeline') = ? AND json_extract(json, '$.step') = ?"
        )
        (sha256,) = log.execute(query, (pipeline, step)).fetchone()
    log.close()
    return str(sha256)


def test_a_pipeline_that_shared_its_devices_is_equal_alone_at_every_step(shared):
    said: list[str] = []
    (verdict,) = verify(shared, ["a"], say=said.append)
    assert verdict.line() == "a: equal at all 2 steps"
    assert verdict.is_equal
    assert said == ["a: step 1 of 2 is equal", "a: step 2 of 2 is equal"]


def test_a_hash_that_was_changed_in_the_log_is_found_at_its_step(shared, tmp_path):
    true = logged_hash(shared, "a", 2)
    where = "type = 'step' AND json_extract(json, '$.pipeline') = 'a' AND json_extract(json, '$.step') = 2"
    run = tampered(shared, tmp_path, where, true, "0" * 64)
    (verdict,) = verify(run, ["a"], say=lambda text: None)
    assert not verdict.is_equal
    assert verdict.line() == f"a: differs at step 2 of 2: 000000000000 in the log, {true[:12]} alone"


def test_another_seed_differs_from_the_first_step_on(shared, tmp_path):
    run = tampered(shared, tmp_path, "type = 'header'", "seed: 11", "seed: 13")
    (verdict,) = verify(run, ["a"], say=lambda text: None)
    assert verdict.difference is not None
    assert (verdict.difference.step, verdict.num_equal) == (1, 0)
    assert verdict.difference.logged == logged_hash(shared, "a", 1)


def test_what_cannot_be_verified_is_refused_before_anything_starts(shared):
    with pytest.raises(UserError, match="no pipeline 'zebra'; accepted: a, b"):
        verify(shared, ["zebra"], say=pytest.fail)
    with FolderLock.take(shared), pytest.raises(UserError, match="another process is writing here"):
        verify(shared, ["a"], say=pytest.fail)
