"""The typed tree: what is stated at a field is what the file takes."""

from __future__ import annotations

import dataclasses
import pickle
import re
import subprocess
import sys
from typing import get_args, get_origin

import pytest

from rlmux.config import schema_docs, tree
from rlmux.config.error_messages import fields_by_key
from rlmux.core.errors import UserError
from rlmux.rl import config
from rlmux.rl.config import FromFile, MisfitError, ModelConfig, TrainingConfig


def mappings(top: type[FromFile]) -> set[type[FromFile]]:
    """The class of every mapping that can be in the file."""
    found, queue = {top}, list(fields_by_key(top).values())
    while queue:
        annotation = queue.pop()
        if isinstance(annotation, type) and issubclass(annotation, FromFile) and annotation not in found:
            found.add(annotation)
            queue += fields_by_key(annotation).values()
        elif get_origin(annotation) is not None:
            queue += get_args(annotation)
    return found


def test_every_mapping_of_the_file_has_a_table_in_the_reference():
    in_tables = {mapping for _, mapping in schema_docs.SECTIONS}
    assert mappings(tree.RunConfig) - in_tables == {tree.ClusterConfig}


@pytest.mark.parametrize("mapping", [mapping for _, mapping in schema_docs.SECTIONS])
def test_every_key_has_a_line_in_the_reference(mapping):
    lines = schema_docs.field_lines(mapping)
    assert [key for key in fields_by_key(mapping) if not lines.get(key)] == []


def test_a_pipeline_of_the_file_has_every_key_that_its_training_reads_but_the_one_of_profiles():
    assert set(fields_by_key(TrainingConfig)) - set(fields_by_key(tree.PipelineConfig)) == {"fills_token_limit"}


def test_the_tree_written_out_reads_as_itself(load, good):
    load(good)
    read = tree.read_tree(
        {
            "cluster": {"pools": {"rollout": {"devices": 1}, "train": {"nodes": 2, "usd_per_gpu_hour": 3}}},
            "pipelines": [{"name": "a", "task": {"name": "sort", "digits": 3}, "slo_slowdown": 2}],
        }
    )
    assert read.pipelines[0].task == config.TaskConfig(name="sort", params={"digits": 3})
    assert tree.read_tree(tree.plain_tree(read)) == read


def test_reward_processes_are_a_key_of_the_task_and_their_limits_need_them(load):
    file = """\
    cluster: {pools: {rollout: {devices: 1}, train: {devices: 1}}}
    pipelines:
      - {name: a, task: {name: sort, reward_processes: 2, reward_memory_gb: 1, reward_file_gb: 0}}
    """
    (pipeline,) = load(file).pipelines
    assert pipeline.config.task == config.TaskConfig(
        name="sort", num_reward_processes=2, reward_memory_gb=1.0, reward_file_gb=0.0
    )
    for before, after, text in [
        ("reward_processes: 2, ", "", "reward_memory_gb is 1: limits the processes of reward_processes; accepted with"),
        ("reward_processes: 2", "reward_processes: -1", "reward_processes is -1; accepted: a whole number, 0 or more"),
        ("memory_gb: 1", "memory_gb: 0.01", "reward_memory_gb is 0.01; accepted: a number, 0.1 or more"),
        ("file_gb: 0", "file_gb: -1", "reward_file_gb is -1; accepted: a number, 0 or more"),
    ]:
        with pytest.raises(UserError, match=re.escape(f":3: pipelines.a.task.{text}")):
            load(file.replace(before, after))


def test_heads_that_do_not_divide_are_refused_in_python_too():
    with pytest.raises(UserError, match="heads: accepted: a divisor of half of hidden_size 64") as caught:
        ModelConfig(num_heads=5)
    again = pickle.loads(pickle.dumps(caught.value))
    assert isinstance(again, MisfitError)
    assert str(again) == str(caught.value)


def test_training_values_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        TrainingConfig(name="a").seed = 1  # type: ignore[misc]


def test_the_training_part_imports_neither_torch_nor_pydantic():
    code = "import sys, rlmux.rl.config; print([name for name in ('torch', 'pydantic') if name in sys.modules])"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[]"
