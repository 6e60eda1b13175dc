"""Labels and notes of pipelines: a JSON file beside the run's log, which stays the truth of the run.

labels.json      {NAME: {"labels": [...], "note": "..."}}        replaced atomically
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlmux.core.errors import UserError
from rlmux.service.dashboard.auth import atomic_json

NAME = "labels.json"
NONE: dict[str, Any] = {"labels": [], "note": ""}


def labels_of(folder: Path) -> dict[str, dict[str, Any]]:
    """Labels and note by pipeline. A damaged file has none; the next change reports it."""
    try:
        return _read(folder)
    except UserError:
        return {}


def set_labels(folder: Path, pipeline: str, *, labels: Sequence[str], note: str) -> dict[str, Any]:
    """Replace a pipeline's labels and note; returns them.

    Raises UserError for a file that cannot be read or written.
    """
    its = {"labels": list(dict.fromkeys(labels)), "note": note}
    with atomic_json.changing(folder, NAME):
        others = {name: labelled for name, labelled in _read(folder).items() if name != pipeline}
        atomic_json.write_whole(folder, NAME, others if its == NONE else {**others, pipeline: its})
    return its


def _read(folder: Path) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = atomic_json.read(folder, NAME) or {}
    return found
