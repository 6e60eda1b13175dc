"""The broker's wire: JSON, one message a line, and what each message must look like.

    client                                                       broker
    hello  ─────────────────────────────────────────────────▶    welcome | refused
    ask{id, pools, phase, step?, units?, need_bytes?}       ▶    granted{id, fence, ...}
    withdraw{id}                                            ▶
    progress{fence, done, total}                            ▶
    done{fence, used_s, restore_s?, resident_bytes?}        ▶    after{fence, leave, pools}
    left{pool, freed_bytes?} | failed_to_leave{pool, error} ▶    evict{pool, for}       at any time between two permits
    workers{workers}                                        ▶
    ping                                                    ▶    ping
    bye                                                     ▶

A line is bounded, and a message is flat: its values are numbers, strings, lists of strings, and mappings from strings
to numbers or strings. Whatever else arrives is answered with `error{code, text}`, and nothing changes. Unknown keys
are ignored: a newer library may send more than an older broker understands.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from typing import Any

from rlmux.core.json_text import parse_json

WIRE_VERSION = 1
MAX_LINE_BYTES = 1 << 16
_MAX_TEXT = 4096
_MAX_ITEMS = 64
_MAX_WORKERS = 2048


class WireError(ValueError):
    """A line that is no message. `code` is for programs, the text for people."""

    def __init__(self, code: str, text: str) -> None:
        super().__init__(text)
        self.code = code


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and 0 < len(value) <= _MAX_TEXT


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 62


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value >= 0


def _is_names(value: Any) -> bool:
    return isinstance(value, list) and len(value) <= _MAX_ITEMS and all(_is_text(item) for item in value)


def _is_workers(value: Any) -> bool:
    if not isinstance(value, list) or len(value) > _MAX_WORKERS:
        return False
    return all(_is_text(item) and re.fullmatch(r"[^/]+/[0-9]{1,10}", item) for item in value)


def _is_mapping_to(is_value: Callable[[Any], bool]) -> Callable[[Any], bool]:
    def check(value: Any) -> bool:
        if not isinstance(value, dict) or len(value) > _MAX_ITEMS:
            return False
        return all(_is_text(key) and is_value(item) for key, item in value.items())

    return check


_Check = tuple[str, Callable[[Any], bool]]
_TEXT: _Check = ("a text", _is_text)
_COUNT: _Check = ("a whole number, 0 or more", _is_count)
_NUMBER: _Check = ("a finite number, 0 or more", _is_number)
_NAMES: _Check = ("a list of texts", _is_names)
_WORKERS: _Check = (f"a list of HOST/PID, {_MAX_WORKERS} at most", _is_workers)
_SIZES: _Check = ("a mapping from pools to bytes", _is_mapping_to(_is_count))
_POOLS: _Check = ("a mapping from roles to pools", _is_mapping_to(_is_text))
_COUNT_OR_NONE: _Check = ("a whole number, or null", lambda value: value is None or _is_count(value))

MESSAGES: Mapping[str, tuple[Mapping[str, _Check], Mapping[str, _Check]]] = {
    # message: (what it must have, what it may have)
    "hello": (
        {"v": _COUNT, "job": _TEXT, "rank": _COUNT, "world": _COUNT, "pid": _COUNT, "host": _TEXT, "session": _TEXT},
        {
            "pools": _POOLS,
            "slo": _NUMBER,
            "weight": _NUMBER,
            "proof": _TEXT,
            "need_bytes": _SIZES,
            "host_bytes": _COUNT,
            "fence": _COUNT_OR_NONE,
            "holds": _NAMES,
            "resident": _NAMES,
            "waited_s": _NUMBER,
            "workers": _WORKERS,
        },
    ),
    "ask": (
        {"id": _COUNT, "pools": _NAMES, "phase": _TEXT},
        {"step": _COUNT, "units": _COUNT, "need_bytes": _SIZES},
    ),
    "withdraw": ({"id": _COUNT}, {}),
    "progress": ({"fence": _COUNT, "done": _COUNT, "total": _COUNT}, {}),
    "done": ({"fence": _COUNT, "used_s": _NUMBER}, {"restore_s": _NUMBER, "resident_bytes": _SIZES}),
    "left": ({"pool": _TEXT}, {"freed_bytes": _COUNT}),
    "failed_to_leave": ({"pool": _TEXT, "error": _TEXT}, {}),
    "workers": ({"workers": _WORKERS}, {}),
    "ping": ({}, {}),
    "bye": ({}, {}),
}
"""Every message that a client may send, with the checks of its fields."""


def read_message(line: bytes) -> dict[str, Any]:
    """The message of a line, with the fields that it must have and those of the others that are there.

    Raises WireError for anything else, with what would be accepted.
    """
    if len(line) > MAX_LINE_BYTES:
        raise WireError("too_long", f"a line of {len(line)} bytes; accepted: {MAX_LINE_BYTES} at most")
    try:
        message = parse_json(line)
    except ValueError:
        message = None
    if not isinstance(message, dict):
        raise WireError("not_a_message", "accepted: one JSON object a line")
    kind = message.get("t")
    if not isinstance(kind, str) or kind not in MESSAGES:
        raise WireError("unknown", f"message {str(kind)[:40]!r}; accepted: {', '.join(MESSAGES)}")
    needed, optional = MESSAGES[kind]
    read = {"t": kind}
    for name, (accepted, is_right) in {**needed, **optional}.items():
        if name not in message and name in optional:
            continue
        if name not in message:
            raise WireError("incomplete", f"{kind} without {name!r}; accepted: {accepted}")
        if not is_right(message[name]):
            raise WireError("wrong_value", f"{kind}.{name} is {str(message[name])[:60]!r}; accepted: {accepted}")
        read[name] = message[name]
    return read


def write_message(kind: str, **fields: Any) -> bytes:
    """A message of the broker as a line."""
    return json.dumps({"t": kind, **fields}).encode() + b"\n"
