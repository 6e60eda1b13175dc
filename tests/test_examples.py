"""The examples are a staircase: numbered without a gap, each with its command on top, all of them valid files."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from rlmux.cli import inputs
from rlmux.config import Purpose
from rlmux.sim.workloads.spec_file import workload_of

EXAMPLES = Path(__file__).parent.parent / "examples"
TO_PLAN = {"07_cluster_what_if.yaml", "14_eight_gpus.yaml"}
WIDE = {"13_both_grains.yaml"}
"""Those whose devices share the cores of two: they show what only several rollout devices have."""
WITHOUT_ANSWERS = {"16_harbor.yaml"}
"""Those whose tasks have no answers to warm up on."""
TO_SHARE = {"09_permits.yaml"}
"""Files of `rlmux broker`; tests/broker/test_example.py runs them."""
FILES = sorted(path.name for path in EXAMPLES.glob("*.yaml"))


def test_the_numbers_of_the_examples_have_no_gap():
    assert [name.partition("_")[0] for name in FILES] == [f"{number:02}" for number in range(1, len(FILES) + 1)]
    assert len(FILES) == 16


@pytest.mark.parametrize("name", [name for name in FILES if name not in TO_PLAN | TO_SHARE])
def test_an_example_can_be_run(name):
    spec = inputs.load(str(EXAMPLES / name))
    trained = [pipeline for pipeline in spec.pipelines if not pipeline.pipeline.is_filler]
    assert all(pipeline.config.sft_warmup.num_updates > 0 for pipeline in trained) or name in WITHOUT_ANSWERS
    devices = [pool.num_nodes for pool in spec.cluster.pools.values()]
    assert max(devices) == 1 or name in WIDE, "examples fit on two cores"


@pytest.mark.parametrize("name", sorted(TO_PLAN))
def test_an_example_can_be_planned(name):
    spec = inputs.load(str(EXAMPLES / name), purpose=Purpose.PLAN)
    assert len(workload_of(spec).arrivals) == len(spec.pipelines)


@pytest.mark.parametrize("name", FILES)
def test_an_example_begins_with_its_new_idea_and_its_command(name):
    comment = (EXAMPLES / name).read_text(encoding="utf-8").partition("cluster:")[0]
    command = "plan" if name in TO_PLAN else "broker" if name in TO_SHARE else "run"
    assert re.match(rf"# New here: .+\n#\n#   rlmux {command} examples/{name}\n", comment)
