"""Events and actions as JSON text and back, without pickle.

    StageFinished(time_s=2.5, order=7, ...)  ──encode──▶  {"type":"StageFinished","time_s":2.5,"order":7,...}
                                             ◀──decode──

Only the outermost value carries its type: what lies inside is known from the field's annotation. Ids and
other named tuples are arrays, enums are their values, a float that JSON cannot hold is "inf", "-inf" or
"nan". Every field is written, so that a later change of a default does not change an old log's meaning.
Reading is strict about what it knows (an unknown type or field, or a value of the wrong kind, is a LogError
that names it) and lenient about what it may not know yet: a field that the text lacks takes its default, so a
log outlives additive changes of the core. A field that is gone and decided nothing (`_GONE_FIELDS`) is passed over.

Notes (`notes.py`) are read by the same rules, but leniently: see `Record`.

The fast path of `encode` is one pass of the C encoder over a flat dict: events have no nested values.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import sys
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import Any

from rlmux.core.actions import Action
from rlmux.core.errors import LogError
from rlmux.core.events import Event

NONFINITE = ("inf", "-inf", "nan")
"""How floats outside JSON are written; `float(text)` reads them back."""


class Record:
    """Base of dataclasses that are read leniently: unknown fields are ignored, and a field that is absent or null has
    its default, else the empty value of its type."""

    __slots__ = ()


def encode(value: Event | Action) -> str:
    """The value as one line of JSON; the same value always gives the same text."""
    kind = type(value)
    names = _FIELDS.get(kind)
    if names is None:
        raise LogError(f"the log cannot hold a {kind.__name__}: it is neither an event nor an action")
    fields: dict[str, Any] = {"type": kind.__name__}
    for name in names:
        fields[name] = getattr(value, name)
    return dumps(fields)


def decode(text: str) -> Event | Action:
    """The value that `encode` was given."""
    return from_fields(loads(text))


def from_fields(fields: Any) -> Event | Action:
    """The value whose JSON text was read already; its fields are taken out of the mapping."""
    if not isinstance(fields, dict) or not isinstance(name := fields.pop("type", None), str):
        raise LogError(f"not an event or action: {str(fields)[:80]!r}")
    kind = _TYPE_BY_NAME.get(name)
    if kind is None:
        raise LogError(f"unknown event or action type {name!r} in the log")
    return typing.cast("Event | Action", reader(kind)(fields, name))


def dumps(value: Any) -> str:
    """Compact JSON of plain values, dataclasses, enums, and numbers with an `item` method (numpy, torch)."""
    try:
        return _ENCODER.encode(value)
    except ValueError:
        return _ENCODER.encode(_without_nonfinite(value))


def loads(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise LogError(f"not JSON: {text[:80]!r} ({error})") from None


def _plain(value: Any) -> Any:
    """What the C encoder cannot write itself."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return dict(value)
    if hasattr(value, "item"):
        return value.item()
    if isinstance(value, Enum) or hasattr(value, "__fspath__"):
        return str(value)
    raise LogError(f"the log cannot hold a {type(value).__name__}: {str(value)[:80]!r}")


def _without_nonfinite(value: Any) -> Any:
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else str(float(value))
    if isinstance(value, str | int | None):
        return value
    if isinstance(value, Mapping):
        return {key: _without_nonfinite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nonfinite(item) for item in value]
    return _without_nonfinite(_plain(value))


_ENCODER = json.JSONEncoder(separators=(",", ":"), allow_nan=False, ensure_ascii=False, default=_plain)
_TYPE_BY_NAME: dict[str, type] = {kind.__name__: kind for kind in typing.get_args(Event) + typing.get_args(Action)}
_FIELDS: dict[type, tuple[str, ...]] = {
    kind: tuple(field.name for field in dataclasses.fields(kind)) for kind in _TYPE_BY_NAME.values()
}

_GONE_FIELDS: dict[str, tuple[str, ...]] = {
    "Relocate": ("saves_usd_per_hour", "expected_saving_usd", "saved_usd"),
    "Release": ("saved_usd",),
}
"""Fields of logs of this schema that told people something and decided nothing, and which no reader knows any more."""

