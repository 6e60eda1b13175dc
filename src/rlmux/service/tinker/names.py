"""Names that clients and the front share, and what is read out of them.

    session   s3-1f9a2c                      model     s3-1f9a2c:train:0
    path      tinker://MODEL/weights/NAME    sampler   s3-1f9a2c:sample:2
              tinker://MODEL/sampler_weights/NAME
              tinker://MODEL/external_weights/NAME

A client computes a model's id itself when it creates one from a checkpoint. A request's id is its channel's name and
its number there, so that a repeated request finds the same future, also after a restart.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from rlmux.core.errors import UserError

WEIGHTS, SAMPLER_WEIGHTS, EXTERNAL_WEIGHTS = "weights", "sampler_weights", "external_weights"
_KINDS = (WEIGHTS, SAMPLER_WEIGHTS, EXTERNAL_WEIGHTS)
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


def model_id(session_id: str, seq_id: int) -> str:
    """The id of a session's model."""
    return f"{session_id}:train:{seq_id}"


def sampler_id(session_id: str, seq_id: int) -> str:
    """The id of a session's sampler."""
    return f"{session_id}:sample:{seq_id}"


class TinkerPath(NamedTuple):
    """A checkpoint's name for clients."""

    run: str
    """Id of the model that made it."""
    kind: str
    """WEIGHTS, SAMPLER_WEIGHTS or EXTERNAL_WEIGHTS."""
    name: str

    @classmethod
    def parse(cls, text: str) -> TinkerPath:
        """Raises UserError for any other text."""
        parts = text.removeprefix("tinker://").split("/")
        if not text.startswith("tinker://") or len(parts) != 3 or parts[1] not in _KINDS:
            raise UserError(f"path {text!r}: accepted: tinker://RUN/KIND/NAME, KIND one of {', '.join(_KINDS)}")
        return cls(*parts)

    @property
    def checkpoint_id(self) -> str:
        return f"{self.kind}/{self.name}"

    def __str__(self) -> str:
        return f"tinker://{self.run}/{self.kind}/{self.name}"


def checked_name(name: str) -> str:
    """A checkpoint's name, which names a folder too. Raises UserError for one that cannot."""
    if not _NAME.fullmatch(name):
        raise UserError(f"checkpoint name {name!r}: accepted: 1 to 128 letters, digits, '.', '_' and '-'")
    return name
