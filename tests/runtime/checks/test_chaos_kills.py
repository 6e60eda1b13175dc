"""Kill anything at any moment, resume, and end with the same weights."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest
from tests.command_line import command

from rlmux.report.reports import load_summary
from rlmux.runtime.checks import chaos_kills
from rlmux.runtime.checks.chaos_kills import CONTROLLER, EVERYTHING, KINDS, Commands, planned_kills, run_chaos

FILE = """
cluster:
  pools:
    rollout: {devices: 1}
    train: {devices: 1}
policy: rollmux
defaults:
  steps: %d
  model: {hidden_size: 32, layers: 2, heads: 2, kv_heads: 1, intermediate_size: 64}
  sft_warmup: {updates: 4, batch_size: 16}
  rollout: {max_new_tokens: 16, slots: 8}
  algorithm: {prompts_per_step: 4, group_size: 4, micro_batch_size: 4, kl_coef: 0.01}
pipelines:
  - {name: sort, seed: 1, task: sort}
  - name: tool
    seed: 2
    task: calculator
    algorithm: {prompts_per_step: 4, group_size: 4, micro_batch_size: 4, staleness: 1}
"""


@pytest.fixture
def commands(tmp_path, backend_words):
    """Commands that train so many steps."""

    def of_steps(num_steps: int) -> Commands:
        file = tmp_path / "two.yaml"
        file.write_text(FILE % num_steps)
        rlmux = [sys.executable, "-m", "rlmux"]

        def run(folder: Path) -> list[str]:
            words = ["run", str(file), "--out", str(folder), *backend_words.run]
            return command(*words) if folder.name == "undisturbed" else [*rlmux, *words]

        return Commands(run=run, resume=lambda folder: [*rlmux, "resume", str(folder), *backend_words.resume])

    return of_steps


@pytest.mark.slow
@pytest.mark.parametrize(("num_kills", "num_steps", "seed"), [(6, 10, 1), (20, 30, 5)])
def test_kills_of_anything_leave_the_weights_as_they_were(commands, tmp_path, num_kills, num_steps, seed):
    result = run_chaos(commands(num_steps), tmp_path / "chaos", num_kills=num_kills, seed=seed)
    assert len(result.kills) == num_kills
    assert {kill.kind for kill in result.kills} == set(KINDS)
    assert result.is_equal
    assert result.orphans == []


@pytest.mark.slow
def test_rounds_that_are_over_before_their_kills_are_due_are_killed_sooner(commands, tmp_path, monkeypatch):
    """Otherwise a run that was undisturbed on a busy machine has rounds without end on an idle one."""
    monkeypatch.setattr(chaos_kills, "load_summary", lambda folder: {**load_summary(folder), "makespan_s": 400.0})
    result = run_chaos(commands(3), tmp_path / "chaos", num_kills=1, seed=1)
    assert (len(result.kills), result.is_equal) == (1, True)
    assert len(result.rounds) <= 10


@pytest.mark.parametrize("num_kills", [1, 5, 20, 103])
def test_as_many_kills_as_asked_for(num_kills):
    kills = planned_kills(num_kills, random.Random(1))
    assert len(kills) == num_kills
    if num_kills >= 20:
        assert sum(kill in (CONTROLLER, EVERYTHING) for kill in kills) == pytest.approx(num_kills / 5, abs=1)


def test_kills_are_a_function_of_the_seed():
    assert planned_kills(20, random.Random(3)) == planned_kills(20, random.Random(3))
    assert planned_kills(20, random.Random(3)) != planned_kills(20, random.Random(4))
