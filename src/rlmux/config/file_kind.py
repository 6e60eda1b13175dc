"""What a file describes, by its top-level keys, and the command that takes it.

| kind | keys | command |
|---|---|---|
| pipelines | `pipelines`, `defaults` | `rlmux run`, and all that read the same file |
| lanes | `lanes`; `serve`, which belongs to a lane | `rlmux serve` |
| permits | a key of the broker's alone, or a cluster, with a policy or without | `rlmux broker` |
| shares | `shares` alone | `rlmux usage DIR --set` |

Each loader checks the kind first, so that another command's file is one line with the right command, not a key that is
unknown.
"""

from __future__ import annotations

from enum import StrEnum

from rlmux.config.error_messages import spec_error
from rlmux.config.source_map import Node
from rlmux.core.errors import SpecError

BROKER_ALONE = frozenset({"leave_limit_s", "max_hold_s", "lease_s"})
"""Keys that no other file has."""
_OF_BROKER = BROKER_ALONE | {"cluster", "policy"}


class FileKind(StrEnum):
    """What a file describes, named after its main part."""

    PIPELINES = "pipelines"
    """The file of `rlmux run`."""
    LANES = "lanes"
    """The file of `rlmux serve`."""
    PERMITS = "permits"
    """The file of `rlmux broker`."""
    SHARES = "shares"
    """Shares and quotas for a run in progress."""


_COMMANDS = {
    FileKind.PIPELINES: "rlmux run {}",
    FileKind.LANES: "rlmux serve {}",
    FileKind.PERMITS: "rlmux broker {}",
    FileKind.SHARES: "rlmux usage DIR --set {}",
}


def kind_of(root: Node) -> FileKind:
    """The kind of a file. One that shows none counts as pipelines, whose loader words the mistake."""
    keys = root.value.keys() if isinstance(root.value, dict) else set()
    if keys & {"lanes", "serve"}:
        return FileKind.LANES
    if keys & {"pipelines", "defaults"} or not keys:
        return FileKind.PIPELINES
    if keys & BROKER_ALONE or ("cluster" in keys and keys <= _OF_BROKER):
        return FileKind.PERMITS
    return FileKind.SHARES if keys == {"shares"} else FileKind.PIPELINES


def check_kind(root: Node, wanted: FileKind, source: str, *, may_be_empty: bool = False) -> None:
    """Raises SpecError for another command's file, with that command. `may_be_empty`: pipelines may be missing."""
    if not isinstance(root.value, dict):
        if source.lower().endswith(".csv"):
            raise SpecError(f"{source}: is a trace; accepted: a YAML file; for a trace: rlmux simulate {source}")
        return
    kind = kind_of(root)
    if kind is wanted:
        return
    command = _COMMANDS[kind].format(source)
    if kind is FileKind.PERMITS and wanted is FileKind.PIPELINES:
        if may_be_empty:
            return
        text = f"is missing; accepted: a list of mappings, at least 1; for permits of programs: {command}"
        raise spec_error(root, ["pipelines"], text)
    first = min(root.value.values(), key=lambda node: node.order)
    raise SpecError(f"{first.where}: the file has {kind}; accepted: one with {wanted}; for {kind}: {command}")
