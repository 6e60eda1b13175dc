"""The origin of weights and samples: they carry it, and every reader checks it.

run's log ── run_id ─────────────┐
TrainingConfig ── plan_sha256 ───┴─▶ Origin ─▶ state.json of checkpoints, metadata of weights, batches
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from typing import Any

from rlmux.rl.config import TrainingConfig

NOT_OF_THE_PLAN = {
    ("rollout", "num_workers"),
    ("rollout", "order"),
    ("train", "num_workers"),
    ("rollout", "engine", "python"),
    ("rollout", "engine", "url"),
    ("rollout", "engine", "memory_gb"),
    ("rollout", "engine", "start_limit_s"),
    ("algorithm", "max_logprob_gap"),
    ("algorithm", "max_mismatch_kl"),
    ("task", "reward_timeout_s"),
    ("task", "num_reward_processes"),
    ("task", "reward_memory_gb"),
    ("task", "reward_file_gb"),
}
"""Fields that decide how fast a pipeline is, or when it fails, and never what its weights are."""

_MODES = {("rollout", "interruptible")}
"""Mappings that change results by being there, be it with nothing in them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """The run and the pipeline that made a file or batch."""

    run_id: str
    """Random name of the run, from its log."""
    pipeline: str
    plan_sha256: str
    """Hash of everything that determines the pipeline's weights, at the time it joined the run."""

    def fields(self) -> dict[str, str]:
        """The fields, as stored in files."""
        return {"run_id": self.run_id, "pipeline": self.pipeline, "plan_sha256": self.plan_sha256}

    def complaint_about(self, written: Mapping[str, Any]) -> str | None:
        """Why something with these fields is not of this origin; None if it is."""
        if written.get("run_id") != self.run_id:
            return f"of another run: {written.get('run_id', 'unnamed')}, this is run {self.run_id}"
        if written.get("plan_sha256") != self.plan_sha256:
            return f"of another plan, of pipeline {written.get('pipeline', 'unnamed')}; this is {self.pipeline}"
        return None


def plan_sha256(config: TrainingConfig) -> str:
    """Hash of all that decides a pipeline's weights, as far as it differs from its default.

    A key that a later rlmux adds, with the default that keeps what was, leaves the hash of a plan as it is.
    """
    return hashlib.sha256(json.dumps(_stated(config, ()), sort_keys=True, default=str).encode()).hexdigest()


def _stated(value: Any, path: tuple[str, ...]) -> dict[str, Any]:
    """The fields of a dataclass that differ from their defaults, those inside included; fields without one stand."""
    stated = {}
    for field in fields(value):
        now, here = getattr(value, field.name), (*path, field.name)
        if here in NOT_OF_THE_PLAN:
            continue
        if is_dataclass(now):
            within = _stated(now, here)
            if within or here in _MODES:
                stated[field.name] = within
        elif now != (field.default_factory() if field.default_factory is not MISSING else field.default):
            stated[field.name] = now
    return stated
