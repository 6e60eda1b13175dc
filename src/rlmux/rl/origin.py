"""Where weights and samples come from: they carry it, and whatever takes them over checks it.

run's log ── run_id ─────────────┐
TrainingConfig ── plan_sha256 ───┴─▶ Origin ─▶ state.json of checkpoints, metadata of weights, batches
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from rlmux.rl.config import TrainingConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """The run and the pipeline that something was made by."""

    run_id: str
    """Random name of the run, from its log."""
    pipeline: str
    plan_sha256: str
    """Hash of all that decides the pipeline's weights, as it was when the pipeline came to the run."""

    def fields(self) -> dict[str, str]:
        """All of it as it is written down."""
        return {"run_id": self.run_id, "pipeline": self.pipeline, "plan_sha256": self.plan_sha256}

    def complaint_about(self, written: Mapping[str, Any]) -> str | None:
        """Why something with these fields is not of this origin; None if it is."""
        if written.get("run_id") != self.run_id:
            return f"of another run: {written.get('run_id', 'unnamed')}, this is run {self.run_id}"
        if written.get("plan_sha256") != self.plan_sha256:
            return f"of another plan, of pipeline {written.get('pipeline', 'unnamed')}; this is {self.pipeline}"
        return None


def plan_sha256(config: TrainingConfig) -> str:
    """Hash of all that decides a pipeline's weights; numbers of workers are left out."""
    plan = asdict(config)
    for side in ("rollout", "train"):
        del plan[side]["num_workers"]
    return hashlib.sha256(json.dumps(plan, sort_keys=True, default=str).encode()).hexdigest()
