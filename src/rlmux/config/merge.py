"""Lays a file, its defaults and the overrides of the command line over each other: nodes in, nodes out.

nodes ─ --set ─▶ nodes ─ merge defaults ─▶ nodes ─ --set pipelines.X ─▶ nodes
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rlmux.config.error_messages import shown_value, spec_error
from rlmux.config.overrides import apply_override, parse_override
from rlmux.config.source_map import Node
from rlmux.core.errors import SpecError

_SHORT_FORMS = (("task",), ("algorithm",), ("rollout", "engine"))
"""Keys whose bare name is short for `{name: ...}`."""
_TAKEN_WHOLE = ("model", "task", "engine")
"""Keys that are one decision: a pipeline's own takes nothing from the default one."""


def merge(root: Node, source: str, override_texts: Sequence[str]) -> Node:
    """The tree with overrides and defaults merged in, and `defaults` gone."""
    _check_is_mapping(root, source)
    overrides = [parse_override(text) for text in override_texts]
    for override in overrides:
        if not override.is_of_one_pipeline:
            root = apply_override(root, override)
    root = _under_defaults(root)
    for override in overrides:
        if override.is_of_one_pipeline:
            root = apply_override(root, override)
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
