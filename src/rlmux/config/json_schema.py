"""The JSON schema of the user's file, for editors: the classes that read the file, in draft 2020-12.

    the file has ─┬ lanes ────────────────▶ ServiceFile
                  ├ a key of brokers only ─▶ BrokerConfig
                  └ neither ───────────────▶ RunConfig

The keys select one class, so that an editor words a mistake against this class alone; with `anyOf` it would word it
against all of them. The schema accepts every file that a command accepts. It does not check how keys fit together, and
not the values that only a function can judge, such as names: `rlmux check` does.
"""

from __future__ import annotations

from typing import Any

from pydantic import TypeAdapter

from rlmux.config.broker_file import BrokerConfig
from rlmux.config.error_messages import fields_by_key
from rlmux.config.schema_docs import SECTIONS, field_lines
from rlmux.config.service_file import ServiceFile
from rlmux.config.tree import (
    AlertConfig,
    ClusterConfig,
    EstimateConfig,
    KeepConfig,
    PipelineConfig,
    RetriesConfig,
    RunConfig,
)
from rlmux.rl.config import AdapterConfig, AlgorithmConfig, EngineConfig, FromFile, TaskConfig

Schema = dict[str, Any]
"""A JSON schema, or a part of one."""
_SHORT_FORMS: tuple[tuple[type[FromFile], str], ...] = (
    (TaskConfig, "name"),
    (AlgorithmConfig, "name"),
    (EngineConfig, "name"),
    (AlertConfig, "level"),
    (RetriesConfig, "any_reason"),
    (KeepConfig, "ended"),
)
"""Mappings that a bare value of one of their keys is short for."""


def json_schema() -> Schema:
    """The schema of every kind of file."""
    tops: tuple[type[FromFile], ...] = (RunConfig, ServiceFile, BrokerConfig)
    _, made = TypeAdapter.json_schemas([(top.__name__, "validation", TypeAdapter(top)) for top in tops], by_alias=True)
    mappings: Schema = made["$defs"]
    for mapping in {*tops, ClusterConfig, *(each for _, each in SECTIONS)}:
        _describe(mappings[mapping.__name__], mapping)
    _loosen(mappings)
    for mapping, key in _SHORT_FORMS:
        whole = mappings[mapping.__name__]
        mappings[mapping.__name__] = {"if": {"type": "object"}, "then": whole, "else": whole["properties"][key]}
    of_broker = fields_by_key(BrokerConfig).keys() - fields_by_key(RunConfig).keys()
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "properties": {"lanes": {"description": "With `rlmux serve`: lanes for submissions and clients."}},
        "if": {"required": ["lanes"]},
        "then": _reference(ServiceFile),
        "else": {
            "if": {"anyOf": [{"required": [key]} for key in sorted(of_broker)]},
            "then": _reference(BrokerConfig),
            "else": _reference(RunConfig),
        },
        "$defs": mappings,
    }


def _reference(mapping: type[FromFile]) -> Schema:
    return {"$ref": f"#/$defs/{mapping.__name__}"}


def _describe(schema: Schema, mapping: type[FromFile]) -> None:
    """Give each key its line of documentation, in place of pydantic's title and its default of null."""
    schema["description"] = " ".join((mapping.__doc__ or "").split())
    del schema["title"]
    for key, line in field_lines(mapping).items():
        its: Schema = schema["properties"][key]
        its.pop("title", None)
        if its.get("default", ...) is None:
            del its["default"]
        its["description"] = line


def _loosen(mappings: Schema) -> None:
    """Accept what `merge.py` completes (keys that `defaults` gives, a file without one part), and options of tasks."""
    task, pipeline, run = (mappings[each.__name__] for each in (TaskConfig, PipelineConfig, RunConfig))
    del task["properties"]["params"]
    task["additionalProperties"] = True
    mappings["Defaults"] = {**pipeline, "required": []}
    run["properties"]["defaults"]["$ref"] = "#/$defs/Defaults"
    for each in (run, mappings[AdapterConfig.__name__], mappings[EstimateConfig.__name__]):
        del each["required"]
