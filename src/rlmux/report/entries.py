"""Rows of the log as their readers get them: with the event, the action or the fields that each holds."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal, NamedTuple, cast

from rlmux.core.actions import Action
from rlmux.core.errors import LogError
from rlmux.core.events import Event
from rlmux.report import codec
from rlmux.report.blocks import Block, decompress

Kind = Literal["header", "event", "action", "note"]


class Entry(NamedTuple):
    """One row of the log, read back."""

    seq: int
    time_s: float
    kind: Kind
    type: str
    value: Event | Action | dict[str, Any]
    """The event or action, or the fields of a note or header."""


def with_blocks_ahead(rows: Iterable[tuple[Any, ...]]) -> Iterator[tuple[Any, ...]]:
    """Rows and blocks of the log as they come; a block's bytes are decompressed in a thread while what is before it is
    read."""
    executor: ThreadPoolExecutor | None = None
    before: tuple[Any, ...] | None = None
    try:
        for row in rows:
            if row[2] == "block":
                executor = executor or ThreadPoolExecutor(1, thread_name_prefix="blocks-ahead")
                row = (*row[:4], executor.submit(decompress, row[4]))
            if before is not None:
                yield before
            before = row
        if before is not None:
            yield before
    finally:
        if executor is not None:
            executor.shutdown()


def entries_of(block: Block, after: int) -> Iterator[Entry]:
    """The rows of a block that are no progress reports."""
    values = [iter(_values(number, block)) for number in range(len(block.groups))]
    kinds = [cast("Kind", group.kind) for group in block.groups]
    types = [group.type for group in block.groups]
    numbers = block.numbers
    of_rows = (map(each.__getitem__, numbers) for each in (kinds, types))
    rows = zip(block.seqs, block.times_s, *of_rows, map(next, map(values.__getitem__, numbers)), strict=True)
    entries = map(Entry._make, rows)
    return entries if not block.seqs or block.seqs[0] > after else (entry for entry in entries if entry.seq > after)


def _values(number: int, block: Block) -> Iterable[Any]:
    """The events, actions or fields of the rows of a group."""
    group = block.groups[number]
    if group.kind not in ("event", "action"):
        return group.fields()
    try:
        return codec.from_columns(group.columns)
    except LogError:  # read row by row, to say which row it is
        seqs = [seq for seq, own in zip(block.seqs, block.numbers, strict=True) if own == number]
        return [value_of(seq, group.kind, fields) for seq, fields in zip(seqs, group.fields(), strict=True)]


def value_of(seq: int, kind: str, fields: Any) -> Any:
    try:
        return codec.from_fields(fields) if kind in ("event", "action") else fields
    except LogError as error:
        raise LogError(f"row {seq}: {error}") from None
