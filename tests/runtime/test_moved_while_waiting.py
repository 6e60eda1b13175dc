"""A trajectory that waits for its environment may migrate; the reply finds it on its new device."""

from __future__ import annotations

import pickle
from dataclasses import replace

from rlmux.rl.types import TurnReply
from rlmux.runtime.workers.planned_workers import EnvWorker, RolloutWorker
from rlmux.runtime.workers.worker_calls import RolloutChunk


def test_a_reply_may_come_with_the_trajectory_that_it_is_for(real, one_thread):
    config = real.submission("moved", task="guess", max_new_tokens=24).config
    requests, is_single_turn = EnvWorker(config).begin_step(1)
    assert not is_single_turn
    requests = [replace(request, stop_tokens=tuple(range(8))) for request in requests[:8]]  # one comes soon
    chunk = RolloutChunk(
        weights=None, requests=requests, partials=(), replies=(), released=(), max_decode_steps=1000,
        max_seconds=60.0, is_load_needed=False,
    )  # fmt: skip
    source, target = RolloutWorker(config), RolloutWorker(config)
    source.run_chunk(chunk)
    partials = source.take_partials(True)
    waiting = [partial for partial in partials if partial.is_waiting_for_reply]
    replies = [TurnReply(id=partial.request.id, tokens=(3,)) for partial in waiting]
    result = target.run_chunk(replace(chunk, requests=(), partials=partials, replies=replies))
    assert result.report.num_waiting == 0
    assert any(partial.kv for partial in partials)
    assert b"torch" not in pickle.dumps(partials), "passing it on would import torch"
    assert waiting, "no trajectory waits: the test shows nothing"
