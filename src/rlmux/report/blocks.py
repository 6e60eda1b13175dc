"""Rows of the log packed into a block, and back: nothing is lost, a tenth to a twentieth of the bytes is left.

    {"groups": [[kind, type, number of rows, names, [values of the first field, ...]], ...],         JSON, one line
     "rows": [how many, the group of each, their numbers, their times]}
    the numbers of all columns                                                                     bytes
                                         then zlib, or LZMA for the blocks of a long run, which are packed once more;
                                         both check the bytes when they are read

Fields of rows of one type are kept in columns (`columns.py`). Numbers and times of rows are kept in the log's order:
an order has the time of the event that it answers. Progress reports have their own: they are sorted by order, so that
neighbours are alike, and the seconds computed so far are kept as what the clock is ahead of them.

A row `resumed` ends every order before it, so ids that are used again afterwards begin a group of their own.
"""

from __future__ import annotations

import json
import lzma
import zlib
from array import array
from bisect import bisect_left
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from operator import itemgetter
from typing import Any, NamedTuple

from rlmux.core.errors import LogError
from rlmux.core.events import ChunkFinished
from rlmux.core.model import OrderId
from rlmux.report import codec
from rlmux.report.columns import Numbers, from_micros, micros_of, pack_column, pack_whole, pass_over, read_column
from rlmux.report.progress import OrderProgress

PROGRESS = ChunkFinished.__name__
"""Type of the rows that are kept by order."""
RESUMED = "resumed"
"""Type of the note that begins the rows of another process, whose orders are counted from 1 again."""

XZ_MAGIC = b"\xfd7zXZ"
"""First bytes of a block that was merged of several."""
_FILTERS = [{"id": lzma.FILTER_LZMA2, "preset": 6, "lc": 0, "lp": 0, "pb": 0}]
"""Bytes of numbers say nothing of the bytes after them."""


class Row(NamedTuple):
    """One row as the log's table has it."""

    seq: int
    time_s: float
    kind: str
    type: str
    json: str


class Group(NamedTuple):
    """Rows of one kind and type with the same fields, in columns."""

    kind: str
    type: str
    num_rows: int
    columns: Mapping[str, Sequence[Any]]
    """The values of each field, by its name."""

    def fields(self) -> Iterator[dict[str, Any]]:
        """The fields of each row."""
        if not self.columns:
            yield from ({} for _ in range(self.num_rows))
        for values in zip(*self.columns.values(), strict=True):
            yield dict(zip(self.columns, values, strict=True))


@dataclass(frozen=True, slots=True)
class Block:
    """What a block holds."""

    seqs: Sequence[int]
    """Number of every row that is no progress report, ascending."""
    times_s: Sequence[float]
    """Time of each."""
    numbers: Sequence[int]
    """The group of each, whose rows come in the same order."""
    groups: Sequence[Group]
    progress: Sequence[OrderProgress]
    """Reports by order."""

    @property
    def rows(self) -> list[tuple[int, float, str, str, dict[str, Any]]]:
        """seq, time_s, kind, type and fields of every row that is no progress report, ascending."""
        fields = [group.fields() for group in self.groups]
        return [
            (seq, time_s, self.groups[number].kind, self.groups[number].type, next(fields[number]))
            for seq, time_s, number in zip(self.seqs, self.times_s, self.numbers, strict=True)
        ]


def pack(rows: Iterable[Row]) -> bytes:
    """The bytes of a block. The rows are ascending, their texts are the log's own."""
    content = _Content()
    reports: dict[tuple[Any, ...], list[tuple[Any, ...]]] = {}
    num_lives = 0
    for row in rows:
        fields = codec.loads(row.json)
        if _is_progress(row.kind, row.type):
            reports.setdefault((tuple(fields), num_lives), []).append((row.seq, row.time_s, *fields.values()))
            continue
        num_lives += row.type == RESUMED
        number = content.number_of(row.kind, row.type, tuple(fields))
        content.add_row(row.seq, row.time_s, number)
        for column, value in zip(content.groups[number].columns, fields.values(), strict=True):
            column.append(value)
    for (names, life), group in reports.items():
        group.sort(key=itemgetter(2 + names.index("order")))
        content.progress[names, life] = [list(column) for column in zip(*group, strict=True)]
    return zlib.compress(content.as_bytes())


