"""The tables of docs/reference/file.md, from the classes of the typed tree.

To print: `python -m rlmux.config.schema_docs`. A module of its own: it is a program.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
from itertools import pairwise
from typing import Any

from rlmux.config import serve_file, service_file, shares, tree
from rlmux.config.error_messages import accepted, fields_by_key
from rlmux.rl import config

SECTIONS: tuple[tuple[str, type[config.FromFile]], ...] = (
    ("The file", tree.RunConfig),
    ("`cluster.pools.NAME`", tree.PoolConfig),
    ("`pipelines[]` and `defaults`", tree.PipelineConfig),
    ("`model`", config.ModelConfig),
    ("`adapter`", config.AdapterConfig),
    ("`task`", config.TaskConfig),
    ("`task.outcomes`", config.OutcomesConfig),
    ("`sft_warmup`", config.SftWarmupConfig),
    ("`algorithm`", config.AlgorithmConfig),
    ("`rollout`", config.RolloutConfig),
    ("`rollout.engine`", config.EngineConfig),
    ("`rollout.tail_batching`", config.TailBatchingConfig),
    ("`rollout.interruptible`", config.InterruptibleConfig),
    ("`train`", config.TrainConfig),
    ("`retries`", tree.RetriesConfig),
    ("`alerts.RULE`", tree.AlertConfig),
    ("`estimate`", tree.EstimateConfig),
    ("`footprint`", tree.FootprintConfig),
    ("`trackers`", tree.TrackersConfig),
    ("`trackers.wandb`", tree.WandbConfig),
    ("`trackers.mlflow`", tree.MlflowConfig),
    ("`keep`", tree.KeepConfig),
    ("`shares`", shares.SharesConfig),
    ("`shares.projects.NAME`", shares.ProjectShareConfig),
    ("`shares.users.NAME`", shares.UserShareConfig),
    ("`quota`", shares.QuotaConfig),
    ("`quota.budget_usd`", shares.BudgetConfig),
    ("The file of `rlmux serve`", service_file.ServiceFile),
    ("`lanes.NAME`", service_file.LaneConfig),
    ("`lanes.NAME.serve`", serve_file.ServeConfig),
    ("`lanes.NAME.serve.models.NAME`", serve_file.ServedModelConfig),
    ("`lanes.NAME.serve.keys.KEY`", serve_file.KeyConfig),
    ("`lanes.NAME.serve.projects.NAME`", serve_file.ProjectConfig),
    ("`lanes.NAME.serve.permits`", serve_file.PermitsConfig),
)

TYPES = (
    (r"^one of ", ""),
    (r"a whole number", "integer"),
    (r"a (number|mapping|list)", r"\1"),
    (r"a text", "string"),
    (r"true or false", "boolean"),
    (r"1 to 64 letters.*", "name"),
    (r", ([\d.]+) or more", r" ≥ \1"),
    (r", more than (\d+)", r" > \1"),
    (r", ([\d.]+) or less", r", ≤ \1"),
    (r", less than (\d+)", r", < \1"),
)
"""Patterns in the words of an error, and the short form of the tables."""


def markdown() -> str:
    """One heading, one sentence and one table for each mapping of the file."""
    return "\n".join(_section(title, mapping) for title, mapping in SECTIONS)


def _section(title: str, mapping: type[config.FromFile]) -> str:
    about = " ".join((mapping.__doc__ or "").split())
    lines, defaults = field_lines(mapping), _defaults(mapping)
    rows = [
        f"| `{key}` | {_type(annotation)} | {_shown(defaults[key])} | {lines[key]} |"
        for key, annotation in fields_by_key(mapping).items()
    ]
    return "\n".join([f"## {title}", "", about, "", "| key | takes | default | |", "|---|---|---|---|", *rows, ""])


def _type(annotation: Any) -> str:
    text = accepted(annotation)
    for pattern, short in TYPES:
        text = re.sub(pattern, short, text)
    return text


def field_lines(mapping: type[Any]) -> dict[str, str]:
    """The line under each field, by key, inherited fields included."""
    lines: dict[str, str] = {}
    for base in reversed(mapping.__mro__):
        if not dataclasses.is_dataclass(base):
            continue
        (definition,) = ast.parse(inspect.getsource(base)).body
        assert isinstance(definition, ast.ClassDef)
        for statement, following in pairwise(definition.body):
            match statement, following:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                    lines[config.key_of(name)] = " ".join(text.split())
    return lines


def _defaults(mapping: type[Any]) -> dict[str, Any]:
    return {config.key_of(each.name): each for each in dataclasses.fields(mapping)}


def _shown(field: dataclasses.Field[Any]) -> str:
    """The default value; nothing where it is a mapping of its own, or none."""
    if field.default is dataclasses.MISSING:
        return "required" if field.default_factory is dataclasses.MISSING else ""
    if field.default is None:
        return ""
    default = list(field.default) if isinstance(field.default, tuple) else field.default
    return f"`{str(default).lower() if isinstance(default, bool) else default}`"


if __name__ == "__main__":
    print(markdown())
