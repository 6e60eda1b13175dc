"""Words a mistake in a file as one line: file, line, key, value, and what is accepted.

two.yaml:9: pipelines.sort.rollout.slot is 64: unknown key; nearest: slots; accepted: workers, ..., slots
two.yaml:7: pipelines.sort.steps is 0; accepted: a whole number, 1 or more
--set pipelines.sort.steps=x: pipelines.sort.steps is 'x'; accepted: a whole number, 1 or more
"""

from __future__ import annotations

import collections.abc
import dataclasses
import types
import typing
from collections.abc import Sequence
from difflib import get_close_matches
from typing import Any, Literal, Union, get_args, get_origin

import annotated_types
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from rlmux.config.source_map import Node, PathPart
from rlmux.core.errors import SpecError
from rlmux.rl.config import FromFile, MisfitError, Takes, TaskConfig, key_of

_SHOWN_CHARS = 60
"""Characters of a value that an error shows."""


def spec_error(root: Node, path: Sequence[PathPart], text: str) -> SpecError:
    """An error about the value at this path. `text` follows the key, as in "is 0; accepted: ..."."""
    return SpecError(f"{root.nearest(path).where}: {shown_path(root, path)} {text}")


def explain(error: ValidationError, root: Node, top: type[FromFile]) -> SpecError:
    """The first mistake in reading order; the others are its notes. Missing keys come last, since a misspelt key is
    missing too. A mistake in `defaults` is counted once, for the first pipeline."""

    def rank(details: ErrorDetails) -> tuple[bool, int]:
        return details["type"] == "missing", root.nearest(_path(details)).order

    found = error.errors()
    # pydantic calls a list too short as well if all its items are wrong
    found = [
        mistake
        for mistake in found
        if mistake["type"] != "too_short" or not any(_is_inside(each, mistake) for each in found)
    ]
    each_once: dict[tuple[int, PathPart | None], ErrorDetails] = {}
    for mistake in sorted(found, key=rank):
        path = _path(mistake)
        each_once.setdefault((id(root.nearest(path)), path[-1] if path else None), mistake)
    first, *others = (_explain_one(mistake, root, top) for mistake in each_once.values())
    for other in others:
        first.add_note(str(other))
    return first


def _explain_one(details: ErrorDetails, root: Node, top: type[FromFile]) -> SpecError:
    path = _path(details)
    value = shown_value(details["input"])
    match details["type"]:
        case "unexpected_keyword_argument":
            known = list(fields_by_key(_mapping_at(top, path[:-1])))
            return spec_error(root, path, f"is {value}: unknown key; {nearest_hint(str(path[-1]), known)}")
        case "missing" if isinstance(path[-1], int):  # an item of a list of fixed length
            path = path[:-1]
        case "missing":
            return spec_error(root, path, f"is missing; accepted: {accepted(_annotation_at(top, path))}")
        case "json_invalid":
            return spec_error(root, path, f"cannot be taken over: {details['ctx']['error']}")
        case "value_error":
            return _misfit(root, path, details["ctx"]["error"])
    if path and path[-1] == "[key]":
        text = f"cannot be a name; accepted: {accepted(_annotation_at(top, path))}"
        return spec_error(root, path[:-1], text)
    return spec_error(root, path, f"is {value}; accepted: {accepted(_annotation_at(top, path))}")


def _misfit(root: Node, path: tuple[PathPart, ...], error: MisfitError) -> SpecError:
    """The first of the keys to change that the file gives: one that is left at its default is no mistake."""
    ways = [((*path, *key.split(".")), text) for key, text in ((error.key, error.text), *error.others)]
    path, text = next((way for way in ways if root.at(way[0]) is not None), ways[0])
    value = shown_value(root.nearest(path).plain())
    glue = "; " if text.startswith("accepted") else ": "
    return spec_error(root, path, f"is {value}{glue}{text}")


def _is_inside(inner: ErrorDetails, outer: ErrorDetails) -> bool:
    depth = len(_path(outer))
    return len(_path(inner)) > depth and _path(inner)[:depth] == _path(outer)


