"""Rows of the log packed into a block, and back: nothing is lost, a tenth to a twentieth of the bytes is left.

    [[kind, type, number of rows, names, [seqs, times, values of the first field, ...]], ...]      JSON, one line
    the whole numbers of all columns                                                               bytes
                                                       then zlib, which checks the bytes when they are read

Rows of one type are kept in columns; progress reports are sorted by order, so that neighbours are alike. A column is
packed by what it holds:

    "i"                       the first number, then the differences, in bytes of this `array` type; with a type that is
                              unsigned or of fractions ("B", "f"), the numbers themselves
    {"us": "i"}               numbers that are whole microseconds, as these
    {"all": "sort"}           the same value in every row
    {"of": {"loss": ...}}     mappings with the same keys, a column for each key
    {"in": ["B", 96, ...]}    lists: a column of their lengths, how many items they have, a column of all items
    {"raw": [...]}            anything else, as it is

Bytes of one significance lie together: the highest are all alike, and cost nothing.

A row `resumed` ends every order before it, so ids that are used again afterwards begin a group of their own.
"""

from __future__ import annotations

import json
import math
import sys
import zlib
from array import array
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise, repeat
from operator import itemgetter
from typing import Any, NamedTuple

from rlmux.core.errors import LogError
from rlmux.core.events import ChunkFinished
from rlmux.core.model import OrderId
from rlmux.report import codec
from rlmux.report.progress import OrderProgress

PROGRESS = ChunkFinished.__name__
"""Type of the rows that are kept by order."""
RESUMED = "resumed"
"""Type of the note that begins the rows of another process, whose orders are counted from 1 again."""

_CODES = "bhiq"
"""Types of `array` for differences, narrowest first: 1, 2, 4 and 8 bytes."""
_MICROS = 1e6
_MOST_S = 1e9
"""A time of the run is less, in seconds."""


class Row(NamedTuple):
    """One row as the log's table has it."""

    seq: int
    time_s: float
    kind: str
    type: str
    json: str


class Rows(NamedTuple):
    """Rows of one kind and type with the same fields, ascending, in columns."""

    kind: str
    type: str
    seqs: Sequence[int]
    times_s: Sequence[float]
    columns: Mapping[str, Sequence[Any]]
    """The values of each field, by its name."""

    def fields(self) -> Iterator[dict[str, Any]]:
        """The fields of each row."""
        if not self.columns:
            yield from ({} for _ in self.seqs)
        for values in zip(*self.columns.values(), strict=True):
            yield dict(zip(self.columns, values, strict=True))


@dataclass(frozen=True, slots=True)
class Block:
    """What a block holds."""

    groups: Sequence[Rows]
    """Every row that is no progress report."""
    progress: Sequence[OrderProgress]
    """Reports by order."""

    @property
    def rows(self) -> list[tuple[int, float, str, str, dict[str, Any]]]:
        """seq, time_s, kind, type and fields of every row that is no progress report, ascending."""
        rows = [
            row
            for group in self.groups
            for row in zip(
                group.seqs, group.times_s, repeat(group.kind), repeat(group.type), group.fields(), strict=False
            )
        ]
        return sorted(rows, key=itemgetter(0))


def pack(rows: Iterable[Row]) -> bytes:
    """The bytes of a block. The rows are ascending, their texts are the log's own."""
    groups: dict[tuple[Any, ...], list[tuple[Any, ...]]] = {}
    num_lives = 0
    for row in rows:
        fields = codec.loads(row.json)
        is_progress = row.type == PROGRESS and row.kind == "event"
        num_lives += row.type == RESUMED
        group = groups.setdefault((row.kind, row.type, tuple(fields), num_lives if is_progress else None), [])
        group.append((row.seq, row.time_s, *fields.values()))
    for (kind, type, names, _), group in groups.items():
        if type == PROGRESS and kind == "event":
            group.sort(key=itemgetter(2 + names.index("order")))
    numbers: list[bytes] = []
    packed = [
        [kind, type, len(group), names, [_packed(column, numbers) for column in zip(*group, strict=True)]]
        for (kind, type, names, _), group in groups.items()
    ]
    return zlib.compress(b"\n".join([codec.dumps(packed).encode(), b"".join(numbers)]))


def unpack(data: bytes, bare: Collection[str] = ()) -> Block:
    """What `pack` was given. Raises LogError for damaged bytes.

    `bare`: types of notes whose fields are left out; their rows have numbers and times alone.
    """
    groups: list[Rows] = []
    progress: list[OrderProgress] = []
    try:
        text, _, given = zlib.decompress(data).partition(b"\n")
        numbers = _Numbers(given)
        for kind, type, count, names, packed in json.loads(text):
            num_wanted = 2 if kind == "note" and type in bare else len(packed)
            columns = [_values(each, count, numbers) for each in packed[:num_wanted]]
            for each in packed[num_wanted:]:
                _pass_over(each, count, numbers)
            if type == PROGRESS and kind == "event":
                progress += _progress(columns[0], dict(zip(names, columns[2:], strict=True)))
            else:
                seqs, times, *others = columns
                groups.append(Rows(kind, type, seqs, _floats(times), dict(zip(names, others, strict=False))))
    except (zlib.error, ValueError, KeyError, TypeError, IndexError) as error:
        raise LogError(f"not a block of rows: {error}") from None
    return Block(groups, progress)


