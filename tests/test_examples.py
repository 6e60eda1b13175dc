"""Every example is a valid file, with tasks, rewards and rows that exist."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlmux.cli import inputs

EXAMPLES = Path(__file__).parent.parent / "examples"
TO_PLAN = {"cluster_what_if.yaml"}
FILES = sorted(path.name for path in EXAMPLES.glob("*.yaml"))


@pytest.mark.parametrize("name", [name for name in FILES if name not in TO_PLAN])
def test_an_example_can_be_run(name):
    spec = inputs.load_for_run(str(EXAMPLES / name), None, None)
    assert all(pipeline.plan.sft_warmup.num_updates > 0 for pipeline in spec.pipelines)
    assert {pool.num_nodes for pool in spec.cluster.pools.values()} == {1}, "examples fit on two cores"


@pytest.mark.parametrize("name", sorted(TO_PLAN))
def test_an_example_can_be_planned(name):
    spec = inputs.load_for_plan(str(EXAMPLES / name), None, None)
    assert len(inputs.workload_of(spec).arrivals) == len(spec.pipelines)


@pytest.mark.parametrize("name", FILES)
def test_an_example_says_how_it_is_used(name):
    comment = (EXAMPLES / name).read_text(encoding="utf-8").partition("cluster:")[0]
    assert f"rlmux {'plan' if name in TO_PLAN else 'run'} examples/{name}" in comment
