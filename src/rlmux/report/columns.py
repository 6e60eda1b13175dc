"""Columns of a block as numbers and JSON, and back: what neighbours in a column have in common costs little.

    "i"                       the first number, then the differences, in bytes of this `array` type; with a type that is
                              unsigned or of fractions ("B", "f"), the numbers themselves
    {"us": "i"}               numbers that are whole microseconds, as these
    {"all": "sort"}           the same value in every row
    {"words": [[...], "B"]}   few texts, numbers or lists that come again and again: these, and the number of each row's
    {"hex": 32}               texts that write so many bytes in hexadecimal, as these bytes
    {"of": {"loss": ...}}     mappings with the same keys, a column for each key
    {"by": [...]}             lists of the same length, a column for each place
    {"in": ["B", 96, ...]}    lists: a column of their lengths, how many items they have, a column of all items
    {"raw": [...]}            anything else, as it is

Numbers lie behind the JSON, those of one column together. Bytes of one significance lie together: the highest are all
alike, and cost nothing.
"""

from __future__ import annotations

import math
import sys
import zlib
from array import array
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

from rlmux.report import codec

_CODES = "bhiq"
"""Types of `array` for differences, narrowest first: 1, 2, 4 and 8 bytes."""
_MICROS = 1e6
_MOST_S = 1e9
"""A time of the run is less, in seconds."""
_WORDS_PART = 4
"""Rows for each text, or number, of a column whose texts are kept once."""
_MOST_WORDS, _MOST_BYTE = 256, 255
_MOST_PLACES = 16
"""Places of lists that have a column each."""
_HEX_DIGITS = frozenset("0123456789abcdef")


class Numbers:
    """Reads the numbers of a block, column after column."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def pass_over(self, code: str, count: int) -> None:
        """Go on behind the next column."""
        self._at += count * array(code).itemsize

    def take_bytes(self, count: int) -> bytes:
        self._at += count
        return self._data[self._at - count : self._at]

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


def pack_column(values: Sequence[Any], numbers: list[bytes]) -> Any:
    """The column as JSON; what is left of it is appended to `numbers`."""
    types = set(map(type, values))
    if types == {int}:
        return _pack_counts(values, numbers)
    if types == {float}:
        return _pack_fractions(values, numbers)
    if types == {dict} and len({tuple(value) for value in values}) == 1:
        return {"of": {name: pack_column([value[name] for value in values], numbers) for name in values[0]}}
    if types == {list}:
        return _pack_lists(values, numbers)
    if types == {str}:
        return _pack_texts(values, numbers)
    if len(set(map(codec.dumps, values))) == 1:  # equal is not enough: 1 equals 1.0
        return {"all": values[0]}
    return {"raw": values}


def read_column(packed: Any, count: int, numbers: Numbers) -> Sequence[Any]:
    """A column's values, so many."""
    if isinstance(packed, str):
        return numbers.take(packed, count)
    ((how, what),) = packed.items()
    if how == "us":
        return from_micros(numbers.take(what, count))
    if how == "all":
        return [what] * count
    if how == "words":
        words, code = what
        return [words[index] for index in numbers.take(code, count)]
    if how == "hex":
        text = numbers.take_bytes(what * count).hex()
        return [text[begin : begin + 2 * what] for begin in range(0, len(text), 2 * what)]
    if how == "of":
        columns = [read_column(column, count, numbers) for column in what.values()]
        return [dict(zip(what, row, strict=True)) for row in zip(*columns, strict=True)] if what else [{}] * count
    if how == "by":
        return [list(row) for row in zip(*[read_column(column, count, numbers) for column in what], strict=True)]
    if how == "in":
        lengths, total, packed_items = what
        ends = accumulate(read_column(lengths, count, numbers), initial=0)
        items = read_column(packed_items, total, numbers)
        return [items[begin:end] for begin, end in pairwise(ends)]
    if how == "raw":
        return list(what)
    raise ValueError(f"a column packed as {how!r}")