def _progress(seqs: Sequence[int], columns: dict[str, Sequence[Any]]) -> Iterator[OrderProgress]:
    nothing = [0] * len(seqs)
    orders = columns["order"]
    of_all: list[Sequence[Any]] = [
        seqs,
        _floats(columns["time_s"]),
        columns["num_active"],
        columns["num_waiting"],
        columns.get("num_waiting_for_env", nothing),
        columns.get("tokens", nothing),
        _floats(columns.get("seconds", nothing)),
    ]
    ends = [at for at, (order, following) in enumerate(pairwise(orders), 1) if order != following]
    for begin, end in pairwise([0, *ends, len(orders)]):
        of_one: list[Any] = [column[begin:end] for column in of_all]
        yield OrderProgress(OrderId(orders[begin]), *of_one)


def _floats(values: Sequence[Any]) -> Sequence[float]:
    """Numbers that JSON cannot hold are texts in the log."""
    return values if set(map(type, values)) <= {float} else [float(value) for value in values]


def _packed(values: Sequence[Any], numbers: list[bytes]) -> Any:
    types = set(map(type, values))
    if types == {int}:
        code = _add_whole(values, numbers)
        return {"raw": values} if code is None else code
    if types == {float}:
        return _packed_fractions(values, numbers)
    if types == {dict} and len({tuple(value) for value in values}) == 1:
        return {"of": {name: _packed([value[name] for value in values], numbers) for name in values[0]}}
    if len(set(map(codec.dumps, values))) == 1:  # equal is not enough: 1 equals 1.0
        return {"all": values[0]}
    if types == {list}:
        lengths = _packed([len(value) for value in values], numbers)
        return {"in": [lengths, sum(map(len, values)), _packed([item for value in values for item in value], numbers)]}
    return {"raw": values}


def _packed_fractions(values: Sequence[float], numbers: list[bytes]) -> Any:
    if all(value < _MOST_S and math.copysign(1.0, value) > 0.0 for value in values):
        micros = [round(value * _MICROS) for value in values]
        if all(micro / _MICROS == value for micro, value in zip(micros, values, strict=True)):
            return {"us": _add_whole(micros, numbers)}
    is_single = all(abs(value) < _MOST_S for value in values) and list(array("f", values)) == list(values)
    return _add(array("f" if is_single else "d", values), numbers)


def _values(packed: Any, count: int, numbers: _Numbers) -> Sequence[Any]:
    """A column's values, so many."""
    if isinstance(packed, str):
        return numbers.take(packed, count)
    ((how, what),) = packed.items()
    if how == "us":
        return [micro / _MICROS for micro in numbers.take(what, count)]
    if how == "all":
        return [what] * count
    if how == "of":
        columns = [_values(column, count, numbers) for column in what.values()]
        return [dict(zip(what, row, strict=True)) for row in zip(*columns, strict=True)] if what else [{}] * count
    if how == "in":
        lengths, total, packed_items = what
        ends = accumulate(_values(lengths, count, numbers), initial=0)
        items = _values(packed_items, total, numbers)
        return [items[begin:end] for begin, end in pairwise(ends)]
    if how == "raw":
        return list(what)
    raise ValueError(f"a column packed as {how!r}")


def _pass_over(packed: Any, count: int, numbers: _Numbers) -> None:
    """Leave a column unread, so that the next one can be read."""
    if isinstance(packed, str):
        numbers.pass_over(packed, count)
        return
    ((how, what),) = packed.items()
    if how == "us":
        numbers.pass_over(what, count)
    elif how == "of":
        for column in what.values():
            _pass_over(column, count, numbers)
    elif how == "in":
        lengths, total, packed_items = what
        _pass_over(lengths, count, numbers)
        _pass_over(packed_items, total, numbers)


def _add_whole(values: Sequence[int], numbers: list[bytes]) -> str | None:
    """Append whole numbers, as they are or as differences, whichever is smaller; None where no type holds them.

    Numbers that grow are smaller as differences, lengths of answers and the like as they are.
    """
    differences = _narrowest([values[0], *(value - before for before, value in pairwise(values))], _CODES)
    themselves = _narrowest(values, _CODES.upper())
    columns = [column for column in (differences, themselves) if column is not None]
    if not columns:
        return None
    return _add(min(columns, key=_compressed_size) if len(columns) > 1 else columns[0], numbers)


def _narrowest(values: Sequence[int], codes: str) -> array[int] | None:
    """The numbers in the narrowest of these types that holds them all."""
    for code in codes:
        try:
            return array(code, values)
        except OverflowError:
            continue
    return None


def _compressed_size(column: array[int]) -> int:
    return len(zlib.compress(b"".join(_places(column)), 1))


def _add(column: array[Any], numbers: list[bytes]) -> str:
    """Append a column's bytes, those of one significance together; returns its type."""
    numbers += _places(column)
    return column.typecode


def _places(column: array[Any]) -> list[bytes]:
    """The bytes of each significance, the lowest first."""
    whole, width = column.tobytes(), column.itemsize
    places = [whole[place::width] for place in range(width)]
    return places if sys.byteorder == "little" else places[::-1]


class _Numbers:
    """Reads the numbers of a block, column after column."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def pass_over(self, code: str, count: int) -> None:
        """Go on behind the next column."""
        self._at += count * array(code).itemsize

    def take(self, code: str, count: int) -> list[Any]:
        """The next column's numbers."""
        column = array(code)
        width = column.itemsize
        whole = bytearray(count * width)
        for place in range(width):
            whole[place::width] = self._data[self._at : self._at + count]
            self._at += count
        column.frombytes(whole)
        if sys.byteorder == "big":
            column.byteswap()
        return list(accumulate(column)) if code in _CODES else column.tolist()
