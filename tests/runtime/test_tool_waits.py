"""Rollouts that wait for their environments."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from rlmux.core.actions import RunStage
from rlmux.core.events import ChunkFinished
from rlmux.core.model import Stage
from rlmux.rl.config import WarmStartConfig


def test_a_rollout_whose_slots_all_wait_for_tools_asks_nothing_of_its_worker(real, tmp_path):
    """16 trajectories on 8 slots: while 8 wait for the tool, 8 wait for them."""
    slow = real.submission(
        "slow", task="calculator", num_steps=1, task_fields={"params": {"digits": 1, "wait_s": 0.5}}
    )
    # Long enough for it to learn to ask.
    plan = replace(slow.plan, warm_start=WarmStartConfig(num_updates=100, batch_size=32, learning_rate=5e-3))
    run = real.run(tmp_path, [replace(slow, plan=plan)])
    assert run.status == {"slow": "finished"}, run.scheduler.state.runs["slow"].reason
    rollouts = {a.order for a in run.recorder.actions if isinstance(a, RunStage) and a.stage is Stage.GENERATE}
    stalled = [
        e.order
        for e in run.recorder.events
        if isinstance(e, ChunkFinished) and e.order in rollouts and e.num_parked == 8 and e.num_active == 0
    ]
    assert stalled, "the slots never all waited: the test shows nothing"
    assert max(Counter(stalled).values()) <= 16, "one report for each reply that came, at most"
