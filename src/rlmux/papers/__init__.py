"""Both papers' tables again: published, ours, deviation, cause.

reproduce("rollmux")    OSDI'26 "Weave": placement, cycles, switches       papers/rollmux.py
reproduce("jigsawrl")   sub-stages, sharing, tail migration                papers/jigsawrl.py
reproduce("rivals")     the systems that both compare with                 papers/rivals_rows.py
rivals.play("areal")    one of them, by name                               papers/rivals/

Reading order: rollmux, rollmux_rows, jigsawrl, tail_migration, micro_cycles, offline_optimum, rivals_rows,
paper_rows.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

from rlmux.core.errors import UserError
from rlmux.sim.results.sweep import Progress

PAPERS = {
    "rollmux": "rlmux.papers.rollmux",
    "jigsawrl": "rlmux.papers.jigsawrl",
    "rivals": "rlmux.papers.rivals_rows",
}
"""Module of each paper, by the name that a user types."""


def reproduce(
    paper: str,
    *,
    num_seeds: int = 5,
    progress: Progress | None = None,
    out: Path | None = None,
) -> dict[str, Any]:
    """The paper's figures again: {"paper", "rows": [{"section", "figure", "published", "ours", ...}]}.

    Raises UserError for a paper that is not in PAPERS.
    """
    if paper not in PAPERS:
        raise UserError(f"paper {paper!r} is unknown; accepted: {', '.join(PAPERS)}")
    result: dict[str, Any] = import_module(PAPERS[paper]).reproduce(num_seeds=num_seeds, progress=progress, out=out)
    return result
