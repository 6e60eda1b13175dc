"""Keys of the file that were renamed. The old key is accepted for one release, with a hint that names the new one."""

from __future__ import annotations

from collections.abc import Mapping

from rlmux.config.source_map import Node
from rlmux.core.errors import SpecError

NEW_BY_OLD: Mapping[str, str] = {"warm_start": "sft_warmup"}
"""Keys of a pipeline."""


def rename_keys(pipeline: Node, hints: list[str]) -> Node:
    """The pipeline (or `defaults`) with new keys only. Adds one hint for each place of an old one to `hints`."""
    if not isinstance(pipeline.value, dict):
        return pipeline
    entries: dict[str, Node] = {}
    for key, node in pipeline.value.items():
        new = NEW_BY_OLD.get(key, key)
        if new != key:
            _hint(key, node.where, hints)
            if new in pipeline.value:
                raise SpecError(f"{node.where}: {key} is the old name of {new}, which is given too; accepted: {new}")
        entries[new] = node
    return Node(value=entries, where=pipeline.where, order=pipeline.order)


def rename_override(keys: tuple[str, ...], where: str, hints: list[str]) -> tuple[str, ...]:
    """The keys of `--set pipelines.NAME.KEY...` or `--set defaults.KEY...`, the old one replaced."""
    place = {"pipelines": 2, "defaults": 1}.get(keys[0])
    if place is None or len(keys) <= place or keys[place] not in NEW_BY_OLD:
        return keys
    _hint(keys[place], where, hints)
    return (*keys[:place], NEW_BY_OLD[keys[place]], *keys[place + 1 :])


def _hint(old: str, where: str, hints: list[str]) -> None:
    text = f"{where}: {old} is now {NEW_BY_OLD[old]}; the old key is accepted until the next release"
    if text not in hints:
        hints.append(text)
