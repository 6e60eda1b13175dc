"""Workers of on-demand pipelines: a chunk shows that it lives, however long one micro-batch of it takes."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from rlmux.rl.client_requests import OptimizerStep
from rlmux.runtime.workers import heartbeat
from rlmux.runtime.workers.request_workers import DatumWorker

UPDATE = OptimizerStep(learning_rate=0.1, betas=(0.9, 0.95), epsilon=1e-8, weight_decay=0.0, grad_clip=0.0)


def test_every_micro_batch_of_a_chunk_shows_life_also_behind_an_update(monkeypatch: pytest.MonkeyPatch) -> None:
    shows_life, seen = threading.Event(), []
    monkeypatch.setattr(heartbeat, "_hearts", [SimpleNamespace(is_on=shows_life)])

    def work() -> Iterator[int]:
        for _ in range(2):
            seen.append(shows_life.is_set())
            worker._carry_out("u", UPDATE)
            yield 1

    worker = DatumWorker.__new__(DatumWorker)
    worker._engine = SimpleNamespace(optimizer_step=lambda request: None)
    worker._waiting, worker._under_way = deque(), ("b", work(), lambda done: done)
    worker.run_chunk(60.0)
    assert seen == [True, True]
    assert not shows_life.is_set()