def _path(details: ErrorDetails) -> tuple[PathPart, ...]:
    """The path in the file. Where a key takes numbers and texts, pydantic adds the type that it tried."""
    path = tuple(details["loc"])
    is_of_type = (path[-1:], details["type"]) in (
        (("float",), "float_type"), (("float",), "finite_number"), (("str",), "string_type")
    )  # fmt: skip
    return path[:-1] if is_of_type else path


def shown_path(root: Node, path: Sequence[PathPart]) -> str:
    """The path with dots, pipelines by their names."""
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
    """The value on one line, at most _SHOWN_CHARS long."""
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
    """The nearest known word if one is near, then all known words."""
    close = get_close_matches(word, known, n=1)
    nearest = f"nearest: {close[0]}; " if close else ""
    return f"{nearest}accepted: {', '.join(known)}"


def fields_by_key(mapping: type[FromFile]) -> dict[str, Any]:
    """The annotation of every key that this mapping of the file takes, constraints included."""
    annotations = typing.get_type_hints(mapping, include_extras=True)
    keys = {key_of(each.name): annotations[each.name] for each in dataclasses.fields(mapping)}  # type: ignore[arg-type]
    if mapping is TaskConfig:
        del keys["params"]
    return keys


def _mapping_at(top: type[FromFile], path: Sequence[PathPart]) -> type[FromFile]:
    """The class of the mapping at this path."""
    found = _bare(_annotation_at(top, path))
    assert _is_mapping(found), f"{path} is no mapping"
    return typing.cast("type[FromFile]", found)


def _annotation_at(top: type[FromFile], path: Sequence[PathPart]) -> Any:
    """The annotation that the tree has for the value (or, after "[key]", the key) at this path."""
    annotation: Any = top
    for position, part in enumerate(path):
        bare = _bare(annotation)
        if _is_mapping(bare):
            annotation = fields_by_key(bare)[str(part)]
            continue
        is_key = path[position + 1 :] == ("[key]",)
        items = [option for option in get_args(bare) if option is not Ellipsis]
        if is_key:
            return items[0]
        annotation = items[-1]
    return annotation


def _is_mapping(bare: Any) -> bool:
    return isinstance(bare, type) and issubclass(bare, FromFile)


def _bare(annotation: Any) -> Any:
    """The annotation without `| None` and `Annotated`."""
    if get_origin(annotation) is typing.Annotated:
        return _bare(get_args(annotation)[0])
    if get_origin(annotation) in (Union, types.UnionType):
        return _bare(next(option for option in get_args(annotation) if option is not type(None)))
    return annotation


def accepted(annotation: Any) -> str:
    """What a key takes, in words: "a whole number, 1 or more"."""
    constraints = _constraints(annotation)
    for constraint in constraints:
        if isinstance(constraint, Takes):
            return constraint.text
    bounds = [text for constraint in constraints for text in _bound(constraint)]
    return ", ".join([_kind(_bare(annotation)), *bounds])


def _kind(bare: Any) -> str:
    origin = get_origin(bare)
    if origin is Literal:
        return "one of " + ", ".join(map(str, get_args(bare)))
    if origin is tuple:
        return _kind_of_list(get_args(bare))
    if origin is collections.abc.Mapping or _is_mapping(bare):
        return "a mapping"
    return {int: "a whole number", float: "a number", str: "a text", bool: "true or false"}[bare]


def _kind_of_list(items: Sequence[Any]) -> str:
    inner = _kind(_bare(items[0])).removeprefix("a ")
    is_of_any_length = items[-1] is Ellipsis
    return f"a list of {inner}s" if is_of_any_length else f"a list of {len(items)} {inner}s"


def _constraints(annotation: Any) -> list[Any]:
    """The metadata of every `Annotated` in this annotation, outermost first."""
    if get_origin(annotation) is typing.Annotated:
        inner, *extras = get_args(annotation)
        return [*extras, *_constraints(inner)]
    if get_origin(annotation) in (Union, types.UnionType):
        return [constraint for option in get_args(annotation) for constraint in _constraints(option)]
    return []


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
