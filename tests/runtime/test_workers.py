"""What workers make of what they are told, beside their engines."""

from __future__ import annotations

from typing import Any

import pytest

from rlmux.runtime import workers
from rlmux.runtime.workers import RolloutWorker, TrainWorker


@pytest.mark.parametrize("is_core", [True, False])
@pytest.mark.parametrize("make", [RolloutWorker, lambda config: TrainWorker(config, None)], ids=["rollout", "train"])
def test_the_hint_to_read_ahead_is_ignored_where_the_core_that_computes_would_read(
    real: Any, one_thread: None, tmp_path: Any, monkeypatch: pytest.MonkeyPatch, make: Any, is_core: bool
) -> None:
    monkeypatch.setattr(workers, "_device", lambda: "cpu")
    worker = make(real.submission("a").config)
    if not is_core:
        monkeypatch.setattr(worker, "_is_core", False)  # as on a GPU
    asked = []
    monkeypatch.setattr(worker._engine, "prefetch", lambda: asked.append("to read ahead"))
    worker.offload(tmp_path / "spilled")
    worker.prefetch()
    assert asked == ([] if is_core else ["to read ahead"])