def pass_over(packed: Any, count: int, numbers: Numbers) -> None:
    """Leave a column unread, so that the next one can be read."""
    if isinstance(packed, str):
        numbers.pass_over(packed, count)
        return
    ((how, what),) = packed.items()
    if how == "us":
        numbers.pass_over(what, count)
    elif how == "words":
        numbers.pass_over(what[1], count)
    elif how == "hex":
        numbers.take_bytes(what * count)
    elif how == "of" or how == "by":
        for column in what.values() if how == "of" else what:
            pass_over(column, count, numbers)
    elif how == "in":
        lengths, total, packed_items = what
        pass_over(lengths, count, numbers)
        pass_over(packed_items, total, numbers)


def pack_whole(values: Sequence[int], numbers: list[bytes]) -> str | None:
    """Append whole numbers, as they are or as differences, whichever is smaller; None where no type holds them.

    Numbers that grow are smaller as differences, lengths of answers and the like as they are.
    """
    if not values:
        return "B"
    differences = _narrowest([values[0], *(value - before for before, value in pairwise(values))], _CODES)
    themselves = _narrowest(values, _CODES.upper())
    columns = [column for column in (differences, themselves) if column is not None]
    if not columns:
        return None
    return _add(min(columns, key=_compressed_size) if len(columns) > 1 else columns[0], numbers)


def micros_of(values: Sequence[Any]) -> list[int] | None:
    """Seconds as whole microseconds; None where they are none, or too many to tell."""
    if not all(type(value) is float and value < _MOST_S and math.copysign(1.0, value) > 0.0 for value in values):
        return None
    micros = [round(value * _MICROS) for value in values]
    return micros if from_micros(micros) == list(values) else None


def from_micros(micros: Sequence[int]) -> list[float]:
    """The seconds that `micros_of` was given."""
    return [micro / _MICROS for micro in micros]


def _pack_counts(values: Sequence[int], numbers: list[bytes]) -> Any:
    """Whole numbers of a byte and a little more, such as lengths up to 256, are one byte as words."""
    if not 0 <= min(values) <= _MOST_BYTE < max(values) < _MOST_WORDS * _WORDS_PART:
        code = pack_whole(values, numbers)
        return {"raw": values} if code is None else code
    words = {word: index for index, word in enumerate(sorted(set(values)))}
    if len(words) > min(_MOST_WORDS, len(values) // _WORDS_PART):
        return pack_whole(values, numbers)
    return {"words": [list(words), pack_whole([words[value] for value in values], numbers)]}


def _pack_fractions(values: Sequence[float], numbers: list[bytes]) -> Any:
    micros = micros_of(values)
    if micros is not None:
        return {"us": pack_whole(micros, numbers)}
    is_single = all(abs(value) < _MOST_S for value in values) and list(array("f", values)) == list(values)
    return _add(array("f" if is_single else "d", values), numbers)


def _pack_texts(values: Sequence[str], numbers: list[bytes]) -> Any:
    words = {word: index for index, word in enumerate(dict.fromkeys(values))}
    if len(words) == 1:
        return {"all": values[0]}
    if len(words) * _WORDS_PART <= len(values):
        return {"words": [list(words), pack_whole([words[value] for value in values], numbers)]}
    size = len(values[0])
    if size and size % 2 == 0 and all(len(value) == size and _HEX_DIGITS.issuperset(value) for value in values):
        numbers.append(bytes.fromhex("".join(values)))
        return {"hex": size // 2}
    return {"raw": values}


def _pack_lists(values: Sequence[list[Any]], numbers: list[bytes]) -> Any:
    size = len(values[0])
    if 0 < size <= _MOST_PLACES:
        texts = list(map(codec.dumps, values))
        words = {text: index for index, text in enumerate(dict.fromkeys(texts))}
        if len(words) == 1:
            return {"all": values[0]}
        if len(words) * _WORDS_PART <= len(values):
            return {"words": [list(map(codec.loads, words)), pack_whole([words[text] for text in texts], numbers)]}
        if set(map(len, values)) == {size}:
            return {"by": [pack_column(column, numbers) for column in zip(*values, strict=True)]}
    lengths = pack_column([len(value) for value in values], numbers)
    items = [item for value in values for item in value]
    return {"in": [lengths, len(items), pack_column(items, numbers)]}


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