def merge(blocks: Iterable[bytes]) -> bytes:
    """The bytes of one block with the rows of several, the oldest first. Raises LogError for damaged bytes.

    Reports of an order that lie in different blocks stay apart: they come where they came.
    """
    merged = _Content()
    num_lives = 0
    for data in blocks:
        content = _Content.of(decompress(data))
        number_by_number = [merged.number_of(one.kind, one.type, one.names) for one in content.groups]
        for seq, time_s, number in zip(content.seqs, content.times_s, content.numbers, strict=True):
            merged.add_row(seq, time_s, number_by_number[number])
        for number, group in zip(number_by_number, content.groups, strict=True):
            for column, values in zip(merged.groups[number].columns, group.columns, strict=True):
                column.extend(values)
        resumed = content.seqs_of(RESUMED)
        for (names, _), columns in content.progress.items():
            key = (names, num_lives + bisect_left(resumed, columns[0][0]))
            before = merged.progress.setdefault(key, [[] for _ in columns])
            for column, values in zip(before, columns, strict=True):
                column.extend(values)
        num_lives += len(resumed)
    return lzma.compress(merged.as_bytes(), format=lzma.FORMAT_XZ, check=lzma.CHECK_CRC32, filters=_FILTERS)


def unpack(data: bytes, bare: Collection[str] = ()) -> Block:
    """What `pack` was given. Raises LogError for damaged bytes.

    `bare`: types of notes whose fields are left out; their rows have numbers and times alone.
    """
    return read_block(decompress(data), bare)


def decompress(data: bytes) -> bytes:
    """The first half of `unpack`, which other threads need not wait for. Raises LogError for damaged bytes."""
    try:
        return lzma.decompress(data) if data.startswith(XZ_MAGIC) else zlib.decompress(data)
    except (zlib.error, lzma.LZMAError) as error:
        raise LogError(f"not a block of rows: {error}") from None


def read_block(whole: bytes, bare: Collection[str] = ()) -> Block:
    """The second half of `unpack`."""
    content = _Content.of(whole, bare)
    groups = [
        Group(one.kind, one.type, one.count, dict(zip(one.names, one.columns, strict=False))) for one in content.groups
    ]
    try:
        progress = [
            one
            for (names, _), columns in content.progress.items()
            for one in _progress(columns[0], dict(zip(names, columns[2:], strict=True)))
        ]
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise LogError(f"not a block of rows: {error}") from None
    return Block(content.seqs, content.times_s, content.numbers, groups, progress)


def _is_progress(kind: str, type: str) -> bool:
    return type == PROGRESS and kind == "event"


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


@dataclass(slots=True)
class _Columns:
    """Rows of one kind and type with the same fields, on their way into a block or out of one."""

    kind: str
    type: str
    names: tuple[str, ...]
    columns: list[list[Any]]
    count: int = 0


