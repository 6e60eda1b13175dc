"""Pickling of small frozen values by their fields in a row.

    @fast_pickled          dumps: (restore, (class, field, field, ...))
    @dataclass(frozen=True, slots=True, ...)

A frozen dataclass with slots is otherwise pickled by a function of Python that looks its fields up for each value. A
step has hundreds of requests and trajectories, which cross processes while a device waits for them.

A module of its own: it serves any dataclass and is tested alone.
"""

from __future__ import annotations

import copyreg
from collections.abc import Callable
from dataclasses import fields
from operator import attrgetter
from typing import Any, TypeVar

T = TypeVar("T")
_SETTERS: dict[type, tuple[Callable[[Any, Any], None], ...]] = {}


def fast_pickled(cls: type[T]) -> type[T]:
    """Pickle values of a dataclass with slots and at least two fields as a row; subclasses are unchanged."""
    names = [field.name for field in fields(cls)]  # type: ignore[arg-type]
    values_of = attrgetter(*names)
    _SETTERS[cls] = tuple(vars(cls)[name].__set__ for name in names)

    def reduce(self: Any) -> tuple[Any, ...]:
        if type(self) is not cls:
            return copyreg.__newobj__, (type(self),), self.__getstate__()  # type: ignore[attr-defined]
        return restore, (cls, *values_of(self))

    cls.__reduce__ = reduce  # type: ignore[method-assign]
    return cls


def restore(cls: type[T], *values: Any) -> T:
    """The value that was pickled."""
    value = object.__new__(cls)
    for set_field, field_value in zip(_SETTERS[cls], values, strict=True):
        set_field(value, field_value)
    return value
