"""A pipeline of a finished run is trained again alone: equal at every step, or the first step that differs is named."""

from __future__ import annotations

import shutil
import sqlite3
from pathlib import Path
from typing import Any

import pytest
from tests.small_files import small_file

from rlmux.config.load import parse_spec
from rlmux.core.errors import UserError
from rlmux.core.events import TrajectoriesMigrated
from rlmux.core.model import DeviceId, OrderId, Phase, PipelineId, Stage
from rlmux.log.folder_lock import FolderLock
from rlmux.log.segments import row_checksum
from rlmux.policies import make_policy
from rlmux.report.timeline.records import Ending, OrderRecord
from rlmux.runtime import launch
from rlmux.runtime.checks.replay_verification import Disturbance, Sample, Verdict, disturbances, verify

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
        log.execute("DROP TRIGGER IF EXISTS log_keeps_facts")
        log.create_function("checksum", 5, row_checksum)
        changed = log.execute(f"UPDATE log SET json = replace(json, ?, ?) WHERE {where}", (old, new))
        assert changed.rowcount
        log.execute(f"UPDATE log SET crc32 = checksum(seq, time_s, kind, type, json) WHERE {where}")
    log.close()
    return copy


def logged(run: Path, note: str, key: str, pipeline: str, step: int) -> str | None:
    with sqlite3.connect(run / "run.db") as log:
        query = (
            f"SELECT json_extract(json, '$.{key}') FROM log WHERE type = ? "
            "AND json_extract(json, '$.pipeline') = ? AND json_extract(json, '$.step') = ?"
        )
        (found,) = log.execute(query, (note, pipeline, step)).fetchone()
    log.close()
    return None if found is None else str(found)


def of_step(note: str, step: int) -> str:
    return f"type = '{note}' AND json_extract(json, '$.pipeline') = 'a' AND json_extract(json, '$.step') = {step}"


def test_a_pipeline_that_shared_its_devices_is_equal_alone_at_every_step(shared):
    said: list[str] = []
    (verdict,) = verify(shared, ["a"], print_line=said.append)
    assert verdict.line() == "a: equal at all 2 steps (checksum, sha256)"
    assert verdict.is_equal
    assert said == ["a: step 1 of 2 is equal", "a: step 2 of 2 is equal"]


@pytest.mark.parametrize(
    ("note", "key", "compared"),
    [("step", "weights_checksum", "checksum"), ("checkpoint", "weights_sha256", "sha256")],
)
def test_a_sum_that_was_changed_in_the_log_is_found_at_its_step(shared, tmp_path, note, key, compared):
    true = logged(shared, note, key, "a", 2)
    run = tampered(shared, tmp_path, of_step(note, 2), true, "0" * len(true))
    (verdict,) = verify(run, ["a"], print_line=lambda text: None)
    assert not verdict.is_equal
    assert verdict.line() == f"a: differs at step 2 of 2: {compared} 000000000000 in the log, {true[:12]} alone"


@pytest.mark.slow
def test_a_log_of_before_with_a_hash_in_each_step_is_compared_by_it(shared, tmp_path):
    """Its notes of steps have SHA-256, its notes of checkpoints and its steps no other sum."""
    run = shared
    for step in (1, 2):
        checksum, sha256 = (
            logged(shared, "step", "weights_checksum", "a", step),
            logged(shared, "checkpoint", "weights_sha256", "a", step),
        )
        run = tampered(run, tmp_path / f"{step}", of_step("checkpoint", step), '"weights_sha256"', '"unknown"')
        old, new = f'"weights_checksum":"{checksum}"', f'"weights_sha256":"{sha256}"'
        run = tampered(run, tmp_path / f"{step}-", of_step("step", step), old, new)
    (verdict,) = verify(run, ["a"], print_line=lambda text: None)
    assert verdict.line() == "a: equal at all 2 steps (sha256)"


@pytest.fixture(scope="module")
def with_gaps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose steps have no checkpoints but the third and the last."""
    folder = tmp_path_factory.mktemp("gaps")
    text = small_file("{name: a, seed: 11, task: sort, checkpoint_every: 3}", steps=5)
    spec = parse_spec(text, source="small.yaml", folder=folder)
    launch.start_run(spec, folder / "run", policy=make_policy("solo"))
    return folder / "run"


def test_between_checkpoints_steps_are_compared_by_their_checksums(with_gaps, tmp_path):
    assert all(logged(with_gaps, "step", "weights_checksum", "a", step) for step in range(1, 6))
    assert [logged(with_gaps, "step", "weights_sha256", "a", step) for step in range(1, 6)] == [None] * 5
    (verdict,) = verify(with_gaps, ["a"], print_line=lambda text: None)
    assert verdict.line() == "a: equal at all 5 steps (checksum, sha256 at 2)"
    true = logged(with_gaps, "step", "weights_checksum", "a", 2)
    run = tampered(with_gaps, tmp_path, of_step("step", 2), true, "0" * 32)
    (verdict,) = verify(run, ["a"], print_line=lambda text: None)
    assert verdict.line() == f"a: differs at step 2 of 5: checksum 000000000000 in the log, {true[:12]} alone"


@pytest.mark.slow
def test_hashes_of_steps_that_would_have_no_checkpoint_are_made_for_the_comparison(with_gaps, tmp_path):
    run = tampered(with_gaps, tmp_path / "one", "type = 'header'", "checkpoint_every: 3", "checkpoint_every: 4")
    (verdict,) = verify(run, ["a"], print_line=lambda text: None)
    assert verdict.line() == "a: equal at all 5 steps (checksum, sha256 at 2)", "step 3 would have none by this file"


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that keeps all its checkpoints: of every fifth step of a, and, of b with staleness, of the step before."""
    folder = tmp_path_factory.mktemp("kept")
    text = small_file(
        "{name: a, seed: 11, task: sort, checkpoint_every: 5, keep_checkpoints: 9}",
        "{name: b, seed: 12, task: reverse, checkpoint_every: 5, keep_checkpoints: 9, algorithm: {staleness: 1}}",
        steps=21,
    )
    launch.start_run(
        parse_spec(text, source="small.yaml", folder=folder), folder / "run", policy=make_policy("rollmux")
    )
    return folder / "run"


