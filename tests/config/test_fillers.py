"""The keys of a filler, and what does not go with it."""

from __future__ import annotations

import pytest

from rlmux.config.checks import Purpose
from rlmux.config.load import parse_spec
from rlmux.core.errors import SpecError
from rlmux.core.model import Stage, Urgency

CLUSTER = "cluster: {pools: {rollout: {devices: 1}, train: {devices: 1}}}\n"


def spec_of(tmp_path, keys: str, purpose: Purpose = Purpose.RUN):
    text = f"{CLUSTER}pipelines:\n  - name: eval\n    task: sort\n    urgency: filler\n{keys}"
    return parse_spec(text, source="f.yaml", folder=tmp_path, purpose=purpose)


def test_a_filler_has_the_stages_of_a_rollout_alone(tmp_path):
    (one,) = spec_of(tmp_path, "    algorithm: {group_size: 1}\n").pipelines
    assert (one.pipeline.urgency, one.pipeline.stages) == (Urgency.FILLER, (Stage.GENERATE, Stage.REWARD))


def test_planning_asks_only_for_the_seconds_of_its_rollout(tmp_path):
    (one,) = spec_of(tmp_path, "    estimate: {rollout_s: 3}\n", Purpose.PLAN).pipelines
    assert (one.pipeline.estimate.rollout_s, one.pipeline.estimate.train_s) == (3.0, 0.0)


@pytest.mark.parametrize(
    ("keys", "what", "why"),
    [
        ("slo_slowdown: 2", "slo_slowdown is 2", "it is promised nothing"),
        ("slo_probability: 0.9", "slo_probability is 0.9", "it is promised nothing"),
        ("sft_warmup: {updates: 3}", "sft_warmup.updates is 3", "it trains nothing"),
        ("algorithm: {staleness: 1}", "algorithm.staleness is 1", "it trains nothing"),
        ("algorithm: {kl_coef: 0.1}", "algorithm.kl_coef is 0.1", "it trains nothing"),
        ("adapter: {rank: 2, alpha: 2}", "adapter is a mapping", "it trains nothing"),
        ("estimate: {rollout_s: 1, train_s: 1}", "estimate.train_s is 1", "it trains nothing"),
    ],
)
def test_what_does_not_go_with_a_filler_is_told_with_its_place(tmp_path, keys, what, why):
    with pytest.raises(SpecError) as error:
        spec_of(tmp_path, f"    {keys}\n")
    assert str(error.value) == (
        f"f.yaml:6: pipelines.eval.{what}: does not go with urgency: filler, since {why}; accepted: no such key"
    )


def test_a_single_answer_of_a_prompt_is_for_fillers(tmp_path):
    text = f"{CLUSTER}pipelines:\n  - name: a\n    task: sort\n    algorithm: {{group_size: 1}}\n"
    with pytest.raises(SpecError) as error:
        parse_spec(text, source="f.yaml", folder=tmp_path, purpose=Purpose.RUN)
    assert str(error.value) == (
        "f.yaml:5: pipelines.a.algorithm.group_size is 1; accepted: 2 or more, since trajectories of one prompt are "
        "compared; 1 with urgency: filler"
    )
