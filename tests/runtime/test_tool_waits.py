"""Rollouts that wait for their environments."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from rlmux.core.actions import RunStage
from rlmux.core.events import ChunkFinished, ReplyArrived, StagePaused
from rlmux.core.model import Cluster, Phase, Pool, Stage
from rlmux.rl.config import SftWarmupConfig


@pytest.mark.slow
def test_a_rollout_that_only_waits_for_tools_asks_nothing_of_its_worker(real, make_backend, tmp_path):
    """16 trajectories on 8 slots: those that wait for the tool yield their slots, so more than 8 wait at a time."""
    slow = real.submission("slow", task="calculator", num_steps=1, task_fields={"params": {"digits": 1, "wait_s": 0.5}})
    # Long enough for it to learn to ask.
    config = replace(slow.config, sft_warmup=SftWarmupConfig(num_updates=100, batch_size=32, learning_rate=5e-3))
    run = real.run(tmp_path, [replace(slow, config=config)], make_backend=make_backend)
    assert run.status == {"slow": "finished"}, run.scheduler.query.reason("slow")
    rollouts = {a.order for a in run.recorder.actions if isinstance(a, RunStage) and a.stage is Stage.GENERATE}
    stalled = [
        e.order
        for e in run.recorder.events
        if isinstance(e, ChunkFinished) and e.order in rollouts and e.num_waiting_for_env > 8 and e.num_active == 0
    ]
    assert stalled, "no more trajectories waited than there are slots"
    assert max(Counter(stalled).values()) <= 16, "one report for each reply that came, at most"


@pytest.mark.slow
def test_devices_go_to_others_while_tools_work_and_the_weights_are_the_same(real, make_backend, tmp_path):
    def given() -> list[Any]:
        slow = real.submission("slow", task="calculator", task_fields={"params": {"digits": 1, "wait_s": 0.5}})
        config = replace(slow.config, sft_warmup=SftWarmupConfig(num_updates=100, batch_size=32, learning_rate=5e-3))
        return [replace(slow, config=config), real.submission("busy", num_steps=6)]

    one = Cluster(pools={"core": Pool(name="core", phase=Phase.TRAIN, num_nodes=1)})
    shared = real.run(tmp_path / "jigsaw", given(), policy="jigsaw", on=one, make_backend=make_backend)
    alone = real.run(tmp_path / "fifo", given(), policy="fifo")
    yielded = [e for e in shared.recorder.events if isinstance(e, StagePaused) and e.is_waiting]
    assert yielded, "nothing was yielded: the test shows nothing"
    assert any(isinstance(e, ReplyArrived) for e in shared.recorder.events)
    assert shared.status == alone.status == {"slow": "finished", "busy": "finished"}
    assert shared.sha256 == alone.sha256
