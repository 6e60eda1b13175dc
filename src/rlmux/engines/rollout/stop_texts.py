"""Detects stop texts in a response without decoding it after every token.

    token ── may_complete ──▶ no, for nearly all    ──▶ decode on
                          └─▶ perhaps ── is_in ──▶ decode the whole response and look

A stop text appears with the token that brings its last character. That token's own text has the character, or is not a
whole text at all (part of a character of several bytes, or a token that decodes to nothing by itself).

A module of its own: it needs a vocabulary, and no tensors.
"""

from __future__ import annotations

from collections.abc import Sequence

from rlmux.rl.vocabulary import Vocabulary

_PART_OF_A_CHARACTER = "\ufffd"


class StopTexts:
    """Finds stop texts in the text of one vocabulary."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._text_by_token: dict[int, str] = {}

    def may_complete(self, token: int, stop_texts: Sequence[str]) -> bool:
        """Whether this token may complete one of the texts."""
        if token not in self._text_by_token:
            self._text_by_token[token] = self._vocabulary.decode([token])
        text = self._text_by_token[token]
        return not text or _PART_OF_A_CHARACTER in text or any(stop[-1] in text for stop in stop_texts)

    def is_in(self, response: Sequence[int], stop_texts: Sequence[str]) -> bool:
        """Whether the decoded response contains one of the texts."""
        text = self._vocabulary.decode(response)
        return any(stop in text for stop in stop_texts)
