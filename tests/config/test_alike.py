"""Pipelines of a file have one key where their steps are expected to take as long."""

from __future__ import annotations

import pytest

from rlmux.config.load import parse_spec

FILE = """
cluster: {pools: {rollout: {devices: 2}, train: {devices: 2}}}
defaults:
  task: {name: sort, digits: 5}
  model: {hidden_size: 64}
  rollout: {max_new_tokens: 16}
pipelines:
  - {name: one}
"""


def key_of(tmp_path, pipeline: str) -> str:
    (_, other) = parse_spec(f"{FILE}  - {pipeline}\n", source="f.yaml", folder=tmp_path).pipelines
    return other.pipeline.alike


@pytest.fixture
def one(tmp_path) -> str:
    key = parse_spec(FILE, source="f.yaml", folder=tmp_path).pipelines[0].pipeline.alike
    assert key
    return key


@pytest.mark.parametrize(
    "keys",
    [
        "seed: 7",
        "steps: 9",
        "model: {hidden_size: 64, seed: 3}",
        "algorithm: {learning_rate: 0.1, clip_high: 0.3}",
        "user: ann",
        "slo_slowdown: 1.5",
        "task: {digits: 5, name: sort}",
    ],
)
def test_what_no_step_takes_longer_for_leaves_the_key_as_it_is(tmp_path, one, keys):
    assert key_of(tmp_path, f"{{name: two, {keys}}}") == one


@pytest.mark.parametrize(
    "keys",
    [
        "model: {hidden_size: 128}",
        "adapter: {rank: 4, alpha: 8}",
        "task: {name: sort, digits: 6}",
        "task: reverse",
        "sft_warmup: {updates: 4}",
        "algorithm: {group_size: 4}",
        "algorithm: {prompts_per_step: 8}",
        "algorithm: {kl_coef: 0.1}",
        "algorithm: {epochs: 2}",
        "rollout: {max_new_tokens: 32}",
        "rollout: {workers: 2}",
        "rollout: {slots: 8}",
        "rollout: {dtype: bfloat16}",
        "train: {workers: 2}",
        "train: {dtype: bfloat16}",
    ],
)
def test_what_changes_the_seconds_of_a_step_changes_the_key(tmp_path, one, keys):
    assert key_of(tmp_path, f"{{name: two, {keys}}}") not in ("", one)


def test_a_filler_has_no_key(tmp_path):
    assert key_of(tmp_path, "{name: two, urgency: filler}") == ""