def sampled(run: Path, name: str, seed: int) -> Verdict:
    (verdict,) = verify(run, [name], print_line=lambda text: None, sample_seed=seed)
    return verdict


@pytest.mark.parametrize(("name", "begins"), [("a", [11, 21]), ("b", [11, 16])])
def test_a_sample_is_trained_from_the_checkpoints_before_it_with_staleness_too(kept, name, begins):
    verdict = sampled(kept, name, seed=5)
    assert verdict.is_equal, verdict.line()
    assert [part.start for part in verdict.sample.parts] == begins, "right after checkpoints"
    assert verdict.num_equal == len(verdict.sample.steps) < 21
    assert verdict.line() == (
        f"{name}: equal at {verdict.num_equal} of 21 steps (sample of 1 in 20, seed 5; --all compares every step)"
    )
    assert verdict.fields()["sampled_steps"] == verdict.sample.steps


@pytest.mark.parametrize("of_rollout", ["bfloat16", "float32"])
def test_rounded_weights_of_a_checkpoint_are_sampled_from_as_published_ones_are(tmp_path, of_rollout):
    """A checkpoint has the float32 numbers that training goes on from, a version those that it computes with."""
    given = f"checkpoint_every: 2, keep_checkpoints: 9, train: {{dtype: bfloat16}}, rollout: {{dtype: {of_rollout}}}"
    spec = parse_spec(
        small_file(f"{{name: a, seed: 12, task: reverse, {given}}}", steps=6), source="small.yaml", folder=tmp_path
    )
    launch.start_run(spec, tmp_path / "run", policy=make_policy("rollmux"))
    verdicts = [sampled(tmp_path / "run", "a", seed) for seed in range(4)]
    assert {part.start for verdict in verdicts for part in verdict.sample.parts} & {3, 5}, "right after checkpoints"
    assert all(verdict.is_equal for verdict in verdicts), [verdict.line() for verdict in verdicts]


def test_a_changed_checksum_is_found_by_the_sample_that_has_its_step(kept, tmp_path):
    step = sampled(kept, "a", seed=5).sample.steps[-1]
    true = logged(kept, "step", "weights_checksum", "a", step)
    verdict = sampled(tampered(kept, tmp_path, of_step("step", step), true, "0" * 32), "a", seed=5)
    assert verdict.line() == f"a: differs at step {step} of 21: checksum 000000000000 in the log, {true[:12]} alone"


@pytest.mark.parametrize("step", [10, 21])
def test_a_damaged_checkpoint_that_a_sample_begins_from_or_the_newest_is_named(kept, tmp_path, step):
    run = shutil.copytree(kept, tmp_path / "run")
    path = run / "a" / f"step_{step}" / "model.safetensors"
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    verdict = sampled(run, "a", seed=5)
    true = logged(kept, "checkpoint", "weights_sha256", "a", step)
    assert verdict.line() == (
        f"a: differs at step {step} of 21: sha256 {true[:12]} in the log, damaged checkpoint step_{step}: "
        f"{path.resolve()} is damaged: its sha256 is not the one in state.json"
    )


def test_a_whole_checkpoint_of_other_weights_is_named_with_its_sha256(kept, tmp_path):
    true = logged(kept, "checkpoint", "weights_sha256", "a", 21)
    verdict = sampled(tampered(kept, tmp_path, of_step("checkpoint", 21), true, "0" * 64), "a", seed=5)
    assert verdict.line() == (
        f"a: differs at step 21 of 21: sha256 000000000000 in the log, damaged checkpoint step_21: {true[:12]}"
    )


def test_without_checkpoints_a_sample_is_of_the_first_steps(kept, tmp_path):
    run = shutil.copytree(kept, tmp_path / "run", ignore=shutil.ignore_patterns("step_*"))
    verdict = sampled(run, "a", seed=0)
    assert verdict.line() == (
        f"a: equal at {verdict.num_equal} of 21 steps (sample of 1 in 20 from the 5 steps near the start or a kept "
        "checkpoint, seed 0; --all compares every step)"
    )


