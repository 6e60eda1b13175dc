"""A real run of a file whose rows have an environment of the user's."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from textwrap import dedent

from tests.command_line import command

SPEC = """
cluster:
  pools:
    rollout: {devices: 1}
    train: {devices: 1}
pipelines:
  - name: game
    steps: 2
    model: {hidden_size: 32, heads: 2, kv_heads: 1, intermediate_size: 64}
    task: {name: file, path: rows.jsonl, environment: "my_game:Game", reward: "my_game:score"}
    sft_warmup: {updates: 30, batch_size: 16, learning_rate: 1e-2}
    algorithm: {prompts_per_step: 4, group_size: 2}
    rollout: {max_new_tokens: 24}
"""
GAME = """
    class Game:
        def __init__(self, row):
            self.answer, self.num_turns = row["answer"], 0

        async def reply(self, turn):
            self.num_turns += 1
            return None if self.num_turns == 3 else f"not {self.answer}?"

    def score(solution_str, ground_truth, data_source, extra_info):
        return float(solution_str.count(f"not {ground_truth}?"))
"""


def test_a_run_trains_on_trajectories_of_several_turns(tmp_path: Path) -> None:
    (tmp_path / "my_game.py").write_text(dedent(GAME))
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"prompt": "g:", "answer": a}) + "\n" for a in "1234"))
    (tmp_path / "game.yaml").write_text(SPEC)
    words = command("run", str(tmp_path / "game.yaml"), "--out", str(tmp_path / "run"))
    done = subprocess.run(words, capture_output=True, text=True, timeout=170)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [json.loads(line) for line in (tmp_path / "run" / "game" / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "turns_mean" in row]
    assert len(steps) == 2
    assert all(1 < row["turns_mean"] <= 3 for row in steps)
    assert all(0 < row["reward_mean"] <= 2 for row in steps), "replies came, and were part of the response"
