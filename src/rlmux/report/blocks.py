"""Rows of the log packed into a block, and back: nothing is lost, a tenth to a twentieth of the bytes is left.

    {"rows": [[seq, time_s, kind, type, fields], ...],
     "progress": [[order, seqs, time_s, num_active, num_waiting, num_waiting_for_env, tokens, seconds], ...]}
                                                       JSON, then zlib, which checks the bytes when they are read

Progress reports are taken out of the rows and kept by order: of each column the first value and then the differences,
seconds in whole microseconds. A column that this would change (a time with more digits) stays as it was, in an object:
{"raw": [...]}. A row `resumed` ends every order before it, so ids that are used again afterwards begin anew.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

from rlmux.core.errors import LogError
from rlmux.core.events import ChunkFinished
from rlmux.core.model import OrderId
from rlmux.report import codec
from rlmux.report.progress import OrderProgress

PROGRESS = ChunkFinished.__name__
"""Type of the rows that are kept in columns."""
RESUMED = "resumed"
"""Type of the note that begins the rows of another process, whose orders are counted from 1 again."""

_COLUMNS = ("time_s", "num_active", "num_waiting", "num_waiting_for_env", "tokens", "seconds")
_SECONDS = ("time_s", "seconds")
_MICROS = 1e6


class Row(NamedTuple):
    """One row as the log's table has it."""

    seq: int
    time_s: float
    kind: str
    type: str
    json: str


@dataclass(frozen=True, slots=True)
class Block:
    """What a block holds."""

    rows: Sequence[tuple[int, float, str, str, Any]]
    """seq, time_s, kind, type and fields of every row that is no progress report, ascending."""
    progress: Sequence[OrderProgress]
    """Reports by order, ascending by their first row."""


def pack(rows: Iterable[Row]) -> bytes:
    """The bytes of a block. The rows are ascending, their texts are the log's own."""
    others: list[list[Any]] = []
    groups: list[tuple[int, list[int], list[dict[str, Any]]]] = []
    open_groups: dict[int, tuple[int, list[int], list[dict[str, Any]]]] = {}
    for row in rows:
        fields = codec.loads(row.json)
        if row.type == PROGRESS and row.kind == "event":
            group = open_groups.get(fields["order"])
            if group is None:
                group = open_groups[fields["order"]] = (fields["order"], [], [])
                groups.append(group)
            group[1].append(row.seq)
            group[2].append(fields)
            continue
        if row.type == RESUMED:
            open_groups = {}
        others.append([row.seq, row.time_s, row.kind, row.type, fields])
    progress = [
        [order, _differences(seqs), *(_packed(name, [one.get(name, 0) for one in reports]) for name in _COLUMNS)]
        for order, seqs, reports in groups
    ]
    return zlib.compress(codec.dumps({"rows": others, "progress": progress}).encode())


def unpack(data: bytes) -> Block:
    """What `pack` was given. Raises LogError for damaged bytes."""
    try:
        block = json.loads(zlib.decompress(data))
        progress = [
            OrderProgress(OrderId(order), list(accumulate(seqs)), *map(_unpacked, _COLUMNS, columns))
            for order, seqs, *columns in block["progress"]
        ]
        return Block([tuple(row) for row in block["rows"]], progress)
    except (zlib.error, ValueError, KeyError, TypeError) as error:
        raise LogError(f"not a block of rows: {error}") from None


def _packed(name: str, values: list[Any]) -> Any:
    if name not in _SECONDS:
        return _differences(values)
    numbers = [float(value) for value in values]
    try:
        micros = [round(number * _MICROS) for number in numbers]
    except (OverflowError, ValueError):  # not a number, or infinite
        return {"raw": numbers}
    if all(micro / _MICROS == number for micro, number in zip(micros, numbers, strict=True)):
        return _differences(micros)
    return {"raw": numbers}


def _unpacked(name: str, packed: Any) -> Sequence[Any]:
    if isinstance(packed, dict):
        return [float(value) for value in packed["raw"]]
    values = accumulate(packed)
    return [value / _MICROS for value in values] if name in _SECONDS else list(values)


def _differences(values: Sequence[int]) -> list[int]:
    return [values[0], *(value - before for before, value in pairwise(values))]