Reader = Callable[[Any, str], Any]
"""Turns a JSON value, and the path to it for an error's text, into the typed value."""

_READERS: dict[Any, Reader] = {}


def add_reader(hint: Any, reader: Reader) -> None:
    """Read values of this annotation by a rule of its own."""
    _READERS[hint] = reader


def reader(hint: Any) -> Reader:
    """The reader of one annotation, made once."""
    made = _READERS.get(hint)
    if made is None:
        made = _READERS[hint] = _make_reader(hint)
    return made


def _make_reader(hint: Any) -> Reader:
    if hasattr(hint, "__supertype__"):
        return reader(hint.__supertype__)
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        return _read_optional(*(reader(arg) for arg in args if arg is not types.NoneType))
    if origin is tuple and len(args) == 2 and args[1] is Ellipsis:
        return _read_tuple(reader(args[0]))
    if origin is tuple:
        return _read_tuple_of([reader(arg) for arg in args])
    if origin in (list, Sequence):
        return _read_list(args[0], reader(args[0]))
    if origin in (dict, Mapping):
        return _read_dict(int if args[0] is int else str, reader(args[1]))
    if hint is Any:
        return lambda value, path: value
    if isinstance(hint, type):
        if hint in _SCALARS:
            return _SCALARS[hint]
        if issubclass(hint, Enum):
            return _read_enum(hint)
        if dataclasses.is_dataclass(hint):
            return _read_record(hint) if issubclass(hint, Record) else _read_dataclass(hint)
        if issubclass(hint, tuple):
            return _read_named_tuple(hint)
    raise TypeError(f"the codec has no rule for {hint!r}")


def _wrong(value: Any, path: str, wanted: str) -> LogError:
    return LogError(f"{path} is {value!r} in the log; it must be {wanted}")


def _read_float(value: Any, path: str) -> float:
    if type(value) is float:
        return value
    if type(value) is int or value in NONFINITE:
        return float(value)
    raise _wrong(value, path, "a number")


def _read_int(value: Any, path: str) -> int:
    if type(value) is int:
        return value
    raise _wrong(value, path, "an integer")


def _read_str(value: Any, path: str) -> str:
    if type(value) is str:
        return sys.intern(value)  # names come again and again
    raise _wrong(value, path, "text")


def _read_bool(value: Any, path: str) -> bool:
    if type(value) is bool:
        return value
    raise _wrong(value, path, "true or false")


_SCALARS: dict[type, Reader] = {float: _read_float, int: _read_int, str: _read_str, bool: _read_bool}


def _read_optional(reader: Reader) -> Reader:
    return lambda value, path: None if value is None else reader(value, path)


def _read_tuple(reader: Reader) -> Reader:
    def read(value: Any, path: str) -> tuple[Any, ...]:
        if not isinstance(value, list | tuple):
            raise _wrong(value, path, "a list")
        return tuple([reader(item, path) for item in value])

    return read


def _read_tuple_of(readers: Sequence[Reader]) -> Reader:
    def read(value: Any, path: str) -> tuple[Any, ...]:
        if not isinstance(value, list | tuple) or len(value) != len(readers):
            raise _wrong(value, path, f"a list of {len(readers)}")
        return tuple([read_one(item, path) for read_one, item in zip(readers, value, strict=True)])

    return read


def _read_list(hint: Any, read_one: Reader) -> Reader:
    def read(value: Any, path: str) -> Sequence[Any]:
        if not isinstance(value, list | tuple):
            raise _wrong(value, path, "a list")
        if {*map(type, value)} <= {hint}:  # nothing to convert
            return value
        return [read_one(item, path) for item in value]

    return read


def _read_dict(key_type: Callable[[Any], Any], read_one: Reader) -> Reader:
    """Keys are texts in JSON."""

    def read(value: Any, path: str) -> dict[Any, Any]:
        if not isinstance(value, Mapping):
            raise _wrong(value, path, "a mapping")
        return {key_type(key): read_one(item, path) for key, item in value.items()}

    return read


