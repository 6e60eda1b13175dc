"""Bytes of single tokens. A character may be several tokens, of which none has a text.

    ByteLevel       a character stands for each byte        `Ã©`     as of GPT-2, Llama 3, Qwen
    ByteFallback    a token for each byte                   `<0xC3>` as of Llama 2, Gemma
    others          the bytes of its text

A module of its own: the forms in which tokenizers keep bytes are no part of a vocabulary's other users.
"""

from __future__ import annotations

import json
import re
from typing import Any

_NO_TEXT = "\N{REPLACEMENT CHARACTER}"
_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
"""The sign that SentencePiece writes for a space."""


class TokenBytes:
    """Bytes of the tokens of one tokenizer of transformers."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._added = {token: each.content for token, each in tokenizer.added_tokens_decoder.items()}
        special = {token for token, each in tokenizer.added_tokens_decoder.items() if each.special}
        self._special = special | set(tokenizer.all_special_ids)
        decoder = getattr(getattr(tokenizer, "backend_tokenizer", None), "decoder", None)
        self._decoder = "" if decoder is None else json.dumps(json.loads(decoder.__getstate__()), ensure_ascii=False)
        """The decoder's settings as JSON."""

    def of(self, token: int) -> bytes | None:
        """Bytes that the token adds to a text; None where the tokenizer does not tell them."""
        if token in self._special:
            return b""
        if token in self._added:
            return str(self._added[token]).encode()
        piece: str | None = self._tokenizer.convert_ids_to_tokens(token)
        if piece is None:
            return None
        if self._has("ByteLevel"):
            places = [_BYTE_BY_CHAR.get(char) for char in piece]
            return None if None in places else bytes(place for place in places if place is not None)
        if self._has("ByteFallback") and (found := re.fullmatch(r"<0x([0-9A-Fa-f]{2})>", piece)):
            return bytes.fromhex(found[1])
        if _SPACE in self._decoder:
            return piece.replace(_SPACE, " ").encode()
        text: str = self._tokenizer.decode([token], clean_up_tokenization_spaces=False)
        return None if _NO_TEXT in text else text.encode()

    def _has(self, kind: str) -> bool:
        return f'"type": "{kind}"' in self._decoder


def _byte_by_char() -> dict[str, int]:
    """GPT-2's alphabet: printable Latin-1 characters stand for themselves, others for the bytes that are left."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + place): byte for place, byte in enumerate(others)}


_BYTE_BY_CHAR = _byte_by_char()