@pytest.mark.parametrize(
    ("num_steps", "starts", "num_drawn", "num_reachable"),
    [
        (1, [0], 1, 1),
        (80, [0, 79], 4, 6),
        (80, [0], 4, 5),
        (2000, [0, 1998, 1999], 100, 100),
        (60, [*range(60)], 3, 60),
    ],
)
def test_a_sample_has_one_step_in_twenty_and_the_steps_from_a_start_to_it(num_steps, starts, num_drawn, num_reachable):
    samples = [Sample.draw(seed, "a", range(1, num_steps + 1), starts) for seed in range(20)]
    for sample in samples:
        assert sample.num_reachable == num_reachable
        assert num_drawn <= len(sample.steps) <= max(num_reachable, num_drawn)
        assert {part.start - 1 for part in sample.parts} <= set(starts)
        assert sample.steps == sorted(set(sample.steps))
    assert samples[3] == Sample.draw(3, "a", range(1, num_steps + 1), starts)
    if num_reachable > num_drawn:
        assert len({tuple(sample.steps) for sample in samples}) > 1, "the seed decides"


def test_disturbed_steps_come_first_in_a_sample_one_of_each_kind_at_least():
    kinds = list(Disturbance)
    tail, shard, tool_wait, paused, shared, redone = kinds
    disturbed = {
        12: {tail}, 13: {tail, paused}, 16: {shard, tool_wait}, 17: {shared}, 18: {shared}, 19: {redone}, 21: {tail}
    }  # fmt: skip
    for seed in range(20):
        sample = Sample.draw(seed, "a", range(1, 23), [0, 10, 21], disturbed)
        assert {kind for step in sample.steps for kind in disturbed.get(step, ())} == set(kinds)
        assert sample.num_disturbed_sampled >= 3
        assert set(sample.kinds) == set(kinds)
        assert sample == Sample.draw(seed, "a", range(1, 23), [0, 10, 21], disturbed)
    assert f"with {sample.num_disturbed_sampled} of the 7 steps in which work moved, paused, " in sample.words()
    assert (
        "was redone: tail 2, shard 1, tool wait 1, " in Sample.draw(0, "a", range(12, 20), [0, 11], disturbed).words()
    )


def test_after_disturbed_steps_a_sample_takes_others_and_never_a_long_way():
    disturbed = {60: {Disturbance.TAIL}, 3: {Disturbance.PAUSED}}
    sample = Sample.draw(0, "a", range(1, 81), [0], disturbed)
    assert 3 in sample.steps
    assert sample.steps[-1] <= 5, "step 60 is far from a start"
    assert sample.num_disturbed_sampled == 1
    assert "with 1 of the 2 steps in which work moved" in sample.words()


def test_orders_that_moved_paused_shared_or_did_not_count_disturb_their_step():
    def order(step: int, **changes: Any) -> OrderRecord:
        given: dict[str, Any] = {"ending": Ending.FINISHED, **changes}
        return OrderRecord(
            id=OrderId(step), pipeline=PipelineId("a"), step=step, stage=Stage.GENERATE, phase=Phase.ROLLOUT,
            devices=(DeviceId("rollout", 0, 0),), start_s=0.0, **given,
        )  # fmt: skip

    def moved(num_begun: int) -> TrajectoriesMigrated:
        return TrajectoriesMigrated(order=OrderId(1), num_trajectories=4, seconds=0.1, num_begun=num_begun)

    orders = [
        order(1), order(2, is_migration=True), order(3, ending=Ending.PAUSED), order(4, least_fraction=0.5),
        order(1, device_fraction=0.0), order(2, is_migration=True, moved=moved(num_begun=2)),
        order(5, ending=Ending.LOST), order(6, is_redone=True), order(3),
        order(7, ending=Ending.PAUSED, has_waited=True), order(8, is_migration=True, moved=moved(num_begun=0)),
    ]  # fmt: skip
    assert disturbances(orders) == {
        "a": {
            2: {"shard", "tail"},
            3: {"paused"},
            4: {"shared"},
            5: {"redone"},
            6: {"redone"},
            7: {"tool wait"},
            8: {"shard"},
        },
    }


def test_another_seed_differs_from_the_first_step_on(shared, tmp_path):
    run = tampered(shared, tmp_path, "type = 'header'", "seed: 11", "seed: 13")
    (verdict,) = verify(run, ["a"], print_line=lambda text: None)
    assert verdict.difference is not None
    assert (verdict.difference.step, verdict.num_equal) == (1, 0)
    assert verdict.difference.logged == logged(shared, "step", "weights_checksum", "a", 1)
    assert verdict.difference.compared == "checksum"


def test_what_cannot_be_verified_is_refused_before_anything_starts(shared):
    with pytest.raises(UserError, match="no pipeline 'zebra'; accepted: a, b"):
        verify(shared, ["zebra"], print_line=pytest.fail)
    with FolderLock.take(shared), pytest.raises(UserError, match="another process is writing here"):
        verify(shared, ["a"], print_line=pytest.fail)
