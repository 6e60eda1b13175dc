"""Tails that policies themselves migrate in a real run, because they expect to end sooner by it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rlmux.core.actions import MigrateShard
from rlmux.core.events import TrajectoriesMigrated
from rlmux.core.model import Cluster, MigrationEstimate, Phase, Pool
from rlmux.runtime.backend import Submission, WorkerOptions

MAX_STEPS = 60
"""Steps within which a tail must have migrated: many more than it takes, and the run ends once one was trained on."""
SHARD_SIZE = 8
"""Trajectories of a shard: half of a step's, on two devices."""
OPTIONS = WorkerOptions(chunk_decode_steps=2, chunk_s=0.005)
"""Safe points often enough for a tail to be left at one of them."""


@pytest.fixture(scope="module")
def submissions(real):
    """Most answers are short, a few take many times as long. Training is ready beside rollouts: staleness is 1."""
    digits = {"min_digits": 2, "mean_digits": 8, "max_digits": 60}
    return [
        real.submission(
            name, num_steps=MAX_STEPS, seed=seed, staleness=1, max_new_tokens=96, task_fields={"params": digits}
        )
        for seed, name in enumerate(("first", "second"), start=1)
    ]


def migrated_tails(recorder, *, is_dearer_to_copy: bool = False) -> list[tuple[str, int]]:
    """Pipeline and step of every part of a shard that had begun and went to the other device: with its KV, unless it is
    dearer to copy and was found to have the same bits when it is computed again.

    The note of that finding may follow the first tails, which are then left out until it is there."""
    is_same = {note.pipeline: note.checks["recomputation"] for note in recorder.notes if note.type == "promise"}
    orders = {one.order: one for one in recorder.actions if isinstance(one, MigrateShard)}
    tails = []
    for event in recorder.events:
        if isinstance(event, TrajectoriesMigrated) and 0 < event.num_begun < SHARD_SIZE:
            assert event.tokens > event.num_begun
            pipeline = orders[event.order].pipeline
            if pipeline not in is_same:
                continue
            assert (event.kv_bytes == 0) == (is_dearer_to_copy and is_same[pipeline])
            tails.append((pipeline, orders[event.order].step))
    return tails


def weights_by_step(recorder, pipeline: str) -> dict[int, str]:
    """Checksum of the weights that each step of the pipeline published."""
    steps = [note for note in recorder.notes if note.type == "step" and note.pipeline == pipeline]
    return {one.step: one.weights_checksum for one in steps}


def dearer_to_copy(submission: Submission) -> Submission:
    """The same with a profile by which a KV cache is computed again sooner than copied."""
    migration = MigrationEstimate(copy_s=0.01, recompute_s=0.001)
    return replace(submission, pipeline=replace(submission.pipeline, migration=migration))


ONE_POOL = Cluster(pools={"device": Pool(name="device", phase=Phase.TRAIN, serves_both_phases=True, num_nodes=2)})
TWO_POOLS = Cluster(
    pools={
        "rollout": Pool(name="rollout", phase=Phase.ROLLOUT, num_nodes=2),
        "train": Pool(name="train", phase=Phase.TRAIN, num_nodes=1),
    }
)


@pytest.mark.parametrize(
    ("policy", "on", "is_dearer_to_copy"),
    [("jigsaw", ONE_POOL, False), ("rlmux", TWO_POOLS, False), ("rlmux", TWO_POOLS, True)],
    ids=["jigsaw", "rlmux", "rlmux, where computing KV again is believed to be cheaper"],
)
def test_a_tail_that_the_policy_chose_to_migrate_trains_the_weights_of_running_alone(
    real, submissions, tmp_path, policy, on, is_dearer_to_copy
):
    given = [dearer_to_copy(each) for each in submissions] if is_dearer_to_copy else submissions

    def is_tail_trained(_, recorder) -> bool:
        tails = migrated_tails(recorder, is_dearer_to_copy=is_dearer_to_copy)
        return any(step in weights_by_step(recorder, name) for name, step in tails)

    shared = real.run(tmp_path / "shared", given, policy=policy, on=on, options=OPTIONS, watch=is_tail_trained)
    tails = migrated_tails(shared.recorder, is_dearer_to_copy=is_dearer_to_copy)
    trained = [(name, step) for name, step in tails if step in weights_by_step(shared.recorder, name)]
    assert trained, f"no tail migrated and was trained on in {MAX_STEPS} steps"
    name, step = trained[0]

    def is_step_trained(_, recorder) -> bool:
        return step in weights_by_step(recorder, name)

    its_own = [one for one in submissions if one.pipeline.id == name]
    alone = real.run(tmp_path / "alone", its_own, policy="solo", on=real.cluster(), watch=is_step_trained)
    assert not [one for one in alone.recorder.actions if isinstance(one, MigrateShard)]
    expected = weights_by_step(alone.recorder, name)
    got = weights_by_step(shared.recorder, name)
    assert {number: got[number] for number in range(1, step + 1)} == {n: expected[n] for n in range(1, step + 1)}
