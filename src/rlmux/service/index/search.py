"""Search for pipelines by words: every word begins a word of one of the pipeline's fields.

    "Sort lr 1e" ─▶ [" sort", " lr", " 1e"]          task.name: sort  ─▶  " task name sort"

Letter case and punctuation do not count; parts of a word that punctuation joins follow each other: `task.name` is
` task name`. Normalized documents are cached by their text, since most stay the same from one search to the next.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

_WORD = re.compile(r"[^\W_]+")
_MAX_MATCHES = 6
_MAX_SHOWN, _BEFORE = 160, 40
"""Characters of a field that an answer shows; of them before the match."""


@dataclass(frozen=True, slots=True)
class Document:
    """Searchable text of one pipeline."""

    fields: tuple[tuple[str, str], ...]
    """(name of the field, its text), in the order in which an answer shows them."""
    words: tuple[str, ...]
    """The same fields, normalized."""
    whole: str
    """All of `words`."""


@functools.lru_cache(maxsize=50_000)
def document_of(row: str, config: str, labels: tuple[str, ...], note: str) -> Document:
    """`row`: JSON with name, user and project. `config`: JSON of values by flat key."""
    fields = [(key, str(value)) for key, value in json.loads(row).items() if value]
    fields += [("label", label) for label in labels]
    fields += [("note", line) for line in note.splitlines()]
    named = [(key, str(value)) for key, value in json.loads(config).items()]
    words = [normalized(text) for _, text in fields] + [normalized(f"{key} {value}") for key, value in named]
    return Document((*fields, *named), tuple(words), "\n".join(words))


def normalized(text: str) -> str:
    """Words in lower case, a blank before each."""
    return "".join(f" {word}" for word in _WORD.findall(text.casefold()))


def words_of(query: str) -> list[str]:
    """The query's words, normalized, without those that are punctuation alone."""
    return [word for word in map(normalized, query.split()) if word]


def is_match(document: Document, words: Sequence[str]) -> bool:
    return all(word in document.whole for word in words)


def matches(document: Document, words: Sequence[str]) -> list[dict[str, Any]]:
    """{field, text} of the fields in which a word was found."""
    found = [
        {"field": field, "text": _excerpt(text, words)}
        for (field, text), its in zip(document.fields, document.words, strict=True)
        if any(word in its for word in words)
    ]
    return found[:_MAX_MATCHES]


def _excerpt(text: str, words: Sequence[str]) -> str:
    """The part of a long text around its first match."""
    lowered = text.casefold()
    places = [at for word in words if (at := lowered.find(word.split()[0])) >= 0]
    start = max(0, min(places, default=0) - _BEFORE) if len(text) > _MAX_SHOWN else 0
    return "…" * (start > 0) + text[start : start + _MAX_SHOWN] + "…" * (start + _MAX_SHOWN < len(text))
