"""JSON that others wrote: files, lines of files, bodies of requests and responses.

    parse_json(text)   a value, or a ValueError of one line, whatever the text is

`json.loads` by itself raises RecursionError for text that is nested too deeply, and accepts values that no code can
walk. The limit leaves room for what copies, renders and writes values recursively.
"""

from __future__ import annotations

import json
import sys
from typing import Any

MAX_LEVELS = 100
"""Deepest nesting of lists and objects that is accepted."""


def parse_json(text: str | bytes) -> Any:
    """The value of a JSON text. Raises ValueError for a text that is no JSON, nests deeper, or has a longer integer."""
    try:
        value = json.loads(text)
    except RecursionError:
        raise _too_deep() from None
    except (json.JSONDecodeError, UnicodeDecodeError):
        raise
    except ValueError:  # of int()
        raise ValueError(f"an integer has more than {sys.get_int_max_str_digits():,} digits; accepted: fewer") from None
    brackets: tuple[Any, Any] = ("[", "{") if isinstance(text, str) else (b"[", b"{")
    if sum(map(text.count, brackets)) > MAX_LEVELS and _is_deeper(value):
        raise _too_deep()
    return value


def _too_deep() -> ValueError:
    return ValueError(f"lists and objects are nested too deeply; accepted: {MAX_LEVELS} levels")


def _is_deeper(value: Any) -> bool:
    level = [value]
    for _ in range(MAX_LEVELS + 1):
        level = [nested for nested in level if isinstance(nested, dict | list)]
        if not level:
            return False
        level = [each for nested in level for each in (nested.values() if isinstance(nested, dict) else nested)]
    return True
