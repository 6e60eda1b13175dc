"""Rewards called on a sample before anything starts: slow ones are told, left to the run, and hide no later one."""

from __future__ import annotations

import pytest

from rlmux.rl.config import TaskConfig, TrainingConfig
from rlmux.runtime.checks import preflight

REWARDS = """
import time
def slow(solution_str): time.sleep(60)
def brisk(solution_str): time.sleep(1.0); return 1.0
def short(solution_str): return "x"
def forkless(solution_str):
    import os, subprocess
    os.fork = subprocess.Popen = None
    return 1.0
def pools(solution_str):
    import multiprocessing
    with multiprocessing.Pool(1) as pool: return float(pool.map(abs, [1])[0])
"""


@pytest.fixture
def config(tmp_path):
    (tmp_path / "my_rewards.py").write_text(REWARDS)

    def build(reward, timeout_s=30.0):
        task = TaskConfig(name="sort", reward=f"my_rewards:{reward}", reward_timeout_s=timeout_s)
        return TrainingConfig(name=reward, task=task)

    return build


def test_a_reward_that_may_take_longer_is_left_to_the_run_and_the_next_is_checked(tmp_path, config, capfd):
    complaints = preflight.complaints_about([config("slow"), config("short")], tmp_path, patience_s=3.0)
    refused = "task.reward: reward my_rewards:short on a sample returned str 'x'; accepted: a finite number"
    assert complaints == [None, refused]
    assert "rlmux: reward my_rewards:slow takes over 3 s on a sample; it was not checked" in capfd.readouterr().err


def test_a_wait_for_a_reward_is_told(tmp_path, config, capfd, monkeypatch):
    monkeypatch.setattr(preflight, "_SILENCE_S", 0.2)
    assert preflight.complaints_about([config("brisk")], tmp_path) == [None]
    assert capfd.readouterr().err == "rlmux: waiting for reward my_rewards:brisk on a sample, at most 32 s\n"


def test_what_one_reward_breaks_in_its_process_another_pipeline_does_not_see(tmp_path, config):
    """As graders of code do, which disable parts of `os`; and others start processes."""
    configs = [config("forkless"), config("pools"), config("forkless")]
    assert preflight.complaints_about(configs, tmp_path) == [None, None, None]
