"""Blocks of the log, and its rows as readers get them.

[2,0.0,"event","PipelineSubmitted",{"type":"PipelineSubmitted",...}]      a line of JSON for each row: seq, time_s,
[3,0.0,"action","Admit",{"type":"Admit",...}]                             kind, type, fields; consecutive rows
                                     then zlib, which checks the bytes when they are read
"""

from __future__ import annotations

import dataclasses
import json
import zlib
from collections.abc import Collection, Iterable, Iterator
from typing import Any, Literal, NamedTuple, cast

from rlmux.core.actions import Action
from rlmux.core.errors import LogError
from rlmux.core.events import ChunkFinished, Event
from rlmux.log import notes, value_codec
from rlmux.log.progress_rows import Progress

Kind = Literal["header", "event", "action", "note"]
_LEVEL = 6
"""zlib's own default: level 9 takes twice the time for 2 % of the bytes."""
_PROGRESS = ChunkFinished.__name__
_NAMES = ("type", *(field.name for field in dataclasses.fields(ChunkFinished)))
_TYPES = (int, str, float, int, int, int, int, int, float)
"""Types of a progress report's row and fields."""
_RESUMED = "resumed"


class Entry(NamedTuple):
    """One row of the log, read back."""

    seq: int
    time_s: float
    kind: Kind
    type: str
    value: Event | Action | dict[str, Any]
    """The event or action, or the fields of a note or header."""

    @property
    def note(self) -> notes.Note | None:
        """The note; None for another row, and for a note of an unknown type. Raises LogError for a wrong field."""
        return notes.decode(self.type, cast("dict[str, Any]", self.value)) if self.kind == "note" else None


def pack(rows: Iterable[tuple[int, float, str, str, str]]) -> bytes:
    """The bytes of a block of rows (seq, time_s, kind, type, JSON text of the fields), ascending."""
    lines = [f"{value_codec.dumps(row[:4])[:-1]},{row[4]}]" for row in rows]
    return zlib.compress("\n".join(lines).encode(), _LEVEL)


def unpack(data: bytes, bare: Collection[str] = ()) -> list[list[Any]]:
    """Rows [seq, time_s, kind, type, fields] of a block. Raises LogError for damaged bytes.

    `bare`: types whose fields are left unread.
    """
    try:
        lines = zlib.decompress(data).split(b"\n")
        if bare:
            unread = {value_codec.dumps(type).encode() for type in bare}
            lines = [_without_fields(line) if line.split(b",", 4)[3] in unread else line for line in lines]
        return cast("list[list[Any]]", json.loads(b"[" + b",".join(lines) + b"]"))  # line by line takes twice the time
    except (zlib.error, ValueError, IndexError) as error:
        raise LogError(f"not a block of rows: {error}") from None


def _without_fields(line: bytes) -> bytes:
    return b",".join(line.split(b",", 4)[:4]) + b",{}]"


def parts_of(rows: Iterable[list[Any]]) -> Iterator[Entry | Progress]:
    """The rows of a block for a fold: an order's progress reports come together, where the first of them is.

    A row `resumed` ends every order before it: ids are used again afterwards.
    """
    parts: list[list[Any]] = []
    reports_by_order: dict[Any, list[Any]] = {}
    for row in rows:
        if row[3] == _PROGRESS and tuple(row[4]) == _NAMES:
            values = [row[0], *row[4].values()]
            reports = reports_by_order.get(values[3])
            if reports is None:
                reports_by_order[values[3]] = reports = []
                parts.append(reports)
            reports.append(values)
            continue
        if row[3] == _RESUMED:
            reports_by_order = {}
        parts.append(row)
    for part in parts:
        if type(part[0]) is int:
            yield entry_of(*part)
            continue
        columns = list(zip(*part, strict=True))
        if all(set(map(type, column)) == {kind} for column, kind in zip(columns, _TYPES, strict=True)):
            seqs, _, times_s, orders, *others = columns
            yield Progress._make([orders[0], seqs, times_s, *others])
        else:
            for seq, *values in part:
                yield entry_of(seq, float(values[1]), "event", _PROGRESS, dict(zip(_NAMES, values, strict=True)))


def entry_of(seq: int, time_s: float, kind: str, type: str, fields: Any) -> Entry:
    """The row of these fields, which are taken out of their mapping. Raises LogError, with the row's number, for an
    event or action that is none."""
    try:
        value = value_codec.from_fields(fields) if kind in ("event", "action") else fields
    except LogError as error:
        raise LogError(f"row {seq}: {error}") from None
    return Entry(seq, float(time_s), cast("Kind", kind), type, value)
