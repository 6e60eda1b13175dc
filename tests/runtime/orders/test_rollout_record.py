"""The log says of each step's rollout what is needed to decode it again elsewhere."""

from __future__ import annotations

import pytest


@pytest.mark.parametrize(("task", "fields"), [("sort", {}), ("calculator", {"params": {"wait_s": 0.01}})])
def test_each_steps_rollout_is_told_with_its_tokens_waits_and_iterations(real, tmp_path, task, fields):
    run = real.run(tmp_path / "run", [real.submission("p", task=task, task_fields=fields)])
    steps = {note.step: note.metrics for note in run.recorder.notes if note.type == "step"}
    rollouts = [note for note in run.recorder.notes if note.type == "rollout"]
    assert [rollout.step for rollout in rollouts] == [1, 2]
    for rollout in rollouts:
        assert (rollout.slots, rollout.group_size, len(rollout.runs)) == (8, 4, 16)
        assert sum(map(sum, rollout.runs)) == steps[rollout.step]["tokens"]
        decoded = [each for each in rollout.iterations if each[0] != "prefill"]
        assert sum(tokens for _, _, _, tokens, _ in decoded) == steps[rollout.step]["tokens"]
        for _, rows, iterations, tokens, ms in decoded:
            assert iterations <= tokens <= rows * iterations
            assert ms > 0.0
        if task == "calculator":
            assert [len(own) // 2 + 1 for own in rollout.runs] == [len(own) for own in rollout.waits_ms]
        else:
            assert rollout.waits_ms is None
