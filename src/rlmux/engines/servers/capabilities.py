"""Capabilities of a rollout server, as measured by `measuring.py`; docs/how-to/vllm.md has the checks."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """Measured capabilities, each described in `measuring.py`."""

    keeps_held: bool
    has_positional_noise: bool
    reloads: bool
    names_versions: bool
    has_checksums: bool
    frees_memory: bool
    freed_bytes: float
    """Device memory that sleeping gives back."""
    remarks: tuple[str, ...] = ()
    """One line for each missing capability: the outcome of its check."""


CANNOT = Capabilities(
    keeps_held=False,
    has_positional_noise=False,
    reloads=False,
    names_versions=False,
    has_checksums=False,
    frees_memory=False,
    freed_bytes=0.0,
)
"""Capabilities before measurement."""
