"""The tables of docs/spec.md, from the models that check the file. To print: `python -m rlmux.config.reference`."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from rlmux.config import schema
from rlmux.config.explain import accepted

SECTIONS: tuple[tuple[str, type[BaseModel]], ...] = (
    ("The file", schema.SpecFile),
    ("`cluster.pools.NAME`", schema.PoolModel),
    ("`pipelines[]` and `defaults`", schema.PipelineModel),
    ("`model`", schema.ModelModel),
    ("`task`", schema.TaskModel),
    ("`sft_warmup`", schema.WarmStartModel),
    ("`algorithm`", schema.AlgorithmModel),
    ("`rollout`", schema.RolloutModel),
    ("`train`", schema.TrainModel),
    ("`estimate`", schema.EstimateModel),
    ("`footprint`", schema.FootprintModel),
)


def markdown() -> str:
    """One heading, one sentence and one table for each mapping of the file."""
    return "\n".join(_section(title, model) for title, model in SECTIONS)


def _section(title: str, model: type[BaseModel]) -> str:
    about = " ".join((model.__doc__ or "").split())
    rows = [_row(name, field) for name, field in model.model_fields.items()]
    return "\n".join([f"## {title}", "", about, "", "| key | takes | default | |", "|---|---|---|---|", *rows, ""])


def _row(name: str, field: FieldInfo) -> str:
    about = " ".join((field.description or "").split())
    return f"| `{name}` | {accepted(field.annotation, field)} | {_default(field)} | {about} |"


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value: Any = field.default
    if value is None or value == {} or isinstance(value, BaseModel):
        return ""
    return f"`{value}`"


if __name__ == "__main__":
    print(markdown())
