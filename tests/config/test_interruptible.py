"""The keys of interruptible rollouts, and what does not go with them."""

from __future__ import annotations

import pytest

from rlmux.config.checks import Purpose
from rlmux.config.load import parse_spec
from rlmux.core.errors import SpecError
from rlmux.rl.config import InterruptibleConfig
from rlmux.rl.origin import plan_sha256
from rlmux.runtime.checks.preflight import complaints_about

HEAD = "cluster: {pools: {rollout: {devices: 1}, train: {devices: 1}}}\npipelines:\n  - name: a\n"


def spec_of(tmp_path, keys: str, task: str = "sort"):
    text = f"{HEAD}    {keys}\n    task: {task}\n"
    return parse_spec(text, source="f.yaml", folder=tmp_path, purpose=Purpose.RUN, check_training=complaints_about)


def test_an_empty_mapping_has_the_defaults_and_is_another_plan_than_none(tmp_path):
    (one,) = spec_of(tmp_path, "rollout: {interruptible: {}}").pipelines
    (plain,) = spec_of(tmp_path, "rollout: {}").pipelines
    assert one.training.rollout.interruptible == InterruptibleConfig(num_slots=None, overlap_ticks=0)
    assert plan_sha256(one.training) != plan_sha256(plain.training)


@pytest.mark.parametrize(("ticks", "staleness", "behind"), [(0, 0, 0), (0, 4, 0), (20, 1, 1), (20, 4, 1)])
def test_the_scheduler_may_begin_a_rollout_one_version_behind_where_it_overlaps_training(
    tmp_path, ticks, staleness, behind
):
    keys = f"rollout: {{interruptible: {{overlap_ticks: {ticks}}}}}\n    algorithm: {{staleness: {staleness}}}"
    (one,) = spec_of(tmp_path, keys).pipelines
    assert one.config.algorithm.staleness == staleness
    assert one.pipeline.staleness == behind


@pytest.mark.parametrize(
    ("keys", "text"),
    [
        ("rollout: {interruptible: {slots: 0}}", "interruptible.slots is 0; accepted: a whole number, 1 or more"),
        ("rollout: {interruptible: {overlap_ticks: -1}}", "overlap_ticks is -1; accepted: a whole number, 0 or more"),
        ("rollout: {interruptible: {overlap: 3}}", "interruptible.overlap"),
        ("rollout: {interruptible: {overlap_ticks: 5}}", "accepted: 0 with algorithm.staleness 0"),
        ("rollout: {interruptible: {}, tail_batching: {}}", "does not go with tail_batching; accepted: one of them"),
        ("rollout: {interruptible: {}, engine: {name: vllm, python: p}}", "does not go with an engine of others"),
        ("urgency: filler\n    rollout: {interruptible: {}}", "does not go with urgency: filler"),
    ],
)
def test_what_does_not_go_with_it_is_told_in_one_line(tmp_path, keys, text):
    with pytest.raises(SpecError) as error:
        spec_of(tmp_path, keys)
    assert text in str(error.value)
    assert str(error.value).startswith("f.yaml:")
    assert "\n" not in str(error.value)


def test_a_task_of_several_turns_is_refused_before_anything_starts(tmp_path):
    with pytest.raises(SpecError) as error:
        spec_of(tmp_path, "rollout: {interruptible: {}}", task="calculator")
    assert str(error.value) == (
        "f.yaml:4: pipelines.a.rollout.interruptible: does not go with task 'calculator', whose answers have several "
        "turns; accepted: a task of one turn, or no interruptible"
    )
