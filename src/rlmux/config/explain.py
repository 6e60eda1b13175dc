"""Says what is wrong with a file in one line: file, line, key, value, and what is accepted.

two.yaml:9: pipelines.sort.rollout.slot is 64: unknown key; nearest: slots; accepted: workers, ..., slots
two.yaml:7: pipelines.sort.steps is 0; accepted: a whole number, 1 or more
--set pipelines.sort.steps=x: pipelines.sort.steps is 'x'; accepted: a whole number, 1 or more
"""

from __future__ import annotations

import types
import typing
from collections.abc import Sequence
from difflib import get_close_matches
from typing import Any, Literal, Union, get_args, get_origin

import annotated_types
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from rlmux.config.located import Node, PathPart
from rlmux.core.errors import SpecError

_SHOWN_CHARS = 60


def spec_error(root: Node, path: Sequence[PathPart], text: str) -> SpecError:
    """An error about the value at this path. `text` goes on after the key, as in "is 0; accepted: ..."."""
    return SpecError(f"{root.nearest(path).where}: {shown_path(root, path)} {text}")


def explain(error: ValidationError, root: Node, top: type[BaseModel]) -> SpecError:
    """The first mistake in reading order; what is missing comes last, since a misspelt key is missing too."""

    def rank(details: ErrorDetails) -> tuple[bool, int]:
        return details["type"] == "missing", root.nearest(_path(details)).order

    return _explain_one(min(error.errors(), key=rank), root, top)


def _explain_one(details: ErrorDetails, root: Node, top: type[BaseModel]) -> SpecError:
    path = _path(details)
    value = shown_value(details["input"])
    match details["type"]:
        case "extra_forbidden":
            known = list(model_at(top, path[:-1]).model_fields)
            return spec_error(root, path, f"is {value}: unknown key; {nearest_hint(str(path[-1]), known)}")
        case "missing":
            return spec_error(root, path, f"is missing; accepted: {accepted_at(top, path)}")
        case "together":
            text = str(details["ctx"]["text"])
            if details["ctx"]["key"]:
                path = (*path, details["ctx"]["key"])
                value = shown_value(root.nearest(path).plain())
            glue = "; " if text.startswith("accepted") else ": "
            return spec_error(root, path, f"is {value}{glue}{text}")
    if path and path[-1] == "[key]":
        kind = accepted_at(top, (*path[:-2], "[key]"))
        return spec_error(root, path[:-1], f"cannot be a name; accepted: {kind}")
    return spec_error(root, path, f"is {value}; accepted: {accepted_at(top, path)}")


def _path(details: ErrorDetails) -> tuple[PathPart, ...]:
    return tuple(details["loc"])


def shown_path(root: Node, path: Sequence[PathPart]) -> str:
    """Dotted, with pipelines by name."""
    words: list[str] = []
    for depth, part in enumerate(path):
        word = str(part)
        if isinstance(part, int) and words == ["pipelines"]:
            pipeline = root.nearest(path[: depth + 1]).value
            name = pipeline["name"].value if isinstance(pipeline, dict) and "name" in pipeline else None
            word = name if isinstance(name, str) and name else word
        words.append(word)
    return ".".join(words) or "the file"


def shown_value(value: Any) -> str:
    """On one line, and short."""
    match value:
        case None:
            return "empty"
        case bool():
            return "true" if value else "false"
        case dict():
            return "a mapping" if value else "an empty mapping"
        case list():
            return f"a list of {len(value)}" if value else "an empty list"
    text = repr(value)
    return text if len(text) <= _SHOWN_CHARS else text[: _SHOWN_CHARS - 3] + "..."


def nearest_hint(word: str, known: Sequence[str]) -> str:
    """The nearest of the known words, if any is near, then all of them."""
    close = get_close_matches(word, known, n=1)
    nearest = f"nearest: {close[0]}; " if close else ""
    return f"{nearest}accepted: {', '.join(known)}"


def model_at(top: type[BaseModel], path: Sequence[PathPart]) -> type[BaseModel]:
    """The model that checks the mapping at this path."""
    annotation, _ = _field_at(top, path)
    found = _bare(annotation)
    assert isinstance(found, type), f"{path} is no mapping"
    assert issubclass(found, BaseModel), f"{path} is no mapping"
    return found


def accepted_at(top: type[BaseModel], path: Sequence[PathPart]) -> str:
    annotation, field = _field_at(top, path)
    return accepted(annotation, field)


def _field_at(top: type[BaseModel], path: Sequence[PathPart]) -> tuple[Any, FieldInfo | None]:
    """The type, and where there is one the field, that the schema has for this path."""
    annotation: Any = top
    field: FieldInfo | None = None
    for part in path:
        bare = _bare(annotation)
        if isinstance(bare, type) and issubclass(bare, BaseModel):
            field = bare.model_fields[str(part)]
            annotation = field.annotation
            continue
        arguments = get_args(bare)
        annotation, field = arguments[0 if part == "[key]" else -1], None
        if part == "[key]":
            break
    return annotation, field


def _bare(annotation: Any) -> Any:
    """Without `| None` and without `Annotated`."""
    if get_origin(annotation) is typing.Annotated:
        return _bare(get_args(annotation)[0])
    if get_origin(annotation) in (Union, types.UnionType):
        return _bare(next(option for option in get_args(annotation) if option is not type(None)))
    return annotation


def accepted(annotation: Any, field: FieldInfo | None = None) -> str:
    """What a key takes, in words: "a whole number, 1 or more"."""
    metadata = _metadata(annotation, field)
    for item in metadata:
        if isinstance(item, FieldInfo) and isinstance(item.json_schema_extra, dict):
            return str(item.json_schema_extra["accepted"])
    bounds = [text for item in metadata for text in _bound(item)]
    return ", ".join([_kind(_bare(annotation)), *bounds])


def _kind(bare: Any) -> str:
    origin = get_origin(bare)
    if origin is Literal:
        return "one of " + ", ".join(map(str, get_args(bare)))
    if origin is list:
        inner = _bare(get_args(bare)[0])
        is_model = isinstance(inner, type) and issubclass(inner, BaseModel)
        return "a list of mappings" if is_model else f"a list of {_kind(inner).removeprefix('a ')}s"
    if origin is dict or (isinstance(bare, type) and issubclass(bare, BaseModel)):
        return "a mapping"
    return {int: "a whole number", float: "a number", str: "a text", bool: "true or false"}[bare]


def _metadata(annotation: Any, field: FieldInfo | None) -> list[Any]:
    """Constraints of the field and of every `Annotated` inside its type."""
    found: list[Any] = []
    if field is not None:
        found += [field, *field.metadata]
    if get_origin(annotation) is typing.Annotated:
        inner, *extras = get_args(annotation)
        for extra in extras:
            found += [extra, *extra.metadata] if isinstance(extra, FieldInfo) else [extra]
        found += _metadata(inner, None)
    elif get_origin(annotation) in (Union, types.UnionType):
        for option in get_args(annotation):
            found += _metadata(option, None)
    return found


def _bound(item: Any) -> list[str]:
    match item:
        case annotated_types.Ge():
            return [f"{item.ge} or more"]
        case annotated_types.Gt():
            return [f"more than {item.gt}"]
        case annotated_types.Le():
            return [f"{item.le} or less"]
        case annotated_types.Lt():
            return [f"less than {item.lt}"]
        case annotated_types.MinLen():
            return [f"at least {item.min_length}"]
        case annotated_types.MaxLen():
            return [f"at most {item.max_length}"]
    return []
