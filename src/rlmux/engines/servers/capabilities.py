"""What the server of a rollout engine can do, as `measuring.py` found it; docs/how-to/vllm.md has the checks."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """What a probe found. Each is described in `measuring.py`."""

    keeps_held: bool
    has_positional_noise: bool
    reloads: bool
    names_versions: bool
    has_checksums: bool
    frees_memory: bool
    freed_bytes: float
    """Device memory that sleeping gives back."""
    remarks: tuple[str, ...] = ()
    """One line for each capability that is not there: what happened when it was tried."""


CANNOT = Capabilities(
    keeps_held=False,
    has_positional_noise=False,
    reloads=False,
    names_versions=False,
    has_checksums=False,
    frees_memory=False,
    freed_bytes=0.0,
)
"""What is known of a server before it was probed."""
