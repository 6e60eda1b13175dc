"""The keys of tail batching, and what does not go with it."""

from __future__ import annotations

import pytest

from rlmux.config.checks import Purpose
from rlmux.config.load import parse_spec
from rlmux.core.errors import SpecError
from rlmux.rl.config import TailBatchingConfig
from rlmux.runtime.checks.preflight import complaints_about

HEAD = "cluster: {pools: {rollout: {devices: 1}, train: {devices: 1}}}\npipelines:\n  - name: a\n"


def spec_of(tmp_path, keys: str, task: str = "sort"):
    text = f"{HEAD}    {keys}\n    task: {task}\n"
    return parse_spec(text, source="f.yaml", folder=tmp_path, purpose=Purpose.RUN, check_training=complaints_about)


def test_an_empty_mapping_has_the_papers_factors(tmp_path):
    (one,) = spec_of(tmp_path, "rollout: {tail_batching: {}}").pipelines
    assert one.training.rollout.tail_batching == TailBatchingConfig(prompts=1.25, samples=1.25, num_slots=None)


@pytest.mark.parametrize(
    ("keys", "text"),
    [
        ("rollout: {tail_batching: {prompts: 1, samples: 1}}", "tail_batching.prompts is 1; accepted: above 1, or "),
        (
            "rollout: {tail_batching: {prompts: 0.5}}",
            "tail_batching.prompts is 0.5; accepted: a number, 1 or more, 4 or",
        ),
        ("rollout: {tail_batching: {slots: 0}}", "tail_batching.slots is 0; accepted: a whole number, 1 or more"),
        ("rollout: {tail_batching: {promts: 1.5}}", "tail_batching.promts"),
        ("rollout: {tail_batching: {}, engine: {name: vllm, python: p}}", "does not go with an engine of others"),
        ("algorithm: {staleness: 1}\n    rollout: {tail_batching: {}}", "accepted: 0 with rollout.tail_batching"),
    ],
)
def test_what_does_not_go_with_it_is_told_in_one_line(tmp_path, keys, text):
    with pytest.raises(SpecError) as error:
        spec_of(tmp_path, keys)
    assert text in str(error.value)
    assert str(error.value).startswith("f.yaml:4: pipelines.a.")
    assert "\n" not in str(error.value)


def test_a_task_of_several_turns_is_refused_before_anything_starts(tmp_path):
    with pytest.raises(SpecError) as error:
        spec_of(tmp_path, "rollout: {tail_batching: {}}", task="calculator")
    assert str(error.value) == (
        "f.yaml:4: pipelines.a.rollout.tail_batching: does not go with task 'calculator', whose answers have several "
        "turns; accepted: a task of one turn, or no tail_batching"
    )
