"""`--set a.b=c`: values given on the command line, laid over the file.

    pipelines.sort.steps=5        the pipeline of that name
    pipelines.0.steps=5           the first
    pipelines.*.steps=5           every one
    defaults.rollout.slots=32     as if in the file's defaults

The value is read as YAML. An override names itself in every error about it.

A module of its own: the grammar of `--set` has tests of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from difflib import get_close_matches

from rlmux.config.source_map import Node, PathPart, parse_yaml
from rlmux.core.errors import SpecError

_AFTER_THE_FILE = 10**9
"""Line number of every override, beyond those of any file: mistakes of the file are reported first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Override:
    """One `--set`, read."""

    keys: tuple[str, ...]
    """Parts of the dotted key."""
    value: Node
    """What the key is set to, placed at the override."""

    @property
    def is_of_one_pipeline(self) -> bool:
        """Whether it applies after the defaults are merged, so that it wins over the file and the defaults."""
        return len(self.keys) > 2 and self.keys[0] == "pipelines"


def parse_override(text: str) -> Override:
    where = f"--set {text}"
    keys_text, equals, value_text = text.partition("=")
    keys = tuple(key.strip() for key in keys_text.split("."))
    if not equals or not all(keys):
        raise SpecError(f"{where}: accepted: key.key=value, such as pipelines.sort.steps=5")
    try:
        parsed = parse_yaml(value_text, "value")
    except SpecError as error:
        raise SpecError(f"{where}: {error}") from None
    return Override(keys=keys, value=_at(parsed, where))


def apply_override(root: Node, override: Override) -> Node:
    """The tree with this value in it."""
    for path in _paths(root, override):
        root = root.replaced(path, override.value)
    return root


def _paths(root: Node, override: Override) -> list[tuple[PathPart, ...]]:
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