@dataclass(slots=True)
class _Content:
    """All columns of a block."""

    seqs: list[int] = field(default_factory=list)
    times_s: list[float] = field(default_factory=list)
    numbers: list[int] = field(default_factory=list)
    groups: list[_Columns] = field(default_factory=list)
    progress: dict[tuple[tuple[str, ...], int], list[list[Any]]] = field(default_factory=dict)
    """Reports with the same fields in one life of the run: numbers, times, and each field."""
    _number_by_key: dict[tuple[Any, ...], int] = field(default_factory=dict)

    def number_of(self, kind: str, type: str, names: tuple[str, ...]) -> int:
        """The number of a group, a new one where there is none."""
        key = (kind, type, names)
        if key not in self._number_by_key:
            self._number_by_key[key] = len(self.groups)
            self.groups.append(_Columns(kind, type, names, [[] for _ in names]))
        return self._number_by_key[key]

    def add_row(self, seq: int, time_s: float, number: int) -> None:
        self.seqs.append(seq)
        self.times_s.append(time_s)
        self.numbers.append(number)
        self.groups[number].count += 1

    def seqs_of(self, type: str) -> list[int]:
        """Numbers of the rows of a type."""
        wanted = {number for number, group in enumerate(self.groups) if group.type == type}
        return [seq for seq, number in zip(self.seqs, self.numbers, strict=True) if number in wanted] if wanted else []

    # ------------------------------------------------------------------ as bytes

    def as_bytes(self) -> bytes:
        numbers: list[bytes] = []
        count = len(self.seqs)
        rows = [count, *(pack_column(column, numbers) for column in (self.numbers, self.seqs, self.times_s) if count)]
        times_s = self._times_by_group(range(len(self.groups)))
        groups: list[Any] = [
            [one.kind, one.type, one.count, one.names, _pack_fields(one, times_s[number], numbers)]
            for number, one in enumerate(self.groups)
        ]
        groups += [
            ["event", PROGRESS, len(columns[0]), names, _pack_reports(names, columns, numbers)]
            for (names, _), columns in self.progress.items()
        ]
        return b"\n".join([codec.dumps({"rows": rows, "groups": groups}).encode(), b"".join(numbers)])

    @classmethod
    def of(cls, whole: bytes, bare: Collection[str] = ()) -> _Content:
        try:
            text, _, given = whole.partition(b"\n")
            described = json.loads(text)
            content, numbers = cls(), Numbers(given)
            if isinstance(described, list):
                content._read_with_own_times(described, numbers, bare)
            else:
                content._read(described, numbers, bare)
        except (ValueError, KeyError, TypeError, IndexError) as error:
            raise LogError(f"not a block of rows: {error}") from None
        return content

    def _read(self, described: dict[str, Any], numbers: Numbers, bare: Collection[str]) -> None:
        count, *packed_rows = described["rows"]
        columns: list[Any] = [read_column(column, count, numbers) for column in packed_rows] or [[], [], []]
        self.numbers, self.seqs, self.times_s = columns[0], columns[1], _floats(columns[2])  # type: ignore[assignment]
        for kind, type, size, names, packed in described["groups"]:
            if _is_progress(kind, type):
                self.progress[tuple(names), len(self.progress)] = _read_reports(names, packed, size, numbers)
            else:
                self._read_group(kind, type, size, names, packed, numbers, bare)
        timed = [number for number, group in enumerate(self.groups) if None in group.columns]
        for number, own_s in self._times_by_group(timed).items():
            own: list[Any] = self.groups[number].columns
            own[own.index(None)] = own_s

    def _times_by_group(self, wanted: Iterable[int]) -> dict[int, list[float]]:
        """Times of the rows of these groups."""
        times_s: dict[int, list[float]] = {number: [] for number in wanted}
        for number, time_s in zip(self.numbers, self.times_s, strict=True):
            if number in times_s:
                times_s[number].append(time_s)
        return times_s

    def _read_group(
        self, kind: str, type: str, size: int, names: list[str], packed: list[Any], numbers: Numbers, bare: Any
    ) -> None:
        columns: list[Any] = []
        for each in packed:
            if kind == "note" and type in bare:
                pass_over(each, size, numbers)
            else:
                columns.append(None if each is None else read_column(each, size, numbers))
        self.groups.append(_Columns(kind, type, tuple(names), columns, size))

    def _read_with_own_times(self, described: list[Any], numbers: Numbers, bare: Collection[str]) -> None:
        """A block as it was before rows had their numbers and times in common: each group has its own."""
        rows: list[tuple[int, float, int]] = []
        for kind, type, size, names, packed in described:
            own = [read_column(each, size, numbers) for each in packed[:2]]
            if _is_progress(kind, type):
                columns: list[Any] = [*own, *(read_column(each, size, numbers) for each in packed[2:])]
                self.progress[tuple(names), len(self.progress)] = columns
                continue
            rows += zip(own[0], _floats(own[1]), [len(self.groups)] * size, strict=True)
            self._read_group(kind, type, size, names, packed[2:], numbers, bare)
        rows.sort()
        for seq, time_s, number in rows:
            self.seqs.append(seq)
            self.times_s.append(time_s)
            self.numbers.append(number)


def _pack_fields(group: _Columns, times_s: Sequence[float], numbers: list[bytes]) -> list[Any]:
    """The columns of a group; null for `time_s` where it is the row's."""
    return [
        None if name == "time_s" and _is_same(column, times_s) else pack_column(column, numbers)
        for name, column in zip(group.names, group.columns, strict=True)
    ]


def _is_same(column: Sequence[Any], times_s: Sequence[float]) -> bool:
    return set(map(type, column)) == {float} and array("d", column) == array("d", times_s) and 0.0 not in column


def _pack_reports(names: Sequence[str], columns: Sequence[list[Any]], numbers: list[bytes]) -> list[Any]:
    """Columns of reports; null: the row's time; {"behind": ...}: microseconds by which the row's time is ahead."""
    seqs, times_s, *others = columns
    packed = [pack_column(seqs, numbers), pack_column(times_s, numbers)]
    time_us = micros_of(times_s)
    for name, column in zip(names, others, strict=True):
        if name == "time_s" and _is_same(column, times_s):
            packed.append(None)
            continue
        micros = micros_of(column) if name == "seconds" and time_us is not None else None
        if micros is None or time_us is None:
            packed.append(pack_column(column, numbers))
            continue
        ahead = [time - spent for time, spent in zip(time_us, micros, strict=True)]
        packed.append({"behind": pack_whole(ahead, numbers)})
    return packed


def _read_reports(names: Sequence[str], packed: Sequence[Any], size: int, numbers: Numbers) -> list[list[Any]]:
    is_micros = isinstance(packed[1], dict) and "us" in packed[1]
    columns: list[Any] = [read_column(packed[0], size, numbers)]
    time_us = numbers.take(packed[1]["us"], size) if is_micros else []
    columns.append(from_micros(time_us) if is_micros else _floats(read_column(packed[1], size, numbers)))
    for _, each in zip(names, packed[2:], strict=True):
        if each is None:
            columns.append(columns[1])
        elif isinstance(each, dict) and "behind" in each:
            ahead = numbers.take(each["behind"], size)
            columns.append(from_micros([time - less for time, less in zip(time_us, ahead, strict=True)]))
        else:
            columns.append(read_column(each, size, numbers))
    return columns
