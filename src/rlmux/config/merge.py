"""Lays a file, its defaults and the overrides of the command line over each other: nodes in, nodes out.

nodes ─ --set ─▶ nodes ─ merge defaults ─▶ nodes ─ --set pipelines.X ─▶ nodes

`--set a.b=c` is a value of the command line, read as YAML. An override names itself in every error about it.

    pipelines.sort.steps=5        the pipeline of that name
    pipelines.0.steps=5           the first
    pipelines.*.steps=5           every one
    defaults.rollout.slots=32     as if in the file's defaults
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches

from rlmux.config.error_messages import shown_value, spec_error
from rlmux.config.source_map import Node, PathPart, parse_yaml
from rlmux.core.errors import SpecError

_SHORT_FORMS = (("task",), ("algorithm",), ("rollout", "engine"))
"""Keys whose bare name is short for `{name: ...}`."""
_TAKEN_WHOLE = ("model", "task", "engine")
"""Keys that are one decision: a pipeline's own takes nothing from the default one."""
_AFTER_THE_FILE = 10**9
"""Line number of every override, beyond those of any file: mistakes of the file are reported first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Override:
    """One `--set`, read."""

    keys: tuple[str, ...]
    """Parts of the dotted key."""
    value: Node
    """What the key is set to, placed at the override."""

    @property
    def is_of_one_pipeline(self) -> bool:
        """Whether it applies after the defaults are merged, so that it wins over the file and the defaults."""
        return len(self.keys) > 2 and self.keys[0] == "pipelines"


def merge(root: Node, source: str, override_texts: Sequence[str]) -> Node:
    """The tree with overrides and defaults merged in, and `defaults` gone."""
    _check_is_mapping(root, source)
    overrides = [_parse_override(text) for text in override_texts]
    for override in overrides:
        if not override.is_of_one_pipeline:
            root = _apply_override(root, override)
    root = _under_defaults(root)
    for override in overrides:
        if override.is_of_one_pipeline:
            root = _apply_override(root, override)
    return _each_pipeline(root, _spelled_out)


def _check_is_mapping(root: Node, source: str) -> None:
    if root.value is None:
        raise SpecError(f"{source}:1: the file is empty; accepted: a mapping with cluster and pipelines")
    if not isinstance(root.value, dict):
        shown = shown_value(root.plain())
        raise SpecError(f"{root.where}: the file is {shown}; accepted: a mapping with cluster and pipelines")


def _under_defaults(root: Node) -> Node:
    entries = dict(root.value)
    defaults = entries.pop("defaults", Node(value={}, where=root.where))
    if defaults.value is None:
        defaults = Node(value={}, where=defaults.where)
    if not isinstance(defaults.value, dict):
        raise spec_error(root, ["defaults"], f"is {shown_value(defaults.plain())}; accepted: a mapping")
    defaults = _spelled_out(defaults)
    root = Node(value=entries, where=root.where, order=root.order)
    return _each_pipeline(root, lambda pipeline: _deep_merge(defaults, _spelled_out(pipeline)))


def _each_pipeline(root: Node, change: Callable[[Node], Node]) -> Node:
    pipelines = root.value.get("pipelines")
    if pipelines is None or not isinstance(pipelines.value, list):
        return root
    items = [change(pipeline) for pipeline in pipelines.value]
    return root.replaced(["pipelines"], Node(value=items, where=pipelines.where, order=pipelines.order))


def _spelled_out(pipeline: Node) -> Node:
    """`task: sort` and `algorithm: grpo` as `{name: ...}`."""
    for path in _SHORT_FORMS:
        node = pipeline.at(path) if isinstance(pipeline.value, dict) else None
        if node is not None and isinstance(node.value, str):
            spelled = Node(value={"name": node}, where=node.where, order=node.order)
            pipeline = pipeline.replaced(path, spelled)
    return pipeline


def _deep_merge(below: Node, above: Node, key: str | None = None) -> Node:
    """Merge two nodes: keys of `above` win, missing keys come from `below`."""
    if key in _TAKEN_WHOLE or not (isinstance(below.value, dict) and isinstance(above.value, dict)):
        return above
    entries = dict(below.value)
    for name, node in above.value.items():
        entries[name] = _deep_merge(entries[name], node, name) if name in entries else node
    return Node(value=entries, where=above.where, order=above.order)


def _parse_override(text: str) -> _Override:
    where = f"--set {text}"
    keys_text, equals, value_text = text.partition("=")
    keys = tuple(key.strip() for key in keys_text.split("."))
    if not equals or not all(keys):
        raise SpecError(f"{where}: accepted: key.key=value, such as pipelines.sort.steps=5")
    try:
        parsed = parse_yaml(value_text, "value")
    except SpecError as error:
        raise SpecError(f"{where}: {error}") from None
    return _Override(keys=keys, value=_at(parsed, where))


def _apply_override(root: Node, override: _Override) -> Node:
    """The tree with this value in it."""
    for path in _paths(root, override):
        root = root.replaced(path, override.value)
    return root


def _paths(root: Node, override: _Override) -> list[tuple[PathPart, ...]]:
    where = override.value.where
    paths: list[tuple[PathPart, ...]] = [()]
    for key in override.keys:
        grown: list[tuple[PathPart, ...]] = []
        for path in paths:
            node = root.at(path)
            if node is None or node.value is None or isinstance(node.value, dict):
                grown.append((*path, key))
            elif isinstance(node.value, list):
                grown += [(*path, index) for index in _indices(node.value, key, where)]
            else:
                parent = ".".join(map(str, path))
                raise SpecError(f"{where}: {parent} is {node.value!r} and has no keys ({node.where})")
        paths = grown
    return paths


def _indices(items: list[Node], key: str, where: str) -> list[int]:
    """The items that a key names: all, one by number, or one by name."""
    if key == "*":
        return list(range(len(items)))
    names = [_name_of(item) for item in items]
    if key in names:
        return [index for index, name in enumerate(names) if name == key]
    if key.isdecimal() and int(key) < len(items):
        return [int(key)]
    known = [name for name in names if name is not None]
    close = get_close_matches(key, known, n=1)
    hint = f"nearest: {close[0]}; " if close else ""
    accepted = ", ".join([*known, f"0 to {len(items) - 1}", "*"]) if items else "none, the list is empty"
    raise SpecError(f"{where}: nothing is called {key!r} there; {hint}accepted: {accepted}")


def _name_of(item: Node) -> str | None:
    name = item.value.get("name") if isinstance(item.value, dict) else None
    return name.value if name is not None and isinstance(name.value, str) else None


def _at(node: Node, where: str) -> Node:
    """The same values, placed at the override."""
    value = node.value
    if isinstance(value, dict):
        value = {key: _at(child, where) for key, child in value.items()}
    elif isinstance(value, list):
        value = [_at(child, where) for child in value]
    return Node(value=value, where=where, order=_AFTER_THE_FILE)
