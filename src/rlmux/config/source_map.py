"""YAML text into values that remember where they were written.

    text ──▶ parse_yaml ──▶ Node(mapping) ──▶ Node(sequence) ──▶ Node(scalar)
                               where = "two.yaml:12"

Scalars follow YAML 1.2, as people expect: `no` and `on` are texts, `3e-4` is a number, `010` is ten.
A duplicated key, a second document, a tag or an endless alias is an error with its line.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from rlmux.core.errors import SpecError

PathPart = str | int
_MAX_NODES = 200_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A value and its place. Mappings and sequences hold further nodes."""

    value: Any
    """`dict[str, Node]`, `list[Node]`, or a scalar."""
    where: str
    """`file:line` of its key (or of itself in a list), or the override that set it."""
    order: int = 0
    """Line number, so that the first mistake of a file is the one reported."""

    def plain(self) -> Any:
        """The value without places."""
        if isinstance(self.value, dict):
            return {key: node.plain() for key, node in self.value.items()}
        if isinstance(self.value, list):
            return [node.plain() for node in self.value]
        return self.value

    def at(self, path: Sequence[PathPart]) -> Node | None:
        """The node at this path; None where the path leads nowhere."""
        node: Node | None = self
        for part in path:
            node = None if node is None else node._child(part)
        return node

    def nearest(self, path: Sequence[PathPart]) -> Node:
        """The node at this path, or the deepest one on the way there."""
        node = self
        for part in path:
            child = node._child(part)
            if child is None:
                break
            node = child
        return node

    def _child(self, part: PathPart) -> Node | None:
        if isinstance(self.value, list) and isinstance(part, int) and part < len(self.value):
            item: Node = self.value[part]
            return item
        entries: dict[PathPart, Node] = self.value if isinstance(self.value, dict) else {}
        return entries.get(part)

    def replaced(self, path: Sequence[PathPart], new: Node) -> Node:
        """A copy of this tree with `new` at `path`; mappings that are missing on the way are made."""
        if not path:
            return new
        part, rest = path[0], path[1:]
        if isinstance(part, int):
            items = list(self.value)
            items[part] = items[part].replaced(rest, new)
            return Node(value=items, where=self.where, order=self.order)
        entries = dict(self.value) if isinstance(self.value, dict) else {}
        child = entries.get(part, Node(value={}, where=new.where, order=new.order))
        entries[part] = child.replaced(rest, new)
        return Node(value=entries, where=self.where, order=self.order)

    def without(self, key: str) -> Node:
        """A copy of this mapping without a key."""
        kept = {name: node for name, node in self.value.items() if name != key}
        return Node(value=kept, where=self.where, order=self.order)


class _Loader(yaml.SafeLoader):
    """Composes nodes only, with the resolvers of YAML 1.2."""

    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012 - the parent's own shape


_SCALARS = {
    "null": (re.compile(r"^(?:~|null|Null|NULL|)$"), ["~", "n", "N", ""]),
    "bool": (re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$"), list("tTfF")),
    "int": (re.compile(r"^[-+]?[0-9][0-9_]*$"), list("-+0123456789")),
    "float": (
        re.compile(
            r"^(?:[-+]?(?:\.[0-9]+|[0-9][0-9_]*(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?"
            r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$"
        ),
        list("-+.0123456789"),
    ),
}
for _tag, (_pattern, _first) in _SCALARS.items():
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", _pattern, _first)


def parse_yaml(text: str, source: str) -> Node:
    """The document as nodes; `source` is how errors name the file. An empty file gives a null node."""
    try:
        root = yaml.compose(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = 1 if mark is None else mark.line + 1
        problem = " ".join(filter(None, [error.context, error.problem]))
        raise SpecError(f"{source}:{line}: this is not YAML: {_one_line(problem)}") from None
    except (yaml.YAMLError, RecursionError) as error:
        problem = _one_line(str(error)) if isinstance(error, yaml.YAMLError) else "nested too deeply"
        raise SpecError(f"{source}: this is not YAML: {problem}") from None
    except (ValueError, OverflowError):  # of chr(), for an escape such as "\\U00110000"
        raise SpecError(f"{source}: this is not YAML: an escape names no character of Unicode") from None
    if root is None:
        return Node(value=None, where=f"{source}:1", order=1)
    return _Converter(source).convert(root)


class _Converter:
    """Turns PyYAML's nodes into ours, refusing what a configuration has no use for."""

    def __init__(self, source: str) -> None:
        self._source = source
        self._num_nodes = 0
        self._open: list[yaml.Node] = []

    def convert(self, node: yaml.Node, key_line: int | None = None) -> Node:
        line = node.start_mark.line + 1 if key_line is None else key_line
        self._num_nodes += 1
        if self._num_nodes > _MAX_NODES:
            raise SpecError(f"{self._source}:{line}: aliases expand to more than {_MAX_NODES:,} values")
        if any(node is parent for parent in self._open):
            raise SpecError(f"{self._source}:{line}: an alias (*) contains itself")
        self._open.append(node)
        value = self._value(node, line)
        self._open.pop()
        return Node(value=value, where=f"{self._source}:{line}", order=line)

    def _value(self, node: yaml.Node, line: int) -> Any:
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node)
        if isinstance(node, yaml.SequenceNode):
            return [self.convert(item) for item in node.value]
        return self._scalar(node, line)

    def _mapping(self, node: yaml.MappingNode) -> dict[str, Node]:
        entries: dict[str, Node] = {}
        for key_node, value_node in node.value:
            line = key_node.start_mark.line + 1
            here = f"{self._source}:{line}"
            if not isinstance(key_node, yaml.ScalarNode):
                raise SpecError(f"{here}: a key is a mapping or a list; accepted: a plain word")
            key = key_node.value
            if key in entries:
                raise SpecError(f"{here}: key {key!r} is given twice; first at {entries[key].where}")
            if key == "<<":
                raise SpecError(f"{here}: merge keys (<<) are not accepted; use 'defaults'")
            entries[key] = self.convert(value_node, line)
        return entries

    def _scalar(self, node: yaml.Node, line: int) -> Any:
        text: str = node.value
        match node.tag.removeprefix("tag:yaml.org,2002:"):
            case "str":
                return text
            case "null":
                return None
            case "bool":
                return text.lower() == "true"
            case "int":
                return self._int(text, line)
            case "float":
                return _float(text)
            case tag:
                raise SpecError(f"{self._source}:{line}: tag {tag!r} is not accepted; write the plain value")

    def _int(self, text: str, line: int) -> int:
        try:
            return int(text.replace("_", ""))
        except ValueError:
            raise SpecError(f"{self._source}:{line}: a number has {len(text):,} digits; accepted: fewer") from None


def _float(text: str) -> float:
    lowered = text.lower().replace("_", "")
    if lowered.endswith(".inf"):
        return -math.inf if lowered.startswith("-") else math.inf
    return math.nan if lowered == ".nan" else float(lowered)


def _one_line(text: str) -> str:
    return " ".join(text.split())
