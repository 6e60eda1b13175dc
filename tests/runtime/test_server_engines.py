"""Pipelines that sample with a server of others train end to end, and sharing a device changes none of their bits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.server_environments import make_environment

from rlmux.rl.config import EngineConfig


@pytest.fixture
def served(real: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Builds a pipeline whose rollouts come from the small server."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    python = make_environment(tmp_path / "environment", "vllm")

    def build(name: str, seed: int) -> Any:
        submission = real.submission(name, seed=seed, num_steps=2, max_new_tokens=8)
        engine = EngineConfig(name="vllm", python=python)
        return replace(
            submission,
            config=replace(submission.config, rollout=replace(submission.config.rollout, engine=engine)),
        )

    return build


def test_two_pipelines_with_servers_share_a_device_and_train_as_alone(real: Any, served: Any, tmp_path: Path) -> None:
    one, other = served("one", 1), served("other", 2)
    together = real.run(tmp_path / "together", [one, other])
    assert together.status == {"one": "finished", "other": "finished"}
    alone = real.run(tmp_path / "alone", [one])
    assert alone.sha256["one"] == together.sha256["one"] is not None
    promises = {
        note.fields["pipeline"]: note.fields["promise"] for note in together.recorder.notes if note.type == "promise"
    }
    assert promises == {"one": "exact", "other": "exact"}
    left = [each for each in psutil.process_iter(["cmdline"]) if str(tmp_path) in " ".join(each.info["cmdline"] or ())]
    assert psutil.wait_procs(left, timeout=60)[1] == []
