"""Rollout that samples another policy than training computes: corrected by weights, shown, and no end by one token.

A real rollout's log-probs, which are the trainer's but for rounding, are moved by what a mismatch would move them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.engines.test_training_loop import Loop, config

from rlmux.core.errors import PipelineError
from rlmux.rl.config import EngineConfig, RolloutConfig, TrainConfig, TrainingConfig
from rlmux.rl.types import Trajectory

Move = Callable[[Sequence[float]], Sequence[float]]


def by(nats: float, *, num: int | None = None) -> Move:
    """Each answer's first `num` log-probs less so many nats; None: all."""
    return lambda logprobs: [each - nats * (num is None or place < num) for place, each in enumerate(logprobs)]


def trained(given: TrainingConfig, folder: Path, move: Move) -> tuple[str, dict[str, float]]:
    """The weights' hash and the metrics of one step whose samples claim moved log-probs."""
    loop = Loop(given, folder)
    loop.rollout.submit(loop.env.begin_step(1))
    loop.sample(1)
    batch = loop.env.finish_step(1)
    moved: list[Trajectory] = [replace(each, logprobs=tuple(move(each.logprobs))) for each in batch.trajectories]
    loop.env.finish_step = lambda step: replace(batch, trajectories=moved)  # type: ignore[method-assign]
    loop.train(1)
    return loop.trainer.weights_sha256(), loop.metrics


def corrected(**algorithm: Any) -> TrainingConfig:
    return config(learning_rate=0.01, weight_decay=0.0, **algorithm)


def test_a_ratio_within_the_limit_weighs_and_beyond_it_is_cut_or_dropped(tmp_path: Path) -> None:
    plain, _ = trained(corrected(), tmp_path, by(0.0))
    for correction, nats, ratio, share in (
        ("tis", math.log(1.5), 1.5, 0.0), ("tis", math.log(3), 2.0, 1.0), ("tis", -math.log(4), 0.25, 0.0),
        ("mis", math.log(1.5), 1.5, 0.0), ("mis", math.log(3), 0.0, 1.0), ("mis", -math.log(4), 0.0, 1.0),
    ):  # fmt: skip
        weights, metrics = trained(corrected(mismatch=correction), tmp_path, by(nats))
        assert metrics["mismatch_ratio"] == pytest.approx(ratio, abs=1e-3)
        assert metrics["mismatch_cut_share"] == pytest.approx(share)
        assert metrics["mismatch_kl"] == pytest.approx(math.exp(nats) - nats - 1, rel=1e-3)
        assert (metrics["grad_norm"] == 0.0) == (ratio == 0.0)
        assert weights != plain


def test_an_answer_has_one_weight_at_the_level_of_sequences(tmp_path: Path) -> None:
    """The first token's ratio is 3: alone it is cut to 2, and all tokens of the answer have that weight."""
    of_tokens = trained(corrected(mismatch="tis"), tmp_path, by(math.log(3), num=1))[1]
    of_answers = trained(corrected(mismatch="tis", mismatch_level="sequence"), tmp_path, by(math.log(3), num=1))[1]
    assert of_answers["mismatch_ratio"] == pytest.approx(2.0, abs=1e-3)
    assert of_answers["mismatch_cut_share"] == pytest.approx(1.0)
    assert 1.0 < of_tokens["mismatch_ratio"] < 2.0


def test_where_rlmux_samples_in_float32_nothing_is_corrected_and_no_bit_changes(tmp_path: Path) -> None:
    given, metrics = trained(corrected(), tmp_path, by(0.0))
    off, _ = trained(corrected(mismatch="none"), tmp_path, by(0.5))
    assert given == off
    assert "mismatch_ratio" not in metrics
    assert metrics["mismatch_kl"] < 1e-6


@pytest.mark.parametrize(
    "changes",
    [
        {"rollout": RolloutConfig(dtype="bfloat16")},
        {"train": TrainConfig(dtype="bfloat16")},
        {"rollout": RolloutConfig(engine=EngineConfig(name="vllm", url="http://127.0.0.1:8000"))},
    ],
)
def test_other_engines_and_rounded_weights_are_corrected_by_default(changes: dict[str, Any]) -> None:
    assert replace(config(), **changes).mismatch_correction == "tis"
    assert config().mismatch_correction == "none"


def test_one_token_far_away_ends_no_pipeline_whose_weights_are_rounded(tmp_path: Path) -> None:
    given = corrected()
    rounded = replace(given, rollout=replace(given.rollout, dtype="bfloat16"))
    calls: list[None] = []

    def one_token(logprobs: Sequence[float]) -> Sequence[float]:
        calls.append(None)
        return by(1.5, num=1)(logprobs) if len(calls) == 1 else logprobs

    _, metrics = trained(rounded, tmp_path, one_token)
    assert metrics["logprob_gap"] > 1.0


def test_policies_that_are_far_apart_end_it_before_any_update(tmp_path: Path) -> None:
    given = corrected()
    rounded = replace(given, rollout=replace(given.rollout, dtype="bfloat16"))
    with pytest.raises(PipelineError, match=r"mismatch_kl is 0\.\d+ nats a token, accepted: up to 0\.1 \(algorithm"):
        trained(rounded, tmp_path, by(0.7))
    named = replace(rounded, algorithm=replace(rounded.algorithm, max_mismatch_kl=1.0))
    assert trained(named, tmp_path, by(0.7))[1]["mismatch_kl"] > 0.1
