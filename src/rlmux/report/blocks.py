"""Blocks of the log, and its rows as readers get them.

    [2,0.0,"event","PipelineSubmitted",{"type":"PipelineSubmitted",...}]      a line of JSON for each row: seq, time_s,
    [3,0.0,"action","Admit",{"type":"Admit",...}]                             kind, type, fields; consecutive rows
                                         then zlib, which checks the bytes when they are read
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Collection, Iterable
from typing import Any, Literal, NamedTuple, cast

from rlmux.core.actions import Action
from rlmux.core.errors import LogError
from rlmux.core.events import ChunkFinished, Event
from rlmux.report import codec
from rlmux.report.progress import Progress

Kind = Literal["header", "event", "action", "note"]
_LEVEL = 6
"""zlib's own default: level 9 takes twice the time for 2 % of the bytes."""
_PROGRESS = ChunkFinished.__name__
_NAMES = ("type", *Progress._fields[1:])
_TYPES = (str, float, int, int, int, int, int, float)
"""Types of a progress report's fields."""


class Entry(NamedTuple):
    """One row of the log, read back."""

    seq: int
    time_s: float
    kind: Kind
    type: str
    value: Event | Action | dict[str, Any]
    """The event or action, or the fields of a note or header."""


def pack(rows: Iterable[tuple[int, float, str, str, str]]) -> bytes:
    """The bytes of a block of rows (seq, time_s, kind, type, JSON text of the fields), ascending."""
    lines = [f"{codec.dumps(row[:4])[:-1]},{row[4]}]" for row in rows]
    return zlib.compress("\n".join(lines).encode(), _LEVEL)


def unpack(data: bytes, bare: Collection[str] = ()) -> list[list[Any]]:
    """Rows [seq, time_s, kind, type, fields] of a block. Raises LogError for damaged bytes.

    `bare`: types whose fields are left unread.
    """
    try:
        lines = zlib.decompress(data).split(b"\n")
        if bare:
            unread = {codec.dumps(type).encode() for type in bare}
            lines = [_without_fields(line) if line.split(b",", 4)[3] in unread else line for line in lines]
        return cast("list[list[Any]]", json.loads(b"[" + b",".join(lines) + b"]"))  # line by line takes twice the time
    except (zlib.error, ValueError, IndexError) as error:
        raise LogError(f"not a block of rows: {error}") from None


def _without_fields(line: bytes) -> bytes:
    return b",".join(line.split(b",", 4)[:4]) + b",{}]"


def part_of(seq: int, time_s: float, kind: str, type_: str, fields: Any) -> Entry | Progress:
    """The same row for a fold: a progress report comes as plain numbers, where it has all and of the right types."""
    if type_ == _PROGRESS and tuple(fields) == _NAMES and tuple(map(type, fields.values())) == _TYPES:
        _, *values = fields.values()
        return Progress(seq, *values)
    return entry_of(seq, time_s, kind, type_, fields)


def entry_of(seq: int, time_s: float, kind: str, type: str, fields: Any) -> Entry:
    """The row of these fields, which are taken out of their mapping. Raises LogError, with the row's number, for an
    event or action that is none."""
    try:
        value = codec.from_fields(fields) if kind in ("event", "action") else fields
    except LogError as error:
        raise LogError(f"row {seq}: {error}") from None
    return Entry(seq, float(time_s), cast("Kind", kind), type, value)
