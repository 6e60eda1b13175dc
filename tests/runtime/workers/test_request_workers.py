"""Workers of on-demand pipelines: a chunk shows that it lives, however long one micro-batch of it takes."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest

from rlmux.engines.train.stage_work import TrainWork
from rlmux.engines.train.update.train_tensors import Requests, Score
from rlmux.rl.client_requests import OptimizerStep
from rlmux.runtime.workers import heartbeat
from rlmux.runtime.workers.request_workers import DatumWorker, RequestChunk

UPDATE = OptimizerStep(learning_rate=0.1, betas=(0.9, 0.95), epsilon=1e-8, weight_decay=0.0, grad_clip=0.0)


def test_every_micro_batch_of_a_chunk_shows_life_also_behind_an_update(monkeypatch: pytest.MonkeyPatch) -> None:
    shows_life, seen = threading.Event(), []
    monkeypatch.setattr(heartbeat, "_hearts", [SimpleNamespace(is_on=shows_life)])

    def work() -> Requests[None]:
        for _ in range(2):
            yield Score(batch=None, temperature=1.0, with_gradient=False)  # type: ignore[arg-type]
            seen.append(shows_life.is_set())
            worker._carry_out("u", UPDATE)
            yield 1

    state = SimpleNamespace(answer=lambda request: None)
    worker = DatumWorker.over(SimpleNamespace(optimizer_step=lambda request: None, state=state), None)  # type: ignore[arg-type]
    worker._under_way = "b", TrainWork(requests=work()), lambda done: done
    worker.run_chunk(RequestChunk(max_seconds=60.0))
    assert seen == [True, True]
    assert not shows_life.is_set()
