"""The schema for editors takes the files that the commands take, and refuses what a person mistypes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rlmux.config.json_schema import json_schema
from rlmux.config.source_map import parse_yaml

jsonschema = pytest.importorskip("jsonschema", reason="comes with ray")
EXAMPLES = Path(__file__).parents[2] / "examples"
POOLS = "cluster: {pools: {rollout: {devices: 1}, train: {devices: 1}}}\n"


@pytest.fixture(scope="module")
def schema() -> dict[str, Any]:
    made = json_schema()
    jsonschema.Draft202012Validator.check_schema(made)
    return made


def mistakes_in(text: str, schema: dict[str, Any]) -> list[str]:
    """The place of each mistake."""
    found = jsonschema.Draft202012Validator(schema).iter_errors(parse_yaml(text, "file.yaml").plain())
    return sorted(error.json_path for error in found)


@pytest.mark.parametrize("path", sorted(EXAMPLES.rglob("*.yaml")), ids=lambda path: path.stem)
def test_every_example_is_valid_and_a_mistyped_key_is_not(schema, path):
    text = path.read_text(encoding="utf-8")
    assert mistakes_in(text, schema) == []
    assert mistakes_in(text.replace("rollout:", "rolout:").replace("policy:", "polici:") + "mistyped: 1\n", schema)


@pytest.mark.parametrize(
    ("text", "where"),
    [
        (POOLS + "pipeline: []", ["$"]),
        (POOLS + "pipelines: [{name: a, task: sort, stepz: 3}]", ["$.pipelines[0]"]),
        (POOLS + "pipelines: [{task: sort}]", ["$.pipelines[0]"]),
        (POOLS + "pipelines: [{name: a, steps: 0}, {name: b, algorithm: grop}]",
         ["$.pipelines[0].steps", "$.pipelines[1].algorithm"]),
        (POOLS + "pipelines: [{name: a, rollout: {engine: {nam: vllm}}}]", ["$.pipelines[0].rollout.engine"]),
        (POOLS + "pipelines: [{name: a, alerts: {no_signal: bad}}]", ["$.pipelines[0].alerts.no_signal"]),
        (POOLS + "pipelines: [{name: a}]\nkeep: {ended: 3, chekpoints: 1d}", ["$.keep"]),
        (POOLS + "pipelines: [{name: a, retries: {lost_worker: -1}}]", ["$.pipelines[0].retries.lost_worker"]),
        ("defaults: {algorithm: {learning_rat: 1}}", ["$.defaults.algorithm"]),
        ("lanes: {small: {clustre: {}}}", ["$.lanes.small", "$.lanes.small"]),
        ("lanes: {a: {cluster: {pools: {}}, serve: {model: {}}}}", ["$.lanes.a.cluster.pools", "$.lanes.a.serve"]),
        ("lease_s: 3\nclustre: {}", ["$", "$"]),
    ],
)  # fmt: skip
def test_a_mistake_is_placed_in_the_kind_of_file_that_the_keys_select(schema, text, where):
    assert mistakes_in(text, schema) == where


@pytest.mark.parametrize(
    "text",
    [
        "pipelines: [{name: a, task: {name: sort, digits: 5}}]",
        "defaults: {adapter: {rank: 8}}\npipelines: [{name: a, adapter: {alpha: 16}, algorithm: rloo}]",
        POOLS + "pipelines: [{name: a, task: {name: file, path: rows.jsonl, answer_key: null}}]",
        POOLS + "pipelines: [{name: a, alerts: {no_signal: off, kl_huge: {steps: 3}}, slo_probability: mean}]",
        POOLS + "pipelines: [{name: a}]\nkeep: 30d",
        POOLS + "pipelines: [{name: a}]\nkeep: {ended: 4w, checkpoints: 7d, samples: 14d, project_gb: 200}",
        POOLS + "pipelines: [{name: a, retries: 2}, {name: b, retries: {lost_worker: 3, user_code: 0}}]",
    ],
)
def test_short_forms_options_of_tasks_and_keys_from_defaults_are_valid(schema, text):
    assert mistakes_in(text, schema) == []


def test_every_key_has_its_line_of_documentation(schema):
    mappings = {name: its.get("then", its) for name, its in schema["$defs"].items()}
    assert [
        f"{name}.{key}"
        for name, mapping in mappings.items()
        for key, its in mapping["properties"].items()
        if not its.get("description")
    ] == []
    assert all(mapping["additionalProperties"] is (name == "TaskConfig") for name, mapping in mappings.items())
