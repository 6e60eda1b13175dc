"""One pipeline's part of a file without default values: short, and it loads to the same pipeline."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlmux.config.checks import Purpose
from rlmux.config.load import Spec, file_of_pipeline, load_spec, parse_spec

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.yaml"))
HERE = Path("/")
IS_PLANNED = {"07_cluster_what_if"}
NEEDS_WEIGHTS = {"14_eight_gpus"}
BARE = """
cluster: {pools: {rollout: {devices: 1}, train: {devices: 1}}}
pipelines:
  - {name: sort, task: sort, steps: 9}
  - name: kept
    task: {name: sort, max_digits: 7}
    retries: 2
    alerts: {kl_huge: warning}
    algorithm: {adam_betas: [0.9, 0.95]}
"""


def parsed(text: str, cluster_of: Spec | None = None, purpose: Purpose = Purpose.RUN) -> Spec:
    return parse_spec(text, source="a.yaml", folder=HERE, cluster_of=cluster_of, purpose=purpose)


def examples() -> list[Path]:
    return [path for path in EXAMPLES if "pipelines:" in path.read_text() and path.stem not in NEEDS_WEIGHTS]


@pytest.mark.parametrize("path", examples(), ids=lambda path: path.stem)
def test_the_short_file_of_each_example_loads_to_the_same_pipelines(path):
    purpose = Purpose.PLAN if path.stem in IS_PLANNED else Purpose.RUN
    spec = load_spec(path, purpose=purpose)
    for pipeline in spec.pipelines:
        whole = file_of_pipeline(spec.resolved, pipeline.name)
        short = file_of_pipeline(spec.resolved, pipeline.name, is_short=True)
        assert whole
        assert short
        assert len(short) < len(whole) / 2
        assert parsed(short, spec, purpose).pipelines == parsed(whole, spec, purpose).pipelines == (pipeline,)


def test_a_short_file_has_what_was_written_and_nothing_more():
    text = file_of_pipeline(parsed(BARE).resolved, "sort", is_short=True)
    assert text == "code_folder: /\npipelines:\n- name: sort\n  steps: 9\n  task: sort\n"


def test_sections_that_differ_have_only_the_keys_that_differ():
    spec = parsed(BARE)
    text = file_of_pipeline(spec.resolved, "kept", is_short=True)
    assert text
    assert "max_digits: 7" in text
    assert "learning_rate" not in text
    assert parsed(text, spec).pipelines == (spec.pipelines[1],)


def test_a_file_without_the_pipeline_has_no_short_one():
    assert file_of_pipeline(parsed(BARE).resolved, "other", is_short=True) is None
