"""Loops of the real cookbook, unmodified, in an environment of their own, which RLMUX_TINKER_PYTHON names.

`make test-tinker` makes that environment and runs these. Without it they are left out.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.service.clients import weights_of
from tests.service.conftest import FILE
from tests.waiting import until

PARITY = Path(__file__).parents[2] / "tinker" / "parity.py"
LIMIT_S = 300
AWAY_S = 5
STEPS = 4

pytestmark = pytest.mark.skipif(
    "RLMUX_TINKER_PYTHON" not in os.environ, reason="RLMUX_TINKER_PYTHON names no Python with the cookbook"
)


def test_the_cookbooks_recipe_runs_as_it_is(serve, program, tmp_path):
    options = {
        "model_name": "rlmux/tiny", "renderer_name": "role_colon", "env": "arithmetic", "group_size": 4,
        "groups_per_batch": 4, "max_tokens": 5, "max_steps": 3, "lora_rank": 8, "loss_fn": "importance_sampling",
        "eval_every": 0, "save_every": 2, "log_path": tmp_path / "log",
    }  # fmt: skip
    words = [f"{key}={value}" for key, value in options.items()]
    ended(program(serve(), "-m", "tinker_cookbook.recipes.math_rl.train", *words))
    assert checkpoints(tmp_path / "log")[-1]["name"] == "final"


@pytest.mark.parametrize("parameters", ["full", "lora"])
def test_two_loops_at_once_end_with_the_weights_each_has_alone(serve, program, tmp_path, parameters):
    served = serve(text=f"{FILE}      parameters: {parameters}\n")
    alone = {seed: ended(loop(program, served, tmp_path / f"alone{seed}", seed)) for seed in (1, 2)}
    together = {seed: loop(program, served, tmp_path / f"together{seed}", seed) for seed in (1, 2)}
    for each in together.values():
        ended(each)
    for seed in alone:
        was, now = tmp_path / f"alone{seed}", tmp_path / f"together{seed}"
        assert weights(served, now) == weights(served, was)
        assert rewards(now) == rewards(was)
        assert max(abs(row["optim/kl_sample_train_v1"]) for row in metrics(now)[:STEPS]) < 1e-6
    assert weights(served, tmp_path / "alone1") != weights(served, tmp_path / "alone2")


def test_loops_ride_through_a_server_that_is_killed_and_away_for_a_while(serve, program, tmp_path):
    served = serve()
    ended(loop(program, served, tmp_path / "alone", 1))
    running = {seed: loop(program, served, tmp_path / f"killed{seed}", seed) for seed in (1, 2)}
    until(lambda: all(metrics(tmp_path / f"killed{seed}") for seed in running), "a step of each", limit_s=LIMIT_S)
    served.kill()
    time.sleep(AWAY_S)
    resumed = serve(served)
    for each in running.values():
        ended(each)
    assert weights(resumed, tmp_path / "killed1") == weights(resumed, tmp_path / "alone")


@pytest.mark.parametrize("parameters", ["full", "lora"])
def test_a_stopped_loop_goes_on_from_its_own_folder_to_the_weights_without_the_stop(
    serve, program, tmp_path, parameters
):
    served = serve(text=f"{FILE}      parameters: {parameters}\n")
    ended(loop(program, served, tmp_path / "whole", 1, save_every=1))
    stopped = loop(program, served, tmp_path / "stopped", 1, save_every=1)
    until(
        lambda: len(checkpoints(tmp_path / "stopped")) >= 2, "two checkpoints", limit_s=LIMIT_S, process=stopped.process
    )
    stopped.process.kill()
    ended(loop(program, served, tmp_path / "stopped", 1, save_every=1))
    assert weights(served, tmp_path / "stopped") == weights(served, tmp_path / "whole")


def loop(program: Callable, served: object, folder: Path, seed: int, save_every: int = 0):
    return program(served, PARITY, folder.name, "rlmux/tiny", folder, STEPS, save_every, seed)


def ended(client) -> None:
    client.process.communicate(timeout=LIMIT_S)
    client.errors.seek(0)
    assert client.process.returncode == 0, client.errors.read()[-3000:]


def rows(file: Path) -> list[dict]:
    lines = file.read_text().splitlines(keepends=True) if file.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def metrics(folder: Path) -> list[dict]:
    return rows(folder / "metrics.jsonl")


def rewards(folder: Path) -> list[float]:
    return [row["env/all/reward/total"] for row in metrics(folder)[:STEPS]]


def checkpoints(folder: Path) -> list[dict]:
    return rows(folder / "checkpoints.jsonl")


def weights(served, folder: Path) -> str:
    return weights_of(served, checkpoints(folder)[-1]["state_path"])
