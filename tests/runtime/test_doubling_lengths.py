"""Real runs in which the answers of one pipeline become several times as long from one step to the next."""

from __future__ import annotations

import json
import string
import subprocess
from pathlib import Path
from typing import Any

import pytest
from tests.command_line import command

from rlmux.core.actions import ExpectSteps, Relocate, RunStage
from rlmux.core.events import StageFinished
from rlmux.core.model import Stage
from rlmux.log.run_log import LogReader
from rlmux.rl.tasks.file_rows import FileTask

STEPS, PROMPTS = 30, 16
LETTERS = string.ascii_letters + string.digits
SHORT, LONG = LETTERS[:12], LETTERS[:48]
SPEC = f"""
cluster:
  pools:
    rollout: {{devices: 2}}
    train: {{devices: 2}}
policy: rollmux
defaults:
  model: {{hidden_size: 32, heads: 2, kv_heads: 1, intermediate_size: 64}}
  sft_warmup: {{updates: 150, batch_size: 16, learning_rate: 1e-2}}
  algorithm: {{prompts_per_step: {PROMPTS}, group_size: 8, learning_rate: 1e-5}}
  rollout: {{max_new_tokens: 64, slots: 4}}
pipelines:
  - name: longer
    steps: {STEPS}
    slo_slowdown: 8
    task: {{name: file, path: longer.jsonl}}
  - name: steady
    steps: {2 * STEPS}
    slo_slowdown: 3
    task: {{name: file, path: steady.jsonl}}
"""


def write_rows(path: Path, num_rows: int, first_long: int) -> None:
    """Rows whose answers are long from the prompt `first_long` on, in the order in which a run of seed 0 asks them."""

    def write(answers: list[str]) -> None:
        rows = [{"prompt": f"{'l' if one == LONG else 's'}:", "answer": one} for one in answers]
        path.write_text("".join(json.dumps({**row, "row": n}) + "\n" for n, row in enumerate(rows)))

    write([SHORT] * num_rows)
    task = FileTask(str(path), prompt_key="prompt", answer_key="answer", is_answer_needed=True, seed=0, render_chat=str)
    answers = [SHORT] * num_rows
    for index in range(first_long, num_rows):
        answers[task.prompt(index).data["row"]] = LONG
    write(answers)


@pytest.mark.slow  # ninety real steps, and as many again to verify them
def test_lengths_that_grow_in_mid_run_lead_to_other_nodes_where_the_slo_is_kept(tmp_path: Path) -> None:
    write_rows(tmp_path / "longer.jsonl", STEPS * PROMPTS, STEPS // 2 * PROMPTS)
    write_rows(tmp_path / "steady.jsonl", 2 * STEPS * PROMPTS, 2 * STEPS * PROMPTS)
    (tmp_path / "two.yaml").write_text(SPEC)
    run = tmp_path / "run"
    assert_passes("run", str(tmp_path / "two.yaml"), "--out", str(run))
    with LogReader(run) as reader:
        rows = [entry.value for entry in reader.entries()]
    bounds_s = [
        one.bounded.bound.rollout_s
        for one in rows
        if isinstance(one, ExpectSteps) and one.pipeline == "longer" and one.bounded
    ]
    assert bounds_s[-1] > 1.8 * min(bounds_s), "the bound follows the lengths"
    moved = [at for at, one in enumerate(rows) if isinstance(one, Relocate)]
    assert moved, "the two leave each other's nodes"
    solo_s = next(
        one.measured.median.solo_s
        for one in reversed(rows)
        if isinstance(one, ExpectSteps) and one.pipeline == "steady" and one.measured
    )
    ends_s = ends_of_steps(rows[moved[-1] :], "steady")
    assert len(ends_s) > 2
    assert (ends_s[-1] - ends_s[0]) / (len(ends_s) - 1) <= 3.0 * solo_s
    assert_passes("verify", str(run), "--all")


def assert_passes(*words: str) -> None:
    done = subprocess.run(command(*words), capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr


def ends_of_steps(rows: list[Any], name: str) -> list[float]:
    """Times at which the pipeline's updates in these rows of the log ended."""
    updates = {
        one.order for one in rows if isinstance(one, RunStage) and one.pipeline == name and one.stage is Stage.UPDATE
    }
    return [one.time_s for one in rows if isinstance(one, StageFinished) and one.order in updates]
