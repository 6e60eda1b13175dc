"""Capabilities of a rollout server, as measured by `measuring.py`; docs/how-to/vllm.md has the checks."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """Measured capabilities, each described in `measuring.py`."""

    keeps_held: bool
    has_positional_noise: bool
    reloads: bool
    takes_tensors: bool
    names_versions: bool
    has_checksums: bool
    frees_memory: bool
    drops_weights: bool
    freed_bytes: float
    """Device memory that sleeping gives back."""
    load_s: float
    """Seconds in which it took the first weights; those of a restart where it takes none."""
    sleep_s: float
    """Seconds of going to sleep."""
    wake_s: float
    """Seconds of waking, with weights that were dropped."""
    remarks: tuple[str, ...] = ()
    """One line for each missing capability: the outcome of its check."""


CANNOT = Capabilities(
    keeps_held=False,
    has_positional_noise=False,
    reloads=False,
    takes_tensors=False,
    names_versions=False,
    has_checksums=False,
    frees_memory=False,
    drops_weights=False,
    freed_bytes=0.0,
    load_s=0.0,
    sleep_s=0.0,
    wake_s=0.0,
)
"""Capabilities before measurement."""
