"""What workers do with their calls, beside what their engines do."""

from __future__ import annotations

from typing import Any

import pytest

from rlmux.engines.rollout import SlotRolloutEngine
from rlmux.engines.train import TorchTrainEngine
from rlmux.runtime import workers
from rlmux.runtime.workers import RolloutWorker, TrainWorker


@pytest.mark.parametrize("is_core", [True, False])
@pytest.mark.parametrize(
    ("engine", "make"),
    [(SlotRolloutEngine, RolloutWorker), (TorchTrainEngine, lambda config: TrainWorker(config, None))],
    ids=["rollout", "train"],
)
def test_the_hint_to_read_ahead_is_ignored_where_the_core_that_computes_would_read(
    real: Any, one_thread: None, tmp_path: Any, monkeypatch: pytest.MonkeyPatch, engine: Any, make: Any, is_core: bool
) -> None:
    asked = []
    monkeypatch.setattr(workers, "device_in_use", lambda: "cpu")
    monkeypatch.setattr(engine, "prefetch", lambda self: asked.append("to read ahead"))
    worker = make(real.submission("a").config)
    worker.is_core = is_core  # False: as on a GPU
    worker.offload(tmp_path / "spilled")
    worker.prefetch()
    assert asked == ([] if is_core else ["to read ahead"])