def _read_enum(kind: type[Enum]) -> Reader:
    by_value = {member.value: member for member in kind}

    def read(value: Any, path: str) -> Enum:
        try:
            return by_value[value]
        except (KeyError, TypeError):
            raise _wrong(value, path, "one of " + ", ".join(map(str, by_value))) from None

    return read


def _read_named_tuple(kind: Any) -> Reader:
    readers = [reader(hint) for hint in typing.get_type_hints(kind).values()]

    @functools.lru_cache(maxsize=4096, typed=True)
    def make(path: str, *items: Any) -> Any:
        """One object for all rows that have it: a log has few devices, and they are compared often."""
        return kind(*[reader(item, path) for reader, item in zip(readers, items, strict=True)])

    def read(value: Any, path: str) -> Any:
        if type(value) is not list or len(value) != len(readers):
            raise _wrong(value, path, f"a list of {len(readers)}, a {kind.__name__}")
        try:
            return make(path, *value)
        except TypeError:  # a list or a mapping in it
            raise _wrong(value, path, f"a {kind.__name__}") from None

    return read


@functools.cache
def _dataclass_readers(kind: Any) -> tuple[dict[str, Reader], list[str]]:
    """The reader of each field by its name, and the names of fields without a default."""
    hints = typing.get_type_hints(kind)
    readers = {field.name: reader(hints[field.name]) for field in dataclasses.fields(kind)}
    required = [
        field.name
        for field in dataclasses.fields(kind)
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
    ]
    return readers, required


def _read_dataclass(kind: Any) -> Reader:
    readers, _ = _dataclass_readers(kind)
    names = tuple(readers)
    types = tuple(next((scalar for scalar in _SCALARS if _SCALARS[scalar] is read), None) for read in readers.values())

    def read(value: Any, path: str) -> Any:
        if type(value) is not dict:
            raise _wrong(value, path, f"the fields of a {kind.__name__}")
        if tuple(value) == names and tuple(map(type, value.values())) == types:
            fields = value  # plain values, as most rows of a log have: nothing to convert
        else:
            fields = _read_fields(kind, value, path)
        try:
            return kind(**fields)
        except ValueError as error:
            raise LogError(f"a {kind.__name__} in the log is not valid: {error}") from None

    return read


def _read_fields(kind: Any, value: dict[str, Any], path: str) -> dict[str, Any]:
    readers, required = _dataclass_readers(kind)
    fields = {}
    for name, item in value.items():
        reader = readers.get(name)
        if reader is None and name in _GONE_FIELDS.get(kind.__name__, ()):
            continue
        if reader is None:
            raise LogError(f"unknown field {name!r} of {kind.__name__} in the log")
        try:
            fields[name] = reader(item, path)
        except LogError:
            reader(item, f"{path}.{name}")  # raises, with the whole path, which costs time to make
            raise
    for name in required:
        if name not in fields:
            raise LogError(f"{kind.__name__} lacks its field {name!r} in the log")
    return fields


def _read_record(kind: Any) -> Reader:
    readers, required = _dataclass_readers(kind)
    hints = typing.get_type_hints(kind)

    def read(value: Any, path: str) -> Any:
        if not isinstance(value, Mapping):
            raise _wrong(value, path, f"the fields of a {kind.__name__}")
        fields = {
            name: readers[name](item, f"{path}.{name}")
            for name, item in value.items()
            if item is not None and name in readers
        }
        return kind(**{name: _empty(hints[name]) for name in required if name not in fields}, **fields)

    return read


def _empty(hint: Any) -> Any:
    """The empty value of a type: None if it may be, else nothing of it, or its first member."""
    hint = getattr(hint, "__supertype__", hint)
    origin = typing.get_origin(hint)
    if origin in (types.UnionType, typing.Union):
        return None
    if isinstance(hint, type) and issubclass(hint, Enum):
        return next(iter(hint))
    return {Mapping: dict, Sequence: list}.get(origin, hint)()
