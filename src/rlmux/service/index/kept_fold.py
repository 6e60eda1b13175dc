"""The fold of a log as of one row, as bytes: a restarted indexer resumes there instead of at the first row.

    LaneIndexer ── dumps ──▶ table `kept` of its index ── loads ──▶ LaneIndexer

The bytes count for the code that made them, and for a log whose row of that number has the same checksum. They are a
pickle of which only listed types are made: a run's folder may be a copy of another user's, and its bytes start nothing.

A module of its own: what may be made of bytes that others may have written is read in one place.
"""

from __future__ import annotations

import hashlib
import io
import pickle
import zlib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import rlmux
from rlmux.core.errors import LogError
from rlmux.report.alerts import Alerts
from rlmux.report.timeline.history import without_collector
from rlmux.report.timeline.live_timeline import Follower
from rlmux.report.weight_sums import StepSums

MAX_BYTES = 256 << 20
"""Largest fold that is kept, compressed."""
_MODULES = ("rlmux.core.model", "rlmux.core.actions", "rlmux.core.events", "rlmux.log.progress_rows")
_PACKAGES = ("rlmux.report.timeline.", "rlmux.report.slos", "rlmux.report.alerts", "rlmux.report.weight_sums")
_CONTAINERS = {
    *(("array", "array"), ("array", "_array_reconstructor"), ("collections", "deque")),
    *(("builtins", "set"), ("builtins", "frozenset")),
}
_FOLDERS = ("core", "log", "report", "service/index")
"""Folders with the code that makes a fold."""


@dataclass(slots=True, kw_only=True)
class KeptFold:
    """What an indexer holds in memory of the rows up to `seq`."""

    seq: int
    row_checksum: int
    """Checksum of the row `seq`."""
    num_chunks: int
    """Number of the last chunk of settled intervals in the index."""
    follower: Follower
    alerts: Alerts
    sums: StepSums
    plans: dict[str, str]
    configs: dict[str, Any]
    accounts: dict[str, Any] | None
    num_pins: int
    open_pins: list[int]

    def dumps(self) -> bytes | None:
        """The bytes; None for a fold that is too large."""
        fields = {name: getattr(self, name) for name in KeptFold.__slots__}
        data = zlib.compress(pickle.dumps((_code_sha256(), fields), protocol=5), 1)
        return data if len(data) <= MAX_BYTES else None

    @classmethod
    def loads(cls, data: bytes) -> KeptFold:
        """What `dumps` of the same code made. Raises LogError for anything else."""
        try:
            with without_collector():
                code, fields = _Reader(io.BytesIO(zlib.decompress(data))).load()
            if code != _code_sha256():
                raise LogError("the fold of another version")
            return cls(**fields)
        except (
            zlib.error,
            pickle.UnpicklingError,
            ValueError,
            TypeError,
            AttributeError,
            EOFError,
            IndexError,
        ) as error:
            raise LogError(f"not a kept fold: {error}") from None


class _Reader(pickle.Unpickler):
    """Makes values of a log's fold alone."""

    def find_class(self, module: str, name: str) -> Any:
        is_ours = module in _MODULES or module.startswith(_PACKAGES)
        if "." in name or not (is_ours or (module, name) in _CONTAINERS):
            raise pickle.UnpicklingError(f"{module}.{name} is no part of a fold")
        found = super().find_class(module, name)
        if is_ours and not (isinstance(found, type) and found.__module__.startswith("rlmux.")):
            raise pickle.UnpicklingError(f"{module}.{name} is no type of a fold")
        return found


@cache
def _code_sha256() -> str:
    """Hash of the code that makes a fold."""
    digest = hashlib.sha256()
    source = Path(rlmux.__file__).parent
    for folder in _FOLDERS:
        for path in sorted((source / folder).rglob("*.py")):
            digest.update(path.relative_to(source).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()
