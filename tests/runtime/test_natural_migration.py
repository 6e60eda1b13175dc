"""A tail that `jigsaw` itself migrates in a real run, because its look-ahead expects to end sooner by it."""

from __future__ import annotations

import pytest

from rlmux.core.actions import MigrateShard, Pause, RunStage
from rlmux.core.events import TrajectoriesMigrated
from rlmux.core.model import Cluster, Phase, Pool, Stage
from rlmux.runtime.backend import WorkerOptions

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


def migrated_tails(recorder) -> list[tuple[str, int]]:
    """Pipeline and step of every part of a shard that was paused in mid-answer and went to the other device."""
    orders = {one.order: one for one in recorder.actions if isinstance(one, RunStage | MigrateShard)}
    paused = [orders[one.order] for one in recorder.actions if isinstance(one, Pause)]
    begun = {(one.pipeline, one.step, one.devices[0]) for one in paused if one.stage is Stage.GENERATE}
    tails = []
    for event in recorder.events:
        if isinstance(event, TrajectoriesMigrated) and 0 < event.num_trajectories < SHARD_SIZE:
            order = orders[event.order]
            if (order.pipeline, order.step, order.source) in begun:
                tails.append((order.pipeline, order.step))
    return tails


def weights_by_step(recorder, pipeline: str) -> dict[int, str]:
    """Checksum of the weights that each step of the pipeline published."""
    steps = [note for note in recorder.notes if note.type == "step" and note.pipeline == pipeline]
    return {one.step: one.weights_checksum for one in steps}


def test_a_tail_that_the_policy_chose_to_migrate_trains_the_weights_of_running_alone(real, submissions, tmp_path):
    pool = Pool(name="device", phase=Phase.TRAIN, serves_both_phases=True, num_nodes=2)
    on = Cluster(pools={"device": pool})

    def is_tail_trained(_, recorder) -> bool:
        return any(step in weights_by_step(recorder, name) for name, step in migrated_tails(recorder))

    shared = real.run(tmp_path / "shared", submissions, policy="jigsaw", on=on, options=OPTIONS, watch=is_tail_trained)
    tails = migrated_tails(shared.recorder)
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
